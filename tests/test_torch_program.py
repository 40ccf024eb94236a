"""Exported programs of PyTorch become networks that compute the same, and nothing of their author's is executed."""

from __future__ import annotations

import json
import pickle
import re
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import onnx
import onnxruntime
import pytest
from helpers.commands import BRIEF, FAST, environment, flags
from helpers.commands import run as run_command
from helpers.hostile import Touch, touch_expression
from helpers.torch_process import TorchProcess, torch_python

from ansor_mlflow import names
from ansor_mlflow.errors import MachineError, NotFasterError, UndecidedError, UserInputError
from ansor_mlflow.networks.inputs.expressions import Sizes
from ansor_mlflow.networks.loading import Network, load_network
from ansor_mlflow.tracking import sources

LOAD = "ansor_mlflow.networks.loading.load_network"
PROGRAM = "models/model.json"
WEIGHTS = "data/weights/model_weights_config.json"
CONSTANTS = "data/constants/model_constants_config.json"


@pytest.fixture(scope="module")
def pytorch() -> Iterator[TorchProcess]:
    process = TorchProcess()
    yield process
    process.close()


@pytest.fixture(scope="module")
def programs(pytorch: TorchProcess, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `helpers.torch_models.write` filled."""
    directory = tmp_path_factory.mktemp("programs")
    pytorch.call("helpers.torch_models.write", directory)
    return directory


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Temporary files of this process are removed."""
    directory = tmp_path / "scratch"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    yield
    assert [path for path in directory.iterdir() if path.name.startswith("ansor")] == []


def read_archive(path: Path) -> dict[str, bytes]:
    """The entries of an archive, without the folder that they are all in."""
    with zipfile.ZipFile(path) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def write_archive(path: Path, entries: Mapping[str, bytes], root: str = "model/") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            archive.writestr(f"{root}{name}", content)
    return path


# -- what is computed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("convolutions", "fixed"),
        ("attention", "1x8"),
        ("attention", "5x20"),
        ("nested", "fixed"),
        ("decomposed", "fixed"),
        ("half", "fixed"),
    ],
)
def test_a_program_computes_what_pytorch_does(pytorch: TorchProcess, programs: Path, name: str, case: str) -> None:
    """Positional outputs are arr_0, arr_1, … in the file; the inputs have their names."""
    with np.load(programs / f"{name}-{case}.npz") as file:
        inputs = {key: file[key] for key in file if not key.startswith("arr_")}
        expected = [file[f"arr_{index}"] for index in range(len(file.files) - len(inputs))]
    shapes = {key: value.shape for key, value in inputs.items()}
    network: Network = pytorch.call(LOAD, str(programs / f"{name}.pt2"), input_shapes=shapes)
    assert network.name == name
    assert {spec.name: spec.shape for spec in network.inputs} == shapes
    assert [(spec.shape, spec.dtype) for spec in network.outputs] == [(o.shape, str(o.dtype)) for o in expected]
    session = onnxruntime.InferenceSession(network.model.SerializeToString(), providers=["CPUExecutionProvider"])
    for actual, wanted in zip(session.run(None, inputs), expected, strict=True):
        tolerance = 1e-3 if wanted.dtype == np.float16 else 1e-5
        np.testing.assert_allclose(actual, wanted, rtol=tolerance, atol=tolerance * np.abs(wanted).max())


