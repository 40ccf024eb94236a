"""The parameters of a network, of records and servers, and of a tuning."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from ansor_mlflow.errors import UserInputError
from ansor_mlflow.parameters.declaring import (
    Auto,
    InputValues,
    NonEmpty,
    NonEmptyList,
    Options,
    PositiveFloat,
    PositiveInt,
    Shapes,
    Tags,
    parameter,
)
from ansor_mlflow.settings import Algorithm, Dtype, Layout, Linker, LoweringSettings, Partition

Trust = Annotated[
    bool,
    parameter(
        help_="Read exported programs (.pt2) and MLflow models of PyTorch: reading one can run any code that its "
        "author put into it, as you."
    ),
]
Target = Annotated[
    str,
    parameter(
        rule="auto, a tag, JSON or `llvm -mcpu=…`",
        help_="Target: auto (this host), a TVM tag, JSON, `llvm -mcpu=… -num-cores …`, or `cuda -arch=…`.",
        min_length=1,
    ),
]
NETWORK_RULE = "a network's name, an operator, a file or a model's URI"


class RunOptions(Options):
    """What a run is called, and where it stands.

    Attributes:
        run_name: Name of the run; by default it says what is done, and how.
        tags: Tags of the run, as JSON: {"team": "vision"}; mlflow.note.content describes it, in place of our
            description.
        parent_run: ID of the run that it is listed below.
        experiment: Name or ID of its experiment, which is made if there is none of that name; by default that of
            MLFLOW_EXPERIMENT_NAME or MLFLOW_EXPERIMENT_ID.
    """

    run_name: str = parameter("", under="run.name")
    tags: Tags = parameter({}, "a JSON object of texts, whose names do not begin with ansor.", under="run.tags")
    parent_run: str = parameter("", under="run.parent")
    experiment: str = parameter("", under="run.experiment")


DATA_RULE = "the path of a .npz, .npy or .parquet file"
Data = Annotated[
    str,
    parameter(
        rule=DATA_RULE,
        help_="Inputs to check the outputs on, the first of which is timed, and to quantise with, in place of seeded "
        "ones: a .npz or .parquet file with an array or a column for each input, or a .npy file; any number of rows.",
    ),
]


class SeedOptions(Options):
    """What is random, made repeatable."""

    seed: int = parameter(
        0,
        "a whole number from 0 to 2147483647",
        help_="Seed of what is random: search, generated weights, inputs.",
        ge=0,
        lt=2**31,
    )


class GraphOptions(SeedOptions):
    """Which network, and with which inputs.

    Attributes:
        network: Network: a built-in name such as resnet-50, an operator with its sizes such as dense:1,512,512, an ONNX
            file, the URI of an MLflow model, or, with trust=true, an exported program of PyTorch (.pt2).
        input_shapes: Shapes that replace those of the inputs, as JSON: {"data": [1, 3, 224, 224]}. Lists in
            place of dimensions make one model for several sizes: {"ids": [1, [32, 128]]}; a range chooses them: {"ids":
            [1, "16..512"]}.
        input_values: Values that inputs are fixed to, as JSON: {"sr": 16000}. They are no inputs of the tuned model any
            more.
        batch_size: Batch size of a built-in network, and of a file whose batch is dynamic; 1 leaves others as they are.
    """

    network: str = parameter("resnet-18", NETWORK_RULE, min_length=1)
    trust: Trust = False
    input_shapes: Shapes = parameter(
        {}, 'a JSON object of shapes, such as {"data": [1, 3, 224, 224]} or {"ids": [1, "16..512"]}'
    )
    input_values: InputValues = parameter(
        {}, 'a JSON object of numbers or lists of them, such as {"sr": 16000}, of at most 6000 characters'
    )
    batch_size: PositiveInt = 1


class NetworkOptions(GraphOptions):
    """How it is compiled, and for which device.

    Attributes:
        layout: Layout of convolutions: channels last or first; auto is last.
        dtype: Type that float32 values are computed in; inputs and outputs keep theirs.
        pad_channels: Number that the output channels of convolutions, dense layers and products are padded to a
            multiple of; auto pads where it pays.
        partition: Whether what TVM cannot compute stays with ONNX Runtime (auto), or is an error (off).
        algorithm: How convolutions with stride 1 are computed: as they are defined (direct), by Winograd's algorithm,
            or as measurements say is faster (auto).
        num_threads: Threads of a kernel; auto is every CPU this process may use.
    """

    layout: Layout = parameter("auto", under="lower.layout")
    dtype: Dtype = "float32"
    pad_channels: PositiveInt | Literal["auto", "off"] = parameter("auto", under="lower.pad_channels")
    partition: Partition = parameter("auto", under="lower.partition")
    algorithm: Algorithm = parameter("auto", under="lower.algorithm")
    target: Target = "auto"
    num_threads: PositiveInt | Auto = "auto"

    @property
    def lowering(self) -> LoweringSettings:
        return LoweringSettings.among(vars(self))


class QuantizeOptions(SeedOptions):
    """Whether a network is quantised first, and what it may lose.

    Attributes:
        quantize: Type that convolutions and dense layers of a float network are quantised to, by data, or with ranges
            that each call measures; off leaves the network as it is.
        quantize_max_loss: Largest loss on inputs of data that were not quantised with: layers stay floats, the worst
            first, until it holds.
        quantize_loss: Which loss: cosine (one less the cosine between the outputs), relative_error, disagreement (share
            of rows whose largest class is another), or your own module:function of two lists of outputs by name.
        quantize_minutes: Minutes in which the layers are tried one by one.
    """

    quantize: Literal["off", "int8"] = "off"
    quantize_max_loss: float = parameter(0.01, "a number, 0 or more", under="quantize.max_loss", ge=0)
    quantize_loss: NonEmpty = parameter(
        "cosine", "cosine, relative_error, disagreement, or module:function", under="quantize.loss"
    )
    quantize_minutes: PositiveFloat = parameter(5.0, under="quantize.minutes")
    data: Data = ""


class LinkOptions(Options):
    """How libraries for another architecture than this host's are linked.

    Attributes:
        cc: Compiler, with its arguments, that links libraries for another architecture, such as aarch64-linux-gnu-g++;
            by default the one that has its name.
        sysroot: Directory with the device's headers and libraries, for a compiler that does not have its own:
            --sysroot.
    """

    cc: str = parameter("", under="link.cc")
    sysroot: str = parameter("", under="link.sysroot")

    @property
    def linker(self) -> Linker:
        return Linker(cc=self.cc, sysroot=self.sysroot)


class ServersOptions(Options):
    """Which devices do the work, in place of this host.

    Attributes:
        rpc_tracker: Address of TVM's RPC tracker, host:port: programs and models are measured on its servers of rpc_key
            instead of on this host, programs on all of them at the same time.
        rpc_key: Key of the servers at the tracker, which are all of one kind.
    """

    rpc_tracker: str = parameter("", "host:port, such as 127.0.0.1:9190")
    rpc_key: str = ""


class RpcOptions(ServersOptions):
    """How long a device is waited for, and kept.

    Attributes:
        rpc_wait_s: Seconds without a free server after which the tuning, or the evaluation, ends.
        rpc_session_s: Seconds of a server lease; the server ends a longer session itself, so that a tuner that is gone
            does not keep it.
    """

    rpc_wait_s: PositiveFloat = parameter(600.0, under="rpc.wait_s")
    rpc_session_s: PositiveFloat = parameter(300.0, under="rpc.session_s")


class RecordsOptions(NetworkOptions):
    """Which records of a network are taken.

    Attributes:
        tune_run: ID of the tuning run whose records are taken; its network, layout, target and threads are used.
        records: Records to take instead of a tuning run's: a directory, a tuning-record file or an artifact URI.
    """

    tune_run: str = ""
    records: str = ""


TRIALS_PER_TASK = {"quick": 16, "standard": 64, "thorough": 256}
"""`trials=auto` gives a task this many trials in MetaSchedule's space, by preset."""
SKETCH_TRIALS_PER_TASK = {"quick": 2, "standard": 6, "thorough": 24}
"""And this many among the programs of its sketch, which are good from the first on; half of it where the task is a
further algorithm for a layer, most of which are soon known to be slower."""

