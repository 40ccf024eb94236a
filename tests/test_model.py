"""A tuned model is a directory that is checked before it is used, and a function that is strict about its inputs."""

from __future__ import annotations

import copy
import hashlib
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from tvm import runtime

from ansor_mlflow.device.device import fingerprint
from ansor_mlflow.device.targets import resolve_target
from ansor_mlflow.device.threads import available_cpus
from ansor_mlflow.errors import ModelError, UserInputError
from ansor_mlflow.lowering.lower import lower
from ansor_mlflow.measuring.compare import ReferenceSession
from ansor_mlflow.model.choice import LoadOptions
from ansor_mlflow.model.library import compile_tuned
from ansor_mlflow.model.loading import load_package, open_library
from ansor_mlflow.model.manifest import LibraryEntry, Manifest, verify_package
from ansor_mlflow.model.package import CompiledNetwork, read_package, write_package
from ansor_mlflow.model.parts import as_array
from ansor_mlflow.model.tuned_model import TunedModel
from ansor_mlflow.names import NETWORK_FILE
from ansor_mlflow.networks import input_specs
from ansor_mlflow.networks.graph import GraphBuilder
from ansor_mlflow.records.store import RECORD_FILE
from ansor_mlflow.tensors import TensorSpec, random_inputs


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_package_holds_what_was_compiled(compiled_network: CompiledNetwork, tmp_path: Path) -> None:
    manifest = write_package(compiled_network, tmp_path)
    (entry,) = manifest.libraries
    assert sha256(tmp_path / entry.path) == sha256(compiled_network.library)
    assert sha256(tmp_path / NETWORK_FILE) == sha256(compiled_network.network)
    assert (tmp_path / "records" / compiled_network.fingerprint.name / RECORD_FILE).is_file()
    written = {path.relative_to(tmp_path).as_posix(): sha256(path) for path in tmp_path.rglob("*") if path.is_file()}
    assert manifest.files == written
    verify_package(tmp_path, manifest)


def for_more_threads(compiled: CompiledNetwork) -> CompiledNetwork:
    device = replace(compiled.fingerprint, num_threads=compiled.fingerprint.num_threads + 1)
    return replace(compiled, fingerprint=device)


def test_a_package_holds_a_library_for_each_device(compiled_network: CompiledNetwork, tmp_path: Path) -> None:
    members = [compiled_network, for_more_threads(compiled_network)]
    manifest = write_package(members, tmp_path)
    verify_package(tmp_path, manifest)
    assert [entry.fingerprint for entry in manifest.libraries] == [member.fingerprint for member in members]
    for member, taken in zip(members, read_package(tmp_path, manifest), strict=True):
        assert sha256(taken.library) == sha256(member.library)
        assert sorted(path.name for path in taken.records.iterdir()) == sorted(
            path.name for path in member.records.iterdir()
        )
        assert (taken.fingerprint, taken.coverage) == (member.fingerprint, member.coverage)


def test_a_package_holds_one_library_for_a_device(compiled_network: CompiledNetwork, tmp_path: Path) -> None:
    name = compiled_network.fingerprint.name
    with pytest.raises(UserInputError, match=f"two libraries are for {name}; a model holds one for each device"):
        write_package([compiled_network, compiled_network], tmp_path)


def damaged(value: Any, damage: Any) -> Any:
    """The value with a damage in its place: what is `...` is missing, and a mapping says what is damaged inside."""
    if isinstance(value, list) and isinstance(damage, dict):
        return [damaged(value[0], damage)]
    if not isinstance(damage, dict) or not damage:
        return damage
    changed = {**value, **{key: damaged(value.get(key), inside) for key, inside in damage.items()}}
    return {key: inside for key, inside in changed.items() if inside is not ...}


