"""The command `doctor`: what it finds on a machine, at a server and in a store that is really so."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import boto3
import mlflow
import numpy as np
import pytest
from helpers.commands import ANSOR_MLFLOW, Finished, RunCommand, environment, flags
from helpers.commands import run as run_command
from helpers.runs_here import QUICK
from helpers.servers import ACCESS_KEY, SECRET_KEY, S3Server, Server, mlflow_server, s3_server
from mlflow.store.artifact.artifact_repository_registry import get_registered_artifact_repositories
from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository

from ansor_mlflow.commands.doctor import Check, Diagnosis
from ansor_mlflow.commands.doctor.examination import bounded, run_checks
from ansor_mlflow.commands.doctor.machine import (
    check_disk,
    check_kernel,
    check_memory,
    check_project,
    check_target,
    check_threads,
    check_versions,
    start_kernel,
)
from ansor_mlflow.commands.doctor.servers import TrackingStore, check_store, check_version
from ansor_mlflow.device import available_cpus, cpu_quota, memory_left
from ansor_mlflow.errors import MachineError

PASSWORD = "password-of-the-tests"


def made(run: Callable[[], Check | None]) -> Check:
    """The check that a function makes as the command does: errors are red."""
    (check,) = run_checks({"check": run})
    return check


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3"), "team") as server:
        yield server


@pytest.fixture
def s3_client(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    for name, value in {**s3.environment(), "MLFLOW_BOTO_CLIENT_ADDRESSING_STYLE": "path"}.items():
        monkeypatch.setenv(name, value)
    return s3


def objects_in(s3: S3Server) -> list[Path]:
    return [path for path in s3.directory.rglob("*") if path.is_file()]


@dataclass(frozen=True)
class Examined:
    finished: Finished
    checks: dict[str, Check]
    elapsed_s: float
    server: Server
    directory: Path


@pytest.fixture(scope="module")
def tracking(tmp_path_factory: pytest.TempPathFactory, s3: S3Server) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("tracking")
    with mlflow_server(directory, artifact_root="s3://team/artifacts", environment=s3.environment()) as server:
        yield server


@pytest.fixture(scope="module")
def examined(tmp_path_factory: pytest.TempPathFactory, s3: S3Server, tracking: Server) -> Examined:
    directory, report = tmp_path_factory.mktemp("examined"), tmp_path_factory.mktemp("report") / "doctor.json"
    uri = tracking.url.replace("://", f"://user:{PASSWORD}@")
    command = [ANSOR_MLFLOW, "doctor", "--experiment", "tomorrow", "--json", str(report)]
    finished = run_command(command, directory, environment(uri, s3.environment()), 400)
    found = json.loads(report.read_text())
    checks = {check["name"]: Check(**check) for check in found["checks"]}
    return Examined(finished, checks, found["elapsed_s"], tracking, directory)


@pytest.mark.system
@pytest.mark.timeout(600)
def test_every_check_has_a_line_and_red_decides_the_exit_code(examined: Examined) -> None:
    """The machine may be noisy: other tests may run at the same time. On two quiet cores it takes less than 20 s."""
    assert list(examined.checks) == [
        *("noise", "versions", "target", "threads", "memory", "disk", "tracking", "artifact store", "kernel")
    ]
    lines = [line for line in examined.finished.stdout.splitlines() if line][:-1]
    assert [line.split()[0] for line in lines] == [check.status for check in examined.checks.values()]
    for line, check in zip(lines, examined.checks.values(), strict=True):
        assert check.name in line
        assert line.endswith(f"; {check.fix}" if check.fix else check.message)
        assert bool(check.fix) == (check.status != "green")
    red = {name for name, check in examined.checks.items() if check.status == "red"}
    assert red <= {"noise"}, examined.finished.stdout
    assert examined.finished.exit_code == (3 if red else 0)
    assert bool(examined.finished.errors) == bool(red)
    assert "Traceback" not in examined.finished.stderr
    print(f"doctor took {examined.elapsed_s:.1f} s")
    assert examined.elapsed_s < 200


@pytest.mark.system
def test_what_is_said_has_no_secret_and_nothing_is_left_anywhere(examined: Examined, s3: S3Server) -> None:
    said = examined.finished.stdout + examined.finished.stderr + "".join(map(str, examined.checks.values()))
    assert not [secret for secret in (PASSWORD, SECRET_KEY, ACCESS_KEY) if secret in said]
    assert "MLflow " + mlflow.__version__ in examined.checks["tracking"].message
    assert "there is no tomorrow yet" in examined.checks["tracking"].message
    assert examined.checks["artifact store"].message.startswith("s3://team/artifacts/0: ")
    assert objects_in(s3) == []
    assert list(examined.directory.iterdir()) == []
    client = mlflow.MlflowClient(examined.server.url)
    assert client.get_experiment_by_name("tomorrow") is None
    assert client.search_runs(["0"]) == []


def test_the_error_names_what_is_red() -> None:
    checks = (
        Check("green", "fine", name="a"),
        Check("red", "gone", "mend it", "b"),
        Check("yellow", "slow", "hurry", "c"),
    )
    with pytest.raises(MachineError, match=r"^1 of 3 checks are red: b; their lines say what to do$"):
        Diagnosis(checks=checks, elapsed_s=1.0).require_no_red()
    Diagnosis(checks=(checks[0], checks[2]), elapsed_s=1.0).require_no_red()


def test_a_check_that_never_ends_is_red_and_is_not_waited_for() -> None:
    never = threading.Event()

    def wait() -> None:
        never.wait()

    check = made(bounded(wait, 0.2))
    never.set()
    assert (check.status, check.message) == ("red", "no answer within 0 s")


def test_whatever_a_check_raises_is_red() -> None:
    def fail() -> None:
        raise OSError("http://user:secret@host password=secret")

    (check,) = run_checks({"it": fail, "absent": lambda: None})
    assert (check.name, check.status) == ("it", "red")
    assert "OSError" in check.message
    assert "secret" not in check.message
    assert check.fix


def test_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an extra counts what is installed."""
    folder = tmp_path / "pinned-1.0.dist-info"
    folder.mkdir()
    needs = ["numpy>=99", "nowhere-to-be-found>=1", "pytest>=1", "nowhere-either>=1; extra == 'more'"]
    lines = ["Metadata-Version: 2.1", "Name: pinned", "Version: 1.0", *(f"Requires-Dist: {need}" for need in needs)]
    (folder / "METADATA").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    check = check_versions("pinned")
    assert check.status == "red"
    assert check.message == f"numpy {np.__version__}, not >=99, nowhere-to-be-found is missing, not >=1"
    assert check.fix == "pip install 'numpy>=99' 'nowhere-to-be-found>=1'"
    assert check_versions("nowhere-to-be-found").status == "yellow"
    check = check_versions()
    assert check.status == "green", check
    assert platform.python_version() in check.message


