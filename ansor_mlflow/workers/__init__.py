"""Candidates are built and measured in processes of their own, behind TVM's interfaces of builders and runners."""

from ansor_mlflow.workers.builder import Builder, BuildQueue, LocalBuilder, as_metaschedule_builder
from ansor_mlflow.workers.measure import (
    MeasureSettings,
    RestOfNetwork,
    RunJob,
    arg_info,
    argument_bytes,
    measure_program,
    random_tensor,
    timeout_s_of,
)
from ansor_mlflow.workers.runner import LocalRunner, Runner
