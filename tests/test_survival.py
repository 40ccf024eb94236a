"""A tuning outlives bad candidates, dying workers and a clock that jumps; a full disk or SIGKILL leaves its records."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import mlflow
import psutil
import pytest
from helpers.commands import TESTS, environment
from helpers.tuner_process import assert_gone, assert_readable, tuning
from helpers.worker_tasks import fill_array, fill_tensor, grow, hang, pid_of_worker, wait_for_pid

from ansor_mlflow import names
from ansor_mlflow.device.device import Device
from ansor_mlflow.errors import UserInputError
from ansor_mlflow.files import ScratchDirectory
from ansor_mlflow.lowering.network import LoweredNetwork
from ansor_mlflow.parameters import TuneOptions
from ansor_mlflow.processes import Outcome, WorkerPool
from ansor_mlflow.tuning.job import TuningJob, directory_lock, tune_job
from ansor_mlflow.workers.builder import LocalBuilder
from ansor_mlflow.workers.measure import MeasureSettings, RunJob
from ansor_mlflow.workers.runner import LocalRunner

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.target import Target

pytestmark = pytest.mark.system

MEMORY_BYTES = 2**30


def candidates() -> dict[str, IRModule]:
    from tvm import IRModule
    from tvm.script import tirx as T  # noqa: N812 - TVMScript's own name

    @T.prim_func
    def endless_loop(data: T.Buffer((64,), "float32")):
        while T.call_extern("int32", "sched_yield") == 0:
            data[0] = data[0] + T.float32(1)

    @T.prim_func
    def out_of_bounds(data: T.Buffer((64,), "float32")):
        data[T.int64(2**40)] = T.float32(1)

    @T.prim_func
    def huge_workspace(data: T.Buffer((64,), "float32")):
        cache = T.alloc_buffer((2**29,), "float32")
        for i in range(2**29):
            cache[i] = data[i % 64]
        for i in range(2**29):
            data[i % 64] = data[i % 64] + cache[2**29 - 1 - i]

    @T.prim_func
    def leak(data: T.Buffer((64,), "float32")):
        while T.call_extern("int32", "sched_yield") == 0:
            T.evaluate(
                T.call_extern("int64", "memset", T.call_extern("int64", "malloc", T.int64(2**26)), 1, T.int64(2**26))
            )

    @T.prim_func
    def slow(data: T.Buffer((64,), "float32")):
        T.evaluate(T.call_extern("int32", "usleep", 50000))

    @T.prim_func
    def fast(data: T.Buffer((64,), "float32")):
        T.evaluate(T.call_extern("int32", "usleep", 1000))

    functions = (endless_loop, out_of_bounds, huge_workspace, leak, slow, fast)
    names_ = ("endless_loop", "out_of_bounds", "huge_workspace", "leak", "slow", "fast")
    return {
        name: IRModule({"main": function.with_attr("global_symbol", "main")})
        for name, function in zip(names_, functions, strict=True)
    }


@pytest.fixture(scope="module")
def libraries(host_target: Target) -> Iterator[Mapping[str, Path]]:
    mods = candidates()
    with contextlib.closing(LocalBuilder(host_target, max_workers=2, timeout_s=60)) as builder:
        outcomes = builder.build(list(mods.values()))
        assert [outcome.error for outcome in outcomes] == [""] * len(mods)
        yield {name: outcome.value for name, outcome in zip(mods, outcomes, strict=True) if outcome.value}


SETTINGS = MeasureSettings(number=1, repeat=3, min_repeat_ms=0, cache_flush=False, num_threads=1, timeout_s=60)


@pytest.fixture(scope="module")
def runner() -> Iterator[LocalRunner]:
    with contextlib.closing(LocalRunner(SETTINGS, memory_bytes=MEMORY_BYTES)) as runner:
        yield runner


def job(path: Path, best_s: float | None = None, task: str = "") -> RunJob:
    return RunJob(path, (("TENSOR", "float32", (64,)),), task=task, best_s=best_s)


def assert_measured(outcome: Outcome[tuple[float, ...]], num_values: int = 3) -> None:
    assert outcome.error == ""
    assert outcome.value is not None
    assert len(outcome.value) == num_values


@pytest.mark.parametrize(
    ("name", "failure", "error"),
    [
        ("endless_loop", "timed_out", r"killed after [\d.]+ s"),
        ("out_of_bounds", "crashed", r"the worker process died \(SIGSEGV\)"),
        ("huge_workspace", "crashed", r"the worker process died \(.*\)"),
        ("leak", "crashed", r"the worker process died \(SIGSEGV\)"),
    ],
)
def test_a_bad_candidate_costs_itself_alone(
    libraries: Mapping[str, Path], runner: LocalRunner, name: str, failure: str, error: str
) -> None:
    """The limit of a program follows from the best of its task, so that a hang costs seconds and not a minute."""
    neighbours = [job(libraries["fast"], task=task) for task in ("before", "after")]
    best_s = 1e-3 if failure == "timed_out" else None  # what crashes may take its time on a slow machine
    before, bad, after = runner.run([neighbours[0], job(libraries[name], best_s=best_s), neighbours[1]])
    assert (bad.value, bad.failure) == (None, failure)
    assert re.fullmatch(error, bad.error)
    for outcome in (before, after, *runner.run([job(libraries["fast"])])):
        assert_measured(outcome)
    if failure == "timed_out":  # far less than the 60 s of the settings
        assert float(bad.error.split()[2]) < 30


def test_a_candidate_is_compared_with_those_of_its_task_alone(
    libraries: Mapping[str, Path], runner: LocalRunner
) -> None:
    runner._repeated_s = math.inf  # what other programs disturb is not measured again
    first, fast, slow, other = runner.run(
        [
            job(libraries["slow"], task="one"),
            job(libraries["fast"], task="one"),
            job(libraries["slow"], task="one"),
            job(libraries["slow"], task="another"),
        ]
    )
    assert_measured(first, num_values=3)
    assert_measured(fast, num_values=3)
    assert_measured(slow, num_values=1)
    assert_measured(other, num_values=3)


def test_the_timeout_holds_where_nothing_is_known_of_a_task(libraries: Mapping[str, Path]) -> None:
    with contextlib.closing(LocalRunner(replace(SETTINGS, timeout_s=0.5))) as runner:
        assert_measured(*runner.run([job(libraries["fast"])]))
        hung, fast = runner.run([job(libraries["endless_loop"]), job(libraries["fast"])])
    assert hung.failure == "timed_out"
    assert hung.error.startswith("killed after ")  # half a second, or longer on a busy machine
    assert_measured(fast)


@pytest.fixture
def one_worker() -> Iterator[WorkerPool]:
    with contextlib.closing(WorkerPool(1, memory_bytes=MEMORY_BYTES)) as pool:
        yield pool


def only_value(outcomes: list[Outcome[int]]) -> int:
    (outcome,) = outcomes
    assert outcome.value is not None
    return outcome.value


@pytest.mark.parametrize("eat", [grow, fill_array, fill_tensor])
def test_a_worker_that_eats_memory_is_replaced(one_worker: WorkerPool, eat: Callable[[object], object]) -> None:
    pid = only_value(one_worker.map(pid_of_worker, [0], 120))
    assert one_worker.map(eat, [0], 60) == [
        Outcome(
            failure="crashed",
            error="the worker process died (out of memory: it reached its bound, worker_memory_mib while tuning)",
        )
    ]
    assert only_value(one_worker.map(pid_of_worker, [0], 120)) != pid
    assert not psutil.pid_exists(pid)


def test_a_worker_that_is_killed_from_outside_is_replaced(one_worker: WorkerPool, tmp_path: Path) -> None:
    """As the system does when memory runs out."""
    with ThreadPoolExecutor(1) as executor:
        outcomes = executor.submit(one_worker.map, hang, [tmp_path / "pid"], 120)
        pid = wait_for_pid(tmp_path / "pid")
        os.kill(pid, signal.SIGKILL)
    assert outcomes.result() == [Outcome(failure="crashed", error="the worker process died (SIGKILL)")]
    assert only_value(one_worker.map(pid_of_worker, [0], 120)) != pid


@pytest.mark.nightly
def test_a_clock_that_jumps_neither_kills_nor_spares_nor_ends_anything(tmp_path: Path) -> None:
    library = tmp_path / "clock_jump.so"
    source = TESTS / "helpers" / "clock_jump.c"
    subprocess.run(["g++", "-x", "c", "-shared", "-fPIC", "-O1", "-o", str(library), str(source)], check=True)
    env = {
        **os.environ,
        "LD_PRELOAD": str(library),
        "CLOCK_OFFSET_FILE": str(tmp_path / "offset"),
        "PYTHONPATH": str(TESTS),
    }
    command = [sys.executable, "-m", "helpers.clock_probe"]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["worked"] == [[0, 1, -1], ""]
    failure, elapsed_s = found["hung"]
    assert failure == "timed_out"
    assert 2 <= elapsed_s < 60
    total_trials, stop_reason, elapsed_s = found["tuned"]
    assert (total_trials, stop_reason) == (12, "trials")
    assert 0 < elapsed_s < 240  # the clock jumps by hours


FILL_LATER = """
mkdir -p "$1" && mount -t tmpfs -o size=64m tmpfs "$1" || exit 99
(while [ ! -e "$2" ]; do sleep 0.05; done; head -c 64M /dev/zero > "$1/big" 2> /dev/null) &
export TMPDIR="$1"
shift 2
exec "$@"
"""
"""Runs a command with a disk of 64 MiB for temporary files, which is filled as soon as a file appears.

