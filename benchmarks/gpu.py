"""What a host with a GPU of NVIDIA's is worth: whether networks are right on it, and how fast they are beside PyTorch.

    python benchmarks/gpu.py --out gpu --minutes 8

Every step is a process with a limit of its own, so that what fails does not cost the rest. After each,
`gpu/result.json` has what is known; `gpu/STEP.log` has what the step said. Whether results are right is checked beside
other steps, times are those of steps alone. The steps of PyTorch need torch, torchvision and
transformers, `bert-base` onnxscript, too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from threading import Lock
from typing import TYPE_CHECKING, Any

import click
import numpy as np

if TYPE_CHECKING:
    from ansor_mlflow.networks.load import Network

_CLASSIC_CONVOLUTION = "conv2d:1,7,7,512,512,3,3,1,1,bias,relu"
"""The last layer of ResNet, which TVM's tutorial of Ansor tunes: 0.354 ms after ten trials on a GPU without a name."""
_RIGHT = ("resnet-block", "resnet-18", "mobilenet_v2", "squeezenet_v1.1", "bert-tiny", "mlp", _CLASSIC_CONVOLUTION)
_TUNED = (_CLASSIC_CONVOLUTION, "resnet-18", "bert-base", "resnet-50", "mobilenet_v2")
_IMAGES = {"resnet-18": "resnet18", "resnet-50": "resnet50", "mobilenet_v2": "mobilenet_v2"}
"""Names of torchvision's."""
_MODES = ("float32", "tf32", "float16")
_MARGIN_S = 150.0
"""For lowering, compiling and timing, beside the time that a tuning has."""
_RUNS = 30
_TURN_S = 0.02
_SEED = 0
_MANY = 100_000
"""Trials, more than a tuning has time for."""
_SHOWN = 25
"""Functions of a network whose time is kept."""

Found = dict[str, Any]


# -- steps, each in a process ------------------------------------------------------------------------------------------


def host() -> Found:
    """The GPU, its driver, and the versions of what measures."""
    import tvm

    from ansor_mlflow.device import Device, describe_gpus

    device = Device.resolve("cuda", 1)
    versions = {}
    for package in ("torch", "onnxruntime", "triton"):
        try:
            versions[package] = __import__(package).__version__
        except ImportError:
            versions[package] = "missing"
    return {
        "gpus": describe_gpus(),
        "target": device.fingerprint.target,
        "cpus": os.cpu_count(),
        "python": sys.version.split()[0],
        "tvm": tvm.__version__,
        **versions,
    }


def doctor() -> Found:
    """What `ansor-mlflow doctor` finds."""
    from ansor_mlflow.commands.doctor import examine
    from ansor_mlflow.parameters import DoctorOptions

    return {check.name: f"{check.status}: {check.message}" for check in examine(DoctorOptions(target="cuda")).checks}


def pipeline(network: str, trials: int) -> Found:
    """A small network from its tuning to its evaluation, with MLflow."""
    import ansor_mlflow

    tuned = ansor_mlflow.tune(network, target="cuda", trials=trials)
    compiled = ansor_mlflow.compile(tune_run=tuned.run_id)
    evaluated = ansor_mlflow.evaluate(model_uri=compiled.model_uri)
    return {"tuned": tuned.metrics, "evaluated": evaluated.metrics}


def right(network: str, dtype: str) -> Found:
    """How far a network without records, which DLight schedules, is from ONNX Runtime on the CPU."""
    from ansor_mlflow.networks import load_network

    return _of_network(load_network(network), dtype, None, timed=False)


def untuned(network: str, dtype: str) -> Found:
    """How fast it is."""
    from ansor_mlflow.networks import load_network

    return _of_network(load_network(_exported(network)), dtype, None)


