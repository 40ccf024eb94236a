"""Operators as TVM imports them, beside ONNX Runtime: ONNX's own cases, in every dtype, on values that they lack.

    python benchmarks/operators.py --json result.json --table docs/operators.csv

Cases are computed in child processes. One that a case takes down is started again behind it.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click

_HERE = Path(__file__).parent
_CLASSES = ("own", "nan", "infinity", "zeros", "halves", "large mean", "largest", "extremes")
_STAYS = "ONNX Runtime"


@click.command(context_settings={"show_default": True})
@click.option("--only", default="", help="Operators, with commas between them; all by default.")
@click.option("--processes", default=2, type=click.IntRange(min=1), help="Child processes.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="File for every result.")
@click.option("--table", type=click.Path(dir_okay=False, path_type=Path), help="File for the table, as CSV.")
def main(only: str, processes: int, json_file: Path | None, table: Path | None) -> None:
    """Compare every operator that ONNX Runtime knows with what is compiled of it."""
    with ThreadPoolExecutor(processes) as pool:
        results = [
            r for part in pool.map(lambda first: _results(first, processes, only), range(processes)) for r in part
        ]
    results.sort(key=lambda result: int(result["number"]))
    if json_file is not None:
        json_file.write_text("".join(json.dumps(result) + "\n" for result in results))
    for result in results:
        for kind, what in result["results"].items():
            if what and not what.startswith(_STAYS):
                click.echo(
                    f"{result['operator']:20} {result['form']}, {result['opset']}, {result['dtype']}, {kind}: {what}"
                )
    if table is not None:
        _write_table(results, table)


def _results(first: int, step: int, only: str) -> list[dict[str, Any]]:
    """The results of every `step`th case from the first on."""
    results: list[dict[str, Any]] = []
    start: int | None = first
    while start is not None:
        start = _run_from(start, step, only, results)
    return results


def _run_from(start: int, step: int, only: str, results: list[dict[str, Any]]) -> int | None:
    """Runs a worker from a case on; the case to go on with, if it did not live to the end."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_HERE), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "operator_parts.worker", str(start), str(step), only]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as worker:
        last: dict[str, Any] = {}
        for line in worker.stdout or ():
            last = json.loads(line)
            if "results" in last:
                results.append(last)
    if not worker.returncode:
        return None
    if not last:
        raise click.ClickException(f"a child process ended with {worker.returncode} before its first case")
    number = last["number"]
    if "about" in last:
        runtime, _, kind = last["about"].partition(", ")
        if runtime != "ONNX Runtime":  # whatever is its own to crash
            results.append({**last, "results": {kind or "own": f"{runtime} crashes"}})
    return int(number) + step


def _write_table(results: list[dict[str, Any]], table: Path) -> None:
    """Writes a row for each operator and dtype: how many models were the same on values of each class."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for result in results:
        if result["results"]:
            rows.setdefault((result["operator"], result["dtype"]), []).append(result)
    with table.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["operator", "dtype", *_CLASSES, "stays with ONNX Runtime", "differs"])
        for (operator, dtype), models in sorted(rows.items()):
            same = [sum(model["results"].get(kind) == "" for model in models) or "" for kind in _CLASSES]
            stays = sum(model["results"].get("own", "").startswith(_STAYS) for model in models)
            writer.writerow([operator, dtype, *same, stays or "", "; ".join(_differences(models))])


def _differences(models: list[dict[str, Any]]) -> list[str]:
    """How models differ: for each class the first of them, and how many there are."""
    found: dict[str, list[str]] = {}
    for model in models:
        for kind, what in model["results"].items():
            if what and not what.startswith(_STAYS):
                found.setdefault(kind, []).append(f"{model['form']}: {what}")
    return [f"{kind} ({len(cases)}): {cases[0]}" for kind, cases in found.items()]


if __name__ == "__main__":
    main()
