"""The command `diff`: which tasks of two tunings differ by more than the noise, and what else differs."""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ansor_mlflow.commands.sides import Compared, Side, SideTask, load_side
from ansor_mlflow.device import DeviceFingerprint
from ansor_mlflow.errors import SlowerError
from ansor_mlflow.files import scratch_directory
from ansor_mlflow.foreign import Mark, Report, Reported, Table, microseconds
from ansor_mlflow.parameters import DiffOptions

_log = logging.getLogger("ansor_mlflow")
_NUM_ERRORS = 2.0
"""Standard errors by which a difference exceeds the noise."""

_HEADERS = ("~task", ">calls", ">share", ">A µs", ">B µs", ">B/A", ">noise", "B is")

TaskVerdict = Literal["faster", "slower", "same", "only_first", "only_second"]
_MARKS: Mapping[TaskVerdict, Mark] = {
    "faster": "green",
    "slower": "red",
    "same": "",
    "only_first": "yellow",
    "only_second": "yellow",
}


@dataclass(frozen=True, kw_only=True)
class TaskDifference:
    """A task of either tuning; times are seconds per call."""

    task: str
    workload_hash: str
    weight: int
    """Calls of the task in the network, in the first tuning that has it."""
    first_s: float | None
    """Time of the record that would be applied in the first tuning; None where there is none."""
    second_s: float | None
    share: float
    """Share of the network's time in the first tuning that has the task, from 0 to 1."""
    noise: float
    """Relative difference that the noise of the two measurements explains."""
    verdict: TaskVerdict
    """What the second tuning is, compared with the first."""

    @property
    def ratio(self) -> float | None:
        """The second time over the first."""
        return self.second_s / self.first_s if self.first_s and self.second_s else None


@dataclass(frozen=True, kw_only=True)
class TuningDifference(Reported):
    """What differs between two tunings."""

    first: Compared
    second: Compared
    tasks: tuple[TaskDifference, ...]
    """Tasks of both tunings, those that cost most first."""
    params: dict[str, tuple[str | None, str | None]]
    """Parameters that differ, with both values."""
    device: dict[str, tuple[str | None, str | None]]
    """Entries of the fingerprints that differ, with both values."""
    versions: dict[str, tuple[str | None, str | None]]
    """Packages whose versions differ, with both versions."""

    def report(self) -> Report:
        """Both sides, the tasks, the sum, and what else differs."""
        sides = (("A", self.first), ("B", self.second))
        others = {
            "parameters that differ": self.params,
            "device entries that differ": self.device,
            "versions that differ": self.versions,
        }
        return Report(
            "Two tunings compared",
            [
                Table([(letter, f"{side.name}  ({side.device}, run {side.run_id})") for letter, side in sides]),
                Table([_cells(task) for task in self.tasks], _HEADERS, marks=[_MARKS[t.verdict] for t in self.tasks]),
                *self._summary(),
                *(
                    Table([(name, a or "", b or "") for name, (a, b) in entries.items()], ("~", "~A", "~B"), title)
                    for title, entries in others.items()
                    if entries
                ),
            ],
        )

    def _summary(self) -> list[str]:
        counts = Counter(task.verdict for task in self.tasks)
        lines = [
            f"B against A: {counts['faster']} tasks faster, {counts['slower']} slower, {counts['same']} the same "
            f"within the noise, {counts['only_first']} only in A, {counts['only_second']} only in B"
        ]
        pairs = {
            "estimated, tasks of both": (self.first.estimated_ms, self.second.estimated_ms),
            "measured end to end": (self.first.latency_ms, self.second.latency_ms),
        }
        for label, (first, second) in pairs.items():
            if first and second:
                lines.append(f"{label}: {first:.3f} ms, {second:.3f} ms ({second / first - 1:+.1%})")
        return [*lines, f"the times cannot be trusted: {self.unreliable}"] if self.unreliable else lines

    @property
    def ratio(self) -> float | None:
        """The second latency over the first: measured end to end, or else estimated over the common tasks."""
        if self.first.latency_ms and self.second.latency_ms:
            return self.second.latency_ms / self.first.latency_ms
        return self.second.estimated_ms / self.first.estimated_ms if self.first.estimated_ms else None

    @property
    def unreliable(self) -> str:
        """Why the times cannot be compared; empty where they can."""
        sides = (self.first, self.second) if self.first.run_id != self.second.run_id else (self.first,)
        return "; ".join(f"{side.given}: {side.unreliable}" for side in sides if side.unreliable)

    def require_not_slower(self, tolerance: float, *, force: bool = False) -> None:
        """Checks the second against the first. Times that cannot be trusted are a warning."""
        lost = [task for task in self.tasks if task.verdict == "only_first"]
        if lost:
            raise SlowerError(
                f"{self.second.given} has no record of {len(lost)} tasks that {self.first.given} has, such as "
                f"{lost[0].task}; tune it with as many trials"
            )
        if self.ratio is None or self.ratio <= 1 + tolerance:
            return
        if self.unreliable and not force:
            _log.warning(
                "%s is %.1f%% slower than %s, which is no error because the times cannot be trusted (%s); tune or "
                "evaluate again, or give force",
                *(self.second.given, (self.ratio - 1) * 100, self.first.given, self.unreliable),
            )
            return
        slower = next((task.task for task in self.tasks if task.verdict == "slower"), None)
        raise SlowerError(
            f"{self.second.given} is {self.ratio - 1:.1%} slower than {self.first.given}, allowed are {tolerance:.1%}"
            + (f"; look at {slower} first" if slower else "; no single task is, look at the device and the versions")
        )


