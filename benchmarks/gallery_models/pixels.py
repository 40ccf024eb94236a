"""Networks that answer with an image or a map of it: segmentation, video, super-resolution, style, generators."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

from gallery_models.entry import GalleryModel
from gallery_models.pytorch import Make, import_torchvision, import_transformers, settle, torch_model


def _segmentation(name: str, *, opset: int, dynamo: bool = False, size: int = 128) -> GalleryModel:
    return torch_model(
        f"torchvision-{name}",
        "segmentation",
        partial(_make_segmentation, name, size),
        inputs=["image"],
        opset=opset,
        dynamo=dynamo,
        packages=["torchvision"],
    )


def _video(name: str, shape: tuple[int, ...], *, opset: int, dynamo: bool = False) -> GalleryModel:
    return torch_model(
        f"torchvision-{name}",
        "video",
        partial(_make_video, name, shape),
        inputs=["video"],
        opset=opset,
        dynamo=dynamo,
        packages=["torchvision"],
    )


def _transformers(name: str, make: Make, *, opset: int, dynamo: bool = False) -> GalleryModel:
    return torch_model(
        f"transformers-{name}",
        "segmentation",
        make,
        inputs=["image"],
        opset=opset,
        dynamo=dynamo,
        packages=["transformers", "torchvision"],
    )


def _own(
    name: str,
    family: str,
    build: Callable[[], Any],
    shape: tuple[int, ...],
    *,
    opset: int,
    dynamo: bool = False,
    dynamic: bool = False,
) -> GalleryModel:
    return torch_model(
        name,
        family,
        partial(_make_own, build, shape),
        inputs=["x"],
        opset=opset,
        dynamo=dynamo,
        dynamic={"x": [0, 2, 3]} if dynamic else None,
        input_shapes={"x": shape} if dynamic else None,
    )


def _make_segmentation(name: str, size: int) -> tuple[Any, Any]:
    torchvision = import_torchvision()
    import torch

    class Segmenter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            builder = getattr(torchvision.models.segmentation, name)
            self.segmenter = builder(weights=None, weights_backbone=None, num_classes=5)

        def forward(self, image: Any) -> Any:
            return self.segmenter(image)["out"]

    image = torch.rand(1, 3, size, size)
    return settle(Segmenter().eval(), image), (image,)


def _make_video(name: str, shape: tuple[int, ...]) -> tuple[Any, Any]:
    torchvision = import_torchvision()
    import torch

    video = torch.rand(*shape)
    return settle(getattr(torchvision.models.video, name)(weights=None).eval(), video), (video,)


def _make_own(build: Callable[[], Any], shape: tuple[int, ...]) -> tuple[Any, Any]:
    import torch

    example = torch.rand(*shape)
    return settle(build().eval(), example), (example,)


def _make_segformer() -> tuple[Any, Any]:
    transformers = import_transformers()
    import torch

    class Segmenter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = transformers.SegformerConfig(
                num_labels=5, depths=[1, 1, 1, 1], hidden_sizes=[16, 32, 64, 128], decoder_hidden_size=64
            )
            self.segmenter = transformers.SegformerForSemanticSegmentation(config)

        def forward(self, image: Any) -> Any:
            return self.segmenter(image, return_dict=True)["logits"]

    image = torch.rand(1, 3, 128, 128)
    return settle(Segmenter().eval(), image), (image,)


def _make_depth() -> tuple[Any, Any]:
    transformers = import_transformers()
    import torch

    class Depth(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = transformers.DPTConfig(
                hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=128, image_size=128,
                patch_size=16, backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[16, 32, 64, 64],
                fusion_hidden_size=32,
            )  # fmt: skip
            self.depth = transformers.DPTForDepthEstimation(config)
            for layer in self.depth.modules():  # as it is, nothing is left of the image after some layers
                if isinstance(layer, torch.nn.Conv2d | torch.nn.ConvTranspose2d):
                    torch.nn.init.kaiming_normal_(layer.weight)

        def forward(self, image: Any) -> Any:
            return self.depth(image, return_dict=True)["predicted_depth"]

    return Depth(), (torch.rand(1, 3, 128, 128),)


def _unet(*, transposed: bool) -> Any:
    import torch
    from torch import nn

    def twice(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(),
        )  # fmt: skip

    def up(inputs: int, outputs: int) -> nn.Module:
        if transposed:
            return nn.ConvTranspose2d(inputs, outputs, 2, 2)
        scale = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        return nn.Sequential(scale, nn.Conv2d(inputs, outputs, 1))

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = (16, 32, 64, 128)
            self.down = nn.ModuleList([twice(i, o) for i, o in zip((3, *widths), widths, strict=False)])
            self.up = nn.ModuleList([up(o, i) for i, o in pairwise(widths)])
            self.join = nn.ModuleList([twice(2 * i, i) for i in widths[:-1]])
            self.last = nn.Conv2d(16, 2, 1)

        def forward(self, x: Any) -> Any:
            kept = []
            for level, block in enumerate(self.down):
                x = block(x if level == 0 else nn.functional.max_pool2d(x, 2))
                kept.append(x)
            for level in reversed(range(3)):
                x = self.join[level](torch.cat([self.up[level](x), kept[level]], dim=1))
            return self.last(x)

    return UNet()


def _espcn() -> Any:
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(1, 64, 5, padding=2), nn.Tanh(), nn.Conv2d(64, 32, 3, padding=1), nn.Tanh(),
        nn.Conv2d(32, 9, 3, padding=1), nn.PixelShuffle(3),
    )  # fmt: skip


def _fsrcnn() -> Any:
    from torch import nn

    middle = [part for _ in range(4) for part in (nn.Conv2d(12, 12, 3, padding=1), nn.PReLU(12))]
    return nn.Sequential(
        nn.Conv2d(1, 56, 5, padding=2), nn.PReLU(56), nn.Conv2d(56, 12, 1), nn.PReLU(12), *middle,
        nn.Conv2d(12, 56, 1), nn.PReLU(56), nn.ConvTranspose2d(56, 1, 9, 3, 4, output_padding=2),
    )  # fmt: skip


def _rrdb() -> Any:
    """Dense residual blocks and nearest-neighbour steps, as in ESRGAN."""
    import torch
    from torch import nn

    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = nn.ModuleList([nn.Conv2d(32 + 16 * i, 16 if i < 4 else 32, 3, padding=1) for i in range(5)])

        def forward(self, x: Any) -> Any:
            parts = [x]
            for conv in self.convs[:-1]:
                parts.append(nn.functional.leaky_relu(conv(torch.cat(parts, dim=1)), 0.2))
            return x + 0.2 * self.convs[-1](torch.cat(parts, dim=1))

    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), Dense(), Dense(), nn.Upsample(scale_factor=2), nn.Conv2d(32, 32, 3, padding=1),
        nn.LeakyReLU(0.2), nn.Upsample(scale_factor=2), nn.Conv2d(32, 3, 3, padding=1),
    )  # fmt: skip


def _style(upsampling: bool) -> Any:
    """The transformer of Johnson et al.: reflected borders, instance normalisation, residual blocks."""
    from torch import nn

    def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
        normalised = nn.InstanceNorm2d(outputs, affine=True)
        return [nn.ReflectionPad2d(kernel // 2), nn.Conv2d(inputs, outputs, kernel, stride), normalised]

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(*conv(64, 64, 3), nn.ReLU(), *conv(64, 64, 3))

        def forward(self, x: Any) -> Any:
            return x + self.inner(x)

    def up(inputs: int, outputs: int) -> list[nn.Module]:
        if upsampling:
            return [nn.Upsample(scale_factor=2), *conv(inputs, outputs, 3), nn.ReLU()]
        transposed = nn.ConvTranspose2d(inputs, outputs, 3, 2, 1, output_padding=1)
        return [transposed, nn.InstanceNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(
        *conv(3, 16, 9), nn.ReLU(), *conv(16, 32, 3, 2), nn.ReLU(), *conv(32, 64, 3, 2), nn.ReLU(),
        Residual(), Residual(), *up(64, 32), *up(32, 16), nn.ReflectionPad2d(4), nn.Conv2d(16, 3, 9), nn.Tanh(),
    )  # fmt: skip


def _dcgan() -> Any:
    from torch import nn

    widths = (128, 64, 32)
    middle = [
        part
        for inputs, outputs in pairwise(widths)
        for part in (nn.ConvTranspose2d(inputs, outputs, 4, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())
    ]
    first = (nn.ConvTranspose2d(64, 128, 4, 1, 0, bias=False), nn.BatchNorm2d(128), nn.ReLU())
    return nn.Sequential(*first, *middle, nn.ConvTranspose2d(32, 3, 4, 2, 1, bias=False), nn.Tanh())


def _denoiser() -> Any:
    """A U-Net of diffusion models: group normalisation, SiLU, attention over pixels."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.first = nn.Sequential(nn.GroupNorm(8, inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1))
            self.second = nn.Sequential(nn.GroupNorm(8, outputs), nn.SiLU(), nn.Conv2d(outputs, outputs, 3, padding=1))
            self.skip = nn.Conv2d(inputs, outputs, 1)

        def forward(self, x: Any) -> Any:
            return self.skip(x) + self.second(self.first(x))

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.qkv, self.out = nn.GroupNorm(8, 64), nn.Conv2d(64, 192, 1), nn.Conv2d(64, 64, 1)

        def forward(self, x: Any) -> Any:
            batch, channels, height, width = x.shape
            query, key, value = self.qkv(self.norm(x)).reshape(batch, 3, 4, channels // 4, height * width).unbind(1)
            weights = (query.transpose(-1, -2) @ key * 0.25).softmax(dim=-1)
            return x + self.out((value @ weights.transpose(-1, -2)).reshape(x.shape))

    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.down = nn.Conv2d(4, 32, 3, padding=1), nn.Conv2d(32, 32, 3, 2, 1)
            self.left, self.middle, self.right = Block(32, 32), Block(32, 64), Block(96, 32)
            self.attention, self.last = Attention(), nn.Conv2d(32, 4, 3, padding=1)

        def forward(self, x: Any) -> Any:
            left = self.left(self.first(x))
            middle = self.attention(self.middle(self.down(left)))
            middle = nn.functional.interpolate(middle, scale_factor=2.0, mode="nearest")
            return self.last(self.right(torch.cat([left, middle], dim=1)))

    return Denoiser()


def _warp() -> Any:
    """A spatial transformer: a predicted affine grid, and GridSample."""
    import torch
    from torch import nn

    class Warp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Sequential(nn.Conv2d(3, 16, 5, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
            self.angles = nn.Linear(16, 6)
            self.after = nn.Conv2d(3, 8, 3, padding=1)
            rows, columns = torch.meshgrid(torch.linspace(-1, 1, 64), torch.linspace(-1, 1, 64), indexing="ij")
            self.register_buffer("grid", torch.stack([columns, rows, torch.ones_like(rows)], dim=-1).reshape(1, -1, 3))

        def forward(self, x: Any) -> Any:
            matrix = self.angles(self.features(x)).reshape(-1, 2, 3)
            grid = (self.grid @ matrix.transpose(1, 2)).reshape(-1, 64, 64, 2)
            return self.after(nn.functional.grid_sample(x, grid, align_corners=False))

    return Warp()


MODELS = (
    _segmentation("fcn_resnet50", opset=11),
    _segmentation("deeplabv3_mobilenet_v3_large", opset=13),
    _segmentation("lraspp_mobilenet_v3_large", opset=18, dynamo=True),
    _transformers("segformer", _make_segformer, opset=17),
    _own("unet", "segmentation", partial(_unet, transposed=True), (1, 3, 128, 128), opset=11),
    _own("unet-bilinear", "segmentation", partial(_unet, transposed=False), (1, 3, 128, 128), opset=18, dynamo=True),
    _own("unet-dynamic", "segmentation", partial(_unet, transposed=True), (1, 3, 96, 128), opset=17, dynamic=True),
    _transformers("dpt", _make_depth, opset=18, dynamo=True),
    _video("r2plus1d_18", (1, 3, 8, 64, 64), opset=11),
    _video("mc3_18", (1, 3, 8, 64, 64), opset=18, dynamo=True),
    _video("swin3d_t", (1, 3, 8, 64, 64), opset=17),
    _own("espcn", "images", _espcn, (1, 1, 96, 96), opset=9),
    _own("fsrcnn", "images", _fsrcnn, (1, 1, 64, 64), opset=11),
    _own("esrgan", "images", _rrdb, (1, 3, 48, 48), opset=18, dynamo=True),
    _own("style-transfer", "images", partial(_style, True), (1, 3, 96, 96), opset=11, dynamic=True),
    _own("cyclegan", "images", partial(_style, False), (1, 3, 96, 96), opset=18, dynamo=True),
    _own("dcgan", "images", _dcgan, (1, 64, 1, 1), opset=10),
    _own("denoiser", "images", _denoiser, (1, 4, 32, 32), opset=17),
    _own("denoiser-dynamo", "images", _denoiser, (1, 4, 32, 32), opset=21, dynamo=True),
    _own("spatial-transformer", "images", _warp, (1, 3, 64, 64), opset=16),
)
