"""Parameters of what follows a tuning: compile, evaluate, promote, and `main`, which is all of them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator

from ansor_mlflow.parameters.declaring import (
    AliasName,
    Auto,
    ModelAddress,
    ModelName,
    NumberByName,
    Options,
    PositiveFloat,
    PositiveInt,
    Rivals,
    Share,
    parameter,
)
from ansor_mlflow.parameters.tuning import (
    Data,
    LinkOptions,
    QuantizeOptions,
    RecordsOptions,
    RpcOptions,
    RunOptions,
    SeedOptions,
    Trust,
    TuneOptions,
)

Tolerance = Annotated[
    PositiveFloat | Auto,
    parameter(
        help_="Largest max_rel_error that passes: max |output - reference| / max |reference|, the latter at least "
        "0.01; auto is 0.0001, with float16 0.02, and with bfloat16 and of quantised networks 0.1."
    ),
]
MeasureSeconds = Annotated[
    PositiveFloat, parameter(help_="Seconds that each contender is timed in a turn.", under="evaluate.measure_s")
]


class SignatureOptions(Options):
    """What a served model takes, how large it may be, and what computes it.

    Attributes:
        signature: Signature of the model: tensor names dtypes and shapes, binary lets a server take base64 as well.
        pad: Values that inputs are padded with at their ends, up to the next larger of several sizes, as JSON: {"ids":
            0, "mask": 0}; by default only exactly these sizes are taken. Outputs are cut again.
        max_library_mib: Size in MiB that the weights in the library may have: beyond it, layers get algorithms with
            smaller weights, as far as there are some; no limit by default.
        runtimes: What may compute the network: what ONNX Runtime, or OpenVINO, which must be installed, computes faster
            on this host than the library, or TVM computes wrong, is left to them; tvm leaves only what TVM cannot
            compute.
    """

    signature: Literal["tensor", "binary"] = "tensor"
    pad: NumberByName = parameter({}, 'a JSON object of numbers, such as {"ids": 0, "mask": 0}')
    max_library_mib: PositiveInt | None = parameter(None, under="lower.max_library_mib")
    runtimes: Literal["tvm", "tvm,onnxruntime", "tvm,onnxruntime,openvino"] = "tvm,onnxruntime"


class CompileOptions(RunOptions, SignatureOptions, LinkOptions, QuantizeOptions, RecordsOptions):
    """Which records a network is compiled with, and where they may come from.

    Attributes:
        tune_run: ID of the tuning run whose records are taken; its network, layout, target and threads are used.
            Several, separated by commas, make one model with a library for the device of each.
        allow_target_mismatch: Apply records of another device where there are none of this one; they may be slow here,
            and the model says so.
        allow_missing: Leave out records that fit no task of this version, or of this TVM, any more; the run says which
            tasks have none.
    """

    tune_run: str = ""
    allow_target_mismatch: bool = False
    allow_missing: bool = False

    @property
    def tune_runs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(run.strip() for run in self.tune_run.split(",") if run.strip()))


class CheckOptions(SeedOptions):
    """How a compiled model is checked and timed.

    Attributes:
        turns: Turns of the latency measurement; each starts every contender once, in a process of its own.
        rivals: Runtimes that the model is timed against, on the same threads and inputs: onnxruntime, openvino and
            torch (torch.compile, with trust=true, of networks that came from PyTorch); auto is those that are
            installed.
        baseline: Also build what TVM makes without tuning, and time its first calls, for ten seconds at most: metric
            untuned_latency_ms; none leaves it out.
        instant: Also build and time what the sketches choose without any trial: metric instant_latency_ms.
    """

    tolerance: Tolerance = "auto"
    data: Data = ""
    turns: PositiveInt = parameter(3, under="evaluate.turns")
    measure_s: MeasureSeconds = 1.5
    rivals: Rivals = parameter("auto", "auto, none, or some of onnxruntime, openvino and torch, separated by commas")
    trust: Trust = False
    baseline: Literal["untuned", "none"] = parameter("untuned", under="evaluate.baseline")
    instant: bool = parameter(False, under="evaluate.instant")


class EvaluateOptions(RunOptions, RpcOptions, LinkOptions, CheckOptions):
    """Which model is checked and timed.

    Attributes:
        model_uri: Model to evaluate: models:/…, runs:/…, or a path.
    """

    model_uri: Annotated[ModelAddress, parameter(rule="models:/…, runs:/… or a model's directory", min_length=1)]


class AliasOptions(Options):
    """When a version of a registered model gets an alias.

    Attributes:
        alias: Alias that moves together with that of the target, such as champion; none by default.
        min_improvement: Share of the champion's latency that the candidate must save at least, such as 2%.
        champion: Runtime that the candidate must beat, too, on its own network and threads; none by default.
    """

    alias: AliasName = parameter("", "letters, digits, - and _, but no number, no v and number, and not latest")
    min_improvement: Share = parameter(0.02, "a share from 0 to below 1, such as 2% or 0.02", ge=0, lt=1)
    champion: str | None = None


class PromoteOptions(RunOptions, AliasOptions, SeedOptions):
    """Which version of a registered model is compared with its champion, and how.

    Attributes:
        model: Name of the registered model.
        candidate: Version that may become the champion: its number or an alias.
        confidence: How sure it must be that the candidate is faster: of candidates that are not, at most the rest is
            promoted.
        max_turns: Turns after which it stays undecided; each starts champion and candidate once, in processes of their
            own.
        dry_run: Compare, but move no alias and tag no version.
        rollback: Instead of comparing, take back the last promotion: its aliases return to where they pointed before.
    """

    model: Annotated[str, parameter(rule="a model name", min_length=1)]
    candidate: Annotated[str, BeforeValidator(str)] = ""
    confidence: Share = parameter(0.95, "a share from 0.5 to below 1, such as 95% or 0.95", ge=0.5, lt=1)
    max_turns: int = parameter(32, ge=4)
    measure_s: MeasureSeconds = 1.5
    data: Data = ""
    tolerance: Tolerance = "auto"
    trust: Trust = False
    dry_run: bool = False
    rollback: bool = False


class PipelineOptions(AliasOptions, SignatureOptions, CheckOptions, TuneOptions):
    """The entry point `main`: tune, compile, evaluate and, if asked, register and promote.

    Attributes:
        register_as: Name to register the model under; not registered by default.
        promote: Promote the registered version if it is faster than the champion; needs register_as.
    """

    register_as: ModelName = parameter("", "a model name, without / and :")
    promote: bool = False
