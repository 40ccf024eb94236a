"""What runs on a node of a Ray cluster: candidates are built there by the code that builds them on the tuning host."""

from __future__ import annotations

import importlib.metadata
import platform
import queue
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from ansor_mlflow.errors import MachineError, UserInputError
from ansor_mlflow.model import require_linker
from ansor_mlflow.settings import Linker
from ansor_mlflow.tuning.workers.builder import LocalBuilder
from ansor_mlflow.tuning.workers.pool import Outcome

_PACKAGES = ("ansor_mlflow", "apache-tvm", "apache-tvm-ffi")


@dataclass(frozen=True, kw_only=True)
class NodeSettings:
    """How a node builds: see `LocalBuilder`."""

    target: str
    """As TVM writes it as JSON."""
    machine: str
    """Architecture of the libraries."""
    linker: Linker = field(default_factory=Linker)
    """What links them, where it is another one than the node's."""
    timeout_s: float
    memory_bytes: int | None = None


def versions() -> dict[str, str]:
    """What has to be the same on two hosts, so that they build the same libraries."""
    packages = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {"Python": ".".join(platform.python_version_tuple()[:2]), "CPU": platform.machine(), **packages}


class NodeBuilder:
    """Builds on one node, as an actor of Ray's, which calls it from several threads.

    Each build is a process of a `WorkerPool`, so that its time limit and its outcome are those of the tuning host.
    """

    def __init__(self) -> None:
        self._free: queue.SimpleQueue[LocalBuilder] = queue.SimpleQueue()

    def prepare(self, expected: Mapping[str, str], settings: NodeSettings, num_builds: int) -> str:
        """Makes ready for so many builds at a time; returns why the node cannot be used, if it cannot.

        Args:
            expected: `versions` of the tuning host.
            settings: How it builds.
            num_builds: How many calls of `build` there are at a time.
        """
        found = versions()
        if wrong := [f"{name} {found[name]}, not {text}" for name, text in expected.items() if found[name] != text]:
            return f"it has {', '.join(wrong)}"
        try:
            compiler = require_linker(settings.machine, settings.linker)
        except (MachineError, UserInputError) as err:  # the node may have no such compiler
            return str(err)
        from tvm.ir import load_json

        vars(sys.modules["__main__"]).pop("__file__", None)  # every new worker would import Ray's, for half a second
        for _ in range(num_builds):  # one for each thread: a pool has one caller
            self._free.put(
                LocalBuilder(
                    load_json(settings.target),
                    max_workers=1,
                    timeout_s=settings.timeout_s,
                    memory_bytes=settings.memory_bytes,
                    as_in_models=True,
                    compiler=compiler,
                )
            )
        return ""

    def build(self, module: str) -> Outcome[bytes]:
        """Builds a module, given as JSON; returns its library, since hosts share no files.

        Raises:
            MachineError: The disk is full.
        """
        from tvm.ir import load_json

        builder = self._free.get()
        try:
            (outcome,) = builder.build([load_json(module)])
        finally:
            self._free.put(builder)
        if outcome.value is None:
            return Outcome(failure=outcome.failure, error=outcome.error)
        library = outcome.value.read_bytes()
        outcome.value.unlink()
        return Outcome(library)
