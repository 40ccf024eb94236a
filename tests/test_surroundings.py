"""What passes through the caches between two calls of a kernel that is timed."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ansor_mlflow.tuning.workers.surroundings import Surroundings, passing_bytes

MIB = 2**20


@pytest.mark.parametrize(
    ("network_bytes", "passing"), [(None, 0), (0, 0), (5 * MIB, 5 * MIB), (64 * MIB, 64 * MIB), (600 * MIB, 64 * MIB)]
)
def test_as_much_passes_as_the_network_has_within_bounds(network_bytes: int | None, passing: int) -> None:
    assert passing_bytes(network_bytes) == passing


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
def test_activations_are_written_and_stay_numbers_of_the_same_kind(dtype: Any, num_threads: int) -> None:
    import tvm

    values = np.linspace(1, 2, 4096).astype(dtype)
    tensor = tvm.runtime.tensor(values)
    surroundings = Surroundings(MIB, num_threads)
    memory = surroundings.memory_of([tensor])
    surroundings.run(memory)
    once = tensor.numpy()
    assert np.mean(once != values) >= 0.4
    assert np.all((np.abs(once.astype(np.float64)) >= 0.9) & (np.abs(once.astype(np.float64)) <= 2.1))
    surroundings.run(memory)
    np.testing.assert_array_equal(tensor.numpy(), values)


def test_indices_and_what_is_smaller_than_a_vector_stay_as_they_are() -> None:
    import tvm

    tensors = [tvm.runtime.tensor(np.arange(64, dtype=dtype)) for dtype in ("int64", "int32", "int8")]
    small = tvm.runtime.tensor(np.ones(3, np.float32))
    assert Surroundings(0, 2).memory_of([*tensors, small]) == []


def test_all_of_the_rest_is_read_each_time() -> None:
    """Each element of it is 1: the sums are the number of times that one was read."""
    surroundings = Surroundings(MIB, 2)
    for _ in range(3):
        surroundings.run([])
    assert surroundings.num_read == 3 * MIB // 4
