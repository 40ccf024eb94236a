"""Networks in 8 bits that lose no more than they may: the layers that lose most stay floats.

`onnxruntime.quantization` measures the ranges and writes QuantizeLinear and DequantizeLinear around each layer:
activations are unsigned, weights signed with a scale for each channel.
"""

from __future__ import annotations

import bisect
import contextlib
import copy
import logging
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import numpy_helper

from ansor_mlflow import names
from ansor_mlflow.device import WEIGHT_BITS, Device, weight_bits
from ansor_mlflow.errors import AnsorMlflowError, UserInputError, one_line
from ansor_mlflow.files import scratch_directory
from ansor_mlflow.foreign import Report, Reported, Table, figure
from ansor_mlflow.graphs import attributes_of, flops_of_nodes, fold_scales, opset_version, raise_opset, simplify, uses
from ansor_mlflow.measuring import Loss, choose_examples, find_loss, is_quantized, reference_inference
from ansor_mlflow.networks import Network, read_network, write_onnx
from ansor_mlflow.parameters import QuantizeNetworkOptions, QuantizeOptions
from ansor_mlflow.processes import in_child_process
from ansor_mlflow.tensors import Arrays, all_sizes
from ansor_mlflow.tracking import StepRun, draw_losses, network_of, save_figure

if TYPE_CHECKING:
    from onnxruntime.quantization import CalibrationMethod
    from tvm.target import Target

_log = logging.getLogger("ansor_mlflow")
_LAYERS = ("Conv", "Gemm", "MatMul")
"""Operators that are computed in 8 bits: those with nearly all operations."""
_BETWEEN = ("Add", "AveragePool", "Clip", "Concat", "MaxPool", "Relu")
"""What is 8 bits as well where all that it takes comes of convolutions: a quarter of the memory, and what runtimes fuse
with them.
"""
DYNAMIC = "dynamic"
_METHODS = {"minmax": "MinMax", "percentile": "Percentile", "entropy": "Entropy"}
"""How a range follows from the values that were seen, the cheapest first, and ONNX Runtime's names of it."""
_OPSET_OF_CHANNELS = 13
"""Version of ONNX's operators from which on there is a scale for each channel."""
_INPUTS_AT_A_TIME = 4
_MAX_EXAMPLES = 100
"""Inputs that ranges are measured with, and that judge a network: more change little."""
_SHARE_JUDGED = 0.2
"""Share of the inputs that ranges are not measured with, but the loss."""


@dataclass(frozen=True, kw_only=True)
class Contract:
    """What a quantised network may lose, and how long it may take to find one."""

    loss: str
    """Its name, as `find_loss` takes it."""
    max_loss: float
    minutes: float


@dataclass(frozen=True)
class LayerLoss:
    """A layer that can be computed in 8 bits."""

    name: str
    op_type: str
    share: float
    """Its share of the operations of all such layers."""
    loss: float | None = None
    """What is lost where it alone is quantised; None where that did not matter, or there was no time to see."""
    is_quantized: bool = True

    @property
    def type_name(self) -> str:
        return "int8" if self.is_quantized else "float32"


@dataclass(frozen=True)
class QuantizedCandidate:
    """A quantised network in which some layers stayed floats."""

    calibration: str
    num_floats: int
    share: float
    """Share of the operations of all layers that are computed in 8 bits."""
    loss: float


