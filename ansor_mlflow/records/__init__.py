"""Tuning records on disk: TVM's own pair of JSON-lines files, read without TVM, and what describes them."""

from ansor_mlflow.records.atomic import write_text
from ansor_mlflow.records.description import Provenance, read_provenance, write_description
from ansor_mlflow.records.store import FAILED_RUN_S, RECORD_FILE, WORKLOAD_FILE, RecordPair, distill, find_records

__all__ = [
    "FAILED_RUN_S",
    "RECORD_FILE",
    "WORKLOAD_FILE",
    "Provenance",
    "RecordPair",
    "distill",
    "find_records",
    "read_provenance",
    "write_description",
    "write_text",
]
