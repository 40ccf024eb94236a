"""Runs a sweep: each entry gets a model first, then the trials go where they gain most.

What is done is read back from MLflow, so that a sweep that was ended goes on.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import math
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import mlflow
from mlflow.entities import Run
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from ansor_mlflow import names, tracking
from ansor_mlflow.commands.sweep.changes import Change, compare, measured_of, pipelines_of
from ansor_mlflow.commands.sweep.declaration import Declaration, Entry, read_sweep
from ansor_mlflow.commands.sweep.nodes import Ended, Node, Nodes, SweepJob, ThisMachine, tracking_store
from ansor_mlflow.commands.sweep.plans import EntryPlan, SweepPlan, plan_entries
from ansor_mlflow.commands.sweep.ray_nodes import RayNodes
from ansor_mlflow.commands.sweep.results import EntryResult, SweepResult
from ansor_mlflow.commands.sweep.schedule import Allowance, next_pipeline, rank
from ansor_mlflow.errors import AnsorMlflowError, MachineError, UserInputError, only_warn
from ansor_mlflow.files import write_text
from ansor_mlflow.foreign import Image
from ansor_mlflow.networks import external_files
from ansor_mlflow.parameters import PipelineOptions, SweepOptions, is_uri, load_options

_log = logging.getLogger("ansor_mlflow")
_MAX_TRIES = 3
"""Times that a pipeline is run whose error is of the machine: a server that was away may be back."""
_MAX_LOSSES = 3
"""Nodes that an entry may lose: a network may be what ends them."""
_TELL_S = 30.0
"""Seconds after which MLflow is told again how the sweep stands."""
_LOOK_S = 5.0
"""Seconds after which is looked for nodes that came."""
_MAX_OUTAGE_S = 600.0
"""Seconds that the tracking server may be away."""
_SEEN_S = 30.0
_MAX_UNSEEN_S = 300.0
"""Seconds after which a driver that said nothing is no more, which its host may be."""
_MAX_BREAK_S = 6 * 3600.0
"""Seconds after which a comparison whose process was killed begins anew: what it measured is no more of today."""
_MAX_EARLIER = 100
"""Runs of a sweep's name that are looked at."""
_FILES_DIR = "files"
"""Folder of the run's artifacts with networks and data that nodes fetch, by the digests of entries."""


def _nobody(_: object) -> None:
    """Is told nothing."""


Found = SweepPlan | SweepResult
Out = TypeVar("Out")


def run_sweep(
    options: SweepOptions, tell: Callable[[Found], None] = _nobody, watch: Callable[[SweepResult], None] = _nobody
) -> Found:
    """Makes a model of every entry, and tunes them.

    `watch` is told how the entries stand whenever one changes, and `tell` what is returned, before any of these errors
    but the first two.

    Raises:
        UserInputError: The file is unusable, or another process runs the sweep.
        MachineError: There is no cluster, or it went away.
        TuningError: An entry has no model in the end.
        SlowerError: A model is slower than it may be.
    """
    if (options.fail_if_slower is not None) and not options.against:
        raise UserInputError("fail_if_slower: there is nothing to compare with; give against, too")
    before = pipelines_of(options.against) if options.against else {}
    declaration = read_sweep(options.sweep)
    nodes = _nodes_of(options, declaration.entries)
    with contextlib.closing(nodes):
        _log.info("planning %d entries of %s", len(declaration.entries), declaration.name)
        plans = _planned(declaration.entries, nodes)
        if options.dry_run:
            plan = SweepPlan(name=declaration.name, entries=declaration.entries, plans=tuple(plans))
            tell(plan)
            return plan
        earlier = _earlier_run(declaration, options)
        with tracking.step_run("sweep", options, f"sweep {declaration.name}", resume=earlier) as run:
            tags = {names.TAG_SWEEP: declaration.name, names.TAG_SWEEP_AGAINST: options.against}
            tags[names.TAG_SWEEP_DRIVER] = f"{socket.gethostname()} {os.getpid()}"
            run.log_tags({name: text for name, text in tags.items() if text})
            driver = Driver(declaration, plans, options, run, nodes, watch)
            with _seen(run.run_id):
                driver.look_up()
                driver.run()
                result = driver.compared(before)
            _write(result, options)
            tell(result)
            result.require_done()
            if options.fail_if_slower is not None:
                result.require_not_slower(options.fail_if_slower)
    return result


