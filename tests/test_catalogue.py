"""`ansor-mlflow networks` lists what is there, with sizes that are true."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from ansor_mlflow.cli import cli
from ansor_mlflow.device import resolve_target
from ansor_mlflow.lowering.lower import lower
from ansor_mlflow.networks import BUILTIN_NETWORKS, OPERATORS, load_network, read_catalogue
from ansor_mlflow.networks.families import NetworkSize
from ansor_mlflow.settings import LoweringSettings


def test_every_network_has_a_size() -> None:
    assert list(read_catalogue()) == list(BUILTIN_NETWORKS)


@pytest.mark.parametrize("name", ["mlp", "bert-tiny", "squeezenet_v1.1", "resnet-block"])
def test_sizes_are_those_of_the_networks(name: str) -> None:
    network = load_network(name)
    lowered = lower(network.model, resolve_target("llvm", 1), LoweringSettings(algorithm="direct"))
    tasks = [task.info for task in lowered.tasks]
    assert read_catalogue()[name] == NetworkSize(
        inputs={spec.name: list(spec.shape) for spec in network.inputs},
        parameters=network.num_parameters,
        flops=sum(task.weight * task.flops for task in tasks),
        tasks=len(tasks),
    ), "run: python benchmarks/zoo.py --catalogue ansor_mlflow/networks/families/catalogue.json"


def test_networks_and_operators_are_listed() -> None:
    output = CliRunner().invoke(cli, ["networks"]).output
    table = output.split("\n\n")[1]
    listed = [line.split()[0] for line in table.splitlines()[1:]]
    assert listed == list(BUILTIN_NETWORKS)
    for form in OPERATORS.values():
        assert form in output
