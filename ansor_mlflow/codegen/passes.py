"""The passes that turn scheduled loops into what LLVM compiles: TVM's own, and three of ours.

One of them keeps NaN, see `nans`, and one fetches weights ahead, see `prefetch`. The third keeps sums in registers.

TVM takes memory for every buffer of scope "local" from a pool while the kernel runs, through a call in the middle of
the loops (`lower_tvm_builtin.cc`). LLVM cannot see then that nothing else knows the buffer: it keeps the sums of a tile
in registers, but it also writes them to that memory, and clears it by calls of `memset` before the next tile. As an
array of the function's own, the buffer is gone.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from ansor_mlflow.codegen.nans import with_nans_kept
from ansor_mlflow.codegen.prefetch import with_prefetches
from ansor_mlflow.device import is_cpu

if TYPE_CHECKING:
    from tvm.ir.transform import Pass
    from tvm.target import Target

_NAME, _NAME_FOR_GPU = "ansor_mlflow", "ansor_mlflow.gpu"
_MAX_STACK_BYTES = 8192
"""Size of a buffer that becomes an array of the function: twice the sums that the largest register files hold."""
_IS_ARRAY = "disable_lower_builtin"
"""TVM's annotation (`transform.h`) of a buffer that code generation is to make an array of."""


def pass_config(target: Target) -> dict[str, bool]:
    """The `config` of the `PassContext` in which code for `target` is generated.

    For CPUs, functions such as exp become vector arithmetic; see `codegen.functions`. Other devices have instructions
    for them. A candidate has to be measured as it will be compiled, so that both take this.
    """
    if not is_cpu(target):
        return {}
    from ansor_mlflow.codegen.functions import RULES_FOR

    return {RULES_FOR: True}


def tir_pipeline(target: Target) -> str:
    """The `pipeline` of TVM's `build`, and `tir_pipeline` of its `compile`, with which code for `target` is generated.

    A candidate has to be measured as it will be compiled, so that both take this, as `pass_config`.
    """
    from tvm.tirx.compilation_pipeline import PIPELINE_MAP, register_tir_pipeline

    is_for_cpu = is_cpu(target)
    name = _NAME if is_for_cpu else _NAME_FOR_GPU
    if name not in PIPELINE_MAP:
        register_tir_pipeline(name, functools.partial(_make, is_for_cpu=is_for_cpu))
    return name


def _make(*, is_for_cpu: bool) -> tuple[Pass, Any, Any]:
    """TVM's default passes, and the makers of those that follow for host and device; kernels are in one of these."""
    from tvm.ir.transform import Sequential
    from tvm.s_tir.pipeline import default_s_tir_pipeline
    from tvm.tirx.transform import prim_func_pass

    passes, of_host, of_device = default_s_tir_pipeline()
    nans = prim_func_pass(with_nans_kept, opt_level=0, name="ansor.nans")
    if not is_for_cpu:
        return passes, of_host, lambda: Sequential([nans, of_device()])
    arrays = prim_func_pass(_with_arrays, opt_level=0, name="ansor.local_arrays")
    fetches = prim_func_pass(with_prefetches, opt_level=0, name="ansor.prefetch")
    return passes, lambda: Sequential([arrays, fetches, nans, of_host()]), of_device


def _with_arrays(func: Any, _mod: Any, _context: Any) -> Any:
    """A lowered function whose small local buffers are arrays of its own."""
    from tvm.tirx import AllocBuffer
    from tvm_ffi import structural_mutate

    return func.with_body(structural_mutate(func.body, (AllocBuffer, _as_array)))


def _as_array(alloc: Any, _mutator: Any) -> Any:
    import tvm
    from tvm import tirx

    buffer = alloc.buffer
    num_bits = tvm.DataType(str(buffer.dtype)).bits
    for extent in buffer.shape:
        if not isinstance(extent, tirx.IntImm):
            return alloc
        num_bits *= int(extent)
    if buffer.scope() != "local" or num_bits > 8 * _MAX_STACK_BYTES:
        return alloc
    return tirx.AllocBuffer(buffer, {**dict(alloc.annotations), _IS_ARRAY: tirx.IntImm("int32", 1)})
