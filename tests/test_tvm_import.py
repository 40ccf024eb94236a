"""The fast import of TVM's tensor intrinsics is the import, and leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys

import pytest

COMPARE = """
import inspect, tvm
original, calls = inspect.getmodule, []
def counted(*args):
    calls.extend(args[1:])
    return original(*args)
inspect.getmodule = counted
from ansor_mlflow.device.tvm_import import import_tensor_intrin
module = import_tensor_intrin("cuda")
assert inspect.getmodule is counted, "inspect.getmodule was not put back"
assert module is tvm.s_tir.tensor_intrin
print(len(calls), len(set(calls)))
"""


@pytest.mark.nightly
def test_every_file_is_looked_up_once() -> None:
    result = subprocess.run([sys.executable, "-c", COMPARE], capture_output=True, text=True, check=True)
    calls, files = map(int, result.stdout.split())
    assert calls == files > 10


ONE_AFTER_THE_OTHER = """
from ansor_mlflow.device.tvm_import import import_tensor_intrin
from tvm.s_tir import TensorIntrin
of_gpu, of_cpu = "wmma_sync_16x16x16_f16f16f32", "dot_16x4_vnni"
package = import_tensor_intrin("llvm")
assert TensorIntrin.get(of_cpu, allow_missing=True) is not None
assert TensorIntrin.get(of_gpu, allow_missing=True) is None
assert not hasattr(package, "cuda")
assert import_tensor_intrin("cuda") is package
assert TensorIntrin.get(of_gpu, allow_missing=True) is not None
from tvm.s_tir.tensor_intrin.cuda import get_wmma_load_intrin
"""


@pytest.mark.nightly
def test_a_process_that_worked_for_a_cpu_can_work_for_a_gpu() -> None:
    subprocess.run([sys.executable, "-c", ONE_AFTER_THE_OTHER], check=True)
