"""A terminal gets a bar and a table of tasks; a file or a pipe gets the log alone."""

from __future__ import annotations

import io
import logging
import os
import pty
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
from rich.console import Console
from rich.live import Live

from ansor_mlflow.cli.progress import ProgressDisplay, TuningView, _log_through
from ansor_mlflow.trials import (
    Durations,
    StopReason,
    TaskInfo,
    TaskState,
    Trial,
    TrialStatus,
    TuningPlan,
    TuningResult,
    TuningRound,
)

SHOW_A_SWEEP = """
from ansor_mlflow.cli.progress import sweep_table
from ansor_mlflow.commands.sweep import SweepResult
from ansor_mlflow.commands.sweep.declaration import Entry
from ansor_mlflow.commands.sweep.plans import EntryPlan
from ansor_mlflow.commands.sweep.results import EntryResult
from ansor_mlflow.parameters import PipelineOptions

with sweep_table() as watch:
    entry = Entry(name="mlp", options=PipelineOptions(), weight=1.0)
    result = EntryResult(entry=entry, plan=EntryPlan(), node="node-7")
    watch(SweepResult(name="all", run_id="", experiment_id="", entries=(result,)))
"""
COUNT_OBSERVERS = """
import threading
from ansor_mlflow.cli.progress import progress_observers
with progress_observers() as observers:
    number, threads = len(observers), threading.active_count()
print(number, threads)
"""
LOG_A_LINE = """
import logging
from ansor_mlflow.cli.progress import progress_observers
from ansor_mlflow.trials import TaskInfo, TuningPlan
info = TaskInfo(index=0, name="conv", weight=1, flops=1e6, workload_hash="0x1")
logging.getLogger("ansor_mlflow").setLevel(logging.INFO)
with progress_observers() as (display,):
    display.tuning_started(TuningPlan(network="small", target="llvm", tasks=(info,), num_trials=8))
    logging.getLogger("ansor_mlflow").info("a line of the log")
"""


def task(index: int, run_s: Sequence[float] = (), *, weight: int = 1, num_failed: int = 0) -> TaskState:
    state = TaskState(
        info=TaskInfo(index=index, name=f"task{index}", weight=weight, flops=1e6, workload_hash=f"0x{index}")
    )
    for step, seconds in enumerate(run_s):
        state.add(Trial(step=step, task=state.info.name, status=TrialStatus.OK, run_s=(seconds,)))
    for step in range(num_failed):
        state.add(Trial(step=step, task=state.info.name, status=TrialStatus.CRASHED, error="it crashed"))
    return state


def plan_of(tasks: Sequence[TaskState], network: str = "small", num_trials: int = 80) -> TuningPlan:
    return TuningPlan(
        network=network, target="llvm x ×2", tasks=tuple(task.info for task in tasks), num_trials=num_trials
    )


def round_of(tasks: Sequence[TaskState], index: int = 0, *, total_trials: int = 20) -> TuningRound:
    return TuningRound(
        trials=(),
        task=tasks[index],
        tasks=tuple(tasks),
        total_trials=total_trials,
        elapsed_s=60.0,
        durations=Durations(),
    )


def result_of(tasks: Sequence[TaskState], stop_reason: str = StopReason.PLATEAU) -> TuningResult:
    return TuningResult(
        tasks=tuple(tasks), total_trials=20, elapsed_s=60.0, durations=Durations(), stop_reason=stop_reason
    )


def console_of(file: io.StringIO | io.TextIOWrapper, width: int = 80, height: int = 24) -> Console:
    return Console(file=file, force_terminal=True, color_system=None, width=width, height=height)


def drawn(view: TuningView, width: int = 80, height: int = 24) -> list[str]:
    screen = io.StringIO()
    console_of(screen, width, height).print(view)
    return [line.rstrip() for line in screen.getvalue().splitlines()]


def names_in(lines: Sequence[str]) -> list[str]:
    return [word for line in lines for word in line.split() if word.startswith("task") and word[4:].isdigit()]


def test_before_the_first_round_only_what_is_known_is_shown() -> None:
    assert drawn(TuningView(plan=plan_of([task(0), task(1, weight=3)]))) == [
        f"small{'0/80 trials':>75}",
        "searching, building and measuring the first candidates",
        "task  weight",
        "task0      1",
        "task1      3",
    ]


def test_a_round_shows_the_budget_the_network_and_every_task() -> None:
    tasks = [task(0, [3e-3, 2e-3], weight=2), task(1, [9e-3], num_failed=2)]
    tasks[0].stop_reason = StopReason.PLATEAU
    bar, status, *table = drawn(TuningView(plan=plan_of(tasks), latest=round_of(tasks)))
    assert bar.split()[0] == "small"
    assert bar.endswith("20/80 trials  20.0/min")
    assert status == "network 13 ms · 0:01:00 elapsed · 0:03:00 left"
    assert [line.split() for line in table] == [
        ["task", "weight", "best", "GFLOP/s", "trials", "failed", "stopped", "by"],
        ["task1", "1", "9", "ms", "0.1", "3", "2"],
        ["▸", "task0", "2", "2", "ms", "0.5", "2", "plateau"],
    ]


@pytest.mark.parametrize(("height", "num_shown"), [(5, 3), (13, 3), (24, 14), (28, 18), (29, 20), (60, 20)])
def test_the_table_leaves_room_for_the_log(height: int, num_shown: int) -> None:
    tasks = [task(index, [(20 - index) * 1e-3]) for index in range(20)]
    lines = drawn(TuningView(plan=plan_of(tasks), latest=round_of(tasks)), height=height)
    assert names_in(lines) == [f"task{index}" for index in range(num_shown)]
    assert (lines[-1] == f"… and {20 - num_shown} more") == (num_shown < 20)


