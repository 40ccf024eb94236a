"""Builds candidates on the nodes of a Ray cluster."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ansor_mlflow.errors import MachineError
from ansor_mlflow.files import ScratchDirectory
from ansor_mlflow.tuning.cluster.address import name_of, no_cluster
from ansor_mlflow.tuning.cluster.connection import ModuleJob, Progress, advance, connect, disconnect
from ansor_mlflow.tuning.cluster.node import NodeSettings
from ansor_mlflow.tuning.workers.builder import Builder
from ansor_mlflow.tuning.workers.pool import Outcome, WorkerPool

if TYPE_CHECKING:
    from tvm.ir import IRModule

_CONNECT_S = 40.0
"""Time to connect with a cluster."""
_FIRST_NODE_S = 120.0
"""Time for the first node to be ready, at the beginning: it loads TVM, or others have its CPUs."""
_ADVANCE_S = 60.0
"""Time for a look at the cluster, which takes no second, before the connection counts as lost."""
_ALONE_S = 30.0
"""Time without a node after which this host builds."""
_AGAIN_S = 300.0
"""Time between two attempts to connect again, each of which may take as long as the first one."""
_DISCONNECT_S = 5.0
_HERE = "this host"
_log = logging.getLogger("ansor_mlflow")


class RayBuilder:
    """A `Builder` on the nodes of a Ray cluster, and on this host while there is none. To be closed.

    Args:
        address: Of the cluster, as Ray takes it.
        settings: How a node builds.
        make_local: Makes the builder on this host.

    Raises:
        MachineError: No cluster can be reached, or none of its nodes can be used.
    """

    def __init__(self, address: str, settings: NodeSettings, make_local: Callable[[], Builder]) -> None:
        self._address = address
        self._settings = settings
        self._make_local = make_local
        self._local: Builder | None = None
        self._numbers = itertools.count(1)
        self._built_by: Counter[str] = Counter()
        self._alone_since_s: float | None = None
        self._is_told = False
        self._is_connected = False
        self._tried_s = -math.inf
        self._pool = WorkerPool(1)
        self._scratch = ScratchDirectory()
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    def build(self, mods: Sequence[IRModule]) -> list[Outcome[Path]]:
        """See `Builder.build`. The libraries live until `close`, or until the caller removes them.

        Raises:
            MachineError: The disk is full.
        """
        from tvm.ir import save_json

        outcomes: dict[int, Outcome[Path]] = {}
        jobs = [ModuleJob(next(self._numbers), save_json(mod)) for mod in mods]
        by_number = {job.number: mod for job, mod in zip(jobs, mods, strict=True)}
        unsent: Sequence[ModuleJob] | None = None
        if self._is_connected and self._is_alone() and self._may_try():  # nodes may be there, but not for us any more
            self._connect()
        while left := [job for job in jobs if job.number not in outcomes]:
            if not self._connect_again():
                unsent = None
            else:
                progress = self._advance(unsent is None, left if unsent is None else unsent)
                unsent = [] if self._is_connected else None
                for number, node, outcome in progress.done:
                    if number in by_number:  # and none of a call that was given up
                        outcomes[number] = self._arrived(number, node, outcome)
                left = [job for job in left if job.number not in outcomes]
            if left and self._is_alone():
                built = self._build_here([by_number[job.number] for job in left])
                outcomes.update(zip((job.number for job in left), built, strict=True))
        return [outcomes[job.number] for job in jobs]

    def close(self) -> None:
        """See `Builder.close`."""
        if self._is_connected:
            with contextlib.suppress(Exception):  # whatever it is, the process ends now
                self._pool.map(disconnect, [None], _DISCONNECT_S)
        self._pool.close()
        if self._local is not None:
            self._local.close()
        self._scratch.close()
        if self._built_by:
            _log.info("built: %s", ", ".join(f"{num} on {where}" for where, num in self._built_by.most_common()))

    # -- the cluster ---------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Connects, and waits for a node."""
        if error := self._connect():
            raise MachineError(no_cluster(self._address, error))
        until_s = time.monotonic() + _FIRST_NODE_S
        while not (found := self._advance(True, ())).num_nodes:
            if not found.num_starting or time.monotonic() > until_s:
                raise MachineError(
                    f"no node of {name_of(self._address)} can build: those that differ are named above, "
                    f"others had no free CPUs for {_FIRST_NODE_S:g} s; give it nodes with this version of "
                    "ansor_mlflow, or build on this host with build_workers=auto"
                )
        _log.info("building on %s", name_of(self._address))

    def _connect(self) -> str:
        """Connects with the cluster; returns why it cannot, where it cannot."""
        (outcome,) = self._pool.map(connect, [(self._address, self._settings)], _CONNECT_S)
        self._tried_s = time.monotonic()
        self._is_connected = not outcome.failure
        is_late = outcome.failure == "timed_out"
        return f"no answer within {_CONNECT_S:g} s" if is_late else " ".join(outcome.error.split())

    def _connect_again(self) -> bool:
        """Whether there is a connection, after an attempt to get one from time to time."""
        if not self._is_connected and self._may_try():
            self._connect()
        if not self._is_connected and not self._is_alone():
            time.sleep(1.0)
        return self._is_connected

    def _may_try(self) -> bool:
        """Whether the last attempt to connect is long ago."""
        return time.monotonic() - self._tried_s > _AGAIN_S

    def _advance(self, begins: bool, jobs: Sequence[ModuleJob]) -> Progress:
        """Lets the cluster work for a moment."""
        (outcome,) = self._pool.map(advance, [(begins, jobs)], _ADVANCE_S)
        progress = outcome.value or Progress(0)
        for message in progress.messages:
            _log.warning("%s", message)
        if outcome.value is None:
            self._is_connected = False
            self._tried_s = -math.inf
            _log.warning(
                "%s was lost: %s; what it was building is built again",
                name_of(self._address),
                " ".join(outcome.error.split()),
            )
        if progress.num_nodes:
            if self._is_told:
                _log.warning("%s builds again", name_of(self._address))
            self._alone_since_s, self._is_told = None, False
        elif self._alone_since_s is None:
            self._alone_since_s = time.monotonic()
        return progress

    def _is_alone(self) -> bool:
        """Whether there has been no node for so long that this host builds."""
        return self._alone_since_s is not None and time.monotonic() - self._alone_since_s > _ALONE_S

    # -- libraries -----------------------------------------------------------------------------------------------------

    def _build_here(self, mods: Sequence[IRModule]) -> list[Outcome[Path]]:
        if not self._is_told:
            self._is_told = True
            _log.warning(
                "%s has had no node for %g s: this host builds until there is one",
                name_of(self._address),
                _ALONE_S,
            )
        self._local = self._local or self._make_local()
        self._built_by[_HERE] += len(mods)
        return self._local.build(mods)

    def _arrived(self, number: int, node: str, outcome: Outcome[bytes]) -> Outcome[Path]:
        """Writes a library that came.

        Raises:
            MachineError: The disk is full.
        """
        self._built_by[node] += 1
        if outcome.value is None:
            return Outcome(failure=outcome.failure, error=outcome.error)
        path = self._scratch.path / f"candidate-{number}.so"
        temporary = path.with_suffix(".part")
        try:
            temporary.write_bytes(outcome.value)
        except OSError as err:
            self._scratch.require_space([str(err)])
            raise
        temporary.replace(path)
        return Outcome(path)
