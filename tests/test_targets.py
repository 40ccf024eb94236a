"""Targets as users write them, the CPUs and threads a process has, and the fingerprint of a device."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import string
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansor_mlflow.errors import MachineError, UserInputError
from ansor_mlflow.targets import (
    DeviceFingerprint,
    available_cpus,
    fingerprint,
    missing_instructions,
    parse_target,
    require_measurable_here,
    resolve_num_threads,
    resolve_target,
    why_not_runnable,
)

if TYPE_CHECKING:
    from tvm.target import Target

THREAD_PROBE = Path(__file__).with_name("thread_probe.py")
needs_two_cpus = pytest.mark.skipif(available_cpus() < 2, reason="needs two CPUs")


# -- how targets are written -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "parsed"),
    [
        ("auto", "auto"),
        ("llvm", "llvm"),
        ("  aws/cpu/c5.9xlarge ", "aws/cpu/c5.9xlarge"),
        ('{"kind": "llvm", "num-cores": 2}', {"kind": "llvm", "num-cores": 2}),
        (
            "llvm -mcpu=skylake-avx512 -num-cores 2",
            {"kind": "llvm", "mcpu": "skylake-avx512", "num-cores": 2},
        ),
        ("llvm --mcpu=znver4 --num-cores=4", {"kind": "llvm", "mcpu": "znver4", "num-cores": 4}),
        ("llvm -libs=a,b -mattr +avx2,-fma", {"kind": "llvm", "libs": ["a", "b"], "mattr": ["+avx2", "-fma"]}),
        ("c -link-params -keys=cpu", {"kind": "c", "link-params": True, "keys": ["cpu"]}),
        ("llvm -mtriple='aarch64-linux-gnu'", {"kind": "llvm", "mtriple": "aarch64-linux-gnu"}),
        ("llvm -mabi=", {"kind": "llvm", "mabi": ""}),
    ],
)
def test_forms_of_a_target(spec: str, parsed: Any) -> None:
    assert parse_target(spec) == parsed


words = st.text(string.ascii_lowercase + string.digits + "-_.+", min_size=1, max_size=8).filter(lambda w: w[0] != "-")
flags = st.dictionaries(
    words.filter(lambda name: name[0].isalpha() and name not in ("keys", "libs", "mattr", "kind")),
    st.one_of(st.booleans().filter(bool), st.integers(0, 10**6), words.filter(lambda word: not word.isdecimal())),
    max_size=5,
)


@given(attributes=flags, joined=st.booleans())
def test_every_flag_is_read_back(attributes: dict[str, Any], joined: bool) -> None:
    text = "llvm"
    for name, value in attributes.items():
        text += f" -{name}" if value is True else f" -{name}{'=' if joined else ' '}{shlex.quote(str(value))}"
    assert parse_target(text) == ({"kind": "llvm", **attributes} if attributes else "llvm")


@given(st.text())
def test_any_text_is_parsed_or_refused_in_one_line(spec: str) -> None:
    message = ""
    try:
        parse_target(spec)
    except UserInputError as err:
        message = str(err)
    assert len(message.splitlines()) <= 1


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ('{"kind": "llvm"', r"target='\{.*' is not valid JSON .*; write an object with a \"kind\""),
        ("llvm 'mcpu", r"cannot be read \(No closing quotation\); write a tag, JSON or `llvm -mcpu=…`"),
        ("llvm mcpu=znver4", "'mcpu=znver4' is neither a flag nor a flag's value; write -name=value"),
        ("llvm -mcpu=a b", "'b' is neither a flag nor a flag's value"),
        ("", "target='' is empty; write auto, a tag, JSON or `llvm -mcpu=…`"),
        (" ", "target=' ' is empty"),
    ],
)
def test_text_that_is_no_target(spec: str, message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        parse_target(spec)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("llvn", r"target='llvn' is unknown to TVM: .*; use auto, a tag, JSON or `llvm -mcpu=…`"),
        ("aws/cpu/c99.large", "target='aws/cpu/c99.large' is unknown to TVM"),
        ("llvm -no-such-flag=1", "unknown to TVM: .*no-such-flag"),
        ('{"mcpu": "znver4"}', "unknown to TVM"),
        ("llvm -mcpu=skylake-avx51", "LLVM knows no CPU 'skylake-avx51'; perhaps you meant skylake-avx512"),
        ("llvm -mcpu=0", "LLVM knows no CPU|unknown to TVM"),
        ("llvm -mcpu=qqqqqqqq", "LLVM knows no CPU 'qqqqqqqq'; use target=auto for this host"),
    ],
)
def test_target_that_tvm_does_not_know(spec: str, message: str) -> None:
    with pytest.raises(UserInputError, match=message) as caught:
        resolve_target(spec, 2)
    assert "\n" not in str(caught.value)


def attributes_of(target: Target) -> dict[str, Any]:
    return json.loads(str(target))


def test_auto_is_this_hosts_cpu_with_the_number_of_threads() -> None:
    attributes = attributes_of(resolve_target("auto", 3))
    assert attributes["kind"] == "llvm"
    assert attributes["mcpu"]
    assert attributes["num-cores"] == 3


@pytest.mark.parametrize(
    ("spec", "num_cores"),
    [
        ("llvm", 3),
        ("llvm -mcpu=skylake-avx512", 3),
        ("llvm -mcpu=skylake-avx512 -num-cores 2", 2),
        ('{"kind": "llvm", "num-cores": 5}', 5),
    ],
)
def test_target_keeps_the_number_of_cores_it_names(spec: str, num_cores: int) -> None:
    assert attributes_of(resolve_target(spec, 3))["num-cores"] == num_cores


def test_tag_is_resolved_with_its_own_number_of_cores() -> None:
    attributes = attributes_of(resolve_target("aws/cpu/c5.9xlarge", 2))
    assert (attributes["mcpu"], attributes["num-cores"]) == ("skylake-avx512", 18)


def test_triple_of_an_unknown_architecture_is_refused() -> None:
    """LLVM itself would end the process."""
    with pytest.raises(UserInputError, match="LLVM generates no code for 'zzz'; the triple must begin with one of"):
        resolve_target("llvm -mtriple=zzz-linux-gnu -mcpu=generic", 2)


def test_number_of_cores_must_be_positive() -> None:
    with pytest.raises(UserInputError, match="num-cores is 0; it must be at least 1"):
        resolve_target("llvm -num-cores=0", 2)


# -- CPUs of a process -----------------------------------------------------------------------------------------------

cgroup_v2 = {"cpu.max": "{quota} 100000\n"}
cgroup_v1 = {"cpu/cpu.cfs_quota_us": "{quota}\n", "cpu/cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize("files", [cgroup_v2, cgroup_v1], ids=["v2", "v1"])
@pytest.mark.parametrize(
    ("quota", "cpus"), [(100000, 1), (199999, 1), (50000, 1), (1000, 1), (10**9, len(os.sched_getaffinity(0)))]
)
def test_quota_of_a_container(tmp_path: Path, files: dict[str, str], quota: int, cpus: int) -> None:
    (tmp_path / "cpu").mkdir()
    for name, content in files.items():
        (tmp_path / name).write_text(content.format(quota=quota))
    assert available_cpus(tmp_path, tmp_path / "none") == cpus


def test_the_smallest_quota_of_nested_groups_counts(tmp_path: Path) -> None:
    """As systemd and Slurm make them, without a namespace that hides the outer groups."""
    service = tmp_path / "system.slice" / "tuner.service"
    service.mkdir(parents=True)
    (tmp_path / "own").write_text("0::/system.slice/tuner.service\n")
    (service / "cpu.max").write_text("max 100000\n")
    (service.parent / "cpu.max").write_text("100000 100000\n")
    assert available_cpus(tmp_path, tmp_path / "own") == 1


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"cpu.max": "max 100000\n"},
        {"cpu.max": "nonsense"},
        {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
        {"cpu/cpu.cfs_quota_us": "100000\n"},
    ],
)
def test_no_quota(tmp_path: Path, files: dict[str, str]) -> None:
    (tmp_path / "cpu").mkdir()
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert available_cpus(tmp_path, tmp_path / "none") == len(os.sched_getaffinity(0))


def test_affinity_of_a_process() -> None:
    code = (
        "import os; from ansor_mlflow.targets import available_cpus;"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); print(available_cpus())"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "1"


def test_number_of_threads() -> None:
    assert resolve_num_threads("auto") == available_cpus()
    assert resolve_num_threads(1) == 1


def test_more_threads_than_cpus() -> None:
    cpus = available_cpus()
    with pytest.raises(UserInputError, match=f"num_threads={cpus + 1}, but this process may use {cpus} CPUs .*at most"):
        resolve_num_threads(cpus + 1)


# -- threads of TVM's kernels ----------------------------------------------------------------------------------------


def probe_threads(*num_threads: int) -> list[dict[str, int]]:
    """Sets each number in turn, in one fresh process, and counts the threads that a parallel kernel then runs on."""
    command = [sys.executable, str(THREAD_PROBE), *map(str, num_threads)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return json.loads(result.stdout)


def test_one_thread_is_one() -> None:
    assert probe_threads(1) == [{"returned": 1, "here": 1, "later": 1}]


@needs_two_cpus
def test_two_threads_are_two_and_can_become_one() -> None:
    assert probe_threads(2, 1) == [{"returned": 2, "here": 2, "later": 2}, {"returned": 1, "here": 1, "later": 1}]


@needs_two_cpus
def test_a_thread_that_ran_kernels_cannot_get_more_threads_and_says_so() -> None:
    assert probe_threads(1, 2)[1] == {"returned": 1, "here": 1, "later": 2}


# -- fingerprints ----------------------------------------------------------------------------------------------------


def test_fingerprint_survives_json(host_target: Target) -> None:
    device = fingerprint(host_target, 2)
    again = DeviceFingerprint.from_dict(json.loads(device.to_json()))
    assert again == device
    assert again.name == device.name


def test_name_of_a_fingerprint_tells_devices_apart(host_target: Target) -> None:
    one, two = fingerprint(host_target, 1), fingerprint(host_target, 2)
    other = fingerprint(resolve_target("llvm -mcpu=skylake-avx512", 2), 2)
    assert len({one.name, two.name, other.name}) == 3
    assert two.name.startswith("llvm-")
    assert "-x2-" in two.name
    assert set(two.name) <= set(string.ascii_letters + string.digits + "-_.")


def test_short_description() -> None:
    assert fingerprint(resolve_target("llvm -mcpu=znver4", 2), 2).description == "llvm znver4 ×2"
    assert fingerprint(resolve_target("llvm", 1), 1).description == "llvm ×1"
    assert fingerprint(resolve_target("cuda -arch=sm_90", 4), 4).description == "cuda sm_90 ×4"


def test_code_for_this_host_runs_here(host_target: Target) -> None:
    assert why_not_runnable(fingerprint(host_target, 1)) is None
    require_measurable_here(host_target, 1)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"machine": "riscv128"}, "it is made for riscv128, this host is .*"),
        ({"features": ("avx1024f",)}, "it needs instructions of .* that this host .* lacks: avx1024f"),
        ({"target": {"kind": "cuda"}}, "it is made for cuda, this host runs llvm libraries"),
    ],
)
def test_why_code_of_another_device_does_not_run_here(host_target: Target, fields: dict[str, Any], reason: str) -> None:
    device = json.loads(fingerprint(host_target, 1).to_json())
    why = why_not_runnable(DeviceFingerprint.from_dict({**device, **fields}))
    assert re.fullmatch(reason, why or "")


@pytest.mark.parametrize(
    ("needed", "missing"),
    [
        (("sse4.2", "avx512f", "slow-3ops-lea", "false-deps-popcnt", "prefer-256-bit", "ermsb"), ["avx512f", "sse4.2"]),
        (("neon", "sve2-aes", "dotprod", "fuse-aes", "use-postra-scheduler"), ["dotprod", "neon", "sve2-aes"]),
        (("slow-incdec", "vzeroupper", "idivq-to-divl", "macrofusion"), []),
    ],
)
def test_only_instructions_can_be_missing(needed: tuple[str, ...], missing: list[str]) -> None:
    """LLVM lists the hints for its own scheduling among a CPU's features; they differ from model to model."""
    assert missing_instructions(needed, ["cx16"]) == missing
    assert missing_instructions(needed, needed) == []


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the levels of x86-64")
def test_code_for_the_level_of_an_older_cpu_runs_here() -> None:
    require_measurable_here(resolve_target("llvm -mcpu=x86-64", 1), 1)
    require_measurable_here(resolve_target("llvm -mcpu=x86-64-v2", 1), 1)


def test_target_of_another_device_cannot_be_measured_here() -> None:
    with pytest.raises(MachineError, match=r"cannot be measured on this host: it is made for cuda.*; use target=auto"):
        require_measurable_here(resolve_target("cuda", 1), 1)
