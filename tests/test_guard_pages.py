"""No program of a sketch touches memory outside of its arguments: their neighbours are pages that nobody may touch."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

NETWORKS = (
    "conv2d:1,13,13,32,16,3,3,1,1,bias,relu",
    "conv2d:1,17,12,24,16,3,3,2,1,relu",
    "conv2d:1,16,16,64,32,3,3,1,1,groups=4",
    "depthwise_conv2d:1,15,12,48,3,3,2,1,relu",
    "conv3d:1,4,8,8,16,4,3,3,3,1,1",
    "dense:19,32,48,bias",
    "batch_matmul:3,17,16,48",
    "softmax:7,48",
)
"""Arguments of each take a multiple of 64 bytes, as TVM aligns them, so that they end where a page does."""
_NUM_TILES = 6
"""Programs of a task, spread over all that may get a trial."""
_PAGE = mmap.PAGESIZE
_PROT_NONE, _PROT_READ_WRITE = 0, 3
_MAP_PRIVATE_ANONYMOUS = 0x22


class GuardedMemory:
    """Memory between two pages that nobody may touch. To be freed."""

    def __init__(self, num_bytes: int, *, at_end: bool) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        inside = -(-num_bytes // _PAGE) * _PAGE
        self._size = inside + 2 * _PAGE
        self._start = self._libc.mmap(None, self._size, _PROT_NONE, _MAP_PRIVATE_ANONYMOUS, -1, 0)
        first = ctypes.c_void_p(self._start + _PAGE)
        assert self._libc.mprotect(first, ctypes.c_size_t(inside), _PROT_READ_WRITE) == 0
        self.address = self._start + _PAGE + (inside - num_bytes if at_end else 0)

    def array(self, like: np.ndarray) -> np.ndarray:
        """An array there, with the values of another."""
        memory = (ctypes.c_char * like.nbytes).from_address(self.address)
        array = np.frombuffer(memory, like.dtype).reshape(like.shape)
        array[...] = like
        return array

    def free(self) -> None:
        self._libc.munmap(ctypes.c_void_p(self._start), ctypes.c_size_t(self._size))


def run_guarded(library: Any, arrays: list[np.ndarray], *, at_end: bool) -> np.ndarray:
    import tvm

    memories = [GuardedMemory(array.nbytes, at_end=at_end) for array in arrays]
    guarded = [memory.array(array) for memory, array in zip(memories, arrays, strict=True)]
    library["main"](*(tvm.runtime.from_dlpack(array) for array in guarded))
    result = guarded[-1].copy()
    for memory in memories:
        memory.free()
    return result


def check(network: str) -> int:
    """Runs programs of the task that computes; returns how many there were."""
    import tvm
    from test_sketches import conv_task
    from tvm.driver import build
    from tvm.s_tir.meta_schedule.arg_info import ArgInfo

    from ansor_mlflow.codegen import tir_pipeline
    from ansor_mlflow.device import resolve_target
    from ansor_mlflow.sketches import find_programs

    target = resolve_target("auto", 1)
    task = conv_task(network, target)
    programs = find_programs(task.mod, target)
    assert programs is not None
    rng = np.random.default_rng(0)
    shapes = [tuple(int(dim) for dim in info.shape) for info in ArgInfo.from_prim_func(task.mod["main"])]
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    assert all(array.nbytes % 64 == 0 for array in arrays), shapes
    tensors = [tvm.runtime.tensor(array) for array in arrays]
    build(task.mod, target=target)["main"](*tensors)
    expected = tensors[-1].numpy()
    chosen = programs.tiles[:: max(1, len(programs.tiles) // _NUM_TILES)][:_NUM_TILES]
    for tile in chosen:
        program = programs.program(tile)
        assert program is not None
        library = build(program.mod, target=target, pipeline=tir_pipeline(target))
        for at_end in (True, False):
            result = run_guarded(library, arrays, at_end=at_end)
            np.testing.assert_allclose(result, expected, rtol=0, atol=1e-4 * abs(expected).max())
    return len(chosen)


def in_process(*args: str) -> subprocess.CompletedProcess[str]:
    """This file as a program: what touches a guarded page ends its process."""
    return subprocess.run([sys.executable, __file__, *args], capture_output=True, text=True, check=False)


@pytest.mark.system
@pytest.mark.parametrize(
    "networks", [NETWORKS[1:2], pytest.param(NETWORKS, marks=pytest.mark.nightly)], ids=["one", "all"]
)
def test_programs_stay_inside_of_their_arguments(networks: tuple[str, ...]) -> None:
    done = in_process(*networks)
    assert done.returncode == 0, f"{done.returncode}: {done.stdout[-500:]} {done.stderr[-2000:]}"
    assert len(done.stdout.splitlines()) == len(networks)


@pytest.mark.parametrize("offset", [-1, 64])
def test_the_pages_are_guarded(offset: int) -> None:
    assert in_process("touch", str(offset)).returncode == -11


if __name__ == "__main__":
    if sys.argv[1] == "touch":
        offset = int(sys.argv[2])
        memory = GuardedMemory(64, at_end=offset > 0)
        print(ctypes.c_char.from_address(memory.address + offset).value)
    else:
        for name in sys.argv[1:]:
            print(name, check(name), flush=True)
