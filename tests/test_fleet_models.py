"""Models on a server of a fleet: what they compute there, how long they take, and which servers can run them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from helpers.commands import RunCommand, flags
from helpers.exports import branching
from helpers.fleet import Fleet, running_fleet
from helpers.runs_here import artifacts_of, newest_run
from helpers.untuned import compiled_untuned

from ansor_mlflow import flavor, names
from ansor_mlflow.device import fingerprint, resolve_target
from ansor_mlflow.errors import MachineError, ModelError
from ansor_mlflow.fleet import NetworkReply, NetworkWork, ServerSession, run_network
from ansor_mlflow.lowering import lower
from ansor_mlflow.model import Manifest, choose_for_server
from ansor_mlflow.networks import load_network
from ansor_mlflow.steps.evaluation import benches

if TYPE_CHECKING:
    from tvm.target import Target

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

BRIEF = {"turns": 1, "measure_s": 0.1}
OF_TVM = "of-tvm"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A server of our own, and one of TVM's under another key."""
    with running_fleet(tmp_path_factory.mktemp("fleet")) as fleet:
        fleet.add_tvm_server(OF_TVM)
        yield fleet


def save_model(onnx_file: Path, target: Target, directory: Path) -> Path:
    network = load_network(str(onnx_file))
    compiled = compiled_untuned(network, lower(network.model, target), target, directory)
    flavor.save_model(compiled, directory / "model")
    return directory / "model"


@pytest.fixture(scope="module")
def plain(small_onnx: Path, host_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(small_onnx, host_target, tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def in_parts(host_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("parts")
    directory.joinpath("branching.onnx").write_bytes(branching().SerializeToString())
    return save_model(directory / "branching.onnx", host_target, directory)


@pytest.mark.parametrize(("model", "key"), [pytest.param("plain", OF_TVM, marks=pytest.mark.nightly), ("in_parts", "")])
def test_a_model_is_checked_and_timed_on_a_server(
    model: str,
    key: str,
    fleet: Fleet,
    run_here: RunCommand,
    own_directory: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    libraries: set[Path] = set()

    def noted(server: ServerSession, work: NetworkWork) -> NetworkReply:
        libraries.add(work.library)
        return run_network(server, work)

    monkeypatch.setattr(benches, "run_network", noted)
    of_fleet = {**fleet.flags, **({"rpc_key": key} if key else {})}
    given = {"model_uri": request.getfixturevalue(model), **BRIEF, **of_fleet}
    assert run_here("evaluate", *flags(given)) == 0
    run = newest_run()
    assert run.data.metrics[names.MAX_REL_ERROR] < 1e-4
    assert 0 < run.data.metrics[names.LATENCY_MS] < 1000
    assert 0 < run.data.metrics[names.UNTUNED_LATENCY_MS] < 1000
    assert len({library.name for library in libraries}) == len(libraries) == 2, "one is taken for the other"
    rivals = json.loads((artifacts_of(run.info.run_id) / names.RIVALS_FILE).read_text())
    assert all(rival["absent"].startswith("it runs on this host, the model on server 127.0.0.1:") for rival in rivals)
    assert {rival["rival"] for rival in rivals} >= {"onnxruntime", "openvino"}


def test_what_a_server_of_tvms_own_cannot_run_is_said(
    in_parts: Path, fleet: Fleet, run_here: RunCommand, own_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"model_uri": in_parts, **BRIEF, **fleet.flags, "rpc_key": OF_TVM}
    assert run_here("evaluate", *flags(given)) == MachineError.exit_code
    assert "one of TVM's own, and the network has several sizes, or parts in ONNX Runtime" in capsys.readouterr().err
    assert newest_run().info.status == "FAILED"


def test_the_library_for_a_server_is_one_that_runs_there(plain: Path) -> None:
    manifest = Manifest.read(plain)
    (entry,) = manifest.libraries
    board = fingerprint(resolve_target("llvm -mtriple=aarch64-linux-gnu -mcpu=cortex-a72", 4), 4)
    assert (board.machine, board.cpu_model) == ("aarch64", "")
    for_board = replace(entry, path="board.so", fingerprint=board)
    both = replace(manifest, libraries=(entry, for_board))
    assert choose_for_server(plain, both, board) == for_board
    assert choose_for_server(plain, both, entry.fingerprint) == entry
    assert choose_for_server(plain, manifest, None) == entry
    with pytest.raises(ModelError, match="does not say what it is; start it with `ansor-mlflow fleet server`"):
        choose_for_server(plain, both, None)
    with pytest.raises(ModelError, match=r"no library runs on the server: .* made for .*, the server is riscv64"):
        choose_for_server(plain, manifest, replace(board, machine="riscv64"))
