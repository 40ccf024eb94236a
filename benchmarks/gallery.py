"""The gallery: models as people export them, each planned and compared with ONNX Runtime and OpenVINO.

    python benchmarks/gallery.py models --trials 0 --json result.json --page docs/gallery.md
    python benchmarks/gallery.py models --names yolo,crnn    # how they get in, and what they compute

Everything happens in child processes with a time limit, so that no model stops the others.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click
from gallery_child import ENDS, Child, End, run_child
from gallery_models import GALLERY
from rich.console import Console
from speed_chart import read_speeds, write_chart

_HERE = Path(__file__).parent
_PROGRAM = Path(sys.executable).with_name("ansor-mlflow")
_PARAMETERS = ("input_shapes", "input_values", "batch_size")
"""What the JSON file beside a model may give for it."""
_TUNING_S = 3600.0
_RIVALS = "onnxruntime,openvino"
_LEAST_SHARE_IN = 0.95


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was found about a model."""

    name: str
    family: str
    exporter: str
    opset: int | None
    plan: Child
    check: Child | None = None
    tuning: Child | None = None

    @property
    def is_in(self) -> bool:
        """Whether it can be tuned, as a whole or in parts."""
        return self.plan.end in ("whole", "parts")

    @property
    def compared(self) -> list[Mapping[str, Any]]:
        """What its comparisons with ONNX Runtime found, untuned and tuned; empty where none came to an end."""
        return [child.result for child in (self.check, self.tuning) if child is not None and child.result is not None]

    @property
    def is_equal(self) -> bool:
        """Whether it was compared with ONNX Runtime and computes the same."""
        return bool(self.compared) and all(found["equal"] for found in self.compared)

    @property
    def ratio(self) -> float | None:
        """Latency over the best rival's; None where it was not timed."""
        if self.best_rival is None or self.tuning is None or self.tuning.result is None:
            return None
        found = self.tuning.result
        return float(found["tuned_latency_ms"] / found[f"{self.best_rival}_latency_ms"])

    @property
    def best_rival(self) -> str | None:
        """The fastest rival whose outputs are right; None where nothing was timed."""
        if self.tuning is None or self.tuning.result is None:
            return None
        found = self.tuning.result
        return min(found["right"], key=lambda name: float(found[f"{name}_latency_ms"]), default=None)


