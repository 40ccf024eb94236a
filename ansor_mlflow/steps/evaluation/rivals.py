"""The runtimes that a model is compared with: which take part, and whether they compute the same."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ansor_mlflow import names
from ansor_mlflow.errors import MachineError, UserInputError
from ansor_mlflow.measuring import (
    RIVALS,
    Deviation,
    Latency,
    MakeInference,
    RivalTask,
    choose_rivals,
    deviation_of,
    rival_inference,
    version_of,
)
from ansor_mlflow.model import LibraryEntry, Manifest, threads_here
from ansor_mlflow.parameters import Rivals
from ansor_mlflow.settings import Dtype, LoweringSettings
from ansor_mlflow.tensors import Arrays
from ansor_mlflow.tracking import find_program

_log = logging.getLogger("ansor_mlflow")


@dataclass(frozen=True, kw_only=True)
class CheckedRival:
    """A rival that has run a network, or could not."""

    name: str
    make_inference: MakeInference
    deviation: Deviation | None = None
    """How far its outputs are from the reference; None where it cannot run the network."""
    is_right: bool = False
    absent: str = ""
    dtype: Dtype = "float32"
    """What it computes float32 in."""

    def to_dict(self, latency: Latency | None) -> dict[str, Any]:
        found: dict[str, Any] = {"rival": self.name, "version": version_of(self.name)}
        if latency is None or self.deviation is None:
            return {**found, "absent": self.absent}
        return {
            **found,
            "dtype": self.dtype,
            names.LATENCY_MS: latency.median_ms,
            names.LATENCY_P90_MS: latency.p90_ms,
            names.LATENCY_STD_MS: latency.std_ms,
            names.MAX_ABS_ERROR: self.deviation.max_abs_error,
            names.MAX_REL_ERROR: self.deviation.max_rel_error,
            "is_right": self.is_right,
        }


def rival_task(
    given: Rivals, directory: Path, manifest: Manifest, entry: LibraryEntry, scratch: Path, *, trust: bool
) -> RivalTask:
    """What rivals compute in the place of a model, on the same device and with as many threads."""
    network = str(entry.provenance.get("network", ""))
    needs_program = any(RIVALS[name].needs_program for name in choose_rivals(given))
    return RivalTask(
        network=directory / names.NETWORK_FILE,
        outputs=tuple(spec.name for spec in manifest.outputs),
        num_threads=threads_here(entry),
        program=find_program(network, scratch / "program") if needs_program and trust else None,
        inputs=manifest.inputs,
        platform=manifest.platform,
        dtype=LoweringSettings.among(entry.provenance).dtype,
    )


def check_rivals(
    given: Rivals,
    task: RivalTask,
    examples: Sequence[Arrays],
    expected: Sequence[Arrays],
    tolerance: float,
    why_absent: str = "",
) -> list[CheckedRival]:
    """Runs each rival in a process of its own, and compares its outputs with ONNX Runtime's.

    One that cannot run the network, or computes something else, is a warning.
    """
    is_auto = given == "auto"
    chosen = [each for each in choose_rivals(given) if task.program or not (is_auto and RIVALS[each].needs_program)]
    if not chosen:
        return []
    if why_absent:
        _log.info("%s not timed: %s", " and ".join(RIVALS[rival].title for rival in chosen), why_absent)
        return [
            CheckedRival(name=rival, make_inference=partial(rival_inference, rival, task), absent=why_absent)
            for rival in chosen
        ]
    _log.info("comparing the outputs of %s", ", ".join(RIVALS[rival].title for rival in chosen))
    return [_check(rival, task, examples, expected, tolerance) for rival in chosen]


def _check(
    rival: str, task: RivalTask, examples: Sequence[Arrays], expected: Sequence[Arrays], tolerance: float
) -> CheckedRival:
    make_inference = partial(rival_inference, rival, task)
    try:
        deviation = deviation_of(make_inference, examples, expected)
    except (MachineError, UserInputError) as err:
        _log.warning("%s is not timed: %s", RIVALS[rival].title, err)
        return CheckedRival(name=rival, make_inference=make_inference, absent=str(err))
    is_right = deviation.max_rel_error <= tolerance
    if not is_right:
        _log.warning(
            "%s computes something else, max_rel_error=%.3g, allowed is %g; it is timed, but is not the best rival",
            RIVALS[rival].title,
            deviation.max_rel_error,
            tolerance,
        )
    dtype = task.dtype if task.dtype == "bfloat16" and RIVALS[rival].has_bfloat16 else "float32"
    return CheckedRival(name=rival, make_inference=make_inference, deviation=deviation, is_right=is_right, dtype=dtype)


def best_of(rivals: Sequence[CheckedRival], latencies: Mapping[str, Latency]) -> str | None:
    """The fastest rival whose outputs are right; None where there is none."""
    right = [rival.name for rival in rivals if rival.is_right]
    return min(right, key=lambda name: latencies[name].median_ms, default=None)


def rival_metrics(
    rivals: Sequence[CheckedRival], latencies: Mapping[str, Latency], tuned_ms: float
) -> dict[str, float]:
    """The metrics of those that were timed."""
    found = {rival.name: latencies[rival.name].median_ms for rival in rivals if not rival.absent}
    metrics = {names.rival_latency_ms(name): rival_ms for name, rival_ms in found.items()}
    metrics |= {names.speedup_vs(name): rival_ms / tuned_ms for name, rival_ms in found.items()}
    if best := best_of(rivals, latencies):
        metrics[names.SPEEDUP_VS_BEST] = found[best] / tuned_ms
    return metrics
