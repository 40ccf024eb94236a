"""Models of PyTorch, and what it computes with them. Only for a Python that has it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlflow
import mlflow.pytorch
import numpy as np
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional

AUTO = {0: Dim.AUTO, 1: Dim.AUTO}
ROWS = {0: Dim("rows", min=3, max=16)}


class Convolutions(nn.Module):
    """Batch norm, a depthwise convolution, a residual and a constant; what it returns is a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.head = nn.Linear(8, 10)
        self.register_buffer("scale", torch.tensor([1.5]), persistent=False)
        for values in (self.bn.running_mean, self.bn.running_var, self.bn.weight, self.bn.bias):
            nn.init.uniform_(values, 0.5, 1.5)

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        data = torch.relu(self.bn(self.stem(image)))
        data = data * self.scale + functional.silu(self.depthwise(data)) + torch.tensor([0.25])
        return {"logits": self.head(functional.avg_pool2d(data, 4).mean((2, 3))), "pixels": data.amax(1)}


class Attention(nn.Module):
    """Causal attention over dynamic sizes, with a mask of infinities, tied weights and a part without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 32)
        self.positions = nn.Parameter(torch.randn(64, 32))
        self.qkv = nn.Linear(32, 96)
        self.norm = nn.LayerNorm(32)
        self.ffn = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.Dropout(0.5))
        self.register_buffer("mask", torch.full((64, 64), -math.inf).triu(1), persistent=False)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        batch, length = ids.shape
        data = self.tokens(ids) + self.positions[torch.arange(length)]
        q, k, v = self.qkv(data).view(batch, length, 3, 4, 8).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2) / math.sqrt(8) + self.mask[:length, :length]).softmax(-1)
        data = data + (scores @ v).transpose(1, 2).reshape(batch, length, 32)
        with torch.no_grad():
            data = data * (1 + 1 / length)
        data = data + self.ffn(self.norm(data))
        if length % 2 == 0:
            data = data.view(batch, length // 2, 2, 32).sum(2)
        return functional.linear(data, self.tokens.weight), data.mean(1)


class Small(nn.Module):
    """A module whose `forward` is the given function of itself and its inputs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.add_module("odd-name", nn.Linear(4, 4))
        self.bn = nn.BatchNorm1d(4)
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


class Named(Small):
    """The same with an input that is called "input", as in PyTorch's own modules."""

    def forward(self, input: torch.Tensor) -> Any:
        return self.function(self, input)


def _save(path: Path, model: nn.Module, *args: Any, kwargs: Any = None, shapes: Any = None, train: bool = False) -> Any:
    program = torch.export.export(model.train(train), args, kwargs, dynamic_shapes=shapes)
    torch.export.save(program, path)
    return program


def write(directory: Path) -> None:
    """Writes programs, `<name>.pt2`, and of some the inputs and outputs, `<name>-<case>.npz`."""
    torch.manual_seed(0)
    x = torch.randn(3, 4)

    def case(name: str, model: nn.Module, inputs: Mapping[str, torch.Tensor], *args: Any, **kwargs: Any) -> None:
        with torch.no_grad():
            outputs = torch.utils._pytree.tree_leaves(model(*args, **kwargs))
        values = {key: value.numpy() for key, value in inputs.items()}
        np.savez(directory / f"{name}.npz", *[output.detach().numpy() for output in outputs], **values)

    convolutions = Convolutions()
    image = torch.randn(2, 3, 16, 16)
    _save(directory / "convolutions.pt2", convolutions, image)
    case("convolutions-fixed", convolutions, {"image": image}, image)
    attention = Attention()
    _save(directory / "attention.pt2", attention, torch.randint(0, 50, (3, 16)), shapes=(AUTO,))
    for shape in ((1, 8), (5, 20)):
        ids = torch.randint(0, 50, shape)
        case(f"attention-{shape[0]}x{shape[1]}", attention, {"ids": ids}, ids)

    nested = Small(lambda self, pair, *, scale: {"a": self.linear(pair[0]) * scale["s"], "b": (pair[1].sum(1),)})
    scale = {"s": torch.randn(3, 1)}
    _save(directory / "nested.pt2", nested.eval(), [x, x + 1], kwargs={"scale": scale})
    case("nested-fixed", nested, {"args_0_0": x, "args_0_1": x + 1, "scale_s": scale["s"]}, [x, x + 1], scale=scale)
    decomposed = Small(lambda self, x: functional.gelu(getattr(self, "odd-name")(self.bn(x)))).eval()
    torch.export.save(torch.export.export(decomposed, (x,)).run_decompositions(), directory / "decomposed.pt2")
    case("decomposed-fixed", decomposed, {"args_0": x}, x)
    half = Small(lambda self, x: self.linear(x).relu()).eval().half()
    _save(directory / "half.pt2", half, x.half())
    case("half-fixed", half, {"args_0": x.half()}, x.half())

    _save(directory / "named.pt2", Named(lambda self, x: self.linear(x)), x, shapes=(ROWS,))
    _save(directory / "pair.pt2", Small(lambda self, x, y: self.linear(x) + y), x, x, shapes=((ROWS, ROWS),))
    _save(directory / "batch-norm.pt2", Small(lambda self, x: self.bn(x)), x, train=True)
    _save(directory / "svd.pt2", Small(lambda self, x: torch.linalg.svd(x)[1]), x)
    _save(directory / "free.pt2", Small(lambda self, x, y: x + y), x, x, shapes=(({0: Dim.AUTO}, {0: Dim.AUTO}),))
    torch.jit.trace(nn.Linear(4, 4), x).save(str(directory / "script.pt2"))


def log(tracking_uri: str, experiment_id: str) -> tuple[str, str]:
    """Logs an exported program, which gets two versions, and pickles. Returns the run's and the program's ID."""
    mlflow.set_tracking_uri(tracking_uri)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)).eval()
    image = np.random.default_rng(0).standard_normal((2, 3, 8, 8), np.float32)
    options: dict[str, Any] = {"pip_requirements": ["torch"], "input_example": image}
    with mlflow.start_run(experiment_id=experiment_id) as run:
        logged = mlflow.pytorch.log_model(model, name="program", serialization_format="pt2", **options)
        mlflow.pytorch.log_model(model, name="pickle", serialization_format="pickle", **options)
        without = {"serialization_format": "pickle", "pip_requirements": ["torch"]}
        mlflow.pytorch.log_model(model, name="unsigned", **without)
        for _ in range(2):
            mlflow.register_model(logged.model_uri, "torch-program")
        mlflow.MlflowClient().set_registered_model_alias("torch-program", "champion", "1")
    return run.info.run_id, logged.model_id


def plan_in_memory() -> list[Any]:
    """The name of an exported program that is planned without a file, and the number of its tasks."""
    import ansor_mlflow as am

    program = torch.export.export(Small(lambda self, x: self.linear(x)).eval(), (torch.ones(2, 4),))
    plan = am.plan(program)
    return [plan.network, len(plan.tasks)]