def test_a_program_is_a_rival_when_it_is_compiled(pytorch: TorchProcess, programs: Path) -> None:
    with np.load(programs / "nested-fixed.npz") as file:
        inputs = {key: file[key] for key in file if not key.startswith("arr_")}
        expected = [file[f"arr_{index}"] for index in range(len(file.files) - len(inputs))]
    outputs = pytorch.call("helpers.torch_models.compute_as_rival", programs / "nested.pt2", inputs)
    for actual, wanted in zip(outputs.values(), expected, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.system
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("experiment_id")
def test_a_tuned_program_is_compared_with_its_compilation_by_pytorch(programs: Path, tmp_path: Path) -> None:
    """By the pipeline, which knows where the program is, and then by a promotion."""
    client = mlflow.MlflowClient()
    new_id = client.create_experiment("rivals", (tmp_path / "artifacts").as_uri())
    parameters = {
        **FAST,
        **BRIEF,
        "network": programs / "named.pt2",
        "input_shapes": '{"input": [4, 4]}',
        "trials": 4,
        "cost_model": "none",
        "rivals": "onnxruntime,torch",
        "register_as": "program",
    }
    program = str(torch_python().parent / "ansor-mlflow")
    env = environment(client.tracking_uri, {"MLFLOW_EXPERIMENT_ID": new_id})
    finished = run_command([program, "main", *flags(parameters)], tmp_path / "cwd", env)
    assert finished.exit_code == 0, finished.stderr
    (run,) = client.search_runs([new_id], f"tags.`{names.TAG_STEP}` = 'main'")
    latencies = {rival: run.data.metrics[names.rival_latency_ms(rival)] for rival in ("onnxruntime", "torch")}
    assert run.data.tags[names.TAG_BEST_RIVAL] == min(latencies, key=lambda rival: latencies[rival])
    command = ["promote", "--model", "program", "--candidate", "1", "--champion", "torch", "--measure-s", "0.1"]
    finished = run_command([program, *command, "--max-turns", "4"], tmp_path / "cwd", env)
    assert finished.exit_code in (0, NotFasterError.exit_code, UndecidedError.exit_code), finished.stderr
    assert "of the time of torch.compile" in finished.stdout


def test_a_program_always_gives_the_same_network(pytorch: TorchProcess, programs: Path) -> None:
    first, second = (pytorch.call(LOAD, str(programs / "convolutions.pt2")) for _ in range(2))
    assert first.sha256 == second.sha256
    assert not any(node.metadata_props for node in first.model.graph.node)  # which name files of this machine


def test_dynamic_sizes_leave_no_operators_on_shapes(pytorch: TorchProcess, programs: Path) -> None:
    network = pytorch.call(LOAD, str(programs / "attention.pt2"), input_shapes={"ids": [2, 6]})
    assert not {node.op_type for node in network.model.graph.node} & {"Shape", "Range", "If", "Loop"}


def test_a_program_from_a_gpu(pytorch: TorchProcess, programs: Path, tmp_path: Path) -> None:
    entries = {
        name: content.replace(b'"type": "cpu", "index": null', b'"type": "cuda", "index": 0')
        for name, content in read_archive(programs / "convolutions.pt2").items()
    }
    assert b"cuda" in entries[PROGRAM] + entries[WEIGHTS]
    network = pytorch.call(LOAD, str(write_archive(tmp_path / "gpu.pt2", entries)))
    assert network.sha256 == pytorch.call(LOAD, str(programs / "convolutions.pt2")).sha256


@pytest.mark.system
@pytest.mark.usefixtures("experiment_id")
def test_a_program_is_tuned(programs: Path, tmp_path: Path) -> None:
    """With the command of the environment that has PyTorch, whose exporter says nothing meanwhile."""
    client = mlflow.MlflowClient()
    new_id = client.create_experiment("programs", (tmp_path / "artifacts").as_uri())
    parameters = {
        **FAST,
        "network": programs / "named.pt2",
        "input_shapes": '{"input": [4, 4]}',
        "trials": 4,
        "cost_model": "none",
    }
    command = [str(torch_python().parent / "ansor-mlflow"), "tune", *flags(parameters)]
    env = environment(client.tracking_uri, {"MLFLOW_EXPERIMENT_ID": new_id})
    finished = run_command(command, tmp_path / "cwd", env)
    assert finished.exit_code == 0, finished.stderr
    assert "torch" not in (finished.stdout + finished.stderr).lower()
    (run,) = client.search_runs([new_id])
    assert run.data.metrics[names.BEST_LATENCY_MS] > 0
    copy = load_network(str(tmp_path / "artifacts" / run.info.run_id / "artifacts" / names.NETWORK_FILE))
    assert [(spec.name, spec.shape) for spec in copy.inputs] == [("input", (4, 4))]


# -- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shapes", "message"),
    [
        (
            "attention",
            {},
            r"""'ids' has dynamic s\d+ \(dimension 1\) in .*; give input_shapes='\{"ids": \[1, 32\]\}', which it""",
        ),
        ("attention", {"ids": [2]}, "1 dimensions"),
        ("attention", {"x": [2, 8]}, "input_shapes names 'x', which is not an input of .*; its inputs are ids"),
        (
            "attention",
            {"ids": [2, 7]},
            r"the shapes break its condition .*\['ids'\].* % 2\) == 0; give other",
        ),
        (
            "attention",
            {"ids": [2, 66]},
            r"its size s\d+ is 66, but it was exported for 2 to 64; give input_shapes",
        ),
        (
            "convolutions",
            {"image": [1, 3, 16, 16]},
            "dimension 0 of its input 'image' must be 2 and not 1; give",
        ),
        ("named", {"input": [2, 4]}, r"its size s\d+ is 2, but it was exported for 3 to 16"),
        ("pair", {"args_0": [5, 4], "args_1": [6, 4]}, "dimension 0 of its input 'args_1' must be 5 and not 6"),
    ],
)
def test_shapes_that_a_program_is_not_made_for(
    programs: Path, name: str, shapes: dict[str, list[int]], message: str
) -> None:
    """Said before PyTorch is looked for."""
    with pytest.raises(UserInputError, match=message):
        load_network(str(programs / f"{name}.pt2"), input_shapes=shapes)


