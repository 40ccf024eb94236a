"""A program whose results and whose time are known, by which servers are checked and compared."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ansor_mlflow.errors import MachineError
from ansor_mlflow.tuning.workers.builder import Builder

_NUM_ELEMENTS = 4096
_NUM_STEPS = 256
_PROGRAM = f"""
@I.ir_module
class Module:
    @T.prim_func(s_tir=True)
    def main(data: T.Buffer(({_NUM_ELEMENTS},), "float32"), result: T.Buffer(({_NUM_ELEMENTS},), "float32")):
        T.func_attr({{"global_symbol": "main", "tirx.noalias": True}})
        for i in T.serial({_NUM_ELEMENTS}):
            with T.sblock("first"):
                v_i = T.axis.spatial({_NUM_ELEMENTS}, i)
                result[v_i] = data[v_i]
        for step, i in T.grid({_NUM_STEPS}, {_NUM_ELEMENTS}):
            with T.sblock("next"):
                v_step, v_i = T.axis.remap("RS", [step, i])
                result[v_i] = result[v_i] * T.float32(0.5) + data[v_i]
"""


@dataclass(frozen=True)
class Calibration:
    """The program, built for a device: it halves and adds, a million times, in the first cache of a core."""

    path: Path
    """Its library."""
    num_calls: int = 20
    """Calls whose median counts."""
    upload_bytes: int = 0
    """Bytes that are uploaded at least, to time it."""

    @staticmethod
    def example() -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """An input, and the output that belongs to it."""
        data = np.linspace(-1, 1, _NUM_ELEMENTS, dtype=np.float32)
        result = data.copy()
        for _ in range(_NUM_STEPS):
            result = result * np.float32(0.5) + data
        return data, result


def build_calibration(builder: Builder, *, num_calls: int = 20, upload_bytes: int = 0) -> Calibration:
    """Builds the program, as candidates are built.

    Raises:
        MachineError: It cannot be built: the target has no compiler here.
    """
    import tvm

    (outcome,) = builder.build([tvm.script.from_source(_PROGRAM)])
    if outcome.value is None:
        raise MachineError(f"no program can be built for the fleet: {outcome.error}")
    return Calibration(outcome.value, num_calls, upload_bytes)
