"""The step `compile`."""

from ansor_mlflow.steps.compiling.compile import CompileResult, compile_network
