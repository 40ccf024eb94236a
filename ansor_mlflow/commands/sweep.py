"""The command `sweep`: many networks and parameters, one run above all of them, one table and one budget.

Each entry gets a model first, then the trials go where they gain most. What is done is read back from MLflow, so that a
sweep that was ended goes on.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from glob import glob
from pathlib import Path
from statistics import median
from typing import Any

import mlflow
from mlflow.entities import Run

from ansor_mlflow import names, tracking
from ansor_mlflow.commands.pipeline import run_pipeline
from ansor_mlflow.commands.plan import plan_tuning
from ansor_mlflow.device import Device
from ansor_mlflow.errors import AnsorMlflowError, TuningError, UserInputError, one_line
from ansor_mlflow.files import sha256_of_file
from ansor_mlflow.foreign import Mark, Report, Reported, Table, figure, read_yaml
from ansor_mlflow.lowering import LOWERING_VERSION
from ansor_mlflow.measuring import require_examples, require_rivals
from ansor_mlflow.networks import require_network
from ansor_mlflow.parameters import (
    PipelineOptions,
    PlanOptions,
    RunOptions,
    SweepOptions,
    as_text,
    is_uri,
    load_options,
)
from ansor_mlflow.processes import WorkerPool, in_child_process

_log = logging.getLogger("ansor_mlflow")
_NUM_PARTS = 4
"""Parts in which an entry gets its trials where a budget may end before all have theirs."""
_HOPED_SHARE = 0.1
"""Share of the latency that all trials of an entry are hoped to save, before any of them is measured."""
_JOB_LIMIT_S = 7 * 24 * 3600.0
_CONTEXT = "MLFLOW_RUN_CONTEXT"
"""Variable with tags, as JSON, that MLflow gives the runs of a process."""
_KEYS = ("name", "defaults", "entries")
_NOT_GIVEN = {"resume_run", "promote", *RunOptions.model_fields}
"""Parameters of `main` that say something of one run, or wait for another."""
_EVERY_MODEL = "models:/*@"
_PLAN_TIMEOUT_S = 1800.0
_DIGEST_CHARS = 16


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A network with its parameters."""

    name: str
    """The network's, and the parameters that the entry itself gives."""
    options: PipelineOptions
    weight: float
    """How often the model is called, beside the others: requests of a day, for example."""


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """A whole sweep."""

    name: str
    entries: tuple[Entry, ...]


@dataclass(frozen=True, kw_only=True)
class EntryPlan:
    """What tuning an entry takes, and what it is known by; an error says why it cannot be tuned."""

    digest: str = ""
    """Digest of the network, the parameters, the device and the lowering: what has the same was tuned already."""
    target: str = ""
    num_tasks: int = 0
    num_trials: int = 0
    expected_minutes: float = 0.0
    error: str = ""


def read_sweep(path: str) -> Declaration:
    """Reads a file, and checks the parameters of all entries.

    Raises:
        UserInputError: It cannot be read, has other keys or no entry, an entry is unusable, or two are the same.
    """
    try:
        found = read_yaml(Path(path).read_bytes())
    except OSError as err:
        raise UserInputError(f"sweep={path}: the file cannot be read ({err.strerror}); give a YAML file") from err
    except ValueError as err:
        raise UserInputError(f"sweep={path}: the file is not valid YAML ({err}); correct it") from err
    if not isinstance(found, dict) or found.keys() - set(_KEYS) or not isinstance(found.get("entries"), list):
        raise UserInputError(
            f"sweep={path}: it must be a mapping of {', '.join(_KEYS)}, the last a list; see examples/sweep.yaml"
        )
    defaults = _mapping(found.get("defaults") or {}, f"sweep={path}: defaults")
    entries: list[Entry] = []
    for number, given in enumerate(found["entries"], start=1):
        where = f"sweep={path}: entry {number}"
        entries += _entries(defaults, _mapping(given, where), where)
    if not entries:
        raise UserInputError(f"sweep={path}: it has no entries; give one network at least")
    networks: dict[str, set[str]] = {}
    for entry in entries:
        networks.setdefault(entry.name, set()).add(entry.options.network)
    entries = [  # files in different directories may have the same name
        replace(entry, name=f"{entry.name} ({entry.options.network})") if len(networks[entry.name]) > 1 else entry
        for entry in entries
    ]
    name, number = Counter(entry.name for entry in entries).most_common(1)[0]
    if number > 1:
        raise UserInputError(f"sweep={path}: {number} entries are {name}; leave all but one out")
    name = str(found.get("name") or Path(path).stem)
    if set(name) & set("'\"\\`"):
        raise UserInputError(f"sweep={path}: name={name}: it must have no quotes and no backslash; give another")
    return Declaration(name=name, entries=tuple(entries))


