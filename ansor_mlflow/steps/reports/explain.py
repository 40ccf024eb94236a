"""The command `explain`: what a task computes, the schedule found for it, and how far that is from the roof."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import mlflow

from ansor_mlflow import names
from ansor_mlflow.device import Device, available_cpus, is_cpu, why_not_runnable
from ansor_mlflow.errors import RecordsError, UserInputError
from ansor_mlflow.files import scratch_directory
from ansor_mlflow.lowering import TuningTask
from ansor_mlflow.measuring import KernelTimes
from ansor_mlflow.model import part_entries
from ansor_mlflow.parameters import ExplainOptions
from ansor_mlflow.records import find_records
from ansor_mlflow.steps.parts import estimated_parts
from ansor_mlflow.steps.records import (
    NetworkTasks,
    SketchUse,
    best_records,
    find_recorded,
    latency_s,
    lower_recorded,
    options_of_source,
    sketch_uses,
)
from ansor_mlflow.steps.reports.explanation import Explanation
from ansor_mlflow.tracking import read_artifact, translated_errors
from ansor_mlflow.tuning import argument_bytes, measure_roofline

if TYPE_CHECKING:
    from tvm.s_tir.meta_schedule.database import TuningRecord


def explain_task(options: ExplainOptions) -> Explanation:
    """Explains the fastest record of a task.

    Raises:
        UserInputError: There is no such run, no such file, or no such task.
        RecordsError: The records are damaged, for another target or network, or have none of the task.
        MachineError: A server is away.
    """
    with scratch_directory() as scratch:
        recorded = find_recorded(options_of_source(options.source, options), Path(scratch))
        network = lower_recorded(recorded)
        records = best_records(recorded.records, network, Path(scratch))
        task = _choose_task(options, network, records)
        trials = find_records(recorded.records, prefer_winners=False)
        ways = [other for other in network.tasks if other.info.layer_hash == task.info.layer_hash]
        uses = sketch_uses(trials, ways, network.device.target)
    others = {way.info.way: uses[hash_].best_s for way in ways if (hash_ := way.info.workload_hash) in uses}
    evaluated, kernels = _find_kernels(recorded.options.tune_run)
    explanation = _explain(task, network, records, uses.get(task.info.workload_hash), others)
    return replace(explanation, evaluated=evaluated, kernels=kernels)


def _find_kernels(run_id: str) -> tuple[str, KernelTimes | None]:
    """See `Explanation.evaluated` and `Explanation.kernels`.

    Args:
        run_id: ID of a tuning run; empty where records are from a path.
    """
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
    """The task that is meant, which has a record."""
    if not records:
        raise RecordsError(
            f"{options.source}: the records fit none of the {len(network.tasks)} tasks of {network.network}; give the "
            "network, layout and input_shapes that they were made with"
        )
    if not options.task:
        return _most_expensive(network.tasks, records, options.source)
    task = _find_task(network.tasks, options.task)
    if task.info.index not in records:
        raise RecordsError(
            f"task={task.info.name}: {options.source} has no record of it; tune it, or leave task out for one that has"
        )
    return task


def _find_task(tasks: Sequence[TuningTask], wanted: str) -> TuningTask:
    """The task of that name or index."""
    by_name = {task.info.name: task for task in tasks} | {str(task.info.index): task for task in tasks}
    if wanted in by_name:
        return by_name[wanted]
    near = difflib.get_close_matches(wanted, [task.info.name for task in tasks], n=3)
    hint = f"perhaps you meant {', '.join(near)}" if near else f"give a name, or an index from 0 to {len(tasks) - 1}"
    raise UserInputError(f"task={wanted!r}: the network has no such task; {hint}")


def _most_expensive(tasks: Sequence[TuningTask], records: dict[int, TuningRecord], source: str) -> TuningTask:
    """The task that takes the largest share of the network's time, of those that compute.

    One that only moves data, such as a transpose, has no schedule worth a look, and if the host was busy while it was
    measured, its time says more of the host.
    """
    tuned = [task for task in tasks if task.info.index in records]
    computing = [task for task in tuned if task.info.flops]
    if not computing:
        raise RecordsError(
            f"{source}: the records are only of tasks that move data, such as {tuned[0].info.name}; tune for longer, "
            "or give one of them as task"
        )
    return max(computing, key=lambda task: task.info.weight * latency_s(records[task.info.index]))


def _explain(
    task: TuningTask,
    network: NetworkTasks,
    records: dict[int, TuningRecord],
    use: SketchUse | None,
    ways_s: dict[str, float],
) -> Explanation:
    record = records[task.info.index]
    tuned = [other for other in network.tasks if other.info.index in records]
    network_s = sum(t.info.weight * latency_s(records[t.info.index]) for t in tuned)
    num_bytes = argument_bytes(task.mod)
    device = network.device
    this_host = Device.of(device.target, min(device.num_threads, available_cpus()))
    is_here = device == this_host and not why_not_runnable(device.fingerprint)
    roofline = measure_roofline(device) if is_cpu(device.target) and is_here else None
    return Explanation(
        network=network.network,
        target=device.description,
        num_threads=device.num_threads,
        task=task.info,
        best_s=latency_s(record),
        network_s=network_s,
        num_tasks=len(network.tasks) - network.lowered.num_ways,
        num_tuned_tasks=len(records),
        parts=(
            estimated_parts(network.lowered, network.graph, device, network_s)
            if is_here
            else part_entries(network.lowered)
        ),
        argument_bytes=num_bytes,
        sketch=use.sketch if use else "",
        own_ratio=use.own_ratio if use else None,
        ways_s=ways_s,
        computation=task.mod.script(),
        schedule=tuple(str(statement) for statement in record.trace.as_python()),
        scheduled=_scheduled(task, record),
        roofline=roofline,
        bound=roofline.bound(task.info.flops, num_bytes) if roofline else None,
    )


def _scheduled(task: TuningTask, record: TuningRecord) -> str:
    """The task's function after the record's schedule, as TVMScript."""
    from tvm.s_tir import Schedule

    schedule = Schedule(task.mod)
    record.trace.apply_to_schedule(schedule, remove_postproc=False)
    return str(schedule.mod.script())
