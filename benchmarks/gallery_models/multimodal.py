"""Images and text, and audio: transformers, from small configurations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from gallery_models.entry import GalleryModel
from gallery_models.pytorch import by_name, import_transformers, torch_model

_TOKENS = ("integer", (1, 16))
_MASK = ("mask", (1, 16))
_IMAGE = ("float", (1, 3, 64, 64))
_VISION = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "image_size": 64,
    "patch_size": 16,
}  # fmt: skip
_TEXT = {
    "vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "max_position_embeddings": 32,
}  # fmt: skip
_WHISPER = {
    "vocab_size": 1000, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "max_source_positions": 100,
    "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
_WAV2VEC2 = {
    "vocab_size": 32, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "conv_dim": (32, 32, 32), "conv_kernel": (10, 8, 4), "conv_stride": (5, 4, 2), "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
}  # fmt: skip
_CLIP_PARTS = {"text_config": {**_TEXT, "eos_token_id": 2}, "vision_config": _VISION, "projection_dim": 32}


def _model(
    name: str,
    family: str,
    kind: str,
    configuration: str,
    values: Mapping[str, Any],
    inputs: Mapping[str, tuple[str, Sequence[int]]],
    output: str,
    *,
    part: str = "",
    opset: int = 17,
    dynamo: bool = False,
) -> GalleryModel:
    """An entry for the class `kind` of transformers, or a part of it. `inputs` has each one's kind and shape."""
    return torch_model(
        f"transformers-{name}",
        family,
        partial(_make, kind, configuration, dict(values), dict(inputs), output, part),
        inputs=list(inputs),
        outputs=[output],
        opset=opset,
        dynamo=dynamo,
        packages=["transformers", "torchvision"],
    )


def _make(
    kind: str,
    configuration: str,
    values: dict[str, Any],
    inputs: dict[str, tuple[str, Sequence[int]]],
    output: str,
    part: str,
) -> tuple[Any, Any]:
    transformers = import_transformers()
    import torch

    module = getattr(transformers, kind)(getattr(transformers, configuration)(**values))
    for name in filter(None, part.split(".")):
        module = getattr(module, name)
    make = {
        "float": torch.rand,
        "integer": lambda shape: torch.randint(3, 1000, shape),
        "mask": lambda shape: torch.ones(shape, dtype=torch.int64),
    }
    return by_name(module, tuple(inputs), output), tuple(make[what](shape) for what, shape in inputs.values())


_PIXELS = {"pixel_values": _IMAGE}

MODELS = (
    _model("vit", "vision transformers", "ViTModel", "ViTConfig", _VISION, _PIXELS, "last_hidden_state", opset=14),
    _model("swin", "vision transformers", "SwinModel", "SwinConfig",
           {"image_size": 64, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
           _PIXELS, "last_hidden_state", opset=18, dynamo=True),
    _model("dinov2", "vision transformers", "Dinov2Model", "Dinov2Config", _VISION, _PIXELS, "last_hidden_state"),
    _model("beit", "vision transformers", "BeitModel", "BeitConfig",
           {**_VISION, "use_relative_position_bias": True}, _PIXELS, "last_hidden_state", opset=18, dynamo=True),
    _model("convnextv2", "vision transformers", "ConvNextV2Model", "ConvNextV2Config",
           {"hidden_sizes": [16, 32, 64, 128], "depths": [1, 1, 2, 1]}, _PIXELS, "last_hidden_state"),
    _model("clip", "images and text", "CLIPModel", "CLIPConfig", _CLIP_PARTS,
           {"input_ids": _TOKENS, "pixel_values": _IMAGE, "attention_mask": _MASK}, "logits_per_image", opset=14),
    _model("clip-vision", "images and text", "CLIPVisionModelWithProjection", "CLIPVisionConfig",
           {**_VISION, "projection_dim": 32}, _PIXELS, "image_embeds", opset=18, dynamo=True),
    _model("clip-text", "images and text", "CLIPTextModelWithProjection", "CLIPTextConfig",
           {**_TEXT, "projection_dim": 32, "eos_token_id": 2}, {"input_ids": _TOKENS, "attention_mask": _MASK},
           "text_embeds"),
    _model("siglip", "images and text", "SiglipModel", "SiglipConfig",
           {"text_config": _TEXT, "vision_config": _VISION}, {"input_ids": _TOKENS, "pixel_values": _IMAGE},
           "logits_per_image"),
    _model("whisper-encoder", "audio", "WhisperModel", "WhisperConfig", _WHISPER,
           {"input_features": ("float", (1, 80, 200))}, "last_hidden_state", part="encoder", opset=14),
    _model("whisper-decoder", "audio", "WhisperModel", "WhisperConfig", {**_WHISPER, "use_cache": False},
           {"input_ids": _TOKENS, "encoder_hidden_states": ("float", (1, 100, 64))}, "last_hidden_state",
           part="decoder", opset=18, dynamo=True),
    _model("wav2vec2", "audio", "Wav2Vec2ForCTC", "Wav2Vec2Config", _WAV2VEC2, {"input_values": ("float", (1, 4000))},
           "logits"),
    _model("audio-spectrogram", "audio", "ASTModel", "ASTConfig",
           {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
            "max_length": 128, "num_mel_bins": 64},
           {"input_values": ("float", (1, 128, 64))}, "last_hidden_state", opset=18, dynamo=True),
)  # fmt: skip