@pytest.mark.parametrize(
    "damage",
    [
        *({key: value} for key in ("inputs", "outputs", "libraries", "files") for value in (5, "text", [5], [{}])),
        *({key: ...} for key in ("network", "inputs", "outputs", "libraries", "files")),
        *({"libraries": inside} for inside in ({"path": 5}, {"fingerprint": {"target": "llvm"}})),
        {"libraries": {"fingerprint": {"target": {}}}},
        {"files": {NETWORK_FILE: 5}},
    ],
    ids=str,
)
def test_a_damaged_manifest(compiled_network: CompiledNetwork, tmp_path: Path, damage: dict[str, Any]) -> None:
    entry = damaged(write_package(compiled_network, tmp_path).to_dict(), damage)
    with pytest.raises(ModelError, match=r"the model's MLmodel file is damaged \(.+\); log the model again"):
        Manifest.from_dict(entry)


@pytest.mark.parametrize("version", [None, 0, 3])
def test_a_manifest_of_another_version(compiled_network: CompiledNetwork, tmp_path: Path, version: int | None) -> None:
    entry = {**write_package(compiled_network, tmp_path).to_dict(), "format_version": version}
    with pytest.raises(ModelError, match=f"the model has format version {version}, this package reads 2; update it"):
        Manifest.from_dict(entry)


