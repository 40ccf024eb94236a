"""The figures that a tuned model is judged by, as the console, a run's description and a notebook show them."""

from __future__ import annotations

from collections.abc import Mapping

from ansor_mlflow import names

_ROWS = (
    ("untuned", names.UNTUNED_LATENCY_MS, "{:.4g} ms"),
    ("ONNX Runtime", names.ONNXRUNTIME_LATENCY_MS, "{:.4g} ms"),
    ("tuned", names.LATENCY_MS, "{:.4g} ms"),
    ("tuned, 90th percentile", names.LATENCY_P90_MS, "{:.4g} ms"),
    ("tuned, as estimated by the tuning", names.BEST_LATENCY_MS, "{:.4g} ms"),
    ("and as its second measurements say", names.CONFIRMED_LATENCY_MS, "{:.4g} ms"),
    ("measured / second measurements", names.ESTIMATE_RATIO, "{:.2f}"),
    ("speedup over untuned", names.SPEEDUP_VS_UNTUNED, "{:.1f} ×"),
    ("speedup over ONNX Runtime", names.SPEEDUP_VS_ONNXRUNTIME, "{:.2f} ×"),
    ("share of ONNX Runtime's parts", names.ONNXRUNTIME_SHARE, "{:.1%}"),
    ("largest relative error", names.MAX_REL_ERROR, "{:.1e}"),
    ("coverage of tasks", names.COVERAGE_TASKS, "{:.0%}"),
    ("trials", names.TRIALS_MEASURED, "{:.0f}"),
)


def summary_rows(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Labels and figures, of the metrics that there are; the three latencies first."""
    return [(label, form.format(metrics[name])) for label, name, form in _ROWS if name in metrics]
