"""The nodes of a Ray cluster: each takes a whole pipeline at a time, with all that it has, and measures by itself.

Nothing is searched, built or measured over the network; models and records go from a node to the tracking server.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import platform
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, TypeVar

from mlflow import MlflowClient

from ansor_mlflow.commands.sweep.declaration import Entry
from ansor_mlflow.commands.sweep.nodes import Ended, Node, device_key, run_in_process, tracking_store
from ansor_mlflow.device import Device, DeviceFingerprint
from ansor_mlflow.errors import AnsorMlflowError, MachineError, UserInputError, one_line, only_warn

Out = TypeVar("Out")
_log = logging.getLogger("ansor_mlflow")
_PACKAGES = ("ansor_mlflow", "apache-tvm", "mlflow")
_FIRST_LOOK_S = 60.0
"""Seconds in which the nodes that are there say what they are."""
_MAX_SILENCE_S = 30.0
"""Seconds after which the cluster's head is given up; Ray itself ends the whole process after 60."""
_REQUEST_S = 60.0
"""Seconds after which the autoscaler is asked again: a task for it takes a worker."""
_ASK_AGAIN_S = 120.0
"""Seconds after which a node is asked again that did not reach the tracking server."""
_POLL_S = 0.2
_FREE_CPU = 0.001
"""What a question takes of a node: one that runs another driver's pipeline answers when that has ended."""


@dataclass(frozen=True, kw_only=True)
class _Question:
    """What a node is asked when it is seen first."""

    devices: Sequence[tuple[str, str]]
    """Targets and numbers of threads of all entries."""
    store: str
    host: str
    """That of the driver, which may be the only one that has the store."""


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """What a node is."""

    host: str
    versions: Mapping[str, str]
    devices: Mapping[tuple[str, str], DeviceFingerprint]
    error: str = ""
    """Why it cannot log to the tracking server."""