@pytest.fixture(scope="session")
def trap(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A library that creates a file as soon as it is opened, and that file."""
    directory = tmp_path_factory.mktemp("trap")
    sprung = directory / "sprung"
    source = directory / "trap.c"
    source.write_text(
        f'#include <fcntl.h>\n__attribute__((constructor)) static void spring(void) {{ creat("{sprung}", 0600); }}\n'
    )
    library = directory / "trap.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    return library, sprung


@pytest.fixture
def trapped(compiled_network: CompiledNetwork, trap: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Manifest]:
    """A model directory whose library, digest and all, is the trap."""
    directory = tmp_path / "model"
    return directory, write_package(replace(compiled_network, library=trap[0]), directory)


def library_of(manifest: Manifest) -> str:
    return manifest.libraries[0].path


def records_of(manifest: Manifest) -> str:
    return next(name for name in manifest.files if name.endswith(RECORD_FILE))


def network_of(manifest: Manifest) -> str:
    return NETWORK_FILE


ANY_FILE = pytest.mark.parametrize("file_of", [library_of, records_of, network_of])
FileOf = Callable[[Manifest], str]


def assert_refused(directory: Path, manifest: Manifest, sprung: Path, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_package(directory, manifest)
    assert not sprung.exists()


def test_the_trap_works(trap: tuple[Path, Path], tmp_path: Path) -> None:
    """Otherwise the tests below would show nothing."""
    from tvm import runtime

    library, sprung = trap
    runtime.load_module(str(shutil.copyfile(library, tmp_path / "model.so")))
    assert sprung.exists()
    sprung.unlink()


@ANY_FILE
def test_a_changed_bit(trapped: tuple[Path, Manifest], trap: tuple[Path, Path], file_of: FileOf) -> None:
    directory, manifest = trapped
    name = file_of(manifest)
    content = bytearray((directory / name).read_bytes())
    content[len(content) // 2] ^= 1
    (directory / name).write_bytes(content)
    assert_refused(directory, manifest, trap[1], f"{name} does not match the SHA-256 in MLmodel, it was changed after")


def test_a_library_that_the_manifest_gives_to_another_device(
    compiled_network: CompiledNetwork, trap: tuple[Path, Path], tmp_path: Path
) -> None:
    """The digests are right: only the paths in the manifest were exchanged."""
    members = [compiled_network, replace(for_more_threads(compiled_network), library=trap[0])]
    manifest = write_package(members, tmp_path)
    ours, other = manifest.libraries
    exchanged = (replace(ours, path=other.path), replace(other, path=ours.path))
    message = f"the library '{other.path}' is not that of its device, '{ours.path}'; it was tampered with"
    assert_refused(tmp_path, replace(manifest, libraries=exchanged), trap[1], message)


@ANY_FILE
def test_a_missing_file(trapped: tuple[Path, Manifest], trap: tuple[Path, Path], file_of: FileOf) -> None:
    directory, manifest = trapped
    name = file_of(manifest)
    (directory / name).unlink()
    assert_refused(directory, manifest, trap[1], f"{name} is missing; log or download the model again")


@ANY_FILE
def test_a_file_without_a_digest(trapped: tuple[Path, Manifest], trap: tuple[Path, Path], file_of: FileOf) -> None:
    directory, manifest = trapped
    name = file_of(manifest)
    files = {path: digest for path, digest in manifest.files.items() if path != name}
    assert_refused(directory, replace(manifest, files=files), trap[1], f"{name} has no SHA-256 in MLmodel")


@pytest.mark.parametrize("kind", ["file", "link to a file", "link to a directory"])
def test_a_file_that_was_added(trapped: tuple[Path, Manifest], trap: tuple[Path, Path], kind: str) -> None:
    directory, manifest = trapped
    added = directory / "libraries" / "more"
    if kind == "file":
        added.write_bytes(b"")
    else:
        added.symlink_to(trap[0] if kind == "link to a file" else trap[0].parent)
    assert_refused(directory, manifest, trap[1], r"libraries/more has no SHA-256 in MLmodel")


@pytest.mark.parametrize("by", ["dots", "detour", "absolute path", "link", "link to a directory"])
def test_a_library_outside_of_the_model(trapped: tuple[Path, Manifest], trap: tuple[Path, Path], by: str) -> None:
    """Even with the right digest."""
    directory, manifest = trapped
    (directory.parent / "elsewhere").mkdir()
    outside = Path(shutil.copyfile(trap[0], directory.parent / "elsewhere" / "outside.so"))
    path = {
        "dots": "../elsewhere/outside.so",
        "detour": f"libraries/../{library_of(manifest)}",  # of use only where a part of it is a link
        "absolute path": str(outside),
        "link": "libraries/link.so",
        "link to a directory": "libraries/folder/outside.so",
    }[by]
    if by == "link":
        (directory / path).symlink_to(outside)
    if by == "link to a directory":
        (directory / path).parent.symlink_to(outside.parent)
    entry = replace(manifest.libraries[0], path=path)
    manifest = replace(manifest, libraries=(entry,), files={**manifest.files, path: sha256(outside)})
    assert_refused(directory, manifest, trap[1], rf"the path '{path}' leads out of the model; it was tampered with")


@pytest.fixture(scope="module")
def model(compiled_network: CompiledNetwork, tmp_path_factory: pytest.TempPathFactory) -> TunedModel:
    directory = tmp_path_factory.mktemp("package")
    return load_package(directory, write_package(compiled_network, directory))


def compile_graph(builder: GraphBuilder, network: str, outputs: dict[str, TensorSpec], directory: Path) -> TunedModel:
    model = builder.build(network, {name: spec.shape for name, spec in outputs.items()})
    for output in model.graph.output:
        dtype = np.dtype(outputs[output.name].dtype)
        output.type.tensor_type.elem_type = onnx.helper.np_dtype_to_tensor_dtype(dtype)
    target = resolve_target("auto", available_cpus())
    compile_tuned(lower(model, target), target, None, directory / "model.so")
    entry = LibraryEntry(path="", fingerprint=fingerprint(target, available_cpus()), coverage={}, provenance={})
    manifest = Manifest(
        network=network, inputs=input_specs(model), outputs=tuple(outputs.values()), libraries=(entry,), files={}
    )
    return open_library(directory / "model.so", manifest, entry)


@pytest.fixture(scope="module")
def reshaping(tmp_path_factory: pytest.TempPathFactory) -> TunedModel:
    builder = GraphBuilder(seed=0)
    builder.node("Reshape", "flat", builder.input("data", (2, 4096)), builder.constant("shape", np.array([-1])))
    outputs = {"flat": TensorSpec("flat", (8192,), "float32")}
    return compile_graph(builder, "reshaping", outputs, tmp_path_factory.mktemp("reshaping"))


@pytest.fixture(scope="module")
def reference(small_onnx: Path) -> ReferenceSession:
    return ReferenceSession(small_onnx, num_threads=1)


def inputs_for(model: TunedModel, seed: int) -> dict[str, np.ndarray]:
    return random_inputs(model.inputs, seed)


def assert_agree(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(actual[name], values, rtol=0, atol=1e-4 * abs(values).max())


def test_a_model_computes_what_onnxruntime_computes(model: TunedModel, reference: ReferenceSession) -> None:
    for seed in range(3):
        inputs = inputs_for(model, seed)
        assert_agree(model.run(inputs), reference.run(inputs))


def test_arrays_in_any_memory_order(model: TunedModel, reference: ReferenceSession) -> None:
    inputs = inputs_for(model, 0)
    strided = {"data": np.asfortranarray(np.repeat(inputs["data"], 2, axis=3))[..., ::2]}
    assert not strided["data"].flags.c_contiguous
    assert_agree(model.run(strided), reference.run(inputs))


@pytest.mark.parametrize(
    ("inputs", "given"),
    [
        ({}, r"inputs \[\]"),
        ({"image": np.zeros((1, 3, 16, 16), np.float32)}, r"inputs \['image'\]"),
        ({"data": np.zeros((1, 3, 16, 16), np.float32), "more": 1}, r"inputs \['data', 'more'\]"),
        ({"data": np.zeros((2, 3, 16, 16), np.float32)}, r"input 'data' is float32 \(2, 3, 16, 16\)"),
        ({"data": np.zeros((1, 3, 16, 16))}, r"input 'data' is float64 \(1, 3, 16, 16\)"),
        ({"data": "zeros"}, r"input 'data' is <U5 \(\)"),
    ],
)
def test_inputs_that_do_not_fit_are_told_what_would(model: TunedModel, inputs: dict[str, Any], given: str) -> None:
    with pytest.raises(UserInputError, match=rf"{given}: the model expects 'data': float32 \(1, 3, 16, 16\)"):
        model.run(inputs)


def test_outputs_belong_to_the_caller(model: TunedModel) -> None:
    first = model.run(inputs_for(model, 0))
    kept = copy.deepcopy(first)
    second = model.run(inputs_for(model, 1))
    assert abs(second["logits"] - kept["logits"]).max() > 1e-3
    np.testing.assert_array_equal(first["logits"], kept["logits"])
    first["logits"][:] = 0.0


def array_at(offset: int, values: np.ndarray) -> np.ndarray:
    """A copy that begins so many bytes behind an address that generated code may read from."""
    memory = np.empty(values.nbytes + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    array = memory[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    array[...] = values
    return array


def test_an_aligned_array_is_read_where_it_is(reshaping: TunedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that is not aligned, or read-only, is copied; neither is seen in the result."""
    wrapped: list[int] = []
    (machine,) = reshaping._machines._machines
    real = machine._from_dlpack
    monkeypatch.setattr(machine, "_from_dlpack", lambda array: (wrapped.append(array.ctypes.data), real(array))[1])
    values = inputs_for(reshaping, 0)["data"]
    for offset in (0, 4, 16, 64):
        array = array_at(offset, values)
        for is_writeable in (True, False):
            array.flags.writeable = is_writeable
            np.testing.assert_array_equal(reshaping.run({"data": array})["flat"], values.reshape(-1))
            is_read_there = offset % 64 == 0 and is_writeable
            assert wrapped == ([array.ctypes.data] if is_read_there else [])
            wrapped.clear()


def test_small_arrays_at_any_address(model: TunedModel, reference: ReferenceSession) -> None:
    values = inputs_for(model, 0)["data"]
    for offset in (0, 4):
        assert_agree(model.run({"data": array_at(offset, values)}), reference.run({"data": values}))


def test_outputs_do_not_share_memory_with_inputs(reshaping: TunedModel) -> None:
    data = array_at(0, np.arange(2 * 4096, dtype=np.float32).reshape(2, 4096))
    kept = data.copy()
    outputs = reshaping.run({"data": data})
    for array in outputs.values():
        array.fill(-1.0)
        np.testing.assert_array_equal(data, kept)
        np.testing.assert_array_equal(reshaping.run({"data": data})["flat"], kept.reshape(-1))


@pytest.mark.parametrize("dtype", ["bool", "int8", "int64", "float16", "float64"])
def test_types_other_than_float32(tmp_path: Path, dtype: str) -> None:
    builder = GraphBuilder(seed=0)
    data = builder.input("data", (2, 3), dtype)
    builder.node("Transpose", "turned", data, perm=[1, 0])
    model = compile_graph(builder, "turning", {"turned": TensorSpec("turned", (3, 2), dtype)}, tmp_path)
    values = random_inputs(model.inputs, 0)["data"]
    turned = model.run({"data": values})["turned"]
    assert turned.dtype == dtype
    np.testing.assert_array_equal(turned, values.T)


@pytest.mark.parametrize("size", [3, 4096])
def test_outputs_small_and_large(tmp_path: Path, size: int) -> None:
    """Small ones go to memory that is kept from call to call, whatever TVM makes of them; large ones do not."""
    builder = GraphBuilder(seed=0)
    data = builder.input("data", (2, size))
    builder.node("Identity", "same", data)
    builder.node("Reshape", "flat", data, builder.constant("shape", np.array([-1])))
    builder.node("ReduceMax", "largest", builder.node("Relu", "positive", data), keepdims=0)
    shapes = {"same": (2, size), "positive": (2, size), "flat": (2 * size,), "largest": ()}
    outputs = {name: TensorSpec(name, shape, "float32") for name, shape in shapes.items()}
    model = compile_graph(builder, "forking", outputs, tmp_path)
    (machine,) = model._machines._machines
    assert (machine._into is not None) == (size == 3)
    found = [
        (data, model.run({"data": data})) for data in np.random.default_rng(0).normal(size=(3, 2, size)).astype("f4")
    ]
    for data, arrays in found:
        positive = data.clip(0)
        assert_agree(arrays, {"same": data, "positive": positive, "flat": data.ravel(), "largest": positive.max()})


def test_a_type_that_numpy_does_not_share() -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(as_array(runtime.tensor(values)), values)


@pytest.fixture(scope="module", params=["threads of the library", "one"])
def shared_model(
    request: pytest.FixtureRequest, compiled_network: CompiledNetwork, tmp_path_factory: pytest.TempPathFactory
) -> TunedModel:
    """A model with one machine, as its kernels use every CPU, and one with a machine for each CPU."""
    directory = tmp_path_factory.mktemp("shared")
    options = LoadOptions(num_threads=1 if request.param == "one" else None)
    shared = load_package(directory, write_package(compiled_network, directory), options)
    assert shared._machines._threads._max_workers == (available_cpus() if request.param == "one" else 1)
    return shared


def test_calls_from_eight_threads(shared_model: TunedModel, reference: ReferenceSession) -> None:
    model = shared_model
    seeds = range(64)
    expected = [reference.run(inputs_for(model, seed)) for seed in seeds]
    with ThreadPoolExecutor(8) as threads:
        for _ in range(5):
            outputs = list(threads.map(lambda seed: model.run(inputs_for(model, seed)), seeds))
            for output, wanted in zip(outputs, expected, strict=True):
                assert_agree(output, wanted)


def test_a_call_that_fails_leaves_its_machine_to_others(model: TunedModel) -> None:
    for _ in range(8):
        with pytest.raises((ValueError, RuntimeError), match=r"broadcast|shape\[0\] mismatch"):
            model._machines.run([np.zeros((7, 3, 16, 16), np.float32)])
    assert model.run(inputs_for(model, 0))


def test_a_library_that_tvm_cannot_load(compiled_network: CompiledNetwork, tmp_path: Path) -> None:
    """Though its digest is right: it may be of another version of TVM, or on a disk that nothing is executed from."""
    (tmp_path / "broken.so").write_bytes(b"no library")
    broken = replace(compiled_network, library=tmp_path / "broken.so")
    directory = tmp_path / "package"
    with pytest.raises(ModelError, match=r"model\.so: TVM .* cannot load it \(.+\); compile the network with"):
        load_package(directory, write_package(broken, directory))
