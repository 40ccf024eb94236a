"""LSTM, GRU and RNN as one function of all steps (https://onnx.ai/onnx/operators/onnx__LSTM.html, …GRU, …RNN).

What the inputs contribute to the gates is one product of matrices for all steps, which is a task as any other. The rest
is a function with the loop over the steps inside: a block of units has all of its gates in registers, to which what the
state contributes is added, and writes its part of the next state. Nothing is launched for a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T  # noqa: N812 - TVM's own name

from ansor_mlflow.codegen import DOT_PRODUCTS, PACK
from ansor_mlflow.sketches import Machine

if TYPE_CHECKING:
    from tvm.target import Target

GATES = {"GRU": 3, "LSTM": 4, "RNN": 1}
_ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "Relu": lambda x: tirx.max(x, tirx.const(0.0, x.ty)),
    "Sigmoid": tirx.sigmoid,
    "Tanh": tirx.tanh,
}
_MIN_SUMS = 8
"""Sums that keep two units busy whose multiply-adds take four cycles."""
_JOBS_FLOPS = 3e6
"""Operations of a layer from which directions and rows are divided among threads: some forty microseconds of one core,
of which starting a thread takes several."""
_UNITS_FLOPS = 1e5
"""Operations of a step for each thread from which units are divided among threads, which then wait for each other."""
SCHEDULED = "tirx.is_scheduled"
"""TVM's attribute of a function that is compiled as it is, so that there is nothing to tune."""
_OPAQUE = 8
"""TVM's `OpPatternKind` of a function that is fused with nothing."""
WRITTEN_AS_LOOPS: dict[str, Any] = {"tirx.noalias": True, "op_pattern": _OPAQUE, SCHEDULED: True}
"""Attributes of a function that is written as loops."""
_LAUNCH, _BARRIER = "pragma_parallel_launch_point", "pragma_parallel_barrier_when_finish"
"""What TVM's code generator for CPUs knows: a region whose threads are started once, and a loop behind which they wait
for each other."""

Threads = Literal["none", "jobs", "units"]
"""What is divided among threads: nothing, directions and rows of the batch, or the units of each step."""


