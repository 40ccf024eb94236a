"""Lowers ONNX to fused TensorIR functions, in the one way that tuning and compiling share."""

from ansor_mlflow.lowering.lower import LOWERING_VERSION, lower, lower_sizes, prepare_graph
from ansor_mlflow.lowering.network import LoweredNetwork, TuningTask
