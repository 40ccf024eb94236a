"""Shows the report as tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from throughput.report import Comparison, Minute, SideReport

_ROWS: list[tuple[str, Callable[[SideReport], float | None], str]] = [
    ("trials", lambda side: side.trials, ".0f"),
    ("trials that worked", lambda side: side.trials_ok, ".0f"),
    ("tuning, s", lambda side: side.tuning_s, ".1f"),
    ("with imports and lowering, s", lambda side: side.wall_s, ".1f"),
    ("trials per minute", lambda side: side.trials_per_minute, ".1f"),
    ("search, s per trial", lambda side: side.seconds_per_trial["search"], ".3f"),
    ("build, s per trial", lambda side: side.seconds_per_trial["build"], ".3f"),
    ("run, s per trial", lambda side: side.seconds_per_trial["run"], ".3f"),
    ("other, s per trial", lambda side: side.seconds_per_trial["other"], ".3f"),
    ("first trial after, s", lambda side: side.first_trial_s, ".1f"),
    ("peak memory, MiB", lambda side: side.peak_memory_bytes / 2**20, ".0f"),
    ("estimated latency, ms", lambda side: side.estimated_latency_ms, ".4g"),
    ("end-to-end latency, ms", lambda side: side.end_to_end_latency_ms, ".4g"),
    ("tasks with a schedule", lambda side: side.coverage["num_covered"] if side.coverage else 0, ".0f"),
    ("tasks", lambda side: side.num_tasks, ".0f"),
]


def print_seed(console: Console, seed: int, sides: Mapping[str, SideReport], comparison: Comparison | None) -> None:
    """Prints the figures of one seed."""
    table = Table("figure", *sides, *(["ours / stock"] if comparison else []), title=f"seed {seed}")
    for column in table.columns[1:]:
        column.justify = "right"
    for title, figure, form in _ROWS:
        values = [figure(side) for side in sides.values()]
        cells = [_text(value, form) for value in values]
        table.add_row(title, *cells, *([_quotient(values)] if comparison else []))
    console.print(table)
    if comparison is not None:
        console.print(
            f"ours reaches stock's final estimate after {_text(comparison.time_to_stock_final_estimate_s, '.1f')} s, "
            f"{_text(comparison.ratio_time_to_stock_estimate, '.2f')} of stock's time"
        )
        _print_minutes(console, comparison.equal_time)


def print_medians(console: Console, medians: Mapping[str, float | None]) -> None:
    """Prints the ratios over all seeds."""
    table = Table("ours / stock, median over the seeds", "")
    for name, value in medians.items():
        table.add_row(name, _text(value, ".2f"))
    console.print(table)


def _print_minutes(console: Console, minutes: Sequence[Minute]) -> None:
    if not minutes:
        return
    table = Table("minute", "stock, ms", "ours, ms", "ours is better", title="estimated latency at equal time")
    for row in minutes:
        table.add_row(
            str(row.minute), _text(row.stock_ms, ".4g"), _text(row.ours_ms, ".4g"), "yes" if row.ours_better else "no"
        )
    console.print(table)


def _quotient(values: Sequence[float | None]) -> str:
    stock, ours = values
    return f"{ours / stock:.2f}" if stock and ours is not None else "-"


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
