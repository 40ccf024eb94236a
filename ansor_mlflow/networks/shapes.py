"""Which shape every input of a network gets: its own, or the one that the user gives."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral

from ansor_mlflow.errors import UserInputError
from ansor_mlflow.networks.inputs.axes import NO_NAME, NamedShape, NamedShapes, batch_axes, size_of, with_names
from ansor_mlflow.networks.inputs.proposals import ShapeTrial, propose

Shape = tuple[int, ...]
DeclaredShape = tuple[int | str, ...]
"""A shape as a file declares it: a dynamic dimension is its name, or "?" where it has none."""

_log = logging.getLogger("ansor_mlflow")


def resolve_shapes(
    network: str,
    declared: Mapping[str, DeclaredShape | None],
    given: Mapping[str, Sequence[int]],
    *,
    batch_size: int = 1,
    says_batch: bool = True,
    trial: Callable[[], ShapeTrial] | None = None,
) -> dict[str, Shape]:
    """The static shape of every input.

    Dimensions of one name get one size. A batch (see `axes.batch_axes`) has the size of another that is given, or else
    `batch_size`, which is logged where nobody has said so.

    Args:
        network: What messages call the network.
        declared: Shape of every input; None where not even the rank is known.
        given: Shapes that replace declared ones (the parameter `input_shapes`).
        batch_size: Size of a dynamic batch. One that is declared must be this size, unless it is 1.
        says_batch: Whether to log a batch that nobody gave a size.
        trial: Makes what sizes are tried with, in order to propose some; without it none are proposed.

    Raises:
        UserInputError: A given shape does not fit its input, or an input is still dynamic.
    """
    for name, shape in given.items():
        _check_given(network, declared, name, list(shape))
    named = with_names(declared)
    batch = batch_axes(named)
    sizes = _given_sizes(named, given)
    shapes: dict[str, NamedShape | None] = {**named, **{name: tuple(map(int, shape)) for name, shape in given.items()}}
    if batch_size != 1:
        _require_batch_size(network, batch_size, shapes, batch)
    assumed = {dim: places for dim, places in batch.items() if dim not in sizes}
    given_batches = {sizes[dim] for dim in batch if dim in sizes}
    sizes |= dict.fromkeys(assumed, min(given_batches) if len(given_batches) == 1 else batch_size)
    shapes = {name: shape and tuple(size_of(dim, sizes) for dim in shape) for name, shape in shapes.items()}
    if any(shape is None or not all(map(_is_static, shape)) for shape in shapes.values()):
        raise UserInputError(_dynamic_message(network, declared, shapes, sizes, trial))
    resolved = {name: tuple(int(dim) for dim in shape or ()) for name, shape in shapes.items()}
    for name, dims in resolved.items():
        if any(size < 1 for size in dims):
            raise UserInputError(
                f"input {name!r} of {network} would be {list(dims)}, but every dimension must be at least 1; "
                "change batch_size or input_shapes"
            )
    if says_batch and assumed and batch_size == 1 and len(given_batches) != 1:
        _say_batch(network, assumed)
    return resolved


def _check_given(network: str, declared: Mapping[str, DeclaredShape | None], name: str, shape: list[int]) -> None:
    if name not in declared:
        raise UserInputError(
            f"input_shapes names {name!r}, which is not an input of {network}; its inputs are {', '.join(declared)}"
        )
    expected = declared[name]
    if expected is not None and len(shape) != len(expected):
        raise UserInputError(
            f"input_shapes gives {name!r} of {network} {len(shape)} dimensions {shape}, but it has {len(expected)}, "
            f"({', '.join(map(str, expected))}); give {len(expected)}"
        )
    if not all(map(_is_static, shape)):
        raise UserInputError(f"input_shapes gives {name!r} of {network} {shape}; dimensions must be whole numbers")


def _given_sizes(shapes: NamedShapes, given: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """The sizes that given shapes say for named dimensions; the first counts."""
    sizes: dict[str, int] = {}
    for name, shape in given.items():
        for dim, size in zip(shapes[name] or (), shape, strict=False):  # there may be no rank
            if isinstance(dim, str):
                sizes.setdefault(dim, int(size))
    return sizes


def _require_batch_size(
    network: str, batch_size: int, shapes: NamedShapes, batch: Mapping[str, Sequence[tuple[str, int]]]
) -> None:
    """Checks that a batch size contradicts neither the file nor what is given."""
    places = [place for places in batch.values() for place in places]
    if not places:
        places = [(name, 0) for name, shape in shapes.items() if shape]
    fixed = [(name, axis, shape[axis]) for name, axis in places if (shape := shapes[name])]
    others = [(name, axis, size) for name, axis, size in fixed if isinstance(size, int) and size != batch_size]
    if others and (batch or len(others) == len(fixed)):
        name, axis, size = others[0]
        raise UserInputError(
            f"batch_size={batch_size} with network={network}: dimension {axis} of its input {name!r} is {size}; "
            "leave batch_size out, or give input_shapes with that batch"
        )


def _say_batch(network: str, batch: Mapping[str, Sequence[tuple[str, int]]]) -> None:
    places = ", ".join(f"dimension {axis} of {name!r}" for places in batch.values() for name, axis in places)
    _log.warning("network=%s: its batch is dynamic (%s) and taken as 1; give batch_size for another", network, places)


def _is_static(dim: object) -> bool:
    return isinstance(dim, Integral)


def _dynamic_message(
    network: str,
    declared: Mapping[str, DeclaredShape | None],
    shapes: NamedShapes,
    sizes: Mapping[str, int],
    trial: Callable[[], ShapeTrial] | None,
) -> str:
    """Names what is dynamic, and writes the parameter out so that the user can copy it."""
    dynamic = []
    for name, shape in shapes.items():
        if shape is None:
            dynamic.append(f"{name!r} has no shape")
        elif not all(map(_is_static, shape)):
            dims = [
                f"{NO_NAME if str(dim).startswith(NO_NAME) else dim} (dimension {axis})"
                for axis, dim in enumerate(shape)
                if not _is_static(dim)
            ]
            dynamic.append(f"{name!r} has dynamic {', '.join(dims)}")
    problem = f"input {'; input '.join(dynamic)} in {network}, but tasks are tuned for fixed shapes"
    if trial is None:
        return f"{problem}; give them in input_shapes"
    tried = trial()
    proposal = propose(shapes, sizes, tried)
    chosen = {
        name: list(shape) for name, shape in proposal.shapes.items() if (own := declared[name]) is None or own != shape
    }
    advice = "which it takes, or the sizes you need"
    if not proposal.is_taken:
        advice = "with the sizes that it is made for: these are typical ones, with which it was not seen to run"
        deciding = [name for name, shape in declared.items() if shape == () and name in tried.integers]
        advice += f"; if {deciding[0]!r} decides a branch, give input_values, too" if deciding else ""
    return f"{problem}; give input_shapes='{json.dumps(chosen)}', {advice}"
