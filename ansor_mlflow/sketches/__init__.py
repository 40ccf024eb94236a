"""Which programs a task may become: schedules of our own, each good before anything is measured."""

from ansor_mlflow.sketches.contraction import (
    MAX_EPILOGUE,
    Contraction,
    Products,
    find_contraction,
    has_sums,
    is_made_of_blocks,
    products_of,
)
from ansor_mlflow.sketches.estimate import Machine
from ansor_mlflow.sketches.sketch import (
    ANNOTATION,
    SKETCHES,
    Programs,
    Sketch,
    Tile,
    decision_columns,
    find_programs,
    gpu_program,
    schedule_for_gpu,
    unbound_kernels,
    why_not_compilable,
)
from ansor_mlflow.sketches.tile import MIN_PARALLEL, divisors
from ansor_mlflow.sketches.winograd import TILE_COLUMNS
