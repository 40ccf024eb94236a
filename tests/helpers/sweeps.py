"""Sweeps of small networks, as their users run them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlflow
import yaml
from helpers.commands import BRIEF, FAST
from mlflow.entities import Run

from ansor_mlflow import names

DEFAULTS: dict[str, Any] = {**FAST, **BRIEF, "cost_model": "none", "baseline": "none", "runtimes": "tvm", "trials": 4}
"""Parameters with which a pipeline is soon over."""


def write_sweep(path: Path, *entries: Mapping[str, Any], **others: Any) -> str:
    """A file with entries; with the defaults that make a pipeline brief, and others."""
    defaults = {**DEFAULTS, **others.pop("defaults", {})}
    path.write_text(yaml.safe_dump({"defaults": defaults, **others, "entries": list(entries)}))
    return str(path)


def runs_of(experiment_id: str, step: str) -> list[Run]:
    """The runs of a step, oldest first."""
    condition = f"tags.`{names.TAG_STEP}` = '{step}'"
    found = mlflow.search_runs([experiment_id], filter_string=condition, output_format="list")
    return sorted(found, key=lambda each: each.info.start_time)
