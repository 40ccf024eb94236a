"""Models of Keras, through tf2onnx: channels last, and names with slashes and colons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gallery_models.entry import GalleryModel


def _model(
    name: str, build: Callable[[], Any], shape: Sequence[int], *, opset: int, batch: bool = True
) -> GalleryModel:
    return GalleryModel(
        name=f"keras-{name}",
        family="Keras",
        exporter="tf2onnx",
        opset=opset,
        packages=("tensorflow", "tf2onnx"),
        write=partial(_write, build, tuple(shape), opset, batch),
        input_shapes={"x": [1, *shape]} if batch else {},
    )


def _write(build: Callable[[], Any], shape: tuple[int, ...], opset: int, batch: bool, path: Path) -> None:
    import tensorflow
    import tf2onnx

    tensorflow.keras.utils.set_random_seed(0)
    model = build()
    signature = [tensorflow.TensorSpec([None if batch else 1, *shape], tensorflow.float32, name="x")]
    function = tensorflow.function(lambda x: model(x, training=False), input_signature=signature)
    tf2onnx.convert.from_function(function, input_signature=signature, opset=opset, output_path=str(path))


def _application(name: str, size: int, **options: Any) -> Any:
    from tensorflow import keras

    build = getattr(keras.applications, name)
    model = build(weights=None, input_shape=(size, size, 3), classes=10, classifier_activation=None, **options)
    return _settled(model, (4, size, size, 3))


def _settled(model: Any, shape: tuple[int, ...]) -> Any:
    """The model with batch normalisations that know its activations: without, they vanish from layer to layer."""
    import tensorflow
    from tensorflow import keras

    for layer in model.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.momentum = 0.0
    model(tensorflow.random.normal(shape), training=True)
    return model


def _recurrent(cell: str) -> Any:
    from tensorflow import keras

    layer = getattr(keras.layers, cell)
    return keras.Sequential(
        [
            keras.Input((20, 16)),
            layer(32, return_sequences=True),
            keras.layers.Bidirectional(layer(16)),
            keras.layers.Dense(4),
        ]
    )


def _autoencoder() -> Any:
    from tensorflow import keras
    from tensorflow.keras import layers

    return keras.Sequential(
        [
            keras.Input((64, 64, 1)),
            layers.Conv2D(16, 3, 2, "same", activation="relu"),
            layers.Conv2D(32, 3, 2, "same", activation="relu"),
            layers.Conv2DTranspose(32, 3, 2, "same", activation="relu"),
            layers.UpSampling2D(2),
            layers.Conv2D(1, 3, padding="same", activation="sigmoid"),
        ]
    )


MODELS = (
    _model("mobilenet_v2", partial(_application, "MobileNetV2", 96), (96, 96, 3), opset=13),
    _model("efficientnet_v2", partial(_application, "EfficientNetV2B0", 96), (96, 96, 3), opset=15),
    _model("nasnet_mobile", partial(_application, "NASNetMobile", 96), (96, 96, 3), opset=11, batch=False),
    _model("autoencoder", _autoencoder, (64, 64, 1), opset=12),
    _model("lstm", partial(_recurrent, "LSTM"), (20, 16), opset=15),
    _model("gru", partial(_recurrent, "GRU"), (20, 16), opset=13, batch=False),
)
