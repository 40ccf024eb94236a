"""The machine and the versions behind a run's numbers."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlflow
import psutil
import requests
from mlflow.exceptions import ExecutionException, MlflowException

from ansor_mlflow.device import CPU_KIND, DeviceFingerprint, available_cpus, describe_gpus, try_huge_pages
from ansor_mlflow.errors import AnsorMlflowError, MachineError, UserInputError, one_line
from ansor_mlflow.foreign import without_credentials
from ansor_mlflow.names import RIVALS

_PACKAGES = ("ansor_mlflow", "apache-tvm", "apache-tvm-ffi", "mlflow", "numpy", "onnx", *RIVALS, "xgboost")


def describe_environment(device: DeviceFingerprint) -> dict[str, Any]:
    """Versions, CPU, memory and load, for `environment.json`. Holds no environment variables: they may be secret."""
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "cpu_model": device.cpu_model,
        "cpus": os.cpu_count(),
        "available_cpus": available_cpus(),
        "memory_bytes": psutil.virtual_memory().total,
        "huge_pages": str(try_huge_pages()),
        "load_average": os.getloadavg(),
        "target": device.target,
        "num_threads": device.num_threads,
        **({} if device.target["kind"] == CPU_KIND else {"gpus": describe_gpus()}),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


_USER_ERRORS = {"INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS", "NOT_FOUND"}
_MISSING = {"RESOURCE_DOES_NOT_EXIST", "NOT_FOUND"}


@contextmanager
def translated_errors(action: str) -> Iterator[None]:
    """Translates errors of the tracking server and the artifact store that happen inside."""
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
