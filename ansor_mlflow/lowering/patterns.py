"""What functions are fused with: corrections of the patterns that TVM sees in them.

TVM takes a slice that begins at zero for an elementwise operation, since it reads what it writes, and fuses it into a
convolution. The convolution's tiles then have to fit the sizes after the slice, too, for which they were padded.

It fuses a concatenation with what computes any of its parts. With many parts, as those of the steps of a recurrent
layer, the last step would be a function of its own kind, whose every element asks which step it belongs to: LLVM takes
a minute for it.
"""

from __future__ import annotations

from tvm.ir import IRModule
from tvm.ir.transform import PassContext, module_pass
from tvm.tirx import PrimFunc

_PATTERN = "op_pattern"
_INJECTIVE, _OPAQUE = 2, 8
"""`OpPatternKind` of TVM (include/tvm/relax/op_attr_types.h): below the first are elementwise and broadcast operations,
and the last is fused with nothing."""
_MAX_FUSED_PARTS = 6
"""Parts of a concatenation; those of image networks have no more."""


@module_pass(opt_level=0, name="CorrectPatterns")
class CorrectPatterns:
    """Says what slices and concatenations are; to be run on what AnnotateTIROpPattern annotated."""

    def transform_module(self, mod: IRModule, _context: PassContext) -> IRModule:
        """Rewrites the attributes of these functions."""
        annotated = mod.clone()
        for name, function in mod.functions_items():
            if isinstance(function, PrimFunc) and (least := _least_pattern(name.name_hint, function)):
                pattern = int(function.attrs[_PATTERN])
                annotated.update_func(name, function.with_attr(_PATTERN, max(pattern, least)))
        return annotated


def _least_pattern(name: str, function: PrimFunc) -> int:
    if name.startswith("strided_slice"):
        return _INJECTIVE
    if name.startswith("concatenate") and len(function.params) - 1 > _MAX_FUSED_PARTS:
        return _OPAQUE
    return 0
