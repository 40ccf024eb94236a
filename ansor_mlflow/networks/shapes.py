"""Which shape every input of a network gets: its own, or the one that the user gives."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from numbers import Integral

from ansor_mlflow.errors import UserInputError

Shape = tuple[int, ...]
DeclaredShape = tuple[int | str, ...]
"""A shape as a file declares it: a dynamic dimension is its name, or "?" where it has none."""


def resolve_shapes(
    network: str, declared: Mapping[str, DeclaredShape | None], given: Mapping[str, Sequence[int]]
) -> dict[str, Shape]:
    """The static shape of every input.

    Args:
        network: What messages call the network.
        declared: Shape of every input; None where not even the rank is known.
        given: Shapes that replace declared ones (the parameter `input_shapes`).

    Raises:
        UserInputError: A given shape does not fit its input, or an input is still dynamic.
    """
    for name, shape in given.items():
        _check_given(network, declared, name, list(shape))
    shapes = {**declared, **{name: tuple(shape) for name, shape in given.items()}}
    if any(shape is None or not all(map(_is_static, shape)) for shape in shapes.values()):
        raise UserInputError(_dynamic_message(network, shapes))
    resolved = {name: tuple(int(dim) for dim in shape or ()) for name, shape in shapes.items()}
    for name, sizes in resolved.items():
        if any(size < 1 for size in sizes):
            raise UserInputError(
                f"input {name!r} of {network} would be {list(sizes)}, but every dimension must be at least 1; "
                "change batch_size or input_shapes"
            )
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


def _is_static(dim: object) -> bool:
    return isinstance(dim, Integral)


def _dynamic_message(network: str, shapes: Mapping[str, DeclaredShape | None]) -> str:
    """Names what is dynamic, and writes the parameter out so that the user can copy it."""
    dynamic, example = [], {}
    for name, shape in shapes.items():
        if shape is None:
            dynamic.append(f"{name!r} has no shape")
            example[name] = [1, 3, 224, 224]
        elif not all(map(_is_static, shape)):
            dims = [f"{dim} (dimension {axis})" for axis, dim in enumerate(shape) if not _is_static(dim)]
            dynamic.append(f"{name!r} has dynamic {', '.join(dims)}")
            example[name] = [int(dim) if _is_static(dim) else 1 for dim in shape]
    return (
        f"input {'; input '.join(dynamic)} in {network}, but tasks are tuned for fixed shapes; "
        f"give input_shapes='{json.dumps(example)}' with the sizes you need"
    )
