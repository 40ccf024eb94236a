"""Which rivals there are here, and the call of one in a child process."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from functools import partial
from typing import Literal

from ansor_mlflow.errors import MachineError
from ansor_mlflow.measuring.compare import Inference, explained
from ansor_mlflow.measuring.rivals.task import RivalTask
from ansor_mlflow.names import RIVALS
from ansor_mlflow.settings import Rival

_TO_INSTALL: dict[Rival, str] = {
    "onnxruntime": "onnxruntime",
    "openvino": "openvino",
    "torch": "torch onnxscript",
}


def version_of(rival: Rival) -> str | None:
    """The version that is installed here; None where it is not."""
    try:
        return importlib.metadata.version(rival)  # which each of them is also called as a package
    except importlib.metadata.PackageNotFoundError:
        return None


def require_rivals(parameter: str, given: Sequence[Rival] | Literal["auto", "none"]) -> None:
    """Checks that the rivals that a user named in a parameter are installed; a `MachineError` where one is not."""
    missing = [rival for rival in choose_rivals(given) if version_of(rival) is None]
    if missing:
        raise MachineError(
            f"{parameter}={','.join(given)}: {' and '.join(missing)} must be installed here; pip install "
            f"{' '.join(_TO_INSTALL[rival] for rival in missing)}, or leave it out"
        )


def choose_rivals(given: Sequence[Rival] | Literal["auto", "none"]) -> tuple[Rival, ...]:
    """The rivals that a parameter means; auto is those that are installed here."""
    if given == "none":
        return ()
    if given == "auto":
        return tuple(rival for rival in RIVALS if version_of(rival) is not None)
    return tuple(rival for rival in RIVALS if rival in given)


def rival_inference(rival: Rival, task: RivalTask) -> Inference:
    """A rival, whose packages only this process loads; see `explained`."""
    return explained(RIVALS[rival], partial(_load, rival, task))


def _load(rival: Rival, task: RivalTask) -> Inference:
    if rival == "onnxruntime":
        from ansor_mlflow.measuring.reference import ReferenceSession

        return ReferenceSession(task.network, task.num_threads, platform=task.platform).run
    if rival == "openvino":
        from ansor_mlflow.measuring.rivals.openvino import openvino_inference

        return openvino_inference(task)
    from ansor_mlflow.measuring.rivals.torch import torch_inference

    return torch_inference(task)
