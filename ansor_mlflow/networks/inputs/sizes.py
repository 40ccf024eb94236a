"""Several sizes of one network: `input_shapes` in which a list of sizes stands in the place of a dimension."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ansor_mlflow.errors import UserInputError

GivenShape = Sequence[int | list[int] | tuple[int, ...]]
"""A shape in which a dimension may be a list of sizes, one for each size of the network."""


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
