"""Pictures of the documentation carry what they show, so that a test finds one that is older than the code.

A picture has the texts as a `tEXt` chunk, https://www.w3.org/TR/png/#11tEXt.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from helpers.tuning_histories import TaskRound, history_of

from ansor_mlflow import names
from ansor_mlflow.tracking import TuningHistory, summary_rows, tuning_page
from ansor_mlflow.tracking.report.figures import draw_convergence
from ansor_mlflow.tracking.report.views import VIEWS

SHOWN_KEY = "shown"
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_LEADERBOARD, _TUNING_CHARTS = (view.state for view in VIEWS)
_SUMMARY = (
    *(names.UNTUNED_LATENCY_MS, names.rival_latency_ms("onnxruntime"), names.LATENCY_MS, names.LATENCY_P90_MS),
    *(names.BEST_LATENCY_MS, names.CONFIRMED_LATENCY_MS, names.ESTIMATE_RATIO, names.SPEEDUP_VS_UNTUNED),
    *(names.speedup_vs("onnxruntime"), names.SPEEDUP_VS_BEST, names.MAX_REL_ERROR, names.COVERAGE_TASKS),
    names.TRIALS_MEASURED,
)
"""Metrics of the run in the picture of an overview."""


def texts_of(picture: Path) -> dict[str, str]:
    """The texts that a PNG file carries, by their keys."""
    texts = (content.split(b"\0", 1) for kind, content in _chunks(picture.read_bytes()) if kind == b"tEXt")
    return {key.decode("latin-1"): text.decode("latin-1") for key, text in texts}


def shown_on(picture: Path) -> list[str]:
    """What a picture says that it shows; empty where it says nothing."""
    return list(json.loads(texts_of(picture).get(SHOWN_KEY, "[]")))


def stamp(picture: Path, shown: list[str]) -> None:
    """Writes into a PNG file what it shows, in the place of what it said before."""
    mine = SHOWN_KEY.encode() + b"\0"
    chunks = [item for item in _chunks(picture.read_bytes()) if not (item[0] == b"tEXt" and item[1].startswith(mine))]
    chunks.insert(-1, (b"tEXt", mine + json.dumps(shown).encode("ascii")))  # the last one ends the file
    picture.write_bytes(_SIGNATURE + b"".join(_chunk(*item) for item in chunks))


def _chunks(png: bytes) -> Iterator[tuple[bytes, bytes]]:
    assert png.startswith(_SIGNATURE)
    place = len(_SIGNATURE)
    while place < len(png):
        (length,) = struct.unpack_from(">I", png, place)
        yield png[place + 4 : place + 8], png[place + 8 : place + 8 + length]
        place += length + 12  # the length, the kind, and the checksum behind the content


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


# -- what the code names today -----------------------------------------------------------------------------------------


def _columns() -> list[str]:
    return list(_LEADERBOARD["selectedColumns"])


def _charts() -> list[str]:
    knobs = [name for chart in _TUNING_CHARTS["compareRunCharts"] for name in chart.get("selectedParams", ())]
    charts = [chart.get("metricKey", chart["type"]) for chart in _TUNING_CHARTS["compareRunCharts"]]
    return [*charts, *knobs]


def _rows() -> list[str]:
    return [label for label, _ in summary_rows(dict.fromkeys(_SUMMARY, 1.0))]


def _page() -> list[str]:
    """The rows, headings and columns of a tuning's report, down to the first schedules."""
    history = history_of([TaskRound(index=0, run_s=[2e-3, 1e-3])], [1])
    assert history.result is not None
    for state in history.result.tasks:
        state.confirmed_s = 1e-3
    page, _, _ = tuning_page(history, Path("nowhere"), run_id="").partition("<h2>Environment")
    first, _, others = page.partition("</table>")
    labels = re.findall(r"<tr><td>(.*?)</td>", first)
    return [*labels, *map(_without_unit, re.findall(r"<(?:h2|th)\b[^>]*>(.*?)</", others))]


def _figure() -> list[str]:
    labels = [
        label for axes in draw_convergence(TuningHistory()).axes for label in (axes.get_xlabel(), axes.get_ylabel())
    ]
    return [_without_unit(label) for label in labels if label]


def _comparison() -> list[str]:
    compared = (names.BEST_LATENCY_MS, names.CONFIRMED_LATENCY_MS, names.PROBE_SPREAD, names.OPTIMISM)
    return [*compared, names.TRIALS_PER_MINUTE, *_figure()]


def _without_unit(label: str) -> str:
    return re.sub(r" \([µm]?s\)$", "", label)


SHOWN: dict[str, Callable[[], list[str]]] = {
    "leaderboard": _columns,
    "tuning-charts": _charts,
    "run": _rows,
    "report": _page,
    "compare": _comparison,
    "figure-dark": _figure,
}
"""What the pictures of the user interface show, in the order in which they show it; units follow the values."""
