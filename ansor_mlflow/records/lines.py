"""The lines of TVM's database, read without TVM and, as far as possible, without parsing them; and what they may hold.

Format of `tvm.s_tir.meta_schedule.database.JSONDatabase` (TVM 0.27, src/s_tir/meta_schedule/database/): a workload line
is `[structural hash, module in base64]`; a record line is `[index of its workload line, [trace, run_secs, target,
args_info]]`. A failed trial has one run time of 1e10 s.

A trace is a program for TVM, `[instructions, decisions]` with instructions `[kind, inputs, attributes, outputs]` (TVM
0.27, src/s_tir/schedule/trace.cc). Some instructions take text that reaches the compiler: what an annotation
`pragma_import_llvm` says is linked into the library, a thread's name is printed into CUDA C, an index map may call any
function. Records come from other people's runs, models and files, so that everything in a trace is one of a list: what
MetaSchedule's spaces and our own sketches write.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

from ansor_mlflow.foreign import read_json

_PLAIN = frozenset(
    {
        *("SampleCategorical", "SamplePerfectTile", "SamplePartitionedTile", "SampleComputeLocation"),
        *("GetSBlock", "GetLoops", "GetChildBlocks", "GetProducers", "GetConsumers", "GetOutputBlocks"),
        *("Merge", "Fuse", "Split", "LoopPartition", "Reorder", "ReorderBlockIterVar", "AddUnitLoop"),
        *("Parallel", "Vectorize", "Unroll", "ReIndex", "CacheInplace", "StorageAlign", "Blockize", "RollingBuffer"),
        *("ComputeAt", "ReverseComputeAt", "ComputeInline", "ReverseComputeInline"),
        *("DecomposeReduction", "RFactor", "DecomposePadding", "PadEinsum", "EnterPostproc", "Unannotate"),
    }
)
"""Instructions whose text is names of blocks, loops and variables, which TVM looks up."""
_PLAIN_VALUES = re.compile(r"[\w .:/+\-,'()\[\]]*")
_INDEX_MAP_VALUES = re.compile(r"[\w .:'{},()\[\]-]*")
_NOTHING = re.compile(r"(?!)")
_SCOPE = re.compile(r"global|local|warp|shared(\.dyn)?|wmma\.(matrix_a|matrix_b|accumulator)|m16n8k8\.matrix[ABC]")
_THREAD = re.compile(r"(blockIdx|threadIdx|vthread)\.[xyz]|vthread")
_INTRINSIC = re.compile(r"((dot|dp4a|mma|rvv|sdot4|sme|wmma)\w{0,100})?")
_TEXTS = {
    "Bind": (0, _THREAD),
    "CacheRead": (1, _SCOPE),
    "CacheWrite": (1, _SCOPE),
    "ReindexCacheRead": (1, _SCOPE),
    "ReindexCacheWrite": (1, _SCOPE),
    "SetScope": (1, _SCOPE),
    "Tensorize": (0, _INTRINSIC),
}
"""Instructions of which one attribute is a text: its position, and what it may be."""
_WITH_INDEX_MAPS = ("TransformLayout", "TransformBlockLayout")
_NUMBER = None
_ANNOTATIONS: dict[str, re.Pattern[str] | None] = {
    "ansor.sketch": re.compile(r"[\w ,:.+-]{0,300}"),
    "ansor_mlflow.dot_products": _NUMBER,
    "ansor_mlflow.matrix_tiles": _NUMBER,
    "ansor_mlflow.prefetch": _NUMBER,
    "double_buffer_scope": _NUMBER,
    "local_stage": _NUMBER,
    "manifest_shared_memory_local_stage": _NUMBER,
    "meta_schedule.auto_tensorize": _INTRINSIC,
    "meta_schedule.auto_tensorize_init": _INTRINSIC,
    "meta_schedule.cache_type": _NUMBER,
    "meta_schedule.cooperative_fetch": _NUMBER,
    "meta_schedule.inline_rule": re.compile("disable"),
    "meta_schedule.layout_rewrite_preproc": _NUMBER,
    "meta_schedule.parallel": _NUMBER,
    "meta_schedule.random_compute_producer": _NUMBER,
    "meta_schedule.tensor_core_enabled": _NUMBER,
    "meta_schedule.thread_extent_high_inclusive": _NUMBER,
    "meta_schedule.thread_extent_low_inclusive": _NUMBER,
    "meta_schedule.tiling_structure": re.compile(r"[SR]{0,20}"),
    "meta_schedule.unroll_explicit": _NUMBER,
    "meta_schedule.unroll_implicit": _NUMBER,
    "meta_schedule.vectorize": _NUMBER,
    "meta_schedule.warp_execution": _NUMBER,
    "permuted_layout": re.compile(r"\w{0,20}"),
    "pragma_auto_unroll_max_step": _NUMBER,
    "pragma_unroll_explicit": _NUMBER,
    "software_pipeline_async_stages": _NUMBER,
    "software_pipeline_order": _NUMBER,
    "software_pipeline_stage": _NUMBER,
    "warp_execution": _NUMBER,
}
"""Keys of annotations with what a text may be; `_NUMBER` stands for numbers, lists of them, and variables."""
_INDEX_MAP_NODES = frozenset(
    {
        *("None", "int", "bool", "ffi.Array", "ffi.String", "ir.IntImm", "ir.PrimType", "ir.Var", "tirx.IndexMap"),
        *("prim.Add", "prim.Sub", "prim.Mul", "prim.FloorDiv", "prim.FloorMod", "prim.Cast"),
    }
)
"""Kinds of objects in the JSON of an index map: arithmetic of variables and constants, and no calls."""


def check_trace(trace: Any) -> None:
    """Checks that a trace holds nothing but what a tuning writes; a ValueError, TypeError or LookupError if it does.

    What has not the form of a trace, TVM itself refuses.
    """
    if not (isinstance(trace, list) and len(trace) == 2 and isinstance(trace[0], list)):
        return
    instructions, decisions = trace
    plain = [decisions]
    for instruction in instructions:
        if isinstance(instruction, list):
            kind, inputs, attributes, outputs = instruction
            values = inputs, attributes
            plain.append([outputs, *(values if kind in _PLAIN else _plain_values(kind, inputs, attributes))])
    if not _is_plain(plain):
        odd = next(values for values in plain if not _is_plain(values))
        raise ValueError(f"a tuning writes numbers and names, and not {odd!s:.100}")


def _plain_values(kind: Any, inputs: Any, attributes: Any) -> list[Any]:
    """What is left of an instruction's values without those that may be more than numbers and names, and are sound."""
    if kind == "Annotate":
        target, value = inputs
        (key,) = attributes
        _check_annotation(key, value)
        return [target]
    if kind in _WITH_INDEX_MAPS:
        values = [*inputs, *attributes]
        maps = [value for value in values if isinstance(value, str) and value.startswith("{")]
        if not all(map(_is_index_map, maps)):
            raise ValueError(f"no tuning writes the index map of its {kind}")
        return [value for value in values if value not in maps]
    if kind not in _TEXTS:
        raise ValueError(f"no tuning writes the instruction {kind!r:.60}")
    position, form = _TEXTS[kind]
    _require(form, attributes[position], kind)
    return [*inputs, *attributes]


