"""Compiles a lowered network with its tuning records into a shared library, and says how much of it they cover."""

from __future__ import annotations

import platform
import shlex
import shutil
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ansor_mlflow.codegen import pass_config, tir_pipeline
from ansor_mlflow.device import CUDA, available_cpus, machine_of, platform_of, why_no_compiler
from ansor_mlflow.errors import MachineError, RecordsError, UserInputError, first_line
from ansor_mlflow.files import scratch_directory
from ansor_mlflow.model.parts import GIVEN_OUTPUTS, write_parts
from ansor_mlflow.records import Database as RecordDatabase
from ansor_mlflow.records import RecordPair, require_whole
from ansor_mlflow.settings import FOR_THIS_HOST, Linker
from ansor_mlflow.sketches import find_programs, is_made_of_blocks, schedule_for_gpu, unbound_kernels
from ansor_mlflow.trials import DIRECT, TaskInfo

if TYPE_CHECKING:
    from tvm.ir import GlobalVar, IRModule
    from tvm.s_tir.meta_schedule.database import Database
    from tvm.s_tir.schedule import Trace
    from tvm.target import Target
    from tvm.tirx import PrimFunc
    from tvm_ffi import StructuralKey

    from ansor_mlflow.lowering import LoweredNetwork, TuningTask
    from ansor_mlflow.lowering.algorithms import ChosenAlgorithm  # for a type alone

_LINK_ERROR = "Compilation error:"
"""Begins what TVM says of a compiler that failed, whose output is in the lines after it."""
_MAX_KEPT = 4096
"""Traces and objects that a process keeps: those of some networks."""
_MAX_GIVEN_BYTES = 1 << 14
"""Bytes of outputs up to which to copy them twice takes less than to ask TVM for them."""
_NOT_MEASURED_S = 1.0  # the time that a record needs; nothing is compared with it


@dataclass(frozen=True)
class Coverage:
    """Which of a network's tasks have a record; the others run as their sketches, or DLight, choose without one."""

    covered: tuple[TaskInfo, ...]
    missing: tuple[TaskInfo, ...]
    unscheduled: tuple[TaskInfo, ...] = ()
    """Of those without a record the ones that no sketch fits: they are often a hundred times slower."""
    growth_bytes: int = 0  # by how much weights are larger than they would be with all layers computed directly
    kernels_us: dict[str, float | None] = field(default_factory=dict)
    """Microseconds of a call as the record says, by the name of the function in the library; None without a record."""

    @property
    def task_share(self) -> float:
        """Tasks with a record over all tasks, from 0 to 1."""
        total = len(self.covered) + len(self.missing)
        return len(self.covered) / total if total else 1.0

    @property
    def flops_share(self) -> float:
        """The covered tasks' share of the network's floating point operations, from 0 to 1."""
        covered, missing = (sum(t.flops * t.weight for t in tasks) for tasks in (self.covered, self.missing))
        return covered / (covered + missing) if covered + missing else self.task_share

    @property
    def algorithms(self) -> dict[str, int]:
        """Number of layers by the algorithm that computes them."""
        return dict(Counter(task.algorithm for task in (*self.covered, *self.missing)))

    @property
    def has_other_algorithms(self) -> bool:
        """Whether some layer is not computed as it is defined."""
        return bool(self.algorithms.keys() - {DIRECT})

    def to_dict(self) -> dict[str, Any]:
        """The figures and the tasks by name, for `coverage.json`."""
        return {
            "task_share": self.task_share,
            "flops_share": self.flops_share,
            "num_covered": len(self.covered),
            "num_tasks": len(self.covered) + len(self.missing),
            "algorithms": self.algorithms,
            "growth_mib": self.growth_bytes / 2**20,
            "kernels_us": self.kernels_us,
            "missing": [asdict(task) for task in self.missing],
            "unscheduled": [task.name for task in self.unscheduled],
        }


