"""Detectors, most with non-maximum suppression in the graph."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from gallery_models.entry import GalleryModel
from gallery_models.pytorch import Make, import_torchvision, import_transformers, settle, torch_model

_FAMILY = "detection"


def _torchvision(name: str, size: int, *, opset: int = 17, dynamo: bool = False, **arguments: Any) -> GalleryModel:
    return torch_model(
        f"torchvision-{name}",
        _FAMILY,
        partial(_make_torchvision, name, size, arguments),
        inputs=["image"],
        outputs=["boxes", "scores", "labels"],
        opset=opset,
        dynamo=dynamo,
        packages=["torchvision"],
    )


def _own(
    name: str, make: Make, outputs: Sequence[str], *, opset: int, dynamo: bool = False, packages: Sequence[str] = ()
) -> GalleryModel:
    return torch_model(
        name,
        _FAMILY,
        make,
        inputs=["image"],
        outputs=outputs,
        opset=opset,
        dynamo=dynamo,
        packages=packages,
    )


def _make_torchvision(name: str, size: int, arguments: dict[str, Any]) -> tuple[Any, Any]:
    torchvision = import_torchvision()
    import torch

    class Detector(torch.nn.Module):
        """Returns tensors: what is found in the first image."""

        def __init__(self) -> None:
            super().__init__()
            builder = getattr(torchvision.models.detection, name)
            self.detector = builder(weights=None, weights_backbone=None, num_classes=5, **arguments)

        def forward(self, image: Any) -> Any:
            found = self.detector([image[index] for index in range(len(image))])[0]
            return found["boxes"], found["scores"], found["labels"]

    detector = Detector()
    image = torch.rand(1, 3, size, size)
    for part, weight in detector.named_parameters():
        if "head" in part and weight.ndim == 4:  # drawn so small that all boxes would score the same but for rounding
            torch.nn.init.xavier_normal_(weight)
    return settle(detector.eval(), image), (image,)


def _make_ssd() -> tuple[Any, Any]:
    """MobileNetV3 with two heads; boxes and scores end in ONNX's NonMaxSuppression, as many detectors are deployed."""
    torchvision = import_torchvision()
    import torch
    from torch import nn

    class Suppress(torch.autograd.Function):
        @staticmethod
        def forward(*_: Any) -> Any:
            return torch.zeros(20, 3, dtype=torch.int64)

        @staticmethod
        def symbolic(g: Any, boxes: Any, scores: Any) -> Any:
            limits = [torch.tensor([20]), torch.tensor([0.5]), torch.tensor([0.3])]
            constants = [g.op("Constant", value_t=limit) for limit in limits]
            return g.op("NonMaxSuppression", boxes, scores, *constants)

    class Ssd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = torchvision.models.mobilenet_v3_small(weights=None).features
            self.classes = nn.Conv2d(576, 6 * 4, 3, padding=1)
            self.offsets = nn.Conv2d(576, 6 * 4, 3, padding=1)
            self.register_buffer("centres", torch.rand(1, 6 * 49, 2))

        def forward(self, image: Any) -> Any:
            features = self.backbone(image)
            scores = self.classes(features).reshape(1, 6, 4, -1).permute(0, 2, 1, 3).reshape(1, 4, -1).sigmoid()
            offsets = self.offsets(features).reshape(1, 6, 4, -1).permute(0, 1, 3, 2).reshape(1, -1, 4)
            centres = self.centres + 0.1 * offsets[..., :2].tanh()
            sizes = 0.05 + 0.1 * offsets[..., 2:].sigmoid()
            boxes = torch.cat([centres - sizes, centres + sizes], dim=-1)
            return boxes, scores, Suppress.apply(boxes, scores)

    image = torch.rand(1, 3, 224, 224)
    detector = Ssd()
    settle(detector.backbone, image)
    return detector, (image,)


