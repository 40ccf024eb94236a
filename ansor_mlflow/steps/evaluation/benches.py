"""Where a model runs while it is evaluated: on this host, or on a server of a fleet."""

from __future__ import annotations

import itertools
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ansor_mlflow import names
from ansor_mlflow.device import available_cpus
from ansor_mlflow.errors import CorrectnessError, UserInputError
from ansor_mlflow.fleet import NetworkReply, NetworkWork, ServerSession, run_network
from ansor_mlflow.foreign import duration
from ansor_mlflow.measuring import (
    Deviation,
    KernelTimes,
    Latency,
    MachineNoise,
    MakeInference,
    Turn,
    compare_outputs,
    expected_of,
    library_inference,
    measure_in_turns,
    outputs_of,
    time_first_calls,
    time_kernels,
    time_parts,
    timed_call,
    turn_in_process,
)
from ansor_mlflow.model import LibraryEntry, Manifest, choose_for_server, choose_library, threads_here, timed_parts
from ansor_mlflow.networks import SizeUse, size_uses
from ansor_mlflow.parameters import CheckOptions
from ansor_mlflow.tensors import OPEN, Arrays, NetworkShapes, Padded, TensorSpec, random_inputs
from ansor_mlflow.tracking import StepRun, kernels_page

_TUNED = "tuned"
_log = logging.getLogger("ansor_mlflow")


def time_sizes(
    network: Padded,
    examples: Sequence[Arrays],
    make_tuned: MakeInference,
    rivals: Mapping[str, MakeInference],
    options: CheckOptions,
    noise: MachineNoise,
) -> list[dict[str, Any]]:
    """Times each size by itself, the model and its rivals in turns; returns the entries of `sizes.json`."""
    found = []
    for size, inputs in zip(network.sizes, examples, strict=True):
        contenders = {_TUNED: make_tuned, **rivals}
        calls = {name: partial(timed_call, make_inference, [inputs]) for name, make_inference in contenders.items()}
        latencies = measure_in_turns(calls, options.turns, noise, options.measure_s)
        times = (f"{name} {duration(measured.median_ms / 1e3)}" for name, measured in latencies.items())
        _log.info("%s: %s", size, ", ".join(times))
        tuned_ms = latencies[_TUNED].median_ms
        shapes = {spec.name: spec.shape for spec in size.inputs}
        entry: dict[str, Any] = {"input_shapes": shapes, names.LATENCY_MS: tuned_ms}
        for rival in rivals:
            rival_ms = latencies[rival].median_ms
            entry |= {names.rival_latency_ms(rival): rival_ms, names.speedup_vs(rival): rival_ms / tuned_ms}
        found.append(entry)
    for number, use in measured_uses(network, [entry[names.LATENCY_MS] for entry in found]).items():
        padded = {"padded_from": use.shortest, "mean_loss": use.mean_loss, "worst_loss": use.worst_loss}
        found[number] |= padded
        _log.info(
            "%s: requests of %d..%d run in it, which by padding take %.0f %% longer on average, %.0f %% at most",
            network.sizes[number],
            use.shortest,
            use.size,
            use.mean_loss * 100,
            use.worst_loss * 100,
        )
    return found


def measured_uses(network: Padded, latencies_ms: Sequence[float]) -> dict[int, SizeUse]:
    """What requests lose that are padded to a size, by its number: of all but the smallest, below which none is timed.

    What a request would take without padding is an estimate: the latency between two sizes is taken to be linear. There
    are none where not every open dimension is padded, or where these differ in a size, as those of images do.
    """
    open_axes = {
        spec.name: [axis for axis, dim in enumerate(spec.shape) if dim == OPEN]
        for spec in network.inputs
        if OPEN in spec.shape
    }
    by_size = [
        {spec.shape[axis] for spec in size.inputs for axis in open_axes.get(spec.name, ())} for size in network.sizes
    ]
    if not open_axes.keys() <= network.pad.keys() or any(len(lengths) > 1 for lengths in by_size):
        return {}
    numbers = {length: number for number, (length,) in enumerate(by_size)}
    lengths = sorted(numbers)
    uses = size_uses(lengths, lengths, [latencies_ms[numbers[length]] for length in lengths], lengths[0])
    return {numbers[use.size]: use for use in uses[1:] if use.shortest < use.size}


