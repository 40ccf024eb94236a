"""Times one built program, in the process that calls: a worker of this host, or a session of an RPC server."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from ansor_mlflow.device import CPU, NewMemory, Platform, set_num_threads
from ansor_mlflow.errors import first_line
from ansor_mlflow.measuring import watched

if TYPE_CHECKING:
    import tvm
    from tvm.ir import IRModule

ArgInfo = tuple[str, str, tuple[int, ...]]
"""How TVM describes an argument: ("TENSOR", dtype, shape)."""

_filled: dict[tuple[int, str, int], Any] = {}
"""The last task's tensors, in one dimension, by position, dtype and number of elements; all on one device."""

_TOO_SLOW = 5.0
"""A program that many times slower than the best of its task needs no exact time."""
_CLOSE = 1.5
"""A program that many times slower than the best is measured for `min_repeat_ms`; beyond, for less in proportion."""
_WORTH_CUTTING_S = 1e-3
"""A call that is shorter is always measured in full: Python's own time is a part of it."""
_SAFETY = 1.1
"""Calls beyond those that just reach `min_repeat_ms`, because a measurement that falls short starts again."""
_SETUP_S = 3.0
"""Time to load a library, on a busy machine."""
_BROKEN_EXIT = 102
"""Exit code of a worker whose GPU does nothing more for it."""
_FILL_S_PER_BYTE = 2e-8
"""Time to fill arguments with random numbers: 7e-9 measured for 16-bit floats, less for others."""
_MAX_BYTES = 64 * 2**20
"""Memory that passes through the caches between two calls, at most: more than what a few cores have of the last one."""
_MAX_S = 0.01
"""Time that passes between two calls, at most: a tuning would take too long."""
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


@dataclass(frozen=True, kw_only=True)
class MeasureSettings:
    """How a candidate is timed; see the parameters of the same names."""

    number: int
    repeat: int
    min_repeat_ms: int
    cache_flush: bool
    num_threads: int
    timeout_s: float
    rest: RestOfNetwork | None = None
    """What passes between two calls of a kernel; None calls it again at once."""
    platform: Platform = CPU
    """The kind of device that runs it."""


@dataclass(frozen=True)
class RunJob:
    """A library whose function "main" is to be timed on random arguments."""

    path: Path
    args_info: tuple[ArgInfo, ...]
    task: str = ""
    """Name of the task; programs of one task compute the same."""
    constants: tuple[int, ...] = ()
    """Numbers of the arguments that are constants of the network."""
    best_s: float | None = None
    """Seconds per call of the task's best program before this round; a far slower one is not measured in full."""


def timeout_s_of(job: RunJob, settings: MeasureSettings) -> float:
    """Time for one program: two calls at `_TOO_SLOW` times the best, or a full measurement of one that is faster."""
    if job.best_s is None:
        return settings.timeout_s
    passing_bytes, passing_s = (settings.rest.passing_bytes, settings.rest.passing_s) if settings.rest else (0, 0.0)
    setup_s = _SETUP_S + settings.platform.setup_s + _FILL_S_PER_BYTE * (num_bytes(job.args_info) + passing_bytes)
    slowest_s = _TOO_SLOW * job.best_s + passing_s
    full_s = (2 + settings.repeat) * (settings.number * slowest_s + 2 * settings.min_repeat_ms / 1e3)
    return min(settings.timeout_s, setup_s + full_s)


def measure_program(work: tuple[RunJob, MeasureSettings]) -> tuple[tuple[float, ...], float]:
    """Times one library: seconds per call, and the share of the time that the worker waited for a CPU."""
    import tvm

    job, settings = work
    used = set_num_threads(settings.num_threads)
    if used != settings.num_threads:
        raise RuntimeError(f"TVM runs on {used} threads in the measuring process, not on {settings.num_threads}")
    library = tvm.runtime.load_module(str(job.path))
    device = tvm.device(settings.platform.name)
    around = None if settings.rest is None else _interference(settings.rest, settings.num_threads)
    with _ends_with(device):
        arguments = random_arguments(job.args_info, device)
        with watched() as waiting:
            if around is None:
                run_s = _time_alone(library, arguments, job, settings, device)
            else:
                run_s = _time_in_network(library, arguments, job, settings, around)
    return run_s, waiting.share


@contextmanager
def _ends_with(device: Any) -> Iterator[None]:
    """Ends the process where a program leaves the GPU unusable for it, as one does that writes to a wrong address."""
    try:
        yield
    except Exception as failure:
        if device.type != "cpu":
            try:
                device.sync()
            except Exception:  # noqa: BLE001 - whatever it says, all programs after this one would fail, too
                print(f"the GPU does nothing more for a worker: {first_line(failure)}", file=sys.stderr, flush=True)
                os._exit(_BROKEN_EXIT)
        raise


