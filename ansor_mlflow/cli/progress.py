"""Progress of a tuning on a terminal. Elsewhere the log's line per round is all there is."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ansor_mlflow.trials import TuningObserver, TuningPlan, TuningResult, TuningRound


class ProgressBar:
    """A `TuningObserver` that moves a bar."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._bar = progress.add_task("extracting tasks", total=None, best="")

    def tuning_started(self, plan: TuningPlan) -> None:
        """Shows the budget."""
        self._progress.update(self._bar, description=plan.network, total=plan.num_trials)

    def round_finished(self, round_: TuningRound) -> None:
        """Shows the trials so far and the network's estimated latency."""
        latency_s = round_.estimated_latency_s
        best = f"{latency_s * 1e3:.3f} ms" if latency_s is not None else ""
        self._progress.update(self._bar, completed=round_.total_trials, best=best)

    def tuning_finished(self, result: TuningResult) -> None:
        """Leaves the bar as it is."""


@contextmanager
def progress_observers() -> Iterator[Sequence[TuningObserver]]:
    """A progress bar if standard error is a terminal, below the log's lines; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield []
        return
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("trials"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[best]}"),
    )
    with Progress(*columns, console=console, refresh_per_second=2) as progress, _log_through(console):
        yield [ProgressBar(progress)]


@contextmanager
def _log_through(console: Console) -> Iterator[None]:
    """Prints log lines above the bar instead of through it."""
    log = logging.getLogger("ansor_mlflow")
    replaced = list(log.handlers)
    log.handlers = [RichHandler(console=console, show_level=False, show_path=False, show_time=False)]
    try:
        yield
    finally:
        log.handlers = replaced
