"""Records that a step takes, from a tuning run or a path, and the tasks that they were made for."""

from __future__ import annotations

import json
from collections.abc import Sequence, Set
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ansor_mlflow import names
from ansor_mlflow.device import CPU, Device, DeviceFingerprint, import_tensor_intrin
from ansor_mlflow.errors import RecordsError, UserInputError, first_line
from ansor_mlflow.files import scratch_directory, write_text
from ansor_mlflow.lowering import LOWERING_VERSION, LoweredNetwork, TuningTask
from ansor_mlflow.model import database_of, lower_guarded
from ansor_mlflow.networks import Network
from ansor_mlflow.parameters import CompileOptions, NetworkOptions, RecordsOptions
from ansor_mlflow.records import (
    FAILED_RUN_S,
    Database,
    Provenance,
    RecordPair,
    RecordText,
    distill,
    find_decision,
    find_pairs,
    find_records,
    open_database,
    read_fingerprint,
    read_provenance,
    summarize,
    target_key,
    target_name,
    why_not_applicable,
    write_pair,
)
from ansor_mlflow.settings import NO_FALLBACK, FallbackReasons, LoweringSettings
from ansor_mlflow.sketches import find_programs
from ansor_mlflow.steps.fetching import fetch_records, fetch_run
from ansor_mlflow.tracking import network_of
from ansor_mlflow.tuning import candidate_of

if TYPE_CHECKING:
    from tvm.s_tir.meta_schedule.database import TuningRecord
    from tvm.target import Target

_MAX_CANDIDATES = 8
"""Records of a workload that are tried, beside its winner."""


@dataclass(frozen=True)
class Recorded:
    """Records on disk with the options that they were made with."""

    options: RecordsOptions
    """The options as given; of a tuning run's records, the network, layout, target and threads are that run's."""
    records: Path
    copy: str
    """URI of a tuning run's copy of a network that came from a file; else empty."""
    provenance: Provenance | None

    @cached_property
    def device(self) -> Device:
        """What they are for: this host as the options say; of a tuning run that measured on the servers of a tracker,
        or is for a GPU, the device of that run, which need not be here.
        """
        made_for = read_fingerprint(self.records) if self.provenance else None
        if self.provenance and self.provenance.rpc_key and made_for is None:
            raise RecordsError(
                f"run {self.options.tune_run} does not say which device of a fleet its records are for; tune again"
            )
        if self.provenance and made_for and (self.provenance.rpc_key or made_for.platform is not CPU):
            return Device.elsewhere(made_for)
        return Device.resolve(self.options.target, self.options.num_threads)


@dataclass(frozen=True)
class NetworkTasks:
    """The tasks of a network on a device."""

    graph: Network
    device: Device
    lowered: LoweredNetwork
    is_padded: bool
    """Whether layers are padded that are hard to tile."""

    @property
    def network(self) -> str:
        return self.graph.name

    @property
    def tasks(self) -> tuple[TuningTask, ...]:
        return self.lowered.tasks


def find_recorded(options: RecordsOptions, scratch: Path, *, any_lowering: bool = False) -> Recorded:
    """Finds the records that the options name; what is in MLflow is copied to `scratch`.

    With `any_lowering`, another version of the lowering may have made the tasks of a tuning run.
    """
    if bool(options.tune_run) == bool(options.records):
        given = "both were" if options.tune_run else "neither was"
        raise UserInputError(f"tune_run and records: {given} given; give the ID of a tuning run, or records=…")
    if options.tune_run:
        return _from_tune_run(options, scratch, any_lowering=any_lowering)
    return Recorded(options, fetch_records(options.records, scratch), "", None)


def _from_tune_run(options: RecordsOptions, scratch: Path, *, any_lowering: bool) -> Recorded:
    records = fetch_run(options.tune_run, scratch)
    provenance = read_provenance(records)
    is_ours = provenance.lowering_version > 0  # a script's tasks are of its own program
    if provenance.lowering_version != LOWERING_VERSION and not (any_lowering and is_ours):
        raise RecordsError(
            f"run {options.tune_run} was tuned with lowering version {provenance.lowering_version}, this is "
            f"{LOWERING_VERSION}: its records do not fit today's tasks; tune again"
        )
    copy = f"runs:/{options.tune_run}/{names.NETWORK_FILE}" if provenance.from_file else ""
    kept = ("network", "target", "num_threads", "batch_size", "input_shapes", "input_values", "seed")
    used = {name: getattr(provenance, name) for name in kept} | asdict(LoweringSettings.among(vars(provenance)))
    return Recorded(options.model_copy(update=used), records, copy, provenance)


def load_recorded_network(recorded: Recorded) -> Network:
    """Loads the network that the records are for."""
    options = recorded.options
    network = network_of(options, recorded.copy)
    if recorded.provenance is not None and network.sha256 != recorded.provenance.network_sha256:
        raise RecordsError(
            f"run {options.tune_run} tuned another version of {options.network} than the one at hand; tune again"
        )
    return network


def lower_recorded(recorded: Recorded) -> NetworkTasks:
    """Loads the network that records are for, and lowers it for their device."""
    known = recorded.provenance.fallback if recorded.provenance else {}
    return lower_for_device(load_recorded_network(recorded), recorded.options, recorded.device, known)


