"""The places of extrema among floats that may be NaN or infinite, and among the smallest integers.

TVM begins with the smallest number of a type at place -1, and forgets what came before a NaN. As ONNX Runtime, this
begins with the first value, which stays where it is NaN, and passes over any other NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from tvm import relax, te, tirx, topi


def _call(builder: relax.BlockBuilder, call: relax.Call, *, find: Callable[..., te.Tensor], sign: int) -> relax.Expr:
    axis = None if call.attrs.axis is None else int(call.attrs.axis)

    def place(data: te.Tensor) -> te.Tensor:
        if str(data.dtype).startswith("float"):
            return find(_comparable(data, axis, sign), axis, call.attrs.keepdims)
        found = find(data, axis, call.attrs.keepdims)
        return te.compute(found.shape, lambda *indices: tirx.max(found[indices], 0), "place")  # all are the smallest

    return builder.call_te(place, call.args[0], primfunc_name_hint=call.op.name.removeprefix("relax."))


def _comparable(data: te.Tensor, axis: int | None, sign: int) -> te.Tensor:
    """Values of which the first one is chosen where it is NaN; all are beyond the number that TVM begins with."""
    dtype = str(data.dtype)
    info = np.finfo(dtype)
    last = tirx.const(-sign * float(np.nextafter(info.max, info.dtype.type(0))), dtype)
    wins = tirx.const(sign * np.inf, dtype)
    bound = tirx.max if sign > 0 else tirx.min

    def value(*indices: Any) -> Any:
        along = indices if axis is None else [indices[axis]]
        is_first = tirx.all(*(index == 0 for index in along))
        element = data[indices]
        of_nan = tirx.Select(is_first, wins, last)
        return tirx.Select(tirx.isnan(element), of_nan, bound(element, last))

    return te.compute(data.shape, value, "comparable")


PLACES = {
    "relax.argmax": partial(_call, find=topi.argmax, sign=1),
    "relax.argmin": partial(_call, find=topi.argmin, sign=-1),
}
"""How these operators become functions, for `LegalizeOps`."""