Arguments: where the disk is mounted, that file, and the command.
"""


def can_mount() -> bool:
    unshare = shutil.which("unshare")
    return unshare is not None and subprocess.run([unshare, "-rm", "true"], check=False).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="needs user namespaces")
@pytest.mark.nightly
def test_a_full_disk_of_temporary_files_ends_the_run_with_one_line_and_its_records(
    small_onnx: Path, experiment_id: str, tmp_path: Path, short_path: Path
) -> None:
    """The disk of the records is filled by `make test-faults`."""
    cwd, fill = short_path / "cwd", short_path / "fill"
    wrapper = ["unshare", "-rm", "sh", "-c", FILL_LATER, "sh", str(cwd / "tmp"), str(fill)]
    with tuning(small_onnx, cwd, tracked(experiment_id), wrapper=wrapper, trials=5000) as tuner:
        tuner.wait_for_rounds(2)
        fill.touch()
        finished = tuner.wait(200)
    assert finished.exit_code == 3, finished.stderr
    (error,) = finished.errors
    assert error == f"Error: no space is left in the temporary directory {cwd}/tmp; free some, or set TMPDIR to another"
    assert "Traceback" not in finished.stderr
    (run,) = mlflow.MlflowClient().search_runs([experiment_id], order_by=["start_time DESC"], max_results=1)
    assert run.info.status == "FAILED"
    assert run.data.tags[names.TAG_ERROR] == error.removeprefix("Error: ")
    assert run.data.tags[names.TAG_EXIT_CODE] == "3"
    artifacts = Path(run.info.artifact_uri.removeprefix("file://"))
    assert_readable(artifacts / names.RECORDS_DIR, tmp_path / "best", min_trials=4)


def tracked(experiment_id: str) -> dict[str, str]:
    return environment(os.environ["MLFLOW_TRACKING_URI"], {"MLFLOW_EXPERIMENT_ID": experiment_id})


HOLD = """
import sys
from pathlib import Path
from ansor_mlflow.tuning.job import directory_lock

