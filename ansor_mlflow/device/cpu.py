"""CPUs: what LLVM knows of them, and which of its code runs on this host's."""

from __future__ import annotations

import ctypes
import difflib
import platform
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ansor_mlflow.device.platform import Platform, attributes_of
from ansor_mlflow.errors import UserInputError

if TYPE_CHECKING:
    from tvm.target import Target

KIND = "llvm"
_OPT_LEVEL = 2
"""LLVM's optimisation level. With 3, TVM's default, candidates take longer to compile and are no faster: see
docs/adr/0009-cost-of-a-candidate.md."""
_TRIPLE_ALIASES = {
    "amd64": "x86_64",
    "x86-64": "x86_64",
    "i686": "i386",
    "arm64": "aarch64",
    "armv7a": "arm",
    "armv7l": "arm",
    "armv8l": "arm",
}
"""Architectures of triples that LLVM's list of code generators spells otherwise."""

_ARITHMETIC = {"float16": {"avx512fp16", "fullfp16"}, "bfloat16": {"avx512bf16", "amx-bf16", "bf16"}}
"""LLVM's names of the instruction sets that compute in 16-bit floats, one of which is enough."""

_DOT_PRODUCTS = {"avx512vnni", "avxvnni", "i8mm"}
WEIGHT_BITS = 8
"""Bits of weights where all bytes are exact."""
_PAIR_PRODUCTS = {"avx512bf16", "bf16"}
_MATRIX_TILES = ("amx-bf16", "amx-int8", "amx-tile", "avx512bf16")
"""All of these come together."""
_FLAGS_OF_TILES = {"amx_bf16", "amx_int8", "amx_tile", "avx512_bf16"}
"""Linux' names of the same."""
TILES_REQUEST = (158, 0x1023, 18)
"""Linux' call `arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)`, without which a process has no tiles of AMX."""
_X86_LANES = {"avx512f": 16, "avx": 8, "sse2": 4}
"""Elements of 32 bits in a vector register with a feature of x86, the widest first."""
_INSTRUCTION_SETS = re.compile(
    # x86: what LLVM generates for arithmetic, moves and vectors
    r"64bit|cmov|cx(8|16)|x87|mmx|s?sse[\w.]*|avx[\w.]*|amx-\w+|fma4?|f16c|bmi2?|lzcnt|popcnt|adx|movbe|xop|tbm"
    r"|v?aes|v?pclmul(qdq)?|gfni|sha\d*|sm[34]|egpr|ndd|nf|ccmp|zu"
    # Arm
    r"|neon|fp-armv8|fullfp16|fp16fml|bf16|i8mm|dotprod|sve[\w-]*|sme[\w-]*|lse2?|rdm|complxnum|jsconv|crc|faminmax"
    r"|fp8\w*|v\d+(\.\d+)?[ar]"
)
"""LLVM's CPU features that are instructions. The others are scheduling hints, or belong to the operating system."""
_MAX_SHOWN = 5


class _Cpu(Platform):
    def complete(self, spec: str, target: Target, num_threads: int) -> Target:
        """The search splits parallel loops by `num-cores`."""
        import tvm

        attributes = {"num-cores": num_threads, "opt-level": _OPT_LEVEL, **attributes_of(target)}
        if attributes["num-cores"] < 1:
            raise UserInputError(f"target={spec!r}: num-cores is {attributes['num-cores']}; it must be at least 1")
        _check_architecture(spec, attributes)
        _check_cpu(spec, attributes)
        return tvm.target.Target(attributes)

    def model(self, target: Mapping[str, Any]) -> str:  # noqa: ARG002
        try:
            lines = Path("/proc/cpuinfo").read_text().splitlines()
        except OSError:
            return platform.processor()
        models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        return next(models, platform.processor())

    def why_not_here(self, target: Mapping[str, Any], features: Iterable[str]) -> str:
        import tvm

        host = host_attributes()
        return why_lacking(target, features, host["mcpu"], cpu_features(tvm.target.Target(host)), "this host")


CPU = _Cpu(
    kind=KIND,
    name="cpu",
    by_llvm=True,
    has_sketches=True,
    in_process=True,
    counts_threads=True,
    setup_s=0.0,
    provider="CPUExecutionProvider",
)


def why_lacking(
    target: Mapping[str, Any], needed: Iterable[str], cpu: str, available: Iterable[str], where: str
) -> str:
    """Why a CPU with some features cannot run code that needs others, in one clause; empty where it can."""
    missing = missing_instructions(needed, available)
    if not missing:
        return ""
    made_for = target.get("mcpu", "its CPU")
    return f"it needs instructions of {made_for} that {where} ({cpu}) lacks: {', '.join(missing[:_MAX_SHOWN])}"


def missing_instructions(needed: Iterable[str], available: Iterable[str]) -> list[str]:
    """The instruction sets among LLVM's CPU features `needed` that are not `available`, sorted."""
    return sorted(name for name in set(needed) - set(available) if _INSTRUCTION_SETS.fullmatch(name))


