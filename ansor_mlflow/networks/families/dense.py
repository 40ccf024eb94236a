"""Networks of dense layers: the multilayer perceptron and BERT."""

from __future__ import annotations

import math

import numpy as np
import onnx

from ansor_mlflow.errors import UserInputError
from ansor_mlflow.networks.graph import BuiltinNetwork, GraphBuilder, image_classifier
from ansor_mlflow.networks.shapes import Shape

MLP_UNITS = (128, 64)
NUM_DIGITS = 10


def _append_mlp(builder: GraphBuilder, input_shape: Shape) -> None:
    """The first layer takes all pixels there are, 784 of 28×28."""
    data = builder.node("Flatten", "flatten", builder.input("data", input_shape), axis=1)
    in_units = math.prod(input_shape[1:])
    for index, units in enumerate(MLP_UNITS):
        data = builder.relu(f"relu{index}", builder.dense(f"dense{index}", data, units=units, in_units=in_units))
        in_units = units
    builder.dense("logits", data, units=NUM_DIGITS, in_units=in_units)


NUM_LAYERS = 2
HIDDEN_UNITS = 128
NUM_HEADS = 2
HEAD_UNITS = HIDDEN_UNITS // NUM_HEADS
FEED_FORWARD_UNITS = 512
VOCABULARY_SIZE = 30522
NUM_TOKEN_TYPES = 2
MAX_SEQUENCE = 512
DEFAULT_SEQUENCE = 128
INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def _build(input_shapes: dict[str, Shape], seed: int) -> onnx.ModelProto:
    """Inputs are int64 (N, S); outputs are "last_hidden_state", float32 (N, S, 128), and "pooled", float32 (N, 128)."""
    if len(set(input_shapes.values())) > 1 or input_shapes[INPUTS[0]][1] > MAX_SEQUENCE:
        shapes = ", ".join(f"{name} {list(shape)}" for name, shape in input_shapes.items())
        raise UserInputError(
            f"the inputs of bert-tiny would be {shapes}; all three must have one shape [N, S] with S at most "
            f"{MAX_SEQUENCE}, so give all of them in input_shapes"
        )
    shape = input_shapes[INPUTS[0]]
    builder = GraphBuilder(seed)
    input_ids, attention_mask, token_type_ids = (builder.input(name, shape, "int64") for name in INPUTS)
    data = _embeddings(builder, input_ids, token_type_ids, shape)
    bias = _mask_bias(builder, attention_mask)
    for layer in range(NUM_LAYERS):
        data = _encoder_layer(builder, f"layer{layer}", data, bias, shape)
    hidden = _reshape(builder, "last_hidden_state", data, (*shape, HIDDEN_UNITS))
    first = builder.node("Gather", "pooler.first", hidden, builder.constant("pooler.index", np.array(0)), axis=1)
    builder.node("Tanh", "pooled", builder.dense("pooler.dense", first, units=HIDDEN_UNITS, in_units=HIDDEN_UNITS))
    return builder.build("bert-tiny", {hidden: (*shape, HIDDEN_UNITS), "pooled": (shape[0], HIDDEN_UNITS)})


def _embeddings(builder: GraphBuilder, input_ids: str, token_type_ids: str, shape: Shape) -> str:
    """Sum of the embeddings of words, token types and positions, normalised: (N, S) -> (N·S, 128)."""

    def table(name: str, rows: int) -> str:
        return builder.he_normal(f"embeddings.{name}.table", (rows, HIDDEN_UNITS))

    words = builder.node("Gather", "embeddings.words", table("words", VOCABULARY_SIZE), input_ids)
    types = builder.node("Gather", "embeddings.types", table("types", NUM_TOKEN_TYPES), token_type_ids)
    position_ids = builder.constant("embeddings.position_ids", np.arange(shape[1]))
    positions = builder.node("Gather", "embeddings.positions", table("positions", MAX_SEQUENCE), position_ids)
    data = builder.node("Add", "embeddings.add0", words, types)
    data = builder.node("Add", "embeddings.add1", data, positions)
    return _layer_norm(builder, "embeddings.norm", _reshape(builder, "embeddings.flat", data, (-1, HIDDEN_UNITS)))


def _mask_bias(builder: GraphBuilder, attention_mask: str) -> str:
    """The bias of attention: 0 where the mask is 1 and −10000 where it is 0: int64 (N, S) -> float32 (N, 1, 1, S)."""
    mask = builder.node("Cast", "mask.float", attention_mask, to=onnx.TensorProto.FLOAT)
    hidden = builder.node("Sub", "mask.inverted", builder.weight("mask.one", np.ones(())), mask)
    bias = builder.node("Mul", "mask.bias", hidden, builder.weight("mask.scale", np.full((), -10000)))
    return builder.node("Unsqueeze", "mask.unsqueezed", bias, builder.constant("mask.axes", np.array([1, 2])))