def _mapping(given: Any, where: str) -> dict[str, Any]:
    if not isinstance(given, dict) or not all(isinstance(key, str) for key in given):
        raise UserInputError(f"{where}: it must be a mapping of parameters of main to values, such as `trials: 64`")
    if taken := sorted(_NOT_GIVEN & given.keys()):
        raise UserInputError(f"{where}: {taken[0]} is not for a sweep; leave it out")
    return given


def _entries(defaults: Mapping[str, Any], given: Mapping[str, Any], where: str) -> Iterator[Entry]:
    """All networks with all combinations of the parameters that are lists."""
    values = {"warm_start": "auto", "weight": 1.0, **defaults, **given}
    if "network" not in values:
        raise UserInputError(f"{where}: it has no network; give a name, a file, a pattern or a URI")
    weight = values.pop("weight")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < float("inf"):
        raise UserInputError(f"{where}: weight={weight!r}: it must be a number, 0 or more")
    networks = [name for each in _listed(values.pop("network")) for name in _networks(each, where)]
    grid = [[(key, value) for value in _listed(values[key])] for key in values]
    own = given.keys() | {key for key, value in defaults.items() if isinstance(value, list)}
    for network, *pairs in itertools.product(networks, *grid):
        chosen = dict(pairs)
        try:
            options = load_options(PipelineOptions, {**chosen, "network": network})
            if not is_uri(network):
                require_network(network, trust=options.trust)
            require_examples(options.data)
            require_rivals("rivals", options.rivals)
        except AnsorMlflowError as err:
            raise UserInputError(f"{where}: {err}") from err
        words = [f"{key}={as_text(chosen[key])}" for key in chosen if key in own]
        yield Entry(name=" ".join([tracking.display_name(network), *words]), options=options, weight=float(weight))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _networks(given: Any, where: str) -> list[str]:
    """The networks that a name, a pattern of files, or one of all models with an alias stands for."""
    text = str(given)
    if text.startswith(_EVERY_MODEL):
        alias = text.removeprefix(_EVERY_MODEL)
        with tracking.translated_errors("search the registered models"):
            models = mlflow.MlflowClient().search_registered_models(max_results=1000)
        found = [tracking.pinned_uri(f"models:/{model.name}@{alias}") for model in models if alias in model.aliases]
    elif not is_uri(text) and set(text) & set("*?["):
        found = [str(Path(path).resolve()) for path in sorted(glob(text, recursive=True))]  # noqa: PTH207 - absolute ones, too
    else:
        return [str(Path(text).resolve()) if Path(text).is_file() else text]
    if not found:
        raise UserInputError(f"{where}: network={text} matches nothing; correct it, or leave it out")
    return found


def plan_entries(entries: tuple[Entry, ...]) -> list[EntryPlan]:
    """Plans all entries, in a process that may die of one."""
    pool = WorkerPool(1)
    try:
        store = mlflow.get_tracking_uri()
        outcomes = pool.map(_plan, [(entry.options, store) for entry in entries], _PLAN_TIMEOUT_S)
    finally:
        pool.close()
    return [outcome.value or EntryPlan(error=outcome.error or str(outcome.failure)) for outcome in outcomes]


