"""Models of scikit-learn, through skl2onnx."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from gallery_models.entry import GalleryModel

_FEATURES = 16


def _model(name: str, build: Callable[[], Any], *, opset: int, rows: int | None = 1) -> GalleryModel:
    return GalleryModel(
        name=f"sklearn-{name}",
        family="scikit-learn",
        exporter="skl2onnx",
        opset=opset,
        packages=("sklearn", "skl2onnx"),
        write=partial(_write, build, opset, rows),
        input_shapes={} if rows else {"x": [1, _FEATURES]},
    )


def _write(build: Callable[[], Any], opset: int, rows: int | None, path: Path) -> None:
    import numpy as np
    from skl2onnx import to_onnx
    from skl2onnx.common.data_types import FloatTensorType

    random = np.random.default_rng(0)
    x = random.standard_normal((300, _FEATURES), np.float32)
    y = (x[:, :3].sum(axis=1) > 0).astype(np.int64) + (x[:, 3] > 0.5)
    estimator = build().fit(x, y)
    options = {id(estimator): {"zipmap": False}} if hasattr(estimator, "predict_proba") else None
    inputs = [("x", FloatTensorType([rows, _FEATURES]))]
    model = to_onnx(estimator, initial_types=inputs, target_opset={"": opset, "ai.onnx.ml": 3}, options=options)
    path.write_bytes(model.SerializeToString())


def _scaled_ridge() -> Any:
    from sklearn.decomposition import PCA
    from sklearn.linear_model import Ridge
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), PCA(8), Ridge())


def _perceptron(regression: bool) -> Any:
    from sklearn.neural_network import MLPClassifier, MLPRegressor

    return (MLPRegressor if regression else MLPClassifier)(hidden_layer_sizes=(32, 32), max_iter=50)


def _logistic() -> Any:
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(max_iter=200)


def _forest() -> Any:
    from sklearn.ensemble import RandomForestClassifier

    return RandomForestClassifier(10, max_depth=5, random_state=0)


def _gaussian_process() -> Any:
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF

    return GaussianProcessRegressor(RBF(4.0), alpha=0.1, optimizer=None)


def _clusters() -> Any:
    from sklearn.cluster import KMeans

    return KMeans(5, n_init=2, random_state=0)


MODELS = (
    _model("logistic-regression", _logistic, opset=12),
    _model("perceptron", partial(_perceptron, False), opset=15),
    _model("perceptron-regression", partial(_perceptron, True), opset=17, rows=None),
    _model("random-forest", _forest, opset=15),
    _model("scaler-pca-ridge", _scaled_ridge, opset=18, rows=None),
    _model("k-means", _clusters, opset=17),
    _model("gaussian-process", _gaussian_process, opset=17),
)
