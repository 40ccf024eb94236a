"""ONNX → Relax → layout → fused tasks.

A tuned schedule is found again by the structural hash of its function, so whatever changes a function here makes
older records useless: raise `LOWERING_VERSION` with such a change.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import onnx

from ansor_mlflow.device import vector_lanes
from ansor_mlflow.errors import UserInputError, first_line
from ansor_mlflow.graphs import best_padding, fold_batch_norms, pad_output_channels, raise_opset, rewrite_operators
from ansor_mlflow.lowering.precision import compute_in
from ansor_mlflow.settings import Layout, LoweringSettings, Padding
from ansor_mlflow.trials import TaskInfo

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.target import Target

LOWERING_VERSION = 6
"""Provenance of records: two lowerings with different versions may give different tasks for one network."""


_DEFAULTS = LoweringSettings()
_LAYOUTS = {
    "NHWC": {"relax.nn.conv2d": ["NHWC", "HWIO"], "relax.nn.conv3d": ["NDHWC", "DHWIO"]},
    "NCHW": {"relax.nn.conv2d": ["NCHW", "OIHW"], "relax.nn.conv3d": ["NCDHW", "OIDHW"]},
}


@dataclass(frozen=True)
class TuningTask:
    """A distinct fused function of a network, as the search takes it."""

    info: TaskInfo
    mod: IRModule
    """Module with one unscheduled PrimFunc, "main"."""


@dataclass(frozen=True)
class LoweredNetwork:
    """A network as fused functions; weights are constants, "main" takes the network's inputs alone."""

    mod: IRModule
    tasks: tuple[TuningTask, ...]


def lower(model: onnx.ModelProto, target: Target, settings: LoweringSettings = _DEFAULTS) -> LoweredNetwork:
    """Lowers a network to fused functions for `target`.

    Args:
        model: ONNX model whose inputs have static shapes.
        target: Device that the functions are for.
        settings: Layout, type and padding.

    Raises:
        UserInputError: The model has an operator or an attribute that TVM cannot import.
    """
    import tvm
    from tvm import relax

    from ansor_mlflow.lowering.constants import fold_constants
    from ansor_mlflow.lowering.elementwise import constants_second, expand_elementwise
    from ansor_mlflow.lowering.indices import bound_indices
    from ansor_mlflow.lowering.slices import SlicesAreInjective
    from ansor_mlflow.lowering.squeeze import positive_squeeze_axes

    graph = rewrite_operators(fold_batch_norms(raise_opset(model)))
    if (padding := _padding(settings.pad_channels, target)) is not None:
        graph = pad_output_channels(graph, padding)
    with target:
        mod = tvm.transform.Sequential(
            [
                positive_squeeze_axes(),
                relax.transform.DecomposeOpsForInference(),
                expand_elementwise(),
                relax.transform.CanonicalizeBindings(),
                fold_constants(),
                constants_second(),
                bound_indices(),
                relax.transform.ConvertLayout(_LAYOUTS[resolve_layout(settings.layout)]),
                *compute_in(settings.dtype),
                fold_constants(),
                # TVM's pipeline "zero", with more to say of slices
                relax.transform.LegalizeOps(),
                relax.transform.AnnotateTIROpPattern(),
                SlicesAreInjective(),
                relax.transform.FoldConstant(),
                relax.transform.FuseOps(),
                relax.transform.FuseTIR(),
                relax.transform.AttachAttrLayoutFreeBuffers(),
            ]
        )(_import_onnx(graph))
    return LoweredNetwork(mod=mod, tasks=_extract_tasks(mod, target))


def resolve_layout(layout: Layout) -> Literal["NHWC", "NCHW"]:
    """The layout that "auto" stands for: channels last, because they are what is vectorised."""
    return "NHWC" if layout == "auto" else layout


def _padding(pad_channels: Padding, target: Target) -> Callable[[int], int] | None:
    """The function that `pad_output_channels` takes; None where nothing is to be padded."""
    if pad_channels == "off":
        return None
    if pad_channels == "auto":
        lanes = vector_lanes(target)
        return lambda channels: best_padding(channels, lanes)
    return lambda channels: -(-channels // pad_channels) * pad_channels


def _import_onnx(model: onnx.ModelProto) -> IRModule:
    import tvm
    from tvm.relax.frontend.onnx import from_onnx

    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):  # it prints what it then raises
            warnings.simplefilter("ignore")
            return from_onnx(model, keep_params_in_input=False)
    except tvm.error.OpNotImplemented as err:
        names = str(err).partition(": ")[2]
        raise UserInputError(
            f"network {model.graph.name!r}: TVM imports no ONNX operator {names}; export the model without it"
        ) from err
    except Exception as err:  # the importer's converters raise errors of every kind for a graph they do not understand
        raise UserInputError(f"network {model.graph.name!r}: TVM cannot import the graph ({first_line(err)})") from err


def _extract_tasks(mod: IRModule, target: Target) -> tuple[TuningTask, ...]:
    from tvm.s_tir import meta_schedule as ms
    from tvm.s_tir.analysis import estimate_tir_flops
    from tvm.s_tir.meta_schedule.utils import shash2hex

    tasks = []
    for index, task in enumerate(ms.relax_integration.extract_tasks(mod, target)):
        function = task.dispatched[0]
        info = TaskInfo(
            index=index,
            name=str(task.task_name),
            weight=int(task.weight),
            flops=float(estimate_tir_flops(function)),
            workload_hash=shash2hex(function),
        )
        tasks.append(TuningTask(info=info, mod=function))
    return tuple(tasks)
