"""How programs become machine code."""

from ansor_mlflow.codegen.instructions import DOT_PRODUCTS, NARROW_REGISTERS, PACK
from ansor_mlflow.codegen.matrix_tiles import MATRIX_TILES, NUM_TILES, TILE_ROWS
from ansor_mlflow.codegen.passes import PREFETCH, pass_config, tir_pipeline
