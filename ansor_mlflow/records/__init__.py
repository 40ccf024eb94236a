"""Tuning records on disk: TVM's own pair of JSON-lines files, read without TVM, and what describes them."""

from ansor_mlflow.records.atomic import is_full, write_text
from ansor_mlflow.records.description import Provenance, read_provenance, write_description
from ansor_mlflow.records.lines import FAILED_RUN_S, fields_of
from ansor_mlflow.records.log import RecordLog, RecordText
from ansor_mlflow.records.repair import Repair, repair
from ansor_mlflow.records.store import (
    RECORD_FILE,
    WORKLOAD_FILE,
    Database,
    RecordPair,
    distill,
    find_records,
    merge,
    write_pair,
)

__all__ = [
    "FAILED_RUN_S",
    "RECORD_FILE",
    "WORKLOAD_FILE",
    "Database",
    "Provenance",
    "RecordLog",
    "RecordPair",
    "RecordText",
    "Repair",
    "distill",
    "fields_of",
    "find_records",
    "is_full",
    "merge",
    "read_provenance",
    "repair",
    "write_description",
    "write_pair",
    "write_text",
]
