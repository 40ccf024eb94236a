"""A team's shared records: an immutable object for each tuning and workload, named by its content.

An object is a gzip file of lines: a JSON header, the workload's line, then record lines with the workload index 0, as
TVM's database has them. Whoever pushes adds objects and changes none, so that nobody needs a lock, and nothing is lost.
Its name is `<device>/<structural hash>-<digest>.jsonl.gz`; beside the objects of a device is its `fingerprint.json`.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ansor_mlflow import names
from ansor_mlflow.device import DeviceFingerprint
from ansor_mlflow.errors import RecordsError
from ansor_mlflow.files import write_text
from ansor_mlflow.foreign import read_json
from ansor_mlflow.records.applicability import code_attributes, has_target
from ansor_mlflow.records.description import read_fingerprint, read_provenance
from ansor_mlflow.records.journal import read_seeds
from ansor_mlflow.records.lines import RecordLine, parse_record, workload_hash
from ansor_mlflow.records.selection import open_winners
from ansor_mlflow.records.store import RecordPair, write_pair
from ansor_mlflow.records.summary import open_database

_FORMAT_VERSION = 1
_DIGEST_LENGTH = 32
_MAX_BYTES = 2**30
"""Most bytes of an object that are unpacked; a longer one counts as damaged."""
_NAME = re.compile(rf"(?P<workload>0x[0-9a-f]{{16}})-(?P<digest>[0-9a-f]{{{_DIGEST_LENGTH}}})\.jsonl\.gz")


@dataclass(frozen=True, kw_only=True)
class PoolObject:
    """What one tuning found out about one workload."""

    workload: str
    """The workload's line of the workload file."""
    records: tuple[str, ...]
    """JSON `[trace, run_secs, target, args_info]` of each trial, failed ones too."""
    winner: str = ""
    """The same JSON of the winner, with its second measurement; empty where there is none."""
    trials_per_task: float = 0.0
    """Trials that the tuning was ready to give a task, on average."""

    def pack(self) -> bytes:
        """The object's content."""
        header = {
            "format_version": _FORMAT_VERSION,
            "has_winner": bool(self.winner),
            "trials_per_task": self.trials_per_task,
        }
        fields = [self.winner, *self.records] if self.winner else self.records
        lines = [json.dumps(header), self.workload, *(f"[0,{text}]" for text in fields)]
        return gzip.compress("".join(f"{line}\n" for line in lines).encode(), mtime=0)

    def require_records(self) -> None:
        """Checks that what it has are records.

        Raises:
            ValueError: One is none.
        """
        for text in filter(None, (self.winner, *self.records)):
            parse_record(f"[0,{text}]".encode())

    @staticmethod
    def unpack(content: bytes) -> PoolObject:
        """Reads what `pack` made.

        Raises:
            ValueError: It is something else.
        """
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
                head, workload, *lines = file.read(_MAX_BYTES).decode().removesuffix("\n").split("\n")
            header = read_json(head)
            version, num_winners = header["format_version"], int(bool(header["has_winner"]))
            trials_per_task = float(header["trials_per_task"])
            workload_hash(workload)
            fields = [line.removeprefix("[0,").removesuffix("]") for line in lines]
            winner, records = fields[:num_winners], fields[num_winners:]
            if len(winner) != num_winners:
                raise ValueError("the winner is missing")
        except (OSError, EOFError, ValueError, TypeError, LookupError) as err:
            raise ValueError(f"it is no object of a pool ({type(err).__name__})") from err
        if version != _FORMAT_VERSION:
            raise ValueError(f"it has format version {version}")
        return PoolObject(
            workload=workload, records=tuple(records), winner="".join(winner), trials_per_task=trials_per_task
        )


@dataclass(frozen=True)
class ObjectName:
    """What the name of an object says."""

    workload_hash: str
    """Structural hash in hexadecimal digits."""
    digest: str

    @staticmethod
    def parse(file_name: str) -> ObjectName | None:
        """Reads the last part of an object's path; None for another file."""
        match = _NAME.fullmatch(file_name)
        return ObjectName(match["workload"], match["digest"]) if match else None

    @staticmethod
    def of(packed: bytes, workload: str) -> ObjectName:
        """The name of an object with this content."""
        return ObjectName(workload_hash(workload), _digest(packed))

    def is_of(self, content: bytes) -> bool:
        """Whether the content is what the name says."""
        return _digest(content) == self.digest

    def __str__(self) -> str:
        return f"{self.workload_hash}-{self.digest}.jsonl.gz"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_DIGEST_LENGTH]


