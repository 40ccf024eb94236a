"""Neither an index outside of its tensor nor a function that TVM's own rules make wrong gives a wrong answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime
import pytest
from helpers.exports import make_model, tensor
from helpers.one_operator import one_operator
from helpers.programs import assert_same, first_program, random_candidates
from helpers.small_networks import small_shapes
from onnx import TensorProto, helper, numpy_helper

from ansor_mlflow.device.targets import resolve_target
from ansor_mlflow.lowering.lower import lower
from ansor_mlflow.lowering.network import TuningTask
from ansor_mlflow.measuring.timing import call_once
from ansor_mlflow.networks.families.dense import VOCABULARY_SIZE
from ansor_mlflow.networks.load import load_network
from ansor_mlflow.processes import in_child_process
from ansor_mlflow.tensors import random_inputs

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.target import Target

FAR = 2**40
"""Far enough to be outside of the process's memory."""

Inputs = list[np.ndarray]


def untuned_calls(cases: list[tuple[onnx.ModelProto, list[Inputs]]]) -> Callable[[], list[list[Inputs]]]:
    """Compiles networks; the call gives the outputs of each for each of its inputs."""
    import tvm

    target = resolve_target("llvm", 1)

    def run(model: onnx.ModelProto, inputs: list[Inputs]) -> list[Inputs]:
        machine = tvm.relax.VirtualMachine(tvm.compile(lower(model, target).mod, target), tvm.cpu())
        outputs = [machine["main"](*map(tvm.runtime.tensor, arrays)) for arrays in inputs]
        return [[output.numpy() for output in (list(o) if len(model.graph.output) > 1 else [o])] for o in outputs]

    return lambda: [run(*case) for case in cases]


def run_in_child(cases: list[tuple[onnx.ModelProto, list[Inputs]]]) -> list[list[Inputs]]:
    """A process that reads foreign memory may crash."""
    return in_child_process(call_once, partial(untuned_calls, cases))


def run_onnxruntime(model: onnx.ModelProto, inputs: Inputs) -> Inputs:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, dict(zip((i.name for i in session.get_inputs()), inputs, strict=True)))


@pytest.mark.nightly
def test_a_token_that_is_not_in_the_vocabulary_makes_the_output_nan() -> None:
    network = load_network("bert-tiny", input_shapes=small_shapes("bert-tiny"))

    def with_token(token: int) -> Inputs:
        inputs = random_inputs(network.inputs, seed=0)
        inputs["input_ids"][0, 3] = token
        return list(inputs.values())

    known = [0, VOCABULARY_SIZE - 1, -1, -VOCABULARY_SIZE]
    unknown = [VOCABULARY_SIZE, -VOCABULARY_SIZE - 1, FAR, -FAR]
    (results,) = run_in_child([(network.model, [with_token(token) for token in known + unknown])])
    for token, outputs in zip(known + unknown, results, strict=True):
        if token in unknown:
            assert all(np.isnan(output).all() for output in outputs)
            continue
        for ours, theirs in zip(outputs, run_onnxruntime(network.model, with_token(token)), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@dataclass(frozen=True)
class Case:
    """An operator on a constant table of 5 rows and 3 columns."""

    op_type: str
    inside: Any
    outside: Any
    nearest: Any
    """Indices inside that `outside` is taken for; None where it gives NaN."""
    axis: int | None = None
    dtype: str = "float32"

    def inputs(self, indices: Any) -> Inputs:
        """Indices and, for a scatter, what it writes."""
        arrays = [np.array(indices)]
        if self.op_type.startswith("Scatter"):
            of_rows = (len(indices), *(5, 3)[arrays[0].shape[-1] :])
            arrays.append(np.full(arrays[0].shape if self.axis is not None else of_rows, -1, self.dtype))
        return arrays

    def model(self) -> onnx.ModelProto:
        table = np.arange(15).reshape(5, 3).astype(self.dtype)
        arrays = self.inputs(self.inside)
        inputs = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
            for name, array in zip(("indices", "updates"), arrays, strict=False)
        ]
        attributes = {} if self.axis is None else {"axis": self.axis}
        node = helper.make_node(self.op_type, ["table", *(value.name for value in inputs)], ["y"], **attributes)
        output = helper.make_tensor_value_info("y", helper.np_dtype_to_tensor_dtype(table.dtype), None)
        graph = helper.make_graph([node], "indexing", inputs, [output], [numpy_helper.from_array(table, "table")])
        return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])


