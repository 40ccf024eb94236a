"""What dynamic axes of inputs are called, which of them are the batch, which follow from others, and usual sizes."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Set

NamedShape = tuple[int | str, ...]
"""A shape in which every dynamic axis has a name; axes of the same name have the same size."""
NamedShapes = Mapping[str, NamedShape | None]
"""Shapes of inputs by their names; None where not even the rank is known."""

NO_NAME = "?"
_BATCH_LETTERS = ("b", "bs", "bsz", "n")
_OTHER_LETTERS = ("c", "d", "h", "l", "s", "t", "w")
_OTHER_WORDS = re.compile(
    r"n?(audio|box|char|feature|frame|height|len|mel|past|patch|point|pos|sample|seq|step|time|token|width|word)"
)
_ANY_SIZE = 7
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}

_SIDE, _LENGTH, _FRAMES, _SAMPLES, _MEL_FRAMES = 224, 128, 100, 16_000, 3_000
_SOUND = ("audio", "wav", "speech", "sample", "pcm")
_SPECTRUM = ("mel", "feat", "fbank", "spec")
"""Words in the name of an input, or of its axis, that holds sound."""
_MEL_BANDS = (80, 128)
_CHANNELS = (1, 3, 4)
USUAL_SHAPE = (1, 3, _SIDE, _SIDE)
"""What is suggested where not even the rank is known."""
_IMAGE_LAST = (1, _SIDE, _SIDE, 3)
_CLIP = (1, 3, 16, _SIDE, _SIDE)


def words_of(name: str) -> list[str]:
    """The words of a name such as "pastLength_0", in lower case: past, length."""
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)]


def with_names(declared: Mapping[str, tuple[int | str, ...] | None]) -> dict[str, NamedShape | None]:
    """Gives every axis that has none a name, which no other axis has."""
    return {
        name: shape and tuple(f"{NO_NAME} {axis} {name}" if dim == NO_NAME else dim for axis, dim in enumerate(shape))
        for name, shape in declared.items()
    }


def free_axes(shapes: NamedShapes, known: Mapping[str, int] = {}) -> Iterator[tuple[str, int, str]]:
    """Every dynamic axis that does not follow from others or from known sizes, as its input, its index and its name."""
    names = {dim for shape in shapes.values() for dim in shape or () if isinstance(dim, str) and dim.isidentifier()}
    sizes = {**dict.fromkeys(names, _ANY_SIZE), **known}
    for name, shape in shapes.items():
        for axis, dim in enumerate(shape or ()):
            if isinstance(dim, str) and dim not in known and (dim in names or isinstance(size_of(dim, sizes), str)):
                yield name, axis, dim


def size_of(dim: int | str, sizes: Mapping[str, int]) -> int | str:
    """The size of an axis that is one of `sizes`, or computed from them, as "past + 1" is; else its name."""
    if isinstance(dim, int) or dim in sizes:
        return sizes.get(dim, dim) if isinstance(dim, str) else dim
    try:
        return _computed(ast.parse(dim.strip(), mode="eval").body, sizes)
    except (ArithmeticError, LookupError, MemoryError, RecursionError, SyntaxError, ValueError):
        return dim


def _computed(node: ast.expr, sizes: Mapping[str, int]) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name):
            return sizes[name]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return int(_OPERATORS[type(op)](_computed(left, sizes), _computed(right, sizes)))
    raise ValueError


def usual_sizes(shapes: NamedShapes, known: Mapping[str, int], integers: Collection[str]) -> dict[str, int]:
    """Known sizes, and for every other axis that follows from none a usual one, by its name, place and dtype."""
    sizes = dict(known)
    for name, axis, dim in free_axes(shapes, known):
        sizes.setdefault(dim, _usual_size(name, shapes[name] or (), axis, is_integer=name in integers))
    return sizes


def _usual_size(name: str, shape: NamedShape, axis: int, *, is_integer: bool) -> int:  # noqa: PLR0911
    dim, rank, is_last = str(shape[axis]), len(shape), axis == len(shape) - 1
    words = words_of(dim)
    context = [*words, *words_of(name)]
    if words in (["h"], ["w"]) or _any(words, ("height", "width")):
        return _SIDE
    if is_last and not is_integer and (rank == 2 or _any(context, _SOUND)):
        return _SAMPLES
    if is_integer or _any(words, ("seq", "token", "past", "len")):
        return _LENGTH
    if _any(words, ("frame", "time")):
        return _FRAMES
    if rank == 4:
        has_channels_last = shape[3] in _CHANNELS and shape[1] not in _CHANNELS
        return (_IMAGE_LAST if has_channels_last else USUAL_SHAPE)[axis]
    if rank == 5:
        return _CLIP[axis]
    if rank == 3 and is_last and shape[1] in _MEL_BANDS:
        return _MEL_FRAMES
    return _FRAMES if _any(context, _SPECTRUM) else _LENGTH


def _any(words: Iterable[str], beginnings: tuple[str, ...]) -> bool:
    return any(word.startswith(beginnings) for word in words)


def batch_axes(shapes: NamedShapes) -> dict[str, list[tuple[str, int]]]:
    """The names of axes that are the batch, with the inputs and indices where they are.

    An axis is the batch if it is called so: batch or batch_size anywhere, a letter such as N only where a batch stands,
    first or after the steps of a sequence. So is the first axis of an input, unless its own name says that it is
    something else (sequence_length, time, …). An input has one batch, so that what stands behind it or twice is none
    in other inputs either. Where there is a batch, the second axis of three is one, too, between two that are fixed:
    that is a recurrent state.
    """
    free = list(free_axes(shapes))
    unclear = [(shapes[name] or (), axis, dim) for name, axis, dim in free if not _is_called_otherwise(dim)]
    called = {dim for _, _, dim in free if _is_called_batch(dim)}
    placed = {dim for shape, axis, dim in unclear if _is_place_of_batch(shape, axis) and not called & set(shape)}
    others = {dim for shape in shapes.values() for dim in _beside_batch(shape or (), called | placed)}
    found = called | placed - others
    if found:
        states = {dim for shape, _, dim in unclear if [type(size) for size in shape] == [int, str, int]}
        found |= states - others
    places: dict[str, list[tuple[str, int]]] = {}
    for name, axis, dim in free:
        if dim in found:
            places.setdefault(dim, []).append((name, axis))
    return places


def _is_place_of_batch(shape: NamedShape, axis: int) -> bool:
    first, dim = str(shape[0]), str(shape[axis])
    return axis == 0 or (axis == 1 and dim.lower() in _BATCH_LETTERS and _is_called_otherwise(first))


def _beside_batch(shape: NamedShape, found: Set[str]) -> Iterator[str]:
    """The dynamic axes of an input that are not its batch, the first of those that are `found`."""
    dims = [dim for dim in shape if isinstance(dim, str)]
    batch = next((dim for dim in dims if dim in found), None)
    return (dim for dim in dims if batch is not None and (dim != batch or dims.count(dim) > 1))


def _is_called_batch(dim: str) -> bool:
    return not dim.startswith(NO_NAME) and any(word.startswith("batch") for word in words_of(dim))


def _is_called_otherwise(dim: str) -> bool:
    if dim.startswith(NO_NAME):
        return False
    return dim.lower() in _OTHER_LETTERS or any(map(_OTHER_WORDS.match, words_of(dim)))
