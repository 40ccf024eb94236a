"""Loads a model directory: checks it, takes or builds the library for this host, and says which and why."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ansor_mlflow.device import CPU, HugePages, Platform
from ansor_mlflow.errors import AnsorMlflowError, MachineError, RecordsError, UserInputError
from ansor_mlflow.files import scratch_directory
from ansor_mlflow.model.choice import (
    Choice,
    LoadOptions,
    entries_to_rebuild,
    find_library,
    host_fingerprint,
    nothing_runs,
    threads_here,
)
from ansor_mlflow.model.manifest import LIBRARY_FILE, LibraryEntry, Manifest, records_path, verify_package
from ansor_mlflow.model.rebuild import BuildJob, build_in_child_process, require_builder
from ansor_mlflow.model.sizes import SizeChoice
from ansor_mlflow.model.virtual_machines import VirtualMachines
from ansor_mlflow.names import NETWORK_FILE
from ansor_mlflow.records import RecordPair
from ansor_mlflow.settings import LoweringSettings
from ansor_mlflow.tensors import OPEN, Arrays, NetworkShapes, Padded, all_sizes

_OF_ANOTHER_DEVICE = ("estimated_latency_ms", "target", "num_threads", "host", "target_mismatch")
"""Entries of a provenance that say on which device its library was tuned."""
_log = logging.getLogger(__name__)


def load_package(directory: Path, manifest: Manifest, options: LoadOptions | None = None) -> TunedModel:
    """Checks a model directory and loads a library for this host: exact, compatible, rebuilt or untuned.

    Raises:
        ModelError: A digest does not match, or no library runs on this host and none may or can be built.
    """
    options = options or LoadOptions()
    verify_package(directory, manifest)
    choice, rejected = find_library(directory, manifest, options)
    if choice is not None:
        model = open_library(directory / choice.entry.path, manifest, choice.entry, choice, options)
    else:
        model = _build(directory, manifest, options, rejected)
    _log.log(logging.INFO if model.choice.level == "exact" else logging.WARNING, "%s", model.choice)
    return model


def open_library(
    library: Path,
    network: Padded,
    entry: LibraryEntry,
    choice: Choice | None = None,
    options: LoadOptions | None = None,
) -> TunedModel:
    """Loads a library whose digest was checked, or that was just built. Its kernels run on as many threads as it was
    made for, unless `options` name a number.
    """
    options = options or LoadOptions()
    num_threads = options.num_threads or threads_here(entry)
    choice = choice or Choice(level="exact", entry=entry, reason="it was asked for")
    return TunedModel(
        library,
        network,
        choice,
        num_threads=num_threads,
        platform=entry.fingerprint.platform,
        huge_pages=options.huge_pages,
    )


def _build(directory: Path, manifest: Manifest, options: LoadOptions, rejected: Sequence[str]) -> TunedModel:
    """Builds a library in a directory that is gone when this returns: what is open needs its file no more."""
    _require_build(directory, options, rejected)
    reasons = list(rejected)
    with scratch_directory() as scratch:
        library = Path(scratch, LIBRARY_FILE)
        for attempt in _attempts(directory, manifest, options):
            _log.warning("building %s; this may take minutes", attempt)
            try:
                entry = _build_library(attempt, directory, manifest, options, library)
                reason, rejected = _outcome(attempt, entry), tuple(reasons)
                choice = Choice(level=attempt.level, entry=entry, reason=reason, rejected=rejected)
                return open_library(library, manifest, entry, choice, options)
            except AnsorMlflowError as err:
                reasons.append(f"not {attempt}: {err}")
    raise nothing_runs(directory, reasons if options.allow_untuned else [*reasons, "allow_untuned is off"])


def _require_build(directory: Path, options: LoadOptions, rejected: Sequence[str]) -> None:
    if options.device != "cpu" or not options.allow_rebuild:
        rule = "allow_rebuild is off" if options.device == "cpu" else f"none is built for {options.device} here"
        raise nothing_runs(directory, [*rejected, rule])
    try:
        require_builder()
    except MachineError as err:
        raise nothing_runs(directory, [*rejected, f"none can be built: {err}"]) from err


@dataclass(frozen=True)
class _Attempt:
    """A way to build a library."""

    level: Literal["rebuilt", "untuned"]
    entry: LibraryEntry
    """The library whose settings are taken."""
    records: Path | None

    def __str__(self) -> str:
        device = self.entry.fingerprint.description
        return f"a library from the records for {device}" if self.records else "an untuned library"


def _attempts(directory: Path, manifest: Manifest, options: LoadOptions) -> Iterator[_Attempt]:
    nearest = entries_to_rebuild(manifest, options)
    for entry in nearest:
        records = directory / records_path(entry.fingerprint)
        if RecordPair.in_directory(records).records.is_file():
            yield _Attempt("rebuilt", entry, records)
    if options.allow_untuned:
        yield _Attempt("untuned", [*nearest, *manifest.libraries][0], None)


def _build_library(
    attempt: _Attempt, directory: Path, manifest: Manifest, options: LoadOptions, library: Path
) -> LibraryEntry:
    """Builds a library for this host, and returns what is known of it."""
    host = host_fingerprint(options)
    provenance = attempt.entry.provenance
    job = BuildJob(
        network=str(directory / NETWORK_FILE),
        sizes=manifest.sizes,
        records=str(attempt.records or ""),
        device=host,
        lowering=LoweringSettings.among(provenance),
        library=str(library),
    )
    built = build_in_child_process(job)
    if attempt.records and not built.coverage["num_covered"]:
        raise RecordsError("the network has other tasks here, and none has a record")
    kept = {name: value for name, value in provenance.items() if name not in _OF_ANOTHER_DEVICE}
    return replace(built, path=attempt.entry.path, provenance={**kept, "built_from": attempt.entry.path})


def _outcome(attempt: _Attempt, entry: LibraryEntry) -> str:
    if attempt.level == "untuned":
        return "it was built here without records, with schedules that nothing has measured"
    return (
        f"it was built here with the records for {attempt.entry.fingerprint.description}, which cover "
        f"{entry.coverage['task_share']:.0%} of the tasks"
    )


class TunedModel:
    """A compiled network in memory. Safe to call from several threads; see `VirtualMachines`."""

    def __init__(
        self,
        library: Path,
        network: Padded,
        choice: Choice,
        *,
        num_threads: int,
        platform: Platform = CPU,
        huge_pages: bool = True,
    ) -> None:
        self.inputs = network.inputs
        """The inputs; dimensions of several sizes are `OPEN`."""
        self.outputs = network.outputs
        self.sizes: tuple[NetworkShapes, ...] = all_sizes(network)
        """What it was compiled for."""
        self.choice = choice
        self._dtypes = {spec.name: np.dtype(spec.dtype) for spec in self.inputs}
        self._size_choice = SizeChoice(self.sizes, network.pad)
        self._machines = VirtualMachines(
            library, self.sizes, choice.entry.parts, num_threads, platform, huge_pages=huge_pages
        )

    @property
    def entry(self) -> LibraryEntry:
        """The library that was loaded."""
        return self.choice.entry

    @property
    def huge_pages(self) -> HugePages:
        """The memory of weights, and after a call of activations, that is in huge pages."""
        return self._machines.huge_pages

    def run(self, inputs: Mapping[str, npt.ArrayLike]) -> Arrays:
        """Runs the network once.

        Args:
            inputs: An array for each input, of exactly its dtype, and of exactly its shape in one of the sizes, but for
                those that are padded.

        Returns:
            The outputs by name; the arrays belong to the caller.

        Raises:
            UserInputError: A name, a shape or a dtype is not as the network expects.
        """
        arrays = self._checked(inputs)
        size, padded = self._size_choice.choose(arrays)
        outputs = self._size_choice.cropped(self._machines.run(padded, size), arrays, size)
        return {spec.name: array for spec, array in zip(self.outputs, outputs, strict=True)}

    def seconds_of_parts(self, inputs: Mapping[str, npt.ArrayLike]) -> list[float]:
        """How long each part of the network takes in a call, in the order of `entry.parts`."""
        size, padded = self._size_choice.choose(self._checked(inputs))
        return self._machines.seconds_of_parts(padded, size)

    def seconds_of_kernels(self, inputs: Mapping[str, npt.ArrayLike]) -> list[tuple[str, float]]:
        """The names of the library's functions that a call runs, TVM's own among them, and how long each takes."""
        size, padded = self._size_choice.choose(self._checked(inputs))
        return self._machines.seconds_of_kernels(padded, size)

    def _checked(self, inputs: Mapping[str, npt.ArrayLike]) -> list[npt.NDArray[Any]]:
        if not isinstance(inputs, Mapping):
            raise UserInputError(f"inputs are of the type {type(inputs).__name__}: give {self._expected()}, by name")
        if inputs.keys() != self._dtypes.keys():
            raise UserInputError(f"inputs {sorted(map(str, inputs))}: the model expects {self._expected()}")
        arrays = []
        for spec in self.inputs:
            array = np.asarray(inputs[spec.name])
            if array.dtype != self._dtypes[spec.name] or not _fits(array.shape, spec.shape):
                given = f"{array.dtype} {array.shape}"
                raise UserInputError(f"input {spec.name!r} is {given}: the model expects {self._expected()}")
            arrays.append(array)
        return arrays

    def _expected(self) -> str:
        return ", ".join(f"{spec.name!r}: {spec.dtype} {spec.shape}" for spec in self.inputs)


def _fits(given: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return given == shape or (
        len(given) == len(shape) and all(dim in (size, OPEN) for size, dim in zip(given, shape, strict=True))
    )