_ELEMENTS = ([[0, 4, -1], [-5, 2, 3]], [[5, -6, FAR], [-FAR, 0, 0]], [[4, 0, 4], [0, 0, 0]])
_COORDINATES = ([[0, 2], [-1, -3], [4, 0]], [[5, 0], [0, -4], [FAR, FAR]], [[4, 0], [0, 0], [4, 2]])
CASES = {
    "floats": Case("Gather", [0, 4, -1, -5], [5, -6, FAR, -FAR], None),
    "integers": Case("Gather", [0, 4, -1, -5], [5, -6, FAR, -FAR], [4, 0, 4, 0], dtype="int8"),
    "columns": Case("Gather", [0, 2, -1, -3], [3, -4, FAR, -FAR], None, axis=1),
    "elements": Case("GatherElements", *_ELEMENTS, axis=0),
    "coordinates": Case("GatherND", *_COORDINATES),
    "scattered elements": Case("ScatterElements", *_ELEMENTS, axis=0),
    "scattered coordinates": Case("ScatterND", *_COORDINATES),
    "scattered rows": Case("ScatterND", [[0], [-1], [3]], [[5], [-6], [FAR]], [[4], [0], [4]]),
}


@pytest.fixture(scope="module")
def outputs() -> dict[str, list[np.ndarray]]:
    """By name of the case, the output for indices inside and for those outside, from one process."""
    cases = [(case.model(), [case.inputs(case.inside), case.inputs(case.outside)]) for case in CASES.values()]
    results = run_in_child(cases)
    return {name: [output for (output,) in result] for name, result in zip(CASES, results, strict=True)}


@pytest.mark.system
@pytest.mark.parametrize("name", CASES)
def test_indices_inside_are_onnxs(name: str, outputs: dict[str, list[np.ndarray]]) -> None:
    case = CASES[name]
    (expected,) = run_onnxruntime(case.model(), case.inputs(case.inside))
    np.testing.assert_array_equal(outputs[name][0], expected)


@pytest.mark.parametrize("name", CASES)
def test_an_index_outside_gives_nan_or_counts_as_the_nearest(name: str, outputs: dict[str, list[np.ndarray]]) -> None:
    case = CASES[name]
    if case.nearest is None:
        assert np.isnan(outputs[name][1]).all()
        return
    (expected,) = run_onnxruntime(case.model(), case.inputs(case.nearest))
    np.testing.assert_array_equal(outputs[name][1], expected)


def test_constant_indices_cost_nothing() -> None:
    """Those of words and token types are checked, that of the first token is not."""
    network = load_network("bert-tiny", input_shapes=small_shapes("bert-tiny"))
    gathers = [task for task in lower(network.model, resolve_target("llvm", 1)).tasks if "take" in task.info.name]
    assert sorted("nan" in task.mod.script() for task in gathers) == [False, True, True]


def programs_of(task: TuningTask, target: Target, space: str, directory: Path) -> list[IRModule]:
    if space == "sketches":
        return [first_program(task, target)]
    return [candidate.sch.mod for candidate in random_candidates(task, target, directory)]


@pytest.mark.parametrize("space", ["sketches", "metaschedule"])
def test_a_constant_that_is_read_in_parts_stays_whole(space: str, host_target: Target, tmp_path: Path) -> None:
    """TVM packs the coordinates of an index as if the first one were all that is read of them."""
    places = np.stack([np.zeros((1, 1, 1, 64), np.int64), np.arange(64).reshape(1, 1, 1, 64)], axis=-1)
    data = {"x": np.arange(64).reshape(1, 64).astype(np.float32)}
    given = one_operator("GatherND", data, {"places": places})
    (task,) = (task for task in lower(given, host_target).tasks if "gather_nd" in task.info.name)
    for program in programs_of(task, host_target, space, tmp_path):
        assert_same(task.mod, program, host_target, arrays=[data["x"], places])


@pytest.mark.parametrize("space", ["sketches", "metaschedule"])
def test_what_only_the_end_of_a_product_needs_may_come_before_it(
    space: str, host_target: Target, tmp_path: Path
) -> None:
    """As the mask of an attention, of which TVM's rules make no program."""
    inputs = [tensor("a", (1, 4, 16, 8)), tensor("b", (1, 4, 8, 16)), tensor("seen", (1, 1, 1, 16), TensorProto.BOOL)]
    constants = {"band": np.tri(16, dtype=bool).reshape(1, 1, 16, 16), "no": np.float32(0), "low": np.float32(-1e4)}
    nodes = [
        helper.make_node("And", ["band", "seen"], ["mask"]),
        helper.make_node("MatMul", ["a", "b"], ["product"]),
        helper.make_node("Where", ["mask", "no", "low"], ["bias"]),
        helper.make_node("Add", ["product", "bias"], ["y"]),
    ]
    given = make_model(nodes, inputs, [tensor("y", None)], constants)
    (task,) = (task for task in lower(given, host_target).tasks if "matmul" in task.info.name)
    assert "logical_and" in task.info.name
    for program in programs_of(task, host_target, space, tmp_path):
        assert_same(task.mod, program, host_target)
