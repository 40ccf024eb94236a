"""The step `tune`: extracts the tasks of a network, searches them, keeps the records in the run."""

from __future__ import annotations

import contextlib
import logging
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ansor_mlflow import names, tracking, tuning
from ansor_mlflow.device import Device, DeviceFingerprint, has_arithmetic, parse_target, resolve_num_threads
from ansor_mlflow.errors import UserInputError
from ansor_mlflow.fleet import device_of_fleet, fleet_settings
from ansor_mlflow.foreign import PrintableFormatter, Report, Reported, Table, without_credentials
from ansor_mlflow.lowering import LOWERING_VERSION, LoweredNetwork
from ansor_mlflow.model import fallback_clauses, lower_guarded, part_entries, require_linker
from ansor_mlflow.networks import Network, write_onnx
from ansor_mlflow.parameters import TuneOptions
from ansor_mlflow.records import JOURNAL_FILE, PARTS_DIR, Provenance, read_provenance, write_description
from ansor_mlflow.settings import FallbackReasons
from ansor_mlflow.steps.fetching import options_of_source
from ansor_mlflow.steps.quantizing import Quantization, log_quantization, quantized
from ansor_mlflow.steps.tuning.earlier import (
    AUTO,
    begin_with_records,
    copy_of_network,
    fetch_what_was_measured,
    require_same_tasks,
    resumed_options,
)
from ansor_mlflow.steps.tuning.tuning_report import TuningReport
from ansor_mlflow.trials import StopReason, TuningObserver, TuningResult

_log = logging.getLogger("ansor_mlflow")


@dataclass(frozen=True, kw_only=True)
class TuneResult(Reported):
    """What a tuning found."""

    run_id: str
    network: str
    target: str
    metrics: dict[str, float]
    stop_reason: str
    """Why the tuning ended, a value of `StopReason`."""

    def report(self) -> Report:
        title = f"tuning of {self.network} for {self.target}, ended by {self.stop_reason}"
        return Report(title, [Table(tracking.summary_rows(self.metrics))], {"run": self.run_id})


def tune(options: TuneOptions, observers: Sequence[TuningObserver] = (), work: TuningWork | None = None) -> TuneResult:
    """Tunes a network."""
    work = work or prepare_tuning(resolved_options(options))
    with (
        tracking.step_run("tune", options, f"tune {work.options.network}", resume=options.resume_run) as run,
        tracking.open_outbox(run.run_id, run.directory, keeps_name=run.is_named) as outbox,
        _log_file(run.directory / names.LOG_FILE),
    ):
        try:
            found = _tune(work, run, outbox, observers)
        finally:
            if outbox.was_used:  # the tuning began
                artifacts = [*tracking.whole_records(run.directory), (names.LOG_FILE, "")]
                outbox.put(tracking.Message(artifacts=artifacts, remove=f"{names.RECORDS_DIR}/{PARTS_DIR}"))
        outbox.put(tracking.Message(status="FINISHED"))
        return found


def resolved_options(options: TuneOptions) -> TuneOptions:
    """The parameters of a tuning, those of a run that goes on included, as far as they can be checked without TVM."""
    options = resumed_options(options) if options.resume_run else options
    parsed = parse_target(options.target)
    is_of_this_host = "mtriple" not in parsed if isinstance(parsed, dict) else parsed == "auto"
    if fleet_settings(options) is None and is_of_this_host:
        resolve_num_threads(options.num_threads)
    for source in () if options.resume_run else options.warm_start:  # a run that goes on has its records already
        if source != AUTO:
            options_of_source(source, options, "warm_start")
    return options


@dataclass(frozen=True, kw_only=True)
class TuningWork:
    """What is tuned, how, and for which device."""

    options: TuneOptions
    network: Network
    quantization: Quantization | None
    device: Device
    lowered: LoweredNetwork
    fallback: FallbackReasons
    sketched: frozenset[str]
    """Structural hashes of the tasks that are searched among the programs of a sketch."""
    num_trials: int


