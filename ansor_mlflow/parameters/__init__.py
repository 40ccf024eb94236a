"""Parameters: what each means, its type, default and rule, said once; options are what a user gave of them."""

from ansor_mlflow.parameters.commands import (
    BisectOptions,
    DiffOptions,
    DistillRecordsOptions,
    DoctorOptions,
    ExplainOptions,
    FleetOptions,
    FleetTestOptions,
    LatencyOptions,
    MergeRecordsOptions,
    PlanOptions,
    QuantizeNetworkOptions,
    ServerOptions,
    ShowRecordsOptions,
    SweepOptions,
    TrackerOptions,
    VerifyRecordsOptions,
)
from ansor_mlflow.parameters.config import (
    GONE_COMMANDS,
    GONE_PARAMETERS,
    load_options,
    mlproject,
    parameters_markdown,
    read_settings,
    why_gone,
)
from ansor_mlflow.parameters.declaring import (
    MAX_PARAM_LENGTH,
    Options,
    Rivals,
    as_text,
    declared,
    default_text,
    grouped,
    is_uri,
    listed,
)
from ansor_mlflow.parameters.model import (
    AliasOptions,
    CheckOptions,
    CompileOptions,
    EvaluateOptions,
    PipelineOptions,
    PromoteOptions,
)
from ansor_mlflow.parameters.tuning import (
    SKETCH_TRIALS_PER_TASK,
    TRIALS_PER_TASK,
    BudgetOptions,
    GraphOptions,
    MeasureOptions,
    NetworkOptions,
    QuantizeOptions,
    RecordsOptions,
    RpcOptions,
    RunOptions,
    SearchOptions,
    TuneOptions,
)
