"""The cost of a microbatch on a GPT stage on one rank: operations, bytes moved, bytes sent. Pure, no torch.

Counts the work of this package's kernels, forward and backward: products of linear layers, causal attention with half
of its scores, and the memory traffic of everything between them. Of experts those count that compute a token. Attention
is counted over the tokens that a layer attends to: its window, and only the document if documents are kept apart.
plan/devices.py converts this to time.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, replace

from trainer.config.sections import RecomputeSection
from trainer.layers.recompute_chunks import chunks
from trainer.models.family import StageCost
from trainer.models.gpt.params import num_parameters
from trainer.models.gpt.shape import GPTShape, blocks_with_experts, kinds, mtp_kind, scores_of
from trainer.parallel.params import Place

BACKWARD_PRODUCTS, BACKWARD_ATTENTION = 2.0, 2.5  # operations of a backward pass, relative to its forward pass
ROUNDED = 2.0  # numbers in 16 bits that are moved to round one to FP8: read, and written with its transpose


@dataclass(frozen=True, slots=True)
class _Forward:
    """One block's forward pass for one token; in FP8 only linear layers are, not routers and experts."""

    products: float
    experts: float  # those of the products that no linear layer computes
    attention: float
    norms: float
    heads: float
    activation: float
    sorted_rows: float  # of experts: moved in each direction beside their products and activation
    inputs: float  # of linear layers
    outputs: float

    @property
    def moved(self) -> float:
        return self.norms + self.heads + self.activation + self.sorted_rows


def stage_cost(
    shape: GPTShape,
    place: Place,
    *,
    tokens: int,
    document_lengths: tuple[int, ...],
    element: int,
    recompute: RecomputeSection,
    float8: range = range(0),
) -> StageCost:
    """The cost of one microbatch.

    Args:
        tokens: of a microbatch on this rank. element: bytes of an activation.
        document_lengths: see `Plan`; (sequence length,): rows are attended to as a whole.
        float8: blocks whose linear layers are computed in FP8.
    """
    blocks = place.blocks(shape.num_layers)
    again = _recomputed(blocks, recompute)
    products = products8 = attention = moved = expert_elements = 0.0
    kind_of = kinds(shape)
    having = [number for number in blocks if kind_of[number].endswith("experts")]
    of_kind = {kind: _forward(shape, place, kind=kind, document_lengths=document_lengths) for kind in {*kind_of}}
    backward = BACKWARD_PRODUCTS if shape.lora is None else 1.0  # frozen weights have no gradient; adapters are small
    for number in blocks:
        forward, runs = of_kind[kind_of[number]], 1 + (number in again)
        if number in float8:
            products += forward.experts * (runs + backward)
            products8 += (forward.products - forward.experts) * (runs + backward)
            moved += ROUNDED * (forward.inputs * runs + forward.outputs)
        else:
            products += forward.products * (runs + backward)
        attention += forward.attention * (runs + BACKWARD_ATTENTION)
        expert_elements += _expert_weights(shape, place, kind_of[number]) * (runs + backward)
        moved += forward.moved * runs + _backward_moved(shape, forward)
        if recompute.mla_up_proj and shape.mla is not None:
            heads, sizes = shape.num_heads / place.tp_size, shape.mla
            products += 2 * sizes.kv_lora_rank * heads * (sizes.qk_nope_head_dim + sizes.v_head_dim)
        if recompute.mode == "selective":
            moved += forward.norms / 2 + forward.activation
    width, e = shape.hidden_size, element
    further = shape.mtp_layers if place.is_last else 0
    again_further = further if recompute.mode == "full" else 0
    experts_further = further if mtp_kind(shape).endswith("experts") else 0
    if further:
        forward = _forward(shape, place, kind=mtp_kind(shape), document_lengths=document_lengths)
        runs, entering = 1 + again_further // further, 2 * width * width / place.tp_size
        products += further * (forward.products + 2 * entering) * (runs + backward)
        attention += further * forward.attention * (runs + BACKWARD_ATTENTION)
        expert_elements += further * _expert_weights(shape, place, mtp_kind(shape)) * (runs + backward)
        moved += further * (forward.moved * runs + _backward_moved(shape, forward))
    # Gradients of weights are accumulated in fp32: read and written once per microbatch.
    of_further = further * _weights(shape, place, mtp_kind(shape))
    weight_bytes = 8.0 * (sum(_weights(shape, place, kind_of[number]) for number in blocks) + of_further)
    if place.is_last:
        rows, heads = shape.padded_vocab_size / place.tp_size, shape.predicted * (1 + further)
        products += 2 * width * rows * (1 + backward) * heads
        moved += 3 * rows * heads  # the loss reads logits, then reads them again and writes their gradient
        weight_bytes += 8 * width * rows
        weight_bytes += 8 * further * 2 * width * width / place.tp_size
    weight_bytes *= shape.lora is None
    runs, every = len(blocks) + further + len(again) + again_further, len(blocks) + further
    of_experts = sum(1 + (i in again) for i in having) + experts_further * (1 + (again_further > 0))
    with_experts = len(having) + experts_further
    return StageCost(
        product_flops=products * tokens,
        float8_flops=products8 * tokens,
        attention_flops=attention * tokens,
        moved_bytes=moved * tokens * e + weight_bytes,
        sent_bytes=(
            _sent(shape, place, runs=runs, blocks=every)
            + _sent_to_experts(shape, place, runs=of_experts, blocks=with_experts)
        )
        * tokens
        * e,
        passes=every + runs,
        expert_elements=expert_elements,
        expert_passes=with_experts + of_experts,
        host_waits=(with_experts + of_experts) * _waits_for_host(shape, place),
    )


