"""Which shapes the inputs of a network get: their own, or those that the user gives, for one size or for several."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Integral

from ansor_mlflow.errors import UserInputError
from ansor_mlflow.networks.axes import (
    NO_NAME,
    USUAL_SHAPE,
    NamedShape,
    NamedShapes,
    batch_axes,
    size_of,
    usual_sizes,
    with_names,
)

_log = logging.getLogger("ansor_mlflow")

Shape = tuple[int, ...]
DeclaredShape = tuple[int | str, ...]
"""A shape as a file declares it: a dynamic dimension is its name, or "?" where it has none."""
GivenShape = Sequence[int | list[int] | tuple[int, ...]]
"""A shape in which a dimension may be a list of sizes, one for each size of the network."""


def resolve_shapes(
    network: str,
    declared: Mapping[str, DeclaredShape | None],
    given: Mapping[str, Sequence[int]],
    *,
    batch_size: int = 1,
    integers: Collection[str] = (),
    note: Callable[[str], object] = _log.warning,
) -> dict[str, Shape]:
    """The static shape of every input.

    Dimensions of one name get one size. A batch (see `axes.batch_axes`) has the size of another that is given, or else
    `batch_size`, which is noted where nobody has said so.

    Args:
        network: What messages call the network.
        declared: Shape of every input; None where not even the rank is known.
        given: Shapes that replace declared ones (the parameter `input_shapes`).
        batch_size: Size of a dynamic batch. One that is declared must be this size, unless it is 1.
        integers: The inputs that are no floats, for the sizes that an error suggests.
        note: Gets the sentence that a batch which nobody gave a size is taken as 1.

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
        raise UserInputError(_dynamic_message(network, declared, shapes, sizes, integers))
    resolved = {name: tuple(int(dim) for dim in shape or ()) for name, shape in shapes.items()}
    for name, dims in resolved.items():
        if any(size < 1 for size in dims):
            raise UserInputError(
                f"input {name!r} of {network} would be {list(dims)}, but every dimension must be at least 1; "
                "change batch_size or input_shapes"
            )
    if assumed and batch_size == 1 and len(given_batches) != 1:
        places = ", ".join(f"dimension {axis} of {name!r}" for places in assumed.values() for name, axis in places)
        note(f"network={network}: its batch is dynamic ({places}) and taken as 1; give batch_size for another")
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


def _is_static(dim: object) -> bool:
    return isinstance(dim, Integral)


def _dynamic_message(
    network: str,
    declared: Mapping[str, DeclaredShape | None],
    shapes: NamedShapes,
    sizes: Mapping[str, int],
    integers: Collection[str],
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
    usual = usual_sizes(shapes, sizes, integers)
    suggested = {
        name: [size_of(dim, usual) for dim in (USUAL_SHAPE if shape is None else shape)]
        for name, shape in shapes.items()
    }
    changed = {name: shape for name, shape in suggested.items() if shape != list(declared[name] or ())}
    deciding = next((name for name, shape in declared.items() if shape == () and name in integers), None)
    return (
        f"input {'; input '.join(dynamic)} in {network}, but tasks are tuned for fixed shapes; give "
        f"input_shapes='{json.dumps(changed)}', which are usual sizes, or those that it was made for"
        + (f"; if {deciding!r} decides a branch, give input_values, too" if deciding else "")
    )


def has_several_sizes(given: Mapping[str, GivenShape]) -> bool:
    """Whether a dimension is a list."""
    return any(isinstance(dim, list | tuple) for shape in given.values() for dim in shape)


def split_sizes(network: str, given: Mapping[str, GivenShape]) -> list[dict[str, tuple[int, ...]]]:
    """The shapes of each size: the first ones of all lists, then the second ones, and so on.

    Args:
        network: What messages call the network.
        given: The parameter `input_shapes`.

    Returns:
        At least one; exactly one where no dimension is a list.

    Raises:
        UserInputError: Lists have different lengths, or a size is there twice.
    """
    dims = [dim for shape in given.values() for dim in shape]
    lengths = sorted({len(dim) for dim in dims if isinstance(dim, list | tuple)} or {1})
    if len(lengths) > 1 or not lengths[0]:
        raise UserInputError(
            f"input_shapes gives dimensions of {network} {' and '.join(map(str, lengths))} sizes; give all lists the "
            "same length: their first sizes belong together, then their second ones"
        )
    sizes = [
        {name: tuple(_size(dim, number) for dim in shape) for name, shape in given.items()}
        for number in range(lengths[0])
    ]
    if twice := next((shapes for i, shapes in enumerate(sizes) if shapes in sizes[:i]), None):
        shapes = ", ".join(f"{name} {list(shape)}" for name, shape in twice.items())
        raise UserInputError(f"input_shapes gives {network} the size {shapes} twice; give each once")
    return sizes


def _size(dim: int | list[int] | tuple[int, ...], number: int) -> int:
    return dim[number] if isinstance(dim, list | tuple) else dim