def _time_in_network(
    library: tvm.runtime.Module,
    arguments: Sequence[Any],
    job: RunJob,
    settings: MeasureSettings,
    interference: CacheInterference,
) -> tuple[float, ...]:
    """Times single calls, between which the rest of the network passes by. Python adds half a microsecond to each."""
    activations = interference.memory_of([a for place, a in enumerate(arguments) if place not in job.constants])
    function = library["main"]

    def call_s() -> float:
        interference.run(activations)
        started = time.perf_counter()
        function(*arguments)
        return time.perf_counter() - started

    first_s, started, samples = call_s(), time.perf_counter(), [call_s()]
    fastest_s = min(first_s, *samples)
    if _is_too_slow(fastest_s, job.best_s):
        return (fastest_s,)
    run_s = []
    for _ in range(settings.repeat):
        until = started + _shortest_ms(settings.min_repeat_ms, fastest_s, job.best_s) / 1e3
        while len(samples) < settings.number or time.perf_counter() < until:
            samples.append(call_s())
        run_s.append(median(samples))  # what disturbs one of them does not count
        started, samples = time.perf_counter(), []
    return tuple(run_s)


def _time_alone(
    library: tvm.runtime.Module, arguments: Sequence[Any], job: RunJob, settings: MeasureSettings, device: Any
) -> tuple[float, ...]:
    """Times calls one after the other, all on the same arguments."""
    call_s = _call_s(library["main"], arguments, device)
    if _is_too_slow(call_s, job.best_s):
        return (call_s,)
    shortest_ms = _shortest_ms(settings.min_repeat_ms, call_s, job.best_s)
    # TVM calls three times and guesses from these cold calls how many are enough; it often starts again
    enough = math.ceil(_SAFETY * shortest_ms / 1e3 / call_s)
    timer = library.time_evaluator(
        "main",
        device,
        number=max(settings.number, enough),
        repeat=settings.repeat,
        min_repeat_ms=shortest_ms,
        f_preproc="cache_flush_cpu_non_first_arg" if settings.cache_flush else "",
    )
    return tuple(float(seconds) for seconds in timer(*arguments).results)


def _is_too_slow(call_s: float, best_s: float | None) -> bool:
    return best_s is not None and call_s > max(_TOO_SLOW * best_s, _WORTH_CUTTING_S)


def _shortest_ms(min_repeat_ms: int, call_s: float, best_s: float | None) -> int:
    """The shortest time for one measurement: the slower a program is than the best, the less its exact time matters."""
    if best_s is None:
        return min_repeat_ms
    return round(min_repeat_ms * min(1.0, _CLOSE * best_s / call_s))


def _call_s(function: Callable[..., object], arguments: Sequence[object], device: Any) -> float:
    """Seconds of the faster of two calls; the first one also pays for cold caches and for starting the threads."""
    seconds = []
    for _ in range(2):
        started = time.perf_counter()
        function(*arguments)
        device.sync()  # a GPU may only have begun
        seconds.append(time.perf_counter() - started)
    return min(seconds)


# -- arguments ---------------------------------------------------------------------------------------------------------


def arg_info(info: Any) -> ArgInfo:
    """MetaSchedule's description of an argument as plain values."""
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
    import tvm

    keys = [(position, dtype, math.prod(shape)) for position, (_, dtype, shape) in enumerate(args_info)]
    if _filled.keys() != set(keys):
        _filled.clear()  # before the new ones take memory
        memory = NewMemory()
        place = device or tvm.cpu(0)
        _filled.update({key: random_tensor(key[1], (key[2],), place, tvm.get_global_func) for key in keys})
        memory.collapse()  # as in a model that is loaded
    return [_filled[key]._create_view(shape, dtype) for key, (_, dtype, shape) in zip(keys, args_info, strict=True)]


def random_tensor(dtype: str, shape: tuple[int, ...], device: Any, function: Callable[[str], Any]) -> Any:
    """A tensor on a device, filled there by a function that `function` finds."""
    import tvm

    if dtype in ("int32", "int64"):
        return tvm.runtime.tensor(np.zeros(shape, dtype), device)
    tensor = tvm.runtime.empty(shape, dtype, device)
    function("tvm.contrib.random.random_fill_for_measure")(tensor)
    return tensor


# -- the rest of the network -------------------------------------------------------------------------------------------


class CacheInterference:
    """The other kernels of a network, as a kernel sees them.

    They take their time, and read their weights, so that those of the kernel are as cold as the network leaves them.
    The last of them wrote its input on the same threads, each a part, and not long ago what was in the memory of its
    output.
    """

    def __init__(self, rest: RestOfNetwork, num_threads: int) -> None:
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


_interference = cache(CacheInterference)  # a worker measures for one network


def _compile(program: str) -> Any:
    import tvm

    return tvm.compile(tvm.script.from_source(program), tvm.target.Target("llvm")).jit()["main"]
