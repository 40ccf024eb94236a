"""Weights are fetched while the ones before them are multiplied.

A program of a sketch reads packed weights panel after panel: all sums of some output channels, once for each tile of
the image. The first tile waits for memory, the others find the panel in a cache. A loop over sums that says how many
tiles there are (`PREFETCH`) gets instructions that fetch the next panel, a share of it with each tile, so that memory
is read all the time. To fetch what is beyond the last panel has no effect.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ansor_mlflow.codegen.nans import with_nans_kept
from ansor_mlflow.device import platform_of

if TYPE_CHECKING:
    from tvm.ir.transform import Pass
    from tvm.target import Target

PREFETCH = "ansor_mlflow.prefetch"
"""Annotation of a loop over sums: how often it runs for each panel of weights."""
_LINE_BYTES = 64
_MAX_FETCHES = 8
"""Lines that are fetched in an iteration."""
_KEPT = 3
"""LLVM's number for a `prefetch` into all caches."""


def with_prefetches(func: Any, _mod: Any, _context: Any) -> Any:
    """A lowered function whose annotated loops fetch the next panel."""
    return func.with_body(_Fetcher(func.body).mutate(func.body))


class _Fetcher:
    def __init__(self, body: Any) -> None:
        from tvm.tirx import Bind
        from tvm_ffi import structural_walk

        self._values: dict[Any, Any] = {}
        """Values that variables stand for."""
        self._around: Any = None
        """The next loop around."""
        self._num_loops = 0
        """Annotated loops before this one."""

        def note(node: Any) -> None:
            if isinstance(node, Bind):
                self._values[node.var] = node.value

        structural_walk(body, note)

    def mutate(self, body: Any) -> Any:
        from tvm.tirx import For
        from tvm_ffi import structural_mutate

        return structural_mutate(body, (For, self._visit))

    def _visit(self, loop: Any, mutator: Any) -> Any:
        if PREFETCH in loop.annotations:
            return self._with_fetches(loop, int(loop.annotations[PREFETCH]))
        outer, self._around = self._around, loop
        loop = mutator.default_mutate(loop)
        self._around = outer
        return loop

    def _with_fetches(self, loop: Any, num_passes: int) -> Any:
        from tvm import DataType, tirx

        found = self._vectors(loop)
        number, self._num_loops = self._num_loops, self._num_loops + 1
        if found is None:
            return loop
        buffer, start, stride = found
        of_pass = self._around.loop_var if self._is_pass(start, num_passes) else number % num_passes
        num_sums, step = int(loop.extent), -(-stride // num_passes)
        place = start + num_sums * stride + (of_pass * num_sums + loop.loop_var) * step
        line = 8 * _LINE_BYTES // DataType(str(buffer.dtype)).bits
        fetches = [_fetch(buffer, place + offset) for offset in range(0, min(step, _MAX_FETCHES * line), line)]
        body = tirx.SeqStmt([loop.body, *fetches])
        return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, body, None, loop.annotations)

    def _vectors(self, loop: Any) -> tuple[Any, Any, int] | None:
        """What a loop reads vector after vector: the buffer, the first element, and the elements of an iteration."""
        from tvm.ir import TensorLoad
        from tvm.sym import detect_linear_equation
        from tvm.tirx import For, Ramp
        from tvm_ffi import structural_walk

        inside = []
        structural_walk(loop.body, lambda node: inside.append(node.loop_var) if isinstance(node, For) else None)
        found = []

        def note(node: Any) -> None:
            if isinstance(node, TensorLoad) and isinstance(node.indices[0], Ramp):
                terms = detect_linear_equation(self._expanded(node.indices[0].base), [loop.loop_var])
                if len(terms) and int(terms[0]) > 0 and not _uses(terms[1], inside):
                    found.append((node.source, terms[1], int(terms[0])))

        structural_walk(loop.body, note)
        return found[0] if found else None

    def _expanded(self, index: Any) -> Any:
        """An index without the variables that TVM has put for common terms."""
        from tvm.tirx import Var
        from tvm_ffi import structural_mutate

        def value_of(var: Any, _mutator: Any) -> Any:
            return self._expanded(self._values[var]) if var in self._values else var

        return structural_mutate(index, (Var, value_of))

    def _is_pass(self, start: Any, num_passes: int) -> bool:
        """Whether the loop around goes over the tiles for which a panel is read; else they are written out."""
        around = self._around
        return around is not None and int(around.extent) == num_passes and not _uses(start, [around.loop_var])


def _uses(index: Any, variables: Sequence[Any]) -> bool:
    from tvm.tirx.analysis import undefined_vars

    return any(var.same_as(other) for var in undefined_vars(index) for other in variables)


def _fetch(buffer: Any, place: Any) -> Any:
    from tvm import tirx

    address = tirx.address_of(tirx.BufferLoad(buffer, [place]))
    arguments = (tirx.const(value, "int32") for value in (0, _KEPT, 1))  # to read, how long, and data
    return tirx.Evaluate(tirx.call_intrin("void", "tirx.prefetch", address, *arguments))


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
    if not platform_of(target).by_llvm:
        return {}
    from ansor_mlflow.codegen.functions import RULES_FOR

    return {RULES_FOR: True}


def tir_pipeline(target: Target) -> str:
    """The `pipeline` of TVM's `build`, and `tir_pipeline` of its `compile`, with which code for `target` is generated.

    A candidate has to be measured as it will be compiled, so that both take this, as `pass_config`.
    """
    from tvm.tirx.compilation_pipeline import PIPELINE_MAP, register_tir_pipeline

    by_llvm = platform_of(target).by_llvm
    name = _NAME if by_llvm else _NAME_FOR_GPU
    if name not in PIPELINE_MAP:
        register_tir_pipeline(name, functools.partial(_make, by_llvm=by_llvm))
    return name


def _make(*, by_llvm: bool) -> tuple[Pass, Any, Any]:
    """TVM's default passes, and the makers of those that follow for host and device; kernels are in one of these."""
    from tvm.ir.transform import Sequential
    from tvm.s_tir.pipeline import default_s_tir_pipeline
    from tvm.tirx.transform import prim_func_pass

    passes, of_host, of_device = default_s_tir_pipeline()
    nans = prim_func_pass(with_nans_kept, opt_level=0, name="ansor.nans")
    if not by_llvm:
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
