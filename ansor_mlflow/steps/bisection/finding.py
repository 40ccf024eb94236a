"""What a bisection found."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pydantic_core

from ansor_mlflow.errors import CorrectnessError, UserInputError
from ansor_mlflow.files import write_text
from ansor_mlflow.foreign import Report, Reported, Table
from ansor_mlflow.networks import write_onnx
from ansor_mlflow.tensors import Arrays

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
