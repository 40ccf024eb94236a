"""Runs one tuning in a fresh process, and watches the memory of that process and of all that it starts."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import psutil
from pydantic import BaseModel, ConfigDict

from throughput.job import JOB_FILE, OUTCOME_FILE, Job, Outcome

_CHILD = Path(__file__).parents[1] / "tuning_child.py"
_LOG_FILE = "child.log"
_SAMPLE_EVERY_S = 1.0


class MemoryUse(BaseModel):
    """Memory of a tree of processes: the sum of their proportional set sizes, in which shared pages count once."""

    model_config = ConfigDict(frozen=True)

    series: list[tuple[float, int]]
    """Seconds since the child was started, and bytes; about one sample a second."""

    @property
    def peak_bytes(self) -> int:
        """The most that was sampled."""
        return max((used for _, used in self.series), default=0)


def run_child(job: Job, directory: Path) -> tuple[Outcome, MemoryUse]:
    """Does a job in a process of its own, and ends all processes that it leaves behind.

    Args:
        job: What to tune.
        directory: Working directory of the process; everything that it writes stays there.

    Raises:
        click.ClickException: The process failed; its last lines are in the message.
    """
    job = job.model_copy(update={"started_s": time.monotonic()})
    (directory / JOB_FILE).write_text(job.model_dump_json())
    with (directory / _LOG_FILE).open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, str(_CHILD), str(directory)],
            cwd=directory,
            env=_environment(job, directory),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        memory = _watch(process, job)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode != 0:
        last = "\n".join((directory / _LOG_FILE).read_text(errors="replace").splitlines()[-20:])
        raise click.ClickException(f"the {job.side} tuning ended with exit code {process.returncode}:\n{last}")
    return Outcome.model_validate_json((directory / OUTCOME_FILE).read_text()), memory


def _environment(job: Job, directory: Path) -> dict[str, str]:
    """The variables of a child: threads of TVM's kernels for stock, an MLflow store of its own for ours."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "TVM_"))}
    if job.side == "stock":
        return {**inherited, "TVM_NUM_THREADS": str(job.num_threads), "TVM_BIND_THREADS": "0"}
    return {**inherited, "MLFLOW_TRACKING_URI": f"sqlite:///{directory}/mlflow.db"}


def _watch(process: subprocess.Popen[bytes], job: Job) -> MemoryUse:
    series = []
    root = psutil.Process(process.pid)
    while process.poll() is None:
        series.append((job.elapsed_s(), _tree_bytes(root)))
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_SAMPLE_EVERY_S)
    return MemoryUse(series=series)


def _tree_bytes(root: psutil.Process) -> int:
    try:
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    return sum(_pss_bytes(process.pid) for process in processes)


def _pss_bytes(pid: int) -> int:
    """Proportional set size of a process (proc(5), `smaps_rollup`); 0 if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    kilobytes = next((line.split()[1] for line in lines if line.startswith("Pss:")), "0")
    return int(kilobytes) * 1024
