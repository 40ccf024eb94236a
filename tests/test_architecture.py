"""The house: imports go down, rooms have doors, and the lower floors need neither MLflow nor a slow start."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

from helpers.commands import ROOT

PACKAGE = "ansor_mlflow"
FLOORS = [
    ["foreign"],
    ["errors"],
    ["files", "names", "parameters", "plugins", "processes", "settings", "tensors", "trials"],
    ["codegen", "device"],
    ["graphs"],
    ["networks", "records"],
    ["lowering", "sketches"],
    ["model"],
    ["measuring"],
    ["workers"],
    ["fleet"],
    ["tuning"],
    ["testing"],
    ["autologging", "flavor", "serving", "tracking"],
    ["steps"],
    ["commands"],
    ["cli"],
    ["api"],
    ["pipelines"],
]
"""Bottom to top; a module's part is its first name below the package."""

FLOOR = {part: floor for floor, parts in enumerate(FLOORS) for part in parts}
MLFLOW_FLOOR = FLOOR["tracking"]
MAX_FILES = 12
MAX_MODULES = 210
MAX_ROOMS = 22
MAX_SHARED_NAMES = 5


def module_names() -> dict[str, Path]:
    """Every module of the package and of the pipelines, by its dotted name."""
    paths = [*ROOT.glob(f"{PACKAGE}/**/*.py"), *ROOT.glob("pipelines/**/*.py")]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


MODULES = module_names()


def part_of(module: str) -> str | None:
    """The part that a module is in; None for the package's own `__init__` and for modules of others."""
    names = module.split(".")
    if names[0] == PACKAGE:
        return names[1] if len(names) > 1 else None
    return names[0] if names[0] == "pipelines" else None


def room_of(module: str) -> str | None:
    """As `part_of`, but each step and each command is a room of its own."""
    below = module.split(".")[1:]
    if below[:1] in (["steps"], ["commands"]) and len(below) > 1:
        return ".".join(below[:2])
    return part_of(module)


def imports_of(module: str) -> Iterator[tuple[str, int]]:
    """The dotted names that a module imports anywhere in its text, for type checking too, with their lines."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import; write the whole name"
            assert node.module is not None
            for alias in node.names:  # `from ansor_mlflow import names` imports a module, `from x import name` a name
                inner = f"{node.module}.{alias.name}"
                yield (inner if inner in MODULES and not is_door(node.module) else node.module), node.lineno


def is_door(module: str) -> bool:
    """Whether what other rooms need is imported from here."""
    return room_of(module) is not None and module == f"{PACKAGE}.{room_of(module)}"


IMPORTS = {module: list(imports_of(module)) for module in sorted(MODULES)}


def test_every_module_has_a_floor() -> None:
    parts = {part_of(module) for module in MODULES} - {None, *FLOOR}
    assert not parts, f"add these to FLOORS in {Path(__file__).name} and to the design"


def test_imports_never_go_up() -> None:
    upward = [
        f"{module} imports {name}"
        for module, imports in IMPORTS.items()
        for name, _ in imports
        if FLOOR.get(part_of(name) or "", 0) > FLOOR.get(part_of(module) or "", len(FLOORS))
    ]
    assert not upward


def test_rooms_are_entered_by_their_doors() -> None:
    """An import from further inside says why at its line: the door would load something heavy."""
    silent = []
    for module, imports in IMPORTS.items():
        lines = MODULES[module].read_text().splitlines()
        inside = [
            (name, n) for name, n in imports if room_of(name) not in (None, room_of(module)) and not is_door(name)
        ]
        silent += [f"{module} imports {name}" for name, number in inside if "  # " not in lines[number - 1]]
    assert not silent


def test_no_two_rooms_import_each_other() -> None:
    rooms: dict[str, set[str]] = {}
    for module in MODULES:
        if room := room_of(module):
            others = {room_of(name) for name, _ in IMPORTS[module]} - {None, room}
            rooms.setdefault(room, set()).update(other for other in others if other)
    TopologicalSorter(rooms).prepare()


def test_no_modules_import_each_other() -> None:
    """Neither directly nor around a corner, within a room or for type checking."""
    doors = {module for module, path in MODULES.items() if path.name == "__init__.py"}
    modules = {
        module: {name for name, _ in imports if name in MODULES and name != module and name not in doors}
        for module, imports in IMPORTS.items()
        if module not in doors
    }
    TopologicalSorter(modules).prepare()


def test_few_files_share_a_name() -> None:
    names = Counter(
        path.name for path in MODULES.values() if path.name != "__init__.py" and "pipelines" not in path.parts
    )
    assert len([name for name, number in names.items() if number > 1]) <= MAX_SHARED_NAMES


def test_the_house_is_small_enough_to_know() -> None:
    assert len(MODULES) <= MAX_MODULES
    rooms = [path for path in (ROOT / PACKAGE).iterdir() if path.is_dir() and path.name != "__pycache__"]
    assert len(rooms) <= MAX_ROOMS


def test_only_the_upper_floors_know_mlflow() -> None:
    lower = [module for module in MODULES if FLOOR.get(part_of(module) or "", 0) < MLFLOW_FLOOR]
    assert [module for module in lower if "mlflow" in {name.split(".")[0] for name, _ in IMPORTS[module]}] == []


def test_lower_rooms_take_small_settings() -> None:
    lower = [module for module in MODULES if FLOOR.get(part_of(module) or "", 0) < MLFLOW_FLOOR]
    found = [m for m in lower if "TuneOptions" in MODULES[m].read_text() and part_of(m) != "parameters"]
    assert found == [], "take SearchOptions or MeasureOptions"


def test_no_two_classes_share_a_name() -> None:
    names = Counter(
        node.name.lstrip("_")
        for path in MODULES.values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, number in names.items() if number > 1] == []


def test_the_picture_of_the_rooms_shows_them_all() -> None:
    picture = (ROOT / "docs" / "images" / "architecture.svg").read_text()
    assert {part for part in FLOOR if not re.search(rf"\b{part}\b", picture)} == set()


def test_folders_are_small_enough_to_look_at() -> None:
    folders = {path.parent for path in MODULES.values()}
    files = {folder: [p for p in folder.iterdir() if p.is_file() and p.name != "py.typed"] for folder in folders}
    large = {folder.name: len(found) for folder, found in files.items() if len(found) > MAX_FILES}
    assert not large


def run_python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return result.stdout.strip()


def test_importing_the_package_loads_nothing_heavy() -> None:
    heavy = {"tvm", "pandas", "mlflow", "onnx", "onnxruntime", "scipy", "matplotlib", "rich"}
    assert run_python(f"import sys, ansor_mlflow; print(*({heavy} & set(sys.modules)))") == ""


def test_no_part_loads_tvm_before_it_is_needed() -> None:
    """What needs TVM imports it inside of functions, so that `--help` and a wrong parameter are answered at once."""
    modules = [f"{PACKAGE}.{part}" for part in FLOOR if f"{PACKAGE}.{part}" in MODULES]
    code = (
        f"import importlib, sys\nfor module in {modules}:\n"
        "    importlib.import_module(module)\n    if 'tvm' in sys.modules: sys.exit(print(module))"
    )
    assert run_python(code) == ""
