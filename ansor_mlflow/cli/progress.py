"""Progress of a tuning on a terminal. Elsewhere the log's line per round is all there is."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.jupyter import JupyterMixin
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from ansor_mlflow.cli.command import PlainConsole, table
from ansor_mlflow.foreign import duration, printable
from ansor_mlflow.trials import TaskState, TrialStatus, TuningObserver, TuningPlan, TuningResult, TuningRound

if TYPE_CHECKING:
    from ansor_mlflow.commands.sweep import SweepResult

_MIN_REFRESH_INTERVAL_S = 0.5
_MARK = ""
"""Header of the column that marks the task of the last round."""
_NUM_HEAD_LINES = 3
"""The bar, the line of figures, and the table's header."""
_NUM_LOG_LINES = 6
"""Lines of the terminal that are left to the log."""
_MIN_TABLE_LINES = 4
"""Three tasks, and the number of the others."""
_MIN_NAME_WIDTH = 12
_ASCII = str.maketrans("▸µ…·", ">u~-")
"""Stand-ins of the same width, for terminals that do not speak Unicode."""


@dataclass(frozen=True, kw_only=True)
class TuningView(JupyterMixin):
    """How far a tuning is: a bar, and below it as many tasks as the terminal has lines for.

    What takes most of the network's time comes first. Above it are tasks whose trials all failed, with which a tuning
    cannot succeed; below it those that were not tried.
    """

    plan: TuningPlan
    latest: TuningRound | TuningResult | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        parts = Group(self._bar(), self._status(), *self._tasks(options))
        for segment in console.render(parts, options):
            if options.ascii_only and not segment.control:
                text = segment.text.translate(_ASCII).encode(options.encoding, "replace").decode(options.encoding)
                yield Segment(text, segment.style)
            else:
                yield segment

    @property
    def search_is_over(self) -> bool:
        """Whether the last round is over, as far as the budget of trials and the tasks' stop reasons tell."""
        if not isinstance(self.latest, TuningRound):
            return False
        spent = self.latest.total_trials >= self.plan.num_trials
        return spent or all(task.stop_reason for task in self.latest.tasks)

    def _bar(self) -> RenderableType:
        num_trials = self.latest.total_trials if self.latest else 0
        count = f"{num_trials}/{self.plan.num_trials} trials"
        if self.latest and num_trials:
            count += f"  {num_trials / self.latest.elapsed_s * 60:.1f}/min"
        line = Table.grid(padding=(0, 2, 0, 0), expand=True)
        line.add_column(max_width=30)
        line.add_column(ratio=1)
        line.add_column(no_wrap=True)
        line.add_row(
            _one_line(self.plan.network), ProgressBar(total=self.plan.num_trials, completed=num_trials), Text(count)
        )
        return line

    def _status(self) -> Text:
        if self.latest is None:
            return _one_line("searching, building and measuring the first candidates")
        parts = [self._network_latency(self.latest), f"{_clock(self.latest.elapsed_s)} elapsed"]
        if isinstance(self.latest, TuningResult):
            parts.append(f"stopped by {self.latest.stop_reason}")
        elif self.search_is_over:
            parts.append("measuring the winners again")
        else:
            trials_left = self.plan.num_trials - self.latest.total_trials
            parts.append(f"{_clock(trials_left / self.latest.total_trials * self.latest.elapsed_s)} left")
        return _one_line(" · ".join(parts))

    def _network_latency(self, latest: TuningRound | TuningResult) -> str:
        estimated_s = latest.estimated_latency_s
        if estimated_s is None:
            num_measured = sum(task.best_s is not None for task in latest.tasks)
            return f"{num_measured} of {len(latest.tasks)} tasks measured"
        text = f"network {duration(estimated_s)}"
        if isinstance(latest, TuningResult) and latest.confirmed_latency_s:
            text += f", confirmed {duration(latest.confirmed_latency_s)}"
        return text

    def _tasks(self, options: ConsoleOptions) -> Iterator[RenderableType]:
        tasks = self.latest.tasks if self.latest else tuple(TaskState(info=info) for info in self.plan.tasks)
        marked = self.latest.task.info.index if isinstance(self.latest, TuningRound) else None
        rows = [_row(task, is_marked=task.info.index == marked) for task in sorted(tasks, key=_rank)]
        num_lines = max(_MIN_TABLE_LINES, options.size.height - _NUM_LOG_LINES - _NUM_HEAD_LINES)
        num_hidden = len(rows) - num_lines + 1 if len(rows) > num_lines else 0
        shown, hidden = rows[: len(rows) - num_hidden], rows[len(rows) - num_hidden :]
        shown[-1:] = [row for row in hidden if row[_MARK]] or shown[-1:]  # the marked task is always to be seen
        # a column that nothing fills is left out; those of the hidden tasks count, so that columns do not come and go
        headers = [header for header in rows[0] if any(row[header] for row in rows)]
        yield _table(shown, headers, options.max_width)
        if num_hidden:
            yield _one_line(f"… and {num_hidden} more", style="dim")


