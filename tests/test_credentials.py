"""What is shown has no credentials and no control characters, and commands that are shown still work."""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
import threading
from dataclasses import dataclass
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansor_mlflow.cli import write_json
from ansor_mlflow.cli.command import console, say, say_marked, show
from ansor_mlflow.commands.doctor import Check
from ansor_mlflow.errors import MachineError, one_line
from ansor_mlflow.foreign import PrintableFormatter, for_shell, printable, without_credentials
from ansor_mlflow.foreign.tables import Code, Report, Table, html_of
from ansor_mlflow.parameters import TuneOptions
from ansor_mlflow.tracking import command_lines, run_address, server_command

SECRET = "S3cr3tP"
PLACES = [
    "postgresql://mlflow:x/HIDE@db.example.com/mlflow",
    "postgresql://me@server:x/HIDE@db.example.com/mlflow",
    "postgresql://a b@server:x/HIDE@db.example.com/mlflow",
    "postgresql+psycopg2://me@server:HIDE@db.example.com:5432/mlflow (is away)",
    "https://me@example.com:x/HIDE@host/x",
    "postgresql+psycopg2://mlflow:x HIDE@db/mlflow",
    "mysql+pymysql://u:p@a/HIDE@db:3306/mlflow",
    "cannot reach https://u:a HIDE@host/x; check it",
    "http://u:5000/HIDE@host",
    "https://HIDE@host/x",
    "sqlite:///file:x.db?uri=true&password=HIDE",
    "(looked in postgresql:///m?host=/run&user=HIDE&password=HIDE); try again",
    "mssql+pyodbc:///?odbc_connect=DRIVER%3Dx%3BPWD%3DHIDE%3B",
    "https://acc.blob.core.windows.net/c?sv=2024&sig=HIDE%3D",
    "https://b.s3.amazonaws.com/k?X-Amz-Credential=HIDE%2F2&X-Amz-Security-Token=HIDE&X-Amz-Signature=HIDE",
    "https://b.s3.amazonaws.com/k?AWSAccessKeyId=HIDE&Signature=HIDE&Expires=1",
    "https://host/x?token=HIDE#part",
    "Authorization: Basic HIDE",
    'curl -H \'Authorization: Digest username="u", response="HIDE"\' https://host',
    "{'authorization': 'Bearer HIDE', 'Accept': '*/*'}",
    "authorization: AWS4-HMAC-SHA256 Credential=a/b, SignedHeaders=host, Signature=HIDE",
    "Bearer HIDEHIDE is no token",
    "X-Api-Key: HIDE",
    "x-amz-security-token: HIDE",
    "aws_secret_access_key = HIDE",
    "AWS_SECRET_ACCESS_KEY='a HIDE'",
    "export MLFLOW_TRACKING_TOKEN=HIDE",
    '{"password": "a \\" HIDE"}',
    "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=HIDE==;EndpointSuffix=x",
    "<AWSAccessKeyId>HIDE</AWSAccessKeyId><StringToSign>HIDE</StringToSign>",
    "mysql --password HIDE",
]
ORDINARY = [
    "http://127.0.0.1:5000/#/experiments/0/runs/7",
    "http://127.0.0.1:5000 has no models:/resnet@champion",
    "http://host:5000: no connection; ask a@b.c",
    "s3://bucket/a@2/b, file:///x y@z and sqlite:////home/me/a@b.db",
    "signature='foo': it must be tensor or binary",
    "ansor-mlflow tune --rpc-key pi4 -P rpc_key=pi4 -P signature=binary",
    '--input-shapes \'{"token": [1, 128], "token_type_ids": [1, 128]}\'',
    "at https://s3.example.com (host/bucket; credentials: env)",
    "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
]


@pytest.mark.parametrize("place", PLACES)
def test_a_secret_is_hidden_wherever_it_stands(place: str) -> None:
    text = place.replace("HIDE", SECRET)
    for shown in (without_credentials(text), one_line(ValueError(text)), str(MachineError(text))):
        assert SECRET not in shown
    assert without_credentials(without_credentials(text)) == without_credentials(text)


@pytest.mark.parametrize("text", ORDINARY)
def test_other_texts_stay_as_they_are(text: str) -> None:
    assert without_credentials(text) == text


def test_what_stands_between_two_uris_stays() -> None:
    text = "cannot read https://u:p@host/m: no connection (postgresql://u:p w@db/m is away)"
    expected = "cannot read https://…@host/m: no connection (postgresql://…@db/m is away)"
    assert without_credentials(text) == expected


@pytest.mark.parametrize("scheme", ["postgresql", "https"])
def test_a_token_of_thousands_of_characters_is_hidden(scheme: str) -> None:
    token = "eyJ" + "0aB-" * 2000
    shown = without_credentials(f"cannot reach {scheme}://u:{token}%2F@h/m: no answer")
    assert shown == f"cannot reach {scheme}://…@h/m: no answer"


@given(st.text(st.characters(exclude_characters="@…", exclude_categories=["Cs", "Cc"]), min_size=6).map(quote))
def test_any_password_of_a_uri_is_hidden(password: str) -> None:
    secret = f"{password}Zq9"
    for text in (f"postgresql://u:{secret}@h/m", f"cannot reach s3://k:{secret}@h/b", f"x://h/m?password={secret}&a=1"):
        assert "Zq9" not in without_credentials(text)


