"""No picture of the documentation is older than what it shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers.commands import ROOT
from helpers.pictures import SHOWN, shown_on, stamp, texts_of

PICTURES = ROOT / "docs" / "images"


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


@pytest.mark.parametrize(("name", "called"), [("gallery", "models"), ("foreign", "files")])
def test_a_chart_is_drawn_from_its_table(name: str, called: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import speed_chart

    table = ROOT / "docs" / f"{name}.csv"
    page, speeds = table.with_suffix(".md").read_text(), speed_chart.read_speeds(table)
    drawn_from = texts_of(PICTURES / f"{name}.png")[speed_chart.DIGEST]
    assert drawn_from == speed_chart.digest_of(table), "draw it anew: see benchmarks/README.md"
    assert f"](images/{name}.png)\n\n{speeds.caption}\n" in page
    faster = sum(speed.ratio > 1 for speed in speeds.models)
    assert speeds.caption.startswith(f"{faster} of {len(speeds.models)} {called} are")


@pytest.mark.parametrize("name", ["gallery", "foreign"])
def test_a_chart_has_a_bar_for_each_model_that_was_timed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import speed_chart

    speeds = speed_chart.read_speeds(ROOT / "docs" / f"{name}.csv")
    (axes,) = speed_chart.draw(speeds).axes
    faster, others = axes.containers
    ends = [bar.get_y() + bar.get_height() for bar in (*faster, *others)]
    assert ends == pytest.approx([speed.ratio for speed in speeds.models])
    low, high = axes.get_ylim()
    assert low < min(ends) < 1 < max(ends) < high
    assert re.fullmatch(rf"{len(faster)} \w+ are faster", axes.get_legend().get_texts()[0].get_text())
