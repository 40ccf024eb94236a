"""The machine and the versions behind a run's numbers."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from typing import Any

import psutil

from ansor_mlflow.device import CPU_KIND, DeviceFingerprint, available_cpus, describe_gpus, try_huge_pages
from ansor_mlflow.names import RIVALS

_PACKAGES = ("ansor_mlflow", "apache-tvm", "apache-tvm-ffi", "mlflow", "numpy", "onnx", *RIVALS, "xgboost")


def describe_environment(device: DeviceFingerprint) -> dict[str, Any]:
    """Versions, CPU, memory and load, for `environment.json`. Holds no environment variables: they may be secret."""
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "cpu_model": device.cpu_model,
        "cpus": os.cpu_count(),
        "available_cpus": available_cpus(),
        "memory_bytes": psutil.virtual_memory().total,
        "huge_pages": str(try_huge_pages()),
        "load_average": os.getloadavg(),
        "target": device.target,
        "num_threads": device.num_threads,
        **({} if device.target["kind"] == CPU_KIND else {"gpus": describe_gpus()}),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
