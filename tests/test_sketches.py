"""Sketches: which functions they fit, what is chosen without a trial, and that every program computes the right."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from helpers.lanes import every_second
from helpers.programs import TOLERANCE, assert_same, compiled_examples, program_of, programs_of
from hypothesis import given
from hypothesis import strategies as st

from ansor_mlflow.codegen import tir_pipeline
from ansor_mlflow.device import available_cpus, fingerprint
from ansor_mlflow.device.targets import resolve_target
from ansor_mlflow.lowering.lower import lower
from ansor_mlflow.lowering.network import TuningTask
from ansor_mlflow.measuring.checking import compare_outputs
from ansor_mlflow.measuring.compare import ReferenceSession
from ansor_mlflow.model.library import compile_tuned
from ansor_mlflow.model.loading import open_library
from ansor_mlflow.model.manifest import LibraryEntry, Manifest
from ansor_mlflow.networks.load import load_network
from ansor_mlflow.networks.onnx_file import write_onnx
from ansor_mlflow.settings import LoweringSettings
from ansor_mlflow.sketches.contraction import Contraction, find_contraction
from ansor_mlflow.sketches.estimate import Machine
from ansor_mlflow.sketches.register_tile import RegisterTiling
from ansor_mlflow.sketches.sketch import ANNOTATION, decision_text, find_programs
from ansor_mlflow.sketches.tile import RegisterTile, TiledAxes
from ansor_mlflow.tensors import random_inputs

if TYPE_CHECKING:
    from tvm import te
    from tvm.ir import IRModule
    from tvm.s_tir import Schedule
    from tvm.target import Target

OTHERS = ["llvm -mcpu=x86-64", "llvm -mcpu=haswell"]
"""Targets that any x86 of today can run."""


def tasks_of(network: str, target: Target) -> tuple[TuningTask, ...]:
    return lower(load_network(network).model, target).tasks


def conv_task(network: str, target: Target) -> TuningTask:
    return max(tasks_of(network, target), key=lambda task: task.info.flops)


def contraction_of(mod: IRModule) -> Contraction:
    found = find_contraction(mod)
    assert found is not None
    return found


def first_program(mod: IRModule, target: Target) -> Schedule:
    program = programs_of(mod, target).first()
    assert program is not None
    return program


def error_without_trials(network: str, target: Target, directory: Path) -> float:
    """The largest error of a network whose tasks run as their sketches choose, against ONNX Runtime's outputs."""
    loaded = load_network(network)
    lowered = lower(loaded.model, target)
    coverage = compile_tuned(lowered, target, None, directory / "model.so")
    assert not coverage.covered
    assert not coverage.unscheduled, "a sketch fits every task"
    write_onnx(loaded.model, directory / "network.onnx")
    inputs = random_inputs(loaded.inputs, seed=0)
    entry = LibraryEntry(
        path="model.so", fingerprint=fingerprint(target, available_cpus()), coverage=coverage.to_dict(), provenance={}
    )
    manifest = Manifest(network=loaded.name, inputs=loaded.inputs, outputs=loaded.outputs, libraries=(entry,), files={})
    outputs = open_library(directory / "model.so", manifest, entry).run(inputs)
    expected = ReferenceSession(directory / "network.onnx", num_threads=1).run(inputs)
    return compare_outputs(outputs, expected).max_rel_error


@pytest.mark.parametrize(
    ("target", "vector_bytes", "num_registers", "broadcasts"),
    [
        ("llvm -mcpu=x86-64", 16, 16, False),
        ("llvm -mcpu=haswell", 32, 16, False),
        ("llvm -mcpu=skylake-avx512", 64, 32, True),
        ("llvm -mcpu=neoverse-n1 -mtriple=aarch64-linux-gnu", 16, 32, True),
    ],
)
def test_vectors_follow_from_the_target(target: str, vector_bytes: int, num_registers: int, broadcasts: bool) -> None:
    machine = Machine.of(resolve_target(target, 2))
    assert (machine.vector_bytes, machine.num_registers, machine.num_threads) == (vector_bytes, num_registers, 2)
    assert machine.broadcasts_operands == broadcasts


