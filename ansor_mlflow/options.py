"""Every parameter of every entry point, defined once: name, type, default, rule and help.

The command line is generated from these classes, and `MLproject` is held against them by a test.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from ansor_mlflow.errors import UserInputError
from ansor_mlflow.foreign import plain_value, read_json, read_yaml
from ansor_mlflow.gone import PARAMETERS, why_gone
from ansor_mlflow.settings import Algorithm, Dtype, Layout, Linker, LoweringSettings, Partition, Rival

TRIALS_PER_TASK = {"quick": 16, "standard": 64, "thorough": 256}
"""`trials=auto` gives a task this many trials in MetaSchedule's space, by preset."""
SKETCH_TRIALS_PER_TASK = {"quick": 2, "standard": 6, "thorough": 24}
"""And this many among the programs of its sketch, which are good from the first on; half of it where the task is a
further way to compute a layer, most of which are soon known to be slower."""


def _parameter(
    default: Any, help_: str, rule: str = "", *, flag: str = "", is_switch: bool = False, **constraints: Any
) -> Any:
    """Declares a parameter.

    Args:
        default: Its default.
        help_: What it is for, as `--help` says it.
        rule: Completes the sentence "NAME is …; it must be …"; by default what the type says.
        flag: Its flag, where that is not its name.
        is_switch: Whether the flag has no value.
        constraints: Of pydantic.
    """
    extra: dict[str, Any] = {"rule": rule, "flag": flag, "is_switch": is_switch}
    return Field(default=default, description=help_, json_schema_extra=extra, **constraints)


def _required(help_: str, rule: str, *, metavar: str = "", min_length: int = 1, max_length: int | None = None) -> Any:
    """Declares a parameter that has no default; one with a `metavar` is given without a flag."""
    extra: dict[str, Any] = {"rule": rule, "metavar": metavar}
    return Field(description=help_, json_schema_extra=extra, min_length=min_length, max_length=max_length)


def _same_as(cls: type[BaseModel], name: str) -> Any:
    """Declares a parameter that another class has, too."""
    return cls.model_fields[name]


def _parse_share(value: Any) -> Any:
    is_percentage = isinstance(value, str) and value.endswith("%")
    return float(value[:-1]) / 100 if is_percentage else value


def _check_alias(value: str) -> str:
    if not _ALIAS.fullmatch(value):
        raise ValueError("MLflow allows no such alias")
    return value


def _check_model_name(value: str) -> str:
    if set(value) & {"/", ":"} or value == "." or value.startswith("..") or value.isspace():
        raise ValueError("MLflow allows no such name")
    return value


def _parse_list(value: Any) -> Any:
    return tuple(item.strip() for item in value.split(",")) if isinstance(value, str) else value


def _parse_rivals(value: Any) -> Any:
    return value if value in ("auto", "none") else _parse_list(value)


def _parse_json(value: Any) -> Any:
    return read_json(value) if isinstance(value, str) else value


def _check_length(value: dict[str, Any]) -> dict[str, Any]:
    if len(json.dumps(value)) > MAX_PARAM_LENGTH:
        raise ValueError("MLflow would cut it short")
    return value


def _plain_numbers(value: Any) -> Any:
    """Numbers, or nested lists of them, as JSON has them; an array of NumPy becomes lists."""
    value = plain_value(value.tolist() if hasattr(value, "tolist") else value)
    if isinstance(value, list | tuple):
        return [_plain_numbers(item) for item in value]
    if not isinstance(value, bool | int | float):
        raise ValueError("not a number")
    return value


MAX_PARAM_LENGTH = 6000
"""Characters of a param that MLflow keeps."""
_ALIAS = re.compile(r"(?!(v?\d+|latest)$)[A-Za-z0-9_-]*", re.IGNORECASE)
"""What MLflow takes, without numbers, which are versions here."""
_URI = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]+):/|(models|runs):", re.IGNORECASE)
"""A scheme has two letters at least, so that no drive of Windows is one."""
_HALF = re.compile("[\ud800-\udfff]")
"""Halves of characters, which stand for bytes that are not UTF-8."""
Share = Annotated[float, Field(ge=0, lt=1), BeforeValidator(_parse_share)]
Dimension = Annotated[int, Field(gt=0)]
Shape = list[Dimension | list[Dimension]]
InputValue = Annotated[Any, AfterValidator(_plain_numbers)]
Auto = Literal["auto"]
Rivals = Annotated[
    Literal["auto", "none"] | Annotated[tuple[Rival, ...], Field(min_length=1)], BeforeValidator(_parse_rivals)
]
PositiveInt = Annotated[int, Field(gt=0)]


