"""The devices that several tuning runs were made on: what code for each is generated from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ansor_mlflow.device import Device
from ansor_mlflow.errors import RecordsError, UserInputError
from ansor_mlflow.lowering import LoweredNetwork
from ansor_mlflow.model import require_linker
from ansor_mlflow.records import read_fingerprint
from ansor_mlflow.settings import Linker
from ansor_mlflow.steps.records import Recorded, distill_for_device


@dataclass(frozen=True)
class TunedDevice:
    """A tuning run, and the device that it was made on, which need not be this host."""

    recorded: Recorded
    device: Device

    @staticmethod
    def of(recorded: Recorded, linker: Linker) -> TunedDevice:
        """Looks at the records of a tuning run.

        Raises:
            UserInputError: The linker is not usable.
            RecordsError: The records are damaged, or it is not known for which device they are.
            MachineError: Libraries for the device cannot be linked here.
        """
        made_for = read_fingerprint(recorded.records)
        if made_for is None:
            run = recorded.options.tune_run
            raise RecordsError(f"run {run} does not say which device its records are for; compile it alone")
        require_linker(made_for.machine, linker)
        return TunedDevice(recorded, Device.elsewhere(made_for))

    def write_best(self, _: LoweredNetwork, device: Device, best: Path) -> str:
        """See `compiling.compile.WriteRecords`."""
        return distill_for_device(self.recorded.records, device.fingerprint, best)


def require_one_network(tuned: Sequence[TunedDevice]) -> None:
    """Refuses tuning runs whose libraries cannot be in one model.

    Raises:
        UserInputError: They tuned different networks, or two of them the same device.
    """
    first = tuned[0]
    devices: dict[str, str] = {}
    for member in tuned:
        run, options = member.recorded.options.tune_run, member.recorded.options
        if _network_of(member) != _network_of(first):
            raise UserInputError(
                f"tune_run: {first.recorded.options.tune_run} tuned {first.recorded.options.network} and {run} tuned "
                f"{options.network}, or other weights of it; a model holds libraries of one network"
            )
        other = devices.setdefault(member.device.fingerprint.name, run)
        if other != run:
            raise UserInputError(
                f"tune_run: {other} and {run} are both for {member.device.description}; a model holds one library for "
                "each device: give one of them, or tune one with warm_start= the other"
            )


def _network_of(member: TunedDevice) -> str:
    return member.recorded.provenance.network_sha256 if member.recorded.provenance else ""