@dataclass(frozen=True, kw_only=True)
class Quantization(Reported):
    """How a network was quantised, and what it lost."""

    contract: Contract
    loss: float
    share: float
    calibration: str
    """One of `_METHODS`, or `DYNAMIC`: without inputs, ranges are measured in each call."""
    num_calibrated: int
    num_judged: int
    layers: tuple[LayerLoss, ...]
    candidates: tuple[QuantizedCandidate, ...]
    float_sha256: str = ""
    """Digest of the float network."""
    weight_bits: int = WEIGHT_BITS

    @property
    def terms(self) -> dict[str, Any]:
        """What a model keeps of it."""
        kept = ("loss", "share", "calibration", "num_calibrated", "num_judged", "float_sha256", "weight_bits")
        return {**{name: getattr(self, name) for name in kept}, "contract": asdict(self.contract)}

    def report(self) -> Report:
        rows = [
            [layer.name, f"{layer.share:.1%}", figure(layer.loss, "{:.3g}"), layer.type_name] for layer in self.layers
        ]
        return Report(self.summary, [Table(rows, ["layer", ">share", f">{self.contract.loss} alone", "type"])])

    @property
    def summary(self) -> str:
        """What was done, and what it costs, in one sentence."""
        num_floats = sum(not layer.is_quantized for layer in self.layers)
        weights = "" if self.weight_bits == WEIGHT_BITS else f" with weights of {self.weight_bits}"
        inputs = (
            f"{self.num_calibrated} inputs"
            if self.num_calibrated
            else "no inputs, so that ranges are measured in each call"
        )
        return (
            f"{len(self.layers) - num_floats} of {len(self.layers)} layers, with {self.share:.1%} of their operations, "
            f"are computed in 8 bits{weights}, by {self.calibration} of {inputs}; "
            f"{self.contract.loss} is {self.loss:.3g} on {self.num_judged} others, {self.contract.max_loss:g} is "
            "allowed"
        )


@dataclass(frozen=True)
class _QuantizationJob:
    """A call of `_quantize`, which another process takes."""

    network: Path
    quantized: Path
    """The file that is written."""
    examples: Sequence[Arrays]
    are_drawn: bool
    """Whether the examples are no data of the user's: they judge a network, and tell no ranges."""
    contract: Contract
    weight_bits: int


def quantized(network: Network, options: QuantizeOptions, target: Target) -> tuple[Network, Quantization | None]:
    """A network as `quantize` asks for it, and what it lost. Weights have as many bits as are exact on `target`.

    Raises:
        UserInputError: It has several sizes or no layer to be quantised, is quantised already, there are not two
            inputs, or none of its layers may be quantised.
    """
    if options.quantize == "off":
        return network, None
    if network.sizes:
        raise UserInputError("quantize=int8 and several sizes in input_shapes: one is quantised at a time; give one")
    find_loss(options.quantize_loss)
    with scratch_directory() as scratch:
        files = Path(scratch, "network.onnx"), Path(scratch, "quantized.onnx")
        write_onnx(network.model, files[0])
        if is_quantized(files[0]):
            raise UserInputError("quantize=int8: the network is quantised already; leave quantize out")
        examples = choose_examples(options.data, all_sizes(network), options.seed, files[0])
        contract = Contract(
            loss=options.quantize_loss, max_loss=options.quantize_max_loss, minutes=options.quantize_minutes
        )
        _log.info("quantising %s to 8 bits", network.name)
        job = _QuantizationJob(
            *files,
            examples=examples,
            are_drawn=not options.data,
            contract=contract,
            weight_bits=weight_bits(target) or WEIGHT_BITS,
        )
        advice = "free memory, give fewer inputs, or leave quantize out"
        found = in_child_process(_quantize, job, work="quantises the network", advice=advice, is_quiet=True)
        _log.info("%s", found.summary)
        made = read_network(files[1], network.name)
        made = replace(made, name=network.name, path=network.path or files[1], source=network.source)
        return made, replace(found, float_sha256=network.sha256)


def quantize_network(options: QuantizeNetworkOptions) -> Quantization:
    """Quantises a network into a file, which is written as a whole or not at all."""
    output = Path(options.output)
    if not output.parent.is_dir():
        raise UserInputError(f"output={output}: there is no directory {output.parent}; make it first")
    made, found = quantized(network_of(options), options, Device.resolve(options.target, 1).target)
    assert found is not None
    with tempfile.TemporaryDirectory(prefix=".quantizing-", dir=output.parent) as scratch:
        for path in reversed(write_onnx(made.model, Path(scratch, output.name))):  # weights first, where they are many
            path.replace(output.with_name(path.name))
    return found


