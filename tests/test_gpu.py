"""NVIDIA's GPUs. The machines of these tests have none: code for CUDA is made here and looked at, and never run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import mlflow
import numpy as np
import pytest
from helpers.commands import RunCommand, flags
from helpers.lanes import every_second
from helpers.programs import random_candidates
from helpers.runs_here import newest_run

from ansor_mlflow import names
from ansor_mlflow.device import (
    CPU,
    CUDA,
    Device,
    describe_gpus,
    fingerprint,
    platform_of,
    resolve_target,
    why_not_on_gpu,
)
from ansor_mlflow.device.cuda import why_no_compiler
from ansor_mlflow.errors import MachineError, UserInputError
from ansor_mlflow.lowering import lower
from ansor_mlflow.measuring.rivals import version_of
from ansor_mlflow.model import load_runtime_alone
from ansor_mlflow.model.library import compile_tuned
from ansor_mlflow.networks.graph import GraphBuilder
from ansor_mlflow.networks.load import Network
from ansor_mlflow.plugins import distribution_of
from ansor_mlflow.records.applicability import why_not_applicable
from ansor_mlflow.settings import LoweringSettings
from ansor_mlflow.sketches import gpu_program, unbound_kernels
from ansor_mlflow.tuning import Replayer
from ansor_mlflow.tuning.candidates import log_lines, make_space_generator
from ansor_mlflow.workers import LocalBuilder

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.target import Target

pytestmark = pytest.mark.timeout(300)

AMPERE = "cuda -arch=sm_80"


@pytest.fixture(autouse=True)
def _no_gpu_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides those of a host that has some."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.parametrize(
    ("spec", "architecture"),
    [
        (AMPERE, "sm_80"),
        ("cuda -arch=sm_100f", "sm_100f"),
        ('{"kind": "cuda", "arch": "sm_90a"}', "sm_90a"),
        ("nvidia/geforce-rtx-3070", "sm_86"),
    ],
)
def test_targets_that_say_which_gpu_need_none(spec: str, architecture: str) -> None:
    target = resolve_target(spec, 2)
    platform = platform_of(target)
    assert (platform.name, platform.binds_threads, platform.in_process) == ("cuda", True, False)
    assert target.attrs["arch"] == architecture
    assert int(target.attrs["max_threads_per_block"]) == 1024
    assert int(target.attrs["max_shared_memory_per_block"]) >= 48 * 1024


@pytest.mark.parametrize("spec", ["cuda", '{"kind": "cuda"}', "cuda -max_num_threads=512"])
def test_a_target_that_does_not_say_which_gpu(spec: str) -> None:
    message = r"does not say for which GPU, and .*; give its architecture, such as `cuda -arch=sm_90`, or a tag"
    with pytest.raises(UserInputError, match=message):
        resolve_target(spec, 2)


def test_a_target_that_does_not_say_which_gpu_is_the_one_that_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    import tvm

    said = {"compute_version": "9.0", "max_threads_per_block": 1024, "max_shared_memory_per_block": 49152}
    monkeypatch.setattr(tvm, "cuda", lambda _: SimpleNamespace(exist=True, device_name="NVIDIA H100", **said))
    device = Device.of(resolve_target("cuda", 2), 2)
    assert device.fingerprint.target["arch"] == "sm_90"
    assert device.fingerprint.cpu_model == "NVIDIA H100"
    assert device.description == "cuda sm_90"


@pytest.mark.parametrize("architecture", ["sm_9", "sm_90x"])
def test_an_architecture_that_is_none(architecture: str) -> None:
    with pytest.raises(UserInputError, match=f"'{architecture}' is no architecture of CUDA; write one such as sm_90"):
        resolve_target(f"cuda -arch={architecture}", 2)


@pytest.mark.parametrize(
    ("made_for", "here", "runs"),
    [
        ("sm_80", "sm_80", True),
        ("sm_80", "sm_86", True),
        ("sm_80", "sm_90", False),
        ("sm_100a", "sm_103", False),
        ("sm_100f", "sm_103", True),
        ("sm_100", "sm_120", False),
    ],
)
def test_code_runs_on_later_gpus_of_its_generation(made_for: str, here: str, runs: bool) -> None:
    assert why_not_on_gpu(made_for, here) == ("" if runs else f"it was made for {made_for}, this is {here}")


def test_nothing_is_measured_without_a_gpu() -> None:
    message = r"it is made for cuda, and .*; use target=auto or, to compile without measuring, trials=0"
    with pytest.raises(MachineError, match=message):
        Device.resolve(AMPERE, 1).require_measurable_here()


def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


def test_model_driver_and_clocks_of_each_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = "NVIDIA H100 80GB HBM3, 570.86.15, 1980 MHz, 2619 MHz, 81559 MiB"
    expected = "--query-gpu=name,driver_version,clocks.max.sm,clocks.max.memory,memory.total --format=csv,noheader"
    say(tmp_path, monkeypatch, f'[ "$*" = "{expected}" ] || exit 6\nfor gpu in 0 1; do echo "{row}"; done')
    gpu = {
        "model": "NVIDIA H100 80GB HBM3",
        "driver": "570.86.15",
        "max_sm_clock": "1980 MHz",
        "max_memory_clock": "2619 MHz",
        "memory": "81559 MiB",
    }
    assert describe_gpus() == [gpu, gpu]


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'NVIDIA-SMI has failed because it could not talk to the driver' >&2; exit 9", "said NVIDIA-SMI has fai"),
        ("exit 0", "said nothing"),
        ("echo 'Field \"clocks.max.sm\" is not a valid field to query.'", 'said Field "clocks.max.sm" is not'),
        ("exec sleep 100", r"did not answer \(TimeoutExpired\)"),
    ],
)
def test_gpus_that_cannot_be_described(
    script: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(tmp_path, monkeypatch, script)
    monkeypatch.setattr("ansor_mlflow.device.cuda._SMI_TIMEOUT_S", 1.0)
    described = describe_gpus()
    assert isinstance(described, str)
    assert re.match(f"not known: nvidia-smi {reason}", described)


def test_a_host_without_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert describe_gpus() == "not known: there is no nvidia-smi"


def test_the_compiler_that_a_gpu_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVM_CUDA_COMPILE_MODE", "nvcc")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert why_no_compiler().startswith("nvcc, which TVM_CUDA_COMPILE_MODE names, is not in PATH")
    tmp_path.joinpath("nvcc").touch(mode=0o755)
    assert why_no_compiler() == ""


def kernels_of(library: Path) -> dict[str, str]:
    """The kernels whose source in CUDA a library holds, by their names."""
    source = library.read_bytes().decode(errors="ignore")
    definitions = re.split(r'extern "C" __global__ void ', source)[1:]
    named = [(re.search(r"(?:__launch_bounds__\(\d+\) )?(\w+)\([^;{]*\)\s*(;|\{)", text), text) for text in definitions]
    return {match[1]: text for match, text in named if match and match[2] == "{"}


@pytest.fixture(scope="module")
def ampere() -> Target:
    return resolve_target(AMPERE, 2)


@pytest.mark.system
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_every_kernel_of_a_network_runs_in_threads_without_a_trial(
    dtype: str, small_network: Network, ampere: Target, tmp_path: Path
) -> None:
    """What they compute only a GPU could tell."""
    lowered = lower(small_network.model, ampere, LoweringSettings(dtype=dtype))
    coverage = compile_tuned(lowered, ampere, None, tmp_path / "model.so")
    assert not coverage.covered
    assert not coverage.unscheduled
    kernels = kernels_of(tmp_path / "model.so")
    assert len(kernels) >= len(lowered.tasks)
    assert all("threadIdx.x" in body or "blockIdx.x" in body for body in kernels.values())


def test_squares_and_cubes_are_products(ampere: Target, tmp_path: Path) -> None:
    """CUDA compiles with fast math for TVM, and powf of a negative number is NaN then."""
    builder = GraphBuilder(seed=0)
    data = builder.input("data", (4, 64))
    exponents = [builder.constant(f"exponent{each}", np.float32(each)) for each in (2.0, 3.0, 1.5)]
    total = builder.node("Sum", "sum", *(builder.node("Pow", f"to_{each}", data, each) for each in exponents))
    compile_tuned(lower(builder.build("powers", {total: (4, 64)}), ampere), ampere, None, tmp_path / "model.so")
    (kernel,) = kernels_of(tmp_path / "model.so").values()
    assert kernel.count("powf(") == 1


def test_a_library_of_a_gpu_has_all_of_tvm(monkeypatch: pytest.MonkeyPatch) -> None:
    """TVM loads CUDA's runtime with its compiler alone."""
    monkeypatch.delitem(sys.modules, "tvm", raising=False)
    monkeypatch.delenv("TVM_USE_RUNTIME_LIB", raising=False)
    load_runtime_alone(CUDA)
    assert "TVM_USE_RUNTIME_LIB" not in os.environ
    monkeypatch.setenv("TVM_USE_RUNTIME_LIB", "")  # to be as it was afterwards
    load_runtime_alone(CPU)
    assert os.environ["TVM_USE_RUNTIME_LIB"] == "1"


