"""The entry point `tune` of the MLflow project."""

import sys

from ansor_mlflow.cli import main

if __name__ == "__main__":
    main(["tune", *sys.argv[1:]])
