"""How the entries of a sweep stand, as a table and as metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from xml.etree import ElementTree

from mlflow.entities import Run

from ansor_mlflow import names, tracking
from ansor_mlflow.commands.sweep.changes import Change
from ansor_mlflow.commands.sweep.declaration import Entry
from ansor_mlflow.commands.sweep.plans import EntryPlan
from ansor_mlflow.errors import SlowerError, TuningError
from ansor_mlflow.foreign import Mark, Report, Reported, Table, figure, printable_line
from ansor_mlflow.trials import StopReason

_HOPED_SHARE = 0.1
"""Share of the latency that all trials of an entry are hoped to save, before any of them is measured."""
_MAX_NOTE_CHARS = 7000
"""Characters of a run's description; a tag of MLflow's has 8,000 at most."""
_NEARLY = 0.95
"""Share of an entry's own minutes that is all of them: a tuning ends with its last round."""
_BUDGETS = {"", StopReason.TRIALS, StopReason.MINUTES, StopReason.INTERRUPTED}
"""Ends of a tuning after which it may go on; after any other, more trials find nothing."""


@dataclass(frozen=True, kw_only=True)
class EntryResult:
    """How an entry stands."""

    entry: Entry
    plan: EntryPlan
    run_id: str = ""
    """ID of the last pipeline that ended well; empty where none has."""
    tune_run: str = ""
    """ID of the tuning that goes on; empty where none has begun."""
    model_tuning: str = ""
    """ID of the tuning that the model is of."""
    num_asked: int = 0
    """Trials that the last pipeline was given."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    unreliable: str = ""
    error: str = ""
    saved_ms: float | None = None
    """What the last part of the trials saved for each of them; None before there was one."""
    minutes: float = 0.0
    num_measured: int = 0
    """Trials of its tuning, those of a part that was ended before there was a model of it among them."""
    num_known: int = 0
    """Tasks of which the tuning knew earlier records."""
    stop_reason: str = ""
    tuned_minutes: float = 0.0
    """Minutes that its tuning has taken."""
    node: str = ""
    """Node that it runs on now; empty where it runs on none."""
    change: Change | None = None
    """Its latency beside that in an earlier sweep; None where the sweep is compared with none."""

    @property
    def num_trials(self) -> int:
        return round(self.metrics.get(names.TRIALS_MEASURED, 0))

    @property
    def num_begun(self) -> int:
        """Trials that were measured, or that earlier records made needless within those that were asked for."""
        spent = self.num_asked if self.stop_reason == StopReason.TRIALS else 0
        return max(self.num_trials, self.num_measured, spent)

    @property
    def num_left(self) -> int:
        """Trials that its tuning is to get yet."""
        own = self.entry.options.max_minutes
        is_over = self.stop_reason == StopReason.MINUTES and own is not None and self.tuned_minutes >= _NEARLY * own
        return max(0, self.plan.num_trials - self.num_begun) if self.stop_reason in _BUDGETS and not is_over else 0

    @property
    def is_behind(self) -> bool:
        """Whether the model is not of all that was tuned: a part was ended before there was one."""
        return bool(self.tune_run) and (self.tune_run != self.model_tuning or self.num_measured > self.num_trials)

    @property
    def num_spared(self) -> int:
        """Trials of the plan that earlier records made needless."""
        is_done = self.num_known and self.stop_reason not in _BUDGETS
        return max(0, self.plan.num_trials - self.num_trials) if is_done else 0

    @property
    def expected_gain(self) -> float:
        """Milliseconds that the next trial is expected to save, times the weight."""
        hoped = _HOPED_SHARE * self.metrics.get(names.LATENCY_MS, 0.0) / max(1, self.plan.num_trials)
        return self.entry.weight * (hoped if self.saved_ms is None else self.saved_ms)

    def with_pipeline(self, found: Run) -> EntryResult:
        """The entry with what its next pipeline, which ended well, found."""
        metrics = dict(found.data.metrics)
        made = replace(
            self,
            run_id=str(found.info.run_id),
            model_tuning=found.data.tags.get(names.TAG_TUNE_RUN, ""),
            num_asked=int(asked) if (asked := found.data.params.get("trials", "")).isdecimal() else 0,
            metrics=metrics,
            unreliable=found.data.tags.get(names.TAG_UNRELIABLE, ""),
            error="",
        )
        if self.run_id and made.num_trials > self.num_trials:
            saved_ms = self.metrics.get(names.LATENCY_MS, 0.0) - metrics.get(names.LATENCY_MS, 0.0)
            made = replace(made, saved_ms=saved_ms / (made.num_trials - self.num_trials))
        return made

    def with_tuning(self, found: Run) -> EntryResult:
        """The entry with one of its tunings, if that has measured more than those before."""
        metrics, tags = found.data.metrics, found.data.tags
        num_measured = round(metrics.get(names.TRIALS_MEASURED, 0))
        num_known = round(metrics.get(names.WARM_START_TASKS, 0))
        # One without trials takes whatever is known for enough; what runs is that of another sweep.
        is_none = found.data.params.get("trials") == "0" or found.info.status == "RUNNING"
        if is_none or num_measured + num_known == 0 or num_measured < self.num_measured:
            return self
        per_minute = metrics.get(names.TRIALS_PER_MINUTE, 0.0)
        return replace(
            self,
            tune_run=str(found.info.run_id),
            num_measured=num_measured,
            num_known=num_known,
            tuned_minutes=num_measured / per_minute if per_minute else 0.0,
            stop_reason=tags.get(names.TAG_STOP_REASON, ""),
        )

    def cells(self) -> dict[str, str]:
        """The texts of a row, by the headers of a `Table`."""
        remarks = [
            self.error,
            f"unreliable: {self.unreliable}" if self.unreliable else "",
            f"runs on {self.node}" if self.node else "",
        ]
        return {
            "entry": self.entry.name,
            "target": self.plan.target,
            ">latency ms": figure(self.metrics.get(names.LATENCY_MS)),
            ">speed-up": figure(self.metrics.get(names.SPEEDUP_VS_BEST), "{:.2f}"),
            ">change": str(self.change) if self.change else "",
            ">trials": str(self.num_trials) if self.run_id else "–",
            ">spared": str(self.num_spared) if self.num_spared else "",
            ">min": f"{self.minutes:.1f}",
            "run": self.run_id,
            "~remark": "; ".join(filter(None, remarks)),
        }


@dataclass(frozen=True, kw_only=True)
class SweepResult(Reported):
    """What a sweep made."""

    name: str
    run_id: str
    experiment_id: str
    entries: tuple[EntryResult, ...]

    @property
    def speedups(self) -> dict[str, float]:
        """Those over the best rival, by the names of the entries."""
        found = {entry.entry.name: entry.metrics.get(names.SPEEDUP_VS_BEST) for entry in self.entries}
        return {name: speedup for name, speedup in found.items() if speedup is not None}

    @property
    def metrics(self) -> dict[str, float]:
        done = sum(bool(entry.run_id) for entry in self.entries)
        counts: dict[str, float] = {names.SWEEP_DONE: done, names.SWEEP_FAILED: len(self.entries) - done}
        return counts | ({names.SWEEP_SPEEDUP_MEDIAN: median(self.speedups.values())} if self.speedups else {})

    def headline(self) -> str:
        """How far the sweep is, in one sentence."""
        done, speedups = sum(bool(entry.run_id) for entry in self.entries), self.speedups
        told = f"{done} of {len(self.entries)} entries have a model"
        return f"{told}; the median speed-up is {median(speedups.values()):.2f}" if speedups else told

    def report(self) -> Report:
        where = {"run": self.run_id, "open": tracking.run_address(self.experiment_id, self.run_id)}
        return Report(f"Sweep {self.name}: {self.headline()}", [self.table()], where)

    def table(self) -> Table:
        """An entry in each row, with those columns that say something; what has no model is red."""
        marks: list[Mark] = ["" if entry.run_id else "red" for entry in self.entries]
        headers, rows = self._rows()
        return Table(rows, headers, marks=marks)

    def _rows(self) -> tuple[list[str], list[list[str]]]:
        """The headers of columns that say something, and the cells below them."""
        rows = [entry.cells() for entry in self.entries]
        headers = [header for header in rows[0] if any(row[header] for row in rows)]
        return headers, [[row[header] for header in headers] for row in rows]

    def note(self) -> str:
        """The description of the run, as Markdown, with a link to each entry's run."""
        headers, rows = self._rows()
        for entry, row in zip(self.entries, rows, strict=True):
            if entry.run_id:
                row[0] = f"[{row[0]}](#/experiments/{self.experiment_id}/runs/{entry.run_id})"
        if "run" in headers:
            place = headers.index("run")
            headers, rows = (
                [*headers[:place], *headers[place + 1 :]],
                [[*row[:place], *row[place + 1 :]] for row in rows],
            )
        order = sorted(range(len(rows)), key=lambda number: bool(self.entries[number].run_id))  # what failed is first
        lines = [
            [header.lstrip(">~") for header in headers],
            ["---"] * len(headers),
            *(rows[number] for number in order),
        ]
        table = [" | ".join(text.replace("|", "\\|") for text in line) for line in lines]
        length, shown = 0, 0
        while shown < len(table) and (length := length + len(table[shown]) + 5) < _MAX_NOTE_CHARS:
            shown += 1
        rest = [] if shown == len(table) else ["", f"{len(table) - shown} more are in {names.SWEEP_REPORT_FILE}."]
        return "\n".join([f"{self.headline()}.", "", *(f"| {line} |" for line in table[:shown]), *rest])

    def junit(self, limit: float | None) -> str:
        """The entries as the test cases of JUnit's XML, for what shows the results of a pull request."""
        suite = ElementTree.Element("testsuite", name=self.name, tests=str(len(self.entries)))
        for entry in self.entries:
            seconds = f"{60 * entry.minutes:.3f}"
            case = ElementTree.SubElement(suite, "testcase", classname=self.name, name=entry.entry.name, time=seconds)
            if not entry.run_id:
                ElementTree.SubElement(case, "error", message=printable_line(entry.error or "it has no model"))
            elif entry.change and limit is not None and entry.change.is_slower(limit):
                ElementTree.SubElement(case, "failure", message=f"the latency changed by {entry.change}")
            ElementTree.SubElement(case, "system-out").text = "\n".join(
                f"{header.lstrip('>~')}: {printable_line(text)}" for header, text in entry.cells().items() if text
            )
        suite.set("errors", str(len(suite.findall("testcase/error"))))
        suite.set("failures", str(len(suite.findall("testcase/failure"))))
        return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True)

    def pipelines(self) -> dict[str, str]:
        """IDs of the last pipelines that ended well, by the names of the entries."""
        return {entry.entry.name: entry.run_id for entry in self.entries if entry.run_id}

    def require_not_slower(self, limit: float) -> None:
        """Raises a `SlowerError` where a model is slower than in the earlier sweep by more than a share."""
        changes = [entry.change for entry in self.entries if entry.change]
        if not any(change.ratio for change in changes):
            reason = changes[0].reason if changes else "the earlier sweep has no entry of these names"
            raise SlowerError(f"sweep={self.name}: nothing was compared: {reason}")
        slower = [entry for entry in self.entries if entry.change and entry.change.is_slower(limit)]
        if slower:
            raise SlowerError(
                f"sweep={self.name}: {len(slower)} of {len(self.entries)} models are slower than before by more than "
                f"{limit:.1%}, {slower[0].entry.name} among them ({slower[0].change})"
            )

    def require_done(self) -> None:
        """Raises a `TuningError` where an entry has no model."""
        failed = [entry.entry.name for entry in self.entries if not entry.run_id]
        if failed:
            raise TuningError(
                f"sweep={self.name}: {len(failed)} of {len(self.entries)} entries have no model, {failed[0]} among "
                "them; the run says why, and the same command tries them again"
            )
