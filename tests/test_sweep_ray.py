"""`ansor-mlflow sweep --on ray` on a real cluster of raylets on this host, which are killed: nothing is lost.

Ray takes no part in what is measured: each node runs whole pipelines, one after the other.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import onnx
import psutil
import pytest
from helpers.browser import MlflowPages, chromium
from helpers.commands import ANSOR_MLFLOW, MLFLOW, ROOT, SCRIPTS, environment, run
from helpers.servers import mlflow_server
from helpers.sweeps import runs_of, write_sweep
from mlflow.entities import Run
from playwright.sync_api import expect

from ansor_mlflow import names
from ansor_mlflow.networks.graph import GraphBuilder

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

FEW: dict[str, Any] = {"rivals": "none", "num_threads": 1}
RAY = str(SCRIPTS / "ray")
DENSE = "dense:16,64,64"


@contextmanager
def cluster_of(directory: Path, *nodes: dict[str, Any]) -> Iterator[Any]:
    """A cluster whose head takes no pipelines, with nodes of one CPU each, and their labels and resources."""
    from ray.cluster_utils import Cluster

    before = dict(os.environ)
    os.environ |= {"XDG_CACHE_HOME": str(directory / "cache"), "RAY_DISABLE_DOCKER_CPU_WARNING": "1"}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        cluster.nodes = [cluster.add_node(num_cpus=1, wait=False, **node) for node in nodes]
        cluster.wait_for_nodes()
        yield cluster
    finally:
        cluster.shutdown()
        os.environ.clear()
        os.environ.update(before)


def command(cluster: Any, experiment_id: str, path: str, *more: str) -> tuple[list[str], dict[str, str]]:
    env = environment(os.environ["MLFLOW_TRACKING_URI"], {"MLFLOW_EXPERIMENT_ID": experiment_id})
    env["RAY_ADDRESS"] = cluster.address
    return [ANSOR_MLFLOW, "sweep", path, "--on", "ray", *more], env


def wait_for(condition: Callable[[], Any], process: subprocess.Popen[bytes], log: Path, limit_s: float = 240) -> Any:
    deadline_s = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < deadline_s, log.read_text()
        assert process.poll() is None, log.read_text()
        time.sleep(0.3)
    return found


def test_what_a_lost_node_tuned_goes_on_elsewhere(tmp_path: Path, new_experiment: str) -> None:
    """The tuning has its trials from before; a label that no node has is named, and the others go on."""
    builder = GraphBuilder(seed=0)
    logits = builder.dense("logits", builder.input("data", (1, 64)), units=32, in_units=64)
    network = tmp_path / "small.onnx"
    onnx.save(builder.build("small", {logits: (1, 32)}), network)
    np.savez(tmp_path / "data.npz", data=np.ones((2, 64), np.float32))
    path = write_sweep(
        tmp_path / "s.yaml",
        {"network": DENSE, "device": "kind=big", "trials": 40},
        {"network": str(network), "device": "small", "trials": 0, "data": str(tmp_path / "data.npz")},
        {"network": "mlp", "device": "kind=absent"},
        name="lost",
        defaults=FEW,
    )
    big, small = {"labels": {"kind": "big"}}, {"resources": {"small": 1}}
    with cluster_of(tmp_path, big, big, small) as cluster:
        args, env = command(cluster, new_experiment, path, "--node-minutes", "0")
        log = tmp_path / "log"
        with log.open("w") as output:
            process = subprocess.Popen(args, cwd=tmp_path, env=env, stdout=output, stderr=output)
        try:

            def tuning() -> Any:
                return [
                    each for each in runs_of(new_experiment, "tune") if each.data.metrics.get(names.TRIALS_MEASURED)
                ]

            wait_for(tuning, process, log)
            (lost,) = [each for each in cluster.nodes[:2] if is_busy(each)]
            cluster.remove_node(lost, allow_graceful=False)
            assert process.wait(300) == 4, log.read_text()
        finally:
            process.kill()
    text = log.read_text()
    assert "no node of the cluster has device=kind=absent target=auto" in text
    assert "node vm kind=big was lost" in text.replace(socket.gethostname(), "vm")
    (parent,) = runs_of(new_experiment, "sweep")
    tuned = [each for each in runs_of(new_experiment, "tune") if each.data.metrics.get(names.TRIALS_MEASURED)]
    assert [each.data.metrics[names.TRIALS_MEASURED] for each in tuned] == [40]
    finished = {each.info.run_name: each for each in runs_of(new_experiment, "main") if each.info.status == "FINISHED"}
    assert sorted(name.split()[0] for name in finished) == [DENSE, "small"]
    assert {each.data.tags["mlflow.parentRunId"] for each in finished.values()} == {parent.info.run_id}
    (folder,) = mlflow.MlflowClient().list_artifacts(parent.info.run_id, "files")
    files = [each.path for each in mlflow.MlflowClient().list_artifacts(parent.info.run_id, folder.path)]
    assert sorted(Path(path).name for path in files) == ["data", "network"]
    assert not [each for each in runs_of(new_experiment, "main") if each.info.status == "RUNNING"]
    assert (parent.data.metrics[names.SWEEP_DONE], parent.data.metrics[names.SWEEP_FAILED]) == (2, 1)


def is_busy(node: Any) -> bool:
    """Whether a pipeline runs below a raylet."""
    processes = psutil.Process(node.all_processes["raylet"][0].process.pid).children(recursive=True)
    return any("ansor_mlflow.processes" in " ".join(each.cmdline()) for each in processes)


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_a_sweep_of_six_networks_on_two_kinds_of_nodes_is_seen_in_the_browser(tmp_path: Path) -> None:
    """A node is killed in the middle."""
    networks = [f"dense:{rows},{units},64" for rows in (1, 8, 16) for units in (32, 64)]
    path = write_sweep(
        tmp_path / "s.yaml",
        {"network": networks, "device": ["kind=big", "kind=small"], "trials": 4},
        name="fleet",
        defaults={"num_threads": 1},
    )
    nodes = [{"labels": {"kind": kind, "slot": slot}} for kind in ("big", "small") for slot in ("1", "2")]
    with (
        mlflow_server(tmp_path / "server") as server,
        pytest.MonkeyPatch.context() as patch,
        cluster_of(tmp_path, *nodes) as cluster,
    ):
        patch.setenv("MLFLOW_TRACKING_URI", server.url)
        experiment = mlflow.MlflowClient(server.url).create_experiment("fleet")
        args, env = command(cluster, experiment, path)
        log = tmp_path / "log"
        with log.open("w") as output:
            process = subprocess.Popen(args, cwd=tmp_path, env=env, stdout=output, stderr=output)
        try:
            wait_for(lambda: len(runs_of(experiment, "main")) > 6, process, log, limit_s=600)
            lost = next(each for each in cluster.nodes if is_busy(each))
            cluster.remove_node(lost, allow_graceful=False)
            assert process.wait(900) == 0, log.read_text()
        finally:
            process.kill()
        (parent,) = runs_of(experiment, "sweep")
        finished = [each for each in runs_of(experiment, "main") if each.info.status == "FINISHED"]
        entries = sorted(f"{network} device=kind={kind} trials=4" for network in networks for kind in ("big", "small"))
        assert sorted(each.info.run_name for each in finished) == entries  # each once
        # Both kinds are of one device: what the one has tuned the other one knows.
        assert sum(each.data.metrics[names.TRIALS_MEASURED] for each in finished) < 4 * 12
        assert "| spared |" in parent.data.tags["mlflow.note.content"]
        assert parent.data.metrics[names.SWEEP_DONE] == 12
        assert "was lost" in log.read_text()
        assert_alone(log.read_text(), runs_of(experiment, "main"))
        with chromium() as browser:
            pages = MlflowPages(browser, server.url, tmp_path)
            run = f"experiments/{experiment}/runs/{parent.info.run_id}?workflowType=machine_learning"
            with pages.open(run, height=2000) as page:
                table = page.get_by_role("table").filter(has_text="speed-up")
                for entry in entries:
                    expect(table.get_by_role("row").filter(has_text=entry)).to_have_count(1)
                expect(page.get_by_text("12 of 12 entries have a model").first).to_be_visible()
                expect(page.get_by_text("sweep/speedup_median").first).to_be_visible()
                children = page.get_by_role("link").filter(has_text=" device=kind=")
                expect(children.nth(9)).to_be_visible()  # MLflow shows ten, and a button for more
                assert {children.nth(place).inner_text() for place in range(10)} < set(entries)


def assert_alone(log: str, pipelines: list[Run]) -> None:
    """No two pipelines ran on one node at the same time: where each did is in the log, when it did in its run."""
    of_node: dict[str, list[tuple[int, int]]] = {}
    places = re.findall(r"^(.*) on (\S+ kind=\w+ slot=\d): trials=", log, re.M)
    assert len(places) >= 12
    by_name = {each.info.run_name: each for each in pipelines if each.info.status == "FINISHED"}
    for name, node in dict(places).items():  # the last place of each
        info = by_name[name].info
        of_node.setdefault(node, []).append((info.start_time, info.end_time))
    for times in of_node.values():
        for begin, _ in times:
            assert sum(start <= begin < end for start, end in times) == 1


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_an_entry_point_runs_on_a_node_and_a_lost_head_is_one_line(tmp_path: Path, new_experiment: str) -> None:
    """`mlflow run -b ansor-ray` makes no environment; without its head a cluster is of no use."""
    config = tmp_path / "config.json"
    parameters = {"network": DENSE, "trials": 0, "baseline": "none", "rivals": "none", "turns": 1, "measure_s": 0.1}
    pairs = [word for key, value in parameters.items() for word in ("-P", f"{key}={value}")]
    path = write_sweep(tmp_path / "s.yaml", {"network": DENSE, "trials": 0, "device": "kind=absent"}, name="waits")
    with cluster_of(tmp_path, {"labels": {"kind": "big"}}) as cluster:
        args, env = command(cluster, new_experiment, path, "--node-minutes", "5")
        config.write_text(json.dumps({"device": "kind=big"}))
        mlflow_run = [MLFLOW, "run", str(ROOT), "-b", "ansor-ray", "--backend-config", str(config), *pairs]
        done = run([*mlflow_run, "--experiment-id", new_experiment], tmp_path / "work", env)
        assert done.exit_code == 0, done.stderr
        (made,) = runs_of(new_experiment, "main")
        assert made.info.status == "FINISHED"
        assert made.data.tags["mlflow.project.backend"] == "ansor-ray"
        assert made.data.tags[names.TAG_MODEL_URI].startswith("models:/")
        config.write_text(json.dumps({"device": "kind=absent", "node_minutes": 0}))
        done = run([*mlflow_run, "--experiment-id", new_experiment], tmp_path / "work", env)
        assert done.exit_code != 0
        assert "no node of the cluster has device=kind=absent" in done.stderr
        assert len(runs_of(new_experiment, "main")) == 1

        head = psutil.Process(cluster.head_node.all_processes["gcs_server"][0].process.pid)
        for make_silent in (head.suspend, head.kill):
            log = tmp_path / "log"
            with log.open("w") as output:
                process = subprocess.Popen(args, cwd=tmp_path, env=env, stdout=output, stderr=output)
            try:
                wait_for(lambda log=log: "sweep run" in log.read_text(), process, log)
                make_silent()
                assert process.wait(120) == 3, log.read_text()
            finally:
                process.kill()
                head.resume()
            errors = [line for line in log.read_text().splitlines() if line.startswith("Error: ")]
            assert len(errors) == 1
            assert errors[0].startswith("Error: the head of the Ray cluster does not answer")
            assert runs_of(new_experiment, "sweep")[0].info.status == "FAILED"


FULL_NODE = """
mount -t tmpfs -o size=8m tmpfs "$1" || exit 99
head -c 8M /dev/zero > "$1/big" 2> /dev/null
export TMPDIR="$1" XDG_CACHE_HOME="$1"
exec "$2" start --address "$3" --num-cpus 1 --block
"""
"""Starts a node whose disk is full. Arguments: where that is mounted, the `ray` command, and the head."""


@pytest.mark.nightly
def test_what_a_full_disk_ends_goes_on_on_another_node(tmp_path: Path, new_experiment: str) -> None:
    path = write_sweep(
        tmp_path / "s.yaml", {"network": [DENSE, "dense:8,32,32", "dense:1,32,32"]}, name="full", defaults=FEW
    )
    (tmp_path / "disk").mkdir()
    with cluster_of(tmp_path, {"labels": {"disk": "good"}}) as cluster:
        args, env = command(cluster, new_experiment, path)
        start = ["unshare", "-rm", "sh", "-c", FULL_NODE, "sh", str(tmp_path / "disk"), RAY, cluster.address]
        with subprocess.Popen(start, env=env, stdout=subprocess.DEVNULL) as node:
            done = run(args, tmp_path / "work", env)
            node.terminate()
    assert done.exit_code == 0, done.stderr
    assert "No space left on device" in done.stderr
    pipelines = runs_of(new_experiment, "main")
    assert "FAILED" in {each.info.status for each in pipelines}
    assert len([each for each in pipelines if each.info.status == "FINISHED"]) == 3
