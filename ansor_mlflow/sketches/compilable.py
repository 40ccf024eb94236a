"""Whether LLVM's code generator knows what is in functions: the operations of each type that were not tried before."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ansor_mlflow.codegen import pass_config, tir_pipeline
from ansor_mlflow.errors import first_line
from ansor_mlflow.sketches.choice import find_programs

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.target import Target

_Operation = tuple[str, ...]
"""A kind of expression, its operator, and the types of its result and operands."""

_OPERATOR = re.compile(r"ir\.Op\(.*?name=\"([^\"]*)\".*\)")
"""How TVM writes an operator in its messages; of all that only the name says something."""

_known: dict[str, set[_Operation]] = {}
"""Operations for which code was generated, by target. A network of convolutions has some twenty."""


def why_not_compilable(mod: IRModule, target: Target) -> str:
    """Says in a few words why LLVM can make no code of unscheduled functions for a CPU; nothing, if it can.

    A function is compiled as it would be without a trial, for vectors are another matter than single elements, and only
    if it has an operation that was in none before.
    """
    from tvm.tirx import PrimFunc

    known = _known.setdefault(str(target), set())
    for _, function in mod.functions_items():
        if not isinstance(function, PrimFunc) or not (new := _operations(function) - known):
            continue
        try:
            _compile(function.with_attr("global_symbol", "main"), target)
        except Exception as err:  # noqa: BLE001 - code generation raises errors of every kind
            return _OPERATOR.sub(r"\1", first_line(err))
        known |= new
    return ""


def _operations(function: Any) -> set[_Operation]:
    from tvm.ir import Expr
    from tvm_ffi import structural_walk

    found: set[_Operation] = set()

    def note(expr: Any) -> None:
        operands = [getattr(expr, name, None) for name in ("a", "b", "value")]
        operands += list(getattr(expr, "args", ()))
        types = (str(getattr(getattr(each, "ty", None), "dtype", "")) for each in (expr, *operands))
        found.add((type(expr).__name__, getattr(getattr(expr, "op", None), "name", ""), *types))

    structural_walk(function.body, (Expr, note))
    return found


def _compile(function: Any, target: Target) -> None:
    import tvm

    mod = tvm.IRModule({"main": function})
    programs = find_programs(mod, target)
    program = programs and programs.first()
    quick = tvm.target.Target({**target.export(), "opt-level": 0})
    with tvm.transform.PassContext(config=pass_config(target)):
        tvm.tirx.build(program.mod if program else mod, target=quick, pipeline=tir_pipeline(target))
