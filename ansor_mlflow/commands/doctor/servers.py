"""Checks of the tracking server and of where its artifacts are kept."""

from __future__ import annotations

import os
import secrets
import time
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

import mlflow
from mlflow.store.artifact.artifact_repo import ArtifactRepository
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.utils.credentials import get_default_host_creds
from mlflow.utils.rest_utils import http_request

from ansor_mlflow.commands.doctor.machine import Check, check_disk, failed
from ansor_mlflow.errors import AnsorMlflowError
from ansor_mlflow.files import scratch_directory
from ansor_mlflow.tracking import translated_errors

_SMALL_BYTES, _LARGE_BYTES = 2**18, 8 * 2**20 + 1
_SLOW_S = 2.0
"""Where the small file takes longer, the large one, which is 32 times as large, is not tried."""
_HTTP_TIMEOUT_S = 5.0
_DEFAULT_EXPERIMENT_ID = "0"


class TrackingStore:
    """A tracking server or database, and where an experiment of it keeps artifacts; to be checked in this order.

    `experiment` is a name or an ID; empty for the experiment that a step would open its run in.
    """

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
        else:
            path = _local_path(self._uri.removeprefix("sqlite:///"))
            if path is not None and not path.exists():  # MLflow would make it when it is asked
                return Check("green", f"{self._uri}, a store that the first command makes")
            found = Check("green", f"{self._uri}, a store without a server")
        wanted = self._experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", "")
        identifier = os.environ.get("MLFLOW_EXPERIMENT_ID") or _DEFAULT_EXPERIMENT_ID
        with translated_errors("find the experiment"):
            client = mlflow.MlflowClient(self._uri)
            experiment = client.get_experiment_by_name(wanted) if wanted else client.get_experiment(identifier)
            if experiment is None and self._experiment.isdecimal():
                experiment = client.get_experiment(self._experiment)
            if experiment is None:  # the server keeps it beside that of its first one
                self._location = client.get_experiment(_DEFAULT_EXPERIMENT_ID).artifact_location
                return replace(found, message=f"{found.message}; there is no {wanted} yet, the first run makes it")
        self._location = experiment.artifact_location
        described = f"{found.message}; experiment {experiment.name} (ID {experiment.experiment_id})"
        if experiment.lifecycle_stage != "active":
            fix = f"mlflow experiments restore --experiment-id {experiment.experiment_id}, or give another"
            return Check("red", f"{described}, which was deleted", fix)
        return replace(found, message=described)

    def check_artifacts(self) -> Check | None:
        """Whether artifacts can be written, read and deleted; None where nothing says where they would be."""
        return check_store(self._location, self._uri) if self._location else None


def check_version(uri: str) -> Check:
    """Asks a server for MLflow's version."""
    with translated_errors(f"reach {uri}"):
        answer = http_request(get_default_host_creds(uri), "/version", "GET", timeout=_HTTP_TIMEOUT_S)
    status, version = f"(HTTP {answer.status_code})", answer.text.strip()
    if answer.status_code in (401, 403):
        fix = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
        return Check("red", f"{uri} refuses this user {status}", fix)
    if not answer.ok or not version.replace(".", "").isalnum():
        return Check("red", f"{uri} answers, but not with MLflow's version {status}", "check the address")
    if version.split(".")[:2] != mlflow.__version__.split(".")[:2]:
        message = f"{uri} has MLflow {version}, this client {mlflow.__version__}"
        return Check("yellow", message, "take the same minor version")
    return Check("green", f"{uri}, MLflow {version}")


def check_store(location: str, tracking_uri: str) -> Check:
    """Writes, lists, reads and deletes a small and a large file below a path or URI, and leaves nothing there."""
    if (path := _local_path(location)) is not None:
        while not path.exists():  # what decides is where it would be made
            path = path.parent
        host = urlsplit(tracking_uri).hostname
        if host in (None, "localhost", "127.0.0.1", "::1"):
            return check_disk(path)
        fix = "make an experiment whose artifacts are at s3://… or mlflow-artifacts:/…"
        return Check("yellow", f"{path} is on this machine: others, and {host}, do not see it", fix)
    with translated_errors(f"use {location}"):
        repository = get_artifact_repository(location, tracking_uri=tracking_uri)
    folder, left = f"ansor-doctor-{secrets.token_hex(8)}", ""
    try:
        found = _probe(repository, folder)
    except AnsorMlflowError as err:
        found = failed(err)
    try:
        with translated_errors("delete a file"):
            repository.delete_artifacts(folder)
            left = "it is still listed" if repository.list_artifacts(folder) else ""
    except (AnsorMlflowError, NotImplementedError) as err:
        left = str(err) or "MLflow deletes nothing in such a store"
    if left and found.status != "red":
        fix = f"allow to delete objects, unless the store is to keep everything; {folder} stays in it"
        found = Check("yellow", f"what was written cannot be deleted ({left})", fix)
    return replace(found, message=f"{location}: {found.message}")


def _probe(repository: ArtifactRepository, folder: str) -> Check:
    """Writes files and reads them again; raises where the store refuses it."""
    written, fix, took_s = {}, "look at the store, and at what is between it and here", 0.0
    with scratch_directory() as scratch:
        for name, size in {"small": _SMALL_BYTES, "large": _LARGE_BYTES}.items():
            if took_s > _SLOW_S:
                break
            content, path, started_s = secrets.token_bytes(size), Path(scratch, name), time.monotonic()
            path.write_bytes(content)
            with translated_errors("write a file"):
                repository.log_artifact(str(path), folder)
            written[name], took_s = content, time.monotonic() - started_s
        with translated_errors("read a file"):
            if {Path(file.path).name for file in repository.list_artifacts(folder)} != written.keys():
                return Check("red", "what was written is not listed", fix)
            for name, content in written.items():
                if Path(repository.download_artifacts(f"{folder}/{name}", scratch)).read_bytes() != content:
                    return Check("red", "what is read is not what was written", fix)
    if "large" not in written:
        return Check("yellow", f"256 KiB took {took_s:.1f} s", "expect long uploads, or take a nearer store")
    return Check("green", "a small and a large file were written, listed, read and deleted")


def _local_path(uri: str) -> Path | None:
    """The path of a folder on this machine; None where the URI is of something else."""
    parts = urlsplit(uri)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return None if parts.scheme else Path(uri).resolve()
