"""The connection with a Ray cluster, in a worker process of the tuner: Ray ends its process when a cluster is lost.

What the cluster does in the meantime is known here alone; the tuner calls `advance` again and again.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ansor_mlflow.errors import first_line
from ansor_mlflow.tuning.cluster.node import NodeBuilder, NodeSettings, versions
from ansor_mlflow.tuning.workers.pool import Outcome

_MAX_RETRIES = 2
"""Times that a candidate is built again after a node was lost with it."""
_ASIDE_S = 60.0
"""Time after which a node that was lost, but is still there, is tried again."""
_GRACE_S = 30.0
"""Time beyond that of a build after which a node is lost: it hangs, or is cut off."""
_LOOK_S = 1.0
"""Time between two looks at the nodes that there are."""
_WAIT_S = 0.5
"""Time that `advance` waits for something to happen."""


@dataclass
class ModuleJob:
    """A module that is to be built."""

    number: int
    module: str
    """As JSON."""
    lost_on: list[str] = field(default_factory=list)
    """Nodes that were lost with it."""


@dataclass(frozen=True)
class Progress:
    """What happened since the last call of `advance`."""

    num_nodes: int
    """Nodes that can build now."""
    num_starting: int = 0
    """Nodes that may be able to soon."""
    done: Sequence[tuple[int, str, Outcome[bytes]]] = ()
    """Numbers of modules, the node, and what became of each."""
    messages: Sequence[str] = ()
    """For the log."""


@dataclass
class _Node:
    """A node, with the actor that builds there."""

    name: str
    num_cpus: int
    actor: Any
    prepared: Any
    """Reference to what `NodeBuilder.prepare` returns; None as soon as it has."""
    running: dict[Any, tuple[ModuleJob, float]] = field(default_factory=dict)
    """By the reference to its outcome, a module and when it was sent."""


class Cluster:
    """Builds on the nodes that a cluster has at a time, as many modules as they have CPUs.

    Args:
        ray: The package, connected.
        settings: How a node builds.
        clock: Seconds.
    """

    def __init__(self, ray: Any, settings: NodeSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._ray = ray
        self._settings = settings
        self._clock = clock
        self._nodes: dict[str, _Node] = {}
        self._aside_until_s: dict[str, float] = {}
        """By the ID of a node. One that is started again has another ID."""
        self._waiting: deque[ModuleJob] = deque()
        self._done: list[tuple[int, str, Outcome[bytes]]] = []
        self._messages: list[str] = []
        self._looked_s = -math.inf

    def begin(self) -> None:
        """Forgets what waits: nobody does for its outcome."""
        self._waiting.clear()
        self._done.clear()

    def advance(self, jobs: Iterable[ModuleJob]) -> Progress:
        """Takes new modules, waits a moment, and returns what happened."""
        self._waiting.extend(jobs)
        self._look()
        self._send()
        self._collect()
        done, self._done = self._done, []
        messages, self._messages = self._messages, []
        num_nodes = sum(node.prepared is None for node in self._nodes.values())
        return Progress(num_nodes, len(self._nodes) - num_nodes, done, messages)

    def _look(self) -> None:
        """Follows the nodes that come and go, and gives up those that do not answer."""
        now_s = self._clock()
        if now_s - self._looked_s < _LOOK_S:
            return
        self._looked_s = now_s
        alive = {found["NodeID"]: found for found in self._ray.nodes() if found["Alive"]}
        for id_ in self._nodes.keys() - alive.keys():
            self._lose(id_, "it died")
        limit_s = self._settings.timeout_s + _GRACE_S
        for id_, node in list(self._nodes.items()):
            if any(now_s - sent_s > limit_s for _, sent_s in node.running.values()):
                self._lose(id_, f"it has not answered for {limit_s:.0f} s")
        for id_, found in alive.items():
            num_cpus = int(found["Resources"].get("CPU", 0))
            if num_cpus and id_ not in self._nodes and now_s >= self._aside_until_s.get(id_, -math.inf):
                self._nodes[id_] = self._start(id_, f"{found['NodeManagerAddress']} ({id_[:8]})", num_cpus)

    def _start(self, id_: str, name: str, num_cpus: int) -> _Node:
        """Starts the actor of a node, which takes all its CPUs as soon as they are free."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        actor = (
            self._ray.remote(NodeBuilder)
            .options(
                num_cpus=num_cpus,
                max_concurrency=num_cpus,
                scheduling_strategy=NodeAffinitySchedulingStrategy(id_, soft=False),
            )
            .remote()
        )
        return _Node(name, num_cpus, actor, actor.prepare.remote(versions(), self._settings, num_cpus))

    def _send(self) -> None:
        """Gives modules to nodes with a free CPU, in turns."""
        now_s = self._clock()
        while self._waiting:
            free = [n for n in self._nodes.values() if n.prepared is None and len(n.running) < n.num_cpus]
            if not free:
                return
            node, job = max(free, key=lambda n: n.num_cpus - len(n.running)), self._waiting.popleft()
            node.running[node.actor.build.remote(job.module)] = (job, now_s)

    def _collect(self) -> None:
        """Takes what nodes have answered."""
        asked = {ref: id_ for id_, node in self._nodes.items() for ref in (*node.running, node.prepared) if ref}
        if not asked:
            time.sleep(_WAIT_S)
            return
        self._ray.wait(list(asked), timeout=_WAIT_S)
        answered, _ = self._ray.wait(list(asked), num_returns=len(asked), timeout=0)
        for ref in answered:
            if asked[ref] in self._nodes:  # it is none that was lost just now
                self._take(asked[ref], ref)

    def _take(self, id_: str, ref: Any) -> None:
        """Takes one answer. An error is none of the candidate, of which `NodeBuilder.build` returns an outcome."""
        node = self._nodes[id_]
        try:
            answer = self._ray.get(ref)
        except Exception as err:  # noqa: BLE001 - whatever ends an answer, the node is not to be relied on
            self._lose(id_, _reason(err))
            return
        if ref != node.prepared:
            job, _ = node.running.pop(ref)
            self._done.append((job.number, node.name, answer))
        elif answer:
            self._refuse(id_, answer)
        else:
            node.prepared = None

    def _refuse(self, id_: str, reason: str) -> None:
        """Uses a node no more, as long as it runs."""
        node = self._nodes.pop(id_)
        self._aside_until_s[id_] = math.inf
        self._end(node)
        self._messages.append(f"Ray node {node.name} is not used: {reason}")

    def _lose(self, id_: str, reason: str) -> None:
        """Gives what a node had to others."""
        node = self._nodes.pop(id_)
        self._aside_until_s[id_] = self._clock() + _ASIDE_S
        self._end(node)
        lost = [job for job, _ in node.running.values()]
        for job in reversed(lost):
            job.lost_on.append(node.name)
            if len(job.lost_on) <= _MAX_RETRIES:
                self._waiting.appendleft(job)
            else:
                error = f"it was lost with {len(job.lost_on)} Ray nodes: {', '.join(job.lost_on)}"
                self._done.append((job.number, node.name, Outcome(failure="crashed", error=error)))
        self._messages.append(
            f"Ray node {node.name} was lost: {reason}; {len(lost)} candidates that were being built there are built "
            "again elsewhere"
        )

    def _end(self, node: _Node) -> None:
        with contextlib.suppress(Exception):  # a node that is gone has ended it
            self._ray.kill(node.actor)


