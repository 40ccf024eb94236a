"""Winograd's convolutions: which layers have them, that they are right and as exact as stated, and that the fastest
way of a layer is taken.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnxruntime
import pytest
from helpers.commands import RunCommand, flags
from helpers.runs_here import artifacts_of, newest_run
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ansor_mlflow import names
from ansor_mlflow.codegen import tir_pipeline
from ansor_mlflow.device import available_cpus
from ansor_mlflow.device.targets import resolve_target
from ansor_mlflow.errors import UserInputError
from ansor_mlflow.lowering.lower import LoweredNetwork, TuningTask, lower
from ansor_mlflow.lowering.ways import NoOtherWayError, find_alternatives
from ansor_mlflow.lowering.ways.cook_toom import TILES, transforms
from ansor_mlflow.lowering.ways.errors import error_of
from ansor_mlflow.lowering.ways.winograd import transform_weights
from ansor_mlflow.model.library import compile_tuned
from ansor_mlflow.networks.graph import GraphBuilder
from ansor_mlflow.networks.loading import load_network
from ansor_mlflow.options import TuneOptions
from ansor_mlflow.settings import LoweringSettings
from ansor_mlflow.sketches.choice import find_programs
from ansor_mlflow.tracking.report.history import TuningHistory
from ansor_mlflow.trials import (
    Durations,
    TaskInfo,
    TaskState,
    Trial,
    TrialStatus,
    TuningPlan,
    TuningRound,
    estimated_latency_s,
)
from ansor_mlflow.tuning.scheduler import GradientScheduler
from ansor_mlflow.tuning.stopping import outrun_tasks, resolve_num_trials
from ansor_mlflow.tuning.workers.arguments import random_arguments

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.target import Target

ERRORS = {2: 2e-6, 4: 2e-5}
"""Largest error of a layer over its largest output, by the outputs of a tile: what docs/winograd.md states."""


def conv(height: int, width: int, filters: int, channels: int, rest: str = "3,3,1,1,bias,relu", batch: int = 1) -> str:
    return f"conv2d:{batch},{height},{width},{filters},{channels},{rest}"


def layer_of(network: str, target: Target, **lowering: object) -> TuningTask:
    settings_ = LoweringSettings(algorithm="direct", pad_channels="off", **lowering)  # type: ignore[arg-type]
    return max(lower(load_network(network).model, target, settings_).tasks, key=lambda task: task.info.flops)


def run(mod: IRModule, arrays: list[np.ndarray], target: Target, pipeline: str) -> np.ndarray:
    """What a task's function gives; the last array is that of the result."""
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


# -- the matrices ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outputs", TILES)
def test_the_transforms_filter_exactly(outputs: int) -> None:
    found = transforms(outputs)
    taps = [Fraction(n) for n in (3, -5, 7)]
    data = [Fraction(n * n - 3 * n, 4) for n in range(outputs + 2)]
    points = [
        sum(a * b for a, b in zip(row, taps, strict=True)) * sum(a * b for a, b in zip(other, data, strict=True))
        for row, other in zip(found.weights, found.data, strict=True)
    ]
    result = [sum(a * b for a, b in zip(row, points, strict=True)) for row in found.output]
    assert result == [sum(taps[k] * data[place + k] for k in range(3)) for place in range(outputs)]


# -- which layers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("network", "reason"),
    [
        (conv(9, 9, 16, 16, "1,1,1,0"), "its kernel is 1x1, not 3x3"),
        (conv(9, 9, 16, 16, "5,5,1,2"), "its kernel is 5x5, not 3x3"),
        (conv(9, 9, 16, 16, "3,3,2,1"), "its stride or dilation is not 1"),
        (conv(9, 9, 16, 16, "3,3,1,2,dilation=2"), "its stride or dilation is not 1"),
        (conv(9, 9, 16, 16, "3,3,1,1,groups=2"), "it is a convolution in groups"),
        ("depthwise_conv2d:1,9,9,16,3,3,1,1", "it is a convolution in groups"),
        ("conv3d:1,4,7,7,16,4,3,3,3,1,1", "it is no convolution in two dimensions"),
        ("dense:3,16,16", "it is no convolution in two dimensions"),
        ("softmax:4,16", "it is no convolution"),
    ],
)
def test_other_layers_have_no_other_way(network: str, reason: str, host_target: Target) -> None:
    with pytest.raises(NoOtherWayError, match=reason):
        find_alternatives(layer_of(network, host_target).mod)