def kernel_here(target: str = "auto", timeout_s: float = 120) -> Check:
    return made(lambda: check_kernel(start_kernel(target), timeout_s))


def test_a_kernel_is_compiled_and_run() -> None:
    check = kernel_here()
    assert check.status == "green", check


@pytest.mark.parametrize(
    ("program", "code", "message"),
    [
        ("tvm_ffi.py", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "TVM ended with SIGSEGV: it and apa"),
        ("tvm_ffi.py", "raise ImportError('libtvm_ffi.so: cannot open')", "the step 'import' failed: ImportError: lib"),
        ("g++", "#!/bin/sh\necho 'cannot find -lstdc++' >&2\nexit 1\n", "the step 'link' failed: RuntimeError: "),
    ],
    ids=["another apache-tvm-ffi", "import error", "a compiler that does not link"],
)
def test_parts_that_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, code: str, message: str
) -> None:
    """With apache-tvm-ffi 0.1.15 the process ends."""
    (tmp_path / program).write_text(code)
    (tmp_path / program).chmod(0o755)
    for variable in ("PYTHONPATH", "PATH"):
        monkeypatch.setenv(variable, os.pathsep.join([str(tmp_path), os.environ.get(variable, "")]))
    check = kernel_here()
    assert check.status == "red"
    assert check.message.startswith(message)
    assert ("g++" in check.fix) == (program == "g++")


