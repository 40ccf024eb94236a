"""What is looked at beside where a network has several sizes: each one's latency, and what padding does."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ansor_mlflow import names
from ansor_mlflow.errors import CorrectnessError, UserInputError
from ansor_mlflow.measuring import Deviation, MachineNoise, MakeInference, measure_in_turns, timed_call
from ansor_mlflow.model import Manifest
from ansor_mlflow.parameters import CheckOptions
from ansor_mlflow.tensors import OPEN, Arrays, NetworkShapes, TensorSpec, random_inputs

_TUNED = "tuned"
_log = logging.getLogger("ansor_mlflow")


@dataclass(frozen=True, kw_only=True)
class SizeLatency:
    """Medians of one size of a network."""

    input_shapes: Mapping[str, tuple[int, ...]]
    latency_ms: float
    rivals_ms: Mapping[str, float]
    """Of each rival."""

    def to_dict(self) -> dict[str, Any]:
        """Its entry in `sizes.json`."""
        found: dict[str, Any] = {"input_shapes": self.input_shapes, names.LATENCY_MS: self.latency_ms}
        for rival, rival_ms in self.rivals_ms.items():
            found |= {names.rival_latency_ms(rival): rival_ms, names.speedup_vs(rival): rival_ms / self.latency_ms}
        return found


def time_sizes(
    sizes: Sequence[NetworkShapes],
    examples: Sequence[Arrays],
    make_tuned: MakeInference,
    rivals: Mapping[str, MakeInference],
    options: CheckOptions,
    noise: MachineNoise,
) -> list[SizeLatency]:
    """Times each size by itself, the model and its rivals in turns."""
    found = []
    for size, inputs in zip(sizes, examples, strict=True):
        contenders = {_TUNED: make_tuned, **rivals}
        calls = {name: partial(timed_call, make_inference, [inputs]) for name, make_inference in contenders.items()}
        latencies = measure_in_turns(calls, options.turns, noise, options.measure_s)
        _log.info("%s: %s", size, ", ".join(f"{name} {found.median_ms:.4g} ms" for name, found in latencies.items()))
        found.append(
            SizeLatency(
                input_shapes={spec.name: spec.shape for spec in size.inputs},
                latency_ms=latencies[_TUNED].median_ms,
                rivals_ms={rival: latencies[rival].median_ms for rival in rivals},
            )
        )
    return found


def require_harmless_padding(
    manifest: Manifest, compare: Callable[[Sequence[Arrays]], Deviation], tolerance: float, seed: int
) -> None:
    """Checks that a model computes of padded inputs what ONNX Runtime computes of them without padding."""
    padded = next(_padded(manifest), None)
    if padded is None:
        _log.info("nothing is ever padded: whatever is smaller than a size of %s is one, too", manifest.network)
        return
    try:
        difference = compare([random_inputs(padded, seed)])
    except UserInputError as err:
        _log.warning("what padding does to the outputs is not checked, for want of a reference: %s", err)
        return
    if not difference.max_rel_error <= tolerance:
        raise CorrectnessError(
            f"padding {', '.join(manifest.pad)} of {manifest.network} changes its outputs: they differ from ONNX "
            f"Runtime's, which needs no padding, by max_rel_error={difference.max_rel_error:.3g}, allowed is "
            f"{tolerance:g}; compile it without pad, or with other values"
        )


def _padded(manifest: Manifest) -> Iterator[tuple[TensorSpec, ...]]:
    """Inputs that a model pads, those that are nearest to a large size first; along one dimension alone come last."""
    sizes = sorted(manifest.sizes, key=lambda size: -sum(math.prod(spec.shape) for spec in size.inputs))
    known = {size.inputs for size in sizes}
    open_axes = {axis for spec in manifest.inputs for axis, dim in enumerate(spec.shape) if dim == OPEN}
    for axes in (open_axes, *({axis} for axis in sorted(open_axes))):
        for size in sizes:
            for less in range(1, max(n for spec in size.inputs for axis, n in enumerate(spec.shape) if axis in axes)):
                smaller = tuple(
                    replace(spec, shape=_smaller(spec, open_, less, axes)) if spec.name in manifest.pad else spec
                    for spec, open_ in zip(size.inputs, manifest.inputs, strict=True)
                )
                if smaller not in known:
                    yield smaller


def _smaller(spec: TensorSpec, open_: TensorSpec, less: int, axes: Set[int]) -> tuple[int, ...]:
    dims = enumerate(zip(spec.shape, open_.shape, strict=True))
    return tuple(max(1, n - less) if dim == OPEN and axis in axes else n for axis, (n, dim) in dims)
