"""How a GPT is divided over tensor-parallel ranks and pipeline stages, as a table.

Only `parameter_table` says which logical tensor is divided along which dim. Column-parallel tensors (q, k, v, gate, up
and their biases, the vocabulary) are divided by rows, row-parallel ones (attention output, down) by columns; norms,
positions and the biases of row-parallel layers are held by every rank. q, k, v and gate, up are separate logical
tensors in one local parameter, so that a layer is one matrix product. Pure, no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from trainer.layers.shapes import LatentShape
from trainer.models.gpt.shape import GPTShape, mtp_kind
from trainer.parallel.params import ParamSpec, Piece, Place, ShardAxis, num_elements, vocabulary_range, with_adapters


def parameter_table(shape: GPTShape, place: Place) -> tuple[ParamSpec, ...]:
    """Every parameter of the rank at a place, in the order of the module tree."""

    def add_block(table: Table, number: int, residual_std: float) -> None:
        has_experts = shape.moe is not None and shape.moe.has_experts(number)
        table.attention_and_mlp(f"blocks.{number}", shape, residual_std=residual_std, experts=has_experts)

    return stage_table(shape, place, add_block)


def stage_table(
    shape: GPTShape, place: Place, add_block: Callable[[Table, int, float], None], *, terms: int = 2
) -> tuple[ParamSpec, ...]:
    """The same of a model with other blocks.

    Args:
        add_block: appends the parameters of one: (table, number, std of what adds to the residual stream).
        terms: that each block adds to it.
    """
    width, std = shape.hidden_size, shape.init_std
    # Keep the variance of the residual stream (GPT-2, Radford et al. 2019).
    residual_std = std / (terms * max(1, shape.num_layers)) ** 0.5  # without layers: only counted, never drawn
    table = Table(place)
    if place.is_first or (place.is_last and shape.embeds_last):
        apart = place.num_stages > 1 and place.ends_apart
        if not place.is_first:
            table.block = shape.num_layers + 1
        again = shape.num_layers + 1 if shape.embeds_last and place.is_first and not apart else None
        ends = ("ends",) if shape.embeds_last and apart else ()
        table.vocabulary("embedding.weight", shape, std, ends=ends, again=again)
    if shape.position == "learned" and place.is_first:
        table.whole("positions.weight", (shape.max_position, width), std=std, decay=True)
    for i in place.blocks(shape.num_layers):
        table.block = i + 1
        add_block(table, i, residual_std)
    table.block = shape.num_layers + 1
    if place.is_last:
        table.norm("final_norm", shape)
        if not shape.tie_embeddings:
            table.vocabulary("head.weight", shape, std)
        for depth in range(shape.mtp_layers):
            table.further(f"mtp.{depth}", shape, residual_std=residual_std)
    if lora := shape.lora:
        rank, targets, saved = lora.rank, lora.targets, lora.saved
        return tuple(with_adapters(table.specs, rank=rank, targets=targets, saved=saved, tp_size=place.tp_size))
    return tuple(table.specs)


def buffer_table(shape: GPTShape, place: Place) -> tuple[ParamSpec, ...]:
    """The biases that balance experts."""
    table, moe = Table(place), shape.moe
    if moe is None or not moe.expert_bias:
        return ()
    blocks = {f"blocks.{i}": i + 1 for i in place.blocks(shape.num_layers) if moe.has_experts(i)}
    if place.is_last and mtp_kind(shape).endswith("experts"):
        blocks |= {f"mtp.{depth}.block": shape.num_layers + 1 for depth in range(shape.mtp_layers)}
    for block, table.block in blocks.items():
        table.whole(f"{block}.mlp.router.expert_bias", (moe.num_experts,), std=0.0, decay=False, partial=())
    return tuple(table.specs)


def num_parameters(shape: GPTShape) -> int:
    """Elements of all logical tensors, without padding and tensor-parallel copies."""
    return num_elements(parameter_table(shape, Place()))


def _up(shape: GPTShape, inner: int) -> list[tuple[str, int]]:
    names = ("gate", "up") if shape.gated else ("up",)
    return [(name, inner) for name in names]


class Table:
    """Appends rows to the table; each method is one way to divide a tensor.

    Attributes:
        block: number of the block that the next rows belong to.
    """

    def __init__(self, place: Place) -> None:
        self.tp_size, self.tp_rank, self.place = place.tp_size, place.tp_rank, place
        self.partial = ("tp",) if place.sequence_parallel and place.tp_size > 1 else ()
        self.block = 0
        self.specs: list[ParamSpec] = []

    def attention_and_mlp(self, block: str, shape: GPTShape, *, residual_std: float, experts: bool = False) -> None:
        """A block of a GPT."""
        self.attention(block, shape, residual_std=residual_std)
        self.mlp(block, shape, residual_std=residual_std, experts=experts)

    def attention(self, block: str, shape: GPTShape, *, residual_std: float) -> None:
        """Attention and its norms."""
        width, inner, bias = shape.hidden_size, shape.num_heads * shape.head_dim, shape.bias is True
        if shape.in_norms:
            self.norm(f"{block}.attention_norm", shape)
        if shape.mla:
            inner = shape.num_heads * shape.mla.v_head_dim
            self.latent_heads(f"{block}.attention", shape, shape.mla)
        else:
            self.heads(f"{block}.attention", shape)
        self.rows(f"{block}.attention.out", width, inner, std=residual_std, bias=bias)
        if shape.out_norms:
            self.norm(f"{block}.attention_out_norm", shape)

    def mlp(self, block: str, shape: GPTShape, *, residual_std: float, experts: bool) -> None:
        """A feed-forward layer, or experts, and its norms."""
        width, bias = shape.hidden_size, shape.bias is True
        if shape.in_norms == 2:
            self.norm(f"{block}.mlp_norm", shape)
        if experts:
            self.experts(f"{block}.mlp", shape, residual_std=residual_std)
        else:
            self.columns(f"{block}.mlp.up", _up(shape, shape.ffn_hidden_size), width, std=shape.init_std, bias=bias)
            self.rows(f"{block}.mlp.down", width, shape.ffn_hidden_size, std=residual_std, bias=bias)
        if shape.out_norms:
            self.norm(f"{block}.mlp_out_norm", shape)

    def further(self, name: str, shape: GPTShape, *, residual_std: float) -> None:
        """A further block, which predicts a later token, and what it reads."""
        width = shape.hidden_size
        for norm in ("embedding_norm", "hidden_norm"):
            self.norm(f"{name}.{norm}", shape)
        self.columns(f"{name}.project", [("project", width)], 2 * width, std=shape.init_std, bias=False)
        experts = mtp_kind(shape).endswith("experts")
        self.attention_and_mlp(f"{name}.block", shape, residual_std=residual_std, experts=experts)
        self.norm(f"{name}.final_norm", shape)

    def experts(self, name: str, shape: GPTShape, *, residual_std: float) -> None:
        """A router, experts that are divided over ep, and each over etp, and the expert of every token over tp."""
        moe, width, std, bias = shape.moe, shape.hidden_size, shape.init_std, shape.bias is True
        assert moe is not None, "a block with experts"
        etp_rank, etp_size = self.place.expert_tp
        count, part = moe.num_experts, moe.ffn_hidden_size // etp_size
        mine = count // self.place.ep_size
        first = self.place.ep_rank * mine
        self.whole(f"{name}.router.weight", (count, width), std=std, decay=True)
        if bias:
            self.whole(f"{name}.router.bias", (count,), std=std, decay=False)  # not 0, as in Megatron
        names, inside = [half for half, _ in _up(shape, part)], f"{name}.experts"
        for kind, rest, spread in ((".weight", (width,), std), (".bias", (), 0.0))[: 1 + bias]:
            pieces = [
                Piece(
                    name=f"{inside}.{half}{kind}",
                    shape=(count, moe.ffn_hidden_size, *rest),
                    start=(first + expert, etp_rank * part, *(0 for _ in rest)),
                    size=(1, part, *rest),
                    offset=(expert * len(names) + number) * part * math.prod(rest),
                )
                for expert in range(mine)
                for number, half in enumerate(names)
            ]
            local, is_weight = (mine, len(names) * part, *rest), bool(rest)
            own = f"{inside}.up" if is_weight else f"{inside}.up_bias"
            self._add(own, local, pieces, std=spread, decay=is_weight, matrix=is_weight, shard="edp")
        piece = Piece(
            name=f"{inside}.down.weight",
            shape=(count, width, moe.ffn_hidden_size),
            start=(first, 0, etp_rank * part),
            size=(mine, width, part),
        )
        local = (mine, width, part)
        self._add(f"{inside}.down", local, [piece], std=residual_std, decay=True, matrix=True, shard="edp")
        if bias:  # added by one of the ranks whose results are summed
            copies = ("etp",)
            logical = Piece(name=f"{inside}.down.bias", shape=(count, width), start=(first, 0), size=(mine, width))
            self._add(
                f"{inside}.down_bias",
                (mine, width),
                [logical],
                std=0.0,
                decay=False,
                copies=copies,
                partial=copies if etp_size > 1 else (),
                shard="edp",
            )
        if moe.shared_ffn_hidden_size:
            inner = moe.shared_ffn_hidden_size
            self.columns(f"{name}.shared.up", _up(shape, inner), width, std=std, bias=bias)
            self.rows(f"{name}.shared.down", width, inner, std=residual_std, bias=bias)
            if moe.shared_gate:
                self.whole(f"{name}.shared_gate.weight", (1, width), std=std, decay=True)

    def heads(self, name: str, shape: GPTShape) -> None:
        """The projections to queries, keys and values.

        If there are fewer key-value heads than ranks, neighbouring ranks hold copies of one; their gradients are
        partial sums, because each rank has other queries.
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
        fill = 0.0 if shape.norm_zero_centered else 1.0
        if shape.qk_norm in ("own_head", "all_heads"):  # divided as the heads are
            for part, rows, parts in (("q_norm", q, None), ("k_norm", kv, min(shape.num_kv_heads, self.tp_size))):
                weight = f"{name}.{part}.weight"
                self.columns(weight, [("weight", rows)], None, parts=parts, std=0.0, bias=False, fill=fill)
        elif shape.qk_norm:
            for part in ("q_norm", "k_norm"):
                # Each rank sees only its own heads.
                self.norm(f"{name}.{part}", shape, width=shape.head_dim, partial=("tp",) if self.tp_size > 1 else ())

    def latent_heads(self, name: str, shape: GPTShape, mla: LatentShape) -> None:
        """The projections of latent attention: to latents, which every rank has whole, and from these to heads.

        The rotated features of keys are made of the second latent's matrix and serve the heads of all ranks.
        """
        width, std, query = shape.hidden_size, shape.init_std, mla.qk_nope_head_dim + mla.qk_rope_head_dim
        down = mla.kv_lora_rank + mla.qk_rope_head_dim
        up = mla.qk_nope_head_dim + mla.v_head_dim
        if shape.scores.sinks == "learned":
            self.columns(f"{name}.sink", [("sink", shape.num_heads)], None, std=0.0, bias=False)
        if mla.q_lora_rank:
            self.whole(f"{name}.q_down.weight", (mla.q_lora_rank, width), std=std, decay=True, matrix=True)
            self.norm(f"{name}.q_norm", shape, width=mla.q_lora_rank)
            inputs, queries = mla.q_lora_rank, "q_up"
        else:
            inputs, queries = width, "q"
        self.columns(f"{name}.{queries}", [(queries, shape.num_heads * query)], inputs, std=std, bias=False)
        self.whole(f"{name}.kv_down.weight", (down, width), std=std, decay=True, matrix=True)
        self.norm(f"{name}.kv_norm", shape, width=mla.kv_lora_rank)
        self.columns(f"{name}.kv_up", [("kv_up", shape.num_heads * up)], mla.kv_lora_rank, std=std, bias=False)

    def columns(
        self,
        name: str,
        outputs: Sequence[tuple[str, int]],
        width: int | None,
        *,
        std: float,
        bias: bool,
        parts: int | None = None,
        fill: float = 0.0,
    ) -> None:
        """Outputs divided over tp: each logical [n, width] by rows, one after the other in one local parameter.

        Args:
            width: None: a vector, which is the parameter itself.
            parts: into which the rows are divided; if fewer than ranks, neighbouring ranks hold copies.
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
            self._add(
                f"{name}{kind}",
                (row, *rest),
                pieces,
                std=spread,
                fill=fill,
                decay=matrix,
                matrix=matrix,
                copies=shared,
                partial=shared,
            )

    def rows(self, name: str, rows: int, inputs: int, *, std: float, bias: bool) -> None:
        """Inputs divided over tp: the logical [rows, inputs] by columns; the bias is added once, after the sum."""
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

    def dense(self, name: str, rows: int, inputs: int, *, std: float) -> None:
        """A layer of a head, whole on each rank, with a bias."""
        self.whole(f"{name}.weight", (rows, inputs), std=std, decay=True)
        self.whole(f"{name}.bias", (rows,), std=0.0, decay=False)

    def vocabulary(
        self, name: str, shape: GPTShape, std: float, *, ends: tuple[str, ...] = (), again: int | None = None
    ) -> None:
        """Rows divided over tp after padding, which belongs to no logical tensor; shared along the axes of `ends`."""
        rows, width = shape.padded_vocab_size, shape.hidden_size
        first, stop = vocabulary_range(shape.vocab_size, rows, tp_size=self.tp_size, tp_rank=self.tp_rank)
        piece = Piece(name=name, shape=(shape.vocab_size, width), start=(first, 0), size=(stop - first, width))
        local = (rows // self.tp_size, width)
        self._add(name, local, [piece], std=std, decay=True, vocabulary=True, again=again, copies=ends, partial=ends)

    def norm(
        self, name: str, shape: GPTShape, *, width: int | None = None, partial: tuple[str, ...] | None = None
    ) -> None:
        size = (width or shape.hidden_size,)
        fill = 0.0 if shape.norm_zero_centered else 1.0
        self.whole(f"{name}.weight", size, std=0.0, fill=fill, decay=False, partial=partial)
        if shape.norm == "layernorm" and shape.norm_bias:
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
        matrix: bool = False,
    ) -> None:
        """Held by every rank of tp; gradients are partial sums if a rank sees part of the tokens, or if `partial`."""
        piece = Piece(name=name, shape=size, start=tuple(0 for _ in size), size=size)
        partial = self.partial if partial is None else partial
        self._add(name, size, [piece], std=std, fill=fill, decay=decay, matrix=matrix, copies=("tp",), partial=partial)

    def _add(
        self,
        name: str,
        local: tuple[int, ...],
        pieces: Sequence[Piece],
        *,
        std: float,
        decay: bool,
        fill: float = 0.0,
        matrix: bool = False,
        vocabulary: bool = False,
        again: int | None = None,
        copies: tuple[str, ...] = (),
        partial: tuple[str, ...] = (),
        shard: ShardAxis = "data",
    ) -> None:
        self.specs.append(
            ParamSpec(
                name=name,
                shape=local,
                pieces=tuple(pieces),
                std=std,
                fill=fill,
                decay=decay,
                matrix=matrix,
                vocabulary=vocabulary,
                block=self.block,
                again=again,
                copies=copies,
                partial=partial,
                shard=shard,
            )
        )
