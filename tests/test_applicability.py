"""Records are for one device; what makes another one of it is said in a line."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ansor_mlflow.device import DeviceFingerprint
from ansor_mlflow.records import why_not_applicable

HERE = DeviceFingerprint(
    target={"kind": "llvm", "mcpu": "znver4", "num-cores": 2, "opt-level": 2, "keys": ["cpu"], "tag": ""},
    machine="x86_64",
    cpu_model="AMD EPYC 9354",
    features=("avx2", "avx512f"),
    num_threads=2,
)


def with_target(**attributes: Any) -> DeviceFingerprint:
    return replace(HERE, target={**HERE.target, **attributes})


def test_the_same_device() -> None:
    assert why_not_applicable(replace(HERE), HERE) == ""


@pytest.mark.parametrize("decoration", [{"tag": "mine"}, {"keys": ["cpu", "x86"]}, {"libs": []}, {"model": "epyc"}])
def test_what_changes_no_code_does_not_matter(decoration: dict[str, Any]) -> None:
    assert why_not_applicable(with_target(**decoration), HERE) == ""


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (replace(with_target(mcpu="znver3"), num_threads=8), "for llvm znver3 ×8 -O2, this is llvm znver4 ×2 -O2"),
        (replace(HERE, num_threads=8), "for llvm znver4 ×8 -O2, this is llvm znver4 ×2 -O2"),
        (with_target(**{"opt-level": 3}), "for llvm znver4 ×2, this is llvm znver4 ×2 -O2"),
        (
            replace(HERE, cpu_model="AMD EPYC 9654"),
            "for llvm znver4 ×2 on AMD EPYC 9654, this is llvm znver4 ×2 on AMD EPYC 9354",
        ),
        (replace(HERE, machine="aarch64"), "for llvm znver4 ×2 on aarch64, this is llvm znver4 ×2 on x86_64"),
        (with_target(mattr=["+fma"]), r"for llvm znver4 ×2, {.*\+fma.*}, this is llvm znver4 ×2, {.*}"),
        (replace(HERE, features=("avx2",)), "for llvm znver4 ×2 with other CPU features: avx512f"),
        (replace(HERE, features=tuple("abcdefg")), "other CPU features: a, avx2, avx512f, b, c, …"),
    ],
    ids=["CPU and threads", "threads", "optimisation", "model", "machine", "attribute", "feature", "many features"],
)
def test_another_device(other: DeviceFingerprint, reason: str) -> None:
    import re

    assert re.search(reason, why_not_applicable(other, HERE)), why_not_applicable(other, HERE)
