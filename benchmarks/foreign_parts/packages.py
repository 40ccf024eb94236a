"""The packages that ship ONNX files, which of these are run, and what a user gives for them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from ansor_mlflow.errors import UserInputError
from ansor_mlflow.foreign import read_yaml, typed

PACKAGES = Path(__file__).with_name("packages.yaml")
_PIN = re.compile(r"([a-z0-9]+(?:-[a-z0-9]+)*)==([0-9][0-9A-Za-z.]*)")


@dataclass(frozen=True, kw_only=True)
class ForeignFile:
    """An ONNX file of a package, and the parameters beside its name."""

    path: str
    """Where it is in the wheel."""
    input_shapes: dict[str, list[int]] = field(default_factory=dict)
    input_values: dict[str, Any] = field(default_factory=dict)
    why: str = ""
    """What these stand for; empty where the file has sizes of its own, but for the batch."""

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters that a user gives, without those that are empty."""
        given = {"input_shapes": self.input_shapes, "input_values": self.input_values}
        return {name: value for name, value in given.items() if value}


@dataclass(frozen=True, kw_only=True)
class ForeignPackage:
    """A package of PyPI with ONNX files in its wheel."""

    pin: str
    """Name and version, as pip takes them."""
    about: str
    """What its networks are for."""
    files: list[ForeignFile]

    @property
    def name(self) -> str:
        """The name of the package, without its version."""
        return self.pin.partition("==")[0]

    def place(self, file: ForeignFile) -> PurePosixPath:
        """Where a file is below the folder of all packages, and what it is called."""
        return PurePosixPath(self.pin, file.path)


def read_packages(path: Path = PACKAGES) -> list[ForeignPackage]:
    """Reads a list of packages.

    Raises:
        UserInputError: It is not what is expected, a package or file is there twice, or it lacks a pin or a reason.
    """
    try:
        packages = typed(list[ForeignPackage], read_yaml(path.read_bytes()))
    except (OSError, ValueError) as err:
        raise UserInputError(f"{path.name}: {err}; see {PACKAGES.name}") from err
    if wrong := next(_mistakes(packages), None):
        raise UserInputError(f"{path.name}: {wrong}")
    return packages


def _mistakes(packages: Sequence[ForeignPackage]) -> Iterator[str]:
    yield from (f"{each.pin} has no version; write name==version" for each in packages if not _PIN.fullmatch(each.pin))
    yield from (f"the package {name} is there twice" for name in _twice(Counter(each.name for each in packages)))
    for package in packages:
        yield from (f"{path} is there twice" for path in _twice(Counter(file.path for file in package.files)))
        for file in package.files:
            if not file.path.endswith(".onnx") or ".." in PurePosixPath(file.path).parts or file.path.startswith("/"):
                yield f"{file.path} of {package.name} is no path of an ONNX file in a wheel"
            if file.parameters and not file.why:
                yield f"{file.path} of {package.name} has parameters without a reason; give why"


def _twice(counts: Mapping[str, int]) -> Iterator[str]:
    return (name for name, number in counts.items() if number > 1)
