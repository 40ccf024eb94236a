"""The step `compile`: applies records to a network and logs the library as an MLflow model."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ansor_mlflow import flavor, measuring, model, names
from ansor_mlflow.device import Device, why_not_runnable
from ansor_mlflow.errors import AnsorMlflowError, CorrectnessError, RecordsError, UserInputError
from ansor_mlflow.files import scratch_directory
from ansor_mlflow.foreign import Report, Reported, without_credentials
from ansor_mlflow.lowering import LOWERING_VERSION, LoweredNetwork, TuningTask, lower_sizes
from ansor_mlflow.networks import Network, write_onnx
from ansor_mlflow.parameters import CompileOptions
from ansor_mlflow.records import (
    Database,
    RecordPair,
    RecordText,
    find_pairs,
    find_records,
    read_fingerprint,
    write_pair,
)
from ansor_mlflow.serving import get_signature
from ansor_mlflow.settings import LoweringSettings
from ansor_mlflow.steps.part_times import measure_parts, prefer_onnxruntime
from ansor_mlflow.steps.recorded import Recorded, distill_for_device, find_recorded, load_recorded_network
from ansor_mlflow.tensors import all_sizes
from ansor_mlflow.tracking import StepRun, model_name, step_run, translated_errors
from ansor_mlflow.tuning import candidate_of

if TYPE_CHECKING:
    from tvm.target import Target

_SEEDS = range(4)
_MARGIN = 0.75
"""Share of the tolerance that these inputs may take. The largest error differs between inputs: of eight random ones it
was up to 1.6 times as large for one as for another, and a fifth more than the largest of the first four."""
_MAX_CANDIDATES = 8
"""Records of a workload that are tried, beside its winner."""
_log = logging.getLogger("ansor_mlflow")


@dataclass(frozen=True)
class CompileResult(Reported):
    """What the step made."""

    run_id: str
    model_uri: str
    coverage: model.Coverage

    def report(self) -> Report:
        covered = f"{self.coverage.task_share:.0%} of tasks, {self.coverage.flops_share:.1%} of operations"
        return Report(f"coverage {covered}", where={"run": self.run_id, "model": self.model_uri})


@dataclass(frozen=True)
class _Recipe:
    """How the library for one device is made."""

    recorded: Recorded
    device: Device
    lowering: LoweringSettings
    provenance: Mapping[str, object]


def compile_network(options: CompileOptions) -> CompileResult:
    """Compiles a network with records and logs the model."""
    with scratch_directory() as scratch:
        recipes = _recipes(options, Path(scratch))
        recorded = recipes[0].recorded
        network = load_recorded_network(recorded)
        with step_run("compile", options, f"compile {options.network}") as run:
            run.log_options(recorded.options.model_copy(update={"tune_run": options.tune_run}))
            model.require_pad(options.pad, network.name, network)
            devices = [recipe.device for recipe in recipes]
            descriptions = ", ".join(device.description for device in devices)
            run.log_tags(
                {
                    names.TAG_TUNE_RUN: ",".join(options.tune_runs),
                    names.TAG_NETWORK: network.name,
                    names.TAG_TARGET: descriptions,
                    names.TAG_NUM_THREADS: ", ".join(str(device.num_threads) for device in devices),
                    "mlflow.runName": f"compile {network.name} · {descriptions}",
                }
            )
            write_onnx(network.model, run.directory / names.NETWORK_FILE)
            built = [_build_library(network, recipe, options, run) for recipe in recipes]
            library, coverage, _ = min(built, key=lambda of_device: of_device[1].flops_share)
            metrics = _report_coverage(coverage, library.parts, run)
            if options.allow_missing:
                metrics |= _report_lost([lost for _, _, of_device in built for lost in of_device], run)
            libraries = [replace(library, pad=options.pad) for library, _, _ in built]
            if sizes := model.describe_sizes(libraries[0]):
                _log.info("sizes: %s", sizes)
            signature = get_signature(network.inputs, network.outputs, options.signature)
            with translated_errors("log the model"):
                logged = flavor.log_model(libraries, name=model_name(network.name, descriptions), signature=signature)
            made = {names.TAG_MODEL_URI: str(logged.model_uri), names.TAG_COMPUTED_BY: model.computed_by(library.parts)}
            run.log_tags(made)
            run.log_metrics(metrics)  # before, MLflow would make them the first ones of the model
            return CompileResult(run.run_id, str(logged.model_uri), coverage)


def _recipes(options: CompileOptions, scratch: Path) -> list[_Recipe]:
    """How to compile for the device of each tuning run, or for the one of the records that are given."""
    if len(options.tune_runs) > 1 and options.allow_target_mismatch:
        raise UserInputError(
            "allow_target_mismatch with several tuning runs: each is compiled for its own device; leave it out"
        )
    recipes = []
    for number, tune_run in enumerate(options.tune_runs or ("",)):
        directory = scratch / str(number)
        directory.mkdir()
        recorded = find_recorded(options.model_copy(update={"tune_run": tune_run}), directory, any_lowering=True)
        find_records(recorded.records)  # there are some, or it says what is missing
        device = _device_of(recorded, options)
        model.require_linker(device.fingerprint.machine, options.linker)
        recipes.append(_Recipe(recorded, device, recorded.options.lowering, provenance_of(recorded)))
    _require_one_network(recipes)
    return recipes


def _device_of(recorded: Recorded, options: CompileOptions) -> Device:
    """What is compiled for: of several tuning runs the device of each, which need not be this host."""
    if len(options.tune_runs) > 1:
        made_for = read_fingerprint(recorded.records)
        if made_for is None:
            run = recorded.options.tune_run
            raise RecordsError(f"run {run} does not say which device its records are for; compile it alone")
        model.require_linker(made_for.machine, options.linker)  # before LLVM is asked, which may not know the machine
        return Device.elsewhere(made_for)
    if options.allow_target_mismatch:
        return Device.resolve(recorded.options.target, recorded.options.num_threads)
    return recorded.device


def _require_one_network(recipes: Sequence[_Recipe]) -> None:
    """Refuses tuning runs whose libraries cannot be in one model: of other networks, or for the same device."""
    first = recipes[0].recorded
    devices: dict[str, str] = {}
    for recipe in recipes:
        run, options = recipe.recorded.options.tune_run, recipe.recorded.options
        if _digest_of(recipe.recorded) != _digest_of(first):
            raise UserInputError(
                f"tune_run: {first.options.tune_run} tuned {first.options.network} and {run} tuned {options.network}, "
                "or other weights of it; a model holds libraries of one network"
            )
        other = devices.setdefault(recipe.device.fingerprint.name, run)
        if other != run:
            raise UserInputError(
                f"tune_run: {other} and {run} are both for {recipe.device.description}; a model holds one library for "
                "each device: give one of them, or tune one with warm_start= the other"
            )


def _digest_of(recorded: Recorded) -> str:
    return recorded.provenance.network_sha256 if recorded.provenance else ""


def _build_library(
    network: Network, recipe: _Recipe, options: CompileOptions, run: StepRun
) -> tuple[model.CompiledNetwork, model.Coverage, list[_LostRecords]]:
    """Compiles a network; of one that is partly ONNX Runtime's only the parts that pay."""
    directory, device = run.directory / recipe.device.fingerprint.name, recipe.device
    lowered = lower_sizes(network.models(), device.target, recipe.lowering, network.name)
    mismatch, lost = _write_records(recipe.recorded, lowered, device, directory / names.BEST_DIR, options)
    if mismatch:
        _log.warning("%s; they are applied nevertheless, and may be slow", mismatch)
        run.log_tags({names.TAG_TARGET_MISMATCH: mismatch})
    compile_in = partial(_compile, network, recipe, options, run.directory, mismatch)
    compiled, coverage = compile_in(lowered)
    if _loses_digits(compiled, coverage):
        directly = replace(recipe.lowering, algorithm="direct")
        provenance = {**recipe.provenance, "algorithm": "direct"}
        directly_computed = replace(recipe, lowering=directly, provenance=provenance)
        return (*_build_library(network, directly_computed, options, run)[:2], lost)
    compiled, fallback = measure_parts(compiled, lowered)
    if fallback:
        lowered = lower_sizes(network.models(), device.target, recipe.lowering, network.name, fallback)
        compiled, coverage = compile_in(lowered)
        compiled, _ = measure_parts(compiled, lowered)
    if options.runtimes != "tvm" and recipe.lowering.dtype == "float32":
        compiled = prefer_onnxruntime(compiled, network)
    return compiled, coverage, lost


