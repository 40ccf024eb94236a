"""The sketches by name, and the programs of a task; for GPUs those of DLight."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Protocol

from ansor_mlflow.codegen import pass_config, tir_pipeline
from ansor_mlflow.device import platform_of
from ansor_mlflow.errors import first_line
from ansor_mlflow.plugins import PluginTable
from ansor_mlflow.sketches.contraction import has_sums, is_made_of_blocks
from ansor_mlflow.sketches.estimate import Machine
from ansor_mlflow.sketches.register_tile import DotTiling, IntegerTiling, MatrixTiling, PairTiling, RegisterTiling
from ansor_mlflow.sketches.rows import RowTile, RowTiling
from ansor_mlflow.sketches.tile import RegisterTile
from ansor_mlflow.sketches.winograd import WinogradTile, WinogradTiling

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.s_tir import Schedule
    from tvm.s_tir.dlight import ScheduleRule
    from tvm.target import Target
    from tvm.tirx import PrimFunc


def schedule_for_gpu(mod: IRModule) -> IRModule:
    """A module in which DLight has scheduled each function that had no schedule. To be called in a target's scope."""
    from tvm.s_tir import dlight

    return dlight.ApplyDefaultSchedule(*_rules())(mod.clone())  # it changes what it is given


def gpu_program(function: PrimFunc, target: Target) -> Schedule | None:
    """DLight's program of a function, with its trace; None where it has none."""
    for rule in _rules():
        with contextlib.suppress(RuntimeError):  # a rule that does not know what to do with it
            if (found := rule.apply(function, target, False)) is not None:
                program: Schedule = found[0] if isinstance(found, list) else found
                return program
    return None


def _rules() -> Sequence[ScheduleRule]:
    """The rules of TVM's own pipeline for CUDA (relax/backend/cuda/pipeline.py), in its order."""
    from tvm.s_tir.dlight import gpu

    return (gpu.Matmul(), gpu.GEMV(), gpu.Reduction(), gpu.GeneralReduction(), gpu.Fallback())


def unbound_kernels(mod: IRModule) -> list[str]:
    """Names of the functions with a loop that no thread of a GPU runs: TVM makes no code of them."""
    from tvm.s_tir import SBlockRealize
    from tvm.tirx import PrimFunc, SeqStmt

    names = []
    for var, function in mod.functions_items():
        if isinstance(function, PrimFunc):
            body = function.body.block.body if isinstance(function.body, SBlockRealize) else function.body
            kernels = body.seq if isinstance(body, SeqStmt) else [body]
            if not all(map(_is_bound, kernels)):
                names.append(var.name_hint)
    return names


def _is_bound(kernel: Any) -> bool:
    from tvm.tirx import AttrStmt, For, ForKind
    from tvm_ffi import structural_walk

    found: list[bool] = []
    structural_walk(kernel, (For, lambda loop: found.append(loop.kind == ForKind.THREAD_BINDING)))
    structural_walk(kernel, (AttrStmt, lambda statement: found.append(statement.attr_key == "thread_extent")))
    return any(found)


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


Tile = Any
"""The decisions of a sketch: a frozen dataclass of numbers and words."""
ANNOTATION = "ansor.sketch"
"""Annotation of a program's outermost block: the sketch and its decisions, as `decision_text` has them."""
_FLAGS = {
    field.name.replace("_", " ")
    for tile in (RegisterTile, RowTile, WinogradTile)
    for field in fields(tile)
    if field.type in ("bool", bool)
}
"""Decisions of our own sketches that stand in the text where they are true."""
_NUM_TRIED = 3
"""How many of the first programs TVM may refuse before the sketch counts as unfit."""


class Sketch(Protocol):
    """One algorithm to compute a function, which leaves a few decisions open."""

    name: str
    """The name that users read."""

    @classmethod
    def find(cls, mod: IRModule, machine: Machine) -> Sketch | None:
        """The sketch for the function "main" of a task's module; None where it knows no program of it."""

    def tiles(self) -> list[Tile]:
        """All decisions that are worth a trial, the one that is taken without any first."""

    def kind(self, tile: Tile) -> object:
        """The part of a decision that matters most for the speed."""

    def cycles(self, tile: Tile) -> float:
        """Estimated cycles of a call; infinite where nothing is known of them."""

    def is_fast(self, tile: Tile) -> bool:
        """Whether the program of a decision is near what the machine can do, as far as its structure tells."""

    def schedule(self, tile: Tile) -> Schedule:
        """The program of a decision, as a schedule whose trace has plain instructions alone.

        Numbers that are drawn within a trace could not depend on one another, and the order of trials would be TVM's.
        """


SKETCHES: PluginTable[type[Sketch]] = PluginTable(
    "sketches",
    {
        "winograd": WinogradTiling,
        "matrix tile": MatrixTiling,
        "integer tile": IntegerTiling,
        "pair tile": PairTiling,
        "dot product": DotTiling,
        "register tile": RegisterTiling,
        "rows": RowTiling,
    },
    lambda found: hasattr(found, "find"),
)
"""The sketches by name, in the order in which they are asked; the last takes what no other does."""


