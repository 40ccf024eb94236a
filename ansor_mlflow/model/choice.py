"""Which library of a model is loaded here, and why: the exact one, a compatible one, or one that is built first."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from ansor_mlflow.device import (
    CPU,
    PLATFORMS,
    Device,
    DeviceFingerprint,
    architecture_here,
    available_cpus,
    why_no_gpu,
    why_not_on_gpu,
    why_not_runnable,
)
from ansor_mlflow.errors import ModelError, UserInputError
from ansor_mlflow.model.manifest import LibraryEntry, Manifest
from ansor_mlflow.model.parts import fallback_clauses, has_library

Level = Literal["exact", "compatible", "rebuilt", "untuned"]


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Where a model is to run, and what may be done if it has no library for that."""

    device: str = "cpu"  # kind of device to load for: cpu or cuda
    num_threads: int | None = None
    """Threads of a kernel; None prefers a library for every CPU that this process may use, and takes its number."""
    allow_compatible: bool = True  # take a library for another CPU or number of threads, if it runs here
    allow_rebuild: bool = True
    """Build a library where none runs here: with the records for another CPU of this architecture, or untuned."""
    allow_untuned: bool = True  # build a library without records, whose schedules nothing has measured
    huge_pages: bool = True  # put weights and activations into huge pages, where the system has them

    def __post_init__(self) -> None:
        if self.device not in (known := [platform.name for platform in PLATFORMS.values()]):
            raise UserInputError(f"device={self.device!r} is unknown; it must be {' or '.join(known)}")
        for name in ("allow_compatible", "allow_rebuild", "allow_untuned", "huge_pages"):
            if not isinstance(getattr(self, name), bool):
                raise UserInputError(f"{name}={getattr(self, name)!r} is neither true nor false; give one of them")
        if self.num_threads is None:
            return
        number, cpus = self.num_threads, available_cpus()
        if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= cpus:
            raise UserInputError(
                f"num_threads={number!r}: it must be a whole number from 1 to {cpus}, the number of CPUs that this "
                "process may use (affinity and cgroup quota); leave it out for as many as the library was tuned for"
            )

    @staticmethod
    def from_config(config: Mapping[str, Any] | None) -> LoadOptions:
        """Reads the `model_config` of MLflow's pyfunc."""
        given = dict(config or {})
        known = [field.name for field in fields(LoadOptions)]
        unknown = sorted(given.keys() - set(known))
        if unknown:
            raise UserInputError(f"model_config has no {unknown[0]!r}; it has {', '.join(known)}")
        return LoadOptions(**given)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which library was taken, and why."""

    level: Level  # exact, compatible, rebuilt or untuned; each may be slower than those before it
    entry: LibraryEntry  # the library; one that was built here has this host's fingerprint
    reason: str  # why this library was chosen, in one clause
    rejected: tuple[str, ...] = ()  # why each better library was rejected

    def __str__(self) -> str:
        device = self.entry.fingerprint
        clauses = [f"{self.level} library for {device.description} on {device.cpu_model}: {self.reason}"]
        return "; ".join([*clauses, *self.rejected, *fallback_clauses(self.entry.parts)])


def choose_library(directory: Path, manifest: Manifest) -> LibraryEntry:
    """The library of a model that is loaded on this host as it is; it is a `ModelError` if none of them runs here."""
    choice, rejected = find_library(directory, manifest, LoadOptions(device=manifest.platform.name))
    if choice is None:
        raise nothing_runs(directory, rejected)
    return choice.entry


def choose_for_server(directory: Path, manifest: Manifest, server: DeviceFingerprint | None) -> LibraryEntry:
    """The library of a model that is run on a server; where the server does not say what it is, the only one.

    It is a `ModelError` if none of them runs there, or it is not known which.
    """
    entries = _entries_for("cpu", directory, manifest)
    if server is None:
        if len(entries) > 1:
            raise ModelError(
                f"model {directory}: it has libraries for {_names_of(entries)}, and the server, one of TVM's own, does "
                "not say what it is; start it with `ansor-mlflow fleet server`"
            )
        return entries[0]
    rejected = []
    for entry in sorted(entries, key=lambda entry: _distance(entry.fingerprint, server)):
        reason = why_not_runnable(entry.fingerprint, server)
        if not reason:
            return entry
        rejected.append(_why_not(entry, reason))
    raise ModelError(
        f"model {directory}: no library runs on the server: {'; '.join(rejected)}; compile the network for it, and add "
        "its library to the model"
    )


def nothing_runs(directory: Path, reasons: Sequence[str]) -> ModelError:
    """The error that says why no library can be loaded."""
    return ModelError(
        f"model {directory}: no library runs here: {'; '.join(reasons)}; compile the network on this host, and add its "
        "library to the model"
    )


def find_library(directory: Path, manifest: Manifest, options: LoadOptions) -> tuple[Choice | None, tuple[str, ...]]:
    """The best library that needs not be built, if there is one, and why not each that is better or does not run."""
    entries = _entries_for(options.device, directory, manifest)
    if options.device != "cpu":
        if reason := why_no_gpu():
            return None, tuple(_why_not(entry, reason) for entry in entries)
        return choose_for_gpu(entries, str(architecture_here()), options)
    host = host_fingerprint(options)

    def judge(entry: LibraryEntry) -> tuple[Level | None, str]:
        device = entry.fingerprint
        if has_library(entry.parts) and (reason := why_not_runnable(device)):
            return None, reason
        if difference := _difference(device, host):
            return "compatible", difference
        return "exact", f"it was made for this CPU and {host.num_threads} threads"

    return _first(sorted(entries, key=lambda entry: _distance(entry.fingerprint, host)), judge, options)


def choose_for_gpu(
    entries: Sequence[LibraryEntry], architecture: str, options: LoadOptions
) -> tuple[Choice | None, tuple[str, ...]]:
    """The best of the libraries for NVIDIA's GPUs, if one runs on a GPU such as "sm_90"; and why not each before it."""

    def is_for_this(device: DeviceFingerprint) -> bool:
        return str(device.target.get("arch")).rstrip("af") == architecture  # a letter says: for no later one

    def judge(entry: LibraryEntry) -> tuple[Level | None, str]:
        device = entry.fingerprint
        made_for = str(device.target.get("arch"))
        if device.machine != platform.machine():
            return None, f"it is made for {device.machine}, this host is {platform.machine()}"
        if is_for_this(device):
            return "exact", f"it was made for {made_for}"
        if reason := why_not_on_gpu(made_for, architecture):
            return None, reason
        return "compatible", f"it was made for {made_for}, this is {architecture}"

    return _first(sorted(entries, key=lambda entry: not is_for_this(entry.fingerprint)), judge, options)


