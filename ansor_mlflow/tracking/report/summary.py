"""The figures that a tuned model is judged by, as the console, a run's description and a notebook show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ansor_mlflow import names

_LATENCIES = (
    ("untuned", names.UNTUNED_LATENCY_MS, "{:.4g} ms"),
    ("without trials", names.INSTANT_LATENCY_MS, "{:.4g} ms"),
    *((title, names.rival_latency_ms(rival), "{:.4g} ms") for rival, title in names.RIVALS.items()),
    ("tuned", names.LATENCY_MS, "{:.4g} ms"),
)
_OTHERS = (
    ("tuned, 90th percentile", names.LATENCY_P90_MS, "{:.4g} ms"),
    ("tuned, as estimated by the tuning", names.BEST_LATENCY_MS, "{:.4g} ms"),
    ("and as its second measurements say", names.CONFIRMED_LATENCY_MS, "{:.4g} ms"),
    ("measured / second measurements", names.ESTIMATE_RATIO, "{:.2f}"),
    ("speedup over untuned", names.SPEEDUP_VS_UNTUNED, "{:.1f} ×"),
    *((f"speedup over {title}", names.speedup_vs(rival), "{:.2f} ×") for rival, title in names.RIVALS.items()),
    ("speedup over the best of them", names.SPEEDUP_VS_BEST, "{:.2f} ×"),
    ("share of ONNX Runtime's parts", names.ONNXRUNTIME_SHARE, "{:.1%}"),
    ("largest relative error", names.MAX_REL_ERROR, "{:.1e}"),
    ("coverage of tasks", names.COVERAGE_TASKS, "{:.0%}"),
    ("trials", names.TRIALS_MEASURED, "{:.0f}"),
)


def summary_rows(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Labels and figures, of the metrics that there are; those of `latency_rows` first."""
    return [*latency_rows(metrics), *_rows(_OTHERS, metrics)]


def latency_rows(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """The latencies of what was compared; that of the model last."""
    return _rows(_LATENCIES, metrics)


def _rows(rows: Sequence[tuple[str, str, str]], metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    return [(label, form.format(metrics[name])) for label, name, form in rows if name in metrics]
