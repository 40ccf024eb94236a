"""Names from files, servers and URIs mean files below one folder, or nothing."""

from __future__ import annotations

import os
import zipfile
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from helpers.exports import make_model, tensor
from onnx import helper

from ansor_mlflow.device import DeviceFingerprint
from ansor_mlflow.errors import MachineError, UserInputError
from ansor_mlflow.files import path_below, replace_directory, require_stored, write_text
from ansor_mlflow.fleet.remote import read_arrays
from ansor_mlflow.networks import load_network
from ansor_mlflow.tracking import work_directory

BAD_NAMES = ("", ".", "..", "/", "//a", "/etc/hosts", "../a", "a/../../b", "a/..", "a\0b", "a\nb", "\x1b[2J", "a" * 256)


@pytest.mark.parametrize("name", BAD_NAMES)
def test_no_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="names no file below a folder"):
        path_below(tmp_path, name)


@pytest.mark.parametrize("name", ["a", "a/b", "a b.json", "...", "..a", "ä", "a//b", "./a", "within/file"])
def test_names(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "within").symlink_to("folder")
    assert path_below(tmp_path, name) == tmp_path / name


@pytest.mark.parametrize("name", ["up/a", "file", "loop/a/../b", "chain"])
def test_links_that_lead_out(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "up").symlink_to("..")
    (folder / "file").symlink_to("/etc/hosts")
    (folder / "chain").symlink_to("file")
    with pytest.raises(ValueError, match=r"outside of its folder|names no file"):
        path_below(folder, name)


@pytest.mark.parametrize("name", ["../../home", "/tmp/x", "a\nb"])
def test_run_ids_of_a_server(name: str) -> None:
    with pytest.raises(MachineError, match="the tracking server calls a run"):
        work_directory(name)


@pytest.mark.parametrize("entry", ["../../x", "/x", "a\nb", "x" * 5000])
@pytest.mark.parametrize("key", ["kind", "mcpu", "arch"])
def test_folders_of_devices(tmp_path: Path, entry: str, key: str) -> None:
    device = DeviceFingerprint(
        target={"kind": "llvm", "mcpu": "znver4"}, machine="x86_64", cpu_model="", features=(), num_threads=2
    )
    assert device.name.startswith("llvm-znver4-x2-")
    odd = replace(device, target={**device.target, key: entry})
    assert path_below(tmp_path, odd.name).parent == tmp_path


SIZE = 300
"""Rows and columns of a weight that stays in its file until its shapes are known."""


