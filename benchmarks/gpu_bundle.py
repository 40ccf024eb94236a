"""Packs what a GPU server without a network needs to run this project, in parts that can be carried there one by one.

    python benchmarks/gpu_bundle.py --out .gpu --python 3.12

It is for Linux on x86-64. On the server, where all parts are in one directory:

    mkdir site && cat part-* | tar -xJ -C site
    export PYTHONPATH=$PWD/site

What the server has already need not travel: `--have` takes a file with a line for each package, such as `pip list`
writes there.
"""

from __future__ import annotations

import configparser
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click

_ROOT = Path(__file__).resolve().parents[1]
_GLIBC_MINORS = (35, 34, 31, 28, 27, 24, 17)
_LEFT_OUT = ("mlflow/server/js", "sklearn", "*/tests", "*/__pycache__", "tvm/include", "tvm/src", "tvm_ffi/include")
"""MLflow's pages, tests and sources."""
_MIB = 2**20


@click.command(context_settings={"show_default": True})
@click.option("--out", default=".gpu", type=click.Path(file_okay=False, path_type=Path), help="Directory of the parts.")
@click.option("--python", "version", default="3.12", help="Version of the server's Python.")
@click.option("--have", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="What the server has.")
@click.option("--part-mib", default=50, help="Size of a part at most.")
def main(out: Path, version: str, have: Path | None, part_mib: int) -> None:
    """Installs this project's dependencies beside it, and packs both."""
    there = set(map(_normal, re.findall(r"^[\w.-]+", have.read_text(), re.M))) if have else set()
    with tempfile.TemporaryDirectory(prefix="gpu-bundle-") as scratch:
        site = Path(scratch, "site")
        _install(site, version)
        for distribution in list(importlib.metadata.distributions(path=[str(site)])):
            if _normal(distribution.name) in there:
                _remove(distribution, site)
        for pattern in _LEFT_OUT:
            for path in list(site.glob(pattern)):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        _show(site)
        _pack(site, out, part_mib * _MIB)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _install(site: Path, version: str) -> None:
    """The dependencies as wheels for the server; XGBoost's without CUDA, which takes a twentieth."""
    config = configparser.ConfigParser()
    config.read(_ROOT / "setup.cfg")
    required = [
        line for line in config["options"]["install_requires"].splitlines() if line and not line.startswith("#")
    ]
    required = [re.sub(r"^xgboost\b", "xgboost-cpu", line) for line in required]
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in _GLIBC_MINORS] + ["manylinux2014_x86_64", "linux_x86_64"]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(site), "--only-binary=:all:"]
    command += ["--no-compile", "--python-version", version, "--implementation", "cp"]
    for platform in platforms:
        command += ["--platform", platform]
    subprocess.run([*command, *required, "cuda-bindings", "onnxscript"], check=True)


def _remove(distribution: importlib.metadata.Distribution, site: Path) -> None:
    """What a distribution installed; packages that several share keep the others' files."""
    for file in distribution.files or ():
        path = Path(str(file.locate())).resolve()
        if path.is_relative_to(site.resolve()):
            path.unlink(missing_ok=True)
    for directory in site.glob("*.dist-info"):
        if not directory.joinpath("METADATA").exists():
            shutil.rmtree(directory)


def _show(site: Path) -> None:
    sizes = {
        f"{distribution.name} {distribution.version}": sum(
            path.stat().st_size
            for path in map(Path, map(str, (file.locate() for file in distribution.files or ())))
            if path.is_file()
        )
        for distribution in importlib.metadata.distributions(path=[str(site)])
    }
    for name, size in sorted(sizes.items(), key=lambda each: -each[1]):
        click.echo(f"{size / _MIB:8.1f} MiB  {name}")


def _pack(site: Path, out: Path, part_bytes: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("part-*"):
        old.unlink()
    archive = site.parent / "site.tar.xz"
    subprocess.run(["tar", "-C", site, "-cf", archive, "-I", "xz -T0 -6", "."], check=True)
    for number, part in enumerate(_parts(archive, part_bytes)):
        Path(out, f"part-{number:02}").write_bytes(part)
        click.echo(f"{len(part) / _MIB:8.1f} MiB  {out}/part-{number:02}")


def _parts(archive: Path, size: int) -> Iterator[bytes]:
    with archive.open("rb") as file:
        while part := file.read(size):
            yield part


if __name__ == "__main__":
    main()
