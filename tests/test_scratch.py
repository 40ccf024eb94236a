"""Scratch directories are removed when nobody holds them any more, and a full disk is called one."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ansor_mlflow.errors import MachineError
from ansor_mlflow.files import ScratchDirectory

HOLD = """
import sys
from ansor_mlflow.files import ScratchDirectory

directory = ScratchDirectory()
print(directory.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def ours(parent: Path) -> set[Path]:
    """The scratch directories; ONNX Runtime leaves a file beside them sooner or later."""
    return {path for path in parent.iterdir() if path.is_dir()}


def test_a_directory_lives_until_it_is_closed(parent: Path) -> None:
    with contextlib.closing(ScratchDirectory()) as directory:
        assert directory.path.parent == parent
        (directory.path / "candidate-1.so").touch()
    assert ours(parent) == set()


def test_those_of_the_living_stay_and_those_of_the_dead_go(parent: Path) -> None:
    command = [sys.executable, "-c", HOLD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        held = Path(other.stdout.readline().strip())
        (held / "candidate-1.so").touch()
        for _ in range(2):
            with contextlib.closing(ScratchDirectory()) as directory:
                assert ours(parent) == {held, directory.path}
        assert (held / "candidate-1.so").exists()
        other.kill()
    assert held.is_dir()
    with contextlib.closing(ScratchDirectory()) as directory:
        assert ours(parent) == {directory.path}


def test_a_directory_whose_owner_died_before_it_was_locked_goes_once_it_is_old(parent: Path) -> None:
    old, young = parent / "ansor_mlflow-new-old", parent / "ansor_mlflow-new-young"
    old.mkdir()
    young.mkdir()
    os.utime(old, (0, 0))
    with contextlib.closing(ScratchDirectory()) as directory:
        assert ours(parent) == {young, directory.path}


def test_a_link_that_bears_our_name_is_not_followed(parent: Path) -> None:
    """Anybody may put one into /tmp."""
    precious = parent / "precious"
    precious.mkdir()
    (precious / "file").touch()
    (parent / "ansor_mlflow-build-link").symlink_to(precious)
    with contextlib.closing(ScratchDirectory()):
        assert [path.name for path in precious.iterdir()] == ["file"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_an_error_may_say_that_the_disk_is_full_although_bytes_are_free(parent: Path, number: int) -> None:
    """As where the quota or the inodes are used up."""
    with contextlib.closing(ScratchDirectory()) as directory:
        directory.require_space()
        directory.require_space(["the worker process died (SIGSEGV)", "ValueError: no such instruction"])
        error = f"RuntimeError: the linker failed: /usr/bin/ld: final link failed: {os.strerror(number)}"
        with pytest.raises(MachineError, match=f"no space is left in the temporary directory {parent}; free some, or"):
            directory.require_space(["ValueError: another", error])
