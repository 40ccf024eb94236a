"""A model takes the best library that it has for this host, builds one where it has none, and says which and why."""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from helpers.untuned import assert_computes

from ansor_mlflow.device import DeviceFingerprint, available_cpus
from ansor_mlflow.errors import MachineError, ModelError, UserInputError
from ansor_mlflow.model import CompiledNetwork, LoadOptions, choose_library, write_package
from ansor_mlflow.model.building import BuildJob, build_in_child_process
from ansor_mlflow.model.choice import choose_for_gpu, entries_to_rebuild, find_library
from ansor_mlflow.model.loading import load_package
from ansor_mlflow.model.manifest import LibraryEntry, Manifest
from ansor_mlflow.records import RECORD_FILE
from ansor_mlflow.settings import LoweringSettings

CPUS = available_cpus()
MakeModel = Callable[..., tuple[Path, Manifest]]


@pytest.fixture(scope="module")
def host(compiled_network: CompiledNetwork) -> DeviceFingerprint:
    return compiled_network.fingerprint


@pytest.fixture(scope="module")
def devices(host: DeviceFingerprint) -> dict[str, DeviceFingerprint]:
    """Devices by a name that says how they differ from this one."""
    older = tuple(name for name in host.features if not name.startswith("avx512"))
    target = {**host.target, "mcpu": "haswell"}
    return {
        "exact": host,
        "one thread more": replace(host, num_threads=CPUS + 1),
        "many threads more": replace(host, num_threads=CPUS + 10),
        "older": replace(host, target=target, cpu_model="Older", features=older),
        "much older": replace(host, target=target, cpu_model="Much older", features=older[: len(older) // 2]),
        "newer": replace(host, target={**host.target, "mcpu": "next"}, features=(*host.features, "avx1024f")),
        "foreign": replace(host, machine="sparc64", cpu_model="SPARC"),
        "gpu": replace(host, target={"kind": "cuda", "arch": "sm_90"}, features=(), cpu_model=""),
    }


@pytest.fixture
def make(compiled_network: CompiledNetwork, devices: dict[str, DeviceFingerprint], tmp_path: Path) -> MakeModel:

    def write(*names: str) -> tuple[Path, Manifest]:
        members = [replace(compiled_network, fingerprint=devices[name]) for name in names]
        return tmp_path / "model", write_package(members, tmp_path / "model")

    return write


ORDER = ["exact", "one thread more", "many threads more", "older", "much older"]
"""From the best for this host to the worst."""
THREADS = rf"it was tuned for {CPUS + 1} threads, {CPUS} are wanted"
CPU = r"it was made for haswell \(Older\), this is .+"
NEEDS = r"not the library for llvm next ×\d+: it needs instructions of next that this host .* lacks: avx1024f"
FOREIGN = r"not the library for llvm .+: it is made for sparc64, this host is .+"


@pytest.mark.parametrize("best", range(len(ORDER)))
def test_the_nearest_library_is_taken(make: MakeModel, devices: dict[str, DeviceFingerprint], best: int) -> None:
    directory, manifest = make("newer", "foreign", "gpu", *reversed(ORDER[best:]))
    choice, _ = find_library(directory, manifest, LoadOptions())
    assert choice is not None
    assert choice.entry.fingerprint == devices[ORDER[best]]
    assert choice.level == ("exact" if best == 0 else "compatible")
    assert choose_library(directory, manifest) == choice.entry


@pytest.mark.parametrize(("name", "reason"), [("one thread more", THREADS), ("older", CPU)])
def test_a_compatible_library_says_what_differs(make: MakeModel, name: str, reason: str) -> None:
    choice, _ = find_library(*make("newer", "foreign", name), LoadOptions())
    assert choice is not None
    assert re.fullmatch(f"compatible library for llvm .+: {reason}(; not the library for .+)?", str(choice))


def test_the_threads_that_are_asked_for_decide(make: MakeModel, devices: dict[str, DeviceFingerprint]) -> None:
    directory, manifest = make("exact", "older")
    single = replace(manifest.libraries[0], fingerprint=replace(devices["exact"], num_threads=1))
    manifest = replace(manifest, libraries=(manifest.libraries[0], single))
    choice, _ = find_library(directory, manifest, LoadOptions(num_threads=1))
    assert choice is not None
    assert (choice.level, choice.entry.fingerprint.num_threads) == ("exact", 1)


def test_only_the_exact_library(make: MakeModel) -> None:
    options = LoadOptions(allow_compatible=False, allow_rebuild=False)
    directory, manifest = make("one thread more", "older")
    message = f"no library runs here: .+: {THREADS}, and allow_compatible is off; .+ allow_rebuild is off; compile the"
    with pytest.raises(ModelError, match=message):
        load_package(directory, manifest, options)


def test_no_library_and_no_build(make: MakeModel) -> None:
    message = f"no library runs here: {NEEDS}; {FOREIGN}; allow_rebuild is off; compile the network on this host, and"
    with pytest.raises(ModelError, match=message):
        load_package(*make("newer", "foreign"), LoadOptions(allow_rebuild=False))


def test_the_records_for_a_gpu_build_no_library_for_a_cpu(
    make: MakeModel, devices: dict[str, DeviceFingerprint]
) -> None:
    _, manifest = make("newer", "gpu", "foreign")
    assert [entry.fingerprint for entry in entries_to_rebuild(manifest, LoadOptions())] == [devices["newer"]]


def test_no_records_and_no_untuned_library(make: MakeModel) -> None:
    with pytest.raises(ModelError, match=f"no library runs here: {FOREIGN}; allow_untuned is off; compile the network"):
        load_package(*make("foreign"), LoadOptions(allow_untuned=False))


@pytest.mark.parametrize(("device", "names"), [("cuda", ["exact", "older"]), ("cpu", ["gpu"])])
def test_no_library_stands_in_for_another_kind_of_device(make: MakeModel, device: str, names: list[str]) -> None:
    message = f"device='{device}', but its libraries are for .+, which never stand in for another kind of device"
    with pytest.raises(ModelError, match=message):
        load_package(*make(*names), LoadOptions(device=device))


def test_a_host_without_a_gpu(make: MakeModel) -> None:
    message = "not the library for cuda sm_90: .+; none is built for cuda here"
    with pytest.raises(ModelError, match=message):
        load_package(*make("exact", "gpu"), LoadOptions(device="cuda"))


@pytest.mark.parametrize(
    ("made_for", "here", "level"),
    [
        (["sm_80", "sm_90"], "sm_90", "exact"),
        (["sm_90a"], "sm_90", "exact"),
        (["sm_86"], "sm_89", "compatible"),
        (["sm_100"], "sm_103", "compatible"),
        (["sm_89"], "sm_86", None),
        (["sm_80"], "sm_90", None),
        (["sm_100a"], "sm_103", None),
    ],
)
def test_the_library_for_a_gpu(
    make: MakeModel, made_for: list[str], here: str, level: str | None, devices: dict[str, DeviceFingerprint]
) -> None:
    """NVIDIA's rules; no GPU is needed to choose."""
    _, manifest = make("gpu")
    entries = [
        replace(manifest.libraries[0], fingerprint=replace(devices["gpu"], target={"kind": "cuda", "arch": arch}))
        for arch in made_for
    ]
    choice, rejected = choose_for_gpu(entries, here, LoadOptions(device="cuda"))
    if level is None:
        assert choice is None
        assert rejected == (f"not the library for cuda {made_for[0]}: it was made for {made_for[0]}, this is {here}",)
    else:
        assert choice is not None
        assert (choice.level, choice.entry) == (level, entries[-1])
    only_exact = LoadOptions(device="cuda", allow_compatible=False)
    assert bool(choose_for_gpu(entries, here, only_exact)[0]) == (level == "exact")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"device": "tpu"}, "device='tpu' is unknown; it must be cpu or cuda"),
        ({"num_threads": 0}, f"^num_threads=0: it must be a whole number from 1 to {CPUS}, the number of CPUs"),
        ({"allow_rebuild": "no"}, "allow_rebuild='no' is neither true nor false"),
        ({"threads": 2}, "model_config has no 'threads'; it has device, num_threads, allow_compatible, allow_rebuild"),
    ],
)
def test_options_that_are_not_usable(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        LoadOptions.from_config(config)


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "scratch"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


@pytest.mark.system
def test_a_library_is_rebuilt_with_the_records_of_a_similar_cpu(
    make: MakeModel, host: DeviceFingerprint, small_onnx: Path, scratch: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = load_package(*make("foreign", "newer"))
    assert model.choice.level == "rebuilt"
    assert model.entry.fingerprint == host
    assert model.entry.coverage["task_share"] == 1.0
    assert model.entry.provenance["built_from"].startswith("libraries/llvm-next-")
    assert_computes(model, small_onnx)
    assert not list(scratch.iterdir())
    reason = r"it was built here with the records for llvm next ×\d+, which cover 100% of the tasks"
    assert re.fullmatch(f"rebuilt library for llvm .+: {reason}; {NEEDS}; {FOREIGN}", str(model.choice))
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings[-1] == str(model.choice)


@pytest.mark.nightly
def test_records_that_do_not_apply_leave_an_untuned_library(make: MakeModel, small_onnx: Path, scratch: Path) -> None:
    directory, manifest = make("newer")
    records = directory / "records" / manifest.libraries[0].fingerprint.name / RECORD_FILE
    records.write_text("[0, [[[], []], [0.001")
    manifest = replace(
        manifest,
        files={**manifest.files, records.relative_to(directory).as_posix(): sha256(records.read_bytes()).hexdigest()},
    )
    model = load_package(directory, manifest)
    assert model.choice.level == "untuned"
    assert re.search(
        r"; not a library from the records for llvm next ×\d+: .+ line 1 is damaged; tune again", str(model.choice)
    )
    assert_computes(model, small_onnx)
    assert not list(scratch.iterdir())


@pytest.mark.nightly
@pytest.mark.system
def test_records_of_no_task_here_leave_an_untuned_library(
    make: MakeModel, small_onnx: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers may be padded otherwise here, so that their tasks are others."""
    directory, manifest = make("newer")

    def build(job: BuildJob) -> LibraryEntry:
        built = build_in_child_process(replace(job, records=""))
        coverage = {"num_covered": 0, "num_tasks": 4, "task_share": 0.0}
        return replace(built, coverage=coverage) if job.records else built

    monkeypatch.setattr("ansor_mlflow.model.loading.build_in_child_process", build)
    with pytest.raises(ModelError, match="the network has other tasks here, and none has a record; allow_untuned is"):
        load_package(directory, manifest, LoadOptions(allow_untuned=False))
    model = load_package(directory, manifest)
    assert model.choice.level == "untuned"
    assert_computes(model, small_onnx)


def test_a_host_without_a_compiler(make: MakeModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    directory, manifest = make("newer")
    monkeypatch.setenv("PATH", str(tmp_path))
    message = rf"no library runs here: {NEEDS}; none can be built: no C\+\+ compiler was found"
    with pytest.raises(ModelError, match=message):
        load_package(directory, manifest)


@pytest.mark.system
def test_a_network_that_cannot_be_built(tmp_path: Path, host: DeviceFingerprint) -> None:
    (tmp_path / "network.onnx").write_bytes(b"no network")
    job = BuildJob(
        network=str(tmp_path / "network.onnx"),
        records="",
        device=host,
        lowering=LoweringSettings(),
        library=str(tmp_path / "model.so"),
    )
    with pytest.raises(UserInputError, match="not a valid ONNX file"):
        build_in_child_process(job)
    with pytest.raises(MachineError, match=r"the library cannot be built .+; compile the network for this"):
        build_in_child_process(replace(job, device=None))
