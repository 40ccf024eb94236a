"""Where networks come from: a built-in name, or an ONNX file."""

from __future__ import annotations

import difflib
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from ansor_mlflow.errors import UserInputError
from ansor_mlflow.networks.builtin import BUILTIN_NETWORKS, build_builtin
from ansor_mlflow.networks.onnx_file import fix_shapes, input_specs, output_specs, read_onnx
from ansor_mlflow.tensors import TensorSpec


@dataclass(frozen=True)
class Network:
    """A network with weights and static shapes."""

    name: str
    """The built-in name, or the stem of the file's name."""
    model: onnx.ModelProto
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    path: Path | None = None
    """The file it was read from; None for a built-in network."""

    @property
    def sha256(self) -> str:
        """Digest of the graph and its weights."""
        return hashlib.sha256(self.model.SerializeToString(deterministic=True)).hexdigest()


def load_network(
    name: str, *, batch_size: int = 1, input_shapes: Mapping[str, Sequence[int]] = {}, seed: int = 0
) -> Network:
    """Generates a built-in network or reads an ONNX file.

    Args:
        name: A built-in name, or the path of an ONNX file.
        batch_size: Batch size of a built-in network.
        input_shapes: Shapes that replace those of the inputs; the other shapes follow from them.
        seed: Seed of the weights of a built-in network.

    Raises:
        UserInputError: There is no such network, it cannot be read, or the shapes do not fit it.
    """
    if name in BUILTIN_NETWORKS:
        model = build_builtin(name, batch_size=batch_size, input_shapes=input_shapes, seed=seed)
        return _network(name, fix_shapes(model, name, {}))
    if not _is_path(name):
        raise UserInputError(f"network={name!r} is neither a built-in network nor a file; {_hint(name)}")
    if batch_size != 1:
        raise UserInputError(
            f"batch_size={batch_size} with network={name}: it is for built-in networks; give an ONNX file's batch size "
            "in input_shapes"
        )
    path = Path(name)
    return _network(path.stem, fix_shapes(read_onnx(path), name, input_shapes), path)


def _network(name: str, model: onnx.ModelProto, path: Path | None = None) -> Network:
    return Network(name=name, model=model, inputs=input_specs(model), outputs=output_specs(model), path=path)


def _is_path(name: str) -> bool:
    return name.endswith(".onnx") or os.sep in name or Path(name).is_file()


def _hint(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), BUILTIN_NETWORKS, n=3)
    if near:
        return f"perhaps you meant {', '.join(near)}"
    return f"built-in are {', '.join(BUILTIN_NETWORKS)}; a file ends in .onnx"
