"""Real servers for tests: an S3 store and an MLflow tracking server, each a process of its own on 127.0.0.1."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

SCRIPTS = Path(sys.executable).parent
"""Where the programs of this environment are."""

ACCESS_KEY = "access-key-of-the-tests"
SECRET_KEY = "secret-key-of-the-tests"


@dataclass(frozen=True)
class Server:
    """A server process that answers at `url`."""

    url: str
    process: subprocess.Popen[bytes]

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
        self.process.wait(timeout=10)
        psutil.wait_procs(processes, timeout=10)


@dataclass(frozen=True)
class S3Server(Server):
    """An S3 server that keeps `<bucket>/<key>` as the file `directory/<bucket>/<key>`."""

    directory: Path

    def environment(self, secret_key: str = SECRET_KEY) -> dict[str, str]:
        """What a client needs in its environment."""
        return {
            "MLFLOW_S3_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
        }


def free_port() -> int:
    """A port that nothing listens on. Another process could take it before the caller does; none has yet."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def s3_server(
    directory: Path, *buckets: str, port: int | None = None, secret_key: str = SECRET_KEY
) -> Iterator[S3Server]:
    """Serves a directory as S3, with a bucket for each name; only `ACCESS_KEY` with the secret key may use it.

    Args:
        directory: Where objects are kept; made if it does not exist.
        buckets: Buckets to make.
        port: Where it listens; a free port by default.
        secret_key: The key that is right.
    """
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
    process = _start(command, directory / "rclone.log", {})
    server = S3Server(f"http://127.0.0.1:{port}", process, directory / "data")
    with _running(server, directory / "rclone.log", lambda: _answers(server.url)):
        yield server


@contextmanager
def mlflow_server(
    directory: Path, *, port: int | None = None, artifact_root: str = "", environment: Mapping[str, str] = {}
) -> Iterator[Server]:
    """Runs a tracking server on an sqlite store. Clients talk to the artifact store themselves.

    Args:
        directory: Where the store and the log are kept; made if it does not exist.
        port: Where it listens; a free port by default.
        artifact_root: Artifact root of new experiments; a folder in `directory` by default.
        environment: Added to the server's environment.
    """
    directory.mkdir(parents=True, exist_ok=True)
    port = port or free_port()
    command = [
        str(SCRIPTS / "mlflow"),
        "server",
        "--host=127.0.0.1",
        f"--port={port}",
        "--workers=1",
        f"--backend-store-uri=sqlite:///{directory / 'server.db'}",
        f"--default-artifact-root={artifact_root or directory / 'artifacts'}",
    ]
    environment = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", **environment}
    process = _start(command, directory / "server.log", environment)
    server = Server(f"http://127.0.0.1:{port}", process)
    with _running(server, directory / "server.log", lambda: _answers(f"{server.url}/health")):
        yield server


def _start(command: list[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        return subprocess.Popen(
            command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env={**os.environ, **environment}
        )


@contextmanager
def _running(server: Server, log: Path, is_ready: Callable[[], bool], timeout_s: float = 60) -> Iterator[None]:
    """Waits until a server is ready, and ends it afterwards."""
    try:
        deadline = time.monotonic() + timeout_s
        while not is_ready():
            if server.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{server.url} did not start:\n{log.read_text()}")
            time.sleep(0.05)
        yield
    finally:
        server.stop()


def _answers(url: str) -> bool:
    """Whether an HTTP server answers at all; S3 answers 403 to a request that is not signed."""
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