class RayNodes:
    """The nodes of a cluster that have CPUs, this package, and a way to the tracking server."""

    def __init__(
        self,
        address: str,
        entries: Sequence[Entry],
        pipeline: Callable[[Any], Ended] = run_in_process,
        directory: str | None = None,
    ) -> None:
        """Connects to a cluster, and asks its nodes what they are.

        A pipeline runs in a copy of the directory, if there is one.

        Raises:
            MachineError: Ray is not installed, or there is no such cluster.
        """
        try:
            import ray
        except ImportError as err:
            raise MachineError(f"on={address}: Ray is not installed; pip install 'ansor_mlflow[ray]'") from err
        self._ray, self._pipeline = ray, pipeline
        on_sigterm = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(
                address="auto" if address == "ray" else address,
                log_to_driver=False,
                logging_level=logging.WARNING,
                runtime_env={"working_dir": directory} if directory else None,
            )
        except Exception as err:  # Ray's errors here have no class in common
            raise MachineError(
                f"on={address}: {one_line(err)}; start a cluster with `ray start --head`, or give the address of one "
                "with the same Python and Ray"
            ) from err
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGTERM, on_sigterm)  # Ray's own ends the process without a word
        # It prints pages about raylets that end, to standard output, where the result goes.
        ray._private.worker._worker_logs_enabled = False
        is_client = ray.util.client.ray.is_connected()  # which has no way to the head but its server
        self._head = "" if is_client else ray.get_runtime_context().gcs_address
        self._question = _Question(
            devices=sorted({device_key(entry) for entry in entries}), store=tracking_store(), host=socket.gethostname()
        )
        self._known: dict[str, Node] = {}
        self._asked: dict[Any, dict[str, Any]] = {}  # nodes that have not answered, by the reference of the answer
        self._ask_s: dict[str, float] = {}  # when a node is asked (again), by its ID
        self._running: dict[Any, tuple[int, Node]] = {}
        self._requested: tuple[list[dict[str, float]], list[dict[str, str]]] = [], []
        self._requested_s = -math.inf
        self._is_closed = False
        deadline_s = time.monotonic() + _FIRST_LOOK_S
        while (self.look() or True) and self._asked and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        if not self._known:
            _log.warning("the cluster has no node that takes a pipeline, yet")

    @property
    def known(self) -> Sequence[Node]:
        return list(self._known.values())

    def look(self) -> bool:
        alive = {node["NodeID"]: node for node in self._answer_of_head(self._ray.nodes) if node["Alive"]}
        for gone in self._known.keys() - alive.keys():
            _log.warning("node %s is gone", self._known.pop(gone).name)
        now_s = time.monotonic()
        for node_id in [each for each in alive if self._ask_s.get(each, 0) <= now_s]:
            self._ask_s[node_id] = math.inf
            if alive[node_id]["Resources"].get("CPU"):
                reference = self._remote(_describe, node_id, {"num_cpus": _FREE_CPU}).remote(self._question)
                self._asked[reference] = alive[node_id]
        answered, _ = (
            self._ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0) if self._asked else ([], [])
        )
        before = len(self._known)
        for reference in answered:
            self._meet(self._asked.pop(reference), reference)
        return len(self._known) > before

    def _meet(self, node: Mapping[str, Any], reference: Any) -> None:
        """Takes a node that has answered, or says why it does not."""
        name = node["NodeManagerHostname"]
        try:
            answer: _Answer = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as err:
            _log.warning("node %s gets no pipeline: %s; install ansor_mlflow there, as here", name, one_line(err.cause))
            return
        except Exception:  # noqa: BLE001 - it is gone already, or comes again
            self._ask_s.pop(node["NodeID"])
            return
        here = _versions()
        others = [f"{key} {text} (here {here[key]})" for key, text in answer.versions.items() if text != here[key]]
        reason = answer.error or (f"it has {', '.join(others)}" if others else "")
        if reason:
            if answer.error:  # a server that is away comes back
                self._ask_s[node["NodeID"]] = time.monotonic() + _ASK_AGAIN_S
            _log.warning("node %s gets no pipeline: %s", answer.host, reason)
            return
        labels = {key: text for key, text in node["Labels"].items() if not key.startswith("ray.io/")}
        found = Node(
            id=node["NodeID"],
            name=" ".join([answer.host, *(f"{key}={text}" for key, text in sorted(labels.items()))]),
            labels=node["Labels"],
            resources=node["Resources"],
            devices=answer.devices,
        )
        _log.info("node %s: %s", found.name, ", ".join(sorted({each.description for each in found.devices.values()})))
        self._known[found.id] = found

    def device_of(self, entry: Entry) -> DeviceFingerprint:
        key = device_key(entry)
        nodes = [node for node in self._known.values() if node.has(entry.device) and key in node.devices]
        found = {node.devices[key].name: node.devices[key] for node in nodes}
        if not found:
            asked = " ".join(filter(None, [entry.device and f"device={entry.device}", f"target={key[0]}"]))
            raise MachineError(f"no node of the cluster has {asked}")
        if len(found) > 1:
            who = "; ".join(sorted({f"{node.name}: {node.devices[key].description}" for node in nodes}))
            raise UserInputError(
                f"the cluster has several devices ({who}); say which with device: a label or a resource"
            )
        return next(iter(found.values()))

    def suits(self, node: Node, entry: Entry, device: str) -> bool:
        made_for = node.devices.get(device_key(entry))
        return node.has(entry.device) and made_for is not None and made_for.name == device

    def request(self, entries: Sequence[tuple[Entry, str]]) -> None:
        bundles = [self._bundle(entry, device) for entry, device in entries]
        labels = [dict([entry.device.split("=", 1)]) if "=" in entry.device else {} for entry, _ in entries]
        if (bundles, labels) != self._requested and time.monotonic() - self._requested_s > _REQUEST_S:
            self._requested, self._requested_s = (bundles, labels), time.monotonic()
            self._ask(bundles, labels)

    def _ask(self, bundles: list[dict[str, float]], labels: list[dict[str, str]]) -> Any:
        """Asks the autoscaler, in a task: a client of a cluster has no way to it. Returns the task's reference."""
        with only_warn("the autoscaler cannot be asked"):
            return self._ray.remote(_request).options(num_cpus=0).remote(bundles, labels)

    def _bundle(self, entry: Entry, device: str) -> dict[str, float]:
        """All CPUs and GPUs of a node such as those that the entry may run on, and its custom resource."""
        like = [node.resources for node in self._known.values() if self.suits(node, entry, device)]
        custom = {entry.device: 1} if entry.device and "=" not in entry.device else {}
        most = {name: max((each.get(name, 0) for each in like), default=0) for name in ("CPU", "GPU")}
        return {"CPU": most["CPU"] or 1, **({"GPU": most["GPU"]} if most["GPU"] else {}), **custom}

    def start(self, number: int, node: Node, job: Any) -> None:
        cpus, gpus = node.resources["CPU"], node.resources.get("GPU", 0)
        task = self._remote(self._pipeline, node.id, {"num_cpus": cpus, "num_gpus": gpus, "name": job.name})
        self._running[task.remote(job)] = number, node

    def _remote(self, function: Callable[..., Any], node_id: str, options: Mapping[str, Any]) -> Any:
        """A function as a task of a node, which is not done again elsewhere."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        place = NodeAffinitySchedulingStrategy(node_id, soft=False)
        return self._ray.remote(function).options(scheduling_strategy=place, max_retries=0, **options)

    def wait(self, limit_s: float) -> list[tuple[int, Ended]]:
        if not self._running:
            time.sleep(min(limit_s, 1.0))
            return []
        try:
            ended, _ = self._ray.wait(list(self._running), num_returns=1, timeout=limit_s)
        except ConnectionError as err:  # of a client whose server is gone
            raise self._silent_head(f" ({one_line(err, 150)})") from err
        return [self._ended(reference) for reference in ended]

    def _ended(self, reference: Any) -> tuple[int, Ended]:
        number, node = self._running.pop(reference)
        try:
            return number, self._ray.get(reference)
        except Exception as err:  # noqa: BLE001 - what the task itself raises is a value
            self._known.pop(node.id, None)
            self._ask_s.pop(node.id, None)  # it is asked again, if it is there
            return number, Ended(error=f"node {node.name} was lost ({one_line(err, 150)})", is_lost=True)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        with only_warn("the cluster cannot be left in order"):
            if self._requested != ([], []):
                self._ray.get(self._ask([], []), timeout=_MAX_SILENCE_S)
            for reference in self._running:
                self._ray.cancel(reference, force=True)
            self._ray.shutdown()

    def _answer_of_head(self, call: Callable[[], Out]) -> Out:
        """What the head of the cluster answers; a `MachineError` where it says nothing, for which Ray has no limit."""
        if self._head and not _is_reachable(self._head):  # a call would go on for ever, and Ray with it
            raise self._silent_head()
        answers: list[Out] = []
        errors: list[Exception] = []

        def ask() -> None:
            try:
                answers.append(call())
            except Exception as err:  # noqa: BLE001 - it is raised in the thread that waits
                errors.append(err)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(_MAX_SILENCE_S)
        if not (answers or errors):
            atexit.unregister(self._ray.shutdown)  # it waits for the call
            atexit.register(_end_process)
        if not answers:
            raise self._silent_head(f" ({one_line(errors[0], 150)})" if errors else "")
        return answers[0]

    def _silent_head(self, said: str = "") -> MachineError:
        """The error to raise; nothing is asked of the head any more."""
        self._is_closed = True
        return MachineError(
            f"the head of the Ray cluster does not answer{said}; the same command goes on when it is back"
        )


def _end_process() -> None:
    """Ends the process at once: Ray's libraries crash as they are unloaded while one of their threads waits."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(MachineError.exit_code)


