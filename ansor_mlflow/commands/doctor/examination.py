"""Runs the checks: all of them for `doctor`, the quick ones for `main`."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, TimeoutError
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal
from unittest.mock import patch

import mlflow

from ansor_mlflow.commands.doctor import machine
from ansor_mlflow.commands.doctor.servers import TrackingStore
from ansor_mlflow.commands.fleet import fleet_status
from ansor_mlflow.device import available_cpus, cpu_quota, memory_left
from ansor_mlflow.errors import MachineError
from ansor_mlflow.foreign import Report, Reported
from ansor_mlflow.parameters import DoctorOptions, FleetOptions, TuneOptions
from ansor_mlflow.tracking import WORK_ROOT

_NETWORK_TIMEOUT_S = 15.0
"""Time after which whoever has not answered counts as away. MLflow's and boto3's own limits are for each request."""
_KERNEL_TIMEOUT_S = 120.0
_IMPATIENCE = {
    # MLflow alone would wait for minutes for a server that is away
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "8",
    "AWS_MAX_ATTEMPTS": "2",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    # the large probe is sent in parts by boto3; so it is to a server that signs uploads for its clients
    "MLFLOW_MULTIPART_UPLOAD_MINIMUM_FILE_SIZE": str(8 * 2**20),
    "MLFLOW_MULTIPART_UPLOAD_CHUNK_SIZE": str(5 * 2**20),
}
"""The environment while checks are made."""
RunCheck = Callable[[], machine.Check | None]
"""Looks at one thing; returns None where there is nothing to look at."""
_log = logging.getLogger("ansor_mlflow")


@dataclass(frozen=True, kw_only=True)
class Diagnosis(Reported):
    """What the checks found."""

    checks: tuple[machine.Check, ...]
    elapsed_s: float

    def report(self) -> Report:
        counts = Counter(check.status for check in self.checks)
        listed = ", ".join(f"{number} {status}" for status in ("green", "yellow", "red") if (number := counts[status]))
        return Report(f"{listed}, in {self.elapsed_s:.0f} s")

    def require_no_red(self) -> None:
        """Raises a MachineError, which ends the command that printed the checks, if one is red."""
        red = [check.name for check in self.checks if check.status == "red"]
        if red:
            raise MachineError(
                f"{len(red)} of {len(self.checks)} checks are red: {', '.join(red)}; their lines say what to do"
            )


def examine(options: DoctorOptions, tell: Callable[[machine.Check], None] = lambda _: None) -> Diagnosis:
    """Checks this machine, the tracking server and its store. Leaves nothing there, and makes no run or experiment."""
    started_s, checks = time.monotonic(), []
    with patch.dict(os.environ, _IMPATIENCE):
        for check in _all_checks(options):
            tell(check)
            checks.append(check)
    return Diagnosis(checks=tuple(checks), elapsed_s=time.monotonic() - started_s)


def warn_of_the_machine(options: TuneOptions) -> None:
    """Warns of what is wrong with this machine as far as that shows at once; asks no server, and stops nothing.

    Where other devices measure, target and threads are theirs.
    """
    target, num_threads = ("auto", "auto") if options.rpc_tracker else (options.target, options.num_threads)
    for check in run_checks(_local_checks(target, num_threads, options.worker_memory_mib)):
        if check.status != "green":
            _log.warning("%s: %s; %s", check.name, check.message, check.fix)


def run_checks(checks: Mapping[str, RunCheck]) -> Iterator[machine.Check]:
    """Makes checks one after the other; one that ends with an error is red."""
    for name, run in checks.items():
        try:
            found = run()
        except Exception as err:  # noqa: BLE001 - whatever goes wrong in a check is what it found
            found = machine.failed(err)
        if found is not None:
            yield replace(found, name=name)


def bounded(run: RunCheck, timeout_s: float) -> RunCheck:
    """A check that waits for others than this machine: in a thread, which is left alone if it takes too long."""

    def run_bounded() -> machine.Check | None:
        found: Future[list[machine.Check]] = Future()
        threading.Thread(target=lambda: found.set_result(list(run_checks({"": run}))), daemon=True).start()
        try:
            return next(iter(found.result(timeout_s)), None)
        except TimeoutError:
            fix = "check the address, the network and what is in between"
            return machine.Check("red", f"no answer within {timeout_s:.0f} s", fix)

    return run_bounded


def _local_checks(target: str, num_threads: int | Literal["auto"], worker_memory_mib: int) -> dict[str, RunCheck]:
    threads = available_cpus() if num_threads == "auto" else num_threads
    return {
        "target": partial(machine.check_target, target, threads),
        "threads": partial(machine.check_threads, threads, cpu_quota()),
        "memory": partial(machine.check_memory, threads, worker_memory_mib, memory_left()),
        "disk": partial(machine.check_disk, WORK_ROOT if WORK_ROOT.is_dir() else Path()),
    }


def _all_checks(options: DoctorOptions) -> Iterator[machine.Check]:
    # the noise first and alone, as the other checks are noise, too
    yield from run_checks({"noise": partial(machine.check_noise, available_cpus()), "versions": machine.check_versions})
    # another process compiles and runs a kernel meanwhile: where versions do not fit, it crashes
    kernel = machine.start_kernel(options.target)
    here = TuneOptions()
    yield from run_checks(_local_checks(options.target, here.num_threads, here.worker_memory_mib))
    yield from run_checks({"project": partial(machine.check_project, Path())})
    store = TrackingStore(options.tracking_uri or mlflow.get_tracking_uri(), options.experiment)
    waiting: dict[str, RunCheck] = {
        "tracking": store.check_server,
        "artifact store": store.check_artifacts,
        "RPC tracker": partial(_check_fleet, options.rpc_tracker, options.rpc_key),
    }
    yield from run_checks({name: bounded(run, _NETWORK_TIMEOUT_S) for name, run in waiting.items()})
    yield from run_checks({"kernel": partial(machine.check_kernel, kernel, _KERNEL_TIMEOUT_S)})


def _check_fleet(tracker: str, key: str) -> machine.Check | None:
    if not tracker:
        return None
    known = fleet_status(FleetOptions(tracker=tracker)).keys
    servers = [f"{len(state.servers)} of key {found}" for found, state in known.items() if state.servers]
    if not servers or (key and not (key in known and known[key].servers)):
        asked = f"no server of key {key}" if key else "no server"
        return machine.Check("red", f"{asked} has reported to {tracker}", "start one: ansor-mlflow fleet server")
    return machine.Check("green", f"{tracker} has servers: {', '.join(servers)}; ansor-mlflow fleet test tries them")
