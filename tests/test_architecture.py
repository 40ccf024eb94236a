"""The package's floors: imports go down or stay, and the lower floors need neither MLflow nor a slow start."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = "ansor_mlflow"
ROOT = Path(__file__).parents[1]

FLOORS = [
    ["errors"],
    ["examples", "names", "options", "targets", "tensors", "threads", "trials", "tvm_import"],
    ["networks", "records"],
    ["lowering"],
    ["compile", "evaluate", "roofline", "significance", "testing", "tuning"],
    ["model", "replay"],
    ["autologging", "flavor", "registry", "serving", "sources", "tracking"],
    ["contenders", "evaluator"],
    ["steps"],
    ["cli"],
    ["pipelines"],
]
"""Bottom to top; a module's part is its first name below the package."""

FLOOR = {part: floor for floor, parts in enumerate(FLOORS) for part in parts}
MLFLOW_FLOOR = FLOOR["tracking"]


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


def imports_of(module: str) -> set[str]:
    """The dotted names that a module imports anywhere in its text, for type checking too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import; write the whole name"
            assert node.module is not None
            found.add(node.module)
            # `from ansor_mlflow import errors` imports a module, `from ansor_mlflow.errors import …` does not.
            found.update(f"{node.module}.{alias.name}" for alias in node.names if node.module == PACKAGE)
    return found


@pytest.mark.parametrize("module", sorted(MODULES))
def test_every_module_has_a_floor(module: str) -> None:
    part = part_of(module)
    assert part is None or part in FLOOR, f"{module}: add {part!r} to FLOORS in {Path(__file__).name} and to the design"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_never_go_up(module: str) -> None:
    floor = FLOOR.get(part_of(module) or "", 0)
    upward = {name for name in imports_of(module) if FLOOR.get(part_of(name) or "", 0) > floor}
    assert not upward, f"{module} imports from a floor above its own: {sorted(upward)}"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_only_the_upper_floors_know_mlflow(module: str) -> None:
    if FLOOR.get(part_of(module) or "", 0) < MLFLOW_FLOOR:
        assert "mlflow" not in {name.split(".")[0] for name in imports_of(module)}


def run_python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return result.stdout.strip()


def test_importing_the_package_is_fast_and_loads_nothing_heavy() -> None:
    code = (
        "import sys, time; start = time.perf_counter(); import ansor_mlflow; seconds = time.perf_counter() - start;"
        "print(seconds, *({'tvm', 'pandas', 'mlflow', 'onnx'} & set(sys.modules)))"
    )
    outputs = [run_python(code).split() for _ in range(3)]
    assert [loaded for _, *loaded in outputs] == [[], [], []]
    assert min(float(seconds) for seconds, *_ in outputs) < 0.5


def test_no_part_loads_tvm_before_it_is_needed() -> None:
    """What needs TVM imports it inside of functions, so that `--help` and a wrong parameter are answered at once."""
    modules = [f"{PACKAGE}.{part}" for part in FLOOR if f"{PACKAGE}.{part}" in MODULES]
    code = (
        f"import importlib, sys\nfor module in {modules}:\n"
        "    importlib.import_module(module)\n    if 'tvm' in sys.modules: sys.exit(print(module))"
    )
    assert run_python(code) == ""
