"""Records that steps take and give: from runs, models and paths; and the commands `records …`."""

from ansor_mlflow.steps.records.databases import WrittenRecords, distill_records, merge_records, show_records
from ansor_mlflow.steps.records.fetching import (
    fetch_databases,
    fetch_records,
    fetch_run,
    fetch_winners,
    options_of_source,
    tuning_of,
)
from ansor_mlflow.steps.records.given import (
    NetworkTasks,
    Recorded,
    best_records,
    distill_for_device,
    find_recorded,
    latency_s,
    load_recorded_network,
    lower_for_device,
    lower_recorded,
)
from ansor_mlflow.steps.records.sketch_use import SketchUse, sketch_uses
from ansor_mlflow.steps.records.verify import (
    MendedRecords,
    ReplayedRecord,
    Verification,
    repair_records,
    verify_records,
)
