"""Checks of what is installed: versions against the pins, and TVM together with XGBoost."""

from __future__ import annotations

import importlib.metadata
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from ansor_mlflow.steps.doctor.checks import Check

_DISTRIBUTION = "ansor_mlflow"
_CONSTRUCT = """
import ansor_mlflow.tuning.workers.preload
import tvm
import xgboost
from tvm import te
from tvm.s_tir.meta_schedule import TuneContext
from tvm.s_tir.meta_schedule.cost_model import XGBModel

a = te.placeholder((64,), name="a")
b = te.compute((64,), lambda i: a[i] + a[i], name="b")
mod = tvm.IRModule({"main": te.create_prim_func([a, b])})
target = tvm.target.Target({"kind": "llvm", "num-cores": 1})
XGBModel()
TuneContext(mod=mod, target=target, space_generator="post-order-apply", search_strategy="evolutionary")
"""


def check_versions(distribution: str = _DISTRIBUTION) -> Check:
    """Compares Python and the packages with what the installed distribution asks for.

    Args:
        distribution: Name of the distribution.
    """
    name = "versions"
    try:
        metadata = importlib.metadata.metadata(distribution)
    except importlib.metadata.PackageNotFoundError:
        return Check.yellow(name, f"{distribution} is not installed, so that nothing says its pins", "pip install .")
    python, wanted = platform.python_version(), SpecifierSet(str(metadata.json.get("requires_python", "")))
    if not wanted.contains(python, prereleases=True):
        return Check.red(name, f"Python {python} is not {wanted}", f"make an environment with Python {wanted}")
    needed = list(_needed(distribution))
    wrong = [(requirement, found) for requirement, found in needed if not _fits(requirement, found)]
    if wrong:
        packages = ", ".join(
            f"{wanted.name} {found or 'is missing'}, not {wanted.specifier}" for wanted, found in wrong
        )
        commands = " ".join(f"'{wanted.name}{wanted.specifier}'" for wanted, _ in wrong)
        return Check.red(name, packages, f"pip install {commands}")
    tvm = next((f", TVM {found}" for wanted, found in needed if wanted.name == "apache-tvm"), "")
    return Check.green(name, f"Python {python}{tvm}; {len(needed)} packages fit the pins")


def _needed(distribution: str) -> Iterator[tuple[Requirement, str | None]]:
    """What the distribution needs with the version that is there; of its extras, what is installed."""
    for text in importlib.metadata.requires(distribution) or ():
        requirement = Requirement(text)
        found = _version(requirement.name)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}) or found:
            yield requirement, found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _fits(requirement: Requirement, found: str | None) -> bool:
    return found is not None and requirement.specifier.contains(found, prereleases=True)


def check_engine(timeout_s: float) -> Check:
    """Makes a TuneContext of MetaSchedule beside XGBoost, in a child process: a mismatch may end the process."""
    name = "TVM"
    fix = "reinstall what the line `versions` names, or install this package in a new environment"
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CONSTRUCT], capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        message = f"making a TuneContext did not end within {timeout_s:.0f} s"
        return Check.yellow(name, message, "try again when the machine is quiet; if it never ends, reinstall TVM")
    if done.returncode < 0:
        ended = signal.Signals(-done.returncode).name
        return Check.red(name, f"making a TuneContext ended with {ended}: TVM and apache-tvm-ffi do not fit", fix)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return Check.red(name, f"making a TuneContext failed: {lines[-1][:300]}", fix)
    return Check.green(name, "a TuneContext is made beside XGBoost")
