"""The bytes that a GPT keeps for backward, from its shape alone.

Counts what the layers of this package save: the inputs of linear layers (under sequence parallelism only this rank's
tokens), sums and statistics of norms, heads as attention reads them with its output and the log of each softmax's sum,
and inputs and outputs of the nonlinearity. Scores, which the plain implementation of attention options keeps, are not
counted. Within 1.5 % of what an H200 held (docs/design/parallel.md). A rank to which tokens are sent for its experts is
taken to compute IMBALANCE times its equal share of them, or has buffers of the size that is set. Pure, no torch.
"""

from __future__ import annotations

import functools

from trainer.config.sections import RecomputeSection
from trainer.layers.recompute_chunks import RecomputedChunk, chunks
from trainer.layers.shapes import LatentShape, MoEShape
from trainer.models.gpt.shape import GPTShape, kinds, mtp_kind
from trainer.parallel.params import Place

IMBALANCE = 1.25  # the load of the busiest rank over the mean
HEAD_CHUNK_TOKENS = 2048  # tokens whose logits exist at the same time, as in layers/head.py


def activation_bytes(
    shape: GPTShape,
    place: Place,
    *,
    tokens: int,
    element: int,
    recompute: RecomputeSection,
    cp: int = 1,
    float8: bool = False,
) -> int:
    """Peak bytes that one microbatch of a stage holds for backward on one rank.

    Args:
        tokens: of a microbatch on this rank. element: bytes of an activation. cp: ranks that share its rows.
        float8: whether all blocks are computed in FP8.
    """
    blocks, hidden_bytes = place.blocks(shape.num_layers), tokens * shape.hidden_size * element
    stream = hidden_bytes // (place.tp_size if place.sequence_parallel else 1)
    how = functools.partial(
        block_bytes, shape, place, tokens=tokens, element=element, recompute=recompute, cp=cp, float8=float8
    )
    of_kind = {kind: how(experts=kind.endswith("experts")) for kind in {*kinds(shape)}}  # a window changes nothing
    of_block = [of_kind[kind] for kind in kinds(shape)]
    parts = [RecomputedChunk(blocks, False)]
    if recompute.mode == "full":
        parts = chunks(blocks, method=recompute.method, layers=recompute.layers)
    inner = tokens * (shape.ffn_hidden_size // place.tp_size) * element
    if shape.moe is not None:  # of the experts' rows also their input and its gradient
        rows = expert_rows(shape.moe, place, tokens)
        of_experts = rows * (shape.moe.ffn_hidden_size // place.expert_tp[1]) * element
        inner = max(inner, of_experts + rows * shape.hidden_size * element)
    inner *= (2 if shape.gated else 1) + (recompute.mode == "selective")  # of a nonlinearity's backward pass
    if float8:  # the gradient of the first projection, rounded, with its transpose
        linear = max(_linear_inner(shape, kind.endswith("experts")) for kind in of_kind)
        inner += 2 * tokens * (linear // place.tp_size) * (2 if shape.gated else 1)
    kept = peak = 0
    for part in parts:
        inside = sum(of_block[number] for number in part.blocks)
        kept += 2 * stream if part.again else inside
        peak = max(peak, kept + inner + (inside if part.again else 0))
    head = 0
    if place.is_last:
        rows = shape.padded_vocab_size // place.tp_size
        head = 2 * stream + 2 * hidden_bytes + min(round(tokens * shape.predicted), HEAD_CHUNK_TOKENS) * rows * element
        # A further block keeps embeddings, both norms' results side by side, hidden states and the head's gradient.
        again = recompute.mode == "full"
        block = how(experts=mtp_kind(shape).endswith("experts"))
        kept += shape.mtp_layers * (3 * stream if again else block + 6 * stream)
        peak = max(peak, kept + block + inner) if again and shape.mtp_layers else peak
    return max(peak, kept + head)


def block_bytes(
    shape: GPTShape,
    place: Place,
    *,
    tokens: int,
    element: int,
    recompute: RecomputeSection,
    cp: int = 1,
    float8: bool = False,
    experts: bool = False,
) -> int:
    """Bytes that one block keeps unless it is recomputed as a whole; keys and values are those of whole rows.

    Args:
        experts: whether it has experts, of which tokens are kept once, and hidden features for each expert of a token.
    """
    tp, wide = place.tp_size, max(element, 4)
    mine = tokens // tp if place.sequence_parallel else tokens
    heads, groups = shape.num_heads // tp, max(1, shape.num_kv_heads // tp)
    inner = shape.ffn_hidden_size // tp
    routing = 0
    if experts and shape.moe is not None:
        moe = shape.moe
        rows = expert_rows(moe, place, tokens)
        # Of a token of this rank, as if all its slots were computed here.
        inner = rows * (moe.ffn_hidden_size // place.expert_tp[1]) // tokens + moe.shared_ffn_hidden_size // tp
        # Logits, scores and their shares in fp32; of slots their weights, places, and whose they are.
        routing = mine * 4 * moe.num_experts * wide + rows * (2 * wide + 5 * 8)
        if not moe.is_gathered(place.ep_size):  # received tokens: one for each rank that has experts of it
            received = min(rows, place.ep_size * _shared_tokens(place, tokens))
            routing += received * shape.hidden_size * element
        routing += mine * shape.hidden_size * element if moe.shared_gate else 0
    sums = mine * shape.hidden_size * (shape.kept_sums + shape.out_norms)
    inside = tokens * inner * (2 if shape.gated else 1)
    if shape.lora:  # what the first of an adapter's two products gives
        inside += tokens * shape.lora.rank * len(shape.lora.targets)
    if shape.mla is None:
        inside += tokens * (2 * heads + 2 * groups * cp) * shape.head_dim
    else:
        inside += _latent_inside(
            shape, shape.mla, tokens=tokens, mine=mine, heads=heads, cp=cp, keys_again=recompute.mla_up_proj
        )
    cheap = mine * shape.hidden_size * shape.in_norms + tokens * inner
    statistics = mine * (shape.in_norms + shape.out_norms)
    if shape.mla:
        statistics += mine * (2 if shape.mla.q_lora_rank else 1)
    elif shape.qk_norm:  # values are part of the projection's output, which is kept
        copied = shape.qk_norm is True or (shape.qk_norm == "all_heads" and tp == 1)
        inside += tokens * (heads + groups) * shape.head_dim * (1 + copied)
        statistics += tokens * (2 if shape.qk_norm == "all_heads" else heads + groups)
    statistics = statistics * (1 if shape.norm == "rmsnorm" else 2) + tokens * heads
    kept = 0 if recompute.mode == "selective" else cheap * element
    if float8 and recompute.mode != "selective" and shape.lora is None:  # adapters read the unrounded input
        # Inputs of linear layers rounded to one byte, that of attention's projection beside attention's own copy.
        linear = _linear_inner(shape, experts) // tp
        first = mine * shape.hidden_size * (element if place.sequence_parallel else 1)
        kept = first * (1 if experts and not linear else 2) + tokens * (linear + heads * shape.value_width)
        if experts:  # they and the router keep theirs as they are
            kept += (mine * shape.hidden_size + tokens * (inner - linear)) * element
    return (sums + inside) * element + kept + statistics * wide + routing


def _linear_inner(shape: GPTShape, experts: bool) -> int:
    """Hidden features of a block's linear layers, which experts are not."""
    return shape.moe.shared_ffn_hidden_size if experts and shape.moe is not None else shape.ffn_hidden_size


def _latent_inside(
    shape: GPTShape, mla: LatentShape, *, tokens: int, mine: int, heads: int, cp: int, keys_again: bool
) -> int:
    """Numbers that latent attention keeps: latents before and behind their norms, and heads as its kernels read them.

    With heads of two widths the result is kept twice: as wide as the kernel gives it, and without the padding.
    """
    widest = max(shape.head_dim, mla.v_head_dim)
    latents = mine * (2 * mla.q_lora_rank + mla.kv_lora_rank) + tokens * cp * mla.kv_lora_rank
    narrow = mla.v_head_dim if mla.v_head_dim < widest else 0
    keys = mla.kv_lora_rank + mla.qk_rope_head_dim if keys_again else heads * 2 * widest
    return latents + tokens * heads * (2 * widest + narrow) + tokens * cp * keys


def expert_rows(moe: MoEShape, place: Place, tokens: int) -> int:
    """Slots that a rank computes, or has rows for, of a microbatch; see `exchanges_tokens` in shape.py.

    Where tokens are gathered, there are rows for the largest possible load, unless buffers have a size.
    """
    shared = _shared_tokens(place, tokens)
    if place.ep_size == 1:
        return shared * moe.top_k
    if not moe.is_gathered(place.ep_size):
        most = moe.num_experts // place.ep_size  # slots of a token for one rank
        return round(shared * min(place.ep_size * min(moe.top_k, most), (moe.buffer or IMBALANCE) * moe.top_k))
    largest = shared * place.ep_size * min(moe.top_k, moe.num_experts // place.ep_size)
    return min(largest, round(moe.buffer * shared * moe.top_k)) if moe.buffer else largest


def _shared_tokens(place: Place, tokens: int) -> int:
    """Tokens of the ranks that share each expert."""
    return tokens // place.tp_size * place.expert_tp[1] if place.sequence_parallel else tokens