@pytest.mark.parametrize(
    ("lowering", "reason"),
    [({"dtype": "float16"}, "it is not in float32"), ({"layout": "NCHW"}, "it is no convolution|its kernel")],
)
def test_other_types_and_layouts_have_no_other_way(lowering: dict[str, str], reason: str, host_target: Target) -> None:
    with pytest.raises(NoOtherWayError, match=reason):
        find_alternatives(layer_of(conv(9, 9, 16, 16), host_target, **lowering).mod)


def test_weights_that_are_no_constants_have_no_other_way(host_target: Target) -> None:
    builder = GraphBuilder(seed=0)
    data, weights = builder.input("data", (1, 16, 9, 9)), builder.input("weights", (16, 16, 3, 3))
    output = builder.node("Conv", "output", data, weights, pads=[1, 1, 1, 1])
    lowered = lower(builder.build("conv", {output: (1, 16, 9, 9)}), host_target)
    task = max(lowered.tasks, key=lambda task: task.info.flops)
    with pytest.raises(NoOtherWayError, match="its weights are no constants"):
        find_alternatives(task.mod)


def test_what_comes_before_a_convolution_is_no_padding(host_target: Target) -> None:
    """An element that is computed is another one than that which is read."""
    from tvm.script import from_source

    mod = layer_of(conv(9, 9, 16, 16), host_target).mod
    text = mod.script()
    assert find_alternatives(from_source(text))
    first, last = text.index("T.if_then_else("), text.index("T.float32(0.0))") + len("T.float32(0.0))")
    other = from_source(f"{text[:first]}T.max({text[first:last]}, T.float32(0.0)){text[last:]}")
    with pytest.raises(NoOtherWayError, match="its input is not padded with zeros alone"):
        find_alternatives(other)


def test_a_network_without_such_a_layer_cannot_be_forced(host_target: Target) -> None:
    network = load_network("dense:3,16,16")
    with pytest.raises(UserInputError, match=r"algorithm=winograd, but no layer can .* it is no convolution in two"):
        lower(network.model, host_target, LoweringSettings(algorithm="winograd"))


# -- what they compute -------------------------------------------------------------------------------------------------


@given(
    batch=st.integers(1, 2),
    height=st.integers(1, 17),
    width=st.integers(1, 17),
    filters=st.integers(1, 33),
    channels=st.integers(1, 33),
    padding=st.integers(0, 2),
    outputs=st.sampled_from(TILES),
    index=st.integers(0, 2**16),
)
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], phases=[Phase.generate]
)
def test_every_program_of_every_edge_is_right(
    host_target: Target,
    batch: int,
    height: int,
    width: int,
    filters: int,
    channels: int,
    padding: int,
    outputs: int,
    index: int,
) -> None:
    """Against the direct way in float32, whose own error is a part of what is allowed."""
    height, width = max(height, 3 - 2 * padding), max(width, 3 - 2 * padding)
    network = conv(height, width, filters, channels, f"3,3,1,{padding},bias,relu", batch)
    task = layer_of(network, host_target)
    other = next(other for other in find_alternatives(task.mod) if other.outputs == outputs)
    programs = find_programs(other.mod, host_target)
    assert programs is not None
    program = programs.program(programs.tiles[index % len(programs.tiles)])
    assert program is not None
    arrays = arguments(task.mod)
    expected = run(task.mod, arrays, host_target, "default")
    plain = [*arrays]
    plain[other.weights] = other.transform(arrays[other.weights])
    actual = run_packed(other.mod, program.mod, plain, host_target)
    assert abs(actual - expected).max() <= ERRORS[outputs] * abs(expected).max() + 1e-6