def require_harmless_padding(
    manifest: Manifest, compare: Callable[[Sequence[Arrays]], Deviation], tolerance: float, seed: int
) -> None:
    """Checks that a model computes of padded inputs what ONNX Runtime computes of them without padding: of a request
    that is padded by little, and for each size of one that is padded by as much as any.
    """
    padded = dict.fromkeys([*itertools.islice(_padded(manifest), 1), *_most_padded(manifest)])
    if not padded:
        _log.info("nothing is ever padded: whatever is smaller than a size of %s is one, too", manifest.network)
        return
    difference = _compared(padded, compare, seed)
    if difference is None:
        return
    if not difference.max_rel_error <= tolerance:
        raise CorrectnessError(
            f"padding {', '.join(manifest.pad)} of {manifest.network} changes its outputs: they differ from ONNX "
            f"Runtime's, which needs no padding, by max_rel_error={difference.max_rel_error:.3g}, allowed is "
            f"{tolerance:g}; compile it without pad, or with other values"
        )


def _compared(
    padded: Collection[tuple[TensorSpec, ...]], compare: Callable[[Sequence[Arrays]], Deviation], seed: int
) -> Deviation | None:
    """The worst of some requests; all at once, or one by one where ONNX Runtime cannot compute one of them."""
    try:
        return compare([random_inputs(specs, seed) for specs in padded])
    except UserInputError as err:
        if len(padded) > 1:
            found = [_compared([specs], compare, seed) for specs in padded]
            known = [difference for difference in found if difference]
            return Deviation.worst(known) if known else None
        (specs,) = padded
        shapes = NetworkShapes(specs, ())
        _log.warning("what padding does to the outputs of %s is not checked, for want of a reference: %s", shapes, err)
        return None


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


