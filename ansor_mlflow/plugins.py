"""What other packages add: rivals, sketches, runners and networks, each by an entry point (docs/extend.md)."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, TypeVar

from ansor_mlflow.errors import MachineError, one_line

T = TypeVar("T")
_log = logging.getLogger("ansor_mlflow")
_STAND_INS = {"onnxruntime": "onnxruntime-gpu", "xgboost": "xgboost-cpu"}
"""Distributions with the modules of another one."""


def distribution_of(package: str) -> tuple[str, str] | None:
    """The name and version of the distribution that is, or stands for, a package here; None where there is none."""
    for name in filter(None, (package, _STAND_INS.get(package))):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return name, importlib.metadata.version(name)
    return None


class PluginTable(Mapping[str, T]):
    """Things of a kind by name: our own, and those of the entry points in the group `ansor_mlflow.<kind>`.

    A plugin is loaded when it is first asked for by its name, which raises `MachineError` where it cannot be.
    """

    def __init__(self, kind: str, own: Mapping[str, T], is_one: Callable[[Any], bool]) -> None:
        self._group = f"ansor_mlflow.{kind}"
        self._is_one = is_one
        self.own = own
        self._loaded: dict[str, T] = {}

    @cached_property
    def plugins(self) -> dict[str, importlib.metadata.EntryPoint]:
        """The entry points by name; what has the name of one of ours is left out."""
        found = importlib.metadata.entry_points(group=self._group)
        for entry in found:
            if entry.name in self.own:
                _log.warning("%s: %s is a name of ansor_mlflow's own, and is left out", _origin(entry), entry.name)
        return {entry.name: entry for entry in found if entry.name not in self.own}

    def __getitem__(self, name: str) -> T:
        if name in self.own:
            return self.own[name]
        if name not in self._loaded:
            self._loaded[name] = self._load(self.plugins[name])
        return self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self.own or name in self.plugins

    def __iter__(self) -> Iterator[str]:
        return iter((*self.own, *self.plugins))

    def __len__(self) -> int:
        return len(self.own) + len(self.plugins)

    def _load(self, entry: importlib.metadata.EntryPoint) -> T:
        try:
            value: T = entry.load()
        except Exception as err:  # noqa: BLE001 - whatever a module of others raises when it is imported
            reason = f"{type(err).__name__}: {one_line(err)}"
        else:
            reason = "" if self._is_one(value) else f"{entry.value} is not what docs/extend.md says of {self._group}"
        if reason:
            raise MachineError(
                f"{entry.name} in {self._group}, of {_origin(entry)}, cannot be used: {reason}; mend that package, or "
                "uninstall it"
            )
        return value


def _origin(entry: importlib.metadata.EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "a package without a name"