def log_quantization(run: StepRun, found: Quantization) -> None:
    """Logs what was lost, by layers and candidates, as figures and as a picture."""
    run.log_json(found, names.QUANTIZATION_FILE)
    run.log_metrics({names.QUANTIZATION_LOSS: found.loss, names.QUANTIZED_SHARE: found.share})
    points = [(each.share, each.loss, each.calibration) for each in found.candidates]
    title = f"{found.contract.loss} of quantised networks"
    chart = draw_losses(title, points, (found.share, found.loss), found.contract.max_loss)
    path = run.directory / names.QUANTIZATION_CHART
    save_figure(chart, path)
    run.log_artifacts(path)


def _quantize(job: _QuantizationJob) -> Quantization:
    """Quantises an ONNX file with static shapes. Of the user's inputs a fifth judges what is lost, the others tell the
    ranges.
    """
    num_judged = max(1, round(_SHARE_JUDGED * len(job.examples)))
    if len(job.examples) < 2 and not job.are_drawn:
        raise UserInputError("quantize=int8: data has one input, and another one has to judge what is lost; give more")
    with scratch_directory() as scratch:
        try:
            search = _QuantizationSearch(
                scratch=Path(scratch),
                network=_prepared(job.network, Path(scratch)),
                calibrating=[] if job.are_drawn else job.examples[num_judged:][:_MAX_EXAMPLES],
                judging=(job.examples if job.are_drawn else job.examples[:num_judged])[:_MAX_EXAMPLES],
                contract=job.contract,
                weight_bits=job.weight_bits,
            )
            return search.run(job.quantized)
        except AnsorMlflowError:
            raise
        except Exception as err:  # of ONNX Runtime's tools, which raise errors of every kind
            raise UserInputError(
                f"quantize=int8: ONNX Runtime cannot quantise the network: {one_line(err)}; leave quantize out"
            ) from err


def _prepared(network: Path, scratch: Path) -> Path:
    """The network with constants folded and batch normalisations in the layers before them, names of its nodes, and
    biases that are vectors, as ONNX Runtime's tools take no row of a matrix.
    """
    path, model = scratch / "float.onnx", onnx.load(network)
    raised = raise_opset(model, _OPSET_OF_CHANNELS)
    onnx.save(raised, path)
    with contextlib.suppress(UserInputError):  # of what ONNX's converter made of an old file
        reference_inference(path, 0, exact=True)
        model = raised
    # ONNX Runtime's own preparation would reshape products, which then are in no runtime one with what follows.
    model = onnx.shape_inference.infer_shapes(fold_scales(simplify(model, str(network))))
    weights, num_uses = {weight.name: weight for weight in model.graph.initializer}, Counter(uses(model.graph))
    for number, node in enumerate(model.graph.node):
        node.name = f"{number} {node.op_type}"
        for place, name in enumerate(node.input if node.op_type in _LAYERS else []):
            if name in weights and num_uses[name] > 1:
                # What several layers share ONNX Runtime's tools give names that other tensors may have.
                own = copy.deepcopy(weights[name])
                own.name = node.input[place] = f"{name} of {number}"
                weights[own.name] = own
        if node.op_type == "Gemm" and len(node.input) == 3 and all(name in weights for name in node.input[1:]):
            _, weight, bias = node.input
            is_transposed = bool(attributes_of(node).get("transB", 0))
            _make_vector(weights[bias], channels=weights[weight].dims[not is_transposed])
    used = set(uses(model.graph))
    del model.graph.initializer[:]
    model.graph.initializer.extend(weight for weight in weights.values() if weight.name in used)
    onnx.save(model, path)
    return path


def _is_layer(node: onnx.NodeProto, num_axes: dict[str, int]) -> bool:
    """Whether a node has constant weights, and no matrix as a bias; constants are given with their numbers of axes."""
    are_constant = node.op_type in _LAYERS and node.input[1] in num_axes
    return are_constant and all(num_axes.get(bias, 1) == 1 for bias in node.input[2:])


