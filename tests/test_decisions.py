"""What records say of sketches."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from ansor_mlflow.records import RECORD_FILE
from ansor_mlflow.sketches import find_decision
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
    assert all(find_decision(line) == "" for line in (tuned_records / RECORD_FILE).read_text().splitlines())
