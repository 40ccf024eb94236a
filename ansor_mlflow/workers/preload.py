"""Imported once by the fork server, so that every worker starts with TVM loaded."""

from __future__ import annotations

import gc
import sys
from importlib import import_module


def _load() -> None:
    """Loads TVM with the collector off, as nothing that it makes is garbage; workers will neither look at it again, nor
    write to its pages, which would copy them.

    It would import PyTorch where that is installed, and ask it for GPUs, after which CUDA serves no forked process.
    """
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    gc.disable()
    for name in ("tvm.driver", "tvm.s_tir.meta_schedule", "tvm.s_tir.transform"):
        import_module(name)
    from ansor_mlflow.device import import_tensor_intrin

    import_tensor_intrin("llvm")
    gc.freeze()
    gc.enable()


_load()