def _write(result: SweepResult, options: SweepOptions) -> None:
    """Writes the files that a pull request shows."""
    if options.junit:
        write_text(Path(options.junit), result.junit(options.fail_if_slower))
    if options.markdown:
        write_text(Path(options.markdown), f"# Sweep {result.name}\n\n{result.note()}\n")


def _nodes_of(options: SweepOptions, entries: Sequence[Entry]) -> Nodes:
    if options.cluster == "local":
        return ThisMachine()
    return RayNodes(options.cluster, entries)


def _planned(entries: Sequence[Entry], nodes: Nodes) -> list[EntryPlan]:
    """The plan of each entry for the device that the nodes have for it; an error where they have none."""
    found: dict[int, EntryPlan] = {}
    known = []
    for number, entry in enumerate(entries):
        try:
            known.append((number, entry, nodes.device_of(entry)))
        except AnsorMlflowError as err:
            found[number] = EntryPlan(error=str(err), waits=isinstance(err, MachineError))
    plans = plan_entries([(entry, device) for _, entry, device in known])
    found |= {number: plan for (number, _, _), plan in zip(known, plans, strict=True)}
    first: dict[str, str] = {}
    for number, entry in enumerate(entries):
        if (digest := found[number].digest) and first.setdefault(digest, entry.name) != entry.name:
            found[number] = EntryPlan(error=f"it is the same as {first[digest]}; leave one out")
    return [found[number] for number in range(len(entries))]


def _earlier_run(declaration: Declaration, options: SweepOptions) -> str:
    """ID of the run of this sweep that goes on; empty where there is none yet."""
    with tracking.translated_errors("search the runs of the sweep"):
        experiments = [options.experiment] if options.experiment.isdecimal() else None
        by_name = [options.experiment] if options.experiment and not experiments else None
        runs = mlflow.search_runs(
            experiments,
            filter_string=f"tags.`{names.TAG_SWEEP}` = '{declaration.name}'",
            order_by=["attributes.start_time DESC"],
            max_results=_MAX_EARLIER,
            output_format="list",
            experiment_names=by_name,
        )
    runs = [run for run in runs if run.data.tags.get(names.TAG_SWEEP_AGAINST, "") == options.against]
    if not runs:
        return ""
    found = runs[0]
    seen_s = float(found.data.tags.get(names.TAG_SWEEP_SEEN, 0))
    if options.against and (found.info.status in ("FINISHED", "FAILED") or time.time() - seen_s > _MAX_BREAK_S):
        return ""  # it is compared anew
    host, _, pid = found.data.tags.get(names.TAG_SWEEP_DRIVER, "").partition(" ")
    is_here = host == socket.gethostname()
    is_there = time.time() - seen_s < _MAX_UNSEEN_S and (not is_here or _is_alive(int(pid)))
    if found.info.status == "RUNNING" and is_there:
        raise UserInputError(
            f"sweep={declaration.name}: process {pid} on {host} runs it already, see run {found.info.run_id}; wait for "
            "it, or give the sweep another name"
        )
    return str(found.info.run_id)


def _is_alive(pid: int) -> bool:
    return pid != os.getpid() and Path(f"/proc/{pid}").exists()


@dataclass(frozen=True, kw_only=True)
class _Started:
    """A pipeline that runs on a node."""

    node: Node
    started_s: float
    num_trials: int
    """Trials that it may measure."""


