"""Runs the checks: all of them for `doctor`, the quick ones for `main`."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import mlflow

from ansor_mlflow.device import available_cpus, cpu_quota, memory_left
from ansor_mlflow.errors import MachineError
from ansor_mlflow.options import DoctorOptions, TuneOptions
from ansor_mlflow.steps.doctor.checks import BackgroundChecks, Check, RunCheck, run_checks
from ansor_mlflow.steps.doctor.machine import (
    check_compiler,
    check_disk,
    check_huge_pages,
    check_memory,
    check_noise,
    check_target,
    check_temporary_directory,
    check_threads,
)
from ansor_mlflow.steps.doctor.packages import check_engine, check_versions
from ansor_mlflow.steps.doctor.servers import IMPATIENCE, TrackingChecks, check_record_pool
from ansor_mlflow.tracking import WORK_ROOT

_NETWORK_TIMEOUT_S = 15.0
"""Time after which whoever has not answered counts as away. MLflow's and boto3's own limits are for each request."""
_ENGINE_TIMEOUT_S = 60.0
_log = logging.getLogger("ansor_mlflow")


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What the checks found."""

    checks: tuple[Check, ...]
    elapsed_s: float

    def require_no_red(self) -> None:
        """Ends the command that printed the checks.

        Raises:
            MachineError: A check is red.
        """
        red = [check.name for check in self.checks if check.status == "red"]
        if red:
            raise MachineError(
                f"{len(red)} of {len(self.checks)} checks are red: {', '.join(red)}; their lines say what to do"
            )


def examine(options: DoctorOptions, tell: Callable[[Check], None] = lambda _: None) -> Diagnosis:
    """Checks this machine, the tracking server and the stores. Leaves nothing there, and makes no run or experiment.

    Args:
        options: What is looked at.
        tell: Called with each check as soon as it and those before it are done.
    """
    started = time.monotonic()
    checks = []
    with _environment(IMPATIENCE):
        for check in _all_checks(options):
            tell(check)
            checks.append(check)
    return Diagnosis(checks=tuple(checks), elapsed_s=time.monotonic() - started)


def warn_of_the_machine(options: TuneOptions) -> None:
    """Warns of what is wrong with this machine as far as that shows at once; asks no server, and stops nothing.

    Where other devices measure, target and threads are theirs.
    """
    target, num_threads = ("auto", "auto") if options.rpc_tracker else (options.target, options.num_threads)
    for check in run_checks(_local_checks(target, num_threads, options.worker_memory_mib)):
        if check.status != "green":
            _log.warning("%s: %s; %s", check.name, check.message, check.fix)


def _local_checks(target: str, num_threads: int | Literal["auto"], worker_memory_mib: int) -> dict[str, RunCheck]:
    threads = available_cpus() if num_threads == "auto" else num_threads
    return {
        "compiler": check_compiler,
        "target": partial(check_target, target, threads),
        "threads": partial(check_threads, threads, cpu_quota()),
        "memory": partial(check_memory, threads, worker_memory_mib, memory_left()),
        "disk": partial(check_disk, WORK_ROOT if WORK_ROOT.is_dir() else Path(), "disk"),
        "temporary files": check_temporary_directory,
    }


def _all_checks(options: DoctorOptions) -> Iterator[Check]:
    noise = list(run_checks({"noise": partial(check_noise, available_cpus())}))  # alone: the others are noise, too
    tuning = TuneOptions(target=options.target)
    engine = BackgroundChecks({"TVM": partial(check_engine, _ENGINE_TIMEOUT_S)}, 2 * _ENGINE_TIMEOUT_S)
    uri = options.tracking_uri or mlflow.get_tracking_uri()
    tracking = TrackingChecks(uri, options.experiment)
    servers = BackgroundChecks(
        {
            "tracking": tracking.server,
            "experiment": tracking.experiment,
            "artifact store": tracking.artifacts,
            "clock": partial(tracking.clock, options.record_pool),
        },
        _NETWORK_TIMEOUT_S,
    )
    pool = BackgroundChecks(
        {"record pool": partial(check_record_pool, options.record_pool, uri)} if options.record_pool else {},
        _NETWORK_TIMEOUT_S,
    )
    yield from run_checks({"versions": check_versions})
    yield from engine.results()
    yield from run_checks(_local_checks(tuning.target, tuning.num_threads, tuning.worker_memory_mib))
    yield from run_checks({"huge pages": check_huge_pages})
    yield from noise
    yield from servers.results()
    yield from pool.results()


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Sets variables, and what they were before afterwards."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
