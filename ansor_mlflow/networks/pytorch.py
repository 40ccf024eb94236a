"""Models of PyTorch become ONNX files, in a process of its own: to read such a model is to run its author's code.

`torch.export.load` unpickles, evaluates text of the graph and opens libraries, and a pickle is a program. The child is
no sandbox: it runs as the user. It only keeps what a model loads, prints or breaks out of this process.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansor_mlflow.errors import AnsorMlflowError, MachineError, UserInputError, one_line
from ansor_mlflow.networks.shapes import DeclaredShape, resolve_shapes
from ansor_mlflow.processes import in_child_process

PROGRAM_SUFFIX = ".pt2"
_OPSET = 18
"""Version of ONNX's operators that PyTorch's translations are written in; it converts the result to others."""
_log = logging.getLogger("ansor_mlflow")


@dataclass(frozen=True)
class TorchModel:
    """A model of PyTorch in the process that has loaded it."""

    module: Any
    """A `torch.nn.Module`."""
    shapes: Mapping[str, DeclaredShape]
    """Shapes of the inputs by name, in their order."""
    dtypes: Sequence[Any]
    """Their types, of `torch.dtype`."""
    in_spec: Any = None
    """How its inputs are nested in positional and named arguments (`TreeSpec`); None where all are positional."""

    def arguments(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments that pass these tensors, in the order of the inputs."""
        from torch.utils import _pytree

        if self.in_spec is None:
            return tuple(tensors), {}
        args, kwargs = _pytree.tree_unflatten(list(tensors), self.in_spec)
        return args, kwargs


def require_trust(network: str, *, trust: bool) -> None:
    """Checks that the user trusts whoever made a model of PyTorch."""
    if not trust:
        raise UserInputError(
            f"network={network}: reading a model of PyTorch can run any code that its author put into it; pass "
            "trust=true if you trust them, or export the model to ONNX (torch.onnx.export)"
        )


def export_model(
    load: Callable[[], TorchModel],
    network: str,
    path: Path,
    *,
    input_shapes: Mapping[str, Sequence[int]],
    batch_size: int,
) -> None:
    """Writes a model, which `load` loads in a child process, as an ONNX file with static shapes."""
    job = (load, network, path, input_shapes, batch_size)
    advice = "free memory, or export the model to ONNX where it can be loaded (torch.onnx.export)"
    for note in in_child_process(_export, job, work="exports the model of PyTorch", advice=advice, is_quiet=True):
        _log.warning(note)


def load_program(path: Path, network: str) -> TorchModel:
    """Loads an exported program, which may run any code; only for a child process."""
    import torch

    program = torch.export.load(path)
    flags = (
        value
        for node in program.graph.nodes
        for argument, value in zip(getattr(getattr(node.target, "_schema", None), "arguments", ()), node.args)  # noqa: B905
        if argument.name in ("train", "training")
    )
    # It updates its statistics, or has an operator that computes as in training.
    if program.graph_signature.buffers_to_mutate or any(flag is True for flag in flags):
        raise UserInputError(
            f"network={network}: it was exported in training mode; call model.eval() before torch.export.export"
        )
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    inputs: dict[str, Any] = {name: values.get(name) for name in program.graph_signature.user_inputs}
    if not all(isinstance(value, torch.Tensor) for value in inputs.values()):
        raise UserInputError(f"network={network}: it takes something that is no tensor; export the model without it")
    shapes = {
        name: tuple(size if isinstance(size, int) else str(size) for size in value.shape)
        for name, value in inputs.items()
    }
    dtypes = [value.dtype for value in inputs.values()]
    return TorchModel(program.module(), shapes, dtypes, program.call_spec.in_spec)


def _export(job: tuple[Callable[[], TorchModel], str, Path, Mapping[str, Sequence[int]], int]) -> list[str]:
    """The child: writes the file, and returns what the user is to know."""
    load, network, path, input_shapes, batch_size = job
    model = _loaded(load, network)
    import torch
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

    notes: list[str] = []
    integers = {name for name, dtype in zip(model.shapes, model.dtypes, strict=True) if not dtype.is_floating_point}
    shapes = resolve_shapes(
        network, model.shapes, input_shapes, batch_size=batch_size, integers=integers, note=notes.append
    )
    # Only the shapes of these count. They are checked against those that a program was exported for.
    examples = [torch.zeros(shape, dtype=dtype) for shape, dtype in zip(shapes.values(), model.dtypes, strict=True)]
    args, kwargs = model.arguments(examples)
    options = {"input_names": [*shapes], "opset_version": _OPSET, "dynamo": True, "verbose": False}
    try:
        exported = torch.onnx.export(model.module, args, kwargs=kwargs, **options)
    except Exception as err:  # its decompositions may raise anything
        raise UserInputError(_refused(network, err)) from err
    # Notes on where nodes come from would make another file of the same program in another folder.
    ClearMetadataAndDocStringPass()(exported.model)
    exported.save(path, external_data=True)
    return notes


def _loaded(load: Callable[[], TorchModel], network: str) -> TorchModel:
    try:
        import onnxscript  # noqa: F401 (the exporter needs it)
        import torch  # noqa: F401
    except ImportError as err:
        raise MachineError(
            f"network={network}: a model of PyTorch needs PyTorch and its exporter: pip install torch onnxscript, "
            "or export the model to ONNX"
        ) from err
    try:
        return load()
    except AnsorMlflowError:
        raise
    except Exception as err:  # what a file may do when it is loaded has no bounds
        raise UserInputError(
            f"network={network}: PyTorch {sys.modules['torch'].__version__} cannot read it ({one_line(err)}); save "
            "it again with this version"
        ) from err


def _refused(network: str, err: BaseException) -> str:
    while err.__cause__ is not None:  # the first of a chain says most
        err = err.__cause__
    reason = str(err).strip().partition("\n")[0]
    if reason.startswith("Guard failed: "):
        return (
            f"network={network}: it was exported for other shapes ({reason.removeprefix('Guard failed: ')}); give "
            "input_shapes within, or export it with other dynamic_shapes"
        )
    return f"network={network}: PyTorch cannot export it to ONNX ({one_line(err)}); export the model without that"