def _check_annotation(key: Any, value: Any) -> None:
    if key not in _ANNOTATIONS:
        raise ValueError(f"no tuning writes the annotation {key!r:.60}")
    form = _ANNOTATIONS[key]
    if isinstance(value, str) and not value.isalnum():  # a text is in quotes, a variable is letters and digits
        _require(form or _NOTHING, value.removeprefix('"').removesuffix('"'), key)
    elif not _is_plain(value):
        raise ValueError(f"the annotation {key} is {value!r:.60}")


def _require(form: re.Pattern[str], text: str, what: str) -> None:
    if not form.fullmatch(text):
        raise ValueError(f"no tuning writes {what} with {text!r:.60}")


def _is_plain(values: Any) -> bool:
    """Whether values are lists of numbers and names alone: Python quotes what is in any other text."""
    return _PLAIN_VALUES.fullmatch(str(values)) is not None


@lru_cache(maxsize=4096)
def _is_index_map(text: str) -> bool:
    """Whether the JSON of an object of TVM's is arithmetic of variables and constants; see `_INDEX_MAP_NODES`."""
    read_json(text)  # it is within bounds
    graph = json.loads(text, object_pairs_hook=_object)
    kinds = {node["type"] for node in graph["nodes"]}
    return kinds <= _INDEX_MAP_NODES and _INDEX_MAP_VALUES.fullmatch(str(graph)) is not None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object in which no name is twice: Python and TVM need not take the same one."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a name twice")
    return found


