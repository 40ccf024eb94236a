"""The report and the description of a run say what was done and how; what others wrote is only text, and stays."""

from __future__ import annotations

import json
import logging
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING

import click
import mlflow
import pytest
from helpers import fake_tuning
from helpers.commands import FAST
from helpers.fakes import FakeRunner
from helpers.tuning_histories import TaskRound, history_of
from mlflow.entities import Run
from mlflow.utils.mlflow_tags import MLFLOW_RUN_NOTE

from ansor_mlflow import names, tracking
from ansor_mlflow.cli.main import cli
from ansor_mlflow.device.device import Device
from ansor_mlflow.errors import MachineError
from ansor_mlflow.lowering.network import LoweredNetwork
from ansor_mlflow.networks.load import load_network
from ansor_mlflow.parameters import TuneOptions
from ansor_mlflow.steps.tuning import tuning_report as report
from ansor_mlflow.steps.tuning.tune import tune
from ansor_mlflow.steps.tuning.tuning_report import TuningReport
from ansor_mlflow.tracking.observer import MlflowObserver
from ansor_mlflow.tracking.outbox import Message, Outbox
from ansor_mlflow.tracking.report.figures import draw_gain, save_figure
from ansor_mlflow.tracking.report.history import TuningHistory
from ansor_mlflow.tracking.report.note import command_lines, note_tags, tuning_note
from ansor_mlflow.tracking.report.pages import KernelNote, ScheduleText, tuning_page
from ansor_mlflow.tracking.run import StepRun
from ansor_mlflow.trials import StopReason, TrialStatus, TuningPlan, TuningRound
from ansor_mlflow.tuning.job import TuningJob

if TYPE_CHECKING:
    from tvm.target import Target

NUM_TRIALS = 6
VOID = {"meta", "img", "br"}
HOSTILE = "<script>alert(1)</script></pre><img src=http://evil/x onerror=alert(1)>\"'&amp;"
ROUNDS = [
    TaskRound(index=0, run_s=[4e-3, 2e-3]),
    TaskRound(index=1, run_s=[3e-3], failed=[(TrialStatus.CRASHED, "signal 11")]),
    TaskRound(index=0, run_s=[1e-3]),
]


