"""The command `sweep`: many networks and parameters, one run above all of them, one table and one budget."""

from ansor_mlflow.commands.sweep.declaration import Entry
from ansor_mlflow.commands.sweep.driver import run_sweep
from ansor_mlflow.commands.sweep.nodes import Ended, Node, tracking_store
from ansor_mlflow.commands.sweep.plans import SweepPlan
from ansor_mlflow.commands.sweep.ray_nodes import RayNodes
from ansor_mlflow.commands.sweep.results import SweepResult
