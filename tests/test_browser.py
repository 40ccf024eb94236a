"""What MLflow's user interface shows of tuning runs: read in a real browser, and compared with the store.

With the environment variable SCREENSHOTS, the pictures go to that directory, after longer tunings: see CONTRIBUTING.md.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from helpers.browser import MlflowPages, card, chromium, chromium_path, traces
from helpers.commands import ROOT, environment, run_project
from helpers.servers import mlflow_server
from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.utils.mlflow_tags import MLFLOW_PROJECT_ENTRY_POINT
from playwright.sync_api import Browser, Locator, Page, expect
from rich.console import Console

from ansor_mlflow import names
from ansor_mlflow.cli.progress import TuningView
from ansor_mlflow.foreign import duration
from ansor_mlflow.parameters import CompileOptions, EvaluateOptions, TuneOptions
from ansor_mlflow.steps.compiling import compile_network
from ansor_mlflow.steps.evaluation import evaluate
from ansor_mlflow.steps.tuning.tune import tune
from ansor_mlflow.tracking.report.views import VIEWS, SavedView
from ansor_mlflow.trials import TrialStatus, TuningPlan, TuningResult, TuningRound

PICTURES_FOR_DOCS = os.environ.get("SCREENSHOTS", "")
NETWORKS = ("resnet-18", "mobilenet_v2") if PICTURES_FOR_DOCS else ("mlp", "resnet-block")
NUM_TRIALS = (72, 108, 144) if PICTURES_FOR_DOCS else (8, 10, 12)
MAX_IMAGE_BYTES = 300_000
DOCS = ROOT / "docs"
CHARTS = "experiments/{id}/runs/{run}/model-metrics?workflowType=machine_learning"
ARTIFACT = "experiments/{id}/runs/{run}/artifacts/{file}?workflowType=machine_learning"
CORNER = """image => {
    const canvas = new OffscreenCanvas(1, 1).getContext("2d");
    canvas.drawImage(image, 0, 0);
    return [...canvas.getImageData(0, 0, 1, 1).data];
}"""
"""The pixel in the upper left corner of an image: red, green, blue, opacity."""
KNOBS: list[dict[str, Any]] = [
    {"network": network, "trials": num_trials, **knobs}
    for network in NETWORKS
    for num_trials, knobs in zip(
        NUM_TRIALS,
        (
            {"strategy": "random", "cost_model": "none", "num_trials_per_round": 4},
            {"strategy": "evolutionary", "cost_model": "random", "num_trials_per_round": 8},
            {"strategy": "evolutionary", "cost_model": "xgb", "num_trials_per_round": 8},
        ),
        strict=True,
    )
]
"""Parameters of the tunings."""
if PICTURES_FOR_DOCS:
    KNOBS += [{"network": "resnet-50", "trials": 144}, {"network": "bert-tiny", "trials": 48}]
else:
    KNOBS = [{**knobs, "min_repeat_ms": 1} for knobs in KNOBS[:4]]  # one of the second network
LEADERBOARD, TUNING_CHARTS = VIEWS
pytestmark = pytest.mark.timeout(3600)  # the tunings are a part of the first test


@dataclass(frozen=True)
class Experiment:
    url: str
    id: str

    @property
    def client(self) -> MlflowClient:
        return MlflowClient(self.url)

    def view(self, view: SavedView, mode: str) -> str:
        """Where the UI shows a saved view. Without a workflow type, a new browser shows the pages for GenAI."""
        query = f"viewStateShareKey={view.key}&workflowType=machine_learning&compareRunsMode={mode}"
        return f"experiments/{self.id}/runs?{query}"

    def runs(self, search: str = "", sorted_by: str = names.BEST_LATENCY_MS) -> list[Run]:
        return list(self.client.search_runs([self.id], search, order_by=[f"metrics.`{sorted_by}` ASC"]))

    def tunings(self, network: str = "%") -> list[Run]:
        """The runs of tunings, the best estimate first."""
        return self.runs(f"tags.`{names.TAG_STEP}` = 'tune' AND tags.`{names.TAG_NETWORK}` LIKE '{network}'")

    def history(self, run: Run, metric: str) -> tuple[list[int], list[float]]:
        points = self.client.get_metric_history(run.info.run_id, metric)
        return [point.step for point in points], [point.value for point in points]


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Experiment]:
    """Tunings of two networks with several knobs; one of them, or all for the docs, within a pipeline."""
    chromium_path()
    directory = tmp_path_factory.mktemp("ui")
    with (
        mlflow_server(directory, artifact_root="mlflow-artifacts:/") as server,  # pictures show no path of this machine
        pytest.MonkeyPatch.context() as patch,
    ):
        made = Experiment(server.url, MlflowClient(server.url).create_experiment("tuning"))
        patch.setenv("MLFLOW_TRACKING_URI", server.url)
        patch.setenv("MLFLOW_EXPERIMENT_ID", made.id)
        patch.chdir(directory)
        for index, knobs in enumerate(KNOBS):
            if index == 0 or PICTURES_FOR_DOCS:
                parameters = {**knobs, **({"turns": 3, "measure_s": 1.5} if PICTURES_FOR_DOCS else {})}
                env = environment(server.url)
                finished = run_project(ROOT, parameters, directory, env, experiment_id=made.id)
                assert finished.exit_code == 0, finished.stderr
            else:
                tuned = tune(TuneOptions(**knobs))
        if not PICTURES_FOR_DOCS:  # one of those that were tuned alone is on the leaderboard, too
            compiled = compile_network(CompileOptions(tune_run=tuned.run_id))
            evaluate(EvaluateOptions(model_uri=compiled.model_uri, turns=1, measure_s=0.1, rivals=("onnxruntime",)))
        yield made


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ROOT / PICTURES_FOR_DOCS if PICTURES_FOR_DOCS else tmp_path_factory.mktemp("pictures")


@pytest.fixture(scope="module")
def pages(experiment: Experiment, browser: Browser, pictures: Path) -> MlflowPages:
    return MlflowPages(browser, experiment.url, pictures)


def number(text: str) -> float:
    """A figure as the page shows it; NaN where there is none."""
    return float("nan") if text.strip() in ("", "-") else float(text)


def rounded(milliseconds: float) -> re.Pattern[str]:
    """A latency as a page shows it; the metric has five digits of it."""
    texts = {duration(milliseconds / 1e3 * factor) for factor in (1 - 5e-6, 1 + 5e-6)}
    return re.compile("|".join(map(re.escape, texts)))


def cells(page: Page, run: Run) -> dict[str, str]:
    found = page.locator(f'.ag-row[row-id="{run.info.run_id}"] [col-id]')
    expect(found.first).to_be_visible()
    texts = found.evaluate_all("cells => cells.map(cell => [cell.getAttribute('col-id'), cell.innerText])")
    return {column.split("`")[1] if "`" in column else column: text for column, text in texts}


def names_shown(page: Page) -> list[str]:
    rows = page.locator(".ag-pinned-left-cols-container .ag-row")
    pairs = rows.evaluate_all("rows => rows.map(row => [Number(row.getAttribute('row-index')), row.innerText])")
    return [text.splitlines()[2] for _, text in sorted(pairs)]


@pytest.mark.nightly
def test_the_leaderboard_has_a_row_for_each_pipeline_and_evaluation(experiment: Experiment, pages: MlflowPages) -> None:
    runs = experiment.runs(LEADERBOARD.state["searchFilter"], names.LATENCY_MS)
    assert len(runs) == (len(KNOBS) if PICTURES_FOR_DOCS else 2)
    with pages.open(experiment.view(LEADERBOARD, "TABLE")) as page:
        expect(page.get_by_test_id("saved-views-trigger")).to_have_text("Leaderboard")
        expect(page.get_by_text(f"{len(runs)} matching runs")).to_be_visible()
        tags = {f"tags.`{tag}`" for run_ in runs for tag in run_.data.tags}
        for title in LEADERBOARD.state["selectedColumns"]:
            if title in tags or not title.startswith("tags."):  # there is no column of a tag that no run has
                expect(page.locator(f'.ag-header-cell[col-id="{title}"]')).to_be_in_viewport(ratio=1)
        for run_ in runs:
            shown, data = cells(page, run_), run_.data
            assert shown[names.TAG_NETWORK] == data.tags[names.TAG_NETWORK]
            assert shown[names.TAG_TARGET] == data.tags[names.TAG_TARGET]
            for metric in (
                names.LATENCY_MS,
                names.SPEEDUP_VS_BEST,
                names.TRIALS_MEASURED,
            ):
                assert number(shown[metric]) == pytest.approx(data.metrics.get(metric, float("nan")), nan_ok=True)
        pages.keep(page, "leaderboard")
        assert names_shown(page) == [run_.info.run_name for run_ in runs]


@pytest.mark.nightly
def test_the_tuning_charts_draw_every_tuning(experiment: Experiment, pages: MlflowPages) -> None:
    tunings = experiment.tunings()
    ids = [run_.info.run_id for run_ in tunings]
    assert len(tunings) == len(KNOBS)
    with pages.open(experiment.view(TUNING_CHARTS, "CHART"), height=1110) as page:
        expect(page.get_by_test_id("saved-views-trigger")).to_have_text("Tuning charts")
        expect(page.get_by_text(f"{len(tunings)} matching runs")).to_be_visible()
        for metric in (names.BEST_LATENCY_MS, names.TRIALS_PER_MINUTE):
            drawn = {trace.run: trace for trace in traces(page, metric)}
            assert set(drawn) == set(ids)
            for run_ in tunings:
                steps, values = experiment.history(run_, metric)
                assert drawn[run_.info.run_id].x == steps
                assert drawn[run_.info.run_id].y == pytest.approx(values)
        (bars,) = traces(page, names.CONFIRMED_LATENCY_MS)
        confirmed = {run_.info.run_id: run_.data.metrics[names.CONFIRMED_LATENCY_MS] for run_ in tunings}
        assert dict(zip(bars.y, bars.x, strict=True)) == pytest.approx(confirmed)

        knobs = card(page, "Parallel Coordinates")
        for text in ("num_trials", "strategy", "cost_model", names.BEST_LATENCY_MS, "random", "xgb", "none"):
            expect(knobs.get_by_text(text, exact=True).first).to_be_visible()
        card(page, names.BEST_LATENCY_MS).scroll_into_view_if_needed()
        pages.keep(page, "tuning-charts")
        page.get_by_text("Failures", exact=True).click()
        for status in TrialStatus:
            name = names.trials_with(status)
            failed = {run_.info.run_id: run_.data.metrics[name] for run_ in tunings if name in run_.data.metrics}
            if status is TrialStatus.OK or not failed:  # a chart without a bar is not there
                expect(card(page, name)).to_have_count(0)
                continue
            (bars,) = traces(page, name)
            assert dict(zip(bars.y, bars.x, strict=True)) == failed


def compared_metrics(page: Page) -> dict[str, list[float]]:
    """What the table of metrics shows now; more comes when it is scrolled."""
    titles = page.locator('a[title="Plot chart"]').all_inner_texts()
    texts = page.locator('[role="grid"]').filter(has_not=page.locator("a")).locator("span").all_inner_texts()
    rows = [texts[index : index + 2] for index in range(0, len(texts), 2)]
    return {title: [number(text) for text in row] for title, row in zip(titles, rows, strict=True)}


@pytest.mark.nightly
def test_two_tunings_are_compared(experiment: Experiment, pages: MlflowPages) -> None:
    tunings = experiment.tunings(NETWORKS[0])
    in_project = [MLFLOW_PROJECT_ENTRY_POINT in run_.data.tags for run_ in tunings]  # `mlflow run` logs more params
    first, second = [run_ for run_, is_in in zip(tunings, in_project, strict=True) if is_in == all(in_project)][:2]
    ids = json.dumps([first.info.run_id, second.info.run_id])
    address = f'compare-runs?runs={ids}&experiments=["{experiment.id}"]&workflowType=machine_learning'
    with pages.open(address, height=1500) as page:
        expect(page.get_by_text("Comparing 2 Runs from 1 Experiment")).to_be_visible()
        plot = page.locator(".js-plotly-plot").first
        for axis in ("num_trials", names.BEST_LATENCY_MS):  # what MLflow shows by itself
            expect(plot.get_by_text(axis, exact=True)).to_be_in_viewport(ratio=1)
        for param in ("network", "strategy", "cost_model", "num_trials_per_round", "num_trials"):
            row = page.get_by_role("row").filter(has=page.get_by_role("rowheader", name=param, exact=True))
            values = [run_.data.params[param] for run_ in (first, second)]
            expect(row.get_by_role("cell")).to_have_text(values)
        page.get_by_role("switch", name="Parameters - Show diff only").click()
        page.get_by_role("switch", name="Metrics - Show diff only").scroll_into_view_if_needed()
        expect(page.locator('a[title="Plot chart"]').first).to_be_visible()
        shown = compared_metrics(page)
        for metric in (names.BEST_LATENCY_MS, names.CONFIRMED_LATENCY_MS, names.TRIALS_PER_MINUTE):
            expected = [run_.data.metrics[metric] for run_ in (first, second)]
            assert shown[metric] == pytest.approx(expected, rel=1e-2, abs=5.1e-4)  # rounded
        page.get_by_text(names.CONVERGENCE_FIGURE, exact=True).click()
        figures = page.get_by_role("img", name=names.CONVERGENCE_FIGURE)
        expect(figures).to_have_count(2)
        for figure in figures.all():
            assert_drawn(figure)
        figures.last.scroll_into_view_if_needed()
        pages.keep(page, "compare")


def assert_drawn(image: Locator) -> None:
    """Asserts that an image has arrived, and is as wide as our figures are."""
    image.evaluate("image => image.decode()")
    assert image.evaluate("image => image.naturalWidth") == 1100


@pytest.mark.nightly
def test_the_charts_of_a_run_are_its_curves(experiment: Experiment, pages: MlflowPages) -> None:
    tuning = experiment.tunings(NETWORKS[1])[0]
    with pages.open(CHARTS.format(id=experiment.id, run=tuning.info.run_id)) as page:
        search = page.get_by_placeholder("Search metric charts")
        for title, metric in ((names.BEST_LATENCY_MS,) * 2, ("trials_per_minute", names.TRIALS_PER_MINUTE)):
            search.fill(title)
            (trace,) = traces(page, title)
            steps, values = experiment.history(tuning, metric)
            assert trace.x == steps
            assert trace.y == pytest.approx(values)
        pages.keep(page, "run-charts")


@pytest.mark.nightly
def test_the_overview_of_a_run_says_what_came_out(experiment: Experiment, pages: MlflowPages) -> None:
    (main, *_) = experiment.runs(f"tags.`{names.TAG_STEP}` = 'main'")
    address = f"experiments/{experiment.id}/runs/{main.info.run_id}?workflowType=machine_learning"
    with pages.open(address) as page:
        expect(page.get_by_role("heading", name=main.info.run_name)).to_be_visible()
        page.get_by_text("Show more", exact=True).click()
        latency = f"tuned: {duration(main.data.metrics[names.LATENCY_MS] / 1e3)}"
        expect(page.get_by_role("listitem").filter(has_text=latency)).to_be_visible()
        expect(page.get_by_text("mlflow run . --env-manager local -P network=")).to_be_visible()
        pages.keep(page, "run")


class MiddleRound:
    """A `TuningObserver` that keeps a round in the middle of a tuning."""

    def __init__(self, num_trials: int) -> None:
        self._num_trials = num_trials

    def tuning_started(self, plan: TuningPlan) -> None:
        self.view = TuningView(plan=plan)

    def round_finished(self, round_: TuningRound) -> None:
        if round_.total_trials <= 0.8 * self._num_trials:
            self.view = replace(self.view, latest=round_)

    def tuning_finished(self, result: TuningResult) -> None: ...


@pytest.mark.nightly
def test_a_terminal_shows_how_far_a_tuning_is(
    browser: Browser, pictures: Path, experiment_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", experiment_id)
    monkeypatch.chdir(tmp_path)
    knobs = KNOBS[2]
    observer = MiddleRound(knobs["trials"])
    tune(TuneOptions(**knobs), [observer])
    console = Console(record=True, width=100, height=18, file=io.StringIO(), force_terminal=True)
    console.print(observer.view)
    page = browser.new_page(device_scale_factor=2)
    page.set_content(console.export_html(inline_styles=True))
    for text in (NETWORKS[0], "trials", "network"):
        expect(page.get_by_text(text).first).to_be_visible()
    page.locator("pre").first.screenshot(path=pictures / "progress.png")


@pytest.mark.nightly
def test_a_figure_is_legible_in_the_dark_theme(experiment: Experiment, pages: MlflowPages) -> None:
    tuning = experiment.tunings(NETWORKS[1])[0]
    address = ARTIFACT.format(id=experiment.id, run=tuning.info.run_id, file=names.CONVERGENCE_FIGURE)
    with pages.open(address, theme="dark") as page:
        expect(page.locator("body")).to_have_class("dark-mode")
        image = page.get_by_role("img", name=names.CONVERGENCE_FIGURE)
        expect(image).to_be_visible()
        assert_drawn(image)
        assert image.evaluate(CORNER) == [255, 255, 255, 255]
        pages.keep(page, "figure-dark")


@pytest.mark.nightly
def test_the_report_is_a_page_within_the_page(experiment: Experiment, pages: MlflowPages) -> None:
    tuning = experiment.tunings(NETWORKS[1])[0]
    metrics = tuning.data.metrics
    address = ARTIFACT.format(id=experiment.id, run=tuning.info.run_id, file=names.REPORT_FILE)
    with pages.open(address, height=1250) as page:
        report = page.frame_locator("iframe")
        expect(report.get_by_role("heading", level=1)).to_have_text(NETWORKS[1])
        figures, tasks = report.locator("table").first, report.locator("table").nth(1)
        expect(figures).to_contain_text(rounded(metrics[names.BEST_LATENCY_MS]))
        expect(figures).to_contain_text(f"trials{metrics[names.TRIALS_MEASURED]:.0f}")
        num_tasks = int(tuning.data.params["num_tasks"])
        expect(tasks.locator("tr:has(td)")).to_have_count(num_tasks)
        for image in report.locator("img").all():
            assert_drawn(image)
        assert tasks.evaluate("table => table.scrollWidth <= table.clientWidth"), "a column is cut off"
        pages.keep(page, "report")


def test_pictures_of_the_docs_are_small() -> None:
    images = sorted((DOCS / "images").glob("*"))
    assert images
    sizes = {image.name: image.stat().st_size for image in images}
    assert {name: size for name, size in sizes.items() if size > MAX_IMAGE_BYTES} == {}


def test_every_picture_is_shown() -> None:
    texts = "\n".join(path.read_text() for path in (ROOT / "README.md", *DOCS.rglob("*.md")))
    assert [image.name for image in (DOCS / "images").glob("*") if f"images/{image.name})" not in texts] == []
