"""Records that a step takes, from a tuning run or a path, and the kernels that they were made for."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import mlflow

from ansor_mlflow import names, sources
from ansor_mlflow.errors import RecordsError, UserInputError
from ansor_mlflow.lowering import LOWERING_VERSION, SETTINGS, PaddedLayer, TuningTask, layers_to_pad, lower
from ansor_mlflow.networks import Network
from ansor_mlflow.options import NetworkOptions, RecordsOptions
from ansor_mlflow.records import Provenance, distill, find_records, join_parts, read_provenance
from ansor_mlflow.targets import DeviceFingerprint, fingerprint, resolve_target, vector_lanes
from ansor_mlflow.threads import resolve_num_threads
from ansor_mlflow.tracking.failures import clear_failures
from ansor_mlflow.tvm_import import import_tensor_intrin

if TYPE_CHECKING:
    from tvm.s_tir.meta_schedule.database import TuningRecord
    from tvm.target import Target

_RUN_ID = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True)
class Recorded:
    """Records on disk with the options that they were made with."""

    options: RecordsOptions
    """As given; of a tuning run's records, the network, layout, target and threads are that run's."""
    records: Path
    network: str
    """What `sources.load_network` takes; of a tuning run with a network from a file, the run's copy of it."""
    provenance: Provenance | None
    """Of a tuning run; None for records from a path."""


@dataclass(frozen=True)
class Kernels:
    """The kernels of a network, lowered for a device."""

    network: str
    target: Target
    device: DeviceFingerprint
    tasks: tuple[TuningTask, ...]
    hard_to_tile: tuple[PaddedLayer, ...]
    """Layers with channels that `pad_channels=auto` pads."""
    is_padded: bool
    """Whether it did."""


def options_of_source(source: str, options: NetworkOptions) -> RecordsOptions:
    """The tuning run or the records that `source` means; `runs:/<ID>` and `runs:/<ID>/records` are a run, too.

    Args:
        source: What the user gave.
        options: The network that records from a path are for.

    Raises:
        UserInputError: It is none of them.
    """
    shared = options.model_dump(include=set(NetworkOptions.model_fields))
    if Path(source).exists():
        return RecordsOptions(**shared, records=source)
    run_id = source.removeprefix("runs:/").removesuffix("/").removesuffix("/records")
    if _RUN_ID.fullmatch(run_id):
        return RecordsOptions(**shared, tune_run=run_id)
    if ":/" in source:
        return RecordsOptions(**shared, records=source)
    raise UserInputError(
        f"source={source!r} is neither a run's ID (32 hexadecimal digits) nor a file or directory of records; give one "
        "of them, or an artifact URI"
    )


def fetch_records(source: str, scratch: Path) -> Path:
    """The file or directory of records that `source` means; what is in MLflow is copied to `scratch`.

    Raises:
        UserInputError: It is no source, or there is no such run or artifact.
        MachineError: A server is away.
    """
    options = options_of_source(source, NetworkOptions())
    return _fetch_run(options.tune_run, scratch) if options.tune_run else _fetch(options.records, scratch)


def find_recorded(options: RecordsOptions, scratch: Path) -> Recorded:
    """Finds the records that the options name; what is in MLflow is copied to `scratch`.

    Raises:
        UserInputError: Not exactly one of `tune_run` and `records` is given, or there is no such run or artifact.
        RecordsError: The tuning run's description is damaged, or another version of the lowering made its kernels.
        MachineError: A server is away.
    """
    if bool(options.tune_run) == bool(options.records):
        given = "both were" if options.tune_run else "neither was"
        raise UserInputError(f"tune_run and records: {given} given; give the ID of a tuning run, or records=…")
    if options.tune_run:
        return _from_tune_run(options, scratch)
    return Recorded(options, _fetch(options.records, scratch), options.network, None)


