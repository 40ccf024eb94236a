"""The command `plan`: what a tuning would measure, how long that takes, and what is known already. Measures nothing."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ansor_mlflow.device import Device
from ansor_mlflow.files import scratch_directory
from ansor_mlflow.foreign import Part, Report, Reported, Table, microseconds
from ansor_mlflow.graphs import PaddedLayer
from ansor_mlflow.model import PartEntry, fallback_clauses, part_entries
from ansor_mlflow.networks import ChosenSizes
from ansor_mlflow.parameters import BudgetOptions, PlanOptions, SearchOptions
from ansor_mlflow.steps.quantizing import quantized
from ansor_mlflow.steps.recorded import best_records, find_recorded, latency_s, lower_for_device, lower_recorded
from ansor_mlflow.tracking import network_of
from ansor_mlflow.trials import TaskInfo, TaskState
from ansor_mlflow.tuning import SECONDS_PER_TRIAL, StoppingRules, resolve_num_trials, sketched_workloads


@dataclass(frozen=True, kw_only=True)
class PlannedTask:
    """A task of the network, before it is tuned."""

    info: TaskInfo
    flops_share: float
    """Share of the network's floating point operations, from 0 to 1: those of its layers, computed directly."""
    best_s: float | None
    """Seconds per call of the fastest record there is so far."""
    num_trials: int
    """Suggested trials: in proportion to the FLOPs, and no fewer than those of the tuner's first pass."""
    expected_minutes: float

    def cells(self) -> dict[str, str]:
        """The texts of a row, by the headers of a `Table`."""
        return {
            ">": str(self.info.index),
            "~task": self.info.name,
            ">weight": str(self.info.weight),
            ">MFLOP": f"{self.info.flops / 1e6:.1f}",
            ">share": f"{self.flops_share:.1%}",
            ">best µs": microseconds(self.best_s),
            ">trials": str(self.num_trials),
            ">min": f"{self.expected_minutes:.1f}",
        }


@dataclass(frozen=True, kw_only=True)
class Plan(Reported):
    """What a tuning with these options would do."""

    network: str
    target: str
    tasks: tuple[PlannedTask, ...]
    parts: tuple[PartEntry, ...]
    """Parts of the network, if ONNX Runtime computes some of it."""
    sizes: ChosenSizes | None
    """The sizes that were chosen in a range; None where none was given."""
    notes: tuple[str, ...]

    def report(self) -> Report:
        if not self.tasks:
            title = f"{self.network} for {self.target}: it has no task for TVM to tune"
            return Report(title, self.notes)
        rows = [task.cells() for task in self.tasks]
        headers = [header for header in rows[0] if any(row[header] for row in rows)]
        total = f"{len(rows)} tasks, {self.num_trials} trials, about {self.expected_minutes:.1f} min on 2 cores"
        table = Table([[row[header] for header in headers] for row in rows], headers)
        return Report(f"{self.network} for {self.target}", [table, total, *self._size_parts(), *self.notes])

    def _size_parts(self) -> list[Part]:
        if self.sizes is None:
            return []
        rows = [use.cells() for use in self.sizes.uses]
        text = str(self.sizes)
        return [Table([list(row.values()) for row in rows], list(rows[0])), f"{text[0].upper()}{text[1:]}."]

    @property
    def num_trials(self) -> int:
        return sum(task.num_trials for task in self.tasks)

    @property
    def expected_minutes(self) -> float:
        return sum(task.expected_minutes for task in self.tasks)


def plan_tuning(options: PlanOptions) -> Plan:
    """Extracts the tasks of a network and shares a budget among them.

    The suggestion is a forecast: the tuner itself gives every task its first pass, and then each round to the task
    whose next trials promise the largest gain.
    """
    has_records, known_s = bool(options.tune_run or options.records), dict[int, float]()
    if has_records:
        with scratch_directory() as scratch:
            recorded = find_recorded(options, Path(scratch))
            network = lower_recorded(recorded)
            records = best_records(recorded.records, network, Path(scratch))
            known_s = {index: latency_s(record) for index, record in records.items()}
    else:
        device = Device.resolve(options.target, options.num_threads)
        graph, _ = quantized(network_of(options), options, device.target)
        network = lower_for_device(graph, options, device)
    tasks: tuple[PlannedTask, ...] = ()
    if network.tasks:
        num_sketched = len(sketched_workloads(network.tasks, network.device.target, options.space))
        tasks = _planned(options, [task.info for task in network.tasks], num_sketched, known_s)
    parts = part_entries(network.lowered)
    return Plan(
        network=network.network,
        target=network.device.description,
        tasks=tasks,
        parts=parts,
        sizes=network.graph.chosen,
        notes=(
            *(f"{clause}." for clause in fallback_clauses(parts)),
            *([_coverage_note(tasks)] if has_records and tasks else []),
            *_padding_notes(network.lowered.hard_to_tile, network.is_padded),
        ),
    )


