"""What is known of a tuned task, and how it is shown."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import mlflow

from ansor_mlflow import names
from ansor_mlflow.device import Device, available_cpus, why_not_runnable
from ansor_mlflow.errors import RecordsError, UserInputError
from ansor_mlflow.files import scratch_directory
from ansor_mlflow.foreign import Code, Part, Report, Reported, Table, duration
from ansor_mlflow.lowering import TuningTask
from ansor_mlflow.measuring import KernelTimes
from ansor_mlflow.model import PartEntry, part_entries
from ansor_mlflow.parameters import ExplainOptions
from ansor_mlflow.records import find_records
from ansor_mlflow.sketches import Products, products_of
from ansor_mlflow.steps.fetching import options_of_source
from ansor_mlflow.steps.recorded import (
    NetworkTasks,
    SketchUse,
    best_records,
    find_recorded,
    latency_s,
    lower_recorded,
    sketch_uses,
)
from ansor_mlflow.steps.runtimes import estimated_parts
from ansor_mlflow.tracking import kernel_rows, read_artifact, translated_errors
from ansor_mlflow.trials import TaskInfo
from ansor_mlflow.tuning import Bound, Roofline, measure_roofline
from ansor_mlflow.workers import argument_bytes

if TYPE_CHECKING:
    from tvm.s_tir.meta_schedule.database import TuningRecord

_SCHEDULE_HEAD = """import tvm
from tvm.script import tirx as T


