"""How programs become machine code."""

from ansor_mlflow.codegen.config import pass_config
from ansor_mlflow.codegen.passes import tir_pipeline
from ansor_mlflow.codegen.prefetch import PREFETCH
