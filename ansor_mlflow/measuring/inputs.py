"""Inputs that a network is checked on: those that a user keeps in a file, or seeded ones."""

from __future__ import annotations

import time
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from ansor_mlflow.errors import AnsorMlflowError, UserInputError, one_line
from ansor_mlflow.measuring.compare import reference_inference
from ansor_mlflow.processes import in_child_process
from ansor_mlflow.tensors import Arrays, NetworkShapes, TensorSpec, random_inputs, stack_cells

if TYPE_CHECKING:
    import onnx

_NUM_SEEDED = 3
_PARQUET_MAGIC = b"PAR1"
_FORMATS = "give a .npz, .npy or .parquet file"


def choose_examples(data: str, sizes: Sequence[NetworkShapes], seed: int, network: Path | None = None) -> list[Arrays]:
    """The inputs that outputs are compared on; the first of them, one of each size, are timed."""
    if not data:
        return seeded_inputs(network, sizes, range(seed, seed + _NUM_SEEDED))
    number, (first, *others) = _read_for_a_size(data, sizes)
    seeded = seeded_inputs(network, sizes, [seed]) if len(sizes) > 1 else [first]
    return [*seeded[:number], first, *seeded[number + 1 :], *others]


def require_examples(data: str) -> None:
    """Checks what can be said of a user's file before the network is known."""
    if data and not Path(data).is_file():
        raise UserInputError(f"data={data}: there is no such file; {_FORMATS}")


def read_examples(path: str, inputs: tuple[TensorSpec, ...]) -> list[Arrays]:
    """Reads inputs from a file. Nothing is unpickled.

    A NumPy file is .npz with an array for each input, or, for a network with one input, .npy. A Parquet file has a
    column for each input, and a row of it, as bytes or as a list of numbers, in each cell. There may be any number of
    rows along the first dimension; the last example is filled up with the first rows.
    """
    expected = ", ".join(f"{spec.name}: {spec.dtype} {spec.shape}" for spec in inputs)
    arrays = _read(path, inputs)
    if set(arrays) != {spec.name for spec in inputs}:
        raise UserInputError(f"data={path}: it holds {', '.join(arrays) or 'nothing'}; it must hold {expected}")
    counts = {_num_examples(arrays[spec.name], spec) for spec in inputs}
    if len(counts) != 1 or not all(counts):
        given = ", ".join(f"{name}: {array.dtype} {array.shape}" for name, array in arrays.items())
        raise UserInputError(
            f"data={path}: it holds {given}; it must hold {expected}, or more rows of each along the first dimension"
        )
    columns = {spec.name: _split(arrays[spec.name], spec) for spec in inputs}
    return [{name: column[index] for name, column in columns.items()} for index in range(ceil(counts.pop()))]


def _read_for_a_size(path: str, sizes: Sequence[NetworkShapes]) -> tuple[int, list[Arrays]]:
    errors = []
    for number, size in enumerate(sizes):
        try:
            return number, read_examples(path, size.inputs)
        except UserInputError as err:
            errors.append(err)
    raise errors[0]


def _read(path: str, inputs: tuple[TensorSpec, ...]) -> Arrays:
    require_examples(path)
    try:
        with Path(path).open("rb") as file:
            is_parquet = file.read(len(_PARQUET_MAGIC)) == _PARQUET_MAGIC
        return _read_parquet(path, inputs) if is_parquet else _read_numpy(path, inputs)
    except (OSError, MemoryError) as err:
        reason = getattr(err, "strerror", None) or one_line(err)
        raise UserInputError(f"data={path}: it cannot be read ({reason}); {_FORMATS}") from err


