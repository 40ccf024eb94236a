"""A tuned model as MLflow serves it: what it takes and returns, its signature, batches of any size."""

from ansor_mlflow.serving.pyfunc import PyfuncModel
from ansor_mlflow.serving.signature import SignatureKind, get_signature