def is_uri(value: str) -> bool:
    """Whether a parameter names something that MLflow has to fetch, and no name or path."""
    return _URI.match(value) is not None


def _check_model(value: str) -> str:
    if not is_uri(value) and not Path(value).is_dir():
        raise ValueError("there is no such directory")
    return value


class Options(BaseModel):
    """Base of the option classes: frozen, and strict about names."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def changed(self) -> dict[str, str]:
        """The parameters that differ from their defaults, as text for a command line."""
        fields = type(self).model_fields
        return {
            name: as_text(value) for name, value in self if value != fields[name].get_default(call_default_factory=True)
        }


class SeedOptions(Options):
    """What is random, made repeatable."""

    seed: Annotated[int, Field(ge=0, lt=2**31)] = _parameter(
        0, "Seed of what is random: search, generated weights, inputs.", "a whole number from 0 to 2147483647"
    )


class NetworkOptions(SeedOptions):
    """What is compiled, and for which device."""

    network: str = _parameter(
        "resnet-18",
        "Network: a built-in name such as resnet-50, an operator with its sizes such as dense:1,512,512, an ONNX file, "
        "the URI of an MLflow model, or, with trust=true, an exported program of PyTorch (.pt2).",
        "a network's name, an operator, a file or a model's URI",
        min_length=1,
    )
    trust: bool = _parameter(
        False,
        "Read exported programs (.pt2) and MLflow models of PyTorch: reading one can run any code that its author put "
        "into it, as you.",
    )
    input_shapes: Annotated[dict[str, Shape], BeforeValidator(_parse_json)] = _parameter(
        {},
        'Shapes that replace those of the inputs, as JSON: {"data": [1, 3, 224, 224]}. Lists of sizes in the place of '
        'dimensions make one model for several sizes: {"ids": [1, [32, 128]]}; their first sizes belong together, then '
        "their second ones.",
        'a JSON object of shapes, such as {"data": [1, 3, 224, 224]} or {"ids": [1, [32, 128]]}',
    )
    input_values: Annotated[dict[str, InputValue], BeforeValidator(_parse_json), AfterValidator(_check_length)] = (
        _parameter(
            {},
            'Values that inputs are fixed to, as JSON: {"sr": 16000}. They are no inputs of the tuned model any more.',
            'a JSON object of numbers or lists of numbers, such as {"sr": 16000}, of at most 6000 characters',
        )
    )
    batch_size: PositiveInt = _parameter(
        1, "Batch size of a built-in network, and of a file whose batch is dynamic; 1 leaves others as they are."
    )
    layout: Layout = _parameter("auto", "Layout of convolutions: channels last or first; auto is last.")
    dtype: Dtype = _parameter("float32", "Type that float32 values are computed in; inputs and outputs keep theirs.")
    pad_channels: PositiveInt | Literal["auto", "off"] = _parameter(
        "auto",
        "Number that the output channels of convolutions and dense layers are padded to a multiple of; auto pads where "
        "it pays.",
        "auto, off or a whole number of at least 1",
    )
    partition: Partition = _parameter(
        "auto", "Whether what TVM cannot compute stays with ONNX Runtime (auto), or is an error (off)."
    )
    algorithm: Algorithm = _parameter(
        "auto",
        "How convolutions of 3x3 with stride 1 are computed: as they are defined (direct), by Winograd's algorithm, or "
        "as measurements say is faster (auto).",
    )
    target: str = _parameter(
        "auto",
        "Target: auto (this host), a TVM tag, JSON, `llvm -mcpu=… -num-cores …`, or `cuda -arch=…`.",
        "auto, a tag, JSON or `llvm -mcpu=…`",
        min_length=1,
    )
    num_threads: PositiveInt | Auto = _parameter("auto", "Threads of a kernel; auto is every CPU this process may use.")

    @property
    def decides_network(self) -> bool:
        """Whether `network` is what is loaded; a run that goes on, or whose records are taken, has its own."""
        return True

    @property
    def lowering(self) -> LoweringSettings:
        """What decides which tasks the network has."""
        return LoweringSettings.among(vars(self))


class LinkOptions(Options):
    """How libraries for another architecture than this host's are linked."""

    cc: str = _parameter(
        "",
        "Compiler, with its arguments, that links libraries for another architecture, such as aarch64-linux-gnu-g++; "
        "by default the one that has its name.",
        "a command, such as aarch64-linux-gnu-g++",
    )
    sysroot: str = _parameter(
        "",
        "Directory with the device's headers and libraries, for a compiler that does not have its own: --sysroot.",
        "the path of a directory",
    )

    @property
    def linker(self) -> Linker:
        """Both."""
        return Linker(cc=self.cc, sysroot=self.sysroot)


