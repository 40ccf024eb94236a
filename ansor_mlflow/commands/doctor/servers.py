"""Checks of the tracking server and of where its artifacts are kept."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

import mlflow
from mlflow.entities import Experiment
from mlflow.store.artifact.artifact_repo import ArtifactRepository
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.utils.credentials import get_default_host_creds
from mlflow.utils.rest_utils import http_request

from ansor_mlflow.commands.doctor.machine import check_disk
from ansor_mlflow.commands.doctor.verdicts import Check, failed
from ansor_mlflow.errors import AnsorMlflowError
from ansor_mlflow.files import scratch_directory
from ansor_mlflow.tracking import translated_errors

_IMPATIENCE = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "8",
    "AWS_MAX_ATTEMPTS": "2",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    # the large probe is sent in parts by boto3; so it is to a server that signs uploads for its clients
    "MLFLOW_MULTIPART_UPLOAD_MINIMUM_FILE_SIZE": str(8 * 2**20),
    "MLFLOW_MULTIPART_UPLOAD_CHUNK_SIZE": str(5 * 2**20),
}
_SMALL_BYTES, _LARGE_BYTES = 2**18, 8 * 2**20 + 1
_SLOW_S = 2.0
"""Where the small file takes longer, the large one, which is 32 times as large, is not tried."""
_HTTP_TIMEOUT_S = 5.0
_DEFAULT_EXPERIMENT_ID = "0"


@contextmanager
def impatience() -> Iterator[None]:
    """Sets the environment of these checks: MLflow alone would wait for minutes for a server that is away."""
    before = {name: os.environ.get(name) for name in _IMPATIENCE}
    os.environ.update(_IMPATIENCE)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


class TrackingStore:
    """A tracking server or database, and where an experiment of it keeps artifacts; to be checked in this order."""

    def __init__(self, uri: str, experiment: str) -> None:
        self._uri = uri
        self._experiment = experiment
        self._location = ""

    def check_server(self) -> Check:
        """Whether it answers, with which version, and has the experiment; MLflow's tables are not made."""
        if urlsplit(self._uri).scheme in ("http", "https"):
            found = check_version(self._uri)
            if found.status == "red":
                return found
        elif _is_new(self._uri):
            return Check("tracking", "green", f"{self._uri}, a store that the first command makes")
        else:
            found = Check("tracking", "green", f"{self._uri}, a store without a server")
        with translated_errors("find the experiment"):
            client = mlflow.MlflowClient(self._uri)
            wanted, experiment = _find_experiment(client, self._experiment)
            if experiment is None:  # the server keeps it beside that of its first one
                self._location = client.get_experiment(_DEFAULT_EXPERIMENT_ID).artifact_location
                return replace(found, message=f"{found.message}; there is no {wanted} yet, the first run makes it")
        self._location = experiment.artifact_location
        described = f"{found.message}; experiment {experiment.name} (ID {experiment.experiment_id})"
        if experiment.lifecycle_stage != "active":
            fix = f"mlflow experiments restore --experiment-id {experiment.experiment_id}, or give another"
            return Check("tracking", "red", f"{described}, which was deleted", fix)
        return replace(found, message=described)

    def check_artifacts(self) -> Check | None:
        """Whether artifacts can be written, read and deleted; None where nothing says where they would be."""
        return check_store(self._location, self._uri) if self._location else None


def check_version(uri: str) -> Check:
    """Asks a server for MLflow's version."""
    name, address = "tracking", uri
    with translated_errors(f"reach {address}"):
        answer = http_request(get_default_host_creds(uri), "/version", "GET", timeout=_HTTP_TIMEOUT_S)
    status, version = f"(HTTP {answer.status_code})", answer.text.strip()
    if answer.status_code in (401, 403):
        fix = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
        return Check(name, "red", f"{address} refuses this user {status}", fix)
    if not answer.ok or not version.replace(".", "").isalnum():
        return Check(name, "red", f"{address} answers, but not with MLflow's version {status}", "check the address")
    if version.split(".")[:2] != mlflow.__version__.split(".")[:2]:
        message = f"{address} has MLflow {version}, this client {mlflow.__version__}"
        return Check(name, "yellow", message, "take the same minor version")
    return Check(name, "green", f"{address}, MLflow {version}")


