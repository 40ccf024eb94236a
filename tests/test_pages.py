"""Huge pages: what is in memory gets them, what is not stays where it is, and nothing changes but the time."""

from __future__ import annotations

import json
import logging
import mmap
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
from helpers.untuned import compiled_untuned

from ansor_mlflow import flavor
from ansor_mlflow.device import NewMemory, try_huge_pages
from ansor_mlflow.lowering import lower
from ansor_mlflow.networks.graph import GraphBuilder
from ansor_mlflow.networks.load import load_network
from ansor_mlflow.tensors import Arrays
from ansor_mlflow.workers.measure import random_arguments

if TYPE_CHECKING:
    from tvm.target import Target

MIB = 2**20
SCRIPT = """
import ctypes, json, sys
from pathlib import Path
import numpy as np
from ansor_mlflow.model import LoadOptions, Manifest, load_package
directory, inputs, outputs, how = sys.argv[1:]
if how == "refused":
    PR_SET_THP_DISABLE = 41
    assert ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0
directory = Path(directory)
model = load_package(directory, Manifest.read(directory), LoadOptions(huge_pages=how != "off"))
got = [model.huge_pages.got_bytes]
for _ in range(2):
    found = model.run(dict(np.load(inputs)))
    got.append(model.huge_pages.got_bytes)
np.savez(outputs, **found)
print(json.dumps(got))
"""
"""A process that loads a model and calls it twice: how many bytes are in huge pages each time, and the outputs."""


def huge_mib(array: npt.NDArray[Any]) -> float:
    """How much is in huge pages of the memory that an array lies in, all but its ends at most; proc_pid_smaps(5)."""
    first, last = array.ctypes.data, array.ctypes.data + array.nbytes
    found = 0.0
    overlap = 0  # Linux divides memory where huge pages begin and end
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            overlap = min(last, int(bounds[2], 16)) - max(first, int(bounds[1], 16))
        elif line.startswith("AnonHugePages:"):
            found += min(int(line.split()[1]) / 1024, max(overlap, 0) / MIB)
    return found


def new_array(mib: int) -> mmap.mmap:
    return mmap.mmap(-1, mib * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def test_what_is_in_memory_gets_them_and_keeps_its_content() -> None:
    memory = NewMemory()
    array = np.frombuffer(new_array(32), np.uint32)
    array[:] = np.arange(len(array))
    pages = memory.collapse()
    assert pages.asked_bytes >= 28 * MIB  # all but the ends
    assert pages.got_bytes >= 28 * MIB
    assert huge_mib(array) >= 28
    np.testing.assert_array_equal(array, np.arange(len(array)))
    assert memory.collapse().got_bytes >= pages.got_bytes  # once more changes nothing


def test_what_is_not_in_memory_stays_out_of_it() -> None:
    memory = NewMemory()
    untouched, sparse = new_array(64), new_array(64)
    for page in range(0, len(sparse), 2 * mmap.PAGESIZE):
        sparse[page] = 1
    pages = memory.collapse()
    assert pages.asked_bytes < 16 * MIB
    assert huge_mib(np.frombuffer(untouched, np.uint8)) == 0


def test_what_was_there_before_is_left_alone() -> None:
    array = np.frombuffer(new_array(64), np.uint8)
    array[:] = 1
    assert NewMemory().collapse().asked_bytes < 16 * MIB


def test_arguments_of_candidates_get_them() -> None:
    """Now and then Linux refuses some, or they lie where others were before."""
    for _ in range(3):
        (tensor,) = random_arguments((("TENSOR", "float32", (2048, 2048)),))
        if huge_mib(np.from_dlpack(tensor)) >= 12:
            return
        random_arguments(())  # other arguments take the place of these
    pytest.fail("a quarter of the arguments' memory, or more, is not in huge pages, three times in a row")


def test_the_environment_says_what_there_is() -> None:
    found = try_huge_pages()
    assert found.got_bytes >= 2 * MIB
    assert found.got_bytes <= found.asked_bytes


@pytest.fixture(scope="module")
def package(host_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
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


def run_in_a_process(package: Path, directory: Path, how: str) -> tuple[list[int], Arrays]:
    np.savez(directory / "inputs.npz", **INPUTS)
    files = [package, directory / "inputs.npz", directory / f"{how}.npz"]
    command = [sys.executable, "-c", SCRIPT, *map(str, files), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    with np.load(files[-1]) as outputs:
        return json.loads(done.stdout), dict(outputs)


@pytest.mark.nightly
@pytest.mark.system
def test_weights_get_them_when_a_model_is_loaded_and_activations_after_a_call(package: Path, tmp_path: Path) -> None:
    (loaded, called, again), outputs = run_in_a_process(package, tmp_path, "on")
    assert loaded >= 12 * MIB
    assert called >= loaded + 4 * MIB
    assert again == called
    for how in ("off", "refused"):
        got, expected = run_in_a_process(package, tmp_path, how)
        assert got == [0, 0, 0]
        assert_same(outputs, expected)


def test_explanation_says_what_was_got(package: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = flavor.load_model(str(package))
    with caplog.at_level(logging.INFO):
        flavor.explain_load(model)
    assert caplog.messages[-1] == str(model.huge_pages)
    assert model.huge_pages.asked_bytes >= 8 * MIB
