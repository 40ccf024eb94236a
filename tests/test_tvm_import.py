"""The fast import of TVM's tensor intrinsics is the import, and leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys

COMPARE = """
import inspect, tvm
original, calls = inspect.getmodule, []
def counted(*args):
    calls.extend(args[1:])
    return original(*args)
inspect.getmodule = counted
from ansor_mlflow.device.tvm_import import import_tensor_intrin
module = import_tensor_intrin()
assert inspect.getmodule is counted, "inspect.getmodule was not put back"
assert module is tvm.s_tir.tensor_intrin
print(len(calls), len(set(calls)))
"""


def test_every_file_is_looked_up_once() -> None:
    result = subprocess.run([sys.executable, "-c", COMPARE], capture_output=True, text=True, check=True)
    calls, files = map(int, result.stdout.split())
    assert calls == files > 10
