"""Gives memory that a long tuning has no use for back to the system."""

from __future__ import annotations

import gc

from ansor_mlflow.device import return_freed_memory


def release_memory() -> None:
    """Frees unreachable objects that refer to each other, and what the C library keeps of freed memory.

    XGBoost defines a class for every array that it returns, hundreds in a training, and a class refers to itself.
    Python looks for such objects among old ones only when there is a quarter more of them than there was the last time.
    The C library keeps memory of every thread that searched, for that thread.
    """
    gc.collect()
    return_freed_memory()
