"""What is the same for all devices of a kind. One object answers where code asks whether a target is a CPU or a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tvm.target import Target


@dataclass(frozen=True, kw_only=True)
class Platform:
    """A kind of device that TVM generates code for. The defaults are those of one that nothing more is known of."""

    kind: str
    """Kind of its targets, such as llvm or cuda."""
    name: str
    """TVM's name of the device, such as cpu or cuda."""
    by_llvm: bool = False
    """True if LLVM makes the code of kernels: functions of elements become vectors, and small buffers registers."""
    has_sketches: bool = False
    """True if there are sketches for it, and so what only they can use: padded channels, layers by other algorithms."""
    in_process: bool = False
    """True if it computes in the memory of the process: arrays need no copies, pages may be huge, caches be flushed."""
    binds_threads: bool = False
    """True if every loop must be bound to threads, so that DLight schedules what has no record."""
    counts_threads: bool = False
    """True if kernels are made for a number of the host's threads."""
    setup_s: float = 20.0
    """Seconds that a process may take before its first kernel runs, beside those of the process itself."""
    provider: str = ""
    """ONNX Runtime's execution provider; empty where it has none."""
    provider_settings: Mapping[str, str] = field(default_factory=dict)

    def complete(self, spec: str, target: Target, num_threads: int) -> Target:  # noqa: ARG002
        """The target with what it leaves open; a `UserInputError` where no device is as it says."""
        return target

    def model(self, target: Mapping[str, Any]) -> str:  # noqa: ARG002
        """The model of this host's device that a target names; empty where it is not known."""
        return ""

    def why_not_here(self, target: Mapping[str, Any], features: Iterable[str]) -> str:  # noqa: ARG002
        """Why code for a target that uses some CPU features cannot run on this host, in one clause; empty if it can."""
        return f"it is made for {self.kind}, this host runs llvm libraries"

    def describe(self) -> dict[str, Any]:
        """What this host's devices say of themselves, beside the CPU, for `environment.json`."""
        return {}


def attributes_of(target: Target) -> dict[str, Any]:
    """The target as plain JSON, without empty entries."""
    return {key: value for key, value in json.loads(str(target)).items() if value not in ("", [])}