def run_packed(mod: IRModule, scheduled: IRModule, arrays: list[np.ndarray], target: Target) -> np.ndarray:
    """What a scheduled function gives, which packs its weights itself."""
    assert [tuple(map(int, p.shape)) for p in mod["main"].params] == [
        tuple(map(int, p.shape)) for p in scheduled["main"].params
    ]
    return run(scheduled, arrays, target, tir_pipeline(target))


def test_weights_are_transformed_in_float64() -> None:
    weights = np.random.default_rng(0).normal(size=(3, 3, 4, 5)).astype("float32")
    for outputs in TILES:
        matrix = np.array(transforms(outputs).weights, np.float64)
        expected = np.einsum("ea,abio,ub->euio", matrix, weights.astype(np.float64), matrix)
        np.testing.assert_allclose(transform_weights(weights, outputs), expected, rtol=2e-7)  # rounded once


@pytest.mark.parametrize(("height", "width", "channels"), [(9, 9, 32), (16, 12, 64)])
def test_weights_are_packed_as_they_are_read(height: int, width: int, channels: int, host_target: Target) -> None:
    from tvm.s_tir.transform import RemoveWeightLayoutRewriteBlock

    for alternative in find_alternatives(layer_of(conv(height, width, channels, channels), host_target).mod):
        programs = find_programs(alternative.mod, host_target)
        assert programs is not None
        for tile in programs.tiles[:: max(1, len(programs.tiles) // 16)]:
            program = programs.program(tile)
            assert program is not None
            packed = RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(program.mod)["main"]
            extents = [int(extent) for extent in packed.params[alternative.weights].shape]
            vectors = [extent for extent in (tile.vectors, tile.lanes) if extent > 1]
            *_, sums = extents[: -len(vectors)]
            assert (sums, extents[-len(vectors) :]) == (channels, vectors)


def residual_block() -> onnx.ModelProto:
    """Two convolutions, the second with an addition after it, for images of no multiple of a tile."""
    builder = GraphBuilder(seed=0)
    data = builder.input("data", (2, 24, 13, 10))
    first = builder.relu("relu1", builder.conv("conv1", data, (24, 24, 3, 3), padding=1, bias=True))
    second = builder.conv("conv2", first, (24, 24, 3, 3), padding=1, bias=True)
    output = builder.relu("output", builder.node("Add", "sum", second, data))
    return builder.build("residual", {output: (2, 24, 13, 10)})


def output_error(library: Path, model: onnx.ModelProto) -> float:
    """The largest error of a library's output over the largest output, against ONNX Runtime's."""
    import tvm
    from tvm import relax

    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    feeds = {each.name: rng.normal(size=each.shape).astype("float32") for each in session.get_inputs()}
    (expected,) = session.run(None, feeds)
    machine = relax.VirtualMachine(tvm.runtime.load_module(str(library)), tvm.cpu())
    actual = machine["main"](*map(tvm.runtime.tensor, feeds.values())).numpy()
    return float(abs(actual - expected).max() / abs(expected).max())


@pytest.mark.parametrize("target", ["auto", "llvm -mcpu=x86-64", "llvm -mcpu=haswell"])
def test_a_residual_block_is_right_on_every_machine(target: str, tmp_path: Path) -> None:
    resolved = resolve_target(target, available_cpus())
    lowered = lower(residual_block(), resolved, LoweringSettings(algorithm="winograd"))
    coverage = compile_tuned(lowered, resolved, None, tmp_path / "model.so")
    ways = [task.way for task in coverage.missing if "conv2d" in task.name]
    assert len(ways) == 2
    assert all(way.startswith("winograd") for way in ways)
    assert not coverage.unscheduled
    assert output_error(tmp_path / "model.so", residual_block()) <= ERRORS[4]


def test_padding_may_differ_on_every_side(host_target: Target, tmp_path: Path) -> None:
    builder = GraphBuilder(seed=0)
    weights = builder.he_normal("weights", (24, 16, 3, 3))
    output = builder.node("Conv", "output", builder.input("data", (1, 16, 11, 14)), weights, pads=[0, 2, 1, 0])
    model = builder.build("uneven", {output: (1, 24, 10, 14)})
    lowered = lower(model, host_target, LoweringSettings(algorithm="winograd"))
    coverage = compile_tuned(lowered, host_target, None, tmp_path / "model.so")
    assert coverage.has_other_ways
    assert output_error(tmp_path / "model.so", model) <= ERRORS[4]


def test_programs_compile_for_other_machines() -> None:
    """They are compiled, not run."""
    from tvm.driver import build

    target = resolve_target("llvm -mcpu=neoverse-n1 -mtriple=aarch64-linux-gnu", 4)
    for other in find_alternatives(layer_of(conv(14, 14, 32, 32), target).mod):
        programs = find_programs(other.mod, target)
        assert programs is not None
        program = programs.first()
        assert program is not None
        assert "fmla" in build(program.mod, target=target, pipeline=tir_pipeline(target)).inspect_source("s")


def test_traces_replay_in_stock_tvm(host_target: Target) -> None:
    """Records have plain instructions: none is drawn, and none needs this package."""
    from tvm.s_tir import Schedule

    for other in find_alternatives(layer_of(conv(13, 14, 32, 16), host_target).mod):
        programs = find_programs(other.mod, host_target)
        assert programs is not None
        program = programs.first()
        assert program is not None
        assert not [inst for inst in program.trace.insts if str(inst.kind.name).startswith("Sample")]
        again = Schedule(other.mod)
        program.trace.apply_to_schedule(again, remove_postproc=False)
        assert again.mod.script() == program.mod.script()


# -- which way is taken ------------------------------------------------------------------------------------------------


def layers_of(lowered: LoweredNetwork) -> list[list[TuningTask]]:
    by_layer = itertools.groupby(lowered.tasks, key=lambda task: task.info.layer_hash)
    return [ways for _, group in by_layer if len(ways := list(group)) > 1]


def write_record(directory: Path, seconds: dict[TuningTask, float], target: Target) -> None:
    """Writes a database with a record of each task that says that its first program took so long."""
    from tvm.s_tir.meta_schedule.arg_info import ArgInfo
    from tvm.s_tir.meta_schedule.database import JSONDatabase, TuningRecord

    directory.mkdir()
    database = JSONDatabase(work_dir=str(directory), allow_missing=True)
    for task, run_s in seconds.items():
        programs = find_programs(task.mod, target)
        assert programs is not None
        program = programs.first()
        assert program is not None
        arguments_ = ArgInfo.from_prim_func(task.mod["main"])
        workload = database.commit_workload(task.mod)
        database.commit_tuning_record(TuningRecord(program.trace, workload, [run_s], target, arguments_))


@pytest.mark.parametrize("fastest", [0, 1, 2])
def test_compile_takes_the_way_with_the_fastest_record(fastest: int, host_target: Target, tmp_path: Path) -> None:
    model = load_network(conv(28, 28, 32, 32)).model
    lowered = lower(model, host_target)
    (ways,) = layers_of(lowered)
    seconds = {way: 1e-3 if place == fastest else 2e-3 for place, way in enumerate(ways)}
    write_record(tmp_path / "best", seconds, host_target)
    coverage = compile_tuned(lowered, host_target, tmp_path / "best", tmp_path / "model.so")
    assert [task.way for task in coverage.covered] == [ways[fastest].info.way]
    assert coverage.flops_share == 1
    assert output_error(tmp_path / "model.so", model) <= ERRORS[4]


def test_a_way_without_a_record_is_not_taken_where_another_has_one(host_target: Target, tmp_path: Path) -> None:
    """Records of earlier versions are of the direct way, and stay valid."""
    lowered = lower(load_network(conv(28, 28, 32, 32)).model, host_target)
    (ways,) = layers_of(lowered)
    write_record(tmp_path / "best", {ways[0]: 1.0}, host_target)
    coverage = compile_tuned(lowered, host_target, tmp_path / "best", tmp_path / "model.so")
    assert [task.way for task in coverage.covered] == ["direct"]


@pytest.mark.parametrize(
    ("algorithm", "ways"),
    [
        ("auto", ["direct", "winograd 2x2", "winograd 4x4"]),
        ("direct", ["direct"]),
        ("winograd", ["winograd 2x2", "winograd 4x4"]),
    ],
)
def test_the_algorithm_decides_which_ways_are_tuned(algorithm: str, ways: list[str], host_target: Target) -> None:
    settings_ = LoweringSettings(algorithm=algorithm)  # type: ignore[arg-type]
    lowered = lower(load_network(conv(28, 28, 32, 32)).model, host_target, settings_)
    convolutions = [task.info for task in lowered.tasks if "conv2d" in task.info.name]
    assert [task.way for task in convolutions] == ways
    assert lowered.num_ways == len(ways) - 1
    assert len({task.layer_hash for task in convolutions}) == 1
    assert [task.info.index for task in lowered.tasks] == list(range(len(lowered.tasks)))


def test_small_layers_get_no_other_way_by_themselves(host_target: Target) -> None:
    assert lower(load_network(conv(7, 7, 8, 8)).model, host_target).num_ways == 0


def test_a_library_that_may_not_grow_takes_the_smaller_way(host_target: Target, tmp_path: Path) -> None:
    """The weights of a layer of 64 channels are 0.14 MiB, 0.25 with F(2×2) and 0.56 with F(4×4)."""
    lowered = lower(load_network(conv(28, 28, 64, 64)).model, host_target)
    (ways,) = layers_of(lowered)
    write_record(tmp_path / "best", {way: 3e-3 - place * 1e-3 for place, way in enumerate(ways)}, host_target)
    found = {}
    for limit in (1.0, 0.3, 0.1, None):
        library = tmp_path / f"{limit}.so"
        max_bytes = None if limit is None else int(limit * 2**20)
        coverage = compile_tuned(lowered, host_target, tmp_path / "best", library, max_bytes=max_bytes)
        (found[limit],) = [task.way for task in coverage.covered]
        assert coverage.growth_bytes == {"direct": 0, "winograd 2x2": 7, "winograd 4x4": 27}[found[limit]] * 64 * 64 * 4
    assert found == {1.0: "winograd 4x4", 0.3: "winograd 2x2", 0.1: "direct", None: "winograd 4x4"}


# -- weights as cold as the network leaves them -----------------------------------------------------------------------


def test_the_constants_of_a_network_are_its_parameters(host_target: Target) -> None:
    """Several layers of the same size among them."""
    network = load_network("resnet-block")
    assert lower(network.model, host_target).constant_bytes == 4 * (2 * 9 * 64 * 64 + 2 * 64)


def test_each_call_takes_the_next_copy_of_the_weights() -> None:
    """Copies fill as much memory as the network's constants; a bias stays where it is."""
    infos = (("TENSOR", "float32", (4,)), ("TENSOR", "float32", (256, 256)), ("TENSOR", "float32", (8,)))
    arguments_ = random_arguments(infos, constants=(1, 2), network_bytes=5 * 2**18)
    calls = arguments_.take(11)
    places = [[tensor.data_ptr() for tensor in call] for call in calls]
    assert arguments_.num_copies == 5
    assert len({weights for _, weights, _ in places}) == 5
    assert places[0] == places[5] == places[10]
    assert len({(data, bias) for data, _, bias in places}) == 1
    np.testing.assert_array_equal(calls[0][1].numpy(), calls[1][1].numpy())
    assert random_arguments(infos, constants=(1, 2)).num_copies == 1


# -- what the loop makes of it -----------------------------------------------------------------------------------------


def states(*best_s: float | None, trials: int = 2) -> list[TaskState]:
    """Ways to compute one layer, of which so much is known."""
    found = [
        TaskState(
            info=TaskInfo(
                index=index,
                name="conv2d",
                weight=1,
                flops=1e9,
                workload_hash=f"0x{index}",
                way=f"way {index}" if index else "direct",
                layer="0x0" if index else "",
            ),
            best_s=seconds,
        )
        for index, seconds in enumerate(best_s)
    ]
    for state in found:
        state.num_trials[TrialStatus.OK] = trials
    return found


def test_the_estimate_counts_the_fastest_way_of_a_layer() -> None:
    assert estimated_latency_s(states(3e-3, 1e-3, 2e-3)) == 1e-3
    assert estimated_latency_s(states(3e-3, None)) == 3e-3
    assert estimated_latency_s(states(None, 2e-3)) == 2e-3
    assert estimated_latency_s(states(None, None)) is None


@pytest.mark.parametrize(
    ("best_s", "trials", "losers"),
    [
        ((2e-3, 1e-3, 1.3e-3), 2, [0]),
        ((2e-3, 1e-3, 1.3e-3), 8, [0, 2]),
        ((1e-3, 1.05e-3, None), 8, []),
        ((1e-3, None, None), 8, []),
    ],
)
def test_a_way_that_lost_beyond_the_noise_gets_no_more_trials(
    best_s: tuple[float | None, ...], trials: int, losers: list[int]
) -> None:
    assert [state.info.index for state in outrun_tasks(states(*best_s, trials=trials))] == losers


def test_every_layer_has_its_first_round_before_another_way_does() -> None:
    ways = states(None, None, trials=0)
    other = TaskState(info=TaskInfo(index=2, name="dense", weight=1, flops=1.0, workload_hash="0x2"))
    scheduler = GradientScheduler(3, seed=0)
    order = []
    for _ in range(3):
        index = scheduler.next_task([*ways, other])
        assert index is not None
        order.append(index)
        state = [*ways, other][index]
        state.best_s = 1e-3
        scheduler.round_finished(state)
    assert order == [0, 2, 1]


def test_only_what_a_way_may_gain_over_the_fastest_counts() -> None:
    """After two rounds each, the optimistic guess is half of the time; the slow way would still be slower then."""
    ways = [*states(1e-3, 2.2e-3), *states(1e-4)]
    ways[2].info = replace(ways[2].info, index=2, name="dense", workload_hash="0x9")
    scheduler = GradientScheduler(3, seed=0)
    for state in ways * 2:
        scheduler.round_finished(state)
    picks = {scheduler.next_task(ways) for _ in range(20)}
    assert 0 in picks
    ways[0].stop_reason = "plateau"
    assert Counter(scheduler.next_task(ways) for _ in range(50)).most_common(1)[0][0] == 2


def test_the_report_counts_a_layer_once() -> None:
    """It began with the direct way, and ended with another: that is its gain."""
    ways = states(None, None, trials=0)
    history = TuningHistory()
    history.begin(TuningPlan(network="conv", target="llvm", tasks=tuple(way.info for way in ways), num_trials=2))
    for step, (way, run_s) in enumerate(zip(ways, (3e-3, 1e-3), strict=True), start=1):
        trial = Trial(step=step, task=way.info.name, status=TrialStatus.OK, run_s=(run_s,))
        way.add(trial)
        history.add(
            TuningRound(
                trials=(trial,),
                task=way.snapshot(),
                tasks=tuple(each.snapshot() for each in ways),
                total_trials=step,
                elapsed_s=1.0,
                durations=Durations(),
            )
        )
    assert (history.before_s, history.after_s) == (3e-3, 1e-3)
    assert [task.gain_s for task in history.tasks] == [0, 2e-3]
    assert [point.latency_s for point in history.curve] == [3e-3, 1e-3]


def test_a_budget_needs_a_trial_for_each_layer_not_for_each_way() -> None:
    options = TuneOptions(trials=2)
    assert resolve_num_trials(options, 4, num_ways=2) == 2
    with pytest.raises(UserInputError, match="trials=2, but the network has 3 tasks"):
        resolve_num_trials(options, 5, num_ways=2)


def test_metaschedules_space_has_the_direct_way_alone() -> None:
    assert TuneOptions(space="metaschedule").lowering.algorithm == "direct"
    with pytest.raises(UserInputError, match="algorithm=winograd and space=metaschedule"):
        _ = TuneOptions(space="metaschedule", algorithm="winograd").lowering


@pytest.fixture
def own_directory(new_experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory whose experiment has the runs of this test."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("own_directory")
def test_a_tuned_layer_is_compiled_as_it_was_measured(run_here: RunCommand) -> None:
    """From tuning to the model: the ways that were tried, and the one that was taken."""
    parameters = {"network": conv(28, 28, 32, 32), "trials": 12, "min_repeat_ms": 0, "cost_model": "none"}
    assert run_here("tune", *flags(parameters)) == 0
    run = newest_run()
    rows = json.loads((artifacts_of(run.info.run_id) / names.TASKS_FILE).read_text())
    ways = [row for row in rows if "conv2d" in row["task"]]
    assert [row["way"] for row in ways] == ["direct", "winograd 2x2", "winograd 4x4"]
    assert len({row["layer"] for row in ways}) == 1
    assert all(sum(row["trials"].values()) for row in ways)
    assert run_here("compile", *flags({"tune_run": run.info.run_id})) == 0
    coverage = json.loads((artifacts_of(newest_run().info.run_id) / names.COVERAGE_FILE).read_text())
    assert coverage["task_share"] == 1
    fastest = min(ways, key=lambda row: row["confirmed_latency_us"] or row["latency_us"])
    assert coverage["ways"][fastest["way"]] >= 1


@pytest.mark.parametrize("channels", [16, 128, 512])
@pytest.mark.parametrize("outputs", TILES)
def test_the_error_of_a_layer_is_as_stated(channels: int, outputs: int) -> None:
    weights = np.random.default_rng(channels).normal(size=(3, 3, channels, channels)).astype("float32")
    assert 1e-8 < error_of(weights, outputs) <= ERRORS[outputs]
    assert error_of(np.zeros_like(weights), outputs) == 0


def test_each_way_says_what_it_loses(host_target: Target) -> None:
    (ways,) = layers_of(lower(load_network(conv(28, 28, 32, 32)).model, host_target))
    direct, small, large = (way.info.max_rel_error for way in ways)
    assert direct is None
    assert small is not None
    assert large is not None
    assert 0 < small < large <= ERRORS[4]


def test_a_way_that_loses_too_much_is_not_offered(host_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    (ways,) = layers_of(lower(load_network(conv(28, 28, 32, 32)).model, host_target))
    between = ((ways[1].info.max_rel_error or 0) + (ways[2].info.max_rel_error or 0)) / 2
    monkeypatch.setattr("ansor_mlflow.lowering.ways.tasks._MAX_REL_ERROR", between)
    (left,) = layers_of(lower(load_network(conv(28, 28, 32, 32)).model, host_target))
    assert [task.info.way for task in left] == ["direct", "winograd 2x2"]


# -- what is lost ------------------------------------------------------------------------------------------------------


def cancelling_network() -> onnx.ModelProto:
    """A convolution, the same one subtracted as one of 5 × 5, and a hundredth of its size: only a direct one is exact
    enough.
    """
    rng = np.random.default_rng(0)
    builder = GraphBuilder(seed=0)
    data = builder.input("data", (1, 32, 28, 28))
    weights = rng.normal(size=(32, 32, 3, 3)).astype("float32")
    small = builder.node("Conv", "small", data, builder.weight("w3", weights), pads=[1, 1, 1, 1])
    wide = builder.weight("w5", np.pad(weights, ((0, 0), (0, 0), (1, 1), (1, 1))))
    large = builder.node("Conv", "large", data, wide, pads=[2, 2, 2, 2])
    difference = builder.node("Sub", "difference", small, large)
    rest = builder.node("Mul", "rest", data, builder.weight("scale", np.float32([0.05])))
    output = builder.node("Add", "output", difference, rest)
    return builder.build("cancelling", {output: (1, 32, 28, 28)})


def test_a_network_that_loses_too_many_digits_is_compiled_directly(
    run_here: RunCommand, host_target: Target, own_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    onnx.save(cancelling_network(), own_directory / "cancelling.onnx")
    lowered = lower(cancelling_network(), host_target)
    (ways,) = layers_of(lowered)
    assert ways[-1].info.way == "winograd 4x4"
    write_record(own_directory / "records", {ways[-1]: 1e-3, ways[0]: 2e-3}, host_target)
    given_ = {"network": own_directory / "cancelling.onnx", "records": own_directory / "records"}
    assert run_here("compile", *flags(given_)) == 0
    assert "with Winograd's convolutions, more than 0.0001: all layers are computed directly" in caplog.text
    coverage = json.loads((artifacts_of(newest_run().info.run_id) / names.COVERAGE_FILE).read_text())
    assert coverage["ways"].keys() == {"direct"}
    assert coverage["num_covered"] == 1
