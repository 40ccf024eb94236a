"""The command `bisect`: which operator of a network is compiled wrongly."""

from ansor_mlflow.steps.bisection.bisect import bisect_network
from ansor_mlflow.steps.bisection.finding import Bisection, WrongTensor
