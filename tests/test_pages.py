"""Huge pages: what is in memory gets them, what is not stays where it is, and nothing changes but the time."""

from __future__ import annotations

import logging
import mmap
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from helpers.untuned import compiled_untuned

from ansor_mlflow import flavor
from ansor_mlflow.device import HugePages, NewMemory
from ansor_mlflow.errors import UserInputError
from ansor_mlflow.lowering import lower
from ansor_mlflow.model import LoadOptions, Manifest, TunedModel, load_package
from ansor_mlflow.networks.graph import GraphBuilder
from ansor_mlflow.networks.loading import load_network
from ansor_mlflow.tensors import Arrays

if TYPE_CHECKING:
    from tvm.target import Target

MIB = 2**20
WITHOUT = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
PR_SET_THP_DISABLE = 41
assert libc.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0
from pathlib import Path
import numpy as np
from ansor_mlflow.model import Manifest, load_package
directory = Path(sys.argv[1])
model = load_package(directory, Manifest.read(directory))
inputs = dict(np.load(sys.argv[2]))
for _ in range(2):
    outputs = model.run(inputs)
np.savez(sys.argv[3], **outputs)
print(model.huge_pages.got_bytes)
"""
"""A process that Linux gives no huge pages."""


def huge_mib() -> float:
    """The memory of this process that is in huge pages."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return int(re.search(r"^AnonHugePages: +(\d+) kB$", text, re.MULTILINE)[1]) / 1024  # type: ignore[index]


def new_array(mib: int) -> mmap.mmap:
    """Memory that nothing has touched, and that Linux has not yet been asked about."""
    return mmap.mmap(-1, mib * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def test_what_is_in_memory_gets_them_and_keeps_its_content() -> None:
    before, memory = huge_mib(), NewMemory()
    array = np.frombuffer(new_array(32), np.uint32)
    array[:] = np.arange(len(array))
    pages = memory.collapse()
    assert pages.asked_bytes >= 28 * MIB  # all but the ends
    assert pages.got_bytes >= 28 * MIB
    assert huge_mib() - before >= 28
    np.testing.assert_array_equal(array, np.arange(len(array)))
    assert memory.collapse().got_bytes >= pages.got_bytes  # once more changes nothing


def test_what_is_not_in_memory_stays_out_of_it() -> None:
    memory = NewMemory()
    untouched, sparse = new_array(64), new_array(64)
    for page in range(0, len(sparse), 2 * mmap.PAGESIZE):
        sparse[page] = 1
    pages = memory.collapse()
    assert pages.asked_bytes < 16 * MIB
    assert len(untouched) == 64 * MIB


def test_what_was_there_before_is_left_alone() -> None:
    array = np.frombuffer(new_array(64), np.uint8)
    array[:] = 1
    assert NewMemory().collapse().asked_bytes < 16 * MIB


def test_what_was_got_is_said() -> None:
    assert str(HugePages(48 * MIB, 44 * MIB)) == "44 of 48 MiB in huge pages"


@pytest.fixture(scope="module")
def package(host_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with weights of 16 MiB and activations of 8."""
    directory = tmp_path_factory.mktemp("wide")
    builder = GraphBuilder(seed=0)
    wide = builder.relu("relu", builder.dense("wide", builder.input("data", (1024, 8)), units=2048, in_units=8))
    builder.dense("narrow", wide, units=8, in_units=2048)
    builder.dense("heavy", builder.input("query", (2, 2048)), units=2048, in_units=2048)
    onnx_file = directory / "wide.onnx"
    onnx_file.write_bytes(builder.build("wide", {"narrow": (1024, 8), "heavy": (2, 2048)}).SerializeToString())
    network = load_network(str(onnx_file))
    compiled = compiled_untuned(network, lower(network.model, host_target), host_target, directory)
    flavor.save_model(compiled, directory / "model")
    return directory / "model"


INPUTS = {
    name: np.random.default_rng(0).standard_normal(shape, np.float32)
    for name, shape in (("data", (1024, 8)), ("query", (2, 2048)))
}


def assert_same(outputs: Arrays, expected: Arrays) -> None:
    assert outputs.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(outputs[name], array)


@pytest.fixture
def load(package: Path) -> Callable[..., TunedModel]:
    """Loads the model."""
    return lambda **options: load_package(package, Manifest.read(package), LoadOptions(**options))


def test_weights_get_them_when_a_model_is_loaded_and_activations_after_a_call(
    load: Callable[..., TunedModel], caplog: pytest.LogCaptureFixture
) -> None:
    expected = load(huge_pages=False).run(INPUTS)
    model = load()
    loaded = model.huge_pages.got_bytes
    assert loaded >= 12 * MIB
    assert_same(model.run(INPUTS), expected)
    called = model.huge_pages
    assert called.got_bytes >= loaded + 4 * MIB
    assert_same(model.run(INPUTS), expected)
    assert model.huge_pages == called
    with caplog.at_level(logging.INFO):
        flavor.explain_load(model)
    assert caplog.messages[-1] == str(called)


def test_an_option_switches_them_off(load: Callable[..., TunedModel]) -> None:
    before = huge_mib()
    model = load(huge_pages=False)
    model.run(INPUTS)
    assert model.huge_pages == HugePages()
    assert huge_mib() - before < 8
    with pytest.raises(UserInputError, match="huge_pages='no' is neither true nor false"):
        LoadOptions(huge_pages="no")  # type: ignore[arg-type]


def test_a_process_that_gets_none_computes_the_same(
    package: Path, load: Callable[..., TunedModel], tmp_path: Path
) -> None:
    np.savez(tmp_path / "inputs.npz", **INPUTS)
    command = [sys.executable, "-c", WITHOUT, *map(str, (package, tmp_path / "inputs.npz", tmp_path / "outputs.npz"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout.split() == ["0"]
    with np.load(tmp_path / "outputs.npz") as outputs:
        assert_same(dict(outputs), load().run(INPUTS))