def _is_new(uri: str) -> bool:
    """Whether the first command makes this folder or file, as MLflow would when it is asked."""
    path = _local_path(uri.removeprefix("sqlite:///"))
    return path is not None and not path.exists()


def _find_experiment(client: mlflow.MlflowClient, given: str) -> tuple[str, Experiment | None]:
    """The experiment that is given, or the one that a step would open its run in, with what it is called."""
    wanted = given or os.environ.get("MLFLOW_EXPERIMENT_NAME", "")
    if not wanted:
        identifier = os.environ.get("MLFLOW_EXPERIMENT_ID") or _DEFAULT_EXPERIMENT_ID
        return identifier, client.get_experiment(identifier)
    found = client.get_experiment_by_name(wanted)
    return wanted, client.get_experiment(given) if found is None and given.isdecimal() else found


def check_store(location: str, tracking_uri: str) -> Check:
    """Writes, lists, reads and deletes a small and a large file below a path or URI, and leaves nothing there."""
    name, path = "artifact store", _local_path(location)
    if path is not None:
        return _check_folder(path, tracking_uri)
    with translated_errors(f"use {location}"):
        repository = get_artifact_repository(location, tracking_uri=tracking_uri)
    folder = f"ansor-doctor-{secrets.token_hex(8)}"
    try:
        found = _probe(repository, folder)
    except AnsorMlflowError as err:
        found = failed(name, err)
    left = _delete(repository, folder)
    if left and found.status != "red":
        fix = f"allow to delete objects, unless the store is to keep everything; {folder} stays in it"
        found = Check(name, "yellow", f"what was written cannot be deleted ({left})", fix)
    return replace(found, message=f"{location}: {found.message}")


def _check_folder(path: Path, tracking_uri: str) -> Check:
    """The folder itself may not be there yet: what decides is where it would be made."""
    while not path.exists():
        path = path.parent
    name, host = "artifact store", urlsplit(tracking_uri).hostname
    if host not in (None, "localhost", "127.0.0.1", "::1"):
        fix = "make an experiment whose artifacts are at s3://… or mlflow-artifacts:/…"
        return Check(name, "yellow", f"{path} is on this machine: others, and {host}, do not see it", fix)
    return replace(check_disk(path), name=name)


def _probe(repository: ArtifactRepository, folder: str) -> Check:
    """Writes files and reads them again; raises where the store refuses it."""
    name, fix, started = "artifact store", "look at the store, and at what is between it and here", time.monotonic()
    written = {"small": _write(repository, folder, "small", _SMALL_BYTES)}
    took_s = time.monotonic() - started
    if took_s <= _SLOW_S:
        written["large"] = _write(repository, folder, "large", _LARGE_BYTES)
    with scratch_directory() as scratch, translated_errors("read a file"):
        if {Path(file.path).name for file in repository.list_artifacts(folder)} != written.keys():
            return Check(name, "red", "what was written is not listed", fix)
        for file, content in written.items():
            if Path(repository.download_artifacts(f"{folder}/{file}", scratch)).read_bytes() != content:
                return Check(name, "red", "what is read is not what was written", fix)
    if "large" not in written:
        return Check(name, "yellow", f"256 KiB took {took_s:.1f} s", "expect long uploads, or take a nearer store")
    return Check(name, "green", "a small and a large file were written, listed, read and deleted")


def _write(repository: ArtifactRepository, folder: str, name: str, size: int) -> bytes:
    content = secrets.token_bytes(size)
    with scratch_directory() as scratch, translated_errors("write a file"):
        path = Path(scratch, name)
        path.write_bytes(content)
        repository.log_artifact(str(path), folder)
    return content


def _delete(repository: ArtifactRepository, folder: str) -> str:
    """Returns why the probe could not be deleted; empty where nothing of it is left."""
    try:
        with translated_errors("delete a file"):
            repository.delete_artifacts(folder)
            left = repository.list_artifacts(folder)
    except (AnsorMlflowError, NotImplementedError) as err:
        return str(err) or "MLflow deletes nothing in such a store"
    return "it is still listed" if left else ""


def _local_path(uri: str) -> Path | None:
    """The path of a folder on this machine; None where the URI is of something else."""
    parts = urlsplit(uri)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return None if parts.scheme else Path(uri).resolve()
