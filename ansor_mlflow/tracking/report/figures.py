"""The figures of a tuning run and of a latency: opaque white, for MLflow's light and dark theme, in colours that the
colour-blind tell apart.

The palette is that of Okabe and Ito, "Color Universal Design", 2008, https://jfly.uni-koeln.de/color/.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from ansor_mlflow.files import new_file
from ansor_mlflow.foreign import duration, time_unit
from ansor_mlflow.measuring import Latency
from ansor_mlflow.tracking.report.history import CurvePoint, TaskHistory, TuningHistory
from ansor_mlflow.trials import TrialStatus
from ansor_mlflow.tuning import Roofline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9"
_COLORS = (BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY)
_GREY = "#8c8c8c"
_CLASSES = tuple(status for status in TrialStatus if status is not TrialStatus.OK)
_NUM_NAMED = 5  # tasks with a colour of their own: those that take most of the time
_MAX_BARS = 15  # tasks that have a bar of their own; the others share one
_MAX_NAMED = 60  # networks of a sweep that have their names beside them
_MAX_RATIO = 30.0  # time over the best time of the task beyond which trials lie outside of the figure
_MAX_LOG_LABELS = 8
_MAX_DOTS = 4000  # trials that are drawn; of more, every second, third and so on is
_LAYOUT = {"left": 0.085, "right": 0.985, "bottom": 0.175, "top": 0.91, "hspace": 0.26, "wspace": 0.06}
"""Fixed: looking for the best layout doubles the time that drawing takes, and this is drawn while a tuning goes on."""


def save_figure(figure: Figure, path: Path) -> None:
    """Writes a figure as PNG. A reader finds the whole of the old file or of the new one."""
    with new_file(path) as file:
        figure.savefig(file, format="png")


def draw_convergence(history: TuningHistory) -> Figure:
    """Draws the best estimated latency of the network against trials and against time, and below it every trial and
    every task's best, relative to the best that the task has now; empty frames where nothing is known yet.
    """
    figure = _new_figure(history.title, 7.5, is_laid_out=True)
    grid = figure.add_gridspec(2, 2, **_LAYOUT)
    by_trials = figure.add_subplot(grid[0, 0])
    by_time = figure.add_subplot(grid[0, 1], sharey=by_trials)
    tasks = figure.add_subplot(grid[1, :])
    unit = time_unit(history.curve[-1].latency_s if history.curve else 1e-3)
    _draw_network(by_trials, [point.num_trials for point in history.curve], history.curve, unit)
    _draw_network(by_time, [point.elapsed_s / 60 for point in history.curve], history.curve, unit)
    by_time.tick_params(which="both", labelleft=False)
    by_trials.set(xlabel="trials", ylabel=f"best latency, estimated ({unit[1]})")
    by_time.set(xlabel="time (minutes)")
    _draw_tasks(tasks, history)
    tasks.set(xlabel="trials", ylabel="time of a task / its best time")
    for axes in (by_trials, by_time, tasks):
        axes.set_xlim(left=0)
        _few_ticks(axes)
        _set_grid(axes)
    return figure


def _draw_network(axes: Axes, x: list[float], curve: list[CurvePoint], unit: tuple[float, str]) -> None:
    latencies = [point.latency_s / unit[0] for point in curve]
    axes.step(x, latencies, where="post", color=BLUE, linewidth=2)
    if not latencies:
        return
    axes.plot(x[-1], latencies[-1], "o", color=BLUE, markersize=5)
    axes.set_title(duration(curve[-1].latency_s), loc="right", fontsize=10)  # outside, where no curve runs through it
    if max(latencies) > 3 * min(latencies):
        axes.set_yscale("log")
        _label_log(axes.yaxis)


def _draw_tasks(axes: Axes, history: TuningHistory) -> None:
    tasks = [task for task in history.slowest() if task.measured]
    best_s = {task.name: task.state.best_s or 0.0 for task in tasks}
    dots = [(t.step, t.latency_s / best_s[t.task]) for t in history.trials if t.latency_s and t.task in best_s]
    if not dots:
        return
    dots = dots[:: 1 + len(dots) // _MAX_DOTS]
    axes.plot(*zip(*dots, strict=True), ".", color="black", alpha=0.25, markersize=3, label="a valid trial", zorder=1)
    for rank, task in enumerate(tasks):
        is_named = rank < _NUM_NAMED
        axes.step(
            *_best_over_trials(task, history),
            where="post",
            color=_COLORS[rank] if is_named else _GREY,
            linewidth=1.8 if is_named else 0.7,
            label=_legend_label(plain(task.name), rank),
            zorder=3 if is_named else 2,
        )
    axes.set_yscale("log")
    axes.set_ylim(0.93, min(_MAX_RATIO, max(2.2, 1.1 * max(ratio for _, ratio in dots))))
    ticks = [1, 2, 5, 10, 20]
    axes.set_yticks(ticks, [f"{tick} ×" for tick in ticks])
    axes.set_yticks([], minor=True)
    axes.figure.legend(*axes.get_legend_handles_labels(), loc="lower center", ncols=3, fontsize=9)


def _best_over_trials(task: TaskHistory, history: TuningHistory) -> tuple[list[float], list[float]]:
    """The steps at which a task got faster, up to now, and its best from then on, relative to the best there is."""
    best_s = task.state.best_s or min(seconds for _, seconds in task.measured)
    steps: list[float] = []
    ratios: list[float] = []
    for step, seconds in task.measured:
        if not ratios or seconds / best_s < ratios[-1]:
            steps.append(float(step))
            ratios.append(seconds / best_s)
    return [*steps, float(len(history.trials))], [*ratios, ratios[-1]]


def draw_failures(history: TuningHistory) -> Figure:
    """Draws the failed trials of each task by class; a class has the same colour in every tuning."""

    def num_failed(task: TaskHistory) -> int:
        return sum(task.state.num_trials[status] for status in _CLASSES)

    bars = _bars_of([task for task in history.tasks if num_failed(task)], num_failed)
    figure = _new_figure(history.title, _height_of(bars, 0.32))
    axes = figure.subplots()
    left = [0] * len(bars)
    for status, color in zip(_CLASSES, _COLORS, strict=False):
        widths = [sum(task.state.num_trials[status] for task in bar.tasks) for bar in bars]
        if any(widths):
            label = f"{status.value.replace('_', ' ')}: {sum(widths)} of {len(history.trials)} trials"
            axes.barh(range(len(bars)), widths, 0.7, left=left, color=color, label=label)
            left = [start + width for start, width in zip(left, widths, strict=True)]
    _label_bars(axes, bars)
    axes.set_xlabel("failed trials")
    axes.set_xlim(0, 1.05 * max([*left, 1]))
    _few_ticks(axes)
    _add_legend(figure)
    _set_grid(axes, "x")
    return figure


def draw_gain(history: TuningHistory) -> Figure:
    """Draws for every task the trials spent on it, beside the time by which they made the network faster."""
    bars = _bars_of([task for task in history.tasks if task.num_trials], lambda task: task.gain_s)
    figure = _new_figure(history.title, _height_of(bars, 0.32))
    trials, gains = figure.subplots(1, 2, sharey=True)
    unit_s, unit = time_unit(max((bar.total(lambda task: task.gain_s) for bar in bars), default=1e-3))
    columns = [
        (trials, [bar.total(lambda task: task.num_trials) for bar in bars], BLUE, "{:.0f}"),
        (gains, [bar.total(lambda task: task.gain_s) / unit_s for bar in bars], GREEN, "{:.3g}"),
    ]
    for axes, values, color, form in columns:
        drawn = axes.barh(range(len(bars)), values, 0.7, color=color)
        axes.bar_label(drawn, [form.format(value) for value in values], padding=3, fontsize=9)
        axes.set_xlim(0, 1.2 * max([*values, 0]) or 1)
        _set_grid(axes, "x")
    _few_ticks(trials)
    _label_bars(trials, bars)
    trials.set_xlabel("trials, failed ones included")
    gains.set_xlabel(f"gain: estimated time saved in the network ({unit})")
    return figure


def draw_task_share(history: TuningHistory) -> Figure:
    """Draws every task's share of the network's time: before is the first valid measurement of each task, or the record
    that it began with; after is its best. Both times its weight.
    """
    before_s, after_s = history.before_s or 1.0, history.after_s or 1.0
    tasks = [task for task in history.tasks if task.after_s]
    bars = _bars_of(tasks, lambda task: max(task.before_s / before_s, task.after_s / after_s))
    before = [bar.total(lambda task: task.before_s) for bar in bars]
    after = [bar.total(lambda task: task.after_s) for bar in bars]
    before_percent = [100 * seconds / before_s for seconds in before]
    after_percent = [100 * seconds / after_s for seconds in after]

    figure = _new_figure(history.title, _height_of(bars, 0.42))
    axes = figure.subplots()
    height = 0.38  # of a bar; a task has two, in a row that is 1 high
    for percents, offset, color, label in (
        (before_percent, -height / 2, ORANGE, f"before: {duration(history.before_s)} in all"),
        (after_percent, height / 2, BLUE, f"after: {duration(history.after_s)} in all"),
    ):
        axes.barh([row + offset for row in range(len(bars))], percents, height, color=color, label=label)
    ends = [max(shares) for shares in zip(before_percent, after_percent, strict=True)]
    for row, end in enumerate(ends):
        unit_s, unit = time_unit(max(before[row], after[row]))
        text = f"{before[row] / unit_s:.3g} → {after[row] / unit_s:.3g} {unit}"
        axes.annotate(text, (end, row), (4, 0), textcoords="offset points", va="center", fontsize=9)
    _label_bars(axes, bars)
    axes.set_xlabel("share of the network's estimated time (%)")
    axes.set_xlim(0, 1.25 * max(ends, default=80))
    _add_legend(figure)
    _set_grid(axes, "x")
    return figure


def draw_latency(title: str, latency: Latency) -> Figure:
    """Draws how many calls took how long, with the median and the 90th percentile."""
    figure = _new_figure(title, 4.0)
    axes = figure.subplots()
    unit_s, unit = time_unit(latency.median_ms / 1e3)
    axes.hist([sample / 1e3 / unit_s for sample in latency.samples_ms], bins=60, color=BLUE)
    for label, color, value_ms in (
        ("median", GREEN, latency.median_ms),
        ("90th percentile", VERMILION, latency.p90_ms),
    ):
        axes.axvline(value_ms / 1e3 / unit_s, color=color, linewidth=2, label=f"{label}, {duration(value_ms / 1e3)}")
    axes.set(xlabel=f"time of a call ({unit})", ylabel="calls")
    _few_ticks(axes)
    _set_grid(axes, "y")
    _add_legend(figure)
    return figure


def draw_losses(
    title: str, candidates: Sequence[tuple[float, float, str]], chosen: tuple[float, float], allowed: float
) -> Figure:
    """Draws the loss of quantised networks against the share of operations in 8 bits, by how ranges were measured, with
    the one that was taken, and what is allowed.
    """
    figure = _new_figure(title, 3.6)
    axes = figure.subplots()
    calibrations = dict.fromkeys(calibration for _, _, calibration in candidates)
    for calibration, color in zip(calibrations, _COLORS, strict=False):
        shares, losses = zip(*((x, y) for x, y, of in candidates if of == calibration), strict=True)
        axes.plot(shares, losses, "o", color=color, label=calibration)
    axes.plot(*chosen, "o", markersize=13, markerfacecolor="none", markeredgecolor=_GREY, label="taken")
    axes.axhline(allowed, color=VERMILION, linewidth=1, label=f"allowed: {allowed:g}")
    axes.set(xlabel="share of operations in 8 bits", ylabel="loss")
    axes.xaxis.set_major_formatter(lambda share, _place: f"{share:.0%}")
    axes.set_ylim(bottom=0)
    _add_legend(figure)
    _set_grid(axes)
    return figure


def draw_speedups(title: str, speedups: Mapping[str, float]) -> Figure:
    """Draws speed-ups over the best rival by their names, the largest first, on a logarithmic axis around 1."""
    ordered = sorted(speedups.items(), key=lambda item: item[1])
    is_named = len(ordered) <= _MAX_NAMED
    figure = _new_figure(title, 1.3 + 0.24 * min(len(ordered), _MAX_NAMED))
    axes = figure.subplots()
    values = [speedup for _, speedup in ordered]
    colors = [BLUE if value >= 1 else VERMILION for value in values]
    axes.hlines(range(len(values)), 1, values, color=colors)
    axes.scatter(values, range(len(values)), color=colors, zorder=3)
    axes.axvline(1, color=_GREY, linewidth=1)
    axes.set_xscale("log")
    axes.set_xlim(min(0.5, *values) * 0.9, max(2.0, *values) * 1.1)
    _label_log(axes.xaxis)
    axes.set_yticks(range(len(values)) if is_named else [], [plain(name) for name, _ in ordered] if is_named else [])
    axes.set(xlabel="speed-up over the best rival")
    _set_grid(axes, "x")
    return figure


def draw_roofline(history: TuningHistory, roofline: Roofline, argument_bytes: Mapping[str, int]) -> Figure:
    """Draws what each task reaches against its intensity, below the host's two roofs; the arguments' sizes are by the
    hash of the workload. Tasks that compute nothing are left out.
    """
    sizes = {task.name: argument_bytes.get(task.state.info.workload_hash) for task in history.tasks}
    tasks = [task for task in history.slowest() if task.state.gflops and sizes[task.name]]
    intensities = [task.state.info.flops / (sizes[task.name] or 1) for task in tasks]
    figure = _new_figure(history.title, 6)
    axes = figure.subplots()
    peak, bandwidth = roofline.peak_flops_per_s / 1e9, roofline.bandwidth_bytes_per_s / 1e9
    ridge = peak / bandwidth
    low, high = min([*intensities, ridge]) / 3, max([*intensities, ridge]) * 3
    roofs = f"roof of this host: {peak:.4g} GFLOP/s of float32, {bandwidth:.3g} GB/s"
    axes.plot([low, ridge, high], [low * bandwidth, peak, peak], color="black", linewidth=1.5, label=roofs)
    axes.set_xlim(low, high)
    for rank, (task, intensity) in enumerate(zip(tasks, intensities, strict=True)):
        share = task.after_s / history.after_s
        axes.plot(
            intensity,
            task.state.gflops or 0.0,
            marker="o",
            markersize=6 + 20 * math.sqrt(share),
            color=_COLORS[rank] if rank < _NUM_NAMED else _GREY,
            markeredgecolor="black",
            markeredgewidth=0.5,
            label=_legend_label(f"{plain(task.name)}, {share:.0%} of the time", rank),
            linestyle="none",
        )
    axes.set(xscale="log", yscale="log", xlabel="arithmetic intensity (FLOP/byte of arguments)", ylabel="GFLOP/s")
    _label_log(axes.xaxis)
    _label_log(axes.yaxis)
    _set_grid(axes)
    _add_legend(figure)
    return figure


# -- how they look -----------------------------------------------------------------------------------------------------


def _new_figure(title: str, height_in: float, *, is_laid_out: bool = False) -> Figure:
    """A figure ten inches wide. Matplotlib finds out what fits where, unless the caller lays everything out."""
    from matplotlib.figure import Figure

    figure = Figure(
        figsize=(10.0, height_in), dpi=110, layout=None if is_laid_out else "constrained", facecolor="white"
    )
    figure.suptitle(plain(title, 100), fontsize=12)
    return figure


def plain(text: str, limit: int = 34) -> str:
    """A text that Matplotlib shows as it is, on one line; what is too long loses its middle."""
    line = " ".join(text.split())
    if len(line) > limit:
        head = (limit - 1) * 2 // 3
        line = f"{line[:head]}…{line[head + 1 - limit :]}"
    return line.replace("$", r"\$")  # it would begin a formula


def _legend_label(text: str, rank: int) -> str:
    """The text of a task in a legend, whose first tasks have a colour and a line of their own."""
    if rank < _NUM_NAMED:
        return text
    return "other tasks" if rank == _NUM_NAMED else "_"  # which keeps a curve out of the legend


def _set_grid(axes: Axes, which: Literal["both", "x", "y"] = "both") -> None:
    axes.grid(visible=True, axis=which, alpha=0.3)
    axes.set_axisbelow(True)


def _few_ticks(axes: Axes) -> None:
    """Leaves room between the numbers of the x axis, which may have many digits."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))


