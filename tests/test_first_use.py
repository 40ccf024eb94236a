"""Several first commands at once on a sqlite file that is not there yet: each waits for its turn, and all succeed."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.commands import environment

NUM_PROCESSES = 3
FIRST_COMMAND = """
import sys, time
from pathlib import Path
import alembic.command, mlflow.store.tracking.sqlalchemy_store
import ansor_mlflow.commands.trial_table
from ansor_mlflow.cli import main
Path(sys.argv[1]).touch()
while not Path("go").exists():
    time.sleep(0.002)
main(["diff", "0" * 32, "1" * 32])
"""
"""Waits for the others where all that takes long to load is loaded, so that they begin within milliseconds."""
NOT_FOUND = f"Error: cannot read {0:032}: Run with id={0:032} not found"


@pytest.mark.system
@pytest.mark.parametrize(
    "uris",
    [
        ["sqlite:///mlflow.db"] * NUM_PROCESSES,
        pytest.param(["", "sqlite:///{here}/mlflow.db"], marks=pytest.mark.nightly),
    ],
)
def test_first_commands_at_once(tmp_path: Path, uris: list[str]) -> None:
    """However they call the file; without a URI it is MLflow's default."""
    started = []
    for number, uri in enumerate(uris):
        env = environment(uri.format(here=tmp_path))
        if not uri:
            del env["MLFLOW_TRACKING_URI"]
        command = [sys.executable, "-c", FIRST_COMMAND, f"ready{number}"]
        started.append(
            subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    while len(list(tmp_path.glob("ready*"))) < len(uris):
        assert all(process.poll() is None for process in started)
        time.sleep(0.01)
    (tmp_path / "go").touch()
    errors = [process.communicate()[1] for process in started]
    assert all(NOT_FOUND in error for error in errors), errors
    left = {path.name for path in tmp_path.iterdir() if not path.name.startswith("ready")}
    assert left == {"go", "mlflow.db"}


@pytest.mark.nightly
def test_a_folder_that_cannot_be_written_to_can_be_read(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FIRST_COMMAND, "/dev/null"]
    env = environment("sqlite:///store/mlflow.db")
    (tmp_path / "go").touch()
    subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, check=False)
    (tmp_path / "store").chmod(stat.S_IRUSR | stat.S_IXUSR)
    if os.geteuid() == 0:  # what is refused to others is allowed to root, unless it gives that up
        command = ["setpriv", "--bounding-set=-dac_override", "--inh-caps=-dac_override", *command]
    again = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, check=False)
    (tmp_path / "store").chmod(stat.S_IRWXU)
    assert again.stderr.decode().startswith(NOT_FOUND), again.stderr
