"""Foreign files: ONNX files as packages of PyPI ship them, each run as a user would, beside its rivals.

    python benchmarks/foreign.py folder --json result.json --page docs/foreign.md
    python benchmarks/foreign.py folder --names silero,nudenet --again --json result.json

Nothing of a package is executed. Everything about a file happens in child processes with bounds of time and memory.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import click
from foreign_parts.install import install
from foreign_parts.packages import PACKAGES, ForeignFile, ForeignPackage, read_packages
from foreign_parts.row import RIVALS, Row
from foreign_parts.tables import line, summary, write_page
from gallery_child import Child, run_child
from rich.console import Console

from ansor_mlflow.errors import AnsorMlflowError

_HERE = Path(__file__).parent


@click.command(context_settings={"show_default": True})
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--packages", default=PACKAGES, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--names", default="", help="Parts of packages' or files' names, with commas between them; all by default."
)
@click.option("--install-only", is_flag=True, help="Only put the files into FOLDER.")
@click.option("--again", is_flag=True, help="Do files that the JSON file has, too.")
@click.option("--turns", default=3, type=click.IntRange(min=1), help="How often each contender is timed.")
@click.option("--runtimes", default="tvm,onnxruntime", help="What may compute a network.")
@click.option("--limit-s", default=600.0, help="Seconds that a file may take.")
@click.option("--memory-gib", default=8.0, help="Data memory that each process may take.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="File for all figures.")
@click.option("--page", type=click.Path(dir_okay=False, path_type=Path), help="File for the page; a CSV is beside it.")
def main(
    folder: Path,
    packages: Path,
    names: str,
    install_only: bool,
    again: bool,
    turns: int,
    runtimes: str,
    limit_s: float,
    memory_gib: float,
    json_file: Path | None,
    page: Path | None,
) -> None:
    """Install the packages' ONNX files into FOLDER, and run each."""
    console = Console()
    try:
        listed = read_packages(packages)
        chosen = list(_chosen(listed, [name for name in names.split(",") if name]))
        for package in {package.pin: package for package, _ in chosen}.values():
            install(package, folder)
    except AnsorMlflowError as err:
        raise click.ClickException(str(err)) from err
    if install_only:
        return
    rows = _read(json_file) if json_file is not None and json_file.exists() else {}
    order = [str(package.place(file)) for package in listed for file in package.files]
    with tempfile.TemporaryDirectory(prefix="foreign-") as scratch:
        for package, file in chosen:
            if (name := str(package.place(file))) in rows and not again:
                continue
            store, memory_bytes = Path(scratch, "mlflow.db"), int(memory_gib * 2**30)
            rows[name] = _row(package, file, folder, turns, runtimes, limit_s, memory_bytes, store)
            console.print(line(rows[name]), markup=False, highlight=False, soft_wrap=True)
            if json_file is not None:
                json_file.write_text(json.dumps([asdict(row) for row in _in_order(rows, order)], indent=1))
    found = _in_order(rows, order)
    if page is not None:
        write_page(found, page)
    console.print(summary(found), markup=False, soft_wrap=True)


def _chosen(packages: Sequence[ForeignPackage], names: Sequence[str]) -> Iterator[tuple[ForeignPackage, ForeignFile]]:
    for package in packages:
        for file in package.files:
            if not names or any(name in str(package.place(file)) for name in names):
                yield package, file


def _in_order(rows: dict[str, Row], order: Sequence[str]) -> list[Row]:
    """The rows as the list has them; those of other versions are left out."""
    return [rows[name] for name in order if name in rows]


def _read(json_file: Path) -> dict[str, Row]:
    """What an earlier run found, by the names of the files."""
    rows = (
        Row(**{**row, **{name: Child(**row[name]) for name in ("compiled", "onnxruntime") if row[name] is not None}})
        for row in json.loads(json_file.read_text())
    )
    return {row.name: row for row in rows}


def _row(
    package: ForeignPackage,
    file: ForeignFile,
    folder: Path,
    turns: int,
    runtimes: str,
    limit_s: float,
    memory_bytes: int,
    store: Path,
) -> Row:
    path = (folder / package.place(file)).resolve()
    words = [str(path), "--parameters", json.dumps(file.parameters)]
    check = [sys.executable, str(_HERE / "gallery_check.py"), *words, "--trials", "0", "--trained"]
    check += ["--store", str(store), "--rivals", ",".join(RIVALS), "--turns", str(turns), "--runtimes", runtimes]
    compiled = run_child(check, path.parent, limit_s, memory_bytes)
    alone = None
    if compiled.result is None:
        script = str(_HERE / "foreign_parts" / "onnxruntime_alone.py")
        alone = run_child([sys.executable, script, *words], path.parent, limit_s, memory_bytes)
    return Row(pin=package.pin, path=file.path, compiled=compiled, onnxruntime=alone)


if __name__ == "__main__":
    main()
