"""Sqlite stores are opened by one process at a time.

Who opens a store makes the tables of a new file, and MLflow does not look whether another process is at it: one of the
two then fails in the middle of MLflow's migrations.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mlflow.tracking._model_registry import utils as registry_stores
from mlflow.tracking._tracking_service import utils as tracking_stores
from sqlalchemy.engine import make_url

_SCHEME = "sqlite"


def open_in_turn() -> None:
    """Lets this process open a sqlite store of MLflow, however it does so, only while no other one opens it."""
    for stores in (tracking_stores._tracking_store_registry, registry_stores._get_store_registry()):
        stores.register(_SCHEME, _in_turn(stores.get_store_builder(f"{_SCHEME}://")))


def _in_turn(build: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(build)
    def build_in_turn(store_uri: str, **others: Any) -> Any:
        with _turn(store_uri):
            return build(store_uri=store_uri, **others)

    return build_in_turn


@contextlib.contextmanager
def _turn(store_uri: str) -> Iterator[None]:
    """Holds the folder of a sqlite file, which needs no right to write and leaves no lock file behind.

    Where it cannot be held, as on some network file systems, nobody waits.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            folder = os.open(_folder(store_uri), os.O_RDONLY)
            stack.callback(os.close, folder)
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield


def _folder(store_uri: str) -> Path:
    """The folder of a store's file; made if need be, as MLflow makes it. Raises OSError where there can be none."""
    database = make_url(store_uri).database
    if not database or database == ":memory:":
        raise FileNotFoundError(store_uri)
    folder = Path(database).resolve().parent
    folder.mkdir(parents=True, exist_ok=True)
    return folder
