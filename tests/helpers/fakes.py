"""Stand-ins for slow parts, to test what is built around them: they keep the contracts of the real ones."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ansor_mlflow.measuring import MachineNoise
from ansor_mlflow.tuning import Outcome
from ansor_mlflow.workers import Builder, RunJob, Runner

if TYPE_CHECKING:
    from tvm.ir import IRModule

_MARK = b"fake library"


class FakeBuilder(Builder):
    """A `Builder` whose libraries are small files that only a `FakeRunner` takes. Failures are given by the number of
    the module, counted from 1 over all calls.
    """

    def __init__(self, failures: Mapping[int, Outcome[Any]] = {}) -> None:
        self.mods: list[IRModule] = []  # every module that was to be built, in order
        self._failures = failures
        self._directory = tempfile.TemporaryDirectory(prefix="ansor_mlflow-fake-")

    def build(self, mods: Sequence[IRModule]) -> list[Outcome[Path]]:
        return [self._build(mod) for mod in mods]

    def close(self) -> None:
        self._directory.cleanup()

    def _build(self, mod: IRModule) -> Outcome[Path]:
        self.mods.append(mod)
        number = len(self.mods)
        if number in self._failures:
            return self._failures[number]
        path = Path(self._directory.name, f"candidate-{number}.so")
        path.write_bytes(_MARK)
        return Outcome(path)


class FakeRunner(Runner):
    """A `Runner` that answers with the times it was given, seconds per call of one library after the other, from the
    first again after the last. Failures are given by the number of the library; a file that no `FakeBuilder` made is
    one.
    """

    def __init__(
        self,
        run_s: Sequence[float] = (1e-3,),
        *,
        repeat: int = 1,
        failures: Mapping[int, Outcome[Any]] = {},
        is_remote: bool = False,
    ) -> None:
        self.is_remote = is_remote
        self.noise = MachineNoise()
        self.jobs: list[RunJob] = []  # every job that was to be run, in order
        self._run_s = run_s
        self._repeat = repeat
        self._failures = failures

    def run(self, jobs: Sequence[RunJob]) -> list[Outcome[tuple[float, ...]]]:
        return [self._run(job) for job in jobs]

    def close(self) -> None:
        """Does nothing: there is nothing to close."""

    def _run(self, job: RunJob) -> Outcome[tuple[float, ...]]:
        self.jobs.append(job)
        number = len(self.jobs)
        if number in self._failures:
            return self._failures[number]
        if not job.path.is_file() or job.path.read_bytes() != _MARK:
            return Outcome(failure="failed", error=f"{job.path.name} is not a library of FakeBuilder")
        return Outcome((self._run_s[(number - 1) % len(self._run_s)],) * self._repeat)
