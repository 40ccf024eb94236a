"""Each kernel's time within the network, beside the one of its record: in the evaluation, and where it is explained."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import mlflow
import numpy as np
import pytest
from helpers.commands import BRIEF, RunCommand, flags
from helpers.finished import FinishedWork
from helpers.runs_here import artifacts_of, newest_run
from mlflow.utils.mlflow_tags import MLFLOW_RUN_NOTE

from ansor_mlflow import names
from ansor_mlflow.foreign import typed
from ansor_mlflow.measuring import time_kernels
from ansor_mlflow.measuring.kernels import KernelTime, KernelTimes
from ansor_mlflow.model.package import CompiledNetwork
from ansor_mlflow.tracking.report.note import evaluation_note

if TYPE_CHECKING:
    from ansor_mlflow.lowering.network import LoweredNetwork

TIMES = KernelTimes(
    latency_us=100.0,
    kernels=(
        KernelTime(name="conv", num_calls=2, us=50.0, estimated_us=48.0),
        KernelTime(name="dense_relu", num_calls=1, us=30.0, estimated_us=10.0),
        KernelTime(name="pool", num_calls=1, us=5.0, estimated_us=None),
    ),
)


@pytest.mark.system
def test_every_kernel_of_a_network_is_timed(compiled_network: CompiledNetwork, small_lowered: LoweredNetwork) -> None:
    rng = np.random.default_rng(0)
    inputs = {spec.name: rng.normal(size=spec.shape).astype(spec.dtype) for spec in compiled_network.inputs}
    times = time_kernels(compiled_network.library, compiled_network, compiled_network.entry, [inputs])
    computing = {task.info.name: task.info.weight for task in small_lowered.tasks if task.info.flops}
    assert computing.items() <= {kernel.name: kernel.num_calls for kernel in times.kernels}.items()
    assert times.without_record_us == 0
    assert all(kernel.us > 0 for kernel in times.kernels)
    assert times.between_us < times.latency_us


@pytest.mark.nightly
def test_a_kernel_without_a_record_has_no_estimate(compiled_network: CompiledNetwork) -> None:
    first, *_ = compiled_network.coverage["kernels_us"]
    known = {**compiled_network.coverage["kernels_us"], first: None}
    entry = replace(compiled_network.entry, coverage={**compiled_network.coverage, "kernels_us": known})
    inputs = {spec.name: np.zeros(spec.shape, spec.dtype) for spec in compiled_network.inputs}
    times = time_kernels(compiled_network.library, compiled_network, entry, [inputs])
    assert [kernel.name for kernel in times.kernels if kernel.estimated_us is None] == [first]
    older = replace(entry, coverage={})  # as a model of an earlier version has it
    assert time_kernels(compiled_network.library, compiled_network, older, [inputs]).without_record_us > 0


def test_what_is_furthest_from_its_record_comes_first() -> None:
    assert [kernel.name for kernel in TIMES.furthest] == ["dense_relu", "conv", "pool"]
    assert (TIMES.between_us, TIMES.without_record_us) == (15.0, 5.0)
    assert typed(KernelTimes, json.loads(json.dumps(TIMES.to_dict()))).furthest == TIMES.furthest
    assert replace(TIMES, latency_us=80.0).between_us == 0  # those who look on take time


def test_the_description_says_where_the_time_goes() -> None:
    note = evaluation_note("small", (), {}, {}, TIMES)
    assert "- dense\\_relu, 1 call: 30 µs, in its record 10 µs\n- conv, 2 calls: 50 µs, in its record 48 µs\n" in note
    assert "- pool, 1 call: 5 µs, no record\n- between kernels: 15 µs" in note


@pytest.mark.nightly
def test_an_evaluation_says_it_and_the_tuning_explains_it(
    run_here: RunCommand, finished_work: FinishedWork, capsys: pytest.CaptureFixture[str]
) -> None:
    tuning = finished_work.tuned
    model = mlflow.get_run(finished_work.compiled).data.tags[names.TAG_MODEL_URI]
    assert run_here("explain", tuning) == 0
    assert "Kernels of the whole network" not in capsys.readouterr().out
    assert run_here("evaluate", *flags({**BRIEF, "model_uri": model, "turns": 1, "rivals": "none"})) == 0
    evaluation = newest_run()
    written = json.loads((artifacts_of(evaluation.info.run_id) / names.KERNELS_FILE).read_text())
    assert written["without_record_us"] == 0
    assert len(written["kernels"]) > 1
    page = (artifacts_of(evaluation.info.run_id) / names.KERNELS_REPORT_FILE).read_text()
    assert all(kernel["name"] in page for kernel in written["kernels"])
    assert "Where the time goes" in evaluation.data.tags[MLFLOW_RUN_NOTE]
    assert run_here("explain", tuning, "--json", "task.json") == 0
    assert f"Kernels of the whole network, in the evaluation {evaluation.info.run_id}" in capsys.readouterr().out
    explained = json.loads(Path("task.json").read_text())
    assert explained["kernels"]["latency_us"] == written["latency_us"]
