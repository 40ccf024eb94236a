"""Proposes sizes for axes that nothing decides: typical ones, the first of which the network takes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ansor_mlflow.networks.inputs.axes import NamedShape, NamedShapes, free_axes, size_of, words_of

_TIME_LIMIT_S = 8.0
"""Seconds after which nothing else is tried."""
_MAX_TRIALS = 200

_IMAGES = (
    (224, 224),
    *((48, 320), (32, 320)),  # lines of text
    *(
        (side, side)
        for side in (
            256,
            299,
            320,
            384,
            512,
            640,
            28,
            32,
            64,
            96,
            112,
            128,
            160,
            192,
            227,
            240,
            288,
            300,
            416,
            448,
            480,
        )
    ),
)
_TYPICAL: dict[str, tuple[tuple[int, ...], ...]] = {
    "image": _IMAGES,
    "channels": ((3,), (1,), (4,)),
    "clip": ((16,), (8,), (32,)),
    "audio": ((16_000,), (512,), (8_000,), (32_000,), (48_000,), (160_000,), (1536,), (4_000,)),
    "mel": ((3_000,), (100,), (1_500,), (200,), (300,), (1_000,)),
    "frames": ((100,), (200,), (300,), (128,), (64,), (32,), (1_000,), (3_000,)),
    "sequence": ((128,), (64,), (32,), (16,), (77,), (256,), (512,), (8,)),
    "any": ((1, 3, 224, 224), (1, 128), (1, 16_000), (1, 80, 3_000), (1, 128, 64), (16,)),
}
"""Sizes by the kind of what axes hold: of images height and width, and "any" whole shapes where there is no rank."""
_WITH_IMPLIED = ("audio", "mel", "frames", "sequence")


class ShapeTrial(Protocol):
    """Tells whether a network takes shapes."""

    @property
    def integers(self) -> frozenset[str]:
        """The inputs that are no floats, such as numbers of words."""

    @property
    def implied(self) -> Sequence[int]:
        """Sizes that stand in the network, such as the length of a table of positions; the likeliest first."""

    def infers(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether the shapes of the inputs fit together, as far as inference knows."""

    def runs(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether the network computes something with them."""


@dataclass(frozen=True)
class Proposal:
    """Shapes that a user could give."""

    shapes: dict[str, tuple[int, ...]]
    is_taken: bool
    """Whether the network was seen to take them; if not, it was with none of those that were tried."""


def propose(shapes: NamedShapes, known: Mapping[str, int], trial: ShapeTrial) -> Proposal:
    """Finds sizes for every axis that has none, given those of other axes.

    What runs is taken before what only fits together, because inference overlooks much.
    """
    candidates = _Candidates.of(shapes, known, trial)
    give_up = time.monotonic() + _TIME_LIMIT_S
    tried: list[dict[str, tuple[int, ...]]] = []
    fitting: list[dict[str, tuple[int, ...]]] = []
    for candidate in candidates:
        tried.append(candidate)
        if trial.infers(candidate):
            fitting.append(candidate)
            if trial.runs(candidate):
                return Proposal(candidate, is_taken=True)
        if time.monotonic() > give_up:
            break
    for candidate in () if fitting else tried:  # inference may refuse what runs
        if time.monotonic() < give_up and trial.runs(candidate):
            return Proposal(candidate, is_taken=True)
    return Proposal((fitting or tried)[0], is_taken=False)


@dataclass(frozen=True)
class _Candidates:
    """Shapes to try, the likeliest first."""

    shapes: NamedShapes
    known: Mapping[str, int]
    columns: Mapping[str, tuple[str, int]]
    """For every free axis the kind of what it holds, and which of that kind's sizes is its own."""
    implied: Sequence[int]

    @staticmethod
    def of(shapes: NamedShapes, known: Mapping[str, int], trial: ShapeTrial) -> _Candidates:
        columns: dict[str, tuple[str, int]] = {}
        for name, axis, dim in free_axes(shapes, known):
            columns.setdefault(dim, _column(name, shapes[name] or (), axis, is_integer=name in trial.integers))
        return _Candidates(shapes, known, columns, trial.implied)

    def __iter__(self) -> Iterator[dict[str, tuple[int, ...]]]:
        kinds = list(dict.fromkeys(kind for kind, _ in self.columns.values()))
        if None in self.shapes.values():
            kinds.append("any")
        choices = [self._sizes(kind) for kind in kinds]
        indices = itertools.product(*(range(len(sizes)) for sizes in choices))
        for chosen in itertools.islice(sorted(itertools.islice(indices, 100 * _MAX_TRIALS), key=sum), _MAX_TRIALS):
            yield self._shapes(
                {kind: choices[n][index] for n, (kind, index) in enumerate(zip(kinds, chosen, strict=True))}
            )

    def _sizes(self, kind: str) -> Sequence[tuple[int, ...]]:
        typical = _TYPICAL[kind]
        implied = ((size,) for size in self.implied) if kind in _WITH_IMPLIED else ()
        return (*typical, *(sizes for sizes in implied if sizes not in typical))

    def _shapes(self, sizes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        by_name = {**self.known, **{dim: sizes[kind][column] for dim, (kind, column) in self.columns.items()}}
        return {
            name: sizes["any"] if shape is None else tuple(int(size_of(dim, by_name)) for dim in shape)
            for name, shape in self.shapes.items()
        }


def _column(name: str, shape: NamedShape, axis: int, *, is_integer: bool) -> tuple[str, int]:  # noqa: PLR0911
    """What an axis holds, by its name and its place; see `_Candidates.columns`."""
    dim, rank, last = str(shape[axis]), len(shape), len(shape) - 1
    words, context = words_of(dim), {*words_of(name), *words_of(dim)}
    if _any(words, "height") or words == ["h"]:
        return "image", 0
    if _any(words, "width") or words == ["w"]:
        return "image", 1
    if axis == last and not is_integer and (rank == 2 or _any(context, "audio", "wav", "speech", "sample", "pcm")):
        return "audio", 0
    if is_integer or _any(words, "seq", "token", "past", "len"):
        return "sequence", 0
    if _any(words, "frame", "time"):
        return "frames", 0
    if rank == 4 and (image_axis := _image_axes(shape).get(axis)):
        return image_axis
    if rank == 5:
        return {1: ("channels", 0), last - 1: ("image", 0), last: ("image", 1)}.get(axis, ("clip", 0))
    if rank == 3 and axis == last and shape[1] in (80, 128):
        return "mel", 0
    if _any(context, "mel", "feat", "fbank", "spec"):
        return "frames", 0
    return "sequence", 0


def _image_axes(shape: NamedShape) -> dict[int, tuple[str, int]]:
    """Which axes of a shape of rank 4 are those of images, channels first or last."""
    if shape[3] in (1, 3, 4) and shape[1] not in (1, 3):
        return {1: ("image", 0), 2: ("image", 1)}
    return {1: ("channels", 0), 2: ("image", 0), 3: ("image", 1)}


def _any(words: Sequence[str] | set[str], *beginnings: str) -> bool:
    return any(word.startswith(beginnings) for word in words)
