"""How programs become machine code."""

from ansor_mlflow.codegen.passes import DOT_PRODUCTS, PACK, PREFETCH, pass_config, tir_pipeline
