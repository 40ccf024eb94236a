"""Works while the time of day jumps, and prints, as JSON, what came of it; run by `test_survival.py`.

Usage: LD_PRELOAD=clock_jump.so CLOCK_OFFSET_FILE=FILE python clock_probe.py
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from helpers.fake_tuning import tune
from helpers.fakes import FakeRunner

from ansor_mlflow.device import resolve_target
from ansor_mlflow.lowering import LoweredNetwork
from ansor_mlflow.lowering.lower import lower
from ansor_mlflow.networks.graph import GraphBuilder
from ansor_mlflow.processes import Outcome, WorkerPool, start_fork_server
from ansor_mlflow.workers import RunJob

HOUR_S = 3600


def set_clock(offset_s: int) -> None:
    """Moves the time of day of this process, and of every other one under the library."""
    path = Path(os.environ["CLOCK_OFFSET_FILE"])
    new = path.with_suffix(".new")
    new.write_text(str(offset_s))
    new.replace(path)


def work_for_two_seconds(_: int) -> list[int]:
    """Returns by how many hours the time of day had moved at the end of each third."""
    started_s, moved = time.time(), []
    for offset_s in (0, HOUR_S, -HOUR_S):
        set_clock(offset_s)
        time.sleep(0.7)
        moved.append(round((time.time() - started_s) / HOUR_S))
    return moved


def hang(_: int) -> None:
    set_clock(-3 * HOUR_S)
    time.sleep(HOUR_S)


class JumpingRunner(FakeRunner):
    """A `FakeRunner` during whose measurements an hour passes, by the time of day."""

    def run(self, jobs: Sequence[RunJob]) -> list[Outcome[tuple[float, ...]]]:
        set_clock((1 + len(self.jobs)) * HOUR_S)
        return super().run(jobs)


def one_task(target: Any) -> LoweredNetwork:
    builder = GraphBuilder(seed=0)
    builder.relu("relu", builder.dense("dense", builder.input("data", (4, 32)), units=16, in_units=32))
    return lower(builder.build("single", {"relu": (4, 16)}), target)


def probe() -> dict[str, Any]:
    start_fork_server()
    found: dict[str, Any] = {}
    target = resolve_target("auto", 1)
    with tempfile.TemporaryDirectory() as directory:
        result = tune(one_task(target), target, Path(directory), runner=JumpingRunner(), trials=12, max_minutes=5)
    found["tuned"] = [result.total_trials, result.stop_reason, result.elapsed_s]
    set_clock(0)
    with contextlib.closing(WorkerPool(1)) as pool:
        (worked,) = pool.map(work_for_two_seconds, [0], 120)
        found["worked"] = [worked.value, worked.failure]
        started_s = time.monotonic()
        (hung,) = pool.map(hang, [0], 2)
        found["hung"] = [hung.failure, time.monotonic() - started_s]
    return found


if __name__ == "__main__":
    print(json.dumps(probe()))
