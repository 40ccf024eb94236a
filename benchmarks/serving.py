"""The same network as our flavor and as MLflow's flavor `onnx`: loading, predicting, serving and memory."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import click
import mlflow
import numpy as np
from rich.console import Console
from rich.table import Table
from serving_parts.models import Models, comparable_models, tuned_model
from serving_parts.process import measurement, prediction
from serving_parts.server import measure_server

from ansor_mlflow.measuring import call_once, compare_outputs
from ansor_mlflow.processes import in_child_process
from ansor_mlflow.tensors import Arrays, random_inputs

_SEED = 0
_TOLERANCE = 1e-3
_ROWS = {
    "load_s": "load, imports of the library included, s",
    "load_again_s": "load again in the same process, s",
    "first_predict_ms": "first predict, ms",
    "library_ms": "the library alone, ms",
    "predict_ms": "predict, ms",
    "server_ready_s": "server answers after, s",
    "rest_json_ms": "request, JSON inputs, ms",
    "rest_lists_ms": "request, flat lists in dataframe_split, ms",
    "rest_binary_ms": "request, base64, ms",
    "rest_best_ms": "request, the fastest of the flavor, ms",
    "memory_idle_mib": "memory of the server before a request, MiB",
    "memory_mib": "memory after JSON requests, MiB",
    "memory_binary_mib": "memory after base64 requests, MiB",
}
Figures = dict[str, dict[str, list[float]]]
"""Values of every turn by side and name."""


@click.command()
@click.option("--network", default="resnet-18", show_default=True)
@click.option("--trials", default="auto", show_default=True, help="Trials of the tuning, as of tune.")
@click.option("--model", "model_uri", help="Tuned model to take instead: a directory, models:/… or runs:/….")
@click.option(
    "--work-directory",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where the tuned model stays for the next time; by default it is not kept.",
)
@click.option("--turns", default=3, show_default=True)
@click.option("--requests", "num_requests", default=20, show_default=True, help="Requests of each form in a turn.")
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Where to write the figures."
)
def main(
    network: str,
    trials: str,
    model_uri: str | None,
    work_directory: Path | None,
    turns: int,
    num_requests: int,
    json_file: Path | None,
) -> None:
    """Measures both flavors in alternating turns, each time in fresh processes and on the same number of threads."""
    with tempfile.TemporaryDirectory(prefix="serving-") as scratch:
        if model_uri:
            tuned = Path(mlflow.artifacts.download_artifacts(artifact_uri=model_uri))
        else:
            directory = (work_directory or Path(scratch)).resolve()
            directory.mkdir(parents=True, exist_ok=True)
            tuned = tuned_model(network, trials, directory)
        models = comparable_models(tuned, Path(scratch))
        expected = _predictions(in_child_process(call_once, partial(prediction, models.onnx, models.inputs, _SEED)))
        figures: Figures = {"tvm": defaultdict(list), "onnx": defaultdict(list)}
        for turn in range(turns):
            for side in ("tvm", "onnx") if turn % 2 == 0 else ("onnx", "tvm"):
                click.echo(f"turn {turn + 1} of {turns}: {side}", err=True)
                measured = _measure(models, side, num_requests, expected, Path(scratch))
                for name, value in measured.items():
                    figures[side][name].append(value)
    result = _result(models, figures)
    _show(result)
    if json_file:
        json_file.write_text(json.dumps({**result, "turns": figures}, indent=1))


def _measure(models: Models, side: str, num_requests: int, expected: Arrays, scratch: Path) -> dict[str, float]:
    """One turn of one flavor.

    Raises:
        click.ClickException: An answer is not what ONNX Runtime computes.
    """
    inputs = random_inputs(models.inputs, _SEED)
    directory = models.tuned if side == "tvm" else models.onnx
    figures: dict[str, float] = in_child_process(call_once, partial(measurement, directory, models.inputs, _SEED))
    served = measure_server(directory, inputs, ["json", "lists"], num_requests, scratch)
    figures |= served.figures
    answers = dict(served.answers)
    if side == "tvm":
        served = measure_server(models.binary, inputs, ["binary"], num_requests, scratch)
        taken = {name: value for name, value in served.figures.items() if name.endswith(("binary_ms", "binary_bytes"))}
        figures |= {**taken, "memory_binary_mib": served.figures["memory_mib"]}
        answers |= served.answers
    figures["rest_best_ms"] = min(value for name, value in figures.items() if name.startswith("rest_"))
    for form, answer in answers.items():
        error = compare_outputs(_predictions(answer, expected), expected).max_rel_error
        if not error <= _TOLERANCE:
            raise click.ClickException(f"{side}: the answer to a request as {form} is wrong (max_rel_error={error:g})")
    return figures


def _predictions(answer: Any, expected: Arrays | None = None) -> Arrays:
    """What a model returned, by name; a single output may come without its name."""
    named = answer if isinstance(answer, Mapping) else dict.fromkeys(expected or {}, answer)
    return {name: np.asarray(values) for name, values in named.items()}


def _result(models: Models, figures: Figures) -> dict[str, Any]:
    """Medians over the turns, and the median of the ratios in each turn, which the machine's drift leaves alone."""
    medians = {side: {name: median(values) for name, values in own.items()} for side, own in figures.items()}
    ratios = {
        f"ratio_{name}": median(ours / theirs for ours, theirs in zip(values, figures["onnx"][name], strict=True))
        for name, values in figures["tvm"].items()
        if name in figures["onnx"]
    }
    return {"network": models.network, "num_threads": models.num_threads, **medians, **ratios}


def _show(result: dict[str, Any]) -> None:
    table = Table("figure", "tvm", "onnx", "tvm / onnx", title=f"{result['network']}, {result['num_threads']} threads")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, title in _ROWS.items():
        values = [result["tvm"].get(name), result["onnx"].get(name), result.get(f"ratio_{name}")]
        table.add_row(title, *("-" if value is None else f"{value:.3g}" for value in values))
    Console().print(table)


if __name__ == "__main__":
    main()