def _label_log(axis: Axis) -> None:
    """Labels a logarithmic axis with plain numbers, at least two of them. Matplotlib labels a range of less than a
    power of ten at the minor ticks, with texts such as 2×10⁰, which are wide, and stay where labels are switched off.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    low, high = axis.get_view_interval()
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    num_labels = sum(low <= digit * 10.0**power <= high for power in powers for digit in (1, 2, 5))
    many = (1,) if num_labels > _MAX_LOG_LABELS else (1, 2, 5)
    axis.set_major_locator(LogLocator(subs=many) if num_labels > 1 else MaxNLocator(4, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.10g}"))
    axis.set_minor_formatter(NullFormatter())


def _add_legend(figure: Figure) -> None:
    """Puts the legend below everything, where it hides nothing."""
    if any(axes.get_legend_handles_labels()[0] for axes in figure.axes):
        figure.legend(loc="outside lower center", ncols=2, fontsize=9)


class _Bar(NamedTuple):
    """What a bar stands for: a task, or the small ones together."""

    label: str
    tasks: Sequence[TaskHistory]

    def total(self, value: Callable[[TaskHistory], float]) -> float:
        return sum(value(task) for task in self.tasks)


def _bars_of(tasks: Sequence[TaskHistory], size: Callable[[TaskHistory], float]) -> list[_Bar]:
    """The largest tasks, and one bar for the others."""
    ranked = sorted(tasks, key=size, reverse=True)
    num_alone = _MAX_BARS if len(ranked) <= _MAX_BARS else _MAX_BARS - 1
    bars = [_Bar(plain(task.name), (task,)) for task in ranked[:num_alone]]
    others = ranked[num_alone:]
    return [*bars, _Bar(f"{len(others)} others", others)] if others else bars


def _label_bars(axes: Axes, bars: Sequence[_Bar]) -> None:
    """Names horizontal bars, the first on top."""
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars], fontsize=9)
    axes.set_ylim(len(bars) - 0.4, -0.6)


def _height_of(bars: Sequence[_Bar], per_bar_in: float) -> float:
    return 1.7 + per_bar_in * max(len(bars), 2)
