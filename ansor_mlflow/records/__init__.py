"""Tuning records on disk: TVM's own pair of JSON-lines files, read without TVM, and what describes them."""

from ansor_mlflow.records.applicability import code_attributes, has_target, target_key, target_name, why_not_applicable
from ansor_mlflow.records.damage import check_copy, check_records, warn_of_damage
from ansor_mlflow.records.description import Provenance, read_fingerprint, read_provenance, write_description
from ansor_mlflow.records.journal import (
    JOURNAL_FILE,
    Journal,
    JournalEntry,
    Seed,
    read_durations,
    read_journal,
    read_seeds,
)
from ansor_mlflow.records.lines import FAILED_RUN_S, RecordLine, fields_of, is_time, target_attributes, workload_hash
from ansor_mlflow.records.log import RecordLog, RecordText
from ansor_mlflow.records.repair import repair
from ansor_mlflow.records.selection import matching_records, open_winners, read_similar, similar_records
from ansor_mlflow.records.store import (
    RECORD_FILE,
    WORKLOAD_FILE,
    Database,
    RecordPair,
    distill,
    find_pairs,
    find_records,
    merge,
    search_directories,
    write_pair,
)
from ansor_mlflow.records.summary import DatabaseSummary, WorkloadSummary, open_database, require_whole, summarize
from ansor_mlflow.records.transfer.manifest import changed_files, write_manifest
from ansor_mlflow.records.transfer.parts import GROWING_FILES, PARTS_DIR, PartWriter, join_parts
from ansor_mlflow.records.transfer.pool_objects import ObjectName, PoolObject, objects_of, what_is_new, write_objects
