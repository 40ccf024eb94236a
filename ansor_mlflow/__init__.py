"""Auto-tune neural networks with Apache TVM; let MLflow remember, compare and serve the result.

`ansor_mlflow.flavor` loads and saves tuned models, `ansor_mlflow.steps` holds the steps as functions, and the command
`ansor-mlflow` runs them. Importing this package loads none of TVM, MLflow and pandas.
"""
