"""Sizes are chosen in a range: those with which requests that are padded to the next of them lose the least."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlflow
import numpy as np
import onnx
import pytest
from helpers.exports import make_model, normal, tensor
from helpers.untuned import compiled_untuned
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from ansor_mlflow import flavor
from ansor_mlflow.commands.plan import plan_tuning
from ansor_mlflow.errors import CorrectnessError, UserInputError
from ansor_mlflow.graphs.partition import MIN_FLOPS, estimated_cost
from ansor_mlflow.lowering.lower import lower_sizes
from ansor_mlflow.measuring.checking import Deviation, compare_outputs
from ansor_mlflow.measuring.compare import ReferenceSession
from ansor_mlflow.model.loading import load_package
from ansor_mlflow.model.manifest import Manifest
from ansor_mlflow.networks.load import Network, load_network
from ansor_mlflow.networks.sizes import MAX_SIZES, ChosenSizes, choose_sizes, size_uses
from ansor_mlflow.parameters import PlanOptions, TuneOptions, load_options
from ansor_mlflow.settings import LoweringSettings
from ansor_mlflow.steps.evaluation.benches import require_harmless_padding
from ansor_mlflow.tensors import OPEN, TensorSpec

if TYPE_CHECKING:
    from tvm.target import Target

NUM_WORDS, WIDTH = 50, 512


def text_model(*, names: tuple[str, str] = ("tokens", "tokens")) -> onnx.ModelProto:
    """Vectors of words, masked, through a layer: ids and mask (batch, tokens) → (batch, tokens, 512)."""
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["vectors"]),
        helper.make_node("Cast", ["mask"], ["numbers"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["numbers", "last"], ["column"]),
        helper.make_node("Mul", ["vectors", "column"], ["masked"]),
        helper.make_node("MatMul", ["masked", "weight"], ["hidden"]),
    ]
    constants = {
        "table": normal(rng, NUM_WORDS, WIDTH),
        "weight": normal(rng, WIDTH, WIDTH),
        "last": np.array([2], np.int64),
    }
    inputs = [tensor(name, ("batch", dim), TensorProto.INT64) for name, dim in zip(("ids", "mask"), names, strict=True)]
    return make_model(nodes, inputs, [tensor("hidden", ("batch", names[0], WIDTH))], constants)


def sound_model(*, stride: int = 1) -> onnx.ModelProto:
    """A convolution over time with zeros at both ends, and as long again: sound (batch, 1, samples) → the same."""
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("Conv", ["sound", "kernel"], ["features"], kernel_shape=[9], pads=[4, 4], strides=[stride]),
        helper.make_node("Relu", ["features"], ["positive"]),
        helper.make_node("Conv", ["positive", "other"], ["mixed"], kernel_shape=[9], pads=[4, 4]),
        helper.make_node("Resize", ["mixed", "", "scales"], ["long"], mode="nearest"),
        helper.make_node("Add", ["long", "sound"], ["out"]),
    ]
    constants = {
        "kernel": normal(rng, 16, 1, 9),
        "other": normal(rng, 1, 16, 9),
        "scales": np.array([1, 1, stride], np.float32),
    }
    shape = ("batch", 1, "samples")
    return make_model(nodes, [tensor("sound", shape)], [tensor("out", shape)], constants)


def saved(directory: Path, model: onnx.ModelProto) -> str:
    path = directory / "net.onnx"
    onnx.save(model, path)
    return str(path)


def chosen_of(network: Network) -> ChosenSizes:
    assert network.chosen is not None
    return network.chosen


def test_axes_of_one_name_get_the_same_sizes(tmp_path: Path) -> None:
    path = saved(tmp_path, text_model())
    network = load_network(path, input_shapes={"ids": [1, "16..512"], "mask": [1, "16..512"]})
    sizes = [use.size for use in chosen_of(network).uses]
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == 512
    assert 2 <= len(sizes) <= MAX_SIZES
    assert [spec.shape for size in network.sizes for spec in size.inputs] == [(1, n) for n in sizes for _ in range(2)]
    assert network.inputs == tuple(TensorSpec(name, (1, OPEN), "int64") for name in ("ids", "mask"))
    alone = load_network(path, input_shapes={"ids": [1, "16..512"]})  # the mask follows
    assert alone.sizes == network.sizes
    given_ = {"ids": [1, sizes], "mask": [1, sizes]}
    assert chosen_of(network).input_shapes == given_
    assert load_network(path, input_shapes=given_).sizes == network.sizes


def test_axes_without_a_name_go_together(tmp_path: Path) -> None:
    model = text_model(names=("ids_tokens", "mask_tokens"))
    for value in model.graph.input:
        value.type.tensor_type.shape.dim[1].ClearField("dim_param")
    network = load_network(saved(tmp_path, model), input_shapes={name: [1, "8..32"] for name in ("ids", "mask")})
    assert all(size.inputs[0].shape == size.inputs[1].shape for size in network.sizes)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"ids": [1, "512..16"]}, "dimension 1 of 'ids' .* the range '512..16', which ends before it begins; write"),
        ({"ids": [1, "0..5"]}, "begins below 1; begin with the shortest request"),
        ({"ids": [1, "16..16"]}, "has one size; write 16"),
        ({"ids": [1, "16.."]}, "'16..', which is no range; write its first and its last size"),
        ({"ids": [1, "..16"]}, "which is no range"),
        ({"ids": [1, "a..b"]}, "which is no range"),
        ({"ids": [1, "-4..8"]}, "which is no range"),
        ({"ids": [1, "4..8..16"]}, "which is no range"),
        (
            {"ids": [1, "1..1000000"]},
            "ends at 1000000 times its beginning, .*; give one that ends at 1024 times at most",
        ),
        ({"ids": [1, "999999999..99999999999"]}, "would take .* GiB, and 8 GiB are the most"),
        (
            {"ids": ["1..4", "16..64"]},
            "ranges batch of ids 1..4, tokens of ids 16..64; axes that .* give lists of sizes",
        ),
        (
            {"ids": [1, "16..64"], "mask": [1, "16..128"]},
            "tokens of ids 16..64, tokens of mask 16..128; .* the same for",
        ),
        ({"ids": [[1, 2], "16..64"]}, "ranges and lists of sizes; give lists alone"),
        ({"words": [1, "16..64"]}, "names 'words', which is not an input"),
        ({"ids": ["16..64"]}, r"gives 'ids' of .* 1 dimensions \[64\], but it has 2"),
    ],
)
def test_ranges_that_are_none(tmp_path: Path, shapes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserInputError, match=message) as caught:
        load_network(saved(tmp_path, text_model()), input_shapes=shapes)
    assert "\n" not in str(caught.value)


def test_a_range_is_for_an_open_axis_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(
        UserInputError, match=r"'1\.\.4', but the file says that it is 1; give ranges to dynamic axes alone"
    ):
        load_network(saved(tmp_path, sound_model()), input_shapes={"sound": [1, "1..4", 64]})
    with pytest.raises(UserInputError, match="bert-tiny several sizes, but its graph is made for one; give an ONNX"):
        load_network("bert-tiny", input_shapes={"input_ids": [1, "16..64"]})


def test_a_parameter_may_be_a_range() -> None:
    options = load_options(TuneOptions, {"input_shapes": '{"ids": ["1", "16..512"], "other": [[2, 3]]}'})
    assert options.input_shapes == {"ids": [1, "16..512"], "other": [[2, 3]]}
    assert load_options(TuneOptions, options.changed()) == options
    with pytest.raises(
        UserInputError, match=r'must be a JSON object of shapes, such as .* or \{"ids": \[1, "16\.\.512"'
    ):
        load_options(TuneOptions, {"input_shapes": '{"ids": [1, "16-512"]}'})


def test_sizes_that_the_network_does_not_take_are_not_chosen(tmp_path: Path) -> None:
    path = saved(tmp_path, sound_model(stride=32))
    uses = chosen_of(load_network(path, input_shapes={"sound": [1, 1, "50..320"]})).uses
    assert all(use.size % 32 == 0 for use in uses)
    assert uses[0].shortest == 50
    with pytest.raises(UserInputError, match=r"^with 330, where the range ends, .* do not fit together"):
        load_network(path, input_shapes={"sound": [1, 1, "50..330"]})
    with pytest.raises(UserInputError, match=r'the range "290..320", of which it takes 320 alone; give that size'):
        load_network(path, input_shapes={"sound": [1, 1, "290..320"]})


def choose(first: int, last: int, cost: Any) -> ChosenSizes:
    given_ = {"x": [f"{first}..{last}"]}
    return choose_sizes("net", {"x": ("n",)}, given_, lambda shapes: float(cost(shapes["x"][0])))


@given(first=st.integers(1, 40), width=st.integers(1, 60), constant=st.floats(0, 100), square=st.floats(0, 1))
def test_no_other_sizes_lose_less(first: int, width: int, constant: float, square: float) -> None:
    """Others of the same candidates, as many, lose no less: some two hundred are tried, at even distances."""
    costs: dict[int, float] = {}

    def cost(length: int) -> float:
        return costs.setdefault(length, constant + length + square * length**2)

    found = choose(first, first + width, cost)
    lengths = sorted(costs)
    estimates = [costs[length] for length in lengths]

    def loss(sizes: tuple[int, ...]) -> float:
        uses = size_uses(sizes, lengths, estimates, first)
        weights = [np.log((use.size + 0.5) / (use.shortest - 0.5)) for use in uses]
        return float(np.average([use.mean_loss for use in uses], weights=weights))

    sizes = tuple(use.size for use in found.uses)
    others = [(*some, lengths[-1]) for some in combinations(lengths[:-1], len(sizes) - 1)]
    assert loss(sizes) <= min(map(loss, others[:: 1 + len(others) // 200])) + 0.01
    assert loss(sizes) == pytest.approx(found.mean_loss, abs=0.01)
    assert max(use.worst_loss for use in found.uses) >= found.mean_loss >= 0


def test_sizes_are_where_the_cost_jumps() -> None:
    def steps(length: int) -> int:
        return 1 if length <= 48 else 10 if length <= 192 else 100

    assert [use.size for use in choose(16, 512, steps).uses] == [48, 192, 512]
    assert len(choose(16, 512, lambda length: 1e6 + length).uses) == 2  # nothing is gained by more
    linear = choose(16, 512, lambda length: length)
    assert len(linear.uses) == MAX_SIZES
    assert choose(16, 512, lambda _: 1) == linear  # an estimate that does not grow knows nothing
    assert [use.size for use in choose(7, 8, lambda length: length).uses] == [7, 8]


def test_a_use_is_what_its_requests_lose() -> None:
    small, large = size_uses([2, 4], [1, 2, 3, 4], [1.0, 2.0, 3.0, 4.0], 1)
    assert (small.shortest, small.worst_loss) == (1, 1.0)
    assert (large.shortest, large.worst_loss) == (3, pytest.approx(1 / 3))
    assert large.mean_loss == pytest.approx(np.log(3.5 / 2.5) / np.log(4.5 / 2.5) / 3, abs=0.01)


def test_few_tokens_cost_what_the_weights_take_to_read(tmp_path: Path) -> None:
    def cost(length: int) -> float:
        return estimated_cost(load_network(path, input_shapes={"ids": [1, length]}).model)

    path, weight_bytes = saved(tmp_path, text_model()), 4 * WIDTH**2
    assert cost(2) == pytest.approx(MIN_FLOPS + 8 * weight_bytes, rel=0.01)
    assert cost(512) - cost(256) == pytest.approx(2 * 256 * WIDTH**2, rel=0.01)


def test_a_plan_says_what_requests_lose(tmp_path: Path) -> None:
    options = PlanOptions(network=saved(tmp_path, text_model()), input_shapes={"ids": [1, "16..64"]})
    plan = plan_tuning(options)
    assert plan.sizes is not None
    text = plan._repr_html_()
    for use in plan.sizes.uses:
        assert f"{use.shortest}..{use.size}" in text
    assert "serve 16..64 (tokens of ids)" in text
    assert f"{plan.sizes.mean_loss:.0%} longer than without on average" in text


def packed(directory: Path, network: Network, target: Target, pad: dict[str, float]) -> Path:
    """The network, compiled with the sketches' own choice, as a model."""
    lowered = lower_sizes(network.models(), target, LoweringSettings(), network.name)
    onnx.save(network.model, directory / "network.onnx")
    compiled = compiled_untuned(network, lowered, target, directory)
    flavor.save_model(replace(compiled, network=directory / "network.onnx", pad=pad), str(directory / "model"))
    return directory / "model"