def _read_numpy(path: str, inputs: tuple[TensorSpec, ...]) -> Arrays:
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return {inputs[0].name: loaded} if len(inputs) == 1 else {"one array": loaded}
        with loaded:
            return dict(loaded)
    except (ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as err:
        raise UserInputError(
            f"data={path}: it is no NumPy file of plain numbers; write one with numpy.savez(path, input=array)"
        ) from err


def _read_parquet(path: str, inputs: tuple[TensorSpec, ...]) -> Arrays:
    import pandas as pd  # it is slow to load, and only this needs it

    try:
        frame = pd.read_parquet(path)
    except (OSError, MemoryError):
        raise
    except Exception as err:  # of pandas, PyArrow or what a damaged schema stands for: there are a dozen kinds
        raise UserInputError(f"data={path}: it is no Parquet file, or cut short; write it again") from err
    by_name = {spec.name: spec for spec in inputs}
    if set(frame.columns) != set(by_name):
        return {str(name): np.empty(0) for name in frame.columns}  # which is refused, by their names
    try:
        return {name: stack_column(frame[name], spec) for name, spec in by_name.items()}
    except UserInputError as err:
        raise UserInputError(f"data={path}: {err}") from err


def stack_column(column: Any, spec: TensorSpec) -> npt.NDArray[Any]:
    """A column of tensors as one array; the lists in its cells may be flat."""
    array = stack_cells(map(_nested, column), spec)
    flat = array.ndim == 2 and array.shape[1:] == (np.prod(spec.shape[1:], dtype=int),)
    return array.reshape(-1, *spec.shape[1:]) if flat else array


def _nested(cell: Any) -> Any:
    """Lists of lists, which pandas reads as arrays of arrays."""
    is_nested = isinstance(cell, np.ndarray) and cell.dtype == object
    return [_nested(inner) for inner in cell] if is_nested else cell


def _num_examples(array: npt.NDArray[Any], spec: TensorSpec) -> Fraction:
    """How often the rows of an array fill the input; 0 where it is not of the network's dtype and shape."""
    if array.dtype != spec.dtype or array.ndim != len(spec.shape) or array.shape[1:] != spec.shape[1:]:
        return Fraction(0)
    return Fraction(len(array), spec.shape[0] or 1) if spec.shape else Fraction(1)


def _split(array: npt.NDArray[Any], spec: TensorSpec) -> list[npt.NDArray[Any]]:
    """The examples in an array; the last one is filled up with the first rows."""
    if not spec.shape:
        return [array]
    rows = np.arange(ceil(_num_examples(array, spec)) * spec.shape[0]) % len(array)
    return list(array[rows].reshape(-1, *spec.shape))


_KEEPING = (
    *("Cast", "Concat", "Expand", "Flatten", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Tile"),
    *("Transpose", "Unsqueeze"),
)
"""Operators that keep values, of which some may be left out."""
_TIME_LIMIT_S = 10.0
"""Seconds after which nothing else is tried."""
_PARTIAL = {"Acos", "Acosh", "Asin", "Atanh", "Log", "Pow", "Sqrt"}
"""Operators that give NaN for some ordinary numbers."""


def seeded_inputs(network: Path | None, sizes: Sequence[NetworkShapes], seeds: Sequence[int]) -> list[Arrays]:
    """Inputs for each seed and size: floats are standard normal, and integers what the network can use."""
    draw = _Draw() if network is None else _chosen_draw(network, sizes[0].inputs, seeds[0])
    return [draw.inputs(size.inputs, seed) for seed in seeds for size in sizes]


def typical_inputs(sizes: Sequence[NetworkShapes], drawn: Sequence[Arrays]) -> list[Arrays]:
    """Inputs of the kinds that networks get, for each size: their floats are like shares of brightness, bytes of an
    image, and sound, each row louder than the one before. What is no float is as it was drawn.
    """
    found = []
    for like in (_like_brightness, _like_bytes, _like_sound):
        for size, inputs in zip(sizes, drawn, strict=True):
            rng = np.random.default_rng(0)
            floats = {spec.name: like(spec, rng) for spec in size.inputs if np.dtype(spec.dtype).kind not in "iub"}
            if floats:
                found.append({**inputs, **floats})
    return found


def _like_brightness(spec: TensorSpec, rng: np.random.Generator) -> npt.NDArray[Any]:
    return rng.random(spec.shape).astype(spec.dtype)


def _like_bytes(spec: TensorSpec, rng: np.random.Generator) -> npt.NDArray[Any]:
    return rng.integers(0, 256, spec.shape).astype(spec.dtype)


def _like_sound(spec: TensorSpec, rng: np.random.Generator) -> npt.NDArray[Any]:
    """Sines of some frequencies along the last axis, as loud as speech."""
    samples = np.arange(spec.shape[-1] if spec.shape else 1)
    waves = sum(np.sin(samples * frequency) for frequency in rng.uniform(0.01, 1.0, 3))
    loudness = 0.05 * np.arange(1, spec.shape[0] + 1 if len(spec.shape) > 1 else 2)
    rows = loudness.reshape(-1, *[1] * (len(spec.shape) - 1)) if len(spec.shape) > 1 else loudness
    return np.broadcast_to(rows * waves, spec.shape or (1,)).reshape(spec.shape).astype(spec.dtype)


def same_for_all(outputs: Sequence[Arrays]) -> list[str]:
    """The outputs that hold nothing that depends on inputs: the same number everywhere, or the same in several calls.

    Of an output of one number, one call says nothing.
    """
    first = outputs[0]
    return [name for name in first if not _varies([values[name] for values in outputs])]


def _varies(values: Sequence[npt.NDArray[Any]]) -> bool:
    if any(array.shape != values[0].shape for array in values):
        return True
    first = values[0]
    if len(values) == 1 and first.size == 1:
        return True
    if len(values) > 1 and all(np.array_equal(array, first, equal_nan=first.dtype.kind == "f") for array in values[1:]):
        return False
    numbers = np.concatenate([array.ravel() for array in values])
    finite = numbers[np.isfinite(numbers)]
    return finite.size > 0 and bool((finite != finite[0]).any())


@dataclass(frozen=True)
class _Draw:
    integers: Literal["bits", "by_shape", "counts", "largest", "ones", "zeros"] = "bits"
    is_positive: bool = False
    """Whether floats are absolute values."""
    tables: Mapping[str, int] = field(default_factory=dict)
    """By the inputs that are indices: the number of rows that they choose from."""

    def inputs(self, specs: Sequence[TensorSpec], seed: int) -> Arrays:
        drawn = random_inputs(specs, seed)
        rng = np.random.default_rng(seed)
        longest = max((dim for spec in specs for dim in spec.shape[1:] or spec.shape), default=2)
        for spec in specs:
            kind = np.dtype(spec.dtype).kind
            if kind in "iub" and self.integers != "bits":
                low, high = self._range(spec, longest)
                drawn[spec.name] = np.asarray(rng.integers(low, high, spec.shape, endpoint=True), spec.dtype)
            elif kind not in "iub" and self.is_positive:
                drawn[spec.name] = abs(drawn[spec.name])
        return drawn

    def _range(self, spec: TensorSpec, longest: int) -> tuple[int, int]:
        fixed = {"ones": 1, "zeros": 0}.get(self.integers)
        if fixed is not None:
            return fixed, fixed
        if spec.name in self.tables:
            return 0, self.tables[spec.name] - 1
        if spec.dtype == "bool" or (self.integers == "by_shape" and _is_mask(spec)):
            return (1, 1) if self.integers == "largest" else (0, 1)
        info = np.iinfo(spec.dtype)
        if info.bits == 8 and len(spec.shape) > 1 and self.integers == "by_shape":  # quantised values, or an image
            return int(info.min), int(info.max)
        longest = min(longest, int(info.max))
        return (longest, longest) if self.integers == "largest" else (1, longest)


def _is_mask(spec: TensorSpec) -> bool:
    has_many = len(spec.shape) > 1 and spec.shape[-1] > 1 and np.dtype(spec.dtype).itemsize > 1
    return "mask" in spec.name.lower() or (has_many and "len" not in spec.name.lower())


def _chosen_draw(network: Path, specs: Sequence[TensorSpec], seed: int) -> _Draw:
    """The first way to draw inputs that ONNX Runtime takes and with which most outputs vary."""
    import onnx

    graph = onnx.load(network, format="protobuf", load_external_data=False).graph
    has_integers = any(np.dtype(spec.dtype).kind in "iub" for spec in specs)
    if not has_integers and not any(node.op_type in _PARTIAL for node in graph.node):
        return _Draw()
    tables = dict(_tables(graph, specs))
    kinds = ("by_shape", "bits", "largest", "counts", "ones", "zeros") if has_integers else ("bits",)
    draws = [_Draw(kind, is_positive, tables) for is_positive in (False, True) for kind in kinds]  # type: ignore[arg-type]
    try:
        shares = in_child_process(_shares, (network, draws, specs, seed))
    except AnsorMlflowError:  # the comparison says so
        return _Draw()
    return draws[shares.index(max(shares))]


def _shares(work: tuple[Path, Sequence[_Draw], Sequence[TensorSpec], int]) -> list[float]:
    """For each way to draw inputs, up to the first with which all outputs vary: the share of numbers that do, by
    outputs, or -1 where they are no inputs.
    """
    network, draws, specs, seed = work
    run = reference_inference(network, 0, exact=True)
    give_up = time.monotonic() + _TIME_LIMIT_S
    shares: list[float] = []
    for draw in draws:
        try:
            outputs = [run(draw.inputs(specs, seed + index)) for index in range(2)]
        except UserInputError:
            shares.append(-1.0)
            continue
        varying = outputs[0].keys() - same_for_all(outputs)
        shares.append(sum(float(np.isfinite(outputs[0][name]).mean()) for name in varying) / len(outputs[0]))
        if shares[-1] == 1 or time.monotonic() > give_up:
            break
    return shares


def _tables(graph: onnx.GraphProto, specs: Sequence[TensorSpec]) -> Iterator[tuple[str, int]]:
    """The inputs whose values are indices, and of how many rows at most."""
    from onnx import numpy_helper

    weights = {weight.name: weight for weight in graph.initializer}
    known = {value.name: value.type.tensor_type.shape.dim for value in graph.value_info}
    dims = {name: [dim.dim_value for dim in found] for name, found in known.items()}
    dims |= {name: list(weight.dims) for name, weight in weights.items()}
    for spec in specs:
        offsets, bounds = {spec.name: 0}, []
        for node in graph.node:  # they are in the order in which they run
            for place, name in enumerate(node.input):
                if name not in offsets:
                    continue
                if node.op_type in _KEEPING or (node.op_type == "Gather" and place == 0):
                    offsets |= dict.fromkeys(node.output, offsets[name])
                elif node.op_type == "Add" and (other := weights.get(node.input[1 - place])) and not other.dims:
                    offsets[node.output[0]] = offsets[name] + int(numpy_helper.to_array(other))
                elif node.op_type in ("Gather", "GatherElements") and place == 1 and dims.get(node.input[0]):
                    axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
                    bounds.append(dims[node.input[0]][axis] - offsets[name])
        if bounds and min(bounds) > 0:
            yield spec.name, min(bounds)
