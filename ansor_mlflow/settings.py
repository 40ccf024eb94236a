"""What decides which tasks a network has; light enough for where a model is served."""

from __future__ import annotations

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
