"""How figures look: opaque white, for MLflow's light and dark theme, in colours that the colour-blind tell apart.

The palette is that of Okabe and Ito, "Color Universal Design", 2008, https://jfly.uni-koeln.de/color/.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ansor_mlflow.files import new_file
from ansor_mlflow.tracking.report.history import TaskHistory

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9"
COLORS = (BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY)
GREY = "#8c8c8c"
MAX_BARS = 15
"""Tasks that have a bar of their own; the others share one."""
_DPI = 110
_MAX_NAME = 34
_WIDTH_IN = 10.0


def new_figure(title: str, height_in: float, *, is_laid_out: bool = False) -> Figure:
    """A figure with a title, ten inches wide.

    Args:
        title: At the top.
        height_in: Inches.
        is_laid_out: Whether the caller says where everything goes; otherwise Matplotlib finds out what fits.
    """
    from matplotlib.figure import Figure

    figure = Figure(
        figsize=(_WIDTH_IN, height_in), dpi=_DPI, layout=None if is_laid_out else "constrained", facecolor="white"
    )
    figure.suptitle(plain(title, 100), fontsize=12)
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Writes a figure as PNG. A reader finds the whole of the old file or of the new one."""
    with new_file(path) as file:
        figure.savefig(file, format="png")


def plain(text: str, limit: int = _MAX_NAME) -> str:
    """A text that Matplotlib shows as it is, on one line; what is too long loses its middle."""
    line = " ".join(text.split())
    if len(line) > limit:
        head = (limit - 1) * 2 // 3
        line = f"{line[:head]}…{line[head + 1 - limit :]}"
    return line.replace("$", r"\$")  # it would begin a formula


def legend_label(text: str, rank: int, num_named: int) -> str:
    """The text of a task in a legend, whose first tasks have a colour and a line of their own."""
    if rank < num_named:
        return text
    return "other tasks" if rank == num_named else "_"  # which keeps a curve out of the legend


def set_grid(axes: Axes, which: Literal["both", "x", "y"] = "both") -> None:
    """Draws a light grid below everything else."""
    axes.grid(visible=True, axis=which, alpha=0.3)
    axes.set_axisbelow(True)


@dataclass(frozen=True)
class Bar:
    """What a bar stands for: a task, or the small ones together."""

    label: str
    tasks: tuple[TaskHistory, ...]

    def total(self, value: Callable[[TaskHistory], float]) -> float:
        """The sum of a value over the tasks."""
        return sum(value(task) for task in self.tasks)


def bars_of(tasks: Sequence[TaskHistory], size: Callable[[TaskHistory], float]) -> list[Bar]:
    """The largest tasks, and one bar for the others.

    Args:
        tasks: Any number.
        size: What they are sorted by.
    """
    ranked = sorted(tasks, key=size, reverse=True)
    num_alone = MAX_BARS if len(ranked) <= MAX_BARS else MAX_BARS - 1
    bars = [Bar(plain(task.name), (task,)) for task in ranked[:num_alone]]
    others = tuple(ranked[num_alone:])
    return [*bars, Bar(f"{len(others)} others", others)] if others else bars


def few_ticks(axes: Axes) -> None:
    """Leaves room between the numbers of the x axis, which may have many digits."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))


def add_legend(figure: Figure) -> None:
    """Puts the legend below everything, where it hides nothing."""
    if any(axes.get_legend_handles_labels()[0] for axes in figure.axes):
        figure.legend(loc="outside lower center", ncols=2, fontsize=9)


def label_bars(axes: Axes, bars: Sequence[Bar]) -> None:
    """Names horizontal bars, the first on top."""
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars], fontsize=9)
    axes.set_ylim(len(bars) - 0.4, -0.6)


def height_of(num_bars: int, per_bar_in: float) -> float:
    """Inches that a figure with so many bars needs."""
    return 1.7 + per_bar_in * max(num_bars, 2)
