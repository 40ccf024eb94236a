"""What sketches know of the machine: vectors, registers and threads, as the target says them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ansor_mlflow.device import cpu_features, vector_lanes

if TYPE_CHECKING:
    from tvm.target import Target

_NUM_REGISTERS = {"avx512f": 32, "neon": 32, "v": 32}
"""Number of vector registers with a feature; 16 without any of them."""


@dataclass(frozen=True)
class Machine:
    """A CPU as a kernel sees it."""

    vector_bytes: int
    """Width of a vector register."""
    num_registers: int
    """Vector registers."""
    broadcasts_operands: bool
    """Whether a multiply-add reads an element from memory for all lanes."""
    num_threads: int
    """Threads of a kernel."""

    @staticmethod
    def of(target: Target) -> Machine:
        """The CPU that a target describes."""
        features = set(cpu_features(target))
        is_x86 = "sse2" in features
        num_registers = [number for feature, number in _NUM_REGISTERS.items() if feature in features]
        return Machine(
            vector_bytes=4 * vector_lanes(target),
            num_registers=num_registers[0] if num_registers else 16,
            broadcasts_operands=not is_x86 or "avx512f" in features,
            num_threads=int(target.attrs.get("num-cores", 1)),
        )

    def lanes(self, num_bytes: int) -> int:
        """Elements of so many bytes in a vector register."""
        return self.vector_bytes // num_bytes