def tuned(network: str, dtype: Any, minutes: float) -> Found:
    """How fast a network is after some minutes of tuning, and how far from ONNX Runtime on the CPU."""
    import mlflow

    import ansor_mlflow
    from ansor_mlflow import names
    from ansor_mlflow.networks import load_network

    place = _exported(network)
    started = time.monotonic()
    found = ansor_mlflow.tune(
        network=place,
        target="cuda",
        dtype=dtype,
        max_minutes=minutes,
        trials=_MANY,
        num_trials_per_round=16,
        min_repeat_ms=20,
    )
    tuned_s = time.monotonic() - started
    records = mlflow.artifacts.download_artifacts(
        run_id=found.run_id, artifact_path=f"{names.RECORDS_DIR}/{names.BEST_DIR}"
    )
    statuses = ansor_mlflow.load_trials(found.run_id)["status"].value_counts().to_dict()
    known = {"tuned_s": tuned_s, "metrics": found.metrics, "trials": statuses}
    _answer(known)
    return {**known, **_of_network(load_network(place), dtype, Path(records), known=known)}


def _of_network(
    network: Network, dtype: Any, records: Path | None, *, timed: bool = True, known: Found | None = None
) -> Found:
    """The deviation of a compiled network, and its times, kernel by kernel and as a graph of CUDA's."""
    from ansor_mlflow.device import Device
    from ansor_mlflow.lowering import lower
    from ansor_mlflow.model import library as building
    from ansor_mlflow.settings import LoweringSettings

    device = Device.resolve("cuda", 1)
    lowered = lower(network.model, device.target, LoweringSettings(dtype=dtype))
    started = time.monotonic()
    library = Path("model", "model.so")
    coverage = building.compile_tuned(lowered, device.target, records, library)
    found = {
        "compiled_s": time.monotonic() - started,
        "coverage": coverage.to_dict(),
        **_of_library(library, network, timed=timed),
    }
    if not timed:
        return found
    found["kernels_us"] = _kernels_us(library, network)
    _answer({**(known or {}), **found})  # what follows may take the process along
    original = building.pass_config
    building.pass_config = lambda target: {**original(target), "relax.backend.use_cuda_graph": True}
    as_graph = Path("graph", "model.so")
    try:
        building.compile_tuned(lowered, device.target, records, as_graph)
        found["graph"] = _of_library(as_graph, network, timed=True)
        found["graph_ms"] = found["graph"]["ms"]
    except RuntimeError as err:
        found["graph"] = str(err)[:500]
    return found


def _exported(network: str) -> str:
    """The network's name, or for one of transformers its file."""
    if network != "bert-base":
        return network
    import torch

    model, arguments = _torch_model(network)
    torch.onnx.export(model, arguments, "bert-base.onnx", dynamo=True, verbose=False)
    return "bert-base.onnx"


def _of_library(library: Path, network: Network, *, timed: bool) -> Found:
    """The deviation from ONNX Runtime on the CPU, and the time of a call with all data on the GPU."""
    import onnxruntime
    import tvm
    from tvm import relax

    from ansor_mlflow.networks import write_onnx
    from ansor_mlflow.tensors import random_inputs

    write_onnx(network.model, Path("reference.onnx"))
    session = onnxruntime.InferenceSession("reference.onnx", providers=["CPUExecutionProvider"])
    inputs = random_inputs(network.inputs, seed=_SEED)
    expected = session.run(None, inputs)
    gpu = tvm.cuda(0)
    machine = relax.VirtualMachine(tvm.runtime.load_module(str(library)), gpu)
    arguments = [tvm.runtime.tensor(array, gpu) for array in inputs.values()]
    outputs = machine["main"](*arguments)
    outputs = [outputs] if hasattr(outputs, "numpy") else list(outputs)
    deviations = [
        float(np.linalg.norm(each.numpy().astype("float64") - other) / np.linalg.norm(other))
        for each, other in zip(outputs, expected, strict=True)
    ]

    def call() -> None:
        machine["main"](*arguments)

    found: Found = {"deviation": max(deviations)}
    return {**found, "ms": _median_ms(call, gpu.sync)} if timed else found


def _kernels_us(library: Path, network: Network) -> dict[str, list[float]]:
    """The slowest functions of a call, with how often each is called and the microseconds of all its calls together."""
    import tvm
    from tvm import relax

    from ansor_mlflow.tensors import random_inputs

    gpu = tvm.cuda(0)
    machine = relax.VirtualMachine(tvm.runtime.load_module(str(library)), gpu)
    arguments = [tvm.runtime.tensor(array, gpu) for array in random_inputs(network.inputs, seed=_SEED).values()]
    found: dict[str, list[float]] = {}
    started = 0.0

    def note(_function: Any, name: str, before: bool, *_: Any) -> None:
        nonlocal started
        gpu.sync()
        if before:
            started = time.perf_counter()
        else:
            times = found.setdefault(name, [0, 0.0])
            times[0] += 1
            times[1] += (time.perf_counter() - started) * 1e6

    machine.set_instrument(note)
    for _ in range(3):
        found.clear()
        machine["main"](*arguments)
    return dict(sorted(found.items(), key=lambda each: -each[1][1])[:_SHOWN])