def _recomputed(blocks: range, recompute: RecomputeSection) -> set[int]:
    if recompute.mode != "full":
        return set()
    parts = chunks(blocks, method=recompute.method, layers=recompute.layers)
    return {number for part in parts if part.again for number in part.blocks}


def _forward(shape: GPTShape, place: Place, *, kind: str, document_lengths: tuple[int, ...]) -> _Forward:
    tp, width = place.tp_size, shape.hidden_size
    scores = scores_of(shape, kind)
    seen = _seen(scores.window, document_lengths) if scores.causal else sum(document_lengths) / len(document_lengths)
    inner = linear = float(shape.ffn_hidden_size)
    experts = sorted_rows = 0.0
    if shape.moe is not None and kind.endswith("experts"):
        inner, linear = _active_inner(shape), float(shape.moe.shared_ffn_hidden_size)
        experts = 2 * (_matrices(shape, inner - linear) / tp + _router(shape))
        sorted_rows = _sorted_rows(shape, place)
        inner = linear + (inner - linear) * _rows_held(shape, place)
    moved, inputs, outputs = _heads_moved(shape, place)
    return _Forward(
        products=2 * (_active_weights(shape, place, kind) - _whole_weights(shape) * (1 - 1 / _sharers(place))),
        experts=experts,
        attention=4 * seen * shape.num_heads * max(shape.head_dim, shape.value_width) / tp,
        norms=_norms_moved(shape) * width / (tp if place.sequence_parallel else 1),
        heads=moved,
        sorted_rows=sorted_rows,
        activation=(3 if shape.gated else 2) * inner / tp,
        inputs=(width if linear else 0) + inputs + (shape.num_heads * shape.value_width + linear) / tp,
        outputs=(2 if linear else 1) * width + outputs + linear * (2 if shape.gated else 1) / tp,
    )


def _sorted_rows(shape: GPTShape, place: Place) -> float:
    """Numbers moved in each direction, by token, to sort rows by expert and back, and to weigh them.

    Forward copies rows into their order and reads them to add up each token's; backward does so with gradients, and
    sorts the rows once more. Forward weighs what the activation wrote, backward computes it again: 2 and 6 features.
    """
    moe, etp = shape.moe, place.expert_tp[1]
    assert moe is not None, "a block with experts"
    rows = (4 * moe.top_k + 1) * shape.hidden_size * etp / place.tp_size
    return (rows + 4 * moe.top_k * moe.ffn_hidden_size / place.tp_size) * _rows_held(shape, place)


def _rows_held(shape: GPTShape, place: Place) -> float:
    """Rows that a rank moves over those that it computes: gathering holds those of all ranks, or a buffer."""
    moe, ep = shape.moe, place.ep_size
    assert moe is not None, "a block with experts"
    return min(float(ep), moe.buffer or ep) if moe.is_gathered(ep) else 1.0


def _waits_for_host(shape: GPTShape, place: Place) -> bool:
    """Whether the host has to know how many tokens travel to each rank."""
    moe, ep = shape.moe, place.ep_size
    return moe is not None and ep > 1 and not moe.buffer and not moe.is_gathered(ep)


