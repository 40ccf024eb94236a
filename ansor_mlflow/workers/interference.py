"""What the rest of a network does to the CPU's caches between two calls of a kernel."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ansor_mlflow.device import NewMemory

_MAX_BYTES = 64 * 2**20
"""Memory that passes through the caches, at most: more than what a few cores have of the last one."""
_MAX_S = 0.01
"""Time that passes, at most: a tuning would take too long."""
_LANES = 16
_SIGNS = -(2**31)
_READ_PROGRAM = """
@T.prim_func(s_tir=True)
def main(
    rest: T.Buffer(({num_threads}, {num_vectors}, {lanes}), "int32"),
    sums: T.Buffer(({num_threads}, {lanes}), "int32"),
):
    T.func_attr({{"global_symbol": "main", "tirx.noalias": True}})
    for thread in T.parallel({num_threads}):
        for i in T.serial({num_vectors}):
            for lane in T.vectorized({lanes}):
                sums[thread, lane] = sums[thread, lane] + rest[thread, i, lane]
"""
_WRITE_PROGRAM = """
@T.prim_func(s_tir=True)
def main(data: T.handle):
    T.func_attr({{"global_symbol": "main", "tirx.noalias": True}})
    num_vectors = T.int64()
    signs = T.match_buffer(data, ({num_threads}, num_vectors, {lanes}), "int32")
    for thread in T.parallel({num_threads}):
        for i in T.serial(num_vectors):
            for lane in T.vectorized({lanes}):
                signs[thread, i, lane] = T.bitwise_xor(signs[thread, i, lane], T.int32({signs}))
"""


@dataclass(frozen=True, kw_only=True)
class RestOfNetwork:
    """What lies between two calls of a kernel, in a network."""

    num_bytes: int
    """Size of the constants and activations."""
    seconds: float
    """How long the network takes, about. Whoever else uses the last cache has that time to fill it."""

    @property
    def passing_bytes(self) -> int:
        return min(self.num_bytes, _MAX_BYTES)

    @property
    def passing_s(self) -> float:
        return min(self.seconds, _MAX_S)


class CacheInterference:
    """The other kernels of a network, as a kernel sees them.

    They take their time, and read their weights, so that those of the kernel are as cold as the network leaves them.
    The last of them wrote its input on the same threads, each a part, and not long ago what was in the memory of its
    output.
    """

    def __init__(self, rest: RestOfNetwork, num_threads: int) -> None:
        import numpy as np
        import tvm

        self._passing_s = rest.passing_s
        self._num_threads = num_threads
        sizes = {"num_threads": num_threads, "lanes": _LANES}
        num_vectors = rest.passing_bytes // (4 * _LANES * num_threads)
        self._write = _compile(_WRITE_PROGRAM.format(**sizes, signs=_SIGNS))
        memory = NewMemory()
        self._rest = tvm.runtime.tensor(np.ones((num_threads, num_vectors, _LANES), np.int32)) if num_vectors else None
        memory.collapse()  # as the weights of a model that is loaded
        self._sums = tvm.runtime.tensor(np.zeros((num_threads, _LANES), np.int32))
        self._read = _compile(_READ_PROGRAM.format(**sizes, num_vectors=max(1, num_vectors)))

    @property
    def num_read(self) -> int:
        """Elements of the rest, of 4 bytes each, that were read until now."""
        return int(self._sums.numpy().sum(dtype="int64"))

    def memory_of(self, tensors: Sequence[Any]) -> list[Any]:
        """The memory of those tensors that hold floats, as integers of 32 bits whose signs `run` turns."""
        views = []
        for tensor in tensors:
            num_bytes = tensor.dtype.bits // 8 * math.prod(int(extent) for extent in tensor.shape)
            num_vectors = num_bytes // (4 * _LANES * self._num_threads)
            if "float" in str(tensor.dtype) and num_vectors:
                views.append(tensor._create_view((self._num_threads, num_vectors, _LANES), "int32"))
        return views

    def run(self, activations: Sequence[Any]) -> None:
        """Lets the rest of the network pass by."""
        until = time.perf_counter() + self._passing_s
        while time.perf_counter() < until:
            pass  # a CPU that sleeps would be given to others
        if self._rest is not None:
            self._read(self._rest, self._sums)  # last, so that all threads are awake
        for memory in reversed(activations):  # the output's before the input's
            self._write(memory)


def _compile(program: str) -> Any:
    import tvm

    return tvm.compile(tvm.script.from_source(program), tvm.target.Target("llvm")).jit()["main"]
