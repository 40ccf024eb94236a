"""Loads and lowers ONNX files with little memory, and prints what became of each: a process that may die."""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path

from ansor_mlflow.device import resolve_target
from ansor_mlflow.errors import AnsorMlflowError
from ansor_mlflow.lowering.lower import lower
from ansor_mlflow.networks import load_network


def virtual_bytes() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmSize"))
    return int(line.split()[1]) * 1024


def main() -> None:
    """Prints seconds, name and outcome of every file of a directory, each before the next begins."""
    target = resolve_target("auto", 1)
    limit = virtual_bytes() + 3 * 2**30
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for path in sorted(Path(sys.argv[1]).glob("*.onnx")):
        print(path.name, end=" ", flush=True)
        start = time.perf_counter()
        try:
            lower(load_network(str(path)).model, target)
            outcome = "fine"
        except AnsorMlflowError as err:
            outcome = f"{type(err).__name__}: {err}"
        except Exception as err:  # noqa: BLE001 - what is none of our errors is what is looked for
            outcome = f"BUG {err!r}"
        print(f"{time.perf_counter() - start:.3f} {outcome!r}", flush=True)


if __name__ == "__main__":
    main()