def prepare_tuning(options: TuneOptions) -> TuningWork:
    """Does all that can show that parameters are not usable, so that there is no run of those that are not."""
    network = tracking.network_of(options, copy_of_network(options.resume_run) if options.resume_run else "")
    if network.chosen:
        _log.info("%s", network.chosen)
    device, quantization = _device_of(options), None
    if not options.resume_run:  # whose copy is quantised
        network, quantization = quantized(network, options, device.target)
    if options.cache_flush and not device.platform.in_process:
        raise UserInputError(
            f"cache_flush=true flushes the caches of a CPU, and target={options.target} is none; leave it out"
        )
    tuning.runner_name(options)
    require_linker(device.fingerprint.machine, options.linker)
    tuning.make_cost_model(options.cost_model, device.num_threads, options.seed)
    if options.trials:
        tuning.start_fork_server()  # it loads TVM while the network is lowered
    _log.info("lowering %s for %s", network.name, device.description)
    lowered, fallback = lower_guarded(network, device, options.lowering, options.network)
    for clause in fallback_clauses(part_entries(lowered)):
        _log.info("%s", clause)
    if not lowered.tasks:
        _log.warning("%s has no task for TVM to tune, so that nothing is measured", network.name)
        options = options.model_copy(update={"trials": 0})
    sketched = tuning.sketched_workloads(lowered.tasks, device.target, options.space) if options.trials else frozenset()
    num_algorithms = lowered.num_algorithms
    num_trials = tuning.resolve_num_trials(
        options, len(lowered.tasks), num_sketched=len(sketched), num_algorithms=num_algorithms
    )
    return TuningWork(
        options=options,
        network=network,
        quantization=quantization,
        device=device,
        lowered=lowered,
        fallback=fallback,
        sketched=sketched,
        num_trials=num_trials,
    )


def _device_of(options: TuneOptions) -> Device:
    """What programs are measured on: this host, or the servers of a fleet."""
    if fleet := fleet_settings(options):
        _log.info("asking the tracker at %s for a server of key %s", fleet.tracker, fleet.key)
        return device_of_fleet(fleet, options.target, options.num_threads)
    device = Device.resolve(options.target, options.num_threads)
    if options.trials:
        device.require_measurable_here()
    return device


def _tune(
    work: TuningWork, run: tracking.StepRun, outbox: tracking.Outbox, observers: Sequence[TuningObserver]
) -> TuneResult:
    options, network, device, lowered = work.options, work.network, work.device, work.lowered
    records = run.directory / names.RECORDS_DIR
    if options.resume_run:
        fetch_what_was_measured(run.run_id, records)
    is_resumed = (records / JOURNAL_FILE).exists()
    records.mkdir(exist_ok=True)
    if is_resumed:
        require_same_tasks(run.run_id, records, network, device.fingerprint, lowered.tasks)
    _log_inputs(run, network, device.fingerprint)
    if work.quantization:
        log_quantization(run, work.quantization)

    if not has_arithmetic(device.target, options.dtype):
        _log.warning("%s converts %s to float32 for every operation, which is slow", device.description, options.dtype)
    trials_per_task = work.num_trials / max(1, len(lowered.tasks))
    known = frozenset[str]()
    if not is_resumed:
        sources, fingerprint = options.warm_start, device.fingerprint
        known = begin_with_records(sources, fingerprint, lowered.tasks, work.sketched, trials_per_task, run)
    job = tuning.TuningJob(
        network=network.name,
        lowered=lowered,
        device=device,
        records=records,
        num_sketched=len(work.sketched),
        known=known,
    )
    provenance = _provenance(work)
    if options.resume_run and (records / names.PROVENANCE_FILE).exists():  # whose copy was quantised by the first call
        provenance = replace(provenance, quantization=read_provenance(records).quantization)
    write_description(records, device.fingerprint, provenance)  # an interrupted tuning can be compiled, too
    if options.trials:
        run.log_tags(
            tracking.memory_tags(device.fingerprint, provenance, [task.info.workload_hash for task in lowered.tasks])
        )
    commands = tracking.command_lines("tune", options)
    logger = tracking.MlflowObserver(outbox, run.directory, commands)
    report = TuningReport(
        history=logger.history,
        job=job,
        shapes=network,
        outbox=outbox,
        directory=run.directory,
        commands=commands,
        is_remote=bool(options.rpc_tracker),
    )
    observers = [tuning.RoundLog(), logger, tracking.RecordMirror(outbox, run.directory), *observers]
    with report.at_the_end(), contextlib.closing(logger):
        result = tuning.tune_job(job, options, options, observers, resume=is_resumed)
    if result.stop_reason == StopReason.MINUTES:
        trials_per_task = result.total_trials / len(result.tasks)
    estimated_s = result.confirmed_latency_s or result.estimated_latency_s
    estimated_ms = estimated_s * 1e3 if estimated_s else None
    provenance = replace(provenance, estimated_latency_ms=estimated_ms, trials_per_task=trials_per_task)
    write_description(records, device.fingerprint, provenance)
    outbox.put(tracking.Message(tags={names.TAG_TRIALS_PER_TASK: str(provenance.trials_per_task)}))
    if options.trials:
        tuning.require_valid_trials(result)
        _warn_of_missing(result, options, run.run_id)
    if result.unreliable:
        _log.warning("the times cannot be trusted: %s", result.unreliable)
    return TuneResult(
        run_id=run.run_id,
        network=network.name,
        target=device.description,
        metrics={names.TRIALS_MEASURED: result.total_trials, **tracking.latency_metrics(result)},
        stop_reason=result.stop_reason,
    )