def _compile(
    network: Network, recipe: _Recipe, options: CompileOptions, root: Path, mismatch: str, lowered: LoweredNetwork
) -> tuple[model.CompiledNetwork, model.Coverage]:
    device, directory = recipe.device, root / recipe.device.fingerprint.name
    library, best = directory / model.LIBRARY_FILE, directory / names.BEST_DIR
    _log.info("compiling %s for %s", network.name, device.description)
    max_bytes = options.max_library_mib * 2**20 if options.max_library_mib else None
    coverage = model.compile_tuned(lowered, device.target, best, library, max_bytes=max_bytes, linker=options.linker)
    if not device.platform.in_process and (reason := why_not_runnable(device.fingerprint)):
        _log.warning("the library for %s is compiled and was not run: %s", device.description, reason)
    compiled = model.CompiledNetwork(
        name=network.name,
        network=root / names.NETWORK_FILE,
        inputs=network.inputs,
        outputs=network.outputs,
        library=library,
        records=best,
        fingerprint=device.fingerprint,
        coverage=coverage.to_dict(),
        parts=model.part_entries(lowered),
        sizes=network.sizes,
        provenance={**recipe.provenance, "target_mismatch": mismatch},
    )
    return compiled, coverage


def _report_coverage(coverage: model.Coverage, parts: Sequence[model.PartEntry], run: StepRun) -> dict[str, float]:
    """Says how much of a network the records cover, and returns the metrics; of several libraries, of the least
    covered one.
    """
    run.log_json({**coverage.to_dict(), "parts": parts}, names.COVERAGE_FILE)
    if coverage.missing:
        number = len(coverage.unscheduled)
        unscheduled = f", {number} as TVM has them, often a hundred times slower" if number else ""
        _log.warning(
            "%d of %d tasks have no record (%.1f %% of the operations are covered), such as %s: they run as chosen "
            "without a measurement%s; tune this network for this target and layout",
            len(coverage.missing),
            len(coverage.missing) + len(coverage.covered),
            coverage.flops_share * 100,
            coverage.missing[0].name,
            unscheduled,
        )
    return {
        names.COVERAGE_TASKS: coverage.task_share,
        names.COVERAGE_FLOPS: coverage.flops_share,
        names.LIBRARY_GROWTH_MIB: coverage.growth_bytes / 2**20,
    }


