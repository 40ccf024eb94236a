"""What a person reads of a tuned model on MLflow's pages, in a window of 1440 × 900: runs, models and the registry."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from helpers.browser import MlflowPages, chromium, chromium_path
from helpers.servers import mlflow_server
from mlflow import MlflowClient
from mlflow.entities import LoggedModel, Run
from playwright.sync_api import Locator, Page, expect

import ansor_mlflow as am
from ansor_mlflow import names
from ansor_mlflow.foreign import duration

NAME = "mlp"
WORKFLOW = "workflowType=machine_learning"
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Registered:
    """A network that was tuned, registered and promoted, and where MLflow shows it."""

    url: str
    experiment: str
    runs: dict[str, Run]
    """The last run of each step, by the step's name."""
    model: LoggedModel

    @property
    def latency(self) -> str:
        return duration(self.runs["evaluate"].data.metrics[names.LATENCY_MS] / 1e3)


@pytest.fixture(scope="module")
def registered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registered]:
    chromium_path()
    directory = tmp_path_factory.mktemp("registered")
    with mlflow_server(directory) as server, pytest.MonkeyPatch.context() as patch:
        client = MlflowClient(server.url)
        experiment = client.create_experiment("tuning")
        patch.setenv("MLFLOW_TRACKING_URI", server.url)
        patch.setenv("MLFLOW_EXPERIMENT_ID", experiment)
        patch.chdir(directory)
        quick = {"trials": 8, "min_repeat_ms": 1, "turns": 1, "measure_s": 0.1}
        made = am.pipeline("mlp", register_as=NAME, promote=True, **quick)
        runs = {run.data.tags[names.TAG_STEP]: run for run in client.search_runs([experiment])}
        model = client.get_logged_model(made.model_uri.removeprefix("models:/"))
        yield Registered(server.url, experiment, runs, model)


@pytest.fixture(scope="module")
def pages(registered: Registered, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowPages]:
    with chromium() as browser:
        yield MlflowPages(browser, registered.url, tmp_path_factory.mktemp("pictures"))


def on_screen(*found: Locator) -> None:
    """Asserts that each is in the window, without scrolling."""
    for locator in found:
        expect(locator).to_be_in_viewport(ratio=0.95)  # of what is wider than its column by a pixel, too


def metrics_shown(page: Page, known: set[str]) -> list[str]:
    """The names of metrics in the order of a page's table."""
    expect(page.get_by_placeholder("Search metrics")).to_be_visible()
    first = [text.split()[0] for text in page.get_by_role("row").all_inner_texts() if text.strip()]
    return [name for name in first if name in known]


@pytest.mark.parametrize(
    ("step", "first"),
    [
        ("main", [names.LATENCY_MS, names.SPEEDUP_VS_BEST, names.SPEEDUP_VS_UNTUNED, names.BEST_LATENCY_MS]),
        ("evaluate", [names.LATENCY_MS, names.SPEEDUP_VS_BEST, names.SPEEDUP_VS_UNTUNED]),
        ("tune", [names.BEST_LATENCY_MS]),
    ],
)
def test_a_run_begins_with_what_came_out_and_how_to_do_it_again(
    registered: Registered, pages: MlflowPages, step: str, first: list[str]
) -> None:
    run = registered.runs[step]
    metrics = run.data.metrics
    with pages.open(f"experiments/{registered.experiment}/runs/{run.info.run_id}?{WORKFLOW}", height=900) as page:
        command = f"ansor-mlflow {step} --network mlp --trials 8"
        again = page.get_by_text(command if step != "evaluate" else "ansor-mlflow evaluate --turns 1")
        headline = page.get_by_text("4 tasks, estimated" if step == "tune" else "as fast as untuned")
        on_screen(page.get_by_role("heading", name=run.info.run_name), headline, again)
        assert metrics_shown(page, set(metrics))[: len(first)] == first
        on_screen(*(page.get_by_role("link", name=name, exact=True) for name in first))
        if step != "tune":
            on_screen(page.get_by_text(registered.latency, exact=True).first)
            on_screen(page.get_by_role("link", name=registered.model.name).first)
        expect(page.get_by_text(f"Parameters ({len(run.data.params)})")).to_be_visible()
        assert len(run.data.params) < 20
        pages.keep(page, step)


