"""A real PostgreSQL server, which loses nothing when it is killed."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from helpers.servers import Server, Service, free_port, program, run_as, running


@contextmanager
def postgres_server() -> Iterator[Service]:
    """Runs PostgreSQL. Its URL is what MLflow takes as the URI of a store."""
    port = free_port()
    # It refuses to run as root. Another user cannot enter the directories of this one, where pytest's are.
    user = "nobody" if os.geteuid() == 0 else None
    with tempfile.TemporaryDirectory(prefix="ansor_mlflow-postgres-") as directory:
        if user:
            shutil.chown(directory, user, pwd.getpwnam(user).pw_gid)
        data = f"{directory}/data"
        command = [program("initdb"), "--no-sync", "--auth=trust", "--username=mlflow", "--encoding=UTF8", "--locale=C"]
        done = subprocess.run(
            [*command, data], cwd=directory, capture_output=True, text=True, check=False, **run_as(user)
        )
        if done.returncode != 0:
            raise RuntimeError(f"initdb ended with {done.returncode}:\n{done.stderr}")

        @contextmanager
        def run() -> Iterator[Server]:
            settings = ["listen_addresses=127.0.0.1", "unix_socket_directories=", "fsync=off"]
            command = [program("postgres"), "-D", data, "-p", str(port)]
            command += [word for setting in settings for word in ("-c", setting)]
            with running(command, Path(directory, "server.log"), lambda: is_ready(port), user=user) as process:
                yield Server(process)

        service = Service(f"postgresql+psycopg2://mlflow@127.0.0.1:{port}/postgres", run)
        try:
            service.start()
            yield service
        finally:
            stop = [program("pg_ctl"), "stop", "-D", data, "-m", "fast"]  # leaves no shared memory behind
            subprocess.run(stop, cwd=directory, capture_output=True, check=False, **run_as(user))
            service.stop()


def is_ready(port: int) -> bool:
    command = [program("pg_isready"), "--quiet", "--host=127.0.0.1", f"--port={port}"]
    return subprocess.run(command, check=False).returncode == 0
