"""The rivals by name, which are here, and the call of one in a child process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy.typing as npt

from ansor_mlflow.device import CPU
from ansor_mlflow.errors import MachineError, UserInputError
from ansor_mlflow.measuring.compare import ONNXRUNTIME, Inference, Rival, RivalTask, explained
from ansor_mlflow.plugins import PluginTable, distribution_of
from ansor_mlflow.tensors import Arrays, random_inputs


def _load_openvino(task: RivalTask) -> Callable[[Mapping[str, npt.NDArray[Any]]], Arrays]:
    from ansor_mlflow.model import OpenVinoSession

    if task.platform != CPU:
        raise ValueError(f"it does not run on {task.platform.name}")
    session = OpenVinoSession(task.network, task.num_threads, is_exact=task.dtype != "bfloat16")

    def run(inputs: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        values = session.views(inputs)
        return {name: values[index] for index, name in enumerate(task.outputs)}

    return run


def _load_torch(task: RivalTask) -> Callable[[Mapping[str, npt.NDArray[Any]]], Arrays]:
    """The exported program, compiled by Inductor; reading it can run its author's code, so only in a child process."""
    import torch
    from torch.utils._pytree import tree_leaves

    from ansor_mlflow.networks import load_program

    if task.program is None:
        raise ValueError("there is no exported program of PyTorch that it came from, or trust=true is not given")
    device = task.platform.name
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("this PyTorch sees no GPU")
    torch.set_num_threads(task.num_threads)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False  # which the line above leaves for convolutions
    model = load_program(task.program, str(task.program))
    if not {spec.name for spec in task.inputs} >= model.shapes.keys():
        raise ValueError("the program takes inputs that have a value for good in the model")
    module = torch.compile(model.module.to(device))

    def run(arrays: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        args, kwargs = model.arguments([torch.from_numpy(arrays[name]).to(device) for name in model.shapes])
        with torch.inference_mode(), torch.autocast(device, torch.bfloat16, enabled=task.dtype == "bfloat16"):
            outputs = tree_leaves(module(*args, **kwargs))
        values = (output.float() if output.dtype == torch.bfloat16 else output for output in outputs)
        return {name: value.cpu().numpy() for name, value in zip(task.outputs, values, strict=True)}

    run(random_inputs(task.inputs, seed=0))  # the first call compiles, which takes seconds
    return run


OPENVINO = Rival(title="OpenVINO", package="openvino", load=_load_openvino, has_bfloat16=True)
TORCH = Rival(
    title="torch.compile",
    package="torch",
    load=_load_torch,
    to_install="torch onnxscript",
    needs_program=True,
    has_bfloat16=True,
)
RIVALS = PluginTable(
    "rivals", {"onnxruntime": ONNXRUNTIME, "openvino": OPENVINO, "torch": TORCH}, lambda found: isinstance(found, Rival)
)


def rival_titles() -> dict[str, str]:
    """What users read, by name; of plugins, which are not loaded for this, the names of their entry points."""
    return {name: RIVALS[name].title if name in RIVALS.own else name for name in RIVALS}


def version_of(rival: str) -> str | None:
    """The version that is installed here; None where it is not."""
    found = distribution_of(RIVALS[rival].package)
    return found and found[1]


def require_rivals(parameter: str, given: Sequence[str] | Literal["auto", "none"]) -> None:
    """Checks that the rivals that a user named in a parameter are known and installed.

    Raises:
        UserInputError: One is not known.
        MachineError: One is not installed, or is a plugin that cannot be loaded.
    """
    if given in ("auto", "none"):
        return
    if unknown := [rival for rival in given if rival not in RIVALS]:
        raise UserInputError(
            f"{parameter}={','.join(given)}: {unknown[0]} is no runtime that is known here; these are "
            f"{', '.join(RIVALS)}"
        )
    missing = [rival for rival in choose_rivals(given) if version_of(rival) is None]
    if missing:
        to_install = " ".join(RIVALS[rival].to_install or RIVALS[rival].package for rival in missing)
        raise MachineError(
            f"{parameter}={','.join(given)}: {' and '.join(missing)} must be installed here; pip install {to_install}, "
            "or leave it out"
        )


def choose_rivals(given: Sequence[str] | Literal["auto", "none"]) -> tuple[str, ...]:
    """The rivals that a parameter means; auto is those that are installed here."""
    if given == "none":
        return ()
    return tuple(rival for rival in RIVALS if (version_of(rival) if given == "auto" else rival in given))


def rival_inference(rival: str, task: RivalTask) -> Inference:
    """A rival, whose packages only this process loads; see `explained`."""
    return explained(RIVALS[rival].title, partial(RIVALS[rival].load, task))