def lower_for_device(
    network: Network, options: NetworkOptions, device: Device, known: FallbackReasons = NO_FALLBACK
) -> NetworkTasks:
    """Lowers a network for a device as the options say; of nodes that are `known` to end it, ONNX Runtime has all."""
    lowered, _ = lower_guarded(network, device, options.lowering, options.network, known)
    return NetworkTasks(graph=network, device=device, lowered=lowered, is_padded=options.pad_channels == "auto")


def distill_for_device(
    records: Path, device: DeviceFingerprint, best: Path, *, keep: int = 1, allow_mismatch: bool = False
) -> str:
    """Writes a database with the `keep` fastest records of each workload that may be applied on a device.

    Returns for which other device the records are, in one clause; only `allow_mismatch` takes such ones.
    """
    pair = find_records(records)
    made_for = read_fingerprint(pair.root)
    reason = why_not_applicable(made_for, device) if made_for else ""
    if reason and not allow_mismatch:
        raise RecordsError(
            f"{reason}; tune on this device, or give allow_target_mismatch=true to apply them nevertheless"
        )
    is_tuning = (pair.root / names.PROVENANCE_FILE).exists()
    may_be_none = is_tuning and read_provenance(pair.root).trials_per_task == 0  # a tuning without trials
    distill(pair, best, device.target, keep, any_target=allow_mismatch, may_be_none=may_be_none)
    if made_for:
        write_text(best / names.FINGERPRINT_FILE, made_for.to_json())
    ours = target_key(json.dumps(device.target))
    others = [t for t in summarize(open_database(RecordPair.in_directory(best))).targets if t.attributes != ours]
    if reason or not others:
        return reason
    made_for_names = ", ".join(f"{len(other.workloads)} for {other.name}" for other in others)
    return f"some records are not for {target_name(device.target)}: {made_for_names}"


def best_records(records: Path, network: NetworkTasks, scratch: Path) -> dict[int, TuningRecord]:
    """The fastest record of each layer that has one, by the index of the task that is the algorithm of the record."""
    import_tensor_intrin(network.device.platform.kind)  # reading a record applies it
    best = scratch / names.BEST_DIR
    distill(find_records(records), best, network.device.fingerprint.target)
    try:
        database = database_of(best, network.tasks)
    except (RuntimeError, ValueError, TypeError) as err:
        raise RecordsError(f"{records}: the records do not apply ({first_line(err)}); tune the network again") from err
    found = {
        task.info.index: database.query_tuning_record(task.mod, network.device.target, task.info.name)
        for task in network.tasks
    }
    fastest: dict[str, tuple[int, TuningRecord]] = {}
    for task in network.tasks:
        record, layer = found[task.info.index], task.info.layer_hash
        if record is not None and (layer not in fastest or latency_s(record) < latency_s(fastest[layer][1])):
            fastest[layer] = task.info.index, record
    return dict(fastest.values())


def latency_s(record: TuningRecord) -> float:
    """Mean seconds per call, the figure by which TVM's databases rank records."""
    return fmean(float(seconds) for seconds in record.run_secs)


@dataclass(frozen=True, kw_only=True)
class SketchUse:
    """The sketch of a task's winner, or, before there are winners, of its fastest record."""

    sketch: str
    best_s: float
    own_ratio: float | None
    """Time of the program that is taken without a trial, over that of this one; None where it was not measured. It is
    below 1 where the winner was the faster one in the second measurements alone."""


def sketch_uses(pair: RecordPair, tasks: Sequence[TuningTask], target: Target) -> dict[str, SketchUse]:
    """The sketches of those tasks that have a valid record, by the hash of their workload.

    Winners are looked for beside all records. Times are compared as they were first measured.
    """
    hashes = {task.info.workload_hash for task in tasks}
    times = _times(pair, hashes)
    winners = RecordPair.in_directory(pair.root / names.BEST_DIR)
    won = _times(winners, hashes) if winners.exists() else {}
    found = {}
    for task in tasks:
        of_task, of_winner = times.get(task.info.workload_hash, {}), won.get(task.info.workload_hash, {})
        if of_task:
            best = min(of_winner.keys() & of_task.keys() or of_task, key=of_task.__getitem__)
            programs = find_programs(task.mod, target)
            own_s = of_task.get(programs.first_decision) if programs else None
            ratio = own_s / of_task[best] if own_s is not None else None
            found[task.info.workload_hash] = SketchUse(sketch=best, best_s=of_task[best], own_ratio=ratio)
    return found


def _times(pair: RecordPair, hashes: Set[str]) -> dict[str, dict[str, float]]:
    """The best time of each decision in seconds, by the hash of the workload; "" stands for MetaSchedule's programs."""
    database = Database(pair)
    times: dict[str, dict[str, float]] = {}
    with pair.records.open("rb") as file:
        for record in database.records:
            hash_ = database.hashes[record.workload]
            if hash_ in hashes and record.run_s < FAILED_RUN_S:
                file.seek(record.offset)
                text = file.read(record.length).decode(errors="replace")  # a line may be damaged in the middle
                of_task, decision = times.setdefault(str(hash_), {}), find_decision(text)
                of_task[decision] = min(record.run_s, of_task.get(decision, record.run_s))
    return times


LostRecords = dict[str, Any]
"""An entry of `lost_records.json`: the records of a workload, of which none applies any more; `task` is the name of
the task today, empty where the network has it no more, and `run_s` the winner's seconds per call."""


def write_best(
    recorded: Recorded, lowered: LoweredNetwork, device: Device, best: Path, options: CompileOptions
) -> tuple[str, list[LostRecords]]:
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
) -> list[LostRecords]:
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
    lost: list[LostRecords] = []
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
