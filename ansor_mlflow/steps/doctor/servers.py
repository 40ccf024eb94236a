"""Checks of what is reached over the network: tracking server, artifact stores, and their clocks."""

from __future__ import annotations

import os
import re
import secrets
import time
from dataclasses import replace
from email.utils import parsedate_to_datetime
from pathlib import Path
from urllib.parse import unquote, urlsplit

import mlflow
import requests
import sqlalchemy
from mlflow.entities import Experiment
from mlflow.store.artifact.artifact_repo import ArtifactRepository
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.utils.credentials import get_default_host_creds
from mlflow.utils.rest_utils import http_request

from ansor_mlflow.errors import AnsorMlflowError, MachineError, one_line
from ansor_mlflow.files import scratch_directory
from ansor_mlflow.foreign import without_credentials
from ansor_mlflow.options import is_uri
from ansor_mlflow.steps.doctor.checks import Check
from ansor_mlflow.steps.doctor.machine import check_disk
from ansor_mlflow.tracking import pinned_uri, translated_errors

IMPATIENCE = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "8",
    "AWS_MAX_ATTEMPTS": "2",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    # The probe is large enough for boto3 to send it in parts; so it is for a server that signs uploads for its clients.
    "MLFLOW_MULTIPART_UPLOAD_MINIMUM_FILE_SIZE": str(8 * 2**20),
    "MLFLOW_MULTIPART_UPLOAD_CHUNK_SIZE": str(5 * 2**20),
}
"""Environment of these checks: MLflow alone would wait for minutes for a server that is away."""

_SMALL_BYTES, _LARGE_BYTES = 2**18, 8 * 2**20 + 1
_SLOW_S = 2.0
"""Where the small file takes longer, the large one, which is 32 times as large, is not tried."""
_HTTP_TIMEOUT_S = 5.0
_SKEW_S, _REFUSED_SKEW_S = 5 * 60, 15 * 60
"""The second is where S3 refuses a signature."""
_DEFAULT_EXPERIMENT_ID = "0"
_VERSION = re.compile(r"\d+\.\d+[\w.]*")
_STORE_FIX = "look at the store, and at what is between it and here"


class TrackingChecks:
    """Checks of a tracking server, and of where an experiment of it keeps artifacts. To be made in their order.

    Args:
        uri: URI of the server or of the database.
        experiment: Name or ID of the experiment, which is not made if it is missing; empty for the one that a step
            would take.
    """

    def __init__(self, uri: str, experiment: str) -> None:
        self._uri = uri
        self._experiment = experiment
        self._is_server = urlsplit(uri).scheme in ("http", "https")
        self._has_experiments = False
        self._location = ""

    def server(self) -> Check:
        """Whether it answers, and with which version."""
        is_new = not self._is_server and _is_new(self._uri)
        found = _check_server(self._uri) if self._is_server else _describe_database(self._uri, is_new=is_new)
        self._has_experiments = found.status != "red" and not is_new
        return found

    def experiment(self) -> Check | None:
        """Whether it can be used; None where the server cannot, or its database is new."""
        if not self._has_experiments:
            return None
        name = "experiment"
        with translated_errors("find the experiment"):
            client = mlflow.MlflowClient(self._uri)
            wanted, found = _find_experiment(client, self._experiment)
            if found is None:
                # the server keeps it beside that of its first experiment
                self._location = client.get_experiment(_DEFAULT_EXPERIMENT_ID).artifact_location
                return Check.green(name, f"there is no {wanted} yet; the first run makes it")
        self._location = found.artifact_location
        described = f"{found.name} (ID {found.experiment_id}), artifacts in {_shown(self._location)}"
        if found.lifecycle_stage != "active":
            fix = f"mlflow experiments restore --experiment-id {found.experiment_id}, or give another"
            return Check.red(name, f"{described}: it was deleted", fix)
        return Check.green(name, described)

    def artifacts(self) -> Check | None:
        """Whether artifacts can be written, read and deleted; None where nothing says where they would be."""
        return check_store("artifact store", self._location, self._uri) if self._location else None

    def clock(self, record_pool: str) -> Check | None:
        """Whether this machine's clock is that of the servers; None where there are none.

        Args:
            record_pool: URI of the record pool, which may be in S3, too.
        """
        is_s3 = _is_s3(self._location) or _is_s3(record_pool)
        urls = {"tracking server": self._uri} if self._is_server else {}
        return check_clock({**urls, "S3 server": s3_endpoint()} if is_s3 else urls, signs=is_s3)


