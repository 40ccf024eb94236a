"""The entry point `compile` of the MLflow project."""

import sys

from ansor_mlflow.cli import main

if __name__ == "__main__":
    main(["compile", *sys.argv[1:]])
