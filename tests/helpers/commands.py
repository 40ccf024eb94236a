"""Runs the package's command lines as their users do: in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ansor_mlflow.parameters import Options, SweepOptions, TuneOptions
from ansor_mlflow.parameters.model import CompileOptions, EvaluateOptions, PipelineOptions, PromoteOptions

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
SCRIPTS = Path(sys.executable).parent
ANSOR_MLFLOW = str(SCRIPTS / "ansor-mlflow")
MLFLOW = str(SCRIPTS / "mlflow")

ENTRY_POINTS: dict[str, type[Options]] = {
    "main": PipelineOptions,
    "tune": TuneOptions,
    "compile": CompileOptions,
    "evaluate": EvaluateOptions,
    "promote": PromoteOptions,
    "sweep": SweepOptions,
}
FAST = {"strategy": "random", "search_threads": "1", "min_repeat_ms": "1", "number": "1"}
"""Parameters with which the tuning of a small network is soon over."""
BRIEF = {"turns": 1, "measure_s": 0.1, "rivals": "onnxruntime"}
"""Parameters with which the evaluation of a network is soon over."""


RunCommand = Callable[..., int]
"""Runs a command line in this process and returns its exit code: the fixture `run_here`."""


@dataclass(frozen=True)
class Finished:
    exit_code: int
    stdout: str
    stderr: str

    @property
    def errors(self) -> list[str]:
        """The lines of standard error that say what went wrong."""
        return [line for line in self.stderr.splitlines() if line.startswith("Error: ")]


def environment(tracking_uri: str, extra: Mapping[str, str] = {}) -> dict[str, str]:
    """The environment of a command: this one's programs, a tracking store, and no leftovers of a surrounding run."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "AWS_"))}
    path = f"{SCRIPTS}{os.pathsep}{kept.get('PATH', '')}"
    return {**kept, "PATH": path, "MLFLOW_TRACKING_URI": tracking_uri, **extra}


def flags(parameters: Mapping[str, object]) -> list[str]:
    return [word for name, value in parameters.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def run(command: Sequence[str], cwd: Path, env: Mapping[str, str], timeout_s: float = 600) -> Finished:
    cwd.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
    return Finished(done.returncode, done.stdout, done.stderr)


def run_project(
    project: Path,
    parameters: Mapping[str, object],
    cwd: Path,
    env: Mapping[str, str],
    *,
    experiment_id: str,
    entry_point: str = "main",
) -> Finished:
    """Runs `mlflow run` in this environment, with a brief evaluation where the parameters say nothing of it."""
    if entry_point in ("main", "evaluate"):
        parameters = {**BRIEF, **parameters}
    pairs = [word for name, value in parameters.items() for word in ("-P", f"{name}={value}")]
    options = ["--env-manager", "local", "--experiment-id", experiment_id, "--entry-point", entry_point]
    return run([MLFLOW, "run", str(project), *options, *pairs], cwd, env)
