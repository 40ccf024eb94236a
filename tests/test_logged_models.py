"""A tuned model in MLflow's Models tab: named after what it is, with its evaluation and the runs around it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import mlflow
import pytest
import yaml
from helpers.finished import FinishedWork

from ansor_mlflow import names
from ansor_mlflow.tracking import describe_model, logged_model_of, model_name


@pytest.mark.parametrize(
    ("network", "devices", "name"),
    [
        ("squeezenet_v1.1", "llvm znver4 ×2", "squeezenet_v1-1-llvm-znver4-x2"),
        ("a/b:c%", "cuda sm_90, llvm ×1", "a-b-c-cuda-sm_90-llvm-x1"),
        ("n" * 300, "llvm", "n" * 200),
        ("ä", "llvm", "llvm"),
    ],
)
def test_a_name_is_one_of_mlflows(network: str, devices: str, name: str) -> None:
    assert model_name(network, devices) == name
    mlflow.utils.validation._validate_logged_model_name(name)


@pytest.mark.system
def test_a_model_that_was_unreliable_is_not_for_ever(finished_work: FinishedWork) -> None:
    (output,) = mlflow.get_run(finished_work.compiled).outputs.model_outputs
    for reason in ("busy", ""):
        describe_model(output.model_id, {names.TAG_UNRELIABLE: reason}, "a model")
        assert mlflow.get_logged_model(output.model_id).tags.get(names.TAG_UNRELIABLE, "") == reason


@pytest.mark.system
@pytest.mark.parametrize("written", [None, {}, {"model_id": 5}, {"model_id": "m-0123456789abcdef0123456789abcdef"}])
@pytest.mark.usefixtures("finished_work")
def test_a_model_of_elsewhere_is_not_known(
    written: Mapping[str, object] | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    if written is not None:
        (directory / "MLmodel").write_text(yaml.safe_dump(written))
    with caplog.at_level(logging.INFO, "ansor_mlflow"):
        assert logged_model_of(directory) == ""
    assert ("nothing is known here of the model m-0123" in caplog.text) is bool(
        written and written.get("model_id") != 5
    )
