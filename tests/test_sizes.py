"""A network of several sizes is one model, which takes the smallest that fits, and pads where padding is harmless."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlflow
import numpy as np
import onnx
import pytest
from helpers.commands import BRIEF, FAST, RunCommand, flags
from helpers.exports import make_model, normal, tensor
from helpers.runs_here import newest_run
from helpers.untuned import compiled_untuned
from hypothesis import given
from hypothesis import strategies as st
from mlflow.utils.mlflow_tags import MLFLOW_RUN_NOTE
from onnx import TensorProto, helper

from ansor_mlflow import flavor, names
from ansor_mlflow.commands.bisect import bisect_network
from ansor_mlflow.errors import CorrectnessError, UserInputError
from ansor_mlflow.lowering.lower import lower, lower_sizes
from ansor_mlflow.lowering.network import LoweredNetwork
from ansor_mlflow.measuring.checking import Deviation, compare_outputs
from ansor_mlflow.measuring.compare import ReferenceSession
from ansor_mlflow.model.choice import LoadOptions
from ansor_mlflow.model.loading import load_package
from ansor_mlflow.model.manifest import Manifest
from ansor_mlflow.model.package import CompiledNetwork, write_package
from ansor_mlflow.model.parts import part_entries
from ansor_mlflow.model.tuned_model import SizeChoice, TunedModel, require_pad
from ansor_mlflow.networks.load import Network, load_network
from ansor_mlflow.networks.sizes import GivenShape, split_sizes
from ansor_mlflow.parameters import BisectOptions, PromoteOptions
from ansor_mlflow.serving.pyfunc import PyfuncModel
from ansor_mlflow.settings import LoweringSettings
from ansor_mlflow.steps.evaluation.benches import measured_uses, require_harmless_padding
from ansor_mlflow.steps.promotion.contest import Contender, common_sizes
from ansor_mlflow.steps.promotion.promote import _errors
from ansor_mlflow.tensors import OPEN, Arrays, NetworkShapes, TensorSpec

if TYPE_CHECKING:
    from tvm.target import Target

LENGTHS = (4, 8, 16)
TOKENS = {"ids": [1, list(LENGTHS)]}
NUM_WORDS, WIDTH = 11, 8


def text_model(*, mixes: bool = False) -> onnx.ModelProto:
    """Words to vectors, (batch, tokens) → (batch, tokens, 8), and how many words there are. The lengths are dynamic.

    Args:
        mixes: Whether a word's vector depends on the words around it, so that padding changes it.
    """
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["vectors"]),
        helper.make_node("MatMul", ["vectors", "weight"], ["mixed" if mixes else "hidden"]),
        helper.make_node("Cast", ["ids"], ["numbers"], to=TensorProto.FLOAT),
        helper.make_node("ReduceSum", ["numbers", "axes"], ["total"], keepdims=0),
    ]
    if mixes:
        nodes.append(helper.make_node("Softmax", ["mixed"], ["hidden"], axis=1))
    constants = {
        "table": normal(rng, NUM_WORDS, WIDTH),
        "weight": normal(rng, WIDTH, WIDTH),
        "axes": np.array([1], np.int64),
    }
    outputs = [tensor("hidden", ("batch", "tokens", WIDTH)), tensor("total", ("batch",))]
    return make_model(nodes, [tensor("ids", ("batch", "tokens"), TensorProto.INT64)], outputs, constants)


def saved_network(directory: Path, *, mixes: bool = False) -> Path:
    path = directory / "words.onnx"
    onnx.save(text_model(mixes=mixes), path)
    return path


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Network:
    return load_network(str(saved_network(tmp_path_factory.mktemp("network"))), input_shapes=TOKENS)


@pytest.fixture(scope="module")
def lowered(network: Network, host_target: Target) -> LoweredNetwork:
    return lower_sizes(network.models(), host_target, LoweringSettings(), network.name)


def compile_in(directory: Path, network: Network, lowered: LoweredNetwork, target: Target) -> CompiledNetwork:
    onnx.save(network.model, directory / "network.onnx")
    return replace(compiled_untuned(network, lowered, target, directory), network=directory / "network.onnx")


@pytest.fixture(scope="module")
def compiled(
    network: Network, lowered: LoweredNetwork, host_target: Target, tmp_path_factory: pytest.TempPathFactory
) -> CompiledNetwork:
    directory = tmp_path_factory.mktemp("compiled")
    return replace(compile_in(directory, network, lowered, host_target), pad={"ids": 0})


@pytest.fixture(scope="module")
def directory(compiled: CompiledNetwork, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "model"
    flavor.save_model(compiled, str(path))
    return path


@pytest.fixture(scope="module")
def model(directory: Path) -> TunedModel:
    return load_package(directory, Manifest.read(directory))


def words(num_rows: int, length: int) -> dict[str, np.ndarray]:
    return {"ids": np.random.default_rng(length).integers(0, NUM_WORDS, (num_rows, length))}


def assert_right(outputs: dict[str, np.ndarray], inputs: dict[str, np.ndarray], network: Network) -> None:
    assert network.path is not None
    expected = ReferenceSession(network.path, 1).run(inputs)
    assert compare_outputs(outputs, expected).max_rel_error < 1e-5


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, [{}]),
        ({"x": [1, 3]}, [{"x": (1, 3)}]),
        ({"x": [1, [3]]}, [{"x": (1, 3)}]),
        ({"x": [1, [320, 640], [640, 320]]}, [{"x": (1, 320, 640)}, {"x": (1, 640, 320)}]),
        ({"x": [[1, 8], 3], "y": [5]}, [{"x": (1, 3), "y": (5,)}, {"x": (8, 3), "y": (5,)}]),
    ],
)
def test_lists_of_sizes_belong_together(
    given: dict[str, GivenShape], expected: list[dict[str, tuple[int, ...]]]
) -> None:
    assert split_sizes("net", given) == expected


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"ids": [[1, 2], [4, 8, 16]]}, "dimensions of .* 2 and 3 sizes; give all lists the same length"),
        ({"ids": [1, []]}, "dimensions of .* 0 sizes; give all lists the same length"),
        ({"ids": [1, [4, 8, 4]]}, r"the size ids \[1, 4\] twice; give each once"),
        ({"ids": [1, [4, "8"]]}, "dimensions must be whole numbers"),
        ({"ids": [1, [4, 0]]}, "every dimension must be at least 1"),
        ({"words": [1, [4, 8]]}, "names 'words', which is not an input"),
    ],
)
def test_sizes_that_are_none(tmp_path: Path, shapes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        load_network(str(saved_network(tmp_path)), input_shapes=shapes)


def test_a_graph_that_is_generated_has_one_size() -> None:
    with pytest.raises(UserInputError, match="mlp several sizes, but its graph is made for one; give an ONNX file"):
        load_network("mlp", input_shapes={"data": [[1, 2], 784]})


def test_what_differs_between_sizes_is_open(network: Network) -> None:
    assert network.inputs == (TensorSpec("ids", (1, OPEN), "int64"),)
    assert network.outputs == (TensorSpec("hidden", (1, OPEN, WIDTH), "float32"), TensorSpec("total", (1,), "float32"))
    assert [size.inputs[0].shape for size in network.sizes] == [(1, length) for length in LENGTHS]
    assert [size.outputs[0].shape for size in network.sizes] == [(1, length, WIDTH) for length in LENGTHS]


def test_bisect_takes_one_size(tmp_path: Path) -> None:
    options = BisectOptions(network=str(saved_network(tmp_path)), input_shapes=TOKENS, output=str(tmp_path / "wrong"))
    with pytest.raises(UserInputError, match="words several sizes; give the one whose outputs are wrong"):
        bisect_network(options)


def test_each_size_has_a_function_and_shares_tasks(
    lowered: LoweredNetwork, network: Network, host_target: Target
) -> None:
    assert [(part.size, part.function) for part in lowered.parts] == [(0, "part0"), (1, "part1"), (2, "part2")]
    single = [lower(model, host_target).tasks for model in network.models()]
    by_hash: dict[str, int] = {}
    for task in (task for tasks in single for task in tasks):
        by_hash[task.info.workload_hash] = by_hash.get(task.info.workload_hash, 0) + task.info.weight
    assert {task.info.workload_hash: task.info.weight for task in lowered.tasks} == by_hash
    assert len({task.info.name for task in lowered.tasks}) == len(lowered.tasks)


def test_sizes_in_parts(tmp_path: Path, host_target: Target) -> None:
    """A network that ONNX Runtime computes some of, in each of its sizes."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["first"]),
        helper.make_node("ReduceMean", ["first"], ["mean"], keepdims=0),
        helper.make_node("Greater", ["mean", "zero"], ["is_positive"]),
        helper.make_node(
            "If",
            ["is_positive"],
            ["y"],
            then_branch=helper.make_graph([helper.make_node("Neg", ["first"], ["a"])], "a", [], [tensor("a", None)]),
            else_branch=helper.make_graph([helper.make_node("Abs", ["first"], ["b"])], "b", [], [tensor("b", None)]),
        ),
    ]
    rng = np.random.default_rng(0)
    constants = {"w": normal(rng, 256, 128), "zero": np.array(0, np.float32)}
    path = tmp_path / "branching.onnx"
    onnx.save(make_model(nodes, [tensor("x", ("rows", 256))], [tensor("y", ("rows", 128))], constants), path)
    network = load_network(str(path), input_shapes={"x": [[64, 128], 256]})
    lowered = lower_sizes(network.models(), host_target, LoweringSettings(), network.name)
    entries = part_entries(lowered)
    assert [(entry.size, entry.runs_in) for entry in entries] == [
        (0, "tvm"),
        (0, "onnxruntime"),
        (1, "tvm"),
        (1, "onnxruntime"),
    ]
    assert [entry.name for entry in entries] == ["part0", "part1.onnx", "part2", "part3.onnx"]
    assert sum(entry.flops_share for entry in entries if entry.size == 1) == pytest.approx(1)
    compiled = compile_in(tmp_path, network, lowered, host_target)
    flavor.save_model(compiled, str(tmp_path / "model"))
    model = load_package(tmp_path / "model", Manifest.read(tmp_path / "model"))
    for rows in (128, 64, 128):
        inputs = {"x": np.random.default_rng(rows).normal(size=(rows, 256)).astype(np.float32)}
        assert_right(model.run(inputs), inputs, network)
        assert len(model.seconds_of_parts(inputs)) == 2


