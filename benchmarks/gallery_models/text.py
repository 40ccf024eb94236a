"""Models of text: transformers, from small configurations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from gallery_models.entry import GalleryModel
from gallery_models.pytorch import by_name, import_transformers, torch_model

_FAMILY = "text"
_TOKENS = 64
_VOCABULARY = 1000
_ENCODER = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 512,
}
_EAGER = {**_ENCODER, "attn_implementation": "eager"}
_DISTILBERT = {"vocab_size": _VOCABULARY, "dim": 128, "n_layers": 2, "n_heads": 4, "hidden_dim": 512}
_DEBERTA = {
    **_ENCODER,
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 32,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
}
_MODERNBERT = {**_ENCODER, "global_attn_every_n_layers": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_MODERNBERT |= {"cls_token_id": 1, "sep_token_id": 2}
_GPT2 = {"vocab_size": _VOCABULARY, "n_positions": 128, "n_embd": 128, "n_layer": 2, "n_head": 4}
_GPT2 |= {"bos_token_id": 1, "eos_token_id": 2}
_DECODER = {**_ENCODER, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_OPT = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 128,
    "word_embed_proj_dim": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "ffn_dim": 512,
    "max_position_embeddings": 128,
}
_QWEN = {**_DECODER, "num_key_value_heads": 2, "head_dim": 32}
_T5 = {"vocab_size": _VOCABULARY, "d_model": 128, "d_ff": 256, "d_kv": 32, "num_layers": 2, "num_heads": 4}
_BART = {
    "vocab_size": _VOCABULARY,
    "d_model": 128,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 256,
    "decoder_ffn_dim": 256,
    "max_position_embeddings": 128,
}
_SEQ2SEQ_INPUTS = ("input_ids", "attention_mask", "decoder_input_ids")


def _model(
    name: str,
    kind: str,
    configuration: str,
    values: Mapping[str, Any],
    *,
    inputs: Sequence[str] = ("input_ids", "attention_mask"),
    output: str = "last_hidden_state",
    part: str = "",
    opset: int = 17,
    dynamo: bool = False,
    dynamic: bool = False,
) -> GalleryModel:
    """An entry for the class `kind` of transformers, or its attribute `part`, called with integers by name."""
    return torch_model(
        f"transformers-{name}",
        _FAMILY,
        partial(_make, kind, configuration, dict(values), tuple(inputs), output, part),
        inputs=inputs,
        outputs=[output],
        opset=opset,
        dynamo=dynamo,
        packages=["transformers", "torchvision"],
        dynamic={name: [0, 1] for name in inputs} if dynamic else None,
        input_shapes={name: [1, _TOKENS] for name in inputs} if dynamic else None,
    )


def _make(
    kind: str, configuration: str, values: dict[str, Any], inputs: tuple[str, ...], output: str, part: str
) -> tuple[Any, Any]:
    transformers = import_transformers()
    import torch

    config = getattr(transformers, configuration)(**values, use_cache=False)
    module = getattr(transformers, kind)(config)
    called = by_name(getattr(module, part) if part else module, inputs, output)
    tokens = torch.randint(3, _VOCABULARY, (1, _TOKENS))
    examples = {
        "input_ids": tokens,
        "decoder_input_ids": tokens,
        "attention_mask": torch.ones(1, _TOKENS, dtype=torch.int64),
        "token_type_ids": torch.zeros(1, _TOKENS, dtype=torch.int64),
    }
    return called, tuple(examples[name] for name in inputs)


_BERT_INPUTS = ("input_ids", "attention_mask", "token_type_ids")

MODELS = (
    _model("bert", "BertModel", "BertConfig", _ENCODER, opset=14, inputs=_BERT_INPUTS),
    _model("bert-dynamic", "BertModel", "BertConfig", _EAGER, opset=12, dynamic=True),
    _model("distilbert", "DistilBertForSequenceClassification", "DistilBertConfig", _DISTILBERT, output="logits"),
    _model("roberta", "RobertaModel", "RobertaConfig", _ENCODER, opset=18, dynamo=True),
    _model("albert", "AlbertModel", "AlbertConfig", {**_ENCODER, "embedding_size": 64}, opset=14),
    _model("electra", "ElectraModel", "ElectraConfig", {**_ENCODER, "embedding_size": 64}, opset=16, dynamic=True),
    _model("mpnet", "MPNetModel", "MPNetConfig", _ENCODER, opset=14),
    _model("deberta-v2", "DebertaV2Model", "DebertaV2Config", _DEBERTA, opset=17),
    _model("modernbert", "ModernBertModel", "ModernBertConfig", _MODERNBERT, opset=18, dynamo=True),
    _model("gpt2", "GPT2LMHeadModel", "GPT2Config", _GPT2, opset=14, output="logits"),
    _model("gpt2-dynamo", "GPT2LMHeadModel", "GPT2Config", _GPT2, opset=20, dynamo=True, output="logits"),
    _model("opt", "OPTForCausalLM", "OPTConfig", _OPT, output="logits"),
    _model("llama", "LlamaForCausalLM", "LlamaConfig", {**_DECODER, "num_key_value_heads": 2}, output="logits"),
    _model("qwen3", "Qwen3ForCausalLM", "Qwen3Config", _QWEN, opset=18, dynamo=True, output="logits"),
    _model("t5-encoder", "T5EncoderModel", "T5Config", _T5, opset=14),
    _model("t5", "T5ForConditionalGeneration", "T5Config", _T5, opset=17, inputs=_SEQ2SEQ_INPUTS, output="logits"),
    _model("bart", "BartModel", "BartConfig", _BART, opset=18, dynamo=True, inputs=_SEQ2SEQ_INPUTS),
)