class RpcOptions(Options):
    """Which devices do the work, in place of this host."""

    rpc_tracker: str = _parameter(
        "",
        "Address of TVM's RPC tracker, host:port: programs and models are measured on the servers of rpc_key that it "
        "knows, programs on all of them at the same time, instead of on this host.",
        "host:port, such as 127.0.0.1:9190",
    )
    rpc_key: str = _parameter("", "Key of the servers at the tracker, which are all of one kind.", "one word")
    rpc_wait_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = _parameter(
        600.0,
        "Seconds without a free server after which the tuning, or the evaluation, ends.",
        "a positive number of seconds",
    )
    rpc_session_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = _parameter(
        300.0,
        "Seconds for which a server is taken at a time; it ends a longer session itself, so that a tuner that is gone "
        "does not keep it.",
        "a positive number of seconds",
    )


class BudgetOptions(NetworkOptions):
    """How many programs are measured."""

    trials: Annotated[int, Field(ge=0)] | Auto = _parameter(
        "auto",
        "Programs to measure in all; auto multiplies the preset's number by the number of tasks. With 0 nothing is "
        "measured, and the network is compiled as the sketches choose.",
        "a whole number, 0 or more, or auto",
    )
    preset: Literal["quick", "standard", "thorough"] = _parameter(
        "standard",
        "Budget that trials=auto stands for: quick 2, standard 6, thorough 24 trials for a task with a sketch, half "
        "of it for a further way to compute a layer, and 16, 64, 256 for one that is searched in MetaSchedule's space.",
    )
    trials_per_task: PositiveInt | None = _parameter(None, "Most trials that one task may use; no limit by default.")
    space: Literal["sketches", "metaschedule", "both"] = _parameter(
        "sketches",
        "Programs to search: those of our sketches, where one fits a task, and MetaSchedule's elsewhere; "
        "MetaSchedule's alone; or both.",
    )

    @property
    def lowering(self) -> LoweringSettings:
        """As of any network; only sketches have programs for other ways to compute a layer than the direct one.

        Raises:
            UserInputError: Another way is wanted, and no sketch.
        """
        settings = super().lowering
        if self.space != "metaschedule":
            return settings
        if self.algorithm == "winograd":
            raise UserInputError(
                "algorithm=winograd and space=metaschedule: that space has no program for it; give space=sketches"
            )
        return replace(settings, algorithm="direct")


