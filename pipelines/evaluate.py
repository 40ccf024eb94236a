"""The entry point `evaluate` of the MLflow project."""

import sys

from ansor_mlflow.cli import main

if __name__ == "__main__":
    main(["evaluate", *sys.argv[1:]])
