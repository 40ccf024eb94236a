"""The versions that `setup.cfg` pins are the installed ones, and they work together."""

from __future__ import annotations

import configparser
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

SETUP_CFG = Path(__file__).parents[1] / "setup.cfg"

MAKE_TUNE_CONTEXT = """
from tvm import te
from tvm.s_tir.meta_schedule import TuneContext
from tvm.s_tir.meta_schedule.search_strategy import EvolutionarySearch
from tvm.target import Target
from ansor_mlflow.device.tvm_import import import_tensor_intrin

import_tensor_intrin("llvm")
a = te.placeholder((64,), name="a")
TuneContext(
    mod=te.create_prim_func([a, te.compute((64,), lambda i: a[i] + 1.0, name="b")]),
    target=Target({"kind": "llvm", "num-cores": 1}),
    space_generator="post-order-apply",
    search_strategy=EvolutionarySearch(),
    num_threads=1,
)
print("made")
"""


def requirement(name: str) -> Requirement:
    config = configparser.ConfigParser()
    config.read(SETUP_CFG)
    lines = config["options"]["install_requires"].splitlines()
    requirements = [Requirement(line) for line in lines if line.strip() and not line.lstrip().startswith("#")]
    (found,) = (requirement for requirement in requirements if requirement.name == name)
    return found


@pytest.mark.parametrize("name", ["apache-tvm", "apache-tvm-ffi", "xgboost", "mlflow"])
def test_the_installed_version_satisfies_its_pin(name: str) -> None:
    assert requirement(name).specifier.contains(version(name), prereleases=True)


def test_the_binary_interface_that_crashes_is_excluded() -> None:
    specifier = requirement("apache-tvm-ffi").specifier
    assert not specifier.contains("0.1.15")
    assert not specifier.contains("0.1.15.post1")


def test_a_tune_context_can_be_made() -> None:
    """In a process of its own: where the pins are wrong, it ends in a segmentation fault."""
    command = [sys.executable, "-c", MAKE_TUNE_CONTEXT]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert (result.returncode, result.stdout) == (0, "made\n"), result.stderr
