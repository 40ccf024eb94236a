"""A device of another architecture, to the end: tuned, compiled, evaluated and registered for an emulated board."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import mlflow
import numpy as np
import pytest
from helpers.commands import RunCommand, flags
from helpers.fleet import Fleet, running_fleet
from helpers.runs_here import artifacts_of

from ansor_mlflow import flavor, names
from ansor_mlflow.errors import ModelError
from ansor_mlflow.model import Manifest

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]

BOARD = {"target": "llvm -mtriple=aarch64-linux-gnu -mcpu=cortex-a72", "num_threads": "1"}
AARCH64 = 183
"""EM_AARCH64, see elf(5)."""
BRIEF = {"turns": 1, "measure_s": 0.2}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(tmp_path_factory.mktemp("fleet"), num_servers=0) as fleet:
        fleet.add_board()
        yield fleet


def test_a_model_is_tuned_on_a_board_and_runs_there_and_nowhere_else(
    fleet: Fleet, own_directory: Path, run_here: RunCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {**BOARD, **BRIEF, **fleet.flags, "network": "mlp", "trials": 5, "register_as": "on-board"}
    assert run_here("main", *flags(given)) == 0
    client = mlflow.MlflowClient()
    (version,) = client.search_model_versions("name = 'on-board'")
    assert version.tags[names.TAG_TARGET] == "llvm cortex-a72 ×1"
    assert float(version.tags[names.LATENCY_MS]) > 0

    directory = Path(mlflow.artifacts.download_artifacts("models:/on-board/1"))
    (entry,) = Manifest.read(directory).libraries
    header = (directory / entry.path).read_bytes()[:20]
    assert header.startswith(b"\x7fELF")
    assert struct.unpack_from("<H", header, 18) == (AARCH64,)
    assert entry.coverage["task_share"] == 1
    assert not entry.provenance["target_mismatch"]

    evaluated = artifacts_of(newest_of("evaluate").info.run_id)
    rivals = json.loads((evaluated / names.RIVALS_FILE).read_text())
    assert {rival["rival"] for rival in rivals} >= {"onnxruntime"}
    for rival in rivals:
        assert rival["absent"].startswith("it runs on this host, the model on server 127.0.0.1:")

    with pytest.raises(ModelError, match="not the library for llvm cortex-a72 ×1: it is made for aarch64"):
        flavor.load_model("models:/on-board/1", allow_untuned=False)
    assert run_here("evaluate", *flags({"model_uri": "models:/on-board/1", **BRIEF})) == ModelError.exit_code
    assert "no library runs here: not the library for llvm cortex-a72 ×1: it is made" in capsys.readouterr().err


def test_a_model_without_trials_computes_on_a_board_what_onnx_runtime_computes_here(
    fleet: Fleet, own_directory: Path, run_here: RunCommand, small_onnx: Path
) -> None:
    """Convolutions, a depthwise one among them, by sketches for NEON."""
    assert run_here("tune", *flags({**BOARD, "network": small_onnx, "trials": 0})) == 0
    tuned = newest_of("tune")
    assert run_here("compile", *flags({"tune_run": tuned.info.run_id})) == 0
    model_uri = newest_of("compile").data.tags[names.TAG_MODEL_URI]
    assert run_here("evaluate", *flags({"model_uri": model_uri, "instant": True, **BRIEF, **fleet.flags})) == 0
    metrics = newest_of("evaluate").data.metrics
    assert metrics[names.MAX_REL_ERROR] < 1e-4
    assert {names.LATENCY_MS, names.UNTUNED_LATENCY_MS, names.INSTANT_LATENCY_MS} <= metrics.keys()


def test_bytes_are_multiplied_by_the_instruction_of_a_board_that_has_one(
    fleet: Fleet, own_directory: Path, run_here: RunCommand, small_onnx: Path
) -> None:
    """`usdot`, which the emulator knows."""
    np.savez("data.npz", data=np.random.default_rng(0).random((8, 3, 16, 16), np.float32))
    given = {"data": "data.npz", "output": "small.int8.onnx", "quantize_max_loss": 1}
    assert run_here("quantize", str(small_onnx), *flags(given)) == 0
    assert error_of({"network": "small.int8.onnx"}, "+i8mm,+dotprod", fleet, run_here) < 0.02


def test_bfloat16_is_multiplied_by_the_instruction_of_a_board_that_has_one(
    fleet: Fleet, own_directory: Path, run_here: RunCommand, small_onnx: Path
) -> None:
    """`bfdot`."""
    assert 0 < error_of({"network": str(small_onnx), "dtype": "bfloat16"}, "+bf16", fleet, run_here) < 0.02


def error_of(given: Mapping[str, object], features: str, fleet: Fleet, run_here: RunCommand) -> float:
    """The largest relative error of a network on a board with more features, without a trial."""
    target = f"{BOARD['target']} -mattr={features}"
    assert run_here("tune", *flags({**BOARD, **given, "target": target, "trials": 0})) == 0
    assert run_here("compile", *flags({"tune_run": newest_of("tune").info.run_id})) == 0
    model_uri = newest_of("compile").data.tags[names.TAG_MODEL_URI]
    assert run_here("evaluate", *flags({"model_uri": model_uri, **BRIEF, **fleet.flags})) == 0
    return newest_of("evaluate").data.metrics[names.MAX_REL_ERROR]


def newest_of(step: str) -> mlflow.entities.Run:
    experiment_id = mlflow.get_experiment_by_name(str(Path.cwd())).experiment_id
    runs = mlflow.MlflowClient().search_runs([experiment_id], order_by=["start_time DESC"])
    return next(run for run in runs if run.data.tags[names.TAG_STEP] == step)
