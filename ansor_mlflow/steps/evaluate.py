"""The step `evaluate`: is the model right, how fast is it, and compared with what."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import mlflow

from ansor_mlflow import contenders, flavor, names, sources
from ansor_mlflow.errors import CorrectnessError, UserInputError
from ansor_mlflow.evaluate import (
    QUANTIZED_TOLERANCE,
    TOLERANCES,
    Difference,
    Latency,
    call_once,
    compare_outputs,
    in_child_process,
    measure_in_turns,
)
from ansor_mlflow.model import LibraryEntry, Manifest, choose_library
from ansor_mlflow.networks.reference import is_quantized
from ansor_mlflow.options import EvaluateOptions
from ansor_mlflow.tensors import TensorSpec
from ansor_mlflow.tracking import StepRun, step_run
from ansor_mlflow.tracking.failures import clear_failures

_log = logging.getLogger("ansor_mlflow")

_NUM_CHECKED_INPUTS = 3
_TUNED, _UNTUNED, _REFERENCE = "tuned", "untuned", "onnxruntime"


def evaluate(options: EvaluateOptions) -> dict[str, float]:
    """Checks a model against ONNX Runtime and measures its latency beside two baselines.

    Returns:
        The metrics that were logged; see `names.SUMMARY_METRICS`.

    Raises:
        CorrectnessError: The outputs differ by more than the tolerance. The metrics are logged all the same.
        AnsorMlflowError: The model cannot be read, or does not run here.
    """
    with step_run("evaluate", options, "evaluate") as run:
        return _evaluate(options, run, _download(options.model_uri, run.directory))


def _download(model_uri: str, scratch: Path) -> Path:
    """The directory of a model; copied into `scratch` if it is not on this machine."""
    if Path(model_uri).is_dir():
        return Path(model_uri)
    if not sources.is_uri(model_uri):
        raise UserInputError(
            f"model_uri={model_uri}: no such directory; give a model's directory, models:/… or runs:/…"
        )
    model_uri = sources.pinned_uri(model_uri, "model_uri")
    with clear_failures(f"read the model {model_uri}"):
        return Path(mlflow.artifacts.download_artifacts(artifact_uri=model_uri, dst_path=str(scratch)))


def _evaluate(options: EvaluateOptions, run: StepRun, directory: Path) -> dict[str, float]:
    manifest = flavor.read_manifest(directory)
    entry = choose_library(directory, manifest)
    device = entry.fingerprint
    run.log_tags(
        {
            names.TAG_NETWORK: manifest.network,
            names.TAG_TARGET: device.description,
            names.TAG_NUM_THREADS: str(device.num_threads),
            names.TAG_MODEL_URI: options.model_uri,
            "mlflow.runName": f"evaluate {manifest.network} · {device.description}",
        }
    )
    reference = partial(contenders.reference_run, directory / names.NETWORK_FILE, device.num_threads)
    runs = {_TUNED: partial(contenders.tuned_run, directory), _REFERENCE: reference}
    quantized = is_quantized(directory / names.NETWORK_FILE)
    difference = _compare(options, manifest, {**runs, _REFERENCE: partial(reference, optimized=not quantized)})
    metrics = {names.MAX_ABS_ERROR: difference.max_abs_error, names.MAX_REL_ERROR: difference.max_rel_error}
    run.log_metrics(metrics)
    tolerance = options.tolerance
    if tolerance == "auto":
        tolerance = QUANTIZED_TOLERANCE if quantized else TOLERANCES[entry.provenance.get("dtype", "float32")]
    if not difference.max_rel_error <= tolerance:
        raise CorrectnessError(
            f"the outputs of {manifest.network} differ from ONNX Runtime's by max_rel_error="
            f"{difference.max_rel_error:.3g}, allowed is {tolerance:g}; do not deploy this model: compile it "
            "again, or raise tolerance if the network is that sensitive to rounding"
        )
    latencies = _measure(options, manifest, directory, entry, runs)
    metrics |= _latency_metrics(latencies, manifest.inputs, entry.provenance.get("estimated_latency_ms"))
    run.log_metrics(metrics)
    return metrics


def _compare(options: EvaluateOptions, manifest: Manifest, runs: Mapping[str, contenders.MakeRun]) -> Difference:
    """Runs the model and ONNX Runtime on the same seeded inputs."""
    _log.info("comparing the outputs of %s with ONNX Runtime's", manifest.network)
    seeds = [options.seed + index for index in range(_NUM_CHECKED_INPUTS)]
    outputs = {
        name: in_child_process(call_once, partial(contenders.outputs_call, make_run, manifest.inputs, seeds))
        for name, make_run in runs.items()
    }
    pairs = zip(outputs[_TUNED], outputs[_REFERENCE], strict=True)
    return Difference.worst([compare_outputs(actual, expected) for actual, expected in pairs])


def _measure(
    options: EvaluateOptions,
    manifest: Manifest,
    directory: Path,
    entry: LibraryEntry,
    runs: Mapping[str, contenders.MakeRun],
) -> dict[str, Latency]:
    """Times the model, ONNX Runtime, and the untuned build of the same network, on the same number of threads."""
    with tempfile.TemporaryDirectory(prefix="ansor_mlflow-") as scratch:
        library = Path(scratch, "untuned.so")
        _log.info("building the untuned baseline")
        in_child_process(call_once, partial(contenders.untuned_build, directory / names.NETWORK_FILE, entry, library))
        runs = {**runs, _UNTUNED: partial(contenders.untuned_run, library, manifest, entry)}
        _log.info("measuring latency in %d turns", options.turns)
        calls = {
            name: partial(contenders.timed_call, make_run, manifest.inputs, options.seed)
            for name, make_run in runs.items()
        }
        return measure_in_turns(calls, options.turns)


def _latency_metrics(
    latencies: dict[str, Latency], inputs: tuple[TensorSpec, ...], estimated_ms: float | None
) -> dict[str, float]:
    tuned, untuned, reference = (latencies[name] for name in (_TUNED, _UNTUNED, _REFERENCE))
    batch_size = inputs[0].shape[0] if inputs and inputs[0].shape else 1
    metrics = {
        names.LATENCY_MS: tuned.median_ms,
        names.LATENCY_P90_MS: tuned.p90_ms,
        names.LATENCY_STD_MS: tuned.std_ms,
        names.THROUGHPUT_PER_S: batch_size / tuned.median_ms * 1e3,
        names.UNTUNED_LATENCY_MS: untuned.median_ms,
        names.ONNXRUNTIME_LATENCY_MS: reference.median_ms,
        names.SPEEDUP_VS_UNTUNED: untuned.median_ms / tuned.median_ms,
        names.SPEEDUP_VS_ONNXRUNTIME: reference.median_ms / tuned.median_ms,
    }
    if estimated_ms:
        metrics[names.ESTIMATE_RATIO] = tuned.median_ms / estimated_ms
    return metrics