class ProgressDisplay:
    """A `TuningObserver` that redraws a display after every round, but at most twice a second.

    `show` takes a view, and whether to draw it now. What it draws on must not refresh by itself: while a candidate is
    measured nothing else of ours may compute, and rounds are told only when nothing is measured.
    """

    def __init__(self, show: Callable[[TuningView, bool], None]) -> None:
        self._draw = show
        self._plan = TuningPlan(network="", target="", tasks=(), num_trials=0)
        self._refreshed_s = -math.inf

    def tuning_started(self, plan: TuningPlan) -> None:
        self._plan = plan
        self._show(TuningView(plan=plan))

    def round_finished(self, round_: TuningRound) -> None:
        view = TuningView(plan=self._plan, latest=round_)
        self._show(view, at_once=view.search_is_over)

    def tuning_finished(self, result: TuningResult) -> None:
        self._show(TuningView(plan=self._plan, latest=result), at_once=True)

    def _show(self, view: TuningView, at_once: bool = False) -> None:
        now_s = time.monotonic()
        is_due = at_once or now_s - self._refreshed_s >= _MIN_REFRESH_INTERVAL_S
        self._draw(view, is_due)
        if is_due:
            self._refreshed_s = now_s


@contextmanager
def progress_observers() -> Iterator[Sequence[TuningObserver]]:
    """A display in a notebook, or if standard error is a terminal, below the log's lines; nothing elsewhere."""
    console, begin = PlainConsole(stderr=True), "lowering the network, extracting tasks"
    if console.is_jupyter:
        from IPython.display import display  # a notebook has it

        handle = display(begin, display_id=True)  # type: ignore[no-untyped-call]
        yield [ProgressDisplay(lambda view, is_due: handle.update(view) if is_due else None)]
        return
    if not sys.stderr.isatty():
        yield []
        return
    live = Live(
        Text(begin),
        console=console,
        auto_refresh=False,  # no thread that draws while a candidate is measured: it would disturb the measurement
        redirect_stdout=sys.stdout.isatty(),
    )
    with live, _log_through(console):
        yield [ProgressDisplay(lambda view, is_due: live.update(view, refresh=is_due))]


@contextmanager
def sweep_table() -> Iterator[Callable[[SweepResult], None]]:
    """Shows how the entries of a sweep stand, if standard error is a terminal, below the log's lines; else nothing."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    console = PlainConsole(stderr=True)
    live = Live(Text("planning"), console=console, auto_refresh=False, transient=True)
    with live, _log_through(console):
        yield lambda result: live.update(Group(_one_line(result.headline()), table(result.table())), refresh=True)


class _ConsoleHandler(logging.Handler):
    """Prints messages as they are. Where a line breaks is left to the terminal: addresses and commands are copied."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(self.format(record), markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _log_through(console: Console) -> Iterator[None]:
    """Prints log lines above the display instead of through it."""
    log = logging.getLogger("ansor_mlflow")
    replaced = list(log.handlers)
    log.handlers = [_ConsoleHandler(console)]
    try:
        yield
    finally:
        log.handlers = replaced


def _rank(task: TaskState) -> tuple[int, float]:
    """Sorts by share of the network's time; only failed trials come first, no trials last."""
    if task.best_s is not None:
        return 1, -task.info.weight * task.best_s
    return (0 if task.total_trials else 2), 0.0


def _row(task: TaskState, is_marked: bool) -> dict[str, str]:
    num_failed = task.total_trials - task.num_trials[TrialStatus.OK]
    return {
        _MARK: "▸" if is_marked else "",
        "task": task.info.name,
        "weight": str(task.info.weight),
        "best": "" if task.best_s is None else duration(task.best_s),
        "confirmed": "" if task.confirmed_s is None else duration(task.confirmed_s),
        "GFLOP/s": f"{task.gflops:.1f}" if task.gflops else "",
        "trials": str(task.total_trials or ""),
        "failed": str(num_failed or ""),
        "stopped by": task.stop_reason,
    }


def _table(rows: Sequence[dict[str, str]], headers: Sequence[str], max_width: int) -> Table:
    """Names give way on a narrow terminal; a very narrow one does not have the last columns."""
    widths = {header: max(len(header), *(len(row[header]) for row in rows)) for header in headers}
    widths["task"] = min(widths["task"], _MIN_NAME_WIDTH)
    shown = list(headers)
    while len(shown) > 2 and sum(widths[header] + 1 for header in shown) - 1 > max_width:
        del shown[-1]
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    for header in shown:
        justify: Literal["left", "right"] = "left" if header in {"task", "stopped by"} else "right"
        table.add_column(header, justify=justify, no_wrap=header != "task", min_width=widths[header])
    for row in rows:
        table.add_row(*(_one_line(row[header]) for header in shown), style="bold" if row[_MARK] else None)
    return table


def _one_line(text: str, style: str = "") -> Text:
    """Text as it is, without markup, cut where the line ends."""
    return Text(printable(text), style=style, no_wrap=True, overflow="ellipsis")


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