with directory_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def another_tuner(directory: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLD, str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def refusal(directory: Path, process: subprocess.Popen[str]) -> str:
    return (
        rf"{directory}: process {process.pid} on .* \(since .*\) tunes in this directory; wait until it ends, or give"
    )


def test_two_tuners_in_one_directory(single: LoweredNetwork, host_target: Target, tmp_path: Path) -> None:
    records = tmp_path / "records"
    tuning_job = TuningJob(network="single", lowered=single, device=Device.of(host_target, 1), records=records)
    options = TuneOptions(trials=1, strategy="random", cost_model="none", min_repeat_ms=0)
    with another_tuner(records) as first:
        with pytest.raises(UserInputError, match=refusal(records, first)):
            tune_job(tuning_job, options, options)
        with directory_lock(tmp_path / "another"):
            pass
        first.kill()
        first.wait()
        assert tune_job(tuning_job, options, options).total_trials == 1
    with (
        directory_lock(records),
        pytest.raises(UserInputError, match=f"process {os.getpid()} on"),
        directory_lock(records),
    ):
        pass


@pytest.mark.parametrize("name", ["link", "records/../records", "."])
def test_a_directory_is_held_under_all_of_its_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    records = tmp_path / "records"
    (tmp_path / "link").symlink_to(records)
    with directory_lock(records):
        monkeypatch.chdir(records if name == "." else tmp_path)
        with pytest.raises(UserInputError, match=f"process {os.getpid()} on"), directory_lock(Path(name)):
            pass


def test_a_killed_tuner_takes_its_workers_along_and_leaves_readable_records(
    small_onnx: Path, experiment_id: str, tmp_path: Path, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its scratch directory is removed when the next tuner starts; that of a living one is not."""
    cwd = short_path / "cwd"
    with tuning(small_onnx, cwd, tracked(experiment_id), trials=5000) as tuner:
        monkeypatch.setattr(tempfile, "tempdir", str(cwd))
        tuner.wait_for_rounds(4)
        (scratch,) = scratch_directories(cwd)
        with contextlib.closing(ScratchDirectory()) as living:
            assert scratch_directories(cwd) == {scratch, living.path}
        descendants = tuner.descendants
        assert len(tuner.workers) >= 2
        tuner.process.kill()
        assert tuner.wait(60).exit_code == -signal.SIGKILL
        assert_gone(descendants)
        assert_readable(tuner.records, tmp_path / "best", min_trials=4)

    assert scratch_directories(cwd) == {scratch}
    with contextlib.closing(ScratchDirectory()) as living, contextlib.closing(ScratchDirectory()) as next_one:
        assert scratch_directories(cwd) == {living.path, next_one.path}
    assert scratch_directories(cwd) == set()


def scratch_directories(parent: Path) -> set[Path]:
    return set(parent.glob("ansor_mlflow-build-*"))
