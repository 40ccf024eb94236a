"""Which servers are trusted: those that fail again and again are set aside for a while, and named."""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from ansor_mlflow.fleet.tracker import HostPort
from ansor_mlflow.trials import ServerState

_MAX_FAILURES = 2
"""Failures in a row after which a server is set aside."""
_ASIDE_S = 60.0
"""For how long at first; each time twice as long."""
_MAX_ASIDE_S = 900.0
_DISAGREES = 1.15
"""Time of the reference kernel over that of the fastest server from which a server is no device of the same kind."""
_NUM_TIMES = 5
"""The last times of the reference kernel whose median counts."""
_log = logging.getLogger("ansor_mlflow")


@dataclass
class _Record:
    num_measured: int = 0
    num_failures: int = 0
    num_in_row: int = 0
    num_aside: int = 0
    aside_until_s: float = -math.inf
    busy_s: float = 0.0
    known_s: float = 0.0
    """Seconds for which it was available before `since_s`."""
    since_s: float | None = None
    """When it became available; None while it is set aside."""
    reference_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_TIMES))
    disagrees: bool = False


class Health:
    """Remembers what servers did, by a clock of seconds. Not safe for use from several threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._records: defaultdict[HostPort, _Record] = defaultdict(_Record)

    def found(self, server: HostPort) -> None:
        record = self._records[server]
        record.since_s = self._clock() if record.since_s is None else record.since_s

    def measured(self, server: HostPort, busy_s: float) -> None:
        """It measured a program, which took it so long."""
        record = self._records[server]
        record.num_measured += 1
        record.num_in_row = 0
        record.busy_s += busy_s

    def failed(self, server: HostPort, reason: str) -> None:
        """It did not answer, or with what cannot be."""
        record = self._records[server]
        record.num_failures += 1
        record.num_in_row += 1
        if record.num_in_row < _MAX_FAILURES:
            _log.warning("server %s: %s", server, reason)
            return
        aside_s = min(_MAX_ASIDE_S, _ASIDE_S * 2**record.num_aside)
        record.num_aside += 1
        record.num_in_row = 0
        record.aside_until_s = self._clock() + aside_s
        record.known_s = self._known_s(record)
        record.since_s = None
        told = "server %s is set aside for %.0f s after %d failures in a row, the last: %s"
        _log.warning(told, server, aside_s, _MAX_FAILURES, reason)

    def is_set_aside(self, server: HostPort) -> bool:
        return self._clock() < self._records[server].aside_until_s

    def compared(self, server: HostPort, seconds: float) -> None:
        """The reference kernel took so long. Names servers that are far slower than the fastest, once."""
        record = self._records[server]
        record.reference_s.append(seconds)
        if len(record.reference_s) < 2:
            return
        taken = {s: median(r.reference_s) for s, r in self._records.items() if len(r.reference_s) >= 2}
        fastest = min(taken, key=lambda other: taken[other])
        ratio = taken[server] / taken[fastest]
        if ratio > _DISAGREES and not record.disagrees:
            _log.warning(
                "server %s takes %.2f times as long as %s for the same program: it is busy, throttled or another kind "
                "of device, and its times are not comparable",
                *(server, ratio, fastest),
            )
        record.disagrees = ratio > _DISAGREES

    def states(self) -> tuple[ServerState, ...]:
        return tuple(
            ServerState(
                name=f"{server.host}_{server.port}".replace(":", "_"),
                num_trials=record.num_measured,
                num_failures=record.num_failures,
                num_set_aside=record.num_aside,
                busy_s=record.busy_s,
                known_s=self._known_s(record),
                calibration_s=median(record.reference_s) if record.reference_s else None,
            )
            for server, record in sorted(self._records.items())
        )

    def _known_s(self, record: _Record) -> float:
        return record.known_s + (0.0 if record.since_s is None else self._clock() - record.since_s)
