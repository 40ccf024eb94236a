"""Loops whose number of steps is known become their nodes, once for each step; others stay with ONNX Runtime."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import onnx
import pytest
from helpers.one_operator import assert_computes_the_same
from onnx import numpy_helper, parser

from ansor_mlflow.graphs import simplify
from ansor_mlflow.lowering.lower import lower

if TYPE_CHECKING:
    from tvm.target import Target

X = np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)
WEIGHTS = {"w": np.random.default_rng(1).normal(size=(8, 8)).astype(np.float32) / 4}
CELL = "p = MatMul (s, w)  q = Add (p, v)  t = Tanh (q)  out = Identity (t)"
LOOPS = {
    "as often as it says": f"""
        y, all = Loop (five, , first) <body = step (int64 i, bool go, float[1, 8] s)
            => (bool goes, float[1, 8] t, float[1, 8] out) {{
            goes = Identity (go)  v = Gather (x, i)  {CELL} }}>""",
    "while a counter is small": f"""
        n, y, all = Loop (, yes, zero, first) <body = step (int64 i, bool go, int64 n, float[1, 8] s)
            => (bool goes, int64 m, float[1, 8] t, float[1, 8] out)
            <int64 one = {{1}}, int64 end = {{5}}> {{
            m = Add (n, one)  goes = Less (m, end)  v = Gather (x, n)  {CELL} }}>""",
    "at most as often as it says": f"""
        n, y, all = Loop (hundred, yes, zero, first) <body = step (int64 i, bool go, int64 n, float[1, 8] s)
            => (bool goes, int64 m, float[1, 8] t, float[1, 8] out)
            <int64 two = {{2}}, int64 end = {{5}}> {{
            m = Add (i, two)  goes = Less (m, end)  v = Gather (x, n)  {CELL} }}>""",
    "with a branch that it decides": f"""
        y, all = Loop (five, yes, first) <body = step (int64 i, bool go, float[1, 8] s)
            => (bool goes, float[1, 8] t, float[1, 8] out) {{
            goes = Identity (go)  odd = Mod (i, two)  is_odd = Cast <to = 9> (odd)  u = Gather (x, i)
            v = If (is_odd) <then_branch = yes () => (float[1, 8] a) {{ a = Neg (u) }},
                             else_branch = no () => (float[1, 8] b) {{ b = Add (u, s) }}>
            {CELL} }}>""",
    "within another one": """
        y, all = Loop (two, yes, first) <body = outer (int64 k, bool go, float[1, 8] r)
            => (bool goes, float[1, 8] last, float[1, 8] out) {
            goes = Identity (go)
            last, every = Loop (five, , r) <body = inner (int64 i, bool on, float[1, 8] s)
                => (bool goes_on, float[1, 8] t, float[1, 8] z) {
                goes_on = Identity (on)  v = Gather (x, i)
                p = MatMul (s, w)  q = Add (p, v)  t = Tanh (q)  z = Identity (q) }>
            out = Gather (every, two) }>""",
    "over rows": f"""
        y, all = Scan <num_scan_inputs = 1, body = step (float[1, 8] s, float[8] v)
            => (float[1, 8] t, float[1, 8] out) {{ {CELL} }}> (first, x)""",
    "backwards over columns": """
        y, all = Scan <num_scan_inputs = 2, scan_input_axes = [1, 1], scan_input_directions = [1, 0],
            scan_output_axes = [1], scan_output_directions = [1],
            body = step (float[5] s, float[5] a, float[5] b) => (float[5] t, float[5] out) {
            p = Mul (a, b)  t = Add (s, p)  out = Sub (a, b) }> (fives, x, x)""",
}
"""What makes "y" and "all" of "x"."""
LOOPS["once"] = LOOPS["while a counter is small"].replace("end = {5}", "end = {-9}")


def model_of(text: str, opset: int = 18) -> onnx.ModelProto:
    model = parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : {opset}]>
        main (float[5, 8] x) => (y, all)
        <int64 zero = {{0}}, int64 two = {{2}}, int64 five = {{5}}, int64 hundred = {{100}}, bool yes = {{1}},
         float[5] fives = {{1, 2, 3, 4, 5}}>
        {{ row = Constant <value = int64[1] {{3}}> ()  first = Gather (x, row) {text} }}""")
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in WEIGHTS.items())
    for output in model.graph.output:
        output.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    return model


def operators_of(model: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in simplify(model, "network").graph.node)


@pytest.mark.parametrize("case", LOOPS)
@pytest.mark.parametrize("opset", [11, 18])
def test_known_steps_are_written_out(case: str, opset: int, host_target: Target) -> None:
    lowered = assert_computes_the_same(model_of(LOOPS[case], opset), host_target, {"x": X})
    assert not lowered.parts  # all of it is TVM's


def test_steps_share_the_task_of_their_product(host_target: Target) -> None:
    lowered = lower(model_of(LOOPS["as often as it says"]), host_target)
    (product,) = [task.info for task in lowered.tasks if "matmul" in task.info.name]
    assert product.weight == 5


@pytest.mark.parametrize(
    ("case", "old", "new"),
    [
        pytest.param("as often as it says", "five, , first", "count, , first", id="a number that an input gives"),
        pytest.param("as often as it says", "Identity (go)", "Less (total, end)", id="a condition on the data"),
        pytest.param("while a counter is small", "end = {5}", "end = {900}", id="too many steps"),
        pytest.param("as often as it says", "five, , first", "zero, , first", id="no step"),
    ],
)
def test_others_stay(case: str, old: str, new: str) -> None:
    assert old in LOOPS[case]
    before = "sum = ReduceSum <keepdims = 0> (x)  count = Cast <to = 7> (sum)  end = Constant <value_float = 9.0> ()"
    text = before + LOOPS[case].replace(old, new)
    text = text.replace("goes = Less (total", "total = ReduceSum <keepdims = 0> (s)  goes = Less (total")
    assert operators_of(model_of(text))["Loop"] == 1


def test_a_counter_that_grows_is_left_alone() -> None:
    """A hostile file may double it in each step."""
    text = """
        n, y = Loop (hundred, yes, row, first) <body = step (int64 i, bool go, int64[m] n, float[1, 8] s)
            => (bool goes, int64[k] doubled, float[1, 8] t) <int64 end = {99999999999}> {
            doubled = Concat <axis = 0> (n, n)  size = Size (doubled)  goes = Less (size, end)  t = Tanh (s) }>
        all = Identity (y)"""
    assert operators_of(model_of(text))["Loop"] == 1


@pytest.mark.parametrize(("lengths", "is_known"), [([5, 5, 5], True), ([3, 3, 3], True), ([1, 2, 3], False)])
def test_sequences_of_one_length_are_reversed(lengths: list[int], is_known: bool, host_target: Target) -> None:
    model = parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : 18]>
        main (float[5, 3, 4] x) => (float[5, 3, 4] y)
        <int64[3] lengths = {{{", ".join(map(str, lengths))}}}>
        {{ y = ReverseSequence <time_axis = 0, batch_axis = 1> (x, lengths) }}""")
    if is_known:
        data = {"x": np.random.default_rng(2).normal(size=(5, 3, 4)).astype(np.float32)}
        assert not assert_computes_the_same(model, host_target, data).parts
    else:
        assert [part.graph.runs_in for part in lower(model, host_target).parts] == ["onnxruntime"]