def _active_inner(shape: GPTShape) -> float:
    """Hidden features that a token passes in a block with experts."""
    moe = shape.moe
    assert moe is not None, "a block with experts"
    return float(moe.top_k * moe.ffn_hidden_size + moe.shared_ffn_hidden_size)


def _heads_moved(shape: GPTShape, place: Place) -> tuple[float, float, float]:
    """Numbers between the hidden state and attention: moved by what is no product, read by products, and their results.

    Latent attention copies queries, keys and values to where its kernels read them.
    """
    tp, mla = place.tp_size, shape.mla
    if mla is None:
        heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        normed = 2 * (heads - shape.num_kv_heads * shape.head_dim) if shape.qk_norm else 0
        return (2 * heads + normed) / tp, shape.hidden_size, heads / tp
    latents = (mla.q_lora_rank + mla.kv_lora_rank + mla.qk_rope_head_dim) / _sharers(place)
    up = mla.qk_nope_head_dim + mla.v_head_dim
    widest = max(shape.head_dim, shape.value_width)
    copied = shape.num_heads * (3 * shape.head_dim + up + 2 * widest) / tp
    results = shape.num_heads * (shape.head_dim + up) / tp
    return 4 * latents + copied, (2 if mla.q_lora_rank else 1) * shape.hidden_size + latents, latents + results


def _norms_moved(shape: GPTShape) -> float:
    """Numbers read and written between layers, by feature: sums, norms, factors of what is added."""
    sums = 3 * 2.0  # each reads two and writes one; its norm, in the same pass, only writes
    return sums + shape.in_norms + 2 * shape.out_norms + (4 if shape.residual_multiplier != 1 else 0)


def _backward_moved(shape: GPTShape, forward: _Forward) -> float:
    """Numbers moved by the backward passes of everything between products."""
    activation = forward.activation * (5 / 3 if shape.gated else 3 / 2)
    return forward.norms + forward.heads + forward.sorted_rows + activation


def _weights(shape: GPTShape, place: Place, kind: str) -> float:
    """Elements of a block's matrices on one rank."""
    moe = shape.moe
    if moe is None or not kind.endswith("experts"):
        return _attention_weights(shape, place) + _matrices(shape, shape.ffn_hidden_size) / place.tp_size
    others = _attention_weights(shape, place) + _matrices(shape, moe.shared_ffn_hidden_size) / place.tp_size
    return others + _expert_weights(shape, place, kind) + _router(shape)


def _expert_weights(shape: GPTShape, place: Place, kind: str) -> float:
    """Those of its experts."""
    moe = shape.moe
    if moe is None or not kind.endswith("experts"):
        return 0.0
    return _matrices(shape, moe.num_experts * moe.ffn_hidden_size) / (place.ep_size * place.expert_tp[1])


def _active_weights(shape: GPTShape, place: Place, kind: str) -> float:
    """Those of them that a token is multiplied with."""
    moe = shape.moe
    if moe is None or not kind.endswith("experts"):
        return _weights(shape, place, kind)
    inner = moe.top_k * moe.ffn_hidden_size + moe.shared_ffn_hidden_size
    return _attention_weights(shape, place) + _matrices(shape, inner) / place.tp_size + _router(shape)


def _router(shape: GPTShape) -> float:
    """Elements of a router."""
    return float(shape.hidden_size * shape.moe.num_experts) if shape.moe is not None else 0.0


def _attention_weights(shape: GPTShape, place: Place) -> float:
    width, inner, mla = shape.hidden_size, shape.num_heads * shape.head_dim, shape.mla
    if mla is None:
        return width * (2 * inner + 2 * shape.num_kv_heads * shape.head_dim) / place.tp_size
    divided = (mla.q_lora_rank or width) * inner
    divided += shape.num_heads * mla.kv_lora_rank * (mla.qk_nope_head_dim + mla.v_head_dim)
    divided += shape.num_heads * mla.v_head_dim * width
    return _whole_weights(shape) + divided / place.tp_size


def _matrices(shape: GPTShape, inner: float) -> float:
    """Elements of a feed-forward layer."""
    return shape.hidden_size * inner * (3 if shape.gated else 2)


def _whole_weights(shape: GPTShape) -> int:
    """Those of the matrices that each tp rank has whole: they make latents."""
    mla = shape.mla
    return 0 if mla is None else shape.hidden_size * (mla.q_lora_rank + mla.kv_lora_rank + mla.qk_rope_head_dim)


