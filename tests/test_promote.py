"""A version becomes the champion on evidence only, and every algorithm that this can end is told apart."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlflow
import numpy as np
import onnx
import pydantic_core
import pytest
from helpers.commands import ROOT, RunCommand
from helpers.served import compiled

from ansor_mlflow import flavor, names
from ansor_mlflow.commands import pipeline
from ansor_mlflow.errors import (
    AnsorMlflowError,
    CorrectnessError,
    MachineError,
    ModelError,
    NotFasterError,
    UndecidedError,
    UserInputError,
)
from ansor_mlflow.measuring import checking
from ansor_mlflow.measuring.checking import Deviation
from ansor_mlflow.model.package import CompiledNetwork
from ansor_mlflow.networks.graph import GraphBuilder
from ansor_mlflow.parameters import PipelineOptions, PromoteOptions
from ansor_mlflow.steps.promotion import contest
from ansor_mlflow.steps.promotion.contest import Contender, Promotion, PromotionOutcome
from ansor_mlflow.steps.promotion.promote import host_of, promote, roll_back, target_alias
from ansor_mlflow.tracking import registry
from ansor_mlflow.tracking.run import StepRun

if TYPE_CHECKING:
    from tvm.target import Target

NAME = "contested"
FAST, SLOW, WRONG, FOREIGN, OTHER_OUTPUT = "1", "2", "3", "4", "5"
"""Versions of the registered model."""
EQUAL = "6"
"""A copy of the first."""


@pytest.fixture(scope="session")
def fast_network(small_onnx: Path, host_target: Target, tmp_path_factory: pytest.TempPathFactory) -> CompiledNetwork:
    return compiled(onnx.load(small_onnx), host_target, tmp_path_factory.mktemp("fast"))


@pytest.fixture(scope="session")
def slow_network(
    fast_network: CompiledNetwork, host_target: Target, tmp_path_factory: pytest.TempPathFactory
) -> CompiledNetwork:
    """A network with the inputs and outputs of the small one, and a thousand times its work."""
    directory = tmp_path_factory.mktemp("slow")
    builder = GraphBuilder(seed=0)
    data = builder.conv("conv", builder.input("data", (1, 3, 16, 16)), (128, 3, 3, 3), padding=1)
    data = builder.relu("relu", builder.conv("conv2", data, (128, 128, 3, 3), padding=1))
    data = builder.node("Flatten", "flatten", builder.node("GlobalAveragePool", "pool", data), axis=1)
    builder.dense("logits", data, units=10, in_units=128)
    slow = compiled(builder.build("small", {"logits": (1, 10)}), host_target, directory)
    return replace(fast_network, network=slow.network, library=slow.library)


@pytest.fixture(scope="session")
def saved_models(
    fast_network: CompiledNetwork, slow_network: CompiledNetwork, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    foreign = replace(fast_network.fingerprint, machine="riscv64")
    renamed = tuple(replace(spec, name="scores") for spec in fast_network.outputs)
    models = {
        FAST: fast_network,
        SLOW: slow_network,
        WRONG: replace(fast_network, library=slow_network.library),
        FOREIGN: replace(fast_network, fingerprint=foreign),
        OTHER_OUTPUT: replace(fast_network, outputs=renamed),
        EQUAL: fast_network,
    }
    for version, model in models.items():
        flavor.save_model(model, str(directory / version), code_paths=[])
    return {version: directory / version for version in models}


@pytest.fixture
def client(
    saved_models: Mapping[str, Path], new_experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[mlflow.MlflowClient]:
    """A registry in which the models are versions without aliases; steps work in a directory of this test."""
    client = mlflow.MlflowClient()
    client.create_registered_model(NAME)
    for version, path in saved_models.items():
        assert str(client.create_model_version(NAME, source=path.as_uri()).version) == version
    monkeypatch.chdir(tmp_path)
    yield client
    client.delete_registered_model(NAME)


@pytest.fixture
def of_target(fast_network: CompiledNetwork) -> str:
    return target_alias(fast_network.fingerprint)


SetTimes = Callable[..., list[str]]


@pytest.fixture
def set_times(monkeypatch: pytest.MonkeyPatch) -> SetTimes:
    """Runs the models in this process, and lets the clock say what a test wants, with noise of 3 %.

    Takes milliseconds by version. Returns the versions in the order in which they are timed.
    """
    monkeypatch.setattr(checking, "in_child_process", lambda function, make_call, **_: function(make_call))

    def set_(times_ms: Mapping[str, float]) -> list[str]:
        rng = np.random.default_rng(0)
        timed: list[str] = []

        def median_ms(contender: Contender, *_: object) -> float:
            timed.append(contender.version)
            return float(times_ms[contender.version] * np.exp(rng.normal(0, 0.03)))

        monkeypatch.setattr(contest, "_median_ms", median_ms)
        return timed

    return set_


def decide(candidate: str, **options: Any) -> Promotion:
    return promote(PromoteOptions(model=NAME, candidate=candidate, **options))


def set_champion(client: mlflow.MlflowClient, version: str, *aliases: str) -> None:
    for alias in aliases:
        client.set_registered_model_alias(NAME, alias, version)


@pytest.mark.system
def test_the_faster_one_is_promoted(client: mlflow.MlflowClient, of_target: str) -> None:
    """The models run and are timed as users have it, in processes of their own."""
    set_champion(client, SLOW, "champion")
    won = decide(FAST, alias="champion", max_turns=4, measure_s=0.05)
    assert won.outcome is PromotionOutcome.PROMOTED
    (measured,) = won.contests
    assert measured.ratio.upper < 0.5
    assert (measured.champion, measured.ratio.num_turns, measured.same_network) == (SLOW, 4, False)
    assert registry.aliases_of(NAME) == {"champion": FAST, of_target: FAST}
    assert not Path(".ansor").exists()


@pytest.mark.parametrize(
    ("times_ms", "outcome", "error", "message"),
    [
        ({FAST: 10.0, EQUAL: 11.0}, PromotionOutcome.LOST, NotFasterError, r"\(lost\): it takes 1\.\d+ .*; tune it"),
        ({FAST: 10.0, EQUAL: 9.95}, PromotionOutcome.LOST, NotFasterError, r"must take less than 0\.800"),
        ({FAST: 10.0, EQUAL: 8.0}, PromotionOutcome.INCONCLUSIVE, UndecidedError, "after 16 turns.*more max_turns"),
    ],
)
def test_what_does_not_save_the_margin_is_not_promoted(
    client: mlflow.MlflowClient,
    of_target: str,
    set_times: SetTimes,
    times_ms: Mapping[str, float],
    outcome: PromotionOutcome,
    error: type[AnsorMlflowError],
    message: str,
) -> None:
    set_champion(client, FAST, of_target)
    set_times(times_ms)
    promotion = decide(EQUAL, max_turns=16, min_improvement=0.2)
    assert promotion.outcome is outcome
    assert registry.aliases_of(NAME) == {of_target: FAST}
    assert client.get_model_version(NAME, EQUAL).tags[names.TAG_PROMOTION] == outcome.value
    with pytest.raises(error, match=message):
        promotion.require_won()


def test_the_first_champion_needs_right_outputs_only(
    client: mlflow.MlflowClient, of_target: str, set_times: SetTimes
) -> None:
    timed = set_times({})
    promotion = decide(FAST, alias="champion")
    assert promotion.outcome is PromotionOutcome.NO_CHAMPION
    assert promotion.is_won
    assert promotion.reason == "its outputs are right, and there was no champion to compare it with"
    assert registry.aliases_of(NAME) == {"champion": FAST, of_target: FAST}
    assert timed == []
    assert 0 <= promotion.errors[FAST].max_rel_error <= 1e-4


@pytest.mark.parametrize("champion", ["", FAST])
def test_wrong_outputs_are_never_promoted(
    client: mlflow.MlflowClient, of_target: str, set_times: SetTimes, champion: str
) -> None:
    if champion:
        set_champion(client, champion, of_target)
    timed = set_times({})
    promotion = decide(WRONG)
    assert promotion.outcome is PromotionOutcome.WRONG
    assert promotion.errors[WRONG].max_rel_error > 1e-2
    assert registry.aliases_of(NAME) == ({of_target: FAST} if champion else {})
    assert timed == []
    with pytest.raises(CorrectnessError, match=r"contested is not champion-llvm.*\(wrong\): its outputs differ"):
        promotion.require_won()


def test_an_infinite_error_is_null_in_json(client: mlflow.MlflowClient, of_target: str, set_times: SetTimes) -> None:
    set_times({})
    promotion = replace(decide(WRONG), errors={WRONG: Deviation(math.inf, math.nan)})
    written = json.loads(pydantic_core.to_json(promotion, inf_nan_mode="null"), parse_constant=pytest.fail)
    assert written["errors"] == {WRONG: {"max_abs_error": None, "max_rel_error": None}}
    assert written["outcome"] == "wrong"


def test_the_champion_of_fewer_threads_is_another_one(client: mlflow.MlflowClient, tmp_path: Path) -> None:
    """A library for more CPUs than there are runs on those that there are."""
    candidate = Contender.of_version(NAME, FAST, tmp_path / "versions")
    entry = candidate.entry
    larger = replace(entry, fingerprint=replace(entry.fingerprint, num_threads=entry.fingerprint.num_threads + 64))
    assert host_of(replace(candidate, entry=larger)) == host_of(candidate)


def test_a_champion_that_does_not_run_here_is_not_replaced(
    client: mlflow.MlflowClient, of_target: str, set_times: SetTimes
) -> None:
    set_champion(client, FOREIGN, "champion")
    set_times({})
    promotion = decide(FAST, alias="champion")
    assert promotion.outcome is PromotionOutcome.NOT_MEASURABLE
    assert registry.aliases_of(NAME) == {"champion": FOREIGN}
    with pytest.raises(ModelError, match=r"the champion, version 4, cannot be compared on this host: .*riscv64"):
        promotion.require_won()
    assert decide(FAST).outcome is PromotionOutcome.NO_CHAMPION  # of this target alone
    assert registry.aliases_of(NAME) == {"champion": FOREIGN, of_target: FAST}


def test_who_serves_onnx_today_asks_whether_to_switch(
    client: mlflow.MlflowClient, of_target: str, set_times: SetTimes, run_here: RunCommand, capsys: Any
) -> None:
    timed = set_times({FAST: 5.0, "onnxruntime": 10.0})
    command = ["promote", "--model", NAME, "--candidate", FAST, "--champion", "onnxruntime"]
    assert run_here(*command, "--dry-run") == 0
    assert registry.aliases_of(NAME) == {}
    assert run_here(*command) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()[-4:]
    assert re.match(rf"promoted: version 1 of {NAME} is now .* of the time of ONNX Runtime$", first)
    assert re.match(r"medians of all turns: version 1 \d.* [mµ]?s, ONNX Runtime \d.* [mµ]?s$", second)
    assert registry.aliases_of(NAME) == {of_target: FAST}
    assert timed[:2] == ["onnxruntime", FAST]
    tags = client.get_model_version(NAME, FAST).tags
    assert client.get_run(tags[names.TAG_PROMOTION_RUN]).data.tags[names.TAG_PROMOTION_CHAMPION] == "onnxruntime"
    page = client.download_artifacts(tags[names.TAG_PROMOTION_RUN], names.PROMOTION_REPORT_FILE)
    assert "Latency: version 1 against ONNX Runtime" in Path(page).read_text()


def test_a_rival_is_beaten_beside_the_champion_and_not_in_its_place(
    client: mlflow.MlflowClient, of_target: str, set_times: SetTimes
) -> None:
    set_champion(client, FAST, of_target)
    timed = set_times({FAST: 5.0, EQUAL: 8.0, "openvino": 10.0})
    promotion = decide(EQUAL, champion="openvino")
    assert promotion.outcome is PromotionOutcome.LOST
    assert [contest.champion for contest in promotion.contests] == ["openvino", FAST]
    assert set(promotion.errors) == {EQUAL, "openvino", FAST}
    assert set(timed) == {EQUAL, "openvino", FAST}
    assert registry.aliases_of(NAME) == {of_target: FAST}


def test_the_champion_itself_may_be_slower_than_a_rival(
    client: mlflow.MlflowClient, of_target: str, set_times: SetTimes
) -> None:
    set_champion(client, FAST, of_target)
    set_times({FAST: 10.0, "onnxruntime": 5.0})
    promotion = decide(FAST, champion="onnxruntime")
    with pytest.raises(
        NotFasterError, match=rf"version 1 of {NAME} is {of_target} \(lost\): it takes .* ONNX Runtime,"
    ):
        promotion.require_won()
    assert registry.aliases_of(NAME) == {of_target: FAST}


def test_the_evidence_of_a_champion_stays_and_that_of_others_is_replaced(
    client: mlflow.MlflowClient, of_target: str, set_times: SetTimes
) -> None:
    set_champion(client, FAST, of_target)
    set_times({FAST: 10.0, EQUAL: 8.0})
    assert decide(EQUAL).outcome is PromotionOutcome.PROMOTED
    won = client.get_model_version(NAME, EQUAL).tags
    assert decide(EQUAL).outcome is PromotionOutcome.ALREADY_CHAMPION
    assert client.get_model_version(NAME, EQUAL).tags == won
    client.delete_registered_model_alias(NAME, of_target)
    assert decide(EQUAL).outcome is PromotionOutcome.NO_CHAMPION
    assert client.get_model_version(NAME, EQUAL).tags[names.TAG_PROMOTION] == "no_champion"


def test_a_champion_that_changes_meanwhile_stays(
    client: mlflow.MlflowClient, of_target: str, set_times: SetTimes, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_champion(client, FAST, of_target, "champion")
    timed = set_times({FAST: 10.0, EQUAL: 8.0})
    median_ms = contest._median_ms

    def meanwhile(contender: Contender, *others: Any) -> float:
        if not timed:  # another promotion ends while this one measures
            set_champion(client, SLOW, "champion")
        return median_ms(contender, *others)

    monkeypatch.setattr(contest, "_median_ms", meanwhile)
    promotion = decide(EQUAL, alias="champion")
    assert promotion.outcome is PromotionOutcome.OVERTAKEN
    assert registry.aliases_of(NAME) == {"champion": SLOW, of_target: FAST}
    with pytest.raises(UndecidedError, match=r"champion of contested pointed to version 1 when .* nothing was moved"):
        promotion.require_won()


def test_every_version_that_loses_an_alias_must_be_beaten(
    client: mlflow.MlflowClient, of_target: str, set_times: SetTimes
) -> None:
    set_champion(client, FAST, of_target)
    set_champion(client, SLOW, "champion")
    set_times({FAST: 10.0, SLOW: 5.0, EQUAL: 8.0})
    promotion = decide(EQUAL, alias="champion")
    assert promotion.outcome is PromotionOutcome.LOST
    assert [measured.champion for measured in promotion.contests] == [FAST, SLOW]
    assert registry.aliases_of(NAME) == {"champion": SLOW, of_target: FAST}


def test_another_interface_is_another_model(client: mlflow.MlflowClient, of_target: str, set_times: SetTimes) -> None:
    set_champion(client, FAST, of_target)
    set_times({})
    with pytest.raises(
        UserInputError, match=r"candidate=5: its outputs are scores: float32 \(1, 10\), those of .* are logits: .*; "
    ):
        decide(OTHER_OUTPUT)


def test_a_candidate_that_does_not_run_here(client: mlflow.MlflowClient, set_times: SetTimes) -> None:
    set_times({})
    with pytest.raises(ModelError, match="no library runs here"):
        decide(FOREIGN)


def test_outputs_are_checked_on_the_data_of_the_user(
    client: mlflow.MlflowClient, set_times: SetTimes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_times({})
    examples: list[np.ndarray] = []
    real = checking.reference_inference

    def reference_inference(*args: Any, **options: Any) -> Any:
        run = real(*args, **options)
        return lambda inputs: (examples.append(inputs["data"]), run(inputs))[1]

    monkeypatch.setattr(checking, "reference_inference", reference_inference)
    mine = np.random.default_rng(5).standard_normal((2, 3, 16, 16)).astype(np.float32)
    np.savez(tmp_path / "mine.npz", data=mine)
    promotion = decide(FAST, data=str(tmp_path / "mine.npz"), dry_run=True)
    assert promotion.is_won
    (given,) = mlflow.get_run(promotion.run_id).inputs.dataset_inputs
    assert (given.dataset.name, given.tags[0].value) == ("mine.npz", "evaluation")
    assert given.dataset.digest == hashlib.sha256((tmp_path / "mine.npz").read_bytes()).hexdigest()[:8]
    assert json.loads(given.dataset.schema)["mlflow_tensorspec"]["features"]
    np.testing.assert_array_equal(np.concatenate(examples), mine)


def test_the_tolerance_is_that_of_the_user(client: mlflow.MlflowClient, set_times: SetTimes) -> None:
    set_times({})
    assert decide(WRONG, tolerance=100.0, dry_run=True).outcome is PromotionOutcome.NO_CHAMPION


def test_the_evidence_is_a_run_and_tags_of_the_version(
    client: mlflow.MlflowClient, of_target: str, set_times: SetTimes
) -> None:
    set_champion(client, FAST, of_target)
    timed = set_times({FAST: 10.0, EQUAL: 8.0})
    promotion = decide(EQUAL, alias="champion")
    promotion.require_won()
    assert timed[:8] == [FAST, EQUAL, EQUAL, FAST] * 2
    assert promotion.errors.keys() == {FAST, EQUAL}
    assert registry.aliases_of(NAME) == {of_target: EQUAL, "champion": EQUAL}
    run = client.get_run(promotion.run_id)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "promote contested/6 · promoted"
    assert run.data.tags[names.TAG_STEP] == "promote"
    assert "min_improvement: 0.02\n" in mlflow.artifacts.load_text(f"runs:/{run.info.run_id}/{names.PARAMETERS_FILE}")
    metrics = run.data.metrics
    assert metrics[names.LATENCY_MS] == pytest.approx(8, rel=0.1)
    assert metrics[names.CHAMPION_LATENCY_MS] == pytest.approx(10, rel=0.1)
    assert metrics[names.LATENCY_RATIO_LOWER] < metrics[names.LATENCY_RATIO] < metrics[names.LATENCY_RATIO_UPPER] < 0.98
    assert metrics[names.MAX_REL_ERROR] <= 1e-4
    artifacts = {file.path for file in client.list_artifacts(promotion.run_id)}
    files = {names.PROMOTION_FILE, names.PROMOTION_REPORT_FILE, names.ENVIRONMENT_FILE, names.PARAMETERS_FILE}
    assert artifacts == files
    found = json.loads(mlflow.artifacts.load_text(f"runs:/{promotion.run_id}/{names.PROMOTION_FILE}"))
    assert (found["outcome"], found["contests"][0]["champion"]) == ("promoted", FAST)
    assert len(found["contests"][0]["candidate_ms"]) == metrics[names.NUM_TURNS]
    tags = run.data.tags
    assert tags[names.TAG_PROMOTION] == "promoted"
    assert tags[names.TAG_PROMOTION_CHAMPION] == FAST
    assert tags[names.TAG_PROMOTION_RATIO].startswith(f"{metrics[names.LATENCY_RATIO]:.4f} [")
    assert tags[names.TAG_PROMOTION_ALIASES] == f"{of_target} champion"
    of_version = {names.TAG_PROMOTION: "promoted", names.TAG_PROMOTION_RUN: promotion.run_id}
    assert client.get_model_version(NAME, EQUAL).tags == of_version


def test_the_report_shows_the_decision(client: mlflow.MlflowClient, of_target: str, set_times: SetTimes) -> None:
    set_champion(client, SLOW, of_target)
    set_times({FAST: 10.0, SLOW: 10.0})
    promotion = decide(FAST, max_turns=4, min_improvement=0.0, confidence=0.999)
    assert promotion.outcome is PromotionOutcome.INCONCLUSIVE
    page = mlflow.artifacts.load_text(f"runs:/{promotion.run_id}/{names.PROMOTION_REPORT_FILE}")
    for text in (
        f"Version 1 of contested is not {of_target}",
        "after 4 turns",
        "Version 2 is another network: speed was compared, not accuracy.",
        f">{promotion.contests[0].ratio.estimate:.3f}<",
        f">{promotion.contests[0].candidate_ms[3]:.4g}<",
        "wrong in at most 0.1 % of such comparisons",
        "ansor-mlflow promote --min-improvement 0.0 --model contested --candidate 1",
    ):
        assert text in page
    assert "://" not in page


def test_no_alias_moves_without_evidence(
    client: mlflow.MlflowClient, of_target: str, set_times: SetTimes, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_champion(client, FAST, of_target)
    set_times({FAST: 10.0, EQUAL: 8.0})

    def no_space(*_: Any) -> None:
        raise MachineError("no space is left")

    monkeypatch.setattr(StepRun, "log_artifacts", no_space)
    with pytest.raises(MachineError, match="no space is left"):
        decide(EQUAL)
    assert registry.aliases_of(NAME) == {of_target: FAST}


def test_a_dry_run_changes_nothing(client: mlflow.MlflowClient, of_target: str, set_times: SetTimes) -> None:
    set_champion(client, FAST, of_target)
    set_times({FAST: 10.0, EQUAL: 8.0})
    promotion = decide(EQUAL, dry_run=True)
    assert promotion.is_won
    assert promotion.headline == f"version 6 of contested would be {of_target}"
    assert registry.aliases_of(NAME) == {of_target: FAST}
    assert client.get_model_version(NAME, EQUAL).tags == {}
    tags = client.get_run(promotion.run_id).data.tags
    assert (tags[names.TAG_DRY_RUN], tags[names.TAG_PROMOTION]) == ("true", "promoted")


@pytest.mark.parametrize(
    ("candidate", "exit_code", "line"),
    [
        (EQUAL, 0, "promoted: version 6 of contested is now champion-llvm"),
        (SLOW, 9, "Error: version 2 of contested is not champion-llvm"),
        (WRONG, 7, "Error: version 3 of contested is not champion-llvm"),
        (FAST, 0, "already_champion: version 1 of contested is champion-llvm"),
        ("9", 2, "Error: cannot read candidate=9 of the registered model contested: "),
        ("", 2, "Error: candidate='': it must be the number of a version, or an alias"),
    ],
)
def test_exit_codes(
    client: mlflow.MlflowClient,
    of_target: str,
    set_times: SetTimes,
    run_here: RunCommand,
    capsys: pytest.CaptureFixture[str],
    candidate: str,
    exit_code: int,
    line: str,
) -> None:
    set_champion(client, FAST, of_target)
    set_times({FAST: 10.0, EQUAL: 5.0, SLOW: 20.0})
    assert run_here("promote", "--model", NAME, "--candidate", candidate) == exit_code
    captured = capsys.readouterr()
    assert any(text.startswith(line) for text in (captured.out + captured.err).splitlines())
    assert "Traceback" not in captured.err


@pytest.mark.parametrize("given", [["--dry-run"], ["--candidate", "1"]])
def test_a_rollback_takes_nothing_of_a_comparison(
    run_here: RunCommand, capsys: pytest.CaptureFixture[str], given: list[str]
) -> None:
    assert run_here("promote", "--model", NAME, "--alias", "champion", "--rollback", *given) == 2
    message = "measures nothing; leave one of them out"
    assert message in capsys.readouterr().err


def promotion_tags(client: mlflow.MlflowClient) -> dict[str, str]:
    tags = {version: client.get_model_version(NAME, version).tags for version in (FAST, SLOW, EQUAL)}
    return {version: found[names.TAG_PROMOTION] for version, found in tags.items() if names.TAG_PROMOTION in found}


def roll_back_here(alias: str = "champion") -> None:
    roll_back(PromoteOptions(model=NAME, alias=alias, rollback=True))


@pytest.mark.nightly
def test_the_tags_after_a_rollback_are_true(
    client: mlflow.MlflowClient, of_target: str, set_times: SetTimes, experiment_id: str
) -> None:
    set_times({FAST: 10.0, SLOW: 8.0, EQUAL: 6.0})
    decide(FAST, alias="champion")
    decide(SLOW, alias="champion")
    roll_back_here()
    assert promotion_tags(client) == {FAST: "no_champion", SLOW: "rolled_back"}
    runs = mlflow.search_runs(output_format="list")
    with pytest.raises(UserInputError, match=r"no version of contested had it before version 1, .* nothing was moved"):
        roll_back_here()
    assert len(mlflow.search_runs(output_format="list")) == len(runs)
    assert registry.aliases_of(NAME) == {"champion": FAST, of_target: FAST}
    assert promotion_tags(client) == {FAST: "no_champion", SLOW: "rolled_back"}
    decide(SLOW, alias="champion")
    assert promotion_tags(client) == {FAST: "no_champion", SLOW: "promoted"}
    roll_back_here()
    assert promotion_tags(client) == {FAST: "no_champion", SLOW: "rolled_back"}


def test_a_version_that_has_an_alias_again_is_not_rolled_back(
    client: mlflow.MlflowClient, of_target: str, set_times: SetTimes
) -> None:
    set_times({FAST: 10.0, SLOW: 8.0, EQUAL: 6.0})
    decide(FAST, alias="champion")
    decide(SLOW, alias="champion")
    decide(EQUAL)  # takes the alias of the target alone
    roll_back_here()
    assert registry.aliases_of(NAME) == {"champion": FAST, of_target: EQUAL}
    assert promotion_tags(client) == {FAST: "no_champion", SLOW: "rolled_back", EQUAL: "promoted"}
    roll_back_here(of_target)
    assert registry.aliases_of(NAME) == {"champion": FAST, of_target: SLOW}
    assert promotion_tags(client) == {FAST: "no_champion", EQUAL: "rolled_back"}
    assert names.TAG_PROMOTION_RUN not in client.get_model_version(NAME, SLOW).tags


def test_the_documented_commands(
    client: mlflow.MlflowClient,
    of_target: str,
    set_times: SetTimes,
    run_here: RunCommand,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Those of docs/promotion.md, in their order; version 2 is the faster one."""
    set_times({FAST: 10.0, SLOW: 5.0, "onnxruntime": 20.0})
    np.savez(tmp_path / "images.npz", data=np.zeros((2, 3, 16, 16), np.float32))
    text = (ROOT / "docs" / "promotion.md").read_text().replace("resnet-18", NAME)
    lines = [line for line in text.splitlines() if line.startswith("ansor-mlflow promote")]
    commands = [shlex.split(line)[1:] for line in lines]
    champions = []
    for command in commands:
        assert run_here(*command) == 0, command
        champions.append(registry.aliases_of(NAME).get("champion", ""))
    assert champions == [FAST, FAST, SLOW, FAST, FAST]
    assert "champion of contested points to version 1 again, it pointed to version 2" in capsys.readouterr().out
    run_id = client.get_model_version(NAME, SLOW).tags[names.TAG_PROMOTION_RUN]
    assert client.get_run(run_id).data.tags[names.TAG_PROMOTION] == "rolled_back"


def test_a_pipeline_promotes_registered_models_only(
    run_here: RunCommand, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_here("main", "--promote") == 2
    assert "promote=true: only a registered model has a champion; give register_as, too" in capsys.readouterr().err


def test_a_version_of_a_pipeline_that_loses_is_no_error(
    client: mlflow.MlflowClient, of_target: str, set_times: SetTimes
) -> None:
    set_champion(client, FAST, of_target)
    set_times({FAST: 10.0, EQUAL: 9.0})
    options = PipelineOptions(register_as=NAME, promote=True, alias="champion", min_improvement=0.2, seed=3)
    with mlflow.start_run() as parent:
        promotion = pipeline._promote(options, EQUAL)
    assert promotion.outcome is PromotionOutcome.LOST
    run = client.get_run(promotion.run_id)
    assert (run.info.status, run.data.tags["mlflow.parentRunId"]) == ("FINISHED", parent.info.run_id)
    params = run.data.params
    assert (params["alias"], params["min_improvement"], params["seed"]) == ("champion", "0.2", "3")
