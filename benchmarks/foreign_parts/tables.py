"""The rows as a page, a table and a sentence."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from gallery_child import ENDS
from speed_chart import read_speeds, write_chart

from ansor_mlflow.measuring import version_of
from ansor_mlflow.measuring.rivals import rival_titles
from foreign_parts.row import OURS, RIVALS, Row

_HEAD = ["package", "file", "gets_in", "computed_by", "compile_s", "right", "error", "ms", "spread"]
_HEAD += [column for rival in RIVALS for column in (f"{rival}_ms", f"{rival}_spread")]
_HEAD += ["best_rival", "ratio", "ratio_low", "ratio_high", "disturbed", "remarks"]


_CHART = """![Speed of the files over the better of ONNX Runtime and OpenVINO, sorted](images/{picture})

{caption}

"""
_PAGE = """# Files that others wrote

ONNX files of packages of PyPI, each run as its users would, untuned (`trials=0`). {where}

{chart}{entry} The median of the ratios is {median}. [The table]({table}) has a line for each file; `python
benchmarks/foreign.py` writes all of it: [notes](../benchmarks/README.md).
"""


def line(row: Row) -> str:
    """What is said of a file as soon as it is done."""
    _, _, end, computed_by, _, right, error, ours_ms, *_ = _cells(row)
    if not row.is_in:
        return f"{row.name}  {end}: {'; '.join(row.remarks)}"
    ratio = "" if row.ratio is None else f"{row.ratio:.2f} of {row.best_rival}"
    wrong = "" if right == "yes" else "WRONG"
    return "  ".join(filter(None, (row.name, end, computed_by, wrong, error, f"{ours_ms} ms", ratio)))


def write_page(rows: Sequence[Row], path: Path) -> None:
    """Writes a page, and beside it a table with a line for each file, and its chart, if one was timed."""
    table = path.with_suffix(".csv")
    with table.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([_HEAD, *map(_cells, rows)])
    speeds, chart = read_speeds(table), ""
    if speeds.models:
        write_chart(table, path.parent / "images" / f"{path.stem}.png")
        chart = _CHART.format(picture=f"{path.stem}.png", caption=speeds.caption)
    middle = f"{median(ratios):.2f}" if (ratios := _ratios(rows)) else "unknown"
    path.write_text(_PAGE.format(where=_where(rows), entry=_entry(rows), median=middle, chart=chart, table=table.name))


def summary(rows: Sequence[Row]) -> str:
    """How many files got in, are right, and are faster than the best rival."""
    text = _entry(rows)
    if ratios := _ratios(rows):
        text += f" {sum(ratio < 1 for ratio in ratios)} of {len(ratios)} are faster than their best rival,"
        text += f" and the median of the ratios is {median(ratios):.2f}."
    return text


def _entry(rows: Sequence[Row]) -> str:
    ends = Counter(row.compiled.end for row in rows)
    counts = ", ".join(f"{ends[end]} {said}" for end, said in ENDS.items() if ends[end])
    text = f"{len(rows)} files of {len({row.pin for row in rows})} packages: {counts}; "
    text += f"{sum(row.is_right for row in rows)} of {sum(row.is_in for row in rows)} are right."
    computed = Counter(row.compiled.result["computed_by"] for row in rows if row.is_in)
    return text + "".join(f" {number} are computed by {name}." for name, number in computed.most_common())


def _ratios(rows: Sequence[Row]) -> list[float]:
    return [row.ratio for row in rows if row.ratio is not None]


def _where(rows: Sequence[Row]) -> str:
    """The machine, the rivals, and how quiet it was."""
    found = [row.compiled.result for row in rows if row.is_in]
    if not found:
        return "Nothing was measured."
    machines = sorted({f"{one['cpu'] or 'an unknown CPU'}, {one['num_threads']} threads" for one in found})
    versions = ", ".join(f"{rival_titles()[rival]} {version_of(rival)}" for rival in RIVALS)
    disturbed = sum(bool(one["unreliable"]) for one in found)
    return f"{' and '.join(machines)}; {versions}; other programs disturbed {disturbed} of {len(found)} files."


def _cells(row: Row) -> list[str]:
    name, version = row.pin.split("==")
    cells = [f"{name} {version}", row.path, ENDS[row.compiled.end]]
    if not row.is_in:
        return [*cells, *[""] * (len(_HEAD) - len(cells) - 1), "; ".join(row.remarks)]
    found = row.compiled.result
    cells += [found["computed_by"], f"{found['compile_s']:.1f}"]
    cells += ["yes" if row.is_right else "no", f"{found['max_rel_error']:.1e}"]
    for contender in (OURS, *RIVALS):
        latency = row.latencies.get(contender)
        cells += ["", ""] if latency is None else [f"{latency.median_ms:.4g}", f"{latency.spread:.3f}"]
    ratios = ["", "", ""]
    if row.ratios:
        ratios = [f"{ratio:.2f}" for ratio in (median(row.ratios), row.ratios[0], row.ratios[-1])]
    return [*cells, row.best_rival or "", *ratios, "yes" if found["unreliable"] else "", "; ".join(row.remarks)]
