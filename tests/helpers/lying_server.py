"""A server of programs that lies: python lying_server.py LIE --tracker … --key … --port …

LIE is `times`, which are zero, or `results`, which are wrong.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import tvm
from tvm.rpc import server

from ansor_mlflow.cli.main import main
from ansor_mlflow.fleet import remote

_WRONG = """
@I.ir_module
class Module:
    @T.prim_func(s_tir=True)
    def main(data: T.Buffer((4096,), "float32"), result: T.Buffer((4096,), "float32")):
        T.func_attr({"global_symbol": "main"})
        for i in T.serial(4096):
            result[i] = T.float32(1)
"""


def no_time(_: str) -> str:
    """Every call takes no time at all."""
    return json.dumps({"run_s": [0.0], "waited": 0.0})


def another_library(_: str) -> Any:
    """A library that computes something else than the one that was uploaded."""
    return tvm.compile(tvm.script.from_source(_WRONG), tvm.target.Target("llvm")).jit()


if __name__ == "__main__":
    lie, *arguments = sys.argv[1:]
    if lie == "times":
        remote._measure = no_time
    elif lie == "results":
        server._load_module = another_library
    main(["fleet", "server", *arguments])
