"""The parameters that an earlier run was started with."""

from __future__ import annotations

import shlex

from mlflow.entities import Run

from ansor_mlflow.options import Options


def params_used(run: Run, cls: type[Options]) -> dict[str, str]:
    """The params of a run that belong to an option class, as text, with the values that were used in the end."""
    params = run.data.params
    return {name: _unquoted(params.get(f"{name}_used", params[name])) for name in cls.model_fields if name in params}


def _unquoted(value: str) -> str:
    """A param as `mlflow run` got it: it logs what it puts on a command line."""
    return shlex.split(value)[0] if value[:1] == "'" else value