def _encoder_layer(builder: GraphBuilder, name: str, data: str, bias: str, shape: Shape) -> str:
    """Attention and a feed-forward network, each added to its input and normalised; data is (N·S, 128)."""
    attended = _attention(builder, f"{name}.attention", data, bias, shape)
    attended = builder.dense(f"{name}.output", attended, units=HIDDEN_UNITS, in_units=HIDDEN_UNITS)
    data = _layer_norm(builder, f"{name}.norm0", builder.node("Add", f"{name}.add0", attended, data))
    wide = builder.dense(f"{name}.wide", data, units=FEED_FORWARD_UNITS, in_units=HIDDEN_UNITS)
    wide = _gelu(builder, f"{name}.gelu", wide)
    narrow = builder.dense(f"{name}.narrow", wide, units=HIDDEN_UNITS, in_units=FEED_FORWARD_UNITS)
    return _layer_norm(builder, f"{name}.norm1", builder.node("Add", f"{name}.add1", narrow, data))


def _attention(builder: GraphBuilder, name: str, data: str, bias: str, shape: Shape) -> str:
    """softmax(Q Kᵀ / √64 + bias) V for each head ("Attention Is All You Need", Vaswani et al., 2017, equation 1)."""

    def heads(role: str, axes: list[int]) -> str:
        """Projects and splits into heads: (N·S, 128) -> (N, S, heads, 64), transposed to `axes`."""
        projected = builder.dense(f"{name}.{role}.dense", data, units=HIDDEN_UNITS, in_units=HIDDEN_UNITS)
        split = _reshape(builder, f"{name}.{role}.split", projected, (*shape, NUM_HEADS, HEAD_UNITS))
        return builder.node("Transpose", f"{name}.{role}", split, perm=axes)

    query, key, value = heads("query", [0, 2, 1, 3]), heads("key", [0, 2, 3, 1]), heads("value", [0, 2, 1, 3])
    scores = builder.node("MatMul", f"{name}.scores", query, key)
    scale = builder.weight(f"{name}.scale", np.array(1 / math.sqrt(HEAD_UNITS)))
    scaled = builder.node("Mul", f"{name}.scaled", scores, scale)
    weights = builder.node("Softmax", f"{name}.weights", builder.node("Add", f"{name}.masked", scaled, bias), axis=-1)
    mixed = builder.node("MatMul", f"{name}.mixed", weights, value)
    joined = builder.node("Transpose", f"{name}.joined", mixed, perm=[0, 2, 1, 3])
    return _reshape(builder, f"{name}.flat", joined, (-1, HIDDEN_UNITS))


def _gelu(builder: GraphBuilder, name: str, data: str) -> str:
    """Gelu: x (1 + erf(x / √2)) / 2 ("Gaussian Error Linear Units", Hendrycks and Gimpel, 2016)."""

    def scale(name: str, data: str, factor: float) -> str:
        return builder.node("Mul", name, data, builder.weight(f"{name}.factor", np.array(factor)))

    erf = builder.node("Erf", f"{name}.erf", scale(f"{name}.scaled", data, math.sqrt(0.5)))
    above = builder.node("Add", f"{name}.above", erf, builder.weight(f"{name}.one", np.ones(())))
    return scale(name, builder.node("Mul", f"{name}.double", data, above), 0.5)


def _reshape(builder: GraphBuilder, name: str, data: str, shape: Shape) -> str:
    return builder.node("Reshape", name, data, builder.constant(f"{name}.shape", np.array(shape)))


def _layer_norm(builder: GraphBuilder, name: str, data: str) -> str:
    """Layer normalisation over the last axis, with the scale and bias that training starts with."""
    scale = builder.weight(f"{name}.scale", np.ones(HIDDEN_UNITS))
    bias = builder.weight(f"{name}.bias", np.zeros(HIDDEN_UNITS))
    return builder.node("LayerNormalization", name, data, scale, bias, axis=-1, epsilon=1e-12)


NETWORKS = {
    "mlp": image_classifier("mlp", _append_mlp, image=(1, 28, 28), min_size=1, num_classes=NUM_DIGITS),
    "bert-tiny": BuiltinNetwork(
        default_shapes=lambda batch_size: dict.fromkeys(INPUTS, (batch_size, DEFAULT_SEQUENCE)), build=_build
    ),
}
