"""What decides which tasks a network has, and how its clients speak with servers; light enough for where a model is
served.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

Layout = Literal["auto", "NHWC", "NCHW"]
Dtype = Literal["float32", "float16", "bfloat16"]
Padding = int | Literal["auto", "off"]
Partition = Literal["auto", "off"]
Algorithm = Literal["auto", "direct", "winograd"]
FallbackReasons = Mapping[int, Mapping[str, str]]
"""Why nodes stay with ONNX Runtime though TVM may know them: by the number of a size, and by an output of the node, as
the parts of an earlier lowering name it."""
NO_FALLBACK: FallbackReasons = {}


@dataclass(frozen=True, kw_only=True)
class LoweringSettings:
    """How a network is lowered; see the parameters of the same names."""

    layout: Layout = "auto"
    """Data layout of two- and three-dimensional convolutions: channels last (NHWC, NDHWC) or first."""
    dtype: Dtype = "float32"
    """Type that float32 values are computed in; inputs and outputs keep theirs."""
    pad_channels: Padding = "auto"
    """Number that the output channels of convolutions and dense layers are made a multiple of; "auto" pads where it
    pays, "off" nowhere."""
    partition: Partition = "auto"
    """Whether what TVM cannot compute stays with ONNX Runtime ("auto"), or is an error ("off")."""
    algorithm: Algorithm = "auto"
    """How convolutions with stride 1 are computed: as they are defined ("direct"), by Winograd's algorithm, or as
    records say is faster ("auto")."""

    @staticmethod
    def among(values: Mapping[str, Any]) -> LoweringSettings:
        """The settings among other values, such as those of a provenance; what is missing has its default."""
        names = [field.name for field in fields(LoweringSettings)]
        return LoweringSettings(**{name: values[name] for name in names if name in values})


@dataclass(frozen=True, kw_only=True)
class Linker:
    """What links libraries for another architecture than this host's; see the parameters of the same names."""

    cc: str = ""
    """The compiler with its arguments; empty for the one that is named after the architecture."""
    sysroot: str = ""
    """Directory of the device's headers and libraries; empty for the compiler's own."""


FOR_THIS_HOST = Linker()

_OF_MLFLOW = {
    # an unreachable server is an error after seconds; MLflow's default of 7 doubling waits takes minutes
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    # a run's address is printed when it begins; MLflow prints it again at the end, with a password in the URI
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
_OF_S3 = {
    # boto3 adds checksums that some servers do not know, and expects them in answers to range requests
    "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
    "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
    # bucket.host resolves for no server that is addressed by a number or a single name
    "MLFLOW_BOTO_CLIENT_ADDRESSING_STYLE": "path",
}
"""What S3 servers other than Amazon's need."""


def set_defaults_of_clients() -> None:
    """Sets variables of MLflow and boto3 that nobody has set, for this process and those that it starts."""
    defaults = dict(_OF_MLFLOW)
    if os.environ.get("MLFLOW_S3_ENDPOINT_URL"):
        # without a region boto3 signs nothing
        defaults |= {**_OF_S3, "AWS_DEFAULT_REGION": os.environ.get("AWS_REGION") or "us-east-1"}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