def test_the_task_of_the_round_is_shown_where_the_table_is_cut() -> None:
    tasks = [task(index, [(20 - index) * 1e-3]) for index in range(20)]
    lines = drawn(TuningView(plan=plan_of(tasks), latest=round_of(tasks, 15)), height=13)
    assert names_in(lines) == ["task0", "task1", "task15"]
    assert lines[-2].startswith("▸ task15 ")
    assert lines[-1] == "… and 17 more"


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_every_line_fits_the_terminal(width: int) -> None:
    tasks = [task(0, [1e-3], num_failed=1), task(1, [1.0], weight=100)]
    for state in tasks:
        state.info = replace(state.info, name="fused_conv2d_add_multiply_sigmoid_multiply_add_" + state.info.name)
        state.confirmed_s, state.stop_reason = 1e-3, StopReason.SPACE_EXHAUSTED
    plan = plan_of(tasks, network="a/very/long/path" * 5)
    for latest in (None, round_of(tasks), result_of(tasks)):
        lines = drawn(TuningView(plan=plan, latest=latest), width=width)
        assert len(lines) == 5
        assert max(map(len, lines)) <= width
        assert all("fused_conv2" in line for line in lines[3:])


def test_names_are_no_markup() -> None:
    tasks = [task(0, [1e-3])]
    tasks[0].info = replace(tasks[0].info, name="conv[red]")
    lines = drawn(TuningView(plan=plan_of(tasks, network="net[bold]"), latest=round_of(tasks)))
    assert lines[0].startswith("net[bold] ")
    assert lines[3].startswith("▸ conv[red] ")


def test_a_terminal_without_unicode_gets_ascii() -> None:
    tasks = [task(index, [1e-5]) for index in range(20)]
    screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    console_of(screen).print(TuningView(plan=plan_of(tasks, network="网络"), latest=round_of(tasks)))
    screen.seek(0)
    lines = screen.read().splitlines()
    assert lines[0].startswith("??")
    assert lines[3].startswith("> task0 ")
    assert " 10 us " in lines[3]
    assert lines[-1].rstrip() == "~ and 6 more"


def test_the_end_shows_the_second_measurements() -> None:
    tasks = [task(0, [2e-3], weight=2), task(1, [1e-3])]
    tasks[0].confirmed_s = 2.5e-3
    for state in tasks:
        state.stop_reason = StopReason.PLATEAU
    _, status, *table = drawn(TuningView(plan=plan_of(tasks), latest=result_of(tasks)))
    assert status == "network 5 ms, confirmed 6 ms · 0:01:00 elapsed · stopped by plateau"
    assert [line.split() for line in table] == [
        ["task", "weight", "best", "confirmed", "GFLOP/s", "trials", "stopped", "by"],
        ["task0", "2", "2", "ms", "2.5", "ms", "0.5", "1", "plateau"],
        ["task1", "1", "1", "ms", "1.0", "1", "plateau"],
    ]


def test_rounds_redraw_at_most_twice_a_second_and_the_last_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")  # a dumb terminal gets the last state only
    tasks = [task(0, [2e-3])]
    screen = io.StringIO()
    with Live(console=console_of(screen), auto_refresh=False) as live:
        display = ProgressDisplay(lambda view, is_due: live.update(view, refresh=is_due))
        display.tuning_started(plan_of(tasks, num_trials=1000))
        started_s = time.monotonic()
        for total_trials in range(1, 100):
            display.round_finished(round_of(tasks, total_trials=total_trials))
        assert screen.getvalue().count("/1000 trials") <= 1 + (time.monotonic() - started_s) / 0.5
        display.round_finished(round_of(tasks, total_trials=1000))
        assert "1000/1000 trials" in screen.getvalue()
        display.tuning_finished(result_of(tasks))
        assert "stopped by plateau" in screen.getvalue()


def test_no_display_in_a_pipe() -> None:
    result = subprocess.run([sys.executable, "-c", COUNT_OBSERVERS], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["0", "1"]
    assert result.stderr == ""


def run_on_terminal(code: str) -> tuple[str, str]:
    """Standard output, which is a pipe, and what came to the terminal that is standard error."""
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "PYTHONIOENCODING": "utf-8"}
    result = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=theirs, text=True, env=env, check=True
    )
    os.close(theirs)
    shown = os.read(ours, 65536).decode()
    os.close(ours)
    return result.stdout, shown


def test_a_display_on_a_terminal_and_no_thread_that_draws() -> None:
    stdout, shown = run_on_terminal(COUNT_OBSERVERS)
    assert stdout.split() == ["1", "1"]
    assert "extracting tasks" in shown


def test_log_lines_go_above_the_display() -> None:
    _, shown = run_on_terminal(LOG_A_LINE)
    before, after = shown.split("a line of the log")
    assert "0/8 trials" in before
    assert "0/8 trials" in after


def test_a_long_line_of_the_log_is_left_to_the_terminal() -> None:
    """An address that is broken cannot be copied."""
    screen, log = io.StringIO(), logging.getLogger("ansor_mlflow")
    address = "https://mlflow.example.com/[team]/#/experiments/1/runs/" + "0" * 32
    with _log_through(console_of(screen, width=40)):
        log.warning("tune run %s", address)
    assert screen.getvalue() == f"tune run {address}\n"


def test_a_sweep_shows_its_entries_on_a_terminal_alone() -> None:
    stdout, shown = run_on_terminal(SHOW_A_SWEEP)
    assert stdout == ""
    assert "0 of 1 entries have a model" in shown
    assert "runs on node-7" in shown
    result = subprocess.run([sys.executable, "-c", SHOW_A_SWEEP], capture_output=True, text=True, check=True)
    assert result.stderr == ""
