"""Saved views of an experiment in the MLflow UI: a leaderboard, and charts of its tunings.

A saved view is an experiment tag. Its format is not documented: it is that of `savedViewEnvelope.ts`,
`ExperimentPageUIState.tsx`, `ExperimentPageSearchFacetsState.tsx` and `runs-charts.types.ts` in the sources of MLflow's
user interface.
"""

from __future__ import annotations

import base64
import json
import time
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import mlflow

from ansor_mlflow import names
from ansor_mlflow.errors import only_warn
from ansor_mlflow.trials import TrialStatus

_RUN_NAME, _RUN_NAME_WIDTH = "attributes.`Run Name`", 279
_seen: set[tuple[str, str]] = set()
"""Tracking URI and experiment ID of every experiment that this process has looked at."""


class SavedView(NamedTuple):
    """What the "Views" menu of an experiment's runs lists."""

    key: str
    name: str
    state: Mapping[str, Any]  # state of MLflow's page: what is searched, its columns and its charts

    @property
    def tag(self) -> str:
        return names.VIEW_PREFIX + self.key


def ensure_views(experiment_id: str) -> None:
    """Adds our views to an experiment that has none of them; what is there is never touched.

    It asks the server once in a process for each experiment. What goes wrong is a warning in the log.
    """
    place = (mlflow.get_tracking_uri(), experiment_id)
    if place in _seen:
        return
    _seen.add(place)
    with only_warn(f"the experiment {experiment_id} gets no saved views"):
        client = mlflow.MlflowClient()
        tags = client.get_experiment(experiment_id).tags
        for view in VIEWS if not any(view.tag in tags for view in VIEWS) else ():
            # MLflow takes up to 20,000 characters
            state = "deflate;" + base64.b64encode(zlib.compress(json.dumps(view.state).encode(), 9)).decode()
            now_ms = int(time.time() * 1000)
            value = {"name": view.name, "createdAt": now_ms, "updatedAt": now_ms, "state": state}
            client.set_experiment_tag(experiment_id, view.tag, json.dumps(value))


# -- what they show ----------------------------------------------------------------------------------------------------


def _metric(name: str) -> str:
    return f"metrics.`{name}`"


def _tag(name: str) -> str:
    return f"tags.`{name}`"


def _state(search: str, sorted_by: str, columns: Mapping[str, int], **more: Any) -> dict[str, Any]:
    """A page with every field that is no choice of one user, for the runs that a search finds and columns with their
    widths in pixels. It is sorted by a metric, the smallest first: MLflow then shows nested runs, too.
    """
    widths = {_RUN_NAME: _RUN_NAME_WIDTH, **columns}
    return {
        "searchFilter": search,
        "orderByKey": _metric(sorted_by),
        "orderByAsc": True,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "modelVersionFilter": "All Runs",
        "datasetsFilter": [],
        "selectedColumns": list(columns),
        "columnOrder": list(widths),
        "columnWidths": widths,
        "runsHiddenMode": "FIRST_10_RUNS",
        "viewMaximized": False,
        "runListHidden": False,
        "isAccordionReordered": False,
        "useGroupedValuesInCharts": True,
        "hideEmptyCharts": True,
        "groupBy": None,
        "groupsExpanded": {},
        "globalLineChartConfig": {"xAxisKey": "step", "lineSmoothness": 0, "selectedXAxisMetricKey": ""},
        **more,
    }


def _section(name: str, **fields: Any) -> dict[str, Any]:
    """A section of charts; without fields, one that MLflow fills itself."""
    uuid, is_ours = f"ansor-section-{name.lower().replace(' ', '-')}", bool(fields)
    made = {"uuid": uuid, "name": name, "display": True, "isReordered": is_ours, "deleted": False}
    return {**made, "isGenerated": not is_ours, **fields}


def _card(type_: str, name: str, section: str, **fields: Any) -> dict[str, Any]:
    """A chart; a metric's name is its identity, so that MLflow makes no second one for it."""
    return {
        "uuid": f"ansor-chart-{name}",
        "type": type_,
        "runsCountToCompare": 10,
        "metricSectionId": _section(section)["uuid"],
        "deleted": False,
        "isGenerated": False,
        **fields,
    }


def _bar(metric: str, section: str, type_: str = "BAR", **fields: Any) -> dict[str, Any]:
    shown = {"displayName": metric, "metricKey": metric, "selectedMetricKeys": [metric]}
    return _card(type_, metric, section, **shown, **fields)


def _line(metric: str, scale: str = "linear") -> dict[str, Any]:
    return _bar(
        metric,
        "Tuning",
        "LINE",
        lineSmoothness=0,
        xAxisScaleType="linear",
        scaleType=scale,
        range={},
        xAxisKey="step",
        selectedXAxisMetricKey="",
        yAxisKey="metric",
        yAxisExpressions=[],
        ignoreOutliers=False,
        useGlobalXaxisKey=True,
        useGlobalLineSmoothing=True,
    )


def _charts() -> Iterator[dict[str, Any]]:
    yield _line(names.BEST_LATENCY_MS, "log")  # of small and large networks
    params = ["num_trials", *names.SEARCH_PARAMS]  # a run that lacks one is not drawn
    metrics = [names.BEST_LATENCY_MS]
    yield _card("PARALLEL", "knobs", "Tuning", selectedParams=params, selectedMetrics=metrics, showAllRuns=True)
    yield _bar(names.CONFIRMED_LATENCY_MS, "Tuning")
    yield _line(names.TRIALS_PER_MINUTE)
    for status in TrialStatus:
        if status is not TrialStatus.OK:
            yield _bar(names.trials_with(status), "Failures")


_IS_MEASURED = " AND ".join(
    (
        f"{_metric(names.LATENCY_MS)} > 0",
        f"{_tag(names.TAG_STEP)} != 'promote'",  # MLflow's searches know no OR; runs of others have no step at all
        f"{_tag('mlflow.parentRunId')} IS NULL",  # a pipeline has the figures of its steps
        "attributes.status = 'FINISHED'",
    )
)
_LEADERBOARD = _state(
    _IS_MEASURED,
    names.LATENCY_MS,
    {
        _tag(names.TAG_NETWORK): 101,  # all of them within a window of 1440 pixels
        _metric(names.LATENCY_MS): 101,
        _metric(names.SPEEDUP_VS_BEST): 105,
        _tag(names.TAG_UNRELIABLE): 101,
        _metric(names.TRIALS_MEASURED): 101,
        _tag(names.TAG_TARGET): 145,
    },
)
_TUNING_CHARTS = _state(
    f"{_tag(names.TAG_STEP)} = 'tune'",  # a pipeline has the figures of its tuning, too, but no curves
    names.BEST_LATENCY_MS,
    {_metric(names.BEST_LATENCY_MS): 130, "params.`strategy`": 110, _tag(names.TAG_NETWORK): 130},
    compareRunCharts=list(_charts()),
    compareRunSections=[
        _section("Tuning", columns=2, cardHeight=380),
        _section("Failures", columns=4, cardHeight=300, display=False),  # most tunings have none
        _section("Model metrics"),
        _section("System metrics"),
    ],
    isAccordionReordered=True,
)

VIEWS = (
    SavedView(names.LEADERBOARD_VIEW, "Leaderboard", _LEADERBOARD),
    SavedView(names.TUNING_CHARTS_VIEW, "Tuning charts", _TUNING_CHARTS),
)
"""Saved views of every experiment that a step has opened a run in."""
