"""Which servers are trusted: those that fail again and again are set aside for a while, and named."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from ansor_mlflow.trials import ServerState
from ansor_mlflow.tuning.fleet.tracker import HostPort

_MAX_FAILURES = 2
"""Failures in a row after which a server is set aside."""
_ASIDE_S = 60.0
"""For how long at first; each time twice as long."""
_MAX_ASIDE_S = 900.0
_DISAGREES = 1.15
"""Time of the known program over that of the fastest server from which a server is no device of the same kind."""
_MAX_REL_ERROR = 1e-5
_NUM_CALIBRATIONS = 5
"""The last times of the known program whose median counts."""
_log = logging.getLogger("ansor_mlflow")


@dataclass
class _Record:
    """What is known of a server."""

    num_measured: int = 0
    num_failures: int = 0
    num_in_row: int = 0
    num_aside: int = 0
    aside_until_s: float = -math.inf
    busy_s: float = 0.0
    known_s: float = 0.0
    """Time until it was last given up, since it was given."""
    since_s: float | None = None
    calibrations_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_CALIBRATIONS))
    disagrees: bool = False


class Health:
    """Remembers what servers did. Not safe for use from several threads.

    Args:
        clock: Seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._records: dict[HostPort, _Record] = {}

    def found(self, server: HostPort) -> None:
        """A session with it begins."""
        record = self._of(server)
        record.since_s = self._clock() if record.since_s is None else record.since_s

    def measured(self, server: HostPort, busy_s: float) -> None:
        """It has answered, whatever became of the program."""
        record = self._of(server)
        record.num_measured += 1
        record.num_in_row = 0
        record.busy_s += busy_s

    def failed(self, server: HostPort, reason: str) -> None:
        """It did not answer, or with what cannot be."""
        record = self._of(server)
        record.num_failures += 1
        record.num_in_row += 1
        if record.num_in_row < _MAX_FAILURES:
            _log.warning("server %s: %s", server, reason)
            return
        aside_s = min(_MAX_ASIDE_S, _ASIDE_S * 2**record.num_aside)
        record.num_aside += 1
        record.num_in_row = 0
        record.aside_until_s = self._clock() + aside_s
        if record.since_s is not None:
            record.known_s += self._clock() - record.since_s
            record.since_s = None
        _log.warning(
            "server %s is set aside for %.0f s after %d failures in a row, the last: %s",
            server,
            aside_s,
            _MAX_FAILURES,
            reason,
        )

    def is_set_aside(self, server: HostPort) -> bool:
        """Whether it gets no work for now."""
        return self._clock() < self._of(server).aside_until_s

    @staticmethod
    def why_wrong(max_rel_error: float) -> str:
        """Why the results of the known program cannot be trusted; empty where they can."""
        if max_rel_error <= _MAX_REL_ERROR:
            return ""
        return f"it computes wrong results, max_rel_error={max_rel_error:.2g} of a known program"

    def calibrated(self, server: HostPort, seconds: float) -> None:
        """The known program took so long. Names servers that are far slower than the fastest, once."""
        record = self._of(server)
        record.calibrations_s.append(seconds)
        if len(record.calibrations_s) < 2:
            return
        taken = {s: median(r.calibrations_s) for s, r in self._records.items() if len(r.calibrations_s) >= 2}
        fastest = min(taken, key=lambda other: taken[other])
        ratio = taken[server] / taken[fastest]
        if ratio > _DISAGREES and not record.disagrees:
            _log.warning(
                "server %s takes %.2f times as long as %s for the same program: it is busy, throttled or another kind "
                "of device, and its times are not comparable",
                server,
                ratio,
                fastest,
            )
        record.disagrees = ratio > _DISAGREES

    def states(self) -> tuple[ServerState, ...]:
        """What became of each server until now."""
        now_s = self._clock()
        return tuple(
            ServerState(
                name=f"{server.host}_{server.port}".replace(":", "_"),
                num_trials=record.num_measured,
                num_failures=record.num_failures,
                num_set_aside=record.num_aside,
                busy_s=record.busy_s,
                known_s=record.known_s + (0.0 if record.since_s is None else now_s - record.since_s),
                calibration_s=median(record.calibrations_s) if record.calibrations_s else None,
            )
            for server, record in sorted(self._records.items())
        )

    def _of(self, server: HostPort) -> _Record:
        return self._records.setdefault(server, _Record())