def _make_yolo() -> tuple[Any, Any]:
    """A YOLO of the fifth generation: SiLU, spatial pyramid pooling, paths up and down, decoded anchors."""
    import torch
    from torch import nn

    def conv(inputs: int, outputs: int, kernel: int = 1, stride: int = 1) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, kernel, stride, (kernel - 1) // 2, bias=False),
            nn.BatchNorm2d(outputs),
            nn.SiLU(),
        )

    class Bottlenecks(nn.Module):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            half = outputs // 2
            self.left, self.right = conv(inputs, half), conv(inputs, half)
            self.inner = nn.Sequential(conv(half, half), conv(half, half, 3))
            self.last = conv(2 * half, outputs)

        def forward(self, x: Any) -> Any:
            left = self.left(x)
            return self.last(torch.cat([left + self.inner(left), self.right(x)], dim=1))

    class Pooling(nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            self.first, self.last = conv(channels, channels // 2), conv(2 * channels, channels)
            self.pool = nn.MaxPool2d(5, 1, 2)

        def forward(self, x: Any) -> Any:
            pooled = [self.first(x)]
            for _ in range(3):
                pooled.append(self.pool(pooled[-1]))
            return self.last(torch.cat(pooled, dim=1))

    class Yolo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.to_8 = nn.Sequential(conv(3, 16, 6, 2), conv(16, 32, 3, 2), conv(32, 64, 3, 2), Bottlenecks(64, 64))
            self.to_16 = nn.Sequential(conv(64, 128, 3, 2), Bottlenecks(128, 128))
            self.to_32 = nn.Sequential(conv(128, 256, 3, 2), Bottlenecks(256, 256), Pooling(256))
            self.up = nn.Upsample(scale_factor=2)
            self.join_16, self.join_8 = Bottlenecks(384, 128), Bottlenecks(192, 64)
            self.heads = nn.ModuleList([nn.Conv2d(64, 27, 1), nn.Conv2d(128, 27, 1), nn.Conv2d(256, 27, 1)])

        def forward(self, image: Any) -> Any:
            at_8 = self.to_8(image)
            at_16 = self.to_16(at_8)
            at_32 = self.to_32(at_16)
            at_16 = self.join_16(torch.cat([self.up(at_32), at_16], dim=1))
            at_8 = self.join_8(torch.cat([self.up(at_16), at_8], dim=1))
            found = []
            for stride, head, features in zip((8, 16, 32), self.heads, (at_8, at_16, at_32), strict=True):
                batch, _, height, width = features.shape
                raw = head(features).view(batch, 3, 9, height, width).permute(0, 1, 3, 4, 2).sigmoid()
                rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
                grid = torch.stack([columns, rows], dim=-1).to(raw.dtype)
                centres, sizes, rest = raw.split([2, 2, 5], dim=-1)
                decoded = torch.cat([(2 * centres - 0.5 + grid) * stride, (2 * sizes) ** 2 * 4 * stride, rest], dim=-1)
                found.append(decoded.reshape(batch, -1, 9))
            return torch.cat(found, dim=1)

    image = torch.rand(1, 3, 192, 192)
    return settle(Yolo().eval(), image), (image,)


def _make_centernet() -> tuple[Any, Any]:
    """A heat map, its peaks by max pooling, and the best by TopK: a detector without suppression."""
    torchvision = import_torchvision()
    import torch
    from torch import nn

    class CenterNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            resnet = torchvision.models.resnet18(weights=None)
            self.backbone = nn.Sequential(*list(resnet.children())[:-2])
            self.up = nn.Sequential(
                nn.ConvTranspose2d(512, 64, 4, 2, 1), nn.BatchNorm2d(64), nn.ReLU(),
                nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.BatchNorm2d(32), nn.ReLU(),
            )  # fmt: skip
            self.heat, self.sizes = nn.Conv2d(32, 5, 1), nn.Conv2d(32, 2, 1)

        def forward(self, image: Any) -> Any:
            features = self.up(self.backbone(image))
            heat = self.heat(features).sigmoid()
            peaks = heat * (nn.functional.max_pool2d(heat, 3, 1, 1) == heat).to(heat.dtype)
            scores, places = peaks.flatten(1).topk(10)
            cells = places % (heat.shape[2] * heat.shape[3])
            sizes = self.sizes(features).flatten(2).gather(2, cells.unsqueeze(1).expand(-1, 2, -1))
            return scores, places, sizes

    image = torch.rand(1, 3, 128, 128)
    return settle(CenterNet().eval(), image), (image,)


def _make_transformer(kind: str, configuration: str, values: dict[str, Any], size: int) -> tuple[Any, Any]:
    transformers = import_transformers()
    import torch

    class Detector(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.detector = getattr(transformers, kind)(getattr(transformers, configuration)(**values))

        def forward(self, image: Any) -> Any:
            found = self.detector(pixel_values=image, return_dict=True)
            return found["logits"], found["pred_boxes"]

    return Detector(), (torch.rand(1, 3, size, size),)


def _transformer(
    name: str, kind: str, configuration: str, values: dict[str, Any], size: int, *, opset: int
) -> GalleryModel:
    return torch_model(
        f"transformers-{name}",
        _FAMILY,
        partial(_make_transformer, kind, configuration, values, size),
        inputs=["image"],
        outputs=["logits", "boxes"],
        packages=["transformers", "torchvision"],
        opset=opset,
    )


_YOLOS = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "image_size": [128, 128], "num_detection_tokens": 20,
}  # fmt: skip
_RT_DETR = {
    "encoder_hidden_dim": 64, "encoder_in_channels": [64, 128, 256], "decoder_in_channels": [64, 64, 64],
    "encoder_ffn_dim": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "d_model": 64, "decoder_layers": 2, "decoder_ffn_dim": 64, "num_queries": 20, "num_denoising": 0,
    "use_pretrained_backbone": False, "anchor_image_size": [128, 128],
}  # fmt: skip

MODELS = (
    _torchvision("ssdlite320_mobilenet_v3_large", 320, opset=11, score_thresh=0.1, detections_per_img=20),
    _torchvision(
        "retinanet_resnet50_fpn", 160, opset=13, min_size=160, max_size=160, score_thresh=0.001, detections_per_img=20
    ),
    _torchvision(
        "fasterrcnn_mobilenet_v3_large_320_fpn", 160, opset=16, min_size=160, max_size=160, box_detections_per_img=20
    ),
    _torchvision(
        "fcos_resnet50_fpn", 160, opset=17, min_size=160, max_size=160, score_thresh=0.001, detections_per_img=20
    ),
    _own("ssd-suppressed", _make_ssd, ["boxes", "scores", "kept"], opset=13, packages=["torchvision"]),
    _own("yolo", _make_yolo, ["found"], opset=12),
    _own("yolo-dynamo", _make_yolo, ["found"], opset=18, dynamo=True),
    _own("centernet", _make_centernet, ["scores", "places", "sizes"], opset=13, packages=["torchvision"]),
    _transformer("yolos", "YolosForObjectDetection", "YolosConfig", _YOLOS, 128, opset=17),
    _transformer("rt-detr", "RTDetrForObjectDetection", "RTDetrConfig", _RT_DETR, 128, opset=17),
)