def _plan(work: tuple[PipelineOptions, str]) -> EntryPlan:
    options, store = work
    mlflow.set_tracking_uri(store)
    try:
        changed = options.changed()
        given = load_options(
            PlanOptions, {key: text for key, text in changed.items() if key in PlanOptions.model_fields}
        )
        plan, network = plan_tuning(given), tracking.network_of(options)
        device = Device.resolve(options.target, options.num_threads)
    except AnsorMlflowError as err:
        return EntryPlan(error=str(err))
    known = [
        network.sha256,
        {key: text for key, text in changed.items() if key not in ("network", "data")},
        sha256_of_file(Path(options.data)) if options.data else "",
        device.fingerprint.name,
        LOWERING_VERSION,
    ]
    return EntryPlan(
        digest=hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:_DIGEST_CHARS],
        target=plan.target,
        num_tasks=len(plan.tasks),
        num_trials=plan.num_trials,
        expected_minutes=plan.expected_minutes,
    )


@dataclass(frozen=True, kw_only=True)
class SweepPlan(Reported):
    """What a sweep would do."""

    name: str
    entries: tuple[Entry, ...]
    plans: tuple[EntryPlan, ...]

    def report(self) -> Report:
        rows = [
            [
                entry.name,
                plan.target,
                str(plan.num_tasks),
                str(plan.num_trials),
                f"{plan.expected_minutes:.1f}",
                plan.error,
            ]
            for entry, plan in zip(self.entries, self.plans, strict=True)
        ]
        headers = ["entry", "target", ">tasks", ">trials", ">min", "~error"]
        trials, minutes = sum(plan.num_trials for plan in self.plans), sum(plan.expected_minutes for plan in self.plans)
        total = f"{len(rows)} entries, {trials} trials, about {minutes:.0f} min on 2 cores"
        return Report(f"Sweep {self.name}", [Table(rows, headers), total])


@dataclass(frozen=True, kw_only=True)
class EntryResult:
    """How an entry stands."""

    entry: Entry
    plan: EntryPlan
    run_id: str = ""
    """ID of the last pipeline that ended well; empty where none has."""
    tune_run: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    unreliable: str = ""
    error: str = ""
    saved_ms: float | None = None
    """What the last part of the trials saved for each of them; None before there was one."""
    minutes: float = 0.0
    num_measured: int = 0
    """Trials of its tuning, those of a part that was ended before there was a model of it among them."""

    @property
    def num_trials(self) -> int:
        return round(self.metrics.get(names.TRIALS_MEASURED, 0))

    @property
    def num_left(self) -> int:
        """Trials that its model is to get yet; none before there is one without any."""
        return max(0, self.plan.num_trials - self.num_trials) if self.tune_run else 0

    @property
    def expected_gain(self) -> float:
        """Milliseconds that the next trial is expected to save, times the weight."""
        hoped = _HOPED_SHARE * self.metrics.get(names.LATENCY_MS, 0.0) / max(1, self.plan.num_trials)
        return self.entry.weight * (hoped if self.saved_ms is None else self.saved_ms)

    def cells(self) -> dict[str, str]:
        """The texts of a row, by the headers of a `Table`."""
        return {
            "entry": self.entry.name,
            "target": self.plan.target,
            ">latency ms": figure(self.metrics.get(names.LATENCY_MS)),
            ">speed-up over the best rival": figure(self.metrics.get(names.SPEEDUP_VS_BEST), "{:.2f}"),
            ">trials": str(self.num_trials) if self.run_id else "–",
            ">min": f"{self.minutes:.1f}",
            "run": self.run_id,
            "~remark": self.error or (f"unreliable: {self.unreliable}" if self.unreliable else ""),
        }


