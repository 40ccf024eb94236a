"""What processes that were killed left, here and in MLflow."""
