"""Where networks come from when MLflow is asked, too: models, and files among the artifacts of runs."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import mlflow
import numpy as np
import requests
from mlflow.store.artifact.artifact_repository_registry import get_registered_artifact_repositories

from ansor_mlflow import names, networks
from ansor_mlflow.errors import AnsorMlflowError, MachineError, UserInputError, one_line
from ansor_mlflow.files import path_below, scratch_directory
from ansor_mlflow.foreign import read_yaml, without_credentials
from ansor_mlflow.model import verified_manifest
from ansor_mlflow.parameters import GraphOptions, is_uri
from ansor_mlflow.tracking.environment import translated_errors

_REGISTERED = re.compile(r"models:/(?P<name>[^/@]+)(/(?P<version>\d+|latest)|@(?P<alias>[^/@]+))(?P<path>(/[^/]+)*)")
_ONNX_FLAVOR, _PYTORCH_FLAVOR = "onnx", "pytorch"
_log = logging.getLogger("ansor_mlflow")


def network_of(options: GraphOptions, copy: str = "") -> networks.Network:
    """The network that options name, called as users know it; or what is at the URI of a copy of it, which has these
    values already, and these shapes but for several sizes.
    """
    if copy:
        sizes = options.input_shapes if networks.has_several_sizes(options.input_shapes) else {}
        return replace(fetch_network(copy, input_shapes=sizes), name=display_name(options.network))
    shapes = {name: getattr(options, name) for name in ("batch_size", "input_shapes", "input_values")}
    return fetch_network(options.network, seed=options.seed, trust=options.trust, **shapes)


def fetch_network(network: str, *, seed: int = 0, trust: bool = False, **shapes: Any) -> networks.Network:
    """Does what `networks.load_network` does, with its arguments, and also takes MLflow models and URIs of artifacts.

    A model must have the flavor `onnx` or `pytorch`, or be one that `compile` logged. What is downloaded is called by
    the name it is registered under, or else by the last part of its URI, and removed again before this returns.
    """
    if not is_uri(network):
        if network in networks.BUILTIN_NETWORKS or not Path(network, names.MODEL_FILE).is_file():
            return networks.load_network(network, seed=seed, trust=trust, **shapes)
        return replace(_read_model(Path(network), network, shapes, trust=trust), name=display_name(network))
    uri = pinned_uri(network)
    called = without_credentials(network)
    with scratch_directory() as scratch:
        artifact = _download(uri, called, Path(scratch))
        if artifact.is_file():
            if artifact.suffix != networks.PROGRAM_SUFFIX:
                _download_weights(artifact, uri, called, Path(scratch))
            read = networks.read_network(artifact, called, trust=trust, **shapes)
        else:
            read = _read_model(artifact, called, shapes, trust=trust)
        return replace(read, name=display_name(uri), source=uri)


def find_program(network: str, directory: Path) -> Path | None:
    """The exported program of PyTorch that a network was when it was tuned, downloaded to a directory if need be; None
    where it was something else, or, with a warning, where it is not to be had any more.

    It is read again from where the tuning read it, and nothing says that it is the same: compare its outputs.
    """
    called = without_credentials(network)
    path = Path(network)
    try:
        if is_uri(network) and not network.endswith(".onnx"):
            directory.mkdir(parents=True, exist_ok=True)
            path = _download(network, called, directory)
        if (path / names.MODEL_FILE).is_file():
            path = _model_file(path, _flavors(path, called), called)
    except AnsorMlflowError as err:
        _log.warning("what the network came from cannot be read any more: %s", err)
        return None
    if path.suffix != networks.PROGRAM_SUFFIX:
        return None
    if not path.is_file():
        _log.warning("the exported program network=%s is not there any more", called)
        return None
    return path


def display_name(network: str) -> str:
    """What a network is called: a registered model's name, or the last part of another URI or of a path."""
    registered = _REGISTERED.fullmatch(network)
    if registered:
        return registered["name"]
    if is_uri(network):
        return PurePosixPath(network).name.removesuffix(".onnx").removesuffix(networks.PROGRAM_SUFFIX)
    return Path(network).resolve().stem


def pinned_uri(uri: str, parameter: str = "network") -> str:
    """Checks a URI of a model or an artifact, and puts a version in the place of an alias or `latest`."""
    uri = uri.rstrip("/")
    given = f"{parameter}={without_credentials(uri)}"
    _check_form(uri, given)
    registered = _REGISTERED.fullmatch(uri)
    if not registered or (registered["version"] or "").isdigit():
        return uri
    name = registered["name"]
    with translated_errors(f"read {given}"):
        client = mlflow.MlflowClient()
        if registered["alias"]:
            versions = [client.get_model_version_by_alias(name, registered["alias"])]
        else:
            versions = client.get_registered_model(name).latest_versions  # the latest of each stage
    if not versions:
        raise UserInputError(f"{given}: the registered model has no version; log one")
    return f"models:/{name}/{max(int(version.version) for version in versions)}{registered['path']}"


