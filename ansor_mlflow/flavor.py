"""The MLflow model flavor "tvm": a compiled network with the tuning records that made it.

The functions follow those of MLflow's own flavors, `mlflow.onnx` for one. Beside the native flavor every model has the
`python_function` flavor, so that `mlflow.pyfunc.load_model`, `mlflow models predict` and `mlflow models serve` work.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import yaml
from mlflow import pyfunc
from mlflow.entities import LoggedModelStatus
from mlflow.exceptions import MlflowException
from mlflow.models import Model, ModelSignature
from mlflow.models.model import ModelInfo
from mlflow.models.utils import ModelInputExample, _save_example
from mlflow.tracking._model_registry import DEFAULT_AWAIT_MAX_SLEEP_SECONDS
from mlflow.tracking.artifact_utils import _download_artifact_from_uri
from mlflow.tracking.fluent import _last_logged_model_id
from mlflow.utils import environment
from mlflow.utils.file_utils import get_total_file_size
from mlflow.utils.model_utils import (
    _copy_extra_files,
    _validate_and_copy_code_paths,
    _validate_and_prepare_target_save_path,
)

from ansor_mlflow import names
from ansor_mlflow.device import why_not_runnable
from ansor_mlflow.errors import AnsorMlflowError, UserInputError
from ansor_mlflow.files import scratch_directory
from ansor_mlflow.foreign import without_credentials
from ansor_mlflow.model import (
    Choice,
    CompiledNetwork,
    LoadOptions,
    Manifest,
    TunedModel,
    load_package,
    read_package,
    verified_manifest,
    with_libraries,
    write_package,
)
from ansor_mlflow.plugins import distribution_of
from ansor_mlflow.serving import PyfuncModel, get_signature
from ansor_mlflow.tensors import Arrays, TensorSpec, all_sizes, random_inputs

FLAVOR_NAME = names.FLAVOR_NAME
_RUNTIME_PACKAGES = ("apache-tvm", "apache-tvm-ffi", "numpy")
_OWN_CODE = str(Path(__file__).parent)
_RUN_ID = re.compile("[0-9a-f]{32}")
_log = logging.getLogger(__name__)


def get_default_pip_requirements(include_onnxruntime: bool = False, include_openvino: bool = False) -> list[str]:
    """The packages that a saved model needs, at the versions installed here.

    This package itself is not among them: a model carries the code that loads it.

    Args:
        include_onnxruntime: Whether a part of the network stays with ONNX Runtime.
        include_openvino: Whether one is left to OpenVINO.
    """
    beside = [("onnxruntime", include_onnxruntime), ("openvino", include_openvino)]
    packages = (*_RUNTIME_PACKAGES, *(name for name, is_needed in beside if is_needed))
    return ["==".join(distribution_of(name) or (name, importlib.metadata.version(name))) for name in packages]


def get_default_conda_env(include_onnxruntime: bool = False, include_openvino: bool = False) -> dict[str, Any]:
    """The Conda environment that a saved model needs; see `get_default_pip_requirements`."""
    requirements = get_default_pip_requirements(include_onnxruntime, include_openvino)
    return dict(environment._mlflow_conda_env(additional_pip_deps=requirements))


def default_example(inputs: Sequence[TensorSpec]) -> Arrays:
    """Seeded values for every input. Floats are eighths: MLflow keeps them as text, and reads it at each load."""
    return {
        name: array if array.dtype.kind in "iub" else (np.round(array * 8) / 8).astype(array.dtype)
        for name, array in random_inputs(inputs, 0).items()
    }


def save_model(
    tvm_model: CompiledNetwork | Sequence[CompiledNetwork],
    path: str,
    conda_env: Any = None,
    code_paths: list[str] | None = None,
    mlflow_model: Model | None = None,
    signature: ModelSignature | None = None,
    input_example: ModelInputExample | None = None,
    pip_requirements: list[str] | str | None = None,
    extra_pip_requirements: list[str] | str | None = None,
    metadata: dict[str, Any] | None = None,
    extra_files: list[str] | None = None,
    validate_serving_input: bool = True,  # noqa: ARG001 - MLflow reads it
) -> None:
    """Saves a compiled network to a local directory.

    Args:
        tvm_model: A compiled network; several, if it was compiled for several devices.
        path: Directory to create.
        conda_env: Conda environment of the model, as a dictionary or a file; made from pip requirements by default.
        code_paths: Code to put into the model; by default this package, which then need not be installed to load it.
        mlflow_model: The `mlflow.models.Model` this flavor is added to.
        signature: Signature of the model; by default the network's inputs and outputs.
        input_example: Example of an input; by default `default_example`.
        pip_requirements: Replaces the default requirements.
        extra_pip_requirements: Added to the default requirements.
        metadata: Stored in the file `MLmodel`.
        extra_files: Paths or URIs of files to put into the model's directory `extra_files`.
        validate_serving_input: Whether MLflow calls the model with its input example once it is logged.

    Example:
        >>> from ansor_mlflow.model import read_package, verified_manifest
        >>> directory = Path(mlflow.artifacts.download_artifacts(compiled.model_uri))
        >>> networks = read_package(directory, verified_manifest(directory))
        >>> am.save_model(networks, "copy", metadata={"team": "vision"})
        >>> am.load_model("copy").run({"data": np.ones((4, 16), np.float32)})["dense"].shape
        (4, 32)
    """
    environment._validate_env_arguments(conda_env, pip_requirements, extra_pip_requirements)
    _validate_and_prepare_target_save_path(path)
    directory = Path(path)
    code = _validate_and_copy_code_paths([_OWN_CODE] if code_paths is None else code_paths, path)
    mlflow_model = Model() if mlflow_model is None else mlflow_model
    manifest = write_package(tvm_model, directory)
    mlflow_model.signature = signature or get_signature(manifest.inputs, manifest.outputs)
    _save_example(
        mlflow_model, default_example(all_sizes(manifest)[0].inputs) if input_example is None else input_example, path
    )
    if metadata is not None:
        mlflow_model.metadata = metadata
    pyfunc.add_to_model(
        mlflow_model,
        loader_module="ansor_mlflow.flavor",
        conda_env=environment._CONDA_ENV_FILE_NAME,
        python_env=environment._PYTHON_ENV_FILE_NAME,
        code=code,
        # MLflow lets the keys that are here be overridden, and no others
        model_config=asdict(LoadOptions(device=manifest.platform.name)),
    )
    copied = _copy_extra_files(extra_files, path)
    mlflow_model.add_flavor(FLAVOR_NAME, code=code, **copied, **manifest.to_dict())
    mlflow_model.model_size_bytes = get_total_file_size(path)
    mlflow_model.save(str(directory / names.MODEL_FILE))
    runtimes = {part.runs_in for library in manifest.libraries for part in library.parts}
    defaults = get_default_pip_requirements("onnxruntime" in runtimes, "openvino" in runtimes)
    _write_environment(directory, defaults, conda_env, pip_requirements, extra_pip_requirements)


def _write_environment(
    directory: Path, defaults: list[str], conda_env: Any, pip_requirements: Any, extra_pip_requirements: Any
) -> None:
    if conda_env is None:
        conda_env, requirements, constraints = environment._process_pip_requirements(
            defaults if pip_requirements is None else None, pip_requirements, extra_pip_requirements
        )
    else:
        conda_env, requirements, constraints = environment._process_conda_env(conda_env)
    (directory / environment._CONDA_ENV_FILE_NAME).write_text(yaml.safe_dump(conda_env, default_flow_style=False))
    if constraints:
        (directory / environment._CONSTRAINTS_FILE_NAME).write_text("\n".join(constraints))
    (directory / environment._REQUIREMENTS_FILE_NAME).write_text("\n".join(requirements))
    environment._PythonEnv.current().to_yaml(str(directory / environment._PYTHON_ENV_FILE_NAME))


def log_model(
    tvm_model: CompiledNetwork | Sequence[CompiledNetwork],
    artifact_path: str | None = None,
    conda_env: Any = None,
    code_paths: list[str] | None = None,
    registered_model_name: str | None = None,
    signature: ModelSignature | None = None,
    input_example: ModelInputExample | None = None,
    await_registration_for: int = DEFAULT_AWAIT_MAX_SLEEP_SECONDS,
    pip_requirements: list[str] | str | None = None,
    extra_pip_requirements: list[str] | str | None = None,
    metadata: dict[str, Any] | None = None,
    extra_files: list[str] | None = None,
    name: str | None = None,
    params: dict[str, Any] | None = None,
    tags: dict[str, Any] | None = None,
    model_type: str | None = None,
    step: int = 0,
    model_id: str | None = None,
    **kwargs: Any,
) -> ModelInfo:
    """Logs a compiled network as a model of the active run, and returns the metadata of the logged model.

    The arguments are those of `save_model`; the model's `name` (once called `artifact_path`), `params`, `tags` and
    `model_type`, such as "classifier"; a name to register it under, too, and how many seconds to wait for that; the
    `step` of the run that made it; the ID of a model that `mlflow.initialize_logged_model` began; and what else
    `mlflow.models.Model.log` takes.

    Example:
        >>> with mlflow.start_run():
        ...     info = am.log_model(networks, name="dense")  # networks as in save_model
        >>> sorted(info.flavors)
        ['python_function', 'tvm']
    """
    members = [tvm_model] if isinstance(tvm_model, CompiledNetwork) else tvm_model
    if all(why_not_runnable(member.fingerprint) for member in members):
        kwargs.setdefault("validate_serving_input", False)  # it would build a library
    with _failing_if_interrupted():
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
            await_registration_for=await_registration_for,
            pip_requirements=pip_requirements,
            extra_pip_requirements=extra_pip_requirements,
            metadata=metadata,
            extra_files=extra_files,
            params=params,
            tags=tags,
            model_type=model_type,
            step=step,
            model_id=model_id,
            **kwargs,
        )
    return info


@contextlib.contextmanager
def _failing_if_interrupted() -> Iterator[None]:
    """Marks the model that is being logged FAILED on Ctrl-C, too, as MLflow does on errors."""
    before = _last_logged_model_id.get()
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):  # the error that is raised already is the one to report
            model = mlflow.last_logged_model()
            if model and model.model_id != before and model.status == LoggedModelStatus.PENDING:
                mlflow.finalize_logged_model(model.model_id, LoggedModelStatus.FAILED)
        raise


def load_model(
    model_uri: str,
    dst_path: str | None = None,
    *,
    device: str = "cpu",
    num_threads: int | None = None,
    allow_compatible: bool = True,
    allow_rebuild: bool = True,
    allow_untuned: bool = True,
    huge_pages: bool = True,
) -> TunedModel:
    """Loads a model for use from Python, without pyfunc.

    Of the model's libraries it takes the one that was made for this CPU and number of threads, else the nearest that
    runs here, else it builds one with the records for another CPU of this architecture, else without records. What it
    took is logged, as a warning if it may be slow; see `explain_load`. A library never stands in for another device.

    Unlike pyfunc, it does not import the code inside the model, which no digest protects.

    Args:
        model_uri: A local path, `runs:/…`, `models:/…`, or another URI that MLflow reads artifacts from.
        dst_path: Existing directory to download to; a temporary one by default.
        device: cpu or cuda.
        num_threads: Threads of a kernel, at most as many as the CPUs that this process may use; by default those of the
            library, of which one for every such CPU is preferred.
        allow_compatible: Whether a library for another CPU or number of threads may be taken.
        allow_rebuild: Whether a library may be built here.
        allow_untuned: Whether one may be built without records.
        huge_pages: Whether weights and activations are put into huge pages, where the system has them.

    Raises:
        UserInputError: `device` or `num_threads` is not usable.
        ModelError: The model is not of this flavor, was changed after it was logged, or has no library for this host.

    Example:
        >>> model = am.load_model(compiled.model_uri, allow_rebuild=False)
        >>> model.run({"data": np.ones((4, 16), np.float32)})["dense"].shape
        (4, 32)
    """
    options = LoadOptions(
        device=device,
        num_threads=num_threads,
        allow_compatible=allow_compatible,
        allow_rebuild=allow_rebuild,
        allow_untuned=allow_untuned,
        huge_pages=huge_pages,
    )
    directory = Path(_download_artifact_from_uri(artifact_uri=model_uri, output_path=dst_path))
    return load_package(directory, Manifest.read(directory), options)


def explain_load(model: Any) -> Choice:
    """Which library of a model was loaded, and why; it is logged, too, with the sizes that it takes and pads, and how
    much memory is in huge pages.

    Args:
        model: What `load_model` or `mlflow.pyfunc.load_model` returned.

    Example:
        >>> am.explain_load(am.load_model(compiled.model_uri)).level
        'exact'
    """
    tuned = model if isinstance(model, TunedModel) else model.get_raw_model()
    _log.info("%s", tuned.choice)
    if tuned.described_sizes:
        _log.info("sizes: %s", tuned.described_sizes)
    if tuned.huge_pages.asked_bytes:
        _log.info("%s", tuned.huge_pages)
    choice: Choice = tuned.choice
    return choice


def add_library(
    model_uri: str, run: str, *, name: str | None = None, registered_model_name: str | None = None
) -> ModelInfo:
    """Logs a model that has the libraries and records of two, for different devices.

    A logged model cannot be changed, so this is a new one, which belongs to the active run if there is one. Its tag
    `ansor.extended_from` names the model that it extends. Of two libraries for the same device the added one is kept.
    Its environment and code are those of the installed packages, and not those of the models, which may be anyone's.

    Args:
        model_uri: The model that is extended; its name, signature, input example and metadata are kept.
        run: ID of the run whose model is added (compile or main), or that model's URI.
        name: Name of the new model; by default that of the model that is extended.
        registered_model_name: Name to register the new model under; no new version by default.

    Returns:
        The metadata of the new model.

    Raises:
        UserInputError: The run has no model, or the models are of different networks or versions of TVM.
        ModelError: One of them was changed after it was logged.

    Example:
        >>> other = am.compile(tune_run=am.tune("dense:4,32,16", trials=0, num_threads=1).run_id)
        >>> info = am.add_library(compiled.model_uri, run=other.run_id)
        >>> len(info.flavors["tvm"]["libraries"])
        2
    """
    with scratch_directory() as scratch:
        directory, members = _fetch_package(model_uri, Path(scratch, "base"))
        _, added = _fetch_package(_model_of(run), Path(scratch, "added"))
        base = Model.load(str(directory))
        libraries = with_libraries(members, added)
        _require_one_tvm(libraries)
        known = mlflow.get_logged_model(base.model_id).name if base.model_id and not name else names.MODEL_NAME
        return log_model(
            libraries,
            name=name or known,
            registered_model_name=registered_model_name,
            signature=base.signature,
            input_example=base.load_input_example(str(directory)),
            metadata=base.metadata,
            tags={names.TAG_EXTENDED_FROM: without_credentials(model_uri)},
        )


def _require_one_tvm(libraries: Sequence[CompiledNetwork]) -> None:
    """Refuses libraries that the TVM which is installed, and is that of a model that is made here, cannot run."""
    installed = importlib.metadata.version("apache-tvm")
    versions = {installed, *(str(library.provenance.get("tvm_version", "")) for library in libraries)} - {""}
    if len(versions) > 1:
        raise UserInputError(
            f"the libraries and the environment here are of TVM {' and '.join(sorted(versions))}, and a model has one "
            "environment; build the older one again: ansor-mlflow compile --tune-run … --allow-missing"
        )


def _fetch_package(model_uri: str, scratch: Path) -> tuple[Path, list[CompiledNetwork]]:
    """Brings a model to this machine and checks it."""
    scratch.mkdir()
    directory = Path(_download_artifact_from_uri(artifact_uri=model_uri, output_path=str(scratch)))
    return directory, read_package(directory, verified_manifest(directory))


def _model_of(run: str) -> str:
    """The URI of the model that a run logged; a URI or a path is taken as it is."""
    if not _RUN_ID.fullmatch(run):
        return run
    tags = mlflow.get_run(run).data.tags
    if names.TAG_MODEL_URI not in tags or tags.get(names.TAG_STEP) == "evaluate":
        raise UserInputError(
            f"run={run}: the run has no model; give one of compile or main, or compile it first: "
            f"ansor-mlflow compile --tune-run {run}"
        )
    return str(tags[names.TAG_MODEL_URI])


def _load_pyfunc(path: str, model_config: dict[str, Any] | None = None) -> PyfuncModel:
    """Loads the model for pyfunc. `path` is the model's directory, since the flavor has no `data` entry."""
    directory = Path(path)
    try:
        options = LoadOptions.from_config(model_config)
        manifest = Manifest.read(directory)
        return PyfuncModel(load_package(directory, manifest, options), manifest.rows)
    except AnsorMlflowError as err:
        raise MlflowException.invalid_parameter_value(str(err)) from err