def save_in_cache(root: Path, blob: str = "../../blobs/{}") -> Path:
    """A model as Hugging Face's cache has it: a snapshot of links to blobs."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"]),
        helper.make_node("ReduceSum", ["w"], ["s"], keepdims=0),
        helper.make_node("Greater", ["s", "zero"], ["is_positive"]),
        helper.make_node("Where", ["is_positive", "rows", "rows"], ["shape"]),  # only ONNX Runtime knows it
        helper.make_node("Reshape", ["y", "shape"], ["z"]),
    ]
    weights = {"w": np.full((SIZE, SIZE), 0.1), "zero": np.array(0.0), "rows": np.array([SIZE, 1])}
    model = make_model(nodes, [tensor("x", [1, SIZE])], [tensor("z", None)], weights)
    (root / "blobs").mkdir(parents=True)
    (root / "snapshots" / "main").mkdir(parents=True)
    onnx.save(model, root / "model.onnx", save_as_external_data=True, location="model.onnx_data", size_threshold=0)
    for name in ("model.onnx", "model.onnx_data"):
        (root / name).replace(root / "blobs" / f"hash-of-{name}")
        (root / "snapshots" / "main" / name).symlink_to(blob.format(f"hash-of-{name}"))
    return root / "snapshots" / "main" / "model.onnx"


def test_links_within_a_cache_are_followed(tmp_path: Path) -> None:
    network = load_network(str(save_in_cache(tmp_path / "models--a--b")))
    assert network.num_parameters == SIZE**2
    assert network.outputs[0].shape == (SIZE, 1)


def test_the_last_of_several_places_counts(tmp_path: Path) -> None:
    path = save_in_cache(tmp_path / "cache", str(tmp_path / "cache" / "blobs" / "{}"))
    model = onnx.load(path, load_external_data=False)
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == "w")
    tensor.external_data.add(key="location", value="../../../secret")
    path.unlink()
    onnx.save(model, path)
    with pytest.raises(UserInputError, match="its external data cannot be read"):
        load_network(str(path))


def test_weights_of_a_function_are_read_from_the_same_places(tmp_path: Path) -> None:
    path = save_in_cache(tmp_path / "cache")
    model = onnx.load(path, load_external_data=False)
    weight = onnx.TensorProto()
    weight.CopyFrom(next(tensor for tensor in model.graph.initializer if tensor.name == "w"))
    nodes = [helper.make_node("Constant", [], ["w"], value=weight), helper.make_node("MatMul", ["a", "w"], ["b"])]
    opsets = [helper.make_opsetid("", 17)]
    model.functions.append(helper.make_function("own", "Layer", ["a"], ["b"], nodes, opsets))
    model.opset_import.append(helper.make_opsetid("own", 1))
    model.graph.node[0].CopyFrom(helper.make_node("Layer", ["x"], ["y"], domain="own"))
    path.unlink()
    onnx.save(model, path)
    assert load_network(str(path)).outputs[0].shape == (SIZE, 1)
    weight.external_data[0].value = "../../../secret"
    model.functions[0].node[0].attribute[0].t.CopyFrom(weight)
    onnx.save(model, path)
    with pytest.raises(UserInputError, match="its external data cannot be read"):
        load_network(str(path))


def test_links_out_of_a_cache_are_refused(tmp_path: Path) -> None:
    path = save_in_cache(tmp_path / "models--a--b")
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * 64)
    for link in (path.with_name("model.onnx_data"), tmp_path / "models--a--b" / "blobs" / "hash-of-model.onnx_data"):
        target = link.readlink() if link.is_symlink() else None
        link.unlink()
        link.symlink_to(secret)
        with pytest.raises(UserInputError, match="its external data cannot be read"):
            load_network(str(path))
        if target:
            link.unlink()
            link.symlink_to(target)


def test_hard_links_are_refused(tmp_path: Path) -> None:
    path = save_in_cache(tmp_path / "cache", str(tmp_path / "cache" / "blobs" / "{}"))
    os.link(path.resolve().with_name("hash-of-model.onnx_data"), tmp_path / "a second name")
    with pytest.raises(UserInputError, match="is a hard link, which may be to any file; copy the file"):
        load_network(str(path))


def test_names_are_on_the_disk_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[Path] = []
    monkeypatch.setattr("os.fsync", lambda descriptor: flushed.append(Path(f"/proc/self/fd/{descriptor}").readlink()))
    write_text(tmp_path / "file", "text")
    assert [path.parent for path in flushed] == [tmp_path, tmp_path.parent]
    for number in range(2):
        new = tmp_path / "new"
        new.mkdir()
        (new / str(number)).touch()
        flushed.clear()
        replace_directory(new, tmp_path / "directory")
        assert flushed == [tmp_path]
        assert [path.name for path in (tmp_path / "directory").iterdir()] == [str(number)]
        assert not new.exists()


def packed(path: Path, sizes: dict[str, int], compression: int) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, size in sizes.items():
            archive.writestr(name, bytes(size))
    return path


def test_archives_that_grow(tmp_path: Path) -> None:
    bomb = packed(tmp_path / "bomb.npz", {"a": 2**26}, zipfile.ZIP_DEFLATED)
    assert bomb.stat().st_size < 2**17
    with zipfile.ZipFile(bomb) as archive, pytest.raises(ValueError, match=r"would unpack to 67108864"):
        require_stored(archive, bomb.stat().st_size)
    stored = packed(tmp_path / "stored.npz", {"a": 2**26}, zipfile.ZIP_STORED)
    with zipfile.ZipFile(stored) as archive:
        require_stored(archive, stored.stat().st_size)


def test_arrays_of_a_server() -> None:
    def answer(compress: bool = False, **arrays: Any) -> BytesIO:
        file = BytesIO()
        (np.savez_compressed if compress else np.savez)(file, **arrays)
        return BytesIO(file.getvalue())

    examples = [{"x": np.zeros(3)}, {"x": np.ones(3), "y": np.ones(1)}]
    keys = {f"{number}/{name}": array for number, arrays in enumerate(examples) for name, array in arrays.items()}
    np.testing.assert_equal(read_arrays(answer(**keys)), examples)
    for odd in ({"1000000000000/x": np.zeros(1)}, {"-1/x": np.zeros(1)}, {"x": np.zeros(1)}, {"1/x": np.zeros(1)}):
        with pytest.raises(ValueError, match=r"numbers calls|invalid literal"):
            read_arrays(answer(**odd))
    with pytest.raises(ValueError, match="would unpack to"):
        read_arrays(answer(compress=True, **{"0/x": np.zeros(2**23)}))