FAILED_RUN_S = 1e9
"""Run times from here on mark failed trials."""
_SHORTEST_S, _LONGEST_S = 1e-9, 1e4
"""No call of a kernel is shorter, and none that is longer is measured: such a time is a mistake, or a lie."""
_MAX_INDEX_DIGITS = 24
_MAX_NUMBERS = 10
"""Lines of a file that a message names."""


@dataclass(frozen=True, slots=True)
class RecordLine:
    """What tells records apart, and where the line is."""

    number: int
    """Number of the line in its file, from 1."""
    offset: int
    length: int
    """Length of the line with its end, in bytes."""
    workload: int
    """Index of its line in the workload file."""
    run_s: float
    """Mean seconds per call; `FAILED_RUN_S` or more for a failed trial."""
    target: str
    """Attributes of the target as JSON."""


@dataclass(frozen=True, slots=True)
class DamagedLine:
    """A line that is no record."""

    number: int
    offset: int
    length: int


def scan_records(path: Path, *, thorough: bool = False) -> Iterator[RecordLine | DamagedLine]:
    """What every line of a record file is; `thorough` parses them as a whole, instead of looking at both ends."""
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            length = len(line)
            if length > _MAX_INDEX_DIGITS or line.strip():
                try:
                    if thorough:
                        parse_record(line)
                    yield RecordLine(number, offset, length, *(_quick_look(line) or _parsed(line)))
                except ValueError:
                    yield DamagedLine(number, offset, length)
            offset += length


def numbered(lines: Sequence[int]) -> str:
    """Lines as the subject of a sentence: "line 7 is", "lines 7, 9 are"."""
    more = f", … ({len(lines)} in all)" if len(lines) > _MAX_NUMBERS else ""
    listed = ", ".join(map(str, lines[:_MAX_NUMBERS])) + more
    return f"line {listed} is" if len(lines) == 1 else f"lines {listed} are"


def parse_record(line: bytes) -> tuple[int, float, dict[str, Any]]:
    """Workload index, mean seconds and target of a record line, parsed as a whole; a ValueError if it is none."""
    try:
        index, (trace, run_secs, target, args_info) = read_json(line)
        if any(isinstance(seconds, bool) for seconds in run_secs):
            raise ValueError("a time is no number")
        mean_s = mean_time(run_secs)
        check_trace(trace)
    except (TypeError, ArithmeticError, LookupError, AttributeError) as err:
        raise ValueError(str(err)) from err
    is_record = isinstance(trace, list) and isinstance(target, dict) and isinstance(args_info, list)
    if not is_record or type(index) is not int or index < 0:
        raise ValueError("no record")
    return index, mean_s, target


def mean_time(run_secs: Sequence[float]) -> float:
    """Mean time of a record, `FAILED_RUN_S` or more for a failed trial; a ValueError if no kernel takes such times."""
    mean_s = fmean(run_secs)
    if not math.isfinite(mean_s) or (mean_s < FAILED_RUN_S and not all(map(is_time, run_secs))):
        raise ValueError(f"no call of a kernel takes {mean_s} s")
    return mean_s


