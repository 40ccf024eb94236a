"""Other algorithms for a layer: the same result by fewer operations."""

from ansor_mlflow.lowering.algorithms.choose import ChosenAlgorithm, choose_algorithms, hash_of, replace_layers
from ansor_mlflow.lowering.algorithms.find import NoAlgorithmError, find_algorithms, with_algorithms
