"""Imported once by the fork server, so that every worker starts with TVM loaded."""

from __future__ import annotations

import gc
from importlib import import_module


def _load() -> None:
    """Loads TVM with the collector off, as nothing that it makes is garbage; workers will neither look at it again, nor
    write to its pages, which would copy them.
    """
    gc.disable()
    for name in ("tvm.driver", "tvm.s_tir.meta_schedule", "tvm.s_tir.transform"):
        import_module(name)
    from ansor_mlflow.device import import_tensor_intrin

    import_tensor_intrin("llvm")
    gc.freeze()
    gc.enable()


_load()
