"""TVM's importer of ONNX graphs, with recurrent layers, which it lacks, and products of bytes."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import tvm
from numpy.typing import NDArray
from tvm import relax, te, tirx
from tvm.ir import GenericConst, Op
from tvm.relax.frontend.onnx.onnx_frontend import ONNXGraphImporter
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T  # noqa: N812 - TVM's own name

from ansor_mlflow.device import WEIGHT_BITS, has_dot_products, platform_of, weight_bits
from ansor_mlflow.graphs import activations_of, attributes_of, opset_version, reverses_of
from ansor_mlflow.lowering.recurrence import GATES, WRITTEN_AS_LOOPS, Blocking, RecurrentLayer, all_steps
from ansor_mlflow.lowering.relax_passes import call_pass, op_name
from ansor_mlflow.sketches import MIN_PARALLEL, Machine

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.target import Target

_BIAS, _INITIAL_STATES, _MAX_INPUTS = 3, 5, 8
_WEIGHT_SCALE, _STATE_SCALE = 8, 10
"""Positions of inputs of a recurrent layer, and how many there are."""
_LINE_ELEMENTS = 16
"""Float32 elements of a line of the caches, which two threads do not share."""
_ZEROS, _GROUPS, _NIBBLE_BIAS = 3, 4, 5
"""Positions of inputs of a MatMulNBits."""
_MAX_NIBBLE_ROWS = 16
"""Rows up to which its weights are read as they are."""
_Array = NDArray[Any]


def import_onnx(model: onnx.ModelProto, target: Target) -> IRModule:
    """The graph as a Relax module with its weights as constants; errors are those of TVM's importer."""
    return _Importer(target).from_onnx(model.graph, opset_version(model))


