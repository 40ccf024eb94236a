"""The notebooks of the documentation run, and show what they showed when they were last run.

With `NOTEBOOKS=docs/notebooks` the tests write the outputs into the notebooks.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import nbformat
import pytest
from helpers.commands import ROOT, environment
from nbclient import NotebookClient

DIRECTORY = ROOT / "docs" / "notebooks"
NOTEBOOKS = sorted(path.stem for path in DIRECTORY.glob("*.ipynb"))
OF_TORCH = "pytorch_to_served_model"


def shown(notebook: nbformat.NotebookNode) -> str:
    """What a notebook has but the cells that people wrote."""
    outputs = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    return str([outputs, notebook.metadata, [cell.metadata for cell in notebook.cells]])


def keep_what_is_shown(notebook: nbformat.NotebookNode) -> None:
    """Leaves out logs, when a cell ran, and the text of what is shown as a table."""
    for cell in notebook.cells:
        cell.metadata = nbformat.NotebookNode()
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            for output in cell.outputs:
                if "text/html" in output.get("data", {}):
                    output.data = {"text/html": output.data["text/html"]}


def run_notebook(name: str, directory: Path) -> None:
    """Runs a notebook in a directory that becomes its store; an error of a cell is one of the test."""
    notebook = nbformat.read(DIRECTORY / f"{name}.ipynb", as_version=4)
    client = NotebookClient(notebook, timeout=500, kernel_name="python3", resources={"metadata": {"path": directory}})
    client.execute(env=environment("sqlite:///mlflow.db"))
    if place := os.environ.get("NOTEBOOKS"):
        keep_what_is_shown(notebook)
        nbformat.write(notebook, ROOT / place / f"{name}.ipynb")


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_stored_outputs_are_whole_and_say_nothing_of_the_machine(name: str) -> None:
    notebook = nbformat.read(DIRECTORY / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
    assert not re.search(r"/(home|root|tmp|work|Users)\b|file://|Traceback|'output_type': 'error'", shown(notebook))


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in NOTEBOOKS if name != OF_TORCH])
def test_a_notebook_runs(name: str, tmp_path: Path) -> None:
    run_notebook(name, tmp_path)


@pytest.mark.nightly
def test_the_notebook_of_pytorch_runs(tmp_path: Path) -> None:
    """The environment is the one that has PyTorch."""
    run_notebook(OF_TORCH, tmp_path)
