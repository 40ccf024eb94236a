"""Parameters of the commands that only look, and of those that handle records and servers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ansor_mlflow.parameters.declaring import Auto, NonEmpty, Options, PositiveFloat, PositiveInt, Share, parameter
from ansor_mlflow.parameters.model import Tolerance
from ansor_mlflow.parameters.tuning import (
    DATA_RULE,
    NETWORK_RULE,
    BudgetOptions,
    GraphOptions,
    LinkOptions,
    MeasureTimeout,
    NetworkOptions,
    QuantizeOptions,
    RecordsOptions,
    RunOptions,
    ServersOptions,
    Target,
    WorkerMemory,
)

TRACKER_RULE = "host:port, such as 127.0.0.1:9190"
SOURCE_RULE = "the ID of a tuning run, or a path or an artifact URI of records"
SLOWER_RULE = "a share such as 3% or 0.03"
DIRECTORY_RULE = "the path of a directory"

Port = Annotated[
    int,
    parameter(
        rule="a whole number from 0 to 65535", help_="Port to listen at; 0 for any that is free.", ge=0, lt=2**16
    ),
]


class ReportOptions(Options):
    """Where a command that only reports writes what it found."""

    json_file: str = parameter(
        "",
        help_="File that the result is written to as JSON; - for standard output, in place of the text; none by "
        "default.",
        flag="--json",
    )


class PlanOptions(ReportOptions, RecordsOptions, QuantizeOptions, BudgetOptions):
    """The command `plan`: what a tuning would measure, and what is known already."""


class SourceOptions(ReportOptions, NetworkOptions):
    """Which records of which network a command reports on."""

    source: NonEmpty = parameter(
        help_="Tuning run or records: a run's ID, a directory, a tuning-record file or an artifact URI. Records need "
        "the network, layout, target and threads that they were made with; a run knows them.",
        rule=SOURCE_RULE,
        metavar="SOURCE",
    )


class ExplainOptions(SourceOptions):
    """The command `explain`: which kernel of which records is explained."""

    task: str = parameter(
        "",
        help_="Name or index of the task; by default that with the largest share of the time, of those that compute.",
    )


class DiffOptions(ReportOptions):
    """The command `diff`: which two tunings are compared.

    Attributes:
        runs: Two runs: IDs of tune, compile, evaluate or main, or URIs of models.
        fail_if_slower: Share by which the second may be slower, such as 3%; by more, or without a record of a task that
            the first has, the exit code is 8.
        force: Let fail_if_slower look at unreliable times, too; by default they are a warning.
        html: File that the comparison is written to as a page of HTML; none by default.
    """

    runs: Annotated[
        tuple[str, ...],
        parameter(rule="two runs, each an ID or the URI of a model", min_length=2, max_length=2, metavar="RUN_A RUN_B"),
    ]
    fail_if_slower: Annotated[Share, parameter(ge=0, allow_inf_nan=False)] | None = parameter(None, SLOWER_RULE)
    force: bool = False
    html: str = ""


class BisectOptions(ReportOptions, NetworkOptions):
    """The command `bisect`: in which network the first wrong tensor is looked for.

    Attributes:
        network: Network: an ONNX file, or anything else that `tune` takes.
        data: Inputs of the network, in place of seeded ones: a .npz, .parquet or .npy file.
        output: Directory of the smallest model that shows the difference, its inputs and both outputs: new, empty, or
            one that this command wrote.
    """

    network: Annotated[str, parameter(rule=NETWORK_RULE, metavar="NETWORK", min_length=1)]
    tolerance: Tolerance = "auto"
    data: str = parameter("", DATA_RULE)
    output: NonEmpty = parameter("wrong", DIRECTORY_RULE)


class QuantizeNetworkOptions(ReportOptions, QuantizeOptions, GraphOptions):
    """The command `quantize`: which network becomes which file.

    Attributes:
        network: Network: an ONNX file, or anything else that `tune` takes.
        quantize: Type that convolutions and dense layers are quantised to.
        output: ONNX file that is written.
        target: Target that it is for: weights have 7 bits where a CPU's products of 8 are not exact.
    """

    network: Annotated[str, parameter(rule=NETWORK_RULE, metavar="NETWORK", min_length=1)]
    quantize: Literal["int8"] = "int8"
    output: NonEmpty = parameter("quantized.onnx", "the path of an ONNX file")
    target: Target = "auto"


class SweepOptions(ReportOptions, RunOptions):
    """The command `sweep`: what is made of which networks, and with how much.

    Attributes:
        sweep: YAML file with the networks and the parameters of each.
        dry_run: Check all entries and say what is to be done, without doing it.
        max_trials: Trials of all entries together, which go where they gain most; by default each gets its own.
        max_minutes: Minutes after which no more trials are measured; no limit by default.
        cluster: Machines that run the pipelines: local, this one; ray, the nodes of the Ray cluster here or of
            RAY_ADDRESS; or ray://host:port, those of another.
        node_minutes: Minutes for which entries wait for a node of theirs, when nothing else is left.
        against: Run of an earlier sweep, whose entries are compared with those of the same names. All models are made
            and measured anew then.
        fail_if_slower: Share by which a model may be slower than in the earlier sweep, such as 3%; by more, beyond the
            noise, the exit code is 8.
        junit: File that the entries are written to as JUnit XML; none by default.
        markdown: File that the table is written to as Markdown; none by default.
    """

    sweep: NonEmpty = parameter(rule="the path of a YAML file", metavar="SWEEP")
    dry_run: bool = parameter(False, flag="--plan")
    max_trials: PositiveInt | None = None
    max_minutes: PositiveFloat | None = None
    cluster: Annotated[str, Field(pattern=r"^(local|ray|ray://.+:\d+)$")] = parameter(
        "local", "local, ray or ray://host:port", flag="--on"
    )
    node_minutes: Annotated[float, parameter(ge=0, allow_inf_nan=False)] = parameter(10.0, "a number, 0 or more")
    against: str = ""
    fail_if_slower: Annotated[Share, parameter(ge=0, allow_inf_nan=False)] | None = parameter(None, SLOWER_RULE)
    junit: str = ""
    markdown: str = ""


class DoctorOptions(ServersOptions, ReportOptions):
    """The command `doctor`: what is looked at, beside this machine.

    Attributes:
        tracking_uri: Tracking server or store; by default that of MLFLOW_TRACKING_URI, or else MLflow's default.
        experiment: ID or name of the experiment; by default that of MLFLOW_EXPERIMENT_NAME or MLFLOW_EXPERIMENT_ID, or
            else MLflow's default.
    """

    tracking_uri: str = ""
    experiment: str = ""
    target: Target = "auto"


class ShowRecordsOptions(ReportOptions):
    """The command `records show`."""

    source: NonEmpty = parameter(
        help_="Records: a run's ID, a directory, a tuning-record file or an artifact URI.",
        rule=SOURCE_RULE,
        metavar="SOURCE",
    )


class MergeRecordsOptions(Options):
    """The command `records merge`: which records go where.

    Attributes:
        sources: Records, each a run's ID, a directory, a tuning-record file or an artifact URI.
        output: Directory of the new database: new, empty, or one that this command wrote and nobody changed.
    """

    sources: tuple[str, ...] = parameter(rule="one source of records at least", metavar="SOURCE...", min_length=1)
    output: NonEmpty = parameter(rule=DIRECTORY_RULE)


class DistillRecordsOptions(MergeRecordsOptions):
    """The command `records distill`: which records are kept.

    Attributes:
        keep: Fastest records to keep of each workload and target.
        target: Targets whose records are taken: those with these attributes, such as `llvm -mcpu=znver4`, or auto for
            this host; by default all, which are kept apart.
    """

    keep: PositiveInt = 1
    target: str = ""


class VerifyRecordsOptions(SourceOptions):
    """The command `records verify`: which records are replayed.

    Attributes:
        keep: Records to replay of each task: the winner of the tuning first, then the fastest.
        repair: First set damaged lines of a local database aside; without a network, nothing else. A flag without a
            value.
    """

    keep: PositiveInt | Literal["all"] = 1
    measure_timeout_s: MeasureTimeout = 30.0
    worker_memory_mib: WorkerMemory = 2048
    repair: bool = parameter(False, is_switch=True)


class TrackerOptions(Options):
    """The command `fleet tracker`: where it listens."""

    host: str = parameter(
        "127.0.0.1", help_="Address to listen at: only this host by default, since TVM's RPC asks nobody who they are."
    )
    port: Port = 9190


class ServerOptions(TrackerOptions):
    """The command `fleet server`: where it listens, and whom it serves.

    Attributes:
        tracker: Tracker to report to, host:port.
        key: Key of the kind of device, one word such as pi4.
        known_as: Host that the tracker tells tuners, where it is not the one that the tracker sees: of a tunnel, say.
    """

    tracker: NonEmpty = parameter(rule=TRACKER_RULE)
    key: NonEmpty = parameter(rule="one word")
    port: Port = 0
    known_as: str = ""


class FleetOptions(ReportOptions):
    """The command `fleet status`: whose servers are listed."""

    tracker: NonEmpty = parameter(help_="Tracker to ask, host:port.", rule=TRACKER_RULE)


class FleetTestOptions(LinkOptions, FleetOptions):
    """The command `fleet test`: which servers are tried.

    Attributes:
        key: Key of the servers.
        target: Target of the servers; auto is what the first one says.
        wait_s: Seconds to wait for servers that somebody else has.
    """

    key: NonEmpty = parameter(rule="one word")
    target: str = "auto"
    wait_s: PositiveFloat = 30.0


class LatencyOptions(Options):
    """The `evaluator_config` of MLflow's evaluator `ansor-latency`.

    Attributes:
        reference: What the outputs are compared with: an ONNX file, or the URI or directory of another MLflow model.
        champion: Runtime that is timed in turns with the model, on the ONNX file that is the reference; none by
            default.
        batch_size: Rows in a call of predict; auto is what the model was compiled for, or else 1.
        turns: Turns of the measurement.
        warm_up_s: Seconds of calls before each turn that do not count.
        measure_s: Seconds of a turn.
    """

    reference: str = ""
    champion: Literal["onnxruntime", "openvino"] | None = None
    batch_size: PositiveInt | Auto = "auto"
    turns: PositiveInt = 3
    warm_up_s: float = parameter(0.5, "a number of seconds, 0 or more", ge=0, allow_inf_nan=False)
    measure_s: PositiveFloat = 1.5
