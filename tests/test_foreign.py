"""Data of others is within bounds or refused in our words, and what nobody thought of ends a command as one line."""

from __future__ import annotations

import contextlib
import copy
import json
import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansor_mlflow import names
from ansor_mlflow.cli import cli
from ansor_mlflow.cli.main import main
from ansor_mlflow.device import parse_target, resolve_target
from ansor_mlflow.errors import AnsorMlflowError, MachineError, ModelError, RecordsError, UserInputError
from ansor_mlflow.fleet import HostPort, servers_by_key
from ansor_mlflow.fleet.remote import ServerDescription
from ansor_mlflow.fleet.tracker import request_server
from ansor_mlflow.foreign import read_json, read_yaml, typed
from ansor_mlflow.model import Manifest, verified_manifest
from ansor_mlflow.parameters import DistillRecordsOptions, TuneOptions, load_options
from ansor_mlflow.records import changed_files, read_fingerprint, read_provenance
from ansor_mlflow.records.log import read_durations, read_journal, read_seeds
from ansor_mlflow.records.store import JOURNAL_FILE, Database, RecordPair, write_pair
from ansor_mlflow.trials import Durations

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([-1, 0, 10**30, 2**63, 1e308])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.sampled_from(["x" * 5000, "../x", "/etc/passwd", "a\0b", "float32", "llvm", "cuda"])
)
VALUES = st.recursive(
    SCALARS, lambda below: st.lists(below, max_size=4) | st.dictionaries(st.text(max_size=8), below, max_size=4)
)
DEEP = "[" * 100_000
DOCUMENTS = ["", "{", DEEP, '{"a":' * 100_000, "NaN", "-Infinity", "[1e999]", "1" * 5000, '["\\ud800"]', "\x00", "[1,]"]
RECORD = '[[[],[]],[0.1],{"kind":"llvm"},[]]'
TARGET = {"kind": "llvm", "mcpu": "znver3", "num-cores": 2}
DEVICE = {"target": TARGET, "machine": "x86_64", "cpu_model": "CPU", "features": ["avx2"], "num_threads": 2}
SPEC = {"name": "x", "shape": [1, 8], "dtype": "float32"}
PART = {
    "runs_in": "tvm",
    "name": "main",
    "inputs": ["x"],
    "outputs": ["x"],
    "operators": {"Relu": 1},
    "flops_share": 1.0,
    "reasons": {"Relu": "why"},
}
ENTRY: dict[str, Any] = {
    "format_version": 2,
    "network": "net",
    "inputs": [SPEC],
    "outputs": [SPEC],
    "libraries": [
        {"path": "libraries/x/model.so", "fingerprint": DEVICE, "coverage": {}, "provenance": {}, "parts": [PART]}
    ],
    "files": {"network.onnx": "00"},
    "sizes": [{"inputs": [SPEC], "outputs": [SPEC]}],
    "pad": {"x": 0.0},
}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The algorithm to every value below a value."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*path, key)
        yield from places(item, (*path, key))


