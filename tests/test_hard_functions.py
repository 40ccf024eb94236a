"""Functions of which TVM's own rules make wrong programs, or none."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from helpers.one_operator import one_operator
from helpers.programs import assert_same, first_program, random_candidates
from onnx import TensorProto, helper, numpy_helper

from ansor_mlflow.lowering.lower import lower
from ansor_mlflow.lowering.network import TuningTask

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.target import Target


def programs_of(task: TuningTask, target: Target, space: str, directory: Path) -> list[IRModule]:
    """Some programs of a task in a space."""
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
    shapes = {"a": (1, 4, 16, 8), "b": (1, 4, 8, 16), "seen": (1, 1, 1, 16)}
    constants = {"band": np.tri(16, dtype=bool).reshape(1, 1, 16, 16), "no": np.float32(0), "low": np.float32(-1e4)}
    nodes = [
        helper.make_node("And", ["band", "seen"], ["mask"]),
        helper.make_node("MatMul", ["a", "b"], ["product"]),
        helper.make_node("Where", ["mask", "no", "low"], ["bias"]),
        helper.make_node("Add", ["product", "bias"], ["y"]),
    ]
    types = {"a": TensorProto.FLOAT, "b": TensorProto.FLOAT, "seen": TensorProto.BOOL}
    graph = helper.make_graph(
        nodes,
        "attention",
        [helper.make_tensor_value_info(name, types[name], shape) for name, shape in shapes.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    given = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
    (task,) = (task for task in lower(given, host_target).tasks if "matmul" in task.info.name)
    assert "logical_and" in task.info.name
    for program in programs_of(task, host_target, space, tmp_path):
        assert_same(task.mod, program, host_target)
