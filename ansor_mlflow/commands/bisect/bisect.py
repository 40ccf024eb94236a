"""What a bisection found."""

from __future__ import annotations

import logging
import shlex
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import pydantic_core

from ansor_mlflow.commands.bisect.search import Comparison, CuttableGraph, Laboratory, Search
from ansor_mlflow.device import Device
from ansor_mlflow.errors import CorrectnessError, UserInputError
from ansor_mlflow.files import scratch_directory, write_text
from ansor_mlflow.foreign import Report, Reported, Table, for_shell
from ansor_mlflow.measuring import Deviation, choose_examples, require_examples, tolerance_for
from ansor_mlflow.model import require_linker
from ansor_mlflow.networks import write_onnx
from ansor_mlflow.parameters import BisectOptions
from ansor_mlflow.tensors import Arrays, all_sizes
from ansor_mlflow.tracking import describe_environment, network_of

MODEL_FILE, INPUTS_FILE, EXPECTED_FILE, ACTUAL_FILE = "model.onnx", "inputs.npz", "expected.npz", "actual.npz"
REPORT_FILE = "bisection.json"


@dataclass(frozen=True, kw_only=True)
class WrongTensor:
    """The first tensor of a network that is not what ONNX Runtime computes, and the smallest model that shows it."""

    tensor: str
    operator: str
    """The operator that makes it, such as "Softmax"."""
    node: str
    """The name of its node; empty where it has none."""
    place: int
    """The number of nodes before it in the graph."""
    shape: tuple[int, ...]
    """Its shape in ONNX Runtime."""
    actual_shape: tuple[int, ...]
    """Its shape in the compiled network."""
    dtype: str
    max_abs_error: float
    max_rel_error: float
    index: tuple[int, ...]
    """Where in the tensor the largest difference is; empty where the shapes differ."""
    actual: float | None
    """The value there of the compiled network."""
    expected: float | None
    """The value there of ONNX Runtime."""
    operators: tuple[str, ...]
    """The operators of the smallest model, in order."""
    directory: str
    """Where the smallest model is, with its inputs and both outputs."""
    command: str
    """Command line that compares the smallest model."""


@dataclass(frozen=True, kw_only=True)
class Bisection(Reported):
    """Whether a network is compiled rightly, and if not, where it goes wrong."""

    network: str
    target: str
    """Short description of the target, such as "llvm znver4 ×2"."""
    num_nodes: int
    tolerance: float
    max_abs_error: float
    """Of the outputs of the whole network."""
    max_rel_error: float
    wrong: WrongTensor | None
    """None where the outputs do not differ by more than the tolerance."""
    note: str
    """What to know of the comparison; empty where there is nothing."""

    def require_equal(self) -> None:
        """Checks that nothing differs.

        Raises:
            CorrectnessError: An output does.
        """
        if self.wrong is not None:
            raise CorrectnessError(
                f"the outputs of {self.network} differ from ONNX Runtime's by max_rel_error={self.max_rel_error:.3g}, "
                f"allowed is {self.tolerance:g}; the first wrong tensor is {self.wrong.tensor!r} of "
                f"{self.wrong.operator}: report it with what is in {self.wrong.directory}"
            )

    def report(self) -> Report:
        """What was found, where the smallest model is, and how to compare it."""
        wrong, notes = self.wrong, [self.note] if self.note else []
        found = notes if wrong else ["nothing differs from ONNX Runtime", *notes]
        where = {"model, inputs and outputs": str(wrong.directory), "compare it": wrong.command} if wrong else {}
        return Report(f"{self.network} for {self.target}", [Table(self._rows()), *found], where)

    def _rows(self) -> list[tuple[str, str]]:
        rows = [
            ("nodes", str(self.num_nodes)),
            ("outputs, largest relative error", f"{self.max_rel_error:.3g}, allowed is {self.tolerance:g}"),
        ]
        wrong = self.wrong
        if wrong is None:
            return rows
        node = f" (node {wrong.node!r})" if wrong.node else ""
        return [
            *rows,
            ("first wrong tensor", f"{wrong.tensor}: {wrong.dtype} {wrong.shape}"),
            ("its operator", f"{wrong.operator}{node}, after {wrong.place} others"),
            *_differences(wrong),
            ("smallest model", f"{len(wrong.operators)} nodes: {_shortened(wrong.operators)}"),
        ]


def _differences(wrong: WrongTensor) -> list[tuple[str, str]]:
    if wrong.actual_shape != wrong.shape:
        return [("its shape", f"{wrong.actual_shape}, in ONNX Runtime {wrong.shape}")]
    return [
        ("its largest error", f"{wrong.max_abs_error:.3g}, relative {wrong.max_rel_error:.3g}"),
        ("where, and the values", f"{wrong.index}: {wrong.actual:.9g}, in ONNX Runtime {wrong.expected:.9g}"),
    ]


def _shortened(operators: tuple[str, ...], most: int = 8) -> str:
    return ", ".join(operators if len(operators) <= most else ("…", *operators[-most:]))


def require_own_directory(directory: Path) -> None:
    """Checks that nothing of somebody else is in the way.

    Raises:
        UserInputError: Something is.
    """
    is_free = not directory.exists() or (directory.is_dir() and not any(directory.iterdir()))
    if not is_free and not (directory / REPORT_FILE).is_file():
        raise UserInputError(
            f"output={directory}: it exists, and bisect did not write it; give the path of a new directory"
        )


