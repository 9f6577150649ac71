"""T5 as Megatron-Core has it: its arguments, and the names and forms of its tensors. Blocks are a GPT's. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.models.family import Form, Json, LayerPlace, Megatron, split_block
from trainer.models.gpt import megatron as gpt
from trainer.models.t5.shape import T5Shape

_NAMES: Mapping[str, str] = {
    "cross_norm": "pre_cross_attn_layernorm",
    "cross.q": "cross_attention.linear_q",
    "cross.k": "cross_attention.linear_kv",
    "cross.v": "cross_attention.linear_kv",
    "cross.out": "cross_attention.linear_proj",
    "encoder_norm": "encoder.final_layernorm",
    "encoder_bias": "encoder_relative_pos_emb.relative_attention_bias",
    "decoder_bias": "decoder_relative_pos_emb.relative_attention_bias",
    "head": "lm_head.output_layer",
    "head_bias": "lm_head.output_layer",
}


def tensor(name: str, size: tuple[int, ...], shape: T5Shape, version: float, fused: bool) -> Form:
    """Where one of our tensors is in theirs."""
    part, kind = split_block(name)[1].rsplit(".", 1)
    if part not in _NAMES:
        return gpt.tensor(name, size, shape, version, fused)
    theirs, columns = f"{_NAMES[part]}.{kind}", " column" if len(size) == 2 else ""
    lengths = dict(zip(("row", "column"), size, strict=False))
    if part in ("cross.k", "cross.v"):  # of one head after the other, as q, k and v are
        lengths |= {"head": shape.num_heads, "channel": shape.head_dim}
        order = {True: "head slot channel", False: "slot head channel" if version == 0 else "head channel slot"}
        slot = {"slot": ("kv".index(part[-1]), 2)}
        return Form(theirs, f"(head channel){columns}", f"({order[version >= 2]}){columns}", lengths, slot, "head")
    cut = {"cross.q": "row", "head": "row", "head_bias": "row"}.get(part, "")
    cut = "column" if part in ("cross.out", "encoder_bias", "decoder_bias") and columns else cut
    return Form(theirs, f"row{columns}", f"row{columns}", lengths, {}, cut)


def place(shape: T5Shape, number: int) -> LayerPlace:
    """The stack of a block, and where in it."""
    if number < shape.encoder_layers:
        return LayerPlace("encoder", number, shape.encoder_layers)
    return LayerPlace("decoder", number - shape.encoder_layers, shape.decoder_layers)


def arguments(keys: Json) -> dict[str, Any]:
    """The arguments with which Megatron-LM builds a model with these keys of [model]."""
    encoder, length = keys["t5.encoder_layers"], keys["sequence_length"]
    relative = keys["position"] == "relative"
    written = gpt.arguments(keys) | {
        "model_type": "t5",
        "num_layers": encoder,
        "encoder_num_layers": encoder,
        "decoder_num_layers": keys["num_layers"] - encoder,
        "encoder_seq_length": length,
        "decoder_seq_length": keys.get("decoder_length", length),
    }
    if relative:
        written |= {
            "position_embedding_type": "relative",
            "relative_attention_num_buckets": keys["t5.relative_buckets"],
            "relative_attention_max_distance": keys["t5.relative_distance"],
        }
    return written


_ALIASES: Mapping[str, str] = {
    "embedding.position_embeddings.weight": "position_embeddings.weight",
    "lm_head.output_layer.weight": "output_layer.weight",
    "lm_head.output_layer.bias": "output_layer.bias",
}
MEGATRON = Megatron(arguments=arguments, tensor=tensor, place=place, aliases=_ALIASES)
