"""A server that MLflow starts for a model: how soon it answers, how fast, and how much memory it takes."""

from __future__ import annotations

import base64
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy.typing as npt
import psutil
import requests

_READY_S = 180.0
_NUM_WARM_UP = 3

Tensors = Mapping[str, npt.NDArray[Any]]


def _json_body(inputs: Tensors) -> dict[str, Any]:
    return {"inputs": {name: array.tolist() for name, array in inputs.items()}}


def _lists_body(inputs: Tensors) -> dict[str, Any]:
    """A row for each sample, with its tensors as flat lists."""
    rows = zip(*(array.reshape(len(array), -1).tolist() for array in inputs.values()), strict=True)
    return {"dataframe_split": {"columns": list(inputs), "data": [list(row) for row in rows]}}


def _binary_body(inputs: Tensors) -> dict[str, Any]:
    cells = [base64.b64encode(array.tobytes()).decode() for array in inputs.values()]
    return {"dataframe_split": {"columns": list(inputs), "data": [cells]}}


BODIES: dict[str, Callable[[Tensors], dict[str, Any]]] = {
    "json": _json_body,
    "lists": _lists_body,
    "binary": _binary_body,
}
"""The forms of a request: JSON `inputs`, flat lists in the cells of `dataframe_split`, and base64 there."""


@dataclass(frozen=True)
class Served:
    """What was seen of one server."""

    figures: dict[str, float]
    answers: dict[str, Any]
    """The predictions by form of the request."""


def measure_server(directory: Path, inputs: Tensors, forms: list[str], num_requests: int, scratch: Path) -> Served:
    """Serves a model and sends it requests, one after the other.

    Args:
        directory: The model.
        inputs: Tensors to send.
        forms: Names in `BODIES`.
        num_requests: Requests of each form that count; the first ones do not.
        scratch: Directory for the log.
    """
    with model_server(directory, scratch) as (url, process, ready_s):
        figures, answers = {"server_ready_s": ready_s, "memory_idle_mib": memory_mib(process)}, {}
        for form in forms:
            body = json.dumps(BODIES[form](inputs)).encode()
            figures[f"body_{form}_bytes"] = len(body)
            figures[f"rest_{form}_ms"], answers[form] = _time_requests(url, body, num_requests)
        figures["memory_mib"] = memory_mib(process)
    return Served(figures, answers)


@contextmanager
def model_server(directory: Path, scratch: Path, workers: int = 1) -> Iterator[tuple[str, psutil.Process, float]]:
    """Runs `mlflow models serve`; yields the URL, the process and the seconds until it answered."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = int(sock.getsockname()[1])
    url, log = f"http://127.0.0.1:{port}", scratch / "server.log"
    command = [sys.executable, "-m", "mlflow", "models", "serve", f"--model-uri={directory}", "--env-manager=local"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # where uvicorn is
    began_s = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, f"--port={port}", f"--workers={workers}"],
            stdout=out,
            stderr=out,
            env={**os.environ, "PATH": path},
        )
    root = psutil.Process(process.pid)
    try:
        while not _answers(url):
            if process.poll() is not None or time.monotonic() - began_s > _READY_S:
                raise click.ClickException(f"the server did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.05)
        yield url, root, time.monotonic() - began_s
    finally:
        for child in [*root.children(recursive=True), root]:
            child.kill()
        process.wait()


def _answers(url: str) -> bool:
    try:
        return requests.get(f"{url}/ping", timeout=5).ok
    except requests.RequestException:
        return False


def memory_mib(root: psutil.Process) -> float:
    """Resident memory of the processes that serve; the command that started them is not one of them."""
    return float(sum(process.memory_info().rss for process in root.children(recursive=True))) / 2**20


def _time_requests(url: str, body: bytes, num_requests: int) -> tuple[float, Any]:
    """The median time of a request in milliseconds, and the predictions."""
    session, times_s, predictions = requests.Session(), [], None
    for _ in range(_NUM_WARM_UP + num_requests):
        began_s = time.perf_counter()
        response = session.post(f"{url}/invocations", data=body, headers={"Content-Type": "application/json"})
        times_s.append(time.perf_counter() - began_s)
        if not response.ok:
            raise click.ClickException(f"the server answered {response.status_code}: {response.text[-1000:]}")
        predictions = response.json()["predictions"]
    return median(times_s[_NUM_WARM_UP:]) * 1e3, predictions