def _check_server(uri: str) -> Check:
    name, address = "tracking", _shown(uri)
    with translated_errors(f"reach {address}"):
        answer = http_request(get_default_host_creds(uri), "/version", "GET", timeout=_HTTP_TIMEOUT_S)
    if answer.status_code in (401, 403):
        return Check.red(
            name,
            f"{address} refuses this user (HTTP {answer.status_code})",
            "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
        )
    version = answer.text.strip()
    if not answer.ok or not _VERSION.fullmatch(version):
        return Check.yellow(
            name, f"{address} answers, but not with MLflow's version (HTTP {answer.status_code})", "check the address"
        )
    if _major_minor(version) != _major_minor(mlflow.__version__):
        return Check.yellow(
            name, f"{address} has MLflow {version}, this client {mlflow.__version__}", "take the same minor version"
        )
    return Check.green(name, f"{address}, MLflow {version}")


def _major_minor(version: str) -> list[str]:
    return version.split(".")[:2]


def _describe_database(uri: str, *, is_new: bool) -> Check:
    kind = "a local store" if _local_path(uri) or uri.startswith("sqlite") else "a store without a server"
    return Check.green("tracking", f"{_shown(uri)}, {kind}{'; the first command makes it' if is_new else ''}")


def _is_new(uri: str) -> bool:
    """Whether a folder or database has nothing of MLflow's yet: asked without MLflow, which would make its tables.

    Raises:
        MachineError: The database cannot be reached, or its driver is missing.
    """
    path = _local_path(uri)
    if path is not None:
        return not path.is_dir()
    try:
        address = sqlalchemy.make_url(uri)
    except sqlalchemy.exc.ArgumentError:  # of no database, but of one of MLflow's plugins, such as databricks
        return False
    if address.get_backend_name() == "sqlite" and not Path(address.database or "").is_file():
        return True
    try:
        engine = sqlalchemy.create_engine(address)
        return not sqlalchemy.inspect(engine).has_table("alembic_version")
    except (sqlalchemy.exc.SQLAlchemyError, ImportError) as err:
        raise MachineError(
            f"cannot reach {_shown(uri)}: {one_line(err)}; check MLFLOW_TRACKING_URI, and that the database "
            "runs and its driver is installed"
        ) from err


def _find_experiment(client: mlflow.MlflowClient, given: str) -> tuple[str, Experiment | None]:
    """The experiment that is given, or the one that a step would open its run in, with what it is called."""
    wanted = given or os.environ.get("MLFLOW_EXPERIMENT_NAME", "")
    if not wanted:
        identifier = os.environ.get("MLFLOW_EXPERIMENT_ID") or _DEFAULT_EXPERIMENT_ID
        return identifier, client.get_experiment(identifier)
    found = client.get_experiment_by_name(wanted)
    return wanted, client.get_experiment(given) if found is None and given.isdecimal() else found


def check_store(name: str, location: str, tracking_uri: str) -> Check:
    """Writes, lists, reads and deletes a small and a large file below a location, and leaves nothing there.

    Args:
        name: What the check is called.
        location: A path, or a URI that MLflow keeps artifacts under.
        tracking_uri: The tracking server, which may hand out the artifacts itself.
    """
    path = _local_path(location)
    if path is not None:
        return _check_folder(name, path, tracking_uri)
    where = _shown(location)
    if _is_s3(location):
        credentials = _credentials()
        if not credentials:
            fix = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile, or give the machine a role"
            return Check.red(name, f"{where}: there are no credentials", fix)
        where += f" at {_shown(s3_endpoint())} ({_address_style()}; credentials: {credentials})"
    with translated_errors(f"use {where}"):
        repository = get_artifact_repository(location, tracking_uri=tracking_uri)
    folder = f"ansor-doctor-{secrets.token_hex(8)}"
    try:
        problem = _probe(repository, folder)
    except AnsorMlflowError as err:
        problem = Check.of_error(name, err, "check the address and the credentials")
    left = _delete(repository, folder)
    if left and not (problem and problem.status == "red"):
        fix = f"allow to delete objects, unless the store is to keep everything; {folder} stays in it"
        problem = Check.yellow(name, f"what was written cannot be deleted ({left})", fix)
    if problem:
        return replace(problem, name=name, message=f"{where}: {problem.message}")
    in_parts = " in parts" if _is_s3(location) else ""
    return Check.green(name, f"{where}: a small and a large file were written{in_parts}, listed, read and deleted")


