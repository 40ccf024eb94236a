"""The description of a run says what was done and how to do it again, and never overwrites a user's words."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click
import mlflow
import pytest
from helpers import fake_tuning
from helpers.tuning_histories import TaskRound, history_of
from mlflow.utils.mlflow_tags import MLFLOW_RUN_NOTE

from ansor_mlflow import names
from ansor_mlflow.cli.main import cli
from ansor_mlflow.lowering.network import LoweredNetwork
from ansor_mlflow.parameters import PipelineOptions, TuneOptions
from ansor_mlflow.testing import FakeRunner
from ansor_mlflow.tracking.observer import MlflowObserver
from ansor_mlflow.tracking.outbox import Message, Outbox
from ansor_mlflow.tracking.report.history import TuningHistory
from ansor_mlflow.tracking.report.note import command_lines, note_tags, pipeline_note, tuning_note
from ansor_mlflow.tracking.run import StepRun
from ansor_mlflow.trials import StopReason, TrialStatus, TuningPlan, TuningRound

if TYPE_CHECKING:
    from tvm.target import Target

COMMANDS = command_lines("tune", TuneOptions(network="resnet-18", trials=640))


@pytest.fixture
def run_id(experiment_id: str) -> str:
    return str(mlflow.MlflowClient().create_run(experiment_id).info.run_id)


def note_of(run_id: str) -> str | None:
    return mlflow.get_run(run_id).data.tags.get(MLFLOW_RUN_NOTE)


# -- whose words stay --------------------------------------------------------------------------------------------------


def test_our_note_is_replaced_and_a_users_stays(run_id: str, tmp_path: Path) -> None:
    def deliver(note: str) -> str | None:
        Message(note=note).deliver(run_id, tmp_path)
        return note_of(run_id)

    assert deliver("tuning…") == "tuning…"
    assert deliver("tuned") == "tuned"
    assert deliver("tuned") == "tuned"  # as when the answer to the first was lost
    mlflow.MlflowClient().set_tag(run_id, MLFLOW_RUN_NOTE, "tuned, and looks good")
    assert deliver("tuned again") == "tuned, and looks good"


def test_a_note_that_was_there_before_stays(run_id: str, tmp_path: Path) -> None:
    mlflow.MlflowClient().set_tag(run_id, MLFLOW_RUN_NOTE, "mine")
    Message(note="tuned", tags={"kind": "test"}).deliver(run_id, tmp_path)
    assert note_of(run_id) == "mine"
    assert mlflow.get_run(run_id).data.tags["kind"] == "test"


def test_a_note_that_was_removed_does_not_come_back() -> None:
    ours = note_tags({}, "tuning…")
    assert note_tags({**ours, MLFLOW_RUN_NOTE: ""}, "tuned") == {}


def test_a_note_holds_no_credentials(run_id: str, tmp_path: Path) -> None:
    outbox = Outbox(run_id, tmp_path)
    outbox.put(Message(note="from s3://bob:hunter2@host/x"))
    outbox.close(10)
    assert note_of(run_id) == "from s3://…@host/x"
    StepRun(run_id, tmp_path).log_note("from https://bob:hunter2@host/y")
    assert note_of(run_id) == "from https://…@host/y"


# -- how to do it again ------------------------------------------------------------------------------------------------


def options_from(line: str) -> dict[str, str]:
    """What the command line sets, as the command itself reads it."""
    program, entry_point, *flags = shlex.split(line)
    assert program == "ansor-mlflow"
    command = cli.get_command(click.Context(cli), entry_point)
    assert command is not None
    given = command.make_context(entry_point, flags).params
    return {name: value for name, value in given.items() if value}


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"network": "my models/a 'b' $(c).onnx", "trials": 7},
        {"input_shapes": {"data": [1, 3, 8, 8]}, "cache_flush": True, "max_minutes": 2.5},
        {"warm_start": ("runs:/0123", "other records"), "target": "llvm -mcpu=znver4", "seed": 3},
    ],
)
def test_the_commands_have_the_parameters_that_differ(parameters: dict[str, object]) -> None:
    options = TuneOptions.model_validate({**parameters, "resume_run": "0123"})
    project, command = command_lines("tune", options)
    expected = {name: text for name, text in options.changed().items() if name != "resume_run"}
    assert options_from(command) == expected
    assert shlex.split(project)[:7] == ["mlflow", "run", ".", "--env-manager", "local", "-e", "tune"]
    pairs = shlex.split(project)[7:]
    assert pairs[::2] == ["-P"] * len(expected)
    assert dict(pair.split("=", 1) for pair in pairs[1::2]) == expected


def test_the_commands_hold_no_credentials() -> None:
    lines = command_lines("main", PipelineOptions(network="resnet-18", warm_start="s3://bob:hunter2@host/pool"))
    assert not [line for line in lines if "hunter2" in line]
    assert lines[0].startswith("mlflow run . --env-manager local -P warm_start=")


# -- what it says ------------------------------------------------------------------------------------------------------


class NoteReader:
    """A `TuningObserver` that reads the run's note after every round."""

    def __init__(self, run_id: str) -> None:
        self.notes: list[str | None] = []
        self._run_id = run_id

    def tuning_started(self, plan: TuningPlan) -> None:
        """Does nothing."""

    def round_finished(self, round_: TuningRound) -> None:
        """Reads."""
        self.notes.append(note_of(self._run_id))

    def tuning_finished(self, result: object) -> None:
        """Does nothing."""


