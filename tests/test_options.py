"""Parameters: types, defaults, rules, files and command lines; a typo is an error before anything heavy is loaded."""

from __future__ import annotations

import json
import re
import resource
import sys
from pathlib import Path
from typing import Any

import click
import mlflow
import numpy as np
import pytest
from click.testing import CliRunner
from helpers.commands import ANSOR_MLFLOW, ENTRY_POINTS, environment, run
from hypothesis import given
from hypothesis import strategies as st

import ansor_mlflow
from ansor_mlflow.cli.command import checked_options, command
from ansor_mlflow.cli.main import cli
from ansor_mlflow.errors import UserInputError
from ansor_mlflow.parameters import (
    CompileOptions,
    EvaluateOptions,
    NetworkOptions,
    Options,
    PipelineOptions,
    PlanOptions,
    PromoteOptions,
    SweepOptions,
    TuneOptions,
    as_text,
    declared,
    default_text,
    load_options,
    read_settings,
)
from ansor_mlflow.parameters.config import GONE_PARAMETERS

OPTION_CLASSES = list(ENTRY_POINTS.values())
REQUIRED = {
    EvaluateOptions: {"model_uri": "models:/m/1"},
    PromoteOptions: {"model": "m"},
    SweepOptions: {"sweep": "s.yaml"},
}


def write_config(directory: Path, text: str) -> str:
    path = directory / "config.yaml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("network", "net.onnx", "net.onnx"),
        ("input_shapes", '{"data": [1, 3, 224, 224], "flag": []}', {"data": [1, 3, 224, 224], "flag": []}),
        ("input_values", '{"sr": 16000, "on": [[true, 0.5]]}', {"sr": 16000, "on": [[True, 0.5]]}),
        ("layout", "NCHW", "NCHW"),
        ("num_threads", "2", 2),
        ("num_threads", "auto", "auto"),
        ("max_minutes", "0.5", 0.5),
        ("measure_timeout_s", "5", 5.0),
        ("cache_flush", "true", True),
        ("cost_model", "none", "none"),
    ],
)
def test_text_becomes_a_value(name: str, text: str, value: Any) -> None:
    options = load_options(TuneOptions, {name: text})
    assert getattr(options, name) == value
    assert type(getattr(options, name)) is type(value)


@pytest.mark.parametrize(
    ("given_rivals", "rivals", "text"),
    [
        ("auto", "auto", "auto"),
        ("none", "none", "none"),
        ("openvino", ("openvino",), "openvino"),
        ("openvino, onnxruntime", ("openvino", "onnxruntime"), "openvino,onnxruntime"),
        (["torch"], ("torch",), "torch"),
    ],
)
def test_rivals(given_rivals: Any, rivals: Any, text: str) -> None:
    options = load_options(PipelineOptions, {"rivals": given_rivals})
    assert options.rivals == rivals
    assert as_text(options.rivals) == text


@pytest.mark.parametrize("given_rivals", ["openvino,", []])
def test_rivals_that_are_none(given_rivals: Any) -> None:
    message = r"it must be auto, none, or some of onnxruntime, openvino and torch, separated by commas"
    with pytest.raises(UserInputError, match=message):
        load_options(PipelineOptions, {"rivals": given_rivals})


@pytest.mark.parametrize("cls", OPTION_CLASSES)
def test_default_text_and_empty_text_mean_the_default(cls: type[Options]) -> None:
    required = REQUIRED.get(cls, {})
    default = load_options(cls, required)
    for given_values in (
        {name: default_text(cls, name) for name in cls.model_fields},
        dict.fromkeys(cls.model_fields, ""),
        dict.fromkeys(cls.model_fields, None),
    ):
        assert load_options(cls, {**given_values, **required}) == default


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("input_shapes", "{"),
        ("input_shapes", '{"data": 3}'),
        ("input_shapes", '{"data": [1, 0]}'),
        ("input_values", '{"sr": "16000"}'),
        ("input_values", '{"sr": null}'),
        ("input_values", json.dumps({"mask": [1] * 3_000})),
        ("input_values", '{"sr": [{}]}'),
        ("batch_size", "0"),
        ("batch_size", "1.5"),
        ("layout", "nhwc"),
        ("num_threads", "0"),
        ("trials", "-1"),
        ("preset", "fast"),
        ("max_minutes", "0"),
        ("max_minutes", "inf"),
        ("strategy", "genetic"),
        ("seed", "-1"),
        ("seed", str(2**31)),
        *(("build_workers", text) for text in ("0", "-1", "2.5", "some")),
        ("min_repeat_ms", "-1"),
        ("measure_timeout_s", "0"),
        ("cache_flush", "maybe"),
        ("tolerance", "0"),
    ],
)
def test_a_value_that_breaks_its_rule(name: str, text: str) -> None:
    with pytest.raises(UserInputError) as caught:
        load_options(PipelineOptions, {name: text})
    expected = UserInputError(f"{name}={text!r}: it must be {declared(PipelineOptions, name)['rule']}")
    assert str(caught.value) == str(expected)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("alias", text) for text in ("v1", "V12", "7", "latest", "Latest", "a b", "a/b", "ä")),
        *(("min_improvement", text) for text in ("-1%", "100%", "1", "some", "nan")),
        *(("confidence", text) for text in ("100%", "1", "0.4", "nan")),
    ],
)
def test_a_value_that_breaks_a_rule_of_promotions(name: str, text: str) -> None:
    with pytest.raises(UserInputError) as caught:
        load_options(PromoteOptions, {"model": "m", name: text})
    assert str(caught.value) == f"{name}={text!r}: it must be {declared(PromoteOptions, name)['rule']}"