def _check_folder(name: str, path: Path, tracking_uri: str) -> Check:
    """The folder itself may not be there yet: what decides is where it would be made."""
    while not path.exists():
        path = path.parent
    found = check_disk(path, name)
    host = urlsplit(tracking_uri).hostname
    if found.status == "green" and host not in (None, "localhost", "127.0.0.1", "::1"):
        fix = "make an experiment whose artifacts are at s3://… or mlflow-artifacts:/…"
        return Check.yellow(name, f"{path} is on this machine: others, and {host}, do not see it", fix)
    return found


def _probe(repository: ArtifactRepository, folder: str) -> Check | None:
    """Returns what is wrong, or None.

    Raises:
        AnsorMlflowError: The store refuses something.
    """
    started = time.monotonic()
    written = {"small": _write(repository, folder, "small", _SMALL_BYTES)}
    took_s = time.monotonic() - started
    if took_s <= _SLOW_S:
        written["large"] = _write(repository, folder, "large", _LARGE_BYTES)
    with translated_errors("list a file"):
        listed = {Path(file.path).name: file.file_size for file in repository.list_artifacts(folder)}
    if listed != {name: len(content) for name, content in written.items()}:
        return Check.red("", f"what was written is not listed, but {listed or 'nothing'}", _STORE_FIX)
    with scratch_directory() as scratch, translated_errors("read a file"):
        for name, content in written.items():
            if Path(repository.download_artifacts(f"{folder}/{name}", scratch)).read_bytes() != content:
                return Check.red("", "what is read is not what was written", _STORE_FIX)
    if "large" not in written:
        fix = "expect long uploads, or take a nearer store; whether it takes files in parts was not tried"
        return Check.yellow("", f"256 KiB took {took_s:.1f} s", fix)
    return None


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


def check_record_pool(pool: str, tracking_uri: str) -> Check:
    """Does what `check_store` does for a record pool, as users name it."""
    return check_store("record pool", pinned_uri(pool, "record_pool") if is_uri(pool) else pool, tracking_uri)


def check_clock(urls: dict[str, str], *, signs: bool) -> Check | None:
    """Compares this machine's clock with those of servers, by the dates of their answers; None where none has one.

    Args:
        urls: Addresses by what messages call them.
        signs: Whether requests are signed with the time, so that a wrong one is refused.
    """
    name = "clock"
    skews = {called: skew for called, url in urls.items() if (skew := _skew_s(url)) is not None}
    if not skews:
        return None
    called, skew_s = max(skews.items(), key=lambda item: abs(item[1]))
    direction = "behind" if skew_s > 0 else "ahead of"
    found = f"{abs(skew_s):.0f} s {direction} the {called}" if abs(skew_s) >= 2 else f"that of the {called}"
    if abs(skew_s) <= _SKEW_S:
        return Check.green(name, found)
    fix = "set the clock, and keep it with chrony or systemd-timesyncd"
    if signs and abs(skew_s) > _REFUSED_SKEW_S:
        return Check.red(name, f"{found}: S3 refuses what is signed 15 minutes off", fix)
    return Check.yellow(name, found, fix)


def _skew_s(url: str) -> float | None:
    """Seconds that a server's clock is ahead of ours."""
    before = time.time()
    try:
        answer = requests.head(url, timeout=_HTTP_TIMEOUT_S, allow_redirects=False)
        date = parsedate_to_datetime(answer.headers.get("Date", ""))
    except (requests.RequestException, ValueError, TypeError):
        return None
    return date.timestamp() - (before + time.time()) / 2


def s3_endpoint() -> str:
    """The address that boto3 asks, by MLflow's setting, those of AWS, or its own."""
    import boto3

    return str(boto3.client("s3", endpoint_url=os.environ.get("MLFLOW_S3_ENDPOINT_URL") or None).meta.endpoint_url)


def _is_s3(location: str) -> bool:
    return urlsplit(location).scheme == "s3"


def _address_style() -> str:
    style = os.environ.get("MLFLOW_BOTO_CLIENT_ADDRESSING_STYLE", "auto")
    return {"path": "host/bucket", "virtual": "bucket.host"}.get(style, "bucket.host where the name allows it")


def _credentials() -> str:
    """Where boto3 finds credentials, such as "env" or "iam-role"; empty where it finds none."""
    import boto3

    found = boto3.Session().get_credentials()
    return str(found.method) if found else ""


def _local_path(uri: str) -> Path | None:
    """The path of a folder on this machine; None where the URI is of something else."""
    parts = urlsplit(uri)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return None if parts.scheme else Path(uri).resolve()


def _shown(uri: str) -> str:
    """A URI without what may be secret in it."""
    return without_credentials(uri.partition("?")[0])
