"""Whether the rows of a batch depend on one another, decided from the axes that each operator mixes.

Where the batch is in a tensor follows from where it is in those that it is computed from. An operator that is not in
the table, or a reshape that melts the batch with another axis, decides nothing. Axes are those of ONNX's Operators.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import onnx
from onnx import numpy_helper

from ansor_mlflow.graphs.types import static_shape, value_infos
from ansor_mlflow.graphs.walk import attributes_of, input_of, opset_version

Rows = Literal["independent", "dependent", ""]
"""Empty where the graph does not decide it."""


class _Mixed(Exception):  # noqa: N818 - rows meet, which is no error
    pass


class _Unknown(Exception):  # noqa: N818 - whether rows meet is not known
    pass


_ELEMENTWISE = {
    *("Abs", "Acos", "Acosh", "Add", "And", "Asin", "Asinh", "Atan", "Atanh", "BiasGelu", "BitShift"),
    *("BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "Cast", "Ceil", "Celu", "Clip", "Cos"),
    *("Cosh", "Div", "Elu", "Equal", "Erf", "Exp", "FastGelu", "Floor", "Gelu", "Greater"),
    *("GreaterOrEqual", "HardSigmoid", "HardSwish", "Identity", "IsInf", "IsNaN", "LeakyRelu", "Less"),
    *("LessOrEqual", "Log", "Max", "Mean", "Min", "Mish", "Mod", "Mul", "Neg", "Not", "Or", "PRelu", "Pow"),
    *("QuickGelu", "Reciprocal", "Relu", "Round", "Selu", "Shrink", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus"),
    *("Softsign", "Sqrt", "Sub", "Sum", "Swish", "Tan", "Tanh", "ThresholdedRelu", "Where", "Xor"),
}
_OF_SAMPLES = {
    *("AveragePool", "BatchNormalization", "Conv", "ConvInteger", "ConvTranspose", "DepthToSpace"),
    *("GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool", "GroupNormalization", "InstanceNormalization", "LRN"),
    *("LpPool", "MaxPool", "QLinearConv", "SpaceToDepth"),
}
"""Operators of (N, C, …) whose other inputs are weights."""
_ONE_AXIS = {"ArgMax": 0, "ArgMin": 0, "CumSum": 0, "Hardmax": -1, "LogSoftmax": -1, "LpNormalization": -1}
_ONE_AXIS |= {"Softmax": -1, "TopK": -1}
"""Operators along one axis, with its default."""
_MIXING = {
    *("Compress", "If", "Loop", "NonMaxSuppression", "NonZero", "RoiAlign", "Scan", "Unique"),
    *("DynamicQuantizeLinear", "DynamicQuantizeLSTM", "DynamicQuantizeMatMul"),
    *("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"),
}
"""Operators whose shapes or branches depend on values, that round with one scale for all rows, or that draw numbers."""


def rows_of(model: onnx.ModelProto) -> Rows:
    """Whether each row of the outputs depends on that row of the inputs alone, which all have one first axis.

    The model has static shapes, and nothing that follows from them (see `simplify`).
    """
    try:
        graph = _Graph(model)
        for node in model.graph.node:
            graph.pass_through(node)
        graph.require_outputs()
    except _Mixed:
        return "dependent"
    except (_Unknown, LookupError, ValueError, TypeError):  # the last of a node that is damaged
        return ""
    return "independent"


class _Graph:
    """Where the batch is in every tensor that has passed: an axis that it is, or the outermost part of."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._infos = value_infos(model)
        self._weights = {weight.name: weight for weight in model.graph.initializer}
        self._outputs = [output.name for output in model.graph.output]
        self.opset = opset_version(model)
        inputs = [value.name for value in model.graph.input if value.name not in self._weights]
        self.size = self.shape(inputs[0])[0]
        self._axes: dict[str, int] = dict.fromkeys(inputs, 0)

    def shape(self, name: str) -> tuple[int, ...]:
        shape = static_shape(self._infos.get(name))
        if shape is None:
            raise _Unknown(name)
        return shape

    def axis(self, name: str) -> int | None:
        """The batch axis of a tensor; None where it does not depend on the inputs."""
        return self._axes.get(name)

    def pass_through(self, node: onnx.NodeProto) -> None:
        """Notes where the batch is in the outputs of a node."""
        if node.op_type in _MIXING:
            raise _Mixed(node.op_type)
        if node.op_type in ("Shape", "Size") or not any(name in self._axes for name in node.input):
            return
        rule = _Graph._reduce if node.op_type.startswith("Reduce") else _RULES.get(node.op_type)
        if rule is None:
            raise _Unknown(node.op_type)
        found = rule(self, node)
        axes = found if isinstance(found, list) else [found] * len(node.output)
        for name, axis in zip(node.output, axes, strict=False):
            if name:
                if self.shape(name)[axis] % self.size:
                    raise _Unknown(name)
                self._axes[name] = axis

    def require_outputs(self) -> None:
        """Checks that every output begins with the batch."""
        for name in self._outputs:
            if self.axis(name) is None:
                if self.size != 1 and not self.is_uniform(name, 0):
                    raise _Unknown(name)
            elif self.axis(name) != 0:
                raise _Mixed(name)

    def is_uniform(self, name: str, axis: int) -> bool:
        """Whether a tensor without a batch is the same for all rows, where its axis meets the batch."""
        shape = self.shape(name)
        if axis < 0 or shape[axis] == 1:
            return True
        weight = self._weights.get(name)
        if weight is None or math.prod(weight.dims) == 0 or shape[axis] % self.size:
            return False
        values = numpy_helper.to_array(weight).reshape(*shape[:axis], self.size, -1)
        return bool((values == values.take([0], axis)).all())

    def aligned(self, names: Iterator[tuple[str, int]]) -> int:
        """The batch axis of a result, from inputs with the number of axes that the result has more than each."""
        pairs = [(name, more) for name, more in names if name]
        found = {axis + more for name, more in pairs if (axis := self.axis(name)) is not None}
        if len(found) != 1:
            raise _Mixed
        (axis,) = found
        for name, more in pairs:
            if self.axis(name) is None and not self.is_uniform(name, axis - more):
                raise _Mixed if name in self._weights else _Unknown(name)
        return axis

    def constant(self, name: str) -> list[Any]:
        if name not in self._weights:
            raise _Unknown(name)
        return list(numpy_helper.to_array(self._weights[name]).ravel().tolist())

    def numbers(self, node: onnx.NodeProto, name: str, place: int) -> list[Any] | None:
        """What is an attribute in old operator sets, and an input in new ones; None where it is left out."""
        value = attributes_of(node).get(name)
        if value is not None:
            return list(value) if hasattr(value, "__len__") else [value]
        given = input_of(node, place)
        return self.constant(given) if given else None

    def only_first(self, node: onnx.NodeProto) -> int:
        """The batch axis of the first input, if the others have none."""
        axis = self.axis(node.input[0])
        if axis is None or any(self.axis(name) is not None for name in node.input[1:]):
            raise _Unknown(node.op_type)
        return axis

    def along(self, node: onnx.NodeProto, axes: Iterable[int], *, keeps: bool = True, axis: int | None = None) -> int:
        """The batch axis behind an operator that mixes some axes of its first input, and may remove them."""
        axis = self.only_first(node) if axis is None else axis
        mixed = {number % self.rank(node) for number in axes}
        if axis in mixed:
            raise _Mixed
        return axis if keeps else axis - sum(number < axis for number in mixed)

    def rank(self, node: onnx.NodeProto) -> int:
        return len(self.shape(node.input[0]))

    def _elementwise(self, node: onnx.NodeProto) -> int:
        rank = len(self.shape(node.output[0]))
        return self.aligned((name, rank - len(self.shape(name))) for name in node.input if name)

    def _of_first(self, node: onnx.NodeProto) -> int:
        if node.op_type == "Dropout" and input_of(node, 2):
            raise _Mixed
        return self.only_first(node) + len(self.shape(node.output[0])) - self.rank(node)

    def _reshape(self, node: onnx.NodeProto) -> int:
        axis = self.only_first(node)
        before, after = self.shape(node.input[0]), self.shape(node.output[0])
        outer = math.prod(before[:axis])
        for place, size in enumerate(after):
            if math.prod(after[:place]) == outer and size % self.size == 0:
                return place
        raise _Unknown(node.op_type)

    def _of_samples(self, node: onnx.NodeProto) -> int:
        # Other outputs are statistics of the batch, or of a MaxPool places in the whole tensor.
        has_others = node.op_type in ("BatchNormalization", "MaxPool") and len(list(filter(None, node.output))) > 1
        if self.only_first(node) != 0 or attributes_of(node).get("training_mode", 0) or has_others:
            raise _Mixed
        return 0

    def _resize(self, node: onnx.NodeProto) -> int:
        axis, shape, attributes = self.only_first(node), self.shape(node.input[0]), attributes_of(node)
        axes = [number % len(shape) for number in attributes.get("axes", range(len(shape)))]
        scales = self.numbers(node, "scales", 1 if len(node.input) == 2 else 2)
        scale = scales[axes.index(axis)] if scales and axis in axes else 1
        is_crop = attributes.get("coordinate_transformation_mode") == "tf_crop_and_resize"
        if is_crop or attributes.get("keep_aspect_ratio_policy", "stretch") != "stretch":
            raise _Unknown(node.op_type)
        if scale != 1 or self.shape(node.output[0])[axis] != shape[axis]:
            raise _Mixed
        return axis

    def _reduce(self, node: onnx.NodeProto) -> int:
        attributes = attributes_of(node)
        every = [] if attributes.get("noop_with_empty_axes", 0) else range(self.rank(node))
        axes = self.numbers(node, "axes", 1) or every
        return self.along(node, axes, keeps=attributes.get("keepdims", 1))

    def _one_axis(self, node: onnx.NodeProto) -> int:
        # Before opset 13, these work on all axes from theirs on.
        is_old = node.op_type in ("Softmax", "LogSoftmax", "Hardmax") and self.opset < 13
        given = self.numbers(node, "axis", 1 if node.op_type == "CumSum" else len(node.input))
        axis = given[0] if given else 1 if is_old else _ONE_AXIS[node.op_type]
        if is_old:
            return self.along(node, range(axis % self.rank(node), self.rank(node)))
        return self.along(
            node, [axis], keeps=not node.op_type.startswith("Arg") or attributes_of(node).get("keepdims", 1)
        )

    def _from_axis(self, node: onnx.NodeProto) -> int:
        rank = self.rank(node)
        self.along(node, range(attributes_of(node).get("axis", -1) % rank, rank))
        return self._elementwise(node)  # scales may have as many axes

    def _transpose(self, node: onnx.NodeProto) -> int:
        return list(attributes_of(node).get("perm", range(self.rank(node))[::-1])).index(self.only_first(node))

    def _concat(self, node: onnx.NodeProto) -> int:
        return self.along(node, [attributes_of(node)["axis"]], axis=self.aligned((name, 0) for name in node.input))

    def _slice(self, node: onnx.NodeProto) -> int:
        axis = self.only_first(node)
        starts = self.numbers(node, "starts", 1) or []
        axes = self.numbers(node, "axes", 3) or list(range(len(starts)))
        is_whole = self.shape(node.output[0])[axis] == self.shape(node.input[0])[axis]
        is_in_order = min(self.numbers(node, "steps", 4) or [1]) > 0
        return axis if is_whole and is_in_order else self.along(node, axes)

    def _pad(self, node: onnx.NodeProto) -> int:
        pads, axes = self.numbers(node, "pads", 1), self.numbers(node, "axes", 3) or range(self.rank(node))
        if pads is None or len(pads) != 2 * len(axes):
            raise _Unknown(node.op_type)
        return self.along(node, [axis for place, axis in enumerate(axes) if pads[place] or pads[place + len(axes)]])

    def _tile(self, node: onnx.NodeProto) -> int:
        return self.along(node, [axis for axis, times in enumerate(self.constant(node.input[1])) if times != 1])

    def _gather(self, node: onnx.NodeProto) -> int:
        data, indices = (self.axis(name) for name in node.input[:2])
        along = attributes_of(node).get("axis", 0) % self.rank(node)
        if data is None and indices is not None:
            return int(along + indices)
        if data is not None and indices is not None and data == along:
            raise _Mixed
        if data is None or indices is not None:
            raise _Unknown(node.op_type)
        more = len(self.shape(node.input[1])) - 1
        return self.along(node, [along], axis=data) + (more if data > along else 0)

    def _gather_elements(self, node: onnx.NodeProto) -> int:
        axis = self.aligned((name, 0) for name in node.input[:2])
        data, indices = (self.shape(name) for name in node.input[:2])
        if data[axis] != indices[axis]:  # the first of all rows are taken, not the first of each
            raise _Mixed
        return self.along(node, [attributes_of(node).get("axis", 0)], axis=axis)

    def _one_hot(self, node: onnx.NodeProto) -> int:
        axis, rank = self.only_first(node), len(self.shape(node.output[0]))
        return int(axis + (attributes_of(node).get("axis", -1) % rank <= axis))

    def _quantize(self, node: onnx.NodeProto) -> int:
        axis, shape = self.only_first(node), self.shape(node.input[1])
        if math.prod(shape) != 1 and axis == attributes_of(node).get("axis", 1) % self.rank(node):
            raise _Mixed
        return axis if len(shape) < 2 else self._elementwise(node)  # of blocks, which have all axes

    def _mat_mul(self, node: onnx.NodeProto) -> int:
        places = (0, 3) if node.op_type == "QLinearMatMul" else (0, 1)
        names = [node.input[place] for place in places]
        others = [name for place, name in enumerate(node.input) if name and place not in places]
        ranks, rank = [len(self.shape(name)) for name in names], len(self.shape(node.output[0]))
        if min(ranks) < 2 or any(self.axis(name) is not None for name in others):
            raise _Unknown(node.op_type)
        if self.axis(names[1]) is not None and any(math.prod(self.shape(name)) != 1 for name in others):
            raise _Unknown(node.op_type)  # a scale for each column
        for name, contracted, kept, other in ((names[0], -1, -2, names[1]), (names[1], -2, -1, names[0])):
            axis = self.axis(name)
            if axis is None or axis < len(self.shape(name)) - 2:
                continue
            if axis == len(self.shape(name)) + contracted or self.axis(other) is not None:
                raise _Mixed
            return rank + kept
        return self.aligned((name, rank - own) for name, own in zip(names, ranks, strict=True))

    def _gemm(self, node: onnx.NodeProto) -> int:
        if self.only_first(node) != (1 if attributes_of(node).get("transA", 0) else 0):
            raise _Mixed
        if (bias := input_of(node, 2)) and not self.is_uniform(bias, len(self.shape(bias)) - 2):
            raise _Mixed
        return 0

    def _einsum(self, node: onnx.NodeProto) -> int:
        equation = attributes_of(node)["equation"].replace(" ", "")
        if "." in equation or "->" not in equation:
            raise _Unknown(node.op_type)
        left, right = equation.split("->")
        terms = left.split(",")
        named = list(zip(terms, node.input, strict=True))
        labels = {term[axis] for term, name in named if (axis := self.axis(name)) is not None}
        if len(labels) != 1 or not labels <= set(right):
            raise _Mixed
        (label,) = labels
        if any(term.count(label) > 1 for term in terms):  # a diagonal
            raise _Mixed
        for term, name in named:
            if self.axis(name) is None and not self.is_uniform(name, term.find(label)):
                raise _Mixed
        return int(right.index(label))

    def _recurrent(self, node: onnx.NodeProto) -> list[int]:
        expected = {0: 1, 4: 0, 5: 1, 6: 1}
        for place, name in enumerate(node.input):
            axis = self.axis(name) if name else None
            if axis is not None and axis != expected.get(place):
                raise _Mixed
            if name and axis is None and place in expected and not self.is_uniform(name, expected[place]):
                raise _Unknown(node.op_type)
        if attributes_of(node).get("layout", 0) or self.axis(node.input[0]) is None:
            raise _Unknown(node.op_type)
        return [2, 1, 1]


