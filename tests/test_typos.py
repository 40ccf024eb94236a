"""A name, a form or a choice that there is not is an error at once: before what takes seconds to load, and any run."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path

import mlflow
import pytest
from helpers.commands import ANSOR_MLFLOW, environment, run

import ansor_mlflow
from ansor_mlflow.cli.command import checked_options
from ansor_mlflow.errors import UserInputError
from ansor_mlflow.parameters import CompileOptions, NetworkOptions, PipelineOptions, PlanOptions, TuneOptions

HEAVY = {"mlflow", "tvm", "pandas", "matplotlib", "scipy", "xgboost"}
RUN_ID = "0" * 32
TYPOS = [
    ("tune --network resnet18", "network='resnet18' is neither a built-in .*; perhaps you meant resnet-18, resnet-34"),
    ("plan --network conv2d:1,7,7", "conv2d takes 9 numbers, 3 were given; write conv2d:N,H,W"),
    ("main --network conv2d:1,7,7,8,8,9,9,1,0", "the kernel spans 9 along H, but the padded image only 7"),
    ("main --network conv2d:1,7,7,8,8,3,3,1,1,groups=3", "CI=8 and CO=8 must be multiples of groups=3"),
    ("plan --network dense:1,99999,99999", "its weights .* take more than 2 GiB"),
    ("compile --network missing.onnx", r"network=missing\.onnx: the file cannot be read \(No such file"),
    (f"explain {RUN_ID} --network resnet-17", "perhaps you meant resnet-18"),
    (f"records verify {RUN_ID} --network danse:1,2,3", "there is no operator 'danse'; perhaps you meant dense"),
    ("evaluate --model-uri missing", "model_uri='missing': it must be models:/…, runs:/… or a model's directory"),
    ("tune --config missing.yaml", r"config=missing\.yaml: the file cannot be read"),
    ("tune --strategy genetic", "strategy='genetic': it must be evolutionary or random"),
    ("main --num-trails 4", "No such option"),
]


ONE_AFTER_THE_OTHER = f"""
import sys
from ansor_mlflow.cli import main
for line in sys.argv[1:]:
    try:
        main(line.split())
    except SystemExit as err:
        assert err.code == 2, line
assert not {HEAVY} & set(sys.modules)
"""


def test_typos_are_answered_before_anything_heavy_is_loaded(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ONE_AFTER_THE_OTHER, *(arguments for arguments, _ in TYPOS)]
    finished = run(command, tmp_path, environment("sqlite:///mlflow.db"))
    assert finished.exit_code == 0, finished.stderr
    for (_, message), error in zip(TYPOS, finished.errors, strict=True):
        assert re.search(message, error)
    assert list(tmp_path.iterdir()) == []


def test_a_typo_takes_less_than_two_seconds(tmp_path: Path) -> None:
    """Of this process's time: how long it waits for a CPU is up to the other ones."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run([ANSOR_MLFLOW, "tune", "--network", "resnet18"], tmp_path, environment("")).exit_code == 2
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


@pytest.mark.usefixtures("experiment_id")
def test_the_python_door_opens_no_run_for_a_typo(new_experiment: str) -> None:
    with pytest.raises(UserInputError, match="perhaps you meant resnet-18"):
        ansor_mlflow.tune("resnet18")
    assert mlflow.MlflowClient().search_runs([new_experiment]) == []


@pytest.mark.parametrize(
    ("cls", "given"),
    [
        (TuneOptions, {"network": "gone.onnx", "resume_run": RUN_ID}),
        (PipelineOptions, {"network": "gone.onnx", "resume_run": RUN_ID}),
        (CompileOptions, {"network": "gone.onnx", "tune_run": RUN_ID}),
        (PlanOptions, {"network": "gone.onnx", "tune_run": RUN_ID}),
        (TuneOptions, {"network": "models:/nobody/1"}),
        (PlanOptions, {"network": "model"}),
    ],
)
def test_a_network_that_a_run_or_a_model_has_is_left_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cls: type[NetworkOptions], given: dict[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    assert checked_options(cls, given).network == given["network"]
