"""How a GPT is split over tensor-parallel ranks and pipeline stages, as a table.

`parameter_table` is the one place that says which logical tensor is cut along which dim. Column-parallel tensors
(q, k, v, gate, up and their biases, the vocabulary) are cut by rows, row-parallel ones (attention output, down) by
columns; norms, positions and the biases of row-parallel layers are held by every rank. q, k, v and gate, up are
separate logical tensors that lie in one local parameter, so that a layer is one matrix product. Pure, no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from trainer.config.sections import ModelSection, RunConfig
from trainer.kernels.scores import ScoreShape
from trainer.layers.shapes import GATED, RopeShape
from trainer.parallel.params import ParamSpec, Piece, Place, num_elements, vocabulary_range


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTShape:
    """All numbers and choices that define the function; no layout in it.

    Args:
        vocab_size: rows of the logical embedding. padded_vocab_size: rows over all ranks with padding.
        head_dim: elements of one head; num_heads of them may differ from hidden_size.
        max_position: rows of learned positions; longest sequence.
        bias: of all linear layers, or of the projections to q, k and v only.
        rope_interval: every k-th block does not turn its heads; 0: all turn.
        scores: what attention does to scores, in a block that window_interval does not except.
        window_interval: every k-th block sees everything; 0: none.
        qk_norm: whether the heads of queries and keys are normalized.
        activation_clamp, activation_offset: see MLPShape. logit_softcap: c of c tanh(logit / c); 0: off.
        hidden_dropout: probability in the embedding and in what each block adds.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    padded_vocab_size: int
    max_position: int
    position: Literal["rope", "learned", "alibi", "none"]
    rope: RopeShape = field(default_factory=RopeShape)
    rope_interval: int = 0
    norm: Literal["rmsnorm", "layernorm"]
    norm_epsilon: float
    activation: Literal["swiglu", "geglu", "geglu_tanh", "gelu", "gelu_erf", "relu", "squared_relu"]
    activation_clamp: float = 0.0
    activation_offset: float = 0.0
    bias: bool | Literal["qkv"]
    qk_norm: bool = False
    scores: ScoreShape = field(default_factory=ScoreShape)
    window_interval: int = 0
    logit_softcap: float = 0.0
    hidden_dropout: float = 0.0
    tie_embeddings: bool
    init_std: float

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate beside its up projection."""
        return self.activation in GATED


def parameter_table(shape: GPTShape, place: Place) -> tuple[ParamSpec, ...]:
    """Every parameter that the rank at a place holds, in the order of the module tree."""
    width, std = shape.hidden_size, shape.init_std
    # Each block adds two terms to the residual stream: keep its variance (GPT-2, Radford et al. 2019).
    residual_std = std / (2 * shape.num_layers) ** 0.5
    table = _Table(place)
    if place.is_first or (place.is_last and shape.tie_embeddings):
        ends = ("ends",) if shape.tie_embeddings and place.num_stages > 1 and place.ends_apart else ()
        table.vocabulary("embedding.weight", shape, std, ends=ends)
    if shape.position == "learned" and place.is_first:
        table.whole("positions.weight", (shape.max_position, width), std=std, decay=True)
    for i in place.blocks(shape.num_layers):
        table.block, block = i + 1, f"blocks.{i}"
        table.norm(f"{block}.attention_norm", shape)
        table.heads(f"{block}.attention", shape)
        inner, bias = shape.num_heads * shape.head_dim, shape.bias is True
        table.rows(f"{block}.attention.out", width, inner, std=residual_std, bias=bias)
        table.norm(f"{block}.mlp_norm", shape)
        table.columns(f"{block}.mlp.up", _up(shape), width, std=std, bias=bias)
        table.rows(f"{block}.mlp.down", width, shape.ffn_hidden_size, std=residual_std, bias=bias)
    table.block = shape.num_layers + 1
    if place.is_last:
        table.norm("final_norm", shape)
        if not shape.tie_embeddings:
            table.vocabulary("head.weight", shape, std)
    return tuple(table.specs)


def block_scores(shape: GPTShape, number: int) -> ScoreShape:
    """What attention does to scores in one block, numbered from 0 in the whole model."""
    sees_all = shape.window_interval and (number + 1) % shape.window_interval == 0
    return replace(shape.scores, window=0) if sees_all else shape.scores


def num_parameters(shape: GPTShape) -> int:
    """Elements of all logical tensors: padding and tensor-parallel copies not counted."""
    return num_elements(parameter_table(shape, Place()))


def _up(shape: GPTShape) -> list[tuple[str, int]]:
    names = ("gate", "up") if shape.gated else ("up",)
    return [(name, shape.ffn_hidden_size) for name in names]


class _Table:
    """Appends rows; each method is one way to split.

    Attributes:
        block: number of the block that the next rows belong to.
    """

    def __init__(self, place: Place) -> None:
        self.tp_size, self.tp_rank = place.tp_size, place.tp_rank
        self.partial = ("tp",) if place.sequence_parallel and place.tp_size > 1 else ()
        self.block = 0
        self.specs: list[ParamSpec] = []

    def heads(self, name: str, shape: GPTShape) -> None:
        """What makes queries, keys and values of the residual stream.

        Of fewer key-value heads than ranks, neighbouring ranks hold copies of one, whose gradients are parts: each
        rank's queries ask it for something else.
        """
        q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        width, std, bias = shape.hidden_size, shape.init_std, bool(shape.bias)
        if shape.scores.sinks == "learned":
            self.columns(f"{name}.sink", [("sink", shape.num_heads)], None, std=0.0, bias=False)
        if shape.num_kv_heads < self.tp_size:
            self.columns(f"{name}.q", [("q", q)], width, std=std, bias=bias)
            self.columns(f"{name}.kv", [("k", kv), ("v", kv)], width, parts=shape.num_kv_heads, std=std, bias=bias)
        else:
            self.columns(f"{name}.qkv", [("q", q), ("k", kv), ("v", kv)], width, std=std, bias=bias)
        if shape.qk_norm:
            for part in ("q_norm", "k_norm"):
                # Each rank sees its own heads only.
                self.norm(f"{name}.{part}", shape, width=shape.head_dim, partial=("tp",) if self.tp_size > 1 else ())

    def columns(
        self,
        name: str,
        outputs: Sequence[tuple[str, int]],
        width: int | None,
        *,
        std: float,
        bias: bool,
        parts: int | None = None,
    ) -> None:
        """Outputs cut over tp: each logical [n, width] by rows, one after the other in one local parameter.

        Args:
            width: None: a vector, which is the parameter itself.
            parts: into which the rows are cut; neighbouring ranks hold copies where they are fewer than ranks.
        """
        parent, parts = name.rsplit(".", 1)[0], parts or self.tp_size
        number = self.tp_rank * parts // self.tp_size
        shared = ("kv",) if parts < self.tp_size else ()
        kinds = [(".weight", (width,), std)] if width is not None else [("", (), std)]
        for kind, rest, spread in kinds + ([(".bias", (), 0.0)] if bias else []):
            pieces, row = [], 0
            for logical, rows in outputs:
                part = rows // parts
                pieces.append(
                    Piece(
                        name=f"{parent}.{logical}{kind}",
                        shape=(rows, *rest),
                        start=(number * part, *(0 for _ in rest)),
                        size=(part, *rest),
                        offset=row * math.prod(rest),
                    )
                )
                row += part
            matrix = bool(rest)
            rules = {"std": spread, "decay": matrix, "matrix": matrix, "copies": shared, "partial": shared}
            self._add(f"{name}{kind}", (row, *rest), pieces, **rules)

    def rows(self, name: str, rows: int, inputs: int, *, std: float, bias: bool) -> None:
        """Inputs cut over tp: the logical [rows, inputs] by columns; the bias is added once, after the sum."""
        part = inputs // self.tp_size
        piece = Piece(
            name=f"{name}.weight",
            shape=(rows, inputs),
            start=(0, self.tp_rank * part),
            size=(rows, part),
        )
        self._add(f"{name}.weight", (rows, part), [piece], std=std, decay=True, matrix=True)
        if bias:
            self.whole(f"{name}.bias", (rows,), std=0.0, decay=False)

    def vocabulary(self, name: str, shape: GPTShape, std: float, *, ends: tuple[str, ...] = ()) -> None:
        """Rows cut over tp after padding, which belongs to no logical tensor; shared along the axes of `ends`."""
        rows, width = shape.padded_vocab_size, shape.hidden_size
        first, stop = vocabulary_range(shape.vocab_size, rows, tp_size=self.tp_size, tp_rank=self.tp_rank)
        piece = Piece(name=name, shape=(shape.vocab_size, width), start=(first, 0), size=(stop - first, width))
        self._add(name, (rows // self.tp_size, width), [piece], std=std, decay=True, copies=ends, partial=ends)

    def norm(
        self, name: str, shape: GPTShape, *, width: int | None = None, partial: tuple[str, ...] | None = None
    ) -> None:
        size = (width or shape.hidden_size,)
        self.whole(f"{name}.weight", size, std=0.0, fill=1.0, decay=False, partial=partial)
        if shape.norm == "layernorm":
            self.whole(f"{name}.bias", size, std=0.0, decay=False, partial=partial)

    def whole(
        self,
        name: str,
        size: tuple[int, ...],
        *,
        std: float,
        decay: bool,
        fill: float = 0.0,
        partial: tuple[str, ...] | None = None,
    ) -> None:
        """Held by every rank of tp; its gradients are parts where each rank sees a part of the tokens, or `partial`."""
        piece = Piece(name=name, shape=size, start=tuple(0 for _ in size), size=size)
        rules = {"copies": ("tp",), "partial": self.partial if partial is None else partial}
        self._add(name, size, [piece], std=std, fill=fill, decay=decay, **rules)

    def _add(self, name: str, local: tuple[int, ...], pieces: Sequence[Piece], **rules: Any) -> None:
        spec = ParamSpec(name=name, shape=local, pieces=tuple(pieces), block=self.block, **rules)
        self.specs.append(spec)


VOCABULARY_MULTIPLE = 128  # rows per tp rank, as Megatron's --make-vocab-size-divisible-by


def gpt_shape(config: RunConfig, vocab_size: int) -> GPTShape:
    """The model with every 0 of its section derived."""
    model = config.model
    return GPTShape(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads or model.num_heads,
        head_dim=head_dim(config),
        ffn_hidden_size=ffn_hidden_size(config),
        vocab_size=vocab_size,
        padded_vocab_size=padded_vocab_size(vocab_size, config.mesh.tp),
        max_position=model.max_position or config.train.sequence_length,
        position=model.position,
        rope=_rope_shape(model),
        rope_interval=model.rope_interval,
        norm=model.norm,
        norm_epsilon=model.norm_epsilon,
        activation=model.activation,
        activation_clamp=model.activation_clamp,
        activation_offset=model.activation_offset,
        bias=model.bias,
        qk_norm=model.qk_norm,
        scores=ScoreShape(
            scale=model.attention_scale,
            softcap=model.attention_softcap,
            alibi=model.position == "alibi",
            window=model.window,
            sinks=model.attention_sinks,
            dropout=model.attention_dropout,
        ),
        window_interval=model.window_interval,
        logit_softcap=model.logit_softcap,
        hidden_dropout=model.hidden_dropout,
        tie_embeddings=model.tie_embeddings,
        init_std=model.init_std,
    )


def _rope_shape(model: ModelSection) -> RopeShape:
    return RopeShape(
        theta=model.rope_theta,
        fraction=model.rope_fraction,
        interleaved=model.rope_interleaved,
        scaling=model.rope_scaling,
        factor=model.rope_factor,
        original_length=model.rope_original_length,
        low_freq_factor=model.rope_low_freq_factor,
        high_freq_factor=model.rope_high_freq_factor,
        beta_fast=model.rope_beta_fast,
        beta_slow=model.rope_beta_slow,
    )


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """The smallest multiple of 128 x tp that holds the vocabulary, as Megatron pads."""
    return round_up(vocab_size, VOCABULARY_MULTIPLE * tp)


def flops_per_token(shape: GPTShape, sequence_length: int) -> int:
    """Operations of forward and backward per token: 6 N + 12 L H S (Chowdhery et al. 2022, PaLM, appendix B).

    N counts the parameters that are multiplied: all but the tables that are only looked up (learned
    positions, an untied embedding). L layers, H = heads x head_dim, S = sequence length; the half of the
    attention matrix that a causal mask hides is counted, as is usual, so that figures compare.
    """
    lookups = shape.max_position * shape.hidden_size if shape.position == "learned" else 0
    lookups += 0 if shape.tie_embeddings else shape.vocab_size * shape.hidden_size
    attention = 12 * shape.num_layers * shape.num_heads * shape.head_dim * sequence_length
    return 6 * (num_parameters(shape) - lookups) + attention


def head_dim(config: RunConfig) -> int:
    """Features of one attention head."""
    return config.model.head_dim or config.model.hidden_size // config.model.num_heads


def ffn_hidden_size(config: RunConfig) -> int:
    """4 x hidden; for a gated MLP, which has three matrices, 2/3 of that (Shazeer 2020), rounded up to 64."""
    model = config.model
    if model.ffn_hidden_size:
        return model.ffn_hidden_size
    return round_up(-(-8 * model.hidden_size // 3), 64) if model.activation in GATED else 4 * model.hidden_size


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is at least the value."""
    return -(-value // multiple) * multiple
