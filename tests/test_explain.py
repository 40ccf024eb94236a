"""An explanation is of the task that was measured: what it computes, the schedule that TVM applies, and its roof."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from helpers.commands import ANSOR_MLFLOW, RunCommand, environment
from helpers.finished import FinishedWork
from threadpoolctl import threadpool_limits

from ansor_mlflow.commands import explain
from ansor_mlflow.commands.explain import Explanation, explain_task
from ansor_mlflow.commands.plan import plan_tuning
from ansor_mlflow.device import Device
from ansor_mlflow.errors import RecordsError, UserInputError
from ansor_mlflow.foreign import duration
from ansor_mlflow.lowering import LoweredNetwork
from ansor_mlflow.parameters import ExplainOptions, PlanOptions
from ansor_mlflow.records import RECORD_FILE, WORKLOAD_FILE
from ansor_mlflow.records.lines import workload_hash
from ansor_mlflow.tuning import Roofline, measure_roofline

if TYPE_CHECKING:
    from tvm.target import Target

pytestmark = pytest.mark.system


@pytest.fixture(scope="module", autouse=True)
def _roofs_measured_once() -> Iterator[None]:
    roofs: dict[int, Roofline] = {}

    def measured(device: Device) -> Roofline:
        return roofs.get(device.num_threads) or roofs.setdefault(device.num_threads, measure_roofline(device))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(explain, "measure_roofline", measured)
        yield


@pytest.fixture
def records(tuned_records: Path, tmp_path: Path) -> Path:
    """A copy of the records of the small network, without the winners' second times."""
    return Path(
        shutil.copytree(tuned_records, tmp_path / "records", ignore=shutil.ignore_patterns("best", "*.lock", ".*"))
    )


@pytest.fixture(scope="module")
def explanation(tuned_records: Path, small_onnx: Path) -> Explanation:
    return explain_task(ExplainOptions(source=str(tuned_records), network=str(small_onnx)))


def test_the_task_that_takes_the_most_time_is_explained(
    explanation: Explanation, tuned_records: Path, small_onnx: Path
) -> None:
    plan = plan_tuning(PlanOptions(network=str(small_onnx), records=str(tuned_records)))
    times_s = {task.info.name: task.info.weight * (task.best_s or 0) for task in plan.tasks}
    computing = {task.info.name: times_s[task.info.name] for task in plan.tasks if task.info.flops}
    assert explanation.task.name == max(computing, key=lambda name: computing[name])
    np.testing.assert_allclose(explanation.network_s, sum(times_s.values()))
    np.testing.assert_allclose(explanation.time_share, max(computing.values()) / sum(times_s.values()))
    assert explanation.num_tasks == explanation.num_tuned_tasks == len(plan.tasks)


def test_a_task_that_moves_data_is_not_explained_unless_it_is_named(records: Path, small_onnx: Path) -> None:
    given = {"source": str(records), "network": str(small_onnx)}
    tasks = plan_tuning(PlanOptions(network=str(small_onnx), records=str(records))).tasks
    moving = {task.info.workload_hash: task.info.name for task in tasks if not task.info.flops}
    hashes = [workload_hash(line) for line in (records / WORKLOAD_FILE).read_text().splitlines()]
    lines = [json.loads(line) for line in (records / RECORD_FILE).read_text().splitlines()]
    moved = [line for line in lines if hashes[line[0]] in moving]
    for _, fields in moved:
        fields[1] = [1.0]
    (records / RECORD_FILE).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    explained = explain_task(ExplainOptions(**given))
    assert explained.task.flops > 0
    assert explained.time_share < 0.01

    (records / RECORD_FILE).write_text("".join(f"{json.dumps(line)}\n" for line in moved))
    with pytest.raises(
        RecordsError, match=r"the records are only of tasks that move data, such as .*; tune for longer"
    ):
        explain_task(ExplainOptions(**given))
    name = next(iter(moving.values()))
    assert explain_task(ExplainOptions(**given, task=name)).task.name == name


def test_the_programs_are_those_of_the_task(explanation: Explanation, small_lowered: LoweredNetwork) -> None:
    import tvm

    task = small_lowered.tasks[explanation.task.index]
    assert task.info == explanation.task
    tvm.ir.assert_structural_equal(tvm.script.from_source(explanation.computation), task.mod)
    schedule = tvm.s_tir.Schedule(task.mod)
    exec("\n".join(explanation.schedule), {"sch": schedule, "tvm": tvm, "T": tvm.script.tirx})
    assert schedule.mod.script() == explanation.scheduled
    assert explanation.scheduled != explanation.computation


def test_arguments_are_the_inputs_the_weights_and_the_result(tuned_records: Path, small_onnx: Path) -> None:
    """The convolution of the small network: (1, 3, 16, 16) by (8, 3, 3, 3) with eight biases gives (1, 8, 16, 16)."""
    (info,) = [
        task.info for task in plan_tuning(PlanOptions(network=str(small_onnx))).tasks if "conv" in task.info.name
    ]
    given = {"source": str(tuned_records), "network": str(small_onnx)}
    conv = explain_task(ExplainOptions(**given, task=info.name))
    assert explain_task(ExplainOptions(**given, task=str(info.index))).task == conv.task
    assert conv.roofline is not None
    assert conv.bound == conv.roofline.bound(conv.task.flops, conv.argument_bytes)
    assert conv.argument_bytes == 4 * (3 * 16 * 16 + 8 * 3 * 3 * 3 + 8 + 8 * 16 * 16)
    assert conv.task.flops >= 2 * 8 * 16 * 16 * 3 * 3 * 3