def apply_schedule(sch: tvm.s_tir.Schedule) -> None:
"""


@dataclass(frozen=True, kw_only=True)
class Explanation(Reported):
    """A tuned task: what it computes, how, how fast, and how fast it could be."""

    network: str
    target: str
    num_threads: int
    task: TaskInfo
    best_s: float
    """Seconds per call of the fastest record."""
    network_s: float
    """Σ weight × best time over the tasks that have a record, in seconds."""
    num_tasks: int
    num_tuned_tasks: int
    parts: tuple[PartEntry, ...]
    argument_bytes: int
    """Size of the task's arguments, the result included."""
    sketch: str
    """The sketch and its decisions, in words; empty for a program of MetaSchedule's space."""
    own_ratio: float | None
    """Time of the program that the sketch chooses without a trial, over that of the fastest one; None where it was not
    measured."""
    algorithms_s: dict[str, float]
    """Seconds per call of the fastest first measurement in each algorithm for the layer that was tried."""
    computation: str
    """The unscheduled function, as TVMScript."""
    schedule: tuple[str, ...]
    """Statements of a Python program that schedules the function, a `tvm.s_tir.Schedule` named `sch`."""
    scheduled: str
    roofline: Roofline | None
    bound: Bound | None
    products: Products = "float32"
    """What it adds products of."""
    evaluated: str = ""
    """ID of the last evaluation of a model with these records that timed its kernels; empty where there is none."""
    kernels: KernelTimes | None = None

    @property
    def time_share(self) -> float:
        """The task's share of `network_s`, from 0 to 1."""
        return self.task.weight * self.best_s / self.network_s

    def report(self) -> Report:
        parts: list[Part] = [Table(self._figures())]
        if self.roofline and self.bound:
            title = f"Roofline of this host, {self.num_threads} threads"
            parts.append(Table(self._roof(self.roofline, self.bound), title=title))
        if self.kernels:
            title = f"Kernels of the whole network, in the evaluation {self.evaluated}"
            parts.append(Table(kernel_rows(self.kernels), title=title))
        schedule = _SCHEDULE_HEAD + "\n".join(f"    {line}" for line in self.schedule)
        # plain numbers instead of `T.int64(7)`, which fill the lines; the JSON file has them
        computation, scheduled = (re.sub(r"T\.int64\((-?\d+)\)", r"\1", s) for s in (self.computation, self.scheduled))
        parts += [Code(computation, "Computation"), Code(schedule, "Schedule"), Code(scheduled, "Scheduled program")]
        return Report(f"Task {self.task.index}: {self.task.name}", parts)

    def _figures(self) -> list[tuple[str, str]]:
        task, megabytes = self.task, f"{self.argument_bytes / 1e6:.3f} MB"
        weighted, network = duration(task.weight * self.best_s), duration(self.network_s)
        of_tasks = f"{self.num_tuned_tasks} of {self.num_tasks} tasks"
        rows = [
            ("network", f"{self.network} for {self.target}"),
            ("operations", f"{task.flops / 1e6:.3f} MFLOP, {task.weight} × in the network"),
            ("arguments", f"{megabytes}, {task.flops / self.argument_bytes:.1f} FLOPs per byte"),
            ("best time", f"{duration(self.best_s)}, {task.flops / self.best_s / 1e9:.1f} GFLOP/s"),
        ]
        if len(self.algorithms_s) > 1:  # the one that is taken first
            ordered = sorted(self.algorithms_s.items(), key=lambda found: (found[0] != task.algorithm, found[1]))
            rows.append(("algorithms", ", ".join(f"{name} {duration(time_s)}" for name, time_s in ordered)))
        if task.max_rel_error is not None:
            error = f"at most {task.max_rel_error:.1e} of the largest output of this algorithm, against float64"
            rows.append(("error", error))
        rows.append(("sketch", self.sketch or "none: a program of MetaSchedule's space"))
        if self.own_ratio is not None:
            own = f"the sketch's own choice, {self.own_ratio:.2f} × as long"
            rows.append(("without trials", "the same program" if self.own_ratio == 1 else own))
        rows.append(("share of time", f"{self.time_share:.1%}: {weighted} of {network}, {of_tasks}"))
        return [*rows, *(("beside TVM", str(part)) for part in self.parts if part.runs_in != "tvm")]

    def _roof(self, roofline: Roofline, bound: Bound) -> list[tuple[str, str]]:
        gain_s = self.task.weight * (self.best_s - bound.shortest_s)
        at_roof = f"{duration(bound.shortest_s)} instead of {duration(self.best_s)}"
        if gain_s > 0:
            at_roof += f", {duration(gain_s)} less for the network"
        else:
            at_roof += ": its arguments stay in the caches, or the host was busy while the roofs were measured"
        return [
            ("peak", roofline.peak_text(self.products)),
            ("memory", f"{roofline.bandwidth_bytes_per_s / 1e9:.1f} GB/s of a copy"),
            ("attainable", f"{self.task.flops / bound.shortest_s / 1e9:.1f} GFLOP/s, limited by {bound.limit}"),
            ("reached", f"{bound.shortest_s / self.best_s:.0%}"),
            ("at the roof", at_roof),
        ]


def explain_task(options: ExplainOptions) -> Explanation:
    """Explains the fastest record of a task."""
    with scratch_directory() as scratch:
        recorded = find_recorded(options_of_source(options.source, options), Path(scratch))
        network = lower_recorded(recorded)
        records = best_records(recorded.records, network, Path(scratch))
        task = _choose_task(options, network, records)
        trials = find_records(recorded.records, prefer_winners=False)
        algorithms = [other for other in network.tasks if other.info.layer_hash == task.info.layer_hash]
        uses = sketch_uses(trials, algorithms, network.device.target)
    others = {
        algorithm.info.algorithm: uses[hash_].best_s
        for algorithm in algorithms
        if (hash_ := algorithm.info.workload_hash) in uses
    }
    evaluated, kernels = _find_kernels(recorded.options.tune_run)
    explanation = _explain(task, network, records, uses.get(task.info.workload_hash), others)
    return replace(explanation, evaluated=evaluated, kernels=kernels)


