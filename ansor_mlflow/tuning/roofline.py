"""How fast a kernel can be on this host: the roofline model, with both roofs measured.

A kernel that computes F FLOPs and moves B bytes takes at least max(F / peak, B / bandwidth) seconds; in other words it
reaches at most min(peak, F/B × bandwidth) FLOP/s (Williams, Waterman and Patterson, "Roofline: an insightful visual
performance model for multicore architectures", Communications of the ACM 52(4), 2009).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ansor_mlflow.codegen import DOT_PRODUCTS, MATRIX_TILES, NARROW_REGISTERS, TILE_ROWS, pass_config, tir_pipeline
from ansor_mlflow.device import (
    WEIGHT_BITS,
    Device,
    has_dot_products,
    has_matrix_tiles,
    has_pair_products,
    set_num_threads,
    vector_lanes,
    weight_bits,
)
from ansor_mlflow.errors import MachineError
from ansor_mlflow.processes import WorkerPool, in_child_process
from ansor_mlflow.sketches import Products

if TYPE_CHECKING:
    from tvm.runtime import Module
    from tvm.target import Target

_CACHE_ROOT = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
_DEFAULT_CACHE_BYTES = 32 * 2**20
"""Size of the last-level cache where Linux does not say it."""
_MAX_COPY_BYTES = 512 * 2**20
"""Largest array that is copied: two of them are in memory."""
_NUM_CHAINS = 12
"""Independent chains of multiply-adds. A CPU that starts two in a cycle, each of which takes four or five, needs ten.
More than twelve, and two factors, would not fit the 16 vector registers of AVX2."""
_NUM_STEPS = 200_000
"""Length of a chain, so that the time to start the threads does not count."""
_NUM_PEAK_REPEATS = 2000
"""Measurements of half a millisecond each, so that even on a busy host some are not disturbed."""
_NUM_COPY_REPEATS = 10
_QUICK_PEAK_REPEATS = 400
_QUICK_COPY_BYTES = 128 * 2**20
_QUICK_TIMEOUT_S = 10.0

_PEAK_PROGRAM = """
@T.prim_func(s_tir=True)
def main(
    factors: T.Buffer((2, {lanes}), "float32"),
    chains: T.Buffer(({num_threads}, {num_chains}, {lanes}), "float32"),
):
    T.func_attr({{"global_symbol": "main", "tirx.noalias": True}})
    for thread in T.parallel({num_threads}):
        chain = T.alloc_buffer(({num_chains}, {lanes}), "float32", scope="local")
        for i in T.unroll({num_chains}):
            for lane in T.vectorized({lanes}):
                chain[i, lane] = chains[thread, i, lane]
        for step in T.serial({num_steps}):
            for i in T.unroll({num_chains}):
                for lane in T.vectorized({lanes}):
                    chain[i, lane] = chain[i, lane] * factors[0, lane] + factors[1, lane]
        for i in T.unroll({num_chains}):
            for lane in T.vectorized({lanes}):
                chains[thread, i, lane] = chain[i, lane]
"""
_PACKS_PROGRAM = """
@T.prim_func(s_tir=True)
def main(
    data: T.Buffer(({rows}, 16 * {pack}), "{data}"),
    weights: T.Buffer((16, 2, {lanes}, {pack}), "{weights}"),
    sums: T.Buffer(({num_threads}, {rows}, {lanes} * 2), "{sums}"),
):
    T.func_attr({{"global_symbol": "main", "tirx.noalias": True}})
    for thread in T.parallel({num_threads}):
        partial = T.alloc_buffer(({rows}, {lanes} * 2), "{sums}", scope="local")
        for i, j in T.grid({rows}, {lanes} * 2):
            partial[i, j] = T.Cast("{sums}", 0)
        for step in T.serial({num_steps}{of_steps}):
            for k in T.{packs}(16):
                for i in T.{inner}({rows}):
                    for vector in T.{inner}(2):
                        for lane in T.serial({lanes}{of_lanes}):
                            for each in T.serial({pack}):
                                partial[i, vector * {lanes} + lane] = partial[i, vector * {lanes} + lane] + T.Cast(
                                    "{sums}", data[i, k * {pack} + each]
                                ) * T.Cast("{sums}", weights[k, vector, lane, each])
        for i, j in T.grid({rows}, {lanes} * 2):
            sums[thread, i, j] = partial[i, j]
"""
_COPY_PROGRAM = """
@T.prim_func(s_tir=True)
def main(
    source: T.Buffer(({num_threads}, {num_vectors}, {lanes}), "float32"),
    copy: T.Buffer(({num_threads}, {num_vectors}, {lanes}), "float32"),
):
    T.func_attr({{"global_symbol": "main", "tirx.noalias": True}})
    for thread in T.parallel({num_threads}):
        for i in T.serial({num_vectors}):
            for lane in T.vectorized({lanes}):
                copy[thread, i, lane] = source[thread, i, lane]
