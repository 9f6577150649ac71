"""Operations, bytes moved and bytes kept of Mamba-2 and its hybrids, from the shape alone.

Attention counts as a GPT's block without an MLP, MLP and experts as one without attention (models/gpt/cost.py). A mixer
counts its projections, the convolution, and the scan in chunks: of each token and head, products with half of a chunk
of other tokens, and with the state, where it is written and where it is read. A mixer keeps what its first projection
reads and gives, and what the second reads; beside them what the kernels of a GPU keep: the convolution's output, the
scan's, and the steps in fp32. The plain ones keep nothing, because convolution, scan and norm are then computed again
in backward, as they are with selective recomputation. Pure, no torch.
"""

from __future__ import annotations

import dataclasses
import functools

from trainer.config.sections import RecomputeSection
from trainer.layers.recompute_chunks import RecomputedChunk, chunks
from trainer.models.family import StageCost
from trainer.models.gpt.cost import BACKWARD_PRODUCTS, ROUNDED, expert_elements
from trainer.models.gpt.cost import stage_cost as gpt_stage_cost
from trainer.models.gpt.memory import HEAD_CHUNK_TOKENS, expert_rows
from trainer.models.gpt.memory import block_bytes as gpt_block_bytes
from trainer.models.gpt.shape import GPTShape, blocks_with_experts
from trainer.models.mamba.params import parameter_table
from trainer.models.mamba.shape import Kind, MambaShape, kinds
from trainer.parallel.params import Place, num_elements

_SCAN_PASSES = 3.0  # beside forward: the scan again, and its gradient


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Half(GPTShape):
    """A GPT of one block, of which only attention or only the MLP is there."""

    @property
    def kept_sums(self) -> int:
        return 1

    @property
    def in_norms(self) -> int:
        return 1


def _half(shape: MambaShape, kind: Kind) -> _Half:
    same = {field.name: getattr(shape, field.name) for field in dataclasses.fields(GPTShape)} | {"num_layers": 1}
    if kind == "attention":
        return _Half(**(same | {"ffn_hidden_size": 0, "moe": None}))
    moe = None
    if kind == "experts":
        assert shape.moe is not None, "checked"
        moe = dataclasses.replace(shape.moe, layers=(1,))
    return _Half(**(same | {"num_heads": 0, "num_kv_heads": 0, "head_dim": 0, "moe": moe}))


def stage_cost(
    shape: MambaShape,
    place: Place,
    *,
    tokens: int,
    document_lengths: tuple[int, ...],
    element: int,
    recompute: RecomputeSection,
    float8: range = range(0),
) -> StageCost:
    """The cost of one microbatch; see models/gpt/cost.py."""
    blocks = place.blocks(shape.num_layers)
    again = {number for part in _parts(blocks, recompute) if part.again for number in part.blocks}
    inside = dataclasses.replace(place, stage=1, num_stages=3, layers_per_stage=(0, 1, 0))
    cost = functools.partial(
        gpt_stage_cost, tokens=tokens, document_lengths=document_lengths, element=element, recompute=recompute
    )
    ends = dataclasses.replace(place, layers_per_stage=(0,) * place.num_stages)
    costs = [cost(dataclasses.replace(shape, num_layers=0, moe=None), ends)]
    for number in blocks:
        kind, runs = kinds(shape)[number], 1 + (number in again)
        if kind == "mixer":
            costs.append(_mixer_cost(shape, place, tokens=tokens, element=element, runs=runs, float8=number in float8))
            continue
        how = recompute if recompute.mode == "selective" else RecomputeSection(mode="full" if runs == 2 else "none")
        block = cost(_half(shape, kind), inside, recompute=how, float8=range(int(number in float8)))
        # Counted as a whole block's, of two layers; what is sent to experts is most of what they send.
        sent = block.sent_bytes * (1 if kind == "experts" else 0.5)
        costs.append(dataclasses.replace(block, sent_bytes=sent, passes=block.passes / 2))
    names = [field.name for field in dataclasses.fields(StageCost)]
    return StageCost(**{name: sum(getattr(each, name) for each in costs) for name in names})


def _parts(blocks: range, recompute: RecomputeSection) -> list[RecomputedChunk]:
    if recompute.mode != "full":
        return [RecomputedChunk(blocks, False)]
    return chunks(blocks, method=recompute.method, layers=recompute.layers)


def _mixer_cost(shape: MambaShape, place: Place, *, tokens: int, element: int, runs: int, float8: bool) -> StageCost:
    """A mixer that is computed `runs` times before its backward pass."""
    mixer, tp, width = shape.mixer, place.tp_size, shape.hidden_size
    weights = width * (mixer.projected + mixer.inner) / tp
    products = 2 * weights * (runs + BACKWARD_PRODUCTS) * tokens
    norms = 7 * width / (tp if place.sequence_parallel else 1)
    inside = (3 * mixer.convolved + 4 * mixer.inner + mixer.num_heads) / tp
    moved = norms * (runs + 1) + inside * (runs + _SCAN_PASSES)
    if float8:
        moved += ROUNDED * ((width + mixer.inner / tp) * runs + mixer.projected / tp + width)
    sent = 2 * width * (tp - 1) / tp * (runs + 1.5 * 0.6)
    return StageCost(
        product_flops=0.0 if float8 else products,
        float8_flops=products if float8 else 0.0,
        attention_flops=_scan_operations(shape) / tp * (runs + _SCAN_PASSES) * tokens,
        moved_bytes=moved * tokens * element + 8 * weights,
        sent_bytes=sent * tokens * element,
        passes=(1 + runs) / 2,
    )


