"""Auto-tune neural networks with Apache TVM; let MLflow remember, compare and serve the result.

A function is loaded when it is first asked for: importing this package loads none of TVM, MLflow and pandas.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ansor_mlflow.api import bisect, compile, diff, evaluate, pipeline, plan, promote, quantize, sweep, tune
    from ansor_mlflow.autologging import autolog
    from ansor_mlflow.commands.trial_table import load_trials
    from ansor_mlflow.flavor import add_library, explain_load, load_model, log_model, save_model

__all__ = [
    "add_library",
    "autolog",
    "bisect",
    "compile",
    "diff",
    "evaluate",
    "explain_load",
    "load_model",
    "load_trials",
    "log_model",
    "pipeline",
    "plan",
    "promote",
    "quantize",
    "save_model",
    "sweep",
    "tune",
]

_HOMES = {
    "autolog": "ansor_mlflow.autologging",
    "load_trials": "ansor_mlflow.commands.trial_table",
    **dict.fromkeys(["add_library", "explain_load", "load_model", "log_model", "save_model"], "ansor_mlflow.flavor"),
}
"""The modules of those that are not in `ansor_mlflow.api`; a model is loaded where most of it is missing."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES.get(name, "ansor_mlflow.api")), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
