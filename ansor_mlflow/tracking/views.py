"""Saved views of an experiment in the MLflow UI: a leaderboard, and charts of its tunings.

A saved view is an experiment tag. Its format is not documented: it is that of `savedViewEnvelope.ts`,
`ExperimentPageUIState.tsx`, `ExperimentPageSearchFacetsState.tsx` and `runs-charts.types.ts` in the sources of MLflow's
user interface.
"""

from __future__ import annotations

import base64
import json
import logging
import re
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlflow

from ansor_mlflow import names
from ansor_mlflow.errors import only_warn
from ansor_mlflow.trials import TrialStatus

_FROM_VERSION, _TO_VERSION = (3, 17), (3, 18)
"""MLflow's versions that the format was checked for: the first, and the first that it was not."""
_KNOBS = ("num_trials", "num_trials_per_round", *names.SEARCH_PARAMS)
_RUN_NAME, _RUN_NAME_WIDTH = "attributes.`Run Name`", 279
_COMPRESSED = "deflate;"
_log = logging.getLogger("ansor_mlflow")
_seen: set[tuple[str, str]] = set()
"""Tracking URI and experiment ID of every experiment that this process has looked at."""


@dataclass(frozen=True, kw_only=True)
class SavedView:
    """What the "Views" menu of an experiment's runs lists."""

    key: str
    name: str
    state: Mapping[str, Any]
    """State of MLflow's page: what is searched, its columns and its charts."""

    @property
    def tag(self) -> str:
        """Name of the experiment tag."""
        return names.VIEW_PREFIX + self.key

    def to_tag_value(self, time_ms: int) -> str:
        """The tag's value; MLflow takes up to 20,000 characters.

        Args:
            time_ms: When it was made, in milliseconds since 1970.
        """
        state = _COMPRESSED + base64.b64encode(zlib.compress(json.dumps(self.state).encode(), 9)).decode()
        return json.dumps({"name": self.name, "createdAt": time_ms, "updatedAt": time_ms, "state": state})


def ensure_views(experiment_id: str) -> None:
    """Adds our views to an experiment that has none of them; what is there is never touched.

    It asks the server once in a process for each experiment. What goes wrong is a warning in the log.
    """
    place = (mlflow.get_tracking_uri(), experiment_id)
    if place in _seen:
        return
    _seen.add(place)
    with only_warn(f"the experiment {experiment_id} gets no saved views"):
        _add_views(experiment_id)


def _add_views(experiment_id: str) -> None:
    version = mlflow.__version__
    if not _FROM_VERSION <= _numbers(version) < _TO_VERSION:
        known = f"{_dotted(_FROM_VERSION)} or later, below {_dotted(_TO_VERSION)}"
        _log.warning("the experiment %s gets no saved views: this is MLflow %s, not %s", experiment_id, version, known)
        return
    client = mlflow.MlflowClient()
    tags = client.get_experiment(experiment_id).tags
    if any(view.tag in tags for view in VIEWS):
        return
    for view in VIEWS:
        client.set_experiment_tag(experiment_id, view.tag, view.to_tag_value(int(time.time() * 1000)))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


# -- what they show ----------------------------------------------------------------------------------------------------


def _metric(name: str) -> str:
    return f"metrics.`{name}`"


def _param(name: str) -> str:
    return f"params.`{name}`"


def _tag(name: str) -> str:
    return f"tags.`{name}`"


def _state(search: str, sorted_by: str, columns: Mapping[str, int], **more: Any) -> dict[str, Any]:
    """A page with every field that is no choice of one user, sorted by a metric: MLflow then shows nested runs, too.

    Args:
        search: Which runs.
        sorted_by: The metric; the smallest first.
        columns: Columns of the table, with their widths in pixels.
        more: Fields that have other values than MLflow's defaults.
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
    return {
        "uuid": _section_id(name),
        "name": name,
        "display": True,
        "isReordered": True,
        "deleted": False,
        "isGenerated": False,
        **fields,
    }


def _generated_section(name: str) -> dict[str, Any]:
    """One that MLflow fills itself."""
    return _section(name, isReordered=False, isGenerated=True)


def _section_id(name: str) -> str:
    return f"ansor-section-{name.lower().replace(' ', '-')}"


def _card(type_: str, name: str, section: str, **fields: Any) -> dict[str, Any]:
    """A chart; a metric's name is its identity, so that MLflow makes no second one for it."""
    return {
        "uuid": f"ansor-chart-{name}",
        "type": type_,
        "runsCountToCompare": 10,
        "metricSectionId": _section_id(section),
        "deleted": False,
        "isGenerated": False,
        **fields,
    }


def _line(metric: str, section: str, scale: str = "linear") -> dict[str, Any]:
    return _card(
        "LINE",
        metric,
        section,
        displayName=metric,
        metricKey=metric,
        selectedMetricKeys=[metric],
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


def _bar(metric: str, section: str) -> dict[str, Any]:
    return _card("BAR", metric, section, displayName=metric, metricKey=metric, selectedMetricKeys=[metric])


def _charts() -> Iterator[dict[str, Any]]:
    yield _line(names.BEST_LATENCY_MS, "Tuning", "log")  # of small and large networks
    yield _card(
        "PARALLEL",
        "knobs",
        "Tuning",
        selectedParams=list(_KNOBS),
        selectedMetrics=[names.BEST_LATENCY_MS],
        showAllRuns=True,
    )
    yield _bar(names.CONFIRMED_LATENCY_MS, "Tuning")
    yield _line(names.TRIALS_PER_MINUTE, "Tuning")
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
        _metric(names.LATENCY_MS): 101,
        _metric(names.SPEEDUP_VS_BEST): 105,
        _metric(names.SPEEDUP_VS_UNTUNED): 115,
        _metric(names.BEST_LATENCY_MS): 101,
        _metric(names.TRIALS_MEASURED): 101,
        _tag(names.TAG_TARGET): 145,  # within a window of 1600 pixels, which the last column begins in, too
        _tag(names.TAG_NETWORK): 101,
        _tag(names.TAG_BEST_RIVAL): 101,
        _param("strategy"): 101,
        _tag(names.TAG_UNRELIABLE): 101,
    },
)
_TUNING_CHARTS = _state(
    f"{_tag(names.TAG_STEP)} = 'tune'",  # a pipeline has the figures of its tuning, too, but no curves
    names.BEST_LATENCY_MS,
    {_metric(names.BEST_LATENCY_MS): 130, _param("strategy"): 110, _tag(names.TAG_NETWORK): 130},
    compareRunCharts=list(_charts()),
    compareRunSections=[
        _section("Tuning", columns=2, cardHeight=380),
        _section("Failures", columns=4, cardHeight=300),
        _generated_section("Model metrics"),
        _generated_section("System metrics"),
    ],
    isAccordionReordered=True,
)

VIEWS = (
    SavedView(key=names.LEADERBOARD_VIEW, name="Leaderboard", state=_LEADERBOARD),
    SavedView(key=names.TUNING_CHARTS_VIEW, name="Tuning charts", state=_TUNING_CHARTS),
)
"""Saved views of every experiment that a step has opened a run in."""