def test_a_tuning_is_described_while_it_goes_on_and_afterwards(
    dense: LoweredNetwork, host_target: Target, run_id: str, tmp_path: Path
) -> None:
    outbox, reader = Outbox(run_id, tmp_path), NoteReader(run_id)
    observers = [MlflowObserver(outbox, tmp_path, COMMANDS), reader]
    runner = FakeRunner(run_s=(3e-3, 2e-3))
    fake_tuning.tune(dense, host_target, tmp_path / "records", observers=observers, runner=runner, trials=8)
    outbox.close(20)
    assert reader.notes
    for note in reader.notes:
        assert note
        assert note.startswith("Tuning… **dense** for host: 2 tasks, 8 trials.")
        assert "    ansor-mlflow tune --trials 640" in note
    final = note_of(run_id)
    assert final
    assert "Tuned **dense** for host: 2 tasks." in final
    assert "- estimated latency: 4 ms" in final
    assert "- trials: 8\n" in final
    assert "the budget of trials was spent (trials)" in final
    assert "    mlflow run . --env-manager local -e tune -P trials=640\n    ansor-mlflow tune --trials 640" in final


def ended(stop_reason: str = StopReason.TRIALS, network: str = "resnet") -> TuningHistory:
    rounds = [TaskRound(index=0, run_s=[4e-3, 2e-3], failed=[(TrialStatus.CRASHED, "signal 11")])]
    return history_of(rounds, [2], stop_reason=stop_reason, network=network)


def test_an_interrupt_and_failed_trials_are_told() -> None:
    note = tuning_note(ended(StopReason.INTERRUPTED), ())
    assert "it was interrupted" in note
    assert "- trials: 3, of which 1 failed\n" in note


def test_an_error_is_told() -> None:
    history = ended()
    history.result = None
    assert "ended by an error: no space is left" in tuning_note(history, COMMANDS, "no space is left")


def test_a_name_is_no_markup() -> None:
    note = tuning_note(ended(network="a](http://evil)\n\n# <img src=x>|`"), ())
    assert "](http" not in note.replace("\\](", "")
    assert "\n#" not in note
    assert "<img" not in note.replace("\\<", "")


def test_the_pipelines_note_has_the_speedups() -> None:
    commands = command_lines("main", PipelineOptions(network="resnet-18"))
    assert "to be tuned, compiled and evaluated" in pipeline_note("resnet-18", commands)
    metrics = {
        names.LATENCY_MS: 20.25,
        names.UNTUNED_LATENCY_MS: 3900.0,
        names.rival_latency_ms("onnxruntime"): 17.0,
        names.rival_latency_ms("openvino"): 16.5,
        names.SPEEDUP_VS_UNTUNED: 192.59,
        names.speedup_vs("onnxruntime"): 0.8395,
        names.SPEEDUP_VS_BEST: 0.8148,
        names.TRIALS_MEASURED: 640.0,
    }
    tags = {
        names.TAG_TARGET: "llvm znver4 ×2",
        names.TAG_BEST_RIVAL: "openvino",
        names.TAG_STOP_REASON: "minutes",
        names.TAG_MODEL_URI: "models:/m-1",
    }
    note = pipeline_note("resnet-18", commands, tags, metrics)
    for part in ("for llvm znver4 ×2", "tuned: 20.25 ms", "192.6 ×", "0.84 ×", "640", "budget of time", "models:/m-1"):
        assert part in note
    for line in ("- OpenVINO: 16.5 ms", "- speedup over the best of them: 0.81 ×", "- best of them: openvino"):
        assert f"{line}\n" in note
    assert "    mlflow run . --env-manager local\n    ansor-mlflow main" in note
