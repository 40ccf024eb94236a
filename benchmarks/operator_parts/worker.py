"""A process that compares cases; one that takes it down is known by the last line that it wrote."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import onnx
import onnxruntime

from ansor_mlflow.codegen import pass_config, tir_pipeline
from ansor_mlflow.device import available_cpus, resolve_target
from ansor_mlflow.errors import UserInputError, first_line
from ansor_mlflow.lowering import lower

from .cases import Case, make, plans, session
from .values import classes, difference, of_class

Outputs = list[np.ndarray]
_CONSTANT = "outputs do not depend on its inputs"


def compare(case: Case, say: Callable[[str], None]) -> dict[str, str]:
    """What came of each class of values: nothing where all is the same.

    Args:
        case: The case.
        say: Is told which runtime is about to compute which class.
    """
    try:
        reference = session(case.model)
        names = [value.name for value in reference.get_inputs()]
        reference.run(None, {name: case.inputs[name] for name in names})
    except Exception:  # noqa: BLE001  ONNX Runtime has an error class for each status
        return {}
    say("TVM's compiler")
    found: dict[str, str] = {}
    try:
        run = _compiled(case.model)
    except UserInputError as err:
        if _CONSTANT in str(err):
            return {}
        return {"own": f"refused: {str(err)[:300]}"}
    except Exception as err:  # noqa: BLE001  whatever it is, the table names it
        return {"own": f"fails: {type(err).__name__}: {first_line(err)[:200]}"}
    if run is None:
        return {"own": "ONNX Runtime: in parts"}
    first = case.inputs[case.varied[0]] if case.varied else np.zeros(1, bool)
    for kind in classes(first):
        rng = np.random.default_rng(0)
        data = {
            name: of_class(array, kind, rng) if name in case.varied else array for name, array in case.inputs.items()
        }
        say(f"ONNX Runtime, {kind}")
        if (expected := _expected(reference, {name: data[name] for name in names})) is not None:
            say(f"TVM, {kind}")
            found[kind] = _compared(run, data, expected, kind)
    return found


def _expected(reference: onnxruntime.InferenceSession, data: Mapping[str, np.ndarray]) -> Outputs | None:
    """What ONNX Runtime computes; None for values that the operator does not take."""
    try:
        return list(reference.run(None, dict(data)))
    except Exception:  # noqa: BLE001  ONNX Runtime has an error class for each status
        return None


def _compared(run: Callable[..., Outputs], data: Mapping[str, np.ndarray], expected: Outputs, kind: str) -> str:
    try:
        actual = run(data)
    except Exception as err:  # noqa: BLE001
        return f"fails: {first_line(err)[:200]}"
    return next(filter(None, (difference(a, e, kind) for a, e in zip(actual, expected, strict=True))), "")


def _compiled(model: onnx.ModelProto) -> Callable[[Mapping[str, np.ndarray]], Outputs] | None:
    import tvm

    target = resolve_target("auto", available_cpus())
    lowered = lower(model, target)
    if lowered.parts:
        return None
    with tvm.transform.PassContext(config=pass_config(target)):
        library = tvm.compile(lowered.mod, target, tir_pipeline=tir_pipeline(target))
    machine = tvm.relax.VirtualMachine(library, tvm.cpu())

    def run(data: Mapping[str, np.ndarray]) -> Outputs:
        order = [value.name for value in model.graph.input]
        result = machine["main"](*(tvm.runtime.tensor(np.array(data[name], order="C")) for name in order))
        return [output.numpy() for output in ([result] if hasattr(result, "numpy") else result)]

    return run


def main(start: int, step: int, only: str) -> None:
    """Compares the cases from a number on, and writes a line of JSON for each."""
    warnings.simplefilter("ignore")
    for number, plan in enumerate(plans()):
        if number < start or (number - start) % step or (only and plan.operator not in only.split(",")):
            continue
        _write(number=number, about="ONNX Runtime")
        case = make(plan)
        if case is not None:
            say = partial(_say, number, case)
            say("ONNX Runtime")
            _write(number=number, results=compare(case, say), **_key(case))


def _say(number: int, case: Case, about: str) -> None:
    _write(number=number, about=about, **_key(case))


def _key(case: Case) -> dict[str, Any]:
    return {"operator": case.operator, "form": case.form, "opset": case.opset, "dtype": case.dtype}


def _write(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "")