def is_time(seconds: float) -> bool:
    """Whether a call of a kernel can take so long."""
    return _SHORTEST_S <= seconds <= _LONGEST_S


_OF_VARIABLE = re.compile(r'("GetSBlock",\s*\[\s*\],\s*\[\s*")[lg]v\d*_(?=red)')
"""How older traces name a block after a variable, which stands elsewhere in another network, or in a part of one."""


def fields_of(line: str) -> str:
    """What follows the index of the workload in a record line: JSON `[trace, run_secs, target, args_info]`."""
    return _OF_VARIABLE.sub(r"\1", line[line.index(",") + 1 : line.rindex("]")].strip())


_SKETCH = re.compile(r'"Annotate",\s*\[\s*"b\d+",\s*"\\"([^"\\]*)\\""\s*\],\s*\[\s*"ansor\.sketch"\s*\]')
"""The instruction in the JSON of a trace, whose value is a string in quotes."""


def find_decision(record: str) -> str:
    """The sketch in the JSON of a record, with its decisions; empty where the program is of no sketch."""
    found = _SKETCH.search(record)
    return found[1] if found else ""


def decision_of(fields: str) -> str:
    """What made the program of a record, given as JSON `[trace, run_secs, target, args_info]`.

    That is a sketch with its decisions, or what MetaSchedule drew, in the order of the trace: tiles, values, and places
    of a computation, as in "metaschedule: 1×7×2×4 64 @-1". It is empty where nothing was decided, and for damage.
    """
    if sketched := find_decision(fields):
        return sketched
    try:
        instructions, decisions = read_json(fields)[0]
        drawn = [_drawn(instructions[index], decision) for index, decision in decisions]
    except (ValueError, TypeError, LookupError):
        return ""
    return f"metaschedule: {' '.join(drawn)}" if drawn else ""


def _drawn(instruction: Any, decision: Any) -> str:
    if isinstance(decision, list):
        return "×".join(map(str, decision))
    kind, _, attributes, _ = instruction
    return str(attributes[0][decision]) if kind == "SampleCategorical" else f"@{decision}"


def workload_hash(line: str) -> str:
    """The structural hash in a workload line, in hexadecimal digits as TVM shows it: "0x" and sixteen."""
    try:
        hash_, module = read_json(line)
        base64.b64decode(module, validate=True)
        return f"{int(hash_):#018x}"
    except TypeError as err:
        raise ValueError("no workload") from err


@lru_cache(maxsize=1024)
def target_attributes(text: str) -> dict[str, Any]:
    """The attributes of `RecordLine.target`; not to be changed."""
    return dict(read_json(text))


def _quick_look(line: bytes) -> tuple[int, float, str] | None:
    """Index, mean seconds and target of a line as TVM writes it; None for one that looks otherwise.

    Behind the trace, which is nearly all of the line, there are only numbers, one object and names of types.
    """
    target = line.rfind(b'],{"') + 2
    times = line.rfind(b",[", 0, target) + 2
    comma = line.find(b",", 0, _MAX_INDEX_DIGITS)
    end = line.find(b"},[", target) + 1
    if not (0 < comma < times < target < end and line.startswith(b"[") and line.endswith(b"]]]\n")):
        return None
    try:
        seconds = [float(second) for second in line[times : target - 2].split(b",")]
        text = line[target:end].decode()
        target_attributes(text)
        index, mean_s = int(line[1:comma]), mean_time(seconds)
    except (ValueError, TypeError, OverflowError):
        return None
    return None if index < 0 else (index, mean_s, text)


def _parsed(line: bytes) -> tuple[int, float, str]:
    index, run_s, target = parse_record(line)
    return index, run_s, json.dumps(target)
