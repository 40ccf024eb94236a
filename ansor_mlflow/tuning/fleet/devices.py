"""What the servers of a key are: what code is generated for, and what was measured on it."""

from __future__ import annotations

import contextlib
import json
import platform
from dataclasses import replace
from typing import Literal

from ansor_mlflow.device import (
    Device,
    DeviceFingerprint,
    attributes_of,
    cpu_features,
    fingerprint,
    is_cpu,
    missing_instructions,
    resolve_target,
)
from ansor_mlflow.errors import MachineError, UserInputError
from ansor_mlflow.tuning.fleet.lookout import FleetSettings
from ansor_mlflow.tuning.fleet.remote import ServerDescription
from ansor_mlflow.tuning.fleet.session import connect_with_any, ready_pool
from ansor_mlflow.tuning.fleet.tracker import HostPort


def device_of_fleet(fleet: FleetSettings, target: str, num_threads: int | Literal["auto"]) -> Device:
    """The device behind a key, as the first free server describes it.

    Args:
        fleet: Where it is.
        target: What the user says it is; auto is what the server says.
        num_threads: Threads of a kernel; auto is every CPU that the server may use.

    Raises:
        UserInputError: TVM knows no such target, or the server does not say what it is and the user does not either.
        MachineError: No server is free for too long, or it cannot run code for the target.
    """
    if target != "auto" and not is_cpu(resolve_target(target, 1)):
        raise UserInputError(
            f"target={target!r} is no CPU, and programs are measured on the CPUs of servers only; tune on a host with "
            "such a device, without rpc_tracker"
        )
    with contextlib.closing(ready_pool()) as pool:
        server, description = connect_with_any(fleet, pool)
    if not description:
        return _as_given(server, target, num_threads)
    found = _described(description)
    number = found.num_threads if num_threads == "auto" else num_threads
    if number > found.num_threads:
        raise UserInputError(
            f"num_threads={num_threads}, but server {server} may use {found.num_threads} CPUs; give at most "
            f"{found.num_threads}, or auto"
        )
    spec = json.dumps(found.target) if target == "auto" else target
    chosen = resolve_target(spec, number)
    features = cpu_features(chosen)
    if missing := missing_instructions(features, found.features):
        raise MachineError(
            f"target={target!r} needs instructions that server {server} ({found.target.get('mcpu')}) lacks: "
            f"{', '.join(missing[:5])}; use target=auto"
        )
    made_for = DeviceFingerprint(
        target=attributes_of(chosen),
        machine=found.machine,
        cpu_model=found.cpu_model,
        features=features,
        num_threads=number,
    )
    return Device(chosen, made_for)


def _described(description: str) -> DeviceFingerprint:
    found = ServerDescription.from_json(description).fingerprint
    target = {key: value for key, value in found.target.items() if key in ("kind", "mcpu")}
    if found.machine != platform.machine():
        target["mtriple"] = f"{found.machine}-linux-gnu"
    return DeviceFingerprint.from_dict({**vars(found), "target": target})


def _as_given(server: HostPort, target: str, num_threads: int | Literal["auto"]) -> Device:
    if target == "auto" or num_threads == "auto":
        raise UserInputError(
            f"target={target}, num_threads={num_threads}: server {server} is one of TVM's own, which does not "
            "say what it is; give both, or start it with `ansor-mlflow fleet server`"
        )
    chosen = resolve_target(target, num_threads)
    return Device(chosen, replace(fingerprint(chosen, num_threads), cpu_model=""))
