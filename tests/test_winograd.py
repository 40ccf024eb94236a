"""Winograd's convolutions: which layers have them, and that they are right and as exact as stated."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from helpers.algorithms import ERRORS, MORE_TAPS, conv, conv3d, layer_of, line, output_error
from helpers.programs import compiled_examples
from hypothesis import given
from hypothesis import strategies as st

from ansor_mlflow.codegen import PREFETCH, tir_pipeline
from ansor_mlflow.device import available_cpus
from ansor_mlflow.device.targets import resolve_target
from ansor_mlflow.errors import UserInputError
from ansor_mlflow.lowering.algorithms import NoAlgorithmError, find_algorithms
from ansor_mlflow.lowering.algorithms.winograd import Filter, error_of, transforms
from ansor_mlflow.lowering.lower import lower
from ansor_mlflow.model.library import compile_tuned
from ansor_mlflow.networks.graph import GraphBuilder
from ansor_mlflow.networks.load import load_network
from ansor_mlflow.settings import LoweringSettings
from ansor_mlflow.sketches.sketch import find_programs

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.target import Target


def run(mod: IRModule, arrays: list[np.ndarray], target: Target, pipeline: str) -> np.ndarray:
    import tvm
    from tvm.driver import build

    tensors = [tvm.runtime.tensor(array) for array in arrays]
    build(mod, target=target, pipeline=pipeline)["main"](*tensors)
    return np.asarray(tensors[-1].numpy())


def arguments(mod: IRModule, seed: int = 0) -> list[np.ndarray]:
    from tvm.s_tir.meta_schedule.arg_info import ArgInfo

    rng = np.random.default_rng(seed)
    return [
        rng.normal(size=[int(dim) for dim in info.shape]).astype("float32")
        for info in ArgInfo.from_prim_func(mod["main"])
    ]


@pytest.mark.parametrize(("outputs", "num_taps"), [(2, 3), (4, 3), (2, 5), (4, 5), (2, 7), (1, 1)])
def test_the_transforms_filter_exactly(outputs: int, num_taps: int) -> None:
    found = transforms(outputs, num_taps)
    taps = [Fraction(n) for n in (3, -5, 7, 2, -9, 4, 8)[:num_taps]]
    data = [Fraction(n * n - 3 * n, 4) for n in range(outputs + num_taps - 1)]
    points = [
        sum(a * b for a, b in zip(row, taps, strict=True)) * sum(a * b for a, b in zip(other, data, strict=True))
        for row, other in zip(found.weights, found.data, strict=True)
    ]
    result = [sum(a * b for a, b in zip(row, points, strict=True)) for row in found.output]
    assert result == [sum(tap * data[place + k] for k, tap in enumerate(taps)) for place in range(outputs)]


@pytest.mark.parametrize(
    ("network", "reason"),
    [
        (conv(9, 9, 16, 16, "1,1,1,0"), "its kernel is 1x1, not of 3, 5 or 7 taps"),
        (conv(9, 9, 16, 16, "4,4,1,3"), "its kernel is 4x4, not of 3, 5 or 7 taps"),
        (conv(9, 9, 16, 6, "5,5,1,2"), "its channels are no multiple of 4"),
        (conv(9, 9, 16, 16, "3,3,2,1"), "its stride or dilation is not 1"),
        (conv(9, 9, 16, 16, "3,3,1,2,dilation=2"), "its stride or dilation is not 1"),
        (conv(9, 9, 16, 16, "3,3,1,1,groups=2"), "it is a convolution in groups"),
        ("depthwise_conv2d:1,9,9,16,3,3,1,1", "it is a convolution in groups"),
        (conv3d("4,7,7", 16, 4, "3,1,1,1,1"), "its kernel is 1x1, not of 3, 5 or 7 taps"),
        (line(9, 16, 16, 3, stride=2), "its stride or dilation is not 1"),
        (conv3d("4,7,7", 16, 4, "3,3,3,2,1"), "its stride or dilation is not 1"),
        (conv3d("4,7,7", 16, 4, "3,3,3,1,1,groups=2"), "it is a convolution in groups"),
        ("dense:3,16,16", "it is no convolution with channels last"),
        ("softmax:4,16", "it is no convolution"),
    ],
)
def test_other_layers_have_no_other_way(network: str, reason: str, host_target: Target) -> None:
    with pytest.raises(NoAlgorithmError, match=reason):
        find_algorithms(layer_of(network, host_target).mod)


@pytest.mark.parametrize(
    ("lowering", "reason"),
    [({"dtype": "float16"}, "it is not in float32"), ({"layout": "NCHW"}, "it is no convolution|its kernel")],
)
def test_other_types_and_layouts_have_no_other_way(lowering: dict[str, str], reason: str, host_target: Target) -> None:
    with pytest.raises(NoAlgorithmError, match=reason):
        find_algorithms(layer_of(conv(9, 9, 16, 16), host_target, **lowering).mod)


def test_weights_that_are_no_constants_have_no_other_way(host_target: Target) -> None:
    builder = GraphBuilder(seed=0)
    data, weights = builder.input("data", (1, 16, 9, 9)), builder.input("weights", (16, 16, 3, 3))
    output = builder.node("Conv", "output", data, weights, pads=[1, 1, 1, 1])
    lowered = lower(builder.build("conv", {output: (1, 16, 9, 9)}), host_target)
    task = max(lowered.tasks, key=lambda task: task.info.flops)
    with pytest.raises(NoAlgorithmError, match="its weights are no constants"):
        find_algorithms(task.mod)


def test_what_comes_before_a_convolution_is_no_padding(host_target: Target) -> None:
    """An element that is computed is another one than that which is read."""
    from tvm.script import from_source

    mod = layer_of(conv(9, 9, 16, 16), host_target).mod
    text = mod.script()
    assert find_algorithms(from_source(text))
    first, last = text.index("T.if_then_else("), text.index("T.float32(0.0))") + len("T.float32(0.0))")
    other = from_source(f"{text[:first]}T.max({text[first:last]}, T.float32(0.0)){text[last:]}")
    with pytest.raises(NoAlgorithmError, match="its input is not padded with zeros alone"):
        find_algorithms(other)


def test_a_network_without_such_a_layer_cannot_be_forced(host_target: Target) -> None:
    network = load_network("dense:3,16,16")
    with pytest.raises(UserInputError, match=r"algorithm=winograd, but no layer can .* no convolution with"):
        lower(network.model, host_target, LoweringSettings(algorithm="winograd"))


LINES = st.builds(
    # each element of a line meets others so far away
    lambda groups, length, filters, quarters, batch, taps, dilation, padding: line(
        *(length, filters if groups == 1 else 16 * groups, 4 * quarters * groups, taps, batch),
        dilation=dilation,
        padding=min(padding, length // 2),
        groups=groups,
    ),
    st.sampled_from([1, 1, 2]),
    *(st.integers(1, most) for most in (70, 33, 6, 2)),
    *(st.sampled_from(each) for each in ([3, 5, 7], [1, 2, 3, 4, 7, 16], [0, 0, 1, 5])),
)
KERNELS = st.builds(
    lambda batch, height, width, filters, quarters, kernel: conv(
        max(height, 3), max(width, 3), filters, 4 * quarters, f"{kernel},1,2,bias,relu", batch
    ),
    *(st.integers(1, most) for most in (2, 17, 17, 33, 6)),
    st.sampled_from(["5,5", "1,3", "3,1", "5,1", "1,7", "7,1", "3,5", "7,7"]),
)
GROUPS = st.builds(
    lambda size, groups, filters, quarters, taps: conv(
        *(size, size + 1, 16 * filters * groups, 4 * quarters * groups),
        f"{taps},{taps},1,{taps // 2},bias,relu,groups={groups}",
    ),
    *(st.integers(3, 17), st.integers(2, 3), st.integers(1, 3), st.integers(1, 5), st.sampled_from([3, 5])),
)
IMAGES = st.builds(
    # over less than 3 × 3 with its padding the kernel is none of 3 × 3
    lambda batch, height, width, filters, channels, padding: conv(
        max(height, 3 - padding), max(width, 3 - padding), filters, channels, f"3,3,1,{padding},bias,relu", batch
    ),
    *(st.integers(1, most) for most in (2, 17, 17, 33, 33)),
    st.integers(0, 2),
)
VOLUMES = st.builds(
    # slices are summed with zeros before and after them, and with gaps between them
    lambda batch, depth, size, filters, channels, face, taps, padding, stride, dilation: conv3d(
        f"{depth + 4},{size},{size + 2}",
        filters,
        channels * (1 if face == "3,3" else 4),
        f"{taps},{face},{stride},{padding},bias,relu,dilation={dilation}",
        batch,
    ),
    *(st.integers(1, 2), st.integers(1, 5), st.integers(2, 9), st.integers(1, 17), st.integers(1, 17)),
    st.sampled_from(["3,3", "3,3", "1,3", "3,1"]),
    *(st.integers(1, 3), st.sampled_from(["1", "0x1x1", "1x1x0", "2x1x1"])),
    *(st.sampled_from(["1", "2x1x1"]), st.sampled_from(["1", "2x1x1"])),
)


@pytest.mark.system
@pytest.mark.parametrize(
    "networks",
    [IMAGES, VOLUMES, LINES, KERNELS, GROUPS],
    ids=["images", "volumes", "lines", "other kernels", "groups"],
)
@given(data=st.data(), number=st.integers(0, 1), index=st.integers(0, 2**16))
@compiled_examples
def test_every_program_is_right(
    host_target: Target, networks: st.SearchStrategy[Any], data: st.DataObject, number: int, index: int
) -> None:
    """Against the direct algorithm in float32, whose own error is a part of what is allowed."""
    network = data.draw(networks)
    task = layer_of(network, host_target)
    other = find_algorithms(task.mod)[-number]
    programs = find_programs(other.mod, host_target)
    assert programs is not None
    program = programs.program(programs.tiles[index % len(programs.tiles)])
    assert program is not None
    arrays = arguments(task.mod)
    expected = run(task.mod, arrays, host_target, "default")
    plain = [*arrays]
    plain[other.weights] = other.transform(arrays[other.weights])
    actual = run_packed(other.mod, program.mod, plain, host_target)
    assert abs(actual - expected).max() <= error_allowed(other.filter) * abs(expected).max() + 1e-6


def error_allowed(of: Filter) -> float:
    return ERRORS[max(of.outputs)] * (1 if max(of.taps) == 3 else MORE_TAPS)


@pytest.mark.parametrize("number", [0, 1])
def test_jobs_are_whole_groups_or_parts_of_one(number: int, host_target: Target) -> None:
    """Others could not be scheduled: they would read other channels each."""
    other = find_algorithms(layer_of(conv(9, 9, 96, 32, "3,3,1,1,groups=2"), host_target).mod)[number]
    programs = find_programs(other.mod, host_target)
    assert programs is not None
    assert {tile.channel_jobs for tile in programs.tiles} >= {1, 2}
    assert all(programs.program(tile) is not None for tile in programs.tiles)


def run_packed(mod: IRModule, scheduled: IRModule, arrays: list[np.ndarray], target: Target) -> np.ndarray:
    """What a scheduled function gives, which packs its weights itself."""
    assert [tuple(map(int, p.shape)) for p in mod["main"].params] == [
        tuple(map(int, p.shape)) for p in scheduled["main"].params
    ]
    return run(scheduled, arrays, target, tir_pipeline(target))


@pytest.mark.parametrize(("size", "channels", "is_fetched"), [(56, 64, False), (7, 64, True), (28, 256, True)])
def test_weights_are_fetched_ahead_where_a_panel_waits_for_memory(
    size: int, channels: int, is_fetched: bool, host_target: Target
) -> None:
    """A panel that is read for few tiles, or one of many."""
    *_, other = find_algorithms(layer_of(conv(size, size, channels, channels), host_target).mod)
    programs = find_programs(other.mod, host_target)
    assert programs is not None
    tile = next(tile for tile in programs.tiles if tile.tile_rows == max(other.tile_rows for other in programs.tiles))
    program = programs.program(tile)
    assert program is not None
    assert (PREFETCH in program.mod.script()) is is_fetched


@pytest.mark.parametrize(("height", "width"), [(268, 24), (92, 184)])
def test_an_image_may_have_a_prime_number_of_rows_of_tiles(height: int, width: int) -> None:
    """Tiles in registers divide those of a job: conditions for a narrower last one took four times as long."""
    target = resolve_target("auto", 1)
    *_, other = find_algorithms(layer_of(conv(height, width, 16, 16), target).mod)
    programs = find_programs(other.mod, target)
    assert programs is not None
    assert all(tile.tile_rows * width // other.filter.outputs[1] % tile.tiles == 0 for tile in programs.tiles)


def residual_block() -> onnx.ModelProto:
    builder = GraphBuilder(seed=0)
    data = builder.input("data", (2, 24, 13, 10))
    first = builder.relu("relu1", builder.conv("conv1", data, (24, 24, 3, 3), padding=1, bias=True))
    second = builder.conv("conv2", first, (24, 24, 3, 3), padding=1, bias=True)
    output = builder.relu("output", builder.node("Add", "sum", second, data))
    return builder.build("residual", {output: (2, 24, 13, 10)})


@pytest.mark.parametrize(
    "target",
    ["auto", *(pytest.param(spec, marks=pytest.mark.nightly) for spec in ("llvm -mcpu=x86-64", "llvm -mcpu=haswell"))],
)
def test_a_residual_block_is_right_on_every_machine(target: str, tmp_path: Path) -> None:
    resolved = resolve_target(target, available_cpus())
    lowered = lower(residual_block(), resolved, LoweringSettings(algorithm="winograd"))
    coverage = compile_tuned(lowered, resolved, None, tmp_path / "model.so")
    algorithms = [task.algorithm for task in coverage.missing if "conv2d" in task.name]
    assert len(algorithms) == 2
    assert all(algorithm.startswith("winograd") for algorithm in algorithms)
    assert not coverage.unscheduled
    assert output_error(tmp_path / "model.so", residual_block()) <= ERRORS[4]


def test_padding_may_differ_on_every_side(host_target: Target, tmp_path: Path) -> None:
    builder = GraphBuilder(seed=0)
    weights = builder.he_normal("weights", (24, 16, 3, 3))
    output = builder.node("Conv", "output", builder.input("data", (1, 16, 11, 14)), weights, pads=[0, 2, 1, 0])
    model = builder.build("uneven", {output: (1, 24, 10, 14)})
    lowered = lower(model, host_target, LoweringSettings(algorithm="winograd"))
    coverage = compile_tuned(lowered, host_target, None, tmp_path / "model.so")
    assert coverage.has_other_algorithms
    assert output_error(tmp_path / "model.so", model) <= ERRORS[4]


@pytest.mark.parametrize("channels", [16, 128, 512])
@pytest.mark.parametrize("taps", [(3, 3), (5, 5), (7, 7), (3, 1), (1, 5), (7, 1)])
def test_the_error_of_a_layer_is_as_stated(channels: int, taps: tuple[int, int]) -> None:
    weights = np.random.default_rng(channels).normal(size=(*taps, channels, channels)).astype("float32")
    for each in Filter.all_of(taps):
        assert 1e-8 < error_of(weights, each) <= error_allowed(each)
        assert error_of(np.zeros_like(weights), each) == 0