class _Importer(ONNXGraphImporter):  # type: ignore[misc]
    """TVM's importer takes no operators of others, so that two of its methods are overridden here."""

    def __init__(self, target: Target) -> None:
        super().__init__({}, "float32")
        self._target = target
        self._added: dict[str, Callable[[onnx.NodeProto], list[relax.Expr]]] = {"LRN": self._local_response}
        if platform_of(target).has_sketches:
            self._added |= dict.fromkeys(GATES, self._recurrent)
            self._added |= {"ScatterND": self._scatter, "MatMulNBits": self._nibble_product}
        if has_dot_products(target):
            if weight_bits(target) == WEIGHT_BITS:
                self._added["DynamicQuantizeLSTM"] = self._recurrent
            self._added |= {"ConvInteger": self._byte_convolution, "MatMulInteger": self._byte_product}
            self._added["DynamicQuantizeLinear"] = self._quantize

    def _check_for_unsupported_ops(self, graph: onnx.GraphProto) -> None:
        others = [node for node in graph.node if node.op_type not in self._added]
        super()._check_for_unsupported_ops(SimpleNamespace(node=others))

    def _construct_nodes(self, graph: onnx.GraphProto) -> None:
        for node in graph.node:
            if node.op_type in self._added:
                outputs = self._added[node.op_type](node)
                self._nodes.update(zip(node.output, outputs, strict=False))
            else:
                super()._construct_nodes(SimpleNamespace(node=[node]))

    def _as_tvm_does(self, node: onnx.NodeProto) -> list[relax.Expr]:
        super()._construct_nodes(SimpleNamespace(node=[node]))
        return [self._nodes[name] for name in node.output]

    def _local_response(self, node: onnx.NodeProto) -> list[relax.Expr]:
        """Data over a power of the mean square of the channels around it; TVM's importer pools over three axes."""
        data, attributes = self._nodes[node.input[0]], attributes_of(node)
        if len(data.ty.shape) != 4:
            return self._as_tvm_does(node)
        size, channels, dtype = int(attributes["size"]), int(data.ty.shape[1]), str(data.ty.dtype)
        before = (size - 1) // 2
        # Channels come last, as after a convolution: rows of vectors.
        rows = self.bb.normalize(relax.op.permute_dims(data, [0, 2, 3, 1]))
        widths = [0, 0, 0, 0, 0, 0, before, size - 1 - before]
        squares = self.bb.normalize(relax.op.nn.pad(relax.op.multiply(rows, rows), widths))
        terms = [relax.op.strided_slice(squares, [3], [first], [first + channels]) for first in range(size)]
        alpha, bias, beta = (
            relax.const(attributes.get(name, default), dtype)
            for name, default in (("alpha", 1e-4), ("bias", 1.0), ("beta", 0.75))
        )
        mean = relax.op.divide(functools.reduce(relax.op.add, terms), relax.const(float(size), dtype))
        divisor = relax.op.power(relax.op.add(relax.op.multiply(mean, alpha), bias), beta)
        divisor = self.bb.normalize(relax.op.permute_dims(divisor, [0, 3, 1, 2]))
        return [self.bb.normalize(relax.op.divide(data, divisor))]

    def _scatter(self, node: onnx.NodeProto) -> list[relax.Expr]:
        """Rows that are put or added where indices say; TVM's function takes them element by element."""
        arguments = [self._nodes[name] for name in node.input]
        data, indices, updates = arguments
        if [str(each.ty.dtype) for each in arguments] != ["float32", "int64", "float32"]:
            return self._as_tvm_does(node)
        shape, (*counts, depth) = ([int(size) for size in each.ty.shape] for each in (data, indices))
        sizes, width, count = shape[:depth], prod(shape[depth:]), prod(counts)
        reduction = str(attributes_of(node).get("reduction", "none"))
        function = _scatter_rows(sizes, width, count, reduction, Machine.of(self._target).num_threads)
        matrices = [
            self.bb.emit(relax.op.reshape(each, (-1, columns)))
            for each, columns in ((data, width), (indices, depth), (updates, width))
        ]
        variable = self.bb.add_func(function, "scatter_rows")
        result = self.bb.emit(relax.call_tir(variable, matrices, matrices[0].ty))
        return [self.bb.emit(relax.op.reshape(result, shape))]

    def _byte_convolution(self, node: onnx.NodeProto) -> list[relax.Expr]:
        """A convolution of unsigned and signed bytes; around the data are its zero points, which count as nothing."""
        data, weight, *given = (self._nodes[name] for name in node.input)
        zero_point, kernel, attributes = int(_value(given[0])) if given else 0, _value(weight), attributes_of(node)
        num_axes = kernel.ndim - 2
        padding = attributes.get("pads", [0] * 2 * num_axes)
        if zero_point and any(padding):
            widths = [0, 0, 0, 0, *(width for axis in range(num_axes) for width in padding[axis::num_axes])]
            data, padding = self.bb.emit(relax.op.nn.pad(data, widths, "constant", zero_point)), [0] * 2 * num_axes
        convolve = {1: relax.op.nn.conv1d, 2: relax.op.nn.conv2d, 3: relax.op.nn.conv3d}[num_axes]
        settings = {name: attributes.get(name, [1] * num_axes) for name in ("strides", "dilations")}
        total = self.bb.emit(
            convolve(data, weight, settings["strides"], padding, settings["dilations"], out_dtype="int32")
        )
        if zero_point:
            sums = kernel.sum(axis=tuple(range(1, kernel.ndim)), dtype=np.int32) * zero_point
            total = self.bb.emit(relax.op.subtract(total, relax.const(sums.reshape(-1, *[1] * num_axes))))
        return [total]

    def _byte_product(self, node: onnx.NodeProto) -> list[relax.Expr]:
        return [self._bytes_times(*(self._nodes[name] for name in node.input))]

    def _bytes_times(self, data: relax.Expr, weight: relax.Expr) -> relax.Expr:
        """The sums, as int32, of the products of two tensors of 8 bits: one of any rank, and a matrix."""

        def product(data: te.Tensor, weight: te.Tensor) -> te.Tensor:
            terms, columns = weight.shape
            k = te.reduce_axis((0, terms), "k")

            def total(*place: Any) -> te.Tensor:
                *row, column = place
                return te.sum(data[(*row, k)].astype("int32") * weight[k, column].astype("int32"), axis=k)

            return te.compute((*data.shape[:-1], columns), total, "byte_product")

        return self.bb.emit_te(product, data, weight, primfunc_name_hint="matmul_integer")

    def _nibble_product(self, node: onnx.NodeProto) -> list[relax.Expr]:
        """A product with constant weights of 4 bits, which have a scale and a zero point for each block of terms.

        See MatMulNBits in ContribOperators.md of ONNX Runtime. Of many rows it is one of floats: what takes the time is
        no more to read the weights.
        """
        inputs: list[Any] = [self._nodes[name] if name else None for name in node.input] + [None] * _MAX_INPUTS
        data, attributes, emit, op = inputs[0], attributes_of(node), self.bb.emit, relax.op
        terms, columns, block = (int(attributes[name]) for name in ("K", "N", "block_size"))
        if int(attributes.get("bits", 4)) != 4 or inputs[_GROUPS] is not None or str(data.ty.dtype) != "float32":
            raise tvm.error.OpNotImplemented("a product with weights of other than 4 bits")
        *outer, _ = (int(size) for size in data.ty.shape)
        rows, more_terms, more_columns = prod(outer), -terms % block, -columns % _LINE_ELEMENTS
        nibbles = _nibbles(_value(inputs[1]).reshape(columns, -1))
        scales = _value(inputs[2]).reshape(columns, -1).astype(np.float32)
        zeros = np.full_like(scales, 8) if inputs[_ZEROS] is None else _value(inputs[_ZEROS]).reshape(columns, -1)
        zeros = (_nibbles(zeros)[:, : scales.shape[1]] if zeros.dtype == np.uint8 else zeros).astype(np.float32)
        flat = emit(op.reshape(data, (rows, terms)))
        if rows > _MAX_NIBBLE_ROWS:
            floats = (nibbles.reshape(columns, -1, block) - zeros[..., None]) * scales[..., None]
            weights = relax.const(np.ascontiguousarray(floats.reshape(columns, -1)[:, :terms].T))
            result = emit(op.matmul(flat, weights))
        else:
            # what is added to blocks and vectors is zero
            nibbles, scales, zeros = (np.pad(each, [(0, more_columns), (0, 0)]) for each in (nibbles, scales, zeros))
            flat = emit(op.nn.pad(flat, [0, 0, 0, more_terms])) if more_terms else flat
            product = _NibbleProduct.of(rows, terms + more_terms, columns + more_columns, block)
            pairs = nibbles.reshape(len(nibbles), -1, 2)
            constants = (pairs[..., 0] | pairs[..., 1] << 4).astype(np.uint8), scales, scales * zeros
            variable = self.bb.add_func(product.function(Machine.of(self._target).num_threads), "nibble_product")
            arguments = [flat, *(relax.const(product.in_panels(each)) for each in constants)]
            result = emit(relax.call_tir(variable, arguments, relax.TensorType((rows, product.columns), "float32")))
            result = emit(op.strided_slice(result, [1], [0], [columns])) if more_columns else result
        result = emit(op.reshape(result, (*outer, columns)))
        return [result if inputs[_NIBBLE_BIAS] is None else emit(op.add(result, inputs[_NIBBLE_BIAS]))]

    def _quantize(self, node: onnx.NodeProto) -> list[relax.Expr]:
        return self._quantized(self._nodes[node.input[0]])

    def _quantized(self, data: relax.Expr) -> list[relax.Expr]:
        """A tensor in bytes, their scale and their zero point, of the range that it has."""
        shape = tuple(int(size) for size in data.ty.shape)
        function = _quantize_by_range(shape, Machine.of(self._target).num_threads)
        types = [relax.TensorType(*each) for each in ((shape, "uint8"), ((), "float32"), ((), "uint8"))]
        outputs = self.bb.emit(relax.call_tir(self.bb.add_func(function, "dynamic_quantize"), [data], types))
        return [self.bb.emit(relax.TupleGetItem(outputs, place)) for place in range(len(types))]

    def _recurrent(self, node: onnx.NodeProto) -> list[relax.Expr]:
        """The outputs of a recurrent layer: a product of all inputs and their weights, and a function of all steps.

        The weights of a DynamicQuantizeLSTM are of 8 bits, and come with their second and third axis exchanged.
        """
        inputs: list[Any] = [self._nodes[name] if name else None for name in node.input] + [None] * _MAX_INPUTS
        is_quantized, attributes = node.op_type == "DynamicQuantizeLSTM", attributes_of(node)
        kind = "LSTM" if is_quantized else str(node.op_type)
        weights, recurrent = _value(inputs[1]), _value(inputs[2])
        if is_quantized:
            weights, recurrent = (values.transpose(0, 2, 1) for values in (weights, recurrent))
        directions, all_units, units = recurrent.shape
        data, batch_first = inputs[0], bool(attributes.get("layout", 0))
        steps, batch, num_inputs = (int(data.ty.shape[axis]) for axis in ([1, 0, 2] if batch_first else [0, 1, 2]))
        layer = RecurrentLayer(
            kind=kind,
            steps=steps,
            batch=batch,
            units=units,
            reverses=reverses_of(node),
            activations=activations_of(node),
            batch_first=batch_first,
            linear_before_reset=kind == "GRU" and bool(attributes.get("linear_before_reset", 0)),
            has_byte_weights=is_quantized,
        )
        blocking = Blocking.of(layer, self._target)

        def by_gate(values: _Array) -> _Array:
            return values.reshape(directions, GATES[kind], units, -1)

        def in_columns(values: _Array) -> _Array:
            """What belongs to a column of the product of all inputs, in the order of its columns."""
            return blocking.pack(by_gate(values)).transpose(2, 0, 1, 3, 4).reshape(values.shape[2], -1)

        # Biases are added to all steps at once, but for one that a GRU multiplies by its reset gate.
        biases = np.zeros((directions, 2 * all_units), np.float32) if inputs[_BIAS] is None else _value(inputs[_BIAS])
        of_inputs, of_state = (half[..., None] for half in np.split(biases, 2, axis=1))
        is_added_later = np.zeros((1, GATES[kind], 1, 1), bool)
        is_added_later[:, 2:] = layer.linear_before_reset
        later = np.where(is_added_later, by_gate(of_state), 0)
        bias = in_columns(of_inputs + of_state - later.reshape(of_state.shape))[0]
        flat = self.bb.emit(relax.op.reshape(data, (steps * batch, num_inputs)))
        if is_quantized:
            scales = [
                self._scales(inputs[place], (directions, all_units, 1)) for place in (_WEIGHT_SCALE, _STATE_SCALE)
            ]
            gates = self._dynamic_product(flat, in_columns(weights), in_columns(scales[0])[0])
        else:
            gates = self.bb.emit(relax.op.matmul(flat, relax.const(in_columns(weights))))
        arguments = [self.bb.emit(relax.op.add(gates, relax.const(bias)))]
        if is_quantized:
            sums = recurrent.sum(axis=2, dtype=np.int32, keepdims=True)
            arguments.append(relax.const(blocking.pack_bytes(by_gate(recurrent))))
            arguments += [relax.const(blocking.pack(by_gate(values))[:, :, 0]) for values in (sums, scales[1])]
        else:
            arguments += [relax.const(blocking.pack(by_gate(recurrent)[:, list(group)])) for group in layer.groups]
        if layer.linear_before_reset:
            arguments.append(relax.const(blocking.pack(later[:, 2:]).reshape(directions, -1)))
        state = [*layer.of_direction(directions, batch), units]
        num_states = 2 if kind == "LSTM" else 1
        for initial in inputs[_INITIAL_STATES : _INITIAL_STATES + num_states]:
            arguments.append(relax.const(np.zeros(state, np.float32)) if initial is None else initial)
        shapes = [[*layer.of_step(steps, directions, batch), units], *[state] * num_states]
        function = self.bb.add_func(all_steps(layer, blocking), kind.lower())
        types = [relax.TensorType(shape, "float32") for shape in shapes]
        outputs = self.bb.emit(relax.call_tir(function, arguments, types))
        return [self.bb.emit(relax.TupleGetItem(outputs, number)) for number in range(len(types))]

    @staticmethod
    def _scales(constant: relax.Expr, shape: tuple[int, int, int]) -> _Array:
        """The scales of weights, of which there is one for each direction, or for each unit of a gate, too."""
        values = _value(constant)
        return np.broadcast_to(values.reshape(shape[0], -1, 1), shape).astype(np.float32)

    def _dynamic_product(self, data: relax.Expr, weights: _Array, scales: _Array) -> relax.Expr:
        """The product of a matrix that is quantised as DynamicQuantizeLinear does, and weights of 8 bits."""
        op, emit = relax.op, self.bb.emit
        levels, scale, zeros = self._quantized(data)
        total = self._bytes_times(levels, relax.const(weights))
        of_zero = op.multiply(op.astype(zeros, "int32"), relax.const(weights.sum(axis=0, dtype=np.int32)))
        floats = op.astype(emit(op.subtract(total, of_zero)), "float32")
        return emit(op.multiply(floats, emit(op.multiply(scale, relax.const(scales)))))