class TuneOptions(RpcOptions, LinkOptions, BudgetOptions):
    """How the search runs, and how it measures."""

    max_minutes: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = _parameter(
        None, "Wall-clock budget in minutes; no limit by default.", "a positive number of minutes"
    )
    patience: PositiveInt | None = _parameter(
        None,
        "Rounds without an improvement above the noise (3 %) after which a task's remaining trials go to others; "
        "no limit by default.",
    )
    num_trials_per_round: PositiveInt = _parameter(32, "Most programs measured before the cost model learns again.")
    strategy: Literal["evolutionary", "random"] = _parameter(
        "evolutionary", "Search strategy; random is MetaSchedule's replay-trace."
    )
    cost_model: Literal["xgb", "mlp", "random", "none"] = _parameter(
        "xgb", "Cost model that ranks programs before they are measured; mlp needs PyTorch."
    )
    search_threads: PositiveInt | Auto = _parameter(
        "auto", "Threads of the search; auto is num_threads. With 1 the candidates of a seed repeat."
    )
    number: PositiveInt = _parameter(3, "Calls averaged in one measurement; raised until min_repeat_ms is reached.")
    repeat: PositiveInt = _parameter(1, "Measurements of a program.")
    min_repeat_ms: Annotated[int, Field(ge=0)] = _parameter(
        50, "Shortest duration of one measurement, in milliseconds."
    )
    measure_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = _parameter(
        30.0, "Seconds after which building or running a program is given up.", "a positive number of seconds"
    )
    worker_memory_mib: Annotated[int, Field(ge=512)] = _parameter(
        2048, "Memory in MiB that building or running one program may take, beside its arguments."
    )
    measure: Literal["network", "warm"] = _parameter(
        "network",
        "What a program finds in the CPU's caches while it is timed: what the rest of the network leaves there "
        "(network), or its own data (warm).",
    )
    cache_flush: bool = _parameter(False, "Flush the CPU's caches before every measurement: all is cold.")
    build_workers: PositiveInt | Auto = _parameter(
        "auto", "Programs that this host builds at a time: auto is num_threads, or every CPU with rpc_tracker."
    )
    rpc_retries: Annotated[int, Field(ge=0)] = _parameter(
        1, "Times that a program is measured again, on another server, when a server was lost with it."
    )
    warm_start: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_parse_list)] = _parameter(
        (),
        "Records of earlier tunings to begin with, separated by commas: runs, models, artifact URIs, paths, or auto, "
        "which takes what finished tuning runs of the tracking server know of the network's tasks. Those of this "
        "device are applied; those of similar devices teach the cost model.",
        "auto, run IDs, artifact URIs or paths, separated by commas",
    )
    resume_run: str = _parameter(
        "",
        "ID of a tuning run that was stopped, or is to get more trials: it goes on with its own parameters, except for "
        "those that are given now.",
        "a run ID",
    )

    @property
    def decides_network(self) -> bool:
        """See `NetworkOptions.decides_network`."""
        return not self.resume_run


class RecordsOptions(NetworkOptions):
    """Which records of a network are taken."""

    tune_run: str = _parameter(
        "",
        "ID of the tuning run whose records are taken; its network, layout, target and threads are used.",
        "a run ID",
    )
    records: str = _parameter(
        "",
        "Records to take instead of a tuning run's: a directory, a tuning-record file or an artifact URI.",
        "a path or an artifact URI",
    )

    @property
    def decides_network(self) -> bool:
        """See `NetworkOptions.decides_network`."""
        return not self.tune_run


class SignatureOptions(Options):
    """What a served model takes, and how large it may be."""

    signature: Literal["tensor", "binary"] = _parameter(
        "tensor", "Signature of the model: tensor names dtypes and shapes, binary lets a server take base64 as well."
    )
    pad: Annotated[dict[str, float], BeforeValidator(_parse_json)] = _parameter(
        {},
        "Values that inputs are padded with at their ends, up to the next larger of several sizes, as JSON: "
        '{"ids": 0, "mask": 0}; by default only exactly these sizes are taken. Outputs are cut again.',
        'a JSON object of numbers, such as {"ids": 0, "mask": 0}',
    )
    max_library_mib: PositiveInt | None = _parameter(
        None,
        "Size in MiB that the weights in the library may have: beyond it, layers are computed in ways with smaller "
        "weights, as far as there are some; no limit by default.",
    )

    @property
    def max_library_bytes(self) -> int | None:
        """The limit in bytes."""
        return None if self.max_library_mib is None else self.max_library_mib * 2**20


class CompileOptions(SignatureOptions, LinkOptions, RecordsOptions):
    """Which records a network is compiled with, and where they may come from."""

    tune_run: str = _parameter(
        "",
        "ID of the tuning run whose records are taken; its network, layout, target and threads are used. Several, "
        "separated by commas, make one model with a library for the device of each.",
        "run IDs, separated by commas",
    )
    allow_target_mismatch: bool = _parameter(
        False,
        "Apply records of another device, too, where there are none of this one; they may be slow here, and the model "
        "says so.",
    )
    allow_missing: bool = _parameter(
        False,
        "Leave out records that fit no task of this version, or of this TVM, any more; such tasks run as they are "
        "chosen without a measurement, and the run says which they are.",
    )

    @property
    def tune_runs(self) -> tuple[str, ...]:
        """The IDs of the tuning runs, each once."""
        return tuple(dict.fromkeys(run.strip() for run in self.tune_run.split(",") if run.strip()))


