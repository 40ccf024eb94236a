"""Servers of a fleet that answer anything are lost, and the tuner goes on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ansor_mlflow.device import DeviceFingerprint
from ansor_mlflow.fleet import NetworkWork, programs, session
from ansor_mlflow.fleet.programs import MeasuredProgram, measure_in_session
from ansor_mlflow.fleet.remote import MEASURE, RUN_NETWORK, MeasureRequest, write_arrays
from ansor_mlflow.measuring import ProbeTime
from ansor_mlflow.model import LibraryEntry, Manifest
from ansor_mlflow.processes import Outcome
from ansor_mlflow.tensors import TensorSpec
from ansor_mlflow.workers import MeasureSettings, RunJob

ENTRY = LibraryEntry(
    path="libraries/x/model.so",
    fingerprint=DeviceFingerprint(
        target={"kind": "llvm"}, machine="x86_64", cpu_model="CPU", features=(), num_threads=1
    ),
    coverage={},
    provenance={},
)
SPEC = TensorSpec(name="x", shape=(1,), dtype="float32")
NETWORK = Manifest(network="net", inputs=(SPEC,), outputs=(SPEC,), libraries=(ENTRY,), files={})
EXAMPLES = ({"x": np.zeros(1, np.float32)},) * 2


@dataclass
class AnyServer:
    """A session with a server that answers as it is told to."""

    answer: str
    outputs: bytes = b""

    @property
    def connection(self) -> session.Connection:
        return session.Connection(self, dict.fromkeys((MEASURE, RUN_NETWORK), lambda _: self.answer))

    def upload(self, path: str) -> None:
        """Takes a file."""

    def remove(self, name: str) -> None:
        """Removes a file."""

    def download(self, name: str) -> bytes:
        return self.outputs


def measured(monkeypatch: pytest.MonkeyPatch, answer: Any) -> Outcome[MeasuredProgram]:
    monkeypatch.setattr(session, "_open", [AnyServer(json.dumps(answer)).connection])
    settings = MeasureSettings(number=1, repeat=1, min_repeat_ms=0, cache_flush=False, num_threads=1, timeout_s=1)
    work = MeasureRequest(job=RunJob(Path("x.so"), ()), settings=settings, memory_bytes=None, limit_s=1.0)
    return measure_in_session(work)


def ran(monkeypatch: pytest.MonkeyPatch, answer: Any, outputs: bytes = b"", measure_s: float | None = 1.0) -> Any:
    monkeypatch.setattr(session, "_open", [AnyServer(json.dumps(answer), outputs).connection])
    work = NetworkWork(library=Path("x.so"), network=NETWORK, entry=ENTRY, examples=EXAMPLES, measure_s=measure_s)
    return programs._run(work)


def npz(*calls: dict[str, npt.NDArray[Any]]) -> bytes:
    file = BytesIO()
    write_arrays(calls, file)  # type: ignore[arg-type]
    return file.getvalue()


@pytest.mark.parametrize(
    "answer",
    [
        *([], 5, None, "text", {}),
        *({"run_s": run_s, "waited": 0.0} for run_s in ("1", 5, [], ["x"], [None], [0.0], [1e-12], [-1.0], [1e5])),
        *({"run_s": [0.1], "waited": waited} for waited in ("x", [], None)),
        *({"run_s": [0.1], "waited": 0.0, "probe": probe} for probe in ("x", [1], {}, {"elapsed_s": 1.0})),
        *(
            {"run_s": [0.1], "waited": 0.0, "probe": {"elapsed_s": elapsed_s, "cpu_s": cpu_s}}
            for elapsed_s, cpu_s in [(1.0, 0.0), (0.0, 1.0), (-1.0, 1.0), ("x", 1.0), (1.0, [])]
        ),
    ],
    ids=str,
)
def test_measurements_of_anything(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    outcome = measured(monkeypatch, answer)
    assert (outcome.value, outcome.failure) == (None, "crashed")
    assert outcome.error


def test_a_measurement_as_it_should_be(monkeypatch: pytest.MonkeyPatch) -> None:
    times = [0.25] * 2000
    outcome = measured(monkeypatch, {"run_s": times, "waited": 0.5, "probe": {"elapsed_s": 2.0, "cpu_s": 1.0}})
    assert outcome == Outcome(MeasuredProgram(run_s=tuple(times), waited=0.5, probe=ProbeTime(2.0, 1.0)))


@pytest.mark.parametrize("samples_s", ["111", 5, [], ["x"], [None], [0.0], [0.1, -1.0]], ids=str)
def test_times_of_networks_of_anything(monkeypatch: pytest.MonkeyPatch, samples_s: Any) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        ran(monkeypatch, {"samples_s": samples_s, "waited": 0.0})
    assert ran(monkeypatch, {"samples_s": [0.5], "waited": 0.0}).samples_s == (0.5,)


@pytest.mark.parametrize(
    "outputs",
    [b"", npz(), npz(EXAMPLES[0]), npz(*EXAMPLES, EXAMPLES[0]), npz(EXAMPLES[0], {"x": np.array(["a"])})],
    ids=["none", "no call", "too few", "too many", "texts"],
)
def test_outputs_of_anything(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, outputs: bytes) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, EOFError), match=r"\w"):
        ran(monkeypatch, {"samples_s": [], "waited": 0.0}, outputs, None)
    assert len(ran(monkeypatch, {}, npz(*EXAMPLES), None).outputs) == 2
