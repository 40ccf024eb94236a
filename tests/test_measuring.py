"""Builders and runners, real and fake, keep one contract; and what passes through the caches between two calls."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from helpers.fakes import FakeBuilder, FakeRunner

from ansor_mlflow.device.threads import available_cpus
from ansor_mlflow.processes import Outcome
from ansor_mlflow.workers.builder import Builder, LocalBuilder
from ansor_mlflow.workers.measure import CacheInterference, MeasureSettings, RestOfNetwork, RunJob
from ansor_mlflow.workers.runner import LocalRunner, Runner

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.target import Target

REPEAT = 2
TIMEOUT_S = 60.0
TENSORS = (("TENSOR", "float32", (64,)),) * 2


def add(number: Any) -> IRModule:
    from tvm import IRModule, te

    data = te.placeholder((64,), name="data")
    result = te.compute((64,), lambda i: data[i] + number, name="result")
    return IRModule({"main": te.create_prim_func([data, result])})


def unbuildable() -> IRModule:
    from tvm.tirx import Var

    return add(Var("undefined", "float32"))


def settings(num_threads: int) -> MeasureSettings:
    return MeasureSettings(
        number=1, repeat=REPEAT, min_repeat_ms=0, cache_flush=False, num_threads=num_threads, timeout_s=TIMEOUT_S
    )


def local_builder(target: Target) -> LocalBuilder:
    return LocalBuilder(target, max_workers=2, timeout_s=TIMEOUT_S)


@pytest.fixture(params=["fake", "local"])
def builder(request: pytest.FixtureRequest, host_target: Target) -> Iterator[Builder]:
    """A builder to which every test gives an unbuildable module second. The fake has to be told that it is."""
    failure: Outcome[Path] = Outcome(failure="failed", error="undefined variable")
    builder = FakeBuilder({2: failure}) if request.param == "fake" else local_builder(host_target)
    yield builder
    builder.close()


@pytest.fixture(scope="module", params=["fake", "alone", "in a network"])
def library_and_runner(request: pytest.FixtureRequest, host_target: Target) -> Iterator[tuple[Path, Runner]]:
    fake = request.param == "fake"
    builder: Builder = FakeBuilder() if fake else local_builder(host_target)
    measure = (
        settings(1)
        if request.param == "alone"
        else replace(settings(1), rest=RestOfNetwork(num_bytes=2**20, seconds=1e-4))
    )
    runner: Runner = FakeRunner(repeat=REPEAT) if fake else LocalRunner(measure)
    (library,) = builder.build([add(1)])
    assert library.value is not None
    yield library.value, runner
    runner.close()
    builder.close()


class TestBuilder:
    def test_a_library_for_every_module_and_a_failure_fails_alone(self, builder: Builder) -> None:
        first, second, third = builder.build([add(1), unbuildable(), add(3)])
        assert first.value is not None
        assert third.value is not None
        assert first.value != third.value
        assert first.value.is_file()
        assert third.value.is_file()
        assert first.failure == first.error == third.failure == third.error == ""
        assert second.value is None
        assert second.failure == "failed"
        assert second.error

    def test_closing_removes_the_libraries(self, builder: Builder) -> None:
        (outcome,) = builder.build([add(1)])
        builder.close()
        assert outcome.value is not None
        assert not outcome.value.parent.exists()


class TestRunner:
    def test_times_for_every_library_and_a_failure_fails_alone(
        self, library_and_runner: tuple[Path, Runner], tmp_path: Path
    ) -> None:
        library, runner = library_and_runner
        (tmp_path / "damaged.so").write_bytes(b"not a library")
        paths = [library, tmp_path / "damaged.so", tmp_path / "missing.so", library]
        first, damaged, missing, last = runner.run([RunJob(path, TENSORS) for path in paths])
        for outcome in (first, last):
            assert outcome.value is not None
            assert len(outcome.value) == REPEAT
            assert all(0 < run_s < 1 for run_s in outcome.value)
            assert outcome.failure == outcome.error == ""
        for outcome in (damaged, missing):
            assert outcome.value is None
            assert outcome.failure == "failed"
            assert outcome.error


def test_built_libraries_compute_their_own_modules(host_target: Target) -> None:
    import tvm

    builder = local_builder(host_target)
    outcomes = builder.build([add(number) for number in range(4)])
    for number, outcome in enumerate(outcomes):
        result = tvm.runtime.tensor(np.zeros(64, "float32"))
        tvm.runtime.load_module(str(outcome.value))["main"](tvm.runtime.tensor(np.ones(64, "float32")), result)
        np.testing.assert_allclose(result.numpy(), 1 + number)
    builder.close()


def test_caches_are_flushed_before_a_measurement_when_asked_for(host_target: Target) -> None:
    builder, runner = local_builder(host_target), LocalRunner(replace(settings(1), cache_flush=True))
    (library,) = builder.build([add(1)])
    assert library.value is not None
    (outcome,) = runner.run([RunJob(library.value, TENSORS)])
    runner.close()
    builder.close()
    assert outcome.error == ""
    assert outcome.value is not None
    assert len(outcome.value) == REPEAT


@pytest.mark.parametrize(
    "rest", [None, RestOfNetwork(num_bytes=0, seconds=0), RestOfNetwork(num_bytes=2**20, seconds=1e-4)]
)
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_a_kernel_that_takes_indices_is_measured(host_target: Target, dtype: str, rest: RestOfNetwork | None) -> None:
    """Random ones would lead it out of its table."""
    from tvm import IRModule, te

    table, indices = te.placeholder((8, 64), name="table"), te.placeholder((4,), dtype, name="indices")
    rows = te.compute((4, 64), lambda i, j: table[indices[i], j], name="rows")
    measure = replace(settings(1), rest=rest)
    builder, runner = local_builder(host_target), LocalRunner(measure)
    (library,) = builder.build([IRModule({"main": te.create_prim_func([table, indices, rows])})])
    assert library.value is not None
    args_info = (("TENSOR", "float32", (8, 64)), ("TENSOR", dtype, (4,)), ("TENSOR", "float32", (4, 64)))
    (outcome,) = runner.run([RunJob(library.value, args_info)])
    runner.close()
    builder.close()
    assert outcome.error == ""


def write_thread_ids(path: Path) -> IRModule:
    import tvm
    from tvm.script import tirx as T  # noqa: N812 - TVMScript's own name

    name = str(path)

    @T.prim_func
    def main(ids: T.Buffer((64,), "uint64")):
        for i in T.parallel(64):
            ids[i] = T.call_extern("uint64", "pthread_self")
        T.evaluate(
            T.call_extern("int64", "write", T.call_extern("int32", "creat", name, 0o600), T.address_of(ids[0]), 512)
        )

    return tvm.IRModule({"main": main})


@pytest.mark.parametrize(
    "num_threads", [1, pytest.param(2, marks=pytest.mark.skipif(available_cpus() < 2, reason="needs two CPUs"))]
)
def test_kernels_are_measured_on_the_number_of_threads_asked_for(
    host_target: Target, tmp_path: Path, num_threads: int
) -> None:
    builder, runner = local_builder(host_target), LocalRunner(settings(num_threads))
    (library,) = builder.build([write_thread_ids(tmp_path / "ids")])
    assert library.value is not None
    (outcome,) = runner.run([RunJob(library.value, (("TENSOR", "uint64", (64,)),))])
    runner.close()
    builder.close()
    assert outcome.error == ""
    ids = np.fromfile(tmp_path / "ids", "uint64")
    assert len(ids) == 64
    assert len(set(ids)) == num_threads


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