def test_a_dynamic_batch_is_one_or_batch_size(pytorch: TorchProcess, programs: Path) -> None:
    """Where the program can take one: "named" was exported for 3 to 16."""
    network = pytorch.call(LOAD, str(programs / "named.pt2"), batch_size=4)
    assert [spec.shape for spec in network.inputs] == [(4, 4)]
    with pytest.raises(UserInputError, match=r"its size s\d+ is 1, but it was exported for 3 to 16"):
        load_network(str(programs / "named.pt2"))
    with pytest.raises(UserInputError, match=r"""give input_shapes='\{"ids": \[2, 32\]\}'"""):
        load_network(str(programs / "attention.pt2"), batch_size=2)
    with pytest.raises(UserInputError, match=r"batch_size=3 with .*: dimension 0 of its input 'image' is 2; leave"):
        load_network(str(programs / "convolutions.pt2"), batch_size=3)


def test_an_input_of_a_program_gets_a_value(pytorch: TorchProcess, programs: Path) -> None:
    shapes = {"args_0": [3, 4], "args_1": [3, 4]}
    network = pytorch.call(LOAD, str(programs / "pair.pt2"), input_shapes=shapes, input_values={"args_1": 0.5})
    assert [spec.name for spec in network.inputs] == ["args_0"]
    whole = pytorch.call(LOAD, str(programs / "pair.pt2"), input_shapes=shapes)
    x = np.ones((3, 4), np.float32)
    outputs = [
        onnxruntime.InferenceSession(one.model.SerializeToString(), providers=["CPUExecutionProvider"]).run(
            None, inputs
        )
        for one, inputs in ((network, {"args_0": x}), (whole, {"args_0": x, "args_1": x / 2}))
    ]
    np.testing.assert_allclose(*outputs, rtol=1e-6)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("Mul(Integer(2), Symbol('s0', positive=True, integer=True))", 14),
        ("Add(Integer(-1), Mul(Rational(1, 2), Add(Symbol('s0'), Integer(1))))", 3),
        ("FloorDiv(Symbol('s0'), Integer(2))", 3),
        ("Mul(Integer(2), Pow(Symbol('s0'), Integer(-1)), Pow(Symbol('s0'), Integer(2)))", 14),
        ("Max(Integer(1), Mod(Symbol('s0'), Integer(4)))", 3),
        ("TruncToInt(Mul(Float('1.5', precision=53), ToFloat(Symbol('s0'))))", 10),
        ("CeilDiv(Symbol('s0'), Integer(2))", 4),
        ("StrictGreaterThan(Symbol('s0'), Integer(6))", True),
        ("L['x'].size()[1] % 2 == 0 and not 3 <= 2", True),
        ("(L['x'].size()[0] // 2) != -1", True),
        ("max(1, L['x'].size()[1]) > 8", False),
    ],
)
def test_expressions_are_computed(expression: str, value: object) -> None:
    result = Sizes({"s0": 7}, {"x": (7, 8)}).evaluate(expression)
    assert (result, type(result)) == (value, type(value))


