"""Where candidates are built: what a user may ask for, and which nodes of a cluster are used."""

from __future__ import annotations

import importlib.util
import platform
import socket
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest

from ansor_mlflow.errors import MachineError, UserInputError
from ansor_mlflow.options import TuneOptions, load_options
from ansor_mlflow.tuning.cluster.address import cluster_address, require_cluster
from ansor_mlflow.tuning.cluster.connection import Cluster, ModuleJob, Progress
from ansor_mlflow.tuning.cluster.node import NodeBuilder, NodeSettings, versions
from ansor_mlflow.tuning.workers.pool import Outcome

SETTINGS = NodeSettings(target="", machine=platform.machine(), timeout_s=1.0)


@pytest.fixture
def _ray_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())


@pytest.fixture(autouse=True)
def _no_cluster_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


# -- the parameter -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["0", "-1", "rays", "ray://", "ray://host", "http://host:1", "ray:10001", "2.5"])
def test_a_wrong_value(value: str) -> None:
    rule = "it must be a whole number of at least 1, auto, ray, or ray://host:port"
    with pytest.raises(UserInputError, match=rf"build_workers='{value}': {rule}"):
        load_options(TuneOptions, {"build_workers": value})


@pytest.mark.parametrize(
    ("value", "named", "address"),
    [
        ("auto", "", ""),
        ("3", "", ""),
        ("ray", "", "auto"),
        ("ray", "ray://10.0.0.1:10001", "ray://10.0.0.1:10001"),
        ("ray", "10.0.0.1:6379", "10.0.0.1:6379"),
        ("ray://head:10001", "ray://10.0.0.1:10001", "ray://head:10001"),
    ],
)
@pytest.mark.usefixtures("_ray_is_installed")
def test_which_cluster(value: str, named: str, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if named:
        monkeypatch.setenv("RAY_ADDRESS", named)
    assert cluster_address(load_options(TuneOptions, {"build_workers": value})) == address


@pytest.mark.usefixtures("_ray_is_installed")
def test_addresses_that_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserInputError, match="build_workers='ray://host:99999': it must be ray://host:port"):
        cluster_address(load_options(TuneOptions, {"build_workers": "ray://host:99999"}))
    monkeypatch.setenv("RAY_ADDRESS", "nowhere")
    with pytest.raises(UserInputError, match="RAY_ADDRESS='nowhere': it must be"):
        cluster_address(load_options(TuneOptions, {"build_workers": "ray"}))


def test_ray_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert cluster_address(TuneOptions()) == ""
    with pytest.raises(MachineError, match=r"build_workers=ray: Ray must be installed .* extra `ray` names"):
        cluster_address(TuneOptions(build_workers="ray"))


def test_nothing_listens_at_an_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"ray://127.0.0.1:{server.getsockname()[1]}"
        require_cluster(address)
    with pytest.raises(MachineError, match=rf"no Ray cluster can be reached at {address} \(nothing listens there"):
        require_cluster(address)


# -- the nodes ---------------------------------------------------------------------------------------------------------


def test_a_node_with_another_version_is_not_used() -> None:
    expected = {**versions(), "apache-tvm": "0.1", "Python": "2.7"}
    reason = NodeBuilder().prepare(expected, SETTINGS, 1)
    found = versions()
    assert reason == f"it has Python {found['Python']}, not 2.7, apache-tvm {found['apache-tvm']}, not 0.1"


@dataclass(eq=False)
class FakeReference:
    """What an actor will answer; it has none until it is told."""

    answer: Any = None
    is_there: bool = False


@dataclass
class FakeActor:
    """Answers at once that it is ready, and builds nothing until it is told."""

    reason: str
    building: deque[FakeReference] = field(default_factory=deque)

    @property
    def prepare(self) -> FakeActor.Call:
        return self.Call(lambda: FakeReference(self.reason, is_there=True))

    @property
    def build(self) -> FakeActor.Call:
        return self.Call(self._build)

    def _build(self) -> FakeReference:
        self.building.append(FakeReference())
        return self.building[-1]

    def tell(self, answer: Any) -> None:
        """Lets the oldest build have ended."""
        reference = self.building.popleft()
        reference.answer, reference.is_there = answer, True

    @dataclass
    class Call:
        call: Any

        def remote(self, *_: Any) -> Any:
            return self.call()


