"""ONNX graphs, rewritten before TVM sees them."""

from ansor_mlflow.graphs.channel_padding import PaddedLayer, best_padding, layers_to_pad, pad_output_channels
from ansor_mlflow.graphs.operators import fallback_reasons, has_weights_of, keep_bytes, rewrite_operators
from ansor_mlflow.graphs.operators.recurrent import activations_of, reverses_of
from ansor_mlflow.graphs.partition import (
    GraphPart,
    ancestors,
    estimated_cost,
    extract,
    flops_of_nodes,
    partition,
    segments,
)
from ansor_mlflow.graphs.row_dependence import rows_of
from ansor_mlflow.graphs.simplify import fold_scales, give_outputs_nodes, raise_opset, simplify, without_tiny_weights
from ansor_mlflow.graphs.types import (
    ValueInfos,
    corrected_types,
    is_tensor,
    run_briefly,
    start_session,
    static_shape,
    value_infos,
)
from ansor_mlflow.graphs.walk import (
    MAX_SHAPE_ELEMENTS,
    attributes_of,
    branches_of,
    constants_of,
    inputs_of,
    nodes_of,
    opset_version,
    own_names,
    producers_of,
    rename,
    tensors_of,
    uses,
    with_weights,
    without_numbers,
)