@dataclass(frozen=True, kw_only=True)
class RecurrentLayer:
    """A recurrent layer without its weights."""

    kind: str
    """LSTM, GRU or RNN."""
    steps: int
    batch: int
    units: int
    reverses: tuple[bool, ...]
    """Whether each direction begins with the last step."""
    activations: tuple[tuple[str, ...], ...]
    """Names of the activations of each direction."""
    batch_first: bool = False
    """Whether the batch is the first axis of inputs, outputs and states."""
    linear_before_reset: bool = False
    """Whether a GRU multiplies by its reset gate after the product with the state."""
    has_byte_weights: bool = False
    """Whether the state's weights are of 8 bits: then each row of the state is quantised before it is multiplied."""

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The gates whose products with the state are summed together, one group after the other."""
        if self.kind == "GRU" and not self.linear_before_reset:
            return (0, 1), (2,)
        return (tuple(range(GATES[self.kind])),)

    def of_direction(self, direction: Any, row: Any) -> list[Any]:
        """The first two indices of a state."""
        return [row, direction] if self.batch_first else [direction, row]

    def of_step(self, step: Any, direction: Any, row: Any) -> list[Any]:
        """The first three indices of the outputs."""
        return [row, step, direction] if self.batch_first else [step, direction, row]


@dataclass(frozen=True, kw_only=True)
class Blocking:
    """How a layer is computed on a CPU, whose registers hold the sums of all gates of some rows and units."""

    lanes: int
    vectors: int
    """Vectors of units in a block."""
    num_blocks: int
    """Blocks of units, of which the last one may be filled up."""
    rows: int
    """Rows of the batch whose sums are in registers together."""
    threads: Threads
    chunks: int = 1
    """Parts of the blocks, each of which has quantised states of its own: one for each thread that shares the units."""

    @staticmethod
    def of(layer: RecurrentLayer, target: Target) -> Blocking:
        machine = Machine.of(target)
        gates, batch, directions = max(map(len, layer.groups)), layer.batch, len(layer.reverses)
        lanes = machine.lanes(4)
        while lanes > 4 and layer.units <= lanes // 2:
            lanes //= 2
        num_vectors = -(-layer.units // lanes)
        most = max(1, min(num_vectors, _MIN_SUMS // (gates * batch)))
        vectors = next(number for number in range(most, 0, -1) if num_vectors % number == 0)
        tiles = -(-batch // max(1, (machine.num_registers - 4) // (gates * vectors)))
        rows = -(-batch // tiles)
        flops = 2.0 * batch * GATES[layer.kind] * layer.units**2  # of a step in one direction
        num_jobs = directions * tiles if batch % rows == 0 and directions * layer.steps * flops >= _JOBS_FLOPS else 1
        threads: Threads = "none"
        if machine.num_threads > 1:
            faster = PACK if layer.has_byte_weights else 1
            is_large = flops >= faster * _UNITS_FLOPS * machine.num_threads
            threads = "units" if is_large and num_jobs < machine.num_threads else "jobs" if num_jobs > 1 else "none"
        num_blocks = num_vectors // vectors
        chunks = 1
        if threads == "units" and layer.has_byte_weights:
            chunks = next(number for number in range(machine.num_threads, 0, -1) if num_blocks % number == 0)
            threads = "units" if chunks > 1 else "none"
        return Blocking(lanes=lanes, vectors=vectors, num_blocks=num_blocks, rows=rows, threads=threads, chunks=chunks)

    @property
    def block(self) -> int:
        """Units of a block."""
        return self.vectors * self.lanes

    @property
    def units(self) -> int:
        """Units of all blocks, also those that only fill up the last one."""
        return self.num_blocks * self.block

    def pack(self, weights: NDArray[Any]) -> NDArray[Any]:
        """Weights or biases [directions, gates, units, K] as [directions, blocks, K, gates · vectors, lanes]."""
        directions, gates, units, k = weights.shape
        padded = np.pad(weights, [(0, 0), (0, 0), (0, self.units - units), (0, 0)])
        blocks = padded.reshape(directions, gates, self.num_blocks, self.vectors, self.lanes, k)
        packed = blocks.transpose(0, 2, 5, 1, 3, 4).reshape(directions, self.num_blocks, k, -1, self.lanes)
        return np.ascontiguousarray(packed)

    def pack_bytes(self, weights: NDArray[np.int8]) -> NDArray[np.int8]:
        """Weights as `pack` has them, in packs of K: [directions, blocks, K / 4, gates · vectors, lanes, 4]."""
        packed = self.pack(weights)
        directions, blocks, k, *others = packed.shape
        packs = packed.reshape(directions, blocks, k // PACK, PACK, *others)
        return np.ascontiguousarray(packs.transpose(0, 1, 2, 4, 5, 3))


def all_steps(layer: RecurrentLayer, blocking: Blocking) -> tirx.PrimFunc:
    """The function of all steps.

    It takes what the inputs and biases contribute, [steps · batch, directions · blocks · gates · block] or, with the
    batch first, [batch · steps, …]; packed weights for each group of gates; for a GRU that is linear before its reset
    the bias of what the state contributes to its last gate, [directions, units of all blocks]; with weights of 8 bits
    their sums over the state's units, as int32, and their scales, both packed as biases are; and the initial states. It
    writes the states after all steps, and the last ones. All others are float32.
    """
    return _Writer(layer, blocking).function()


@dataclass(frozen=True)
class _Tile:
    """Where a tile of sums is."""

    direction: Any
    step: Any
    block: Any
    first: Any
    """The first of its rows."""
    rows: int


class _Writer:
    """Writes the function of a layer."""

    def __init__(self, layer: RecurrentLayer, blocking: Blocking) -> None:
        self._layer, self._blocking = layer, blocking
        self._states = ["h", "c"] if layer.kind == "LSTM" else ["h"]

    def function(self) -> tirx.PrimFunc:
        layer, blocking, directions = self._layer, self._blocking, len(self._layer.reverses)
        state = [*layer.of_direction(directions, layer.batch), layer.units]
        with IRBuilder() as builder, T.prim_func(is_private=True, s_tir=True):
            T.func_name(layer.kind.lower())
            T.func_attr(WRITTEN_AS_LOOPS)
            num_columns = directions * GATES[layer.kind] * blocking.units
            self._inputs = _argument("inputs", layer.steps * layer.batch, num_columns)
            blocks = [directions, blocking.num_blocks]
            vectors = [[len(group) * blocking.vectors, blocking.lanes] for group in layer.groups]
            if layer.has_byte_weights:
                shape = [*blocks, layer.units // PACK, *vectors[0], PACK]
                self._weights = [_argument("weights0", *shape, dtype="int8")]
                self._sums = _argument("weight_sums", *blocks, *vectors[0], dtype="int32")
                self._scales = _argument("weight_scales", *blocks, *vectors[0])
            else:
                self._weights = [
                    _argument(f"weights{number}", *blocks, layer.units, *shape) for number, shape in enumerate(vectors)
                ]
            if layer.linear_before_reset:
                self._bias = _argument("bias", directions, blocking.units)
            self._initial = [_argument(f"initial_{name}", *state) for name in self._states]
            self._outputs = _argument("outputs", *layer.of_step(layer.steps, directions, layer.batch), layer.units)
            self._last = [_argument(f"last_{name}", *state) for name in self._states]
            with T.sblock("all_steps"):  # as other functions that are written as loops
                # Two of them: blocks of the next state are written while others read this one.
                self._h = T.alloc_buffer((directions, 2, layer.batch, blocking.units))
                # The cell of an LSTM; of a GRU with two groups of gates its update gate, and the state after the reset.
                num_others = 1 if layer.kind == "LSTM" else 2 * (len(layer.groups) - 1)
                self._others = [T.alloc_buffer((directions, layer.batch, blocking.units)) for _ in range(num_others)]
                if layer.has_byte_weights:
                    rows = blocking.chunks, directions, layer.batch
                    self._bytes = T.alloc_buffer((*rows, layer.units), "uint8")
                    self._steps = T.alloc_buffer((*rows, 1))
                    self._zeros = T.alloc_buffer((*rows, 1), "int32")
                self._write()
        return builder.get()

    def _write(self) -> None:
        layer, rows = self._layer, self._blocking.rows
        tiles = [(first, min(rows, layer.batch - first)) for first in range(0, layer.batch, rows)]
        match self._blocking.threads:
            case "jobs":
                with T.parallel(len(layer.reverses) * len(tiles)) as job:
                    self._run(job // len(tiles), [(job % len(tiles) * rows, rows)])
            case "units":
                with T.attr(0, _LAUNCH, 1), T.serial(len(layer.reverses)) as direction:
                    self._run(direction, tiles, T.parallel, lambda: T.attr(0, _BARRIER, 1))
            case "none":
                with T.serial(len(layer.reverses)) as direction:
                    self._run(direction, tiles)

    def _run(
        self,
        direction: Any,
        tiles: Sequence[tuple[Any, int]],
        loop: Callable[[int], Any] = T.serial,
        barrier: Callable[[], Any] = nullcontext,
    ) -> None:
        """All steps of a direction for rows of the batch, which come in tiles: the first row and the number of each."""
        layer, num_blocks = self._layer, self._blocking.num_blocks
        with barrier(), loop(num_blocks) as block:
            for first, rows in tiles:
                with T.serial(rows) as row:
                    self._begin(_Tile(direction, 0, block, first + row, 1))
        with T.serial(layer.steps) as step:
            if layer.has_byte_weights:
                with barrier(), loop(self._blocking.chunks) as chunk:
                    self._compute_chunk(direction, step, chunk, tiles)
            for group in range(0 if layer.has_byte_weights else len(layer.groups)):
                with barrier(), loop(num_blocks) as block:
                    for first, rows in tiles:
                        self._compute(_Tile(direction, step, block, first, rows), group)
        with barrier(), loop(num_blocks) as block:
            for first, rows in tiles:
                with T.serial(rows) as row:
                    self._end(_Tile(direction, layer.steps, block, first + row, 1))

    def _compute_chunk(self, direction: Any, step: Any, chunk: Any, tiles: Sequence[tuple[Any, int]]) -> None:
        """One step of some blocks, for which the state is quantised."""
        for first, rows in tiles:
            with T.serial(rows) as row:
                self._quantize(self._h, [direction, step % 2, first + row], [chunk, direction, first + row])
        size = self._blocking.num_blocks // self._blocking.chunks
        with T.serial(size) as place:
            for first, rows in tiles:
                self._compute(_Tile(direction, step, chunk * size + place, first, rows), 0, chunk)

    def _quantize(self, state: Any, row: Sequence[Any], place: Sequence[Any]) -> None:
        """Quantises a row of a state as DynamicQuantizeLinear does: round(h / scale) + zero point."""
        units, lanes, zero = self._layer.units, self._blocking.lanes, tirx.const(0.0, "float32")
        ends = T.alloc_buffer((2,), scope="local")
        for number, extremum in enumerate((tirx.min, tirx.max)):
            T.buffer_store(ends, zero, [number])
            with T.serial(units) as unit:
                T.buffer_store(ends, extremum(ends[number], state[(*row, unit)]), [number])
        span = ends[1] - ends[0]
        scale = tirx.Select(span > zero, span / tirx.const(255.0, "float32"), tirx.const(1.0, "float32"))
        T.buffer_store(self._steps, scale, [*place, 0])
        lowest = tirx.nearbyint(zero - ends[0] / self._steps[(*place, 0)])
        T.buffer_store(self._zeros, tirx.Cast("int32", lowest), [*place, 0])
        with T.serial(units // lanes) as number:
            steps = self._vector(state, *row, number * lanes) / tirx.Broadcast(self._steps[(*place, 0)], lanes)
            level = tirx.Cast(f"int32x{lanes}", tirx.nearbyint(steps)) + tirx.Broadcast(self._zeros[(*place, 0)], lanes)
            level = tirx.max(tirx.min(level, tirx.Broadcast(255, lanes)), tirx.Broadcast(0, lanes))
            self._store(tirx.Cast(f"uint8x{lanes}", level), self._bytes, *place, number * lanes)

    def _byte_totals(self, at: _Tile, chunk: Any) -> Any:
        """The sums of the products of a quantised state and its weights, as int32, of a tile."""
        num_vectors, lanes = GATES["LSTM"] * self._blocking.vectors, self._blocking.lanes
        totals = T.alloc_buffer((at.rows, num_vectors, lanes), "int32", scope="local")
        tile = list(product(range(at.rows), range(num_vectors)))
        for row, number in tile:
            self._store(tirx.Broadcast(0, lanes), totals, row, number, 0)
        with T.serial(self._layer.units // PACK) as pack:
            for row, number in tile:
                with T.serial(lanes, annotations={DOT_PRODUCTS: 1}) as lane, T.serial(PACK) as k:
                    factor = self._bytes[chunk, at.direction, at.first + row, pack * PACK + k]
                    weight = self._weights[0][at.direction, at.block, pack, number, lane, k]
                    total = totals[row, number, lane] + tirx.Cast("int32", factor) * tirx.Cast("int32", weight)
                    T.buffer_store(totals, total, [row, number, lane])
        return totals

    def _add_totals(self, at: _Tile, chunk: Any, totals: Any, sums: Any) -> None:
        """Adds what the quantised state contributes to the sums of a tile."""
        lanes = self._blocking.lanes
        for row, number in product(range(at.rows), range(int(sums.shape[1]))):
            place, block = [chunk, at.direction, at.first + row, 0], [at.direction, at.block, number, 0]
            zeros = tirx.Broadcast(self._zeros[tuple(place)], lanes) * self._vector(self._sums, *block)
            total = tirx.Cast(f"float32x{lanes}", self._vector(totals, row, number, 0) - zeros)
            scale = tirx.Broadcast(self._steps[tuple(place)], lanes) * self._vector(self._scales, *block)
            self._store(self._vector(sums, row, number, 0) + total * scale, sums, row, number, 0)

    def _begin(self, at: _Tile) -> None:
        """Copies the initial states. What fills up the last block must be numbers, and is multiplied with nothing."""
        with T.serial(self._blocking.block) as lane:
            unit = at.block * self._blocking.block + lane
            place = *self._layer.of_direction(at.direction, at.first), tirx.min(unit, self._layer.units - 1)
            T.buffer_store(self._h, self._initial[0][place], [at.direction, 0, at.first, unit])
            for cell, initial in zip(self._others, self._initial[1:], strict=False):
                T.buffer_store(cell, initial[place], [at.direction, at.first, unit])

    def _end(self, at: _Tile) -> None:
        with self._units(at.block) as lane:
            unit = at.block * self._blocking.block + lane
            place = [*self._layer.of_direction(at.direction, at.first), unit]
            T.buffer_store(self._last[0], self._h[at.direction, at.step % 2, at.first, unit], place)
            for cell, last in zip(self._others, self._last[1:], strict=False):
                T.buffer_store(last, cell[at.direction, at.first, unit], place)

    def _units(self, block: Any) -> Any:
        """A loop over the units of a block that are no filling."""
        size = self._blocking.block
        if self._layer.units % size == 0:
            return T.vectorized(size)
        return T.serial(tirx.min(size, self._layer.units - block * size))

    def _compute(self, at: _Tile, group: int, chunk: Any = 0) -> None:
        """One step of a block of units for some rows: sums in registers, and what becomes of them."""
        layer, lanes, gates = self._layer, self._blocking.lanes, self._layer.groups[group]
        num_vectors = len(gates) * self._blocking.vectors
        totals = self._byte_totals(at, chunk) if layer.has_byte_weights else None
        sums = T.alloc_buffer((at.rows, num_vectors, lanes), scope="local")
        for row, (number, gate), vector in product(range(at.rows), enumerate(gates), range(self._blocking.vectors)):
            value = self._from_inputs(at, row, gate, vector)
            if layer.linear_before_reset and gate == 2:
                value = self._vector(self._bias, at.direction, self._unit(at, vector))
            self._store(value, sums, row, number * self._blocking.vectors + vector, 0)
        if totals is None:
            self._add_floats(at, group, sums)
        else:
            self._add_totals(at, chunk, totals, sums)
        for row, vector in product(range(at.rows), range(self._blocking.vectors)):
            self._cell(at, group, sums, row, vector)
        if group == len(layer.groups) - 1:
            for row in range(at.rows):
                with self._units(at.block) as lane:
                    unit = at.block * self._blocking.block + lane
                    place = layer.of_step(self._time(at), at.direction, at.first + row)
                    value = self._h[at.direction, (at.step + 1) % 2, at.first + row, unit]
                    T.buffer_store(self._outputs, value, [*place, unit])

    def _add_floats(self, at: _Tile, group: int, sums: Any) -> None:
        """Adds what the state contributes to the sums of a tile."""
        factors, place = (self._others[1], []) if group else (self._h, [at.step % 2])
        with T.serial(self._layer.units) as k:
            for row, number in product(range(at.rows), range(int(sums.shape[1]))):
                weights = self._vector(self._weights[group], at.direction, at.block, k, number, 0)
                factor = tirx.Broadcast(factors[(at.direction, *place, at.first + row, k)], self._blocking.lanes)
                self._store(self._vector(sums, row, number, 0) + factor * weights, sums, row, number, 0)

    def _cell(self, at: _Tile, group: int, sums: Any, row: int, vector: int) -> None:
        """The equations of a vector of units.

        Each function's value is stored: code generation writes out what is nested again and again.
        """
        layer, gates, one = self._layer, self._layer.groups[group], tirx.Broadcast(1.0, self._blocking.lanes)
        place = at.direction, at.first + row, self._unit(at, vector)
        h = self._vector(self._h, at.direction, at.step % 2, *place[1:])

        def gate(number: int) -> Any:
            return self._vector(sums, row, gates.index(number) * self._blocking.vectors + vector, 0)

        def activate(number: int, activation: int, value: Any = None) -> Any:
            index = gates.index(number) * self._blocking.vectors + vector
            if value is not None:
                self._store(value, sums, row, index, 0)
            self._store(self._activated(at, activation, gate(number)), sums, row, index, 0)
            return gate(number)

        match layer.kind, group:
            case "RNN", _:
                result = activate(0, 0)
            case "LSTM", _:  # gates i, o, f, c: C = f ⊙ C + i ⊙ c and H = o ⊙ h(C)
                (cells,) = self._others
                i, o, f, c = (activate(number, activation) for number, activation in enumerate((0, 0, 0, 1)))
                self._store(f * self._vector(cells, *place) + i * c, cells, *place)
                result = o * self._activated(at, 2, self._vector(cells, *place))
            case _, 0 if layer.linear_before_reset:  # gates z, r, h: H = (1 − z) ⊙ h + z ⊙ H
                z, r = activate(0, 0), activate(1, 0)
                candidate = activate(2, 1, self._from_inputs(at, row, 2, vector) + r * gate(2))
                result = (one - z) * candidate + z * h
            case _, 0:
                self._store(activate(0, 0), self._others[0], *place)
                self._store(activate(1, 0) * h, self._others[1], *place)
                return
            case _:
                z = self._vector(self._others[0], *place)
                result = (one - z) * activate(2, 1) + z * h
        self._store(result, self._h, at.direction, (at.step + 1) % 2, *place[1:])

    def _activated(self, at: _Tile, number: int, value: Any) -> Any:
        functions = [_ACTIVATIONS[names[number]] for names in self._layer.activations]
        if functions[0] is functions[-1]:
            return functions[0](value)
        return tirx.Select(at.direction == 0, functions[0](value), functions[1](value))

    def _from_inputs(self, at: _Tile, row: int, gate: int, vector: int) -> Any:
        """What the inputs contribute to a vector of a gate."""
        layer, blocking, time = self._layer, self._blocking, self._time(at)
        place = (at.first + row) * layer.steps + time if layer.batch_first else time * layer.batch + at.first + row
        block = at.direction * blocking.num_blocks + at.block
        number = (block * GATES[layer.kind] + gate) * blocking.vectors + vector
        return self._vector(self._inputs, place, number * blocking.lanes)

    def _time(self, at: _Tile) -> Any:
        """The place of a step in the sequence."""
        places = [self._layer.steps - 1 - at.step if reverse else at.step for reverse in self._layer.reverses]
        return places[0] if len(places) == 1 else tirx.Select(at.direction == 0, *places)

    def _unit(self, at: _Tile, vector: int) -> Any:
        return (at.block * self._blocking.vectors + vector) * self._blocking.lanes

    def _vector(self, buffer: Any, *place: Any) -> Any:
        """A vector that begins at a place of a buffer."""
        return tirx.BufferLoad(buffer, [*place[:-1], tirx.Ramp(place[-1], 1, self._blocking.lanes)])

    def _store(self, value: Any, buffer: Any, *place: Any) -> None:
        T.buffer_store(buffer, value, [*place[:-1], tirx.Ramp(place[-1], 1, self._blocking.lanes)])


def _argument(name: str, *shape: int, dtype: str = "float32") -> Any:
    return T.arg(name, T.buffer(shape, dtype))
