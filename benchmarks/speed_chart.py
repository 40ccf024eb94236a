"""The table of `gallery.py` or `foreign.py` as one chart: how fast each model is over its rival, the fastest first.

    python benchmarks/speed_chart.py docs/gallery.csv docs/images/gallery.png

The picture carries the digest of the table that it was drawn from.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from ansor_mlflow.tracking.report.figures import BLUE, VERMILION

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DIGEST = "csv_sha256"
"""Key of the digest in the picture's text."""
_RIVAL = "the better of ONNX Runtime and OpenVINO"
_TICKS = (0.25, 0.5, 1, 2, 4, 8)
_NUM_NAMED = 4  # models at either end whose names are written


class Speed(NamedTuple):
    """How fast a model is: its rival's latency over ours."""

    ratio: float
    model: str


class Speeds(NamedTuple):
    """The models of a table that were timed, the fastest first."""

    models: list[Speed]
    called: str
    """What they are: models, or files."""

    @property
    def caption(self) -> str:
        """What the chart shows, in a sentence."""
        num_faster = sum(speed.ratio > 1 for speed in self.models)
        return (
            f"{num_faster} of {len(self.models)} {self.called} are faster than {_RIVAL} on the same CPU: "
            f"from {self.models[0].ratio:.2f} to {self.models[-1].ratio:.2f} times its speed."
        )


def read_speeds(table: Path) -> Speeds:
    """Reads a table."""
    with table.open(newline="") as file:
        timed = [row for row in csv.DictReader(file) if row["ratio"]]
    found = [
        Speed(float(row[f"{row['best_rival']}_ms"]) / float(row["ms"]), row.get("model") or Path(row["file"]).stem)
        for row in timed
    ]
    called = "models" if timed and "model" in timed[0] else "files"
    return Speeds(sorted(found, key=lambda speed: -speed.ratio), called)


def digest_of(table: Path) -> str:
    """What the picture carries of a table."""
    return hashlib.sha256(table.read_bytes()).hexdigest()


def draw(speeds: Speeds) -> Figure:
    """Draws a bar for each model, up from 1 × where it is faster, down where it is slower."""
    from matplotlib.figure import Figure

    models = speeds.models
    figure = Figure(figsize=(9, 4.6), dpi=150, layout="constrained", facecolor="white")
    axes = figure.subplots()
    for label, color, is_shown in (("faster", BLUE, True), ("not faster", VERMILION, False)):
        bars = [(place, speed) for place, speed in enumerate(models) if (speed.ratio > 1) is is_shown]
        axes.bar(
            [place for place, _ in bars],
            [speed.ratio - 1 for _, speed in bars],
            0.8,
            bottom=1,
            color=color,
            label=f"{len(bars)} {speeds.called} are {label}",
        )
    axes.set_yscale("log")
    axes.set_yticks(_TICKS, [f"{tick:g} ×" for tick in _TICKS])
    axes.set_yticks([], minor=True)
    axes.set_ylim(models[-1].ratio / 1.35, models[0].ratio * 1.2)
    axes.set_xlim(-1.5, len(models) + 0.5)
    axes.set_xticks([])
    axes.axhline(1, color="black", linewidth=1)
    axes.set_ylabel(f"speed over {_RIVAL}")
    axes.set_xlabel(f"{len(models)} {speeds.called} on the same CPU, sorted")
    axes.grid(visible=True, axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    _name_ends(axes, models)
    axes.legend(loc="upper right", fontsize=10, frameon=False)
    return figure


def _name_ends(axes: Axes, speeds: Sequence[Speed]) -> None:
    """Writes which are the fastest and the slowest models, where there are no bars."""
    fastest = [f"{speed.ratio:.2f} ×  {speed.model}" for speed in speeds[:_NUM_NAMED]]
    slowest = [f"{speed.model}  {speed.ratio:.2f} ×" for speed in speeds[-_NUM_NAMED:]]
    (low, high), blank = axes.get_ylim(), {"facecolor": "white", "edgecolor": "none", "pad": 2}
    on_top, below = "\n".join(["fastest:", *fastest]), "\n".join(["slowest:", *slowest])
    axes.text(0.27 * len(speeds), high / 1.08, on_top, va="top", fontsize=9, bbox=blank)
    axes.text(0.86 * len(speeds), low * 1.08, below, va="bottom", ha="right", fontsize=9, bbox=blank)


def write_chart(table: Path, picture: Path) -> None:
    """Draws a table's models into a PNG file."""
    picture.parent.mkdir(exist_ok=True)
    draw(read_speeds(table)).savefig(picture, format="png", metadata={DIGEST: digest_of(table)})


@click.command()
@click.argument("table", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("picture", type=click.Path(dir_okay=False, path_type=Path))
def main(table: Path, picture: Path) -> None:
    """Draw TABLE into PICTURE, and say what it shows."""
    write_chart(table, picture)
    click.echo(read_speeds(table).caption)


if __name__ == "__main__":
    main()