@dataclass(frozen=True, kw_only=True)
class SweepResult(Reported):
    """What a sweep made."""

    name: str
    run_id: str
    experiment_id: str
    entries: tuple[EntryResult, ...]

    @property
    def speedups(self) -> list[float]:
        """Those over the best rival of each entry, the smallest first."""
        found = (entry.metrics.get(names.SPEEDUP_VS_BEST) for entry in self.entries)
        return sorted(speedup for speedup in found if speedup is not None)

    @property
    def metrics(self) -> dict[str, float]:
        done = sum(bool(entry.run_id) for entry in self.entries)
        counts: dict[str, float] = {names.SWEEP_DONE: done, names.SWEEP_FAILED: len(self.entries) - done}
        return counts | ({names.SWEEP_SPEEDUP_MEDIAN: median(self.speedups)} if self.speedups else {})

    def headline(self) -> str:
        """How far the sweep is, in one sentence."""
        done, speedups = sum(bool(entry.run_id) for entry in self.entries), self.speedups
        told = f"{done} of {len(self.entries)} entries have a model"
        return f"{told}; the median speed-up is {median(speedups):.2f}" if speedups else told

    def report(self) -> Report:
        rows = [entry.cells() for entry in self.entries]
        headers = [header for header in rows[0] if any(row[header] for row in rows)]
        marks: list[Mark] = ["" if entry.run_id else "red" for entry in self.entries]
        table = Table([[row[header] for header in headers] for row in rows], headers, marks=marks)
        where = {"run": self.run_id, "open": tracking.run_address(self.experiment_id, self.run_id)}
        return Report(f"Sweep {self.name}: {self.headline()}", [table], where)

    def note(self) -> str:
        """The description of the run, as Markdown."""
        rows = [entry.cells() for entry in self.entries]
        lines = [" | ".join(header.lstrip(">~") for header in rows[0]), " | ".join("---" for _ in rows[0])]
        lines += [" | ".join(text.replace("|", "\\|") for text in row.values()) for row in rows]
        return "\n".join([f"{self.headline()}.", "", *(f"| {line} |" for line in lines)])

    def require_done(self) -> None:
        """Raises a `TuningError` where an entry has no model."""
        failed = [entry.entry.name for entry in self.entries if not entry.run_id]
        if failed:
            raise TuningError(
                f"sweep={self.name}: {len(failed)} of {len(self.entries)} entries have no model, {failed[0]} among "
                "them; the run says why, and the same command tries them again"
            )


@dataclass(frozen=True)
class SweepJob:
    """A pipeline of an entry, which another process takes."""

    options: PipelineOptions
    tags: Mapping[str, str]
    store: str
    """Tracking server, or store, that it logs to."""


def run_sweep(options: SweepOptions) -> SweepPlan | SweepResult:
    """Makes a model of every entry, and tunes them.

    Raises:
        UserInputError: The file is unusable, or another process runs the sweep.
        TuningError: An entry has no model in the end.
    """
    declaration = read_sweep(options.sweep)
    _log.info("planning %d entries of %s", len(declaration.entries), declaration.name)
    plans = plan_entries(declaration.entries)
    if options.dry_run:
        return SweepPlan(name=declaration.name, entries=declaration.entries, plans=tuple(plans))
    earlier = _earlier_run(declaration, options)
    with tracking.step_run("sweep", options, f"sweep {declaration.name}", resume=earlier) as run:
        run.log_tags(
            {names.TAG_SWEEP: declaration.name, names.TAG_SWEEP_DRIVER: f"{socket.gethostname()} {os.getpid()}"}
        )
        driver = _Driver(declaration, plans, options, run)
        driver.look_up()
        driver.make_models()
        driver.tune()
        result = driver.result()
        driver.show()
        result.require_done()
    return result


