"""What passes through the caches between two calls of a kernel that is timed."""

from __future__ import annotations

import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ansor_mlflow.workers.measure import CacheInterference, RestOfNetwork

MIB = 2**20


@pytest.mark.parametrize(
    ("num_bytes", "passing"), [(0, 0), (5 * MIB, 5 * MIB), (64 * MIB, 64 * MIB), (600 * MIB, 64 * MIB)]
)
def test_as_much_passes_as_the_network_has_within_bounds(num_bytes: int, passing: int) -> None:
    assert RestOfNetwork(num_bytes=num_bytes, seconds=0).passing_bytes == passing


@pytest.mark.parametrize(("seconds", "passing"), [(0, 0), (0.003, 0.003), (0.06, 0.01)])
def test_as_much_time_passes_as_the_network_takes_within_bounds(seconds: float, passing: float) -> None:
    rest = RestOfNetwork(num_bytes=0, seconds=seconds)
    assert rest.passing_s == passing
    interference = CacheInterference(rest, 1)
    started = time.perf_counter()
    interference.run([])
    assert passing <= time.perf_counter() - started


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
def test_activations_are_written_and_stay_numbers_of_the_same_kind(dtype: Any, num_threads: int) -> None:
    import tvm

    values = np.linspace(1, 2, 4096).astype(dtype)
    tensor = tvm.runtime.tensor(values)
    interference = CacheInterference(RestOfNetwork(num_bytes=MIB, seconds=0), num_threads)
    memory = interference.memory_of([tensor])
    interference.run(memory)
    once = tensor.numpy()
    assert np.mean(once != values) >= 0.4
    assert np.all((np.abs(once.astype(np.float64)) >= 0.9) & (np.abs(once.astype(np.float64)) <= 2.1))
    interference.run(memory)
    np.testing.assert_array_equal(tensor.numpy(), values)


def test_indices_and_what_is_smaller_than_a_vector_stay_as_they_are() -> None:
    import tvm

    tensors = [tvm.runtime.tensor(np.arange(64, dtype=dtype)) for dtype in ("int64", "int32", "int8")]
    small = tvm.runtime.tensor(np.ones(3, np.float32))
    assert CacheInterference(RestOfNetwork(num_bytes=0, seconds=0), 2).memory_of([*tensors, small]) == []


def test_all_of_the_rest_is_read_each_time() -> None:
    """Each element of it is 1: the sums are the number of times that one was read."""
    interference = CacheInterference(RestOfNetwork(num_bytes=MIB, seconds=0), 2)
    for _ in range(3):
        interference.run([])
    assert interference.num_read == 3 * MIB // 4
