"""Which sizes a network of several has: those of lists, or those that serve a range of requests at the least loss.

A request is padded to the next larger size, and loses the time that this takes longer. So sizes belong where the cost
of a call jumps, and far apart where it hardly grows, as for a text so short that reading the weights decides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ansor_mlflow.errors import UserInputError
from ansor_mlflow.networks.shapes import NamedShapes, Shape

GivenShape = Sequence[int | list[int] | tuple[int, ...] | str]
"""A shape in which a dimension may be a list of sizes, one for each size of the network, or a range: "16..512"."""
Cost = Callable[[Mapping[str, Shape]], float]
"""Estimates what a call with inputs of some shapes costs; it raises a `UserInputError` where the network takes none."""

MAX_SIZES = 6
"""Sizes that are chosen in a range: each is tuned, compiled and kept in the library."""
_MIN_GAIN = 0.03
"""Share of its time that a further size must save the mean request, to be worth its tuning."""
_MAX_RATIO = 1024
"""End of a range over its beginning: of six sizes of a wider one, each would be over three times the one before."""
_NUM_REQUESTS = 4096
_ROWS = 8
"""Lengths beyond 16 are multiples of this: those of the vectors of AVX2, and of most tiles' rows."""
_RANGE = re.compile(r"\s*(\d{1,12})\s*\.\.\s*(\d{1,12})\s*")


@dataclass(frozen=True, kw_only=True)
class SizeUse:
    """A size, and the requests that are padded to it."""

    size: int
    shortest: int
    """Length of the shortest request that it serves; the longest has its own length."""
    cost: float
    """Time of a call, in any unit."""
    mean_loss: float
    """What a request takes longer than without padding, over the latter; the mean, with lengths even on a log scale."""
    worst_loss: float
    """What the request loses that loses most: the shortest, unless costs are measured ones that do not always grow."""

    def cells(self) -> dict[str, str]:
        """The texts of a row, by the headers of a `Table`."""
        return {
            ">size": str(self.size),
            "requests": f"{self.shortest}..{self.size}" if self.shortest < self.size else str(self.size),
            ">mean loss": f"{self.mean_loss:.0%}",
            ">worst loss": f"{self.worst_loss:.0%}",
        }


@dataclass(frozen=True, kw_only=True)
class ChosenSizes:
    """The sizes that were chosen in a range."""

    axis: str
    """What the axes are called, and of which inputs they are."""
    uses: tuple[SizeUse, ...]
    """The sizes from small to large; costs are those of `graphs.estimated_cost`, or lengths where it is constant."""
    mean_loss: float
    """What requests of the whole range lose on average: see `SizeUse.mean_loss`."""
    input_shapes: dict[str, list[int | list[int]]]
    """What was given, with lists of the sizes in the place of ranges."""

    def __str__(self) -> str:
        sizes, first, last = ", ".join(str(use.size) for use in self.uses), self.uses[0].shortest, self.uses[-1].size
        worst = max(use.worst_loss for use in self.uses)
        return (
            f"the sizes {sizes} serve {first}..{last} ({self.axis}): with the parameter pad of compile, requests are "
            f"padded to the next of them, and take an estimated {self.mean_loss:.0%} longer than without on average, "
            f"{worst:.0%} at most; without pad, only these sizes are taken"
        )


def has_range(given: Mapping[str, GivenShape]) -> bool:
    """Whether a dimension is a range, right or wrong."""
    return any(isinstance(dim, str) and ".." in dim for shape in given.values() for dim in shape)


def has_several_sizes(given: Mapping[str, GivenShape]) -> bool:
    """Whether a dimension is a list or a range."""
    return has_range(given) or any(isinstance(dim, list | tuple) for shape in given.values() for dim in shape)


def only_size(network: str, given: Mapping[str, GivenShape], reason: str) -> dict[str, Shape]:
    """The shapes of a network that cannot have several sizes, for a reason that the error says."""
    sizes = [] if has_range(given) else split_sizes(network, given)
    if len(sizes) != 1:
        raise UserInputError(f"input_shapes gives {network} several sizes, but {reason}")
    return sizes[0]


