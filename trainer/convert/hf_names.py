"""The tensors of Hugging Face's models as links to ours: one table a family, read in both directions.

Llama, Mistral and Qwen keep q, k, v, gate and up apart, as we do. GPT-2 keeps its matrices transposed (its layers are
Conv1D) and q, k, v side by side in one. Where our pairs of rotary features are neighbours, rows of q and k change their
order: theirs are halves apart. Padding of the vocabulary exists on neither side. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from trainer.convert.links import Link, link
from trainer.models.gpt.params import parameter_table
from trainer.models.gpt.shape import GPTShape
from trainer.parallel.params import Place

_LLAMA: Mapping[str, str] = MappingProxyType(
    {
        "attention_norm": "input_layernorm",
        "attention.q": "self_attn.q_proj",
        "attention.k": "self_attn.k_proj",
        "attention.v": "self_attn.v_proj",
        "attention.out": "self_attn.o_proj",
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
        "mlp_norm": "post_attention_layernorm",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
        "embedding": "model.embed_tokens",
        "final_norm": "model.norm",
        "head": "lm_head",
    }
)
_GPT2: Mapping[str, str] = MappingProxyType(
    {
        "attention_norm": "ln_1",
        "attention.q": "attn.c_attn",
        "attention.k": "attn.c_attn",
        "attention.v": "attn.c_attn",
        "attention.out": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
        "embedding": "wte",
        "positions": "wpe",
        "final_norm": "ln_f",
        "head": "lm_head",
    }
)


def logical_shapes(shape: GPTShape) -> dict[str, tuple[int, ...]]:
    """Every logical tensor of a model with its shape, in the order of the module tree."""
    return {piece.name: piece.shape for spec in parameter_table(shape, Place()) for piece in spec.pieces}


def hf_links(shape: GPTShape, *, model_type: str, state: str = "weight/", bare: bool = False) -> Iterator[Link]:
    """Links between our tensors and those of a Hugging Face folder.

    Args:
        state: before the names of ours. bare: GPT-2 without "transformer." before its names, as published.
    """
    for name, size in logical_shapes(shape).items():
        theirs, part = hf_name(name, model_type=model_type, bare=bare), _split(name.rsplit(".", 1)[0])[1]
        if model_type == "gpt2":
            yield _gpt2_link(state + name, theirs, part, size=size)
        else:
            yield _llama_link(state + name, theirs, part, size=size, shape=shape)


def hf_name(name: str, *, model_type: str, bare: bool = False) -> str:
    """Their name of the tensor that holds one of ours; `bare` as in `hf_links`."""
    base, kind = name.rsplit(".", 1)
    block, part = _split(base)
    if model_type == "gpt2":
        outer = "" if bare or part == "head" else "transformer."
        return f"{outer}{'' if block is None else f'h.{block}.'}{_GPT2[part]}.{kind}"
    return f"{'' if block is None else f'model.layers.{block}.'}{_LLAMA[part]}.{kind}"


def _split(base: str) -> tuple[str | None, str]:
    """ "blocks.3.attention.q" to ("3", "attention.q")."""
    if not base.startswith("blocks."):
        return None, base
    _, number, part = base.split(".", 2)
    return number, part


def _gpt2_link(ours: str, theirs: str, part: str, *, size: tuple[int, ...]) -> Link:
    lengths = dict(zip(("row", "column"), size, strict=False))
    columns = " column" if len(size) == 2 else ""
    stacked = ("attention.q", "attention.k", "attention.v")
    if part in stacked:
        front = "column " if columns else ""
        inside = {"slot": (stacked.index(part), 3)}
        return link((ours, f"row{columns}"), (theirs, f"{front}(slot row)"), lengths=lengths, theirs_in=inside)
    turned = part in ("attention.out", "mlp.up", "mlp.down") and columns
    return link((ours, f"row{columns}"), (theirs, "column row" if turned else f"row{columns}"), lengths=lengths)


def _llama_link(ours: str, theirs: str, part: str, *, size: tuple[int, ...], shape: GPTShape) -> Link:
    lengths = dict(zip(("row", "column"), size, strict=False))
    columns = " column" if len(size) == 2 else ""
    turned = part.rsplit(".", 1)[-1] in ("q", "k", "q_norm", "k_norm")
    if not (turned and shape.position == "rope" and shape.rope.interleaved):
        return link((ours, f"row{columns}"), (theirs, f"row{columns}"), lengths=lengths)
    lengths |= {"head": size[0] // shape.head_dim, "pair": shape.head_dim // 2, "two": 2}
    return link((ours, f"(head pair two){columns}"), (theirs, f"(head two pair){columns}"), lengths=lengths)
