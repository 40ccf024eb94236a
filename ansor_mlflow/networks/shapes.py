"""Which shapes the inputs of a network get: their own, or those that the user gives.

The names of dynamic axes say which of them are the batch, which follow from others, and what sizes are usual.
"""

from __future__ import annotations

import ast
import json
import logging
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from numbers import Integral

from ansor_mlflow.errors import UserInputError

_log = logging.getLogger("ansor_mlflow")

Shape = tuple[int, ...]
DeclaredShape = tuple[int | str, ...]
"""A shape as a file declares it: a dynamic dimension is its name, or "?" where it has none."""
NamedShapes = Mapping[str, DeclaredShape | None]
"""Shapes of inputs by their names; None where not even the rank is known. Each dynamic axis has a name, and axes of one
name have one size."""

_NO_NAME = "?"
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
_USUAL_SHAPE = (1, 3, _SIDE, _SIDE)
"""What is suggested where not even the rank is known."""
_IMAGE_LAST = (1, _SIDE, _SIDE, 3)
_CLIP = (1, 3, 16, _SIDE, _SIDE)


def resolve_shapes(
    network: str,
    declared: Mapping[str, DeclaredShape | None],
    given: Mapping[str, Sequence[int]],
    *,
    batch_size: int = 1,
    integers: Collection[str] = (),
    note: Callable[[str], object] = _log.warning,
) -> dict[str, Shape]:
    """The static shape of every input; `integers` are those that are no floats, for the sizes that an error suggests.

    Dimensions of one name get one size. A batch (see `_batch_axes`) has the size of another that is given, or else
    `batch_size`, which is noted where nobody has said so.
    """
    for name, shape in given.items():
        _check_given(network, declared, name, list(shape))
    named = {  # an axis without a name gets one that no other axis has
        name: shape and tuple(f"{_NO_NAME} {axis} {name}" if dim == _NO_NAME else dim for axis, dim in enumerate(shape))
        for name, shape in declared.items()
    }
    batch = _batch_axes(named)
    sizes: dict[str, int] = {}
    for name, shape in given.items():
        for dim, size in zip(named[name] or (), shape, strict=False):  # there may be no rank
            if isinstance(dim, str):
                sizes.setdefault(dim, int(size))
    shapes: NamedShapes = {**named, **{name: tuple(map(int, shape)) for name, shape in given.items()}}
    if batch_size != 1:
        _require_batch_size(network, batch_size, shapes, batch)
    assumed = {dim: places for dim, places in batch.items() if dim not in sizes}
    given_batches = {sizes[dim] for dim in batch if dim in sizes}
    sizes |= dict.fromkeys(assumed, min(given_batches) if len(given_batches) == 1 else batch_size)
    shapes = {name: shape and tuple(_size_of(dim, sizes) for dim in shape) for name, shape in shapes.items()}
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
                f"{_NO_NAME if str(dim).startswith(_NO_NAME) else dim} (dimension {axis})"
                for axis, dim in enumerate(shape)
                if not _is_static(dim)
            ]
            dynamic.append(f"{name!r} has dynamic {', '.join(dims)}")
    usual = dict(sizes)
    for name, axis, dim in _free_axes(shapes, sizes):
        usual.setdefault(dim, _usual_size(name, shapes[name] or (), axis, is_integer=name in integers))
    suggested = {
        name: [_size_of(dim, usual) for dim in (_USUAL_SHAPE if shape is None else shape)]
        for name, shape in shapes.items()
    }
    changed = {name: shape for name, shape in suggested.items() if shape != list(declared[name] or ())}
    deciding = next((name for name, shape in declared.items() if shape == () and name in integers), None)
    return (
        f"input {'; input '.join(dynamic)} in {network}, but tasks are tuned for fixed shapes; give "
        f"input_shapes='{json.dumps(changed)}', which are usual sizes, or those that it was made for"
        + (f"; if {deciding!r} decides a branch, give input_values, too" if deciding else "")
    )