def test_the_models_tab_has_a_row_with_the_latency(registered: Registered, pages: MlflowPages) -> None:
    with pages.open(f"experiments/{registered.experiment}/models?{WORKFLOW}", height=900) as page:
        on_screen(page.get_by_role("link", name=registered.model.name), page.get_by_text("Ready"))
        columns = page.locator('.ag-header-cell[col-id^="metrics."]')
        expect(columns.first).to_have_attribute("col-id", f'metrics.{{"metricKey":"{names.LATENCY_MS}"}}')
        page.locator(".ag-center-cols-viewport").evaluate("columns => { columns.scrollLeft = 640; }")
        page.locator(".ag-body-horizontal-scroll-viewport").evaluate("bar => { bar.scrollLeft = 640; }")
        metrics = registered.runs["evaluate"].data.metrics
        for name in (names.LATENCY_MS, names.SPEEDUP_VS_BEST):
            cell = page.get_by_role("gridcell", name=f"{metrics[name]:.5g}", exact=True)
            on_screen(page.get_by_role("columnheader", name=name), cell.first)
        pages.keep(page, "models-tab")


def test_the_page_of_a_model_has_its_figures_and_its_runs(registered: Registered, pages: MlflowPages) -> None:
    model = registered.model
    with pages.open(f"experiments/{registered.experiment}/models/{model.model_id}?{WORKFLOW}", height=900) as page:
        on_screen(page.get_by_role("heading", name=model.name), page.get_by_text(registered.latency, exact=True).first)
        first = [names.LATENCY_MS, names.SPEEDUP_VS_BEST, names.SPEEDUP_VS_UNTUNED]
        assert metrics_shown(page, {metric.key for metric in model.metrics})[:3] == first
        on_screen(page.get_by_text(names.LATENCY_MS, exact=True))
        pages.keep(page, "model")
        on_screen(page.get_by_role("link", name=registered.runs["compile"].info.run_name).last)
        on_screen(page.locator(f'a[href="#/models/{NAME}/versions/1"]'))


def test_the_registry_names_version_and_alias(registered: Registered, pages: MlflowPages) -> None:
    with pages.open(f"models?{WORKFLOW}", height=900) as page:
        row = page.get_by_role("row").filter(has=page.get_by_role("link", name=NAME, exact=True))
        on_screen(row)
        expect(row).to_contain_text("champion")
        pages.keep(page, "registry")


def test_a_registered_model_is_described_and_no_bookkeeping_shows(registered: Registered, pages: MlflowPages) -> None:
    with pages.open(f"models/{NAME}?{WORKFLOW}", height=900) as page:
        on_screen(page.get_by_text(registered.latency, exact=True).first, page.get_by_text("as fast as untuned"))
        on_screen(page.get_by_text("ansor-mlflow main --network mlp"))
        page.get_by_text("Tags", exact=True).first.click()
        expect(page.get_by_text("No tags found.")).to_be_visible()
        expect(page.get_by_role("link", name="Version 1")).to_be_visible()
        expect(page.get_by_text(names.MOVES_PREFIX)).to_have_count(0)
        pages.keep(page, "registered-model")


def test_a_version_says_what_it_is_where_it_comes_from_and_what_it_is_called(
    registered: Registered, pages: MlflowPages
) -> None:
    with pages.open(f"models/{NAME}/versions/1?{WORKFLOW}", height=900) as page:
        on_screen(page.get_by_role("heading", name="Version 1"), page.get_by_text("as fast as untuned"))
        on_screen(page.get_by_role("link", name=registered.runs["compile"].info.run_name))
        on_screen(page.get_by_text("champion", exact=False).first)
        on_screen(page.get_by_text(registered.latency, exact=True).first)
        tags = {names.TAG_NETWORK: "mlp", names.TAG_PROMOTION: "no_champion"}
        for name, value in tags.items():
            row = page.get_by_role("row").filter(has_text=name).filter(has_text=value)
            row.first.scroll_into_view_if_needed()
            expect(row.first).to_be_visible()
        assert sum("ansor." in text for text in page.get_by_role("row").all_inner_texts()) <= 4  # and latency_ms
        pages.keep(page, "version")