@pytest.mark.parametrize("text", ["ray", "ray://10.0.0.1:10001"])
def test_a_value_that_is_gone_says_what_to_give_instead(text: str) -> None:
    with pytest.raises(UserInputError, match=f"build_workers='{text}': candidates are built on this host, .*give auto"):
        load_options(TuneOptions, {"build_workers": text})


def test_a_share_may_be_a_percentage() -> None:
    given = {"model": "m", "min_improvement": "3%", "confidence": "99%", "alias": "v1-champion"}
    options = load_options(PromoteOptions, given)
    assert (options.min_improvement, options.confidence, options.alias) == (0.03, 0.99, "v1-champion")


def test_a_parameter_that_must_be_given() -> None:
    with pytest.raises(UserInputError, match="model_uri='': it must be models:/…, runs:/… or a model's directory"):
        load_options(EvaluateOptions, {})


@pytest.mark.parametrize("cls", OPTION_CLASSES)
def test_every_parameter_has_help_and_a_rule(cls: type[Options]) -> None:
    for name, field in cls.model_fields.items():
        assert (field.description or "").endswith("."), name
        assert declared(cls, name)["rule"], name


@pytest.mark.parametrize(("text", "runs"), [("", ()), ("a", ("a",)), (" a,", ("a",)), ("a,b,a", ("a", "b"))])
def test_tuning_runs_are_named_once(text: str, runs: tuple[str, ...]) -> None:
    assert CompileOptions(network="resnet-18", tune_run=text).tune_runs == runs


def test_file_replaces_defaults_and_the_command_line_replaces_the_file(tmp_path: Path) -> None:
    config = write_config(tmp_path, "trials: 640\nnetwork: resnet-50\ninput_shapes: {data: [1, 3, 64, 64]}\n")
    options = load_options(TuneOptions, {"trials": "128", "network": "", "seed": "7"}, config)
    assert (options.trials, options.network, options.seed) == (128, "resnet-50", 7)
    assert options.input_shapes == {"data": [1, 3, 64, 64]}


def test_a_default_on_the_command_line_does_not_replace_the_file(tmp_path: Path) -> None:
    config = write_config(tmp_path, "trials: 640\n")
    assert load_options(TuneOptions, {"trials": default_text(TuneOptions, "trials")}, config).trials == 640


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trails: 640", r"unknown key 'trails'; perhaps you meant trials"),
        ("xyzzy: 1", r"unknown key 'xyzzy'; known are seed, network, .*cache_flush"),
        ("7: 1", r"unknown key 7; known are"),
        ("", r"expected a mapping"),
        ("trials: [", r"the file is not valid YAML \("),
    ],
)
def test_file_that_is_not_usable(tmp_path: Path, text: str, message: str) -> None:
    config = write_config(tmp_path, text)
    with pytest.raises(UserInputError, match=f"config={config}: {message}") as caught:
        load_options(TuneOptions, {}, config)
    assert "\n" not in str(caught.value)


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(
        UserInputError, match=r"the file cannot be read \(No such file or directory\); give a YAML file"
    ):
        load_options(TuneOptions, {}, str(tmp_path / "missing.yaml"))
    with pytest.raises(UserInputError, match="Is a directory"):
        load_options(TuneOptions, {}, str(tmp_path))
    (tmp_path / "latin.yaml").write_bytes(b"network: caf\xe9\n")
    with pytest.raises(UserInputError, match="the file is not valid YAML"):
        load_options(TuneOptions, {}, str(tmp_path / "latin.yaml"))


