"""ONNX graphs, rewritten before TVM sees them."""

from ansor_mlflow.graphs.batch_norm import fold_batch_norms
from ansor_mlflow.graphs.channel_padding import PaddedLayer, best_padding, layers_to_pad, pad_output_channels
from ansor_mlflow.graphs.nodes import ValueInfos, branches_of, inputs_of, is_tensor, uses, value_infos
from ansor_mlflow.graphs.operators.rewritings import rewrite_operators
from ansor_mlflow.graphs.opset import raise_opset
from ansor_mlflow.graphs.partition import GraphPart, Side, extract, partition
from ansor_mlflow.graphs.rows import rows_of
from ansor_mlflow.graphs.simplify import give_outputs_nodes, simplify
from ansor_mlflow.graphs.unsupported import reasons_to_stay