def _median_ms(call: Callable[[], object], wait: Callable[[], object]) -> float:
    """The median of some turns; each has as many calls as take a fiftieth of a second, and waits for the last one."""

    def turn(calls: int) -> float:
        wait()
        started = time.perf_counter()
        for _ in range(calls):
            call()
        wait()
        return (time.perf_counter() - started) / calls

    for _ in range(3):
        turn(1)
    calls = max(1, int(_TURN_S / turn(10)))
    return median(turn(calls) for _ in range(_RUNS)) * 1e3


def torch_eager(network: str) -> Found:
    """PyTorch as it is."""
    found = {}
    for mode in _MODES:
        found[mode] = _torch_ms(network, mode, None)
        _answer(found)
    return found


def torch_compile(network: str, mode: str) -> Found:
    """PyTorch's compiler, whose kernels are launched as a graph of CUDA's."""
    started = time.monotonic()
    found = _torch_ms(network, mode, "reduce-overhead")
    return {"ms": found, "compiled_s": time.monotonic() - started}


def _torch_ms(network: str, mode: str, compiler_mode: str | None) -> float:
    import torch

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = mode == "tf32"
    torch.backends.cudnn.benchmark = True
    model, arguments = _torch_model(network)
    dtype = torch.float16 if mode == "float16" else torch.float32
    model = model.to("cuda", dtype)
    arguments = tuple(each.to("cuda", dtype if each.is_floating_point() else None) for each in arguments)
    if arguments[0].dim() == 4:  # images: cuDNN is faster with channels last
        model, arguments = (
            model.to(memory_format=torch.channels_last),
            tuple(each.to(memory_format=torch.channels_last) for each in arguments),
        )
    with torch.inference_mode():
        called = model if compiler_mode is None else torch.compile(model, mode=compiler_mode)
        return _median_ms(lambda: called(*arguments), torch.cuda.synchronize)


def _torch_model(network: str) -> tuple[Any, tuple[Any, ...]]:
    """A model of the network in PyTorch with random weights, and arguments for it."""
    import torch

    torch.manual_seed(_SEED)
    if network == _CLASSIC_CONVOLUTION:
        layer = torch.nn.Sequential(torch.nn.Conv2d(512, 512, 3, padding=1), torch.nn.ReLU())
        return layer.eval(), (torch.randn(1, 512, 7, 7),)
    if network in _IMAGES:
        import torchvision

        return getattr(torchvision.models, _IMAGES[network])().eval(), (torch.randn(1, 3, 224, 224),)
    import transformers

    model = transformers.BertModel(transformers.BertConfig(attn_implementation="sdpa"), add_pooling_layer=False)

    class Encoder(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=ids).last_hidden_state

    return Encoder().eval(), (torch.randint(0, 30000, (1, 128)),)


_STEPS: Mapping[str, Callable[..., Found]] = {
    step.__name__: step for step in (host, doctor, pipeline, right, untuned, tuned, torch_eager, torch_compile)
}


# -- the steps together ------------------------------------------------------------------------------------------------


