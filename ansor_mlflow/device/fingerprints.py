"""Device fingerprints: what a measurement and a library depend on, and what runs on this host."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ansor_mlflow.device.gpu import architecture_here, gpu_model, why_no_compiler, why_no_gpu, why_not_on_gpu
from ansor_mlflow.device.targets import CPU_KIND, attributes_of, cpu_features, host_cpu, machine_of
from ansor_mlflow.foreign import typed

if TYPE_CHECKING:
    from tvm.target import Target

_MAX_THREADS = 2**16
_INSTRUCTION_SETS = re.compile(
    # x86: what LLVM generates for arithmetic, moves and vectors
    r"64bit|cmov|cx(8|16)|x87|mmx|s?sse[\w.]*|avx[\w.]*|amx-\w+|fma4?|f16c|bmi2?|lzcnt|popcnt|adx|movbe|xop|tbm"
    r"|v?aes|v?pclmul(qdq)?|gfni|sha\d*|sm[34]|egpr|ndd|nf|ccmp|zu"
    # Arm
    r"|neon|fp-armv8|fullfp16|fp16fml|bf16|i8mm|dotprod|sve[\w-]*|sme[\w-]*|lse2?|rdm|complxnum|jsconv|crc|faminmax"
    r"|fp8\w*|v\d+(\.\d+)?[ar]"
)
"""LLVM's CPU features that are instructions. The others are scheduling hints, or belong to the operating system."""
_NOT_IN_NAMES = re.compile(r"[^\w.+-]")
_MAX_NAME_LENGTH = 100


@dataclass(frozen=True, kw_only=True)
class DeviceFingerprint:
    """What a measurement and a compiled library depend on: the target, the CPU or GPU, and the thread count."""

    target: dict[str, Any]
    machine: str
    """Instruction set of the operating system, such as "x86_64"."""
    cpu_model: str
    """Model of the CPU, or of the GPU of a target for one; empty where it is not known."""
    features: tuple[str, ...]
    """LLVM's names of the CPU features that generated code may use."""
    num_threads: int

    def __post_init__(self) -> None:
        are_texts = all(isinstance(self.target.get(name, ""), str) for name in ("kind", "mcpu", "arch", "mtriple"))
        if not are_texts or not self.target.get("kind") or not 0 < self.num_threads <= _MAX_THREADS:
            raise ValueError(f"there is no device of {self.num_threads} threads and the target {self.target}")

    @property
    def name(self) -> str:
        """A directory name: readable, and unique by a digest of every field, but for the host's threads of a GPU."""
        kind = self.target["kind"]
        if kind != CPU_KIND:
            called, digest = f"{kind}-{self.target.get('arch', self.machine)}", _digest(replace(self, num_threads=1))
        else:
            called, digest = f"{kind}-{self.target.get('mcpu', self.machine)}-x{self.num_threads}", _digest(self)
        # Fingerprints come from runs, models and servers, and their names are folders.
        return f"{_NOT_IN_NAMES.sub('_', called)[:_MAX_NAME_LENGTH]}-{digest}"

    @property
    def description(self) -> str:
        """A short name for run names and messages, such as "llvm znver4 ×2" or "cuda sm_90"."""
        kind = self.target["kind"]
        if kind != CPU_KIND:
            return f"{kind} {self.target.get('arch', '')}".rstrip()
        return " ".join(filter(None, (kind, self.target.get("mcpu"), f"×{self.num_threads}")))

    def to_json(self) -> str:
        """The fields as JSON with sorted keys."""
        return json.dumps(asdict(self), sort_keys=True, indent=1)

    @staticmethod
    def from_dict(fields: dict[str, Any]) -> DeviceFingerprint:
        """Reads the fields as JSON keeps them, with the features as a list.

        Raises:
            ValueError: They are not those of a device.
        """
        return typed(DeviceFingerprint, fields)


def _digest(device: DeviceFingerprint) -> str:
    return hashlib.sha256(device.to_json().encode()).hexdigest()[:10]


def fingerprint(target: Target, num_threads: int) -> DeviceFingerprint:
    """The fingerprint of code made for `target` that runs with `num_threads` threads on this host, or, where its triple
    is of another architecture, on a machine of which no more is known.
    """
    attributes, machine = attributes_of(target), machine_of(target)
    return DeviceFingerprint(
        target=attributes,
        machine=machine,
        cpu_model=_model(attributes) if machine == platform.machine() else "",
        features=cpu_features(target),
        num_threads=num_threads,
    )


def _model(target: Mapping[str, Any]) -> str:
    return gpu_model(target["arch"]) if target["kind"] == "cuda" else _cpu_model()


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def why_not_runnable(device: DeviceFingerprint, server: DeviceFingerprint | None = None) -> str | None:
    """Why code made for `device` cannot run on this host, or on a server, in one clause; None where it can."""
    import tvm

    kind, machine = device.target["kind"], server.machine if server else platform.machine()
    where = "the server" if server else "this host"
    if device.machine != machine:
        return f"it is made for {device.machine}, {where} is {machine}"
    if kind == "cuda" and not server:
        if reason := why_no_gpu() or why_no_compiler():
            return f"it is made for cuda, and {reason}"
        return why_not_on_gpu(str(device.target.get("arch")), str(architecture_here())) or None
    if kind != CPU_KIND:
        return f"it is made for {kind}, {where} runs llvm libraries"
    cpu = str(server.target.get("mcpu", machine)) if server else host_cpu()
    features = server.features if server else cpu_features(tvm.target.Target({"kind": "llvm", "mcpu": cpu}))
    missing = missing_instructions(device.features, features)
    if missing:
        made_for = device.target.get("mcpu", "its CPU")
        return f"it needs instructions of {made_for} that {where} ({cpu}) lacks: {', '.join(missing[:5])}"
    return None


def missing_instructions(needed: Iterable[str], available: Iterable[str]) -> list[str]:
    """The instruction sets among LLVM's CPU features `needed` that are not `available`, sorted."""
    return sorted(name for name in set(needed) - set(available) if _INSTRUCTION_SETS.fullmatch(name))