@pytest.mark.parametrize("document", [*DOCUMENTS, '["\udcff"]'])
def test_documents_that_are_none_are_one_kind_of_error(document: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        read_json(document)


@given(VALUES)
def test_other_documents_are_read_as_they_are(value: Any) -> None:
    text = json.dumps(value)
    is_small = not any(isinstance(number, int) and number.bit_length() > 64 for number in numbers(value))
    if is_small:
        assert read_json(text) == json.loads(text)
    else:
        with pytest.raises(ValueError, match="64 bits"):
            read_json(text)


def numbers(value: Any) -> Iterator[Any]:
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from numbers(item)
    yield value


@pytest.mark.parametrize(
    "document", [b"[" * 10_000, b"a: [", b"\xff\xfe\xfd", b"!!python/object:os.system {}", b"a: 0x", b"&a [*a]"]
)
def test_yaml_is_read_as_data(document: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert read_yaml(document) is not None


def test_lines_that_stand_for_millions_of_values_are_refused() -> None:
    lines = ["a0: &a0 [1,1,1,1,1,1,1,1,1,1]"]
    lines += [f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    with pytest.raises(ValueError, match="values"):
        read_yaml("\n".join(lines).encode())


def test_long_lists_that_lines_name_often_take_no_memory() -> None:
    text = f"a: &a [{'1,' * 3000}]\nb: [{'*a,' * 10_000}]".encode()
    tracemalloc.start()
    with pytest.raises(ValueError, match="values"):
        read_yaml(text)
    assert tracemalloc.get_traced_memory()[1] < 1.5e8
    tracemalloc.stop()


@pytest.mark.parametrize("thorough", [False, True])
@pytest.mark.parametrize("document", [*DOCUMENTS, "[]", "5", "null", "{}", '[1e999, "AAAA"]', '["1", 5]', '[null, ""]'])
def test_lines_of_anything_are_damaged_lines(tmp_path: Path, document: str, thorough: bool) -> None:
    targets = [f'{{"kind":{document}}}', document]
    records = [f"[0, {document}]", *(f"[0,[[[],[]],[0.1],{target},[]]]" for target in targets)]
    write_pair(tmp_path, [document, '["1", "AAAA"]'], [document, *records, f"[1,{RECORD}]"])
    database = Database(RecordPair.in_directory(tmp_path), thorough=thorough)
    assert [hash_ for hash_ in database.hashes if hash_] == ["0x0000000000000001"]
    assert [(record.workload, record.run_s) for record in database.records] == [(1, 0.1)]


@pytest.mark.parametrize(
    "line",
    [
        *DOCUMENTS,
        *("[]", "5", "null", "{}", '{"earlier_records": []}', '{"earlier_records": 1, "seeds": 5}'),
        *('{"step": []}', '{"step": 1, "workload_hash": "0x1", "status": [], "run_s": [0.1]}'),
        '{"step": 1, "workload_hash": "0x1", "status": "ok", "run_s": [0.1], "round_": "x"}',
        '{"step": 1, "workload_hash": "0x1", "status": "ok", "run_s": 5}',
        *('{"durations": 5}', '{"durations": {"run_s": []}}'),
    ],
)
def test_a_journal_of_anything_says_nothing(tmp_path: Path, line: str) -> None:
    write_pair(tmp_path, ['["1", "AAAA"]'], [f"[0,{RECORD}]"] * 2)
    (tmp_path / JOURNAL_FILE).write_text(f"{line}\n{line}\n")
    assert read_seeds(tmp_path) == (0, [])
    assert read_durations(tmp_path) == Durations()
    assert [(trial.round_, trial.run_s) for trial in read_journal(tmp_path)] == [(1, (0.1,))] * 2


@given(st.data())
def test_any_other_value_in_it_is_a_damaged_model(data: st.DataObject) -> None:
    entry = copy.deepcopy(ENTRY)
    place = data.draw(st.sampled_from(list(places(ENTRY))))
    below: Any = entry
    for key in place[:-1]:
        below = below[key]
    below[place[-1]] = data.draw(VALUES)
    try:
        manifest = Manifest.from_dict(entry)
    except ModelError:
        return
    assert manifest.platform.name in ("cpu", "cuda")
    assert all(library.fingerprint.name and library.fingerprint.description for library in manifest.libraries)
    assert all(str(part) for library in manifest.libraries for part in library.parts)


@pytest.mark.parametrize("text", [*DOCUMENTS, "flavors: {tvm: {format_version: [2]}}", "flavors: [tvm]", "a: &a [*a]"])
def test_a_model_file_of_anything_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / names.MODEL_FILE).write_text(text)
    with pytest.raises(ModelError):
        verified_manifest(tmp_path)


@pytest.mark.parametrize(
    "document", [*DOCUMENTS, "[]", "{}", '{"files": {"a": {"bytes": 1e30, "sha256": []}}}', "null"]
)
def test_files_beside_records_of_anything_are_damaged(tmp_path: Path, document: str) -> None:
    for name in (names.FINGERPRINT_FILE, names.PROVENANCE_FILE, names.MANIFEST_FILE):
        (tmp_path / name).write_text(document)
    for read in (read_fingerprint, read_provenance):
        with pytest.raises(RecordsError):
            read(tmp_path)
    changed_files(tmp_path)


@given(st.sampled_from(["input_shapes", "input_values", "network", "target", "warm_start"]), VALUES)
def test_a_parameter_of_any_json_is_taken_or_refused(name: str, value: Any) -> None:
    for given_ in (json.dumps(value), value):
        with contextlib.suppress(UserInputError):
            load_options(TuneOptions, {name: given_})


@given(VALUES | st.dictionaries(st.sampled_from(["kind", "mcpu", "host", "arch", "keys", "num-cores", "tag"]), VALUES))
def test_a_target_of_any_json_is_taken_or_refused(value: Any) -> None:
    for text in (json.dumps(value), json.dumps({"kind": "llvm", "host": value})):
        with contextlib.suppress(UserInputError):
            parse_target(load_options(DistillRecordsOptions, {"sources": ["a"], "output": "b", "target": text}).target)


@pytest.mark.parametrize("text", ['{"kind": 5}', "{}", '{"kind": "llvm", "num-cores": "x"}', "[1]"])
def test_a_target_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UserInputError):
        resolve_target(text, 1)


@pytest.mark.parametrize("text", [*DOCUMENTS, "{}", "[]", '{"fingerprint": {}, "boot_id": 1}'])
def test_a_server_that_describes_itself_wrongly(text: str) -> None:
    with pytest.raises(MachineError):
        ServerDescription.from_json(text)


def test_a_dataclass_has_the_types_that_it_names() -> None:
    with pytest.raises(ValueError, match=r"libraries\.0\.fingerprint\.features"):
        typed(Manifest, {**ENTRY, "libraries": [{**ENTRY["libraries"][0], "fingerprint": {**DEVICE, "features": 1}}]})


GREETING = struct.pack("<i", 0x2F271)


@contextlib.contextmanager
def tracker_that_sends(content: bytes, pause_s: float, greeting: bytes = GREETING) -> Iterator[HostPort]:
    """A tracker that greets, and then sends one byte after the other."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                connection, _ = server.accept()
                with connection:
                    connection.sendall(greeting)
                    for byte in content if pause_s else ():
                        time.sleep(pause_s)
                        connection.sendall(bytes([byte]))
                    connection.sendall(b"" if pause_s else content)
                    while connection.recv(1024):  # until the client has read all of it
                        pass

        threading.Thread(target=serve, daemon=True).start()
        yield HostPort(*server.getsockname())


def message(value: Any) -> bytes:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return struct.pack("<i", len(text)) + text


def test_a_tracker_that_dribbles_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ansor_mlflow.fleet.tracker._ANSWER_S", 0.5)
    with tracker_that_sends(message([0, {}]) * 1000, 0.1) as address:
        started = time.monotonic()
        with pytest.raises(MachineError, match="no tracker can be reached"):
            servers_by_key(address)
        assert time.monotonic() - started < 60  # all of it would take a hundred and more
    with tracker_that_sends(message([0, ["host", 1, "key"]]), 0.1) as address:
        assert request_server(address, "key", 0.3) is None


ANSWERS = [DEEP.encode(), b"[0, 1e999]", [0, 5], [0, [1, 2, 3]], [0, {"server_info": 5}], [1], 7]


@pytest.mark.parametrize(
    ("greeting", "answer"),
    [
        *((GREETING, message(value)) for value in ANSWERS),
        (GREETING, struct.pack("<i", 2**31 - 1)),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", b""),
    ],
)
def test_a_tracker_that_answers_anything_else_is_none(greeting: bytes, answer: bytes) -> None:
    for ask in (servers_by_key, lambda address: request_server(address, "key", 5.0)):
        with (
            tracker_that_sends(answer, 0.0, greeting) as address,
            pytest.raises(MachineError, match=rf"rpc_tracker={address}: what listens there is no RPC tracker"),
        ):
            ask(address)


def test_names_from_a_tracker_have_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    key = "server:pi\x1b[2J\x07\r\nfree"
    known = {"server_info": [{"addr": ["h\x1b", 1], "key": key}], "queue_info": {"a\x9b": {"free": 1, "pending": 0}}}
    with tracker_that_sends(message([0, known]), 0.0) as address:
        main_exits(["fleet", "status", "--tracker", str(address)], 0)
    shown = capsys.readouterr().out
    assert not {"\x1b", "\x07", "\r", "\x9b"} & set(shown)
    assert "pi\\x1b[2J" in shown


def main_exits(args: list[str], exit_code: int) -> None:
    if exit_code == 0:
        main(args)
        return
    with pytest.raises(SystemExit) as found:
        main(args)
    assert found.value.code == exit_code


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (KeyError("a secret: password=S3cr3tP"), 1),
        (AssertionError(), 1),
        (MemoryError(), 3),
        (OSError(28, "No space left on device", "/x"), 3),
        (PermissionError(13, "Permission denied", "/x"), 3),
        (OSError(36, "File name too long", "x" * 5000), 2),
    ],
    ids=lambda value: str(value)[:20],
)
def test_an_error_of_no_kind_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    error: Exception,
    exit_code: int,
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def fail(**_: Any) -> None:
        raise error

    monkeypatch.setattr(cli.commands["networks"], "callback", fail)
    main_exits(["networks"], exit_code)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("Error: ")
    assert len(line) < 1000
    if exit_code > 1:
        return
    (report,) = tmp_path.iterdir()
    assert f"report it with the file {report}" in line
    text = report.read_text()
    assert "Traceback (most recent call last)" in text
    assert "apache-tvm" in text
    assert "S3cr3tP" not in text + line


@pytest.mark.parametrize("name", ["x" * 5000, "x/" * 2500, "models:/" + "x" * 5000, "a" * 300 + ".onnx"])
def test_names_of_any_length_are_refused_in_one_line(capsys: pytest.CaptureFixture[str], name: str) -> None:
    for command in (["plan", "--network", name], ["records", "show", name], ["plan", "--config", name]):
        main_exits(command, AnsorMlflowError.exit_code + 1)
        (line,) = capsys.readouterr().err.splitlines()
        assert len(line) < 5000