class _Check:
    """Runs steps until the time is over, and keeps what they found."""

    def __init__(self, out: Path, minutes: float) -> None:
        self._out = out
        self._until = time.monotonic() + 60 * minutes
        self._found: dict[str, Found] = {}
        self._lock = Lock()

    def run(self, limit_s: float, step: str, *arguments: Any) -> None:
        name = " ".join([step, *map(str, arguments)])
        limit_s = min(limit_s, self._until - time.monotonic())
        if limit_s < 1:
            self._keep(name, {"error": "there was no time left"})
            return
        directory = self._out / "".join(letter if letter.isalnum() else "-" for letter in name)
        directory.mkdir(parents=True, exist_ok=True)
        answer = directory / "answer.json"
        answer.unlink(missing_ok=True)  # of an earlier call
        log = directory.with_suffix(".log")
        started = time.monotonic()
        with log.open("w") as output:
            child = subprocess.Popen(
                [sys.executable, Path(__file__).resolve(), "--step", json.dumps([step, *arguments])],
                cwd=directory,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "MLFLOW_TRACKING_URI": f"sqlite:///{directory}/mlflow.db", "COLUMNS": "100"},
                start_new_session=True,
            )
            try:
                child.wait(limit_s)
                said = "" if child.returncode == 0 else f"exit code {child.returncode}"
            except subprocess.TimeoutExpired:
                said = f"it took more than {limit_s:.0f} s"
            finally:
                _end(child)
        found = json.loads(answer.read_text()) if answer.exists() else {}
        if said:
            found["error"] = f"{said}: {log.read_text(errors='replace').strip()[-600:]}"
        self._keep(name, {**found, "took_s": round(time.monotonic() - started, 1)})

    def _keep(self, name: str, found: Found) -> None:
        with self._lock:
            self._found[name] = found
            partial = self._out / "result.json.part"
            partial.write_text(json.dumps(self._found, indent=1))
            partial.replace(self._out / "result.json")
        short = {key: value for key, value in found.items() if isinstance(value, (int, float, str))}
        click.echo(
            f"{name}: "
            + ", ".join(
                f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in short.items()
            )
        )


def _end(child: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    child.wait()


def _step(text: str) -> None:
    name, *arguments = json.loads(text)
    _answer(_STEPS[name](*arguments))


def _answer(found: Found) -> None:
    """Tells what a step found; what it told before is kept where it fails later."""
    partial = Path("answer.json.part")
    partial.write_text(json.dumps(found, default=str))
    partial.replace("answer.json")


@click.command(context_settings={"show_default": True})
@click.option(
    "--out", default="gpu", type=click.Path(file_okay=False, path_type=Path), help="Directory for what is found."
)
@click.option("--minutes", default=8.0, help="Time for all of it.")
@click.option("--tune-minutes", default=1.0, help="Time for the tuning of a network.")
@click.option("--steps", default=",".join(_STEPS), help="What to do, with commas.")
@click.option("--networks", default=";".join(_TUNED), help="Networks to tune, with semicolons.")
@click.option("--dtypes", default="float32,float16", help="Types to tune them in.")
@click.option("--modes", default="float32,tf32,float16", help="Types to compile them in with PyTorch.")
@click.option("--step", help="A step with its arguments, as JSON: what a child process does.")
def main(
    out: Path, minutes: float, tune_minutes: float, steps: str, networks: str, dtypes: str, modes: str, step: str | None
) -> None:
    """Checks the first GPU of this host."""
    if step is not None:
        _step(step)
        return
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    check, chosen, named = _Check(out, minutes), steps.split(","), networks.split(";")
    alone, beside = _plan(named, dtypes.split(","), modes.split(","), tune_minutes)
    if "host" in chosen:
        check.run(60, "host")
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 4)) as threads:
        list(threads.map(lambda each: check.run(*each), [each for each in beside if each[1] in chosen]))
    for each in alone:
        if each[1] in chosen:
            check.run(*each)


def _plan(
    networks: Sequence[str], dtypes: Sequence[str], modes: Sequence[str], tune_minutes: float
) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """The steps that are to be alone and those that need not, each with its limit in seconds."""
    beside: list[tuple[Any, ...]] = [(120, "right", network, dtype) for network in _RIGHT for dtype in dtypes]
    alone: list[tuple[Any, ...]] = [(60, "doctor"), (180, "pipeline", "mlp", 8)]
    alone += [(60, "torch_eager", network) for network in networks]
    alone += [(60, "untuned", network, dtype) for network in networks for dtype in dtypes]
    limit_s = 60 * tune_minutes + _MARGIN_S
    alone += [(limit_s, "tuned", network, dtype, tune_minutes) for network in networks for dtype in dtypes]
    alone += [(120, "torch_compile", network, mode) for network in networks for mode in modes]
    return alone, beside


if __name__ == "__main__":
    main()
