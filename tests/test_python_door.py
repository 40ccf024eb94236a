"""`import ansor_mlflow as am`: the commands as functions, typed, with results for people and for notebooks."""

from __future__ import annotations

import inspect
import pydoc
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlflow
import nbformat
import onnx
import pytest
from helpers.commands import ROOT, environment
from nbclient import NotebookClient

import ansor_mlflow as am
from ansor_mlflow import api, names
from ansor_mlflow.errors import UserInputError
from ansor_mlflow.parameters import (
    CompileOptions,
    EvaluateOptions,
    Options,
    PipelineOptions,
    PlanOptions,
    PromoteOptions,
    TuneOptions,
    grouped,
    listed,
)

PAGE = ROOT / "docs" / "python.md"
QUICK = {"strategy": "random", "min_repeat_ms": 0, "number": 1}


def page_blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.system
@pytest.mark.nightly
def test_the_page_of_the_documentation_works(
    new_experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    for block in page_blocks():
        if "__main__" in block:
            continue  # a script of its own, which the next test runs
        exec(compile(block, str(PAGE), "exec"), found)
    promised = re.search(r"print\(err\)  # (.*)", PAGE.read_text())
    assert promised is not None
    assert capsys.readouterr().out.splitlines()[-1] == promised[1]
    assert found["checked"].metrics["max_rel_error"] < 1e-4
    assert found["loaded"].run({"x": found["np"].ones((8, 32), "float32")})["y"] == pytest.approx(0.32)
    steps = {run.data.tags[names.TAG_STEP] for run in mlflow.search_runs([new_experiment], output_format="list")}
    assert steps == {"main", "tune", "compile", "evaluate"}


@pytest.mark.parametrize("network", [None, "", 3])
def test_a_network_that_is_none_is_not_the_default(network: Any) -> None:
    for give in (lambda: am.plan(network), lambda: am.plan(network=network)):
        with pytest.raises(UserInputError, match=f"network={network!r}: it is "):
            give()


def test_two_networks_are_one_too_many() -> None:
    for give in (lambda: am.plan("mlp", "bert-tiny"), lambda: am.plan("mlp", network="bert-tiny")):  # type: ignore[call-arg, misc]
        with pytest.raises(UserInputError, match="plan: one network is taken; give the parameters by name"):
            give()


@pytest.mark.parametrize(
    ("function", "options"),
    [
        ("tune", TuneOptions),
        ("compile", CompileOptions),
        ("evaluate", EvaluateOptions),
        ("promote", PromoteOptions),
        ("pipeline", PipelineOptions),
        ("plan", PlanOptions),
    ],
)
def test_functions_have_the_parameters_of_the_commands(function: str, options: type[Options]) -> None:
    *parameters, others = inspect.signature(getattr(am, function)).parameters.values()
    assert {parameter.name for parameter in parameters} == set(listed(options))
    for parameter in parameters:
        field = options.model_fields[parameter.name]
        default = inspect.Parameter.empty if field.is_required() else field.get_default(call_default_factory=True)
        assert parameter.default == default
    assert others.kind is inspect.Parameter.VAR_KEYWORD
    inspect.signature(getattr(am, function)).bind(**dict.fromkeys(options.model_fields))
    documentation = inspect.getdoc(getattr(am, function))
    assert documentation is not None
    _, _, arguments = documentation.partition("\n\nArgs:\n")
    lines = dict(re.findall(r"^    (\w+): (\S.*)$", arguments, re.MULTILINE))
    assert list(lines) == [parameter.name for parameter in parameters]
    assert set(re.findall(r"\w+", arguments.partition("explains them:")[2])) >= set(grouped(options).values())
    assert max(map(len, documentation.splitlines())) <= 120


def test_help_is_short_and_begins_with_the_network() -> None:
    printed = pydoc.render_doc(am.tune, renderer=pydoc.plaintext)
    assert "tune(network='resnet-18', *, seed=0, trust=False," in printed
    assert (
        "\n        trials: Programs to measure in all; auto is the preset's number for each task. [default: 'auto']\n"
        in printed
    )
    assert len(printed.splitlines()) < 40
    inspect.signature(am.tune).bind("resnet-50", trials=8, patience=3)


def test_examples_of_a_function_follow_its_arguments() -> None:
    made = api._with_arguments("Tunes.\n\nExample:\n    am.tune()", TuneOptions)
    assert re.fullmatch(
        r"Tunes\.\n\nArgs:\n    network: .*\n\nFor experts, .*\.\n\nExample:\n    am\.tune\(\)", made, re.DOTALL
    )


def test_all_that_is_promised_is_there() -> None:
    assert set(am.__all__) <= set(dir(am))
    assert all(callable(getattr(am, name)) for name in am.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'tuna'"):
        am.tuna  # type: ignore[attr-defined]  # noqa: B018


PROGRAM = """
import ansor_mlflow as am
import onnx

am.tune("resnet-18", trials=64, cost_model="xgb").metrics["best_latency_ms"] + 1
am.tune(onnx.ModelProto(), num_threads="auto")
am.tune(resume_run="0").run_id.upper()
am.compile(tune_run="0").coverage.task_share + 1
am.evaluate(model_uri="models:/m-1").target.upper()
am.promote(model="m", candidate="2", dry_run=True)
am.diff("0", "1").require_not_slower(0.03)
am.tune("resnet-18", trails=64)  # wrong
am.tune("resnet-18", trials="many")  # wrong
am.tune("resnet-18", cost_model="xgboost")  # wrong
am.evaluate()  # wrong
am.tune("resnet-18").runid  # wrong
"""


@pytest.mark.nightly
def test_type_checkers_know_parameters_and_results(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", "--config-file", "setup.cfg", str(tmp_path / "program.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    wrong = {number for number, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# wrong")}
    assert {int(number) for number in re.findall(r"program\.py:(\d+): error", done.stdout)} == wrong, done.stdout


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: am.tune("resnet-18", trials=-1), "^trials=-1: it must be a whole number, 0 or more, or auto$"),
        (lambda: am.tune("resnet-18", trails=1), "^parameters: unknown key 'trails'; perhaps you meant trials$"),
        (am.evaluate, "^model_uri='': it must be models:/…, runs:/… or a model's directory$"),
        (lambda: am.evaluate("models:/m"), r"^evaluate\('models:/m'\): parameters are given by name; see help\(\)$"),
        (lambda: am.plan(3), "^network=3: it is of the type int; give a name, a path, a URI, an onnx.ModelProto or"),
    ],
)
def test_what_is_wrong_is_said_as_the_commands_say_it(call: Any, message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        call()


def test_a_graph_in_memory_is_called_by_its_name(small_onnx: Path) -> None:
    model = onnx.load(small_onnx)
    assert am.plan(model).network == "small"
    model.graph.name = "../torch jit"
    assert am.plan(network=model).network == "torch-jit"


CELLS = [
    "import ansor_mlflow as am",
    f"am.pipeline('dense:4,32,16', trials=4, turns=1, measure_s=0.1, rivals='onnxruntime', **{QUICK})",
    "am.plan('dense:4,32,16', trials=4)",
]


@pytest.mark.nightly
def test_a_notebook_shows_progress_and_results(experiment_id: str, tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    env = {**environment(mlflow.get_tracking_uri()), "MLFLOW_EXPERIMENT_ID": experiment_id}
    client = NotebookClient(notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": tmp_path}})
    client.execute(env=env)
    progress, result = (output for output in notebook.cells[1].outputs if "data" in output)
    assert "stopped by trials" in progress.data["text/html"]
    assert "4/4 trials" in progress.data["text/html"]
    assert "<h3>dense:4,32,16 for llvm" in result.data["text/html"]
    assert "speedup over ONNX Runtime" in result.data["text/html"]
    assert "<th>task</th>" in notebook.cells[2].outputs[-1].data["text/html"]