class CheckOptions(SeedOptions):
    """How a compiled model is checked and timed."""

    tolerance: Annotated[float, Field(gt=0, allow_inf_nan=False)] | Auto = _parameter(
        "auto",
        "Largest max_rel_error that passes: max |output - reference| / max |reference|, the latter at least 0.01; auto "
        "is 0.0001, with float16 0.02, and with bfloat16 and of quantised networks 0.1.",
        "a positive number, or auto",
    )
    data: str = _parameter(
        "",
        "Inputs that the outputs are checked on, and the first of which is timed, in place of seeded ones: a .npz or "
        ".parquet file with an array or a column for each input, or a .npy file; any number of rows.",
        "the path of a .npz, .npy or .parquet file",
    )
    turns: PositiveInt = _parameter(
        3, "Turns of the latency measurement; each starts every contender once, in a process of its own."
    )
    measure_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = _parameter(
        1.5, "Seconds that each of them is timed in a turn.", "a positive number of seconds"
    )
    rivals: Rivals = _parameter(
        "auto",
        "Runtimes that the model is timed against, on the same threads and inputs: onnxruntime, openvino and torch "
        "(torch.compile, with trust=true, of networks that came from PyTorch); auto is those that are installed. "
        "Outputs are checked against ONNX Runtime in any case.",
        "auto, none, or some of onnxruntime, openvino and torch, separated by commas",
    )
    trust: bool = _same_as(NetworkOptions, "trust")
    instant: bool = _parameter(
        False,
        "Also build and time what the sketches choose without any trial: metric instant_latency_ms, which shows what "
        "the tuning gained.",
    )


class EvaluateOptions(RpcOptions, LinkOptions, CheckOptions):
    """Which model is checked and timed."""

    model_uri: Annotated[
        str,
        AfterValidator(_check_model),
        _required("Model to evaluate: models:/…, runs:/…, or a path.", "models:/…, runs:/… or a model's directory"),
    ]


class ReportOptions(Options):
    """Where a command that only reports writes what it found."""

    json_file: str = _parameter(
        "",
        "File that the result is written to as JSON; - for standard output, in place of the text; none by default.",
        "a path or -",
        flag="--json",
    )


class BisectOptions(ReportOptions, NetworkOptions):
    """The command `bisect`: in which network the first wrong tensor is looked for."""

    network: Annotated[
        str,
        _required(
            "Network: an ONNX file, or anything else that `tune` takes.",
            "a network's name, an operator, a file or a model's URI",
            metavar="NETWORK",
        ),
    ]
    tolerance: Annotated[float, Field(gt=0, allow_inf_nan=False)] | Auto = _same_as(CheckOptions, "tolerance")
    data: str = _parameter(
        "",
        "Inputs of the network, in place of seeded ones: a .npz or .parquet file with an array or a column for each "
        "input, or a .npy file; any number of rows.",
        "the path of a .npz, .npy or .parquet file",
    )
    output: str = _parameter(
        "wrong",
        "Directory of the smallest model that shows the difference, its inputs and both outputs: new, empty, or one "
        "that this command wrote.",
        "the path of a directory",
        min_length=1,
    )


class LatencyOptions(Options):
    """The `evaluator_config` of MLflow's evaluator `ansor-latency`."""

    reference: str = _parameter(
        "",
        "What the outputs are compared with: an ONNX file, or the URI or directory of another MLflow model.",
        "an ONNX file, or the URI or directory of a model",
    )
    champion: Literal["onnxruntime", "openvino"] | None = _parameter(
        None,
        "Runtime that is timed in turns with the model, on the ONNX file that is the reference; none by default.",
    )
    batch_size: PositiveInt | Auto = _parameter(
        "auto", "Rows in a call of predict; auto is what the model was compiled for, or else 1."
    )
    turns: PositiveInt = _parameter(3, "Turns of the measurement.")
    warm_up_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = _parameter(
        0.5, "Seconds of calls before each turn that do not count.", "a number of seconds, 0 or more"
    )
    measure_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = _parameter(
        1.5, "Seconds of a turn.", "a positive number of seconds"
    )


