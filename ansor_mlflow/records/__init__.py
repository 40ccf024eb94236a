"""Tuning records on disk: TVM's own pair of JSON-lines files, read without TVM, and what describes them."""

from ansor_mlflow.records.atomic import is_full, write_text
from ansor_mlflow.records.description import Provenance, read_provenance, write_description
from ansor_mlflow.records.journal import JOURNAL_FILE, Journal, JournalEntry, read_journal
from ansor_mlflow.records.lines import FAILED_RUN_S, fields_of
from ansor_mlflow.records.log import RecordLog, RecordText
from ansor_mlflow.records.parts import PARTS_DIR, PartWriter, join_parts
from ansor_mlflow.records.repair import Repair, repair
from ansor_mlflow.records.store import (
    RECORD_FILE,
    WORKLOAD_FILE,
    Database,
    RecordPair,
    distill,
    find_records,
    merge,
    search_directories,
    write_pair,
)
from ansor_mlflow.records.summary import (
    DatabaseSummary,
    TargetSummary,
    WorkloadSummary,
    open_database,
    summarize,
)

__all__ = [
    "FAILED_RUN_S",
    "JOURNAL_FILE",
    "PARTS_DIR",
    "RECORD_FILE",
    "WORKLOAD_FILE",
    "Database",
    "DatabaseSummary",
    "Journal",
    "JournalEntry",
    "PartWriter",
    "Provenance",
    "RecordLog",
    "RecordPair",
    "RecordText",
    "Repair",
    "TargetSummary",
    "WorkloadSummary",
    "distill",
    "fields_of",
    "find_records",
    "is_full",
    "join_parts",
    "merge",
    "open_database",
    "read_journal",
    "read_provenance",
    "repair",
    "search_directories",
    "summarize",
    "write_description",
    "write_pair",
    "write_text",
]
