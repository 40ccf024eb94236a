"""A tuned model as MLflow serves it: what it takes and returns, its signature, batches of any size."""

from ansor_mlflow.serving.pyfunc import PyfuncModel, SignatureKind, get_signature
