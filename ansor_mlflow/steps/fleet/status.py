"""What a tracker knows."""

from __future__ import annotations

from dataclasses import dataclass

from ansor_mlflow.options import FleetOptions
from ansor_mlflow.tuning import HostPort, KeyState, TrackerClient


@dataclass(frozen=True)
class FleetStatus:
    """The servers of a tracker, and who waits for them."""

    tracker: str
    keys: dict[str, KeyState]


def fleet_status(options: FleetOptions) -> FleetStatus:
    """Asks a tracker.

    Raises:
        UserInputError: That is no address.
        MachineError: There is no tracker.
    """
    client = TrackerClient(HostPort.parse(options.tracker, "tracker"))
    return FleetStatus(str(client.address), client.summary())