def test_value_in_a_file_that_breaks_its_rule(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="trials=-1: it must be a whole number, 0 or more, or auto"):
        load_options(TuneOptions, {}, write_config(tmp_path, "trials: -1"))
    with pytest.raises(UserInputError, match="trials=None: it must be"):
        load_options(TuneOptions, {}, write_config(tmp_path, "trials:"))


def test_a_mapping_of_a_group_is_its_parameters(tmp_path: Path) -> None:
    config = write_config(tmp_path, "measure: {number: 5, timeout_s: 7}\nsearch: {strategy: random}\n")
    options = load_options(TuneOptions, {"measure": {"repeat": 2}}, config)
    assert (options.number, options.repeat, options.measure_timeout_s, options.strategy) == (5, 2, 7.0, "random")
    assert options.measure == "network"
    assert load_options(TuneOptions, {}, write_config(tmp_path, "measure: warm")).measure == "warm"


def test_settings_of_the_command_line() -> None:
    text = "measure.number=5,search.strategy=random,link.cc=clang++ -Wl,-s"
    assert read_settings(TuneOptions, text) == {"number": "5", "strategy": "random", "cc": "clang++ -Wl,-s"}
    assert read_settings(TuneOptions, "") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("repeat", r"set='repeat': it must be GROUP\.KEY=VALUE, such as measure\.repeat=3"),
        ("repeat=3", r"set: unknown key 'repeat'; perhaps you meant measure\.repeat"),
        ("measure.repaet=3", r"set: unknown key 'measure\.repaet'; perhaps you meant measure\.repeat"),
        ("fleet.colour=red", r"set: unknown key 'fleet\.colour'; known are lower\.layout, "),
    ],
)
def test_settings_that_are_none(text: str, message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        read_settings(TuneOptions, text)


@pytest.mark.parametrize("name", GONE_PARAMETERS)
def test_a_parameter_that_is_gone_says_what_to_use(name: str) -> None:
    assert load_options(TuneOptions, {name: ""}) == TuneOptions()
    with pytest.raises(UserInputError, match=f"^{name} is gone: "):
        load_options(TuneOptions, {name: "x"})


def run_command_line(*args: str) -> TuneOptions:
    found: list[TuneOptions] = []
    group = click.Group("cli")

    @command(group, "tune")
    def tune(options: TuneOptions) -> None:
        found.append(options)

    group.main(["tune", *args], standalone_mode=False)
    return found[0]


def test_an_experts_parameter_has_a_key_and_its_old_flags() -> None:
    by_key = run_command_line("--set", "measure.timeout_s=7", "--set", "measure.cache_flush=true")
    assert by_key == TuneOptions(measure_timeout_s=7.0, cache_flush=True)
    assert run_command_line("--measure-timeout-s", "7", "--cache-flush") == by_key
    assert run_command_line("--measure_timeout_s", "7", "--cache_flush", "true") == by_key


counts = st.integers(1, 10**9)
positive = st.floats(min_value=0, exclude_min=True, allow_infinity=False, allow_nan=False)
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "network": texts,
    "input_shapes": st.dictionaries(st.text(), st.lists(counts, max_size=4), max_size=3),
    "input_values": st.dictionaries(st.text(), st.lists(counts, max_size=2) | st.booleans() | positive, max_size=3),
    "batch_size": counts,
    "layout": st.sampled_from(["NHWC", "NCHW"]),
    "target": texts,
    "num_threads": counts | st.just("auto"),
    "trials": counts | st.just("auto"),
    "preset": st.sampled_from(["quick", "standard", "thorough"]),
    "trials_per_task": counts,
    "max_minutes": positive,
    "strategy": st.sampled_from(["evolutionary", "random"]),
    "cost_model": st.sampled_from(["xgb", "mlp", "random", "none"]),
    "seed": st.integers(0, 2**31 - 1),
    "min_repeat_ms": st.integers(0, 10**6),
    "measure_timeout_s": positive,
    "cache_flush": st.booleans(),
}


@given(st.fixed_dictionaries({}, optional=VALUES))
def test_what_changed_makes_the_same_options_again(values: dict[str, Any]) -> None:
    options = TuneOptions(**values)
    changed = options.changed()
    assert load_options(TuneOptions, changed) == options
    assert set(changed) <= set(values)
    assert all(changed[name] != default_text(TuneOptions, name) for name in changed)