@pytest.mark.parametrize(
    "expression",
    [
        touch_expression(Path("never")),
        "Symbol('u0')",
        "Symbol('s0').func",
        "L['y'].size()[0]",
        "L['x'].size()[2]",
        "L['x'].stride()[0]",
        "(lambda: 7)()",
        "[7 for _ in (1,)][0]",
        "'text'",
        "FloorDiv(Integer(1), Integer(0))",
        "Pow(Integer(9), Integer(10000))",
        "max",
        "max(1, 2, key=print)",
        "max(*(1, 2))",
        "1 +",
        "",
        "1" * 20_000,
        "(" * 4_000 + "1" + ")" * 4_000,
        "-" * 9_000 + "1",
        "not " * 2_000 + "1",
    ],
)
def test_nothing_but_arithmetic_is_computed(expression: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Sizes({"s0": 7}, {"x": (7, 8)}).evaluate(expression)


# -- what is refused -------------------------------------------------------------------------------------------------

HOSTILE: dict[str, Callable[[dict[str, Any], Path], Any]] = {}


def hostile(change: Callable[[dict[str, Any], Path], Any]) -> Callable[[dict[str, Any], Path], Any]:
    """A change to the entries of an archive, JSON as what it stands for, so that `torch.export.load` makes a file."""
    HOSTILE[change.__name__] = change
    return change


@hostile
def pickled_weight(entries: dict[str, Any], made: Path) -> None:
    next(iter(entries[WEIGHTS]["config"].values()))["use_pickle"] = True
    entries["data/weights/weight_0"] = pickle.dumps(Touch(made))


def add_constant(entries: dict[str, Any], path_name: str, made: Path) -> None:
    entry = {"path_name": path_name, "is_param": False, "use_pickle": True, "tensor_meta": None}
    entries[CONSTANTS]["config"]["added"] = entry
    entries[f"data/constants/{path_name}"] = pickle.dumps(Touch(made))


@hostile
def pickled_constant(entries: dict[str, Any], made: Path) -> None:
    add_constant(entries, "tensor_99", made)


@hostile
def opaque_object(entries: dict[str, Any], made: Path) -> None:
    add_constant(entries, "opaque_obj_0", made)


@hostile
def old_weights(entries: dict[str, Any], made: Path) -> None:
    del entries[WEIGHTS]
    entries["data/weights/model.pt"] = pickle.dumps(Touch(made))


@hostile
def old_constants(entries: dict[str, Any], made: Path) -> None:
    del entries[CONSTANTS]
    entries["data/constants/model.pt"] = pickle.dumps(Touch(made))


@hostile
def old_archive(entries: dict[str, Any], made: Path) -> None:
    program = entries[PROGRAM]
    entries.clear()
    entries["version"] = b"8.0"
    entries["serialized_exported_program.json"] = program
    for name in ("state_dict", "constants", "example_inputs"):
        entries[f"serialized_{name}.pt"] = pickle.dumps(Touch(made))


@hostile
def size(entries: dict[str, Any], made: Path) -> None:
    sizes = entries[PROGRAM]["graph_module"]["graph"]["tensor_values"]["relu"]["sizes"]
    sizes[0] = {"as_expr": {"expr_str": touch_expression(made), "hint": None}}


@hostile
def condition(entries: dict[str, Any], made: Path) -> None:
    entries[PROGRAM]["guards_code"] = [f"{touch_expression(made)} is None"]


@hostile
def name_of_an_input(entries: dict[str, Any], made: Path) -> None:
    text = json.dumps(entries[PROGRAM])
    entries[PROGRAM] = json.loads(text.replace('"image"', json.dumps(f"image={touch_expression(made)}")))


def make_hostile(programs: Path, path: Path, kind: str, made: Path) -> Path:
    contents = read_archive(programs / "convolutions.pt2")
    entries: dict[str, Any] = {
        name: json.loads(content) if name.endswith(".json") else content for name, content in contents.items()
    }
    HOSTILE[kind](entries, made)
    packed = {
        name: content if isinstance(content, bytes) else json.dumps(content).encode()
        for name, content in entries.items()
    }
    return write_archive(path, packed, root="" if "version" in entries else "model/")


@pytest.mark.parametrize("kind", HOSTILE)
def test_nothing_of_a_program_is_executed(pytorch: TorchProcess, programs: Path, tmp_path: Path, kind: str) -> None:
    """Each is a place where PyTorch alone does execute it."""
    made = tmp_path / "made"
    path = make_hostile(programs, tmp_path / "hostile.pt2", kind, made)
    pytorch.call("helpers.torch_models.load_as_pytorch_does", path)
    assert made.exists()
    made.rmdir() if made.is_dir() else made.unlink()
    with pytest.raises(UserInputError, match=r"network=.*hostile\.pt2: .*; ") as caught:
        pytorch.call(LOAD, str(path))
    assert not made.exists()
    assert "\n" not in str(caught.value)
    with pytest.raises(UserInputError, match=re.escape(str(caught.value))):
        load_network(str(path))  # without PyTorch
    assert not made.exists()


def test_sample_inputs_and_libraries_are_not_even_read(pytorch: TorchProcess, programs: Path, tmp_path: Path) -> None:
    """Every archive has pickled sample inputs."""
    made = tmp_path / "made"
    entries = read_archive(programs / "convolutions.pt2")
    entries["data/sample_inputs/model.pt"] = pickle.dumps(Touch(made))
    path = write_archive(tmp_path / "samples.pt2", entries)
    pytorch.call("helpers.torch_models.load_as_pytorch_does", path)
    assert made.exists()
    made.unlink()
    for name in ("data/aotinductor/model/model.so", "data/constants/custom_obj_0", "extra/notes.pkl"):
        entries[name] = pickle.dumps(Touch(made))
    network = pytorch.call(LOAD, str(write_archive(tmp_path / "samples.pt2", entries)))
    assert network.sha256 == pytorch.call(LOAD, str(programs / "convolutions.pt2")).sha256
    assert not made.exists()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            "torch.os.mkdir",
            r"its operator 'torch\.os\.mkdir' is none of PyTorch's own \(torch\.ops\.aten\); export the",
        ),
        ("torch.ops.aten.save.default", "its operator 'torch.ops.aten.save.default' is none of PyTorch's own"),
        ("torch.ops.aten.from_file.default", "is none of PyTorch's own"),
        ("torch.ops.aten.relu.default.__call__", "is none of PyTorch's own"),
        ("torch.ops.aten.relu.overloads", "has no operator torch.ops.aten.relu.overloads"),
        ("torch.ops.aten.__class__.mro", "has no operator torch.ops.aten.__class__.mro"),
        ("torch.ops.torchvision.nms.default", "is none of PyTorch's own"),
        ("_operator.add", "is none of PyTorch's own"),
    ],
)
def test_only_operators_of_pytorch_are_looked_up(
    pytorch: TorchProcess, programs: Path, tmp_path: Path, target: str, message: str
) -> None:
    entries = read_archive(programs / "convolutions.pt2")
    program = json.loads(entries[PROGRAM])
    relu = next(node for node in program["graph_module"]["graph"]["nodes"] if "relu" in node["target"])
    relu["target"] = target
    relu["inputs"] = [{"name": "", "arg": {"as_string": "made"}, "kind": 1}]
    entries[PROGRAM] = json.dumps(program).encode()
    with pytest.raises(UserInputError, match=message):
        pytorch.call(LOAD, str(write_archive(tmp_path / "operator.pt2", entries)))


