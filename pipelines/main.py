"""The entry point `main` of the MLflow project."""

import sys

from ansor_mlflow.cli import main

if __name__ == "__main__":
    main(["main", *sys.argv[1:]])