class AliasOptions(Options):
    """When a version of a registered model gets an alias."""

    alias: Annotated[str, AfterValidator(_check_alias)] = _parameter(
        "",
        "Alias that moves together with that of the target, such as champion; none by default.",
        "letters, digits, - and _, but no number, no v and number, and not latest",
    )
    min_improvement: Share = _parameter(
        0.02,
        "Share of the champion's latency that the candidate must save at least, such as 2%.",
        "a share from 0 to below 1, such as 2% or 0.02",
    )
    champion: Rival | None = _parameter(
        None,
        "Runtime that the candidate must beat, too, on its own network and threads: what is served today, where that "
        "is no version; none by default.",
    )


class PromoteOptions(AliasOptions, SeedOptions):
    """Which version of a registered model is compared with its champion, and how."""

    model: Annotated[str, _required("Name of the registered model.", "a model name")]
    candidate: Annotated[str, BeforeValidator(str)] = _parameter(
        "", "Version that may become the champion: its number or an alias.", "the number of a version, or an alias"
    )
    confidence: Annotated[float, Field(ge=0.5, lt=1), BeforeValidator(_parse_share)] = _parameter(
        0.95,
        "How sure it must be that the candidate is faster: of candidates that are not, at most the rest is promoted.",
        "a share from 0.5 to below 1, such as 95% or 0.95",
    )
    max_turns: Annotated[int, Field(ge=4)] = _parameter(
        32, "Turns after which it stays undecided; each starts champion and candidate once, in processes of their own."
    )
    measure_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = _same_as(CheckOptions, "measure_s")
    data: str = _same_as(CheckOptions, "data")
    tolerance: Annotated[float, Field(gt=0, allow_inf_nan=False)] | Auto = _same_as(CheckOptions, "tolerance")
    trust: bool = _same_as(NetworkOptions, "trust")
    dry_run: bool = _parameter(False, "Compare, but move no alias and tag no version.")
    rollback: bool = _parameter(
        False, "Instead of comparing, take back the last promotion: its aliases return to where they pointed before."
    )


class PipelineOptions(AliasOptions, SignatureOptions, CheckOptions, TuneOptions):
    """The entry point `main`: tune, compile, evaluate and, if asked, register and promote."""

    register_as: Annotated[str, AfterValidator(_check_model_name)] = _parameter(
        "", "Name to register the model under; not registered by default.", "a model name, without / and :"
    )
    promote: bool = _parameter(
        False, "Promote the registered version if it is faster than the champion; needs register_as."
    )


class PlanOptions(ReportOptions, RecordsOptions, BudgetOptions):
    """The command `plan`: what a tuning would measure, and what is known already."""


class SourceOptions(ReportOptions, NetworkOptions):
    """Which records of which network a command reports on."""

    source: Annotated[
        str,
        _required(
            "Tuning run or records: a run's ID, a directory, a tuning-record file or an artifact URI. Records need the "
            "network, layout, target and threads that they were made with; a run knows them.",
            "the ID of a tuning run, or a path or an artifact URI of records",
            metavar="SOURCE",
        ),
    ]


class TrackerOptions(Options):
    """The command `fleet tracker`: where it listens."""

    host: str = _parameter(
        "127.0.0.1", "Address to listen at: only this host by default, since TVM's RPC asks nobody who they are."
    )
    port: Annotated[int, Field(ge=0, lt=2**16)] = _parameter(
        9190, "Port to listen at; 0 for any that is free.", "a whole number from 0 to 65535"
    )


class ServerOptions(TrackerOptions):
    """The command `fleet server`: where it listens, and whom it serves."""

    tracker: Annotated[str, _required("Tracker to report to, host:port.", "host:port, such as 127.0.0.1:9190")]
    key: Annotated[str, _required("Key of the kind of device, one word such as pi4.", "one word")]
    port: Annotated[int, Field(ge=0, lt=2**16)] = _parameter(
        0, "Port to listen at; 0 for any that is free.", "a whole number from 0 to 65535"
    )
    known_as: str = _parameter(
        "", "Host that the tracker tells tuners, where it is not the one that the tracker sees: of a tunnel, say."
    )


class FleetOptions(ReportOptions):
    """The command `fleet status`: whose servers are listed."""

    tracker: Annotated[str, _required("Tracker to ask, host:port.", "host:port, such as 127.0.0.1:9190")]


