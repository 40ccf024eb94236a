"""The tracking server as the memory of a team: finished tuning runs are found by the tags that say what they know.

MLflow reads all params and metrics of each run that a search returns, a thousand of which take longer than a tuning.
So the database compares the hashes, and a search returns few runs.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import mlflow
from mlflow.entities import Run

from ansor_mlflow import names
from ansor_mlflow.device import DeviceFingerprint
from ansor_mlflow.records import Provenance, device_key
from ansor_mlflow.tracking.environment import translated_errors

_HASH_DIGITS = 8
_HASHES_PER_TAG = 5000 // (_HASH_DIGITS + 1)  # MLflow keeps 8,000 characters of a tag, earlier servers 5,000
_MAX_RUNS = 8  # runs that one search returns: enough that a thorough tuning is among those of a week's quick ones
_ORDER = [
    f"tags.`{names.TAG_TVM_VERSION}` DESC",
    f"tags.`{names.TAG_LOWERING_VERSION}` DESC",
    f"metrics.`{names.TRIALS_MEASURED}` DESC",
    "attributes.start_time DESC",
]


@dataclass(frozen=True, kw_only=True)
class EarlierTuning:
    """A finished tuning run, as its tags describe it."""

    run_id: str
    workloads: frozenset[str]  # short hashes of its tasks' workloads: see `short_hash`
    versions: tuple[tuple[int, ...], ...]  # TVM's version and that of the lowering, as numbers that can be compared
    trials_per_task: float  # trials that it was ready to give a task, on average
    started_ms: int

    def knows(self, workload_hash: str) -> bool:
        return short_hash(workload_hash) in self.workloads


def memory_tags(device: DeviceFingerprint, provenance: Provenance, workload_hashes: Iterable[str]) -> dict[str, str]:
    """The tags that a later tuning finds a run by."""
    tags = {
        names.TAG_DEVICE: device_key(device),
        names.TAG_TVM_VERSION: provenance.tvm_version,
        names.TAG_LOWERING_VERSION: str(provenance.lowering_version),
    }
    hashes = sorted(set(map(short_hash, workload_hashes)))
    for number, start in enumerate(range(0, len(hashes), _HASHES_PER_TAG), 1):
        name = f"{names.TAG_WORKLOADS}.{number}" if number > 1 else names.TAG_WORKLOADS
        tags[name] = " ".join(hashes[start : start + _HASHES_PER_TAG])
    return tags


def short_hash(workload_hash: str) -> str:
    """The first digits of a structural hash in hexadecimal digits: few enough for a tag, as records have all of it."""
    return workload_hash.removeprefix("0x")[:_HASH_DIGITS]


def find_tunings(device: DeviceFingerprint, workload_hashes: Iterable[str]) -> list[EarlierTuning]:
    """Finished tuning runs for a device that know some workloads, of all experiments that the user may read.

    A search for a workload also finds what a run of the same network knows of the others, so that a network that was
    tuned before takes one or two. Those of a run with more tasks than one tag has room for are found by these alone.
    """
    with translated_errors("search the tracking server for earlier tunings"):
        experiments = [experiment.experiment_id for experiment in mlflow.search_experiments()]
        newest = _search(experiments, device)
        found = {tuning.run_id: tuning for tuning in newest}
        if len(newest) == _MAX_RUNS:  # or there are no others
            for hash_ in workload_hashes:
                if not any(tuning.knows(hash_) for tuning in found.values()):
                    found |= {tuning.run_id: tuning for tuning in _search(experiments, device, hash_)}
    return list(found.values())


def _search(experiments: Sequence[str], device: DeviceFingerprint, workload_hash: str = "") -> list[EarlierTuning]:
    """The best runs that know a workload; without one, the newest runs."""
    conditions = [f"tags.`{names.TAG_DEVICE}` = '{device_key(device)}'", "attributes.status = 'FINISHED'"]
    if workload_hash:
        conditions.append(f"tags.`{names.TAG_WORKLOADS}` LIKE '%{short_hash(workload_hash)}%'")
    runs = mlflow.MlflowClient().search_runs(
        list(experiments),
        " AND ".join(conditions),
        max_results=_MAX_RUNS,
        order_by=_ORDER if workload_hash else _ORDER[-1:],
    )
    return [_described(run) for run in runs]


def _described(run: Run) -> EarlierTuning:
    tags = run.data.tags
    hashes = [text for name, text in tags.items() if name.startswith(names.TAG_WORKLOADS)]
    trials = re.fullmatch(r"\d{1,9}(\.\d{1,20})?", tags.get(names.TAG_TRIALS_PER_TASK, ""))
    return EarlierTuning(
        run_id=run.info.run_id,
        workloads=frozenset(" ".join(hashes).split()),
        versions=tuple(
            tuple(map(int, re.findall(r"\d{1,9}", tags.get(name, ""))))
            for name in (names.TAG_TVM_VERSION, names.TAG_LOWERING_VERSION)
        ),
        trials_per_task=float(trials[0]) if trials else 0.0,
        started_ms=run.info.start_time,
    )


def best_source(
    tunings: Collection[EarlierTuning], workload_hashes: Collection[str], trials_per_task: float
) -> tuple[EarlierTuning, list[str]] | None:
    """The tuning that is the best source of most workloads, with those; None where none knows one of them.

    Of a workload, a newer TVM and lowering are better, then a tuning that was ready to give a task so many trials.
    """

    def rank(tuning: EarlierTuning) -> tuple[object, ...]:
        return *tuning.versions, tuning.trials_per_task >= trials_per_task

    best = {
        hash_: max(map(rank, knowing))
        for hash_ in workload_hashes
        if (knowing := [tuning for tuning in tunings if tuning.knows(hash_)])
    }
    if not best:
        return None
    shares = [
        (tuning, [hash_ for hash_, rank_ in best.items() if tuning.knows(hash_) and rank(tuning) == rank_])
        for tuning in tunings
    ]
    return max(shares, key=lambda share: (len(share[1]), share[0].started_ms))
