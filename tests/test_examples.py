"""Inputs in a file are those of the network, or an error says what they must be."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from ansor_mlflow.errors import UserInputError
from ansor_mlflow.measuring import choose_examples
from ansor_mlflow.measuring.inputs import read_examples
from ansor_mlflow.tensors import NetworkShapes, TensorSpec, random_inputs

IMAGE = TensorSpec("image", (2, 3), "float32")
MASK = TensorSpec("mask", (2,), "int64")
SCALE = TensorSpec("scale", (), "float32")
RULE = r"it must hold image: float32 \(2, 3\), mask: int64 \(2,\)"


def images(count: int) -> np.ndarray:
    return np.arange(count * 3, dtype=np.float32).reshape(count, 3)


def saved(directory: Path, **arrays: np.ndarray) -> str:
    np.savez(directory / "data.npz", **arrays)
    return str(directory / "data.npz")


def test_several_examples_along_the_first_dimension(tmp_path: Path) -> None:
    found = read_examples(saved(tmp_path, image=images(6), mask=np.arange(6)), (IMAGE, MASK))
    assert [list(example["mask"]) for example in found] == [[0, 1], [2, 3], [4, 5]]
    np.testing.assert_array_equal(np.concatenate([example["image"] for example in found]), images(6))


def test_any_number_of_rows_fills_the_last_example_with_the_first(tmp_path: Path) -> None:
    found = read_examples(saved(tmp_path, image=images(3), mask=np.arange(3)), (IMAGE, MASK))
    assert [list(example["mask"]) for example in found] == [[0, 1], [2, 0]]
    np.testing.assert_array_equal(found[1]["image"], images(3)[[2, 0]])
    (example,) = read_examples(saved(tmp_path, image=images(1), mask=np.array([7])), (IMAGE, MASK))
    assert list(example["mask"]) == [7, 7]


def test_an_array_alone_is_the_only_input(tmp_path: Path) -> None:
    np.save(tmp_path / "data.npy", images(4))
    assert len(read_examples(str(tmp_path / "data.npy"), (IMAGE,))) == 2
    with pytest.raises(UserInputError, match=f"it holds one array; {RULE}"):
        read_examples(str(tmp_path / "data.npy"), (IMAGE, MASK))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"image": images(2)}, f"it holds image; {RULE}"),
        ({"image": images(2).astype("float64"), "mask": np.arange(2)}, rf"image: float64 \(2, 3\).*; {RULE}"),
        ({"image": images(3), "mask": np.arange(2)}, rf"image: float32 \(3, 3\).*; {RULE}, or more rows of each along"),
        ({"image": images(0), "mask": np.arange(0)}, rf"image: float32 \(0, 3\).*; {RULE}"),
        ({"image": images(4), "mask": np.arange(2)}, rf"image: float32 \(4, 3\).*; {RULE}"),
    ],
)
def test_arrays_that_are_not_the_inputs(tmp_path: Path, arrays: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        read_examples(saved(tmp_path, **arrays), (IMAGE, MASK))


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04 no archive"])
def test_a_file_of_another_format(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "data.npz").write_bytes(content)
    with pytest.raises(UserInputError, match=r"data.npz: it is no NumPy file of plain numbers; write one with"):
        read_examples(str(tmp_path / "data.npz"), (IMAGE,))


def test_a_damaged_archive(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "data.npz", image=images(200))
    content = bytearray((tmp_path / "data.npz").read_bytes())
    content[60:200] = bytes(140)
    (tmp_path / "data.npz").write_bytes(content)
    with pytest.raises(UserInputError, match="it is no NumPy file of plain numbers"):
        read_examples(str(tmp_path / "data.npz"), (IMAGE,))


def test_an_array_that_fits_into_no_memory(tmp_path: Path) -> None:
    with (tmp_path / "data.npy").open("wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": (2**40, 3)}
        np.lib.format.write_array_header_1_0(file, header)
    with pytest.raises(UserInputError, match=r"data\.npy: it "):
        read_examples(str(tmp_path / "data.npy"), (IMAGE,))


def test_pickled_objects_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "data.npy", np.array([object()]), allow_pickle=True)
    with pytest.raises(UserInputError, match="it is no NumPy file of plain numbers"):
        read_examples(str(tmp_path / "data.npy"), (IMAGE,))
    with pytest.raises(UserInputError, match="it is no NumPy file of plain numbers"):
        read_examples(saved(tmp_path, image=np.array([object()])), (IMAGE,))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match=r"there is no such file; give a \.npz, \.npy or \.parquet file"):
        read_examples(str(tmp_path / "data.npz"), (IMAGE,))


def written(directory: Path, **columns: list[Any]) -> str:
    pd.DataFrame(columns).to_parquet(directory / "data.parquet")
    return str(directory / "data.parquet")


CUBE = TensorSpec("cube", (2, 2, 2, 2), "float32")
CUBES = np.arange(24, dtype=np.float32).reshape(3, 2, 2, 2)


@pytest.mark.parametrize(
    "cells", [[cube.tobytes() for cube in CUBES], [cube.ravel() for cube in CUBES], [cube.tolist() for cube in CUBES]]
)
def test_cells_are_rows_as_bytes_or_lists(tmp_path: Path, cells: list[Any]) -> None:
    found = read_examples(written(tmp_path, cube=cells, mask=[4, 5, 6]), (CUBE, MASK))
    np.testing.assert_array_equal(np.concatenate([example["cube"] for example in found]), CUBES[[0, 1, 2, 0]])
    assert [list(example["mask"]) for example in found] == [[4, 5], [6, 4]]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"image": [[1.0, 2.0, 3.0]]}, f"it holds image; {RULE}"),
        ({"image": [[1.0, 2.0]], "mask": [1]}, rf"it holds image: float32 \(1, 2\).*; {RULE}"),
        ({"image": [[1.0, 2.0, 3.0]], "mask": [0.5]}, "column 'mask': its cells must be tensors .* int64"),
        ({"image": [[1.0, 2.0, 3.0], [1.0]], "mask": [1, 2]}, "column 'image': its cells must be tensors of one shape"),
        ({"image": [b"1234"], "mask": [1]}, "column 'image': .*; one has 4 bytes"),
        ({"image": [], "mask": []}, "data.parquet: "),
    ],
)
def test_columns_that_are_not_the_inputs(tmp_path: Path, columns: dict[str, list[Any]], message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        read_examples(written(tmp_path, **columns), (IMAGE, MASK))


def test_a_damaged_table(tmp_path: Path) -> None:
    path = Path(written(tmp_path, image=[[1.0, 2.0, 3.0]] * 100, mask=[1] * 100))
    content = path.read_bytes()
    for damaged in (content[:-20], content[:50] + bytes(400) + content[450:], content[:4] + content[-8:]):
        path.write_bytes(damaged)
        with pytest.raises(UserInputError, match=r"data.parquet: it (is no Parquet file|cannot be read)"):
            read_examples(str(path), (IMAGE, MASK))


def test_the_users_inputs_take_the_place_of_seeded_ones(tmp_path: Path) -> None:
    sizes = [NetworkShapes((IMAGE, MASK), ())]
    first, second, third = choose_examples("", sizes, 7)
    np.testing.assert_array_equal(first["image"], random_inputs((IMAGE, MASK), 7)["image"])
    assert not np.array_equal(second["image"], third["image"])
    (mine,) = choose_examples(saved(tmp_path, image=images(2), mask=np.arange(2)), sizes, 7)
    np.testing.assert_array_equal(mine["image"], images(2))


def test_there_is_an_example_of_each_size(tmp_path: Path) -> None:
    sizes = [NetworkShapes((TensorSpec("x", (1, length), "float32"),), ()) for length in (4, 8, 16)]
    seeded = choose_examples("", sizes, 7)
    assert [example["x"].shape[1] for example in seeded] == [4, 8, 16] * 3
    mine = np.arange(24, dtype=np.float32).reshape(3, 8)
    found = choose_examples(saved(tmp_path, x=mine), sizes, 7)
    assert [example["x"].shape[1] for example in found] == [4, 8, 16, 8, 8]
    np.testing.assert_array_equal(found[1]["x"], mine[:1])
    with pytest.raises(UserInputError, match=r"it must hold x: float32 \(1, 4\)"):
        choose_examples(saved(tmp_path, x=np.zeros((1, 5), np.float32)), sizes, 7)


@pytest.mark.parametrize("seed", range(8))
def test_parquet_with_flipped_bits_is_read_or_refused(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    spec = TensorSpec("image", (2, 3), "float32")
    pd.DataFrame({"image": [row.tolist() for row in rng.standard_normal((2, 3))]}).to_parquet(
        tmp_path / "whole.parquet"
    )
    content = np.frombuffer((tmp_path / "whole.parquet").read_bytes(), np.uint8)
    for _ in range(60):
        flipped = content.copy()
        for place in rng.integers(4, len(flipped), rng.integers(1, 4)):
            flipped[place] ^= 1 << rng.integers(0, 8)
        (tmp_path / "data.parquet").write_bytes(flipped.tobytes())
        with contextlib.suppress(UserInputError):
            read_examples(str(tmp_path / "data.parquet"), (spec,))