def _report_lost(lost: Sequence[_LostRecords], run: StepRun) -> dict[str, float]:
    run.log_json(lost, names.LOST_RECORDS_FILE)
    if lost:
        _log.warning(
            "the records of %d workloads do not apply any more, such as %s; %s says which",
            len(lost),
            lost[0]["task"] or lost[0]["workload_hash"],
            names.LOST_RECORDS_FILE,
        )
    return {names.RECORDS_LOST: len(lost)}


def provenance_of(recorded: Recorded) -> dict[str, object]:
    """Where a library that is compiled with records comes from; a model keeps it."""
    import tvm

    versions = {"lowering_version": LOWERING_VERSION, "tvm_version": tvm.__version__}
    if recorded.provenance is not None:
        return {**asdict(recorded.provenance), **versions, "tune_run": recorded.options.tune_run}
    records = without_credentials(recorded.options.records)
    return {**asdict(recorded.options.lowering), **versions, "records": records}


def _loses_digits(compiled: model.CompiledNetwork, coverage: model.Coverage) -> bool:
    """Whether a network with layers by other algorithms is off by more than `evaluate` lets pass, or nearly.

    A library that does not run here, or a network that ONNX Runtime cannot compute from random inputs, is not checked:
    `evaluate` does it where the model runs.
    """
    if not coverage.has_other_algorithms or why_not_runnable(compiled.fingerprint):
        return False
    runs = {"algorithms": partial(measuring.library_inference, compiled.library, compiled, compiled.entry)}
    threads = model.threads_here(compiled.entry)
    examples = measuring.seeded_inputs(compiled.network, all_sizes(compiled), _SEEDS)
    try:
        found = measuring.compare_with_reference(runs, compiled.network, threads, examples)["algorithms"]
        measuring.require_broken_stays_broken(
            partial(measuring.outputs_of, runs["algorithms"]), compiled.network, threads, examples[0]
        )
    except CorrectnessError as err:
        _log.warning("with Winograd's convolutions, %s: all layers are direct", err)
        return True
    except AnsorMlflowError as err:
        _log.warning("the outputs of %s are not checked: %s", compiled.name, err)
        return False
    tolerance = measuring.tolerance_for("auto", compiled.network, str(compiled.provenance.get("dtype", "float32")))
    error = found.max_rel_error
    if error <= _MARGIN * tolerance:
        return False
    text = "max_rel_error %.2g with Winograd's convolutions, near or above the %.2g allowed: all layers are direct"
    _log.warning(text, error, tolerance)
    return True


