"""A tuning run that goes on: its parameters, and its records wherever they are."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import mlflow

from ansor_mlflow import names
from ansor_mlflow.device import DeviceFingerprint
from ansor_mlflow.errors import RecordsError, UserInputError
from ansor_mlflow.files import replace_directory
from ansor_mlflow.foreign import without_credentials
from ansor_mlflow.lowering import LOWERING_VERSION
from ansor_mlflow.networks import Network
from ansor_mlflow.parameters import NetworkOptions, TuneOptions, as_text, load_options
from ansor_mlflow.records import RecordPair, read_fingerprint, read_provenance, why_not_applicable
from ansor_mlflow.steps.fetching import fetch_run
from ansor_mlflow.tracking import params_used, translated_errors

_MEASURED_FOR = (*(name for name in NetworkOptions.model_fields if name not in ("seed", "trust")), "warm_start")
"""Parameters that the records of a run depend on."""


def resumed_options(options: TuneOptions) -> TuneOptions:
    """The parameters of the run that goes on, and those that were given now."""
    run_id = options.resume_run
    with translated_errors(f"resume the run {run_id}"):
        run = mlflow.get_run(run_id)
    if run.data.tags.get(names.TAG_STEP) != "tune":
        raise UserInputError(f"resume_run={run_id}: it is not a tuning run; give the ID of one, such as a run of tune")
    used = params_used(run, TuneOptions)
    given = options.changed()
    for name in _MEASURED_FOR:
        now, then = _as_logged(given.get(name)), _as_logged(used.get(name))
        if name in given and now != then:
            raise UserInputError(
                f"{name}={now}, but the run {run_id} has {name}={then}; leave {name} out, or start a new tuning"
            )
    return load_options(TuneOptions, {**used, **given})


def _as_logged(value: Any) -> str:
    return without_credentials(as_text(value))


def copy_of_network(run_id: str) -> str:
    """URI of the copy that a run has of a network from a file; empty where it has none."""
    with translated_errors(f"read the artifacts of run {run_id}"):
        files = {file.path for file in mlflow.MlflowClient().list_artifacts(run_id)}
    return f"runs:/{run_id}/{names.NETWORK_FILE}" if names.NETWORK_FILE in files else ""


def fetch_what_was_measured(run_id: str, records: Path) -> None:
    """Brings the records of a run to this machine, unless it still has as many."""
    records.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetched-", dir=records.parent) as scratch:
        with translated_errors(f"read the records of run {run_id}"):
            if not any(file.path == names.RECORDS_DIR for file in mlflow.MlflowClient().list_artifacts(run_id)):
                return
        fetched = fetch_run(run_id, Path(scratch))
        if _num_bytes(fetched) > _num_bytes(records):
            replace_directory(fetched, records)


def require_same_tasks(run_id: str, records: Path, network: Network, device: DeviceFingerprint) -> None:
    """Checks that records were measured on such a device, of the tasks that this network has today."""
    if not RecordPair.in_directory(records).records.exists():
        return
    made_for = read_fingerprint(records)
    if made_for is None:
        raise RecordsError(
            f"resume_run={run_id}: {names.FINGERPRINT_FILE} of its records is missing, so nobody knows which device "
            "they are for; start a new tuning"
        )
    if reason := why_not_applicable(made_for, device):
        raise RecordsError(f"resume_run={run_id}: {reason}; resume it on such a device, or start a new tuning")
    provenance = read_provenance(records)
    if provenance.lowering_version != LOWERING_VERSION or provenance.network_sha256 != network.sha256:
        raise RecordsError(
            f"resume_run={run_id}: the network has other tasks today than the run tuned (lowering version "
            f"{provenance.lowering_version}, this is {LOWERING_VERSION}; or another version of the network); start a "
            "new tuning"
        )


def _num_bytes(records: Path) -> int:
    path = RecordPair.in_directory(records).records
    return path.stat().st_size if path.exists() else -1
