"""Fixes the sizes of an exported program, and lets nothing through but data.

The program is the JSON that `torch.export.save` writes (`torch/_export/serde/schema.py`, version 8). What makes PyTorch
run code when it reads or exports such a graph: sizes and conditions are expressions that it evaluates, names become
Python source that it executes, and operators are looked up as attributes of Python modules. So here every expression
becomes the number that it stands for, every name must be an identifier, and every operator one of PyTorch's own.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ansor_mlflow.networks.inputs.expressions import Sizes
from ansor_mlflow.networks.pytorch.shapes import Json, UnusableProgramError, fix_sizes, short

Number = bool | int | float

_SCHEMA_VERSION = 8
_OPERATOR = re.compile(r"torch\.ops\.aten\.(?!(save|from_file)\.)\w+\.\w+")
"""Operators of PyTorch, without the two that take the name of a file."""
_REGIONS = ("torch.ops.higher_order.wrap_with_set_grad_enabled", "torch.ops.higher_order.wrap_with_autocast")
"""Operators that run a part of the graph in another mode."""
_QUALIFIED_NAME = re.compile(r"(?!__)[\w\-/ ]+(\.(?!__)[\w\-/ ]+)*")
_QUALIFIED = ("parameter_name", "buffer_name", "tensor_constant_name")
_FREE_TEXT = ("as_string", "as_strings")
"""Arguments of operators; where they become Python source, it is as literals."""
_FLOAT_TEXT = {"Infinity": float("inf"), "-Infinity": float("-inf"), "NaN": float("nan")}
_NUMBERS = ("sym_int_values", "sym_float_values", "sym_bool_values")
_SYMBOLIC = ("as_sym_int", "as_sym_float", "as_sym_bool")
_CPU = {"type": "cpu", "index": None}


@dataclass(frozen=True)
class FixedGraph:
    """A program whose sizes are numbers."""

    program: Json
    inputs: tuple[str, ...]
    operators: frozenset[str]
    """Names of the operators that are called, such as "torch.ops.aten.relu.default"."""


def fix_graph(exported: Json, network: str, given: Mapping[str, Sequence[int]], batch_size: int = 1) -> FixedGraph:
    """Replaces every size by a number.

    Args:
        exported: The JSON of a program. One that is not well-formed raises what the access to it does.
        network: What messages call it.
        given: Shapes that dynamic dimensions get.
        batch_size: Size of a dynamic batch.

    Raises:
        UnusableProgramError: The graph holds what might be executed, or is not one for inference.
        UserInputError: A shape does not fit its input, or an input is still dynamic.
    """
    if exported["schema_version"]["major"] != _SCHEMA_VERSION:
        raise UnusableProgramError(
            f"its format has the version {exported['schema_version']['major']}, but only {_SCHEMA_VERSION} is known; "
            "save it again with PyTorch 2.13"
        )
    graph, signature = exported["graph_module"]["graph"], exported["graph_module"]["signature"]
    inputs = _inputs(signature)
    convention = _calling_convention(signature)
    fixer = _Fixer(fix_sizes(exported, inputs, network, given, batch_size))
    program = {
        "graph_module": {
            "graph": fixer.graph(graph),
            "signature": fixer.data(signature),
            "module_call_graph": [convention],
            "metadata": {},
            "treespec_namedtuple_fields": {},
        },
        "opset_version": fixer.data(exported["opset_version"]),
        "range_constraints": {},
        "schema_version": fixer.data(exported["schema_version"]),
        "verifiers": ["TRAINING"],
        "guards_code": [],
    }
    return FixedGraph(program, tuple(inputs), frozenset(fixer.operators))


def require_qualified_name(name: str) -> None:
    """Checks the name of a weight, such as "encoder.layers.0.weight".

    Raises:
        UnusableProgramError: It has a character that PyTorch would have to quote.
    """
    _text(name, _QUALIFIED[0])


def plain_data(value: Json) -> Json:
    """Checks JSON without expressions, such as the description of a weight, and returns a copy.

    Raises:
        UnusableProgramError: It holds a text that is no identifier.
    """
    copy: Json = _Fixer(Sizes({}, {})).data(value)
    return copy


@dataclass
class _Fixer:
    """Copies the parts of a program."""

    sizes: Sizes
    operators: set[str] = field(default_factory=set)

    def graph(self, graph: Json) -> Json:
        numbers = {name: self._number(value) for kind in _NUMBERS for name, value in graph.get(kind, {}).items()}
        nodes = [node for node in graph["nodes"] if not _computes_numbers(node)]
        return {
            "inputs": self.data(graph["inputs"]),
            "outputs": self.data(graph["outputs"], numbers),
            "nodes": [self._node(node, numbers) for node in nodes],
            "tensor_values": self.data(graph["tensor_values"]),
            **{kind: self.data(graph.get(kind, {})) for kind in _NUMBERS},
            "is_single_tensor_return": bool(graph["is_single_tensor_return"]),
        }

    def _node(self, node: Json, numbers: Mapping[str, Number]) -> Json:
        for argument in node["inputs"]:
            if argument["name"] in ("train", "training") and argument["arg"].get("as_bool"):
                raise UnusableProgramError(
                    "it was exported in training mode; call model.eval() before torch.export.export"
                )
        return {
            "target": self._operator(node["target"]),
            "inputs": self.data(node["inputs"], numbers),
            "outputs": self.data(node["outputs"]),
            "metadata": {},
            "is_hop_single_tensor_return": self.data(node.get("is_hop_single_tensor_return")),
            "name": self.data(node.get("name"), key="name"),
        }

    def _operator(self, target: str) -> str:
        if _OPERATOR.fullmatch(target):
            self.operators.add(target)
        elif target not in _REGIONS:
            raise UnusableProgramError(
                f"its operator {target[:100]!r} is none of PyTorch's own (torch.ops.aten); export the model without it"
            )
        return target

    def data(  # noqa: PLR0911 (one line for each kind)
        self, value: Any, numbers: Mapping[str, Number] = {}, key: str = ""
    ) -> Any:
        """A copy of any part, with numbers for expressions and for the names in `numbers`."""
        match value:
            case None | bool() | int() | float():
                return value
            case str():
                return _text(value, key)
            case list():
                return [self.data(item, numbers, key) for item in value]
            case {"as_expr": _}:
                return _as_number(self._number(value))
            case {"as_name": str(name)} if name in numbers:
                return _as_number(numbers[name])
            case {"name": name, "graph": graph}:
                return {"name": _text(name, "name"), "graph": self.graph(graph)}
            case dict() if key in ("device", "as_device"):
                return _CPU
            case dict():
                return {_text(name, "name"): self.data(item, numbers, name) for name, item in value.items()}
        raise TypeError(f"{type(value).__name__} in JSON")

    def _number(self, value: Json) -> Number:
        """The number that {"as_expr": {"expr_str": …}} or {"as_int": …} stands for."""
        ((_, number),) = value.items()
        if isinstance(number, bool | int | float):
            return number
        expression = number["expr_str"]
        try:
            return self.sizes.evaluate(expression)
        except ValueError as err:
            raise UnusableProgramError(
                f"its size {short(expression)} does not follow from the shapes of its inputs ({err}); only such "
                "programs can be tuned"
            ) from err


def _text(text: str, key: str) -> Any:
    """A text that is no code: it must be of the kind that its key says."""
    if key in _FREE_TEXT:
        return text
    if key in ("as_float", "as_floats") and text in _FLOAT_TEXT:
        return _FLOAT_TEXT[text]
    if key in _QUALIFIED and _QUALIFIED_NAME.fullmatch(text):
        return text
    if key in ("name", "as_name", "path_name") and _is_name(text):
        return text
    raise UnusableProgramError(
        f"its entry {key}={text[:100]!r} is none that torch.export.save writes for a network; save it again"
    )


def _is_name(text: str) -> bool:
    return text == "" or (text.isidentifier() and not keyword.iskeyword(text) and not text.startswith("__"))


def _as_number(number: Number) -> Json:
    return {"as_bool" if isinstance(number, bool) else "as_int" if isinstance(number, int) else "as_float": number}


def _computes_numbers(node: Json) -> bool:
    """Whether a node computes sizes, which are known."""
    return bool(node["outputs"]) and all(output.keys() <= set(_SYMBOLIC) for output in node["outputs"])


def _inputs(signature: Json) -> list[str]:
    """Names of the tensors that the program takes."""
    arguments = [spec["user_input"]["arg"] for spec in signature["input_specs"] if "user_input" in spec]
    if not all("as_tensor" in argument for argument in arguments):
        raise UnusableProgramError("it takes a number as an input; export it with the number as a constant")
    return [argument["as_tensor"]["name"] for argument in arguments]


def _calling_convention(signature: Json) -> Json:
    """Inputs and outputs as flat tuples, so that no class of the model's author has to be known."""
    num_inputs = sum(bool(spec.keys() & {"user_input", "constant_input"}) for spec in signature["input_specs"])
    for spec in signature["output_specs"]:
        if "user_output" not in spec:
            raise UnusableProgramError(
                "it changes its buffers or inputs, as in training; call model.eval() before torch.export.export"
            )
        if "as_tensor" not in spec["user_output"]["arg"]:
            raise UnusableProgramError("it returns something that is no tensor; export the model without it")
    leaf = '{"type": null, "context": null, "children_spec": []}'

    def container(kind: str, context: str, children: Sequence[str]) -> str:
        return f'{{"type": "builtins.{kind}", "context": "{context}", "children_spec": [{", ".join(children)}]}}'

    arguments = [container("tuple", "null", [leaf] * num_inputs), container("dict", "[]", [])]
    convention: Json = {
        "inputs": [],
        "outputs": [],
        "in_spec": f"[1, {container('tuple', 'null', arguments)}]",
        "out_spec": f"[1, {container('tuple', 'null', [leaf] * len(signature['output_specs']))}]",
        "forward_arg_names": None,
    }
    return {"fqn": "", "signature": convention}
