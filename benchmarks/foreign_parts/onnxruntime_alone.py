"""A process of `foreign.py`: whether ONNX Runtime computes a file as it is, for one that did not get in.

python benchmarks/foreign_parts/onnxruntime_alone.py model.onnx --parameters '{"input_shapes": {"x": [1, 8]}}'
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
import onnxruntime

_DTYPES = {"tensor(float)": "float32", "tensor(double)": "float64"}
"""Types that ONNX Runtime calls otherwise than NumPy; "tensor(int64)" and the like say it."""


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--parameters", default="{}", help="Those of the network beside its name, as JSON.")
def main(file: Path, parameters: str) -> None:
    """Runs a file once in ONNX Runtime, on seeded floats and integers that are 1; prints the shapes of its outputs."""
    given = json.loads(parameters)
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    shapes = given.get("input_shapes", {})
    sizes = {
        dim: size
        for spec in session.get_inputs()
        for dim, size in zip(spec.shape, shapes.get(spec.name, ()), strict=False)
        if isinstance(dim, str)
    }
    feed = {}
    for spec in session.get_inputs():
        shape = shapes.get(spec.name) or [dim if isinstance(dim, int) else sizes.get(dim, 1) for dim in spec.shape]
        values = given.get("input_values", {}).get(spec.name)
        feed[spec.name] = _values(spec.type, shape) if values is None else np.asarray(values, _dtype(spec.type))
    outputs = session.run(None, feed)
    click.echo(json.dumps({"outputs": [list(np.shape(output)) for output in outputs]}))


def _dtype(kind: str) -> str:
    return _DTYPES.get(kind, kind.removeprefix("tensor(").removesuffix(")"))


def _values(kind: str, shape: Sequence[int]) -> npt.NDArray[Any]:
    dtype = np.dtype(_dtype(kind))
    if dtype.kind == "f":
        return np.random.default_rng(0).standard_normal(shape).astype(dtype)
    return np.ones(shape, dtype)


if __name__ == "__main__":
    main()