class FleetTestOptions(LinkOptions, FleetOptions):
    """The command `fleet test`: which servers are tried."""

    key: Annotated[str, _required("Key of the servers.", "one word")]
    target: str = _parameter(
        "auto", "Target of the servers; auto is what the first one says.", "auto, a tag, JSON or `llvm -mcpu=…`"
    )
    wait_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = _parameter(
        30.0, "Seconds to wait for servers that somebody else has.", "a positive number of seconds"
    )


class ExplainOptions(SourceOptions):
    """The command `explain`: which kernel of which records is explained."""

    task: str = _parameter(
        "",
        "Name of the task, or its index from 0; by default the one that takes the largest share of the time, of those "
        "that compute.",
        "a task's name or index",
    )


class DiffOptions(ReportOptions):
    """The command `diff`: which two tunings are compared."""

    runs: Annotated[
        tuple[str, ...],
        _required(
            "Two runs: IDs of tune, compile, evaluate or main, or URIs of models.",
            "two runs, each the ID of one of tune, compile, evaluate or main, or the URI of a model",
            min_length=2,
            max_length=2,
            metavar="RUN_A RUN_B",
        ),
    ]
    fail_if_slower: Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(_parse_share)] | None = (
        _parameter(
            None,
            "Share by which the second may be slower, such as 3%; by more, or without a record of a task that the "
            "first has, the exit code is 8.",
            "a share such as 3% or 0.03",
        )
    )
    force: bool = _parameter(
        False, "Let fail_if_slower look at times that cannot be trusted, too; by default they are a warning."
    )
    html: str = _parameter(
        "", "File that the comparison is written to as a page of HTML; none by default.", "the path of a file"
    )


class DoctorOptions(ReportOptions):
    """The command `doctor`: what is looked at, beside this machine."""

    tracking_uri: str = _parameter(
        "",
        "Tracking server or store; by default that of MLFLOW_TRACKING_URI, or else MLflow's default.",
        "the address of a server, or the URI of a database or a folder",
    )
    experiment: str = _parameter(
        "",
        "ID or name of the experiment; by default that of MLFLOW_EXPERIMENT_NAME or MLFLOW_EXPERIMENT_ID, or else "
        "MLflow's default.",
        "an experiment's ID or name",
    )
    target: str = _same_as(NetworkOptions, "target")
    rpc_tracker: str = _same_as(RpcOptions, "rpc_tracker")
    rpc_key: str = _same_as(RpcOptions, "rpc_key")


class ShowRecordsOptions(ReportOptions):
    """The command `records show`."""

    source: Annotated[
        str,
        _required(
            "Records: a run's ID, a directory, a tuning-record file or an artifact URI.",
            "the ID of a tuning run, or a path or an artifact URI of records",
            metavar="SOURCE",
        ),
    ]


class MergeRecordsOptions(Options):
    """The command `records merge`: which records go where."""

    sources: Annotated[
        tuple[str, ...],
        _required(
            "Records, each a run's ID, a directory, a tuning-record file or an artifact URI.",
            "one source of records at least: the ID of a tuning run, a path or an artifact URI",
            metavar="SOURCE...",
        ),
    ]
    output: Annotated[
        str,
        _required(
            "Directory of the new database: new, empty, or one that this command wrote and nobody changed.",
            "the path of a directory",
        ),
    ]


class DistillRecordsOptions(MergeRecordsOptions):
    """The command `records distill`: which records are kept."""

    keep: PositiveInt = _parameter(1, "Fastest records to keep of each workload and target.")
    target: str = _parameter(
        "",
        "Targets whose records are taken: those with these attributes, such as `llvm -mcpu=znver4`, or auto for this "
        "host; by default all, which are kept apart.",
        "auto, a tag, JSON or `llvm -mcpu=…`",
    )


class VerifyRecordsOptions(SourceOptions):
    """The command `records verify`: which records are replayed."""

    keep: PositiveInt | Literal["all"] = _parameter(
        1, "Records to replay of each task: the winner of the tuning first, then the fastest."
    )
    measure_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = _same_as(TuneOptions, "measure_timeout_s")
    worker_memory_mib: Annotated[int, Field(ge=512)] = _same_as(TuneOptions, "worker_memory_mib")
    repair: bool = _parameter(
        False,
        "First set damaged lines of a local database aside; without a network, nothing else. A flag without a value.",
        is_switch=True,
    )


OptionsT = TypeVar("OptionsT", bound=Options)


