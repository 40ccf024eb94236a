"""Other ways to compute a layer: the same result by fewer operations."""

from ansor_mlflow.lowering.ways.alternatives import Alternative, NoOtherWayError, find_alternatives
from ansor_mlflow.lowering.ways.choosing import ChosenWay, choose_ways
from ansor_mlflow.lowering.ways.rewriting import hash_of, replace_layers
from ansor_mlflow.lowering.ways.tasks import with_other_ways
