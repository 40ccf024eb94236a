"""Real servers for tests: an S3 store and an MLflow tracking server, each a process of its own on 127.0.0.1.

Those of the tests of faults are in `ceph.py` and `postgres.py`.
"""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import psutil
import pytest

SCRIPTS = Path(sys.executable).parent
"""Where the programs of this environment are."""

ACCESS_KEY = "access-key-of-the-tests"
SECRET_KEY = "secret-key-of-the-tests"

PACKAGES = "radosgw ceph-mon ceph-osd ceph-common postgresql"
"""Debian packages with the servers that `make test-faults` (PostgreSQL) and `make test-nightly` (Ceph) break."""


@dataclass(frozen=True)
class Server:
    process: subprocess.Popen[bytes]
    url: str = ""

    def stop(self) -> None:
        """Ends the process and those it started, at once; they have nothing to save that a test looks at."""
        if self.process.poll() is not None:
            return
        processes = [*psutil.Process(self.process.pid).children(recursive=True), psutil.Process(self.process.pid)]
        for process in processes:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait(timeout=60)
        psutil.wait_procs(processes, timeout=60)


@dataclass(frozen=True)
class S3Server(Server):
    """An S3 server that keeps `<bucket>/<key>` as the file `directory/<bucket>/<key>`."""

    directory: Path = Path()

    def environment(self, secret_key: str = SECRET_KEY) -> dict[str, str]:
        return s3_environment(self.url, secret_key)


class Service:
    """A server that is stopped and started again, at one address and with what it keeps."""

    def __init__(self, url: str, run: Callable[[], AbstractContextManager[Server]]) -> None:
        self.url = url
        self._run = run
        self._stack = ExitStack()
        self._is_running = False

    def start(self) -> None:
        """Starts it, unless it runs, and waits until it answers."""
        if not self._is_running:
            self._stack.enter_context(self._run())
            self._is_running = True

    def stop(self) -> None:
        """Ends it at once, as when its machine fails."""
        self._is_running = False
        self._stack.close()


class S3Service(Service):
    """An S3 server; only `ACCESS_KEY` with the secret key may use it."""

    def environment(self) -> dict[str, str]:
        return s3_environment(self.url, SECRET_KEY)

    def client(self) -> Any:
        return boto3.client(
            "s3",
            endpoint_url=self.url,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            region_name="us-east-1",
        )


class RcloneS3(S3Service):
    """rclone, with a bucket in a directory."""

    def __init__(self, directory: Path, bucket: str) -> None:
        port, self._secret_key = free_port(), SECRET_KEY
        super().__init__(
            f"http://127.0.0.1:{port}", lambda: s3_server(directory, bucket, port=port, secret_key=self._secret_key)
        )

    @contextmanager
    def another_secret_key(self) -> Iterator[None]:
        """Has the server refuse `SECRET_KEY` for a while."""
        self._restart("another-secret-key")
        try:
            yield
        finally:
            self._restart(SECRET_KEY)

    def _restart(self, secret_key: str) -> None:
        self._secret_key = secret_key
        self.stop()
        self.start()


def s3_environment(url: str, secret_key: str) -> dict[str, str]:
    """What a client of an S3 server needs in its environment."""
    return {
        "MLFLOW_S3_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": secret_key,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
    }


def program(name: str) -> str:
    """The path of a program of `PACKAGES`. Fails the test where it is missing."""
    postgresql = sorted(map(str, Path("/usr/lib/postgresql").glob("*/bin")), reverse=True)
    path = shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", *postgresql]))
    if path is None:
        pytest.fail(f"{name} is missing; install it: apt-get install --no-install-recommends {PACKAGES}", pytrace=False)
    return path


def free_port() -> int:
    """A port that nothing listens on. Another process could take it before the caller does; none has yet."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def s3_server(
    directory: Path, *buckets: str, port: int | None = None, secret_key: str = SECRET_KEY
) -> Iterator[S3Server]:
    """Serves a directory as S3, with a bucket for each name; only `ACCESS_KEY` with the secret key may use it."""
    for bucket in buckets:
        (directory / "data" / bucket).mkdir(parents=True, exist_ok=True)
    port = port or free_port()
    command = [
        str(SCRIPTS / "rclone"),
        "serve",
        "s3",
        f"--addr=127.0.0.1:{port}",
        f"--auth-key={ACCESS_KEY},{secret_key}",
        f"--cache-dir={directory / 'cache'}",
        "--config=",
        str(directory / "data"),
    ]
    url = f"http://127.0.0.1:{port}"
    with running(command, directory / "rclone.log", lambda: answers(url)) as process:
        yield S3Server(process, url, directory / "data")


@contextmanager
def mlflow_server(
    directory: Path,
    *,
    port: int | None = None,
    store: str = "",
    artifact_root: str = "",
    environment: Mapping[str, str] = {},
) -> Iterator[Server]:
    """Runs a tracking server. Clients talk to the artifact store themselves."""
    directory.mkdir(parents=True, exist_ok=True)
    port = port or free_port()
    command = [
        str(SCRIPTS / "mlflow"),
        "server",
        "--host=127.0.0.1",
        f"--port={port}",
        "--workers=1",
        f"--backend-store-uri={store or f'sqlite:///{directory}/server.db'}",
        f"--default-artifact-root={artifact_root or directory / 'artifacts'}",
    ]
    environment = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", **environment}
    url = f"http://127.0.0.1:{port}"
    with running(command, directory / "server.log", lambda: answers(f"{url}/health"), environment) as process:
        yield Server(process, url)


@contextmanager
def running(
    command: Sequence[str],
    log: Path,
    is_ready: Callable[[], bool],
    environment: Mapping[str, str] = {},
    *,
    user: str | None = None,
    timeout_s: float = 240,
) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a server, waits until it is ready, and ends it afterwards."""
    with log.open("ab") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            cwd=log.parent,
            env={**os.environ, **environment},
            **run_as(user),
        )
    try:
        deadline = time.monotonic() + timeout_s
        while not is_ready():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command[0]} did not start:\n{log.read_text()[-4000:]}")
            time.sleep(0.05)
        yield process
    finally:
        Server(process).stop()


def run_as(user: str | None) -> dict[str, Any]:
    return {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []} if user else {}


def answers(url: str) -> bool:
    """Whether an HTTP server answers at all; S3 answers 403 to a request that is not signed."""
    try:
        with urllib.request.urlopen(url, timeout=30):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