def _earlier_run(declaration: Declaration, options: SweepOptions) -> str:
    """ID of the run of this sweep that goes on; empty where there is none yet."""
    with tracking.translated_errors("search the runs of the sweep"):
        experiments = [options.experiment] if options.experiment.isdecimal() else None
        by_name = [options.experiment] if options.experiment and not experiments else None
        runs = mlflow.search_runs(
            experiments,
            filter_string=f"tags.`{names.TAG_SWEEP}` = '{declaration.name}'",
            order_by=["attributes.start_time DESC"],
            max_results=1,
            output_format="list",
            experiment_names=by_name,
        )
    if not runs:
        return ""
    found = runs[0]
    host, _, pid = found.data.tags.get(names.TAG_SWEEP_DRIVER, "").partition(" ")
    is_here = host == socket.gethostname()
    if found.info.status == "RUNNING" and (not is_here or _is_alive(int(pid))):
        raise UserInputError(
            f"sweep={declaration.name}: process {pid} on {host} runs it already, see run {found.info.run_id}; wait for "
            "it, or give the sweep another name"
        )
    return str(found.info.run_id)


def _is_alive(pid: int) -> bool:
    return pid != os.getpid() and Path(f"/proc/{pid}").exists()


class _Driver:
    """Knows how the entries stand, and does what is next."""

    def __init__(
        self, declaration: Declaration, plans: Sequence[EntryPlan], options: SweepOptions, run: tracking.StepRun
    ) -> None:
        self._declaration, self._options, self._run = declaration, options, run
        self._entries = [
            EntryResult(entry=entry, plan=plan, error=plan.error)
            for entry, plan in zip(declaration.entries, plans, strict=True)
        ]
        self._give_up_s = math.inf if options.max_minutes is None else time.monotonic() + 60 * options.max_minutes
        with tracking.translated_errors("read the run of the sweep"):
            self._experiment_id = mlflow.get_run(run.run_id).info.experiment_id

    def result(self) -> SweepResult:
        return SweepResult(
            name=self._declaration.name,
            run_id=self._run.run_id,
            experiment_id=self._experiment_id,
            entries=tuple(self._entries),
        )

    def look_up(self) -> None:
        """Finds the models that entries have already, here or in another run of the experiment."""
        with tracking.translated_errors("search the runs of the entries"):
            runs = mlflow.search_runs(
                [self._experiment_id],
                filter_string=f"tags.`{names.TAG_STEP}` = 'main' and attributes.status = 'FINISHED'",
                order_by=["attributes.start_time ASC"],
                output_format="list",
            )
        done: dict[str, list[Run]] = {}
        for found in runs:
            done.setdefault(found.data.tags.get(names.TAG_SWEEP_ENTRY, ""), []).append(found)
        for number, entry in enumerate(self._entries):
            for found in done.get(entry.plan.digest, []) if entry.plan.digest else []:
                self._entries[number] = _with_run(self._entries[number], found)
            if tune_run := self._entries[number].tune_run:
                with tracking.translated_errors("read the tuning of an entry"):
                    measured = mlflow.get_run(tune_run).data.metrics.get(names.TRIALS_MEASURED, 0)
                self._entries[number] = replace(self._entries[number], num_measured=round(measured))

    def make_models(self) -> None:
        """Gives each entry a model without a trial, so that none is without one when the budget ends."""
        for number, entry in enumerate(self._entries):
            if not entry.run_id and not entry.plan.error:
                self._do(number, {"trials": "0"})

    def tune(self) -> None:
        """Gives trials to the entry of which the next are expected to gain most, until all have theirs."""
        tried: set[int] = set()
        while True:
            left = self._trials_left()
            open_ = [
                number
                for number, entry in enumerate(self._entries)
                if number not in tried and entry.num_left and (left > 0 or entry.num_measured > entry.num_trials)
            ]
            if not open_ or time.monotonic() > self._give_up_s:
                return
            number = max(open_, key=lambda each: self._entries[each].expected_gain)
            before = self._entries[number]
            # Where a part was ended, its trials are there, and only a model of them is made.
            begun = max(before.num_trials, before.num_measured)
            num_trials = min(before.plan.num_trials, begun + min(max(0, left), self._part(before)))
            if num_trials < before.plan.num_tasks:  # each task needs one
                tried.add(number)
                continue
            given = {"trials": str(num_trials), "resume_run": before.tune_run}
            if math.isfinite(self._give_up_s):
                minutes = max(0.01, (self._give_up_s - time.monotonic()) / 60)
                given["max_minutes"] = f"{min(minutes, before.entry.options.max_minutes or math.inf):.3g}"
            self._do(number, given)
            if self._entries[number].num_trials <= before.num_trials:  # it failed, or had no time for any
                tried.add(number)

    def _trials_left(self) -> int:
        most = self._options.max_trials
        measured = sum(max(entry.num_trials, entry.num_measured) for entry in self._entries)
        return 2**31 if most is None else most - measured

    def _part(self, entry: EntryResult) -> int:
        """Trials that an entry gets at once."""
        has_budget = self._options.max_trials is not None or self._options.max_minutes is not None
        part = math.ceil(entry.plan.num_trials / _NUM_PARTS) if has_budget else entry.num_left
        return min(entry.num_left, max(part, entry.plan.num_tasks))

    def _do(self, number: int, given: Mapping[str, str]) -> None:
        """Runs a pipeline of an entry, and takes note of how it ended."""
        before = self._entries[number]
        name = before.entry.name
        started_s = time.monotonic()
        _log.info("%s: %s", name, ", ".join(f"{key}={text}" for key, text in given.items() if key != "resume_run"))
        own = {"parent_run": self._run.run_id, "run_name": name}
        options = load_options(PipelineOptions, {**before.entry.options.changed(), **given, **own})
        tags = {names.TAG_SWEEP_ENTRY: before.plan.digest}
        job = SweepJob(options=options, tags=tags, store=mlflow.get_tracking_uri())
        try:
            run_id = in_child_process(
                run_job, job, work=f"tunes {name}", advice="see its run", is_quiet=True, limit_s=_JOB_LIMIT_S
            )
            with tracking.translated_errors("read the run of an entry"):
                found = mlflow.get_run(run_id)
            made = replace(_with_run(before, found), error="")
        except Exception as err:  # noqa: BLE001 - whatever ends one entry leaves the others
            _log.warning("%s: %s", name, one_line(err))
            made = replace(before, error=one_line(err))
        minutes = (time.monotonic() - started_s) / 60
        self._entries[number] = replace(made, minutes=before.minutes + minutes)
        self.show()
        _log.info("%s", self.result().headline())

    def show(self) -> None:
        """Tells MLflow how the sweep stands."""
        result = self.result()
        self._run.log_metrics(result.metrics)
        self._run.log_note(result.note())
        self._run.log_text(tracking.html_page(result.report()), names.SWEEP_REPORT_FILE)


def _with_run(entry: EntryResult, found: Run) -> EntryResult:
    """An entry with what its next pipeline found."""
    metrics = dict(found.data.metrics)
    made = replace(
        entry,
        run_id=str(found.info.run_id),
        tune_run=found.data.tags.get(names.TAG_TUNE_RUN, ""),
        metrics=metrics,
        unreliable=found.data.tags.get(names.TAG_UNRELIABLE, ""),
    )
    if entry.run_id and made.num_trials > entry.num_trials:
        saved_ms = entry.metrics.get(names.LATENCY_MS, 0.0) - metrics.get(names.LATENCY_MS, 0.0)
        made = replace(made, saved_ms=saved_ms / (made.num_trials - entry.num_trials))
    return made


def run_job(job: SweepJob) -> str:
    """Runs a pipeline, in a process of its own; returns the ID of its run."""
    os.environ[_CONTEXT] = json.dumps(dict(job.tags))
    mlflow.set_tracking_uri(job.store)
    return run_pipeline(job.options).run_id
