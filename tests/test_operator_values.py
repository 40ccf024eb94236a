"""ONNX's own cases of single operators, and those in other dtypes and values, compute what ONNX Runtime computes."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DIFFER = {
    "CumSum": {"nan", "infinity", "zeros"},
    "ReduceMean": {"extremes"},
    "RoiAlign": {"largest"},
}
"""Classes of values in which operators may differ, for the reasons in docs/operators.md."""

KINDS = ("ArgMax", "MatMul", "Relu", "Softmax")
REFUSED = ("AffineGrid", "float16")
"""ONNX Runtime itself does not load what it makes of this function with the optimisations that shapes need."""


@pytest.mark.nightly
@pytest.mark.timeout(1200)  # two thousand models are compiled
def test_operators_are_the_same_on_all_values(tmp_path: Path) -> None:
    rows = compared(tmp_path)
    assert len({row["operator"] for row in rows}) > 150
    assert sum(int(row["own"] or 0) for row in rows) > 1500


@pytest.mark.nightly
def test_one_operator_of_each_kind_is_the_same_on_all_values(tmp_path: Path) -> None:
    rows = compared(tmp_path, "--processes", "1", "--only", ",".join(KINDS))
    assert {row["operator"] for row in rows} == set(KINDS)


def compared(directory: Path, *arguments: str) -> list[dict[str, str]]:
    """The rows of the benchmark's table, which differ in nothing but what is known."""
    table = directory / "operators.csv"
    command = [sys.executable, str(ROOT / "benchmarks" / "operators.py"), "--table", str(table), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with table.open() as file:
        rows = list(csv.DictReader(file))
    differ = {(row["operator"], row["dtype"]): row["differs"] for row in rows if row["differs"]}
    assert {key for key, what in differ.items() if "own (" in what} <= {REFUSED}
    for (operator, dtype), what in differ.items():
        if operator in {*DIFFER, "ArgMax", "ArgMin", "BatchNormalization", "Conv", "Relu", "Softmax", "TopK"}:
            classes = {part.split(" (")[0] for part in what.split("; ")}
            assert classes <= DIFFER.get(operator, set()), f"{operator}, {dtype}: {what}"
    return rows