def test_arrays_are_values_of_inputs() -> None:
    options = TuneOptions(input_values={"sr": np.int64(16_000), "mask": np.ones((1, 2), bool)})
    assert options.changed()["input_values"] == '{"sr": 16000, "mask": [[true, true]]}'


HEAVY = {"mlflow", "tvm", "pandas", "matplotlib", "scipy", "xgboost"}
RUN_ID = "0" * 32
TYPOS = [
    ("tune --network resnet18", "network='resnet18' is neither a built-in .*; perhaps you meant resnet-18"),
    ("plan --network conv2d:1,7,7", "conv2d takes 9 numbers, 3 were given; write conv2d:N,H,W"),
    ("main --network conv2d:1,7,7,8,8,9,9,1,0", "the kernel spans 9 along H, but the padded image only 7"),
    ("main --network conv2d:1,7,7,8,8,3,3,1,1,groups=3", "CI=8 and CO=8 must be multiples of groups=3"),
    ("plan --network dense:1,99999,99999", "its weights .* take more than 2 GiB"),
    ("compile --network missing.onnx", r"network=missing\.onnx: the file cannot be read \(No such file"),
    (f"explain {RUN_ID} --network resnet-17", "perhaps you meant resnet-18"),
    (f"records verify {RUN_ID} --network danse:1,2,3", "there is no operator 'danse'; perhaps you meant dense"),
    ("evaluate --model-uri missing", "model_uri='missing': it must be models:/…, runs:/… or a model's directory"),
    ("tune --config missing.yaml", r"config=missing\.yaml: the file cannot be read"),
    ("tune --strategy genetic", "strategy='genetic': it must be evolutionary or random"),
    ("main --num-trails 4", "No such option"),
]


ONE_AFTER_THE_OTHER = f"""
import sys
from ansor_mlflow.cli import main
for line in sys.argv[1:]:
    try:
        main(line.split())
    except SystemExit as err:
        assert err.code == 2, line
assert not {HEAVY} & set(sys.modules)
"""


def test_typos_are_answered_before_anything_heavy_is_loaded(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ONE_AFTER_THE_OTHER, *(arguments for arguments, _ in TYPOS)]
    finished = run(command, tmp_path, environment("sqlite:///mlflow.db"))
    assert finished.exit_code == 0, finished.stderr
    for (_, message), error in zip(TYPOS, finished.errors, strict=True):
        assert re.search(message, error)
    assert list(tmp_path.iterdir()) == []


def test_a_typo_takes_less_than_two_seconds(tmp_path: Path) -> None:
    """Of this process's time: how long it waits for a CPU is up to the other ones."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run([ANSOR_MLFLOW, "tune", "--network", "resnet18"], tmp_path, environment("")).exit_code == 2
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


@pytest.mark.usefixtures("experiment_id")
def test_the_python_door_opens_no_run_for_a_typo(new_experiment: str) -> None:
    with pytest.raises(UserInputError, match="perhaps you meant resnet-18"):
        ansor_mlflow.tune("resnet18")
    assert mlflow.MlflowClient().search_runs([new_experiment]) == []


@pytest.mark.parametrize(
    ("cls", "given"),
    [
        (TuneOptions, {"network": "gone.onnx", "resume_run": RUN_ID}),
        (PipelineOptions, {"network": "gone.onnx", "resume_run": RUN_ID}),
        (CompileOptions, {"network": "gone.onnx", "tune_run": RUN_ID}),
        (PlanOptions, {"network": "gone.onnx", "tune_run": RUN_ID}),
        (TuneOptions, {"network": "models:/nobody/1"}),
        (PlanOptions, {"network": "model"}),
    ],
)
def test_a_network_that_a_run_or_a_model_has_is_left_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cls: type[NetworkOptions], given: dict[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    assert checked_options(cls, given).network == given["network"]


ROOT = Path(__file__).parents[1]


def test_the_reference_of_parameters_is_up_to_date() -> None:
    result = CliRunner().invoke(cli, ["parameters"])
    assert result.output == (ROOT / "docs" / "parameters.md").read_text(), (
        "run: ansor-mlflow parameters > docs/parameters.md"
    )


def test_help_explains_every_parameter() -> None:
    result = CliRunner().invoke(cli, ["tune", "--help"])
    assert result.exit_code == 0
    assert "--num-threads VALUE" in result.output
    assert "[default: resnet-18]" in " ".join(result.output.split())
