"""What `pyproject.toml` offers to ansor_mlflow: a rival and a sketch."""