def _warn_of_missing(result: TuningResult, options: TuneOptions, run_id: str) -> None:
    if missing := result.uncovered:
        assert options.max_minutes is not None  # any other end is an error
        _log.warning(
            "max_minutes=%g was too short: %d of %d tasks have no valid trial, such as %s, and are compiled as their "
            "sketches choose; go on with ansor-mlflow tune --resume-run %s --max-minutes %.1f (main takes the same)",
            options.max_minutes,
            len(missing),
            len(result.tasks),
            missing[0].info.name,
            run_id,
            2 * max(0.1, result.elapsed_s / 60, options.max_minutes),  # the time until now counts
        )


def _log_inputs(run: tracking.StepRun, network: Network, device: DeviceFingerprint) -> None:
    """Logs what is known before tuning. The first upload shows at once whether the artifact store takes files."""
    run.log_json(tracking.describe_environment(device), names.ENVIRONMENT_FILE)
    run.log_tags(
        {
            names.TAG_NETWORK: network.name,
            names.TAG_TARGET: device.description,
            names.TAG_NUM_THREADS: str(device.num_threads),
        }
    )
    if network.source is not None:
        run.log_tags({names.TAG_NETWORK_SOURCE: network.source})
    if network.path is not None:
        for path in write_onnx(network.model, run.directory / names.NETWORK_FILE):
            run.log_artifacts(path)


def _provenance(work: TuningWork) -> Provenance:
    import tvm

    options, network, device = work.options, work.network, work.device
    given = options.model_dump(include={"batch_size", "input_shapes", "input_values", "seed", "target"})
    if network.chosen:  # what is compiled does not depend on how a later version would choose
        given["input_shapes"] = network.chosen.input_shapes
    return Provenance(
        network=without_credentials(options.network),
        from_file=network.path is not None,
        network_sha256=network.sha256,
        **given,
        **asdict(options.lowering),
        num_threads=device.num_threads,
        lowering_version=LOWERING_VERSION,
        tvm_version=tvm.__version__,
        quantization=work.quantization.terms if work.quantization else {},
        fallback={size: dict(reasons) for size, reasons in work.fallback.items()},
        host=platform.node(),
        measure={
            **options.model_dump(include={"number", "repeat", "min_repeat_ms", "measure", "cache_flush"}),
            **({} if device.platform.in_process else {"measure": "warm"}),
            **device.platform.describe(),
            **({"rpc_key": options.rpc_key} if options.rpc_tracker else {"cpus": sorted(device.cpus)}),
        },
    )


@contextlib.contextmanager
def _log_file(path: Path) -> Iterator[None]:
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(PrintableFormatter("%(asctime)s %(levelname)s %(message)s"))
    _log.addHandler(handler)
    try:
        yield
    finally:
        _log.removeHandler(handler)
        handler.close()