def _most_padded(manifest: Manifest) -> Iterator[tuple[TensorSpec, ...]]:
    """For each size, inputs that are a little too large for the next smaller one; for the smallest, half of its own."""
    sizes = sorted(manifest.sizes, key=lambda size: sum(math.prod(spec.shape) for spec in size.inputs))
    known = {size.inputs for size in sizes}
    for number, size in enumerate(sizes):
        before = sizes[number - 1].inputs if number else [None] * len(size.inputs)
        inputs = []
        for spec, smaller, open_ in zip(size.inputs, before, manifest.inputs, strict=True):
            limits = [n + 1 for n in smaller.shape] if smaller else [max(1, n // 2) for n in spec.shape]
            dims = zip(spec.shape, limits, open_.shape, strict=True)
            shape = tuple(min(n, limit) if dim == OPEN else n for n, limit, dim in dims)
            inputs.append(replace(spec, shape=shape) if spec.name in manifest.pad else spec)
        if tuple(inputs) not in known:
            yield tuple(inputs)


def _smaller(spec: TensorSpec, open_: TensorSpec, less: int, axes: Set[int]) -> tuple[int, ...]:
    dims = enumerate(zip(spec.shape, open_.shape, strict=True))
    return tuple(max(1, n - less) if dim == OPEN and axis in axes else n for axis, (n, dim) in dims)


Library = tuple[Path, LibraryEntry]


class Bench(ABC):
    """A model, and where it runs."""

    why_no_rivals = ""
    """Why the runtimes of this host take no part; empty where they do."""
    num_threads: int
    reference_threads: int

    def __init__(self, directory: Path, manifest: Manifest, entry: LibraryEntry, noise: MachineNoise) -> None:
        self.directory = directory
        self.manifest = manifest
        self.entry = entry
        self.noise = noise
        self.network = directory / names.NETWORK_FILE

    @abstractmethod
    def outputs(self, examples: Sequence[Arrays]) -> Sequence[Arrays]:
        """The model's outputs for some inputs. Raises MachineError: the process died, or the server is lost."""

    @abstractmethod
    def turn(self, library: Library | None, of_each_size: Sequence[Arrays], measure_s: float) -> Turn:
        """Times a library, or the one of the model that this device takes."""

    @abstractmethod
    def time_first_calls(self, library: Library, of_each_size: Sequence[Arrays], limit_s: float) -> Latency:
        """Times a library that may be very slow; see `measuring.time_first_calls`."""

    @abstractmethod
    def details(
        self, of_each_size: Sequence[Arrays], rivals: Mapping[str, MakeInference], options: CheckOptions, run: StepRun
    ) -> tuple[dict[str, float], KernelTimes | None]:
        """Logs where the time goes; returns metrics and the times of the kernels, where they are known."""

    def expected(self, examples: Sequence[Arrays]) -> list[Arrays]:
        return expected_of(self.network, self.reference_threads, examples)

    def compare(self, examples: Sequence[Arrays]) -> Deviation:
        pairs = zip(self.outputs(examples), self.expected(examples), strict=True)
        return Deviation.worst([compare_outputs(*pair) for pair in pairs])


class HostBench(Bench):
    """A model on this host, in processes of its own."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        super().__init__(directory, manifest, choose_library(directory, manifest), MachineNoise())
        self.num_threads = self.reference_threads = threads_here(self.entry)
        self._make_tuned = partial(library_inference, directory / self.entry.path, manifest, self.entry)

    def outputs(self, examples: Sequence[Arrays]) -> Sequence[Arrays]:
        return outputs_of(self._make_tuned, examples)

    def turn(self, library: Library | None, of_each_size: Sequence[Arrays], measure_s: float) -> Turn:
        make: MakeInference = self._make_tuned
        if library is not None:
            make = partial(library_inference, library[0], self.manifest, library[1])
        return partial(turn_in_process, partial(timed_call, make, of_each_size), measure_s)

    def time_first_calls(self, library: Library, of_each_size: Sequence[Arrays], limit_s: float) -> Latency:
        make = partial(library_inference, library[0], self.manifest, library[1])
        return time_first_calls(partial(timed_call, make, of_each_size), limit_s)

    def details(
        self, of_each_size: Sequence[Arrays], rivals: Mapping[str, MakeInference], options: CheckOptions, run: StepRun
    ) -> tuple[dict[str, float], KernelTimes | None]:
        metrics, library = {}, self.directory / self.entry.path
        if self.manifest.sizes:
            of_sizes = time_sizes(self.manifest, of_each_size, self._make_tuned, rivals, options, self.noise)
            run.log_json(of_sizes, names.SIZES_FILE)
        if any(part.runs_in == "onnxruntime" for part in self.entry.parts):
            seconds = time_parts(library, self.manifest, self.entry, of_each_size)
            timed = timed_parts(self.entry.parts, seconds)
            run.log_json(timed, names.PARTS_FILE)
            theirs = [s for part, s in zip(self.entry.parts, seconds, strict=True) if part.runs_in == "onnxruntime"]
            metrics[names.ONNXRUNTIME_SHARE] = sum(theirs) / sum(seconds)
        metrics[names.PROBE_SPREAD] = self.noise.spread
        kernels = time_kernels(library, self.manifest, self.entry, of_each_size)
        run.log_json(kernels.to_dict(), names.KERNELS_FILE)
        page = kernels_page(self.manifest.network, self.entry.fingerprint.description, kernels)
        run.log_text(page, names.KERNELS_REPORT_FILE)
        return metrics, kernels


class ServerBench(Bench):
    """A model on a server of a fleet, in one session of it."""

    def __init__(self, directory: Path, manifest: Manifest, session: ServerSession) -> None:
        entry = choose_for_server(directory, manifest, session.device)
        super().__init__(directory, manifest, entry, MachineNoise(server=str(session.server)))
        self.why_no_rivals = f"it runs on this host, the model on server {session.server}"
        self.num_threads, self.reference_threads = entry.fingerprint.num_threads, available_cpus()
        self._session = session

    def outputs(self, examples: Sequence[Arrays]) -> Sequence[Arrays]:
        return self._run(None, examples, None).outputs

    def turn(self, library: Library | None, of_each_size: Sequence[Arrays], measure_s: float) -> Turn:

        def turn() -> tuple[list[float], float]:
            reply = self._run(library, of_each_size, measure_s)
            return list(reply.samples_s), reply.waited

        return turn

    def time_first_calls(self, library: Library, of_each_size: Sequence[Arrays], limit_s: float) -> Latency:
        del limit_s  # a session of a server ends by itself
        samples_s, _ = self.turn(library, of_each_size, 0.0)()
        return Latency(np.array(samples_s) * 1e3)

    def details(self, *_: object) -> tuple[dict[str, float], KernelTimes | None]:
        return {}, None

    def _run(self, library: Library | None, examples: Sequence[Arrays], measure_s: float | None) -> NetworkReply:
        path, entry = library or (self.directory / self.entry.path, self.entry)
        work = NetworkWork(
            library=path, network=self.manifest, entry=entry, examples=tuple(examples), measure_s=measure_s
        )
        return run_network(self._session, work)