def _reason(err: BaseException) -> str:
    """Why an answer did not come, in a few words."""
    if "node has died" in str(err):
        return "it died"
    cause = getattr(err, "cause", None)  # what an actor's function raised
    return first_line(cause if isinstance(cause, BaseException) else err).rstrip(".")


# -- called by the tuner, in the worker --------------------------------------------------------------------------------

_connected: list[Cluster] = []
"""The cluster that this process is connected with."""


def connect(what: tuple[str, NodeSettings]) -> None:
    """Connects this process with a cluster.

    Args:
        what: Its address, and how its nodes build.
    """
    import ray

    address, settings = what
    disconnect(None)
    with Path(os.devnull).open("wb") as nowhere:
        for output in (1, 2):  # what Ray has to say there, errors and messages say in a line
            os.dup2(nowhere.fileno(), output)
    with _plain_errors():
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ray's handler would let the tuner wait for it
    _connected.append(Cluster(ray, settings))


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """Makes one of Python's own of an error of Ray's, of which not each can be sent to the tuner."""
    try:
        yield
    except Exception as err:  # noqa: BLE001 - it is raised again
        raise ConnectionError(first_line(err)) from None


def advance(work: tuple[bool, Sequence[ModuleJob]]) -> Progress:
    """See `Cluster.advance`.

    Args:
        work: Whether what was given before is forgotten, and new modules.
    """
    if not _connected:
        raise ConnectionError("its process was lost")
    begins, jobs = work
    if begins:
        _connected[0].begin()
    with _plain_errors():
        return _connected[0].advance(jobs)


def disconnect(_: None) -> None:
    """Ends the connection, and with it the actors."""
    if _connected:
        import ray

        _connected.clear()
        ray.shutdown()