MeasureTimeout = Annotated[
    PositiveFloat,
    parameter(help_="Seconds after which building or running a program is given up.", under="measure.timeout_s"),
]
WorkerMemory = Annotated[
    int,
    parameter(
        help_="Memory in MiB that building or running one program may take, beside its arguments.",
        under="measure.memory_mib",
        ge=512,
    ),
]


class BudgetOptions(NetworkOptions):
    """How many programs are measured.

    Attributes:
        trials: Programs to measure in all; auto is the preset's number for each task. With 0 nothing is measured, and
            the network is compiled as the sketches choose.
        preset: What trials=auto stands for: quick 2, standard 6, thorough 24 trials for a task with a sketch, half of
            it for a further algorithm for a layer, and 16, 64, 256 for one in MetaSchedule's space.
        trials_per_task: Most trials that one task may use; no limit by default.
        space: Programs to search: those of our sketches, where one fits a task, and MetaSchedule's elsewhere;
            MetaSchedule's alone; or both.
    """

    trials: Annotated[int, parameter(ge=0)] | Auto = parameter("auto", "a whole number, 0 or more, or auto")
    preset: Literal["quick", "standard", "thorough"] = "standard"
    trials_per_task: PositiveInt | None = parameter(None, under="search.trials_per_task")
    space: Literal["sketches", "metaschedule", "both"] = parameter("sketches", under="search.space")

    @property
    def lowering(self) -> LoweringSettings:
        """As of any network; only sketches have programs for other algorithms of a layer than the direct one."""
        settings = super().lowering
        if self.space != "metaschedule":
            return settings
        if self.algorithm == "winograd":
            raise UserInputError(
                "algorithm=winograd and space=metaschedule: that space has no program for it; give space=sketches"
            )
        return replace(settings, algorithm="direct")