def compile_tuned(
    lowered: LoweredNetwork,
    target: Target,
    best_records: Path | None,
    library: Path,
    *,
    max_bytes: int | None = None,
    linker: Linker = FOR_THIS_HOST,
) -> Coverage:
    """Builds the network with the fastest record of each layer; beside the library is what stays with ONNX Runtime.

    A task without a record runs as its sketch chooses without a measurement, on a GPU as DLight does.
    """
    import tvm
    from tvm import relax
    from tvm.s_tir.meta_schedule.database import MemoryDatabase, OrderedUnionDatabase

    from ansor_mlflow.codegen.concatenations import write_in_place  # the door would load TVM
    from ansor_mlflow.device import import_tensor_intrin
    from ansor_mlflow.lowering.algorithms import choose_algorithms, replace_layers  # so would this one
    from ansor_mlflow.lowering.relax_passes import with_given_outputs  # and this one

    if lowered.is_onnxruntimes:
        write_parts(lowered, library.parent)
        return Coverage((), ())
    platform = platform_of(target)
    import_tensor_intrin(platform.kind)
    chosen = MemoryDatabase()
    try:
        database = database_of(best_records, lowered.tasks) if best_records else MemoryDatabase()
        algorithms = choose_algorithms(lowered, database, target, max_bytes)
        covered = [algorithm.task.info for algorithm in algorithms if algorithm.is_recorded]
        missing = [algorithm.task for algorithm in algorithms if not algorithm.is_recorded]
        unscheduled = [task.info for task in missing if not (platform.binds_threads or _choose(task, target, chosen))]
        tasks = [algorithm.task for algorithm in algorithms]
        others = {task.info.layer_hash: task.algorithm for task in tasks if task.algorithm is not None}
        replaced = replace_layers(lowered.mod, others)
        with target, OrderedUnionDatabase(database, chosen):
            scheduled = relax.transform.MetaScheduleApplyDatabase()(replaced)
            mod = tvm.transform.Sequential(
                [
                    relax.transform.SplitLayoutRewritePreproc(),
                    relax.transform.FoldConstant(),
                    relax.transform.CanonicalizeBindings(),  # packed weights were parts of tuples
                ]
            )(_with_roots(scheduled))
    except (OSError, RuntimeError, ValueError, TypeError) as err:
        records = RecordPair.in_directory(best_records).records if best_records else None
        if records is None or not records.exists() or not records.stat().st_size:
            raise  # no record is to blame
        raise RecordsError(
            f"{best_records}: the records do not apply ({first_line(err)}); tune the network again, or leave out what "
            "does not apply (compile with allow_missing=true)"
        ) from err
    finished = write_in_place(_with_schedules(mod, target))
    if platform.in_process and "main" in {var.name_hint for var in finished.get_global_vars()}:
        finished = with_given_outputs(finished, GIVEN_OUTPUTS, _MAX_GIVEN_BYTES)
    _export(finished, target, library, linker)
    write_parts(lowered, library.parent)
    return Coverage(
        covered=tuple(covered),
        missing=tuple(task.info for task in missing),
        unscheduled=tuple(unscheduled),
        growth_bytes=sum(algorithm.growth_bytes for algorithm in algorithms),
        kernels_us=_kernels_us(replaced, algorithms),
    )


def database_of(records: Path, tasks: Sequence[TuningTask]) -> Database:
    """TVM's database of the records of tasks; TVM has errors of its own for a record that does not apply to its task.

    The workloads are the tasks' own. Those of the files are not even read: they may come from anybody, and an object in
    TVM's JSON may be machine code.
    """
    import tvm_ffi
    from tvm.s_tir.meta_schedule.database import MemoryDatabase, TuningRecord

    recorded = RecordDatabase(RecordPair.in_directory(records), thorough=True)
    require_whole(recorded)
    database, mods = MemoryDatabase(), {task.info.workload_hash: task.mod for task in tasks}
    parse = tvm_ffi.get_global_func("ffi.json.Parse")
    for record in recorded.records:
        if (mod := mods.get(str(recorded.hashes[record.workload]))) is not None:
            workload = database.commit_workload(mod)
            database.commit_tuning_record(TuningRecord.from_json(parse(recorded.fields(record)), workload))
    return database


def _with_roots(mod: IRModule) -> IRModule:
    """The module, in which a function that is one block of loops has a root block, without which TVM's pass stops."""
    from tvm.s_tir import SBlock, SBlockRealize

    changed = mod.clone()
    for var, function in mod.functions_items():
        if isinstance(getattr(function, "body", None), SBlockRealize) and not is_made_of_blocks(function):
            root = SBlockRealize([], True, SBlock([], [], [], "root", function.body))
            changed.update_func(var, function.with_body(root))
    return changed


