"""Auto-tune neural networks with Apache TVM; let MLflow remember, compare and serve the result.

`ansor_mlflow.flavor` loads and saves tuned models, `ansor_mlflow.steps` holds the steps as functions, and the command
`ansor-mlflow` runs them. `ansor_mlflow.autolog` logs what TVM's own tuning functions do, `ansor_mlflow.load_trials`
reads the trials of a run. Importing this package loads none of TVM, MLflow and pandas.
"""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {"autolog": "ansor_mlflow.autologging", "load_trials": "ansor_mlflow.steps.reports"}
"""What is loaded when it is first asked for, and the module that has it."""


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