class Programs:
    """The programs of a task's sketch, in the order in which they are worth a trial."""

    def __init__(self, sketch: Sketch, *, packs: bool) -> None:
        self._sketch, self._packs = sketch, packs
        self.tiles = sketch.tiles()

    def program(self, tile: Tile) -> Schedule | None:
        """A program as it is measured and recorded; None if TVM refuses it."""
        from tvm.s_tir.meta_schedule.postproc import RewriteLayout, RewriteReductionBlock

        try:
            sch = self._sketch.schedule(tile)
            sch.annotate(sch.get_sblock("root"), ANNOTATION, decision_text(self._sketch.name, tile))
            sch.enter_postproc()
            postprocs = (RewriteReductionBlock(), *([RewriteLayout()] if self._packs else ()))
            is_valid = all(postproc.apply(sch) for postproc in postprocs)
        except (RuntimeError, ValueError):  # TVM's error for what it refuses is one of the first
            return None
        return sch if is_valid else None

    def first(self) -> Schedule | None:
        """The program that is taken without a trial."""
        return next(filter(None, map(self.program, self.tiles)), None)

    @property
    def estimated_cycles(self) -> float:
        """Estimated cycles of a call of the program that is taken without a trial."""
        return self._sketch.cycles(self.tiles[0])

    @property
    def first_decision(self) -> str:
        """The annotation of the program that is taken without a trial."""
        tile = next(tile for tile in self.tiles if self.program(tile) is not None)
        return decision_text(self._sketch.name, tile)

    def kind(self, tile: Tile) -> object:
        """See `Sketch.kind`."""
        return self._sketch.kind(tile)

    @property
    def are_enough(self) -> bool:
        """Whether there is no need to look for faster ones in another space."""
        return self._sketch.is_fast(self.tiles[0])

    def tile_of(self, sch: Schedule) -> Tile | None:
        """The decision that a program says that it is made of; None if it is none of these."""
        annotations = sch.get(sch.get_sblock("root")).annotations
        decision = str(annotations.get(ANNOTATION, ""))
        return next((tile for tile in self.tiles if decision_text(self._sketch.name, tile) == decision), None)


def find_programs(mod: IRModule, target: Target) -> Programs | None:
    """The programs of our own for a task's function; None where there are none, or the target is no CPU."""
    if not platform_of(target).has_sketches or not is_made_of_blocks(mod["main"]):
        return None
    programs = Programs(_find_sketch(mod, Machine.of(target)), packs=has_sums(mod))
    return programs if any(programs.program(tile) is not None for tile in programs.tiles[:_NUM_TRIED]) else None


def _find_sketch(mod: IRModule, machine: Machine) -> Sketch:
    names = (*SKETCHES.plugins, *SKETCHES.own)  # whoever adds one means it to be taken
    return next(found for name in names if (found := SKETCHES[name].find(mod, machine)) is not None)


def decision_text(sketch: str, tile: Tile) -> str:
    """A sketch's decision in words, such as "register tile: lanes 16, vectors 2, columns 7, rows 1, parallel".

    There are no quotes in it: TVM prints a schedule's annotations as they are.
    """
    words = [_words(field.name.replace("_", " "), getattr(tile, field.name)) for field in fields(tile)]
    return f"{sketch}: {', '.join(filter(None, words))}"


def _words(name: str, value: object) -> str:
    if isinstance(value, bool):
        return name if value else ""
    if value is None:
        return ""
    return f"{name} {value}"


def decision_columns(decisions: Sequence[str]) -> dict[str, list[int | str | bool | None]]:
    """Decisions of several programs as a table: a column `sketch`, and one for each decision that one of them has.

    MetaSchedule's programs have the sketch "metaschedule" and one decision, `sampled`. None stands where a program's
    sketch has no such decision.
    """
    rows = [_decided(*decision.partition(": ")[::2]) for decision in decisions]
    flags = {(row["sketch"], name) for row in rows for name, value in row.items() if value is True}
    for row in rows:
        row.update({name: False for sketch, name in flags if sketch == row["sketch"] and name not in row})
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _decided(sketch: str, text: str) -> dict[str, int | str | bool | None]:
    """The decisions of a text that `decision_text` made, by name."""
    row: dict[str, int | str | bool | None] = {"sketch": sketch or None}
    if sketch == "metaschedule":
        return {**row, "sampled": text}
    for words in filter(None, text.split(", ")):
        name, _, value = words.rpartition(" ")
        if not name or words in _FLAGS:
            row[words.replace(" ", "_")] = True
        else:
            row[name.replace(" ", "_")] = int(value) if value.removeprefix("-").isdecimal() else value
    return row
