"""Loads a model directory: checks it, takes or builds the library for this host, and says which and why."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ansor_mlflow.device import device_kind
from ansor_mlflow.errors import AnsorMlflowError, MachineError, RecordsError
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
from ansor_mlflow.model.digests import verify_package
from ansor_mlflow.model.manifest import LIBRARY_FILE, LibraryEntry, Manifest, records_path
from ansor_mlflow.model.rebuild import BuildJob, build_in_child_process, require_builder
from ansor_mlflow.model.tuned import TunedModel
from ansor_mlflow.names import NETWORK_FILE
from ansor_mlflow.records import RecordPair
from ansor_mlflow.settings import LoweringSettings
from ansor_mlflow.tensors import Padded

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
        device=device_kind(entry.fingerprint.target),
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
