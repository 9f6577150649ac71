"""Operations, bytes moved and bytes kept of a T5, from its shape alone.

`tokens` of a microbatch are the encoder's, as train.sequence_length is its length; the decoder's follow from the
lengths of both. Attention of the encoder and cross attention see all tokens of the encoder; that of the decoder is
counted with half of its scores. What a layer moves and keeps is counted as in models/gpt/cost.py and memory.py: scores
that the plain implementation keeps are not counted. Every decoder stage keeps the encoder's output of each microbatch
in progress. Pure, no torch.
"""

from __future__ import annotations

from trainer.config.sections import RecomputeSection
from trainer.layers.recompute_chunks import RecomputedChunk, chunks
from trainer.models.family import StageCost
from trainer.models.gpt.cost import BACKWARD_ATTENTION, BACKWARD_PRODUCTS, ROUNDED
from trainer.models.gpt.memory import HEAD_CHUNK_TOKENS, block_bytes
from trainer.models.t5.shape import T5Shape, kinds, of_stacks
from trainer.parallel.params import Place


def stage_cost(
    shape: T5Shape,
    place: Place,
    *,
    tokens: int,
    document_lengths: tuple[int, ...],
    element: int,
    recompute: RecomputeSection,
    float8: range = range(0),
) -> StageCost:
    """The cost of one microbatch; see models/gpt/cost.py. Each row is one document."""
    blocks, tp, width = place.blocks(shape.num_layers), place.tp_size, shape.hidden_size
    again = {number for part in _parts(shape, place, recompute) if part.again for number in part.blocks}
    products = products8 = attention = moved = weight_bytes = sent = 0.0
    for number in blocks:
        is_decoder = number >= shape.encoder_layers
        runs, mine = 1 + (number in again), _decoder_tokens(shape, tokens) if is_decoder else tokens
        multiplied, weights, between = _products(shape, is_decoder, tokens=tokens, mine=mine)
        if number in float8:
            products8 += multiplied / tp * (runs + BACKWARD_PRODUCTS)
            moved += ROUNDED * mine * 4 * width * (runs + 1)
        else:
            products += multiplied / tp * (runs + BACKWARD_PRODUCTS)
        attention += _attention(shape, is_decoder) * mine / tp * (runs + BACKWARD_ATTENTION)
        between /= tp if place.sequence_parallel else 1
        moved += between * (runs + 1 + (recompute.mode == "selective") / 2)
        weight_bytes += 8.0 * weights / tp
        # A collective before and after each layer, two more of the encoder's output for all decoder blocks of a stage.
        sent += (3 if is_decoder else 2) * width * (tp - 1) / tp * (2 * runs + 3 * 0.6) * mine
    if place.is_last:
        rows, mine = shape.padded_vocab_size / tp, _decoder_tokens(shape, tokens)
        products += 2 * width * rows * (1 + BACKWARD_PRODUCTS) * mine
        moved += 3 * rows * mine
        weight_bytes += 8 * width * rows
    return StageCost(
        product_flops=products,
        float8_flops=products8,
        attention_flops=attention,
        moved_bytes=moved * element + weight_bytes,
        sent_bytes=sent * element,
        passes=2 * len(blocks) + len(again),
    )


def flops_per_token(shape: T5Shape, document_lengths: tuple[int, ...]) -> int:
    """Operations of forward and backward for a sample, divided by the tokens of its encoder row."""
    encoder, decoder, total = shape.encoder_length, shape.decoder_length, 0.0
    for kind in kinds(shape):
        is_decoder = kind == "decoder"
        mine = decoder if is_decoder else encoder
        total += _products(shape, is_decoder, tokens=encoder, mine=mine)[0] + _attention(shape, is_decoder) * mine
    total += 2 * shape.hidden_size * shape.vocab_size * decoder
    return round(3 * total / encoder)