def test_no_other_operator_takes_the_name_of_a_file(pytorch: TorchProcess) -> None:
    assert pytorch.call("helpers.torch_models.operators_with_paths") == {"aten::save", "aten::from_file"}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"parameter_name": "stem.weight"', b'"parameter_name": "stem[\'weight\']"'),
        (b'"parameter_name": "stem.weight"', b'"parameter_name": "__class__.weight"'),
        (b'{"as_none": true}', b'{"as_operator": "torch.os.system"}'),
        (b'{"as_none": true}', b'{"as_custom_obj": {"name": "added", "class_fqn": "a.b"}}'),
        (b'"relu"', b'"relu()"'),
        (b'"relu"', b'"lambda"'),
        (b'"sym_int_values": {}', b'"sym_int_values": {"a b": {"as_int": 1}}'),
    ],
)
def test_every_other_text_must_be_a_name(programs: Path, tmp_path: Path, old: bytes, new: bytes) -> None:
    entries = read_archive(programs / "convolutions.pt2")
    assert old in entries[PROGRAM]
    entries[PROGRAM] = entries[PROGRAM].replace(old, new)
    with pytest.raises(UserInputError, match=r"its entry \w+=.* is none that torch\.export\.save writes"):
        load_network(str(write_archive(tmp_path / "text.pt2", entries)))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", r"the file cannot be read \(No such file.*; give an ONNX file, an exported program or"),
        ("folder", r"the file cannot be read \(Is a directory"),
        ("empty", r"not an exported program of PyTorch, or cut short \(File is not a zip file\); save it again"),
        ("pickle", "not an exported program of PyTorch, or cut short"),
        ("cut", "not an exported program of PyTorch, or cut short"),
        ("damaged", "not an exported program of PyTorch, or cut short .*CRC"),
        ("graph", "its graph is damaged .*; save it again"),
        ("version", "its format has the version 9, but only 8 is known; save it again with PyTorch 2.13"),
        ("weights", r"it holds no exported program, or one of an old format; write one .*torch\.export\.save"),
        ("script", r"it holds no exported program, or one of an old format"),
        ("batch-norm", r"it was exported in training mode; call model\.eval\(\) before"),
        ("dropout", r"it was exported in training mode; call model\.eval\(\) before"),
        ("values", r"its size u0 does not follow from the shapes of its inputs .*; only such programs can be tuned"),
        (
            "branch",
            r"its operator 'torch\.ops\.higher_order\.cond' is none of PyTorch's own .*; export the model",
        ),
        ("number", "it returns something that is no tensor; export the model without it"),
    ],
)
def test_what_is_wrong_with_a_program_is_said_in_one_line(
    programs: Path, tmp_path: Path, name: str, message: str
) -> None:
    """Without PyTorch, which has not been looked for yet."""
    valid = (programs / "convolutions.pt2").read_bytes()
    contents = {
        "empty": b"",
        "pickle": pickle.dumps(Touch(tmp_path / "unpickled")),
        "cut": valid[: len(valid) // 2],
        "damaged": valid.replace(b"torch.ops.aten.relu.default", b"torch.ops.aten.silu.default"),
    }
    entries = read_archive(programs / "convolutions.pt2")
    programs_of_json = {"graph": b'{"schema_version": {"major": 8}}', "version": b'{"schema_version": {"major": 9}}'}
    path = programs / f"{name}.pt2"
    if name in contents:
        path = tmp_path / path.name
        path.write_bytes(contents[name])
    elif name in programs_of_json:
        path = write_archive(tmp_path / path.name, {**entries, PROGRAM: programs_of_json[name]})
    elif name == "folder":
        path = tmp_path / path.name
        path.mkdir()
    with pytest.raises(UserInputError, match=rf"network=.*{name}\.pt2: {message}") as caught:
        load_network(str(path), input_shapes={"args_0": [3, 4]} if name == "number" else {})
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "unpickled").exists()