def split_sizes(network: str, given: Mapping[str, GivenShape]) -> list[dict[str, Shape]]:
    """The shapes of each size, one at least: the first ones of all lists, then the second ones, and so on."""
    dims = [dim for shape in given.values() for dim in shape]
    lengths = sorted({len(dim) for dim in dims if isinstance(dim, list | tuple)} or {1})
    if len(lengths) > 1 or not lengths[0]:
        raise UserInputError(
            f"input_shapes gives dimensions of {network} {' and '.join(map(str, lengths))} sizes; give all lists the "
            "same length: their first sizes belong together, then their second ones"
        )
    sizes: list[dict[str, Shape]] = [
        {
            name: tuple(dim[number] if isinstance(dim, list | tuple) else dim for dim in shape)  # type: ignore[misc]
            for name, shape in given.items()
        }
        for number in range(lengths[0])
    ]
    if twice := next((shapes for i, shapes in enumerate(sizes) if shapes in sizes[:i]), None):
        shapes = ", ".join(f"{name} {list(shape)}" for name, shape in twice.items())
        raise UserInputError(f"input_shapes gives {network} the size {shapes} twice; give each once")
    return sizes


def choose_sizes(network: str, declared: NamedShapes, given: Mapping[str, GivenShape], cost: Cost) -> ChosenSizes:
    """Chooses sizes in the range of `given`: a pure function of the network, so that every device gets the same ones.

    Axes that have a range get the same size, and so must have the same range and the same name in the file, or none.
    Candidates are the ends of the range, four lengths for each doubling between them, and of these what the network
    can take. At most `MAX_SIZES` of them are taken, those with which a request loses least on average.

    Raises:
        UserInputError: A range is none, or too wide; axes have several, or are static; the network does not take its
            end, or nothing else of it.
    """
    axis, first, last = _find_range(network, declared, given)

    def shapes_of(length: int) -> dict[str, Shape]:
        ((shapes),) = split_sizes(network, _with_sizes(given, [length]))
        return shapes

    try:
        costs = {last: cost(shapes_of(last))}
    except UserInputError as err:
        raise UserInputError(f"with {last}, where the range ends, {err}") from err
    for length in _candidates(first, last):
        try:
            costs[length] = cost(shapes_of(length))
        except UserInputError:  # U-Nets take multiples of a stride alone
            continue
    lengths = sorted(costs)
    if len(lengths) == 1:
        raise UserInputError(
            f'input_shapes gives {network} the range "{first}..{last}", of which it takes {last} alone; give that '
            "size, or a list of those that it takes"
        )
    is_unknown = len(set(costs.values())) == 1  # as where all is in the branches of an If, of which nothing is counted
    estimates = [float(length) if is_unknown else costs[length] for length in lengths]
    sizes = _least_loss(first, lengths, estimates)
    uses = size_uses(sizes, lengths, estimates, first)
    requests = _requests(first, last)
    shares = [float(np.mean((requests >= use.shortest) & (requests <= use.size))) for use in uses]
    return ChosenSizes(
        axis=axis,
        uses=uses,
        mean_loss=sum(share * use.mean_loss for share, use in zip(shares, uses, strict=True)),
        input_shapes=_with_sizes(given, sizes),
    )


def size_uses(
    sizes: Sequence[int], lengths: Sequence[int], costs: Sequence[float], shortest: int
) -> tuple[SizeUse, ...]:
    """What requests lose, from the shortest one on, that are padded to the next of some sizes.

    Args:
        sizes: Lengths from small to large.
        lengths: Lengths of which the cost is known, from small to large, the sizes among them; between two it is taken
            to be linear.
        costs: The cost of each of `lengths`.
        shortest: Length of the shortest request.
    """
    uses = []
    for start, size in zip([shortest, *(size + 1 for size in sizes[:-1])], sizes, strict=True):
        cost, *others = np.interp([size, start, *_requests(start, size)], lengths, costs)
        losses = cost / np.array(others) - 1
        worst, mean = float(losses.max()), float(losses[1:].mean())
        uses.append(SizeUse(size=size, shortest=start, cost=float(cost), mean_loss=mean, worst_loss=worst))
    return tuple(uses)


