"""The entry point `promote` of the MLflow project."""

import sys

from ansor_mlflow.cli import main

if __name__ == "__main__":
    main(["promote", *sys.argv[1:]])
