"""`autolog()`, by the rules of MLflow's autologging."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mlflow.utils.autologging_utils import (
    AUTOLOGGING_INTEGRATIONS,
    autologging_integration,
    get_autologging_config,
    safety,
)
from mlflow.utils.import_hooks import register_post_import_hook

from ansor_mlflow.autologging.call import TuneCall
from ansor_mlflow.autologging.logged import INTEGRATION, logged_tuning

if TYPE_CHECKING:
    from tvm.s_tir.meta_schedule import TaskScheduler

_TVM_SERIES = "0.27."
_CALLBACKS = "measure_callbacks"
_log = logging.getLogger("ansor_mlflow")


@autologging_integration(INTEGRATION)  # type: ignore[untyped-decorator]
def autolog(
    *,
    disable: bool = False,  # noqa: ARG001 - MLflow keeps them all, and reads them when a tuning begins
    exclusive: bool = False,  # noqa: ARG001
    disable_for_unsupported_versions: bool = False,  # noqa: ARG001
    silent: bool = False,  # noqa: ARG001
    extra_tags: Mapping[str, str] | None = None,  # noqa: ARG001
) -> None:
    """Logs what TVM's `tune_tir`, `tune_relax`, `tune_tasks` and its tuning passes do, as `ansor-mlflow tune` logs.

    A tuning is logged to the active run, which stays open; without one, and where something was tuned in it before, to
    a new run. May be called before TVM is imported, and again, with other arguments.

    Args:
        disable: Ends the logging.
        exclusive: Logs nothing while a run of the user is active.
        disable_for_unsupported_versions: Logs nothing with another TVM than 0.27; otherwise there is a warning.
        silent: Suppresses MLflow's messages and warnings.
        extra_tags: Tags of new runs; `ansor.network` is the name of what is tuned.

    Example:
        >>> from tvm import te, topi
        >>> from tvm.s_tir import meta_schedule
        >>> am.autolog(extra_tags={"ansor.network": "dense"})
        >>> a, b = te.placeholder((16, 16), name="a"), te.placeholder((16, 16), name="b")
        >>> function, target = te.create_prim_func([a, b, topi.nn.dense(a, b)]), {"kind": "llvm", "num-cores": 2}
        >>> database = meta_schedule.tune_tir(function, target, "logs", 2, strategy="replay-trace")
        >>> mlflow.last_active_run().data.metrics["trials/measured"]
        2.0
    """
    # `tune` of this module's class is what every tuning function of MetaSchedule calls, and calls once. The functions
    # themselves are imported by name in several places, of which TVM's passes are one.
    register_post_import_hook(_patch_scheduler, "tvm.s_tir.meta_schedule.task_scheduler.task_scheduler")


def _patch_scheduler(module: ModuleType) -> None:
    import tvm

    if not tvm.__version__.startswith(_TVM_SERIES):
        if get_autologging_config(INTEGRATION, "disable_for_unsupported_versions", False):
            return
        _log.warning("autolog() is for TVM %sx; this is %s", _TVM_SERIES, tvm.__version__)
    safety.safe_patch(INTEGRATION, module.TaskScheduler, "tune", _tune)


def _tune(original: Callable[..., None], scheduler: TaskScheduler, *args: Any, **kwargs: Any) -> None:
    """Takes the place of `TaskScheduler.tune`. What it raises on its own account, MLflow makes a warning."""
    signature = inspect.signature(original)
    call = TuneCall.bind(signature, scheduler, *args, **kwargs)
    extra_tags = get_autologging_config(INTEGRATION, "extra_tags") or {}
    with _without_cost_model(), logged_tuning(call, extra_tags) as callback:
        callbacks = [*call.measure_callbacks, callback]
        if _CALLBACKS in kwargs:
            original(scheduler, *args, **{**kwargs, _CALLBACKS: callbacks})
        else:
            position = list(signature.parameters).index(_CALLBACKS) - 1
            original(scheduler, *args[:position], callbacks, *args[position + 1 :], **kwargs)


@contextlib.contextmanager
def _without_cost_model() -> Iterator[None]:
    """Turns off MLflow's autologging of XGBoost, by which MetaSchedule's cost model is trained after every batch."""
    config = AUTOLOGGING_INTEGRATIONS.get("xgboost", {})
    before = dict(config)
    config["disable"] = True
    try:
        yield
    finally:
        config.clear()
        config.update(before)
