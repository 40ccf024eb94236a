"""Targets: what code is generated for."""

from __future__ import annotations

import difflib
import json
import platform
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ansor_mlflow.device.gpu import names_no_architecture, with_architecture_of_host, with_features
from ansor_mlflow.errors import UserInputError
from ansor_mlflow.foreign import read_json

if TYPE_CHECKING:
    from tvm.target import Target

CPU_KIND = "llvm"
"""Kind of the targets of CPUs."""
_OPT_LEVEL = 2
"""LLVM's optimisation level. With 3, TVM's default, candidates take longer to compile and are no faster: see
docs/adr/0009-cost-of-a-candidate.md."""
_LIST_ATTRIBUTES = {"keys", "libs", "mattr"}
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

_X86_LANES = {"avx512f": 16, "avx": 8, "sse2": 4}
"""Elements of 32 bits in a vector register with a feature of x86, the widest first."""


def parse_target(spec: str) -> str | dict[str, Any]:
    """Reads a target as users write it, without TVM.

    Args:
        spec: A tag (`aws/cpu/c5.9xlarge`), a JSON object, or the command-line form of older TVM versions
            (`llvm -mcpu=skylake-avx512 -num-cores 2`).

    Returns:
        The tag or kind unchanged, or a dictionary of attributes with its "kind".

    Raises:
        UserInputError: The text has none of the three forms.
    """
    text = spec.strip()
    if text.startswith("{"):
        try:
            return dict(read_json(text))
        except ValueError as err:
            raise UserInputError(f'target={spec!r} is not valid JSON ({err}); write an object with a "kind"') from err
    try:
        words = shlex.split(text)
    except ValueError as err:
        raise UserInputError(f"target={spec!r} cannot be read ({err}); write a tag, JSON or `llvm -mcpu=…`") from err
    if not words:
        raise UserInputError(f"target={spec!r} is empty; write auto, a tag, JSON or `llvm -mcpu=…`")
    if len(words) == 1:
        return words[0]
    return {"kind": words[0], **_parse_flags(spec, words[1:])}


def _parse_flags(spec: str, words: list[str]) -> dict[str, Any]:
    """Reads `-name=value`, `-name value` and the bare `-name` (true)."""
    attributes: dict[str, Any] = {}
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not word.startswith("-"):
            raise UserInputError(f"target={spec!r}: {word!r} is neither a flag nor a flag's value; write -name=value")
        name, equals, value = word.lstrip("-").partition("=")
        if not equals and position < len(words) and not words[position].startswith("-"):
            value, equals = words[position], "="
            position += 1
        attributes[name] = _flag_value(name, value) if equals else True
    return attributes


def _flag_value(name: str, value: str) -> Any:
    if name in _LIST_ATTRIBUTES:
        return value.split(",")
    return int(value) if value.isdecimal() else value


def resolve_target(spec: str, num_threads: int) -> Target:
    """Makes the TVM target; "auto" is this host's LLVM CPU.

    A CPU target gets `num-cores` = `num_threads`, by which the search splits parallel loops, and `opt-level` = 2,
    unless it names its own. One for CUDA gets the architecture of this host's GPU, and what a block may take.

    Raises:
        UserInputError: TVM knows no such target, attribute, architecture or CPU, or there is no GPU to ask for its
            architecture.
    """
    import tvm

    parsed = parse_target(spec)
    if parsed == "auto":
        parsed = {"kind": CPU_KIND, "mcpu": host_cpu()}
    elif names_no_architecture(parsed):
        parsed = with_architecture_of_host(spec, parsed)
    try:
        target = tvm.target.Target(parsed)
    except (ValueError, TypeError) as err:
        reason = str(err).splitlines()[0]
        raise UserInputError(
            f"target={spec!r} is unknown to TVM: {reason}; use auto, a tag, JSON or `llvm -mcpu=…`"
        ) from err
    if target.kind.name == "cuda":
        return tvm.target.Target(with_features(spec, attributes_of(target)))
    if not is_cpu(target):
        return target
    attributes = {"num-cores": num_threads, "opt-level": _OPT_LEVEL, **attributes_of(target)}
    if attributes["num-cores"] < 1:
        raise UserInputError(f"target={spec!r}: num-cores is {attributes['num-cores']}; it must be at least 1")
    _check_architecture(spec, attributes)
    _check_cpu(spec, attributes)
    return tvm.target.Target(attributes)


def is_cpu(target: Target) -> bool:
    """Whether code for a target runs on a CPU. Only for these there are sketches, packed weights and huge pages."""
    return bool(target.kind.name == CPU_KIND)


def is_gpu(target: Target) -> bool:
    """Whether code for a target runs on a GPU: every loop of it must be bound to threads."""
    return "gpu" in target.keys


def host_cpu() -> str:
    """LLVM's name of this host's CPU."""
    import tvm

    return str(tvm.get_global_func("target.llvm_get_system_cpu")())


def attributes_of(target: Target) -> dict[str, Any]:
    """The target as plain JSON, without empty entries."""
    return {key: value for key, value in json.loads(str(target)).items() if value not in ("", [])}


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


def device_kind(target: Mapping[str, Any]) -> str:
    """TVM's name of the kind of device that runs code for a target with these attributes, such as cpu or cuda."""
    return "cpu" if target["kind"] == CPU_KIND else str(target["kind"])


def machine_of(target: Target) -> str:
    """The architecture of the machine that runs the code, or that calls a GPU's kernels: this host's unless the target
    names a triple.
    """
    attributes = (target if is_cpu(target) or target.host is None else target.host).attrs
    return architecture_of(str(attributes.get("mtriple", ""))) or platform.machine()


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

    if not is_cpu(target):
        return ()
    return tuple(sorted(str(name) for name in tvm.get_global_func("target.llvm_get_cpu_features")(target)))


def has_arithmetic(target: Target, dtype: str) -> bool:
    """Whether a CPU computes in `dtype` itself; otherwise every operation converts to float32 and back."""
    needed = _ARITHMETIC.get(dtype)
    return needed is None or not is_cpu(target) or not needed.isdisjoint(cpu_features(target))


def vector_lanes(target: Target) -> int:
    """Elements of 32 bits in a vector register that LLVM uses for `target`; 1 for targets other than LLVM.

    TVM says 16 for every x86-64, hence the features are asked.
    """
    import tvm

    if not is_cpu(target):
        return 1
    features = cpu_features(target)
    for feature, lanes in _X86_LANES.items():
        if feature in features:
            return lanes
    return int(tvm.get_global_func("target.llvm_get_vector_width")(target)) // 32
