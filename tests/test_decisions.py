"""What records say of sketches."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from ansor_mlflow.records import RECORD_FILE, decision_of, fields_of, find_decision
from ansor_mlflow.sketches import decision_columns
from ansor_mlflow.sketches.sketch import decision_text

DECISION = "register tile: lanes 16, row tiles 2, pad at job, parallel"


@dataclass(frozen=True)
class Tile:
    lanes: int
    row_tiles: int
    pad_at: str
    parallel: bool


def record(annotation: str) -> str:
    value = json.dumps(f'"{annotation}"')
    return f'[[[["Annotate",["b1",{value}],["ansor.sketch"],[]]],[]],[1e-5],{{"kind":"llvm"}},[]]'


def test_decisions_in_words() -> None:
    assert decision_text("register tile", Tile(16, 2, "job", True)) == DECISION
    assert decision_text("rows", Tile(8, 1, "row", False)) == "rows: lanes 8, row tiles 1, pad at row"


@pytest.mark.parametrize("text", [DECISION, "rows: lanes 1"])
def test_the_annotation_of_a_record_is_found(text: str) -> None:
    assert json.loads(record(text))
    assert find_decision(record(text)) == text


def test_a_record_of_another_space_has_none(tuned_records: Path) -> None:
    assert find_decision(record(DECISION).replace("ansor.sketch", "meta_schedule.unroll_explicit")) == ""
    lines = (tuned_records / RECORD_FILE).read_text().splitlines()
    assert all(find_decision(line) == "" for line in lines)
    drawn = [decision_of(fields_of(line)) for line in lines]
    assert {text for text in drawn if not re.fullmatch(r"(metaschedule:( \d+(×\d+)+| \d+| @-?\d+)+)?", text)} == set()
    assert any(text.startswith("metaschedule: ") for text in drawn)
    assert decision_of("[[[], [[7, 1]]], [1e-5], {}, []]") == decision_of("no record") == ""


def test_decisions_become_columns() -> None:
    texts = [
        DECISION,
        "rows: lanes 8, pad at row",
        "",
        "metaschedule: 1×7 64 @-1",
        "register tile: lanes 8, jumps by 2",
    ]
    assert decision_columns([*texts, "theirs: ready, mode of sums fast"]) == {
        "sketch": ["register tile", "rows", None, "metaschedule", "register tile", "theirs"],
        "lanes": [16, 8, None, None, 8, None],
        "row_tiles": [2, None, None, None, None, None],
        "pad_at": ["job", "row", None, None, None, None],
        "parallel": [True, None, None, None, False, None],
        "sampled": [None, None, None, "1×7 64 @-1", None, None],
        "jumps_by": [None, None, None, None, 2, None],
        "ready": [None, None, None, None, None, True],
        "mode_of_sums": [None, None, None, None, None, "fast"],
    }
    assert decision_columns([]) == {}


def test_flags_of_two_words_are_no_names_with_values() -> None:
    columns = decision_columns(["register tile: rows 1, channels outside", "register tile: rows 2"])
    assert columns == {"sketch": ["register tile"] * 2, "rows": [1, 2], "channels_outside": [True, False]}