def _cells(task: TaskDifference) -> tuple[str, ...]:
    return (
        task.task,
        str(task.weight),
        f"{task.share:.1%}",
        microseconds(task.first_s),
        microseconds(task.second_s),
        f"{task.ratio:.3f}" if task.ratio else "",
        f"± {task.noise:.1%}",
        {"same": "", "only_first": "only A", "only_second": "only B"}.get(task.verdict, task.verdict),
    )


def diff_runs(options: DiffOptions) -> TuningDifference:
    """Compares two tunings task by task."""
    with scratch_directory() as scratch:
        first, second = (load_side(given, Path(scratch, name)) for name, given in zip("ab", options.runs, strict=True))
    common = first.tasks.keys() & second.tasks.keys()
    found = TuningDifference(
        first=first.compared(common),
        second=second.compared(common),
        tasks=tuple(_task_differences(first, second)),
        params=_differing(first.params, second.params),
        device=_differing(_flat(first.device), _flat(second.device)),
        versions=_differing(first.versions, second.versions),
    )
    if found.unreliable:
        _log.warning("the times cannot be trusted: %s", found.unreliable)
    return found


# -- what differs ------------------------------------------------------------------------------------------------------


def _task_differences(first: Side, second: Side) -> list[TaskDifference]:
    differences = []
    for hash_ in dict.fromkeys([*first.tasks, *second.tasks]):
        ours, theirs = first.tasks.get(hash_), second.tasks.get(hash_)
        known, side = (ours, first) if ours else (theirs, second)
        assert known is not None  # it is in one of them
        noise = _NUM_ERRORS * math.hypot(*(task.error for task in (ours, theirs) if task))
        differences.append(
            TaskDifference(
                task=f"{ours.name} → {theirs.name}" if ours and theirs and ours.name != theirs.name else known.name,
                workload_hash=hash_,
                weight=known.weight,
                first_s=ours.run_s if ours else None,
                second_s=theirs.run_s if theirs else None,
                share=known.weight * known.run_s / side.total_s,
                noise=noise,
                verdict=_verdict(ours, theirs, noise),
            )
        )
    return sorted(differences, key=lambda task: -task.share)


def _verdict(first: SideTask | None, second: SideTask | None, noise: float) -> TaskVerdict:
    if second is None:
        return "only_first"
    if first is None:
        return "only_second"
    change = math.log(second.run_s / first.run_s)
    if abs(change) <= noise:
        return "same"
    return "slower" if change > 0 else "faster"


def _differing(
    first: Mapping[str, str | None], second: Mapping[str, str | None]
) -> dict[str, tuple[str | None, str | None]]:
    return {
        name: (first.get(name), second.get(name))
        for name in dict.fromkeys([*first, *second])
        if first.get(name) != second.get(name)
    }


def _flat(device: DeviceFingerprint) -> dict[str, str]:
    return {
        **{f"target.{name}": json.dumps(value) for name, value in device.target.items()},
        "machine": device.machine,
        "cpu_model": device.cpu_model,
        "features": ",".join(device.features),
        "num_threads": str(device.num_threads),
    }