def save(directory: Path, model: onnx.ModelProto, inputs: Arrays, expected: Arrays, actual: Arrays) -> None:
    """Writes a model with its inputs, and what ONNX Runtime and the compiled model make of them."""
    directory.mkdir(parents=True, exist_ok=True)
    write_onnx(model, directory / MODEL_FILE)
    for name, arrays in ((INPUTS_FILE, inputs), (EXPECTED_FILE, expected), (ACTUAL_FILE, actual)):
        _save_arrays(directory / name, arrays)


def save_report(directory: Path, bisection: Bisection, environment: Mapping[str, object]) -> None:
    """Writes what was found, and with which versions, as JSON."""
    fields = {"bisection": bisection, "environment": environment}
    write_text(directory / REPORT_FILE, pydantic_core.to_json(fields, indent=1, inf_nan_mode="null").decode())


def _save_arrays(path: Path, arrays: Arrays) -> None:
    """Does what `numpy.savez` does, which takes no array that is called "file"."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)


_log = logging.getLogger("ansor_mlflow")
_KEPT = ("tolerance", "layout", "dtype", "pad_channels", "target", "num_threads", "output")
"""Parameters of the command line that compares the smallest model."""


def bisect_network(options: BisectOptions) -> Bisection:
    """Compiles a network without tuning, and looks for the operator that is compiled wrongly.

    If the outputs of the whole network differ from those of ONNX Runtime, the shortest beginning of the graph is
    searched whose outputs differ. Of its last node a model is made, with the inputs that ONNX Runtime computes; where
    that is right, of as many nodes before it as it takes. The smallest model that shows a difference is saved with its
    inputs.

    Raises:
        AnsorMlflowError: The options are not usable, or the whole network cannot be compiled or run.
    """
    require_examples(options.data)
    directory = Path(options.output)
    require_own_directory(directory)
    network = network_of(options)
    if network.sizes:
        raise UserInputError(f"input_shapes gives {network.name} several sizes; give the one whose outputs are wrong")
    device = Device.resolve(options.target, options.num_threads)
    device.require_measurable_here()
    require_linker()
    with scratch_directory() as scratch:
        file = Path(scratch, "network.onnx")
        write_onnx(network.model, file)
        examples = choose_examples(options.data, all_sizes(network), options.seed, file)
        tolerance = tolerance_for(options.tolerance, file, options.dtype)
        laboratory = Laboratory(device=device, lowering=options.lowering, scratch=Path(scratch))
        _log.info("compiling %s for %s, and comparing it on %d inputs", network.name, device.description, len(examples))
        whole = laboratory.compare(network.model, examples)
        error = Deviation.worst([comparison.worst for comparison in whole])
        bisection = Bisection(
            network=network.name,
            target=device.description,
            num_nodes=len(network.model.graph.node),
            tolerance=tolerance,
            max_abs_error=error.max_abs_error,
            max_rel_error=error.max_rel_error,
            wrong=None,
            note=_note(whole),
        )
        first = next((comparison for comparison in whole if comparison.wrong(tolerance)), None)
        if first is None:
            return bisection
        shown, tensor = Search(CuttableGraph(network.model), laboratory, tolerance, first.inputs).smallest(first)
    save(directory, shown.model, shown.inputs, shown.expected, shown.actual)
    wrong = _described(shown, tensor, network.model.graph.node, directory, _command(options, directory))
    bisection = replace(bisection, wrong=wrong)
    save_report(directory, bisection, describe_environment(device.fingerprint))
    return bisection


def _note(whole: Sequence[Comparison]) -> str:
    outputs = (values for comparison in whole for values in comparison.expected.values())
    if all(np.isfinite(values).all() for values in outputs):
        return ""
    return "ONNX Runtime's outputs hold infinities or NaNs on these inputs; give data= for which they do not"


def _command(options: BisectOptions, directory: Path) -> str:
    kept = {name: text for name, text in options.changed().items() if name in _KEPT}
    files = {"data": str(directory / INPUTS_FILE), **kept}
    flags = (f"--{name.replace('_', '-')} {for_shell(text, name.upper())}" for name, text in files.items())
    return f"ansor-mlflow bisect {shlex.quote(str(directory / MODEL_FILE))} {' '.join(flags)}"


def _described(
    shown: Comparison, tensor: str, nodes: Sequence[onnx.NodeProto], directory: Path, command: str
) -> WrongTensor:
    actual, expected, deviation = shown.actual[tensor], shown.expected[tensor], shown.deviation(tensor)
    is_of_same_shape = actual.shape == expected.shape
    index = shown.largest_difference(tensor) if is_of_same_shape else ()
    place, node = next((place, node) for place, node in enumerate(nodes) if tensor in node.output)
    return WrongTensor(
        tensor=tensor,
        operator=f"{node.domain}.{node.op_type}".lstrip("."),
        node=node.name,
        place=place,
        shape=expected.shape,
        actual_shape=actual.shape,
        dtype=str(expected.dtype),
        max_abs_error=deviation.max_abs_error,
        max_rel_error=deviation.max_rel_error,
        index=index,
        actual=float(actual[index]) if is_of_same_shape else None,
        expected=float(expected[index]) if is_of_same_shape else None,
        operators=tuple(node.op_type for node in shown.model.graph.node),
        directory=str(directory),
        command=command,
    )
