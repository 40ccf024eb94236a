"""Everything that users install comes as wheels; the versions that are pinned are the installed ones."""

from __future__ import annotations

import configparser
import itertools
import subprocess
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from helpers.commands import ROOT, SCRIPTS
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

PYTHONS = ["3.10", "3.13", "3.14"]
"""The oldest, and the newest two: Debian 13 and Ubuntu 26.04 come with these."""

MACHINES = ["x86_64", "aarch64"]

GLIBC = "manylinux_2_28"
"""As old as TVM's wheels allow. Wheels for it run on every newer glibc, too."""

SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")
REQUIREMENTS = [
    SETUP["options"]["install_requires"],
    *(text for name, text in SETUP["options.extras_require"].items() if name != "dev"),
]


def missing(python: str, machine: str) -> str:
    """What uv says is not to be had; nothing if all is. It reads markers as that Python on that machine would."""
    command = [
        *(str(SCRIPTS / "uv"), "pip", "compile", "-", "--quiet", "--only-binary=:all:"),
        *(f"--python-version={python}", f"--python-platform={machine}-{GLIBC}"),
    ]
    done = subprocess.run(
        command, input="\n".join(REQUIREMENTS), capture_output=True, text=True, timeout=240, check=False
    )
    return f"Python {python}, {machine}: {done.stderr}" if done.returncode else ""


@pytest.mark.nightly
def test_users_need_nothing_but_wheels() -> None:
    """Resolved anew, without installing or downloading packages; needs a package index."""
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda pair: missing(*pair), itertools.product(PYTHONS, MACHINES)))
    assert not any(answers), "\n".join(filter(None, answers))


def test_the_pythons_are_those_that_the_project_allows() -> None:
    assert f">={PYTHONS[0]}" == SETUP["options"]["python_requires"]
    dependencies = yaml.safe_load((ROOT / "conda.yaml").read_text())["dependencies"]
    (python,) = (Requirement(entry) for entry in dependencies if str(entry).startswith("python"))
    newest_minor = int(PYTHONS[-1].removeprefix("3."))
    assert python.specifier == SpecifierSet(f">={PYTHONS[0]},<3.{newest_minor + 1}")


SETUP_CFG = Path(__file__).parents[1] / "setup.cfg"


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
