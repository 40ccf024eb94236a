"""What is timed: models of ours, and the rivals on the same network; and the process that times one of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ansor_mlflow.measuring import (
    Inference,
    MakeInference,
    RivalTask,
    call_once,
    choose_rivals,
    measure_watched,
    rival_inference,
    tuned_inference,
)
from ansor_mlflow.model import LIBRARY_FILE, BuildJob, LibraryEntry, Manifest, build_in_child_process, open_library
from ansor_mlflow.names import NETWORK_FILE
from ansor_mlflow.processes import in_child_process
from ansor_mlflow.settings import LoweringSettings
from ansor_mlflow.tensors import Arrays

OURS = "ours"


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What a process found that loads a network, calls it for a while, and ends."""

    samples_s: list[float]
    """Seconds of single calls."""
    waited: float
    """Share of the time that the process waited for a CPU."""
    load_s: float
    """With the imports, and without the first call."""
    peak_memory_bytes: int
    """Resident memory, that of Python and of what times it included."""


def contenders_of(model: Path, builds: Sequence[str], scratch: Path) -> Iterator[tuple[str, MakeInference]]:
    """Yields the contenders of a tuned model by their names: other compilations of its network, itself, the rivals.

    Args:
        model: Directory of the model, with one library, which is for this host.
        builds: Names of the other compilations.
        scratch: Where other libraries are written.
    """
    manifest = Manifest.read(model)
    (entry,) = manifest.libraries
    for build in builds:
        yield build, _built(model, manifest, entry, scratch / build, untuned=build == "untuned")
    yield OURS, partial(tuned_inference, model)
    task = RivalTask(
        network=model / NETWORK_FILE,
        outputs=tuple(spec.name for spec in manifest.outputs),
        num_threads=entry.fingerprint.num_threads,
        dtype=LoweringSettings.among(entry.provenance).dtype,
    )
    for rival in choose_rivals("auto"):
        if rival != "torch":  # which needs a program, and the networks here are ONNX
            yield rival, partial(rival_inference, rival, task)


def time_turn(make_inference: MakeInference, inputs: Arrays) -> Turn:
    """Times a contender in a process of its own."""
    turn: Turn = in_child_process(call_once, partial(_turn, make_inference, inputs))
    return turn


def _built(model: Path, manifest: Manifest, entry: LibraryEntry, directory: Path, *, untuned: bool) -> MakeInference:
    """The network without records, as TVM compiles it by itself, or as the sketches choose."""
    directory.mkdir()
    library = directory / LIBRARY_FILE
    job = BuildJob(
        network=str(model / NETWORK_FILE),
        sizes=manifest.sizes,
        records="",
        untuned=untuned,
        device=entry.fingerprint,
        lowering=LoweringSettings.among(entry.provenance),
        library=str(library),
    )
    return partial(_open, library, manifest, build_in_child_process(job))


def _open(library: Path, manifest: Manifest, entry: LibraryEntry) -> Inference:
    return open_library(library, manifest, entry).run


def _peak_memory_bytes() -> int:
    """Of this process; `getrusage` has that of its parent, too, where this is larger."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def _turn(make_inference: MakeInference, inputs: Arrays) -> Callable[[], Any]:
    def run() -> Turn:
        started = time.perf_counter()
        inference = make_inference()
        load_s = time.perf_counter() - started
        samples_s, waited = measure_watched(partial(inference, inputs), warm_up_s=0.5, measure_s=1.5)
        return Turn(samples_s=samples_s, waited=waited, load_s=load_s, peak_memory_bytes=_peak_memory_bytes())

    return run
