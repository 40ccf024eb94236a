"""Lowers networks and builds their libraries in other processes, which what TVM or LLVM cannot compile may end.

What ends one is looked for, kept as the smallest graph that shows it, and left to ONNX Runtime.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import math
import os
import re
import shutil
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ansor_mlflow.device import Device, DeviceFingerprint, memory_left, resolve_target
from ansor_mlflow.errors import AnsorMlflowError, MachineError, ModelError, one_line
from ansor_mlflow.files import scratch_directory
from ansor_mlflow.foreign import typed
from ansor_mlflow.model.manifest import LIBRARY_FILE, LibraryEntry
from ansor_mlflow.model.parts import part_entries
from ansor_mlflow.names import NETWORK_FILE
from ansor_mlflow.processes import WorkerPool, in_child_process
from ansor_mlflow.settings import FOR_THIS_HOST, NO_FALLBACK, FallbackReasons, Linker, LoweringSettings
from ansor_mlflow.tensors import NetworkShapes

if TYPE_CHECKING:
    import onnx

    from ansor_mlflow.lowering import LoweredNetwork
    from ansor_mlflow.model.library import Coverage
    from ansor_mlflow.networks import Network

_LIMIT_S = 600.0
"""Seconds in which a network has to be compiled: ten times as long as the slowest that is known takes here."""
_SEARCH_S = 300.0
"""Seconds after which nothing more is looked for, and ONNX Runtime computes all of a network."""
_PIECE_LIMIT_S = 60.0
_MEMORY_SHARE = 0.8
"""Share of the memory that is free of which a worker may take as much as it needs."""
T = TypeVar("T")
_log = logging.getLogger("ansor_mlflow")


@dataclass(frozen=True, kw_only=True)
class BuildJob:
    """What is built."""

    network: str  # path of the ONNX file
    called: str = ""  # how errors name the network; by the path, where this is empty
    sizes: tuple[NetworkShapes, ...] = ()  # its sizes; empty where it has one
    records: str  # directory of the records to apply; empty for none
    untuned: bool = False  # whether it is the library that TVM builds by itself, which others are compared with
    device: DeviceFingerprint
    lowering: LoweringSettings
    library: str  # path of the library to write
    linker: Linker = FOR_THIS_HOST  # what links it, where the target has another architecture
    fallback: FallbackReasons = field(default_factory=dict)
    max_bytes: int | None = None  # bytes that the weights in the library may have
    num_segments: int = 1  # of how many segments it is at most, so that each can be timed


def fallback_among(values: Mapping[str, Any]) -> FallbackReasons:
    """The reasons among other values, such as those of a provenance, whose keys JSON has made texts."""
    try:
        return typed(dict[int, dict[str, str]], values.get("fallback", {}))
    except ValueError as err:
        raise ModelError(f"fallback in the provenance of a model is damaged ({err}); log the model again") from err


def require_builder() -> None:
    """Checks that libraries can be built here; what is missing is a `MachineError`."""
    for package in ("onnx", "onnxruntime"):
        if importlib.util.find_spec(package) is None:
            raise MachineError(
                f"building a library needs the package {package}, which models do not ask for; pip install onnx "
                "onnxruntime"
            )
    from ansor_mlflow.model.library import require_linker  # it needs ONNX

    require_linker()


def build_in_child_process(job: BuildJob) -> LibraryEntry:
    """Builds a library in a process of its own, which ends with this one. The coverage of an untuned one is empty."""
    advice = "compile the network for this host on another one"
    try:
        return in_child_process(build, job, work="builds the library", advice=advice, is_quiet=True)[0]
    except AnsorMlflowError:
        raise
    except Exception as err:  # of TVM, which has errors of its own
        raise MachineError(f"the library cannot be built ({one_line(err)}); {advice}") from err


def build(job: BuildJob) -> tuple[LibraryEntry, Coverage]:
    """Builds a library; see `build_in_child_process` and `guarded`."""
    from ansor_mlflow.model.library import Coverage, compile_tuned, compile_untuned

    lowered, library, coverage = _lower(job), Path(job.library), Coverage((), ())
    target = resolve_target(json.dumps(job.device.target), job.device.num_threads)
    if job.untuned:
        compile_untuned(lowered, target, library, job.linker)
    else:
        records = Path(job.records) if job.records else None
        coverage = compile_tuned(lowered, target, records, library, max_bytes=job.max_bytes, linker=job.linker)
    entry = LibraryEntry(
        path=job.library,
        fingerprint=job.device,
        coverage={} if job.untuned else coverage.to_dict(),
        provenance=asdict(job.lowering),
        parts=part_entries(lowered),
    )
    return entry, coverage


def _lower(job: BuildJob) -> LoweredNetwork:
    from ansor_mlflow.lowering import lower_sizes
    from ansor_mlflow.networks import models_of_sizes, read_whole

    target = resolve_target(json.dumps(job.device.target), job.device.num_threads)
    models = models_of_sizes(read_whole(Path(job.network)), job.network, job.sizes)
    return lower_sizes(models, target, job.lowering, job.called or job.network, job.fallback, job.num_segments)


# -- what ends a process -----------------------------------------------------------------------------------------------


def lower_guarded(
    network: Network, device: Device, settings: LoweringSettings, called: str, fallback: FallbackReasons = NO_FALLBACK
) -> tuple[LoweredNetwork, FallbackReasons]:
    """Lowers a network in this process; one of a file only once it is known what of it ends no process.

    Returns also what stays with ONNX Runtime: see `guarded`. Errors call the network as it is `called`.
    """
    from ansor_mlflow.lowering import lower_sizes
    from ansor_mlflow.networks import write_onnx

    if network.path is not None:
        with scratch_directory() as scratch:
            job = BuildJob(
                network=str(Path(scratch, NETWORK_FILE)),
                called=called,
                sizes=network.sizes,
                records="",
                device=device.fingerprint,
                lowering=settings,
                library="",
                fallback=fallback,
            )
            write_onnx(network.model, Path(job.network))
            _, fallback = guarded(job, _try_to_lower)
    return lower_sizes(network.models(), device.target, settings, called, fallback), fallback


def _try_to_lower(job: BuildJob) -> None:
    _lower(job)


def build_pool() -> WorkerPool:
    """The process for several works that are `guarded`: what they have in common it does once. To be closed."""
    return WorkerPool(1, memory_bytes=int(_MEMORY_SHARE * _free_bytes()))


def guarded(
    job: BuildJob, work: Callable[[BuildJob], T], crashes: Path | None = None, pool: WorkerPool | None = None
) -> tuple[T, FallbackReasons]:
    """Does a work in processes that may die, take too long or too much memory, with bounds for each.

    Returns also what stays with ONNX Runtime: what the job says, and what ended processes. The smallest graphs that do
    are written to the directory `crashes`. The processes are those of `pool`, where one is given.

    Raises:
        AnsorMlflowError: What the work raises.
        MachineError: TVM compiles nothing at all here, or the work fails without it, too.
    """
    with contextlib.ExitStack() as stack:
        workers = pool or stack.enter_context(contextlib.closing(build_pool()))
        guard = _Guard(work, workers, Path(stack.enter_context(scratch_directory())))
        while True:
            value, died = guard.attempt(job, _LIMIT_S)
            if not died:
                return value, job.fallback
            _log.warning("%s: %s; looking for what it is", job.called, died)
            found = guard.find(job, died, crashes)
            if found == job.fallback:
                raise MachineError(f"{job.called}: {died}, though TVM has nothing left to compute; run doctor")
            job = replace(job, fallback=found)


class _Guard:
    """A work that a worker does, and the search for what ends it."""

    def __init__(self, work: Callable[[BuildJob], Any], pool: WorkerPool, scratch: Path) -> None:
        self._work, self._pool, self._scratch = work, pool, scratch
        self._numbers = count()
        self._until_s = math.inf

    def attempt(self, job: BuildJob, limit_s: float) -> tuple[Any, str]:
        """What the work returns, or, in a few words, how it ended the worker."""
        said = self._scratch / "said.txt"
        said.write_bytes(b"")  # a worker may die before it says anything
        (outcome,) = self._pool.map(_answer, [(self._work, job, said)], limit_s)
        if outcome.failure == "timed_out":
            return None, f"TVM takes longer than {limit_s:.0f} s"
        if outcome.failure:
            last_words = re.search(r"^LLVM ERROR: .*$", said.read_text(errors="replace"), re.MULTILINE)
            return None, f"TVM fails: {last_words[0] if last_words else ' '.join(outcome.error.split())}"
        value, error = outcome.value or (None, None)
        if error is not None:
            raise error
        return value, ""

    def find(self, job: BuildJob, died: str, crashes: Path | None) -> FallbackReasons:
        """What stays with ONNX Runtime, so that the work ends no worker: one node more, or all of the network."""
        from ansor_mlflow.lowering import prepare_graph
        from ansor_mlflow.networks import models_of_sizes, read_whole

        self._until_s = min(self._until_s, time.monotonic() + _SEARCH_S)
        target = resolve_target(json.dumps(job.device.target), job.device.num_threads)
        models = models_of_sizes(read_whole(Path(job.network)), job.network, job.sizes)
        graphs = [prepare_graph(model, target, job.lowering, job.network)[0] for model in models]
        with contextlib.suppress(TimeoutError):
            self._require_compiler(job, died)
            for size, graph in enumerate(graphs):
                known = job.fallback.get(size, {})
                if found := self._smallest(graph, replace(job, fallback={0: known})):
                    node, smallest = found[0], found[1]
                    died = self._dies(smallest, job) or died
                    kept = _keep(smallest, crashes) if crashes else ""
                    text = "%s: %s at %s, the last of %d nodes that show it; it stays with ONNX Runtime%s"
                    _log.warning(text, job.called, died, node.op_type, len(smallest.graph.node), kept)
                    return {**job.fallback, size: {**known, **dict.fromkeys(filter(None, node.output), died)}}
        _log.warning("%s: what it is was not found, so that ONNX Runtime computes all of it", job.called)
        return {
            size: {output: died for node in graph.graph.node for output in node.output if output}
            for size, graph in enumerate(graphs)
        }

    def _smallest(self, graph: onnx.ModelProto, job: BuildJob) -> tuple[onnx.NodeProto, onnx.ModelProto] | None:
        """The first node with which the nodes up to it end a worker, and the last few that do; None if none do."""
        from ansor_mlflow.graphs import extract, value_infos

        nodes, values = graph.graph.node, value_infos(graph)

        def dies(start: int, stop: int) -> bool:
            return bool(self._dies(extract(graph, range(start, stop), values), job))

        if not dies(0, len(nodes)):
            return None
        stop = bisect_left(range(1, len(nodes)), True, key=lambda stop: dies(0, stop)) + 1
        starts = (stop - 2**power for power in range(stop.bit_length()) if 2**power < stop)
        start = next((start for start in starts if dies(start, stop)), 0)
        return nodes[stop - 1], extract(graph, range(start, stop), values)

    def _require_compiler(self, job: BuildJob, died: str) -> None:
        """Raises a MachineError where not even one operator can be compiled."""
        from onnx import TensorProto, helper

        x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy")
        graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "relu", [x], [y])
        if self._dies(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), job):
            raise MachineError(f"TVM compiles nothing here ({died}); look at the lines above, and run doctor")

    def _dies(self, model: onnx.ModelProto, job: BuildJob) -> str:
        """How a model ends the worker; empty where it does not, or is refused for a known reason.

        Raises:
            TimeoutError: The search has taken too long.
        """
        from ansor_mlflow.networks import write_onnx

        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        directory = self._scratch / str(next(self._numbers))
        directory.mkdir()
        file, library = directory / NETWORK_FILE, directory / LIBRARY_FILE
        write_onnx(model, file)
        try:
            piece = replace(job, network=str(file), sizes=(), records="", library=str(library))
            return self.attempt(piece, min(_PIECE_LIMIT_S, left_s))[1]
        except AnsorMlflowError:
            return ""
        finally:
            shutil.rmtree(directory)


def _keep(model: onnx.ModelProto, directory: Path) -> str:
    """Writes a graph to a directory of a run; returns a clause that says where it is."""
    from ansor_mlflow.networks import write_onnx

    directory.mkdir(exist_ok=True)
    path = directory / f"{len(list(directory.glob('*.onnx')))}.onnx"
    write_onnx(model, path)
    return f"; {directory.name}/{path.name} of this run shows it"


def _free_bytes() -> int:
    """Memory that programs may still take: of the system, and of this process's cgroups."""
    kib = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    free, granted = int(kib[1]) * 1024 if kib else sys.maxsize, memory_left()
    return free if granted is None else min(free, granted)


# -- in the worker -----------------------------------------------------------------------------------------------------


def _answer(call: tuple[Callable[[BuildJob], Any], BuildJob, Path]) -> tuple[Any, AnsorMlflowError | None]:
    """What the work returns, or the error of this package that it raises; others are none that a user made.

    What the compiler says before it dies, and TVM's traces of C++, go to a file.
    """
    work, job, said = call
    kept = [os.dup(number) for number in (1, 2)]
    try:
        with said.open("wb") as file:
            for number in (1, 2):
                os.dup2(file.fileno(), number)
        return work(job), None
    except AnsorMlflowError as err:
        return None, err
    finally:
        for number, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, number)
            os.close(copy)
