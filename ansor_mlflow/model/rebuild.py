"""Builds a library for this host where a model has none: with the records for a similar CPU, or without any.

The build runs in a process of its own: what LLVM cannot compile ends a process, and what TVM needs to compile a network
would stay in the memory of the one that serves it.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ansor_mlflow.device import DeviceFingerprint
from ansor_mlflow.errors import AnsorMlflowError, MachineError, one_line
from ansor_mlflow.model.manifest import LibraryEntry
from ansor_mlflow.model.parts import part_entries
from ansor_mlflow.processes import in_child_process
from ansor_mlflow.settings import FOR_THIS_HOST, Linker, LoweringSettings
from ansor_mlflow.tensors import NetworkShapes


@dataclass(frozen=True, kw_only=True)
class BuildJob:
    """What is built."""

    network: str
    """Path of the ONNX file."""
    sizes: tuple[NetworkShapes, ...] = ()
    """Its sizes; empty where it has one."""
    records: str
    """Directory of the records to apply; empty for none."""
    untuned: bool = False
    """Whether it is the library that TVM builds by itself, which others are compared with."""
    device: DeviceFingerprint
    lowering: LoweringSettings
    library: str
    """Path of the library to write."""
    linker: Linker = FOR_THIS_HOST
    """What links it, where the target has another architecture."""


def require_builder() -> None:
    """Checks that libraries can be built here; what is missing is a `MachineError`."""
    for package in ("onnx", "onnxruntime"):
        if importlib.util.find_spec(package) is None:
            raise MachineError(
                f"building a library needs the package {package}, which models do not ask for; pip install onnx "
                "onnxruntime"
            )
    from ansor_mlflow.model.library import require_linker  # it needs ONNX

    require_linker()


def build_in_child_process(job: BuildJob) -> LibraryEntry:
    """Builds a library in a process of its own, which ends with this one.

    The coverage of an untuned library is empty. Its parts may be others than those of a model, which leaves to ONNX
    Runtime what was measured to be faster there.

    Raises:
        AnsorMlflowError: The records do not apply, or the network cannot be compiled here.
        MachineError: The process died, or its time was over.
    """
    advice = "compile the network for this host on another one"
    try:
        return in_child_process(build, job, work="builds the library", advice=advice, is_quiet=True)
    except AnsorMlflowError:
        raise
    except Exception as err:  # of TVM, which has errors of its own
        raise MachineError(f"the library cannot be built ({one_line(err)}); {advice}") from err


def build(job: BuildJob) -> LibraryEntry:
    """Builds a library; see `build_in_child_process`."""
    from ansor_mlflow.device import resolve_target
    from ansor_mlflow.lowering import lower_sizes
    from ansor_mlflow.model.library import compile_tuned, compile_untuned
    from ansor_mlflow.networks import models_of_sizes, read_whole

    target = resolve_target(json.dumps(job.device.target), job.device.num_threads)
    models = models_of_sizes(read_whole(Path(job.network)), job.network, job.sizes)
    lowered = lower_sizes(models, target, job.lowering, job.network)
    coverage: dict[str, Any] = {}
    if job.untuned:
        compile_untuned(lowered, target, Path(job.library), job.linker)
    else:
        records = Path(job.records) if job.records else None
        coverage = compile_tuned(lowered, target, records, Path(job.library), linker=job.linker).to_dict()
    return LibraryEntry(
        path=job.library,
        fingerprint=job.device,
        coverage=coverage,
        provenance=asdict(job.lowering),
        parts=part_entries(lowered),
    )
