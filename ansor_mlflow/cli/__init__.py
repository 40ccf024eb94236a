"""The commands `ansor-mlflow …`."""

from ansor_mlflow.cli.main import cli, main

__all__ = ["cli", "main"]