def test_a_kernel_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import time; time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    check = kernel_here(timeout_s=1)
    assert (check.status, check.message) == ("yellow", "compiling and running one did not end within 1 s")


OTHER_MACHINE = "x86_64" if platform.machine() == "aarch64" else "aarch64"


@pytest.mark.parametrize(
    ("target", "status", "message"),
    [
        ("auto", "green", r"^llvm .*×1 on .+"),
        (f"llvm -mtriple={OTHER_MACHINE}-linux-gnu", "red", "cannot be measured on this host: it is made for"),
        ("cuda -arch=sm_10", "red", "cannot be measured on this host: it is made for cuda"),
        ("llvm -mcpu=nonsense", "red", "LLVM knows no CPU 'nonsense'"),
        ("nonsense", "red", "target='nonsense' is unknown to TVM"),
    ],
)
def test_targets_and_this_cpu(target: str, status: str, message: str) -> None:
    check = made(lambda: check_target(target, 1))
    assert check.status == status
    assert re.search(message, check.message), check.message


@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs a CPU with AVX2")
def test_a_target_that_uses_less_than_the_cpu_has() -> None:
    check = check_target("llvm", 1)
    assert (check.status, check.fix) == ("yellow", "use target=auto, or name the CPU with -mcpu")
    assert "instructions that it has are left unused, avx2" in check.message


def test_threads() -> None:
    cpus = len(os.sched_getaffinity(0))
    assert check_threads(1, None).status == "green"
    assert check_threads(1, float(cpus)).status == "green"
    too_many = check_threads(cpus + 1, None)
    assert (too_many.status, too_many.fix) == ("red", f"give num_threads={cpus}")
    throttled = check_threads(1, 0.5)
    assert throttled.status == "red"
    assert "0.5 by the cgroup's quota" in throttled.message


def test_the_quota_of_a_nested_group_of_version_1(tmp_path: Path) -> None:
    """As Docker makes them, without a namespace that hides the outer groups."""
    group = tmp_path / "cpu" / "docker" / "tuner"
    group.mkdir(parents=True)
    (group / "cpu.cfs_quota_us").write_text("150000\n")
    (group / "cpu.cfs_period_us").write_text("100000\n")
    (tmp_path / "own").write_text("4:memory:/\n3:cpu,cpuacct:/docker/tuner\n0::/\n")
    assert cpu_quota(tmp_path, tmp_path / "own") == 1.5
    assert cpu_quota(tmp_path, tmp_path / "none") is None
    assert available_cpus(tmp_path, tmp_path / "own") == 1


