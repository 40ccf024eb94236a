"""How programs become machine code."""

from ansor_mlflow.codegen.passes import PREFETCH, pass_config, tir_pipeline
