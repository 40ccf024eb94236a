"""The commands `records show`, `merge` and `distill`: databases are counted, put together and thinned, without TVM."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ansor_mlflow import names, records
from ansor_mlflow.device import Device, parse_target
from ansor_mlflow.errors import RecordsError, UserInputError
from ansor_mlflow.files import replace_directory, scratch_directory, translated_disk_errors, write_text
from ansor_mlflow.foreign import Report, Reported, read_json, without_credentials
from ansor_mlflow.parameters import DistillRecordsOptions, MergeRecordsOptions, ShowRecordsOptions
from ansor_mlflow.steps.fetching import fetch_source

_DESCRIPTIONS = (names.FINGERPRINT_FILE, names.PROVENANCE_FILE)
_WRITTEN = {records.WORKLOAD_FILE, records.RECORD_FILE, names.SOURCES_FILE, *_DESCRIPTIONS}
"""The files of a database that merge or distill wrote."""


@dataclass(frozen=True, kw_only=True)
class WrittenRecords(Reported):
    """A new database."""

    output: Path
    num_records: int

    def report(self) -> Report:
        return Report(f"{self.num_records} records are in {self.output}")


def show_records(options: ShowRecordsOptions) -> records.DatabaseSummary:
    """Counts the records of a database."""
    with scratch_directory() as scratch:
        path = fetch_source(options.source, Path(scratch))
        return records.summarize(records.open_database(records.find_records(path, prefer_winners=False)))


def merge_records(options: MergeRecordsOptions) -> WrittenRecords:
    """Writes all records of several databases to a new one, each once."""
    return _write(options, keep=None, target="")


def distill_records(options: DistillRecordsOptions) -> WrittenRecords:
    """Writes the fastest valid records of each workload and target to a new database."""
    return _write(options, keep=options.keep, target=options.target)


def _write(options: MergeRecordsOptions, *, keep: int | None, target: str) -> WrittenRecords:
    output = Path(options.output).resolve()
    _require_free(output, options.output)
    with scratch_directory() as scratch:
        paths = [fetch_source(source, Path(tempfile.mkdtemp(dir=scratch))) for source in options.sources]
        for path in paths:
            sources = records.search_directories(path) if path.is_dir() else [path.parent]
            if output in [source.resolve() for source in sources]:
                raise UserInputError(
                    f"output={options.output}: that is where records are read from; give another directory"
                )
        databases = [records.open_database(records.find_records(path, prefer_winners=False)) for path in paths]
        if target:
            _take_target(databases, target)
        try:
            with translated_disk_errors():
                output.parent.mkdir(parents=True, exist_ok=True)
                new = output.with_name(f".new-{output.name}")
                shutil.rmtree(new, ignore_errors=True)  # an earlier process may have left it
                new.mkdir()
                try:
                    num_records = records.merge(databases, new, keep=keep)
                    if num_records:
                        _describe(new, databases, options.sources, keep, target)
                        replace_directory(new, output)
                finally:
                    shutil.rmtree(new, ignore_errors=True)
        except OSError as err:
            raise UserInputError(f"output={options.output}: it cannot be written ({err.strerror})") from err
    if not num_records:
        kind = "record" if keep is None else "valid record"
        raise RecordsError(f"there is no {kind} in {', '.join(options.sources)}; tune first")
    return WrittenRecords(output=output, num_records=num_records)


def _require_free(output: Path, given: str) -> None:
    """Checks that the directory can be replaced as a whole, and that nothing of the user's is in it."""
    if output.exists() and not output.is_dir():
        raise UserInputError(f"output={given}: it is a file; give a directory")
    if not output.is_dir():
        return
    found = {path.name for path in output.iterdir()}
    if found and not (found <= _WRITTEN and _is_ours(output)):
        raise UserInputError(
            f"output={given}: the directory holds something else than a database as merge and distill left it; give a "
            "new directory"
        )
    if output.is_mount() or output == Path.cwd():
        raise UserInputError(
            f"output={given}: it is the current directory or a mount point, which a new database cannot replace at "
            "once; give a directory in it"
        )


def _is_ours(directory: Path) -> bool:
    try:
        written = read_json((directory / names.SOURCES_FILE).read_bytes())["sha256"]
        return bool(written == _digests(directory))
    except (OSError, ValueError, TypeError, KeyError):
        return False


def _take_target(databases: Sequence[records.Database], target: str) -> None:
    """Leaves the records for targets with the attributes that the user gave.

    Only `auto` and a tag need TVM, which knows what they stand for.
    """
    parsed = parse_target(target)
    made_for = {record.target for database in databases for record in database.records}
    if isinstance(parsed, str) and parsed in {records.target_attributes(text).get("kind") for text in made_for}:
        parsed = {"kind": parsed}
    if isinstance(parsed, str):
        parsed = Device.resolve(target, "auto").fingerprint.target
    wanted = {name: value for name, value in records.code_attributes(parsed).items() if name in parsed}.items()
    taken = {text for text in made_for if wanted <= records.code_attributes(records.target_attributes(text)).items()}
    if not taken:
        raise RecordsError(
            f"target={target!r}: there are no records for it; `ansor-mlflow records show` lists the targets"
        )
    for database in databases:
        database.records = [record for record in database.records if record.target in taken]


def _describe(
    directory: Path, databases: Sequence[records.Database], given: Sequence[str], keep: int | None, target: str
) -> None:
    for name in _DESCRIPTIONS:
        files = [database.pair.records.with_name(name) for database in databases]
        texts = {file.read_text() if file.is_file() else "" for file in files}
        if len(texts) == 1 and (text := texts.pop()):
            write_text(directory / name, text)
    made_from = {"sources": [without_credentials(source) for source in given], "keep": keep, "target": target}
    text = json.dumps({**made_from, "sha256": _digests(directory)}, indent=1)
    write_text(directory / names.SOURCES_FILE, text)


def _digests(directory: Path) -> dict[str, str]:
    return {
        name: hashlib.sha256((directory / name).read_bytes()).hexdigest()
        for name in (records.WORKLOAD_FILE, records.RECORD_FILE)
    }