def _kernels_us(mod: IRModule, algorithms: Sequence[ChosenAlgorithm]) -> dict[str, float | None]:
    from tvm.tirx import PrimFunc

    from ansor_mlflow.lowering.algorithms import hash_of  # the door would load TVM

    recorded = {
        algorithm.task.info.workload_hash: algorithm.seconds * 1e6 for algorithm in algorithms if algorithm.is_recorded
    }
    return {
        var.name_hint: recorded.get(hash_of(function))
        for var, function in mod.functions_items()
        if isinstance(function, PrimFunc)
    }


def _choose(task: TuningTask, target: Target, database: Database) -> bool:
    """Writes what the sketch of a task chooses to a database; returns whether there is such a sketch."""
    from tvm.s_tir.meta_schedule.arg_info import ArgInfo
    from tvm.s_tir.meta_schedule.database import TuningRecord

    trace = _trace_of(_key(task.mod), _names_of_blocks(task.mod), _key(target))
    if trace is None:
        return False
    workload = database.commit_workload(task.mod)
    arguments = ArgInfo.from_prim_func(task.mod["main"])
    database.commit_tuning_record(TuningRecord(trace, workload, [_NOT_MEASURED_S], target, arguments))
    return True


def _names_of_blocks(mod: IRModule) -> tuple[str, ...]:
    from tvm.s_tir import SBlock
    from tvm_ffi import structural_walk

    names: list[str] = []
    for _, function in mod.functions_items():
        structural_walk(function.body, (SBlock, lambda block: names.append(block.name_hint)))
    return tuple(names)


def _key(value: Any) -> StructuralKey:
    """A value as one that is equal where its structure is."""
    from tvm_ffi import StructuralKey

    return StructuralKey(value)  # type: ignore[call-arg]  # its second field is made of the first


@lru_cache(maxsize=_MAX_KEPT)
def _trace_of(mod: StructuralKey, _blocks: tuple[str, ...], target: StructuralKey) -> Trace | None:
    """What makes the first program of a sketch, which names blocks; None where no sketch fits.

    A network is often built in variants, of which most functions are the same.
    """
    programs = find_programs(mod.key, target.key)
    program = programs and programs.first()
    return program.trace if program else None


def _with_schedules(mod: IRModule, target: Target) -> IRModule:
    """The network; where every loop must be bound to threads, with a schedule for each kernel that has none."""
    if not platform_of(target).binds_threads:
        return mod
    with target:
        scheduled = schedule_for_gpu(mod)
    if unbound := unbound_kernels(scheduled):
        raise UserInputError(
            f"DLight, which schedules for {target.kind.name} what has no record, knows no schedule for "
            f"{', '.join(unbound[:5])}; tune these tasks, or compile the network for a CPU"
        )
    return scheduled


def compile_untuned(lowered: LoweredNetwork, target: Target, library: Path, linker: Linker = FOR_THIS_HOST) -> None:
    """Builds the network as TVM does without records: the baseline that tuning is compared with."""
    if not lowered.is_onnxruntimes:
        _export(_with_schedules(lowered.mod, target), target, library, linker)
    write_parts(lowered, library.parent)


def require_linker(machine: str = "", linker: Linker = FOR_THIS_HOST) -> tuple[str, ...]:
    """Checks that libraries for an architecture, by default this host's, can be linked here. The command that links is
    returned where the architecture is another or one is given; else it is empty, and TVM finds one.
    """
    if linker.sysroot and not Path(linker.sysroot).is_dir():
        raise UserInputError(
            f"sysroot={linker.sysroot!r}: there is no such directory; give the root of the device's system"
        )
    sysroot = [f"--sysroot={Path(linker.sysroot).resolve()}"] if linker.sysroot else []
    if linker.cc:
        return (*_given_command(linker.cc), *sysroot)
    if machine and machine != platform.machine():
        compiler = f"{machine}-linux-gnu-g++"
        if not shutil.which(compiler):
            raise MachineError(
                f"libraries for {machine} are linked with {compiler}, which is not here; install it (Debian: apt "
                f"install g++-{machine.replace('_', '-')}-linux-gnu), give another one as cc, or compile on such a "
                "machine"
            )
        return (compiler, *sysroot)
    if sysroot:
        raise UserInputError(
            f"sysroot={linker.sysroot!r}: the library is for this host, whose compiler has its own; leave it out, or "
            "give cc, too"
        )
    if not any(shutil.which(name) for name in ("g++", "gcc", "clang++", "clang", "c++", "cc")):
        raise MachineError("no C++ compiler was found to link libraries with; install g++ (Debian: apt install g++)")
    return ()


