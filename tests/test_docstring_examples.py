"""Every function that the package exports has an example in its docstring, which does what it says."""

from __future__ import annotations

import doctest
import inspect
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest

import ansor_mlflow as am

FIRST = ["tune", "compile", "save_model"]
"""What the other examples begin with: a tuning, its model, and the libraries of that."""
SLOW = ["autolog", "evaluate", "pipeline"]
"""They start many processes; the other examples take half a minute together."""


def example_of(name: str) -> str:
    """The section of a docstring that API references show."""
    return inspect.getdoc(getattr(am, name)).partition("Example:\n")[2]


def run_example(name: str, known: dict[str, Any]) -> None:
    """Runs an example as `doctest` does, with the names of those before it."""
    test = doctest.DocTestParser().get_doctest(example_of(name), known, name, None, None)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    said: list[str] = []
    runner.run(test, out=said.append, clear_globs=False)
    assert not said, "".join(said)
    known.update(test.globs)


@pytest.fixture(scope="module")
def known(empty_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The names that examples use: imports, and what the first examples make, in a store of this module."""
    directory = tmp_path_factory.mktemp("examples")
    shutil.copy(empty_store, directory / "mlflow.db")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{directory}/mlflow.db")
        patch.chdir(directory)
        logging.getLogger("tvm.s_tir.meta_schedule").setLevel(logging.WARNING)  # it writes to standard output
        names = {"am": am, "mlflow": mlflow, "np": np, "Path": Path}
        for name in FIRST:
            run_example(name, names)
        yield names
        am.autolog(disable=True)
        os.chdir(directory.parent)


@pytest.mark.system
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.nightly) if name in SLOW else name
        for name in am.__all__
        if name not in FIRST
    ],
)
def test_the_example_of_a_docstring_does_what_it_says(name: str, known: dict[str, Any]) -> None:
    run_example(name, dict(known))


def test_every_exported_name_has_an_example() -> None:
    assert {name: len(example_of(name).splitlines()) in range(2, 9) for name in am.__all__} == dict.fromkeys(
        am.__all__, True
    )
