"""A process of the Python that has PyTorch, which calls functions for the tests.

PyTorch is in an environment of its own because TVM imports it wherever it finds it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import ROOT, TESTS

ENVIRONMENT = ".venv/torch"


def torch_python() -> Path:
    """The Python that has PyTorch: this one, or that of `make .venv/torch`. Without one the test fails."""
    python = ROOT / ENVIRONMENT / "bin/python"
    if importlib.util.find_spec("torch") and importlib.util.find_spec("onnxscript"):
        return Path(sys.executable)
    if not python.is_file():
        pytest.fail(f"no Python here has PyTorch: run `make {ENVIRONMENT}`, or install the extra `torch`")
    return python


class TorchProcess:
    """Calls functions in that process, one at a time."""

    def __init__(self) -> None:
        command = [torch_python(), "-m", "helpers.torch_process"]
        env = {**os.environ, "PYTHONPATH": str(TESTS)}
        self._process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def call(self, function: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a function such as "helpers.torch_models.write"; what it raises is raised here."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump((function, args, kwargs), self._process.stdin)
        self._process.stdin.flush()
        returned, value = pickle.load(self._process.stdout)
        if not returned:
            raise value
        return value

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a function prints is no answer
    while True:
        try:
            name, args, kwargs = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        module, _, function = name.rpartition(".")
        try:
            answer = True, getattr(importlib.import_module(module), function)(*args, **kwargs)
        except Exception as err:  # noqa: BLE001 - it is raised again where the function was called
            answer = False, err
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    _serve()