def test_an_element_that_fills_a_vector_by_itself_serves_for_several() -> None:
    target = resolve_target("llvm -mcpu=haswell", 2)
    task = conv_task("conv2d:1,28,28,64,32,3,3,1,1", target)
    found = contraction_of(task.mod)
    first = RegisterTiling(task.mod, found, Machine.of(target)).tiles()[0]
    assert first.vectors > 1


@pytest.mark.parametrize(
    ("cpu", "is_wide"),
    [
        ("haswell", False),
        ("znver4", False),
        ("znver5", True),
        ("skylake-avx512", True),
        ("sapphirerapids", True),
    ],
)
def test_two_wide_units_wait_for_loads(cpu: str, is_wide: bool) -> None:
    """An element of the input that serves for one vector alone, or sums that do not fit beside padding, cost more."""
    target = resolve_target(f"llvm -mcpu={cpu}", 2)
    assert Machine.of(target).is_wide == is_wide
    if not is_wide:
        return
    for network, asks in (("conv2d:1,14,14,1024,256,1,1,1,0", False), ("conv2d:1,56,56,64,64,3,3,1,1", True)):
        programs = find_programs(conv_task(network, target).mod, target)
        assert programs is not None
        (first, *_) = programs.tiles
        assert isinstance(first, RegisterTile)
        assert first.vectors > 1
        has_room = first.vectors * first.columns * first.rows + first.vectors < 30
        assert has_room or first.pad_at == "job" or not asks


def test_weights_that_no_cache_holds_are_read_for_few_jobs() -> None:
    """A thread has four mebibytes of 2,048 channels of 1,024 terms, which each job over rows would read again."""
    target = resolve_target("llvm -mcpu=znver4", 2)
    task = conv_task("conv2d:1,14,14,2048,1024,1,1,2,0", target)
    tiling = RegisterTiling(task.mod, contraction_of(task.mod), Machine.of(target))
    first = tiling.tiles()[0]
    weights = first.lanes * first.vectors * first.channel_tiles * 1024 * 4
    rows = TiledAxes.of(contraction_of(task.mod)).num_spatial_jobs(first)
    assert rows == 1 or weights < 2 * 2**20


def test_a_convolution_is_a_sum_of_products(host_target: Target) -> None:
    task = conv_task("conv2d:1,14,14,32,16,3,3,1,1,bias,relu", host_target)
    found = contraction_of(task.mod)
    assert (found.spatial, found.reduction) == ((1, 14, 14, 32), (3, 3, 16))
    assert found.has_padding
    assert found.broadcast is not None
    assert found.shared is not None
    assert found.free_axes == (0, 1, 2)
    assert found.epilogue == ("T_add", "compute")


def test_a_softmax_is_no_sum_of_products_but_has_programs(host_target: Target) -> None:
    task = conv_task("softmax:8,64", host_target)
    assert find_contraction(task.mod) is None
    assert find_programs(task.mod, host_target) is not None


def test_no_sketch_is_for_gpus() -> None:
    task = conv_task("dense:8,16,16", resolve_target("llvm -mcpu=x86-64", 1))
    assert find_programs(task.mod, resolve_target("cuda -arch=sm_80", 1)) is None


@pytest.mark.parametrize(
    ("network", "are_enough"),
    [
        ("conv2d:1,28,28,64,32,3,3,1,1", True),
        ("conv2d:1,28,28,37,32,3,3,1,1", False),  # vectors of one element
        ("conv2d:1,28,28,64,64,3,3,1,1,groups=32", False),
        ("dense:1,10,10", True),  # soon done however it is done
        ("softmax:64,1000", True),
    ],
)
def test_programs_that_waste_the_vectors_are_not_enough(network: str, are_enough: bool, host_target: Target) -> None:
    lowered = lower(load_network(network).model, host_target, LoweringSettings(pad_channels="off"))
    programs = programs_of(max(lowered.tasks, key=lambda task: task.info.flops).mod, host_target)
    assert programs.are_enough is are_enough


