"""Brings records to this machine: from a tuning run, a model, an artifact URI or a path."""

from __future__ import annotations

import re
from pathlib import Path

import mlflow
from mlflow.entities import Run

from ansor_mlflow import names
from ansor_mlflow.errors import UserInputError
from ansor_mlflow.foreign import for_shell
from ansor_mlflow.model import verified_manifest
from ansor_mlflow.parameters import NetworkOptions, RecordsOptions, is_uri
from ansor_mlflow.records import check_copy, check_records, join_parts
from ansor_mlflow.tracking import pinned_uri, translated_errors

_RUN_ID = re.compile("[0-9a-f]{32}")


def options_of_source(source: str, options: NetworkOptions, parameter: str = "source") -> RecordsOptions:
    """The tuning run or the records that `source` means; `runs:/<ID>` and `runs:/<ID>/records` are a run, too."""
    shared = options.model_dump(include=set(NetworkOptions.model_fields))
    if Path(source).exists():
        return RecordsOptions(**shared, records=source)
    run_id = source.removeprefix("runs:/").removesuffix("/").removesuffix("/records")
    if _RUN_ID.fullmatch(run_id):
        return RecordsOptions(**shared, tune_run=run_id)
    if is_uri(source):
        return RecordsOptions(**shared, records=source)
    raise UserInputError(
        f"{parameter}={source!r} is neither a run's ID (32 hexadecimal digits) nor a file or directory of records; "
        "give one of them, or an artifact URI"
    )


def fetch_source(source: str, scratch: Path) -> Path:
    """The file or directory of records that `source` means; what is in MLflow is copied to `scratch`."""
    return _sole(fetch_databases(source, scratch), f"source={source}")


def fetch_records(records: str, scratch: Path) -> Path:
    """As `fetch_source`, of a path or an artifact URI."""
    return _sole(_databases_in(_fetch(records, scratch, "records")), f"records={records}")


def fetch_databases(source: str, scratch: Path, parameter: str = "source") -> list[Path]:
    """As `fetch_source`, but a model may have records for several devices."""
    options = options_of_source(source, NetworkOptions(), parameter)
    if options.tune_run:
        return [fetch_run(options.tune_run, scratch)]
    return _databases_in(_fetch(options.records, scratch, parameter))


def tuning_of(run: Run) -> str:
    """The ID of the tuning run that a run is or has used; empty where there is none."""
    if run.data.tags.get(names.TAG_STEP) == "tune":
        return str(run.info.run_id)
    tune_run = run.data.tags.get(names.TAG_TUNE_RUN, "")
    if "," in tune_run:
        raise UserInputError(f"run {run.info.run_id} was compiled with several tunings; give one of {tune_run}")
    return tune_run


def fetch_run(run_id: str, scratch: Path) -> Path:
    """The records of a tuning run, those of one that was killed too."""
    with translated_errors(f"read the records of run {run_id}"):
        run = mlflow.get_run(run_id)
        if not any(file.path == names.RECORDS_DIR for file in mlflow.MlflowClient().list_artifacts(run_id)):
            tuning = tuning_of(run)
            hint = f", {tuning}" if tuning not in ("", run_id) else ""
            raise UserInputError(f"run {run_id} has no records; give the ID of a tuning run{hint}")
        records = Path(
            mlflow.artifacts.download_artifacts(run_id=run_id, artifact_path=names.RECORDS_DIR, dst_path=str(scratch))
        )
    join_parts(records)
    check_copy(records, f"run {run_id}", _download(run_id))
    return records


def fetch_winners(run_id: str, scratch: Path) -> Path:
    """The winners of a finished tuning run, and the device that they are for; all records where it has no winners, as
    one that was autologged.
    """
    with translated_errors(f"read the winners of run {run_id}"):
        files = mlflow.MlflowClient().list_artifacts(run_id, names.RECORDS_DIR)
        if f"{names.RECORDS_DIR}/{names.BEST_DIR}" not in {file.path for file in files}:
            return fetch_run(run_id, scratch)
        records = scratch / "winners"
        records.mkdir()
        for name in (names.MANIFEST_FILE, names.FINGERPRINT_FILE, names.BEST_DIR):
            path = f"{names.RECORDS_DIR}/{name}"
            fetched = mlflow.artifacts.download_artifacts(run_id=run_id, artifact_path=path, dst_path=str(scratch))
            Path(fetched).rename(records / name)  # stores differ in whether they keep the folder above
    check_copy(records, f"run {run_id}", _download(run_id), parts=(names.FINGERPRINT_FILE, names.BEST_DIR))
    return records


def _download(run_id: str) -> str:
    return f"mlflow artifacts download --run-id {run_id} --artifact-path {names.RECORDS_DIR} --dst-path ."


def _fetch(records: str, scratch: Path, parameter: str) -> Path:
    if not is_uri(records):
        check_records(Path(records))
        return Path(records)
    uri = pinned_uri(records, parameter)
    with translated_errors(f"read {parameter}={uri}"):
        copy = Path(mlflow.artifacts.download_artifacts(artifact_uri=uri, dst_path=str(scratch)))
    command = f"mlflow artifacts download --artifact-uri {for_shell(uri, 'ARTIFACT_URI')} --dst-path ."
    check_copy(copy, f"{parameter}={uri}", command)
    return copy


def _databases_in(path: Path) -> list[Path]:
    """A model has a database for each of its libraries; any other source is one."""
    if not (path / names.MODEL_FILE).is_file():
        return [path]
    verified_manifest(path)
    return sorted(directory for directory in (path / names.RECORDS_DIR).iterdir() if directory.is_dir())


def _sole(databases: list[Path], given: str) -> Path:
    if len(databases) != 1:
        raise UserInputError(
            f"{given}: the model has records for {len(databases)} devices; give one of "
            f"{', '.join(f'{names.RECORDS_DIR}/{directory.name}' for directory in databases)}"
        )
    return databases[0]