def _is_reachable(address: str) -> bool:
    """Whether `host:port` takes connections, within the time that the head may be silent."""
    host, _, port = address.rpartition(":")
    deadline_s = time.monotonic() + _MAX_SILENCE_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), _MAX_SILENCE_S):
            return True
        time.sleep(1.0)
    return False


def _versions() -> dict[str, str]:
    return {"Python": ".".join(platform.python_version_tuple()[:2]), **{name: version(name) for name in _PACKAGES}}


def _request(bundles: list[dict[str, float]], labels: list[dict[str, str]]) -> None:
    """The task that asks the autoscaler for nodes; what it was asked for stays until it is asked for less."""
    from ray.autoscaler.sdk import request_resources

    request_resources(bundles=bundles, bundle_label_selectors=labels)


# -- on a node ---------------------------------------------------------------------------------------------------------


def _describe(question: _Question) -> _Answer:
    """The task of a question."""
    devices = {}
    for target, threads in question.devices:
        try:
            device = Device.resolve(target, "auto" if threads == "auto" else int(threads))
            device.require_measurable_here()
            devices[target, threads] = device.fingerprint
        except AnsorMlflowError:
            pass  # it has none
    host, error = socket.gethostname(), ""
    try:
        if host != question.host and question.store.startswith(("sqlite:", "file:", "/")):
            raise MachineError(f"{question.store} is a file of {question.host}")
        MlflowClient(question.store).search_experiments(max_results=1)
    except Exception as err:  # noqa: BLE001 - it is said of the node
        error = f"it does not reach the tracking server ({one_line(err, 150)}); set MLFLOW_TRACKING_URI to one for all"
    return _Answer(host=host, versions=_versions(), devices=devices, error=error)
