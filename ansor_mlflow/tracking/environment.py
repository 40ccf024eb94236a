"""What a run depends on: the machine and versions behind its numbers, and a store that may be away or newly opened."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlflow
import psutil
import requests
from mlflow.exceptions import ExecutionException, MlflowException
from mlflow.tracking._model_registry import utils as registry_stores
from mlflow.tracking._tracking_service import utils as tracking_stores
from sqlalchemy.engine import make_url

from ansor_mlflow.device import DeviceFingerprint, available_cpus, try_huge_pages
from ansor_mlflow.errors import AnsorMlflowError, MachineError, UserInputError, one_line
from ansor_mlflow.foreign import without_credentials
from ansor_mlflow.measuring import RIVALS
from ansor_mlflow.plugins import distribution_of

_SQLITE = "sqlite"
_MISSING = {"RESOURCE_DOES_NOT_EXIST", "NOT_FOUND"}
_USER_ERRORS = {"INVALID_PARAMETER_VALUE", "RESOURCE_ALREADY_EXISTS", *_MISSING}
_PACKAGES = ("ansor_mlflow", "apache-tvm", "apache-tvm-ffi", "mlflow", "numpy", "onnx", "xgboost")


def describe_environment(device: DeviceFingerprint) -> dict[str, Any]:
    """Versions, CPU, memory and load, for `environment.json`. Holds no environment variables: they may be secret."""
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": {
            name: found and found[1]
            for name in (*_PACKAGES, *(rival.package for rival in RIVALS.own.values()))
            for found in [distribution_of(name)]
        },
        "cpu_model": device.cpu_model,
        "cpus": os.cpu_count(),
        "available_cpus": available_cpus(),
        "memory_bytes": psutil.virtual_memory().total,
        "huge_pages": str(try_huge_pages()),
        "load_average": os.getloadavg(),
        "target": device.target,
        "num_threads": device.num_threads,
        **device.platform.describe(),
    }


@contextlib.contextmanager
def translated_errors(action: str) -> Iterator[None]:
    """Translates errors of the tracking server and the artifact store that happen inside, while it does something, such
    as "log metrics". That of a project's step passes as it is.
    """
    try:
        yield
    except (AnsorMlflowError, ExecutionException):
        raise
    except _s3_errors() as err:
        raise _s3_failure(action, err) from err
    except MlflowException as err:
        raise _mlflow_failure(action, err) from err
    except (requests.RequestException, ConnectionError) as err:
        raise MachineError(
            f"cannot {action}: no connection ({one_line(err)}); check MLFLOW_TRACKING_URI and that the server runs"
        ) from err
    except ImportError as err:  # of a database's driver, for one
        raise MachineError(f"cannot {action}: a package is missing ({one_line(err)}); install it") from err


def _s3_errors() -> tuple[type[Exception], ...]:
    """The errors of boto3, which is not imported before something has failed: it takes a tenth of a second."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    return BotoCoreError, ClientError, Boto3Error


def _mlflow_failure(action: str, err: MlflowException) -> AnsorMlflowError:
    if "s3://" in str(err):  # what boto3 says when MLflow reads
        return _s3_failure(action, err)
    cause = err.__cause__
    if isinstance(cause, MlflowException) and cause.error_code not in _USER_ERRORS:
        err = cause  # when the server is away, MLflow says that the experiment in MLFLOW_EXPERIMENT_ID does not exist
    if err.error_code in _USER_ERRORS:
        place = without_credentials(mlflow.get_tracking_uri()) if err.error_code in _MISSING else ""
        return UserInputError(f"cannot {action}: {one_line(err)}" + (f" (looked in {place})" if place else ""))
    return MachineError(
        f"cannot {action}: the MLflow server or store answered: {one_line(err)}; check MLFLOW_TRACKING_URI and "
        "that the server runs"
    )


def _s3_failure(action: str, err: Exception) -> MachineError:
    return MachineError(
        f"cannot {action}: the S3 artifact store answered: {one_line(err)}; check the bucket, "
        "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and MLFLOW_S3_ENDPOINT_URL"
    )


def open_in_turn() -> None:
    """Lets this process open a sqlite store of MLflow, however it does so, only while no other one opens it.

    Who opens a store makes the tables of a new file, and MLflow does not look whether another process is at it: one of
    the two then fails in the middle of MLflow's migrations.
    """
    for stores in (tracking_stores._tracking_store_registry, registry_stores._get_store_registry()):
        stores.register(_SQLITE, _in_turn(stores.get_store_builder(f"{_SQLITE}://")))


def _in_turn(build: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(build)
    def build_in_turn(store_uri: str, **others: Any) -> Any:
        with contextlib.ExitStack() as stack:
            # the folder, which needs no right to write and leaves no lock file behind; where it cannot be held, as on
            # some network file systems, nobody waits
            with contextlib.suppress(OSError):
                database = make_url(store_uri).database
                if database and database != ":memory:":
                    folder = Path(database).resolve().parent
                    folder.mkdir(parents=True, exist_ok=True)  # as MLflow does
                    descriptor = os.open(folder, os.O_RDONLY)
                    stack.callback(os.close, descriptor)
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
            return build(store_uri=store_uri, **others)

    return build_in_turn
