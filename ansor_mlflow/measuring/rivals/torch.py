"""`torch.compile`, for networks that came from PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy.typing as npt

from ansor_mlflow.measuring.compare import Rival, RivalTask
from ansor_mlflow.tensors import Arrays, random_inputs


def _load(task: RivalTask) -> Callable[[Mapping[str, npt.NDArray[Any]]], Arrays]:
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
        with torch.inference_mode():
            outputs = tree_leaves(module(*args, **kwargs))
        return {name: output.cpu().numpy() for name, output in zip(task.outputs, outputs, strict=True)}

    run(random_inputs(task.inputs, seed=0))  # the first call compiles, which takes seconds
    return run


TORCH = Rival(title="torch.compile", package="torch", load=_load, to_install="torch onnxscript", needs_program=True)
