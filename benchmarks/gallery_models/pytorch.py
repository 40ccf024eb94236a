"""Writes modules of PyTorch as ONNX files, with either exporter. Imports PyTorch when it is called."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gallery_models.entry import GalleryModel

SEED = 0
_SETTLED_BATCH = 8
Make = Callable[[], tuple[Any, Sequence[Any]]]
"""Makes a module and the tensors it is called with."""


def torch_model(
    name: str,
    family: str,
    make: Make,
    *,
    inputs: Sequence[str],
    outputs: Sequence[str] = ("output",),
    opset: int = 17,
    dynamo: bool = False,
    packages: Sequence[str] = (),
    dynamic: Mapping[str, Sequence[int]] | None = None,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
) -> GalleryModel:
    """An entry of the gallery for a module.

    Args:
        name: Its name.
        family: Its group.
        make: Makes the module and example inputs; weights are drawn after `torch.manual_seed`.
        inputs: Names of the inputs in the file.
        outputs: Names of the outputs in the file.
        opset: Version of ONNX's operators.
        dynamo: Whether the exporter that captures with `torch.export` writes it, in place of the one that traces.
        packages: Modules needed beside `torch`.
        dynamic: Axes of each input that the file leaves open.
        input_shapes: Sizes for such inputs.
    """
    write = partial(
        _export, make, inputs=inputs, outputs=outputs, opset=opset, dynamo=dynamo, dynamic=dict(dynamic or {})
    )
    return GalleryModel(
        name=name,
        family=family,
        exporter="torch dynamo" if dynamo else "torch",
        opset=opset,
        packages=("torch", "onnxscript", *packages),
        write=write,
        input_shapes=input_shapes or {},
    )


def import_torchvision() -> Any:
    """Imports torchvision, also without its compiled operators.

    Its wheels are built for CUDA, and beside a PyTorch without CUDA their library does not load. Both exporters only
    need to know that the operators exist, and what shapes they return.
    """
    import torch

    if _loads_operators():
        import torchvision

        return torchvision
    library = torch.library.Library("torchvision", "FRAGMENT")
    schemas = {
        "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        "roi_align": (
            "(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
            "int sampling_ratio, bool aligned) -> Tensor"
        ),
    }
    if not hasattr(torch.ops.torchvision, "nms"):
        for name, schema in schemas.items():
            library.define(f"{name}{schema}")
        library.impl("nms", _nms, "CPU")
        library.impl("roi_align", _roi_align, "CPU")
        _KEPT.append(library)
    import torchvision

    for module in (torchvision.extension, sys.modules["torchvision.ops.roi_align"]):
        module._has_ops = _has_ops
    return torchvision


def _loads_operators() -> bool:
    """Whether torchvision's own operators load beside this PyTorch."""
    import torch

    package = importlib.util.find_spec("torchvision")
    if package is None or package.origin is None:
        return False
    try:
        for library in Path(package.origin).parent.glob("_C*.so"):
            torch.ops.load_library(library)
    except OSError:
        return False
    return True


def import_transformers() -> Any:
    """Imports transformers, which imports torchvision where it is installed."""
    import_torchvision()
    import transformers

    return transformers


_KEPT: list[Any] = []
"""Operators are forgotten with the library that defines them."""


def _has_ops() -> bool:
    """In place of torchvision's own; detectors compile it with TorchScript, so that it is no lambda."""
    return True


def _nms(boxes: Any, scores: Any, iou_threshold: float) -> Any:
    """Non-maximum suppression in Python, for as many boxes as a trace sees."""
    import torch
    from torchvision.ops import box_iou

    kept: list[int] = []
    overlaps = box_iou(boxes, boxes)
    for index in scores.argsort(descending=True).tolist():
        if all(overlaps[index, other] <= iou_threshold for other in kept):
            kept.append(index)
    return torch.tensor(kept, dtype=torch.int64)


def _roi_align(features: Any, regions: Any, _scale: float, height: int, width: int, *_: Any) -> Any:
    """Only the shape matters: a trace writes the operator down, whatever it returns."""
    return features.new_ones((regions.shape[0], features.shape[1], height, width))


def settle(module: Any, *inputs: Any) -> Any:
    """Sets the statistics of batch normalisations to those of random inputs, as training would have.

    With freshly drawn weights and the default statistics, values grow or vanish from layer to layer; with statistics of
    other inputs than those of the comparison, small differences grow with them.

    Args:
        module: The module; it is given back.
        inputs: Tensors as it takes them, with a batch of one.
    """
    import torch

    norms = [part for part in module.modules() if isinstance(part, torch.nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.train()
        norm.momentum = None
    with torch.no_grad():
        module(*[torch.randn(_SETTLED_BATCH, *tensor.shape[1:]) for tensor in inputs])
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.eval()
        norm.momentum = momentum
    return module


def by_name(module: Any, inputs: Sequence[str], output: str) -> Any:
    """A module that takes tensors by position, hands them on by name, and returns one output."""
    import torch

    class Called(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, *tensors: Any) -> Any:
            return self.module(**dict(zip(inputs, tensors, strict=True)), return_dict=True)[output]

    return Called()


def _export(
    make: Make,
    path: Path,
    *,
    inputs: Sequence[str],
    outputs: Sequence[str],
    opset: int,
    dynamo: bool,
    dynamic: Mapping[str, Sequence[int]],
) -> None:
    import torch

    torch.manual_seed(SEED)
    module, examples = make()
    module.eval()
    options: dict[str, Any] = {"opset_version": opset, "dynamo": dynamo, "input_names": list(inputs)}
    options["output_names"] = list(outputs)
    if dynamo:
        options |= {"external_data": False, "verbose": False}
        if dynamic:
            axes = [dict.fromkeys(dynamic.get(name, ()), torch.export.Dim.DYNAMIC) for name in inputs]
            options["dynamic_shapes"] = tuple(axes)
    elif dynamic:
        options["dynamic_axes"] = {name: {axis: f"{name}_{axis}" for axis in axes} for name, axes in dynamic.items()}
    with torch.no_grad():
        torch.onnx.export(module, tuple(examples), str(path), **options)
