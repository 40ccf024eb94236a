"""NVIDIA's GPUs: what a target says of one, which one is here, and what code for one runs on another.

Code for them is generated everywhere. It is compiled for the GPU where CUDA's runtime is: when a library is made there,
else when it is loaded. See docs/gpu.md.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ansor_mlflow.device.platform import Platform, attributes_of
from ansor_mlflow.errors import UserInputError, one_line

if TYPE_CHECKING:
    from tvm.target import Target

_ARCHITECTURE = re.compile(r"sm_(?P<major>\d+)(?P<minor>\d)(?P<only>[af]?)")
"""Compute capability; code for one with "a" runs on that alone, with "f" on its family."""
_FEATURES = {"max_threads_per_block": 1024, "max_shared_memory_per_block": 48 * 2**10, "registers_per_block": 2**16}
"""What a block may take where a target does not say it: what TVM's tags say of all newer GPUs of NVIDIA's."""
_COMPILER = "TVM_CUDA_COMPILE_MODE"
"""TVM's variable of the environment that names CUDA's compiler: nvrtc, the default, or nvcc."""
_SMI_FIELDS = {
    "name": "model",
    "driver_version": "driver",
    "clocks.max.sm": "max_sm_clock",
    "clocks.max.memory": "max_memory_clock",
    "memory.total": "memory",
}
"""What `nvidia-smi` is asked for, and what it is called here."""
_SMI_TIMEOUT_S = 10.0


class _Cuda(Platform):
    def complete(self, spec: str, target: Target, num_threads: int) -> Target:  # noqa: ARG002
        """What a block may take keeps the search to what a GPU can run."""
        import tvm

        attributes = attributes_of(target)
        architecture = str(attributes.get("arch"))
        if not _ARCHITECTURE.fullmatch(architecture):
            raise UserInputError(
                f"target={spec!r}: {architecture!r} is no architecture of CUDA; write one such as sm_90"
            )
        return tvm.target.Target({**_FEATURES, **attributes})

    def model(self, target: Mapping[str, Any]) -> str:
        """The name of this host's first GPU, if it is of the architecture."""
        import tvm

        here = architecture_here()
        return str(tvm.cuda(0).device_name) if here and target["arch"].rstrip("af") == here else ""

    def why_not_here(self, target: Mapping[str, Any], features: Iterable[str]) -> str:  # noqa: ARG002
        if reason := why_no_gpu() or why_no_compiler():
            return f"it is made for cuda, and {reason}"
        return why_not_on_gpu(str(target.get("arch")), str(architecture_here()))

    def describe(self) -> dict[str, Any]:
        return {"gpus": describe_gpus()}


CUDA = _Cuda(
    kind="cuda",
    name="cuda",
    binds_threads=True,
    provider="CUDAExecutionProvider",
    provider_settings={"use_tf32": "0"},  # products of float32 in float32
)


def names_no_architecture(parsed: str | Mapping[str, Any]) -> bool:
    """Whether a target, as `parse_target` reads it, is CUDA's without saying which GPU; TVM would take sm_50."""
    return parsed == "cuda" or (
        isinstance(parsed, Mapping) and parsed.get("kind") == "cuda" and not {"arch", "tag"} & parsed.keys()
    )


def with_architecture_of_host(spec: str, parsed: str | Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of CUDA's target with what the GPU of this host says of itself.

    Args:
        spec: The target as the user wrote it.
        parsed: The same, as `parse_target` reads it.

    Raises:
        UserInputError: There is no GPU to ask.
    """
    import tvm

    if (architecture := architecture_here()) is None:
        raise UserInputError(
            f"target={spec!r} does not say for which GPU, and {why_no_gpu()}; give its architecture, such as "
            "`cuda -arch=sm_90`, or a tag, such as nvidia/nvidia-h100"
        )
    gpu = tvm.cuda(0)
    found = {
        "arch": architecture,
        "max_threads_per_block": int(gpu.max_threads_per_block),
        "max_shared_memory_per_block": int(gpu.max_shared_memory_per_block),
    }
    return {**found, **({"kind": parsed} if isinstance(parsed, str) else parsed)}


def architecture_here() -> str | None:
    """The architecture of this host's first GPU, such as "sm_90"; None where TVM sees none."""
    import tvm

    gpu = tvm.cuda(0)
    return "sm_" + str(gpu.compute_version).replace(".", "") if gpu.exist else None


def why_no_gpu() -> str:
    """Why nothing runs on a GPU of this host, in one clause; empty where it does."""
    import tvm

    if not tvm.runtime.enabled("cuda"):
        return (
            "TVM's runtime for CUDA does not load here: it needs NVIDIA's driver and CUDA's runtime, or a TVM that was "
            "built with USE_CUDA=ON (docs/gpu.md)"
        )
    return "" if tvm.cuda(0).exist else "this host has no GPU of NVIDIA's"


def why_no_compiler() -> str:
    """Why TVM cannot compile CUDA's source on this host, in one clause; empty where it can.

    It looks for NVRTC among Python's packages, and for CUDA's headers in its toolkit (tvm/support/nvcc.py).
    """
    from tvm.support.nvcc import find_cuda_path

    if os.environ.get(_COMPILER, "nvrtc").lower() == "nvcc":
        return "" if shutil.which("nvcc") else f"nvcc, which {_COMPILER} names, is not in PATH (docs/gpu.md)"
    try:
        importlib.import_module("cuda.bindings.nvrtc").nvrtcVersion()  # opens the library, which is another package's
        root = Path(find_cuda_path())
        is_complete = any(list(root.glob(where + "include/cuda_runtime.h")) for where in ("", "targets/*/"))
        return "" if is_complete else f"CUDA's toolkit in {root} has no headers (docs/gpu.md)"
    except ImportError:
        return f"there is no compiler of CUDA: pip install cuda-bindings, or set {_COMPILER}=nvcc (docs/gpu.md)"
    except (RuntimeError, OSError) as err:
        return f"NVRTC, or the toolkit of CUDA whose headers it needs, is not found ({one_line(err)}); set CUDA_PATH"


def why_not_on_gpu(made_for: str, here: str) -> str:
    """Why code for one architecture cannot run on another, in one clause; empty where it can.

    Code for one GPU runs on later ones of its generation, unless it is for that one alone ("sm_90a") or its family
    ("sm_100f"): see "Binary Compatibility" in the CUDA C++ Programming Guide.
    """
    theirs, ours = _ARCHITECTURE.fullmatch(made_for), _ARCHITECTURE.fullmatch(here)
    if theirs and ours and theirs["major"] == ours["major"]:
        is_same = theirs["minor"] == ours["minor"]
        if is_same or (theirs["only"] != "a" and int(theirs["minor"]) < int(ours["minor"])):
            return ""
    return f"it was made for {made_for}, this is {here}"


def describe_gpus() -> list[dict[str, str]] | str:
    """Model, driver and clocks of each GPU of this host, as `nvidia-smi` says them; why not, where it says nothing."""
    if not shutil.which("nvidia-smi"):
        return "not known: there is no nvidia-smi"
    command = ["nvidia-smi", f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SMI_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as err:
        return f"not known: nvidia-smi did not answer ({type(err).__name__})"
    rows = [[value.strip() for value in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    if done.returncode or not rows or any(len(row) != len(_SMI_FIELDS) for row in rows):
        said = (done.stdout + done.stderr).strip().splitlines() or ["nothing"]
        return f"not known: nvidia-smi said {said[0]}"
    return [dict(zip(_SMI_FIELDS.values(), row, strict=True)) for row in rows]