def test_what_stands_in_for_a_package_counts_as_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime with CUDA is a distribution of its own."""
    found = tmp_path / "onnxruntime_gpu-9.9.dist-info"
    found.mkdir()
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: onnxruntime-gpu\nVersion: 9.9\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert distribution_of("onnxruntime") == ("onnxruntime-gpu", "9.9")
    assert version_of("onnxruntime") == "9.9"
    assert distribution_of("xgboost") is None


def test_a_kernel_of_a_gpu_is_compared_with_that_of_a_cpu(small_network: Network, ampere: Target) -> None:
    """It runs up to where there is no GPU: the kernel before any schedule, and CUDA's code of the scheduled one."""
    from tvm.s_tir.meta_schedule.arg_info import ArgInfo
    from tvm.s_tir.meta_schedule.search_strategy import MeasureCandidate

    task = lower(small_network.model, ampere).tasks[0]
    program = gpu_program(task.mod["main"], ampere)
    assert program is not None
    candidate = MeasureCandidate(program, ArgInfo.from_entry_func(task.mod))
    _, (record,) = log_lines(task.mod, ampere, [candidate], [[1.0]])
    trace = json.dumps(json.loads(record.line(0))[1][0])
    with contextlib.closing(Replayer(Device.of(ampere, 1), seed=0, timeout_s=60)) as replayer:
        outcome = replayer.replay(task, trace)
    assert outcome.failure
    assert "cuda" in outcome.error.lower()