def _check_form(uri: str, given: str) -> None:
    """Refuses what MLflow would report as an error of the server."""
    scheme = uri.partition(":")[0]
    if scheme == "models" and not (_REGISTERED.fullmatch(uri) or re.fullmatch("models:/m-[0-9a-f]+", uri)):
        raise UserInputError(
            f"{given}: no URI of a model; write models:/name/version, models:/name@alias, or models:/m-… with the ID "
            "of a logged model"
        )
    if scheme == "runs" and not re.fullmatch("runs:/[^/]+(/[^/]+)+", uri):
        raise UserInputError(f"{given}: no URI of an artifact; write runs:/<run ID>/<path>")
    # Behind "http" MLflow expects its own server, which "mlflow-artifacts" is for.
    known = sorted(get_registered_artifact_repositories().keys() - {"", "http", "https"})
    if scheme not in known:
        raise UserInputError(f"{given}: MLflow reads no {scheme}: URIs; it reads {', '.join(known)}")


def _download(uri: str, called: str, directory: Path) -> Path:
    with translated_errors(f"read network={called}"):
        try:
            return Path(mlflow.artifacts.download_artifacts(artifact_uri=uri, dst_path=str(directory)))
        except (requests.RequestException, ConnectionError):
            raise
        except OSError as err:  # of the libraries that some stores need
            raise MachineError(f"cannot read network={called}: {one_line(err)}") from err


def _download_weights(path: Path, uri: str, called: str, scratch: Path) -> None:
    """Downloads the files that hold the weights of the ONNX file `path` from beside `uri`, where that came from."""
    for location in networks.external_files(path, called):
        target = path_below(path.parent, location)
        target.parent.mkdir(parents=True, exist_ok=True)
        _download(f"{uri.rpartition('/')[0]}/{PurePosixPath(location)}", called, scratch).replace(target)


def _read_model(directory: Path, called: str, options: Mapping[str, Any], *, trust: bool) -> networks.Network:
    path = _model_file(directory, _flavors(directory, called), called)
    if path.is_dir():
        networks.require_trust(called, trust=trust)
        return networks.read_torch_model(partial(_load_module, directory, called), called, **options)
    return networks.read_network(path, called, **options, trust=trust)


def _model_file(directory: Path, flavors: Mapping[str, Mapping[str, Any]], called: str) -> Path:
    """The ONNX file or exported program of an MLflow model; its directory, where it is a pickle of PyTorch."""
    if names.FLAVOR_NAME in flavors:
        verified_manifest(directory)
        return directory / names.NETWORK_FILE
    if _ONNX_FLAVOR in flavors:
        file = str(flavors[_ONNX_FLAVOR].get("data", ""))
    elif _PYTORCH_FLAVOR in flavors:
        file = (
            f"{flavors[_PYTORCH_FLAVOR].get('model_data', '')}/model{networks.PROGRAM_SUFFIX}"  # a pickle is model.pth
        )
    else:
        raise UserInputError(
            f"network={called}: the model has the flavors {', '.join(flavors)}; give one with the flavor "
            f"{_ONNX_FLAVOR} or {_PYTORCH_FLAVOR}, or one that compile logged"
        )
    with contextlib.suppress(ValueError):
        if (path := path_below(directory, file)).is_file():
            return path
    if _ONNX_FLAVOR not in flavors:
        return directory
    raise UserInputError(f"network={called}: the model lacks the ONNX file that {names.MODEL_FILE} names; log it again")


def _load_module(directory: Path, called: str) -> networks.TorchModel:
    """Loads a pickled module as MLflow does; only for a child process."""
    import mlflow.pytorch
    import torch
    from mlflow.models import Model

    os.environ["MLFLOW_ALLOW_PICKLE_DESERIALIZATION"] = "true"  # which is what `trust` says
    signature = Model.load(str(directory)).signature
    inputs = signature.inputs if signature else None
    if inputs is None or not inputs.is_tensor_spec():
        raise UserInputError(
            f"network={called}: its signature does not say which tensors it takes; log it with "
            "mlflow.pytorch.log_model(..., input_example=) of an array, or export it to ONNX"
        )
    module = mlflow.pytorch.load_model(str(directory), weights_only=False).to("cpu").eval()
    specs = inputs.inputs
    arguments = list(inspect.signature(module.forward).parameters)
    shapes = {
        spec.name or arguments[index]: tuple(size if size >= 0 else "?" for size in spec.shape)
        for index, spec in enumerate(specs)
    }
    return networks.TorchModel(module, shapes, [torch.from_numpy(np.empty(0, spec.type)).dtype for spec in specs])


def _flavors(directory: Path, called: str) -> dict[str, dict[str, Any]]:
    """The flavors of an MLflow model by name, as MLflow's file describes them."""
    path = directory / names.MODEL_FILE
    if not path.is_file():
        raise UserInputError(
            f"network={called}: a folder without the file {names.MODEL_FILE}; give an MLflow model, or a file in it"
        )
    try:
        flavors = read_yaml(path.read_bytes())["flavors"]
        return {str(name): dict(entries) for name, entries in flavors.items()}
    except (LookupError, TypeError, ValueError, AttributeError) as err:
        raise UserInputError(f"network={called}: its file {names.MODEL_FILE} is damaged; log the model again") from err
