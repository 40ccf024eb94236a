"""A part of TVM's that ONNX Runtime computes faster stays there, and every part says how long it takes."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import mlflow
import numpy as np
import onnx
import pytest
from helpers.commands import ROOT, RunCommand, environment, run
from helpers.exports import branching
from helpers.untuned import compiled_untuned
from onnx import TensorProto, helper

from ansor_mlflow import flavor, names
from ansor_mlflow.device import Device
from ansor_mlflow.errors import ModelError, UserInputError
from ansor_mlflow.foreign import typed
from ansor_mlflow.lowering.lower import lower, lower_sizes
from ansor_mlflow.lowering.network import LoweredNetwork
from ansor_mlflow.measuring import expected_of
from ansor_mlflow.model.loading import open_library
from ansor_mlflow.model.package import CompiledNetwork
from ansor_mlflow.model.parts import PartEntry, computed_by, fallback_clauses, part_entries
from ansor_mlflow.networks.graph import GraphBuilder
from ansor_mlflow.networks.load import Network, load_network
from ansor_mlflow.parameters import EvaluateOptions
from ansor_mlflow.settings import LoweringSettings
from ansor_mlflow.steps import runtimes
from ansor_mlflow.steps.evaluation.evaluate import evaluate
from ansor_mlflow.steps.runtimes import (
    FASTER_THERE,
    WRONG_HERE,
    best_mix,
    estimated_parts,
    leave_to_onnxruntime,
    losing_parts,
    losing_segments,
    measure_parts,
    prefer_fastest,
    why_wrong,
)
from ansor_mlflow.tensors import random_inputs

if TYPE_CHECKING:
    from tvm.target import Target


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Network:
    path = tmp_path_factory.mktemp("network") / "branching.onnx"
    onnx.save(branching(), path)
    return load_network(str(path))


@pytest.fixture(scope="module")
def lowered(network: Network, host_target: Target) -> LoweredNetwork:
    return lower(network.model, host_target)


@pytest.fixture(scope="module")
def compiled(
    network: Network, lowered: LoweredNetwork, host_target: Target, tmp_path_factory: pytest.TempPathFactory
) -> CompiledNetwork:
    return compiled_untuned(network, lowered, host_target, tmp_path_factory.mktemp("compiled"))


def part(runs_in: str, *, flops_share: float = 0.1, size: int = 0) -> PartEntry:
    fields = {"name": "", "inputs": (), "outputs": (), "operators": {"Conv": 1}, "reasons": {}}
    return typed(PartEntry, {**fields, "runs_in": runs_in, "flops_share": flops_share, "size": size})


PARTS = [part("tvm"), part("onnxruntime"), part("tvm", flops_share=0.8)]


@pytest.mark.parametrize(
    ("here", "there", "expected"),
    [
        ([1, 5, 1], [2, 1, 2], []),  # what is ONNX Runtime's already is not asked
        ([1.04, 1, 1], [1, 1, 2], []),  # the difference is noise
        ([2, 1, 1], [1, 1, 2], [0]),
        ([1, 1, 2], [2, 1, 1], [2]),
        ([9, 1, 2], [1, 1, 1], [0]),  # one has to be TVM's, and most of the operations are the last one's
    ],
)
def test_parts_that_take_longer_do_not_pay(here: list[float], there: list[float], expected: list[int]) -> None:
    assert losing_parts(PARTS, here, there) == expected


def test_each_size_keeps_a_part() -> None:
    parts = [part("tvm"), part("onnxruntime"), part("tvm", size=1), part("onnxruntime", size=1)]
    assert losing_parts(parts, [9.0] * 4, [1.0] * 4) == []


@pytest.mark.nightly
def test_parts_of_an_untuned_library_do_not_pay(
    compiled: CompiledNetwork,
    lowered: LoweredNetwork,
    network: Network,
    host_target: Target,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "ansor_mlflow")
    timed, stays = measure_parts(compiled, lowered)
    assert [entry.runs_in for entry in timed.parts] == ["tvm", "onnxruntime", "tvm"]
    assert sum(entry.latency_share or 0 for entry in timed.parts) == pytest.approx(1)
    assert all(entry.latency_ms for entry in timed.parts)
    assert {"first", "mean", "is_positive"} <= stays[0].keys()
    assert set(stays[0].values()) == {FASTER_THERE}
    assert "a part takes" in caplog.text
    assert "tune for longer" in caplog.text

    again = lower_sizes(network.models(), host_target, LoweringSettings(), network.name, stays)
    entries = part_entries(again)
    assert [entry.runs_in for entry in entries] == ["onnxruntime", "tvm"]
    assert entries[0].reasons["Conv"] == FASTER_THERE
    assert len(again.tasks) < len(lowered.tasks)


@pytest.mark.usefixtures("new_experiment")
@pytest.mark.nightly
def test_baselines_have_parts_of_their_own(network: Network, host_target: Target, tmp_path: Path) -> None:
    """What the model leaves to ONNX Runtime, as it was faster there, TVM computes in what it is compared with."""
    stays = {0: dict.fromkeys(("first", "mean", "is_positive"), FASTER_THERE)}
    lowered = lower_sizes(network.models(), host_target, LoweringSettings(), network.name, stays)
    compiled = compiled_untuned(network, lowered, host_target, tmp_path)
    assert [entry.runs_in for entry in compiled.parts] == ["onnxruntime", "tvm"]
    flavor.save_model(compiled, str(tmp_path / "model"), code_paths=[])
    options = EvaluateOptions(model_uri=str(tmp_path / "model"), instant=True, turns=1, measure_s=0.05, rivals="none")
    metrics = evaluate(options).metrics
    assert {names.LATENCY_MS, names.UNTUNED_LATENCY_MS, names.INSTANT_LATENCY_MS} <= metrics.keys()


LOAD = """
import numpy as np
from ansor_mlflow.flavor import load_model
model = load_model("model")
outputs = model.run(dict(np.load("inputs.npz")))
np.savez("outputs.npz", **outputs)
print(model.choice)
"""


@pytest.fixture(scope="module")
def slow(host_target: Target, tmp_path_factory: pytest.TempPathFactory) -> tuple[CompiledNetwork, Network]:
    """A convolution in two sizes as TVM computes it without a schedule, a hundred times slower than ONNX Runtime."""
    directory = tmp_path_factory.mktemp("slow")
    network = _convolution(directory / "slow.onnx", sizes=(12, 28))
    lowered = lower_sizes(network.models(), host_target, LoweringSettings(), network.name)
    return compiled_untuned(network, lowered, host_target, directory), network


def _convolution(path: Path, *, seed: int = 0, sizes: int | tuple[int, int] = 28) -> Network:
    builder = GraphBuilder(seed=seed)
    builder.conv("y", builder.input("x", (1, 32, "rows", 28)), (64, 32, 3, 3))
    onnx.save(builder.build("slow", {"y": (1, 64, "rows less 2", 26)}), path)
    return load_network(str(path), input_shapes={"x": [1, 32, list(sizes) if isinstance(sizes, tuple) else sizes, 28]})


@pytest.mark.parametrize("allowed", [["tvm", "onnxruntime"], ["tvm", "openvino"]])
def test_each_size_is_left_to_the_runtime_that_is_faster(
    slow: tuple[CompiledNetwork, Network], allowed: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    title = {"onnxruntime": "ONNX Runtime", "openvino": "OpenVINO"}[allowed[1]]
    preferred = prefer_fastest(*slow, allowed)
    assert [(entry.runs_in, entry.size) for entry in preferred.parts] == [(allowed[1], 0), (allowed[1], 1)]
    assert caplog.text.count(f"{title} computes all of x 1×32×") == 2
    for entry, times in zip(preferred.parts, preferred.provenance["runtimes_ms"], strict=True):
        assert times["tvm"] > times[allowed[1]] == entry.latency_ms
    assert computed_by(preferred.parts) == allowed[1]
    flavor.save_model(preferred, str(tmp_path / "model"), code_paths=[])
    assert f"{allowed[1]}==" in (tmp_path / "model" / "requirements.txt").read_text()
    assert not list((tmp_path / "model").rglob("*.so"))
    inputs = random_inputs(preferred.sizes[1].inputs, 0)
    np.savez(tmp_path / "inputs.npz", **inputs)
    done = run([sys.executable, "-c", LOAD], tmp_path, environment(""), timeout_s=60)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith("exact library for ")
    assert done.stdout.endswith(f"{title} computes all 1 node (faster than in TVM)\n")
    (expected,) = expected_of(preferred.network, 2, [inputs])
    for name, array in np.load(tmp_path / "outputs.npz").items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-4, atol=1e-4)
    (file, _) = sorted((tmp_path / "model" / "libraries").rglob("part*.onnx"))
    file.write_bytes(file.read_bytes() + b" ")
    with pytest.raises(ModelError, match=file.name):
        flavor.load_model(str(tmp_path / "model"))


def test_one_size_may_stay(slow: tuple[CompiledNetwork, Network], monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, network = slow
    times = iter([{"tvm": 1.0, "onnxruntime": 2.0}, {"tvm": 2.0, "onnxruntime": 1.0}])
    monkeypatch.setattr(runtimes, "_milliseconds", lambda _: next(times))
    preferred = prefer_fastest(compiled, network, ["tvm", "onnxruntime"])
    assert [(entry.runs_in, entry.size) for entry in preferred.parts] == [("tvm", 0), ("onnxruntime", 1)]
    model = open_library(preferred.library, preferred, preferred.entry)
    for size in preferred.sizes:
        inputs = random_inputs(size.inputs, 0)
        (expected,) = expected_of(preferred.network, 2, [inputs])
        np.testing.assert_allclose(model.run(inputs)["y"], expected["y"], rtol=1e-4, atol=1e-4)


def test_a_library_that_is_faster_stays(slow: tuple[CompiledNetwork, Network], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtimes, "MIN_SLOWDOWN", 1e9)
    compiled, network = slow
    kept = prefer_fastest(compiled, network, ["tvm", "onnxruntime"])
    assert (kept.parts, computed_by(kept.parts)) == (compiled.parts, "tvm")
    assert [set(times) for times in kept.provenance["runtimes_ms"]] == [{"tvm", "onnxruntime"}] * 2
    here = compiled.fingerprint
    elsewhere = replace(compiled, fingerprint=replace(here, features=(*here.features, "avx1024f")))
    assert prefer_fastest(elsewhere, network, ["tvm", "onnxruntime"]) == elsewhere
    assert prefer_fastest(compiled, network, ["tvm"]) == compiled


def test_a_library_that_is_wrong_is_known(slow: tuple[CompiledNetwork, Network], tmp_path: Path) -> None:
    compiled, network = slow
    assert why_wrong(compiled) == ""
    of_others = _convolution(tmp_path / "others.onnx", seed=1, sizes=(12, 28))
    assert why_wrong(replace(compiled, network=of_others.path)).startswith("max_rel_error 1")
    (tmp_path / "model.so").write_bytes(b"")
    assert "model.so" in why_wrong(replace(compiled, library=tmp_path / "model.so"))
    left = leave_to_onnxruntime(compiled, network, WRONG_HERE)
    assert [(entry.runs_in, entry.reasons) for entry in left.parts] == [("onnxruntime", {"Conv": WRONG_HERE})] * 2
    assert why_wrong(left) == ""


def test_inputs_of_which_no_runtime_keeps_two_digits_say_nothing(host_target: Target, tmp_path: Path) -> None:
    """Bytes of an image, in a network that is made for noise: ONNX Runtime's own outputs depend on the last bit."""
    builder = GraphBuilder(seed=0)
    product = builder.dense("dense", builder.input("x", (4, 64)), units=64, in_units=64)
    centred = builder.node("Sub", "centred", product, builder.node("ReduceMean", "mean", product, axes=[1]))
    steep = builder.node("Pow", "steep", centred, builder.constant("exponent", np.float32(4)))
    model = builder.build("chaotic", {builder.node("Sin", "sin", steep): (4, 64)})
    onnx.save(model, tmp_path / "chaotic.onnx")
    network = load_network(str(tmp_path / "chaotic.onnx"))
    assert why_wrong(compiled_untuned(network, lower(model, host_target), host_target, tmp_path)) == ""