def test_a_sum_that_reads_elements_again_is_not_enough_row_by_row(host_target: Target) -> None:
    lowered = lower(load_network("conv2d:1,14,14,64,32,3,3,1,1").model, host_target, LoweringSettings(layout="NCHW"))
    programs = find_programs(max(lowered.tasks, key=lambda task: task.info.flops).mod, host_target)
    assert programs is None or not programs.are_enough


@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from([1, 3, 8, 24, 48, 100, 256]), st.sampled_from([1, 3, 5]))
@compiled_examples
def test_every_tile_fits_into_the_registers(
    host_target: Target, height: int, width: int, channels: int, kernel: int
) -> None:
    task = conv_task(f"conv2d:1,{height},{width},{channels},4,{kernel},{kernel},1,{kernel // 2}", host_target)
    found = contraction_of(task.mod)
    machine = Machine.of(host_target)
    tiles = RegisterTiling(task.mod, found, machine).tiles()
    assert tiles
    for tile in tiles:
        assert tile.vectors * tile.columns * tile.rows + tile.vectors < machine.num_registers + 1
        assert found.spatial[-1] % (tile.lanes * tile.vectors) == 0  # channels may be padded
        assert height % (tile.rows * tile.row_tiles) == 0
        assert tile.lanes & (tile.lanes - 1) == 0


def test_the_first_tile_keeps_both_threads_busy(host_target: Target) -> None:
    task = conv_task("conv2d:1,28,28,128,64,3,3,1,1", resolve_target("auto", 2))
    program = first_program(task.mod, resolve_target("auto", 2))
    assert "T.parallel" in program.mod.script()


def test_a_program_says_what_it_is_made_of(host_target: Target) -> None:
    task = conv_task("dense:16,32,16,bias", host_target)
    programs = programs_of(task.mod, host_target)
    program = program_of(programs, programs.tiles[0])
    assert programs.tile_of(program) == programs.tiles[0]
    annotation = program.get(program.get_sblock("root")).annotations[ANNOTATION]
    assert str(annotation) == decision_text("register tile", programs.tiles[0])


def test_traces_replay_in_stock_tvm(host_target: Target) -> None:
    """Records have plain instructions: none is drawn, and none needs this package."""
    from tvm.s_tir import Schedule

    task = conv_task("conv2d:1,13,13,32,16,3,3,1,1,bias", host_target)
    program = first_program(task.mod, host_target)
    names = {str(instruction.kind.name) for instruction in program.trace.insts}
    assert not {name for name in names if name.startswith("Sample")}
    again = Schedule(task.mod)
    program.trace.apply_to_schedule(again, remove_postproc=False)
    assert again.mod.script() == program.mod.script()


@pytest.mark.parametrize("target", ["auto", *(pytest.param(other, marks=pytest.mark.nightly) for other in OTHERS)])
@pytest.mark.parametrize(
    "network",
    [
        "conv2d:1,13,13,24,16,3,3,1,1,bias,relu",
        "conv2d:1,17,11,32,5,3,3,2,1,bias",
        "conv2d:2,9,9,16,8,3,3,1,2,dilation=2",
        "conv2d:1,7,7,20,64,1,1,1,0,relu",
        "conv2d:1,73,5,8,3,5,1,1,0",
        "depthwise_conv2d:1,15,15,24,3,3,2,1,relu",
        "conv3d:1,4,7,7,16,4,3,3,3,1,1",
        "conv2d:1,9,11,48,32,3,3,1,1,groups=2,bias,relu",
        "dense:1,10,64,bias",
        "dense:19,33,47,bias,relu",
        "batch_matmul:3,17,24,40",
        "softmax:7,48",
        "softmax:7,77",
    ],
)
def test_what_is_chosen_without_a_trial_is_right(network: str, target: str, tmp_path: Path) -> None:
    assert error_without_trials(network, resolve_target(target, available_cpus()), tmp_path) <= TOLERANCE