@click.command(context_settings={"show_default": True})
@click.argument("models", type=click.Path(file_okay=False, path_type=Path))
@click.option("--names", default="", help="Models, with commas between them; all by default.")
@click.option("--export/--no-export", default=True, help="Whether to write the models that are missing in MODELS.")
@click.option("--python", default=sys.executable, help="Interpreter that has the packages the models come from.")
@click.option("--check/--no-check", default=True, help="Whether to compile and compare what was planned.")
@click.option("--trials", type=int, help="Trials of a tuning, whose model is timed; without them there is none.")
@click.option("--turns", default=2, help="How often each model and each of its rivals is timed.")
@click.option("--runtimes", default="tvm,onnxruntime", help="What may compute a tuned model.")
@click.option("--limit-s", default=300.0, help="Seconds that a plan or a check may take.")
@click.option("--plan-s", default=20.0, help="Seconds that a plan may take before it counts as slow.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="File for all figures.")
@click.option("--continue", "goes_on", is_flag=True, help="Keep what the JSON file has, and do the other models.")
@click.option("--page", type=click.Path(dir_okay=False, path_type=Path), help="File for the page; a CSV is beside it.")
def main(
    models: Path,
    names: str,
    export: bool,
    python: str,
    check: bool,
    trials: int | None,
    turns: int,
    runtimes: str,
    limit_s: float,
    plan_s: float,
    json_file: Path | None,
    goes_on: bool,
    page: Path | None,
) -> None:
    """Plan and check every ONNX file of the folder MODELS."""
    console = Console()
    chosen = [name for name in names.split(",") if name]
    if export:
        subprocess.run([python, str(_HERE / "gallery_export.py"), str(models), *chosen], check=False)
    rows = _read(json_file) if goes_on and json_file is not None and json_file.exists() else []
    known = {row.name for row in rows}
    tuning = [] if trials is None else ["--trials", str(trials), "--turns", str(turns), "--runtimes", runtimes]
    with tempfile.TemporaryDirectory(prefix="gallery-") as scratch:
        for file in _in_order(models.glob("*.onnx"), chosen):
            if file.stem in known:
                continue
            rows.append(_row(file, check, tuning, limit_s, Path(scratch, "mlflow.db")))
            console.print(_line(rows[-1]), markup=False, highlight=False, soft_wrap=True)
            rows.sort(key=lambda row: _place(row.name))
            if json_file is not None:
                json_file.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    if page is not None:
        _write_page(rows, page)
    console.print(_summary(rows), markup=False)
    if failures := list(_failures(rows, check or trials is not None, plan_s)):
        raise click.ClickException("; ".join(failures))


def _in_order(files: Iterable[Path], chosen: Sequence[str]) -> list[Path]:
    """The files as they were asked for, or as the gallery lists them."""
    found = [file for file in files if not file.name.startswith(".") and (not chosen or file.stem in chosen)]
    return sorted(found, key=lambda file: chosen.index(file.stem) if chosen else _place(file.stem))


def _place(name: str) -> tuple[int, str]:
    """Where the gallery lists a model; others come after it."""
    return list(GALLERY).index(name) if name in GALLERY else len(GALLERY), name


def _read(json_file: Path) -> list[Row]:
    """What an earlier run found."""
    children = ("plan", "check", "tuning")
    return [
        Row(**{**row, **{name: Child(**row[name]) for name in children if row[name] is not None}})
        for row in json.loads(json_file.read_text())
    ]


def _row(file: Path, check: bool, tuning: Sequence[str], limit_s: float, store: Path) -> Row:
    """What is found about a model; without options of a tuning there is none."""
    about_file = file.with_suffix(".json")
    about = json.loads(about_file.read_text()) if about_file.exists() else {}
    parameters = {name: about[name] for name in _PARAMETERS if about.get(name)}
    options = [
        word for name, value in parameters.items() for word in (f"--{name.replace('_', '-')}", json.dumps(value))
    ]
    folder = file.parent.resolve()
    plan = run_child(
        [str(_PROGRAM), "plan", "--network", str(file.resolve()), *options, "--json", "-"], folder, limit_s
    )
    checked = tuned = None
    if plan.result is not None:
        child = [sys.executable, str(_HERE / "gallery_check.py"), str(file.resolve())]
        child += ["--parameters", json.dumps(parameters)]
        checked = run_child(child, folder, limit_s) if check else None
        timing = [*child, *tuning, "--store", str(store), "--rivals", _RIVALS]
        tuned = run_child(timing, folder, _TUNING_S) if tuning else None
    return Row(
        name=file.stem,
        family=about.get("family", "others"),
        exporter=about.get("exporter", about.get("package", "")),
        opset=about.get("opset"),
        plan=plan,
        check=checked,
        tuning=tuned,
    )


def _failures(rows: Sequence[Row], compared: bool, plan_s: float) -> Iterable[str]:
    """What keeps the gallery from passing."""
    inside = [row for row in rows if row.is_in and (row.is_equal or not compared)]
    if len(inside) < _LEAST_SHARE_IN * len(rows):
        yield f"{len(inside)} of {len(rows)} get in and equal ONNX Runtime, fewer than {_LEAST_SHARE_IN:.0%}"
    if broken := [row.name for row in rows if _worst_end(row) in ("traceback", "crashed", "late")]:
        yield f"no clear end: {', '.join(broken)}"
    if slow := [row.name for row in rows if row.plan.seconds > plan_s]:
        yield f"planning takes more than {plan_s:g} s: {', '.join(slow)}"


def _worst_end(row: Row) -> End:
    order: list[End] = list(ENDS)
    return max((child.end for child in (row.plan, row.check, row.tuning) if child is not None), key=order.index)


# -- the page and its table ------------------------------------------------------------------------------------------

_HEAD = [
    "family",
    "model",
    "exporter",
    "opset",
    "plan_s",
    "tasks",
    "gets_in",
    "error",
    "computed_by",
    "ms",
    "onnxruntime_ms",
    "openvino_ms",
    "best_rival",
    "ratio",
]
_CHART = """![Speed of the models over the better of ONNX Runtime and OpenVINO, sorted](images/{picture})

{caption}

"""
_PAGE = """# Gallery

Models as people export them, with random weights, and how they get in: with all of their operators, or with some left
to ONNX Runtime. {summary}

{chart}| family | models | in whole | in parts | faster | median ratio |
|---|---|---|---|---|---|
{lines}

[The table](gallery.csv) has a line for each model: the largest difference from ONNX Runtime over its largest value, who
computes it, and the latencies, in turns, after {trials} trials. `python
benchmarks/gallery.py` writes all of it: [notes](../benchmarks/README.md).
"""


def _line(row: Row) -> str:
    """What is said of a model as soon as it is done."""
    return "  ".join(filter(None, _cells(row)[1:]))


def _cells(row: Row) -> list[str]:
    end = ENDS[row.plan.end] if row.is_in else f"{ENDS[row.plan.end]}: {row.plan.message}"
    tasks = "" if row.plan.result is None else str(len(row.plan.result["tasks"]))
    opset = "" if row.opset is None else str(row.opset)
    cells = [row.family, row.name, row.exporter, opset, f"{row.plan.seconds:.1f}", tasks, end, _error(row)]
    if row.tuning is None or row.tuning.result is None:
        return [*cells, *[""] * (len(_HEAD) - len(cells))]
    found = row.tuning.result
    latencies = (found.get(f"{name}_latency_ms") for name in ("tuned", *_RIVALS.split(",")))
    cells += [found["computed_by"], *("" if latency is None else f"{latency:.4g}" for latency in latencies)]
    return [*cells, row.best_rival or "", "" if row.ratio is None else f"{row.ratio:.2f}"]


def _error(row: Row) -> str:
    failed = [child for child in (row.check, row.tuning) if child is not None and child.result is None]
    if failed:
        return f"{ENDS[failed[0].end]}: {failed[0].message}"
    if not row.compared:
        return ""
    worst = max(found["max_rel_error"] for found in row.compared)
    return f"{worst:.1e}" + ("" if row.is_equal else " (not equal)")


def _write_csv(rows: Sequence[Row], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([_HEAD, *map(_cells, rows)])


def _write_page(rows: Sequence[Row], page: Path) -> None:
    """Writes the page, and beside it its table and its chart, if a model was timed."""
    table = page.with_suffix(".csv")
    _write_csv(rows, table)
    page.write_text(_page(rows, table))
    if read_speeds(table).models:
        write_chart(table, page.with_name("images") / f"{page.stem}.png")


def _page(rows: Sequence[Row], table: Path) -> str:
    """The counts, of all models and of each family, and the chart of the table's models, if one was timed."""
    speeds = read_speeds(table)
    chart = _CHART.format(picture=f"{table.stem}.png", caption=speeds.caption) if speeds.models else ""
    families: dict[str, list[Row]] = {}
    for row in rows:
        families.setdefault(row.family, []).append(row)
    lines = "\n".join(f"| {' | '.join(map(str, _counts(family, of)))} |" for family, of in families.items())
    timed = [row.tuning.result for row in rows if row.tuning is not None and row.tuning.result is not None]
    trials = dict.fromkeys(str(found["trials"]) for found in timed) or ["no"]
    return _PAGE.format(summary=_summary(rows), chart=chart, lines=lines, trials=" or ".join(trials))


def _counts(family: str, rows: Sequence[Row]) -> list[str | int]:
    ends = Counter(row.plan.end for row in rows)
    ratios = [row.ratio for row in rows if row.ratio is not None]
    middle = f"{median(ratios):.2f}" if ratios else ""
    return [family, len(rows), ends["whole"], ends["parts"], sum(ratio < 1 for ratio in ratios), middle]


def _summary(rows: Sequence[Row]) -> str:
    ends = Counter(row.plan.end for row in rows)
    counts = ", ".join(f"{ends[end]} {said}" for end, said in ENDS.items() if ends[end])
    compared = [row for row in rows if row.check is not None or row.tuning is not None]
    equal = f"; {sum(row.is_equal for row in compared)} of {len(compared)} equal ONNX Runtime" if compared else ""
    ratios = [row.ratio for row in rows if row.ratio is not None]
    speed = f" The median ratio is {median(ratios):.2f}." if ratios else ""
    return f"{len(rows)} models: {counts}{equal}.{speed}"


if __name__ == "__main__":
    main()