def test_a_library_for_another_machine_is_not_timed(compiled: CompiledNetwork, lowered: LoweredNetwork) -> None:
    here = compiled.fingerprint
    elsewhere = replace(compiled, fingerprint=replace(here, features=(*here.features, "avx1024f")))
    assert measure_parts(elsewhere, lowered) == (elsewhere, {})


def test_a_library_that_cannot_be_timed_is_kept(
    compiled: CompiledNetwork, lowered: LoweredNetwork, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "model.so").write_bytes(b"")
    broken = replace(compiled, library=tmp_path / "model.so")
    assert measure_parts(broken, lowered) == (broken, {})
    assert "the parts of branching are not timed" in caplog.text


def test_before_it_is_compiled_what_stays_has_a_time(
    lowered: LoweredNetwork, network: Network, host_target: Target
) -> None:
    device = Device.resolve("auto", "auto")
    first, staying, last = estimated_parts(lowered, network, device, estimated_s=1.0)
    assert (first.latency_share, last.latency_share) == (None, None)
    assert staying.latency_ms is not None
    assert staying.latency_share == pytest.approx(staying.latency_ms / (1000 + staying.latency_ms))
    (clause,) = fallback_clauses([first, staying, last])
    assert clause.startswith("ONNX Runtime computes If (control flow): 0.3% of the operations, ")
    assert clause.endswith("% of the time")


