"""What a rival is, and what it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from ansor_mlflow.device import CPU, Platform
from ansor_mlflow.tensors import Arrays, TensorSpec


@dataclass(frozen=True, kw_only=True)
class RivalTask:
    """What a rival is to compute, and how."""

    network: Path
    """The user's ONNX file."""
    outputs: tuple[str, ...]
    """Names, in their order."""
    num_threads: int
    program: Path | None = None
    """The exported program of PyTorch that the file came from, if there is one."""
    inputs: tuple[TensorSpec, ...] = ()
    """The inputs, with the sizes that a program is compiled for."""
    platform: Platform = CPU
    """The kind of device that it runs on."""


@dataclass(frozen=True, kw_only=True)
class Rival:
    """A runtime that a user could have taken instead."""

    title: str
    """The name that users read."""
    package: str
    """The Python package that must be installed, whose version is logged."""
    load: Callable[[RivalTask], Callable[[Mapping[str, npt.NDArray[Any]]], Arrays]]
    """Makes what computes the outputs, by name, of inputs, by name; called in a process that does nothing else. An
    error of any class says why it cannot."""
    to_install: str = ""
    """What pip is to install, where that is more than the package."""
    needs_program: bool = False
    """Whether it runs programs of PyTorch, and no ONNX file."""
