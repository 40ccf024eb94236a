"""The CPUs a process may use, those that kernels are measured on, and the threads that kernels really run on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.commands import TESTS

from ansor_mlflow.device.threads import available_cpus, measuring_cpus, resolve_num_threads
from ansor_mlflow.errors import UserInputError

THREAD_PROBE = TESTS / "helpers" / "thread_probe.py"
needs_two_cpus = pytest.mark.skipif(available_cpus() < 2, reason="needs two CPUs")


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
        "import os; from ansor_mlflow.device.threads import available_cpus;"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); print(available_cpus())"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "1"


def test_more_threads_than_cpus() -> None:
    cpus = available_cpus()
    with pytest.raises(UserInputError, match=f"num_threads={cpus + 1}, but this process may use {cpus} CPUs .*at most"):
        resolve_num_threads(cpus + 1)


def describe_cpus(root: Path, siblings: list[str]) -> None:
    for cpu, text in enumerate(siblings):
        topology = root / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{text}\n")


HALVES = ["0,4", "1,5", "2,6", "3,7"] * 2
"""Four cores, numbered as Intel's are: first every core's first thread."""
NEIGHBOURS = [f"{cpu}-{cpu + 1}" for cpu in (0, 0, 2, 2, 4, 4, 6, 6)]
"""Four cores, numbered as in most virtual machines: a core's two threads one after the other."""


@pytest.mark.parametrize(
    ("siblings", "num_threads", "cpus"),
    [
        (HALVES, 1, {0}),
        (HALVES, 4, {0, 1, 2, 3}),
        (HALVES, 6, {0, 1, 2, 3, 4, 5}),
        (NEIGHBOURS, 1, {0}),
        (NEIGHBOURS, 4, {0, 2, 4, 6}),
        (NEIGHBOURS, 6, {0, 1, 2, 3, 4, 6}),
        (NEIGHBOURS, 8, set(range(8))),
        ([], 3, {0, 1, 2}),
    ],
)
def test_a_core_is_taken_before_the_second_thread_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, siblings: list[str], num_threads: int, cpus: set[int]
) -> None:
    describe_cpus(tmp_path, siblings)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert measuring_cpus(num_threads, tmp_path, process=0) == cpus


def test_a_core_of_which_only_the_second_thread_is_allowed_is_a_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe_cpus(tmp_path, NEIGHBOURS)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2, 3, 7})
    assert measuring_cpus(3, tmp_path, process=0) == {1, 2, 7}
    assert measuring_cpus(4, tmp_path, process=0) == {1, 2, 3, 7}


def test_processes_begin_at_different_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    describe_cpus(tmp_path, HALVES)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert [measuring_cpus(2, tmp_path, process) for process in (10, 11, 12)] == [{0, 1}, {2, 3}, {0, 1}]
    assert measuring_cpus(3, tmp_path, process=1) == {3, 0, 1}


def probe_threads(*num_threads: int) -> list[dict[str, int]]:
    """Sets each number in turn, in one fresh process, and counts the threads that a parallel kernel then runs on."""
    command = [sys.executable, str(THREAD_PROBE), *map(str, num_threads)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=280)
    return json.loads(result.stdout)


@needs_two_cpus
def test_two_threads_are_two_and_can_become_one() -> None:
    assert probe_threads(2, 1) == [{"returned": 2, "here": 2, "later": 2}, {"returned": 1, "here": 1, "later": 1}]


@needs_two_cpus
def test_a_thread_that_ran_kernels_cannot_get_more_threads_and_says_so() -> None:
    assert probe_threads(1, 2)[1] == {"returned": 1, "here": 1, "later": 2}
