"""The commands `ansor-mlflow …`, and what the Python door shares with them."""

from ansor_mlflow.cli.command import checked_options, write_json
from ansor_mlflow.cli.main import cli, main
from ansor_mlflow.cli.progress import progress_observers