def test_operators_with_one_reason_are_one_clause() -> None:
    reasons = {"Conv": FASTER_THERE, "Relu": FASTER_THERE, "If": "control flow"}
    staying = replace(part("onnxruntime"), operators={"Add": 2, "Conv": 3, "If": 1, "Relu": 1}, reasons=reasons)
    assert str(staying) == (
        "ONNX Runtime computes Conv and Relu (faster than in TVM), If (control flow), and 2 nodes between operators "
        "that stay: 10.0% of the operations"
    )


def test_the_benchmark_of_handing_tensors_over(tmp_path: Path) -> None:
    """It takes the parts of a network one by one, as nothing else does."""
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "handover.py"), "--elements", "16", "--json", str(figures)]
    done = run(command, tmp_path, environment(""), timeout_s=300)
    assert done.exit_code == 0, done.stderr
    (row,) = json.loads(figures.read_text())["sizes"]
    assert row["handovers"] == 11
    assert row["whole_us"] > row["alone_us"] > 0


@pytest.mark.parametrize(
    ("here", "there", "sides", "total"),
    [
        ([1.0, 1.0], [2.0, 2.0], [False, False], 2.0),
        ([1.0, 9.0, 1.0], [2.0, 1.0, 2.0], [False, True, False], 3.0 + 2 * 20e-6),
        ([1e-4, 11e-5, 1e-4], [2e-4, 1e-4, 2e-4], [False, False, False], 31e-5),  # handing over costs more
        ([9.0], [1.0], [True], 1.0),
    ],
)
def test_the_best_mix_is_the_shortest_path(
    here: list[float], there: list[float], sides: list[bool], total: float
) -> None:
    found, seconds = best_mix(here, there)
    assert (found, seconds) == (sides, pytest.approx(total))


