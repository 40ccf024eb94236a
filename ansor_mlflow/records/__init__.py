"""Tuning records on disk: TVM's own pair of JSON-lines files, read without TVM, and what describes them."""

from ansor_mlflow.records.atomic import is_full, write_text
from ansor_mlflow.records.description import Provenance, read_provenance, write_description
from ansor_mlflow.records.log import RecordLog, RecordText, fields_of
from ansor_mlflow.records.store import (
    FAILED_RUN_S,
    RECORD_FILE,
    WORKLOAD_FILE,
    RecordPair,
    distill,
    find_records,
    write_pair,
)

__all__ = [
    "FAILED_RUN_S",
    "RECORD_FILE",
    "WORKLOAD_FILE",
    "Provenance",
    "RecordLog",
    "RecordPair",
    "RecordText",
    "distill",
    "fields_of",
    "find_records",
    "is_full",
    "read_provenance",
    "write_description",
    "write_pair",
    "write_text",
]
