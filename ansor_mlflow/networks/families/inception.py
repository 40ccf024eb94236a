"""Inception v3 ("Rethinking the Inception Architecture for Computer Vision", Szegedy et al., 2015), layer by layer as
torchvision has it (`torchvision/models/inception.py`, version 0.20), without the auxiliary head.

Dropout does nothing at inference and is left out. The graph ends in logits.
"""

from __future__ import annotations

from typing import NamedTuple

from ansor_mlflow.networks.graph import GraphBuilder, append_pooled_logits, image_classifier
from ansor_mlflow.networks.shapes import Shape


class _Features(NamedTuple):
    tensor: str
    """Name of a tensor (N, channels, H, W)."""
    channels: int


class _Layer(NamedTuple):
    """A convolution with batch norm and relu. Padding keeps the size of the image unless the layer is `valid`."""

    channels: int
    kernel: tuple[int, int] = (1, 1)
    stride: int = 1
    valid: bool = False


def _halving(channels: int) -> _Layer:
    return _Layer(channels, (3, 3), stride=2, valid=True)


def _append_inception(builder: GraphBuilder, input_shape: Shape) -> None:
    data = _Features(builder.input("data", input_shape), input_shape[1])
    data = _chain(builder, "stem0", data, _halving(32), _Layer(32, (3, 3), valid=True), _Layer(64, (3, 3)))
    data = _max_pool(builder, "stem0.pool", data)
    data = _chain(builder, "stem1", data, _Layer(80), _Layer(192, (3, 3), valid=True))
    data = _max_pool(builder, "stem1.pool", data)
    for index, pool_channels in enumerate((32, 64, 64)):
        data = _block_a(builder, f"a{index}", data, pool_channels)
    data = _block_b(builder, "b", data)
    for index, channels in enumerate((128, 160, 160, 192)):
        data = _block_c(builder, f"c{index}", data, channels)
    data = _block_d(builder, "d", data)
    for index in range(2):
        data = _block_e(builder, f"e{index}", data)
    append_pooled_logits(builder, data.tensor, channels=data.channels)


def _block_a(builder: GraphBuilder, name: str, data: _Features, pool_channels: int) -> _Features:
    """Figure 5 of the paper, with one 5×5 kernel kept."""
    branches = {
        "one": [_Layer(64)],
        "five": [_Layer(48), _Layer(64, (5, 5))],
        "three": [_Layer(64), _Layer(96, (3, 3)), _Layer(96, (3, 3))],
    }
    chains = _chains(builder, name, data, branches)
    return _concat(builder, name, *chains, _pool_chain(builder, f"{name}.pool", data, _Layer(pool_channels)))


def _block_b(builder: GraphBuilder, name: str, data: _Features) -> _Features:
    """Halves height and width, as in figure 10."""
    branches = {"three": [_halving(384)], "double": [_Layer(64), _Layer(96, (3, 3)), _halving(96)]}
    return _concat(builder, name, *_chains(builder, name, data, branches), _max_pool(builder, f"{name}.pool", data))


def _block_c(builder: GraphBuilder, name: str, data: _Features, channels: int) -> _Features:
    """Figure 6: 7×7 kernels as rows and columns."""
    row, column = _Layer(channels, (1, 7)), _Layer(channels, (7, 1))
    branches = {
        "one": [_Layer(192)],
        "seven": [_Layer(channels), row, _Layer(192, (7, 1))],
        "double": [_Layer(channels), column, row, column, _Layer(192, (1, 7))],
    }
    chains = _chains(builder, name, data, branches)
    return _concat(builder, name, *chains, _pool_chain(builder, f"{name}.pool", data, _Layer(192)))


def _block_d(builder: GraphBuilder, name: str, data: _Features) -> _Features:
    """Halves height and width."""
    seven = [_Layer(192), _Layer(192, (1, 7)), _Layer(192, (7, 1)), _halving(192)]
    chains = _chains(builder, name, data, {"three": [_Layer(192), _halving(320)], "seven": seven})
    return _concat(builder, name, *chains, _max_pool(builder, f"{name}.pool", data))


def _block_e(builder: GraphBuilder, name: str, data: _Features) -> _Features:
    """Figure 7: rows and columns side by side."""
    branches = {"three": [_Layer(384)], "double": [_Layer(448), _Layer(384, (3, 3))]}
    wide = _chains(builder, name, data, branches)
    one = _chain(builder, f"{name}.one", data, _Layer(320))
    sides = {"row": [_Layer(384, (1, 3))], "column": [_Layer(384, (3, 1))]}
    chains = [chain for branch in wide for chain in _chains(builder, branch.tensor, branch, sides)]
    return _concat(builder, name, one, *chains, _pool_chain(builder, f"{name}.pool", data, _Layer(192)))


def _chains(builder: GraphBuilder, name: str, data: _Features, branches: dict[str, list[_Layer]]) -> list[_Features]:
    return [_chain(builder, f"{name}.{branch}", data, *layers) for branch, layers in branches.items()]


def _chain(builder: GraphBuilder, name: str, data: _Features, *layers: _Layer) -> _Features:
    tensor, in_channels = data
    for index, (channels, kernel, stride, valid) in enumerate(layers):
        padding = 0 if valid else (kernel[0] // 2, kernel[1] // 2)
        shape = (channels, in_channels, *kernel)
        tensor = builder.conv(f"{name}.conv{index}", tensor, shape, stride=stride, padding=padding)
        tensor = builder.batch_norm(f"{name}.bn{index}", tensor, channels, gain=1)
        tensor = builder.relu(f"{name}.relu{index}", tensor)
        in_channels = channels
    return _Features(tensor, in_channels)


def _pool_chain(builder: GraphBuilder, name: str, data: _Features, layer: _Layer) -> _Features:
    """Means over 3×3 pixels, where those beyond the edge count as zeros, and a convolution."""
    mean = builder.pool("AveragePool", name, data.tensor, (3, 3), padding=1, count_include_pad=1)
    return _chain(builder, name, data._replace(tensor=mean), layer)


def _max_pool(builder: GraphBuilder, name: str, data: _Features) -> _Features:
    return data._replace(tensor=builder.pool("MaxPool", name, data.tensor, (3, 3), stride=2))


def _concat(builder: GraphBuilder, name: str, *parts: _Features) -> _Features:
    tensor = builder.node("Concat", name, *(part.tensor for part in parts), axis=1)
    return _Features(tensor, sum(part.channels for part in parts))


NETWORKS = {"inception_v3": image_classifier("inception_v3", _append_inception, image=(3, 299, 299), min_size=75)}
