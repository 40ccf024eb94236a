"""The project backend `ansor-ray`: `mlflow run . -b ansor-ray -P …` runs an entry point on a node of a Ray cluster.

The node has this package and its dependencies installed, so that MLflow makes no environment. An entry point has a node
for itself, as a pipeline of a sweep has.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlflow
from mlflow.entities import RunStatus
from mlflow.exceptions import ExecutionException
from mlflow.projects import SubmittedRun
from mlflow.projects.backend.abstract_backend import AbstractBackend
from mlflow.projects.utils import (
    fetch_and_validate_project,
    get_entry_point_command,
    get_or_create_run,
    get_run_env_vars,
    load_project,
)

from ansor_mlflow import tracking
from ansor_mlflow.commands.sweep import Ended, Entry, Node, RayNodes, tracking_store
from ansor_mlflow.errors import MachineError
from ansor_mlflow.parameters import PipelineOptions, load_options

_log = logging.getLogger("ansor_mlflow")
_CONFIG = {"address": "ray", "device": "", "node_minutes": 10.0}
"""What a backend's configuration may say, as the parameters of `sweep` and of its entries; `address` is `cluster`."""
_LOOK_S = 5.0
_MAX_OUTPUT_LINES = 20


@dataclass(frozen=True, kw_only=True)
class ProjectJob:
    """An entry point's command, which a node runs in a copy of the project."""

    name: str
    command: str
    variables: Mapping[str, str]


class EndedRun(SubmittedRun):
    """A run that has ended."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    @property
    def run_id(self) -> str:
        return self._run_id

    def wait(self) -> bool:
        return True

    def get_status(self) -> str:
        return str(RunStatus.to_string(RunStatus.FINISHED))

    def cancel(self) -> None:
        """It has ended."""


class RayBackend(AbstractBackend):
    """Runs entry points on the nodes of a cluster; `run` returns when they have ended, as that of MLflow's own does."""

    def run(
        self,
        project_uri: str,
        entry_point: str,
        params: Mapping[str, Any],
        version: str | None,
        backend_config: Mapping[str, Any],
        tracking_uri: str,
        experiment_id: str,
    ) -> SubmittedRun:
        """Runs an entry point, see `AbstractBackend.run`.

        Raises:
            ExecutionException: It failed, or its node was lost.
            MachineError: There is no cluster, or no such node.
        """
        del tracking_uri  # that of this process, whose path may be relative
        config = {**_CONFIG, **{key: backend_config[key] for key in _CONFIG if key in backend_config}}
        directory = fetch_and_validate_project(project_uri, version, entry_point, params)
        shared = {key: params[key] for key in ("network", "target", "num_threads") if key in params}
        options = load_options(PipelineOptions, shared)
        entry = Entry(name=entry_point, options=options, weight=1.0, device=str(config["device"]))
        nodes = RayNodes(str(config["address"]), [entry], run_command, directory=directory)
        run_id = ""
        try:
            node = _node_for(entry, nodes, 60 * float(config["node_minutes"]))
            run = get_or_create_run(None, project_uri, experiment_id, directory, version, entry_point, params)
            run_id = str(run.info.run_id)
            variables = {**get_run_env_vars(run_id, experiment_id), "MLFLOW_TRACKING_URI": tracking_store()}
            command = get_entry_point_command(load_project(directory), entry_point, params, None)
            _log.info("%s on %s, run %s", entry_point, node.name, run_id)
            nodes.start(0, node, ProjectJob(name=entry_point, command=" && ".join(command), variables=variables))
            while not (found := nodes.wait(_LOOK_S)):
                nodes.look()
            ((_, ended),) = found
        except BaseException:
            if run_id:
                tracking.end_killed_run(run_id)
            raise
        finally:
            nodes.close()
        _end(run_id, ended)
        return EndedRun(run_id)


def _node_for(entry: Entry, nodes: RayNodes, limit_s: float) -> Node:
    """A node of the device that an entry point is for; waits until there is one."""
    deadline_s = time.monotonic() + limit_s
    while True:
        try:
            device = nodes.device_of(entry).name
            return next(node for node in nodes.known if nodes.suits(node, entry, device))
        except MachineError:
            if time.monotonic() > deadline_s:
                raise
        nodes.request([(entry, "")])
        time.sleep(_LOOK_S)
        nodes.look()


def _end(run_id: str, ended: Ended) -> None:
    """Ends the run as its entry point ended, where that did not say so itself."""
    client = mlflow.MlflowClient()
    if ended.is_lost:
        tracking.end_killed_run(run_id)
    elif client.get_run(run_id).info.status == RunStatus.to_string(RunStatus.RUNNING):
        client.set_terminated(run_id, "FAILED" if ended.error else "FINISHED")
    if ended.error:
        raise ExecutionException(f"run {run_id}: {ended.error}")


def run_command(job: ProjectJob) -> Ended:
    """The task of a node: runs the command in the directory that Ray made of the project."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    done = subprocess.run(
        ["bash", "-c", job.command],
        env={**os.environ, **job.variables, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    last = "\n".join(done.stdout.strip().splitlines()[-_MAX_OUTPUT_LINES:])
    return Ended(error="" if done.returncode == 0 else f"exit code {done.returncode}: {last}")
