"""Several algorithms for a layer: they compete for trials, and the fastest is taken as far as it is exact."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
import pytest
from helpers.algorithms import ERRORS, conv, layers_of, output_error
from helpers.commands import RunCommand, flags
from helpers.runs_here import artifacts_of, newest_run

from ansor_mlflow import names
from ansor_mlflow.errors import UserInputError
from ansor_mlflow.lowering import TuningTask
from ansor_mlflow.lowering.lower import lower
from ansor_mlflow.measuring import checking
from ansor_mlflow.model import compile_tuned, library
from ansor_mlflow.networks import load_network
from ansor_mlflow.networks.graph import GraphBuilder
from ansor_mlflow.parameters import TuneOptions
from ansor_mlflow.settings import LoweringSettings
from ansor_mlflow.sketches import find_programs
from ansor_mlflow.tracking import TuningHistory
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
from ansor_mlflow.tuning import resolve_num_trials
from ansor_mlflow.tuning.stopping import GradientScheduler, dominated_tasks, seemingly_faster

if TYPE_CHECKING:
    from tvm.target import Target


def write_record(directory: Path, seconds: dict[TuningTask, float | list[float]], target: Target) -> None:
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
        runs_s = run_s if isinstance(run_s, list) else [run_s]
        database.commit_tuning_record(TuningRecord(program.trace, workload, runs_s, target, arguments_))


@pytest.mark.parametrize("fastest", [0, 1, 2])
def test_compile_takes_the_way_with_the_fastest_record(fastest: int, host_target: Target, tmp_path: Path) -> None:
    model = load_network(conv(28, 28, 32, 32)).model
    lowered = lower(model, host_target)
    (algorithms,) = layers_of(lowered)
    measured: list[float] = [1e-3, 1e-3, 6e-3]  # the last time other programs used the CPU
    seconds = {algorithm: measured if place == fastest else 2e-3 for place, algorithm in enumerate(algorithms)}
    write_record(tmp_path / "best", seconds, host_target)
    coverage = compile_tuned(lowered, host_target, tmp_path / "best", tmp_path / "model.so")
    assert [task.algorithm for task in coverage.covered] == [algorithms[fastest].info.algorithm]
    assert coverage.flops_share == 1
    assert output_error(tmp_path / "model.so", model) <= ERRORS[4]


def test_variants_of_a_network_share_what_is_the_same(host_target: Target, tmp_path: Path) -> None:
    """The second one is compiled by the same process, which has the code of all functions but its convolution."""
    model = load_network(conv(28, 28, 32, 32)).model
    for algorithm in ("winograd", "direct"):
        lowered = lower(model, host_target, LoweringSettings(algorithm=algorithm))  # type: ignore[arg-type]
        before = library._object_of.cache_info()
        compile_tuned(lowered, host_target, None, tmp_path / f"{algorithm}.so")
        assert output_error(tmp_path / f"{algorithm}.so", model) <= ERRORS[4]
    compile_tuned(lowered, host_target, None, tmp_path / "again.so")
    found = library._object_of.cache_info()
    assert found.misses - before.misses <= 1 < found.hits - before.hits
    assert output_error(tmp_path / "again.so", model) == output_error(tmp_path / "direct.so", model)


def test_a_kept_schedule_is_of_the_same_blocks(host_target: Target) -> None:
    """It names them, though functions are equal whatever their blocks are called."""
    import tvm
    from tvm import te

    data = te.placeholder((64, 64), "float32", "data")
    for name in ("first", "second"):
        result = te.compute((64, 64), lambda *place: data(*place) + 1, name)
        mod = tvm.IRModule({"main": te.create_prim_func([data, result])})
        trace = library._trace_of(library._key(mod), library._names_of_blocks(mod), library._key(host_target))
        assert trace is not None
        trace.apply_to_schedule(tvm.s_tir.Schedule(mod), remove_postproc=False)


def test_a_way_without_a_record_is_not_taken_where_another_has_one(host_target: Target, tmp_path: Path) -> None:
    """Records of earlier versions are of the direct algorithm, and stay valid."""
    lowered = lower(load_network(conv(28, 28, 32, 32)).model, host_target)
    (algorithms,) = layers_of(lowered)
    write_record(tmp_path / "best", {algorithms[0]: 1.0}, host_target)
    coverage = compile_tuned(lowered, host_target, tmp_path / "best", tmp_path / "model.so")
    assert [task.algorithm for task in coverage.covered] == ["direct"]


@pytest.mark.parametrize(
    ("algorithm", "algorithms"),
    [
        ("auto", ["direct", "winograd 2x2", "winograd 4x4"]),
        ("direct", ["direct"]),
        ("winograd", ["winograd 2x2", "winograd 4x4"]),
    ],
)
def test_the_algorithm_decides_which_ways_are_tuned(algorithm: str, algorithms: list[str], host_target: Target) -> None:
    settings_ = LoweringSettings(algorithm=algorithm)  # type: ignore[arg-type]
    lowered = lower(load_network(conv(28, 28, 32, 32)).model, host_target, settings_)
    convolutions = [task.info for task in lowered.tasks if "conv2d" in task.info.name]
    assert [task.algorithm for task in convolutions] == algorithms
    assert lowered.num_algorithms == len(algorithms) - 1
    assert len({task.layer_hash for task in convolutions}) == 1
    assert lower(load_network(conv(7, 7, 8, 8)).model, host_target).num_algorithms == 0  # a small layer
    assert [task.info.index for task in lowered.tasks] == list(range(len(lowered.tasks)))


@pytest.mark.nightly
@pytest.mark.system
def test_a_library_that_may_not_grow_takes_the_smaller_way(host_target: Target, tmp_path: Path) -> None:
    """The weights of a layer of 64 channels are 0.14 MiB, 0.25 with F(2×2) and 0.56 with F(4×4)."""
    lowered = lower(load_network(conv(28, 28, 64, 64)).model, host_target)
    (algorithms,) = layers_of(lowered)
    write_record(
        tmp_path / "best", {algorithm: 3e-3 - place * 1e-3 for place, algorithm in enumerate(algorithms)}, host_target
    )
    found = {}
    for limit in (1.0, 0.3, 0.1, None):
        library = tmp_path / f"{limit}.so"
        max_bytes = None if limit is None else int(limit * 2**20)
        coverage = compile_tuned(lowered, host_target, tmp_path / "best", library, max_bytes=max_bytes)
        (found[limit],) = [task.algorithm for task in coverage.covered]
        assert coverage.growth_bytes == {"direct": 0, "winograd 2x2": 7, "winograd 4x4": 27}[found[limit]] * 64 * 64 * 4
    assert found == {1.0: "winograd 4x4", 0.3: "winograd 2x2", 0.1: "direct", None: "winograd 4x4"}


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
                algorithm=f"algorithm {index}" if index else "direct",
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
        ((2.1e-3, 1e-3, 1.5e-3), 1, [0]),  # a single trial may have been disturbed
        ((2e-3, 1e-3, 1.3e-3), 2, [0]),
        ((2e-3, 1e-3, 1.3e-3), 8, [0, 2]),
        ((1e-3, 1.05e-3, None), 8, []),
        ((1e-3, None, None), 8, []),
    ],
)
def test_a_way_that_lost_beyond_the_noise_gets_no_more_trials(
    best_s: tuple[float | None, ...], trials: int, losers: list[int]
) -> None:
    assert [state.info.index for state in dominated_tasks(states(*best_s, trials=trials))] == losers


def test_in_the_end_a_way_that_is_behind_is_not_measured_again() -> None:
    """However few trials it had: there will be no better program of it."""
    algorithms = states(1.0, 1.2, trials=4)
    assert not dominated_tasks(algorithms)
    assert [state.info.index for state in dominated_tasks(algorithms, in_the_end=True)] == [1]


def test_a_way_that_was_left_out_is_measured_again_where_the_host_became_slower() -> None:
    algorithms = states(1.0, 1.2, trials=4)
    algorithms[0].confirmed_s = 1.1
    assert not seemingly_faster(algorithms)
    algorithms[0].confirmed_s = 1.3
    assert [state.info.index for state in seemingly_faster(algorithms)] == [1]


def test_every_layer_has_its_first_round_before_another_way_does() -> None:
    algorithms = states(None, None, trials=0)
    other = TaskState(info=TaskInfo(index=2, name="dense", weight=1, flops=1.0, workload_hash="0x2"))
    scheduler = GradientScheduler(3, seed=0)
    order = []
    for _ in range(3):
        index = scheduler.next_task([*algorithms, other])
        assert index is not None
        order.append(index)
        state = [*algorithms, other][index]
        state.best_s = 1e-3
        scheduler.round_finished(state)
    assert order == [0, 2, 1]


def test_only_what_a_way_may_gain_over_the_fastest_counts() -> None:
    """After two rounds each, the optimistic guess is half of the time; the slow one would still be slower then."""
    algorithms = [*states(1e-3, 2.2e-3), *states(1e-4)]
    algorithms[2].info = replace(algorithms[2].info, index=2, name="dense", workload_hash="0x9")
    scheduler = GradientScheduler(3, seed=0)
    for state in algorithms * 2:
        scheduler.round_finished(state)
    picks = {scheduler.next_task(algorithms) for _ in range(20)}
    assert 0 in picks
    algorithms[0].stop_reason = "plateau"
    assert Counter(scheduler.next_task(algorithms) for _ in range(50)).most_common(1)[0][0] == 2


def test_the_report_counts_a_layer_once() -> None:
    """It began with the direct algorithm, and ended with another: that is its gain."""
    algorithms = states(None, None, trials=0)
    history = TuningHistory()
    history.begin(
        TuningPlan(network="conv", target="llvm", tasks=tuple(algorithm.info for algorithm in algorithms), num_trials=2)
    )
    for step, (algorithm, run_s) in enumerate(zip(algorithms, (3e-3, 1e-3), strict=True), start=1):
        trial = Trial(step=step, task=algorithm.info.name, status=TrialStatus.OK, run_s=(run_s,))
        algorithm.add(trial)
        history.add(
            TuningRound(
                trials=(trial,),
                task=algorithm.snapshot(),
                tasks=tuple(each.snapshot() for each in algorithms),
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
    assert resolve_num_trials(options, 4, num_algorithms=2) == 2
    with pytest.raises(UserInputError, match="trials=2, but the network has 3 tasks"):
        resolve_num_trials(options, 5, num_algorithms=2)


@pytest.mark.parametrize(("preset", "num_trials"), [("quick", 6 + 4), ("standard", 18 + 12), ("thorough", 72 + 48)])
def test_a_further_way_adds_half_a_task_to_the_budget(preset: str, num_trials: int) -> None:
    options = TuneOptions(preset=preset)
    assert resolve_num_trials(options, 7, num_sketched=7, num_algorithms=4) == num_trials
    assert resolve_num_trials(TuneOptions(space="both"), 7, num_sketched=0, num_algorithms=4) == 7 * 64


def test_metaschedules_space_has_the_direct_way_alone() -> None:
    assert TuneOptions(space="metaschedule").lowering.algorithm == "direct"
    with pytest.raises(UserInputError, match="algorithm=winograd and space=metaschedule"):
        _ = TuneOptions(space="metaschedule", algorithm="winograd").lowering


def test_each_way_says_what_it_loses_and_is_not_offered_if_that_is_too_much(
    host_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    (algorithms,) = layers_of(lower(load_network(conv(28, 28, 32, 32)).model, host_target))
    direct, small, large = (algorithm.info.max_rel_error for algorithm in algorithms)
    assert direct is None
    assert small is not None
    assert large is not None
    assert 0 < small < large <= ERRORS[4]
    monkeypatch.setattr("ansor_mlflow.lowering.algorithms.find._MAX_REL_ERROR", (small + large) / 2)
    (left,) = layers_of(lower(load_network(conv(28, 28, 32, 32)).model, host_target))
    assert [task.info.algorithm for task in left] == ["direct", "winograd 2x2"]


def cancelling_network() -> onnx.ModelProto:
    """A convolution, the same one subtracted as one of 9 × 9, and a hundredth of its size: only a direct one is exact
    enough.
    """
    rng = np.random.default_rng(0)
    builder = GraphBuilder(seed=0)
    data = builder.input("data", (1, 32, 28, 28))
    weights = rng.normal(size=(32, 32, 3, 3)).astype("float32")
    small = builder.node("Conv", "small", data, builder.weight("w3", weights), pads=[1, 1, 1, 1])
    wide = builder.weight("w9", np.pad(weights, ((0, 0), (0, 0), (3, 3), (3, 3))))
    large = builder.node("Conv", "large", data, wide, pads=[4, 4, 4, 4])
    difference = builder.node("Sub", "difference", small, large)
    rest = builder.node("Mul", "rest", data, builder.weight("scale", np.float32([0.05])))
    output = builder.node("Add", "output", difference, rest)
    return builder.build("cancelling", {output: (1, 32, 28, 28)})


@pytest.mark.system
def test_a_network_that_loses_too_many_digits_is_compiled_directly(
    run_here: RunCommand,
    host_target: Target,
    own_directory: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checking, "_MOST_SENSITIVE", 1.0)  # this network loses digits in any runtime
    onnx.save(cancelling_network(), own_directory / "cancelling.onnx")
    lowered = lower(cancelling_network(), host_target)
    (algorithms,) = layers_of(lowered)
    assert algorithms[-1].info.algorithm == "winograd 4x4"
    write_record(own_directory / "records", {algorithms[-1]: 1e-3, algorithms[0]: 2e-3}, host_target)
    given_ = {"network": own_directory / "cancelling.onnx", "records": own_directory / "records"}
    assert run_here("compile", *flags(given_)) == 0
    assert re.search(r"with Winograd's .*, max_rel_error .* of 7.5e-05 allowed: all layers are direct", caplog.text)
    coverage = json.loads((artifacts_of(newest_run().info.run_id) / names.COVERAGE_FILE).read_text())
    assert coverage["algorithms"].keys() == {"direct"}
    assert coverage["num_covered"] == 1
