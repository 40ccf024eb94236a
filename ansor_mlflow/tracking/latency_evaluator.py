"""MLflow's evaluator `ansor-latency`: how fast any pyfunc model predicts, and how far it is from a reference.

MLflow finds it by its entry point, when `mlflow.models.evaluate` is called.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import numpy.typing as npt
import pandas as pd
from mlflow.exceptions import MlflowException
from mlflow.models.evaluation import EvaluationArtifact, EvaluationResult, ModelEvaluator
from mlflow.models.evaluation.artifacts import CsvEvaluationArtifact, ImageEvaluationArtifact
from mlflow.pyfunc import PyFuncModel

from ansor_mlflow import measuring, names
from ansor_mlflow.device import available_cpus
from ansor_mlflow.errors import MachineError, UserInputError, one_line
from ansor_mlflow.files import scratch_directory
from ansor_mlflow.model import TunedModel, threads_here
from ansor_mlflow.networks import read_onnx
from ansor_mlflow.parameters import LatencyOptions, is_uri, load_options
from ansor_mlflow.tensors import Arrays, TensorSpec
from ansor_mlflow.tracking.outbox import as_logged
from ansor_mlflow.tracking.registry import known_model, take_model
from ansor_mlflow.tracking.report.figures import draw_latency, save_figure

EVALUATOR_NAME = "ansor-latency"
MODEL_TYPE = "tvm"  # the `model_type` for which there is no other evaluator
_SPIN_S = 0.1  # how long idle threads of a model spin; a probe meanwhile would take them for another program
Predict = Callable[[Any], Any]


class LatencyEvaluator(ModelEvaluator):
    """Times `predict` in this process and compares what it returns with a reference, or with the targets.

    With `model_type="tvm"` it measures any model. Beside the evaluators of another type it measures tuned models, and
    others where `evaluator_config` has one of its options: MLflow asks it whenever a user names no evaluators.
    """

    @classmethod
    def can_evaluate(cls, **kwargs: Any) -> bool:  # noqa: ARG003
        return True

    def evaluate(
        self,
        *,
        dataset: Any,
        run_id: str,
        evaluator_config: dict[str, Any],
        model_type: str | None = None,
        model: Any = None,
        model_id: str | None = None,
        **kwargs: Any,  # noqa: ARG002 - MLflow passes what other evaluators need
    ) -> EvaluationResult | None:
        """Measures a model, or the wrapper of a function, and logs the metrics and artifacts to a run and a model."""
        if model_type != MODEL_TYPE:
            known = LatencyOptions.model_fields  # MLflow passes the options of its own evaluators, too
            evaluator_config = {name: value for name, value in evaluator_config.items() if name in known}
            if model is None or not (evaluator_config or isinstance(_raw_model(model), TunedModel)):
                return None
        try:
            options = load_options(LatencyOptions, evaluator_config)
            model_id = model_id or _linked(model, run_id)
            has_outputs = model_type == MODEL_TYPE and dataset.has_targets  # targets of others may be labels
            latency, metrics = _evaluate(options, dataset, model, has_outputs=has_outputs)
        except (MachineError, UserInputError) as err:
            raise MlflowException.invalid_parameter_value(f"{EVALUATOR_NAME}: {err}") from err
        mlflow.log_metrics(as_logged(metrics), run_id=run_id, model_id=model_id)
        return EvaluationResult(metrics, _log_artifacts(latency, run_id), run_id)


def _linked(model: Any, run_id: str) -> str | None:
    """Links the run with the LoggedModel behind the URI of a registered model, and returns its ID; MLflow does not."""
    model_id = known_model(getattr(model, "model_id", None) or "")
    take_model(run_id, model_id)
    return model_id or None


def _evaluate(
    options: LatencyOptions, dataset: Any, model: Any, *, has_outputs: bool
) -> tuple[measuring.Latency, dict[str, float]]:
    if model is None:
        raise UserInputError("no model was given, so there is nothing to time; give one beside the data")
    if not len(dataset.features_data):
        raise UserInputError("the data has no rows; give one at least")
    size = _batch_size(model) if options.batch_size == "auto" else options.batch_size
    reference = _reference(options.reference) if options.reference else None
    first = _model_input(_take(dataset.features_data, np.arange(size)), model)
    noise = measuring.MachineNoise()

    def turn() -> tuple[list[float], float]:
        measured = measuring.measure_watched(
            lambda: model.predict(first), warm_up_s=options.warm_up_s, measure_s=options.measure_s
        )
        time.sleep(_SPIN_S)
        return measured

    turns: dict[str, measuring.Turn] = {MODEL_TYPE: turn}
    if champion := _champion(options, model):
        turns[str(options.champion)] = partial(
            measuring.turn_in_process, partial(measuring.timed_call, champion, [first]), options.measure_s
        )
    latencies = measuring.take_turns(turns, options.turns, noise)
    if noise.unreliable:
        logging.getLogger("ansor_mlflow").warning("the times cannot be trusted: %s", noise.unreliable)
    latency = latencies[MODEL_TYPE]
    metrics = {
        names.LATENCY_MS: latency.median_ms,
        names.LATENCY_P90_MS: latency.p90_ms,
        names.LATENCY_STD_MS: latency.std_ms,
        names.THROUGHPUT_PER_S: size / latency.median_ms * 1e3,
        names.PROBE_SPREAD: noise.spread,
    }
    if options.champion and champion and reference:
        champion_ms = latencies[options.champion].median_ms
        metrics[names.rival_latency_ms(options.champion)] = champion_ms
        metrics[names.speedup_vs(options.champion)] = champion_ms / latency.median_ms
        metrics[names.CHAMPION_MAX_REL_ERROR] = measuring.deviation_of(
            champion, [first], [reference(first)]
        ).max_rel_error
    if reference is not None or has_outputs:
        difference = measuring.Deviation.worst(list(_differences(dataset, model, reference, size)))
        metrics |= {names.MAX_ABS_ERROR: difference.max_abs_error, names.MAX_REL_ERROR: difference.max_rel_error}
    return latency, metrics


def _champion(options: LatencyOptions, model: Any) -> measuring.MakeInference | None:
    """The rival that the model is timed with, in processes of its own; None where none is asked for."""
    if options.champion is None:
        return None
    measuring.require_rivals("champion", (options.champion,))
    path = Path(options.reference)
    if is_uri(options.reference) or not path.is_file():
        raise UserInputError(
            f"champion={options.champion}: it needs the network; give the model's ONNX file as reference, too"
        )
    raw = _raw_model(model)
    threads = threads_here(raw.choice.entry) if isinstance(raw, TunedModel) else available_cpus()
    outputs = tuple(output.name for output in read_onnx(path, options.reference).graph.output)
    return partial(
        measuring.rival_inference,
        options.champion,
        measuring.RivalTask(network=path, outputs=outputs, num_threads=threads),
    )


def _batch_size(model: Any) -> int:
    """The rows that a tuned model, or an ONNX model with a fixed batch, takes at once; 1 for others."""
    raw = _raw_model(model)
    inputs = raw.inputs if isinstance(raw, TunedModel) else raw.get_inputs() if hasattr(raw, "get_inputs") else None
    shape = inputs[0].shape if inputs else ()
    return shape[0] if shape and isinstance(shape[0], int) else 1


def _raw_model(model: Any) -> Any:
    """What a pyfunc model wraps; None where it does not say."""
    try:
        return model.get_raw_model()
    except (AttributeError, NotImplementedError):
        return None


def _differences(dataset: Any, model: Any, reference: Predict | None, size: int) -> Iterator[measuring.Deviation]:
    """Compares the outputs for all rows, batch by batch; the last batch is filled up with the first rows."""
    for start in range(0, len(dataset.features_data), size):
        indices = np.arange(start, start + size)
        data = _model_input(_take(dataset.features_data, indices), model)
        expected = _arrays(_take(dataset.labels_data, indices) if reference is None else reference(data))
        actual = _arrays(model.predict(data))
        if len(actual) == len(expected) == 1:  # some models name a single output, others do not
            actual = dict(zip(expected, actual.values(), strict=True))
        yield measuring.compare_outputs(actual, expected)


def _take(rows: Any, indices: npt.NDArray[np.intp]) -> Any:
    """Some rows of a DataFrame or an array, from the first again after the last."""
    indices = indices % len(rows)
    return rows.iloc[indices].reset_index(drop=True) if isinstance(rows, pd.DataFrame) else rows[indices]


def _model_input(rows: Any, model: Any) -> Any:
    """What `predict` gets for rows of the data: a function, or a model of plain columns, the rows as they are; columns
    of tensors become arrays by name, or one array for a model whose input has no name.
    """
    if not isinstance(model, PyFuncModel):
        return rows
    raw = _raw_model(model)
    specs: Sequence[TensorSpec] = ()
    if isinstance(raw, TunedModel):  # its signature may say no more than that columns hold objects
        specs = raw.inputs
    elif (schema := model.metadata.get_input_schema()) is not None and schema.is_tensor_spec():
        specs = [TensorSpec(spec.name or "", spec.shape, spec.type.name) for spec in schema.inputs]
    by_name = {spec.name: spec for spec in specs if spec.name}
    if isinstance(rows, np.ndarray):
        return {name: rows.astype(spec.dtype) for name, spec in by_name.items()} if len(by_name) == 1 else rows
    if not by_name and not any(isinstance(cell, np.ndarray | list) for cell in rows.iloc[0]):
        return rows
    arrays = {}
    for column in rows:
        try:
            spec = by_name.get(column)
            cells = rows[column]
            arrays[column] = measuring.stack_column(cells, spec) if spec else np.stack(list(map(np.asarray, cells)))
        except ValueError as err:
            raise UserInputError(f"column {column!r}: its cells must be tensors of one shape, a row each") from err
    return next(iter(arrays.values())) if specs and not by_name else arrays


def _reference(reference: str) -> Predict:
    """What computes the expected outputs."""
    path = Path(reference)
    if is_uri(reference) or path.is_dir():
        predict: Predict = mlflow.pyfunc.load_model(reference).predict
        return predict
    if not path.is_file():
        raise UserInputError(f"reference={reference}: no such file; give an ONNX file, or a model's URI or directory")
    read_onnx(path, reference)
    session = measuring.ReferenceSession(path, available_cpus(), exact=True)

    def predict_named(data: Any) -> Arrays:
        if not isinstance(data, Mapping):
            raise UserInputError(
                f"reference={reference}: it needs tensors by name; name the data's columns as its inputs"
            )
        try:
            return session.run(data)
        except Exception as err:  # ONNX Runtime's errors have no class in common
            raise UserInputError(
                f"reference={reference}: it cannot be computed from the data ({one_line(err)}); name the data's "
                "columns as its inputs, and give batch_size= the rows that it takes at once"
            ) from err

    return predict_named


def _arrays(outputs: Any) -> Arrays:
    """Outputs by name; a single one without a name gets an empty one."""
    named = outputs if isinstance(outputs, Mapping | pd.DataFrame) else {"": outputs}
    arrays = {str(name): np.asarray(values) for name, values in named.items()}
    return {name: np.stack(list(array)) if array.dtype == object else array for name, array in arrays.items()}


def _log_artifacts(latency: measuring.Latency, run_id: str) -> dict[str, EvaluationArtifact]:
    """Logs the times of all calls, as a table and as a figure."""
    table, figure = names.LATENCY_SAMPLES_FILE, names.LATENCY_FIGURE
    artifacts: dict[str, EvaluationArtifact] = {
        Path(table).stem: CsvEvaluationArtifact(uri=f"runs:/{run_id}/{table}"),
        Path(figure).stem: ImageEvaluationArtifact(uri=f"runs:/{run_id}/{figure}"),
    }
    with scratch_directory() as scratch:
        pd.DataFrame({names.LATENCY_MS: latency.samples_ms}).to_csv(Path(scratch, table), index=False)
        save_figure(draw_latency("latency of predict", latency), Path(scratch, figure))
        mlflow.MlflowClient().log_artifacts(run_id, scratch)
        for artifact in artifacts.values():
            artifact._load(str(Path(scratch, Path(artifact.uri).name)))
    return artifacts
