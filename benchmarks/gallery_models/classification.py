"""Classifiers of images: torchvision and timm."""

from __future__ import annotations

from functools import partial
from typing import Any

from gallery_models.entry import GalleryModel
from gallery_models.pytorch import import_torchvision, settle, torch_model

_FAMILY = "classification"


def _torchvision(
    name: str, *, size: int = 224, opset: int = 17, dynamo: bool = False, batch: bool = False, **arguments: Any
) -> GalleryModel:
    return torch_model(
        f"torchvision-{name}",
        _FAMILY,
        partial(_make_torchvision, name, size, arguments),
        inputs=["image"],
        opset=opset,
        dynamo=dynamo,
        packages=["torchvision"],
        dynamic={"image": [0]} if batch else None,
        input_shapes={"image": [1, 3, size, size]} if batch else None,
    )


def _timm(name: str, *, size: int = 224, opset: int = 17, dynamo: bool = False, **arguments: Any) -> GalleryModel:
    return torch_model(
        f"timm-{name}",
        _FAMILY,
        partial(_make_timm, name, size, arguments),
        inputs=["image"],
        opset=opset,
        dynamo=dynamo,
        packages=["timm", "torchvision"],
    )


def _make_torchvision(name: str, size: int, arguments: dict[str, Any]) -> tuple[Any, Any]:
    models = import_torchvision().models
    return _with_image(models.get_model(name, weights=None, **arguments), size)


def _make_timm(name: str, size: int, arguments: dict[str, Any]) -> tuple[Any, Any]:
    import_torchvision()
    import timm
    import torch

    module = timm.create_model(name, pretrained=False, exportable=True, **arguments)
    for weight in module.parameters():
        if weight.ndim > 1 and not weight.any():  # a head of zeros says nothing of what comes before it
            torch.nn.init.trunc_normal_(weight, std=0.02)
    return _with_image(module, size)


def _with_image(module: Any, size: int) -> tuple[Any, Any]:
    import torch

    image = torch.rand(1, 3, size, size)
    return settle(module.eval(), image), (image,)


MODELS = (
    _torchvision("alexnet", opset=7),
    _torchvision("vgg11_bn", opset=8),
    _torchvision("resnet18", size=128, opset=9),
    _torchvision("squeezenet1_1", size=128, opset=9),
    _torchvision("mobilenet_v2", size=128, opset=10, batch=True),
    _torchvision("resnext50_32x4d", size=128, opset=11),
    _torchvision("mnasnet0_5", size=128, opset=11),
    _torchvision("shufflenet_v2_x0_5", size=128, opset=11),
    _torchvision("googlenet", size=128, opset=12, aux_logits=False, init_weights=False, transform_input=True),
    _torchvision("inception_v3", size=139, opset=13, aux_logits=False, init_weights=False),
    _torchvision("densenet121", size=128, opset=18, dynamo=True),
    _torchvision("mobilenet_v3_small", size=128, opset=18, dynamo=True, batch=True),
    _torchvision("efficientnet_b0", size=128, opset=20, dynamo=True),
    _torchvision("efficientnet_v2_s", size=128, opset=17),
    _torchvision("regnet_y_400mf", size=128, opset=18, dynamo=True),
    _torchvision("convnext_tiny", size=128, opset=18, dynamo=True),
    _torchvision("swin_t", size=112, opset=17),
    _torchvision("swin_v2_t", size=128, opset=18, dynamo=True),
    _torchvision("maxvit_t", opset=17),
    _timm("vit_tiny_patch16_224", opset=14),
    _timm("deit_tiny_distilled_patch16_224", opset=18, dynamo=True),
    _timm("mobilevit_xxs", size=128, opset=17),
    _timm("levit_128s", opset=13),
    _timm("efficientformer_l1", opset=18, dynamo=True),
    _timm("ghostnet_100", size=128, opset=11),
    _timm("repvgg_a0", size=128, opset=10),
    _timm("xcit_nano_12_p16_224", opset=17),
    _timm("hrnet_w18_small", size=128, opset=11),
    _timm("mobilenetv4_conv_small", size=128, opset=21, dynamo=True),
    _timm("fastvit_t8", size=128, opset=17),
    _timm("poolformer_s12", size=128, opset=16),
    _timm("resmlp_12_224", opset=18, dynamo=True),
    _timm("resnest14d", size=128, opset=12),
)
