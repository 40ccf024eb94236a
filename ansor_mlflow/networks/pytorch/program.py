"""Exports a program of PyTorch to ONNX."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ansor_mlflow.errors import MachineError, UserInputError, one_line
from ansor_mlflow.networks.pytorch.archive import fix_program

PROGRAM_SUFFIX = ".pt2"

_OPSET = 18
"""Version of ONNX's operators that PyTorch's translations are written in; it converts the result to others."""


def export_program(
    path: Path, network: str, input_shapes: Mapping[str, Sequence[int]], directory: Path, *, batch_size: int = 1
) -> Path:
    """Writes an exported program as an ONNX file with static shapes. Nothing of the program is unpickled.

    Args:
        path: File that `torch.export.save` wrote.
        network: What messages call it.
        input_shapes: Shapes that dynamic dimensions get.
        directory: Empty directory to write to.
        batch_size: Size of a dynamic batch.

    Raises:
        UserInputError: The file is no such program, or one that cannot be exported; or the shapes do not fit it.
        MachineError: PyTorch or its exporter is not installed.
    """
    program, inputs = load_program(path, network, input_shapes, directory, batch_size=batch_size)
    with _silence():
        import torch

        try:
            exported = torch.onnx.export(program, input_names=inputs, opset_version=_OPSET, verbose=False)
        except Exception as err:  # nor has the exporter, whose decompositions may raise anything
            raise UserInputError(
                f"network={network}: PyTorch cannot export it to ONNX ({_cause(err)}); export the model without that"
            ) from err
        return _save(exported, directory / "program.onnx")


def load_program(
    path: Path, network: str, input_shapes: Mapping[str, Sequence[int]], directory: Path, *, batch_size: int = 1
) -> tuple[Any, tuple[str, ...]]:
    """Loads an exported program with static shapes. Nothing of it is unpickled.

    Args:
        path: File that `torch.export.save` wrote.
        network: What messages call it.
        input_shapes: Shapes that dynamic dimensions get.
        directory: Empty directory to write a checked copy to.
        batch_size: Size of a dynamic batch.

    Returns:
        The program, a `torch.export.ExportedProgram` whose inputs are all positional, and the names of these.

    Raises:
        UserInputError: The file is no such program, or the shapes do not fit it.
        MachineError: PyTorch or its exporter is not installed.
    """
    archive = directory / f"program{PROGRAM_SUFFIX}"
    fixed = fix_program(path, network, input_shapes, archive, batch_size=batch_size)
    with _silence():
        try:
            import onnxscript  # noqa: F401 (the exporter needs it)
            import torch
        except ImportError as err:
            raise MachineError(
                f"network={network}: an exported program needs PyTorch and its exporter: pip install "
                "'torch>=2.13,<2.14' onnxscript, or export the model to ONNX"
            ) from err
        _require_operators(torch, network, fixed.operators)
        try:
            return torch.export.load(archive), fixed.inputs
        except Exception as err:  # the loader has no error class of its own
            raise UserInputError(
                f"network={network}: PyTorch {torch.__version__} cannot read it ({one_line(err)}); save it again with "
                "this version"
            ) from err


def _require_operators(torch: Any, network: str, targets: Iterable[str]) -> None:
    """Checks that a name such as "torch.ops.aten.relu.default" is that of an operator, and no other attribute."""
    unknown = []
    for target in sorted(targets):
        *_, name, overload = target.split(".")
        operator = getattr(getattr(torch.ops.aten, name, None), overload, None)
        if not isinstance(operator, torch._ops.OpOverload):
            unknown.append(target)
    if unknown:
        raise UserInputError(
            f"network={network}: PyTorch {torch.__version__} has no operator {', '.join(unknown)}; save the program "
            "with this version"
        )


def _save(exported: Any, path: Path) -> Path:
    """Writes an ONNX file without notes on where its nodes come from, so that a program always gives the same file."""
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

    ClearMetadataAndDocStringPass()(exported.model)
    exported.save(path, external_data=True)
    return path


def _cause(err: BaseException) -> str:
    """The first error of a chain; those that it led to say less."""
    while err.__cause__ is not None:
        err = err.__cause__
    return one_line(err)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keeps from the terminal what PyTorch and its exporter print, warn of and log."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
