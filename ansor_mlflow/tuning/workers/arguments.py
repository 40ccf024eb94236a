"""The arguments that candidate programs are timed on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ansor_mlflow.device import NewMemory

if TYPE_CHECKING:
    from tvm.ir import IRModule

ArgInfo = tuple[str, str, tuple[int, ...]]
"""How TVM describes an argument: ("TENSOR", dtype, shape)."""

_MIN_ROTATED_BYTES = 32 * 1024
"""Size of weights that are not in the first cache any more when a kernel is called again."""
_MAX_ROTATED_BYTES = 128 * 2**20
"""Memory for copies of weights: more than the caches of most CPUs."""

_filled: dict[tuple[int, str, int, int], list[Any]] = {}
"""The copies of the last task's tensors, by position, dtype, number of elements and of copies."""
_turns = itertools.count()
"""The numbers of all calls: no program begins with the copies that the one before has just read."""


def arg_info(info: Any) -> ArgInfo:
    """Reads MetaSchedule's description of an argument."""
    kind, dtype, shape = info.as_json()
    return str(kind), str(dtype), tuple(int(extent) for extent in shape)


def num_bytes(args_info: tuple[ArgInfo, ...]) -> int:
    """Size of all arguments."""
    return sum(math.prod(shape) * np.dtype(dtype).itemsize for _, dtype, shape in args_info)


def argument_bytes(mod: IRModule) -> int:
    """Size of the arguments of a task's function."""
    from tvm.s_tir.meta_schedule.arg_info import ArgInfo as TvmArgInfo

    return num_bytes(tuple(arg_info(info) for info in TvmArgInfo.from_entry_func(mod, remove_preproc=True)))


def copied_bytes(network_bytes: int) -> int:
    """Size of the copies of a task's weights, at most, for a network with constants of that size."""
    return min(network_bytes, _MAX_ROTATED_BYTES)


class Arguments:
    """The arguments of calls, one after the other.

    Args:
        copies: For each position the copies of the argument, in one dimension.
        args_info: The arguments.
        turns: The numbers of the next calls.
    """

    def __init__(self, copies: Sequence[Sequence[Any]], args_info: tuple[ArgInfo, ...], turns: Iterator[int]) -> None:
        self._copies = copies
        self._args_info = args_info
        self._turns = turns
        self._made: dict[int, list[Any]] = {}
        self.num_copies = max(map(len, copies), default=1)

    def take(self, number: int) -> list[list[Any]]:
        """Those of so many calls."""
        return [self._of_turn(turn % self.num_copies) for turn in itertools.islice(self._turns, number)]

    def _of_turn(self, turn: int) -> list[Any]:
        if turn not in self._made:
            pairs = zip(self._copies, self._args_info, strict=True)
            self._made[turn] = [
                copies[turn % len(copies)]._create_view(shape, dtype) for copies, (_, dtype, shape) in pairs
            ]
        return self._made[turn]


def random_arguments(
    args_info: tuple[ArgInfo, ...], constants: Collection[int] = (), network_bytes: int = 0
) -> Arguments:
    """Tensors of random numbers: zeros would let denormals and branches distort the time.

    Programs of one task differ in the layout of their weights but not in the number of elements, so that they share
    the numbers, which take longer to make than a fast program to measure. Indices, which ONNX has in 32 and 64 bits,
    are zero: TVM fills integers with any bits, and kernels do not check the indices that they read with.

    Args:
        args_info: What they are.
        constants: Positions of the network's constants.
        network_bytes: Size of all constants of the network. Within it, they pass through the caches between two calls
            of a kernel. Here copies of the task's own do: each call takes the next one.
    """
    large = {number: args_info[number] for number in constants if num_bytes((args_info[number],)) >= _MIN_ROTATED_BYTES}
    num_copies = _num_copies(num_bytes(tuple(large.values())), network_bytes) if large else 1
    keys = [
        (position, dtype, math.prod(shape), num_copies if position in large else 1)
        for position, (_, dtype, shape) in enumerate(args_info)
    ]
    if _filled.keys() != set(keys):
        _filled.clear()  # before the new ones take memory
        memory = NewMemory()
        _filled.update({key: _fill(*key[1:]) for key in keys})
        memory.collapse()  # as in a model that is loaded
    return Arguments([_filled[key] for key in keys], args_info, _turns)


def _num_copies(own_bytes: int, network_bytes: int) -> int:
    """How many copies of a task's constants it takes so that the others are as large as all else of the network."""
    num_others = math.ceil((network_bytes - own_bytes) / own_bytes)
    return 1 + max(0, min(num_others, _MAX_ROTATED_BYTES // own_bytes - 1))


def _fill(dtype: str, num_elements: int, num_copies: int) -> list[Any]:
    """Tensors of their own: a kernel would read all parts of a larger one from its beginning."""
    import tvm

    device = tvm.cpu(0)
    if dtype in ("int32", "int64"):
        return [tvm.runtime.tensor(np.zeros(num_elements, dtype), device) for _ in range(num_copies)]
    first, *others = [tvm.runtime.empty((num_elements,), dtype, device) for _ in range(num_copies)]
    tvm.get_global_func("tvm.contrib.random.random_fill_for_measure")(first)
    for other in others:
        first.copyto(other)
    return [first, *others]