class SearchOptions(BudgetOptions):
    """How programs are searched, and for how long.

    Attributes:
        max_minutes: Wall-clock budget in minutes; no limit by default.
        patience: Rounds without an improvement above the noise (3 %) after which a task's remaining trials go to
            others; no limit by default.
        num_trials_per_round: Most programs measured before the cost model learns again.
        strategy: Search strategy; random is MetaSchedule's replay-trace.
        cost_model: Cost model that ranks programs before they are measured; mlp needs PyTorch.
        search_threads: Threads of the search; auto is num_threads. With 1 the candidates of a seed repeat.
    """

    max_minutes: PositiveFloat | None = None
    patience: PositiveInt | None = parameter(None, under="search.patience")
    num_trials_per_round: PositiveInt = parameter(32, under="search.trials_per_round")
    strategy: Literal["evolutionary", "random"] = parameter("evolutionary", under="search.strategy")
    cost_model: Literal["xgb", "mlp", "random", "none"] = parameter("xgb", under="search.cost_model")
    search_threads: PositiveInt | Auto = parameter("auto", under="search.threads")


class MeasureOptions(RpcOptions, LinkOptions):
    """How a program is built and measured, and where.

    Attributes:
        number: Calls averaged in one measurement; raised until min_repeat_ms is reached.
        repeat: Measurements of a program.
        min_repeat_ms: Shortest duration of one measurement, in milliseconds.
        measure: What a program finds in the CPU's caches while it is timed: what the rest of the network leaves there
            (network), or its own data (warm).
        cache_flush: Flush the CPU's caches before every measurement: all is cold.
        build_workers: Programs that this host builds at a time: auto is num_threads, or every CPU with rpc_tracker.
        runner: What measures programs: local, rpc, or the name of a plugin's (docs/extend.md); auto is rpc with
            rpc_tracker, else local.
        rpc_retries: Times that a program is measured again, on another server, when a server was lost with it.
    """

    number: PositiveInt = parameter(3, under="measure.number")
    repeat: PositiveInt = parameter(1, under="measure.repeat")
    min_repeat_ms: int = parameter(50, under="measure.min_repeat_ms", ge=0)
    measure_timeout_s: MeasureTimeout = 30.0
    worker_memory_mib: WorkerMemory = 2048
    measure: Literal["network", "warm"] = parameter("network", under="measure.caches")
    cache_flush: bool = parameter(False, under="measure.cache_flush")
    build_workers: PositiveInt | Auto = parameter("auto", under="measure.build_workers")
    runner: NonEmpty = parameter("auto", "auto, or the name of a runner", under="measure.runner")
    rpc_retries: int = parameter(1, under="rpc.retries", ge=0)


class TuneOptions(RunOptions, MeasureOptions, QuantizeOptions, SearchOptions):
    """The entry point `tune`.

    Attributes:
        warm_start: Earlier records to begin with: runs, models, artifact URIs, paths, or auto, which takes what
            finished tuning runs of the tracking server know of the network's tasks. Those of this device are applied;
            those of similar devices teach the cost model.
        resume_run: ID of a tuning run that was stopped, or is to get more trials: it goes on with its own parameters
            and those that are given now.
    """

    warm_start: NonEmptyList = parameter((), "auto, run IDs, artifact URIs or paths, separated by commas")
    resume_run: str = ""