MEMORY_FILES = {
    "v2": ("", "memory.max", "memory.current", "inactive_file"),
    "v1": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


@pytest.mark.parametrize("version", MEMORY_FILES)
@pytest.mark.parametrize(("limit", "left"), [("3000", 1100), ("1000", 0), ("max", None), ("9223372036854771712", None)])
def test_memory_that_a_container_has_left(tmp_path: Path, version: str, limit: str, left: int | None) -> None:
    folder, limit_file, usage_file, cached = MEMORY_FILES[version]
    (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / folder / limit_file).write_text(f"{limit}\n")
    (tmp_path / folder / usage_file).write_text("2000\n")
    (tmp_path / folder / "memory.stat").write_text(f"anon 1900\n{cached} 100\n")
    assert memory_left(tmp_path, tmp_path / "none") == left


def test_memory() -> None:
    assert check_memory(1, 512, None).status == "green"
    much = check_memory(2, 2**40, None)
    assert much.status == "yellow"
    assert "each worker may take 1099511627776 MiB, 2 at a time" in much.message
    narrow = check_memory(1, 512, 2**29)
    assert narrow.status == "red"
    assert narrow.message.startswith("0.5 GiB are free in the cgroup")


def test_a_directory_that_cannot_be_written_to() -> None:
    check = check_disk(Path("/proc"))
    assert check.status == "red"
    assert check.message.startswith("/proc cannot be written to: ")


@pytest.mark.parametrize(("free", "status"), [(2**40, "green"), (2**30, "yellow"), (2**27, "red")])
def test_the_space_of_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, status: str) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    check = check_disk(tmp_path)
    assert check.status == status
    assert f"{free / 2**30:.1f} GiB are free in {tmp_path}" in check.message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("status", "text", "colour", "message"),
    [
        (200, mlflow.__version__, "green", f"MLflow {mlflow.__version__}"),
        (200, "2.1.0", "yellow", "has MLflow 2.1.0, this client "),
        (200, "<html>another program</html>", "red", "answers, but not with MLflow's version"),
        (401, "who are you", "red", "refuses this user (HTTP 401)"),
    ],
)
def test_what_a_tracking_server_answers(status: int, text: str, colour: str, message: str) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        check = made(lambda: check_version(f"http://127.0.0.1:{server.server_address[1]}"))
        server.shutdown()
    assert check.status == colour
    assert message in check.message
    assert "refuses" not in message or "MLFLOW_TRACKING_PASSWORD" in check.fix


@pytest.mark.system
def test_a_server_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A firewall that drops packets looks like this: who connects waits."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        check = made(TrackingStore(f"http://127.0.0.1:{sock.getsockname()[1]}", "").check_server)
    assert check.status == "red"
    assert "timeout" in check.message


def test_a_new_database_is_not_made(tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    store = TrackingStore(f"sqlite:///{path}", "")
    check = made(store.check_server)
    assert check.status == "green"
    assert check.message.endswith("a store that the first command makes")
    assert store.check_artifacts() is None
    assert not path.exists()


def test_experiments(experiment_id: str, tmp_path: Path) -> None:
    uri, client = mlflow.get_tracking_uri(), mlflow.MlflowClient()
    deleted_id = client.create_experiment(f"deleted {tmp_path}", (tmp_path / "artifacts").as_uri())
    client.delete_experiment(deleted_id)

    def check(given: str) -> Check:
        return made(TrackingStore(uri, given).check_server)

    assert check("tests").status == check(experiment_id).status == "green"
    assert f"(ID {experiment_id})" in check("tests").message
    assert check("not there").message.endswith("; there is no not there yet, the first run makes it")
    assert client.get_experiment_by_name("not there") is None
    assert check("99999999").status == "red"
    deleted = check(f"deleted {tmp_path}")
    assert deleted.status == "red"
    assert deleted.fix.startswith(f"mlflow experiments restore --experiment-id {deleted_id}")


def test_a_file_in_parts_goes_to_s3_and_away_again(s3_client: S3Server) -> None:
    boto3.setup_default_session()
    calls: list[str] = []
    boto3.DEFAULT_SESSION.events.register("before-call.s3", lambda model, **_: calls.append(model.name))
    check = made(lambda: check_store("s3://team/parts", ""))
    boto3.setup_default_session()
    assert check.status == "green", check
    assert calls.count("UploadPart") == 2
    assert {"PutObject", "CompleteMultipartUpload", "GetObject", "ListObjectsV2", "DeleteObjects"} <= set(calls)
    assert objects_in(s3_client) == []


@pytest.mark.parametrize(
    ("key", "location", "message"),
    [
        ("another-key", "s3://team/wrong", "SignatureDoesNotMatch"),
        (SECRET_KEY, "s3://elsewhere/key", "NoSuchBucket"),
        (None, "s3://team/none", "credentials"),
    ],
    ids=["wrong key", "missing bucket", "no credentials"],
)
def test_a_store_that_refuses(
    s3_client: S3Server, monkeypatch: pytest.MonkeyPatch, key: str | None, location: str, message: str
) -> None:
    # MLflow keeps its clients by their addresses, and would use that of another test
    monkeypatch.setenv("MLFLOW_S3_ENDPOINT_URL", s3_client.url + "/" * len(message))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key or "")
    if key is None:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, "/nowhere")
    boto3.setup_default_session()
    check = made(lambda: check_store(location, ""))
    assert check.status == "red"
    assert message in check.message
    assert "AWS_SECRET_ACCESS_KEY" in check.fix
    assert not [key for key in (SECRET_KEY, ACCESS_KEY) if key in str(check)]


