"""Tuning throughput: MetaSchedule's `tune_relax` as it comes, against `ansor-mlflow tune`.

    python benchmarks/tuning_throughput.py --seeds 0,1,2 --json result.json

Both tune the same tasks with the same seed, budget, way of measuring and number of threads, in turn, each time in a
fresh process. What is measured and how is in the README beside this file.
"""

from __future__ import annotations

import contextlib
import json
import signal
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import click
from rich.console import Console
from throughput.job import Job, Outcome, Side
from throughput.latency import Compiled, compile_records, host_environment, measure_libraries
from throughput.process import MemoryUse, run_child
from throughput.report import Comparison, SideReport, compare, medians, side_report
from throughput.tables import print_medians, print_seed

from ansor_mlflow.device import resolve_num_threads
from ansor_mlflow.errors import AnsorMlflowError
from ansor_mlflow.networks import BUILTIN_NETWORKS
from ansor_mlflow.parameters import TuneOptions
from ansor_mlflow.trials import TrialStatus

_TURNS = 5
"""Fresh processes in which each library is timed."""


def _seeds(_context: click.Context, _parameter: click.Parameter, text: str) -> list[int]:
    try:
        return [int(seed) for seed in text.split(",")]
    except ValueError as err:
        raise click.BadParameter(f"{text!r}: give whole numbers with commas between them, such as 0,1,2") from err


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--network", default="resnet-18", help="Built-in network, or the path of an ONNX file.")
@click.option("--trials", default=640, type=click.IntRange(min=1), help="Programs that each side measures.")
@click.option("--our-trials", type=click.IntRange(min=1), help="Programs that our side measures.  [default: trials]")
@click.option("--seeds", default="0", callback=_seeds, help="Seeds with commas between them; each is one comparison.")
@click.option("--num-threads", default="auto", help="Threads of a kernel; auto is every CPU.")
@click.option(
    "--stock-trials-per-round",
    type=click.IntRange(min=1),
    help="Programs of one round of MetaSchedule. It spends the budget in whole rounds, so that with its default of 64 "
    "half of ResNet-18's 20 tasks would get no trial out of 640.  [default: trials // tasks, at most 64]",
)
@click.option("--side", default="both", type=click.Choice(["both", "stock", "ours"]), help="What to run.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="File for all figures.")
@click.option(
    "--work-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="New directory that keeps databases, logs and libraries.  [default: a temporary one]",
)
def main(
    network: str,
    trials: int,
    our_trials: int | None,
    seeds: list[int],
    num_threads: str,
    stock_trials_per_round: int | None,
    side: Literal["both", "stock", "ours"],
    json_file: Path | None,
    work_dir: Path | None,
) -> None:
    """Compare the tuning throughput of stock MetaSchedule with ours."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no child process stays behind
    try:
        job = Job(
            side="stock",
            network=network if network in BUILTIN_NETWORKS else str(Path(network).resolve()),
            trials=trials,
            seed=0,
            num_threads=resolve_num_threads(num_threads),
            stock_trials_per_round=stock_trials_per_round,
            started_s=0.0,
        )
        if json_file is not None:
            json_file.parent.mkdir(parents=True, exist_ok=True)
        with _work_directory(work_dir) as directory:
            sides: list[Side] = ["stock", "ours"] if side == "both" else [side]
            _run(
                {"stock": job, "ours": job.model_copy(update={"trials": our_trials or trials})},
                seeds,
                sides,
                directory,
                json_file,
            )
    except AnsorMlflowError as err:
        raise click.ClickException(str(err)) from err


@contextlib.contextmanager
def _work_directory(work_dir: Path | None) -> Iterator[Path]:
    """The directory to work in. It must be new: MetaSchedule would go on from a database that it finds."""
    if work_dir is None:
        with tempfile.TemporaryDirectory(prefix="tuning-throughput-") as directory:
            yield Path(directory)
        return
    try:
        work_dir.mkdir(parents=True)
    except FileExistsError as err:
        raise click.UsageError(f"--work-dir {work_dir}: it exists; give the path of a new directory") from err
    yield work_dir.resolve()


def _run(
    jobs: Mapping[Side, Job], seeds: list[int], sides: list[Side], directory: Path, json_file: Path | None
) -> None:
    """Runs all seeds. The JSON file is written after each, so that a later failure does not cost the earlier ones."""
    console, job = Console(), jobs["stock"]
    measure = TuneOptions().model_dump(include={"number", "repeat", "min_repeat_ms", "cache_flush"})
    report: dict[str, Any] = {
        "environment": host_environment(job.num_threads),
        "settings": {
            **job.model_dump(include={"network", "trials", "num_threads", "stock_trials_per_round"}),
            "our_trials": jobs["ours"].trials,
            "seeds": seeds,
            "sides": sides,
            "measure": measure,
            "end_to_end_turns": _TURNS,
        },
        "seeds": [],
    }
    comparisons: list[Comparison] = []
    for position, seed in enumerate(seeds):
        order = sides if position % 2 == 0 else sides[::-1]
        of_seed = {side: jobs[side].model_copy(update={"side": side, "seed": seed}) for side in order}
        reports = _run_seed(of_seed, directory / f"{position}-seed-{seed}")
        comparison = compare(reports["stock"], reports["ours"]) if len(sides) == 2 else None
        print_seed(console, seed, {name: reports[name] for name in sides}, comparison)
        entry = {"seed": seed, "order": order, **{name: side.model_dump() for name, side in reports.items()}}
        report["seeds"].append(entry)
        if comparison is not None:
            entry |= comparison.model_dump()
            comparisons.append(comparison)
            report |= _summary(comparisons)
        if json_file is not None:
            json_file.write_text(json.dumps(report, indent=1))
    if comparisons:
        print_medians(console, medians(comparisons))


def _run_seed(jobs: Mapping[Side, Job], directory: Path) -> Mapping[str, SideReport]:
    """Tunes with each side in turn, then compiles and times what they found."""
    outcomes: dict[Side, tuple[Outcome, MemoryUse]] = {}
    for side, job in jobs.items():
        folder = directory / side
        folder.mkdir(parents=True)
        click.echo(f"seed {job.seed}: tuning, {side}", err=True)
        outcomes[side] = run_child(job, folder)
    libraries: dict[str, Compiled] = {
        side: compile_records(jobs[side], directory / side)
        for side, (outcome, _) in outcomes.items()
        if outcome.trials_by_status.get(TrialStatus.OK.value)
    }
    seed = next(iter(jobs.values())).seed
    click.echo(f"seed {seed}: timing the libraries", err=True)
    latencies = measure_libraries(libraries, _TURNS, seed)
    return {side: side_report(outcome, memory, latencies.get(side)) for side, (outcome, memory) in outcomes.items()}


def _summary(comparisons: list[Comparison]) -> dict[str, Any]:
    """The figures over all seeds so far."""
    better = [found for comparison in comparisons if (found := comparison.ours_better_at_all_minutes) is not None]
    return {**medians(comparisons), "ours_better_at_all_minutes": all(better) if better else None}


if __name__ == "__main__":
    main()