def test_every_request_of_the_range_is_served(tmp_path: Path, host_target: Target) -> None:
    path = saved(tmp_path, text_model())
    network = load_network(path, input_shapes={"ids": [1, "4..32"]})
    directory = packed(tmp_path, network, host_target, {"ids": 0, "mask": 0})
    signature = mlflow.models.get_model_info(str(directory)).signature
    assert [spec.shape for spec in signature.inputs.inputs] == [(-1, -1), (-1, -1)]
    model, reference = load_package(directory, Manifest.read(directory)), ReferenceSession(Path(path), 1)
    rng = np.random.default_rng(0)
    for length in range(4, 33):
        inputs = {"ids": rng.integers(0, NUM_WORDS, (1, length)), "mask": rng.integers(0, 2, (1, length))}
        assert compare_outputs(model.run(inputs), reference.run(inputs)).max_rel_error < 1e-5
    with pytest.raises(UserInputError, match="none is as large"):
        model.run({name: np.zeros((1, 33), np.int64) for name in ("ids", "mask")})


def test_sound_is_not_padded_where_that_changes_its_end(tmp_path: Path, host_target: Target) -> None:
    path = saved(tmp_path, sound_model())
    network = load_network(path, input_shapes={"sound": [1, 1, "200..400"]})
    reference = ReferenceSession(Path(path), 1)
    directory = packed(tmp_path, network, host_target, {"sound": 0})
    model, manifest = load_package(directory, Manifest.read(directory)), Manifest.read(directory)

    def compare(examples: Any) -> Deviation:
        return Deviation.worst([compare_outputs(model.run(inputs), reference.run(inputs)) for inputs in examples])

    with pytest.raises(CorrectnessError, match="padding sound of net changes its outputs"):
        require_harmless_padding(manifest, compare, 1e-4, seed=0)
    exact = tmp_path / "exact"
    exact.mkdir()
    only_sizes = load_package(packed(exact, network, host_target, {}), Manifest.read(exact / "model"))
    sizes = [use.size for use in chosen_of(network).uses]
    inputs = {"sound": np.random.default_rng(0).normal(size=(1, 1, sizes[0])).astype(np.float32)}
    assert compare_outputs(only_sizes.run(inputs), reference.run(inputs)).max_rel_error < 1e-5
    example = json.dumps({"sound": 0})
    with pytest.raises(UserInputError) as caught:
        only_sizes.run({"sound": inputs["sound"][..., 1:]})
    assert f"compiled for sound {', '.join(f'1×1×{size}' for size in sizes)}; pad them" in str(caught.value)
    assert str(caught.value).endswith(f"compile it with pad, such as {example}")
