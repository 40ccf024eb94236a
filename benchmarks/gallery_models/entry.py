"""What the gallery knows about a model before anybody has made it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class GalleryModel:
    """A model with random weights, and how an exporter writes it."""

    name: str
    family: str
    """Group in the table, such as "classification"."""
    exporter: str
    """What writes the ONNX file, such as "torch" (traced), "torch dynamo" or "skl2onnx"."""
    opset: int
    packages: tuple[str, ...]
    """Modules that the export imports."""
    write: Callable[[Path], None]
    """Writes the ONNX file; imports `packages` when it is called, and not before."""
    input_shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Sizes for inputs with dynamic axes; empty where the file itself has static ones."""

    def export(self, directory: Path) -> Path:
        """Writes `<name>.onnx` and, beside it, what the benchmark has to know as `<name>.json`.

        Returns:
            The ONNX file, which appears only when it is whole.
        """
        directory.mkdir(parents=True, exist_ok=True)
        unfinished = directory / f".{self.name}.onnx"
        self.write(unfinished)
        about = {"family": self.family, "exporter": self.exporter, "opset": self.opset}
        shapes = {name: list(shape) for name, shape in self.input_shapes.items()}
        (directory / f"{self.name}.json").write_text(json.dumps({**about, "input_shapes": shapes}, indent=1) + "\n")
        return unfinished.rename(directory / f"{self.name}.onnx")
