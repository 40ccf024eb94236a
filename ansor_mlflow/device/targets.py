"""Targets: what code is generated for, and what TVM imports for it.

`tvm.s_tir.tensor_intrin` decorates hundreds of functions with `@T.prim_func`, each of which is parsed, and calls
`inspect.stack()`; for every frame `inspect.getmodule` then walks all of `sys.modules`. That takes 15 to 45 s. The
answer depends on the frame's file alone, so remembering it per file brings the import down to a few seconds. Nearly all
of those are for the functions of accelerators, which schedules for CPUs do not use.
"""

from __future__ import annotations

import importlib
import inspect
import platform
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ansor_mlflow.device.cpu import CPU, architecture_of, host_attributes
from ansor_mlflow.device.cuda import CUDA, names_no_architecture, with_architecture_of_host
from ansor_mlflow.device.platform import Platform
from ansor_mlflow.errors import UserInputError
from ansor_mlflow.foreign import read_json

if TYPE_CHECKING:
    from tvm.target import Target

_PACKAGE = "tvm.s_tir.tensor_intrin"
_OF_ACCELERATORS = ("cuda", "rocm", "hexagon")


def import_tensor_intrin(kind: str) -> ModuleType:
    """Imports `tvm.s_tir.tensor_intrin`, which every TuneContext and every tuned build needs.

    Args:
        kind: Kind of the target. With "llvm" the modules of accelerators are left out. Whoever then tunes for one in
            the same process, without this package, imports them: `import tvm.s_tir.tensor_intrin.cuda`.
    """
    with _getmodule_memoised():
        if _PACKAGE not in sys.modules:
            _import_for_cpus()
        if kind != "llvm":
            for name in _OF_ACCELERATORS:
                importlib.import_module(f"{_PACKAGE}.{name}")
        return sys.modules[_PACKAGE]


def _import_for_cpus() -> None:
    """Imports the package; where it imports a module of an accelerator, it finds an empty one, which is gone again."""
    import tvm  # noqa: F401 - whatever it imports by itself is not to be left out

    absent = [name for name in _OF_ACCELERATORS if f"{_PACKAGE}.{name}" not in sys.modules]
    for name in absent:
        sys.modules[f"{_PACKAGE}.{name}"] = ModuleType(name)
    try:
        package = importlib.import_module(_PACKAGE)
    finally:
        for name in absent:
            del sys.modules[f"{_PACKAGE}.{name}"]
    for name in absent:
        vars(package).pop(name, None)


@contextmanager
def _getmodule_memoised() -> Iterator[None]:
    original = inspect.getmodule
    known: dict[str, ModuleType | None] = {}

    def getmodule(object: Any, _filename: str | None = None) -> ModuleType | None:
        if _filename is None:
            return original(object)
        if _filename not in known:
            known[_filename] = original(object, _filename)
        return known[_filename]

    inspect.getmodule = getmodule
    try:
        yield
    finally:
        inspect.getmodule = original


_LIST_ATTRIBUTES = {"keys", "libs", "mattr"}
PLATFORMS = {each.kind: each for each in (CPU, CUDA)}
"""The kinds of devices that more is known of, by the kind of their targets."""


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
        parsed = host_attributes()
    elif names_no_architecture(parsed):
        parsed = with_architecture_of_host(spec, parsed)
    try:
        target = tvm.target.Target(parsed)
    except (ValueError, TypeError) as err:
        reason = str(err).splitlines()[0]
        raise UserInputError(
            f"target={spec!r} is unknown to TVM: {reason}; use auto, a tag, JSON or `llvm -mcpu=…`"
        ) from err
    return platform_of(target).complete(spec, target, num_threads)


def platform_of(target: Target | Mapping[str, Any]) -> Platform:
    """The kind of device that runs code for a target, or for one with these attributes."""
    kind, keys = (
        (target["kind"], target.get("keys", ())) if isinstance(target, Mapping) else (target.kind.name, target.keys)
    )
    return PLATFORMS.get(kind) or Platform(kind=kind, name=kind, binds_threads="gpu" in keys)


def machine_of(target: Target) -> str:
    """The architecture of the machine that runs the code, or that calls a GPU's kernels: this host's unless the target
    names a triple.
    """
    attributes = (target if platform_of(target) is CPU or target.host is None else target.host).attrs
    return architecture_of(str(attributes.get("mtriple", ""))) or platform.machine()
