"""Tuning records on disk: TVM's own pair of JSON-lines files, read without TVM, and what describes them."""

from ansor_mlflow.records.applicability import (
    Provenance,
    code_attributes,
    device_key,
    has_target,
    read_fingerprint,
    read_provenance,
    target_key,
    target_name,
    why_not_applicable,
    write_description,
)
from ansor_mlflow.records.damage import check_copy, check_records, repair, warn_of_damage
from ansor_mlflow.records.lines import (
    FAILED_RUN_S,
    RecordLine,
    decision_of,
    fields_of,
    find_decision,
    is_time,
    target_attributes,
)
from ansor_mlflow.records.log import Journal, RecordLog, RecordText, Seed, read_durations, read_journal, read_seeds
from ansor_mlflow.records.pieces import GROWING_FILES, PARTS_DIR, PartWriter, changed_files, join_parts, write_manifest
from ansor_mlflow.records.selection import (
    DatabaseSummary,
    matching_records,
    open_database,
    open_winners,
    read_similar,
    require_whole,
    schedule_of,
    similar_records,
    summarize,
)
from ansor_mlflow.records.store import (
    JOURNAL_FILE,
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
