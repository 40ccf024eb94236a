"""Input shapes at which the built-in networks are quick to run."""

from __future__ import annotations


def small_shapes(name: str) -> dict[str, list[int]]:
    """Shapes for `input_shapes` of a built-in network. The poolings of a VGG leave one pixel."""
    if name == "bert-tiny":
        return {key: [1, 16] for key in ("input_ids", "attention_mask", "token_type_ids")}
    if name == "resnet-block":
        return {"data": [1, 64, 14, 14]}
    family = name.partition("-")[0]
    special = {"vgg": [3, 32, 32], "resnet3d": [3, 16, 32, 32], "inception_v3": [3, 75, 75], "mlp": [1, 28, 28]}
    return {"data": [1, *special.get(family, [3, 64, 64])]}
