"""Other algorithms for a layer: the same result by fewer operations."""

from ansor_mlflow.lowering.algorithms.choose import ChosenAlgorithm, choose_algorithms
from ansor_mlflow.lowering.algorithms.find import NoAlgorithmError, find_algorithms
from ansor_mlflow.lowering.algorithms.rewrite import hash_of, replace_layers
from ansor_mlflow.lowering.algorithms.tasks import with_algorithms
