"""No picture of the documentation is older than what it shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers.commands import ROOT
from helpers.pictures import SHOWN, shown_on, stamp, texts_of

PICTURES = ROOT / "docs" / "images"
TABLE = ROOT / "docs" / "gallery.csv"


@pytest.mark.parametrize("name", SHOWN)
def test_a_picture_shows_what_the_code_names_today(name: str) -> None:
    shown = SHOWN[name]()
    assert len(shown) > 3
    assert shown_on(PICTURES / f"{name}.png") == shown, "make it anew: see CONTRIBUTING.md"


def test_a_stamp_changes_nothing_else(tmp_path: Path) -> None:
    from matplotlib.image import imread

    picture, before = tmp_path / "picture.png", (PICTURES / "gallery.png").read_bytes()
    picture.write_bytes(before)
    for shown in (["a", "× µs"], ["b"]):
        stamp(picture, shown)
        assert shown_on(picture) == shown
    assert (imread(picture) == imread(PICTURES / "gallery.png")).all()
    assert texts_of(picture).items() > texts_of(PICTURES / "gallery.png").items()
    assert len(picture.read_bytes()) < len(before) + 50


def test_the_gallery_is_drawn_from_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gallery_chart

    page, speeds = (ROOT / "docs" / "gallery.md").read_text(), gallery_chart.read_speeds(TABLE)
    drawn_from = texts_of(PICTURES / "gallery.png")[gallery_chart.DIGEST]
    assert drawn_from == gallery_chart.digest_of(TABLE), "draw it anew: see benchmarks/README.md"
    assert f"](images/gallery.png)\n\n{gallery_chart.caption(speeds)}\n" in page
    assert gallery_chart.caption(speeds).startswith(f"{sum(s.ratio > 1 for s in speeds)} of {len(speeds)} models are")


def test_the_chart_has_a_bar_for_each_model_that_was_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gallery_chart

    speeds = gallery_chart.read_speeds(TABLE)
    (axes,) = gallery_chart.draw(speeds).axes
    faster, others = axes.containers
    ends = [bar.get_y() + bar.get_height() for bar in (*faster, *others)]
    assert ends == pytest.approx([speed.ratio for speed in speeds])
    low, high = axes.get_ylim()
    assert low < min(ends) < 1 < max(ends) < high
    assert re.fullmatch(rf"{len(faster)} models are faster", axes.get_legend().get_texts()[0].get_text())
