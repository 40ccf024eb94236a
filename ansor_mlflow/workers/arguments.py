"""The arguments that candidate programs are timed on."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np

from ansor_mlflow.device import NewMemory

if TYPE_CHECKING:
    from tvm.ir import IRModule

ArgInfo = tuple[str, str, tuple[int, ...]]
"""How TVM describes an argument: ("TENSOR", dtype, shape)."""

_filled: dict[tuple[int, str, int], Any] = {}
"""The last task's tensors, in one dimension, by position, dtype and number of elements; all on one device."""


def arg_info(info: Any) -> ArgInfo:
    """Reads MetaSchedule's description of an argument."""
    kind, dtype, shape = info.as_json()
    return str(kind), str(dtype), tuple(int(extent) for extent in shape)


def num_bytes(args_info: tuple[ArgInfo, ...]) -> int:
    """Size of all arguments."""
    return sum(math.prod(shape) * np.dtype(dtype).itemsize for _, dtype, shape in args_info)


def argument_bytes(mod: IRModule, besides: Collection[int] = ()) -> int:
    """Size of the arguments of a task's function, but for those at some positions."""
    from tvm.s_tir.meta_schedule.arg_info import ArgInfo as TvmArgInfo

    found = enumerate(TvmArgInfo.from_entry_func(mod, remove_preproc=True))
    return num_bytes(tuple(arg_info(info) for position, info in found if position not in besides))


def random_arguments(args_info: tuple[ArgInfo, ...], device: Any = None) -> list[Any]:
    """Tensors of random numbers: zeros would let denormals and branches distort the time.

    Programs of one task differ in the layout of their weights but not in the number of elements, so that they share
    the numbers, which take longer to make than a fast program to measure. Indices, which ONNX has in 32 and 64 bits,
    are zero: TVM fills integers with any bits, and kernels do not check the indices that they read with. The device, by
    default the CPU, is the same in all calls of a process.
    """
    keys = [(position, dtype, math.prod(shape)) for position, (_, dtype, shape) in enumerate(args_info)]
    if _filled.keys() != set(keys):
        _filled.clear()  # before the new ones take memory
        memory = NewMemory()
        _filled.update({key: _fill(*key[1:], device) for key in keys})
        memory.collapse()  # as in a model that is loaded
    return [_filled[key]._create_view(shape, dtype) for key, (_, dtype, shape) in zip(keys, args_info, strict=True)]


def _fill(dtype: str, num_elements: int, device: Any) -> Any:
    import tvm

    device = device or tvm.cpu(0)
    if dtype in ("int32", "int64"):
        return tvm.runtime.tensor(np.zeros(num_elements, dtype), device)
    filled = tvm.runtime.empty((num_elements,), dtype, device)
    tvm.get_global_func("tvm.contrib.random.random_fill_for_measure")(filled)
    return filled