def test_an_operator_that_onnx_lacks(pytorch: TorchProcess, programs: Path) -> None:
    with pytest.raises(UserInputError, match=r"cannot export it to ONNX \(.*linalg_svd.*\); export the") as caught:
        pytorch.call(LOAD, str(programs / "svd.pt2"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("missing", ["torch", "onnxscript"])
def test_without_pytorch(programs: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(MachineError, match=r"convolutions\.pt2: an exported program needs PyTorch .*: pip install"):
        load_network(str(programs / "convolutions.pt2"))


# -- MLflow ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def logged(pytorch: TorchProcess, _mlflow_store: tuple[str, str]) -> tuple[str, str]:
    """The IDs of a run and of the exported program that it logged; two versions of that are "torch-program"."""
    return pytorch.call("helpers.torch_models.log", *_mlflow_store)


@pytest.mark.parametrize(
    ("template", "name", "source"),
    [
        ("models:/torch-program/1", "torch-program", "models:/torch-program/1"),
        ("models:/torch-program@champion", "torch-program", "models:/torch-program/1"),
        ("models:/{model_id}", "{model_id}", "models:/{model_id}"),
        ("runs:/{run_id}/program", "program", "runs:/{run_id}/program"),
        ("models:/torch-program/2/data/model.pt2", "torch-program", "models:/torch-program/2/data/model.pt2"),
        ("file://{directory}/data/model.pt2", "model", "file://{directory}/data/model.pt2"),
        ("{directory}", "artifacts", None),
    ],
)
@pytest.mark.usefixtures("experiment_id")
def test_models_of_the_flavor_pytorch(
    pytorch: TorchProcess, logged: tuple[str, str], template: str, name: str, source: str | None
) -> None:
    run_id, model_id = logged
    location = mlflow.MlflowClient().get_logged_model(model_id).artifact_location
    values = {"run_id": run_id, "model_id": model_id, "directory": location.removeprefix("file://")}
    given = template.format(**values)
    network = pytorch.call("ansor_mlflow.tracking.sources.fetch_network", given, input_shapes={"input": [1, 3, 8, 8]})
    assert network.name == name.format(**values)
    assert network.source == (source and source.format(**values))
    assert [spec.shape for spec in (*network.inputs, *network.outputs)] == [(1, 3, 8, 8), (1, 4)]
    assert onnx.checker.check_model(network.model) is None


@pytest.mark.usefixtures("experiment_id")
def test_a_model_that_was_logged_as_a_pickle(logged: tuple[str, str]) -> None:
    message = r"/pickle: the model was logged as a pickle, .*; log it with .*serialization_format='pt2'"
    with pytest.raises(UserInputError, match=message):
        sources.fetch_network(f"runs:/{logged[0]}/pickle")
