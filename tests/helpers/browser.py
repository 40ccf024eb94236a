"""A real browser for tests: Debian's Chromium without a window, steered by Playwright."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers.pictures import SHOWN, stamp
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

PACKAGE = "chromium"
"""The Debian package; `.ci/run` installs the same."""
WAIT_MS = 60_000
"""For content that a page loads: a busy machine is slow."""

_FLAGS = [
    "--no-sandbox",  # it may run as root
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
_SETTINGS = {"mlflow.assistant.fab.autoOpenedOnFirstLoad_v1": "true", "mlflow.assistant.panelOpen_v1": "false"}
"""What MLflow's page remembers of a user who has closed the assistant, which opens by itself on a first visit."""
_PLOTS = """card => [...card.querySelectorAll(".js-plotly-plot")].flatMap(plot =>
    plot.data.map(trace => ({run: trace.uuid ?? null, x: [...trace.x], y: [...trace.y]})))"""
expect.set_options(timeout=WAIT_MS)


def chromium_path() -> str:
    """Where Chromium is. Fails the test where it is missing."""
    path = shutil.which("chromium")
    if path is None:
        install = f"apt-get install --no-install-recommends {PACKAGE}"
        pytest.fail(f"the browser Chromium is missing; install it: {install}", pytrace=False)
    return path


@contextmanager
def chromium() -> Iterator[Browser]:
    path = chromium_path()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=_FLAGS)
        try:
            yield browser
        finally:
            browser.close()


@dataclass(frozen=True)
class Trace:
    """One curve of a chart, or all bars of one."""

    run: str | None
    """ID; of bars, the runs are `y`."""
    x: list[Any]
    y: list[Any]


@dataclass(frozen=True)
class MlflowPages:
    """The user interface of an MLflow server, and pictures of it."""

    browser: Browser
    url: str
    pictures: Path

    @contextmanager
    def open(self, address: str, *, height: int = 1000, theme: str = "light") -> Iterator[Page]:
        """Opens an address behind `#/`, as a user who was never there; it has a page of its own."""
        settings = {**_SETTINGS, "_mlflow_dark_mode_toggle_enabled": "true" if theme == "dark" else "false"}
        context = self.browser.new_context(viewport={"width": 1440, "height": height})
        context.set_default_timeout(WAIT_MS)
        context.add_init_script(
            f"for (const [key, value] of Object.entries({json.dumps(settings)})) localStorage.setItem(key, value)"
        )
        page = context.new_page()
        try:
            page.goto(f"{self.url}/#/{address}")
            yield page
        finally:
            context.close()

    def keep(self, page: Page, name: str) -> None:
        page.mouse.move(0, 0)  # away from what shows more below the pointer
        picture = self.pictures / f"{name}.png"
        page.screenshot(path=picture, animations="disabled")
        if name in SHOWN:
            stamp(picture, SHOWN[name]())


def card(page: Page, title: str) -> Locator:
    heading = page.get_by_role("heading", name=title, exact=True)
    return page.get_by_test_id("experiment-view-compare-runs-card").filter(has=heading)


def traces(page: Page, title: str) -> list[Trace]:
    """What a chart draws, when it is drawn. A curve that is also drawn for the legend is there once."""
    chart = card(page, title)
    chart.scroll_into_view_if_needed()
    expect(chart.locator(".js-plotly-plot")).to_have_count(1)
    found: dict[str | None, Trace] = {}
    for trace in chart.evaluate(_PLOTS):
        found[trace["run"]] = Trace(**trace)
    return list(found.values())
