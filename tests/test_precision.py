"""Networks computed in 16-bit floats: close to what they compute in 32."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, get_args

import numpy as np
import pytest

from ansor_mlflow.device.cpu import has_arithmetic
from ansor_mlflow.device.targets import resolve_target
from ansor_mlflow.lowering.lower import lower
from ansor_mlflow.measuring.checking import TOLERANCES, compare_outputs
from ansor_mlflow.measuring.compare import ReferenceSession
from ansor_mlflow.model.library import compile_untuned
from ansor_mlflow.networks.load import Network
from ansor_mlflow.settings import Dtype, LoweringSettings
from ansor_mlflow.tensors import random_inputs

if TYPE_CHECKING:
    from tvm.target import Target


@pytest.mark.parametrize("dtype", get_args(Dtype))
def test_outputs_equal_the_references(
    small_network: Network, small_onnx: Path, host_target: Target, tmp_path: Path, dtype: Dtype
) -> None:
    from tvm import cpu, relax, runtime

    lowered = lower(small_network.model, host_target, LoweringSettings(dtype=dtype))
    compile_untuned(lowered, host_target, tmp_path / "model.so")
    (values,) = random_inputs(small_network.inputs, seed=0).values()
    machine = relax.VirtualMachine(runtime.load_module(str(tmp_path / "model.so")), cpu())
    logits = machine["main"](runtime.tensor(values)).numpy()
    assert logits.dtype == np.float32
    error = compare_outputs({"logits": logits}, ReferenceSession(small_onnx, 1).run({"data": values})).max_rel_error
    assert error <= TOLERANCES[dtype]
    assert (error > TOLERANCES["float32"]) == (dtype != "float32")


def test_convolutions_take_16_bits_and_add_up_in_32(small_network: Network, host_target: Target) -> None:
    from tvm.s_tir.meta_schedule.arg_info import ArgInfo

    for dtype in ("float16", "bfloat16"):
        (conv,) = (
            task
            for task in lower(small_network.model, host_target, LoweringSettings(dtype=dtype)).tasks
            if "conv2d" in task.info.name
        )
        data, weight, *_ = ArgInfo.from_entry_func(conv.mod, remove_preproc=True)
        assert {str(data.dtype), str(weight.dtype)} == {dtype}
        assert 'T.Cast("float32"' in conv.mod.script()


@pytest.mark.parametrize(
    ("spec", "dtype", "expected"),
    [
        ("llvm -mcpu=sapphirerapids", "float16", True),
        ("llvm -mcpu=sapphirerapids", "bfloat16", True),
        ("llvm -mcpu=haswell", "float16", False),
        ("llvm -mcpu=haswell", "bfloat16", False),
        ("llvm -mcpu=haswell", "float32", True),
        ("cuda -arch=sm_90", "bfloat16", True),
    ],
)
def test_which_targets_have_instructions_for_16_bits(spec: str, dtype: str, expected: bool) -> None:
    assert has_arithmetic(resolve_target(spec, 1), dtype) is expected
