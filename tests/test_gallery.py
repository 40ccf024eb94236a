"""The benchmark of a folder of models: how each ends is told apart, and none stops the others."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import ROOT, environment, run
from onnx import TensorProto, helper, save

BENCHMARKS = ROOT / "benchmarks"
EXPORTED = ("espcn", "unet", "yolo", "crnn")
"""Models that need PyTorch alone."""


def gallery(*arguments: str | Path, cwd: Path) -> tuple[int, str, dict[str, dict[str, Any]]]:
    """The exit code of the benchmark, what it printed, and what it found about each model."""
    figures = cwd / "figures.json"
    command = [sys.executable, str(BENCHMARKS / "gallery.py"), *map(str, arguments), "--json", str(figures)]
    done = run(command, cwd, environment(""), timeout_s=1100)
    rows = json.loads(figures.read_text()) if figures.exists() else []
    return done.exit_code, done.stdout + done.stderr, {row["name"]: row for row in rows}


def save_relu(path: Path, *, op_type: str = "Relu", size: int | str = 4) -> None:
    node = helper.make_node(op_type, ["x"], ["y"], domain="of.nobody" if op_type != "Relu" else "")
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (size, 8)) for name in "xy"]
    graph = helper.make_graph([node], "graph", values[:1], values[1:])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("of.nobody", 1)]
    save(helper.make_model(graph, ir_version=10, opset_imports=opsets), path)


@pytest.mark.nightly
def test_the_ends_of_models_are_told_apart(tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    save_relu(models / "good.onnx")
    save_relu(models / "open.onnx", size="rows")
    (models / "open.json").write_text(json.dumps({"family": "dynamic", "input_shapes": {"x": [2, 8]}}))
    save_relu(models / "unknown.onnx", op_type="Riddle")
    (models / "cut.onnx").write_bytes((models / "good.onnx").read_bytes()[:-20])
    page = tmp_path / "page.md"

    exit_code, said, rows = gallery(models, "--no-export", "--page", page, cwd=tmp_path)

    assert exit_code == 1
    assert "2 of 4 get in and equal ONNX Runtime" in said
    assert {name: row["plan"]["end"] for name, row in rows.items()} == {
        "cut": "refused",
        "good": "whole",
        "open": "whole",
        "unknown": "refused",
    }
    assert rows["good"]["check"]["result"] == {"max_rel_error": 0.0, "equal": True, "algorithm": "auto"}
    assert "not a valid ONNX file" in rows["cut"]["plan"]["message"]
    assert "| dynamic | 1 | 1 | 0 |" in page.read_text()
    assert "dynamic,open," in page.with_suffix(".csv").read_text()


def test_a_model_that_takes_too_long_is_left(tmp_path: Path) -> None:
    save_relu(tmp_path / "good.onnx")
    exit_code, said, rows = gallery(tmp_path, "--no-export", "--limit-s", "0.01", cwd=tmp_path)
    assert exit_code == 1
    assert rows["good"]["plan"]["end"] == "late"
    assert "no clear end: good" in said


def test_names_are_unique_and_exporters_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gallery_models

    models = gallery_models.MODELS
    assert len(models) == len(gallery_models.GALLERY) >= 65
    assert {model.exporter for model in models} >= {"torch", "torch dynamo", "skl2onnx", "tf2onnx"}
    assert min(Counter(model.family for model in models).values()) >= 3


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_exported_models(tmp_path: Path) -> None:
    """PyTorch writes them here; each gets in and equals ONNX Runtime."""
    chosen = ",".join(EXPORTED)
    arguments = ("--names", chosen, "--plan-s", "200")  # other tests run meanwhile
    exit_code, said, rows = gallery(tmp_path / "models", *arguments, cwd=tmp_path)
    assert set(rows) == set(EXPORTED), said
    assert exit_code == 0, said
