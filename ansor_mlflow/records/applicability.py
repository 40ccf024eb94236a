"""What describes records, and where they may be applied: only on the same device."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from ansor_mlflow import names
from ansor_mlflow.device import DeviceFingerprint
from ansor_mlflow.errors import RecordsError
from ansor_mlflow.files import write_text
from ansor_mlflow.foreign import read_json, typed
from ansor_mlflow.records.lines import RecordLine, target_attributes

_TARGET_DECORATION = {"tag", "keys", "host", "libs", "model"}
"""Entries of a target that do not change generated CPU code."""
_DEFAULT_OPT_LEVEL = 3
"""What TVM takes where a target names no `opt-level`. A program that is fast at one level may be slow at another."""
_MAX_FEATURES = 5
"""CPU features that a message names."""


def why_not_applicable(made_for: DeviceFingerprint, device: DeviceFingerprint) -> str:
    """Why records of one device may not be applied on another, in one clause; empty where they may."""
    if made_for.platform == device.platform and not device.platform.counts_threads:
        # its kernels do not know the CPU's threads; records for a GPU that is not here may be compiled for it
        cpu_model = made_for.cpu_model if "" in (made_for.cpu_model, device.cpu_model) else device.cpu_model
        device = replace(device, num_threads=made_for.num_threads, cpu_model=cpu_model)
    for describe in _DESCRIPTIONS:
        theirs, ours = describe(made_for), describe(device)
        if theirs != ours:
            return f"the records are for {theirs}, this is {ours}"
    differing = sorted(set(made_for.features) ^ set(device.features))
    if differing:
        listed = ", ".join(differing[:_MAX_FEATURES]) + (", …" if len(differing) > _MAX_FEATURES else "")
        return f"the records are for {made_for.description} with other CPU features: {listed}"
    return ""


def device_key(device: DeviceFingerprint) -> str:
    """A digest of what `why_not_applicable` compares: records of devices with other digests are never applied."""
    facts: list[Any] = [code_attributes(device.target), device.machine, sorted(device.features)]
    if device.platform.counts_threads:
        facts += [device.num_threads, device.cpu_model]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


_DESCRIPTIONS: tuple[Callable[[DeviceFingerprint], str], ...] = (
    lambda device: target_name({"kind": "", **device.target, "num-cores": device.num_threads}),
    lambda device: f"{device.description} on {device.cpu_model}",
    lambda device: f"{device.description} on {device.machine}",
    lambda device: f"{device.description}, {json.dumps(code_attributes(device.target), sort_keys=True)}",
)
"""Descriptions of a device, each of which tells devices apart that those before it do not."""


def code_attributes(target: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of a target that decide which code is made for it."""
    deciding = {key: value for key, value in target.items() if key not in _TARGET_DECORATION and value not in ("", [])}
    as_recorded = {key: int(value) if isinstance(value, bool) else value for key, value in deciding.items()}  # by TVM
    return {"opt-level": _DEFAULT_OPT_LEVEL, **as_recorded}


def has_target(record: RecordLine, attributes: Mapping[str, Any]) -> bool:
    """Whether a record is for a target with these code attributes."""
    return _code_attributes(record.target) == attributes


@lru_cache(maxsize=1024)
def _code_attributes(target: str) -> dict[str, Any]:
    return code_attributes(target_attributes(target))


@lru_cache(maxsize=1024)
def target_key(target: str) -> str:
    """Tells targets apart by the code that is made for them; `target` is that of a `RecordLine`."""
    return json.dumps(_code_attributes(target), sort_keys=True)


def target_name(target: Mapping[str, Any]) -> str:
    """A target's short name, such as "llvm znver4 ×2"."""
    words = [target.get("kind", "?"), target.get("mcpu") or target.get("arch") or ""]
    if "num-cores" in target:
        words.append(f"×{target['num-cores']}")
    if target.get("opt-level", _DEFAULT_OPT_LEVEL) != _DEFAULT_OPT_LEVEL:
        words.append(f"-O{target['opt-level']}")
    return " ".join(str(word) for word in words if word)


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where records come from. It decides whether two numbers may be compared, never whether records apply."""

    network: str
    """Built-in name, or the path as it was given."""
    from_file: bool
    """Whether the network was read from a file; the run then has a copy of it."""
    network_sha256: str
    batch_size: int
    input_shapes: dict[str, list[int | list[int]]]
    seed: int
    layout: str
    dtype: str
    pad_channels: int | str
    target: str
    """The target as it was given."""
    num_threads: int
    lowering_version: int
    tvm_version: str
    host: str
    measure: dict[str, Any]
    """Settings of the time evaluator, with the CPUs that were measured on, or with the `rpc_key` of the servers."""
    partition: str = "auto"
    algorithm: str = "auto"
    input_values: dict[str, Any] = field(default_factory=dict)
    """Values that inputs were fixed to; runs of earlier versions have none."""
    quantization: dict[str, Any] = field(default_factory=dict)
    """What a network that was quantised first may lose, what it does, and the digest of the float network."""
    fallback: dict[int, dict[str, str]] = field(default_factory=dict)
    """Why nodes stay with ONNX Runtime that end TVM's compiler: see `settings.FallbackReasons`."""
    estimated_latency_ms: float | None = None
    trials_per_task: float | None = None
    """Trials that the tuning was ready to give a task, on average; None before its end."""

    @property
    def rpc_key(self) -> str | None:
        """Key of the servers that the records were measured on; None where it was the tuning host itself."""
        return self.measure.get("rpc_key")


def write_description(directory: Path, device: DeviceFingerprint, provenance: Provenance) -> None:
    """Writes both files."""
    write_text(directory / names.FINGERPRINT_FILE, device.to_json())
    write_text(directory / names.PROVENANCE_FILE, json.dumps(asdict(provenance), indent=1))


def read_fingerprint(directory: Path) -> DeviceFingerprint | None:
    """Reads the device that records are for; None where nothing says so, as in a database that TVM wrote."""
    path = directory / names.FINGERPRINT_FILE
    if not path.is_file():
        return None
    try:
        return DeviceFingerprint.from_dict(read_json(path.read_bytes()))
    except (ValueError, TypeError, LookupError) as err:
        raise RecordsError(
            f"{path} is damaged ({type(err).__name__}), so nobody knows which device the records are for; fetch them "
            "again, or tune"
        ) from err


def read_provenance(directory: Path) -> Provenance:
    """Reads the provenance of a tuning run's records."""
    path = directory / names.PROVENANCE_FILE
    try:
        return typed(Provenance, read_json(path.read_bytes()))
    except (OSError, ValueError, TypeError) as err:
        raise RecordsError(
            f"{path.name} of the tuning run is missing or damaged ({type(err).__name__}); give the records with "
            "records=… and the network by name"
        ) from err