def _scan_operations(shape: MambaShape) -> float:
    """Of the scan of a token in a forward pass."""
    mixer = shape.mixer
    return mixer.chunk_size * (mixer.of_groups + mixer.inner) + 4.0 * mixer.inner * mixer.state_size


def flops_per_token(shape: MambaShape, document_lengths: tuple[int, ...]) -> int:
    """Operations of forward and backward per token: 6 N, 12 H x A for each attention layer, and 3 scans for each mixer.

    See models/gpt/cost.py for N, H and A; the scan is counted as it is computed, in chunks.
    """
    lookups = shape.max_position * shape.hidden_size if shape.position == "learned" else 0
    lookups += 0 if shape.tie_embeddings else shape.vocab_size * shape.hidden_size
    attended = sum(min(shape.scores.window or length, length) for length in document_lengths) / len(document_lengths)
    pair, of_block = 2 * shape.num_heads * shape.head_dim, kinds(shape)
    attention = 6 * pair * attended * of_block.count("attention")
    scans = 3 * _scan_operations(shape) * of_block.count("mixer")
    return 6 * (active_parameters(shape) - lookups) + round(attention + scans)


def active_parameters(shape: MambaShape) -> int:
    """Elements of all logical tensors without the experts that do not compute a token."""
    total = num_elements(parameter_table(shape, Place()))
    if shape.moe is None:
        return total
    idle = (shape.moe.num_experts - shape.moe.top_k) * expert_elements(shape)
    return total - len(blocks_with_experts(shape)) * idle


def activation_bytes(
    shape: MambaShape,
    place: Place,
    *,
    tokens: int,
    element: int,
    recompute: RecomputeSection,
    cp: int = 1,
    float8: bool = False,
    scan: str = "auto",
) -> int:
    """Peak bytes that one microbatch of a stage holds for backward on one rank; see models/gpt/memory.py.

    Args:
        scan: kernels.scan of the run; "auto" is counted as on a GPU.
    """
    blocks, tp, of_block = place.blocks(shape.num_layers), place.tp_size, kinds(shape)
    hidden_bytes = tokens * shape.hidden_size * element
    stream = hidden_bytes // (tp if place.sequence_parallel else 1)
    of_kind = {
        kind: _kept(shape, place, kind, tokens=tokens, element=element, recompute=recompute, float8=float8, scan=scan)
        for kind in {*of_block}
    }
    inner = {kind: _inner(shape, place, kind, tokens=tokens, element=element) for kind in {*of_block}}
    kept = peak = 0
    for part in _parts(blocks, recompute):
        inside = sum(of_kind[of_block[number]] for number in part.blocks)
        kept += 2 * stream if part.again else inside
        most = max((inner[of_block[number]] for number in part.blocks), default=0)
        peak = max(peak, kept + most + (inside if part.again else 0))
    head = 0
    if place.is_last:
        rows = shape.padded_vocab_size // tp
        head = 2 * stream + 2 * hidden_bytes + min(tokens, HEAD_CHUNK_TOKENS) * rows * element
    return max(peak, kept + head)


def _kept(
    shape: MambaShape,
    place: Place,
    kind: Kind,
    *,
    tokens: int,
    element: int,
    recompute: RecomputeSection,
    float8: bool,
    scan: str,
) -> int:
    """Bytes that a layer keeps unless it is recomputed as a whole."""
    if kind != "mixer":
        return gpt_block_bytes(
            _half(shape, kind),
            place,
            tokens=tokens,
            element=element,
            recompute=recompute,
            float8=float8,
            experts=kind == "experts",
        )
    mine = tokens // place.tp_size if place.sequence_parallel else tokens
    sums = mine * shape.hidden_size * (1 if recompute.mode == "selective" else 2)
    mixer, of_kernels = shape.mixer, 0
    inside = tokens * (mixer.projected + mixer.inner) // place.tp_size
    if scan != "plain" and recompute.mode != "selective":
        steps = 3 * mixer.num_heads + mixer.num_groups  # padded, alone and added up; the norm's factors
        of_kernels = tokens * ((mixer.convolved + mixer.inner) * element + steps * max(element, 4)) // place.tp_size
    return (sums + inside) * element + mine * max(element, 4) + of_kernels


def _inner(shape: MambaShape, place: Place, kind: Kind, *, tokens: int, element: int) -> int:
    """Bytes that the backward pass of a layer needs beside what is kept."""
    tp, wide = place.tp_size, max(element, 4)
    if kind == "mixer":
        mixer = shape.mixer
        states = tokens // mixer.chunk_size * mixer.inner * mixer.state_size
        return (2 * tokens * (mixer.projected + mixer.inner) * element + 2 * states * wide) // tp
    if kind == "attention":
        return 0
    inner = tokens * (shape.ffn_hidden_size // tp) * element
    if kind == "experts" and shape.moe is not None:
        rows = expert_rows(shape.moe, place, tokens)
        inner = rows * (shape.moe.ffn_hidden_size // place.expert_tp[1] + shape.hidden_size) * element
    return inner * (2 if shape.gated else 1)
