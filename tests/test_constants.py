"""Constants folded in NumPy: the same bits as the kernels of TVM's FoldConstant give."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
from tvm import relax

from ansor_mlflow.lowering.relax_passes import fold_constants_in_numpy

SHAPE = (2, 3, 4)


def floats(dtype: str = "float32", seed: int = 0) -> relax.Expr:
    return relax.const(np.random.default_rng(seed).normal(size=SHAPE).astype(dtype))


def module_of(make_call: Callable[[], relax.Expr]) -> tvm.IRModule:
    """A module whose "main" returns what `make_call` gives."""
    builder = relax.BlockBuilder()
    with builder.function("main", []):
        with builder.dataflow():
            value = builder.emit_output(make_call())
        builder.emit_func_output(value)
    return builder.get()


def folded_value(mod: tvm.IRModule, fold: tvm.ir.transform.Pass) -> np.ndarray:
    """What the module returns, which must be a constant after `fold`."""
    with tvm.target.Target("llvm"):
        mod = relax.transform.CanonicalizeBindings()(fold(mod))
    return mod["main"].body.body.value.numpy()


@pytest.mark.parametrize(
    "make_call",
    [
        pytest.param(lambda: relax.op.permute_dims(floats(), [1, 2, 0]), id="permute_dims"),
        pytest.param(lambda: relax.op.permute_dims(floats("bfloat16"), [0, 2, 1]), id="permute_dims, bfloat16"),
        pytest.param(lambda: relax.op.reshape(floats(), [6, -1]), id="reshape"),
        pytest.param(lambda: relax.op.expand_dims(floats(), [0, -1]), id="expand_dims"),
        pytest.param(lambda: relax.op.astype(floats(), "bfloat16"), id="bfloat16"),
        pytest.param(lambda: relax.op.add(floats(), floats(seed=1)), id="add"),
        pytest.param(lambda: relax.op.subtract(floats(), relax.const(1.5)), id="subtract a scalar"),
        pytest.param(lambda: relax.op.divide(floats(), relax.const(np.zeros(SHAPE, "float32"))), id="divide by zero"),
        pytest.param(lambda: relax.op.sqrt(floats()), id="sqrt, half of it NaN"),
        pytest.param(lambda: relax.op.isnan(relax.const(np.float32([1, np.nan]))), id="isnan"),
        pytest.param(
            lambda: relax.op.where(relax.const(np.array([True, False])), relax.const(1.0), relax.const(2.0)), id="where"
        ),
        pytest.param(lambda: relax.op.less(floats(), floats(seed=1)), id="less"),
        pytest.param(lambda: relax.op.take(floats(), relax.const(np.int64(-1)), 2, mode="wrap"), id="take, wrapped"),
        pytest.param(
            lambda: relax.op.take(floats(), relax.const(np.int64([9, 1])), 1, mode="clip"), id="take, clipped"
        ),
    ],
)
def test_same_bits_as_the_compiled_kernel(make_call: Callable[[], relax.Expr]) -> None:
    mod = module_of(make_call)
    ours = folded_value(mod, fold_constants_in_numpy)
    tvms = folded_value(mod, relax.transform.FoldConstant())
    assert (ours.dtype, ours.shape) == (tvms.dtype, tvms.shape)
    np.testing.assert_array_equal(ours, tvms)  # NaN equals NaN


@pytest.mark.parametrize(
    "make_call",
    [
        pytest.param(lambda: relax.op.exp(floats()), id="another function"),
        pytest.param(
            lambda: relax.op.take(floats(), relax.const(np.int64([9])), 1, mode="nan"), id="take, NaN beyond the end"
        ),
        pytest.param(
            lambda: relax.op.divide(relax.const(np.int32([7])), relax.const(np.int32([2]))),
            id="integers, which NumPy divides into floats",
        ),
    ],
)
def test_what_numpy_computes_otherwise_is_left(make_call: Callable[[], relax.Expr]) -> None:
    mod = module_of(make_call)
    tvm.ir.assert_structural_equal(fold_constants_in_numpy(mod), mod)


def test_what_depends_on_the_input_is_left_and_the_rest_of_a_chain_is_folded() -> None:
    data = relax.Var("data", relax.TensorType(SHAPE, "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [data]):
        scale = builder.emit(relax.op.sqrt(relax.const(4.0)))
        scale = builder.emit(relax.op.add(scale, relax.const(1.0)))
        builder.emit_func_output(builder.emit(relax.op.multiply(data, scale)))
    mod = relax.transform.CanonicalizeBindings()(fold_constants_in_numpy(builder.get()))
    mod = relax.transform.DeadCodeElimination()(mod)
    (block,) = mod["main"].body.blocks
    (binding,) = block.bindings
    assert binding.value.op.name == "relax.multiply"
    assert binding.value.args[1].value.numpy() == 3


def test_what_is_computed_of_a_static_shape_is_a_constant() -> None:
    """As an exporter's Gather of a Shape is imported: the index is brought into the shape's range first."""
    data = relax.Var("data", relax.TensorType(SHAPE, "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [data]):
        shape = builder.emit(relax.op.shape_to_tensor(builder.emit(relax.op.shape_of(data))))
        index, zero, rank = (relax.const(np.int64([value]), "int64") for value in (-1, 0, len(SHAPE)))
        wrapped = builder.emit(relax.op.add(index, rank))
        index = builder.emit(relax.op.where(builder.emit(relax.op.less(index, zero)), wrapped, index))
        builder.emit_func_output(builder.emit(relax.op.take(shape, index, 0, mode="clip")))
    mod = relax.transform.CanonicalizeBindings()(fold_constants_in_numpy(builder.get()))
    np.testing.assert_array_equal(mod["main"].body.body.value.numpy(), [SHAPE[-1]])


def test_a_shape_that_only_a_run_knows_is_left() -> None:
    data = relax.Var("data", relax.TensorType((tvm.tirx.Var("n", "int64"), 3), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [data]):
        shape = builder.emit(relax.op.shape_of(data))
        builder.emit_func_output(builder.emit(relax.op.shape_to_tensor(shape)))
    mod = builder.get()
    tvm.ir.assert_structural_equal(fold_constants_in_numpy(mod), mod)
