"""Networks as ONNX graphs: built-in ones, and those of users."""

from ansor_mlflow.networks.builtin import BUILTIN_NETWORKS
from ansor_mlflow.networks.source import Network, load_network

__all__ = ["BUILTIN_NETWORKS", "Network", "load_network"]