def test_a_folder_on_this_machine(tmp_path: Path) -> None:
    missing = tmp_path / "not" / "yet"
    assert check_store(missing.as_uri(), "sqlite:///mlflow.db").status != "red"
    assert not missing.parent.exists()
    assert check_store(str(missing), "http://mlflow.example.com").status == "yellow"
    assert check_store("/proc/nowhere", "sqlite:///mlflow.db").status == "red"


class _Store(LocalArtifactRepository):
    """A store under `odd:` that is a folder here."""

    def __init__(self, artifact_uri: str, **_: object) -> None:
        super().__init__(artifact_uri.removeprefix("odd:"))


class _KeepingStore(_Store):
    def delete_artifacts(self, artifact_path: str | None = None) -> None:
        pass


class _ForgetfulStore(_Store):
    def log_artifact(self, local_file: str, artifact_path: str | None = None) -> None:
        Path(local_file).write_bytes(bytes(Path(local_file).stat().st_size))
        super().log_artifact(local_file, artifact_path)


class _SlowStore(_Store):
    def log_artifact(self, local_file: str, artifact_path: str | None = None) -> None:
        threading.Event().wait(2.1)
        super().log_artifact(local_file, artifact_path)


@pytest.mark.parametrize(
    ("store", "status", "message", "num_left"),
    [
        (_Store, "green", "a small and a large file were written, listed, read and deleted", 0),
        (_KeepingStore, "yellow", "what was written cannot be deleted (it is still listed)", 2),
        (_ForgetfulStore, "red", "what is read is not what was written", 0),
        (_SlowStore, "yellow", "256 KiB took 2.", 0),
    ],
)
def test_stores_that_are_odd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: type[_Store], status: str, message: str, num_left: int
) -> None:
    monkeypatch.setitem(get_registered_artifact_repositories(), "odd", store)
    check = made(lambda: check_store(f"odd:{tmp_path}", ""))
    assert check.status == status
    assert message in check.message
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == num_left


MUCH_MEMORY_MIB = 2**40


@pytest.mark.usefixtures("experiment_id")
def test_main_begins_with_it(
    small_onnx: Path,
    run_here: RunCommand,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    parameters = {**QUICK, "network": small_onnx, "trials": 1, "worker_memory_mib": MUCH_MEMORY_MIB}
    assert run_here("main", *flags(parameters)) == 2
    err = capfd.readouterr().err
    assert err.index(f"each worker may take {MUCH_MEMORY_MIB} MiB") < err.index("Error: ")
    assert " run " not in err.partition("Error: ")[0]  # none was opened


def test_a_project_without_conda_is_told_the_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_project(tmp_path) is None
    (tmp_path / "MLproject").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("MLFLOW_CONDA_HOME", str(tmp_path))
    check = check_project(tmp_path)
    assert check
    assert (check.status, check.fix) == ("yellow", "give it --env-manager local or uv")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/conda").touch(mode=0o755)
    check = check_project(tmp_path)
    assert check
    assert check.status == "green"
