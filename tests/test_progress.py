"""A terminal gets a bar; a file or a pipe gets the log alone."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys

from rich.console import Console
from rich.progress import Progress, TextColumn

from ansor_mlflow.cli.progress import ProgressBar
from ansor_mlflow.trials import Durations, TaskInfo, TaskState, Trial, TrialStatus, TuningPlan, TuningRound

COUNT_OBSERVERS = """
from ansor_mlflow.cli.progress import progress_observers
with progress_observers() as observers:
    number = len(observers)
print(number)
"""


def test_the_bar_shows_trials_and_the_estimated_latency() -> None:
    info = TaskInfo(index=0, name="conv", weight=2, flops=1e6, workload_hash="0x1")
    state = TaskState(info=info)
    trials = tuple(Trial(step=i, task="conv", status=TrialStatus.OK, run_s=(i * 1e-3,)) for i in (1, 2, 3))
    for trial in trials:
        state.add(trial)
    columns = TextColumn("{task.description} {task.completed}/{task.total} {task.fields[best]}")
    screen = io.StringIO()
    with Progress(columns, console=Console(file=screen, force_terminal=True, width=80)) as progress:
        bar = ProgressBar(progress)
        bar.tuning_started(TuningPlan(network="small", target="llvm x ×2", tasks=(info,), num_trials=8))
        bar.round_finished(
            TuningRound(trials=trials, task=state, tasks=(state,), total_trials=3, elapsed_s=1.0, durations=Durations())
        )
    assert "small 3/8 2.000 ms" in screen.getvalue()


def test_no_bar_in_a_pipe() -> None:
    result = subprocess.run([sys.executable, "-c", COUNT_OBSERVERS], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "0"


def test_a_bar_on_a_terminal() -> None:
    ours, theirs = pty.openpty()
    result = subprocess.run(
        [sys.executable, "-c", COUNT_OBSERVERS], stdout=subprocess.PIPE, stderr=theirs, text=True, check=True
    )
    os.close(theirs)
    assert result.stdout.strip() == "1"
    assert b"extracting tasks" in os.read(ours, 4096)
    os.close(ours)
