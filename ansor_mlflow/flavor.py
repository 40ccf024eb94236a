"""The MLflow model flavor "tvm": a compiled network with the tuning records that made it.

The functions follow those of MLflow's own flavors, `mlflow.onnx` for one. Beside the native flavor every model has the
`python_function` flavor, so that `mlflow.pyfunc.load_model`, `mlflow models predict` and `mlflow models serve` work.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import yaml
from mlflow import pyfunc
from mlflow.exceptions import MlflowException
from mlflow.models import Model, ModelSignature
from mlflow.models.model import MLMODEL_FILE_NAME, ModelInfo
from mlflow.models.utils import ModelInputExample, _save_example
from mlflow.tracking.artifact_utils import _download_artifact_from_uri
from mlflow.types import Schema
from mlflow.types import TensorSpec as MlflowTensorSpec
from mlflow.utils.environment import (
    _CONDA_ENV_FILE_NAME,
    _CONSTRAINTS_FILE_NAME,
    _PYTHON_ENV_FILE_NAME,
    _REQUIREMENTS_FILE_NAME,
    _mlflow_conda_env,
    _process_conda_env,
    _process_pip_requirements,
    _PythonEnv,
    _validate_env_arguments,
)
from mlflow.utils.file_utils import get_total_file_size
from mlflow.utils.model_utils import (
    _get_flavor_configuration,
    _validate_and_copy_code_paths,
    _validate_and_prepare_target_save_path,
)

from ansor_mlflow.errors import AnsorMlflowError, ModelError, UserInputError
from ansor_mlflow.model import CompiledNetwork, Manifest, TunedModel, load_package, write_package
from ansor_mlflow.tensors import TensorSpec, random_inputs

FLAVOR_NAME = "tvm"

_RUNTIME_PACKAGES = ("apache-tvm", "apache-tvm-ffi", "numpy")
_OWN_CODE = str(Path(__file__).parent)


def get_default_pip_requirements() -> list[str]:
    """The packages that a saved model needs, at the versions installed here.

    This package itself is not among them: a model carries the code that loads it.
    """
    return [f"{name}=={importlib.metadata.version(name)}" for name in _RUNTIME_PACKAGES]


def get_default_conda_env() -> dict[str, Any]:
    """The Conda environment that a saved model needs."""
    return dict(_mlflow_conda_env(additional_pip_deps=get_default_pip_requirements()))


def get_signature(inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> ModelSignature:
    """The MLflow signature with every tensor's name, dtype and shape.

    The first dimension is open (-1), because MLflow takes a DataFrame for a tensor only then. The model itself checks
    the exact shape.
    """
    return ModelSignature(inputs=_schema(inputs), outputs=_schema(outputs))


def _schema(specs: tuple[TensorSpec, ...]) -> Schema:
    shapes = [(-1, *spec.shape[1:]) if spec.shape else () for spec in specs]
    return Schema([MlflowTensorSpec(np.dtype(s.dtype), shape, s.name) for s, shape in zip(specs, shapes, strict=True)])


def save_model(
    tvm_model: CompiledNetwork,
    path: str,
    conda_env: Any = None,
    code_paths: list[str] | None = None,
    mlflow_model: Model | None = None,
    signature: ModelSignature | None = None,
    input_example: ModelInputExample | None = None,
    pip_requirements: list[str] | str | None = None,
    extra_pip_requirements: list[str] | str | None = None,
    metadata: dict[str, Any] | None = None,
) -> None:
    """Saves a compiled network to a local directory.

    Args:
        tvm_model: What `ansor_mlflow.steps.compile_network` made.
        path: Directory to create.
        conda_env: Conda environment of the model, as a dictionary or a file; made from pip requirements by default.
        code_paths: Code to put into the model; by default this package, which then need not be installed to load it.
        mlflow_model: The `mlflow.models.Model` this flavor is added to.
        signature: Signature of the model; by default the network's inputs and outputs.
        input_example: Example of an input; by default seeded random values.
        pip_requirements: Replaces the default requirements.
        extra_pip_requirements: Added to the default requirements.
        metadata: Stored in the file `MLmodel`.
    """
    _validate_env_arguments(conda_env, pip_requirements, extra_pip_requirements)
    _validate_and_prepare_target_save_path(path)
    directory = Path(path)
    code = _validate_and_copy_code_paths([_OWN_CODE] if code_paths is None else code_paths, path)
    mlflow_model = Model() if mlflow_model is None else mlflow_model
    mlflow_model.signature = signature or get_signature(tvm_model.inputs, tvm_model.outputs)
    _save_example(mlflow_model, random_inputs(tvm_model.inputs, 0) if input_example is None else input_example, path)
    if metadata is not None:
        mlflow_model.metadata = metadata
    manifest = write_package(tvm_model, directory)
    pyfunc.add_to_model(
        mlflow_model,
        loader_module="ansor_mlflow.flavor",
        conda_env=_CONDA_ENV_FILE_NAME,
        python_env=_PYTHON_ENV_FILE_NAME,
        code=code,
    )
    mlflow_model.add_flavor(FLAVOR_NAME, code=code, **manifest.to_dict())
    mlflow_model.model_size_bytes = get_total_file_size(path)
    mlflow_model.save(str(directory / MLMODEL_FILE_NAME))
    _write_environment(directory, conda_env, pip_requirements, extra_pip_requirements)


def _write_environment(directory: Path, conda_env: Any, pip_requirements: Any, extra_pip_requirements: Any) -> None:
    if conda_env is None:
        defaults = get_default_pip_requirements() if pip_requirements is None else None
        conda_env, requirements, constraints = _process_pip_requirements(
            defaults, pip_requirements, extra_pip_requirements
        )
    else:
        conda_env, requirements, constraints = _process_conda_env(conda_env)
    (directory / _CONDA_ENV_FILE_NAME).write_text(yaml.safe_dump(conda_env, default_flow_style=False))
    if constraints:
        (directory / _CONSTRAINTS_FILE_NAME).write_text("\n".join(constraints))
    (directory / _REQUIREMENTS_FILE_NAME).write_text("\n".join(requirements))
    _PythonEnv.current().to_yaml(str(directory / _PYTHON_ENV_FILE_NAME))


def log_model(
    tvm_model: CompiledNetwork,
    artifact_path: str | None = None,
    conda_env: Any = None,
    code_paths: list[str] | None = None,
    registered_model_name: str | None = None,
    signature: ModelSignature | None = None,
    input_example: ModelInputExample | None = None,
    pip_requirements: list[str] | str | None = None,
    extra_pip_requirements: list[str] | str | None = None,
    metadata: dict[str, Any] | None = None,
    name: str | None = None,
    **kwargs: Any,
) -> ModelInfo:
    """Logs a compiled network as a model of the active run.

    Args:
        tvm_model: What `ansor_mlflow.steps.compile_network` made.
        artifact_path: Deprecated. Use `name` instead.
        conda_env: See `save_model`.
        code_paths: See `save_model`.
        registered_model_name: Name to register the model under, too.
        signature: See `save_model`.
        input_example: See `save_model`.
        pip_requirements: See `save_model`.
        extra_pip_requirements: See `save_model`.
        metadata: See `save_model`.
        name: Name of the model.
        kwargs: Passed to `mlflow.models.Model.log`: params, tags, model_type, step, model_id and others.

    Returns:
        The metadata of the logged model.
    """
    info: ModelInfo = Model.log(
        artifact_path=artifact_path,
        name=name,
        flavor=sys.modules[__name__],
        tvm_model=tvm_model,
        conda_env=conda_env,
        code_paths=code_paths,
        registered_model_name=registered_model_name,
        signature=signature,
        input_example=input_example,
        pip_requirements=pip_requirements,
        extra_pip_requirements=extra_pip_requirements,
        metadata=metadata,
        **kwargs,
    )
    return info


def load_model(model_uri: str, dst_path: str | None = None) -> TunedModel:
    """Loads a model for use from Python, without pyfunc.

    Unlike pyfunc, it does not import the code inside the model, which no digest protects.

    Args:
        model_uri: A local path, `runs:/…`, `models:/…`, or another URI that MLflow reads artifacts from.
        dst_path: Existing directory to download to; a temporary one by default.

    Raises:
        ModelError: The model is not of this flavor, was changed after it was logged, or has no library for this host.
    """
    directory = Path(_download_artifact_from_uri(artifact_uri=model_uri, output_path=dst_path))
    return _load(directory)


def _load(directory: Path) -> TunedModel:
    return load_package(directory, read_manifest(directory))


def read_manifest(directory: Path) -> Manifest:
    """The description of a model in a local directory.

    Raises:
        ModelError: The model is not of this flavor, or its description is damaged.
    """
    try:
        configuration = _get_flavor_configuration(model_path=str(directory), flavor_name=FLAVOR_NAME)
    except MlflowException as err:
        raise ModelError(
            f"model {directory}: it has no flavor {FLAVOR_NAME!r}; give a model that compile logged"
        ) from err
    return Manifest.from_dict(configuration)


class _TvmModelWrapper:
    """The pyfunc face of a `TunedModel`."""

    def __init__(self, model: TunedModel) -> None:
        self._model = model

    def get_raw_model(self) -> TunedModel:
        """Returns the underlying model."""
        return self._model

    def predict(self, data: Any, params: dict[str, Any] | None = None) -> Any:  # noqa: ARG002 - MLflow passes params
        """Runs the network once.

        Args:
            data: An array (for a network with one input), a mapping from input names to arrays, or a DataFrame with a
                column for each input, whose rows hold the tensors along the first dimension.
            params: Not used.

        Returns:
            The output array; a dictionary of arrays by name if the network has several.
        """
        try:
            outputs = self._model.run(_as_mapping(data, self._model.inputs))
        except UserInputError as err:
            raise MlflowException.invalid_parameter_value(str(err)) from err
        return next(iter(outputs.values())) if len(outputs) == 1 else outputs


def _as_mapping(data: Any, inputs: tuple[TensorSpec, ...]) -> Mapping[str, npt.ArrayLike]:
    """The network's inputs from what pyfunc was given; shapes and dtypes are checked later.

    Raises:
        UserInputError: An array was given to a network with several inputs, or the type is none of the three.
    """
    names = [spec.name for spec in inputs]
    if isinstance(data, pd.DataFrame):
        if set(data.columns) != set(names):
            raise UserInputError(f"columns {[str(name) for name in data.columns]}: the model expects {names}")
        return {spec.name: _stacked(data[spec.name], spec) for spec in inputs}
    if isinstance(data, Mapping):
        return data
    if isinstance(data, np.ndarray):
        if len(names) > 1:
            raise UserInputError(f"one array was given: the model expects a dictionary with {names}")
        return {names[0]: data}
    raise UserInputError(f"{type(data).__name__} was given: the model takes an array, a dictionary or a DataFrame")


def _stacked(column: pd.Series, spec: TensorSpec) -> npt.NDArray[Any]:
    """A column of tensors as one array; a single cell may also hold the whole input."""
    try:
        array = np.stack([np.asarray(cell, dtype=spec.dtype) for cell in column])
    except (ValueError, TypeError) as err:
        raise UserInputError(f"column {spec.name!r}: its cells must be tensors of one shape and {spec.dtype}") from err
    return array[0] if len(array) == 1 and array.shape[1:] == spec.shape else array


def _load_pyfunc(path: str) -> _TvmModelWrapper:
    """Loads the model for pyfunc. `path` is the model's directory, since the flavor has no `data` entry."""
    try:
        return _TvmModelWrapper(_load(Path(path)))
    except AnsorMlflowError as err:
        raise MlflowException.invalid_parameter_value(str(err)) from err