def _given_command(cc: str) -> list[str]:
    try:
        words = shlex.split(cc)
    except ValueError as err:
        raise UserInputError(f"cc={cc!r} cannot be read ({err}); give a command like aarch64-linux-gnu-g++") from err
    if not words or not shutil.which(words[0]):
        raise UserInputError(f"cc={cc!r}: there is no such program here; give a compiler like aarch64-linux-gnu-g++")
    return words


def _export(mod: IRModule, target: Target, library: Path, linker: Linker) -> None:
    import tvm
    from tvm import relax
    from tvm.ir.transform import PassContext
    from tvm.support import cc

    command = require_linker(machine_of(target), linker)
    link = cc.cross_compiler(command[0], options=list(command[1:])) if command else None
    library.parent.mkdir(parents=True, exist_ok=True)
    with (
        target,
        PassContext(config=pass_config(target)),
        scratch_directory() as scratch,
        ThreadPoolExecutor(available_cpus()) as pool,
    ):
        try:
            # as for a CPU: TVM's default for a GPU would fuse and schedule once more
            finished = relax.get_pipeline("default")(mod)
            apart = _functions_apart(finished, target)
            modules = (tvm.IRModule({var: function}, attrs=finished.attrs) for var, function in apart.items())
            objects = pool.map(partial(_write_object, target, scratch), modules, count())
            for var in apart:
                finished.update_func(var, relax.ExternFunc(var.name_hint))
            compiled = tvm.compile(finished, target, relax_pipeline=None, tir_pipeline=tir_pipeline(target))
            addons = list(objects)
        except RuntimeError as err:
            if platform_of(target) is CUDA and tvm.runtime.enabled("cuda") and (reason := why_no_compiler()):
                raise MachineError(f"code for {target.kind.name} cannot be compiled here: {reason}") from err
            raise
        try:
            compiled.export_library(str(library), fcompile=link, addons=addons)
        except RuntimeError as err:
            if not command or not str(err).startswith(_LINK_ERROR):
                raise
            raise UserInputError(
                f"{shlex.join(command)} does not link a library for {target.attrs.get('mtriple') or 'this host'} "
                f"({str(err).splitlines()[1].strip()}); give the compiler of the device as cc"
            ) from err


def _functions_apart(mod: IRModule, target: Target) -> dict[GlobalVar, PrimFunc]:
    """The functions of which each is compiled by itself, so that all CPUs compile; on a CPU all of them but one.

    That one makes of the library what TVM makes of any: machine code, and what it has to load with it.
    """
    from tvm.tirx import PrimFunc

    if not platform_of(target).by_llvm:
        return {}
    functions = [(var, function) for var, function in mod.functions_items() if isinstance(function, PrimFunc)]
    return dict(functions[1:])


def _write_object(target: Target, directory: str, mod: IRModule, number: int) -> str:
    """Writes the machine code of a module to a file, and returns its path."""
    path = Path(directory, f"{number}.o")
    path.write_bytes(_object_of(_key(mod), _key(target)))
    return str(path)


@lru_cache(maxsize=_MAX_KEPT)
def _object_of(mod: StructuralKey, target: StructuralKey) -> bytes:
    """The machine code of a module. The context of the thread that asks for it is not that of the network's."""
    import tvm
    from tvm.ir.transform import PassContext

    with scratch_directory() as scratch, target.key, PassContext(config=pass_config(target.key)):
        path = Path(scratch, "module.o")
        tvm.tirx.build(mod.key, target.key, tir_pipeline(target.key)).write_to_file(str(path))
        return path.read_bytes()