def _products(shape: T5Shape, is_decoder: bool, *, tokens: int, mine: int) -> tuple[float, float, float]:
    """(operations of a block's linear layers, elements of their matrices, numbers moved between them)."""
    width, heads = shape.hidden_size, shape.num_heads * shape.head_dim
    mlp = width * shape.ffn_hidden_size * (3 if shape.gated else 2)
    weights, layers = 4.0 * width * heads + mlp, 2
    operations = 2 * weights * mine
    between = (8 * heads + (3 if shape.gated else 2) * shape.ffn_hidden_size) * mine
    if is_decoder:
        operations += 2 * (2 * width * heads * mine + 2 * width * heads * tokens)
        weights, layers = weights + 4 * width * heads, 3
        between += 2 * heads * (mine + 2 * tokens)
    return operations, weights, between + layers * 4.0 * width * mine


def _attention(shape: T5Shape, is_decoder: bool) -> float:
    """Operations of a block's attention for one of its tokens."""
    heads = shape.num_heads * shape.head_dim
    own = shape.decoder_length / 2 if is_decoder else shape.encoder_length
    return 4.0 * heads * (own + (shape.encoder_length if is_decoder else 0))


def _decoder_tokens(shape: T5Shape, tokens: int) -> int:
    return tokens * shape.decoder_length // shape.encoder_length


def _parts(shape: T5Shape, place: Place, recompute: RecomputeSection) -> list[RecomputedChunk]:
    blocks = place.blocks(shape.num_layers)
    parts = [RecomputedChunk(blocks, False)]
    if recompute.mode == "full":
        parts = chunks(blocks, method=recompute.method, layers=recompute.layers)
    return of_stacks(parts, shape.encoder_layers)


def activation_bytes(
    shape: T5Shape,
    place: Place,
    *,
    tokens: int,
    element: int,
    recompute: RecomputeSection,
    cp: int = 1,
    float8: bool = False,
) -> int:
    """Peak bytes that one microbatch of a stage holds for backward on one rank; see models/gpt/memory.py."""
    blocks, tp, width = place.blocks(shape.num_layers), place.tp_size, shape.hidden_size
    share = tp if place.sequence_parallel else 1
    of_stack = {False: tokens, True: _decoder_tokens(shape, tokens)}
    kept = peak = 0
    has_decoder = blocks.stop > shape.encoder_layers
    # The encoder's output, or on its way through the encoder what the decoder reads first.
    kept += (tokens if has_decoder else of_stack[True]) * width * element // share
    if has_decoder and share > 1:
        kept += tokens * width * element  # gathered, for all decoder blocks
    for part in _parts(shape, place, recompute):
        is_decoder = part.blocks.start >= shape.encoder_layers
        mine = of_stack[is_decoder]
        each = block_bytes(shape, place, tokens=mine, element=element, recompute=recompute, float8=float8)
        each += is_decoder * _cross_bytes(shape, place, tokens=tokens, mine=mine, element=element, recompute=recompute)
        inside = len(part.blocks) * each
        inner = mine * (shape.ffn_hidden_size // tp) * element
        inner *= (2 if shape.gated else 1) + (recompute.mode == "selective")
        kept += 2 * mine * width * element // share if part.again else inside
        peak = max(peak, kept + inner + (inside if part.again else 0))
    head = 0
    if place.is_last:
        mine, rows = of_stack[True], shape.padded_vocab_size // tp
        head = 2 * (mine // share + mine) * width * element + min(mine, HEAD_CHUNK_TOKENS) * rows * element
    return max(peak, kept + head)


def _cross_bytes(
    shape: T5Shape, place: Place, *, tokens: int, mine: int, element: int, recompute: RecomputeSection
) -> int:
    """Bytes that cross attention keeps: a sum, its norm, queries and results, keys and values."""
    tp, share = place.tp_size, place.tp_size if place.sequence_parallel else 1
    heads = shape.num_heads // tp
    sums = mine * shape.hidden_size // share * (1 if recompute.mode == "selective" else 2)
    statistics = mine // share * (1 if shape.norm == "rmsnorm" else 2) + mine * heads
    return (sums + 2 * (mine + tokens) * heads * shape.head_dim) * element + statistics * max(element, 4)
