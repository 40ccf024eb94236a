"""A Ray cluster on loopback whose nodes can be killed, as `ray_nodes.py` runs it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from helpers.commands import TESTS
from helpers.tuner_process import kill


@dataclass(frozen=True)
class RayCluster:
    """A running cluster."""

    process: subprocess.Popen[str]
    address: str
    """For clients of Ray."""
    environment: Mapping[str, str]
    """What a process needs so that `ray` is this cluster."""

    def add_node(self) -> psutil.Process:
        """Starts a node with two CPUs; the process that it lives and dies with."""
        assert self.process.stdin is not None
        self.process.stdin.write("add\n")
        self.process.stdin.flush()
        return psutil.Process(self.answer())

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


@contextlib.contextmanager
def running_ray(directory: Path) -> Iterator[RayCluster]:
    """A cluster without a node that builds.

    Args:
        directory: For its files; its path is short, since there are sockets in it.
    """
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = int(found.getsockname()[1])
    environment = {
        "RAY_TMPDIR": str(directory),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # all of it stays on loopback
        "RAY_ADDRESS": "auto",
    }
    (directory / "ray").mkdir()  # or the address of the cluster cannot be written there
    with (directory / "nodes.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, str(TESTS / "helpers" / "ray_nodes.py"), str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **environment, "TMPDIR": str(directory)},
            start_new_session=True,
        )
    cluster = RayCluster(process, f"ray://127.0.0.1:{port}", environment)
    descendants: set[psutil.Process] = set()
    try:
        assert cluster.answer() == "ready"
        yield cluster
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            descendants.update(psutil.Process(process.pid).children(recursive=True))
        process.kill()
        process.communicate()
        for descendant in descendants:
            kill(descendant)
