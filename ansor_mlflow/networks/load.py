"""Where networks come from: a built-in name, an operator with its sizes, an ONNX file, or one of PyTorch."""

from __future__ import annotations

import difflib
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import onnx

from ansor_mlflow.errors import UserInputError
from ansor_mlflow.files import scratch_directory
from ansor_mlflow.graphs import estimated_cost
from ansor_mlflow.networks.families import BUILTIN_NETWORKS, build_builtin
from ansor_mlflow.networks.onnx_file import data_root, digest, load_weights, read_onnx
from ansor_mlflow.networks.operators import build_operator, check_operator, is_operator
from ansor_mlflow.networks.pytorch import PROGRAM_SUFFIX, TorchModel, export_model, load_program, require_trust
from ansor_mlflow.networks.shapes import Shape
from ansor_mlflow.networks.sizes import ChosenSizes, GivenShape, choose_sizes, has_range, only_size, split_sizes
from ansor_mlflow.networks.static_shapes import declared_shapes, fix_shapes, input_specs, open_shapes, output_specs
from ansor_mlflow.tensors import NetworkShapes, TensorSpec, open_where_different

_log = logging.getLogger("ansor_mlflow")

_TRAINED_TYPES = {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}
_PICKLE_SUFFIXES = (".pt", ".pth")


@dataclass(frozen=True)
class Network:
    """A network with weights and static shapes, of which there may be several."""

    name: str
    """The built-in name, the operator with its sizes, or the stem of the file's name."""
    model: onnx.ModelProto
    """The graph with static shapes; with dynamic ones where it has several sizes."""
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    path: Path | None = None
    """The file it was read from, which may be gone; None for a network that is generated."""
    source: str | None = None
    """The URI that the file was downloaded from; with a version, where the user gave an alias."""
    sizes: tuple[NetworkShapes, ...] = ()
    """Its sizes, in the order in which they were given; empty where it has one."""
    chosen: ChosenSizes | None = None
    """How they were chosen in a range that was given; None where they were given themselves."""

    def models(self) -> Iterator[onnx.ModelProto]:
        """Yields the network with the static shapes of each of its sizes."""
        yield from models_of_sizes(self.model, self.name, self.sizes)

    @property
    def num_parameters(self) -> int:
        """Trained values: weights that are not scalars, without the statistics of batch normalisations."""
        graph = self.model.graph
        statistics = {name for node in graph.node if node.op_type == "BatchNormalization" for name in node.input[3:5]}
        return sum(
            math.prod(weight.dims)
            for weight in graph.initializer
            if weight.dims and weight.name not in statistics and weight.data_type in _TRAINED_TYPES
        )

    @property
    def sha256(self) -> str:
        """Digest of the graph and its weights."""
        return digest(self.model)


def require_network(name: str, *, trust: bool = False) -> None:
    """Checks that there is such a name, form or file before anything of it is loaded; a directory may be a model."""
    if name in BUILTIN_NETWORKS:
        return
    if is_operator(name):
        check_operator(name)
        return
    is_there = name != "" and Path(name).exists()
    if not (is_there or os.sep in name or name.endswith((".onnx", PROGRAM_SUFFIX, *_PICKLE_SUFFIXES))):
        near = difflib.get_close_matches(name.lower(), BUILTIN_NETWORKS, cutoff=0.65)
        known = f"built-in are {', '.join(BUILTIN_NETWORKS)}; a file ends in .onnx or .pt2"
        hint = f"perhaps you meant {', '.join(near)}" if near else known
        raise UserInputError(f"network={name!r} is neither a built-in network nor a file; {hint}")
    _refuse_pickle(Path(name), name)
    try:
        Path(name).stat()
    except OSError as err:
        raise UserInputError(
            f"network={name}: the file cannot be read ({err.strerror}); give an ONNX file, an exported program or a "
            "built-in name"
        ) from err
    if Path(name).suffix == PROGRAM_SUFFIX:
        require_trust(name, trust=trust)


def load_network(
    name: str,
    *,
    batch_size: int = 1,
    input_shapes: Mapping[str, GivenShape] = {},
    input_values: Mapping[str, Any] = {},
    seed: int = 0,
    trust: bool = False,
) -> Network:
    """Generates a built-in network or a single operator (see `operators.OPERATORS`), or reads a file.

    `input_shapes` replaces the shapes of inputs, from which the others follow; a dimension of a file may be a list of
    sizes (see `split_sizes`), or a range in which they are chosen (see `choose_sizes`). Inputs with `input_values` are
    fixed to them, and `seed` is that of generated weights.
    """
    require_network(name, trust=trust)
    if name in BUILTIN_NETWORKS or is_operator(name):
        shapes = only_size(name, input_shapes, "its graph is made for one; give an ONNX file with dynamic axes")
        build = build_operator if is_operator(name) else build_builtin
        model = build(name, batch_size=batch_size, input_shapes=shapes, seed=seed)
        return _network(name, fix_shapes(model, name, {}, values=input_values))
    return read_network(
        Path(name), name, batch_size=batch_size, input_shapes=input_shapes, input_values=input_values, trust=trust
    )


