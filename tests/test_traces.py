"""Records of others hold what a tuning writes, and a time that a kernel can take; all else is a damaged record."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from ansor_mlflow.records.lines import RecordLine, parse_record, scan_records
from ansor_mlflow.records.log import read_journal, read_seeds
from ansor_mlflow.records.store import JOURNAL_FILE, RecordPair, write_pair

IR = 'module asm ".globl evil"\n'
INDEX_MAP = [
    {"type": "None"},
    {"type": "ir.PrimType", "data": {"span": 0, "dtype": "int32"}},
    {"type": "ffi.String", "data": "i0"},
    {"type": "ir.Var", "data": {"span": 0, "ty": 1, "name": 2}},
    {"type": "ffi.Array", "data": [3]},
    {"type": "tirx.IndexMap", "data": {"initial_indices": 4, "final_indices": 4, "inverse_index_map": 0}},
]


def graph(*more: Any) -> str:
    return json.dumps({"root_index": 5, "nodes": [*INDEX_MAP, *more], "metadata": {"tvm_version": "0.27.0"}}, indent=2)


def line(*instructions: Any, decisions: Any = (), times: Any = (0.001,)) -> bytes:
    trace = [list(instructions), list(decisions)]
    return json.dumps([0, [trace, list(times), {"kind": "llvm"}, [["TENSOR", "float32", [4]]]]]).encode() + b"\n"


def annotate(key: Any, value: Any) -> Any:
    return ["Annotate", ["b0", value], [key], []]


SOUND = [
    annotate("pragma_auto_unroll_max_step", 64),
    annotate("meta_schedule.unroll_explicit", "v12"),
    annotate("software_pipeline_order", [0, 1, 2]),
    annotate("meta_schedule.tiling_structure", '"SSSRRSRS"'),
    annotate("meta_schedule.auto_tensorize", '"dot_16x4_vnni"'),
    annotate("meta_schedule.auto_tensorize", '""'),
    annotate("ansor_mlflow.dot_products", 1),
    annotate("ansor_mlflow.matrix_tiles", 1),
    annotate("ansor.sketch", '"register tile: lanes 16, vectors 2, columns 7, rows 1, parallel"'),
    ["Unannotate", ["b0"], ["schedule_rule"], []],
    ["GetSBlock", [], ["A_reindex_shared.dyn_wmma.matrix_a", "main"], ["b0"]],
    ["SampleCategorical", [], [[0, 16], [0.5, 0.1e-3]], ["v1"]],
    ["Split", ["l1", None, 4], [True, False], ["l2", "l3"]],
    ["Bind", ["l1"], ["threadIdx.x"], []],
    ["Bind", ["l1"], ["vthread.x"], []],
    ["CacheRead", ["b0", []], [0, "shared.dyn"], ["b1"]],
    ["SetScope", ["b0"], [0, "local"], []],
    ["Tensorize", ["b0"], ["wmma_sync_16x16x16_f16f16f32", True], []],
    ["TransformLayout", ["b0", graph()], [2, 0, None, False], []],
    ["TransformBlockLayout", ["b0"], [graph()], []],
]


@pytest.mark.parametrize("instruction", SOUND, ids=lambda instruction: str(instruction)[:60])
def test_what_a_tuning_writes(instruction: Any) -> None:
    assert parse_record(line(instruction, decisions=[[0, [1, 2, 4]]]))[1] == 0.001


FOREIGN = [
    annotate("pragma_import_llvm", f'"{IR}"'),
    annotate("pragma_import_c", '"int x;"'),
    annotate("pragma_debug_skip_region", 1),
    annotate("pragma_anything", 1),
    annotate("schedule_rule", '"evil"'),
    annotate("", 1),
    annotate(["pragma_import_llvm"], 1),
    annotate({"pragma_import_llvm": 1}, 1),
    annotate("pragma_auto_unroll_max_step", f'"{IR}"'),
    annotate("pragma_auto_unroll_max_step", IR),
    annotate("pragma_auto_unroll_max_step", {"a": 1}),
    annotate("pragma_auto_unroll_max_step", [[IR]]),
    annotate("pragma_auto_unroll_max_step", graph()),
    annotate("meta_schedule.auto_tensorize", '"evil_intrinsic"'),
    annotate("ansor.sketch", '"register tile\x1b[2J"'),
    annotate("ansor.sketch", '"<script>"'),
    ["Annotate", ["b0", 1], ["pragma_unroll_explicit", "pragma_import_llvm"], []],
    ["Annotate", ["b0", 1, f'"{IR}"'], ["pragma_unroll_explicit"], []],
    ["Annotate", [f'"{IR}"', 1], ["pragma_unroll_explicit"], []],
    ["Bind", ["l1"], ["threadIdx.x); evil("], []],
    ["Bind", ["l1"], ["threadIdx.x + 1"], []],
    ["CacheRead", ["b0", []], [0, "global.evil"], ["b1"]],
    ["SetScope", ["b0"], [0, 'shared"'], []],
    ["UnsafeSetDType", ["b0"], [0, "float16"], []],
    ["UnsafeHideBufferAccess", ["b0"], ["read", [0]], []],
    ["AnnotateBufferAccess", ["b0", graph()], [0, 0], []],
    ["Tensorize", ["b0"], ["evil", True], []],
    ["GetSBlock", [], ['"quoted"', "main"], ["b0"]],
    ["GetSBlock", [], ["\x1b[2J", "main"], ["b0"]],
    ["Split", ["l1", graph()], [True, False], ["l2"]],
    ["TransformLayout", ["b0", graph({"type": "ir.Call", "data": {"op": 1}})], [2, 0, None, False], []],
    ["TransformLayout", ["b0", graph({"type": "ffi.Module", "data": "AAAA"})], [2, 0, None, False], []],
    ["TransformLayout", ["b0", graph({"type": "ffi.String", "data": "a\nb"})], [2, 0, None, False], []],
    ["TransformLayout", ["b0", graph().replace('"type": "None"', '"type": "ffi.Module", "type": "None"')], [2, 0], []],
    ["TransformLayout", ["b0", graph()], [2, 0, graph({"type": "tirx.Call"}), False], []],
    ["TransformLayout", ["b0", "{not JSON"], [2, 0, None, False], []],
    ["TransformBlockLayout", ["b0"], ["{}"], []],
    ["Unknown", [], [], []],
    [["Annotate"], ["b0", 1], ["pragma_unroll_explicit"], []],
    [{}, [], [], []],
    ["GetLoops", ["b0"], []],
    ["GetLoops", {"b0": 1}, [], []],
    [],
]


@pytest.mark.parametrize("instruction", FOREIGN, ids=lambda instruction: str(instruction)[:60])
def test_what_no_tuning_writes(instruction: Any) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse_record(line(SOUND[0], instruction))


@pytest.mark.parametrize("decisions", [[[0, IR]], [[0, {"a": 1}]], [[0, graph()]]])
def test_decisions_are_numbers(decisions: Any) -> None:
    with pytest.raises(ValueError, match="numbers and names"):
        parse_record(line(decisions=decisions))


TIMES = [[0.0], [-1.0], [-0.0], [float("-inf")], [float("inf")], [float("nan")], [1e-10], [1e5], [0.001, -0.0005], []]


@pytest.mark.parametrize("thorough", [False, True])
@pytest.mark.parametrize("times", [*TIMES, [True], ["0.1"], [None], [[0.1]], [10**400]], ids=str)
def test_times_that_no_kernel_takes(tmp_path: Path, times: list[Any], thorough: bool) -> None:
    path = tmp_path / "records.json"
    honest = line(SOUND[0], times=[0.5])
    path.write_bytes(line(SOUND[0], times=times) + honest + line(SOUND[0], times=[1e10]))
    found = list(scan_records(path, thorough=thorough))
    assert [record.run_s for record in found if isinstance(record, RecordLine)] == [0.5, 1e10]


@pytest.mark.parametrize("run_s", [[-1.0], [0.0], [float("nan")], [1e-12]])
def test_times_of_a_journal(tmp_path: Path, run_s: list[float]) -> None:
    workload = '["4660", "AAAA"]'
    write_pair(tmp_path, [workload], [line(SOUND[0], times=[0.5]).decode().strip()])
    seeds = [{"workload_hash": "0x1", "best_s": seconds} for seconds in (*filter(math.isfinite, run_s), 0.25)]
    entry = {"step": 1, "workload_hash": "0x1234", "status": "ok", "run_s": run_s}
    header = {"earlier_records": 0, "seeds": seeds}
    (tmp_path / JOURNAL_FILE).write_text(f"{json.dumps(header)}\n{json.dumps(entry)}\n")
    assert [seed.best_s for seed in read_seeds(tmp_path)[1]] == [0.25]
    assert [trial.run_s for trial in read_journal(tmp_path)] == [(0.5,)]
    assert RecordPair.in_directory(tmp_path).exists()
