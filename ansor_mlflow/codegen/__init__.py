"""How programs become machine code."""

from ansor_mlflow.codegen.instructions import DOT_PRODUCTS, MATRIX_TILES, NUM_TILES, PACK, TILE_ROWS
from ansor_mlflow.codegen.passes import PREFETCH, pass_config, tir_pipeline
