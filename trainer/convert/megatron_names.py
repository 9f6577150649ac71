"""Megatron-Core's tensors as links to ours, whole or cut over ranks: one table, read in both directions.

Megatron keeps q, k, v of one key-value group after the other in one matrix, and gate and up as its halves. A shard says
which layers and which part of each tensor a set of names is about: in a torch_dist checkpoint the only one, with layers
stacked along a leading axis; in mp_rank folders one for each rank, with layers that begin at 0. Versions 0 and 1 of
those kept other orders of rows. Padding of the vocabulary exists on their side only. Pure.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from trainer.convert.hf_names import logical_shapes
from trainer.convert.links import Link, Ranges, link
from trainer.models.gpt.shape import GPTShape

_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "attention_norm": "input_layernorm",
        "attention.q": "self_attention.linear_qkv",
        "attention.k": "self_attention.linear_qkv",
        "attention.v": "self_attention.linear_qkv",
        "attention.out": "self_attention.linear_proj",
        "attention.q_norm": "self_attention.q_layernorm",
        "attention.k_norm": "self_attention.k_layernorm",
        "mlp_norm": "pre_mlp_layernorm",
        "mlp.gate": "mlp.linear_fc1",
        "mlp.up": "mlp.linear_fc1",
        "mlp.down": "mlp.linear_fc2",
        "embedding": "embedding.word_embeddings",
        "positions": "embedding.position_embeddings",
        "final_norm": "decoder.final_layernorm",
        "head": "output_layer",
    }
)
# Fused layers hold the norm before them.
_FUSED: Mapping[str, str] = MappingProxyType(
    {"attention_norm": "self_attention.linear_qkv.layer_norm_", "mlp_norm": "mlp.linear_fc1.layer_norm_"}
)
# Names of Megatron-LM before its core: (pattern, what stands for it now).
_OLDER = (
    (r"^language_model\.(encoder|transformer)\.final_layernorm\.", "decoder.final_layernorm."),
    (r"^language_model\.(encoder|transformer)\.layers\.", "decoder.layers."),
    (r"^language_model\.embedding\.", "embedding."),
    (r"^language_model\.output_layer\.", "output_layer."),
    (r"^word_embeddings_for_head\.", "output_layer."),
    (r"^(decoder\.layers\.\d+)\.attention\.", r"\1.self_attention."),
    (r"\.self_attention\.query_key_value\.", ".self_attention.linear_qkv."),
    (r"\.self_attention\.dense\.", ".self_attention.linear_proj."),
    (r"\.post_attention_(layernorm|norm)\.", ".pre_mlp_layernorm."),
    (r"\.input_norm\.", ".input_layernorm."),
    (r"^decoder\.final_norm\.", "decoder.final_layernorm."),
    (r"\.mlp\.dense_h_to_4h\.", ".mlp.linear_fc1."),
    (r"\.mlp\.dense_4h_to_h\.", ".mlp.linear_fc2."),
)
IGNORED = ("_extra_state", "rotary_pos_emb.inv_freq", "rng_state", "rerun_state_machine_state")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What one set of Megatron's names is about.

    Args:
        layers: blocks, by their numbers in the whole model. stacked: along a leading axis; else numbered from 0.
        has_embedding, has_head: whether it holds the first and the last layers' neighbours.
        tied_copy: whether a tied embedding stands under the head's name as well.
        tp_rank, tp_size: which part of each tensor.
        padded_rows: of the vocabulary, over all ranks.
        version: of the order of rows of q, k, v (checkpoint_version).
        fused: whether norms have the names of fused layers.
        prefix: before all names.
    """

    layers: range
    padded_rows: int
    stacked: bool = False
    has_embedding: bool = True
    has_head: bool = True
    tied_copy: bool = False
    tp_rank: int = 0
    tp_size: int = 1
    version: float = 3.0
    fused: bool = False
    prefix: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class _Form:
    """How one of our tensors lies in theirs: both sides' dims, and the axis that tp cuts."""

    ours: str
    theirs: str
    lengths: Mapping[str, int]
    theirs_in: Ranges
    cut: str = ""


def modern_name(name: str) -> str:
    """The name that a tensor of any version has in Megatron-Core."""
    for pattern, new in _OLDER:
        name = re.sub(pattern, new, name)
    return name


def num_rows(tensors: Mapping[str, Any]) -> int:
    """Rows of the embedding among tensors that have a shape; 0: there is none."""
    embedding = tensors.get("embedding.word_embeddings.weight")
    return embedding.shape[0] if embedding is not None and embedding.shape else 0