def _from_tune_run(options: RecordsOptions, scratch: Path) -> Recorded:
    """The records of a tuning run, with the options that it used."""
    records = _fetch_run(options.tune_run, scratch)
    provenance = read_provenance(records)
    if provenance.lowering_version != LOWERING_VERSION:
        raise RecordsError(
            f"run {options.tune_run} was tuned with lowering version {provenance.lowering_version}, this is "
            f"{LOWERING_VERSION}: its records do not fit today's kernels; tune again"
        )
    network = f"runs:/{options.tune_run}/{names.NETWORK_FILE}" if provenance.from_file else provenance.network
    used = {
        "network": provenance.network,
        **{name: getattr(provenance, name) for name in SETTINGS},
        "target": provenance.target,
        "num_threads": provenance.num_threads,
        "batch_size": provenance.batch_size,
        "input_shapes": provenance.input_shapes,
        "seed": provenance.seed,
    }
    return Recorded(options.model_copy(update=used), records, network, provenance)


def _fetch_run(run_id: str, scratch: Path) -> Path:
    """The records of a tuning run, those of one that was killed too."""
    with clear_failures(f"read the records of run {run_id}"):
        records = Path(
            mlflow.artifacts.download_artifacts(run_id=run_id, artifact_path=names.RECORDS_DIR, dst_path=str(scratch))
        )
    join_parts(records)
    return records


def _fetch(records: str, scratch: Path) -> Path:
    """Records from a path or an artifact URI."""
    if sources.is_uri(records):
        records = sources.pinned_uri(records, "records")
        with clear_failures(f"read records={records}"):
            records = mlflow.artifacts.download_artifacts(artifact_uri=records, dst_path=str(scratch))
    return Path(records)


def load_recorded_network(recorded: Recorded) -> Network:
    """Loads the network that the records are for.

    Raises:
        UserInputError: There is no such network.
        RecordsError: The tuning run had another version of it.
    """
    options = recorded.options
    is_copy = recorded.network != options.network
    network = sources.load_network(
        recorded.network,
        batch_size=options.batch_size,
        input_shapes={} if is_copy else options.input_shapes,
        seed=options.seed,
    )
    if recorded.provenance is None:
        return network
    if network.sha256 != recorded.provenance.network_sha256:
        raise RecordsError(
            f"run {options.tune_run} tuned another version of {options.network} than the one at hand; tune again"
        )
    return replace(network, name=sources.display_name(options.network)) if is_copy else network


def lower_for_device(network: Network, options: NetworkOptions) -> Kernels:
    """Lowers a network for the target and the threads of the options.

    Raises:
        UserInputError: The target is unknown, there are fewer CPUs than threads, or TVM cannot import the network.
    """
    num_threads = resolve_num_threads(options.num_threads)
    target = resolve_target(options.target, num_threads)
    tasks = lower(network.model, target, **options.lowering()).tasks
    hard_to_tile = tuple(layers_to_pad(network.model, vector_lanes(target)))
    is_padded = options.pad_channels == "auto"
    return Kernels(network.name, target, fingerprint(target, num_threads), tasks, hard_to_tile, is_padded)


def best_records(records: Path, kernels: Kernels, scratch: Path) -> dict[int, TuningRecord]:
    """The fastest record of each task that has one, by the task's index.

    Raises:
        UserInputError: There are no records.
        RecordsError: They are damaged, all of them are for other targets, or one does not apply to its kernel.
    """
    from tvm.s_tir.meta_schedule.database import JSONDatabase

    import_tensor_intrin()  # reading a record applies it
    best = scratch / names.BEST_DIR
    distill(find_records(records), best, kernels.device.target)
    try:
        database = JSONDatabase(work_dir=str(best), allow_missing=False)
    except (RuntimeError, ValueError, TypeError) as err:
        reason = (str(err).splitlines() or [type(err).__name__])[0]
        raise RecordsError(f"{records}: the records do not apply ({reason}); tune the network again") from err
    found = {
        task.info.index: database.query_tuning_record(task.mod, kernels.target, task.info.name)
        for task in kernels.tasks
    }
    return {index: record for index, record in found.items() if record is not None}


def latency_s(record: TuningRecord) -> float:
    """Mean seconds per call, the figure by which TVM's databases rank records."""
    return fmean(float(seconds) for seconds in record.run_secs)