def _first(
    entries: Sequence[LibraryEntry],
    judge: Callable[[LibraryEntry], tuple[Level | None, str]],
    options: LoadOptions,
) -> tuple[Choice | None, tuple[str, ...]]:
    """The first library that runs here and may be taken, and why not each before it."""
    rejected: list[str] = []
    for entry in entries:
        level, reason = judge(entry)
        if level == "exact":
            return Choice(level=level, entry=entry, reason=reason), ()
        if level and options.allow_compatible:
            return Choice(level=level, entry=entry, reason=reason, rejected=tuple(rejected)), ()
        rejected.append(_why_not(entry, f"{reason}, and allow_compatible is off" if level else reason))
    return None, tuple(rejected)


def threads_here(entry: LibraryEntry) -> int:
    """The threads that a library runs on here, if no other number is asked for."""
    return min(entry.fingerprint.num_threads, available_cpus())


def entries_to_rebuild(manifest: Manifest, options: LoadOptions) -> list[LibraryEntry]:
    """The libraries whose records may serve to build one for this host, the nearest first."""
    host = host_fingerprint(options)
    devices = [(entry, entry.fingerprint) for entry in manifest.libraries]
    same = [entry for entry, made in devices if (made.machine, made.platform) == (host.machine, CPU)]
    return sorted(same, key=lambda entry: _distance(entry.fingerprint, host))


def host_fingerprint(options: LoadOptions) -> DeviceFingerprint:
    """The CPU of this host with the threads that are wanted."""
    return Device.resolve("auto", options.num_threads or available_cpus()).fingerprint


def _entries_for(device: str, directory: Path, manifest: Manifest) -> list[LibraryEntry]:
    entries = [entry for entry in manifest.libraries if entry.fingerprint.platform.name == device]
    if not entries:
        raise ModelError(
            f"model {directory}: device={device!r}, but its libraries are for {_names_of(manifest.libraries)}, which "
            "never stand in for another kind of device; give the device that they are for, or add a library"
        )
    return entries


def _names_of(entries: Sequence[LibraryEntry]) -> str:
    return ", ".join(entry.fingerprint.description for entry in entries)


def _why_not(entry: LibraryEntry, reason: str) -> str:
    return f"not the library for {entry.fingerprint.description}: {reason}"


def _distance(device: DeviceFingerprint, host: DeviceFingerprint) -> tuple[bool, bool, int, int]:
    """Orders libraries: first of the same CPU, then with the most of this one's features, then by their threads."""
    num_shared = len(set(device.features) & set(host.features))
    return (
        device.machine != host.machine,
        (device.cpu_model, device.features) != (host.cpu_model, host.features),
        -num_shared,
        abs(device.num_threads - host.num_threads),
    )


def _difference(device: DeviceFingerprint, host: DeviceFingerprint) -> str:
    """What a library that runs here was made for instead; empty where it is exactly for this host."""
    clauses = []
    if (device.cpu_model, device.features) != (host.cpu_model, host.features):
        cpus = [(made.target.get("mcpu", made.machine), made.cpu_model) for made in (device, host)]
        there, here = (f"{cpu} ({model})" if model else str(cpu) for cpu, model in cpus)
        clauses.append(f"it was made for {there}, this is {here}")
    if device.num_threads != host.num_threads:
        clauses.append(f"it was tuned for {device.num_threads} threads, {host.num_threads} are wanted")
    return ", ".join(clauses)