@given(
    height=st.integers(1, 20),
    width=st.integers(1, 20),
    filters=st.integers(1, 40),
    channels=st.integers(1, 20),
    kernel=st.sampled_from([1, 3, 5]),
    stride=st.integers(1, 2),
    index=st.integers(0, 2**16),
)
@compiled_examples
def test_every_program_of_a_convolution_is_right(
    host_target: Target, height: int, width: int, filters: int, channels: int, kernel: int, stride: int, index: int
) -> None:
    spec = f"conv2d:1,{height},{width},{filters},{channels},{kernel},{kernel},{stride},{kernel // 2},bias,relu"
    task = conv_task(spec, host_target)
    programs = programs_of(task.mod, host_target)
    program = program_of(programs, programs.tiles[index % len(programs.tiles)])
    assert_same(task.mod, program.mod, host_target)


def test_what_follows_the_sums_is_not_unrolled_where_it_is_long(host_target: Target) -> None:
    """A compiler would take minutes for it."""
    import tvm
    from tvm import te, topi

    inputs = [te.placeholder((19, 33), "float32", "data"), te.placeholder((33, 48), "float32", "weight")]
    result = _matmul(*inputs, "float32")
    for number in range(10):
        result = topi.abs(topi.subtract(topi.multiply(result, 0.5), tvm.tirx.const(number, "float32")))
    mod = tvm.IRModule({"main": te.create_prim_func([*inputs, result]).with_attr("global_symbol", "main")})
    programs = programs_of(mod, host_target)
    for tile in programs.tiles[:: max(1, len(programs.tiles) // 3)]:
        program = program_of(programs, tile)
        assert program.mod.script().count("T.fabs") == 10
        assert_same(mod, program.mod, host_target)


@pytest.mark.parametrize(
    "network",
    every_second(
        [
            "conv2d:1,11,13,1,32,5,3,1,1,bias,relu",
            "dense:70,1,64,bias",
            "conv2d:1,12,14,3,32,5,5,1,2,bias",
            "conv2d:1,9,7,2,32,3,3,2,1,relu",
            "conv2d:1,1,600,1,1,1,64,2,0,bias",
            "conv2d:2,9,7,1,8,5,5,1,2",
        ]
    ),
)
def test_a_few_channels_have_vectors_along_what_is_summed(network: str, host_target: Target) -> None:
    task = conv_task(network, host_target)
    programs = programs_of(task.mod, host_target)
    assert programs.first_decision.startswith("dot product")
    assert programs.are_enough
    narrow = [tile for tile in programs.tiles if tile.lanes < programs.tiles[0].lanes and tile.parallel]
    for tile in (*programs.tiles[:: max(1, len(programs.tiles) // 3)], *narrow[:1]):
        program = program_of(programs, tile)
        assert programs.tile_of(program) == tile
        assert_same(task.mod, program.mod, host_target)


def test_a_kernel_that_is_widely_dilated_reads_a_padded_copy(host_target: Target) -> None:
    """Nearly every tile would ask for each element whether it is padding, in its loops."""
    from tvm import IRModule, te, topi

    data, weight = te.placeholder((4, 75, 32), name="data"), te.placeholder((5, 32, 32), name="weight")
    sums = topi.nn.conv1d_nwc(data, weight, strides=1, padding=64, dilation=32)
    mod = IRModule({"main": te.create_prim_func([data, weight, topi.nn.relu(sums)])})
    programs = programs_of(mod, host_target)
    assert {tile.pad_at for tile in programs.tiles} == {"job", "row"}
    for tile in programs.tiles[:: max(1, len(programs.tiles) // 2)]:
        assert_same(mod, program_of(programs, tile).mod, host_target)


@pytest.mark.parametrize(("dtype", "are_divided"), [("uint8", False), ("float32", True)])
def test_no_two_threads_write_to_the_same_lines(dtype: str, are_divided: bool) -> None:
    """Half of 64 channels are half of a line of a cache where each of them is a byte."""
    from tvm import IRModule, te, topi

    data, weight = te.placeholder((9, 32), "float32", "data"), te.placeholder((32, 64), "float32", "weight")
    rounded = topi.cast(topi.nn.relu(topi.nn.matmul(data, weight)), dtype)
    programs = programs_of(IRModule({"main": te.create_prim_func([data, weight, rounded])}), resolve_target("auto", 2))
    jobs = {64 // (tile.lanes * tile.vectors * tile.channel_tiles) for tile in programs.tiles if tile.channels_outside}
    assert (max(jobs) > 1) == are_divided


def test_a_row_may_have_a_prime_number_of_columns(host_target: Target) -> None:
    """The copies of its tile are few operations each; with a single column each of them was a tile."""
    task = conv_task("conv2d:1,1,601,24,8,1,3,1,0,bias,relu", host_target)
    programs = programs_of(task.mod, host_target)
    assert programs.tiles[0].columns > 1
    assert_same(task.mod, program_of(programs, programs.tiles[0]).mod, host_target)


def test_a_short_sum_has_no_vectors_along_it(host_target: Target) -> None:
    """To add their elements up would take longer than to sum one after the other."""
    task = conv_task("conv2d:1,11,13,1,16,1,1,1,0", host_target)
    assert programs_of(task.mod, host_target).first_decision.startswith("register tile")


@pytest.mark.parametrize("activation", ["", "hard sigmoid"])
def test_sums_may_scale_something_larger(activation: str, host_target: Target) -> None:
    """As the channels of an image in a squeeze-and-excitation block."""
    import tvm
    from tvm import te, topi

    pooled = te.placeholder((1, 1, 1, 24), "float32", "pooled")
    weight = te.placeholder((1, 1, 24, 40), "float32", "weight")
    image = te.placeholder((1, 11, 13, 40), "float32", "image")
    gate = topi.nn.conv2d_nhwc(pooled, weight, 1, 0, 1)
    if activation:
        gate = topi.clip(topi.add(topi.multiply(gate, 0.2), 0.5), 0.0, 1.0)
    scaled = topi.add(topi.multiply(image, gate), image)
    mod = tvm.IRModule({"main": te.create_prim_func([pooled, weight, image, scaled])})
    programs = programs_of(mod, host_target)
    assert programs.first_decision.startswith("register tile")
    for tile in programs.tiles[:: max(1, len(programs.tiles) // 3)]:
        program = program_of(programs, tile)
        assert "T.vectorized(" in program.mod.script()
        assert_same(mod, program.mod, host_target)


def test_a_row_may_need_more_of_a_tensor_than_another_row(host_target: Target) -> None:
    """As the mask of attention, which is the product of a vector and itself: how much of it depends on the row."""
    import tvm
    from tvm import te

    data = te.placeholder((64,), "float32", "data")
    twice = te.compute((64,), lambda i: data[i] * 2.0, "twice")
    mask = te.compute((64, 64), lambda i, j: twice[i] * twice[j], "mask")
    mod = tvm.IRModule({"main": te.create_prim_func([data, mask])})
    program = first_program(mod, host_target)
    assert_same(mod, program.mod, host_target)


@pytest.mark.parametrize("length", [64, 100])
def test_a_sum_whose_axis_is_kept_is_computed_once_for_a_row(length: int, host_target: Target) -> None:
    """And not once for each element that it is taken from, as the mean of a normalisation."""
    import tvm
    from tvm import te

    data = te.placeholder((4, 8, length), "float32", "data")
    place = te.reduce_axis((0, length), "place")
    mean = te.compute((4, 8, 1), lambda i, j, _: te.sum(data[i, j, place], axis=place), "mean")
    difference = te.compute(data.shape, lambda i, j, k: data[i, j, k] - mean[i, j, 0], "difference")
    mod = tvm.IRModule({"main": te.create_prim_func([data, difference])})
    programs = programs_of(mod, host_target)
    for tile in programs.tiles:
        program = program_of(programs, tile)
        sums = [name for name in ("mean", "mean_update", "mean_rf_update") if f'"{name}"' in program.mod.script()]
        assert sums
        for name in sums:
            loops = program.get_loops(program.get_sblock(name))
            assert np.prod([int(program.get(loop).extent) for loop in loops]) <= 4 * 8 * length
        assert_same(mod, program.mod, host_target)


def test_functions_of_functions_are_computed_one_after_the_other(host_target: Target) -> None:
    """As in a step of LSTM: code generation takes seconds for an expression of all of them, in vectors or not."""
    import tvm
    from tvm import te, topi

    gates = [te.placeholder((2, 64), "float32", f"gate{number}") for number in range(3)]
    state = topi.add(topi.multiply(topi.sigmoid(gates[0]), topi.tanh(gates[1])), topi.sigmoid(gates[2]))
    mod = tvm.IRModule({"main": te.create_prim_func([*gates, topi.tanh(state)])})
    program = first_program(mod, host_target)
    (line,) = (line for line in program.mod.script().splitlines() if "] = T.tanh(" in line and "sigmoid" not in line)
    assert "T.vectorized(" in program.mod.script()
    assert "tanh" not in line.partition("T.tanh(")[2]
    assert_same(mod, program.mod, host_target)


@pytest.mark.parametrize("sizes", [(32, 16), (24, 24), (5, 11), (640, 3456)])
def test_a_concatenation_is_copied_in_vectors(sizes: tuple[int, int], host_target: Target) -> None:
    """With a condition for each element it takes twice to nine times as long."""
    import tvm
    from tvm import te, topi

    inputs = [te.placeholder((3, 7, size), "float32", f"input{size}") for size in sizes]
    mod = tvm.IRModule({"main": te.create_prim_func([*inputs, topi.nn.relu(topi.concatenate(inputs, axis=-1))])})
    program = first_program(mod, host_target)
    (lanes,) = (int(number) for number in re.findall(r"T\.vectorized\((\d+)\)", program.mod.script()))
    assert ("T.unroll(" in program.mod.script()) == (sizes[0] % lanes != 0)
    assert_same(mod, program.mod, host_target)
    if sizes[0] % lanes == 0:  # the vector knows what it is made of
        code = tvm.tirx.build(program.mod, host_target, tir_pipeline(host_target)).inspect_source("ll")
        assert f"load <{lanes} x float>" in code
        assert "load float" not in code


@pytest.mark.parametrize("added", ["bias", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("", "scalar"))])
@pytest.mark.parametrize(
    ("shape", "order", "columns"),
    every_second(
        [
            ((1, 750, 128), (0, 2, 1), None),
            ((1, 3, 96, 80), (0, 2, 3, 1), 3),
            ((2, 64, 320), (0, 2, 1), 16),
            ((4, 48, 8, 32), (2, 3, 0, 1), 16),
            ((1, 24, 24, 64), (0, 3, 1, 2), None),
            ((1, 128, 12, 64), (0, 2, 1, 3), 0),
            ((64, 8, 64), (0, 2, 1), None),
            ((3, 197, 64), (0, 2, 1), 0),
        ]
    ),
)
def test_a_transposition_goes_over_blocks_of_columns(
    shape: tuple[int, ...], order: tuple[int, ...], columns: int | None, added: str, host_target: Target
) -> None:
    """Row by row it reads a line of the cache for every element: that took ten times as long.

    Args:
        shape: What is read.
        order: Its axes in the result.
        columns: Of the first program's blocks; 0 for whole rows, and None where that depends on the CPU's vectors.
        added: What is added to what is read.
    """
    import tvm
    from tvm import te, topi

    data = te.placeholder(shape, "float32", "data")
    other = te.placeholder((shape[order[-1]],) if added == "bias" else (), "float32", "other")
    result = topi.transpose(data, order)
    arguments = [data, other, topi.add(result, other)] if added else [data, result]
    mod = tvm.IRModule({"main": te.create_prim_func(arguments)})
    programs = programs_of(mod, host_target)
    assert columns is None or (programs.tiles[0].columns or 0) == columns
    for tile in programs.tiles:
        program = program_of(programs, tile)
        assert_same(mod, program.mod, host_target)


@pytest.mark.parametrize(
    ("shape", "columns"), [((2, 5, 7, 48), 48), ((1, 16, 4, 2106), 234), ((3, 6, 257), 257), ((1, 21, 64, 64), 64)]
)
def test_sums_over_another_axis_than_the_last_are_vectors_of_columns(
    shape: tuple[int, ...], columns: int, host_target: Target
) -> None:
    """All columns of a row were written out when each sum had a vector of parts: a minute in the compiler."""
    import tvm
    from tvm import te, topi

    data = te.placeholder(shape, "float32", "data")
    mod = tvm.IRModule({"main": te.create_prim_func([data, topi.nn.softmax(data, axis=1)])})
    programs = programs_of(mod, host_target)
    assert programs.tiles[0].columns == columns
    for tile in programs.tiles:
        program = program_of(programs, tile)
        assert len(program.mod.script()) < 20_000
        if tile.columns:
            assert "_rf" not in program.mod.script()
        assert_same(mod, program.mod, host_target)


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("shape", [(2, 12, 48), (3, 6, 30), (8, 64, 192)])
def test_a_split_has_vectors_in_each_result(shape: tuple[int, ...], axis: int, host_target: Target) -> None:
    """In TVM's space a random program of a split took a third of an LSTM."""
    import tvm
    from tvm import te, topi

    data = te.placeholder((shape[0] * shape[1], *shape[2:]), "float32", "data")
    third = shape[axis] // 3
    results = topi.split(topi.reshape(data, shape), [third, 2 * third], axis=axis)
    mod = tvm.IRModule({"main": te.create_prim_func([data, *results])})
    program = first_program(mod, host_target)
    assert program.mod.script().count("T.vectorized(") == (3 if shape[-1] % 48 == 0 else 0)
    assert_same(mod, program.mod, host_target, num_results=3)


@pytest.mark.parametrize(
    ("dtype", "sum_dtype"), [("float16", "float32"), ("float16", "float16"), ("bfloat16", "float32"), ("int8", "int32")]
)
@pytest.mark.parametrize("kind", every_second(["conv2d", "dense"]))
def test_other_types_are_right(dtype: str, sum_dtype: str, kind: str, host_target: Target) -> None:
    import tvm
    from tvm import te, topi

    if kind == "conv2d":
        inputs = [te.placeholder((1, 9, 11, 24), dtype, "data"), te.placeholder((3, 3, 24, 40), dtype, "weight")]
        result = topi.nn.conv2d_nhwc(*inputs, 1, 1, 1, sum_dtype)
    else:
        inputs = [te.placeholder((19, 33), dtype, "data"), te.placeholder((33, 48), dtype, "weight")]
        result = topi.matmul(*inputs) if dtype == sum_dtype else _matmul(*inputs, sum_dtype)
    mod = tvm.IRModule({"main": te.create_prim_func([*inputs, result]).with_attr("global_symbol", "main")})
    assert find_contraction(mod) is not None
    programs = programs_of(mod, host_target)
    for tile in programs.tiles[:: max(1, len(programs.tiles) // 3)]:
        program = program_of(programs, tile)
        assert_same(mod, program.mod, host_target, 1e-2 if sum_dtype == "float16" else TOLERANCE)


def _matmul(data: te.Tensor, weight: te.Tensor, dtype: str) -> te.Tensor:
    from tvm import te

    k = te.reduce_axis((0, data.shape[1]), "k")
    return te.compute(
        (data.shape[0], weight.shape[1]),
        lambda i, j: te.sum(data[i, k].astype(dtype) * weight[k, j].astype(dtype), axis=k),
        name="matmul",
    )


def test_programs_compile_for_other_machines() -> None:
    """They are compiled, not run."""
    from tvm.driver import build

    target = resolve_target("llvm -mcpu=neoverse-n1 -mtriple=aarch64-linux-gnu", 4)
    task = conv_task("conv2d:1,13,13,24,16,3,3,1,1,bias,relu", target)
    program = first_program(task.mod, target)
    assert "fmla" in build(program.mod, target=target, pipeline=tir_pipeline(target)).inspect_source("s")
