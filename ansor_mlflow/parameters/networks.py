"""Parameters that say what is compiled, for which device, and where the devices are."""

from __future__ import annotations

from typing import Annotated, Literal

from ansor_mlflow.parameters.declaring import Auto, InputValues, Options, PositiveFloat, PositiveInt, Shapes, parameter
from ansor_mlflow.settings import Algorithm as AlgorithmName
from ansor_mlflow.settings import Dtype as DtypeName
from ansor_mlflow.settings import Layout as LayoutName
from ansor_mlflow.settings import Linker, LoweringSettings
from ansor_mlflow.settings import Partition as PartitionName

Trust = Annotated[
    bool,
    parameter(
        "Read exported programs (.pt2) and MLflow models of PyTorch: reading one can run any code that its author "
        "put into it, as you."
    ),
]
NETWORK_RULE = "a network's name, an operator, a file or a model's URI"
Layout = Annotated[
    LayoutName, parameter("Layout of convolutions: channels last or first; auto is last.", under="lower.layout")
]
Dtype = Annotated[DtypeName, parameter("Type that float32 values are computed in; inputs and outputs keep theirs.")]
Partition = Annotated[
    PartitionName,
    parameter(
        "Whether what TVM cannot compute stays with ONNX Runtime (auto), or is an error (off).", under="lower.partition"
    ),
]
Algorithm = Annotated[
    AlgorithmName,
    parameter(
        "How convolutions of 3x3 with stride 1 are computed: as they are defined (direct), by Winograd's "
        "algorithm, or as measurements say is faster (auto).",
        under="lower.algorithm",
    ),
]
Target = Annotated[
    str,
    parameter(
        "Target: auto (this host), a TVM tag, JSON, `llvm -mcpu=… -num-cores …`, or `cuda -arch=…`.",
        "auto, a tag, JSON or `llvm -mcpu=…`",
        min_length=1,
    ),
]


class SeedOptions(Options):
    """What is random, made repeatable."""

    seed: int = parameter(
        "Seed of what is random: search, generated weights, inputs.",
        "a whole number from 0 to 2147483647",
        default=0,
        ge=0,
        lt=2**31,
    )


class NetworkOptions(SeedOptions):
    """What is compiled, and for which device."""

    network: str = parameter(
        "Network: a built-in name such as resnet-50, an operator with its sizes such as dense:1,512,512, an ONNX "
        "file, the URI of an MLflow model, or, with trust=true, an exported program of PyTorch (.pt2).",
        NETWORK_RULE,
        default="resnet-18",
        min_length=1,
    )
    trust: Trust = False
    input_shapes: Shapes = parameter(
        'Shapes that replace those of the inputs, as JSON: {"data": [1, 3, 224, 224]}. Lists of sizes in the place '
        'of dimensions make one model for several sizes: {"ids": [1, [32, 128]]}.',
        'a JSON object of shapes, such as {"data": [1, 3, 224, 224]} or {"ids": [1, [32, 128]]}',
        default={},
    )
    input_values: InputValues = parameter(
        'Values that inputs are fixed to, as JSON: {"sr": 16000}. They are no inputs of the tuned model any more.',
        'a JSON object of numbers or lists of numbers, such as {"sr": 16000}, of at most 6000 characters',
        default={},
    )
    batch_size: PositiveInt = parameter(
        "Batch size of a built-in network, and of a file whose batch is dynamic; 1 leaves others as they are.",
        default=1,
    )
    layout: Layout = "auto"
    dtype: Dtype = "float32"
    pad_channels: PositiveInt | Literal["auto", "off"] = parameter(
        "Number that the output channels of convolutions and dense layers are padded to a multiple of; auto pads "
        "where it pays.",
        "auto, off or a whole number of at least 1",
        default="auto",
        under="lower.pad_channels",
    )
    partition: Partition = "auto"
    algorithm: Algorithm = "auto"
    target: Target = "auto"
    num_threads: PositiveInt | Auto = parameter(
        "Threads of a kernel; auto is every CPU this process may use.", default="auto"
    )

    @property
    def lowering(self) -> LoweringSettings:
        """What decides which tasks the network has."""
        return LoweringSettings.among(vars(self))


class LinkOptions(Options):
    """How libraries for another architecture than this host's are linked."""

    cc: str = parameter(
        "Compiler, with its arguments, that links libraries for another architecture, such as "
        "aarch64-linux-gnu-g++; by default the one that has its name.",
        default="",
        under="link.cc",
    )
    sysroot: str = parameter(
        "Directory with the device's headers and libraries, for a compiler that does not have its own: --sysroot.",
        default="",
        under="link.sysroot",
    )

    @property
    def linker(self) -> Linker:
        return Linker(cc=self.cc, sysroot=self.sysroot)


class ServersOptions(Options):
    """Which devices do the work, in place of this host."""

    rpc_tracker: str = parameter(
        "Address of TVM's RPC tracker, host:port: programs and models are measured on its servers of rpc_key instead "
        "of on this host, programs on all of them at the same time.",
        "host:port, such as 127.0.0.1:9190",
        default="",
    )
    rpc_key: str = parameter("Key of the servers at the tracker, which are all of one kind.", default="")


class RpcOptions(ServersOptions):
    """How long a device is waited for, and kept."""

    rpc_wait_s: PositiveFloat = parameter(
        "Seconds without a free server after which the tuning, or the evaluation, ends.",
        default=600.0,
        under="rpc.wait_s",
    )
    rpc_session_s: PositiveFloat = parameter(
        "Seconds of a server lease; the server ends a longer session itself, so that a tuner that is gone does not "
        "keep it.",
        default=300.0,
        under="rpc.session_s",
    )


class RecordsOptions(NetworkOptions):
    """Which records of a network are taken."""

    tune_run: str = parameter(
        "ID of the tuning run whose records are taken; its network, layout, target and threads are used.",
        default="",
    )
    records: str = parameter(
        "Records to take instead of a tuning run's: a directory, a tuning-record file or an artifact URI.",
        default="",
    )
