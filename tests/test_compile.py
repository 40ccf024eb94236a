"""Compiling applies the records there are, tells which are missing, and the library computes the network either way."""

from __future__ import annotations

import base64
import json
import platform
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlflow
import numpy as np
import pytest
from helpers.commands import RunCommand, flags
from helpers.exports import make_model, tensor
from helpers.one_operator import one_operator, run_onnxruntime
from mlflow.models import Model
from mlflow.types import Schema, TensorSpec
from onnx import helper

from ansor_mlflow import names
from ansor_mlflow.device import fingerprint, import_tensor_intrin, resolve_target
from ansor_mlflow.errors import MachineError, RecordsError, UserInputError
from ansor_mlflow.lowering import LoweredNetwork
from ansor_mlflow.lowering.lower import lower
from ansor_mlflow.measuring import ReferenceSession
from ansor_mlflow.model import CompiledNetwork, Coverage, compile_tuned, compile_untuned, library, require_linker
from ansor_mlflow.networks import Network
from ansor_mlflow.parameters import CompileOptions
from ansor_mlflow.records import RECORD_FILE, WORKLOAD_FILE, RecordPair, distill
from ansor_mlflow.settings import Linker
from ansor_mlflow.steps.compiling import provenance_of
from ansor_mlflow.steps.recorded import Recorded
from ansor_mlflow.tensors import random_inputs
from ansor_mlflow.trials import TaskInfo

if TYPE_CHECKING:
    from tvm.target import Target


@pytest.fixture
def best(compiled_network: CompiledNetwork, tmp_path: Path) -> Path:
    return Path(shutil.copytree(compiled_network.records, tmp_path / "best"))


@pytest.fixture(scope="session")
def inputs(small_network: Network) -> dict[str, np.ndarray]:
    return random_inputs(small_network.inputs, seed=7)


@pytest.fixture(scope="session")
def expected(small_onnx: Path, inputs: dict[str, np.ndarray]) -> np.ndarray:
    return ReferenceSession(small_onnx, num_threads=1).run(inputs)["logits"]


def run(library: Path, inputs: dict[str, np.ndarray]) -> np.ndarray:
    import tvm

    machine = tvm.relax.VirtualMachine(tvm.runtime.load_module(str(library)), tvm.cpu())
    return machine["main"](*map(tvm.runtime.tensor, inputs.values())).numpy()


def is_scheduled(library: Path) -> bool:
    """Whether a function has a parallel loop, which TVM makes only as a schedule says."""
    return b"TVMBackendParallelLaunch" in library.read_bytes()


