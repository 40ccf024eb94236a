"""Models quantised by ONNX Runtime's tools, in each of their forms, and one in half precision."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from gallery_models import classification, pixels, recurrent, text
from gallery_models.entry import GalleryModel

_FAMILY = "quantised"
_FLOAT = {model.name: model for room in (classification, text, recurrent, pixels) for model in room.MODELS}


def _model(name: str, form: str, **options: Any) -> GalleryModel:
    source = _FLOAT[name]
    return GalleryModel(
        name=f"{name}-{form}",
        family=_FAMILY,
        exporter=f"{source.exporter}, onnxruntime",
        opset=max(source.opset, 13),
        packages=(*source.packages, "onnxruntime"),
        write=partial(_write, source, _FORMS[form], options),
        input_shapes=source.input_shapes,
    )


def _write(source: GalleryModel, form: Callable[..., None], options: dict[str, Any], path: Path) -> None:
    float_file = path.with_suffix(".float.onnx")
    source.write(float_file)
    try:
        form(_with_opset(float_file, 13), path, dict(source.input_shapes), **options)
    finally:
        float_file.unlink()


def _with_opset(path: Path, opset: int) -> Path:
    """Brings an older file to the opset that has all of quantisation."""
    import onnx
    from onnx import version_converter

    model = onnx.load(path)
    if next(entry.version for entry in model.opset_import if not entry.domain) < opset:
        onnx.save(version_converter.convert_version(model, opset), path)
    return path


def _dynamic(source: Path, path: Path, _: dict[str, Any], **options: Any) -> None:
    from onnxruntime.quantization import quantize_dynamic

    quantize_dynamic(source, path, **options)


def _static(source: Path, path: Path, shapes: dict[str, Any], *, qoperator: bool, **options: Any) -> None:
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    quant_pre_process(source, source, skip_symbolic_shape=True)
    quantize_static(
        source,
        path,
        _Examples(source, shapes),
        quant_format=QuantFormat.QOperator if qoperator else QuantFormat.QDQ,
        activation_type=QuantType.QUInt8,
        **options,
    )


def _half(source: Path, path: Path, _: dict[str, Any]) -> None:
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    onnx.save(convert_float_to_float16(onnx.load(source), keep_io_types=True), path)


class _Examples:
    """Two random inputs, which the calibration asks for one after the other."""

    def __init__(self, path: Path, shapes: dict[str, Any]) -> None:
        import numpy as np
        import onnxruntime

        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        random = np.random.default_rng(0)
        self._left = [
            {
                value.name: random.random(shapes.get(value.name, value.shape), np.float32)
                if value.type == "tensor(float)"
                else np.ones(shapes.get(value.name, value.shape), np.int64)
                for value in session.get_inputs()
            }
            for _ in range(2)
        ]

    def get_next(self) -> dict[str, Any] | None:
        """The next input, or None."""
        return self._left.pop() if self._left else None


_FORMS: dict[str, Callable[..., None]] = {
    "qdq": partial(_static, qoperator=False),
    "qoperator": partial(_static, qoperator=True),
    "dynamic-int8": _dynamic,
    "float16": _half,
}

MODELS = (
    _model("torchvision-resnet18", "qdq"),
    _model("torchvision-mobilenet_v2", "qdq", per_channel=True),
    _model("torchvision-resnet18", "qoperator"),
    _model("torchvision-squeezenet1_1", "qoperator", per_channel=True),
    _model("unet", "qdq"),
    _model("transformers-bert", "dynamic-int8"),
    _model("transformers-distilbert", "dynamic-int8", per_channel=True),
    _model("transformers-t5-encoder", "qdq"),
    _model("torchvision-mnasnet0_5", "dynamic-int8"),
    _model("lstm", "dynamic-int8"),
    _model("timm-repvgg_a0", "float16"),
    _model("transformers-distilbert", "float16"),
)
