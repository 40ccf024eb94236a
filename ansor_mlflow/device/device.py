"""One device: what code is generated for, what runs it, and the fingerprint that tells it from others."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from ansor_mlflow.device.cpu import CPU, cpu_features, why_lacking
from ansor_mlflow.device.platform import Platform, attributes_of
from ansor_mlflow.device.targets import machine_of, platform_of, resolve_target
from ansor_mlflow.device.threads import measuring_cpus, resolve_num_threads
from ansor_mlflow.errors import MachineError, UserInputError
from ansor_mlflow.foreign import typed

if TYPE_CHECKING:
    from tvm.target import Target

_MAX_THREADS = 2**16
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
    def platform(self) -> Platform:
        """The kind of device."""
        return platform_of(self.target)

    @property
    def name(self) -> str:
        """A directory name: readable, and unique by a digest of every field, but for the host's threads of a GPU."""
        kind = self.target["kind"]
        if not self.platform.counts_threads:
            called, digest = f"{kind}-{self.target.get('arch', self.machine)}", _digest(replace(self, num_threads=1))
        else:
            called, digest = f"{kind}-{self.target.get('mcpu', self.machine)}-x{self.num_threads}", _digest(self)
        # Fingerprints come from runs, models and servers, and their names are folders.
        return f"{_NOT_IN_NAMES.sub('_', called)[:_MAX_NAME_LENGTH]}-{digest}"

    @property
    def description(self) -> str:
        """A short name for run names and messages, such as "llvm znver4 ×2" or "cuda sm_90"."""
        kind = self.target["kind"]
        if not self.platform.counts_threads:
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
        cpu_model=platform_of(attributes).model(attributes) if machine == platform.machine() else "",
        features=cpu_features(target),
        num_threads=num_threads,
    )


def why_not_runnable(device: DeviceFingerprint, server: DeviceFingerprint | None = None) -> str:
    """Why code made for `device` cannot run on this host, or on a server, in one clause; empty where it can."""
    machine, where = (server.machine, "the server") if server else (platform.machine(), "this host")
    if device.machine != machine:
        return f"it is made for {device.machine}, {where} is {machine}"
    if not server:
        return device.platform.why_not_here(device.target, device.features)
    if not device.platform.by_llvm:
        return f"it is made for {device.platform.kind}, {where} runs llvm libraries"
    return why_lacking(device.target, device.features, str(server.target.get("mcpu", machine)), server.features, where)


@dataclass(frozen=True)
class Device:
    """A target and a number of threads, resolved once and handed down."""

    target: Target
    fingerprint: DeviceFingerprint
    """Tells the device from others, and is kept with what was measured on it or compiled for it."""

    @staticmethod
    def of(target: Target, num_threads: int) -> Device:
        """This host, or the machine of the target's triple, for a target that TVM knows already."""
        return Device(target, fingerprint(target, num_threads))

    @staticmethod
    def resolve(target: str, num_threads: int | Literal["auto"]) -> Device:
        """This host, or another machine that a triple names, as users describe it; see the parameters of these names.

        Raises:
            UserInputError: TVM knows no such target, there are fewer CPUs than threads, or nobody knows how many
                another machine has.
        """
        machine = machine_of(resolve_target(target, 1))
        if machine == platform.machine():
            number = resolve_num_threads(num_threads)
        elif num_threads == "auto":
            raise UserInputError(
                f"target={target!r}, num_threads=auto: how many CPUs that {machine} machine has is not known here; "
                "give num_threads"
            )
        else:
            number = num_threads
        return Device.of(resolve_target(target, number), number)

    @staticmethod
    def elsewhere(made_for: DeviceFingerprint) -> Device:
        """The device of a fingerprint, which need not be this host: its target has the triple of its architecture."""
        attributes = dict(made_for.target)
        if made_for.machine != platform.machine():
            triple = f"{made_for.machine}-linux-gnu"
            if made_for.platform is CPU:
                attributes.setdefault("mtriple", triple)
            else:
                attributes.setdefault("host", {"kind": CPU.kind, "mtriple": triple})
        return Device(resolve_target(json.dumps(attributes), made_for.num_threads), made_for)

    @property
    def platform(self) -> Platform:
        """The kind of device."""
        return self.fingerprint.platform

    @property
    def num_threads(self) -> int:
        """Threads of a kernel."""
        return self.fingerprint.num_threads

    @property
    def description(self) -> str:
        """A short name, such as "llvm znver4 ×2"."""
        return self.fingerprint.description

    @cached_property
    def cpus(self) -> frozenset[int]:
        """The CPUs of this host that kernels are measured on."""
        return measuring_cpus(self.num_threads)

    def require_measurable_here(self) -> None:
        """Checks that this host can run what is compiled for the device.

        Raises:
            MachineError: It cannot.
        """
        if reason := why_not_runnable(self.fingerprint):
            other = " or, to compile without measuring, trials=0" if self.platform.binds_threads else ""
            raise MachineError(
                f"target {self.target!s} cannot be measured on this host: {reason}; use target=auto{other}"
            )