def sizes_of(*lengths: int) -> list[NetworkShapes]:
    return [
        NetworkShapes((TensorSpec("x", (length,), "int64"),), (TensorSpec("y", (2, length), "int64"),))
        for length in lengths
    ]


def test_the_first_padded_request_of_a_size_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    choice = SizeChoice(sizes_of(4, 8, 16), {"x": 0})
    with caplog.at_level(logging.INFO, "ansor_mlflow"):
        for length in (6, 5, 8, 12, 3):
            choice.choose([np.ones(length)])
    assert caplog.messages == [
        f"inputs x {given_} are padded to x {size}: 25 % is padding" for given_, size in ((6, 8), (12, 16), (3, 4))
    ]


@given(st.lists(st.integers(1, 20), min_size=2, max_size=5, unique=True), st.integers(1, 24))
def test_the_smallest_size_that_fits_is_taken(lengths: list[int], length: int) -> None:
    choice = SizeChoice(sizes_of(*lengths), {"x": -1})
    x = np.arange(length)
    fitting = [size for size in lengths if size >= length]
    if not fitting:
        with pytest.raises(
            UserInputError, match=f"inputs x {length}: the model was compiled for x {lengths[0]}, {lengths[1]}"
        ):
            choice.choose([x])
        return
    number, (padded,) = choice.choose([x])
    assert lengths[number] == min(fitting)
    assert padded.tolist() == [*x.tolist(), *[-1] * (min(fitting) - length)]
    assert padded.dtype == x.dtype
    (y,) = choice.cropped([np.stack([padded, padded])], [x], number)
    assert y.tolist() == [x.tolist()] * 2