def share_trials(shares: Sequence[float], num_trials: int, *, least: int, most: int) -> list[int]:
    """Shares trials among tasks: one after the other goes to the task that has the fewest for its share.

    `shares` are of the network's FLOPs; tasks without any get what no other task may take.
    """

    def need(index: int) -> tuple[float, int, int]:
        return (trials[index] / shares[index] if shares[index] else math.inf, trials[index], index)

    trials = [least] * len(shares)
    queue = [need(index) for index in range(len(shares)) if least < most]
    heapq.heapify(queue)
    for _ in range(num_trials - sum(trials)):
        *_, index = heapq.heappop(queue)
        trials[index] += 1
        if trials[index] < most:
            heapq.heappush(queue, need(index))
    return trials


def _planned(
    options: PlanOptions, tasks: Sequence[TaskInfo], num_sketched: int, known_s: dict[int, float]
) -> tuple[PlannedTask, ...]:
    budget = SearchOptions(**options.model_dump(include=set(BudgetOptions.model_fields)))
    num_layers = len({task.layer_hash for task in tasks})
    num_trials = resolve_num_trials(
        budget, len(tasks), num_sketched=num_sketched, num_algorithms=len(tasks) - num_layers
    )
    rules = StoppingRules(budget, num_trials, len(tasks))
    first_pass = rules.round_limit(TaskState(info=tasks[0]), len(tasks), total_trials=0, elapsed_s=0.0)
    total_flops = sum(_flops_of_layers(tasks).values())
    shares = [task.weight * task.flops / total_flops if total_flops else 0.0 for task in tasks]
    trials = share_trials(shares, num_trials, least=first_pass, most=options.trials_per_task or num_trials)
    return tuple(
        PlannedTask(
            info=task,
            flops_share=share,
            best_s=known_s.get(task.index),
            num_trials=count,
            expected_minutes=count * SECONDS_PER_TRIAL / 60,
        )
        for task, share, count in zip(tasks, shares, trials, strict=True)
    )


def _flops_of_layers(tasks: Iterable[TaskInfo]) -> dict[str, float]:
    """Operations of each layer in all of its calls, by its hash; of its algorithms the direct one has the most."""
    flops: dict[str, float] = {}
    for task in tasks:
        flops[task.layer_hash] = max(flops.get(task.layer_hash, 0.0), task.weight * task.flops)
    return flops


def _padding_notes(layers: Iterable[PaddedLayer], is_padded: bool) -> Iterator[str]:
    """What is said of layers that cannot be tiled, once for each number of channels."""
    action = "it is computed with" if is_padded else "pad_channels=auto computes it with"
    names = defaultdict[tuple[int, int], list[str]](list)
    for layer in layers:
        names[layer.channels, layer.padded_channels].append(layer.name)
    for (channels, padded), (first, *others) in names.items():
        who = f"{first} and {len(others)} more have" if others else f"{first} has"
        yield (
            f"{who} {channels} output channels, which no wide vector divides; {action} {padded}, which halved the time "
            "of such a layer in a measurement (docs/networks.md)."
        )


def _coverage_note(tasks: Sequence[PlannedTask]) -> str:
    layers = _flops_of_layers(task.info for task in tasks)
    covered = {task.info.layer_hash for task in tasks if task.best_s is not None}
    flops_share = sum(layers[layer] for layer in covered) / (sum(layers.values()) or 1)
    return f"The records cover {len(covered)} of {len(layers)} layers, {flops_share:.1%} of the operations."