_LostRecords = dict[str, Any]
"""An entry of `lost_records.json`: the records of a workload, of which none applies any more; `task` is the name of
the task today, empty where the network has it no more, and `run_s` the winner's seconds per call."""


def _write_records(
    recorded: Recorded, lowered: LoweredNetwork, device: Device, best: Path, options: CompileOptions
) -> tuple[str, list[_LostRecords]]:
    """Writes a database with the fastest record of each task.

    Returns for which other device the records are, and those that do not apply any more, if they may be missing.
    """
    may_mismatch = options.allow_target_mismatch
    if not options.allow_missing:
        mismatch = distill_for_device(recorded.records, device.fingerprint, best, allow_mismatch=may_mismatch)
        _require_todays_tasks(recorded, lowered.tasks, best)
        return mismatch, []
    with scratch_directory() as scratch:
        fastest: list[Path] = []
        for pair in find_pairs(recorded.records):  # the winners, which were measured twice, before all records
            fastest.append(Path(scratch, str(len(fastest))))
            mismatch = distill_for_device(
                pair.records, device.fingerprint, fastest[-1], keep=_MAX_CANDIDATES, allow_mismatch=may_mismatch
            )
        return mismatch, _write_applying(fastest, lowered.tasks, device.target, best)


def _require_todays_tasks(recorded: Recorded, tasks: Sequence[TuningTask], best: Path) -> None:
    made_by = recorded.provenance.lowering_version if recorded.provenance else LOWERING_VERSION
    if made_by == LOWERING_VERSION:
        return
    database = Database(RecordPair.in_directory(best))
    hashes = {str(database.hashes[record.workload]) for record in database.records}
    layers = {task.info.layer_hash for task in tasks}
    missing = layers - {task.info.layer_hash for task in tasks if task.info.workload_hash in hashes}
    if missing:
        run = recorded.options.tune_run
        raise RecordsError(
            f"run {run} was tuned with lowering version {made_by}, this is {LOWERING_VERSION}: {len(missing)} of "
            f"{len(layers)} tasks have no record; tune again with warm_start={run}, or give allow_missing=true to "
            "compile nevertheless"
        )


def _write_applying(
    fastest: Sequence[Path], tasks: Sequence[TuningTask], target: Target, best: Path
) -> list[_LostRecords]:
    """Writes for each task the first record that applies, of those in some directories; returns what is lost."""
    by_hash: dict[str, list[RecordText]] = {}
    workloads: dict[str, str] = {}
    for directory in fastest:
        database = Database(RecordPair.in_directory(directory))
        for record in database.records:
            hash_ = str(database.hashes[record.workload])
            by_hash.setdefault(hash_, []).append(RecordText(record.run_s, database.fields(record)))
            workloads[hash_] = database.workloads[record.workload]
    tasks_by_hash = {task.info.workload_hash: task for task in tasks}
    applied: dict[str, RecordText] = {}
    lost: list[_LostRecords] = []
    for hash_, records in by_hash.items():
        task = tasks_by_hash.get(hash_)
        found = next((record for record in records if task and candidate_of(record, task, target)), None)
        if found:
            applied[hash_] = found
            continue
        reason = "does_not_apply" if task else "no_such_kernel"
        name = task.info.name if task else ""
        lost.append({"workload_hash": hash_, "task": name, "reason": reason, "run_s": records[0].run_s})
    lines = [record.line(index) for index, record in enumerate(applied.values())]
    write_pair(best, [workloads[hash_] for hash_ in applied], lines)
    return lost