def test_dlight_stands_in_where_tvms_rules_make_no_program(small_network: Network, ampere: Target) -> None:
    """Its program has a trace, so that a record of it can be applied."""
    from tvm.s_tir import Schedule

    for task in lower(small_network.model, ampere).tasks:
        program = gpu_program(task.mod["main"], ampere)
        assert program is not None
        assert not unbound_kernels(program.mod)
        replayed = Schedule(task.mod)
        program.trace.apply_to_schedule(replayed, remove_postproc=False)
        assert not unbound_kernels(replayed.mod)


@pytest.mark.nightly
def test_a_search_begins_with_what_a_gpu_runs_without_a_record(
    small_network: Network, ampere: Target, tmp_path: Path
) -> None:
    """Else the best of a few trials may be slower."""
    from tvm.s_tir.meta_schedule.utils import shash2hex

    task = lower(small_network.model, ampere).tasks[0]
    hashes = [shash2hex(candidate.sch.mod) for candidate in random_candidates(task, ampere, tmp_path)]
    program = gpu_program(task.mod["main"], ampere)
    assert program is not None
    assert hashes[0] == shash2hex(program.mod)
    assert 1 < len(hashes) <= 4
    assert len(set(hashes)) == len(hashes)


def some_program(mod: IRModule, target: Target) -> IRModule:
    from tvm.s_tir.meta_schedule import TuneContext

    context = TuneContext(
        mod=mod, target=target, space_generator=make_space_generator(mod, target), search_strategy="replay-trace"
    )
    context.pre_tuning(max_trials=16, num_trials_per_iter=4, design_spaces=context.generate_design_space())
    candidates = context.generate_measure_candidates()
    assert candidates
    program: IRModule = candidates[0].sch.mod
    return program


