"""Settings of boto3 that S3 servers other than Amazon's need, for everything in this process that talks to S3."""

from __future__ import annotations

import os

_ENDPOINT = "MLFLOW_S3_ENDPOINT_URL"
_DEFAULTS = {
    # boto3 adds checksums that some servers do not know, and expects them in answers to range requests.
    "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
    "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
    # bucket.host resolves for no server that is addressed by a number or a single name.
    "MLFLOW_BOTO_CLIENT_ADDRESSING_STYLE": "path",
    # Without one boto3 signs nothing.
    "AWS_DEFAULT_REGION": "us-east-1",
}


def suit_other_s3_servers() -> None:
    """Sets what the user left open, if `MLFLOW_S3_ENDPOINT_URL` names a server; entry points of `main` inherit it."""
    if not os.environ.get(_ENDPOINT):
        return
    for name, value in _DEFAULTS.items():
        if name == "AWS_DEFAULT_REGION" and os.environ.get("AWS_REGION"):
            continue
        os.environ.setdefault(name, value)