def _sharers(place: Place) -> int:
    """Ranks that divide the tokens between the parallel linears."""
    return place.tp_size if place.sequence_parallel else 1


def _sent(shape: GPTShape, place: Place, *, runs: int, blocks: int) -> float:
    """Numbers sent over tp per token; in backward the weight's product hides about 40 % of them."""
    width, mla = shape.hidden_size, shape.mla
    entering = width if mla is None else (mla.q_lora_rank or width) + mla.kv_lora_rank + mla.qk_rope_head_dim
    once = (3 * width + entering) * (place.tp_size - 1) / place.tp_size  # gathers, and reductions to shares
    return once * (runs + 1.5 * 0.6 * blocks)


def _sent_to_experts(shape: GPTShape, place: Place, *, runs: int, blocks: int) -> float:
    """Numbers sent over ep per token: to its experts and back, in each pass; see `exchanges_tokens` in shape.py."""
    moe, ep = shape.moe, place.ep_size
    if moe is None or ep == 1:
        return 0.0
    tokens = 1 / place.tp_size if place.sequence_parallel else 1.0
    gathered = ep - 1.0
    if moe.is_gathered(ep):
        return tokens * shape.hidden_size * gathered * (2 * runs + 3 * blocks)
    buffer = moe.buffer or 1.0
    out = min(1.0, buffer * moe.top_k / ep) if moe.buffer else 1 - (1 - 1 / ep) ** moe.top_k  # once for each rank
    back = buffer * moe.top_k / ep
    return tokens * shape.hidden_size * gathered * (out + back) * (runs + blocks)


def flops_per_token(shape: GPTShape, document_lengths: tuple[int, ...]) -> int:
    """Operations of forward and backward per token: 6 N + 12 H x (the sum of A over layers).

    N counts the parameters that are multiplied: all except lookup tables (learned positions, an untied embedding), and
    of experts those that compute a token. H = heads x head_dim; with latent attention, 2 H = heads x (size of a key +
    size of a value). A is the tokens that a layer attends to at most: the sequence length (Chowdhery et al. 2022, PaLM,
    appendix B), the layer's window if that is shorter, or the document if that is shorter still; a mean over
    `document_lengths`, see `Plan`. The half of the attention matrix that a causal mask hides is counted, as is usual,
    so that figures are comparable. Later tokens pass the head once more each. Frozen weights have no gradient: 4 N.
    """
    lookups = shape.max_position * shape.hidden_size if shape.position == "learned" else 0
    lookups += 0 if shape.tie_embeddings else shape.vocab_size * shape.hidden_size
    pair = shape.num_heads * (shape.head_dim + shape.value_width)
    of_blocks = [*kinds(shape), *[mtp_kind(shape)] * shape.mtp_layers]
    windows = Counter(scores_of(shape, kind).window for kind in of_blocks)
    attended = sum(
        layers * sum(_attended(window, length) for length in document_lengths) / len(document_lengths)
        for window, layers in windows.items()
    )
    again = shape.mtp_layers * shape.vocab_size * shape.hidden_size  # the head of later tokens
    frozen = 0 if shape.lora is None else num_parameters(replace(shape, lora=None)) - lookups
    return 6 * (active_parameters(shape) - lookups + again) - 2 * frozen + round(6 * pair * attended)


def active_parameters(shape: GPTShape) -> int:
    """Elements of all logical tensors without the experts that do not compute a token."""
    if shape.moe is None:
        return num_parameters(shape)
    idle = (shape.moe.num_experts - shape.moe.top_k) * expert_elements(shape)
    return num_parameters(shape) - len(blocks_with_experts(shape, further=True)) * idle


def expert_elements(shape: GPTShape) -> int:
    """Elements of one expert."""
    assert shape.moe is not None, "the model has experts"
    each = round(_matrices(shape, shape.moe.ffn_hidden_size))
    if shape.bias is True:
        each += shape.moe.ffn_hidden_size * (2 if shape.gated else 1) + shape.hidden_size
    return each


def _attended(window: int, length: int) -> int:
    """The most tokens that a token of a document attends to in a layer with this window; 0: no window."""
    return min(window or length, length)


@functools.lru_cache(maxsize=256)
def _seen(window: int, document_lengths: tuple[int, ...], /) -> float:
    """The mean number of tokens that a token attends to, without those that the causal mask hides."""
    attended = ((_attended(window, length), length) for length in document_lengths)
    return sum(most * (1 - most / (2 * length)) for most, length in attended) / len(document_lengths)
