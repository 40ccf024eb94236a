"""Networks as ONNX graphs: built-in ones, and those of users."""

from ansor_mlflow.networks.families import BUILTIN_NETWORKS, read_catalogue
from ansor_mlflow.networks.graph import BuiltinNetwork
from ansor_mlflow.networks.load import (
    Network,
    load_network,
    models_of_sizes,
    read_network,
    read_torch_model,
    require_network,
)
from ansor_mlflow.networks.onnx_file import digest_of_file, external_files, read_onnx, read_whole, write_onnx
from ansor_mlflow.networks.operators import OPERATORS
from ansor_mlflow.networks.pytorch import PROGRAM_SUFFIX, TorchModel, load_program, require_trust
from ansor_mlflow.networks.sizes import ChosenSizes, SizeUse, has_several_sizes, size_uses
from ansor_mlflow.networks.static_shapes import input_specs, output_specs
