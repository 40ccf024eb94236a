"""The command `runs`: finds the runs of an experiment, on the server."""

from __future__ import annotations

import os
from dataclasses import dataclass

import mlflow
from mlflow.entities import Experiment, Run

from ansor_mlflow import names
from ansor_mlflow.errors import UserInputError
from ansor_mlflow.options import RunsOptions
from ansor_mlflow.tracking import existing_views, translated_errors

_DEFAULT_ID = "0"
"""ID of the experiment that MLflow makes for itself."""
_ORDERS = {
    "started": "attributes.start_time DESC",
    "latency_ms": f"metrics.`{names.LATENCY_MS}` ASC",
    "best_latency_ms": f"metrics.`{names.BEST_LATENCY_MS}` ASC",
    "speedup_vs_untuned": f"metrics.`{names.SPEEDUP_VS_UNTUNED}` DESC",
    "trials": f"metrics.`{names.TRIALS_MEASURED}` DESC",
}


@dataclass(frozen=True, kw_only=True)
class FoundRun:
    """A run of one of our steps; a figure that it does not have is None."""

    run_id: str
    step: str
    name: str
    network: str
    target: str
    """Short description of the target, such as "llvm znver4 ×2"."""
    status: str
    started_ms: int
    """When the run started, in milliseconds since 1970."""
    latency_ms: float | None
    best_latency_ms: float | None
    """Latency that the tuning estimated."""
    speedup_vs_untuned: float | None
    trials: int | None
    distrust: str
    """Why its times cannot be trusted; empty where they can."""


@dataclass(frozen=True, kw_only=True)
class FoundRuns:
    """The runs of an experiment that were asked for, in the order that was asked for."""

    experiment_id: str
    experiment: str
    """Name of the experiment."""
    runs: tuple[FoundRun, ...]
    are_all: bool
    """Whether the experiment has no more such runs."""
    pages: dict[str, str]
    """The experiment's saved views: names, and addresses within the UI."""


def find_runs(options: RunsOptions) -> FoundRuns:
    """Finds runs, in one request beside the one for the experiment.

    Raises:
        UserInputError: There is no such experiment, or a name has characters that MLflow cannot search for.
        MachineError: A server is away.
    """
    with translated_errors("find runs"):
        experiment = _experiment(options.experiment)
        found = mlflow.MlflowClient().search_runs(
            [experiment.experiment_id],
            filter_string=_filter(options),
            order_by=[_ORDERS[options.sort]],
            max_results=options.limit,
        )
    return FoundRuns(
        experiment_id=experiment.experiment_id,
        experiment=experiment.name,
        runs=tuple(_found(run) for run in found),
        are_all=not found.token,
        pages={view.name: view.page(experiment.experiment_id) for view in existing_views(experiment.tags)},
    )


def _experiment(given: str) -> Experiment:
    """The experiment that is given, or the one that a step would open its run in; it is not made if it is missing."""
    client = mlflow.MlflowClient()
    name = given or os.environ.get("MLFLOW_EXPERIMENT_NAME", "")
    if not name:
        return client.get_experiment(os.environ.get("MLFLOW_EXPERIMENT_ID") or _DEFAULT_ID)
    experiment = client.get_experiment_by_name(name)
    if experiment is None and given.isdecimal():
        experiment = client.get_experiment(given)
    if experiment is None:
        raise UserInputError(f"experiment={name}: there is no such experiment; give the ID or the name of one")
    return experiment


def _filter(options: RunsOptions) -> str:
    """The search expression. Runs of others than our steps have no step."""
    clauses = [f"tags.`{names.TAG_STEP}` = '{options.step}'" if options.step else f"tags.`{names.TAG_STEP}` != ''"]
    if options.network:
        operator = "LIKE" if "%" in options.network else "="
        clauses.append(f"tags.`{names.TAG_NETWORK}` {operator} {_quoted('network', options.network)}")
    if options.target:
        clauses.append(f"tags.`{names.TAG_TARGET}` LIKE {_quoted('target', options.target, around='%')}")
    return " AND ".join(clauses)


def _quoted(parameter: str, text: str, around: str = "") -> str:
    """A text of a search expression, which knows two kinds of quotes and no way to write one within its own kind."""
    quote = '"' if "'" in text else "'"
    if quote in text or text.endswith("\\"):
        raise UserInputError(
            f"{parameter}={text}: MLflow cannot search for text with both kinds of quotes, or with a backslash at its "
            "end; give a part of it, with % for the rest"
        )
    return f"{quote}{around}{text}{around}{quote}"


def _found(run: Run) -> FoundRun:
    tags, metrics = run.data.tags, run.data.metrics
    trials = metrics.get(names.TRIALS_MEASURED)
    return FoundRun(
        run_id=run.info.run_id,
        step=tags[names.TAG_STEP],
        name=run.info.run_name or "",
        network=tags.get(names.TAG_NETWORK, ""),
        target=tags.get(names.TAG_TARGET, ""),
        status=run.info.status,
        started_ms=run.info.start_time,
        latency_ms=metrics.get(names.LATENCY_MS),
        best_latency_ms=metrics.get(names.BEST_LATENCY_MS),
        speedup_vs_untuned=metrics.get(names.SPEEDUP_VS_UNTUNED),
        trials=None if trials is None else int(trials),
        distrust=tags.get(names.TAG_DISTRUST, ""),
    )
