"""The steps `compile` and `recompile`."""

from ansor_mlflow.steps.compiling.compile import CompileResult, compile_network
from ansor_mlflow.steps.compiling.recompile import RecompileResult, recompile