def _find_kernels(run_id: str) -> tuple[str, KernelTimes | None]:
    """Finds `Explanation.evaluated` and `Explanation.kernels` for the ID of a tuning run; empty for other records."""
    if not run_id:
        return "", None
    with translated_errors(f"look for evaluations of run {run_id}"):
        client = mlflow.MlflowClient()
        evaluations = client.search_runs(
            [client.get_run(run_id).info.experiment_id],
            f"tags.`{names.TAG_TUNE_RUN}` = '{run_id}' and tags.`{names.TAG_STEP}` = 'evaluate' "
            "and attributes.status = 'FINISHED'",
            max_results=1,
            order_by=["attributes.start_time DESC"],
        )
        evaluated = evaluations[0].info.run_id if evaluations else ""
        if evaluated and any(file.path == names.KERNELS_FILE for file in client.list_artifacts(evaluated)):
            return evaluated, read_artifact(evaluated, names.KERNELS_FILE, KernelTimes)
    return "", None


def _choose_task(options: ExplainOptions, network: NetworkTasks, records: dict[int, TuningRecord]) -> TuningTask:
    """The task that is meant, which has a record; by default the one that takes the largest share of the time.

    One that only moves data, such as a transpose, has no schedule worth a look, and if the host was busy while it was
    measured, its time says more of the host.
    """
    source, tasks = options.source, network.tasks
    if not records:
        raise RecordsError(
            f"{source}: the records fit none of the {len(tasks)} tasks of {network.network}; give the network, layout "
            "and input_shapes that they were made with"
        )
    if not options.task:
        tuned = [task for task in tasks if task.info.index in records]
        computing = [task for task in tuned if task.info.flops]
        if not computing:
            raise RecordsError(
                f"{source}: the records are only of tasks that move data, such as {tuned[0].info.name}; tune for "
                "longer, or give one of them as task"
            )
        return max(computing, key=lambda task: task.info.weight * latency_s(records[task.info.index]))
    by_name = {task.info.name: task for task in tasks}
    found = (by_name | {str(task.info.index): task for task in tasks}).get(options.task)
    if found is None:
        near = difflib.get_close_matches(options.task, by_name, n=3)
        hint = (
            f"perhaps you meant {', '.join(near)}" if near else f"give a name, or an index from 0 to {len(tasks) - 1}"
        )
        raise UserInputError(f"task={options.task!r}: the network has no such task; {hint}")
    if found.info.index not in records:
        raise RecordsError(
            f"task={found.info.name}: {source} has no record of it; tune it, or leave task out for one that has"
        )
    return found


def _explain(
    task: TuningTask,
    network: NetworkTasks,
    records: dict[int, TuningRecord],
    use: SketchUse | None,
    algorithms_s: dict[str, float],
) -> Explanation:
    from tvm.s_tir import Schedule

    record = records[task.info.index]
    schedule = Schedule(task.mod)
    record.trace.apply_to_schedule(schedule, remove_postproc=False)
    tuned = [other for other in network.tasks if other.info.index in records]
    network_s = sum(t.info.weight * latency_s(records[t.info.index]) for t in tuned)
    num_bytes = argument_bytes(task.mod)
    device = network.device
    this_host = Device.of(device.target, min(device.num_threads, available_cpus()))
    is_here = device == this_host and not why_not_runnable(device.fingerprint)
    roofline = measure_roofline(device) if device.platform.in_process and is_here else None
    products = products_of(task.mod)
    parts = part_entries(network.lowered)
    if is_here:
        parts = estimated_parts(network.lowered, network.graph, device, network_s)
    return Explanation(
        network=network.network,
        target=device.description,
        num_threads=device.num_threads,
        task=task.info,
        best_s=latency_s(record),
        network_s=network_s,
        num_tasks=len(network.tasks) - network.lowered.num_algorithms,
        num_tuned_tasks=len(records),
        parts=parts,
        argument_bytes=num_bytes,
        sketch=use.sketch if use else "",
        own_ratio=use.own_ratio if use else None,
        algorithms_s=algorithms_s,
        computation=task.mod.script(),
        schedule=tuple(str(statement) for statement in record.trace.as_python()),
        scheduled=str(schedule.mod.script()),
        roofline=roofline,
        bound=roofline.bound(task.info.flops, num_bytes, products) if roofline else None,
        products=products,
    )