def load_options(cls: type[OptionsT], given: Mapping[str, Any], config: str | None = None) -> OptionsT:
    """Checks what the user gave and fills in defaults.

    A value that is empty or equal to the parameter's default counts as not given (MLflow passes every parameter of an
    entry point, given or not), so that the configuration file decides it.

    Args:
        cls: Option class to make.
        given: Values from the command line by parameter name.
        config: Path of a YAML file with values for any of the class's parameters.

    Raises:
        UserInputError: A value breaks its rule, or a name in the configuration is unknown.
    """
    values: dict[str, Any] = _read_config(cls, config) if config else {}
    _check_names(cls, given, "parameters")
    for name, value in given.items():
        if value not in (None, "", ()) and not (name in values and value == default_text(cls, name)):
            values[name] = value
    _check_texts(values)
    _check_values(values)
    try:
        return cls(**values)
    except ValidationError as err:
        name = str(err.errors()[0]["loc"][0])
        raise UserInputError(f"{name}={values.get(name, '')!r}: it must be {declared(cls, name)['rule']}") from err


def _read_config(cls: type[Options], config: str) -> dict[str, Any]:
    try:
        values = read_yaml(Path(config).read_bytes())
    except OSError as err:
        raise UserInputError(f"config={config}: the file cannot be read ({err.strerror}); give a YAML file") from err
    except ValueError as err:
        raise UserInputError(f"config={config}: the file is not valid YAML ({err}); correct it") from err
    if not isinstance(values, dict):
        raise UserInputError(f"config={config}: expected a mapping of parameters to values, such as `trials: 640`")
    _check_names(cls, values, f"config={config}")
    return values


def _check_texts(values: Mapping[str, Any]) -> None:
    """Refuses texts that are no path, no name in MLflow and no word of a command line."""
    for name, value in values.items():
        for text in [value] if isinstance(value, str) else value if isinstance(value, list | tuple) else ():
            if isinstance(text, str) and ("\0" in text or (not text.isascii() and _HALF.search(text))):
                raise UserInputError(f"{name}={text!r}: it has characters that UTF-8 lacks, or NUL; leave them out")


def _check_values(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if why := why_gone(name, value):
            raise UserInputError(f"{name}={value!r}: {why}")


def _check_names(cls: type[Options], names: Iterable[str], source: str) -> None:
    for name in names:
        if name not in cls.model_fields:
            if name in PARAMETERS:
                raise UserInputError(f"{source}: {name} is gone: {PARAMETERS[name]}")
            near = difflib.get_close_matches(str(name), cls.model_fields, n=1)
            hint = f"perhaps you meant {near[0]}" if near else f"known are {', '.join(cls.model_fields)}"
            raise UserInputError(f"{source}: unknown key {name!r}; {hint}")


def declared(cls: type[Options], name: str) -> dict[str, Any]:
    """How a parameter was declared beside its type: its `rule`, and its `flag`, `metavar` or `is_switch`."""
    extra = cls.model_fields[name].json_schema_extra
    found: dict[str, Any] = dict(extra) if isinstance(extra, dict) else {}
    return {**found, "rule": found.get("rule") or _rule_of_type(cls.model_fields[name])}


def _rule_of_type(field: FieldInfo) -> str:
    """What a value must be, of a type with closed choices, or of a whole number with a lower bound."""
    kinds = get_args(field.annotation) if get_origin(field.annotation) in (Union, UnionType) else [field.annotation]
    words = [str(word) for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    words = ["true", "false"] if field.annotation is bool else words
    choices = " or ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))
    numbers = (get_args(kind)[1].metadata for kind in kinds if get_origin(kind) is Annotated)
    bounds = next(numbers, field.metadata)
    least = next((bound.ge if hasattr(bound, "ge") else bound.gt + 1 for bound in bounds), None)
    if least is None:
        return choices
    return f"a whole number of at least {least}" + (f", or {choices}" if choices else "")


def default_text(cls: type[Options], name: str) -> str:
    """A parameter's default as it is written on the command line and in `MLproject`; empty for "not given"."""
    field = cls.model_fields[name]
    return "" if field.is_required() else as_text(field.get_default(call_default_factory=True))


def as_text(value: Any) -> str:
    """A parameter's value as it is written on the command line."""
    if value in (None, {}, ()):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value)
