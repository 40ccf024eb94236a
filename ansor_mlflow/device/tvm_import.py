"""Imports of TVM that cost seconds, made cheaper.

`tvm.s_tir.tensor_intrin` decorates hundreds of functions with `@T.prim_func`, each of which is parsed, and calls
`inspect.stack()`; for every frame `inspect.getmodule` then walks all of `sys.modules`. That takes 15 to 45 s. The
answer depends on the frame's file alone, so remembering it per file brings the import down to a few seconds. Nearly all
of those are for the functions of accelerators, which schedules for CPUs do not use.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_PACKAGE = "tvm.s_tir.tensor_intrin"
_OF_ACCELERATORS = ("cuda", "rocm", "hexagon")


def import_tensor_intrin(kind: str) -> ModuleType:
    """Imports `tvm.s_tir.tensor_intrin`, which every TuneContext and every tuned build needs.

    Args:
        kind: Kind of the target. With "llvm" the modules of accelerators are left out. Whoever then tunes for one in
            the same process, without this package, imports them: `import tvm.s_tir.tensor_intrin.cuda`.
    """
    with _getmodule_memoised():
        if _PACKAGE not in sys.modules:
            _import_for_cpus()
        if kind != "llvm":
            for name in _OF_ACCELERATORS:
                importlib.import_module(f"{_PACKAGE}.{name}")
        return sys.modules[_PACKAGE]


def _import_for_cpus() -> None:
    """Imports the package; where it imports a module of an accelerator, it finds an empty one, which is gone again."""
    import tvm  # noqa: F401 - whatever it imports by itself is not to be left out

    absent = [name for name in _OF_ACCELERATORS if f"{_PACKAGE}.{name}" not in sys.modules]
    for name in absent:
        sys.modules[f"{_PACKAGE}.{name}"] = ModuleType(name)
    try:
        package = importlib.import_module(_PACKAGE)
    finally:
        for name in absent:
            del sys.modules[f"{_PACKAGE}.{name}"]
    for name in absent:
        vars(package).pop(name, None)


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
