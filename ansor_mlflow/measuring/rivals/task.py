"""What a rival is given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ansor_mlflow.device import CPU, Platform
from ansor_mlflow.tensors import TensorSpec


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
    """With the sizes that a program is compiled for."""
    platform: Platform = CPU
    """Where it runs."""
