"""What the documents name is there: variables, commands with their flags, exit codes, metrics, tags and files."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from helpers.commands import ENTRY_POINTS, ROOT
from mlflow import environment_variables
from mlflow.cli import cli as mlflow_cli

from ansor_mlflow import names
from ansor_mlflow.cli import cli
from ansor_mlflow.cli.main import main
from ansor_mlflow.errors import INTERRUPTED_EXIT_CODE, AnsorMlflowError
from ansor_mlflow.trials import TrialStatus

DOCUMENTS = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
S3_SETTINGS = {
    "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
    "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
    "MLFLOW_BOTO_CLIENT_ADDRESSING_STYLE": "path",
    "AWS_DEFAULT_REGION": "us-east-1",
}
IN_ONE_DOCUMENT = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)


def document(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text()


def lines_of_code(path: Path) -> Iterator[str]:
    """The command lines of a document: those of its blocks for a shell, and those within sentences."""
    text = path.read_text()
    for block in re.findall(r"^```bash\n(.*?)^```$", text, re.M | re.S):
        yield from block.replace("\\\n", " ").splitlines()
    yield from re.findall(r"`((?:ansor-mlflow|mlflow) [^`\n]+)`", text)


def words_of(line: str) -> list[str]:
    """The words of a command line up to a pipe, without what stands in for a value: `<run ID>`."""
    words = shlex.split(re.sub(r"<[^>]*>|…", "X", line), comments=True)
    while words and re.fullmatch(r"\w+=.*|nohup|nice", words[0]):
        del words[0]
    return words[: words.index("|")] if "|" in words else words


def called(words: list[str]) -> tuple[click.Command, list[str]] | None:
    """The command that words call, with those behind its name; None if it is none of ours or MLflow's."""
    groups: dict[str, click.Command] = {"ansor-mlflow": cli, "mlflow": mlflow_cli}
    if not words or words[0] not in groups:
        return None
    found, rest = groups[words[0]], words[1:]
    while isinstance(found, click.Group) and rest and not rest[0].startswith("-"):
        assert rest[0] in found.commands, f"{shlex.join(words)}: there is no {rest[0]}"
        found, rest = found.commands[rest[0]], rest[1:]
    return found, rest


@IN_ONE_DOCUMENT
def test_commands_and_their_flags(document: Path) -> None:
    for line in lines_of_code(document):
        words = words_of(line)
        if (call := called(words)) is None:
            continue
        found, rest = call
        flags = {flag for param in found.params for flag in (*param.opts, *param.secondary_opts)}
        given = {word.partition("=")[0] for word in rest if re.match(r"--?[a-zA-Z]", word)}
        assert given <= {*flags, "--help", "-h"}, line
        if words[:2] == ["mlflow", "run"]:
            entry_point = rest[rest.index("-e") + 1] if "-e" in rest else "main"
            passed = {rest[place + 1].partition("=")[0] for place, word in enumerate(rest) if word == "-P"}
            assert passed <= {*ENTRY_POINTS[entry_point].model_fields, "config"}, line


@IN_ONE_DOCUMENT
def test_variables_of_mlflow(document: Path) -> None:
    found = set(re.findall(r"\bMLFLOW_[A-Z0-9_]+", document.read_text()))
    assert {name for name in found if not hasattr(environment_variables, name)} <= {
        "MLFLOW_BOTO_CLIENT_ADDRESSING_STYLE",  # these are elsewhere in MLflow
        "MLFLOW_AUTOLOGGING_TESTING",
        "MLFLOW_PYFUNC_INFERENCE_CONFIG",
    }


def test_a_request_may_take_as_long_as_the_guide_says() -> None:
    timeout = environment_variables.MLFLOW_SCORING_SERVER_REQUEST_TIMEOUT
    assert f"A request may take {timeout.default} seconds; `{timeout.name}`" in document("serving")


def test_exit_codes() -> None:
    rows = {int(code) for code in re.findall(r"^\| (\d+) \|", document("errors"), re.M)}
    assert rows == {kind.exit_code for kind in (AnsorMlflowError, *AnsorMlflowError.__subclasses__())} | {
        INTERRUPTED_EXIT_CODE
    }


def values_of(constants: str) -> set[str]:
    return {value for name, value in vars(names).items() if re.fullmatch(constants, name)}


def test_tags_of_runs_models_and_versions() -> None:
    named = set(re.findall(r"`(ansor\.\w+)`", document("tracking") + document("promotion")))
    assert named == values_of("TAG_.*")


def test_metrics() -> None:
    (table,) = re.findall(r"^\| metric \|.*?\n\n", document("tracking"), re.M | re.S)
    first_column = re.findall(r"^\|(.*?)\|", table, re.M)
    listed = {name for cell in first_column for name in re.findall(r"`([\w<][\w/<>]*)`", cell)}
    families = {names.task_latency_us("<task>"), names.task_gflops("<task>")}
    families |= {
        names.rival_latency_ms("<rival>"),
        names.speedup_vs("<rival>"),
        names.server_metric("<server>", "trials"),
    }
    source = Path(str(names.__file__)).read_text()
    metrics = set(re.findall(r'^[A-Z_0-9]+ = "(.*)"', source[: source.index("# -- tags")], re.M))
    assert listed == metrics | families | {names.trials_with(status) for status in TrialStatus}


def test_files_of_a_run() -> None:
    text = "".join(map(document, ("tracking", "evaluate", "promotion", "records")))
    assert not {name for name in values_of(".*_(FILE|FIGURE|TABLE)") - {names.MODEL_FILE} if name not in text}


def test_what_other_s3_servers_than_amazons_need(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*S3_SETTINGS, "AWS_REGION", "MLFLOW_HTTP_REQUEST_MAX_RETRIES"):
        monkeypatch.setenv(name, "")  # so that it is as it was afterwards
        monkeypatch.delenv(name)
    monkeypatch.delenv("MLFLOW_S3_ENDPOINT_URL", raising=False)
    main(["networks"])
    assert not S3_SETTINGS.keys() & os.environ.keys()
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "3"
    monkeypatch.setenv("MLFLOW_S3_ENDPOINT_URL", "https://s3.example.com")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "5")
    main(["networks"])
    assert {name: os.environ[name] for name in S3_SETTINGS} == {**S3_SETTINGS, "AWS_DEFAULT_REGION": "eu-1"}
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "5"
    text = document("tracking")
    assert all(name in text and f"`{value}`" in text for name, value in S3_SETTINGS.items())
