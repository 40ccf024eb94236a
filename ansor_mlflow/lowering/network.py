"""The nouns of lowering: a lowered network, its parts and its tasks."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ansor_mlflow.graphs import GraphPart, PaddedLayer
from ansor_mlflow.trials import TaskInfo

if TYPE_CHECKING:
    from tvm.ir import IRModule

CONSTANTS = "layout_free_buffers"
"""TVM's attribute of a fused function: the numbers of the parameters that are constants of the network."""
_MAX_NAME = 100
"""Characters of a task's name: it is a part of a metric's, of which MLflow takes 250."""


class LayerAlgorithm(Protocol):
    """An algorithm that computes a layer with other operations than its definition, from changed weights."""

    @property
    def mod(self) -> IRModule:
        """Module with one function, "main", that takes the place of the layer's."""

    @property
    def weights(self) -> int:
        """Number of the parameter that this function takes transformed."""

    @property
    def suffix(self) -> str:
        """The word that is added to the name of the layer's function."""

    @property
    def growth_bytes(self) -> int:
        """Bytes by which the weights of a call are larger than those of the layer."""

    def transform(self, weights: Any) -> Any:
        """The array that takes the place of the layer's weights."""


@dataclass(frozen=True)
class TuningTask:
    """A distinct fused function of a network, as the search takes it."""

    info: TaskInfo
    mod: IRModule
    """Module with one unscheduled PrimFunc, "main"."""
    algorithm: LayerAlgorithm | None = None
    """How the network is changed to compute it so; None for the layer as it is defined."""

    @property
    def constants(self) -> tuple[int, ...]:
        """Numbers of the function's parameters that are constants of the network."""
        return tuple(map(int, self.mod["main"].attrs.get(CONSTANTS, ())))


@dataclass(frozen=True)
class NetworkPart:
    graph: GraphPart
    function: str
    """Name of its function in the module; empty for a part that ONNX Runtime runs."""
    size: int = 0
    """Which of the network's sizes it is of."""


@dataclass(frozen=True)
class LoweredNetwork:
    """A network as fused functions; weights are constants."""

    mod: IRModule
    """Module whose function "main" takes the network's inputs alone. Of a network in parts, or of several sizes, it has
    one for each part of TVM's, which may be none."""
    tasks: tuple[TuningTask, ...]
    """A layer that may be computed by several algorithms has a task for each, after each other."""
    parts: tuple[NetworkPart, ...] = ()
    """The parts in the order in which they run, size after size; empty where "main" is the only one."""
    hard_to_tile: tuple[PaddedLayer, ...] = ()
    """Layers with channels that `pad_channels=auto` pads."""

    @property
    def constant_bytes(self) -> int:
        """Size of the weights and other constants that a call reads; of several sizes of the network the largest."""
        by_size: Counter[int] = Counter()
        functions = [(part.size, part.function) for part in self.parts if part.function]
        for size, function in functions if self.parts else [(0, "main")]:
            by_size[size] += _constant_bytes(self.mod[function])
        return max(by_size.values(), default=0)

    @property
    def is_onnxruntimes(self) -> bool:
        """Whether TVM computes nothing of the network."""
        return bool(self.parts) and not any(part.function for part in self.parts)

    @property
    def num_algorithms(self) -> int:
        """Tasks that are further algorithms for a layer."""
        return len(self.tasks) - len({task.info.layer_hash for task in self.tasks})


def _constant_bytes(function: object) -> int:
    from tvm import relax
    from tvm.ir import GenericConst

    sizes: dict[int, int] = {}

    def visit(expr: object) -> None:
        if isinstance(expr, GenericConst):
            sizes[expr.value.data_ptr()] = math.prod(expr.value.shape) * expr.value.dtype.itemsize

    relax.analysis.post_order_visit(function, visit)
    return sum(sizes.values())


def short_name(name: str, workload_hash: str) -> str:
    """A task's name; one that lists dozens of operators is cut, and stays the only one of its kind by the hash."""
    return name if len(name) <= _MAX_NAME else f"{name[: _MAX_NAME - 9]}_{workload_hash.removeprefix('0x')[:8]}"