@pytest.mark.parametrize(
    ("flops", "num_bytes", "shortest_s", "limit"),
    [(2e9, 1e6, 0.02, "arithmetic"), (1e6, 1e9, 0.1, "memory"), (0.0, 1e9, 0.1, "memory")],
)
def test_the_lower_roof_counts(flops: float, num_bytes: float, shortest_s: float, limit: str) -> None:
    bound = Roofline(peak_flops_per_s=1e11, bandwidth_bytes_per_s=1e10).bound(flops, num_bytes)
    np.testing.assert_allclose(bound.shortest_s, shortest_s)
    assert bound.limit == limit


@pytest.mark.nightly
def test_the_peak_is_above_what_a_product_of_matrices_reaches(host_target: Target) -> None:
    """In turns and on one thread, the best of each, since other tests run beside this one."""
    size = 1024
    factors = np.ones((2, size, size), np.float32)
    peaks, products = [], []
    for _ in range(3):
        peaks.append(measure_roofline(Device.of(host_target, 1)).peak_flops_per_s)
        with threadpool_limits(1):
            for _ in range(5):
                started = time.perf_counter()
                factors[0] @ factors[1]
                products.append(2 * size**3 / (time.perf_counter() - started))
    assert max(peaks) > 0.8 * max(products)


@pytest.mark.nightly
def test_a_plan_knows_what_a_run_measured(finished_work: FinishedWork) -> None:
    plan = plan_tuning(PlanOptions(tune_run=finished_work.tuned))
    assert plan.network == "small"
    assert all(task.best_s for task in plan.tasks)


@pytest.mark.parametrize(
    ("task", "hint"), [("99", r"give a name, or an index from 0 to \d"), ("fused_conv2d", "perhaps you meant .*conv2d")]
)
def test_a_task_that_there_is_not(tuned_records: Path, small_onnx: Path, task: str, hint: str) -> None:
    with pytest.raises(UserInputError, match=f"task='{task}': the network has no such task; {hint}"):
        explain_task(ExplainOptions(source=str(tuned_records), network=str(small_onnx), task=task))


def test_a_task_without_a_record(records: Path, small_onnx: Path) -> None:
    lines = (records / RECORD_FILE).read_text().splitlines()
    (records / RECORD_FILE).write_text("".join(f"{line}\n" for line in lines if json.loads(line)[0] == 0))
    assert explain_task(ExplainOptions(source=str(records), network=str(small_onnx))).num_tuned_tasks == 1
    with pytest.raises(RecordsError, match=r"records has no record of it; tune it, or leave task out"):
        explain_task(ExplainOptions(source=str(records), network=str(small_onnx), task="1"))


def test_records_of_another_network(tuned_records: Path) -> None:
    options = ExplainOptions(source=str(tuned_records), input_shapes={"data": [1, 3, 32, 32]})
    with pytest.raises(
        RecordsError, match=r"the records fit none of the \d+ tasks of resnet-18; give the network, layout"
    ):
        explain_task(options)


def test_the_schedule_of_another_task(records: Path, small_onnx: Path) -> None:
    lines = [json.loads(line) for line in (records / RECORD_FILE).read_text().splitlines()]
    traces = {index: fields[0] for index, fields in lines}
    others = dict(zip(traces, [*list(traces.values())[1:], next(iter(traces.values()))], strict=True))
    rotated = [[index, [others[index], *fields[1:]]] for index, fields in lines]
    (records / RECORD_FILE).write_text("".join(f"{json.dumps(line)}\n" for line in rotated))
    with pytest.raises(RecordsError, match=r"records: the records do not apply \(.+\); tune the network again"):
        explain_task(ExplainOptions(source=str(records), network=str(small_onnx)))


def test_the_command_prints_sections(
    run_here: RunCommand, tuned_records: Path, small_onnx: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "task.json"
    assert run_here("explain", str(tuned_records), "--network", str(small_onnx), "--json", str(path)) == 0
    output = capsys.readouterr().out
    written = json.loads(path.read_text())
    assert "\x1b" not in output
    titles = [
        f"Task {written['task']['index']}: {written['task']['name']}",
        "Computation",
        "Schedule",
        "Scheduled program",
    ]
    assert [line for line in output.splitlines() if line in titles] == titles
    for program in ("computation", "scheduled"):
        assert re.sub(r"T\.int64\((-?\d+)\)", r"\1", written[program]) in output
    for statement in written["schedule"]:
        assert f"    {statement}\n" in output
    assert re.search(rf"^best time +{duration(written['best_s'])}, ", output, re.MULTILINE)
    assert f"limited by {written['bound']['limit']}" in output


@pytest.mark.nightly
def test_the_command_can_be_piped_into_one_that_reads_a_line(
    tuned_records: Path, small_onnx: Path, tmp_path: Path
) -> None:
    command = f"'{ANSOR_MLFLOW}' explain '{tuned_records}' --network '{small_onnx}' | head -n 1"
    env = environment(f"sqlite:///{tmp_path}/mlflow.db", {"PYTHONUNBUFFERED": "1"})
    done = subprocess.run(command, shell=True, env=env, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert re.fullmatch(r"Task \d: \w+\n", done.stdout)
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_bad_input_is_one_line(run_here: RunCommand, experiment_id: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here("explain") == 2
    message = "source='': it must be the ID of a tuning run, or a path or an artifact URI of records"
    assert message in capsys.readouterr().err
