"""The entry points as functions of their options; here the tuner and MLflow meet.

Each module is one entry point or a part of several: `from ansor_mlflow.steps.tune import tune`.
"""
