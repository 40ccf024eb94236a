"""The package as its users install it: a wheel in an environment that knows nothing of this checkout."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import urllib.request
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.commands import BRIEF, FAST, ROOT, Finished, environment, flags, run
from helpers.servers import answers, free_port, running

PACKAGE = "ansor_mlflow"
NOT_SOURCES = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "mlruns", "mlflow.db*")
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel, and an empty directory to work in, with its own store."""

    python: Path
    directory: Path

    @property
    def variables(self) -> dict[str, str]:
        uri = f"sqlite:///{self.directory}/mlflow.db"
        return environment(uri, {"PATH": f"{self.python.parent}{os.pathsep}{os.environ['PATH']}"})

    def run(self, *command: str) -> Finished:
        program, *arguments = command
        finished = run([str(self.python.parent / program), *arguments], self.directory, self.variables)
        assert finished.exit_code == 0, finished.stderr
        return finished


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *arguments], check=True, timeout=400)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, for what an earlier build left beside the sources would get into it."""
    directory = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, directory / "source", ignore=NOT_SOURCES)
    pip("wheel", "--no-deps", f"--wheel-dir={directory}", str(directory / "source"))
    (path,) = directory.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The packages of others are those of the Python that runs the tests. It is named in a .pth file; Python reads no
    other .pth files there, among which is the one that leads to the checkout."""
    directory = tmp_path_factory.mktemp("environment")
    venv.create(directory, symlinks=True)
    python = directory / "bin/python"
    pip(f"--python={python}", "install", "--no-deps", "--no-index", str(wheel))
    (packages,) = directory.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    uvicorn = directory / "bin/uvicorn"  # `mlflow models serve` calls it
    uvicorn.write_text(f"#!{python}\nfrom uvicorn.main import main\nmain()\n")
    uvicorn.chmod(0o755)
    return Installed(python, tmp_path_factory.mktemp("work"))


def test_the_wheel_is_the_package_and_nothing_else(wheel: Path) -> None:
    """With its data: templates, the catalogue of networks, and the marker of its types."""
    files = {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}
    top_level = {name.split("/")[0] for name in files}
    metadata = wheel.name.removesuffix("-py3-none-any.whl") + ".dist-info"
    assert top_level == {PACKAGE, metadata}
    sources = {path.relative_to(ROOT) for path in (ROOT / PACKAGE).rglob("*") if path.is_file()}
    expected = {path.as_posix() for path in sources if "__pycache__" not in path.parts}
    assert {name for name in files if name.startswith(f"{PACKAGE}/")} == expected
    assert f"{PACKAGE}/py.typed" in files


def test_from_the_wheel_to_answers(installed: Installed) -> None:
    """What is imported is the wheel's, and it tunes, compiles, evaluates and is served without the checkout."""
    program = "import importlib.util as u; print(u.find_spec('ansor_mlflow').origin, u.find_spec('pipelines'))"
    origin, pipelines = installed.run("python", "-c", program).stdout.split()
    assert Path(origin).is_relative_to(installed.python.parents[1])
    assert pipelines == "None"

    network = {"network": "dense:1,32,32"}
    tuned = installed.run("ansor-mlflow", "tune", *flags({**FAST, **network, "cost_model": "none", "trials": 4}))
    (run_id,) = re.findall(r"^run    (\w+)$", tuned.stdout, re.M)
    (report,) = installed.directory.rglob("report.html")
    assert run_id in report.parts
    compiled = installed.run("ansor-mlflow", "compile", *flags({**network, "tune_run": run_id}))
    (model_uri,) = re.findall(r"^model  (models:/m-\w+)$", compiled.stdout, re.M)
    installed.run("ansor-mlflow", "evaluate", *flags({**BRIEF, "model_uri": model_uri}))

    port = free_port()
    url = f"http://127.0.0.1:{port}"
    serve = ["-m", "mlflow", "models", "serve", "--model-uri", model_uri, "--env-manager", "local", "--port", str(port)]
    command, log = [str(installed.python), *serve], installed.directory / "server.log"
    with running(command, log, lambda: answers(f"{url}/ping"), installed.variables, timeout_s=400):
        body = json.dumps({"inputs": [[0.0] * 32]}).encode()
        request = urllib.request.Request(f"{url}/invocations", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=200) as response:
            (row,) = json.load(response)["predictions"]
    assert len(row) == 32