class Page(HTMLParser):
    """A parsed page: well-formed, or this fails."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.rows: list[list[str]] = []
        self.texts: list[str] = []
        """Of `<pre>`."""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "pre":
            self.texts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert tag in VOID or self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self._open):
            self.rows[-1][-1] += data
        if "pre" in self._open:
            self.texts[-1] += data

    def require_self_contained(self) -> None:
        """Fails where anything is loaded, or run."""
        assert not self.tags & {"script", "link", "iframe", "object", "embed", "base", "form"}
        assert not [name for name, _ in self.attributes if name.startswith("on")]
        sources = [value for name, value in self.attributes if name in ("src", "href", "srcset", "data", "action")]
        assert all(source.startswith("data:image/png;base64,iVBOR") for source in sources)


IN_US = {"µs": 1.0, "ms": 1e3, "s": 1e6}
"""Microseconds of the units of times."""


def page_of(history: TuningHistory, directory: Path, **shown: object) -> tuple[Page, str]:
    text = tuning_page(history, directory, run_id="0123", **shown)
    page = Page(text)
    page.require_self_contained()
    assert "url(" not in text
    assert "@import" not in text
    return page, text


def test_the_numbers_of_the_tuning(tmp_path: Path) -> None:
    history = history_of(ROUNDS, [2, 1])
    kernel = KernelNote(sketch="rows: lanes 8", own_ratio=1.25, roof_share=0.5, limit="memory")
    kernels = {history.tasks[1].state.info.workload_hash: kernel}
    page, text = page_of(history, tmp_path, commands=["ansor-mlflow tune"], kernels=kernels)
    assert page.rows[:5] == [
        ["estimated latency", "5 ms"],
        ["before, with first measurements", "11 ms"],
        ["trials", "5, of which 1 failed"],
        ["time", "3.0 minutes"],
        ["ended", "the budget of trials was spent (trials)"],
    ]
    header, first, second = page.rows[5:8]
    assert (header[:2], header[3], header[7]) == (["task", "weight"], "best (ms)", "gain (ms)")
    # weight, share, best, GFLOP/s, trials, failed, gain
    assert first == ["task1", "1", "60.0%", "3", "0.3333", "2", "1", "0", "trials"]
    assert second[:8] == ["task0", "2", "40.0%", "1", "1", "3", "0", "6"]
    assert page.rows[8][:2] == ["task", "sketch"]
    assert page.rows[9] == ["task1", "rows: lanes 8", "50%", "memory", "1.25"]
    assert page.rows[10] == ["task0", "", "–", "", "–"]
    assert "crashed: " in text
    assert page.texts == ["signal 11", "ansor-mlflow tune"]
    assert "img" not in page.tags  # there are no figures in the directory


def test_figures_environment_and_warm_start_are_shown(tmp_path: Path) -> None:
    history = history_of(ROUNDS, [2, 1])
    save_figure(draw_gain(history), tmp_path / names.GAIN_FIGURE)
    environment = {"cpu_model": "AMD EPYC 9B14", "packages": {"apache-tvm": "0.27.0"}, "load_average": [0.5, 1]}
    (tmp_path / names.ENVIRONMENT_FILE).write_text(json.dumps(environment))
    taken = {"source": "runs:/4567", "num_records": 9, "num_applied": 8, "num_transferred": 1, "note": "of a friend"}
    (tmp_path / names.WARM_START_FILE).write_text(json.dumps([taken]))
    page, _ = page_of(history, tmp_path)
    assert [value for name, value in page.attributes if name == "src"]
    assert ["cpu_model", "AMD EPYC 9B14"] in page.rows
    assert ["packages.apache-tvm", "0.27.0"] in page.rows
    assert ["load_average", "[0.5, 1]"] in page.rows
    assert ["runs:/4567", "9", "8", "1", "of a friend"] in page.rows


def test_what_others_wrote_is_only_text(tmp_path: Path) -> None:
    rounds = [TaskRound(index=0, run_s=[1e-3], failed=[(TrialStatus.BUILD_FAILED, HOSTILE)])]
    history = history_of(rounds, [1], network=HOSTILE)
    (tmp_path / names.ENVIRONMENT_FILE).write_text(json.dumps({HOSTILE: HOSTILE}))
    schedule = ScheduleText(task=HOSTILE, lines=[HOSTILE])
    page, text = page_of(history, tmp_path, commands=[HOSTILE], schedules=[schedule])
    assert page.texts == [HOSTILE, HOSTILE, HOSTILE]
    assert [HOSTILE, HOSTILE] in page.rows
    assert HOSTILE not in text


def test_a_task_without_a_valid_trial_is_told(tmp_path: Path) -> None:
    history = history_of([*ROUNDS, TaskRound(index=2, failed=[(TrialStatus.TIMED_OUT, "30 s")])], [2, 1, 1])
    page, _ = page_of(history, tmp_path)
    assert ["without a valid trial", "1 of 3 tasks"] in page.rows
    assert ["task2", "1", "–", "–", "–", "1", "1", "–"] in [row[:8] for row in page.rows]


def test_commands_hold_no_credentials(tmp_path: Path) -> None:
    _, text = page_of(history_of(ROUNDS, [2, 1]), tmp_path, commands=["tune --warm-start s3://bob:hunter2@host"])
    assert "hunter2" not in text


def tune_small(small_onnx: Path, experiment_id: str, monkeypatch: pytest.MonkeyPatch, directory: Path) -> Run:
    """Tunes the small network for real, in a directory of its own."""
    monkeypatch.chdir(directory)
    options = {**FAST, "network": str(small_onnx), "trials": str(NUM_TRIALS), "num_trials_per_round": "2"}
    return mlflow.get_run(tune(TuneOptions.model_validate(options)).run_id)


def artifact(run: Run, name: str) -> Path:
    return Path(mlflow.artifacts.download_artifacts(run_id=run.info.run_id, artifact_path=name))


@pytest.mark.system
def test_a_tuning_ends_with_a_report(
    small_onnx: Path, new_experiment: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = tune_small(small_onnx, new_experiment, monkeypatch, tmp_path)
    text = artifact(run, names.REPORT_FILE).read_text()
    page = Page(text)
    page.require_self_contained()
    for row, name in zip(page.rows, (names.BEST_LATENCY_MS, names.CONFIRMED_LATENCY_MS), strict=False):
        number, unit = row[1].split()
        assert float(number) * IN_US[unit] == pytest.approx(1e3 * run.data.metrics[name], rel=1e-3)  # rounded twice
    tasks = json.loads(artifact(run, names.TASKS_FILE).read_text())
    shown = {row[0]: row for row in page.rows if len(row) == 9}
    (unit,) = re.findall(r"best \((\w+)\)", shown["task"][3])
    for task in tasks:
        assert float(shown[task["task"]][3]) * IN_US[unit] == pytest.approx(task["latency_us"], rel=1e-3)
    assert len(re.findall("<img ", text)) >= 4
    assert artifact(run, names.ROOFLINE_FIGURE).read_bytes().startswith(b"\x89PNG")
    programs = {row[0]: row for row in page.rows if len(row) == 5 and row[0] in shown}
    of_sums = [programs[task["task"]] for task in tasks if task["flops"]]
    assert all(roof != "–" and limit in ("arithmetic", "memory") for _, _, roof, limit, _ in of_sums)
    assert any(sketch.startswith("register tile: lanes ") for _, sketch, *_ in of_sums)
    schedules = [text for text in page.texts if "sch." in text]
    assert 1 <= len(schedules) <= 3
    assert all(re.match(r"b0 = sch\.get_\w*block\(", schedule) for schedule in schedules)
    assert any(text.startswith("ansor-mlflow tune --network ") for text in page.texts)
    assert run.info.run_id in text
    assert "Tuned **small**" in run.data.tags[MLFLOW_RUN_NOTE]


@pytest.mark.nightly
def test_a_report_that_cannot_be_made_is_a_warning(
    small_onnx: Path,
    new_experiment: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MachineError("no CPU is free")

    monkeypatch.setattr(report, "quick_roofline", fail)
    monkeypatch.setattr(tracking, "tuning_page", fail)
    with caplog.at_level(logging.WARNING, "ansor_mlflow"):
        run = tune_small(small_onnx, new_experiment, monkeypatch, tmp_path)
    assert run.info.status == "FINISHED"
    assert "the run gets no roofline: no CPU is free" in caplog.text
    assert "the run gets no report: no CPU is free" in caplog.text
    files = {file.path for file in mlflow.MlflowClient().list_artifacts(run.info.run_id)}
    assert names.TASK_SHARE_FIGURE in files
    assert not {names.REPORT_FILE, names.ROOFLINE_FIGURE} & files


def end_with(error: BaseException, history: TuningHistory, job: TuningJob, directory: Path) -> Run:
    experiment_id = mlflow.MlflowClient().create_experiment(str(directory), (directory / "artifacts").as_uri())
    run_id = mlflow.MlflowClient().create_run(experiment_id).info.run_id
    outbox = Outbox(run_id, directory)
    shapes = load_network("dense:4,4,4")
    reporter = TuningReport(history=history, job=job, shapes=shapes, outbox=outbox, directory=directory, commands=())
    with pytest.raises(type(error)), reporter.at_the_end():
        raise error
    outbox.close(20)
    return mlflow.get_run(run_id)


@pytest.fixture
def job(dense: LoweredNetwork, host_target: Target, tmp_path: Path) -> TuningJob:
    return TuningJob(network="dense", lowered=dense, device=Device.of(host_target, 1), records=tmp_path / "records")


@pytest.mark.usefixtures("experiment_id")
def test_an_interrupted_tuning_has_a_report_and_measures_nothing(job: TuningJob, tmp_path: Path) -> None:
    history = history_of(ROUNDS, [2, 1], stop_reason=StopReason.INTERRUPTED)
    run = end_with(KeyboardInterrupt(), history, job, tmp_path)
    files = {file.path for file in mlflow.MlflowClient().list_artifacts(run.info.run_id)}
    assert files == {names.REPORT_FILE}
    assert "it was interrupted" in artifact(run, names.REPORT_FILE).read_text()


@pytest.mark.usefixtures("experiment_id")
def test_a_tuning_that_failed_says_so_in_its_description(job: TuningJob, tmp_path: Path) -> None:
    history = history_of(ROUNDS, [2, 1])
    history.result = None
    run = end_with(MachineError("no space is left"), history, job, tmp_path)
    assert "ended by an error: no space is left" in run.data.tags[MLFLOW_RUN_NOTE]
    assert list(mlflow.MlflowClient().list_artifacts(run.info.run_id)) == []


COMMANDS = command_lines("tune", TuneOptions(network="resnet-18", trials=640))


@pytest.fixture
def run_id(experiment_id: str) -> str:
    return str(mlflow.MlflowClient().create_run(experiment_id).info.run_id)


def note_of(run_id: str) -> str | None:
    return mlflow.get_run(run_id).data.tags.get(MLFLOW_RUN_NOTE)


def test_our_note_is_replaced_and_a_users_stays(run_id: str, tmp_path: Path) -> None:
    def deliver(note: str) -> str | None:
        Message(note=note).deliver(run_id, tmp_path)
        return note_of(run_id)

    assert deliver("tuning…") == "tuning…"
    assert deliver("tuned") == "tuned"
    assert deliver("tuned") == "tuned"  # as when the answer to the first was lost
    mlflow.MlflowClient().set_tag(run_id, MLFLOW_RUN_NOTE, "tuned, and looks good")
    assert deliver("tuned again") == "tuned, and looks good"


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


def options_from(line: str) -> dict[str, str]:
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


class NoteReader:
    """A `TuningObserver` that reads the run's note after every round."""

    def __init__(self, run_id: str) -> None:
        self.notes: list[str | None] = []
        self._run_id = run_id

    def tuning_started(self, plan: TuningPlan) -> None: ...

    def round_finished(self, round_: TuningRound) -> None:
        self.notes.append(note_of(self._run_id))

    def tuning_finished(self, result: object) -> None: ...


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
        assert note.startswith("Tuning… **dense** for host: 2 tasks, 8 trials.\n\n    ")
        assert "    ansor-mlflow tune --trials 640" in note
    final = note_of(run_id)
    assert final
    assert final.startswith("Tuned **dense** for host: 2 tasks, estimated **4 ms**, before 5 ms.\n\n    ")
    assert "- estimated latency: 4 ms" in final
    assert "- trials: 8\n" in final
    assert "the budget of trials was spent (trials)" in final
    assert "    mlflow run . --env-manager local -e tune -P trials=640\n    ansor-mlflow tune --trials 640" in final


def ended(stop_reason: str = StopReason.TRIALS, network: str = "resnet") -> TuningHistory:
    rounds = [TaskRound(index=0, run_s=[4e-3, 2e-3], failed=[(TrialStatus.CRASHED, "signal 11")])]
    return history_of(rounds, [2], stop_reason=stop_reason, network=network)


def test_a_name_is_no_markup() -> None:
    note = tuning_note(ended(network="a](http://evil)\n\n# <img src=x>|`"), ())
    assert "](http" not in note.replace("\\](", "")
    assert "\n#" not in note
    assert "<img" not in note.replace("\\<", "")