def _find_range(network: str, declared: NamedShapes, given: Mapping[str, GivenShape]) -> tuple[str, int, int]:
    """What the axes with a range are called, and its ends."""
    found: dict[tuple[str, tuple[int, int]], list[str]] = {}
    for name, shape in given.items():
        for axis, text in enumerate(shape):
            if isinstance(text, list | tuple):
                raise UserInputError(
                    f"input_shapes gives {network} ranges and lists of sizes; give lists alone, whose first sizes "
                    "belong together, then their second ones"
                )
            if not isinstance(text, str):
                continue
            ends = _read_range(f"input_shapes gives dimension {axis} of {name!r} of {network}", text)
            known = declared.get(name) or ()
            dim = known[axis] if axis < len(known) else ""  # an input without a shape; other ranks are an error later
            if isinstance(dim, int):
                raise UserInputError(
                    f"input_shapes gives dimension {axis} of {name!r} of {network} the range {text!r}, but the file "
                    f"says that it is {dim}; give ranges to dynamic axes alone, or export it with that axis dynamic"
                )
            found.setdefault((dim.strip("?"), ends), []).append(name)
    if len(found) > 1:
        axes = ", ".join(
            f"{dim or 'an axis without a name'} of {', '.join(names)} {first}..{last}"
            for (dim, (first, last)), names in found.items()
        )
        raise UserInputError(
            f"input_shapes gives {network} the ranges {axes}; axes that the file calls by different names differ, and "
            "one range is taken, the same for all axes of one name; give lists of sizes for several"
        )
    (((dim, (first, last)), names),) = found.items()
    return f"{dim or 'the open axis'} of {', '.join(names)}", first, last


def _read_range(what: str, text: str) -> tuple[int, int]:
    ends = _RANGE.fullmatch(text)
    if ends is None:
        raise UserInputError(
            f'{what} {text!r}, which is no range; write its first and its last size, such as "16..512"'
        )
    first, last = map(int, ends.groups())
    if first < 1:
        reason = "begins below 1; begin with the shortest request"
    elif first > last:
        reason = f'ends before it begins; write "{last}..{first}"'
    elif first == last:
        reason = f"has one size; write {first}"
    elif last > _MAX_RATIO * first:
        reason = (
            f"ends at {last / first:.0f} times its beginning, which {MAX_SIZES} sizes do not serve well; give one that "
            f"ends at {_MAX_RATIO} times at most, or lists of sizes"
        )
    else:
        return first, last
    raise UserInputError(f"{what} the range {text!r}, which {reason}")


def _with_sizes(given: Mapping[str, GivenShape], sizes: Sequence[int]) -> dict[str, list[int | list[int]]]:
    return {
        name: [list(sizes) if isinstance(dim, str) else dim for dim in shape]  # type: ignore[misc]
        for name, shape in given.items()
    }


def _candidates(first: int, last: int) -> list[int]:
    """The beginning of a range, and round lengths up to its end: 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, …"""
    found, length = [first], 1
    while length < last:
        if length > first:
            found.append(length)
        step = max(1, 2 ** (length.bit_length() - 3))
        length += step if length < 2 * _ROWS else max(step, _ROWS)
    return found


def _requests(first: int, last: int) -> npt.NDArray[np.float64]:
    """Lengths of requests, even on a log scale: nobody says how long they are, and 20 is to 10 as 200 is to 100."""
    return np.round(np.geomspace(first - 0.49, last + 0.49, _NUM_REQUESTS))


def _least_loss(first: int, lengths: Sequence[int], costs: Sequence[float]) -> list[int]:
    """The best sizes among some lengths, the last of which is one: a shortest path over them (Bellman, 1957)."""
    requests = _requests(first, lengths[-1])
    ends = [0, *np.searchsorted(requests, lengths, side="right")]
    inverse = np.concatenate([[0.0], np.cumsum(1 / np.interp(requests, lengths, costs))])

    def loss(before: int, size: int) -> float:
        """What all requests beyond one length and up to another lose that are padded to the latter."""
        begin, end = ends[before + 1], ends[size + 1]
        return float(costs[size] * (inverse[end] - inverse[begin]) - (end - begin)) / _NUM_REQUESTS

    paths = {size: (loss(-1, size), [size]) for size in range(len(lengths))}  # the best of each end, by its number
    complete = []
    for num_sizes in range(2, min(MAX_SIZES, len(lengths)) + 1):  # of one size alone no axis would be open
        paths = {
            size: min(
                (paths[before][0] + loss(before, size), [*paths[before][1], size]) for before in paths if before < size
            )
            for size in range(num_sizes - 1, len(lengths))
        }
        complete.append(paths[len(lengths) - 1])
    _, best = min(complete, key=lambda path: path[0] + _MIN_GAIN * len(path[1]))
    return [lengths[number] for number in best]
