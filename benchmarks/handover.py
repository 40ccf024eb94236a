"""What it costs to hand tensors over between TVM and ONNX Runtime, in a network of several parts.

    python benchmarks/handover.py --json result.json

A network of operators that compute next to nothing is compiled in parts that take turns, with tensors of several sizes.
What a call of the model takes beyond the bare calls of the parts' functions and sessions is divided by the tensors that
are handed over.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import click
import numpy as np
import onnx
from onnx import TensorProto, helper
from rich.console import Console
from rich.table import Table

from ansor_mlflow.device import Device
from ansor_mlflow.tensors import NetworkShapes, TensorSpec

_NUM_PAIRS = 4
"""Pairs of parts: a rectifier for TVM, and a branch for ONNX Runtime."""
_CALLS = 300


@click.command(context_settings={"show_default": True})
@click.option("--elements", default="16,4096,262144", help="Sizes of the tensors, in floats.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="File for the figures.")
def main(elements: str, json_file: Path | None) -> None:
    """Time the handing over of tensors between the parts of a network."""
    device = Device.resolve("auto", "auto")
    figures = []
    with tempfile.TemporaryDirectory(prefix="handover-") as scratch:
        for size in map(int, elements.split(",")):
            directory = Path(scratch, str(size))
            directory.mkdir()
            figures.append({"elements": size, **_measure(size, device, directory)})
    table = Table("floats", "handovers", "whole call µs", "parts alone µs", "µs per handover", "copy of one µs")
    for row in figures:
        table.add_row(*(f"{value:.4g}" for value in row.values()))
    Console().print(table)
    if json_file is not None:
        json_file.write_text(json.dumps({"cpu": device.fingerprint.cpu_model, "sizes": figures}, indent=1))


def _measure(size: int, device: Device, directory: Path) -> dict[str, float]:
    from tvm import relax, runtime

    from ansor_mlflow.graphs import partition
    from ansor_mlflow.lowering import lower
    from ansor_mlflow.model import PartRunner, compile_untuned, open_sessions, part_entries
    from ansor_mlflow.model.parts import as_array  # for the bare calls

    with mock.patch(f"{partition.__module__}.MIN_FLOPS", 0.0):
        lowered = lower(_network(size), device.target)
    parts = part_entries(lowered)
    assert len(parts) == 2 * _NUM_PAIRS, [str(part) for part in parts]
    compile_untuned(lowered, device.target, directory / "model.so")
    functions = relax.VirtualMachine(runtime.load_module(str(directory / "model.so")), runtime.cpu())
    sessions = open_sessions(directory, parts, device.num_threads)
    spec = TensorSpec("x", (size,), "float32")
    network = NetworkShapes((spec,), (replace(spec, name=parts[-1].outputs[0]),))
    whole = PartRunner(parts, functions, sessions, network, runtime.cpu())
    tensor = runtime.tensor(np.ones(size, np.float32))
    array = as_array(tensor)
    feeds = {name: _feed(session) for name, session in sessions.items()}

    def alone() -> None:
        for part in parts:
            if part.runs_in == "tvm":
                functions[part.name](tensor)
            else:
                sessions[part.name].run(part.outputs, feeds[part.name])

    times = _medians({"whole": lambda: whole(tensor), "alone": alone, "copy": array.copy})
    handovers = sum(len(part.inputs) for part in parts[1:])
    return {
        "handovers": handovers,
        "whole_us": times["whole"],
        "alone_us": times["alone"],
        "handover_us": (times["whole"] - times["alone"]) / handovers,
        "copy_us": times["copy"],
    }


def _feed(session: Any) -> dict[str, np.ndarray]:
    """Ones for the inputs of a session: floats, and the flag of a branch."""
    dtypes = {"tensor(float)": np.float32, "tensor(bool)": np.bool_}
    return {value.name: np.ones(value.shape, dtypes[value.type]) for value in session.get_inputs()}


def _medians(calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """The median microseconds of each, called in turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(_CALLS):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - start) * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def _network(size: int) -> onnx.ModelProto:
    """X → Relu → If(x₀ > 0: itself, else its negative) → Relu → …"""
    first = helper.make_tensor("zero", TensorProto.INT64, [1], [0])
    nodes, tensor = [], "x"
    for number in range(_NUM_PAIRS):
        names = [f"{tensor}{suffix}" for suffix in ("_relu", "_first", "_scalar", "_flag", f"_{number}")]
        rectified, picked, scalar, flag, branched = names
        outputs = helper.make_tensor_value_info("o", TensorProto.FLOAT, [size])
        branches = {
            key: helper.make_graph([helper.make_node(op, [rectified], ["o"])], key, [], [outputs])
            for key, op in (("then_branch", "Identity"), ("else_branch", "Neg"))
        }
        nodes += [
            helper.make_node("Relu", [tensor], [rectified]),
            helper.make_node("Gather", [rectified, "zero"], [picked]),
            helper.make_node("Squeeze", [picked], [scalar]),
            helper.make_node("Cast", [scalar], [flag], to=TensorProto.BOOL),
            helper.make_node("If", [flag], [branched], **branches),
        ]
        tensor = branched
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [size]) for name in ("x", tensor)]
    graph = helper.make_graph(nodes, "handover", values[:1], values[1:], [first])
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])


if __name__ == "__main__":
    main()