def read_network(
    path: Path,
    called: str,
    *,
    batch_size: int = 1,
    input_shapes: Mapping[str, GivenShape] = {},
    input_values: Mapping[str, Any] = {},
    trust: bool = False,
) -> Network:
    """Reads an ONNX file or an exported program of PyTorch, which messages call `called`; see `load_network`."""
    _refuse_pickle(path, called)
    if path.suffix == PROGRAM_SUFFIX:
        require_trust(called, trust=trust)
        load = partial(load_program, path, called)
        sizes: dict[str, Any] = {"batch_size": batch_size, "input_shapes": input_shapes, "input_values": input_values}
        return replace(read_torch_model(load, called, **sizes), name=path.stem, path=path)
    if has_range(input_shapes):
        chosen = _choose_sizes(path, called, input_shapes, batch_size=batch_size, values=input_values)
        sized = read_network(
            path, called, batch_size=batch_size, input_shapes=chosen.input_shapes, input_values=input_values
        )
        return replace(sized, chosen=chosen)
    shapes, *others = split_sizes(called, input_shapes)
    if others:
        return _read_sizes(path, called, [shapes, *others], batch_size=batch_size, values=input_values)
    model = _read(path, called, given=shapes, batch_size=batch_size, values=input_values)
    return _network(path.stem, model, path)


def read_torch_model(
    load: Callable[[], TorchModel],
    called: str,
    *,
    batch_size: int = 1,
    input_shapes: Mapping[str, GivenShape] = {},
    input_values: Mapping[str, Any] = {},
) -> Network:
    """Makes a network of a model of PyTorch, which a child process loads and exports; it can run code of its author."""
    shapes = only_size(
        called,
        input_shapes,
        "a model of PyTorch is read with one; export an ONNX file with dynamic axes: torch.onnx.export(model, args, "
        "'model.onnx', dynamic_shapes=…)",
    )
    with scratch_directory() as scratch:
        exported = Path(scratch, "model.onnx")
        export_model(load, called, exported, input_shapes=shapes, batch_size=batch_size)
        return _network(called, _read(exported, called, values=input_values))


def models_of_sizes(model: onnx.ModelProto, network: str, sizes: Sequence[NetworkShapes]) -> Iterator[onnx.ModelProto]:
    """Yields a model, as `Network.model` is, with the static shapes of each of its sizes; itself, if there are none."""
    if not sizes:
        yield model
    for size in sizes:
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        yield fix_shapes(copy, network, {spec.name: spec.shape for spec in size.inputs})


def _refuse_pickle(path: Path, called: str) -> None:
    if path.suffix in _PICKLE_SUFFIXES:
        raise UserInputError(
            f"network={called}: pickles of PyTorch do not say what inputs they take, and can run any code; export the "
            "model to ONNX (torch.onnx.export), or log it with mlflow.pytorch.log_model"
        )


def _read(path: Path, called: str, *, given: Mapping[str, Sequence[int]] = {}, **options: Any) -> onnx.ModelProto:
    """Reads an ONNX file with all its weights; for the options see `fix_shapes`."""
    directory = data_root(path.parent)
    model = fix_shapes(read_onnx(path, called), called, given, directory, **options)
    load_weights(model, called, directory)
    return model


def _choose_sizes(path: Path, called: str, given: Mapping[str, GivenShape], **options: Any) -> ChosenSizes:
    """Chooses the sizes of an ONNX file in a range; the shapes of each candidate are inferred, a second or so each."""
    _log.info("choosing the sizes of %s", called)
    directory = data_root(path.parent)

    def cost(shapes: Mapping[str, Shape]) -> float:
        return estimated_cost(fix_shapes(read_onnx(path, called), called, shapes, directory, **options, note=str))

    return choose_sizes(called, declared_shapes(read_onnx(path, called)), given, cost)


def _read_sizes(path: Path, called: str, given: Sequence[Mapping[str, tuple[int, ...]]], **options: Any) -> Network:
    """Reads an ONNX file with several sizes; each of them is tried."""
    directory, sizes = data_root(path.parent), []
    note: Callable[[str], object] = _log.warning
    for shapes in given:
        model = fix_shapes(read_onnx(path, called), called, shapes, directory, **options, note=note)
        note = str  # one size has said what the others would repeat
        sizes.append(NetworkShapes(input_specs(model), output_specs(model)))
    inputs, outputs = (
        open_where_different(specs) for specs in zip(*((s.inputs, s.outputs) for s in sizes), strict=True)
    )
    model = open_shapes(read_onnx(path, called), called, inputs, options["values"])
    load_weights(model, called, directory)
    return Network(name=path.stem, model=model, inputs=inputs, outputs=outputs, path=path, sizes=tuple(sizes))


def _network(name: str, model: onnx.ModelProto, path: Path | None = None) -> Network:
    return Network(name=name, model=model, inputs=input_specs(model), outputs=output_specs(model), path=path)
