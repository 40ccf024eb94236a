"""Tunes a lowered network: the engine with its worker processes, or its fleet of servers, and its database."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from ansor_mlflow import names
from ansor_mlflow.device import Device, available_cpus
from ansor_mlflow.errors import UserInputError
from ansor_mlflow.files import write_text
from ansor_mlflow.fleet import RpcRunner, build_reference_kernel, fleet_settings
from ansor_mlflow.lowering import LoweredNetwork
from ansor_mlflow.model import require_linker
from ansor_mlflow.parameters import MeasureOptions, SearchOptions
from ansor_mlflow.plugins import PluginTable
from ansor_mlflow.records import Journal, RecordLog, Seed, read_durations, read_journal, read_seeds, read_similar
from ansor_mlflow.trials import TuningObserver, TuningPlan, TuningResult
from ansor_mlflow.tuning.candidates import candidate_of
from ansor_mlflow.tuning.engine import Tuner
from ansor_mlflow.tuning.stopping import resolve_num_trials
from ansor_mlflow.workers import (
    Builder,
    LocalBuilder,
    LocalRunner,
    MeasureSettings,
    RestOfNetwork,
    Runner,
    argument_bytes,
)

_FLOPS_OF_A_THREAD = 1e11
"""Floating point operations of a thread with vectors in a second, about."""
_STACK_BYTES = 8 * 2**20
"""Size of the stack of a thread, as Linux sets it aside."""
_log = logging.getLogger("ansor_mlflow")


@dataclass(frozen=True, kw_only=True)
class TuningJob:
    """What is tuned, for what, and where its records go."""

    network: str
    lowered: LoweredNetwork
    device: Device
    records: Path
    """Directory of the database; every trial is in it as soon as its round has ended."""
    num_sketched: int = 0
    """Tasks that are searched among the programs of a sketch: see `sketched_workloads`."""
    known: frozenset[str] = frozenset()
    """Structural hashes of the tasks that get no trials, as the records that are there say enough of them."""


def tune_job(
    job: TuningJob,
    search: SearchOptions,
    measure: MeasureOptions,
    observers: Sequence[TuningObserver] = (),
    *,
    resume: bool = False,
) -> TuningResult:
    """Tunes a network with builds on this host, and measurements on it or on a fleet.

    With `resume` the trials in the records directory belong to this tuning and count; otherwise they are those of
    earlier ones, whose fastest programs the search starts from. `similar/` of that directory may have records of
    similar devices, which teach the cost model; `best/` gets the winners' records with their second measurements.
    """
    with directory_lock(job.records), _workers(job, measure) as (builder, runner):
        best = job.records / names.BEST_DIR
        shutil.rmtree(best, ignore_errors=True)  # a killed tuning would leave that of the one before
        log, journal = RecordLog(job.records, job.device.target.export()), Journal(job.records)
        if not resume or read_seeds(job.records)[0]:
            _drop_inapplicable(job, log)
        if resume:
            journal.resume()
        else:
            hashes = [task.info.workload_hash for task in job.lowered.tasks]
            fastest = {hash_: records[0].run_s for hash_ in hashes if (records := log.best(hash_))}
            known = [Seed(workload_hash=h, best_s=s, is_enough=h in job.known) for h, s in fastest.items()]
            journal.begin(log.num_earlier, known)
        _, seeds = read_seeds(job.records)
        num_trials = resolve_num_trials(
            search,
            len(job.lowered.tasks),
            num_sketched=job.num_sketched,
            num_known=sum(seed.is_enough for seed in seeds),
            num_algorithms=job.lowered.num_algorithms,
        )
        host_threads = available_cpus() if measure.rpc_tracker else job.device.num_threads
        tuner = Tuner(
            job.lowered.tasks,
            target=job.device.target,
            options=search,
            num_trials=num_trials,
            search_threads=host_threads if search.search_threads == "auto" else search.search_threads,
            log=log,
            journal=journal,
            past=read_journal(job.records) if resume else (),
            durations=read_durations(job.records) if resume else None,
            seeds=seeds,
            similar=read_similar(job.records / names.SIMILAR_DIR),
            builder=builder,
            runner=runner,
            observers=observers,
        )
        changed = search.changed()
        plan = TuningPlan(
            network=job.network,
            target=job.device.description,
            tasks=tuple(task.info for task in job.lowered.tasks),
            num_trials=num_trials,
            search=" · ".join(
                f"{name.replace('_', ' ')} {text}" for name in names.SEARCH_PARAMS if (text := changed.get(name))
            ),
        )
        try:
            result = tuner.tune(plan)
        except BaseException:
            try:
                tuner.save_winners(best)
            except Exception as err:  # noqa: BLE001 - the error that ended the tuning is the one to report
                _log.warning("the winners were not saved: %s", err)
            raise
        tuner.save_winners(best)
        return result


@contextlib.contextmanager
def directory_lock(directory: Path) -> Iterator[None]:
    """Holds a directory, which is made if need be: two tuners would number the workloads of one database differently.

    The system lets go of it when the process ends, however it ends.
    """
    directory.mkdir(parents=True, exist_ok=True)
    directory = directory.resolve()  # it has one name only, and is not "."
    owner = directory.with_name(f"{directory.name}.tuner.json")
    lock = FileLock(directory.with_name(f"{directory.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout as err:
        holder = "another process"
        with contextlib.suppress(OSError, ValueError, KeyError):  # it has only just begun, or is about to end
            fields = json.loads(owner.read_text())
            holder = f"process {fields['process']} on {fields['host']} (since {fields['started']})"
        raise UserInputError(
            f"{directory}: {holder} tunes in this directory; wait until it ends, or give another directory"
        ) from err
    try:
        started = datetime.now().astimezone().isoformat(timespec="seconds")
        write_text(owner, json.dumps({"process": os.getpid(), "host": platform.node(), "started": started}))
        yield
    finally:
        owner.unlink(missing_ok=True)
        lock.release()


def _drop_inapplicable(job: TuningJob, log: RecordLog) -> None:
    """Leaves out records of others whose schedules do not apply: the search would end with an error."""
    for task in job.lowered.tasks:
        for record in log.best(task.info.workload_hash):
            if candidate_of(record, task, job.device.target) is None:
                _log.warning("a record of %s does not apply to the task, and is left out", task.info.name)
                log.drop(task.info.workload_hash, record)


@dataclass(frozen=True)
class RunnerTask:
    """What a runner of a tuning is made of."""

    settings: MeasureSettings
    device: Device
    options: MeasureOptions
    builder: Builder
    """Builds programs for the device, such as one to compare servers with."""
    memory_bytes: int
    """What a process that measures may take."""


def _local_runner(task: RunnerTask) -> Runner:
    # the driver of a device maps more memory than it uses
    bound = task.memory_bytes if task.device.platform.in_process else None
    return LocalRunner(task.settings, memory_bytes=bound, cpus=task.device.cpus)


def _rpc_runner(task: RunnerTask) -> Runner:
    fleet = fleet_settings(task.options)
    if fleet is None:
        raise UserInputError("runner=rpc, but rpc_tracker is empty; give the address of a tracker")
    return RpcRunner(task.settings, fleet, build_reference_kernel(task.builder), memory_bytes=task.memory_bytes)


RUNNERS: PluginTable[Callable[[RunnerTask], Runner]] = PluginTable(
    "runners", {"local": _local_runner, "rpc": _rpc_runner}, callable
)
"""What makes the runner of a tuning, by the name that users give."""


def runner_name(options: MeasureOptions) -> str:
    """The name of what measures programs; a `UserInputError` where there is none of that name."""
    if options.runner == "auto":
        return "rpc" if options.rpc_tracker else "local"
    if options.runner not in RUNNERS:
        raise UserInputError(f"runner={options.runner}: there is none of that name; give auto, {', '.join(RUNNERS)}")
    return options.runner


@contextlib.contextmanager
def _workers(job: TuningJob, options: MeasureOptions) -> Iterator[tuple[Builder, Runner]]:
    """Builder and runner with their bounds of memory; arguments and stacks of a program come on top of the runner's."""
    memory_bytes = options.worker_memory_mib * 2**20
    num_workers = available_cpus() if options.rpc_tracker else job.device.num_threads
    builder = LocalBuilder(
        job.device.target,
        max_workers=num_workers if options.build_workers == "auto" else options.build_workers,
        timeout_s=options.measure_timeout_s,
        memory_bytes=memory_bytes,
        as_in_models=True,
        compiler=require_linker(job.device.fingerprint.machine, options.linker),
    )
    with contextlib.closing(builder):
        most_bytes = max((argument_bytes(task.mod) for task in job.lowered.tasks), default=0)
        settings = _measure_settings(options, job)
        bound_bytes = (
            memory_bytes
            + most_bytes
            + (settings.rest.passing_bytes if settings.rest else 0)
            + job.device.num_threads * _STACK_BYTES
        )
        make_runner = RUNNERS[runner_name(options)]
        with contextlib.closing(make_runner(RunnerTask(settings, job.device, options, builder, bound_bytes))) as runner:
            yield builder, runner


def _measure_settings(options: MeasureOptions, job: TuningJob) -> MeasureSettings:
    rest = None
    if options.measure == "network" and not options.cache_flush and job.device.platform.in_process:
        tasks = job.lowered.tasks
        # tensors are passed on in about as much memory as the input and output that need most of it together
        activation_bytes = max((argument_bytes(task.mod, besides=task.constants) for task in tasks), default=0)
        flops = sum(task.info.weight * task.info.flops for task in tasks if not task.info.layer)
        seconds = flops / (job.device.num_threads * _FLOPS_OF_A_THREAD)
        rest = RestOfNetwork(num_bytes=job.lowered.constant_bytes + activation_bytes, seconds=seconds)
    return MeasureSettings(
        number=options.number,
        repeat=options.repeat,
        min_repeat_ms=options.min_repeat_ms,
        cache_flush=options.cache_flush,
        num_threads=job.device.num_threads,
        timeout_s=options.measure_timeout_s,
        rest=rest,
        platform=job.device.platform,
    )