@dataclass
class FakeRay:
    """A cluster that a test steers."""

    cpus: dict[str, int]
    """By the node: a letter, of which its ID is made."""
    reasons: dict[str, str] = field(default_factory=dict)
    actors: dict[str, FakeActor] = field(default_factory=dict)

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"NodeID": 56 * id_, "Alive": True, "Resources": {"CPU": number}, "NodeManagerAddress": f"host-{id_}"}
            for id_, number in self.cpus.items()
        ]

    def remote(self, _: type) -> Any:
        return self

    def options(self, *, scheduling_strategy: Any, **_: Any) -> FakeActor.Call:
        id_ = scheduling_strategy.node_id[0]
        return FakeActor.Call(lambda: self.actors.setdefault(id_, FakeActor(self.reasons.get(id_, ""))))

    def wait(self, references: list[FakeReference], **_: Any) -> tuple[list[FakeReference], list[FakeReference]]:
        return [r for r in references if r.is_there], [r for r in references if not r.is_there]

    def get(self, reference: FakeReference) -> Any:
        if isinstance(reference.answer, Exception):
            raise reference.answer
        return reference.answer

    def kill(self, actor: FakeActor) -> None:
        self.actors = {id_: other for id_, other in self.actors.items() if other is not actor}


class TestCluster:
    """The choice of nodes, with a Ray that does what it is told."""

    @pytest.fixture(autouse=True)
    def _fake(self) -> None:
        pytest.importorskip("ray")
        self.now_s = 0.0

    def cluster_of(self, ray: FakeRay) -> Cluster:
        return Cluster(ray, SETTINGS, clock=lambda: self.now_s)

    def later(self, cluster: Cluster, *jobs: ModuleJob, seconds: float = 2.0) -> Progress:
        self.now_s += seconds
        return cluster.advance(jobs)

    def test_a_node_that_cannot_be_used_is_named_once(self) -> None:
        cluster = self.cluster_of(FakeRay({"a": 1, "b": 1, "c": 0}, reasons={"b": "it has Python 2.7, not 3"}))
        first, second = self.later(cluster), self.later(cluster, seconds=1e6)
        assert first.messages == ["Ray node host-b (bbbbbbbb) is not used: it has Python 2.7, not 3"]
        assert (first.num_nodes, first.num_starting) == (1, 0)
        assert second.messages == []

    def test_there_are_as_many_builds_as_cpus(self) -> None:
        ray = FakeRay({"a": 2, "b": 1})
        cluster = self.cluster_of(ray)
        self.later(cluster)
        self.later(cluster, *(ModuleJob(number, "") for number in range(5)))
        assert {id_: len(actor.building) for id_, actor in ray.actors.items()} == {"a": 2, "b": 1}
        ray.cpus["c"] = 1
        self.later(cluster)
        self.later(cluster)
        assert len(ray.actors["c"].building) == 1

    def test_a_candidate_is_given_up_after_the_third_node(self) -> None:
        ray = FakeRay(dict.fromkeys("abcd", 1))
        cluster = self.cluster_of(ray)
        self.later(cluster)
        self.later(cluster, ModuleJob(7, ""))
        told: list[str] = []
        for _ in range(3):
            (actor,) = (actor for actor in ray.actors.values() if actor.building)
            actor.tell(OSError("no space is left\non the disk"))
            progress = self.later(cluster)
            told += progress.messages
            progress = self.later(cluster) if not progress.done else progress
        ((number, _, outcome),) = progress.done
        assert number == 7
        assert outcome.failure == "crashed"
        assert outcome.error.startswith("it was lost with 3 Ray nodes: host-")
        assert len(told) == 3
        assert told[0].endswith(
            "was lost: no space is left; 1 candidates that were being built there are built again elsewhere"
        )

    def test_a_node_that_does_not_answer_is_lost_and_tried_again_later(self) -> None:
        ray = FakeRay({"a": 1})
        cluster = self.cluster_of(ray)
        self.later(cluster)
        self.later(cluster, ModuleJob(1, ""))
        lost = self.later(cluster, seconds=SETTINGS.timeout_s + 40)
        assert lost.num_nodes == 0
        assert "it has not answered for 31 s" in lost.messages[0]
        assert self.later(cluster, seconds=100).num_nodes == 1
        self.later(cluster)
        ray.actors["a"].tell(Outcome(b"library"))
        assert self.later(cluster).done == [(1, "host-a (aaaaaaaa)", Outcome(b"library"))]
