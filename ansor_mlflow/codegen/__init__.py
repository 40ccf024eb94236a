"""How programs become machine code."""

from ansor_mlflow.codegen.passes import pass_config, tir_pipeline
from ansor_mlflow.codegen.prefetch import PREFETCH
