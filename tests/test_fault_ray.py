"""Nodes of a Ray cluster that die while they build: every candidate is built, or says why not."""

from __future__ import annotations

import logging
import platform
import re
import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import mlflow
import psutil
import pytest
from helpers.commands import environment
from helpers.fleet import wait_for
from helpers.tuner_process import kill, tuning
from test_measuring import unbuildable

from ansor_mlflow import names
from ansor_mlflow.tuning.cluster import builder as cluster_builder
from ansor_mlflow.tuning.cluster.builder import RayBuilder
from ansor_mlflow.tuning.cluster.node import NodeSettings
from ansor_mlflow.tuning.workers.builder import LocalBuilder
from ansor_mlflow.tuning.workers.pool import Outcome

if TYPE_CHECKING:
    from helpers.ray_cluster import RayCluster
    from tvm.ir import IRModule
    from tvm.target import Target

pytest.importorskip("ray")

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]

TRIALS = 24
LOST = (
    r"Ray node 127\.0\.0\.1 \(\w{8}\) was lost: [^;]+; (\d+) candidates that were being built there are built again "
    "elsewhere"
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """A cluster to which every test adds the nodes that it needs, and kills them."""
    from helpers.ray_cluster import running_ray

    with (
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as short,
        running_ray(Path(short)) as cluster,
    ):
        yield cluster


@pytest.fixture
def nodes(cluster: RayCluster) -> Iterator[list[psutil.Process]]:
    """Two nodes, which are gone after the test."""
    found = [cluster.add_node(), cluster.add_node()]
    yield found
    for node in found:
        end(node)


def end(node: psutil.Process) -> None:
    """Ends all processes of a node at once, as those of a host that fails."""
    for process in (*descendants(node), node):
        kill(process)


def descendants(node: psutil.Process) -> list[psutil.Process]:
    try:
        return node.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def module(num_statements: int) -> IRModule:
    """A module that takes the longer to build the more statements it has: 300 a second, about, and 10000 minutes."""
    import tvm

    return tvm.script.from_source(f"""
@I.ir_module
class Module:
    @T.prim_func(s_tir=True)
    def main(data: T.Buffer((64,), "float32"), result: T.Buffer((64,), "float32")):
        T.func_attr({{"global_symbol": "main"}})
        for i in T.unroll({num_statements}):
            result[i % 64] = T.exp(data[i * 7 % 64])
""")


ENDLESS = 10000
TIMEOUT_S = 10.0


def ray_builder(cluster: RayCluster, target: Target) -> RayBuilder:
    from tvm.ir import save_json

    settings = NodeSettings(target=save_json(target), machine=platform.machine(), timeout_s=TIMEOUT_S)
    return RayBuilder(cluster.address, settings, partial(local_builder, target))


def local_builder(target: Target) -> LocalBuilder:
    return LocalBuilder(target, max_workers=2, timeout_s=TIMEOUT_S, as_in_models=True)


def contents(outcomes: list[Outcome[Path]]) -> list[bytes]:
    assert [outcome.error for outcome in outcomes] == [""] * len(outcomes)
    return [outcome.value.read_bytes() for outcome in outcomes if outcome.value is not None]


def busy_worker(nodes: list[psutil.Process]) -> psutil.Process | None:
    """A process that builds: a child of a fork server, some time after its start."""
    servers = [p for node in nodes for p in descendants(node) if "forkserver" in " ".join(p.cmdline())]
    return next((p for p in servers if p.parent() in servers and p.cpu_times().user > 0.2), None)


def test_nodes_build_and_fail_as_this_host_does(
    cluster: RayCluster,
    nodes: list[psutil.Process],
    host_target: Target,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO, "ansor_mlflow")
    mods = [module(1), unbuildable(), module(40)]
    with (
        closing(local_builder(host_target)) as local,
        closing(ray_builder(cluster, host_target)) as builder,
        ThreadPoolExecutor(1) as executor,
    ):
        good, bad, better = builder.build(mods)
        expected_good, expected_bad, expected_better = local.build(mods)
        assert contents([good, better]) == contents([expected_good, expected_better])
        assert bad == expected_bad
        assert bad.failure == "failed"

        # a build crashes
        built = executor.submit(builder.build, [module(ENDLESS), module(1)])
        wait_for(lambda: busy_worker(nodes) is not None)
        worker = busy_worker(nodes)
        assert worker is not None
        worker.send_signal(signal.SIGSEGV)
        crashed, good = built.result(60)
        assert crashed == Outcome(failure="crashed", error="the worker process died (SIGSEGV)")
        assert good.failure == ""

        # a build hangs, and a node is killed in the middle of others
        built = executor.submit(builder.build, [module(ENDLESS), *[module(300)] * 16])
        wait_for(lambda: busy_worker(nodes[:1]) is not None)
        kill(nodes[0])
        hung, *others = built.result(90)
        assert hung == Outcome(failure="timed_out", error="killed after 10 s")
        assert len(contents(others)) == 16
        (lost,) = (re.fullmatch(LOST, line) for line in caplog.messages if "lost" in line)
        assert lost is not None, caplog.messages
        assert int(lost[1]) > 0

        # and then the last one
        monkeypatch.setattr(cluster_builder, "_ALONE_S", 1.0)
        end(nodes[1])
        assert len(contents(builder.build([module(1)] * 4))) == 4
        (told,) = (line for line in caplog.messages if "this host builds" in line)
        assert (
            told == f"the Ray cluster at {cluster.address} has had no node for 1 s: this host builds until there is one"
        )


def test_a_tuning_whose_node_is_killed_has_all_its_trials(
    cluster: RayCluster, nodes: list[psutil.Process], small_onnx: Path, short_path: Path
) -> None:
    store = f"sqlite:///{short_path / 'mlflow.db'}"
    env = environment(store, cluster.environment)
    with tuning(small_onnx, short_path / "cwd", env, trials=TRIALS, build_workers="ray") as tuner:
        tuner.wait_for_rounds(3)
        kill(nodes[0])
        finished = tuner.wait(120)
    assert finished.exit_code == 0, finished.stderr
    client = mlflow.MlflowClient(store)
    (run,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert run.data.params["build_workers"] == "ray"
    assert run.data.metrics[names.TRIALS_MEASURED] == run.data.metrics["trials/ok"] == TRIALS
    assert len(re.findall(LOST, finished.stderr)) == 1, finished.stderr
    assert "raylet" not in finished.stderr
