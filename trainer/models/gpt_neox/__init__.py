"""GPT-NeoX and Pythia: a GPT whose attention and MLP read the same residual stream, side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer.config.sections import GPTNeoXSection, RunConfig
from trainer.models.family import Form, HuggingFace, Json, split_block
from trainer.models.gpt import FAMILY as GPT
from trainer.models.gpt.hf_layers import demand, rope_json, rope_keys, share_of_head
from trainer.models.gpt.huggingface import PLAIN, activation, reverse
from trainer.models.gpt.shape import GPTShape, effective_keys, function_keys, gpt_shape
from trainer.parallel.params import Place

if TYPE_CHECKING:
    import torch

    from trainer.parallel.collectives import Group

_PARALLEL = "gpt_neox.parallel_residual"  # a key of [model]

_DEFAULTS: Json = {
    "vocab_size": 50432, "hidden_size": 6144, "num_hidden_layers": 44, "num_attention_heads": 64,
    "intermediate_size": 24576, "hidden_act": "gelu", "max_position_embeddings": 2048, "layer_norm_eps": 1e-5,
    "tie_word_embeddings": False, "use_parallel_residual": True, "attention_bias": True, "initializer_range": 0.02,
    "rotary_pct": 0.25, "rotary_emb_base": 10000.0,
}  # fmt: skip
_NAMES: Mapping[str, str] = {
    "attention_norm": "input_layernorm",
    "attention.q": "attention.query_key_value",
    "attention.k": "attention.query_key_value",
    "attention.v": "attention.query_key_value",
    "attention.out": "attention.dense",
    "mlp_norm": "post_attention_layernorm",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
    "embedding": "gpt_neox.embed_in",
    "final_norm": "gpt_neox.final_layer_norm",
    "head": "embed_out",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GPTNeoXShape(GPTShape):
    """A GPT's, and whether attention and MLP are side by side."""

    parallel_residual: bool


def shape_of(config: RunConfig, vocab_size: int) -> GPTNeoXShape:
    """The model that a configuration describes."""
    shape = gpt_shape(config, vocab_size)
    same = {field.name: getattr(shape, field.name) for field in dataclasses.fields(shape)}
    return GPTNeoXShape(**same, parallel_residual=_section(config).parallel_residual)


def _section(config: RunConfig) -> GPTNeoXSection:
    return config.model.gpt_neox or GPTNeoXSection()


def _function(shape: GPTNeoXShape) -> dict[str, Any]:
    keys = function_keys(shape)
    return keys | {_PARALLEL: keys.pop("parallel_residual")}


def _effective(config: RunConfig) -> dict[str, Any]:
    return effective_keys(config) | {_PARALLEL: _section(config).parallel_residual}


def _build(
    shape: Any,
    place: Place,
    *,
    groups: Mapping[str, Group],
    dtype: torch.dtype,
    device: torch.device,
    config: RunConfig | None = None,
    allocate: bool = True,
) -> Any:
    from trainer.models.gpt.model import GPT as PlainGPT
    from trainer.models.gpt.model import build_gpt
    from trainer.models.gpt_neox.model import GPTNeoX

    model = GPTNeoX if shape.parallel_residual else PlainGPT
    return build_gpt(
        shape, place, groups=groups, dtype=dtype, device=device, config=config, allocate=allocate, model=model
    )


def _keys(_: str, found: Json, problems: list[str]) -> dict[str, Any]:
    """The keys of [model] for a config.json; it says by other names what part of a head is rotated."""
    demand(found, "attention_bias", True, problems)
    share, rotary = share_of_head(found, found["rotary_pct"], problems)
    plain = {name: value for name, value in rotary.items() if not name.startswith("rotary_")}
    return {
        "num_layers": found["num_hidden_layers"],
        "hidden_size": found["hidden_size"],
        "num_heads": found["num_attention_heads"],
        "ffn_hidden_size": found["intermediate_size"],
        "vocab_size": found["vocab_size"],
        "max_position": found["max_position_embeddings"],
        "position": "rope",
        "rope_fraction": share,
        "norm": "layernorm",
        "norm_epsilon": found["layer_norm_eps"],
        "activation": activation(found["hidden_act"], PLAIN, "hidden_act", problems=problems),
        "bias": True,
        "tie_embeddings": found["tie_word_embeddings"],
        "init_std": found["initializer_range"],
        "gpt_neox": {"parallel_residual": found["use_parallel_residual"]},
        **rope_keys({"rope_theta": found["rotary_emb_base"], **plain}, problems),
    }


def _settings(_: str, keys: Json) -> dict[str, Any]:
    return {
        "num_hidden_layers": keys["num_layers"],
        "hidden_size": keys["hidden_size"],
        "num_attention_heads": keys["num_heads"],
        "intermediate_size": keys["ffn_hidden_size"],
        "max_position_embeddings": keys["max_position"],
        "layer_norm_eps": keys["norm_epsilon"],
        "hidden_act": reverse(PLAIN, keys["activation"], "gelu"),
        "attention_bias": True,
        "use_parallel_residual": keys[_PARALLEL],
        "rotary_pct": keys.get("rope_fraction", 1.0),
        "rotary_emb_base": keys.get("rope_theta", 10000.0),
        **rope_json(keys, share=True),
    }


def _tensor(name: str, size: tuple[int, ...], shape: GPTShape, _: str) -> Form:
    """Theirs has q, k, v of one head after the other in one matrix."""
    block, rest = split_block(name)
    part, kind = rest.rsplit(".", 1)
    theirs = f"{'' if block is None else f'gpt_neox.layers.{block}.'}{_NAMES[part]}.{kind}"
    columns = " column" if len(size) == 2 else ""
    lengths = dict(zip(("row", "column"), size, strict=False))
    if part not in ("attention.q", "attention.k", "attention.v"):
        return Form(theirs, f"row{columns}", f"row{columns}", lengths)
    lengths |= {"head": shape.num_heads, "channel": shape.head_dim}
    slot = {"slot": ("qkv".index(part[-1]), 3)}
    return Form(theirs, f"(head channel){columns}", f"(head slot channel){columns}", lengths, slot)


FAMILY = dataclasses.replace(
    GPT,
    shape=shape_of,
    function=_function,
    effective=_effective,
    build=_build,
    sections=("gpt_neox",),
    hugging_face=HuggingFace(
        architectures={"gpt_neox": "GPTNeoXForCausalLM"},
        defaults={"gpt_neox": _DEFAULTS},
        fitting_type=lambda _: "gpt_neox",
        keys=_keys,
        settings=_settings,
        tensor=_tensor,
        buffers={"gpt_neox": r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"},
    ),
    megatron=None,
)
