"""MLflow's stores of runs and registered models."""
