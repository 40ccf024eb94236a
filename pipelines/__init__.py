"""Scripts of the MLflow project, one per entry point; run as `python -m pipelines.tune …`."""
