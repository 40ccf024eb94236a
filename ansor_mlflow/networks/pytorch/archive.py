"""Reads exported programs of PyTorch, and writes of them what is data and nothing else.

A `.pt2` file is a ZIP archive (https://docs.pytorch.org/docs/stable/export/pt2_archive.html): a graph in JSON, raw
weights, pickled sample inputs, and perhaps pickled weights, pickled objects and compiled libraries. `torch.export.load`
unpickles without restriction and opens the libraries. So PyTorch never sees such a file: it sees a second one, with a
graph that `pytorch.graph` has checked, the raw weights, and none of the rest.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ansor_mlflow.errors import UserInputError, one_line
from ansor_mlflow.files import require_stored
from ansor_mlflow.foreign import read_json
from ansor_mlflow.networks.pytorch.graph import FixedGraph, fix_graph, plain_data, require_qualified_name
from ansor_mlflow.networks.pytorch.shapes import Json, UnusableProgramError

_PROGRAM = "models/model.json"
_FIXED = {
    "archive_format": "pt2",
    "archive_version": "0",
    ".data/version": "6",
    "byteorder": "little",
    "data/sample_inputs/model.pt": "",
}
"""Entries that every archive must have, with what they say."""
_PAYLOADS = (
    ("data/weights", "weights", re.compile(r"weight_\d+")),
    ("data/constants", "constants", re.compile(r"tensor_\d+")),
)
"""The two kinds of tensors: folder, the word in the name of their description, and the names of raw ones."""


def fix_program(
    path: Path, network: str, given: Mapping[str, Sequence[int]], target: Path, *, batch_size: int = 1
) -> FixedGraph:
    """Writes a program with fixed shapes, of which nothing is executed when it is loaded. Needs no PyTorch.

    Args:
        path: Archive that `torch.export.save` wrote.
        network: What messages call it.
        given: Shapes that dynamic dimensions get.
        target: Archive to write.
        batch_size: Size of a dynamic batch.

    Returns:
        What was written as the graph.

    Raises:
        UserInputError: The file is not such an archive, holds what would have to be unpickled or executed, is no
            program for inference, or the shapes do not fit it.
    """
    with _translated_errors(network), zipfile.ZipFile(path) as archive, zipfile.ZipFile(target, "w") as copy:
        require_stored(archive, path.stat().st_size)
        names = archive.namelist()
        root = names[0].partition("/")[0] if names else ""
        if f"{root}/{_PROGRAM}" not in names:
            raise UnusableProgramError(
                "it holds no exported program, or one of an old format; write one with PyTorch 2.13: "
                "torch.export.save(torch.export.export(model, args), path)"
            )
        for folder, kind, raw_name in _PAYLOADS:
            config = _payload_config(archive, root, folder, kind, raw_name)
            copy.writestr(f"model/{folder}/model_{kind}_config.json", json.dumps({"config": config}))
            for name in sorted({entry["path_name"] for entry in config.values()}):
                with (
                    archive.open(f"{root}/{folder}/{name}") as read,
                    copy.open(f"model/{folder}/{name}", "w", force_zip64=True) as write,
                ):
                    shutil.copyfileobj(read, write)
        fixed = fix_graph(read_json(archive.read(f"{root}/{_PROGRAM}")), network, given, batch_size)
        for name, text in {**_FIXED, _PROGRAM: json.dumps(fixed.program)}.items():
            copy.writestr(f"model/{name}", text)
    return fixed


def _payload_config(archive: zipfile.ZipFile, root: str, folder: str, kind: str, raw_name: re.Pattern[str]) -> Json:
    """Describes tensors by their qualified names."""
    name = f"{folder}/model_{kind}_config.json"
    if f"{root}/{name}" not in archive.namelist():
        raise UnusableProgramError(
            f"it has no {name}, so its {kind} are pickled, as PyTorch once wrote them, and nothing is unpickled here; "
            "save it again with torch.export.save of PyTorch 2.13"
        )
    config = read_json(archive.read(f"{root}/{name}"))["config"]
    checked: Json = {}
    for qualified_name, entry in config.items():
        if entry["use_pickle"] or not raw_name.fullmatch(entry["path_name"]):
            raise UnusableProgramError(
                f"its {folder}/{entry['path_name'][:100]} is pickled, and nothing is unpickled here; save the program "
                "again without tensor subclasses and custom objects"
            )
        require_qualified_name(qualified_name)
        checked[qualified_name] = plain_data(entry)
    return checked


@contextlib.contextmanager
def _translated_errors(network: str) -> Iterator[None]:
    """Translates the errors of reading an archive."""
    try:
        yield
    except UnusableProgramError as err:
        raise UserInputError(f"network={network}: {one_line(err)}") from err
    except (FileNotFoundError, IsADirectoryError, PermissionError) as err:
        raise UserInputError(
            f"network={network}: the file cannot be read ({err.strerror}); give an exported program, an ONNX file or a "
            "built-in name"
        ) from err
    except (zipfile.BadZipFile, zlib.error, EOFError) as err:
        raise UserInputError(
            f"network={network}: not an exported program of PyTorch, or cut short ({one_line(err)}); save it again "
            "with torch.export.save"
        ) from err
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError, RuntimeError) as err:
        raise UserInputError(
            f"network={network}: its graph is damaged ({type(err).__name__}: {one_line(err)}); save it again with "
            "torch.export.save"
        ) from err
