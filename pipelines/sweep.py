"""The entry point `sweep` of the MLflow project."""

import sys

from ansor_mlflow.cli import main

if __name__ == "__main__":
    main(["sweep", *sys.argv[1:]])