def objects_of(records: Path) -> tuple[DeviceFingerprint, list[PoolObject]]:
    """What a tuning found out itself, an object for each workload; not the records that it began with.

    A workload of which every program was known already has an object, too: it says how thoroughly it was searched.

    Args:
        records: Directory of its records.

    Raises:
        RecordsError: Nothing says which device the records are for, or there is no database.
    """
    device = read_fingerprint(records)
    if device is None:
        raise RecordsError(
            f"{records}: {names.FINGERPRINT_FILE} is missing, so nobody knows which device the records are for; push "
            "those of a tuning run"
        )
    database = open_database(RecordPair.in_directory(records))
    num_earlier, seeds = read_seeds(records)
    wanted = code_attributes(device.target)
    winners = _winners(records)
    untouched = {seed.workload_hash for seed in seeds if seed.is_enough}
    groups: dict[str | None, list[RecordLine]] = {hash_: [] for hash_ in winners if hash_ not in untouched}
    for record in database.records[num_earlier:]:
        if has_target(record, wanted):
            groups.setdefault(database.hashes[record.workload], []).append(record)
    workloads = dict(zip(database.hashes, database.workloads, strict=True))
    budget = _trials_per_task(records)
    return device, [
        PoolObject(
            workload=workloads[hash_],
            records=tuple(dict.fromkeys(map(database.fields, group))),
            winner=winners.get(hash_, ""),
            trials_per_task=budget,
        )
        for hash_, group in groups.items()
    ]


def what_is_new(objects: Iterable[PoolObject], there: Iterable[PoolObject]) -> list[PoolObject]:
    """What objects add to those of a pool; records are told apart by their text, wherever they come from.

    An object adds records that none there has, a winner, or that its workload was searched more thoroughly.

    Args:
        objects: What may be added.
        there: All that the pool has of their workloads.

    Returns:
        Objects without what is there already; one that adds nothing is left out.
    """
    texts: dict[str, set[str]] = {}
    budgets: dict[str, float] = {}

    def remember(found: PoolObject) -> None:
        hash_ = workload_hash(found.workload)
        texts.setdefault(hash_, {""}).update(found.records, (found.winner,))
        budgets[hash_] = max(found.trials_per_task, budgets.get(hash_, 0.0))

    for found in there:
        remember(found)
    new = []
    for found in objects:
        hash_ = workload_hash(found.workload)
        known = texts.get(hash_, {""})
        records = tuple(text for text in dict.fromkeys(found.records) if text not in known)
        winner = "" if found.winner in known else found.winner
        if records or winner or found.trials_per_task > budgets.get(hash_, 0.0):
            new.append(replace(found, records=records, winner=winner))
        remember(found)
    return new


def write_objects(objects: Iterable[PoolObject], device: DeviceFingerprint, directory: Path) -> None:
    """Writes a database with what objects hold, each record once, and the winners in `best/`."""
    workloads: dict[str, str] = {}
    records: dict[str, dict[str, None]] = {}
    winners: dict[str, dict[str, None]] = {}
    for found in objects:
        hash_ = workload_hash(found.workload)
        workloads.setdefault(hash_, found.workload)
        records.setdefault(hash_, {}).update(dict.fromkeys(found.records))
        if found.winner:
            winners.setdefault(hash_, {})[found.winner] = None
    _write(directory, workloads, records)
    if winners:
        _write(directory / names.BEST_DIR, workloads, winners)
    write_text(directory / names.FINGERPRINT_FILE, device.to_json())


def _write(directory: Path, workloads: Mapping[str, str], fields: Mapping[str, Mapping[str, None]]) -> None:
    lines = [f"[{index},{text}]" for index, texts in enumerate(fields.values()) for text in texts]
    write_pair(directory, [workloads[hash_] for hash_ in fields], lines)


def _winners(records: Path) -> dict[str | None, str]:
    """The winners of a tuning by the structural hash of their workload."""
    database = open_winners(records)
    if database is None:
        return {}
    return {database.hashes[record.workload]: database.fields(record) for record in database.records}


def _trials_per_task(records: Path) -> float:
    if not (records / names.PROVENANCE_FILE).is_file():
        return 0.0
    return read_provenance(records).trials_per_task or 0.0
