"""What a tuning run leaves behind in `records/`, besides the database: the device and the provenance."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ansor_mlflow import names
from ansor_mlflow.device import DeviceFingerprint
from ansor_mlflow.errors import RecordsError
from ansor_mlflow.files import write_text
from ansor_mlflow.foreign import read_json, typed


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
