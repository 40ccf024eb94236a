"""Writes one line per round to the log."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ansor_mlflow.trials import Trial, TuningPlan, TuningResult, TuningRound

_BUSY = 1.0
"""Probe spread from which the machine is said to be busy: the fixed computation took twice as long."""
_log = logging.getLogger("ansor_mlflow")


class RoundLog:
    """A `TuningObserver` that logs to the logger `ansor_mlflow`."""

    def __init__(self) -> None:
        self._was_busy = False

    def tuning_started(self, plan: TuningPlan) -> None:
        """Says what is tuned."""
        _log.info("tuning %s · %s: %d tasks, %d trials", plan.network, plan.target, len(plan.tasks), plan.num_trials)

    def round_finished(self, round_: TuningRound) -> None:
        """Says what the round brought."""
        best_s, total_s = round_.task.best_s, round_.estimated_latency_s
        _log.info(
            "%5d trials %6.1f s  %s: %s  network: %s  %.1f/min%s%s",
            round_.total_trials,
            round_.elapsed_s,
            round_.task.info.name,
            f"{best_s * 1e6:.1f} µs" if best_s is not None else "no valid trial",
            f"{total_s * 1e3:.3f} ms" if total_s is not None else "not all tasks measured",
            round_.trials_per_minute,
            f"  ended by: {round_.task.stop_reason}" if round_.task.stop_reason else "",
            _failures(round_.trials),
        )
        if round_.probe_spread > _BUSY and not self._was_busy:
            self._was_busy = True
            _log.warning("other programs use the CPUs: what they disturb is measured again, which takes longer")

    def tuning_finished(self, result: TuningResult) -> None:
        """Says how it ended, and what the second measurements of the winners say."""
        _log.info(
            "%d trials in %.1f s, stopped by: %s%s",
            result.total_trials,
            result.elapsed_s,
            result.stop_reason,
            _confirmation(result),
        )


def _confirmation(result: TuningResult) -> str:
    estimated_s, confirmed_s = result.estimated_latency_s, result.confirmed_latency_s
    if not (estimated_s and confirmed_s):
        return ""
    return f"; confirmed: {confirmed_s * 1e3:.3f} ms, optimism {confirmed_s / estimated_s:.3g}"


def _failures(trials: Sequence[Trial]) -> str:
    failed = [trial for trial in trials if trial.error]
    if not failed:
        return ""
    return f"  ({len(failed)} failed, first {failed[0].status.value}: {' '.join(failed[0].error.split())[:160]})"