def test_an_output_is_cut_along_the_dimension_of_its_input() -> None:
    def image(height: int, width: int) -> NetworkShapes:
        x = TensorSpec("x", (1, height, width), "float32")
        half = TensorSpec("half", (1, height // 2, width // 2), "float32")
        return NetworkShapes((x,), (TensorSpec("y", (1, height, width), "float32"), half))

    choice = SizeChoice([image(8, 8), image(16, 16)], {"x": 0})
    given_ = np.ones((1, 10, 13), np.float32)
    number, (padded,) = choice.choose([given_])
    assert (number, padded.shape, padded.sum()) == (1, (1, 16, 16), 130)
    y, half = choice.cropped([padded, padded[:, :8, :8]], [given_], number)
    assert (y.shape, half.shape) == ((1, 10, 13), (1, 8, 8))


def test_only_inputs_with_a_value_are_padded() -> None:
    def pair(length: int) -> NetworkShapes:
        return NetworkShapes(tuple(TensorSpec(name, (length,), "int64") for name in "ab"), ())

    choice = SizeChoice([pair(4), pair(8)], {"a": 0})
    assert choice.choose([np.ones(3), np.ones(8)])[0] == 1
    with pytest.raises(UserInputError, match="inputs a 4, b 3: the model was compiled for a, b 4, 8; it pads a"):
        choice.choose([np.ones(4), np.ones(3)])
    with pytest.raises(UserInputError, match=r'pad them .* or compile it with pad, such as \{"a": 0, "b": 0\}$'):
        SizeChoice([pair(4), pair(8)], {}).choose([np.ones(4), np.ones(3)])
    with pytest.raises(UserInputError, match="none is as large; tune it with a larger one"):
        SizeChoice([pair(4), pair(8)], {"a": 0, "b": 0}).choose([np.ones(9), np.ones(9)])


def test_what_cannot_be_padded_is_said(network: Network, small_network: Network) -> None:
    require_pad({}, "small", small_network)
    require_pad({"ids": 0}, "words", network)
    with pytest.raises(
        UserInputError, match=r'pad=\{"data": 0\}, but small has one size; give several in input_shapes'
    ):
        require_pad({"data": 0}, "small", small_network)
    with pytest.raises(UserInputError, match="pad names 'mask', which is not an input of words; its inputs are ids"):
        require_pad({"mask": 0}, "words", network)


def test_a_model_is_right_in_every_size_and_between(model: TunedModel, network: Network) -> None:
    for length in (*LENGTHS, 3, 11):
        inputs = words(1, length)
        outputs = model.run(inputs)
        assert outputs["hidden"].shape == (1, length, WIDTH)
        assert_right(outputs, inputs, network)


def test_callers_of_different_sizes_do_not_disturb_each_other(model: TunedModel, network: Network) -> None:
    inputs = [words(1, length) for length in (*LENGTHS, 5, 9)] * 8
    with ThreadPoolExecutor(4) as threads:
        for outputs, given_ in zip(threads.map(model.run, inputs), inputs, strict=True):
            assert_right(outputs, given_, network)


def test_inputs_of_no_size(model: TunedModel) -> None:
    with pytest.raises(UserInputError, match="inputs ids 1×17: the model was compiled for ids 1×4, 1×8, 1×16;"):
        model.run({"ids": np.zeros((1, 17), np.int64)})
    with pytest.raises(UserInputError, match=r"'ids' is int64 \(2, 4\): the model expects 'ids': int64 \(1, -1\)"):
        model.run({"ids": np.zeros((2, 4), np.int64)})


def test_a_loaded_model_says_which_sizes_it_takes(model: TunedModel, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ansor_mlflow"):
        flavor.explain_load(model)
    assert "sizes: ids 1×4, 1×8, 1×16; what is between them is padded (ids)" in caplog.messages
    assert str(SizeChoice(sizes_of(4, 8), {})).endswith("x 4, 8; what is between them is refused, for want of pad")


def test_rows_of_any_size_are_run_one_after_the_other(model: TunedModel, network: Network) -> None:
    served = PyfuncModel(model)
    for num_rows, length in ((3, 8), (2, 5), (1, 16)):
        inputs = words(num_rows, length)
        assert_right(served.predict(inputs), inputs, network)


def test_a_model_says_what_it_was_compiled_for(compiled: CompiledNetwork, directory: Path, tmp_path: Path) -> None:
    manifest = write_package(compiled, tmp_path)
    assert Manifest.from_dict(json.loads(json.dumps(manifest.to_dict()))) == manifest
    assert (manifest.sizes, manifest.pad) == (compiled.sizes, {"ids": 0})
    signature = mlflow.models.get_model_info(str(directory)).signature
    assert [spec.shape for spec in signature.inputs] == [(-1, -1)]
    requirements = (directory / "requirements.txt").read_text()
    assert "onnxruntime" not in requirements  # TVM computes all of it
    one_size = replace(compiled, sizes=(), fingerprint=replace(compiled.fingerprint, num_threads=1))
    with pytest.raises(UserInputError, match="words and words have other inputs, outputs or sizes"):
        write_package([compiled, one_size], tmp_path / "two")


@pytest.mark.system
def test_sizes_are_built_again_where_no_library_runs(
    compiled: CompiledNetwork, network: Network, tmp_path: Path
) -> None:
    elsewhere = replace(compiled, fingerprint=replace(compiled.fingerprint, cpu_model="other", features=("no-such",)))
    flavor.save_model(elsewhere, str(tmp_path / "model"))
    options = LoadOptions(allow_compatible=False)
    model = load_package(tmp_path / "model", Manifest.read(tmp_path / "model"), options)
    assert model.choice.level == "untuned"
    inputs = words(1, 7)
    assert_right(model.run(inputs), inputs, network)


def test_padding_that_changes_the_outputs_is_found(
    model: TunedModel, directory: Path, host_target: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def compare(model: TunedModel, path: Path) -> Any:
        def deviation(examples: list[dict[str, np.ndarray]]) -> Deviation:
            session = ReferenceSession(path, 1)
            return Deviation.worst([compare_outputs(model.run(inputs), session.run(inputs)) for inputs in examples])

        return deviation

    manifest = Manifest.read(directory)
    require_harmless_padding(manifest, compare(model, directory / names.NETWORK_FILE), 1e-4, seed=0)

    path = saved_network(tmp_path, mixes=True)
    network = load_network(str(path), input_shapes=TOKENS)
    lowered = lower_sizes(network.models(), host_target, LoweringSettings(), network.name)
    mixing = replace(compile_in(tmp_path, network, lowered, host_target), pad={"ids": 0})
    flavor.save_model(mixing, str(tmp_path / "model"))
    wrong = load_package(tmp_path / "model", Manifest.read(tmp_path / "model"))
    with pytest.raises(CorrectnessError, match=r"padding ids of words changes its outputs: .* without pad"):
        require_harmless_padding(manifest, compare(wrong, path), 1e-4, seed=0)

    def no_reference(_: object) -> Deviation:
        raise UserInputError("ONNX Runtime cannot compute the network from the inputs")

    with caplog.at_level(logging.WARNING):
        require_harmless_padding(manifest, no_reference, 1e-4, seed=0)
    assert "what padding does to the outputs of ids 1×15 is not checked, for want of a reference" in caplog.text


def test_a_contest_is_held_in_the_sizes_that_both_have(compiled: CompiledNetwork, tmp_path: Path) -> None:
    manifest = write_package(compiled, tmp_path)
    (entry,) = manifest.libraries
    candidate = Contender(version="2", directory=tmp_path, manifest=manifest, entry=entry)
    middle = manifest.sizes[1]
    single = replace(manifest, inputs=middle.inputs, outputs=middle.outputs, sizes=())
    champion = replace(candidate, version="1", manifest=single)
    assert common_sizes(candidate, champion) == common_sizes(champion, candidate) == [middle]
    large = replace(champion, manifest=replace(manifest, sizes=manifest.sizes[2:]))
    small = replace(candidate, manifest=replace(manifest, sizes=manifest.sizes[:2]))
    with pytest.raises(
        UserInputError, match="candidate=2: it has none of the sizes of the champion, version 1; compile"
    ):
        small.require_interface_of(large)


@pytest.mark.nightly
def test_outputs_of_a_champion_are_compared_in_its_sizes(
    compiled: CompiledNetwork, directory: Path, host_target: Target, tmp_path: Path
) -> None:
    def contender(version: str, directory: Path) -> Contender:
        manifest = Manifest.read(directory)
        return Contender(version=version, directory=directory, manifest=manifest, entry=manifest.libraries[0])

    network = load_network(str(compiled.network), input_shapes={"ids": [1, list(LENGTHS[:2])]})
    lowered = lower_sizes(network.models(), host_target, LoweringSettings(), network.name)
    smaller = replace(compiled_untuned(network, lowered, host_target, tmp_path), network=compiled.network)
    flavor.save_model(smaller, str(tmp_path / "model"))
    candidate, champion = contender("2", directory), contender("1", tmp_path / "model")
    assert champion.has_network_of(candidate)
    errors = _errors(PromoteOptions(model="words"), candidate, [champion])
    assert errors.keys() == {"1", "2"}
    assert all(error.max_rel_error < 1e-5 for error in errors.values())


@pytest.mark.parametrize(
    ("lengths", "padded"),
    [((7, 8), [6, 3]), ((4, 7, 8), [6, 2, 5]), ((1, 8), [7, 2]), ((1, 2), []), ((4, 8, 16), [15, 2, 5, 9])],
)
def test_what_padding_does_is_looked_at_where_there_is_padding(
    directory: Path, lengths: tuple[int, ...], padded: list[int]
) -> None:
    """Inputs are padded by little, and by as much as to any size; one that has a size is not padded."""
    manifest = Manifest.read(directory)
    (ids,) = manifest.sizes[0].inputs
    sizes = [replace(manifest.sizes[0], inputs=(replace(ids, shape=(1, length)),)) for length in lengths]
    seen: list[int] = []

    def compare(examples: Sequence[Arrays]) -> Deviation:
        seen.extend(example["ids"].shape[1] for example in examples)
        return Deviation(0.0, 0.0)

    require_harmless_padding(replace(manifest, sizes=tuple(sizes)), compare, 1e-4, seed=0)
    assert seen == padded


def test_what_cannot_be_compared_does_not_hide_the_rest(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As of a U-Net, which takes multiples of a stride alone."""

    def compare(examples: Sequence[Arrays]) -> Deviation:
        if any(example["ids"].shape[1] != 9 for example in examples):
            raise UserInputError("ONNX Runtime cannot compute it")
        return Deviation(1.0, 1.0)

    with pytest.raises(CorrectnessError, match="padding ids of words changes its outputs"):
        require_harmless_padding(Manifest.read(directory), compare, 1e-4, seed=0)
    assert "what padding does to the outputs of ids 1×15 is not checked" in caplog.text


def test_what_padding_costs_is_measured(model: TunedModel, directory: Path) -> None:
    manifest = Manifest.read(directory)
    uses = measured_uses(manifest, [1.0, 2.0, 4.0])
    assert {number: (use.shortest, use.size) for number, use in uses.items()} == {1: (5, 8), 2: (9, 16)}
    assert uses[2].worst_loss == pytest.approx(4 / 2.25 - 1)
    assert 0 < uses[2].mean_loss < uses[2].worst_loss
    backwards = replace(manifest, sizes=manifest.sizes[::-1])
    assert measured_uses(backwards, [4.0, 2.0, 1.0])[0] == uses[2]
    assert measured_uses(replace(manifest, pad={}), [1.0, 2.0, 4.0]) == {}


@pytest.mark.system
@pytest.mark.usefixtures("new_experiment")
def test_several_sizes_from_the_tuning_to_a_call(
    run_here: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path, shapes = saved_network(tmp_path), {"ids": [1, "8..16"]}
    lengths = [size.inputs[0].shape[1] for size in load_network(str(path), input_shapes=shapes).sizes]
    assert len(lengths) > 1
    tuning = {**FAST, "network": path, "input_shapes": json.dumps(shapes), "trials": 16}
    assert run_here("tune", *flags(tuning)) == 0
    assert json.loads(newest_run().data.params["input_shapes"]) == shapes  # as it was given
    assert run_here("compile", "--tune-run", newest_run().info.run_id, "--pad", json.dumps({"ids": 0})) == 0
    assert json.loads(newest_run().data.params["input_shapes"]) == {"ids": [1, lengths]}  # as it was chosen
    model_uri = newest_run().data.tags[names.TAG_MODEL_URI]
    assert run_here("evaluate", "--model-uri", model_uri, *flags(BRIEF)) == 0
    run = newest_run()
    assert run.data.metrics[names.MAX_REL_ERROR] < 1e-5
    sizes = f"ids {', '.join(f'1×{length}' for length in lengths)}; what is between them is padded (ids)"
    assert run.data.tags[names.TAG_SIZES] == sizes
    assert f"- sizes: {sizes}" in run.data.tags[MLFLOW_RUN_NOTE]
    path = mlflow.MlflowClient().download_artifacts(run.info.run_id, names.SIZES_FILE, str(tmp_path))
    rows = json.loads(Path(path).read_text())
    assert [row["input_shapes"]["ids"][1] for row in rows] == lengths
    between = [small + 1 if small + 1 < large else None for small, large in pairwise(lengths)]
    assert [row.get("padded_from") for row in rows] == [None, *between]
    for row in rows:
        assert row["speedup_vs_onnxruntime"] == pytest.approx(row["onnxruntime_latency_ms"] / row["latency_ms"])
    served = mlflow.pyfunc.load_model(model_uri)
    inputs = words(2, 6)
    expected = ReferenceSession(tmp_path / "words.onnx", 1).run(inputs)
    assert compare_outputs(served.predict(inputs), expected).max_rel_error < 1e-5
