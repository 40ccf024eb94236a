"""One device: what code is generated for, and what runs it."""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from ansor_mlflow.device.cpu import CPU
from ansor_mlflow.device.fingerprints import DeviceFingerprint, fingerprint, why_not_runnable
from ansor_mlflow.device.platform import Platform
from ansor_mlflow.device.targets import machine_of, resolve_target
from ansor_mlflow.device.threads import measuring_cpus, resolve_num_threads
from ansor_mlflow.errors import MachineError, UserInputError

if TYPE_CHECKING:
    from tvm.target import Target


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
