"""Writes models of the gallery as ONNX files; it needs the packages that they come from, and not `ansor_mlflow`.

    python benchmarks/gallery_export.py models
    python benchmarks/gallery_export.py models crnn yolo

A model whose file is there, or whose packages are not installed, is left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path

from gallery_models import GALLERY, GalleryModel

_EXPORT_S = 600


def main() -> None:
    """Writes each model in a process of its own, so that the end of one is not that of all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="where the files go")
    parser.add_argument("names", nargs="*", default=list(GALLERY), help="models; all by default", metavar="name")
    parser.add_argument("--here", action="store_true", help="in this process, whatever is there")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in GALLERY]:
        parser.error(f"no model {unknown[0]!r}; there are {', '.join(GALLERY)}")
    models = [GALLERY[name] for name in arguments.names]
    if arguments.here:
        for model in models:
            model.export(arguments.directory)
        return
    failed = [model.name for model in models if not _exported(model, arguments.directory)]
    if failed:
        sys.exit(f"not exported: {', '.join(failed)}")


def _exported(model: GalleryModel, directory: Path) -> bool:
    if (directory / f"{model.name}.onnx").exists():
        return True
    if missing := [name for name in model.packages if importlib.util.find_spec(name) is None]:
        print(f"{model.name}: left out, {missing[0]} is not installed", flush=True)
        return True
    command = [sys.executable, __file__, str(directory), model.name, "--here"]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=_EXPORT_S, check=False)
        last = (child.stderr.strip().splitlines() or ["nothing"])[-1]
        said = "exported" if child.returncode == 0 else f"failed: {last}"
    except subprocess.TimeoutExpired:
        child, said = None, f"took longer than {_EXPORT_S} s"
    print(f"{model.name}: {said}", flush=True)
    return child is not None and child.returncode == 0


if __name__ == "__main__":
    main()
