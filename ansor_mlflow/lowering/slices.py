"""Slices that stay out of the functions before them.

TVM takes a slice that begins at zero for an elementwise operation, since it reads what it writes, and fuses it into a
convolution. The convolution's tiles then have to fit the sizes after the slice, too, for which they were padded.
"""

from __future__ import annotations

from tvm.ir import IRModule
from tvm.ir.transform import PassContext, module_pass
from tvm.tirx import PrimFunc

_PATTERN = "op_pattern"
_INJECTIVE = 2
"""`OpPatternKind` of TVM (include/tvm/relax/op_attr_types.h): below are elementwise and broadcast operations."""


@module_pass(opt_level=0, name="SlicesAreInjective")
class SlicesAreInjective:
    """Says of every slice what it does; to be run on what AnnotateTIROpPattern annotated."""

    def transform_module(self, mod: IRModule, _context: PassContext) -> IRModule:
        """Rewrites the attributes of slices."""
        annotated = mod.clone()
        for name, function in mod.functions_items():
            if isinstance(function, PrimFunc) and name.name_hint.startswith("strided_slice"):
                pattern = int(function.attrs[_PATTERN])
                annotated.update_func(name, function.with_attr(_PATTERN, max(pattern, _INJECTIVE)))
        return annotated
