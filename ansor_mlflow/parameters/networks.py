"""Parameters that say what is compiled, for which device, and where the devices are."""

from __future__ import annotations

from typing import Annotated, Literal

from ansor_mlflow.parameters.declaring import Auto, InputValues, Options, PositiveFloat, PositiveInt, Shapes, parameter
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


class SeedOptions(Options):
    """What is random, made repeatable."""

    seed: int = parameter(
        0,
        "a whole number from 0 to 2147483647",
        help_="Seed of what is random: search, generated weights, inputs.",
        ge=0,
        lt=2**31,
    )


class NetworkOptions(SeedOptions):
    """What is compiled, and for which device.

    Attributes:
        network: Network: a built-in name such as resnet-50, an operator with its sizes such as dense:1,512,512, an ONNX
            file, the URI of an MLflow model, or, with trust=true, an exported program of PyTorch (.pt2).
        input_shapes: Shapes that replace those of the inputs, as JSON: {"data": [1, 3, 224, 224]}. Lists of sizes in
            the place of dimensions make one model for several sizes: {"ids": [1, [32, 128]]}.
        input_values: Values that inputs are fixed to, as JSON: {"sr": 16000}. They are no inputs of the tuned model any
            more.
        batch_size: Batch size of a built-in network, and of a file whose batch is dynamic; 1 leaves others as they are.
        layout: Layout of convolutions: channels last or first; auto is last.
        dtype: Type that float32 values are computed in; inputs and outputs keep theirs.
        pad_channels: Number that the output channels of convolutions and dense layers are padded to a multiple of; auto
            pads where it pays.
        partition: Whether what TVM cannot compute stays with ONNX Runtime (auto), or is an error (off).
        algorithm: How convolutions of 3x3 with stride 1 are computed: as they are defined (direct), by Winograd's
            algorithm, or as measurements say is faster (auto).
        num_threads: Threads of a kernel; auto is every CPU this process may use.
    """

    network: str = parameter("resnet-18", NETWORK_RULE, min_length=1)
    trust: Trust = False
    input_shapes: Shapes = parameter({}, 'a JSON object of shapes, such as {"data": [1, 3, 224, 224]}')
    input_values: InputValues = parameter(
        {}, 'a JSON object of numbers or lists of them, such as {"sr": 16000}, of at most 6000 characters'
    )
    batch_size: PositiveInt = 1
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
