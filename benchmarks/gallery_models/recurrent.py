"""Recurrent networks, and others over sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from gallery_models.entry import GalleryModel
from gallery_models.pytorch import settle, torch_model

_FAMILY = "sequences"


def _model(
    name: str,
    build: Callable[[], Any],
    shapes: Sequence[tuple[int, ...]],
    *,
    outputs: Sequence[str] = ("output",),
    **how: Any,
) -> GalleryModel:
    inputs = ["x", "state", "cell"][: len(shapes)]
    return torch_model(name, _FAMILY, partial(_make, build, shapes), inputs=inputs, outputs=outputs, **how)


def _make(build: Callable[[], Any], shapes: Sequence[tuple[int, ...]]) -> tuple[Any, Any]:
    import torch

    return build(), tuple(torch.rand(*shape) for shape in shapes)


def _tagger(kind: str, **options: Any) -> Any:
    """Layers of a recurrent cell over a sequence, and a class for every step."""
    import torch
    from torch import nn

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = getattr(nn, kind)(32, 64, batch_first=True, **options)
            self.classes = nn.Linear(128 if options.get("bidirectional") else 64, 10)

        def forward(self, x: Any) -> Any:
            return torch.log_softmax(self.classes(self.cells(x)[0]), dim=-1)

    return Tagger()


def _stateful(kind: str) -> Any:
    """One step of a stream: the state goes in and comes out."""
    from torch import nn

    class Stream(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells, self.last = getattr(nn, kind)(32, 64), nn.Linear(64, 32)

        def forward(self, x: Any, *state: Any) -> Any:
            hidden, after = self.cells(x, state if len(state) > 1 else state[0])
            return self.last(hidden).sigmoid(), *(after if len(state) > 1 else (after,))

    return Stream()


def _make_sentiment() -> tuple[Any, Any]:
    """Sentiment of a text: embedded tokens, an LSTM, and its last state."""
    import torch
    from torch import nn

    class Sentiment(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.cells, self.last = nn.Embedding(500, 32), nn.LSTM(32, 64, 2), nn.Linear(64, 2)

        def forward(self, x: Any) -> Any:
            _, (state, _) = self.cells(self.words(x).transpose(0, 1))
            return self.last(state[-1])

    return Sentiment(), (torch.randint(0, 500, (1, 24)),)


def _crnn() -> Any:
    """Optical character recognition: convolutions, two bidirectional LSTMs along the line, a class for every column."""
    import torch
    from torch import nn

    class Crnn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = (1, 16, 32, 64, 64)
            pools = (nn.MaxPool2d(2), nn.MaxPool2d(2), nn.MaxPool2d((2, 1)), nn.MaxPool2d((4, 1)))
            blocks = [
                nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(), pool)
                for i, o, pool in zip(widths, widths[1:], pools, strict=False)
            ]
            self.features = nn.Sequential(*blocks)
            self.cells = nn.LSTM(64, 64, num_layers=2, bidirectional=True)
            self.classes = nn.Linear(128, 40)

        def forward(self, x: Any) -> Any:
            columns = self.features(x).squeeze(2).permute(2, 0, 1)
            return torch.log_softmax(self.classes(self.cells(columns)[0]), dim=2)

    return settle(Crnn().eval(), torch.rand(1, 1, 32, 128))


def _keywords() -> Any:
    """Keyword spotting: separable convolutions over time, and a GRU."""
    from torch import nn

    class Keywords(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Sequential(
                nn.Conv1d(40, 64, 5, 2, 2),
                nn.ReLU(),
                nn.Conv1d(64, 64, 5, 1, 2, groups=64),
                nn.Conv1d(64, 64, 1),
                nn.ReLU(),
            )
            self.cells, self.last = nn.GRU(64, 64, batch_first=True), nn.Linear(64, 12)

        def forward(self, x: Any) -> Any:
            hidden, _ = self.cells(self.features(x).transpose(1, 2))
            return self.last(hidden[:, -1])

    return Keywords()


def _tcn() -> Any:
    """Dilated causal convolutions, as in WaveNet."""
    from torch import nn

    class Causal(nn.Module):
        def __init__(self, dilation: int) -> None:
            super().__init__()
            self.pad, self.conv = nn.ConstantPad1d((2 * dilation, 0), 0.0), nn.Conv1d(32, 64, 3, dilation=dilation)

        def forward(self, x: Any) -> Any:
            value, gate = self.conv(self.pad(x)).chunk(2, dim=1)
            return x + value.tanh() * gate.sigmoid()

    return nn.Sequential(nn.Conv1d(8, 32, 1), *[Causal(2**level) for level in range(5)], nn.Conv1d(32, 4, 1))


def _masking() -> Any:
    """Speech enhancement: an LSTM gives a mask for the frequencies; instance normalisation along time."""
    from torch import nn

    class Masking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = (
                nn.Conv1d(1, 64, 32, 16, bias=False),
                nn.ConvTranspose1d(64, 1, 32, 16, bias=False),
            )
            self.norm, self.cells = nn.InstanceNorm1d(64), nn.LSTM(64, 64, 2, batch_first=True)
            self.mask = nn.Linear(64, 64)

        def forward(self, x: Any) -> Any:
            encoded = self.encode(x)
            hidden, _ = self.cells(self.norm(encoded).transpose(1, 2))
            return self.decode(encoded * self.mask(hidden).sigmoid().transpose(1, 2))

    return Masking()


def _vocoder() -> Any:
    """HiFi-GAN's generator: transposed and dilated convolutions over time."""
    from torch import nn

    class Residual(nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            self.convs = nn.ModuleList([nn.Conv1d(channels, channels, 3, padding=d, dilation=d) for d in (1, 3, 5)])

        def forward(self, x: Any) -> Any:
            for conv in self.convs:
                x = x + conv(nn.functional.leaky_relu(x, 0.1))
            return x

    return nn.Sequential(
        nn.Conv1d(40, 64, 7, padding=3), nn.LeakyReLU(0.1), nn.ConvTranspose1d(64, 32, 8, 4, 2), Residual(32),
        nn.LeakyReLU(0.1), nn.ConvTranspose1d(32, 16, 8, 4, 2), Residual(16), nn.LeakyReLU(0.01),
        nn.Conv1d(16, 1, 7, padding=3), nn.Tanh(),
    )  # fmt: skip


_SEQUENCE = ((1, 24, 32),)

MODELS = (
    _model("lstm", partial(_tagger, "LSTM"), _SEQUENCE, opset=9),
    _model("lstm-bidirectional", partial(_tagger, "LSTM", num_layers=2, bidirectional=True), _SEQUENCE, opset=13),
    _model("lstm-dynamo", partial(_tagger, "LSTM"), _SEQUENCE, opset=18, dynamo=True),
    _model("gru", partial(_tagger, "GRU", num_layers=2), _SEQUENCE, opset=11),
    _model("gru-dynamo", partial(_tagger, "GRU", bidirectional=True), _SEQUENCE, opset=18, dynamo=True),
    _model("rnn", partial(_tagger, "RNN"), _SEQUENCE, opset=14),
    _model("lstm-stream", partial(_stateful, "LSTM"), ((1, 1, 32), (1, 1, 64), (1, 1, 64)),
           outputs=("output", "state_after", "cell_after"), opset=17),
    _model("gru-stream", partial(_stateful, "GRU"), ((1, 1, 32), (1, 1, 64)), outputs=("output", "state_after"),
           opset=17),
    torch_model("lstm-sentiment", _FAMILY, _make_sentiment, inputs=["tokens"], dynamic={"tokens": [0]},
                input_shapes={"tokens": [1, 24]}),
    _model("crnn", _crnn, ((1, 1, 32, 128),), opset=11, dynamic={"x": [0, 3]}, input_shapes={"x": (1, 1, 32, 128)}),
    _model("keyword-spotting", _keywords, ((1, 40, 64),), opset=12),
    _model("wavenet", _tcn, ((1, 8, 128),), opset=18, dynamo=True),
    _model("speech-masking", _masking, ((1, 1, 1024),), opset=13),
    _model("vocoder", _vocoder, ((1, 40, 32),), opset=15),
)  # fmt: skip