def host_attributes() -> dict[str, Any]:
    """The target of this host's CPU.

    LLVM names a CPU after its model, which a virtual machine may not tell, and AMX needs Linux' permission besides.
    """
    import tvm

    host = {"kind": KIND, "mcpu": str(tvm.get_global_func("target.llvm_get_system_cpu")())}
    may_use_tiles = _may_use_tiles()
    if has_matrix_tiles(tvm.target.Target(host)) == may_use_tiles:
        return host
    return {**host, "mattr": [f"{'+' if may_use_tiles else '-'}{name}" for name in _MATRIX_TILES]}


def _may_use_tiles() -> bool:
    """Whether this host has AMX, and Linux lets this process use it, which it does from then on."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return False
    return flags >= _FLAGS_OF_TILES and ctypes.CDLL(None).syscall(*TILES_REQUEST) == 0


def _check_architecture(spec: str, attributes: dict[str, Any]) -> None:
    """Refuses a triple that LLVM has no code generator for: asking LLVM about it ends the process."""
    import tvm

    if "mtriple" not in attributes:
        return
    architecture = architecture_of(attributes["mtriple"])
    known = [str(name) for name in tvm.get_global_func("target.llvm_get_targets")()]
    if architecture not in known:
        raise UserInputError(
            f"target={spec!r}: LLVM generates no code for {architecture!r}; the triple must begin with one of "
            f"{', '.join(sorted({*known, *_TRIPLE_ALIASES}))}"
        )


def architecture_of(triple: str) -> str:
    """The architecture of a triple such as `aarch64-linux-gnu`, as LLVM calls it."""
    architecture = triple.partition("-")[0].lower()
    return _TRIPLE_ALIASES.get(architecture, architecture)


def _check_cpu(spec: str, attributes: dict[str, Any]) -> None:
    import tvm

    cpu = attributes.get("mcpu")
    if cpu is None:
        return
    kind = {key: attributes[key] for key in ("kind", "mtriple") if key in attributes}
    known = [str(name) for name in tvm.get_global_func("target.llvm_get_cpu_archlist")(tvm.target.Target(kind))]
    if cpu not in known:
        near = difflib.get_close_matches(cpu, known, n=3)
        hint = f"perhaps you meant {', '.join(near)}" if near else "use target=auto for this host"
        raise UserInputError(f"target={spec!r}: LLVM knows no CPU {cpu!r}; {hint}")


def cpu_features(target: Target) -> tuple[str, ...]:
    """The names of the CPU features that LLVM may use for `target`, sorted; empty for targets other than LLVM."""
    import tvm

    if target.kind.name != KIND:
        return ()
    return tuple(sorted(str(name) for name in tvm.get_global_func("target.llvm_get_cpu_features")(target)))


def has_arithmetic(target: Target, dtype: str) -> bool:
    """Whether a CPU computes in `dtype` itself; otherwise every operation converts to float32 and back."""
    needed = _ARITHMETIC.get(dtype)
    return needed is None or target.kind.name != KIND or not needed.isdisjoint(cpu_features(target))


def has_dot_products(target: Target) -> bool:
    """Whether a CPU adds four products of unsigned bytes and weights of `weight_bits` to each element of a vector."""
    return weight_bits(target) > 0


def weight_bits(target: Target) -> int:
    """Bits of signed weights of which a CPU adds products with unsigned bytes; 0 of one that has no instruction.

    They are 8 with x86's `vpdpbusd` and Arm's `usdot`. AVX2 adds two products in 16 bits, which hold those of weights
    from -64 to 64: ONNX Runtime's `reduce_range` makes them, and calls them 7 bits.
    """
    features = set(cpu_features(target))
    if not _DOT_PRODUCTS.isdisjoint(features):
        return WEIGHT_BITS
    is_whole = "avx512f" not in features or "avx512bw" in features  # vectors of 64 bytes have no bytes without it
    return WEIGHT_BITS - 1 if "avx2" in features and is_whole else 0


def has_pair_products(target: Target) -> bool:
    """Whether a CPU adds two products of bfloat16 to each element of a vector: x86's `vdpbf16ps`, or Arm's `bfdot`.

    Those with AMX have it, too, at half of the speed of multiply-adds of float32.
    """
    return not _PAIR_PRODUCTS.isdisjoint(cpu_features(target)) and not has_matrix_tiles(target)


def has_matrix_tiles(target: Target) -> bool:
    """Whether a CPU multiplies matrices of unsigned and signed 8 bits, and of bfloat16: x86's AMX."""
    return set(_MATRIX_TILES) <= set(cpu_features(target))


def vector_lanes(target: Target) -> int:
    """Elements of 32 bits in a vector register that LLVM uses for `target`; 1 for targets other than LLVM.

    TVM says 16 for every x86-64, hence the features are asked.
    """
    import tvm

    if target.kind.name != KIND:
        return 1
    features = cpu_features(target)
    for feature, lanes in _X86_LANES.items():
        if feature in features:
            return lanes
    return int(tvm.get_global_func("target.llvm_get_vector_width")(target)) // 32
