"""Figures show what was measured, whatever the number of tasks, and never end a tuning."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlflow
import pytest
from helpers import fake_tuning
from helpers.lanes import every_second
from helpers.tuning_histories import TaskRound, history_of, large_history
from numpy.testing import assert_allclose

from ansor_mlflow import names
from ansor_mlflow.foreign import duration
from ansor_mlflow.lowering import LoweredNetwork
from ansor_mlflow.tracking import Message, MlflowObserver, Outbox, TuningHistory, draw_roofline, observer, save_figure
from ansor_mlflow.tracking.report.figures import (
    draw_convergence,
    draw_failures,
    draw_gain,
    draw_speedups,
    draw_task_share,
)
from ansor_mlflow.trials import TrialStatus
from ansor_mlflow.tuning import Roofline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from tvm.target import Target

MAX_BYTES = 300_000
ROOFLINE = Roofline(peak_flops_per_s=400e9, bandwidth_bytes_per_s=20e9)
TWO_TASKS = [
    TaskRound(index=0, run_s=[4e-3, 2e-3]),
    TaskRound(index=1, run_s=[3e-3], failed=[(TrialStatus.CRASHED, "signal 11")]),
    TaskRound(index=0, run_s=[1e-3, 5e-3]),
]
"""With the weights 2 and 1 the network takes 7, then 5 ms; task 0 began with 8 of 11 ms."""


@pytest.fixture
def history() -> TuningHistory:
    return history_of(TWO_TASKS, [2, 1])


def draw_roofs(history: TuningHistory) -> Figure:
    return draw_roofline(history, ROOFLINE, {task.state.info.workload_hash: 10_000 for task in history.tasks})


ALL = [draw_convergence, draw_task_share, draw_gain, draw_failures, draw_roofs]


def legend_texts(figure: Figure) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def widths(axes: Axes, number: int = 0) -> list[float]:
    return [bar.get_width() for bar in axes.containers[number]]


def row_names(axes: Axes) -> list[str]:
    return [label.get_text() for label in axes.get_yticklabels()]


def test_convergence_shows_the_network_and_every_task(history: TuningHistory) -> None:
    figure = draw_convergence(history)
    by_trials, by_time, tasks = figure.axes
    assert [axes.get_xlabel() for axes in figure.axes] == ["trials", "time (minutes)", "trials"]
    assert by_trials.get_ylabel() == "best latency, estimated (ms)"
    assert tasks.get_ylabel() == "time of a task / its best time"
    assert_allclose(by_trials.lines[0].get_xydata(), [(4, 7), (6, 5)])
    assert_allclose(by_time.lines[0].get_xydata(), [(2, 7), (3, 5)])
    dots, first, second = tasks.lines
    assert_allclose(dots.get_xydata(), [(1, 4), (2, 2), (3, 1), (5, 1), (6, 5)])
    assert_allclose(
        second.get_xydata() if second.get_label() == "task0" else first.get_xydata(), [(1, 4), (2, 2), (5, 1), (6, 1)]
    )
    assert set(legend_texts(figure)) == {"a valid trial", "task0", "task1"}
    assert figure.get_suptitle() == "resnet · 6 trials · llvm znver4 ×2"


def labels_of(axis: Axis) -> list[str]:
    """What is written beside an axis: the texts within its range."""
    low, high = axis.get_view_interval()
    ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
    return [t.label1.get_text() for t in ticks if low <= t.get_loc() <= high and t.label1.get_visible()]


@pytest.mark.parametrize(
    ("first_s", "best_s", "unit", "labels"),
    [
        (6.8e-3, 2.1e-3, "ms", {"5"}),
        (4.9e-3, 1.05e-3, "ms", {"2"}),
        (8.5e-1, 2.2e-5, "µs", {"100", "1000", "10000", "100000"}),
        (9.0, 1.1, "s", {"2", "5"}),
    ],
)
def test_log_axes_have_plain_numbers(first_s: float, best_s: float, unit: str, labels: set[str]) -> None:
    figure = draw_convergence(
        history_of([TaskRound(index=0, run_s=[first_s]), TaskRound(index=0, run_s=[best_s])], [1])
    )
    figure.draw_without_rendering()
    by_trials, by_time, _ = figure.axes
    assert by_trials.get_yscale() == "log"
    assert by_trials.get_ylabel() == f"best latency, estimated ({unit})"
    assert by_trials.get_title(loc="right") == duration(best_s)
    shown = list(filter(None, labels_of(by_trials.yaxis)))
    assert labels <= set(shown)
    assert 2 <= len(shown) <= 9
    assert all(re.fullmatch(r"[\d.]+", text) for text in shown)
    assert list(filter(None, labels_of(by_time.yaxis))) == []


def test_the_share_before_is_that_of_first_measurements(history: TuningHistory) -> None:
    figure = draw_task_share(history)
    (axes,) = figure.axes
    assert row_names(axes) == ["task0", "task1"]
    assert_allclose(widths(axes, 0), [100 * 8 / 11, 100 * 3 / 11])
    assert_allclose(widths(axes, 1), [40, 60])
    assert [text.get_text() for text in axes.texts] == ["8 → 2 ms", "3 → 3 ms"]
    assert legend_texts(figure) == ["before: 11 ms in all", "after: 5 ms in all"]
    assert "(%)" in axes.get_xlabel()


def test_a_task_with_an_earlier_record_began_with_it() -> None:
    rounds = [
        TaskRound(index=0, run_s=[6e-3, 1e-3]),
        TaskRound(index=1, run_s=[4e-3]),
        TaskRound(index=1, run_s=[1e-3]),
    ]
    history = history_of(rounds, [1, 1, 1], known_s={0: 2e-3, 1: 2e-3, 2: 5e-3})
    assert [task.before_s for task in history.tasks] == [2e-3, 2e-3, 5e-3]
    assert [task.after_s for task in history.tasks] == [1e-3, 1e-3, 5e-3]


def test_gain_stands_beside_the_trials_that_it_cost(history: TuningHistory) -> None:
    trials, gains = draw_gain(history).axes
    assert row_names(trials) == ["task0", "task1"]
    assert widths(trials) == [4, 2]
    assert_allclose(widths(gains), [6, 0], atol=1e-12)
    assert trials.get_xlabel().startswith("trials")
    assert gains.get_xlabel().endswith("(ms)")


def test_failures_are_counted_by_task_and_class() -> None:
    crashed, timed_out = (TrialStatus.CRASHED, "signal 11"), (TrialStatus.TIMED_OUT, "30 s")
    rounds = [
        TaskRound(index=0, run_s=[1e-3], failed=[crashed]),
        TaskRound(index=1, run_s=[1e-3], failed=[timed_out, crashed, timed_out]),
        TaskRound(index=2, run_s=[1e-3]),
    ]
    history = history_of(rounds, [1, 1, 1])
    figure = draw_failures(history)
    (axes,) = figure.axes
    assert row_names(axes) == ["task1", "task0"]
    assert (widths(axes, 0), widths(axes, 1)) == ([2, 0], [1, 1])
    assert legend_texts(figure) == ["timed out: 2 of 7 trials", "crashed: 2 of 7 trials"]
    assert {(f.status, f.num_trials, f.task, f.error) for f in history.failures()} == {
        (TrialStatus.CRASHED, 2, "task0", "signal 11"),
        (TrialStatus.TIMED_OUT, 2, "task1", "30 s"),
    }


def test_the_roofline_has_every_task_that_computes(history: TuningHistory) -> None:
    figure = draw_roofline(history, ROOFLINE, {"0x0": 10_000, "0x1": 1_000_000})
    (axes,) = figure.axes
    roof, *points = axes.lines
    assert_allclose(roof.get_ydata()[1:], [400, 400])
    assert_allclose(roof.get_xdata()[1], 20)  # FLOP/byte at which 20 GB/s feed 400 GFLOP/s
    assert_allclose(roof.get_ydata()[0], roof.get_xdata()[0] * 20)
    found = sorted((float(point.get_xdata()[0]), float(point.get_ydata()[0])) for point in points)
    assert_allclose(found, [(1, 1 / 3), (100, 1)])
    assert "FLOP/byte" in axes.get_xlabel()
    assert axes.get_ylabel() == "GFLOP/s"
    texts = legend_texts(figure)
    assert texts[0] == "roof of this host: 400 GFLOP/s of float32, 20 GB/s"
    assert set(texts[1:]) == {"task1, 60% of the time", "task0, 40% of the time"}
    nothing = history_of(TWO_TASKS, [2, 1], flops=0)
    assert len(draw_roofs(nothing).axes[0].lines) == 1


def test_small_tasks_share_a_bar() -> None:
    history = large_history(60, 960)
    (axes,) = draw_task_share(history).axes
    assert row_names(axes)[-1] == "46 others"
    assert len(row_names(axes)) == 15
    for group in range(2):
        assert sum(widths(axes, group)) == pytest.approx(100)
    trials, gains = draw_gain(history).axes
    assert sum(widths(trials)) == 960
    assert sum(widths(gains)) == pytest.approx(1e3 * (history.before_s - history.after_s))
    assert sum(widths(draw_failures(history).axes[0])) == 120


def test_speedups_are_in_order_around_one() -> None:
    figure = draw_speedups("Sweep all", {"slower": 0.8, "fastest": 3.5, "a_$network$": 1.2})
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["slower", r"a_\$network\$", "fastest"]
    (points,) = (each for each in axes.collections if len(each.get_offsets()) == 3)
    assert_allclose(points.get_offsets()[:, 0], [0.8, 1.2, 3.5])
    assert axes.get_xscale() == "log"
    many = draw_speedups("Sweep many", {str(number): 1 + number / 100 for number in range(500)})
    assert not many.axes[0].get_yticklabels()


@pytest.mark.parametrize("draw", ALL)
@pytest.mark.parametrize(("num_tasks", "num_trials"), every_second([(60, 12000), (1, 16)]))
def test_pictures_are_small_and_opaque(
    draw: Callable[[TuningHistory], Figure], num_tasks: int, num_trials: int, tmp_path: Path
) -> None:
    figure = draw(large_history(num_tasks, num_trials))
    save_figure(figure, tmp_path / "figure.png")
    content = (tmp_path / "figure.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert 5_000 < len(content) < MAX_BYTES
    assert figure.get_facecolor() == (1, 1, 1, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["figure.png"]


def test_an_empty_history_is_drawn_and_a_name_is_no_formula(tmp_path: Path) -> None:
    for draw in ALL:  # where nothing is known yet
        save_figure(draw(TuningHistory()), tmp_path / "figure.png")
    history = history_of(TWO_TASKS, [2, 1], network="$\\frac{1}$\n" + "x" * 200)
    for draw in ALL:
        save_figure(draw(history), tmp_path / "figure.png")
    assert len(draw_gain(history).get_suptitle()) < 110


class SpyOutbox(Outbox):
    def __init__(self, run_id: str, directory: Path) -> None:
        super().__init__(run_id, directory)
        self.messages: list[Message] = []

    def put(self, message: Message) -> None:
        self.messages.append(message)
        super().put(message)

    def flush(self, timeout_s: float) -> bool:
        """See `Outbox.flush`; waits longer, because a busy machine is no server that is away."""
        return super().flush(timeout_s + 20)

    def num_uploads(self, artifact: str) -> int:
        return sum((artifact, "") in message.artifacts for message in self.messages)


TuneFake = Callable[..., SpyOutbox]


@pytest.fixture
def tune(dense: LoweredNetwork, host_target: Target, new_experiment: str, tmp_path: Path) -> TuneFake:

    def tune(**options: Any) -> SpyOutbox:
        run_id = str(mlflow.MlflowClient().create_run(new_experiment).info.run_id)
        outbox = SpyOutbox(run_id, tmp_path)
        logger = MlflowObserver(outbox, tmp_path)
        fake_tuning.tune(dense, host_target, tmp_path / "records", observers=[logger], trials=16, **options)
        outbox.close(20)
        return outbox

    return tune


def artifacts_of(experiment_id: str) -> set[str]:
    (run,) = mlflow.search_runs([experiment_id], output_format="list")
    return {file.path for file in mlflow.MlflowClient().list_artifacts(run.info.run_id)}


def test_a_tuning_logs_its_figures_once(tune: TuneFake, new_experiment: str) -> None:
    outbox = tune()
    figures = {names.CONVERGENCE_FIGURE, names.TASK_SHARE_FIGURE, names.GAIN_FIGURE}
    assert {name for name in artifacts_of(new_experiment) if name.endswith(".png")} == figures  # nothing failed
    assert [outbox.num_uploads(name) for name in figures] == [1, 1, 1]


@pytest.mark.system
def test_convergence_is_refreshed_when_it_is_old(tune: TuneFake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer, "_REFRESH_S", 0.0)
    outbox = tune()
    num_rounds = sum(names.TRIALS_PER_MINUTE in message.metrics for message in outbox.messages)
    assert outbox.num_uploads(names.CONVERGENCE_FIGURE) == num_rounds + 1 > 2
    assert outbox.num_uploads(names.GAIN_FIGURE) == 1


def test_a_figure_that_cannot_be_made_ends_no_tuning(
    tune: TuneFake, new_experiment: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: TuningHistory) -> Figure:
        raise ZeroDivisionError("no axis")

    monkeypatch.setitem(observer._FIGURES, names.CONVERGENCE_FIGURE, fail)
    with caplog.at_level(logging.WARNING, "ansor_mlflow"):
        tune()
    assert "the figure convergence.png could not be made: no axis" in caplog.text
    assert names.CONVERGENCE_FIGURE not in artifacts_of(new_experiment)
    assert names.TASKS_FILE in artifacts_of(new_experiment)