@pytest.mark.parametrize("dtype", every_second(["float16", "float32"]))
def test_programs_of_a_search_are_built_in_workers(dtype: str, small_network: Network, ampere: Target) -> None:
    lowered = lower(small_network.model, ampere, LoweringSettings(dtype=dtype))
    programs = [some_program(task.mod, ampere) for task in lowered.tasks if "conv" in task.info.name]
    assert programs
    with contextlib.closing(LocalBuilder(ampere, max_workers=1, timeout_s=60)) as builder:
        outcomes = builder.build(programs)
    assert [outcome.failure for outcome in outcomes] == [""] * len(programs)


def test_records_of_a_gpu_are_of_its_model_and_not_of_the_hosts_threads(ampere: Target) -> None:
    without_model = fingerprint(ampere, 2)
    a100 = dataclasses.replace(without_model, cpu_model="NVIDIA A100")
    assert why_not_applicable(dataclasses.replace(a100, num_threads=64), a100) == ""
    assert why_not_applicable(a100, without_model) == "", "where the GPU is not at hand its records may be compiled"
    assert "NVIDIA A30" in why_not_applicable(dataclasses.replace(a100, cpu_model="NVIDIA A30"), a100)
    assert why_not_applicable(fingerprint(resolve_target("cuda -arch=sm_86", 2), 2), without_model)


@pytest.mark.nightly
def test_from_a_plan_to_a_model_that_does_not_run_here(
    run_here: RunCommand,
    own_directory: Path,
    small_onnx: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """CUDA is compiled and not run, which the command says."""
    network = flags({"network": small_onnx, "target": AMPERE})
    assert run_here("plan", *network) == 0
    assert run_here("tune", *network) == 3
    assert "it is made for cuda, and " in capsys.readouterr().err
    assert run_here("tune", *network, "--trials", "0") == 0
    tuned = newest_run()
    assert run_here("records", "verify", tuned.info.run_id) == 3
    assert "it is made for cuda, and " in capsys.readouterr().err
    with caplog.at_level(logging.WARNING):
        assert run_here("compile", "--tune-run", tuned.info.run_id) == 0
    assert "the library for cuda sm_80 is compiled and was not run: it is made for cuda, and " in caplog.text
    compiled = newest_run()
    model_uri = compiled.data.tags[names.TAG_MODEL_URI]
    assert mlflow.models.get_model_info(model_uri).flavors["python_function"]["config"]["device"] == "cuda"
    assert run_here("evaluate", "--model-uri", model_uri) == 6
    assert "no library runs here: not the library for cuda sm_80: " in capsys.readouterr().err
    evaluated = newest_run()
    assert evaluated.info.status == "FAILED"
    assert mlflow.get_run(evaluated.info.run_id).data.tags[names.TAG_EXIT_CODE] == "6"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cache_flush": "true"}, "cache_flush=true flushes the caches of a CPU"),
        ({"rpc_tracker": "127.0.0.1:1", "rpc_key": "gpu"}, "programs are measured on the CPUs of servers only"),
    ],
)
def test_what_a_gpu_cannot_have(
    given: dict[str, str],
    message: str,
    run_here: RunCommand,
    own_directory: Path,
    small_onnx: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    parameters = {"network": small_onnx, "target": AMPERE, "trials": 0, **given}
    assert run_here("tune", *flags(parameters)) == 2
    assert message in capsys.readouterr().err