def assert_same(output: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(output, expected, rtol=0, atol=1e-4 * abs(expected).max())


def test_with_every_record(compiled_network: CompiledNetwork, inputs: Any, expected: np.ndarray) -> None:
    assert compiled_network.coverage["task_share"] == compiled_network.coverage["flops_share"] == 1.0
    assert compiled_network.coverage["missing"] == []
    assert is_scheduled(compiled_network.library)
    assert_same(run(compiled_network.library, inputs), expected)


def test_with_half_of_the_records(
    small_lowered: LoweredNetwork, host_target: Target, best: Path, tmp_path: Path, inputs: Any, expected: np.ndarray
) -> None:
    records = (best / RECORD_FILE).read_text().splitlines()
    (best / RECORD_FILE).write_text("".join(f"{line}\n" for line in records[::2]))
    coverage = compile_tuned(small_lowered, host_target, best, tmp_path / "model.so")
    infos = [task.info for task in small_lowered.tasks]  # they were tuned, and committed, in this order
    assert (coverage.covered, coverage.missing) == (tuple(infos[::2]), tuple(infos[1::2]))
    assert sum(estimate is None for estimate in coverage.kernels_us.values()) == len(infos[1::2])
    assert 0 < coverage.task_share < 1
    assert_same(run(tmp_path / "model.so", inputs), expected)


def test_without_records(
    small_lowered: LoweredNetwork, host_target: Target, tmp_path: Path, inputs: Any, expected: np.ndarray
) -> None:
    compile_untuned(small_lowered, host_target, tmp_path / "lib" / "model.so")
    assert not is_scheduled(tmp_path / "lib" / "model.so")
    assert_same(run(tmp_path / "lib" / "model.so", inputs), expected)


def commit_with_tvm(lowered: LoweredNetwork, target: Target, work_dir: Path) -> None:
    """Commits the first schedule of every task's design space, with a time, through TVM's own classes alone."""
    from tvm.s_tir import meta_schedule as ms

    import_tensor_intrin(target.kind.name)  # TVM would import it, too, but slowly
    database = ms.database.JSONDatabase(work_dir=str(work_dir))
    for task in ms.relax_integration.extract_tasks(lowered.mod, target):
        mod = task.dispatched[0]
        context = ms.TuneContext(mod, target=target, space_generator="post-order-apply", num_threads=1, rand_state=1)
        schedule = context.generate_design_space()[0]
        args_info = ms.arg_info.ArgInfo.from_entry_func(schedule.mod, remove_preproc=True)
        workload = database.commit_workload(mod)
        database.commit_tuning_record(ms.database.TuningRecord(schedule.trace, workload, [1e-3], target, args_info))


def test_with_records_of_plain_tvm(
    small_lowered: LoweredNetwork, host_target: Target, tmp_path: Path, inputs: Any, expected: np.ndarray
) -> None:
    commit_with_tvm(small_lowered, host_target, tmp_path)
    distill(RecordPair.in_directory(tmp_path), tmp_path / "best", fingerprint(host_target, 1).target)
    coverage = compile_tuned(small_lowered, host_target, tmp_path / "best", tmp_path / "model.so")
    assert coverage.task_share == 1.0
    assert_same(run(tmp_path / "model.so", inputs), expected)


def test_schedules_of_other_tasks(
    small_lowered: LoweredNetwork, host_target: Target, best: Path, tmp_path: Path
) -> None:
    first, *others, last = (best / RECORD_FILE).read_text().splitlines()
    (first_workload, first), (last_workload, last) = json.loads(first), json.loads(last)
    first, last = json.dumps([last_workload, first]), json.dumps([first_workload, last])
    (best / RECORD_FILE).write_text("\n".join([first, *others, last]) + "\n")
    with pytest.raises(RecordsError, match=r"best: the records do not apply \(.+\); tune the network again") as caught:
        compile_tuned(small_lowered, host_target, best, tmp_path / "model.so")
    assert "\n" not in str(caught.value)


def test_a_record_that_brings_code(
    small_lowered: LoweredNetwork, host_target: Target, best: Path, tmp_path: Path
) -> None:
    first, *others = (best / RECORD_FILE).read_text().splitlines()
    index, (trace, *rest) = json.loads(first)
    block = next(instruction[3][0] for instruction in trace[0] if instruction[0] == "GetSBlock")
    trace[0].append(["Annotate", [block, '"declare void @evil()"'], ["pragma_import_llvm"], []])
    (best / RECORD_FILE).write_text("\n".join([json.dumps([index, [trace, *rest]]), *others]) + "\n")
    with pytest.raises(RecordsError, match=rf"{RECORD_FILE}: line 1 is damaged; tune again"):
        compile_tuned(small_lowered, host_target, best, tmp_path / "model.so")
    assert not (tmp_path / "model.so").exists()


def test_workloads_of_others_are_not_read(
    small_lowered: LoweredNetwork, host_target: Target, best: Path, tmp_path: Path
) -> None:
    """A module in TVM's JSON may be machine code, and reading one that is damaged ends the process."""
    graph = json.dumps({"root_index": 0, "nodes": [{"type": "ffi.Module", "data": "AAAA"}], "metadata": {}}).encode()
    module = base64.b64encode(len(graph).to_bytes(8, "little") + graph).decode()
    hashes = [json.loads(line)[0] for line in (best / WORKLOAD_FILE).read_text().splitlines()]
    (best / WORKLOAD_FILE).write_text("".join(f"{json.dumps([hash_, module])}\n" for hash_ in hashes))
    coverage = compile_tuned(small_lowered, host_target, best, tmp_path / "model.so")
    assert coverage.task_share == 1.0


def task(name: str, weight: int, flops: float) -> TaskInfo:
    return TaskInfo(index=0, name=name, weight=weight, flops=flops, workload_hash=name)


def test_coverage_weighs_tasks_by_their_operations() -> None:
    coverage = Coverage(covered=(task("conv", 3, 100.0),), missing=(task("dense", 1, 50.0), task("pool", 1, 50.0)))
    np.testing.assert_allclose([coverage.task_share, coverage.flops_share], [1 / 3, 0.75])
    assert coverage.to_dict() == {
        "task_share": coverage.task_share,
        "flops_share": coverage.flops_share,
        "num_covered": 1,
        "num_tasks": 3,
        "algorithms": {"direct": 3},
        "growth_mib": 0,
        "kernels_us": {},
        "missing": [asdict(info) for info in coverage.missing],
        "unscheduled": [],
    }


def test_coverage_without_operations_or_tasks() -> None:
    coverage = Coverage(covered=(task("transpose", 1, 0.0),), missing=(task("reshape", 1, 0.0),))
    assert coverage.flops_share == coverage.task_share == 0.5
    empty = Coverage(covered=(), missing=())
    assert empty.flops_share == empty.task_share == 1.0


def test_compile_gives_the_signature_that_is_asked_for(
    small_onnx: Path, tuned_records: Path, new_experiment: str, run_here: RunCommand
) -> None:
    arguments = {"network": small_onnx, "records": tuned_records, "signature": "binary"}
    assert run_here("compile", *flags(arguments)) == 0
    (run,) = mlflow.search_runs([new_experiment], output_format="list")
    signature = Model.load(run.data.tags[names.TAG_MODEL_URI]).signature
    assert signature.inputs == Schema([TensorSpec(np.dtype(object), (-1,), "data")])
    assert signature.outputs == Schema([TensorSpec(np.dtype(np.float32), (-1, 10), "logits")])


def test_without_a_compiler(
    small_lowered: LoweredNetwork, host_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_linker()
    monkeypatch.setenv("PATH", str(tmp_path))
    message = r"no C\+\+ compiler was found to link libraries with; install g\+\+"
    with pytest.raises(MachineError, match=message):
        require_linker()
    with pytest.raises(MachineError, match=message):
        compile_untuned(small_lowered, host_target, tmp_path / "model.so")


@pytest.mark.parametrize(
    ("linker", "message"),
    [
        (
            Linker(cc="no-such-compiler -O2"),
            "cc='no-such-compiler -O2': there is no such program here; give a compiler",
        ),
        (Linker(cc="'g++"), r"cc=\"'g\+\+\" cannot be read \(No closing quotation\)"),
        (Linker(cc="g++", sysroot="/no/such"), "sysroot='/no/such': there is no such directory"),
        (Linker(sysroot="."), "sysroot='.': the library is for this host, whose compiler has its own; leave it out"),
    ],
)
def test_linkers_that_are_not_usable(linker: Linker, message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        require_linker("", linker)


def test_a_compiler_is_given_with_its_arguments_and_root(tmp_path: Path) -> None:
    command = require_linker("riscv64", Linker(cc="g++ -Wl,-O1", sysroot=str(tmp_path)))
    assert command == ("g++", "-Wl,-O1", f"--sysroot={tmp_path}")
    with pytest.raises(MachineError, match=r"for riscv64 are linked with riscv64-linux-gnu-g\+\+, which is not"):
        require_linker("riscv64")


def test_a_compiler_of_another_architecture_is_told_from_the_devices(small_network: Network, tmp_path: Path) -> None:
    machine = "x86_64" if platform.machine() == "aarch64" else "aarch64"
    target = resolve_target(f"llvm -mtriple={machine}-linux-gnu", 1)
    lowered = lower(small_network.model, target)
    with pytest.raises(
        UserInputError, match=rf"g\+\+ does not link a library for {machine}-linux-gnu \(.*\); give the"
    ):
        compile_untuned(lowered, target, tmp_path / "model.so", Linker(cc="g++"))


def test_a_model_does_not_tell_the_password_of_its_records(tmp_path: Path) -> None:
    options = CompileOptions(network="small", records="https://bob:hunter2@host/records")
    recorded = Recorded(options=options, records=tmp_path, copy="", provenance=None)
    assert provenance_of(recorded)["records"] == "https://…@host/records"


@pytest.mark.parametrize("constant", ["i", "u", ""])
def test_a_function_that_is_one_block_of_loops_is_compiled(host_target: Target, tmp_path: Path, constant: str) -> None:
    """TVM's pass that packs constants stops at a scatter of elements, whether or not it has one."""
    values = {"x": np.full((4, 3), 2, np.float32), "i": np.array([[0, 2, 3], [0, 2, -1]]), "u": np.eye(2, 3, 1)}
    values["u"] = values["u"].astype(np.float32)
    data = {name: array for name, array in values.items() if name != constant}
    constants = {constant: values[constant]} if constant else {}
    model = one_operator("ScatterElements", data, constants, inputs=[*values], opset=18, reduction="add")
    compile_tuned(lower(model, host_target), host_target, None, tmp_path / "model.so")
    (expected,) = run_onnxruntime(model, data)
    np.testing.assert_array_equal(run(tmp_path / "model.so", data), expected)


def test_a_sum_to_one_number_that_a_number_scales(host_target: Target, tmp_path: Path) -> None:
    """TVM cannot split the sum of a function that has a block without loops, and says so by an internal error."""
    nodes = [
        helper.make_node("MatMul", ["x", "weights"], ["sum"]),
        helper.make_node("Mul", ["scale", "factor"], ["scaled"]),
        helper.make_node("Mul", ["sum", "scaled"], ["product"]),
        helper.make_node("Sigmoid", ["product"], ["y"]),
    ]
    weights = {"weights": np.ones((64, 1), np.float32), "factor": np.array(0.5, np.float32)}
    inputs = [tensor("x", (1, 1, 64)), tensor("scale", ())]
    model = make_model(nodes, inputs, [tensor("y", (1, 1, 1))], weights)
    coverage = compile_tuned(lower(model, host_target), host_target, None, tmp_path / "model.so")
    assert len(coverage.missing) == 1


def test_an_error_of_tvm_is_no_error_of_records(
    small_lowered: LoweredNetwork, host_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("InternalError: Check failed")

    monkeypatch.setattr(library, "find_programs", fail)
    with pytest.raises(RuntimeError, match="Check failed"):
        compile_tuned(small_lowered, host_target, None, tmp_path / "model.so")
