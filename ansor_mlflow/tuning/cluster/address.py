"""Where a Ray cluster is found that builds candidates."""

from __future__ import annotations

import importlib.util
import os

from ansor_mlflow.errors import MachineError, UserInputError
from ansor_mlflow.options import TuneOptions
from ansor_mlflow.tuning.fleet.tracker import HostPort

ANY = "ray"
"""Value of the parameter for the cluster that this environment names."""
_SCHEME = "ray://"
_ADDRESS_VARIABLE = "RAY_ADDRESS"
"""Ray's own."""
_RUNNING_HERE = "auto"
"""What Ray calls the cluster that this host is a node of."""
_LISTENS_S = 5.0


def cluster_address(options: TuneOptions) -> str:
    """Address of the cluster that builds, as Ray takes it; empty where this host builds.

    Raises:
        UserInputError: It is none.
        MachineError: Ray is not installed.
    """
    given = str(options.build_workers)
    if not given.startswith(ANY):
        return ""
    address = os.environ.get(_ADDRESS_VARIABLE) or _RUNNING_HERE if given == ANY else given
    if address != _RUNNING_HERE:
        _host_port(address)
    if importlib.util.find_spec("ray") is None:
        raise MachineError(
            f"build_workers={given}: Ray must be installed here and on the nodes, of the release that this "
            "package's extra `ray` names; or build on this host with build_workers=auto"
        )
    return address


def require_cluster(address: str) -> None:
    """Checks that something listens at an address of `cluster_address`, as far as that is known without Ray.

    Raises:
        MachineError: Nothing does.
    """
    if address not in ("", _RUNNING_HERE) and not _host_port(address).is_listening(_LISTENS_S):
        raise MachineError(no_cluster(address, f"nothing listens there, or answers within {_LISTENS_S:g} s"))


def name_of(address: str) -> str:
    """A cluster as the log names it."""
    return "the Ray cluster of this host" if address == _RUNNING_HERE else f"the Ray cluster at {address}"


def no_cluster(address: str, why: str) -> str:
    """What an error says of a cluster that cannot be used."""
    if address == _RUNNING_HERE:
        return (
            f"build_workers=ray: this host is no node of a Ray cluster that answers ({why}); make it one with `ray "
            f"start`, or name a cluster by {_ADDRESS_VARIABLE} or build_workers=ray://host:port"
        )
    return (
        f"no Ray cluster can be reached at {address} ({why}); look at it with `ray status`, or build on this host with "
        "build_workers=auto"
    )


def _host_port(address: str) -> HostPort:
    """Host and port, of a Ray client's server (`ray://host:port`) or of the head node itself (`host:port`)."""
    name = "build_workers" if address.startswith(_SCHEME) else _ADDRESS_VARIABLE
    try:
        return HostPort.parse(address.removeprefix(_SCHEME), name)
    except UserInputError as err:
        raise UserInputError(
            f"{name}={address!r}: it must be ray://host:port of a cluster, such as ray://10.0.0.1:10001"
        ) from err
