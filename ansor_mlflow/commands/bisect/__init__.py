"""The command `bisect`: which operator of a network is compiled wrongly."""

from ansor_mlflow.commands.bisect.bisect import Bisection, WrongTensor, bisect_network
