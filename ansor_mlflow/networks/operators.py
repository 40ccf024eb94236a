"""Single operators by name and sizes, such as `conv2d:1,7,7,512,512,3,3,1,1`, and a residual block of ResNet.

Names of sizes: N batch, H W D image, CI CO channels in and out, KH KW KD kernel; M N K rows, columns and the axis that
is summed over; B matrices of a batch. `stride`, `padding` and `dilation` are one number, or one for each axis: `2x1`.
All tensors are float32.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import cast

import onnx

from ansor_mlflow.errors import UserInputError
from ansor_mlflow.networks.graph import BuiltinNetwork, GraphBuilder
from ansor_mlflow.networks.shapes import Shape

_MAX_WEIGHT_BYTES = 2**31 - 1
"""Limit of a protobuf message, which an ONNX model is."""


@dataclass(frozen=True)
class _Spec:
    """An operator with its sizes, which are checked when they are read."""

    text: str
    given: Mapping[str, str]
    """Sizes and options by name; an option without a value has an empty one."""

    def numbers(self, *names: str) -> Shape:
        """Positive sizes; an option that was not given is 1."""
        return tuple(self._number(name, self.given.get(name, "1")) for name in names)

    def per_axis(self, name: str, axes: Sequence[str], *, least: int = 1) -> Shape:
        """A number for each of `axes`."""
        text = self.given.get(name, "1")
        parts = text.split("x")
        if len(parts) not in (1, len(axes)):
            raise self.error(
                f"{name}={text} has {len(parts)} numbers; give one, or one for each of {', '.join(axes)}, such as "
                f"{'x'.join('1' * len(axes))}"
            )
        numbers = tuple(self._number(name, part, least) for part in parts)
        return numbers if len(numbers) == len(axes) else numbers * len(axes)

    def _number(self, name: str, text: str, least: int = 1) -> int:
        if not re.fullmatch("[0-9]{1,9}", text) or int(text) < least:
            raise self.error(f"{name}={text!r} must be a whole number from {least} to 999999999")
        return int(text)

    def check_weight(self, shape: Shape) -> None:
        """Refuses weights that no ONNX file can hold, before they are drawn."""
        if 4 * math.prod(shape) > _MAX_WEIGHT_BYTES:
            raise self.error(f"its weights {list(shape)} take more than 2 GiB, the limit of an ONNX message")

    def error(self, message: str) -> UserInputError:
        return UserInputError(f"network={self.text!r}: {message}")


@dataclass(frozen=True)
class _Operator:
    """The form of an operator's name, and what generates it."""

    numbers: str
    """Names of the numbers that follow the operator's name."""
    options: tuple[str, ...]
    """Names of the options that may follow the numbers; those that end in "=" take a value."""
    build: Callable[[_Spec, GraphBuilder], tuple[str, Shape]]
    """Appends the operator; returns its output and the output's shape."""


def is_operator(name: str) -> bool:
    """Whether a network's name is an operator's, with or without sizes, or looks like a misspelt one with sizes."""
    return name.partition(":")[0] in _OPERATORS or re.fullmatch(r"[\w-]+:\d[\w,=]*", name) is not None


def check_operator(name: str) -> None:
    """Checks an operator with its sizes and options; none of its weights are drawn."""

    class NoGraph:  # the sizes are checked where the graph is built
        def __getattr__(self, method: str) -> Callable[..., str]:
            return lambda *_, **__: method

    operator, spec = _parse(name)
    operator.build(spec, cast("GraphBuilder", NoGraph()))


def build_operator(
    name: str, *, batch_size: int, input_shapes: Mapping[str, Sequence[int]], seed: int
) -> onnx.ModelProto:
    """Generates a network of one operator in a form of `OPERATORS`, whose name has all sizes."""
    operator, spec = _parse(name)
    if batch_size != 1 or input_shapes:
        raise spec.error("it has its sizes in its name; change them there, and leave out batch_size and input_shapes")
    builder = GraphBuilder(seed)
    output, shape = operator.build(spec, builder)
    return builder.build(name, {output: shape})


def _parse(text: str) -> tuple[_Operator, _Spec]:
    name, _, rest = text.partition(":")
    if name not in _OPERATORS:
        near = difflib.get_close_matches(name.lower(), _OPERATORS, n=3)
        hint = f"perhaps you meant {', '.join(near)}" if near else f"known are {', '.join(_OPERATORS)}"
        raise UserInputError(f"network={text!r}: there is no operator {name!r}; {hint}")
    operator = _OPERATORS[name]
    words = rest.split(",") if rest else []
    numbers = list(takewhile(lambda word: not word[:1].isalpha(), words))
    names = operator.numbers.split(",")
    if len(numbers) != len(names):
        verb = "was" if len(numbers) == 1 else "were"
        raise UserInputError(
            f"network={text!r}: {name} takes {len(names)} numbers, {len(numbers)} {verb} given; write {OPERATORS[name]}"
        )
    given = dict(zip(names, numbers, strict=True))
    for option in words[len(numbers) :]:
        key, equals, value = option.partition("=")
        if f"{key}{equals}" not in operator.options:
            known = f"{name} takes {', '.join(operator.options)}" if operator.options else f"{name} takes none"
            raise UserInputError(f"network={text!r}: unknown option {option!r}; {known}")
        if key in given:
            raise UserInputError(f"network={text!r}: option {key} was given twice; leave one of them out")
        given[key] = value
    return operator, _Spec(text, given)