def test_segments_that_lose_are_left_out(
    network: Network, host_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = GraphBuilder(seed=0)
    data = builder.input("x", (1, 32, 28, 28))
    for name in ("first", "second", "y"):
        data = builder.conv(name, data, (32, 32, 3, 3), padding=1)
    onnx.save(builder.build("deep", {"y": (1, 32, 28, 28)}), tmp_path / "deep.onnx")
    network = load_network(str(tmp_path / "deep.onnx"))
    cut = lower_sizes(network.models(), host_target, LoweringSettings(), "deep", num_segments=8)
    assert [part.function for part in cut.parts] == ["part0", "part1", "part2"]
    (tmp_path / "cut").mkdir()
    in_segments = compiled_untuned(network, cut, host_target, tmp_path / "cut")
    assert why_wrong(in_segments) == ""
    assert losing_segments(in_segments, cut, fastest_s=1e-9) == {}
    monkeypatch.setattr(runtimes, "_seconds", lambda *_: ([1.0, 9.0, 1.0], [2.0, 1.0, 2.0]))
    losing = losing_segments(in_segments, cut, fastest_s=4.0)
    assert losing == {0: {"second": FASTER_THERE}}
    assert losing_segments(in_segments, cut, fastest_s=3.0) == {}
    mixed = lower_sizes(network.models(), host_target, LoweringSettings(), "deep", losing)
    assert [part.graph.runs_in for part in mixed.parts] == ["tvm", "onnxruntime", "tvm"]


@pytest.mark.system
@pytest.mark.usefixtures("own_directory")
def test_a_network_of_which_tvm_computes_nothing_is_a_model_like_any_other(run_here: RunCommand) -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])
    y = helper.make_tensor_value_info("y", TensorProto.INT64, [1, "found"])
    graph = helper.make_graph([helper.make_node("NonZero", ["x"], ["y"])], "nonzero", [x], [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), "nonzero.onnx")
    assert run_here("main", "--network", "nonzero.onnx", "--turns", "1", "--measure-s", "0.05") == 0
    main = mlflow.search_runs(filter_string="tags.`ansor.step` = 'main'", output_format="list")[0]
    assert names.UNTUNED_LATENCY_MS not in main.data.metrics
    assert main.data.metrics[names.ONNXRUNTIME_SHARE] == 1
    model_uri = main.data.tags[names.TAG_MODEL_URI]
    model = flavor.load_model(model_uri)
    assert str(model.choice).endswith("ONNX Runtime computes all 1 node (shapes that depend on values)")
    values = np.array([0, 1, 0, 2], np.float32)
    np.testing.assert_array_equal(model.run({"x": values})["y"], [[1, 3]])
    np.testing.assert_array_equal(mlflow.pyfunc.load_model(model_uri).predict({"x": values}), [[1, 3]])
    tune_run = main.data.tags[names.TAG_TUNE_RUN]
    assert run_here("compile", "--tune-run", tune_run, "--runtimes", "tvm") == UserInputError.exit_code