@contextlib.contextmanager
def _seen(run_id: str) -> Iterator[None]:
    """Says in a run, again and again, that this process is there: else another host may take the sweep over."""
    is_over = threading.Event()

    def say() -> None:
        client = mlflow.MlflowClient()
        while True:
            with contextlib.suppress(Exception):  # the server may be away; it is told the next time
                client.set_tag(run_id, names.TAG_SWEEP_SEEN, str(int(time.time())))
            if is_over.wait(_SEEN_S):
                return

    thread = threading.Thread(target=say, name="sweep-seen", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


class Driver:
    """Knows how the entries stand, and does what is next."""

    def __init__(
        self,
        declaration: Declaration,
        plans: Sequence[EntryPlan],
        options: SweepOptions,
        run: tracking.StepRun,
        nodes: Nodes,
        watch: Callable[[SweepResult], None] = _nobody,
    ) -> None:
        self._declaration, self._options, self._run, self._nodes = declaration, options, run, nodes
        self._watch = watch
        self._entries = [
            EntryResult(entry=entry, plan=plan, error=plan.error)
            for entry, plan in zip(declaration.entries, plans, strict=True)
        ]
        self._give_up_s = math.inf if options.max_minutes is None else time.monotonic() + 60 * options.max_minutes
        self._started: dict[int, _Started] = {}
        self._ended: set[int] = set()
        """Entries that get no more in this call: they failed, or had no time for a trial."""
        self._failed_on: dict[int, list[str]] = {}
        """Nodes on which a pipeline of an entry failed, by the entry's number."""
        self._failures = Counter[str]()
        """Pipelines that failed on a node since one ended well there."""
        self._losses = Counter[int]()
        self._files: set[str] = set()
        """Artifacts that nodes fetch, and that this process has uploaded."""
        with tracking.translated_errors("read the run of the sweep"):
            self._experiment_id = mlflow.get_run(run.run_id).info.experiment_id

    def result(self) -> SweepResult:
        return SweepResult(
            name=self._declaration.name,
            run_id=self._run.run_id,
            experiment_id=self._experiment_id,
            entries=tuple(self._entries),
        )

    def compared(self, before: Mapping[str, str]) -> SweepResult:
        """The sweep's end: with each model compared with that of an earlier pipeline of the same name."""
        for number, entry in enumerate(self._entries):
            if entry.run_id and (earlier := before.get(entry.entry.name)):
                try:
                    change = compare(
                        *(_until_answered(partial(measured_of, run_id)) for run_id in (entry.run_id, earlier))
                    )
                except AnsorMlflowError as err:
                    change = Change(reason=str(err))
                self._entries[number] = replace(entry, change=change)
        _until_answered(partial(self._tell, is_over=True))
        return self.result()

    def look_up(self) -> None:
        """Finds the models and tunings that entries have already, here or in another run of the experiment."""
        for number, entry in enumerate(self._entries):
            if entry.plan.digest:
                self._look_up(number)

    def _look_up(self, number: int) -> None:
        digest = self._entries[number].plan.digest
        with tracking.translated_errors("search the runs of an entry"):
            found = self._runs_of(digest)
            if self._end_killed_runs(found):
                found = self._runs_of(digest)
        own = {self._run.run_id}
        for run in found:
            if self._options.against and run.data.tags.get("mlflow.parentRunId") not in own:
                continue  # what is compared is measured anew
            own.add(run.info.run_id)
            step = run.data.tags.get(names.TAG_STEP)
            if step == "tune":
                self._entries[number] = self._entries[number].with_tuning(run)
            elif step == "main" and run.info.status == "FINISHED":
                self._entries[number] = self._entries[number].with_pipeline(run)

    def _runs_of(self, digest: str) -> list[Run]:
        """Runs of an entry in the experiment, oldest first: a run is older than those below it."""
        return list(
            mlflow.search_runs(
                [self._experiment_id],
                filter_string=f"tags.`{names.TAG_SWEEP_ENTRY}` = '{digest}'",
                order_by=["attributes.start_time ASC"],
                output_format="list",
            )
        )

    def _end_killed_runs(self, runs: Sequence[Run]) -> int:
        """Marks runs KILLED that run no more: those below the run of this sweep, which has one driver.

        Returns:
            How many it marked.
        """
        above = {self._run.run_id}
        for run in runs:
            if run.data.tags.get("mlflow.parentRunId") in above:
                above.add(run.info.run_id)
        running = [run for run in runs if run.info.status == "RUNNING"]
        # a tuning that goes on may be that of another sweep
        resumed = {run.data.params.get("resume_run") for run in running if run.info.run_id in above}
        killed = [run.info.run_id for run in running if run.info.run_id in above | resumed]
        for run_id in killed:
            tracking.end_killed_run(run_id)
        return len(killed)

    def run(self) -> None:
        """Runs pipelines until none is left, or those that are left have no node."""
        looked_s = told_s = waits_since_s = time.monotonic()
        try:
            while True:
                if time.monotonic() - looked_s > _LOOK_S:
                    self._look_for_nodes()
                    looked_s = time.monotonic()
                self._start_all()
                if self._started:
                    waits_since_s = time.monotonic()
                elif (
                    not (self._waiting() or self._pipelines())
                    or time.monotonic() - waits_since_s > 60 * self._options.node_minutes
                ):
                    break
                if time.monotonic() - told_s > _TELL_S:
                    self.show()
                    told_s = time.monotonic()
                for number, ended in self._nodes.wait(_LOOK_S):
                    self._take(number, ended)
        finally:
            self._end_started()

    def _look_for_nodes(self) -> None:
        """Plans entries that had no node, if there is one now, and asks for those that are missing."""
        if self._nodes.look():
            waiting = [number for number, entry in enumerate(self._entries) if entry.plan.waits]
            plans = _planned([self._entries[number].entry for number in waiting], self._nodes)
            for number, plan in zip(waiting, plans, strict=True):
                self._entries[number] = replace(self._entries[number], plan=plan, error=plan.error)
                if plan.digest:
                    _until_answered(partial(self._look_up, number))
        wanted = [*self._pipelines(), *self._started, *self._waiting()]
        self._nodes.request([(self._entries[each].entry, self._entries[each].plan.device) for each in wanted])

    def _waiting(self) -> list[int]:
        """Entries for which there is no node."""
        return [number for number, entry in enumerate(self._entries) if entry.plan.waits]

    def _pipelines(self) -> dict[int, dict[str, str]]:
        """What the next pipelines of entries are given that run none."""
        left = self._left()
        found = {
            number: next_pipeline(entry, left)
            for number, entry in enumerate(self._entries)
            if not entry.plan.error and number not in self._ended and number not in self._started
        }
        return {number: given for number, given in found.items() if given is not None}

    def _left(self) -> Allowance:
        """What nobody has spent, or is about to."""
        trials = math.inf
        if self._options.max_trials is not None:
            about = Counter({number: job.num_trials for number, job in self._started.items()})
            spent = [max(e.num_trials, e.num_measured, about[number]) for number, e in enumerate(self._entries)]
            trials = self._options.max_trials - sum(spent)
        return Allowance(trials=trials, minutes=(self._give_up_s - time.monotonic()) / 60)

    def _start_all(self) -> None:
        """Gives each free node the entry that is next for it."""
        busy = {job.node.id for job in self._started.values()}
        free = [node for node in self._nodes.known if node.id not in busy]
        pipelines = self._pipelines() if free else {}
        for node in free:
            left = self._left()
            tuned = [self._entries[number].plan for number, job in self._started.items() if job.num_trials]
            suited = [number for number in pipelines if self._suits(node, number)]
            if suited:
                number = max(
                    suited, key=lambda each: rank(self._entries[each], left, is_shared=self._shares(each, tuned))
                )
                self._start(number, node, pipelines.pop(number))
                if math.isfinite(left.trials):  # there are fewer for the next
                    pipelines = self._pipelines()

    def _shares(self, number: int, tuned: Sequence[EntryPlan]) -> bool:
        """Whether an entry has tasks that are being tuned."""
        own = self._entries[number].plan
        return any(plan.device == own.device and plan.workloads & own.workloads for plan in tuned)

    def _suits(self, node: Node, number: int) -> bool:
        """Whether an entry may run on a node: it is of its device, and not one where it failed, or where everything
        does, unless there is no other.
        """
        entry = self._entries[number]
        if not self._nodes.suits(node, entry.entry, entry.plan.device):
            return False
        failed = {*self._failed_on.get(number, []), *(each for each, times in self._failures.items() if times > 1)}
        return node.id not in failed or not any(
            self._nodes.suits(each, entry.entry, entry.plan.device)
            for each in self._nodes.known
            if each.id not in failed
        )

    def _start(self, number: int, node: Node, given: Mapping[str, str]) -> None:
        """Runs a pipeline of an entry on a node."""
        entry = self._entries[number]
        texts = [f"{key}={text}" for key, text in given.items() if key != "resume_run"]
        _log.info("%s%s: %s", entry.entry.name, f" on {node.name}" if node.name else "", ", ".join(texts))
        own = {"parent_run": self._run.run_id, "run_name": entry.entry.name}
        changed = entry.entry.options.changed()
        try:
            if "resume_run" in given:  # which has a copy; the network may be elsewhere now
                changed = {key: text for key, text in changed.items() if key != "network"}
            if node.name:
                changed = _until_answered(partial(self._with_files, changed, entry.plan.digest))
            options = load_options(PipelineOptions, {**changed, **given, **own})
            job = SweepJob(
                name=entry.entry.name,
                options=options,
                tags={names.TAG_SWEEP_ENTRY: entry.plan.digest},
                store=tracking_store(),
                since_s=time.time() if math.isfinite(self._give_up_s) else None,
                on_node=bool(node.name),
            )
            self._nodes.start(number, node, job)
        except AnsorMlflowError as err:
            self._fail(number, node, Ended(error=str(err), may_be_repeated=isinstance(err, MachineError)))
            return
        self._started[number] = _Started(node=node, started_s=time.monotonic(), num_trials=int(given["trials"]))
        self._entries[number] = replace(entry, node=node.name or "this machine")
        self._watch(self.result())

    def _with_files(self, changed: Mapping[str, str], digest: str) -> dict[str, str]:
        """Parameters with files of this host as artifacts of the sweep's run."""
        shared = dict(changed)
        for key in ("network", "data"):
            text = changed.get(key, "")
            if text and not is_uri(text) and Path(text).exists():
                shared[key] = self._shared(text, f"{_FILES_DIR}/{digest}/{key}")
        if sources := [text for text in changed.get("warm_start", "").split(",") if text]:
            folder = f"{_FILES_DIR}/{digest}/warm_start"
            shared["warm_start"] = ",".join(
                self._shared(text, f"{folder}/{number}") if not is_uri(text) and Path(text).exists() else text
                for number, text in enumerate(sources)
            )
        return shared

    def _shared(self, path: str, folder: str) -> str:
        """The URI of a file or directory of this host as an artifact."""
        return f"runs:/{self._run.run_id}/{self._uploaded(Path(path), folder)}"

    def _uploaded(self, path: Path, folder: str) -> str:
        """The artifact path of a file or a directory, with the files of its weights."""
        address = f"{folder}/{path.name}"
        if address not in self._files:
            _log.info("uploading %s for the nodes", path.name)
            if path.is_dir():
                self._run.log_artifacts(path, address)
            else:
                others = external_files(path, path.name) if path.suffix == ".onnx" else []
                for other in others:
                    self._run.log_artifacts(path.parent / other, str(Path(folder, other).parent))
                self._run.log_artifacts(path, folder)
            self._files.add(address)
        return address

    def _take(self, number: int, ended: Ended) -> None:
        """Takes note of how a pipeline ended."""
        started, before = self._started.pop(number), self._entries[number]
        minutes = before.minutes + (time.monotonic() - started.started_s) / 60
        self._entries[number] = replace(before, minutes=minutes, node="")
        _until_answered(partial(self._look_up, number))
        after = self._entries[number]
        if not ended.run_id:
            self._fail(number, started.node, ended)
            return
        self._failures[started.node.id] = 0
        if after.run_id == before.run_id or (started.num_trials and after.num_trials <= before.num_trials):
            self._ended.add(number)  # it had no time for a trial
        _log.info("%s", self.result().headline())
        self._watch(self.result())

    def _fail(self, number: int, node: Node, ended: Ended) -> None:
        """Says why a pipeline failed, and whether it is tried again."""
        name = self._entries[number].entry.name
        _log.warning("%s: %s", name, ended.error)
        self._entries[number] = replace(self._entries[number], error=ended.error)
        if ended.is_lost:
            self._losses[number] = self._losses.get(number, 0) + 1
            is_over = self._losses[number] >= _MAX_LOSSES
        else:
            self._failures[node.id] += ended.may_be_repeated
            tried = self._failed_on.setdefault(number, [])
            tried.append(node.id)
            is_over = not ended.may_be_repeated or len(tried) >= _MAX_TRIES
        if is_over:
            self._ended.add(number)
        self._watch(self.result())

    def _end_started(self) -> None:
        """Ends what runs, where the sweep is ended; their runs say so."""
        if not self._started:
            return
        self._nodes.close()
        for number in self._started:
            with only_warn("runs of the sweep cannot be ended"):
                self._end_killed_runs(self._runs_of(self._entries[number].plan.digest))

    def show(self) -> None:
        """Tells MLflow how the sweep stands; where it cannot be told now, it is told the next time."""
        with only_warn("MLflow cannot be told how the sweep stands"):
            self._tell()

    def _tell(self, *, is_over: bool = False) -> None:
        result = self.result()
        report = result.report()
        self._run.log_metrics(result.metrics)
        self._run.log_note(result.note())
        self._run.log_json(result.pipelines(), names.SWEEP_FILE)
        if is_over and (speedups := result.speedups):  # to draw takes a second, in which a node may wait
            chart = self._run.directory / names.SWEEP_CHART
            tracking.save_figure(tracking.draw_speedups(f"Sweep {result.name}", speedups), chart)
            self._run.log_artifacts(chart)
            image = Image(base64.b64encode(chart.read_bytes()).decode(), "Speed-ups over the best rival")
            report = replace(report, parts=[*report.parts, image])
        self._run.log_text(tracking.html_page(report), names.SWEEP_REPORT_FILE)


def _until_answered(function: Callable[[], Out]) -> Out:
    """Calls a function again while the tracking server is away."""
    retrying = Retrying(
        retry=retry_if_exception_type(MachineError),
        wait=wait_fixed(_LOOK_S),
        stop=stop_after_delay(_MAX_OUTAGE_S),
        reraise=True,
    )
    return retrying(function)