def _usual_size(name: str, shape: DeclaredShape, axis: int, *, is_integer: bool) -> int:  # noqa: PLR0911
    """A usual size of an axis, by its name, its place and the input's name and dtype."""
    dim, rank, is_last = str(shape[axis]), len(shape), axis == len(shape) - 1
    words = _words_of(dim)
    context = [*words, *_words_of(name)]
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
        return (_IMAGE_LAST if has_channels_last else _USUAL_SHAPE)[axis]
    if rank == 5:
        return _CLIP[axis]
    if rank == 3 and is_last and shape[1] in _MEL_BANDS:
        return _MEL_FRAMES
    return _FRAMES if _any(context, _SPECTRUM) else _LENGTH


def _words_of(name: str) -> list[str]:
    """The words of a name such as "pastLength_0", in lower case: past, length."""
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)]


def _any(words: Iterable[str], beginnings: tuple[str, ...]) -> bool:
    return any(word.startswith(beginnings) for word in words)


def _free_axes(shapes: NamedShapes, known: Mapping[str, int] = {}) -> Iterator[tuple[str, int, str]]:
    """Every dynamic axis that does not follow from others or from known sizes, as its input, its index and its name."""
    names = {dim for shape in shapes.values() for dim in shape or () if isinstance(dim, str) and dim.isidentifier()}
    sizes = {**dict.fromkeys(names, _ANY_SIZE), **known}
    for name, shape in shapes.items():
        for axis, dim in enumerate(shape or ()):
            if isinstance(dim, str) and dim not in known and (dim in names or isinstance(_size_of(dim, sizes), str)):
                yield name, axis, dim


def _size_of(dim: int | str, sizes: Mapping[str, int]) -> int | str:
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


def _batch_axes(shapes: NamedShapes) -> dict[str, list[tuple[str, int]]]:
    """The names of axes that are the batch, with the inputs and indices where they are.

    An axis is the batch if it is called so: batch or batch_size anywhere, a letter such as N only where a batch stands,
    first or after the steps of a sequence. So is the first axis of an input, unless its own name says that it is
    something else (sequence_length, time, …). An input has one batch, so that what stands behind it or twice is none
    in other inputs either. Where there is a batch, the second axis of three is one, too, between two that are fixed:
    that is a recurrent state.
    """
    free = list(_free_axes(shapes))
    unclear = [(shapes[name] or (), axis, dim) for name, axis, dim in free if not _is_called_otherwise(dim)]
    called = {
        dim
        for _, _, dim in free
        if not dim.startswith(_NO_NAME) and any(word.startswith("batch") for word in _words_of(dim))
    }
    placed = {dim for shape, axis, dim in unclear if _is_place_of_batch(shape, axis) and not called & set(shape)}
    others = set()
    for shape in shapes.values():
        dims = [dim for dim in shape or () if isinstance(dim, str)]
        first = next((dim for dim in dims if dim in called | placed), None)
        others |= {dim for dim in dims if first is not None and (dim != first or dims.count(dim) > 1)}
    found = called | placed - others
    if found:
        states = {dim for shape, _, dim in unclear if [type(size) for size in shape] == [int, str, int]}
        found |= states - others
    places: dict[str, list[tuple[str, int]]] = {}
    for name, axis, dim in free:
        if dim in found:
            places.setdefault(dim, []).append((name, axis))
    return places


def _is_place_of_batch(shape: DeclaredShape, axis: int) -> bool:
    first, dim = str(shape[0]), str(shape[axis])
    return axis == 0 or (axis == 1 and dim.lower() in _BATCH_LETTERS and _is_called_otherwise(first))


def _is_called_otherwise(dim: str) -> bool:
    if dim.startswith(_NO_NAME):
        return False
    return dim.lower() in _OTHER_LETTERS or any(map(_OTHER_WORDS.match, _words_of(dim)))