def _value(constant: relax.Expr | None) -> _Array:
    if not isinstance(constant, GenericConst):
        raise tvm.error.OpNotImplemented("a recurrent layer whose weights are no constants")
    return np.asarray(constant.value.numpy())


def _nibbles(bytes_: _Array) -> _Array:
    """Halves of bytes along the last axis, the lower ones first."""
    return np.stack([bytes_ & 15, bytes_ >> 4], axis=-1).reshape(*bytes_.shape[:-1], -1)


@dataclass(frozen=True)
class _NibbleProduct:
    """A product with weights of 4 bits, which a thread reads panel after panel, once for a few rows of the data."""

    rows: int
    terms: int
    columns: int
    block: int
    """Terms that have a scale and a zero point of their own."""
    rows_at_once: int
    vectors: int
    """Vectors of columns of a panel."""

    @staticmethod
    def of(rows: int, terms: int, columns: int, block: int) -> _NibbleProduct:
        rows_at_once = next(number for number in (8, 6, 5, 4, 3, 2, 1) if rows % number == 0)
        most = 4 if rows_at_once == 1 else 2
        vectors = next(number for number in (4, 2, 1) if number <= most and columns % (number * _LINE_ELEMENTS) == 0)
        return _NibbleProduct(rows, terms, columns, block, rows_at_once, vectors)

    def in_panels(self, values: _Array) -> _Array:
        """What belongs to columns, (columns, n), as (panels, n, columns of a panel)."""
        width = self.vectors * _LINE_ELEMENTS
        return np.ascontiguousarray(values.reshape(self.columns // width, width, -1).transpose(0, 2, 1))

    def function(self, num_threads: int) -> tirx.PrimFunc:
        """Σ over blocks of scale · Σ data · nibble − scale · zero point · Σ data."""
        width, num_blocks = self.vectors * _LINE_ELEMENTS, self.terms // self.block
        panels, at_once, zero = self.columns // width, self.rows_at_once, tirx.const(0, "float32")
        loop = T.parallel if num_threads > 1 and self.terms * self.columns >= MIN_PARALLEL else T.serial
        with IRBuilder() as builder, T.prim_func(is_private=True, s_tir=True):
            T.func_name("nibble_product")
            T.func_attr(WRITTEN_AS_LOOPS)
            data = T.arg("data", T.buffer((self.rows, self.terms), "float32"))
            weights = T.arg("weights", T.buffer((panels, self.terms // 2, width), "uint8"))
            scales = T.arg("scales", T.buffer((panels, num_blocks, width), "float32"))
            zeros = T.arg("zeros", T.buffer((panels, num_blocks, width), "float32"))
            result = T.arg("result", T.buffer((self.rows, self.columns), "float32"))
            with T.sblock("product"):
                sums = T.alloc_buffer((self.rows, num_blocks))
                with T.serial(self.rows) as row, T.serial(num_blocks) as block:
                    T.buffer_store(sums, zero, [row, block])
                    with T.serial(self.block) as term:
                        total = sums[row, block] + data[row, block * self.block + term]
                        T.buffer_store(sums, total, [row, block])
                with loop(panels) as panel, T.serial(self.rows // at_once) as group:
                    totals, partial = (T.alloc_buffer((at_once, width), scope="local") for _ in range(2))
                    self._each(lambda place: T.buffer_store(totals, zero, place))
                    with T.serial(num_blocks) as block:
                        self._each(lambda place: T.buffer_store(partial, zero, place))
                        with T.serial(self.block // 2) as pair:
                            number = block * (self.block // 2) + pair

                            def add(place: list[Any]) -> None:
                                row, column = place
                                byte, first = tirx.Cast("int32", weights[panel, number, column]), group * at_once + row
                                halves = (byte & 15, byte >> 4)
                                factors = (data[first, 2 * number + half] for half in range(2))
                                terms = (a * tirx.Cast("float32", b) for a, b in zip(factors, halves, strict=True))
                                T.buffer_store(
                                    partial, functools.reduce(operator.add, terms, partial[row, column]), place
                                )

                            self._each(add)

                        def scale(place: list[Any]) -> None:
                            row, column = place
                            scaled = partial[row, column] * scales[panel, block, column]
                            offset = sums[group * at_once + row, block] * zeros[panel, block, column]
                            T.buffer_store(totals, totals[row, column] + scaled - offset, place)

                        self._each(scale)

                    def write(place: list[Any]) -> None:
                        row, column = place
                        T.buffer_store(result, totals[row, column], [group * at_once + row, panel * width + column])

                    self._each(write)
        return builder.get()

    def _each(self, store: Callable[[list[Any]], None]) -> None:
        """A statement for each element of a tile, in vectors."""
        with T.unroll(self.rows_at_once) as row, T.unroll(self.vectors) as vector, T.vectorized(_LINE_ELEMENTS) as lane:
            store([row, vector * _LINE_ELEMENTS + lane])


def _scatter_rows(sizes: Sequence[int], width: int, count: int, reduction: str, num_threads: int) -> tirx.PrimFunc:
    """Puts or adds rows of a matrix where indices say, as ONNX's ScatterND does; one that is outside, to the nearest.

    Each thread has columns of its own, so that it does not matter how many of the rows go to one place.
    """
    combine = {"add": operator.add, "mul": operator.mul, "max": tirx.max, "min": tirx.min}.get(reduction)
    jobs = next((jobs for jobs in range(num_threads, 1, -1) if width % (jobs * _LINE_ELEMENTS) == 0), 1)
    with IRBuilder() as builder, T.prim_func(is_private=True, s_tir=True):
        T.func_name("scatter_rows")
        T.func_attr(WRITTEN_AS_LOOPS)
        data = T.arg("data", T.buffer((prod(sizes), width), "float32"))
        indices = T.arg("indices", T.buffer((count, len(sizes)), "int64"))
        updates = T.arg("updates", T.buffer((count, width), "float32"))
        result = T.arg("result", T.buffer((prod(sizes), width), "float32"))
        with T.sblock("scatter"), T.parallel(jobs) as job:
            with T.serial(prod(sizes)) as row, T.serial(width // jobs) as column:
                place = [row, job * (width // jobs) + column]
                T.buffer_store(result, data[tuple(place)], place)
            with T.serial(count) as number, T.serial(width // jobs) as column:
                row = tirx.const(0, "int64")
                for axis, size in enumerate(sizes):
                    index = indices[number, axis]
                    index = tirx.Select(index < 0, index + size, index)
                    row = row * size + tirx.max(tirx.min(index, tirx.const(size - 1, "int64")), tirx.const(0, "int64"))
                place = [row, job * (width // jobs) + column]
                value = updates[number, place[1]]
                T.buffer_store(result, combine(result[tuple(place)], value) if combine else value, place)
    return builder.get()


def _quantize_by_range(shape: tuple[int, ...], num_threads: int) -> tirx.PrimFunc:
    """Quantises a tensor of float32 as ONNX's DynamicQuantizeLinear does: saturate(round(x / scale) + zero point).

    As runtimes do, it multiplies with 1 / scale: what is half-way between two steps is so by chance. The scale is NaN
    where any element is, so that what is broken does not look like a number later.
    """
    size = prod(shape)
    num_vectors = size // _LINE_ELEMENTS
    most = num_threads if size >= MIN_PARALLEL else 1
    jobs = next(jobs for jobs in range(most, 0, -1) if num_vectors % jobs == 0)
    loop, share = (T.parallel if jobs > 1 else T.serial), num_vectors // jobs * _LINE_ELEMENTS
    zero, one, most_level = (tirx.const(value, "float32") for value in (0, 1, 255))
    with IRBuilder() as builder, T.prim_func(is_private=True, s_tir=True):
        T.func_name("dynamic_quantize")
        T.func_attr(WRITTEN_AS_LOOPS)
        tensor, levels = T.arg("tensor", T.buffer(shape, "float32")), T.arg("levels", T.buffer(shape, "uint8"))
        scale, zero_point = T.arg("scale", T.buffer((), "float32")), T.arg("zero_point", T.buffer((), "uint8"))

        def quantize(place: Any) -> None:
            steps = tirx.nearbyint(data[place] * factor[0]) + factor[1]
            T.buffer_store(bytes_, tirx.Cast("uint8", tirx.min(tirx.max(steps, zero), most_level)), [place])

        with T.sblock("quantize"):
            data, bytes_ = (T.decl_buffer((size,), each.dtype, each.data) for each in (tensor, levels))
            ends, factor = T.alloc_buffer((3, jobs, _LINE_ELEMENTS)), T.alloc_buffer((2,))
            extrema = list(enumerate((tirx.min, tirx.max, _nan_of)))
            with loop(jobs) as job:
                for end, _ in extrema:
                    with T.vectorized(_LINE_ELEMENTS) as lane:
                        T.buffer_store(ends, zero, [end, job, lane])
                with T.serial(share // _LINE_ELEMENTS) as number:
                    for end, extremum in extrema:
                        with T.vectorized(_LINE_ELEMENTS) as lane:
                            value = data[job * share + number * _LINE_ELEMENTS + lane]
                            T.buffer_store(ends, extremum(ends[end, job, lane], value), [end, job, lane])
            for end, extremum in extrema:
                with T.serial(jobs) as job, T.serial(_LINE_ELEMENTS) as lane:
                    T.buffer_store(ends, extremum(ends[end, 0, 0], ends[end, job, lane]), [end, 0, 0])
                with T.serial(jobs * share, size) as place:
                    T.buffer_store(ends, extremum(ends[end, 0, 0], data[place]), [end, 0, 0])
            span = ends[1, 0, 0] - ends[0, 0, 0] + ends[2, 0, 0]
            T.buffer_store(scale, tirx.Select(span <= zero, one, span / most_level), [])
            T.buffer_store(factor, one / scale[()], [0])
            T.buffer_store(factor, tirx.nearbyint((zero - ends[0, 0, 0]) / scale[()]), [1])
            T.buffer_store(zero_point, tirx.Cast("uint8", factor[1]), [])
            with loop(jobs) as job, T.serial(share // _LINE_ELEMENTS) as number, T.vectorized(_LINE_ELEMENTS) as lane:
                quantize(job * share + number * _LINE_ELEMENTS + lane)
            with T.serial(jobs * share, size) as place:
                quantize(place)
    return builder.get()


def _nan_of(kept: Any, value: Any) -> Any:
    return tirx.Select(tirx.isnan(value), value, kept)


@call_pass("HideFunctions")
def hide_functions(_mutator: Any, call: relax.Call) -> relax.Expr:
    """Makes calls of functions such as ToMixedPrecision leaves alone: it would ask for the type of each function."""
    if op_name(call) != "relax.call_tir":
        return call
    return relax.Call(relax.ExternFunc(call.args[0].name_hint), list(call.args[1]), ty_args=call.ty_args)


@call_pass("ShowFunctions")
def show_functions(mutator: Any, call: relax.Call) -> relax.Expr:
    """Undoes `hide_functions`. Functions take float32 or bytes, whatever now computes their arguments."""
    if not isinstance(call.op, relax.ExternFunc):
        return call
    arguments = [
        mutator.builder_.emit(relax.op.astype(argument, "float32")) if str(argument.ty.dtype) == "float16" else argument
        for argument in call.args
    ]
    function = mutator.mod.get_global_var(str(call.op.global_symbol))
    return relax.Call(Op.get("relax.call_tir"), [function, relax.Tuple(arguments)], ty_args=call.ty_args)
