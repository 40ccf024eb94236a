"""Targets as users write them, and the fingerprint of a device."""

from __future__ import annotations

import json
import re
import shlex
import string
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansor_mlflow.device.cpu import missing_instructions
from ansor_mlflow.device.device import Device, DeviceFingerprint, fingerprint, why_not_runnable
from ansor_mlflow.device.targets import parse_target, resolve_target
from ansor_mlflow.errors import MachineError, UserInputError

if TYPE_CHECKING:
    from tvm.target import Target


@pytest.mark.parametrize(
    ("spec", "parsed"),
    [
        ("auto", "auto"),
        ("llvm", "llvm"),
        ("  aws/cpu/c5.9xlarge ", "aws/cpu/c5.9xlarge"),
        ('{"kind": "llvm", "num-cores": 2}', {"kind": "llvm", "num-cores": 2}),
        ("llvm -mcpu=skylake-avx512 -num-cores 2", {"kind": "llvm", "mcpu": "skylake-avx512", "num-cores": 2}),
        ("llvm -libs=a,b -mattr +avx2,-fma", {"kind": "llvm", "libs": ["a", "b"], "mattr": ["+avx2", "-fma"]}),
        ("c -link-params -keys=cpu", {"kind": "c", "link-params": True, "keys": ["cpu"]}),
        ("llvm -mtriple='aarch64-linux-gnu'", {"kind": "llvm", "mtriple": "aarch64-linux-gnu"}),
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
        ("", "target='' is empty; write auto, a tag, JSON or `llvm -mcpu=…`"),
    ],
)
def test_text_that_is_no_target(spec: str, message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        parse_target(spec)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("llvn", r"target='llvn' is unknown to TVM: .*; use auto, a tag, JSON or `llvm -mcpu=…`"),
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


@pytest.mark.parametrize(("spec", "opt_level"), [("auto", 2), ("llvm", 2), ("llvm -opt-level=3", 3)])
def test_target_keeps_the_optimisation_level_it_names(spec: str, opt_level: int) -> None:
    assert attributes_of(resolve_target(spec, 3))["opt-level"] == opt_level


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


def test_name_of_a_fingerprint_tells_devices_apart(host_target: Target) -> None:
    one, two = fingerprint(host_target, 1), fingerprint(host_target, 2)
    other = fingerprint(resolve_target("llvm -mcpu=skylake-avx512", 2), 2)
    assert len({one.name, two.name, other.name}) == 3
    assert two.name.startswith("llvm-")
    assert "-x2-" in two.name
    assert set(two.name) <= set(string.ascii_letters + string.digits + "-_.")


def test_code_for_this_host_runs_here(host_target: Target) -> None:
    assert not why_not_runnable(fingerprint(host_target, 1))
    Device.of(host_target, 1).require_measurable_here()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"machine": "riscv128"}, "it is made for riscv128, this host is .*"),
        ({"features": ("avx1024f",)}, "it needs instructions of .* that this host .* lacks: avx1024f"),
        ({"target": {"kind": "cuda", "arch": "sm_10"}}, "it is made for cuda, and .*"),
    ],
)
def test_why_code_of_another_device_does_not_run_here(host_target: Target, fields: dict[str, Any], reason: str) -> None:
    device = json.loads(fingerprint(host_target, 1).to_json())
    why = why_not_runnable(DeviceFingerprint.from_dict({**device, **fields}))
    assert re.fullmatch(reason, why)


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


def test_target_of_another_device_cannot_be_measured_here() -> None:
    with pytest.raises(MachineError, match=r"cannot be measured on this host: it is made for cuda.*; use target=auto"):
        Device.of(resolve_target("cuda -arch=sm_10", 1), 1).require_measurable_here()
