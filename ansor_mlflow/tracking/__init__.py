"""What a run in MLflow shows: params, tags, metrics, artifacts, and what went wrong."""
