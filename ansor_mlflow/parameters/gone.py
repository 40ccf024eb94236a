"""What earlier versions had and this one has not, and what to use instead."""

from __future__ import annotations

_MEMORY = "the tracking server has a team's records"
COMMANDS = {
    "pool": f"{_MEMORY}; give warm_start=auto to tune and main, and the IDs of tuning runs to records …",
    "recompile": "`ansor-mlflow compile --tune-run RUN --allow-missing` does it; RUN is the tag ansor.tune_run of the "
    "run whose model is built again",
    "runs": "`mlflow runs list --experiment-id ID` lists runs, and the view Leaderboard of the experiment sorts them",
}
"""What to use instead of a command."""
PARAMETERS = {"record_pool": f"{_MEMORY}; give warm_start=auto"}
"""What to use instead of a parameter."""
_VALUES = {
    ("build_workers", "ray"): "candidates are built on this host, and no longer on a Ray cluster; give auto, or how "
    "many are built at a time, and start whole tunings on the cluster's nodes instead"
}
"""What to use instead of a value, which is given by its parameter and its beginning."""


def why_gone(name: str, value: object) -> str:
    """Why a parameter no longer takes a value that it took once, and what to give instead; empty where it takes it."""
    return next((why for (gone, start), why in _VALUES.items() if name == gone and str(value).startswith(start)), "")
