"""Imports of TVM that cost seconds, made cheaper.

`tvm.s_tir.tensor_intrin` decorates hundreds of functions with `@T.prim_func`, each of which calls
`inspect.stack()`; for every frame `inspect.getmodule` then walks all of `sys.modules`. That takes 15 to 45 s. The
answer depends on the frame's file alone, so remembering it per file brings the import down to a few seconds.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


def import_tensor_intrin() -> ModuleType:
    """Imports `tvm.s_tir.tensor_intrin`, which every TuneContext and every tuned build needs."""
    with _getmodule_memoised():
        return importlib.import_module("tvm.s_tir.tensor_intrin")


@contextmanager
def _getmodule_memoised() -> Iterator[None]:
    original = inspect.getmodule
    known: dict[str, ModuleType | None] = {}

    def getmodule(object: Any, _filename: str | None = None) -> ModuleType | None:
        if _filename is None:
            return original(object)
        if _filename not in known:
            known[_filename] = original(object, _filename)
        return known[_filename]

    inspect.getmodule = getmodule
    try:
        yield
    finally:
        inspect.getmodule = original