def _conv(spec: _Spec, builder: GraphBuilder) -> tuple[str, Shape]:
    """A convolution over as many axes as the image has. Weights: (CO, CI / groups, kernel)."""
    axes = [axis for axis in "DHW" if axis in spec.given]
    batch, out_channels, in_channels, groups = spec.numbers("N", "CO", "CI", "groups")
    image, kernel = spec.numbers(*axes), spec.numbers(*(f"K{axis}" for axis in axes))
    stride, dilation = spec.per_axis("stride", axes), spec.per_axis("dilation", axes)
    padding = spec.per_axis("padding", axes, least=0)
    if in_channels % groups or out_channels % groups:
        raise spec.error(f"CI={in_channels} and CO={out_channels} must be multiples of groups={groups}")
    out_image = tuple(
        _out_size(spec, *along) for along in zip(axes, image, kernel, stride, padding, dilation, strict=True)
    )
    weights = (out_channels, in_channels // groups, *kernel)
    spec.check_weight(weights)
    data = builder.input("data", (batch, in_channels, *image))
    axes_options = {"stride": stride, "padding": padding, "dilation": dilation}
    output = builder.conv("conv", data, weights, groups=groups, bias="bias" in spec.given, **axes_options)
    return _with_relu(spec, builder, output), (batch, out_channels, *out_image)


def _out_size(spec: _Spec, axis: str, size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """Size of a convolution's output along an axis (operator Conv of ONNX, version 11)."""
    span = dilation * (kernel - 1) + 1
    padded = size + 2 * padding
    if span > padded:
        raise spec.error(
            f"the kernel spans {span} along {axis}, but the padded image only {padded}, so the output would be empty; "
            "give a smaller kernel or more padding"
        )
    return (padded - span) // stride + 1


def _depthwise_conv(spec: _Spec, builder: GraphBuilder) -> tuple[str, Shape]:
    (channels,) = spec.numbers("C")
    same = dict.fromkeys(("CI", "CO", "groups"), str(channels))
    return _conv(replace(spec, given={**spec.given, **same}), builder)


def _dense(spec: _Spec, builder: GraphBuilder) -> tuple[str, Shape]:
    """The product data · weightᵀ. Data: (M, K), weights: (N, K), bias: (N)."""
    rows, units, in_units = spec.numbers("M", "N", "K")
    spec.check_weight((units, in_units))
    data = builder.input("data", (rows, in_units))
    if "bias" in spec.given:
        output = builder.dense("dense", data, units=units, in_units=in_units)
    else:
        output = builder.node("Gemm", "dense", data, builder.he_normal("dense.weight", (units, in_units)), transB=1)
    return _with_relu(spec, builder, output), (rows, units)


def _batch_matmul(spec: _Spec, builder: GraphBuilder) -> tuple[str, Shape]:
    batch, rows, columns, inner = spec.numbers("B", "M", "N", "K")
    a, b = builder.input("a", (batch, rows, inner)), builder.input("b", (batch, inner, columns))
    return builder.node("MatMul", "batch_matmul", a, b), (batch, rows, columns)


def _softmax(spec: _Spec, builder: GraphBuilder) -> tuple[str, Shape]:
    shape = spec.numbers("M", "N")
    return builder.node("Softmax", "softmax", builder.input("data", shape), axis=-1), shape


def _with_relu(spec: _Spec, builder: GraphBuilder, output: str) -> str:
    return builder.relu("relu", output) if "relu" in spec.given else output


_OPERATORS = {
    "conv2d": _Operator("N,H,W,CO,CI,KH,KW,stride,padding", ("dilation=", "groups=", "bias", "relu"), _conv),
    "depthwise_conv2d": _Operator("N,H,W,C,KH,KW,stride,padding", ("dilation=", "bias", "relu"), _depthwise_conv),
    "conv3d": _Operator("N,D,H,W,CO,CI,KD,KH,KW,stride,padding", ("dilation=", "groups=", "bias", "relu"), _conv),
    "dense": _Operator("M,N,K", ("bias", "relu"), _dense),
    "batch_matmul": _Operator("B,M,N,K", (), _batch_matmul),
    "softmax": _Operator("M,N", (), _softmax),
}


OPERATORS: dict[str, str] = {
    name: f"{name}:{operator.numbers}"
    + "".join(f"[,{option}…]" if option.endswith("=") else f"[,{option}]" for option in operator.options)
    for name, operator in _OPERATORS.items()
}
"""Syntax of each operator, in brackets what may be left out."""
_BLOCK_CHANNELS = 64


def _build_block(input_shapes: dict[str, Shape], seed: int) -> onnx.ModelProto:
    """The first block of ResNet-18 (He et al., 2015, figure 2): float32 (N, 64, H, W) -> (N, 64, H, W)."""
    shape, channels = input_shapes["data"], _BLOCK_CHANNELS
    if shape[1] != channels:
        raise UserInputError(
            f"input_shapes gives 'data' of resnet-block {list(shape)}; it must be [N, {channels}, H, W]"
        )
    builder = GraphBuilder(seed)
    data = builder.input("data", shape)
    branch = builder.conv("conv0", data, (channels, channels, 3, 3), padding=1)
    branch = builder.relu("relu0", builder.batch_norm("bn0", branch, channels))
    branch = builder.conv("conv1", branch, (channels, channels, 3, 3), padding=1)
    branch = builder.batch_norm("bn1", branch, channels)
    output = builder.relu("relu1", builder.node("Add", "add", branch, data))
    return builder.build("resnet-block", {output: shape})


NETWORKS = {
    "resnet-block": BuiltinNetwork(
        default_shapes=lambda batch_size: {"data": (batch_size, _BLOCK_CHANNELS, 56, 56)}, build=_build_block
    )
}