def _make_vector(bias: onnx.TensorProto, channels: int) -> None:
    """Makes a vector of a bias that is the same for all rows."""
    if prod(bias.dims[:-1]) == 1:
        vector = np.broadcast_to(numpy_helper.to_array(bias).reshape(-1), channels)
        bias.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(vector), bias.name))


class _QuantizationSearch:
    """Looks for the network with most layers in 8 bits that keeps to the contract."""

    def __init__(
        self,
        *,
        scratch: Path,
        network: Path,
        calibrating: Sequence[Arrays],
        judging: Sequence[Arrays],
        contract: Contract,
        weight_bits: int,
    ) -> None:
        self._scratch, self._network, self._contract, self._weight_bits = scratch, network, contract, weight_bits
        self._calibrating, self._judging = calibrating, judging
        self._loss: Loss = find_loss(contract.loss)
        self._give_up_s = time.monotonic() + 60 * contract.minutes
        model = onnx.load(network)
        num_axes = {weight.name: len(weight.dims) for weight in model.graph.initializer}
        flops = zip(model.graph.node, flops_of_nodes(model), strict=True)
        # A product of two computed tensors, as in an attention, loses much and is soon done.
        found = [(node, number) for node, number in flops if _is_layer(node, num_axes)]
        total = sum(number for _, number in found) or 1.0
        self._per_channel = opset_version(model) >= _OPSET_OF_CHANNELS
        self._layers = [LayerLoss(node.name, node.op_type, number / total) for node, number in found]
        self._nodes, self._constants = list(model.graph.node), set(num_axes)
        self._candidates: list[QuantizedCandidate] = []

    def run(self, quantized: Path) -> Quantization:
        """Writes the network that was found."""
        if not self._layers:
            raise UserInputError(
                f"quantize=int8: the network has no {', '.join(_LAYERS)} with constant weights; leave quantize out"
            )
        calibrations = tuple(_METHODS) if self._calibrating else (DYNAMIC,)
        for each in calibrations:
            try:
                self._try(each, ())
            except ValueError as err:  # NumPy makes no histogram of an infinity, or of next to nothing
                if each == calibrations[-1] and not self._candidates:
                    raise
                _log.info("no ranges by %s: %s", each, one_line(err))
        calibration = min(self._candidates, key=lambda candidate: candidate.loss).calibration
        floats: list[str] = []
        if min(candidate.loss for candidate in self._candidates) > self._contract.max_loss:
            floats = self._floats(calibration)
        path = self._write(calibration, floats)
        path.replace(quantized)
        kept = set(floats)
        layers = tuple(replace(layer, is_quantized=layer.name not in kept) for layer in self._layers)
        tried = {(each.calibration, each.num_floats): each for each in self._candidates}
        found = tried[calibration, len(kept)]
        return Quantization(
            contract=self._contract,
            loss=found.loss,
            share=found.share,
            calibration=calibration,
            num_calibrated=len(self._calibrating),
            num_judged=len(self._judging),
            weight_bits=self._weight_bits,
            layers=layers,
            candidates=tuple(self._candidates),
        )

    def _floats(self, calibration: str) -> list[str]:
        """The fewest layers that stay floats, those first that lose most by themselves."""
        # A share of the inputs is nothing for most layers, and an error tells them apart.
        losses = [self._losses_of(layer, calibration) or (None, 0.0) for layer in self._layers]
        self._layers = [replace(layer, loss=loss) for layer, (loss, _) in zip(self._layers, losses, strict=True)]
        ranks = {layer.name: (loss or 0.0, error) for layer, (loss, error) in zip(self._layers, losses, strict=True)}
        worst = sorted(ranks, key=lambda name: ranks[name], reverse=True)
        # More floats lose less, nearly always, so that half of what is left is tried again and again.
        numbers = range(1, len(worst))
        keeps = lambda number: self._try(calibration, worst[:number]).loss <= self._contract.max_loss  # noqa: E731
        number = numbers[0] + bisect.bisect_left(numbers, True, key=keeps) if numbers else 0
        if not numbers or number > numbers[-1]:
            least = min(candidate.loss for candidate in self._candidates)
            raise UserInputError(
                f"quantize=int8: no layer may be quantised: at best {self._contract.loss} is {least:.3g}, above "
                f"quantize_max_loss={self._contract.max_loss:g}; allow more, or leave quantize out"
            )
        return worst[:number]

    def _losses_of(self, layer: LayerLoss, calibration: str) -> tuple[float, float] | None:
        """What is lost where one layer is quantised, and the relative error of it; None where there is no time."""
        if time.monotonic() > self._give_up_s:
            return None
        others = [other.name for other in self._layers if other is not layer]
        outputs = self._run(self._write(calibration, others))
        return self._loss(self._expected, outputs), find_loss("relative_error")(self._expected, outputs)

    def _try(self, calibration: str, floats: Sequence[str]) -> QuantizedCandidate:
        kept = set(floats)
        share = sum(layer.share for layer in self._layers if layer.name not in kept)
        found = QuantizedCandidate(calibration, len(kept), share, self._judge(self._write(calibration, floats)))
        self._candidates.append(found)
        return found

    @cached_property
    def _expected(self) -> list[Arrays]:
        return self._run(self._network)

    def _judge(self, path: Path) -> float:
        return self._loss(self._expected, self._run(path))

    def _run(self, path: Path) -> list[Arrays]:
        run = reference_inference(path, 0, exact=True)
        return [run(inputs) for inputs in self._judging]

    def _write(self, calibration: str, floats: Sequence[str]) -> Path:
        """Quantises all layers but some."""
        from onnxruntime.quantization import CalibrationMethod, QuantType, quantize_dynamic, quantize_static

        path = self._scratch / "quantized.onnx"
        layers = [layer.name for layer in self._layers if layer.name not in floats]
        common: dict[str, Any] = {
            "nodes_to_quantize": [*layers, *self._between(set(layers))],
            "op_types_to_quantize": [*_LAYERS, *_BETWEEN],
            "per_channel": self._per_channel,
            "weight_type": QuantType.QInt8,
            "reduce_range": self._weight_bits < WEIGHT_BITS,
        }
        if calibration == DYNAMIC:
            quantize_dynamic(self._network, path, **common)
            return path
        method = CalibrationMethod[_METHODS[calibration]]
        ranges = self._scratch / f"{calibration}.json"
        if not ranges.exists():
            self._measure(method, ranges)
        quantize_static(
            self._network,
            path,
            activation_type=QuantType.QUInt8,
            calibrate_method=method,
            calibration_cache_path=ranges,
            **common,
        )
        return path

    def _between(self, layers: set[str]) -> list[str]:
        """What follows nothing but quantised convolutions."""
        found: list[str] = []
        quantized: set[str] = set()
        for node in self._nodes:
            limits = self._constants if node.op_type == "Clip" else set()  # other constants its tools take amiss
            of_bytes = node.op_type in _BETWEEN and {name for name in node.input if name} - limits <= quantized
            if of_bytes:
                found.append(node.name)
            if of_bytes or (node.op_type == "Conv" and node.name in layers):
                quantized.update(node.output)
        return found

    def _measure(self, method: CalibrationMethod, ranges: Path) -> None:
        """Writes the ranges of activations; a few inputs at a time, as ONNX Runtime keeps all activations of a call."""
        from onnxruntime.quantization import create_calibrator, save_tensors_data

        augmented = str(self._scratch / "augmented.onnx")
        calibrator = create_calibrator(
            self._network, [*_LAYERS, *_BETWEEN], augmented_model_path=augmented, calibrate_method=method
        )
        for start in range(0, len(self._calibrating), _INPUTS_AT_A_TIME):
            calibrator.collect_data(_Reader(self._calibrating[start : start + _INPUTS_AT_A_TIME]))
        save_tensors_data(calibrator.compute_data(), ranges)


class _Reader:
    """Hands inputs to `onnxruntime.quantization` one after the other."""

    def __init__(self, examples: Sequence[Arrays]) -> None:
        self._left = iter(examples)

    def get_next(self) -> Arrays | None:
        return next(self._left, None)
