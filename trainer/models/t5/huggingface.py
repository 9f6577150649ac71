"""T5 and mT5 of transformers: config.json, and the names of tensors. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trainer.config.sections import RunConfig
from trainer.models.family import Form, HuggingFace, Json, split_block
from trainer.models.gpt.huggingface import activation, reverse
from trainer.models.t5.shape import T5Shape

_T5: Json = {
    "vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_decoder_layers": None,
    "num_heads": 8, "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6, "feed_forward_proj": "relu", "tie_word_embeddings": True, "n_positions": 512,
}  # fmt: skip
_SIZES: Mapping[str, str] = {  # setting -> key of [model]
    "d_model": "hidden_size",
    "d_kv": "head_dim",
    "d_ff": "ffn_hidden_size",
    "num_heads": "num_heads",
    "layer_norm_epsilon": "norm_epsilon",
    "n_positions": "max_position",
}
_RELATIVE = {
    "relative_attention_num_buckets": "relative_buckets",
    "relative_attention_max_distance": "relative_distance",
}
_ACTIVATIONS = {
    "relu": "relu",
    "gated-gelu": "geglu_tanh",
    "gated-silu": "swiglu",
    "gelu": "gelu_erf",
    "gelu_new": "gelu",
}
_OUTSIDE = {
    "embedding": "shared",
    "encoder_norm": "encoder.final_layer_norm",
    "final_norm": "decoder.final_layer_norm",
    "head": "lm_head",
    "encoder_bias": "encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
    "decoder_bias": "decoder.block.0.layer.0.SelfAttention.relative_attention_bias",
}
_ATTENTION = {"q": "q", "k": "k", "v": "v", "out": "o"}


def _keys(kind: str, settings: Json, problems: list[str]) -> dict[str, Any]:
    """T5's output is scaled where head and embedding are tied; transformers 5 keeps that apart. mT5's never is."""
    name, decoder = settings["feed_forward_proj"], settings["num_decoder_layers"] or settings["num_layers"]
    scaled = kind == "t5" and settings.get("scale_decoder_outputs", settings["tie_word_embeddings"])
    return {ours: settings[theirs] for theirs, ours in _SIZES.items()} | {
        "num_layers": settings["num_layers"] + decoder,
        "vocab_size": settings["vocab_size"],
        "position": "relative",
        "norm": "rmsnorm",
        "activation": activation(name, _ACTIVATIONS, "feed_forward_proj", problems=problems),
        "bias": False,
        "attention_scale": 1.0,
        "logit_scale": settings["d_model"] ** -0.5 if scaled else None,
        "tie_embeddings": settings["tie_word_embeddings"],
        "t5": {
            "encoder_layers": settings["num_layers"],
            # transformers begins with padding unless a folder says otherwise.
            "start_token": settings.get("decoder_start_token_id") or settings.get("pad_token_id") or 0,
            "init": "sizes",
            **{ours: settings[theirs] for theirs, ours in _RELATIVE.items()},
        },
    }


def _settings(kind: str, keys: Json) -> dict[str, Any]:
    encoder, width = keys["t5.encoder_layers"], keys["hidden_size"]
    written = {theirs: keys[ours] for theirs, ours in _SIZES.items()}
    written |= {theirs: keys.get(f"t5.{ours}", _T5[theirs]) for theirs, ours in _RELATIVE.items()}
    written |= {"num_layers": encoder, "num_decoder_layers": keys["num_layers"] - encoder}
    written["feed_forward_proj"] = reverse(_ACTIVATIONS, keys["activation"], "relu")
    if kind == "t5":
        written["scale_decoder_outputs"] = math.isclose(keys["logit_scale"], width**-0.5, rel_tol=1e-6)
    return written | {"is_encoder_decoder": True, "dropout_rate": 0.0}


def _tensor(name: str, size: tuple[int, ...], shape: T5Shape, _: str) -> Form:
    block, rest = split_block(name)
    part, kind = rest.rsplit(".", 1)
    columns = " column" if len(size) == 2 else ""
    lengths = dict(zip(("row", "column"), size, strict=False))
    theirs = _OUTSIDE.get(part) if block is None else _in_block(block, part, shape)
    # What transformers has no place for is refused by the configuration; its name is only looked up.
    return Form(f"{theirs or part}.{kind}", f"row{columns}", f"row{columns}", lengths)


def _in_block(number: int, part: str, shape: T5Shape) -> str:
    is_decoder = number >= shape.encoder_layers
    at = f"decoder.block.{number - shape.encoder_layers}" if is_decoder else f"encoder.block.{number}"
    layer, _, inner = part.partition(".")
    place = {"attention": 0, "attention_norm": 0, "cross": 1, "cross_norm": 1}.get(layer, 2 if is_decoder else 1)
    if not inner:
        return f"{at}.layer.{place}.layer_norm"
    if layer == "mlp":
        names = {"gate": "wi_0", "up": "wi_1" if shape.gated else "wi", "down": "wo"}
        return f"{at}.layer.{place}.DenseReluDense.{names[inner]}"
    return f"{at}.layer.{place}.{'EncDecAttention' if layer == 'cross' else 'SelfAttention'}.{_ATTENTION[inner]}"


def _fitting_type(_: RunConfig) -> str:
    return "t5"


HUGGING_FACE = HuggingFace(
    architectures={"t5": "T5ForConditionalGeneration", "mt5": "MT5ForConditionalGeneration"},
    defaults={"t5": _T5, "mt5": {**_T5, "vocab_size": 250112, "d_ff": 1024, "num_layers": 8, "num_heads": 6,
                                 "feed_forward_proj": "gated-gelu"}},
    nullable=("num_decoder_layers",),
    ties_by_presence=True,
    auto_class=lambda _: "AutoModelForSeq2SeqLM",
    fitting_type=_fitting_type,
    keys=_keys,
    settings=_settings,
    tensor=_tensor,
    # Copies of the embedding, and a table that no version used.
    buffers=dict.fromkeys(("t5", "mt5"), r"(en|de)coder\.embed_tokens\.weight"
                          r"|decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"),
)  # fmt: skip
