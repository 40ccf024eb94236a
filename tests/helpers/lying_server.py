"""A server of programs that loads another library than it was given: lying_server.py --tracker … --key … --port …"""

from __future__ import annotations

import sys
from typing import Any

import tvm
from tvm.rpc import server

from ansor_mlflow.cli.main import main

_WRONG = """
@I.ir_module
class Module:
    @T.prim_func(s_tir=True)
    def main(data: T.Buffer((4096,), "float32"), result: T.Buffer((4096,), "float32")):
        T.func_attr({"global_symbol": "main"})
        for i in T.serial(4096):
            result[i] = T.float32(1)
"""


def another_library(_: str) -> Any:
    """A library that computes something else than the one that was uploaded."""
    return tvm.compile(tvm.script.from_source(_WRONG), tvm.target.Target("llvm")).jit()


if __name__ == "__main__":
    server._load_module = another_library
    main(["fleet", "server", *sys.argv[1:]])