"""


@dataclass(frozen=True)
class _Packs:
    """What an instruction multiplies: the types, and how many of them are a pack."""

    data: str
    weights: str
    sums: str
    pack: int
    has_instruction: Callable[[Target], bool]


_BYTES = _Packs("uint8", "int8", "int32", 4, has_dot_products)
_PAIRS = _Packs("bfloat16", "bfloat16", "float32", 2, has_pair_products)


@dataclass(frozen=True, kw_only=True)
class Bound:
    """The least time that a kernel can take."""

    shortest_s: float
    limit: Literal["arithmetic", "memory"]
    """What the kernel would wait for."""


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """The two roofs of a host, for a number of threads."""

    peak_flops_per_s: float
    """Peak of float32 multiply-adds, each of them two FLOPs."""
    bandwidth_bytes_per_s: float
    """Bandwidth of a copy: bytes read plus bytes written."""
    peak_of_bytes_per_s: float | None = None
    """Peak of products of 8 bits that are added up, each of them two operations; None of a CPU that has no instruction
    for them.
    """
    peak_of_bfloat16_per_s: float | None = None
    """That of products of bfloat16."""

    def peak(self, products: Products = "float32") -> float:
        """The peak that a kernel has, of what it adds products of, in operations per second."""
        return {
            "float32": self.peak_flops_per_s,
            "bfloat16": self.peak_of_bfloat16_per_s or self.peak_flops_per_s,
            "int8": self.peak_of_bytes_per_s or self.peak_flops_per_s,
        }[products]

    def peak_text(self, products: Products) -> str:
        """The peak that a kernel has."""
        peak = self.peak(products)
        if peak == self.peak_flops_per_s:
            return f"{peak / 1e9:.1f} GFLOP/s of float32 multiply-adds"
        return f"{peak / 1e9:.0f} Gop/s of products of {products}"

    def bound(self, flops: float, num_bytes: float, products: Products = "float32") -> Bound:
        """The least time of a kernel."""
        arithmetic_s, memory_s = flops / self.peak(products), num_bytes / self.bandwidth_bytes_per_s
        if arithmetic_s > memory_s:
            return Bound(shortest_s=arithmetic_s, limit="arithmetic")
        return Bound(shortest_s=memory_s, limit="memory")


def measure_roofline(device: Device) -> Roofline:
    """Measures peak and bandwidth in a process of its own, on the CPUs on which candidates are measured, too.

    The peak is that of float32 multiply-adds on registers, in independent chains, with the vectors that LLVM uses for
    the target, and that of products of 8 bits with their instruction, or in AMX's tiles; a short burst may run at a
    clock that a longer computation does not hold. The bandwidth is that of copying an array four times as large as the
    last-level cache. Most CPUs read a line of the copy before they write it; these bytes are not counted, so that a
    kernel that mostly reads can move more. The fastest of many repetitions counts: what disturbs only slows down.
    """
    return in_child_process(_measure, (device, _NUM_PEAK_REPEATS, _MAX_COPY_BYTES))


def quick_roofline(device: Device) -> Roofline:
    """Measures as `measure_roofline` does, but in a second or two, in a worker that has loaded TVM already.

    It takes fewer repetitions, and an array of 128 MiB at most, of which a larger cache holds a part.
    """
    with contextlib.closing(WorkerPool(1)) as pool:
        (outcome,) = pool.map(_measure, [(device, _QUICK_PEAK_REPEATS, _QUICK_COPY_BYTES)], _QUICK_TIMEOUT_S)
    if outcome.value is None:
        raise MachineError(f"the roofs of this host were not measured ({outcome.failure}); free CPUs and memory")
    return outcome.value


def last_level_cache_bytes(cache_root: Path = _CACHE_ROOT) -> int:
    """The size of the largest cache of the first CPU."""
    texts = [path.read_text().strip() for path in cache_root.glob("index*/size")]
    sizes = [int(text[:-1]) * _UNITS[text[-1]] for text in texts if text[-1:] in _UNITS]
    return max(sizes, default=_DEFAULT_CACHE_BYTES)


def _measure(work: tuple[Device, int, int]) -> Roofline:
    """Measures both roofs, with so many repetitions of the peak and so large a copy. Runs in the child process."""
    device, num_peak_repeats, max_copy_bytes = work
    os.sched_setaffinity(0, device.cpus)
    set_num_threads(device.num_threads)
    return Roofline(
        peak_flops_per_s=_peak_flops_per_s(device.target, device.num_threads, num_peak_repeats),
        bandwidth_bytes_per_s=_bandwidth_bytes_per_s(device.target, device.num_threads, max_copy_bytes),
        peak_of_bytes_per_s=_peak_of_packs_per_s(_BYTES, device, num_peak_repeats),
        peak_of_bfloat16_per_s=_peak_of_packs_per_s(_PAIRS, device, num_peak_repeats),
    )


def _peak_flops_per_s(target: Target, num_threads: int, num_repeats: int) -> float:
    import numpy as np
    import tvm

    lanes = vector_lanes(target)
    sizes = {"lanes": lanes, "num_threads": num_threads, "num_chains": _NUM_CHAINS, "num_steps": _NUM_STEPS}
    # x ← x/2 + 1 tends to 2: neither infinity nor denormals, with which some CPUs take longer
    factors = tvm.runtime.tensor(np.repeat(np.array([[0.5], [1.0]], np.float32), lanes, axis=1))
    chains = tvm.runtime.tensor(np.ones((num_threads, _NUM_CHAINS, lanes), np.float32))
    flops = 2.0 * num_threads * _NUM_CHAINS * lanes * _NUM_STEPS
    library = tvm.compile(tvm.script.from_source(_PEAK_PROGRAM.format(**sizes)), target).jit()
    return flops / _fastest_s(library, num_repeats, factors, chains)


def _peak_of_packs_per_s(kind: _Packs, device: Device, num_repeats: int) -> float | None:
    """The peak of products of packs, by tiles or dot products; None of a CPU that has neither."""
    import ml_dtypes  # noqa: F401  NumPy knows bfloat16 by it
    import numpy as np
    import tvm

    target, num_threads = device.target, device.num_threads
    has_tiles, lanes = has_matrix_tiles(target), vector_lanes(target)
    if not has_tiles and not kind.has_instruction(target):
        return None
    num_rows = _NUM_CHAINS * lanes // 16
    if kind is _BYTES and weight_bits(target) < WEIGHT_BITS:
        num_rows -= NARROW_REGISTERS
    annotation = f', annotations={{"{MATRIX_TILES if has_tiles else DOT_PRODUCTS}": 1}}'
    sizes: dict[str, Any] = {
        **asdict(kind),
        "rows": 2 * TILE_ROWS if has_tiles else num_rows,
        "lanes": lanes,
        "num_threads": num_threads,
        "num_steps": _NUM_STEPS // 16,
        "of_steps": annotation if has_tiles else "",
        "of_lanes": "" if has_tiles else annotation,
        "packs": "serial",
        "inner": "serial" if has_tiles else "unroll",
    }
    program = tvm.script.from_source(_PACKS_PROGRAM.format(**sizes))
    with tvm.transform.PassContext(config=pass_config(target)):
        library = tvm.compile(program, target, tir_pipeline=tir_pipeline(target)).jit()
    shapes = (
        ((sizes["rows"], 16 * kind.pack), kind.data),
        ((16, 2, lanes, kind.pack), kind.weights),
        ((num_threads, sizes["rows"], 2 * lanes), kind.sums),
    )
    arguments = [tvm.runtime.tensor(np.ones(shape, dtype)) for shape, dtype in shapes]
    operations: float = 2.0 * num_threads * sizes["num_steps"] * 16 * kind.pack * sizes["rows"] * 2 * lanes
    return operations / _fastest_s(library, num_repeats // 4, *arguments)


def _bandwidth_bytes_per_s(target: Target, num_threads: int, max_copy_bytes: int) -> float:
    import tvm

    lanes = vector_lanes(target)
    num_bytes = min(4 * last_level_cache_bytes(), max_copy_bytes)
    num_vectors = num_bytes // (4 * lanes * num_threads)
    program = _COPY_PROGRAM.format(lanes=lanes, num_threads=num_threads, num_vectors=num_vectors)
    library = tvm.compile(tvm.script.from_source(program), target).jit()
    source, copy = (tvm.runtime.empty((num_threads, num_vectors, lanes), "float32") for _ in range(2))
    # memory that nobody wrote to is a single page of zeros, which a cache holds: this gives `source` pages of its own
    library["main"](copy, source)
    return 2.0 * 4 * lanes * num_vectors * num_threads / _fastest_s(library, _NUM_COPY_REPEATS, source, copy)


def _fastest_s(library: Module, num_repeats: int, *arguments: Any) -> float:
    """Seconds of the fastest call of "main", without the first."""
    import tvm

    timer = library.time_evaluator("main", tvm.cpu(0), number=1, repeat=num_repeats)
    return float(min(timer(*arguments).results))
