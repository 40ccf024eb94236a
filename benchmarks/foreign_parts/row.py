"""What is found about a file, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from gallery_child import Child

OURS = "tuned"
RIVALS = ("onnxruntime", "openvino")


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Medians of a contender in turns."""

    turns_ms: list[float]

    @property
    def median_ms(self) -> float:
        """The median of the turns."""
        return median(self.turns_ms)

    @property
    def spread(self) -> float:
        """Half of what lies between the slowest turn and the fastest, over the median."""
        return (max(self.turns_ms) - min(self.turns_ms)) / self.median_ms / 2


@dataclass(frozen=True, kw_only=True)
class Row:
    """A file, and what became of it."""

    pin: str
    path: str
    compiled: Child
    """The process that compiles, compares and times it."""
    onnxruntime: Child | None = None
    """ONNX Runtime alone, where the other one failed."""

    @property
    def name(self) -> str:
        """The version of the package and the path in its wheel, by which a row is known."""
        return f"{self.pin}/{self.path}"

    @property
    def is_in(self) -> bool:
        """Whether a user gets a model of it."""
        return self.compiled.result is not None

    @property
    def is_right(self) -> bool:
        """Whether that model computes what ONNX Runtime does."""
        return self.is_in and bool(self.compiled.result["equal"])

    @property
    def latencies(self) -> dict[str, Latency]:
        """The contenders that were timed."""
        turns_ms = self.compiled.result["turns_ms"] if self.is_in else {}
        return {name: Latency(turns_ms=medians_ms) for name, medians_ms in turns_ms.items()}

    @property
    def best_rival(self) -> str | None:
        """The fastest rival whose outputs are right; None where there is none."""
        right = self.compiled.result["right"] if self.is_in else []
        return min(right, key=lambda name: self.latencies[name].median_ms, default=None)

    @property
    def ratios(self) -> list[float]:
        """Our latency over the best rival's in each turn, the smallest first; empty where it was not timed."""
        if self.best_rival is None:
            return []
        pairs = zip(self.latencies[OURS].turns_ms, self.latencies[self.best_rival].turns_ms, strict=True)
        return sorted(ours_ms / rival_ms for ours_ms, rival_ms in pairs)

    @property
    def ratio(self) -> float | None:
        """The median of the ratios; None where there is none, and where it is not right."""
        return median(self.ratios) if self.ratios and self.is_right else None

    @property
    def remarks(self) -> list[str]:
        """Why it did not get in, and what a reader of the other figures has to know."""
        if not self.is_in:
            runs = self.onnxruntime is not None and self.onnxruntime.result is not None
            alone = "ONNX Runtime runs it" if runs else "ONNX Runtime does not run it either"
            return [self.compiled.message.removeprefix("Error: "), alone]
        found = self.compiled.result
        said = list(found["parts"])
        if found["unchecked"]:
            said.append(f"the same for all inputs: {', '.join(found['unchecked'])}")
        said += [f"{rival} is not timed: {reason}" for rival, reason in found["absent"].items()]
        said += [f"{rival} is wrong" for rival in self.latencies if rival not in (OURS, *found["right"])]
        return said
