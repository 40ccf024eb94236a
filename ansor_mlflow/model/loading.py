"""Loads a model directory: checks it, takes or builds the library for this host, and says which and why.

A build runs in a process of its own: what LLVM cannot compile ends a process, and what TVM needs to compile a network
would stay in the memory of the one that serves it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ansor_mlflow.errors import AnsorMlflowError, MachineError, RecordsError
from ansor_mlflow.files import scratch_directory
from ansor_mlflow.model.building import BuildJob, build_in_child_process, fallback_among, require_builder
from ansor_mlflow.model.choice import (
    Choice,
    Level,
    LoadOptions,
    entries_to_rebuild,
    find_library,
    host_fingerprint,
    nothing_runs,
    threads_here,
)
from ansor_mlflow.model.manifest import LIBRARY_FILE, LibraryEntry, Manifest, records_path, verify_package
from ansor_mlflow.model.tuned_model import TunedModel
from ansor_mlflow.names import NETWORK_FILE
from ansor_mlflow.records import RecordPair
from ansor_mlflow.settings import LoweringSettings
from ansor_mlflow.tensors import Padded

_OF_ANOTHER_DEVICE = ("estimated_latency_ms", "target", "num_threads", "host", "target_mismatch")
"""Entries of a provenance that say on which device its library was tuned."""
_log = logging.getLogger(__name__)


def load_package(directory: Path, manifest: Manifest, options: LoadOptions | None = None) -> TunedModel:
    """Checks a model directory and loads a library for this host: exact, compatible, rebuilt or untuned."""
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
    """Builds a library, with the records for the nearest device that has some, or else without; in a directory that is
    gone when this returns: what is open needs its file no more.
    """
    if options.device != "cpu" or not options.allow_rebuild:
        rule = "allow_rebuild is off" if options.device == "cpu" else f"none is built for {options.device} here"
        raise nothing_runs(directory, [*rejected, rule])
    try:
        require_builder()
    except MachineError as err:
        raise nothing_runs(directory, [*rejected, f"none can be built: {err}"]) from err
    reasons, nearest = list(rejected), entries_to_rebuild(manifest, options)
    attempts: list[tuple[LibraryEntry, Path | None]] = []
    for entry in nearest:
        records = directory / records_path(entry.fingerprint)
        if RecordPair.in_directory(records).records.is_file():
            attempts.append((entry, records))
    if options.allow_untuned:
        attempts.append(([*nearest, *manifest.libraries][0], None))
    with scratch_directory() as scratch:
        library = Path(scratch, LIBRARY_FILE)
        for like, known in attempts:
            device = like.fingerprint.description
            attempt = f"a library from the records for {device}" if known else "an untuned library"
            _log.warning("building %s; this may take minutes", attempt)
            try:
                built = _build_library(like, known, directory, manifest, options, library)
                if known:
                    covered = f"which cover {built.coverage['task_share']:.0%} of the tasks"
                    reason = f"it was built here with the records for {device}, {covered}"
                else:
                    reason = "it was built here without records, with schedules that nothing has measured"
                level: Level = "rebuilt" if known else "untuned"
                choice = Choice(level=level, entry=built, reason=reason, rejected=tuple(reasons))
                return open_library(library, manifest, built, choice, options)
            except AnsorMlflowError as err:
                reasons.append(f"not {attempt}: {err}")
    raise nothing_runs(directory, reasons if options.allow_untuned else [*reasons, "allow_untuned is off"])


def _build_library(
    like: LibraryEntry, records: Path | None, directory: Path, manifest: Manifest, options: LoadOptions, library: Path
) -> LibraryEntry:
    """Builds a library for this host as another one was built, and returns what is known of it."""
    job = BuildJob(
        network=str(directory / NETWORK_FILE),
        sizes=manifest.sizes,
        records=str(records or ""),
        device=host_fingerprint(options),
        lowering=LoweringSettings.among(like.provenance),
        library=str(library),
        fallback=fallback_among(like.provenance),
    )
    built = build_in_child_process(job)
    if records and not built.coverage["num_covered"]:
        raise RecordsError("the network has other tasks here, and none has a record")
    kept = {name: value for name, value in like.provenance.items() if name not in _OF_ANOTHER_DEVICE}
    return replace(built, path=like.path, provenance={**kept, "built_from": like.path})
