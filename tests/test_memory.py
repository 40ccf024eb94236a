"""A tuning holds no more memory the longer it goes on."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from helpers.fake_tuning import Notebook, tune

from ansor_mlflow.lowering.network import LoweredNetwork
from ansor_mlflow.trials import TuningRound
from ansor_mlflow.tuning import engine
from ansor_mlflow.tuning.program_search import release_memory

if TYPE_CHECKING:
    from tvm.target import Target

NUM_BLOCKS, BLOCK_BYTES = 16_384, 4096


@pytest.fixture
def no_automatic_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


class Cyclic:
    """Refers to itself, so that only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


class CyclicNotebook(Notebook):
    """Leaves a cyclic object behind at every round."""

    def __init__(self, records: Path) -> None:
        super().__init__(records)
        self.left: list[weakref.ref[Cyclic]] = []

    def round_finished(self, round_: TuningRound) -> None:
        super().round_finished(round_)
        self.left.append(weakref.ref(Cyclic()))


@pytest.mark.usefixtures("no_automatic_collection")
def test_a_tuning_frees_what_only_the_collector_can_free(
    dense: LoweredNetwork, host_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_TRIALS_PER_RELEASE", 16)
    notebook = CyclicNotebook(tmp_path)
    tune(dense, host_target, tmp_path, observers=[notebook], trials=40, num_trials_per_round=2)
    is_freed = [reference() is None for reference in notebook.left]
    assert len(is_freed) >= 16
    assert all(is_freed[:8])


def test_freed_memory_returns_to_the_system() -> None:
    """Also that below a block which is still used: the C library gives back only what is above, by itself."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    blocks = [libc.malloc(BLOCK_BYTES) for _ in range(NUM_BLOCKS)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK_BYTES)
    for block in blocks[:-1]:
        libc.free(block)
    before = psutil.Process().memory_info().rss
    release_memory()
    freed = before - psutil.Process().memory_info().rss
    libc.free(blocks[-1])
    assert freed > NUM_BLOCKS * BLOCK_BYTES / 2
