"""The Python door: the commands as functions, with their parameters, defaults and checks, and typed results.

Users import these functions from `ansor_mlflow`, which loads this module when one of them is first asked for.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeAlias, TypeVar, cast, overload

from ansor_mlflow.cli import checked_options, progress_observers, write_json
from ansor_mlflow.commands.bisect import Bisection, bisect_network
from ansor_mlflow.commands.diff import TuningDifference, diff_runs
from ansor_mlflow.commands.pipeline import PipelineResult, run_pipeline
from ansor_mlflow.commands.plan import Plan, plan_tuning
from ansor_mlflow.commands.sweep import SweepPlan, SweepResult, run_sweep
from ansor_mlflow.errors import UserInputError
from ansor_mlflow.files import scratch_directory
from ansor_mlflow.networks import PROGRAM_SUFFIX, write_onnx
from ansor_mlflow.parameters import (
    BisectOptions,
    CompileOptions,
    DiffOptions,
    EvaluateOptions,
    Options,
    PipelineOptions,
    PlanOptions,
    PromoteOptions,
    QuantizeNetworkOptions,
    SweepOptions,
    TuneOptions,
    grouped,
    listed,
    load_options,
)
from ansor_mlflow.steps.compiling import CompileResult, compile_network
from ansor_mlflow.steps.evaluation import EvaluateResult
from ansor_mlflow.steps.evaluation import evaluate as evaluate_step
from ansor_mlflow.steps.promotion import Promotion, Rollback, roll_back
from ansor_mlflow.steps.promotion import promote as promote_step
from ansor_mlflow.steps.quantizing import Quantization, quantize_network
from ansor_mlflow.steps.tuning import TuneResult
from ansor_mlflow.steps.tuning import tune as tune_step

if TYPE_CHECKING:
    import onnx
    import torch

    Network: TypeAlias = str | os.PathLike[str] | onnx.ModelProto | torch.export.ExportedProgram

P = ParamSpec("P")
_LINE = 112
"""Characters of a line that says what a parameter is for."""
OptionsT = TypeVar("OptionsT", bound=Options)
ResultT = TypeVar("ResultT")
ResultT_co = TypeVar("ResultT_co", covariant=True)


class NetworkFunction(Protocol[P, ResultT_co]):
    """A function of a network, and of the parameters of an option class."""

    @overload
    def __call__(self, network: Network, /, *args: P.args, **parameters: P.kwargs) -> ResultT_co: ...
    @overload
    def __call__(self, *args: P.args, **parameters: P.kwargs) -> ResultT_co: ...


def _with_parameters(options: Callable[P, OptionsT]) -> Callable[[Callable[[OptionsT], ResultT]], Callable[P, ResultT]]:
    """Makes a function of options one of their fields; type checkers and editors see them, too."""

    def decorate(function: Callable[[OptionsT], ResultT]) -> Callable[P, ResultT]:
        @functools.wraps(function)
        def call(*args: P.args, **parameters: P.kwargs) -> ResultT:
            if args:
                raise UserInputError(f"{function.__name__}({args[0]!r}): parameters are given by name; see help()")
            return function(checked_options(cast("type[OptionsT]", options), parameters))

        call.__signature__ = _short_signature(cast("type[Options]", options), function)  # type: ignore[attr-defined]
        call.__doc__ = _with_arguments(inspect.getdoc(function) or "", cast("type[Options]", options))
        return call

    return decorate


def _listed(options: type[Options]) -> list[str]:
    """The parameters that a function lists, the network first."""
    return sorted(listed(options), key="network".__ne__)


def _short_signature(options: type[Options], function: Callable[..., Any]) -> inspect.Signature:
    """What editors show of a function: the listed parameters with their defaults, the network first."""
    by_position, by_name = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    made = []
    for name in _listed(options):
        field = options.model_fields[name]
        default = inspect.Parameter.empty if field.is_required() else field.get_default(call_default_factory=True)
        kind = by_position if name == "network" else by_name
        made.append(inspect.Parameter(name, kind, default=default))
    made.append(inspect.Parameter("parameters", inspect.Parameter.VAR_KEYWORD))
    return inspect.Signature(made, return_annotation=inspect.signature(function).return_annotation)


def _with_arguments(docstring: str, options: type[Options]) -> str:
    """A docstring with a line for each listed parameter, and the names of the others; examples come after them."""
    text, *examples = re.split(r"^(?=Examples?:)", docstring, maxsplit=1, flags=re.MULTILINE)
    lines = []
    for name in _listed(options):
        field = options.model_fields[name]
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        shown = "" if default in (None, "", (), {}) else f" [default: {default!r}]"
        sentence = str(field.description).partition(". ")[0].rstrip(".")
        lines.append(textwrap.shorten(f"{name}: {sentence}.", _LINE - len(shown), placeholder=" …") + shown)
    others = ", ".join(grouped(options).values())
    experts = textwrap.fill(f"For experts, as docs/parameters.md explains them: {others}.", _LINE + 4)
    arguments = textwrap.indent("\n".join(lines), "    ")
    return "\n\n".join([text.rstrip(), f"Args:\n{arguments}", experts, *examples])


def _of_network(
    options: Callable[P, OptionsT],
) -> Callable[[Callable[[OptionsT], ResultT]], NetworkFunction[P, ResultT]]:
    """As `_with_parameters`; the network may come first, and may be in memory."""

    def decorate(function: Callable[[OptionsT], ResultT]) -> NetworkFunction[P, ResultT]:
        by_name: Callable[..., ResultT] = _with_parameters(options)(function)

        @functools.wraps(by_name)
        def call(*network: Network, **parameters: Any) -> ResultT:
            given = [*network, parameters.pop("network")] if "network" in parameters else [*network]
            if not given:
                return by_name(**parameters)
            if len(given) > 1:
                raise UserInputError(f"{function.__name__}: one network is taken; give the parameters by name")
            with _network_in_a_file(*given) as network_parameters:
                return by_name(**{**parameters, **network_parameters})

        return cast("NetworkFunction[P, ResultT]", call)

    return decorate


@_of_network(TuneOptions)
def tune(options: TuneOptions) -> TuneResult:
    """Searches the best schedule for every task of a network; the records are in the run.

    Example:
        >>> tuning = am.tune("dense:4,32,16", trials=4)
        >>> tuning.stop_reason, tuning.metrics["best_latency_ms"] > 0
        ('trials', True)
    """
    with progress_observers() as observers:
        return tune_step(options, observers)


@_of_network(CompileOptions)
def compile(options: CompileOptions) -> CompileResult:
    """Builds a network with tuning records and logs it as a model.

    Example:
        >>> compiled = am.compile(tune_run=tuning.run_id)  # what am.tune returned
        >>> compiled.model_uri, compiled.coverage.task_share
        ('models:/m-...', 1.0)
    """
    return compile_network(options)


@_with_parameters(EvaluateOptions)
def evaluate(options: EvaluateOptions) -> EvaluateResult:
    """Checks a model against ONNX Runtime and measures its latency.

    Example:
        >>> checked = am.evaluate(model_uri=compiled.model_uri, turns=1, measure_s=0.1, rivals="onnxruntime")
        >>> checked.metrics["max_rel_error"] < 1e-4, checked.metrics["speedup_vs_onnxruntime"] > 0
        (True, True)
    """
    return evaluate_step(options)


@_with_parameters(PromoteOptions)
def promote(options: PromoteOptions) -> Promotion | Rollback:
    """Makes a version of a registered model the champion if it is right and faster than the champion on this host.

    One that loses is no error; `Promotion.require_won` makes it one. With `rollback` the last promotion is taken back.

    Example:
        >>> version = mlflow.register_model(compiled.model_uri, "dense")
        >>> promotion = am.promote(model="dense", candidate=version.version)
        >>> promotion.headline, promotion.outcome.value
        ('version 1 of dense is now champion-...', 'no_champion')
    """
    return roll_back(options) if options.rollback else promote_step(options)


@_of_network(PipelineOptions)
def pipeline(options: PipelineOptions) -> PipelineResult:
    """Tunes, compiles and evaluates a network and, if asked, registers and promotes it; all of it in this process.

    Example:
        >>> result = am.pipeline("dense:4,32,16", trials=4, turns=1, measure_s=0.1, register_as="small")
        >>> am.load_model("models:/small/1").run({"data": np.ones((4, 16), np.float32)})["dense"].shape
        (4, 32)
    """
    with progress_observers() as observers:
        return run_pipeline(options, observers=observers)


@_of_network(PlanOptions)
def plan(options: PlanOptions) -> Plan:
    """Lists the tasks that tuning a network would search, and the trials that each would get. Measures nothing.

    Example:
        >>> planned = am.plan("dense:4,32,16", trials=4)
        >>> planned.num_trials, [task.info.weight for task in planned.tasks]
        (4, [1])
    """
    made = plan_tuning(options)
    write_json(options.json_file, made)
    return made


@_of_network(QuantizeNetworkOptions)
def quantize(options: QuantizeNetworkOptions) -> Quantization:
    """Writes a network in 8 bits that loses no more than it may; layers that lose most stay floats. Opens no run.

    Example:
        >>> quantized = am.quantize("mlp", output="mlp.int8.onnx")  # with data= of your own, ranges are measured once
        >>> quantized.calibration, quantized.loss < quantized.contract.max_loss
        ('dynamic', True)
    """
    found = quantize_network(options)
    write_json(options.json_file, found)
    return found


@_of_network(BisectOptions)
def bisect(options: BisectOptions) -> Bisection:
    """Finds the first tensor of a network that is not what ONNX Runtime computes, and the smallest model that shows it.

    A difference is no error; `Bisection.require_equal` makes it one.

    Example:
        >>> found = am.bisect("dense:4,32,16")
        >>> found.max_rel_error < found.tolerance, found.wrong
        (True, None)
    """
    found = bisect_network(options)
    write_json(options.json_file, found)
    return found


@_with_parameters(SweepOptions)
def sweep(options: SweepOptions) -> SweepPlan | SweepResult:
    """Tunes the networks of a YAML file: each gets a model first, then the trials go where they gain most.

    Example:
        >>> _ = Path("sweep.yaml").write_text("entries: [{network: mlp}, {network: 'dense:4,32,16', trials: 0}]")
        >>> planned = am.sweep(sweep="sweep.yaml", dry_run=True)
        >>> [(entry.name, len(plan.workloads)) for entry, plan in zip(planned.entries, planned.plans)]
        [('mlp', 4), ('dense:4,32,16 trials=0', 1)]
    """
    return run_sweep(options, lambda found: write_json(options.json_file, found))


def diff(first: str, second: str) -> TuningDifference:
    """Compares two tunings task by task: which is faster, by how much, and is that more than noise.

    Args:
        first: ID of a run of tune, compile, evaluate or main, or the URI of a model.
        second: What is compared with it.

    Example:
        >>> difference = am.diff(tuning.run_id, compiled.run_id)
        >>> difference.ratio, [task.verdict for task in difference.tasks]
        (1.0, ['same'])
    """
    return diff_runs(load_options(DiffOptions, {"runs": (first, second)}))


@contextlib.contextmanager
def _network_in_a_file(network: Network) -> Iterator[dict[str, Any]]:
    """The parameters for a network: what is in memory is in a file meanwhile, of which a tuning's run keeps a copy."""
    if network == "":
        raise UserInputError("network='': it is empty; give a name, a path or a URI")
    if isinstance(network, str | os.PathLike):
        yield {"network": os.fspath(network)}
        return
    kind = type(network).__name__
    with scratch_directory() as directory:
        if kind == "ModelProto":
            name = "".join(c if c.isalnum() or c in "-_." else "-" for c in network.graph.name).strip("-.") or "network"
            path = Path(directory, f"{name}.onnx")
            write_onnx(network, path)
            yield {"network": str(path)}
        elif kind == "ExportedProgram":
            import torch

            path = Path(directory, f"program{PROGRAM_SUFFIX}")
            torch.export.save(network, path)
            yield {"network": str(path), "trust": True}  # whoever calls this has it in memory
        else:
            raise UserInputError(
                f"network={repr(network)[:60]}: it is of the type {kind}; give a name, a path, a URI, "
                "an onnx.ModelProto or a torch.export.ExportedProgram"
            )
