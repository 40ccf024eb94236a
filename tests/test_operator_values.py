"""Operators on values and dtypes that ONNX's own cases lack compute what ONNX Runtime computes."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OPERATORS = ("CumSum", "ReduceMean", "RoiAlign")
"""A few of those that TVM does not import well; the table of all is made by hand."""


@pytest.mark.system
def test_operators_are_the_same_on_all_values(tmp_path: Path) -> None:
    table = tmp_path / "operators.csv"
    command = [sys.executable, str(ROOT / "benchmarks" / "operators.py"), "--only", ",".join(OPERATORS)]
    done = subprocess.run([*command, "--table", str(table)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert {row["operator"] for row in rows} == set(OPERATORS)
    means = {row["dtype"]: row for row in rows if row["operator"] == "ReduceMean"}
    assert {"float", "double", "int32"} <= means.keys()
    for kind in ("own", "nan", "infinity", "zeros", "halves", "large mean"):
        assert int(means["float"][kind]) > 0
    assert means["int32"]["own"]
    assert [row["differs"] for row in rows if row["operator"] == "ReduceMean" and "own" in row["differs"]] == []