_RULES: Mapping[str, Callable[[_Graph, onnx.NodeProto], Any]] = {
    **dict.fromkeys(_ELEMENTWISE, _Graph._elementwise),
    **dict.fromkeys(("CastLike", "Dropout", "Expand"), _Graph._of_first),  # other inputs say how
    **dict.fromkeys(("Flatten", "Reshape", "Squeeze", "Unsqueeze"), _Graph._reshape),
    **dict.fromkeys(_OF_SAMPLES, _Graph._of_samples),
    **dict.fromkeys(_ONE_AXIS, _Graph._one_axis),
    **dict.fromkeys((f"{kind}Normalization" for kind in ("Layer", "RMS", "SimplifiedLayer")), _Graph._from_axis),
    **dict.fromkeys(("GRU", "LSTM", "RNN"), _Graph._recurrent),
    "MeanVarianceNormalization": lambda graph, node: graph.along(node, attributes_of(node).get("axes", [0, 2, 3])),
    **dict.fromkeys(("Resize", "Upsample"), _Graph._resize),
    "Transpose": _Graph._transpose,
    "Concat": _Graph._concat,
    "Split": lambda graph, node: graph.along(node, [attributes_of(node).get("axis", 0)]),
    "Slice": _Graph._slice,
    "Pad": _Graph._pad,
    "Tile": _Graph._tile,
    "Gather": _Graph._gather,
    "GatherElements": _Graph._gather_elements,
    "OneHot": _Graph._one_hot,
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear"), _Graph._quantize),
    **dict.fromkeys(("MatMul", "MatMulInteger", "QLinearMatMul"), _Graph._mat_mul),
    "Gemm": _Graph._gemm,
    "Einsum": _Graph._einsum,
}
