"""Compiles what the tunings found and times the libraries against each other, all in child processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import BaseModel, ConfigDict

from ansor_mlflow import names
from ansor_mlflow.device import fingerprint
from ansor_mlflow.measuring import Inference, call_once, measure_in_turns, timed_call
from ansor_mlflow.model import LibraryEntry, Manifest
from ansor_mlflow.processes import in_child_process
from ansor_mlflow.tensors import random_inputs
from throughput.job import Job

_LIBRARY_FILE = "model.so"


@dataclass(frozen=True)
class Compiled:
    """A library with what is needed to run it."""

    library: Path
    manifest: Manifest
    entry: LibraryEntry


class EndToEnd(BaseModel):
    """Latency of a network with the schedules of one tuning."""

    model_config = ConfigDict(frozen=True)

    latency_ms: float
    """Median over the turns of each turn's median."""
    turns_ms: list[float]
    coverage: dict[str, Any]
    """Which tasks have a schedule; the others run untuned. See `ansor_mlflow.model.Coverage`."""


def compile_records(job: Job, directory: Path) -> Compiled:
    """Compiles a network with the fastest records of its tuning.

    Args:
        job: The tuning, which is done.
        directory: Directory of the tuning; the library is written there.
    """
    compiled: Compiled = in_child_process(call_once, partial(_compilation, job, directory))
    return compiled


def measure_libraries(libraries: Mapping[str, Compiled], turns: int, seed: int) -> dict[str, EndToEnd]:
    """Times libraries in alternating turns, each time in a fresh process."""
    calls = {
        side: partial(timed_call, partial(_run, compiled), [random_inputs(compiled.manifest.inputs, seed)])
        for side, compiled in libraries.items()
    }
    turns_ms: dict[str, list[float]] = {side: [] for side in libraries}
    for _ in range(turns):
        for side, latency in measure_in_turns(calls, 1).items():
            turns_ms[side].append(latency.median_ms)
    return {
        side: EndToEnd(
            latency_ms=median(turns_ms[side]), turns_ms=turns_ms[side], coverage=dict(compiled.entry.coverage)
        )
        for side, compiled in libraries.items()
    }


def host_environment(num_threads: int) -> dict[str, Any]:
    """The machine and the versions, as `ansor-mlflow tune` logs them."""
    environment: dict[str, Any] = in_child_process(call_once, partial(_description, num_threads))
    return environment


def _description(num_threads: int) -> Callable[[], dict[str, Any]]:
    """Runs in a child process."""
    from ansor_mlflow.device import fingerprint, resolve_target
    from ansor_mlflow.tracking import describe_environment

    return partial(describe_environment, fingerprint(resolve_target("auto", num_threads), num_threads))


def _compilation(job: Job, directory: Path) -> Callable[[], Compiled]:
    return partial(_compile, job, directory)


def _compile(job: Job, directory: Path) -> Compiled:
    """Runs in a child process."""
    from ansor_mlflow.lowering import lower
    from ansor_mlflow.model import compile_tuned
    from ansor_mlflow.networks import load_network
    from ansor_mlflow.records import RecordPair, distill
    from throughput.target import target_of

    network = load_network(job.network, seed=job.seed)
    target = target_of(job)
    device = fingerprint(target, job.num_threads)
    records, library = directory / names.RECORDS_DIR, directory / _LIBRARY_FILE
    best = records / names.BEST_DIR
    if not best.is_dir():
        distill(RecordPair.in_directory(records), best, device.target)
    coverage = compile_tuned(lower(network.model, target), target, best, library)
    return Compiled(
        library=library,
        manifest=Manifest(network=network.name, inputs=network.inputs, outputs=network.outputs, libraries=(), files={}),
        entry=LibraryEntry(path=library.name, fingerprint=device, coverage=coverage.to_dict(), provenance={}),
    )


def _run(compiled: Compiled) -> Inference:
    """Runs in a child process."""
    from ansor_mlflow.model import open_library

    return open_library(compiled.library, compiled.manifest, compiled.entry).run
