"""What a sweep is to make: a YAML file of networks and parameters, checked as a whole."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from glob import glob
from pathlib import Path
from typing import Any

import mlflow

from ansor_mlflow import tracking
from ansor_mlflow.errors import AnsorMlflowError, UserInputError
from ansor_mlflow.foreign import read_yaml
from ansor_mlflow.measuring import require_examples, require_rivals
from ansor_mlflow.networks import require_network
from ansor_mlflow.parameters import PipelineOptions, RunOptions, as_text, is_uri, load_options

_KEYS = ("name", "defaults", "entries")
_NOT_GIVEN = {"resume_run", "promote", *RunOptions.model_fields}
"""Parameters of `main` that say something of one run, or wait for another."""
_EVERY_MODEL = "models:/*@"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A network with its parameters."""

    name: str
    """The network's, and the parameters that the entry itself gives."""
    options: PipelineOptions
    weight: float
    """How often the model is called, beside the others: requests of a day, for example."""
    device: str = ""
    """Nodes of a Ray cluster that it runs on: those with a label (`name=value`) or with a custom resource; empty for
    all."""


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """A whole sweep."""

    name: str
    entries: tuple[Entry, ...]


def read_sweep(path: str) -> Declaration:
    """Reads a file, and checks the parameters of all entries.

    Raises:
        UserInputError: It cannot be read, has other keys or no entry, an entry is unusable, or two are the same.
    """
    try:
        found = read_yaml(Path(path).read_bytes())
    except OSError as err:
        raise UserInputError(f"sweep={path}: the file cannot be read ({err.strerror}); give a YAML file") from err
    except ValueError as err:
        raise UserInputError(f"sweep={path}: the file is not valid YAML ({err}); correct it") from err
    if not isinstance(found, dict) or found.keys() - set(_KEYS) or not isinstance(found.get("entries"), list):
        raise UserInputError(
            f"sweep={path}: it must be a mapping of {', '.join(_KEYS)}, the last a list; see examples/sweep.yaml"
        )
    defaults = _mapping(found.get("defaults") or {}, f"sweep={path}: defaults")
    entries: list[Entry] = []
    for number, given in enumerate(found["entries"], start=1):
        where = f"sweep={path}: entry {number}"
        entries += _entries(defaults, _mapping(given, where), where)
    if not entries:
        raise UserInputError(f"sweep={path}: it has no entries; give one network at least")
    networks: dict[str, set[str]] = {}
    for entry in entries:
        networks.setdefault(entry.name, set()).add(entry.options.network)
    entries = [  # files in different directories may have the same name
        replace(entry, name=f"{entry.name} ({entry.options.network})") if len(networks[entry.name]) > 1 else entry
        for entry in entries
    ]
    name, number = Counter(entry.name for entry in entries).most_common(1)[0]
    if number > 1:
        raise UserInputError(f"sweep={path}: {number} entries are {name}; leave all but one out")
    name = str(found.get("name") or Path(path).stem)
    if set(name) & set("'\"\\`"):
        raise UserInputError(f"sweep={path}: name={name}: it must have no quotes and no backslash; give another")
    return Declaration(name=name, entries=tuple(entries))


def _mapping(given: Any, where: str) -> dict[str, Any]:
    if not isinstance(given, dict) or not all(isinstance(key, str) for key in given):
        raise UserInputError(f"{where}: it must be a mapping of parameters of main to values, such as `trials: 64`")
    if taken := sorted(_NOT_GIVEN & given.keys()):
        raise UserInputError(f"{where}: {taken[0]} is not for a sweep; leave it out")
    return given


def _entries(defaults: Mapping[str, Any], given: Mapping[str, Any], where: str) -> Iterator[Entry]:
    """All networks with all combinations of the parameters that are lists."""
    values = {"warm_start": "auto", "weight": 1.0, "device": "", **defaults, **given}
    if "network" not in values:
        raise UserInputError(f"{where}: it has no network; give a name, a file, a pattern or a URI")
    weight = values.pop("weight")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < float("inf"):
        raise UserInputError(f"{where}: weight={weight!r}: it must be a number, 0 or more")
    networks = [name for each in _listed(values.pop("network")) for name in _networks(each, where)]
    grid = [[(key, value) for value in _listed(values[key])] for key in values]
    own = given.keys() | {key for key, value in defaults.items() if isinstance(value, list)}
    for network, *pairs in itertools.product(networks, *grid):
        chosen = dict(pairs)
        words = [f"{key}={as_text(chosen[key])}" for key in chosen if key in own]
        device = chosen.pop("device")
        if not isinstance(device, str):
            raise UserInputError(f"{where}: device={device!r}: it must be name=value, or the name of a resource")
        try:
            options = load_options(PipelineOptions, {**chosen, "network": network})
            if not is_uri(network):
                require_network(network, trust=options.trust)
            require_examples(options.data)
            require_rivals("rivals", options.rivals)
        except AnsorMlflowError as err:
            raise UserInputError(f"{where}: {err}") from err
        name = " ".join([tracking.display_name(network), *words])
        yield Entry(name=name, options=options, weight=float(weight), device=device)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _networks(given: Any, where: str) -> list[str]:
    """The networks that a name, a pattern of files, or one of all models with an alias stands for."""
    text = str(given)
    if text.startswith(_EVERY_MODEL):
        alias = text.removeprefix(_EVERY_MODEL)
        with tracking.translated_errors("search the registered models"):
            models = mlflow.MlflowClient().search_registered_models(max_results=1000)
        found = [tracking.pinned_uri(f"models:/{model.name}@{alias}") for model in models if alias in model.aliases]
    elif not is_uri(text) and set(text) & set("*?["):
        found = [str(Path(path).resolve()) for path in sorted(glob(text, recursive=True))]  # noqa: PTH207 - absolute ones, too
    else:
        return [str(Path(text).resolve()) if Path(text).is_file() else text]
    if not found:
        raise UserInputError(f"{where}: network={text} matches nothing; correct it, or leave it out")
    return found