def is_ignored(name: str) -> bool:
    """Whether a tensor of theirs holds nothing to learn."""
    return any(part in name for part in IGNORED)


def megatron_links(shape: GPTShape, shard: Shard, *, state: str = "weight/", copies: bool = True) -> Iterator[Link]:
    """Links between our tensors and those of a shard.

    Args:
        state: before the names of ours. copies: whether with what other shards hold as well; a reader needs one.
    """
    for name, size in logical_shapes(shape).items():
        base, kind = name.rsplit(".", 1) if not name.endswith(".sink") else (name, "")
        number, part = _split(base)
        first = shard.has_embedding if part in ("embedding", "positions") else shard.has_head
        if number not in shard.layers if number is not None else not first:
            continue
        form = _form(part, size, shape, version=shard.version)
        if copies or form.cut or shard.tp_rank == 0:
            yield _cut(state + name, _their_name(part, kind, number, shard=shard), form, number=number, shard=shard)
    if shard.tied_copy and copies and shape.tie_embeddings:
        form = _form("embedding", (shape.vocab_size, shape.hidden_size), shape, version=shard.version)
        name = f"{shard.prefix}output_layer.weight"
        yield _cut(f"{state}embedding.weight", name, form, number=None, shard=shard)


def _split(base: str) -> tuple[int | None, str]:
    if not base.startswith("blocks."):
        return None, base
    _, number, part = base.split(".", 2)
    return int(number), part


def _their_name(part: str, kind: str, number: int | None, *, shard: Shard) -> str:
    if part == "attention.sink":
        inner = "self_attention.core_attention.softmax_offset"
    elif part in _FUSED and shard.fused:
        inner = f"{_FUSED[part]}{kind}"
    else:
        inner = f"{_NAMES[part]}.{kind}"
    if number is None:
        return shard.prefix + inner
    at = "" if shard.stacked else f"{number - shard.layers.start}."
    return f"{shard.prefix}decoder.layers.{at}{inner}"


def _form(part: str, size: tuple[int, ...], shape: GPTShape, *, version: float) -> _Form:
    columns = " column" if len(size) == 2 else ""
    lengths = dict(zip(("row", "column"), size, strict=False))
    if part in ("attention.q", "attention.k", "attention.v"):
        return _qkv(part, columns, lengths, shape=shape, version=version)
    if part in ("mlp.gate", "mlp.up") and shape.gated:
        half = {"half": (int(part == "mlp.up"), 2)}
        return _Form(f"row{columns}", f"(half row){columns}", lengths, half, "row")
    cut = ""
    if part in ("mlp.up", "embedding", "head", "attention.sink"):
        cut = "row"
    elif part in ("attention.out", "mlp.down") and columns:
        cut = "column"
    return _Form(f"row{columns}", f"row{columns}", lengths, {}, cut)


def _qkv(part: str, columns: str, lengths: dict[str, int], *, shape: GPTShape, version: float) -> _Form:
    groups, each, place = shape.num_kv_heads, shape.num_heads // shape.num_kv_heads, "qkv".index(part[-1])
    lengths |= {"group": groups, "channel": shape.head_dim, "slot": each if part[-1] == "q" else 1}
    ours = f"(group slot channel){columns}"
    if version >= 2:
        first = (0, each, each + 1)[place]
        return _Form(ours, ours, lengths, {"slot": (first, each + 2)}, "group")
    inside = {"part": (place, 3)}
    order = "part group slot channel" if version == 0 else "group slot channel part"
    return _Form(ours, f"({order}){columns}", lengths, inside, "group")


def _cut(ours: str, theirs: str, form: _Form, *, number: int | None, shard: Shard) -> Link:
    """The link of a form for one shard: its layer, its part of the axis that tp cuts, and padding."""
    lengths, theirs_in, ours_in = dict(form.lengths), dict(form.theirs_in), {}
    dims = form.theirs
    if number is not None and shard.stacked:
        dims = f"layer {dims}"
        theirs_in["layer"] = (number - shard.layers.start, len(shard.layers))
    if form.cut:
        whole = lengths[form.cut]
        vocabulary = "embedding" in ours or ours.endswith("head.weight")
        part = (shard.padded_rows if vocabulary else whole) // shard.tp_size
        first = min(shard.tp_rank * part, whole)
        lengths[form.cut] = min(first + part, whole) - first
        ours_in[form.cut] = (first, whole)
        theirs_in[form.cut] = (0, part)
    return link((ours, form.ours), (theirs, dims), lengths=lengths, ours_in=ours_in, theirs_in=theirs_in)