@given(st.text(min_size=1, max_size=300))
def test_hiding_and_showing_take_any_text(text: str) -> None:
    shown = printable(text)
    assert shown == printable(shown)
    assert "\x1b" not in shown


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("MLFLOW_TRACKING_PASSWORD", "hunter2x", "hunter2x"),
        ("AWS_SECRET_ACCESS_KEY", "a/b+c d=", "a/b+c d="),
        ("PGPASSWORD", "horse staple", "horse staple"),
        ("MLFLOW_TRACKING_URI", "postgresql://u:my p/w1@h/m", "my p/w1"),
        ("MLFLOW_REGISTRY_URI", "postgresql:///m?password=my p/w1", "my p/w1"),
    ],
)
def test_what_the_environment_keeps_secret_is_hidden_anywhere(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, secret: str
) -> None:
    monkeypatch.setenv(name, value)
    for text in (f"the driver says that {secret} is wrong", f"it asked for /x?a={quote(secret, safe='')}"):
        shown = without_credentials(text)
        assert secret not in shown
        assert "…" in shown


def test_ordinary_words_are_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "mlflow")
    monkeypatch.setenv("PWD", "/home/me")
    assert without_credentials("mlflow run /home/me") == "mlflow run /home/me"


def test_a_long_text_takes_no_time() -> None:
    for text in ("://a:" * 20_000, "secret" * 20_000, 'token":"' * 20_000, "@" * 100_000):
        without_credentials(text)


@pytest.mark.parametrize("uri", [f"postgresql://u:a/{SECRET}@h/m", f"sqlite:///x.db?password={SECRET}"])
def test_commands_name_a_variable_in_place_of_credentials(monkeypatch: pytest.MonkeyPatch, uri: str) -> None:
    monkeypatch.setattr("mlflow.get_tracking_uri", lambda: uri)
    word = server_command().removeprefix("mlflow server --backend-store-uri ")
    assert SECRET not in word
    shell = ["/bin/sh", "-c", f"printf %s {word}"]
    given = subprocess.run(shell, env={"MLFLOW_TRACKING_URI": uri}, capture_output=True, text=True, check=True)
    assert given.stdout == uri
    missing = subprocess.run(shell, env={}, capture_output=True, text=True, check=False)
    assert missing.returncode != 0
    assert "MLFLOW_TRACKING_URI" in missing.stderr


@pytest.mark.parametrize("entry_point", [0, 1])
def test_commands_that_do_a_step_again_have_what_they_were_given(entry_point: int) -> None:
    source, network = f"s3://u:a/{SECRET}@h/pool", "a b'$(id).onnx"
    line = command_lines("tune", TuneOptions(warm_start=source, network=network))[entry_point]
    assert SECRET not in line
    script = f"set -- {line}; printf '%s\\n' \"$@\""
    words = subprocess.run(
        ["/bin/sh", "-c", script], env={"WARM_START": source}, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert {source, network} <= set(words) | {word.partition("=")[2] for word in words}


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_a_word_of_a_command_is_one_word(text: str) -> None:
    word = for_shell(text, "NAME")
    assert word == '"${NAME:?is to have it, with its credentials}"' or shlex.split(word) == [text]


def test_the_address_of_a_page_has_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlflow.get_tracking_uri", lambda: f"http://u:a/{SECRET}@host:5000")
    assert run_address("1", "2") == "http://host:5000/#/experiments/1/runs/2?workflowType=machine_learning"


@dataclass
class Result:
    found: dict[str, list[str]]


def test_nothing_that_is_printed_has_secrets_or_control_characters(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    name = f"pi\x1b]0;owned\x07\x9b2J\u202e\r\nfake://u:{SECRET}@h"
    say(name)
    console().print(name)
    report = Report(name, [name, Table([[name]], [name], name), Code(name, name)], {name: name})
    show(report)
    say_marked("red", str(Check(name, "red", name, name)))
    write_json("-", Result({name: [name]}))
    logging.getLogger("ansor_mlflow").warning("%s", name)
    caplog.handler.setFormatter(PrintableFormatter("%(message)s"))
    logged = caplog.handler.format(caplog.records[0])
    texts = [capfd.readouterr().out, html_of(report), logged, str(MachineError(name))]
    for text in texts:
        assert not {"\x1b", "\x07", "\x9b", "\u202e", "\r"} & set(text)
        assert SECRET not in text
    assert "\n" not in texts[-1]


def test_variables_may_go_while_secrets_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow's telemetry removes one of its own from its thread."""
    is_over = threading.Event()

    def come_and_go() -> None:
        while not is_over.is_set():
            os.environ["ANSOR_TEST_SESSION"] = "1"
            os.environ.pop("ANSOR_TEST_SESSION")

    monkeypatch.setenv("SOME_PASSWORD", "correct-horse")
    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for _ in range(2000):
            assert "correct-horse" not in without_credentials("it is correct-horse")
    finally:
        is_over.set()
        thread.join()


def test_a_traceback_in_an_errors_text_is_its_last_line() -> None:
    text = (
        "refused by the server:\nTraceback (most recent call last):\n  File 'a', line 1, in f\n    g()\n\nOSError: full"
    )
    assert one_line(RuntimeError(text)) == "refused by the server: OSError: full"
