"""GPT: a decoder-only transformer, written like its papers.

Covers the GPT-2 form (learned positions, LayerNorm, GELU, biases), the Llama form (rotary positions, RMSNorm, SwiGLU,
no biases, grouped key-value heads) and forms in between. The forward pass holds no parallel code: the layers enter and
leave parallel regions themselves, and models/gpt/params.py says what each rank holds.

Shapes: B batch, S sequence, N = B * S tokens, batch-major (N / tp of them between the parallel linears under sequence
parallelism), D hidden, V local vocabulary rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from trainer.arithmetic import power_of_two
from trainer.config.sections import RecomputeSection, RunConfig
from trainer.kernels.scan import ScanSizes
from trainer.kernels.table import Kernels, choose_kernels
from trainer.layers.attention import Attention, Documents, Sequences
from trainer.layers.base import Layer, Parallel
from trainer.layers.block_hooks import BlockHooks, enter_block, leave_block
from trainer.layers.context_rows import ContextRows
from trainer.layers.dropout import Dropout, TokenPlaces, token_places
from trainer.layers.embedding import PositionEmbedding, VocabularyEmbedding
from trainer.layers.experts import MoE
from trainer.layers.head import capped, head_loss
from trainer.layers.latent_attention import LatentAttention
from trainer.layers.linear import column_product
from trainer.layers.lora import add_adapters
from trainer.layers.mlp import MLP
from trainer.layers.norm import Norm
from trainer.layers.recompute import keep_input, recomputed
from trainer.layers.recompute_chunks import RecomputedChunk, chunks
from trainer.layers.rope import Rotation, Rotations, rotation
from trainer.layers.router import RouterLosses, RowLayout
from trainer.layers.shapes import AttentionShape, RopeShape
from trainer.models.family import DecodeState
from trainer.models.gpt.mtp import Depth, later_counts, later_tokens
from trainer.models.gpt.params import parameter_table
from trainer.models.gpt.shape import (
    GPTShape,
    attention_shape,
    decode_state,
    exchanges_tokens,
    expert_losses,
    expert_shape,
    kinds,
    later_losses,
    mlp_shape,
)
from trainer.models.preferences import pair_sequences
from trainer.models.stage import LossFunction, Microbatch, NamedLoss, Tensors, only_tokens, summed
from trainer.parallel.collectives import Group
from trainer.parallel.conjugates import gather_columns
from trainer.parallel.params import Place

_EXPERT_BIAS = ".mlp.router.expert_bias"
ROWS, TOKENS = "rows", "tokens"  # of a step, see GPT.loss_weights


class Context(NamedTuple):
    """The data of one microbatch that all blocks of a stage use."""

    sequences: Sequences
    places: TokenPlaces | None
    batch: Microbatch
    cp: Group

    def of_block(self, number: int) -> Context:
        """The same for one block, which in generation has pages of its own."""
        return self if self.sequences.step is None else self._replace(sequences=self.sequences.of_block(number))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); the next norm computes the second sum.

    What attention and MLP add may be normalized too, or instead, and multiplied by a number.

    Args:
        number: in the whole model, from 0. like: the block whose kind it has; None: its own number.
        groups: the ranks along each axis. exchanges, expert_buffer: see `Dispatch`.
        selective: outputs of norms and of the nonlinearity are computed again in backward.
        parts: what it has, of the two.
    """

    attention_shape: Callable[[Any, int], AttentionShape] = staticmethod(attention_shape)

    def __init__(
        self,
        shape: GPTShape,
        parallel: Parallel,
        *,
        number: int,
        kernels: Kernels,
        seed: int,
        selective: bool,
        groups: Mapping[str, Group] = MappingProxyType({}),
        like: int | None = None,
        exchanges: bool = False,
        expert_buffer: float = 0.0,
        parts: tuple[str, ...] = ("attention", "mlp"),
    ) -> None:
        super().__init__()
        of_kind = number if like is None else like
        site = functools.partial(Dropout, seed=seed, layer=number + 1, kernels=kernels)
        weights = site(shape.scores.dropout, site="weights") if shape.scores.dropout else None
        enters, leaves = shape.block_norm != "output", shape.block_norm != "input"
        self.number, self.moe = number, shape.moe
        self.selective, self.multiplier = selective, shape.residual_multiplier
        if "attention" in parts:
            self.attention_norm = make_norm(shape, kernels) if enters else None
            attention = LatentAttention if shape.mla else Attention
            of_attention = self.attention_shape(shape, of_kind)
            self.attention = attention(of_attention, parallel, kernels=kernels, dropout=weights)
            self.attention_out_norm = make_norm(shape, kernels) if leaves else None
            self.drop_attention = site(shape.hidden_dropout, site="attention")
        if "mlp" in parts:
            self.mlp_norm = make_norm(shape, kernels) if enters else None
            if self.moe is not None and self.moe.has_experts(of_kind):
                self.mlp: MLP | MoE = MoE(
                    self.moe,
                    expert_shape(shape),
                    parallel,
                    kernels=kernels,
                    groups=groups,
                    exchanges=exchanges,
                    expert_buffer=expert_buffer,
                )
            else:
                self.mlp = MLP(mlp_shape(shape), parallel, kernels=kernels)
            self.mlp_out_norm = make_norm(shape, kernels) if leaves else None
            self.drop_mlp = site(shape.hidden_dropout, site="mlp")

    def forward(self, x_ND: Tensor, branch_ND: Tensor | None, context: Context) -> tuple[Tensor, Tensor | None]:
        x_ND, branch_ND = self.attend(x_ND, branch_ND, context)
        return self.feed_forward(x_ND, branch_ND, context)

    def attend(self, x_ND: Tensor, branch_ND: Tensor | None, context: Context) -> tuple[Tensor, Tensor]:
        """(x + branch, what attention adds to it)."""
        x_ND, y_ND = entered(self.attention_norm, x_ND, branch_ND)
        with self.recomputed(self.attention_norm, x_ND, y_ND):
            return x_ND, self.attention_branch(y_ND, context)

    def feed_forward(self, x_ND: Tensor, branch_ND: Tensor | None, context: Context) -> tuple[Tensor, Tensor]:
        """(x + branch, what the MLP adds to it)."""
        x_ND, y_ND = entered(self.mlp_norm, x_ND, branch_ND)
        with self.recomputed(self.mlp_norm, x_ND, y_ND):
            return x_ND, self.mlp_branch(y_ND, context)

    def attention_branch(self, y_ND: Tensor, context: Context) -> Tensor:
        """What attention adds, of what it reads."""
        branch_ND = self.attention(y_ND, context.sequences)
        return self.drop_attention(self._left(self.attention_out_norm, branch_ND), context.places)

    def mlp_branch(self, y_ND: Tensor, context: Context) -> Tensor:
        """What the MLP adds, of what it reads."""
        if isinstance(self.mlp, MoE):
            branch_ND = self._experts(self.mlp, y_ND, context)
        else:
            branch_ND = self.mlp(y_ND, recompute=self.selective)
        return self.drop_mlp(self._left(self.mlp_out_norm, branch_ND), context.places)

    def _experts(self, mlp: MoE, y_ND: Tensor, context: Context) -> Tensor:
        """What experts add; their losses and counts go to the microbatch."""
        batch = context.batch
        rows = RowLayout(
            batch.tokens_BS.shape[0],
            batch.tokens_BS.shape[1],
            context.cp,
            drops=batch.step is None,
            measured=batch.losses is not None,
        )
        branch_ND, losses = mlp(y_ND, rows, recompute=self.selective)
        if losses is not None:
            self._report(losses, batch)
        return branch_ND

    def _report(self, losses: RouterLosses, batch: Microbatch) -> None:
        moe = self.moe
        assert moe is not None and batch.losses is not None and batch.counts is not None, "losses were measured"
        batch.counts[f"experts_{self.number}"] = losses.counts
        balance_factor = 0.0 if moe.balance == "none" else moe.balance_factor
        for name, (total, weight), factor, of_step in (
            ("balance", losses.balance, balance_factor, None if moe.balance == "microbatch" else ROWS),
            ("z", losses.z, moe.z_loss_factor, TOKENS),
        ):
            if factor:
                weight_1 = torch.full((), weight, dtype=total.dtype, device=total.device)
                batch.losses[f"{name}_{self.number}"] = NamedLoss(total, weight_1, factor, of_step)

    def _left(self, norm: Norm | None, branch_ND: Tensor) -> Tensor:
        if norm is not None:
            _, branch_ND = norm(branch_ND)
        return branch_ND if self.multiplier == 1 else branch_ND * self.multiplier

    def recomputed(self, norm: Norm | None, sum_ND: Tensor, y_ND: Tensor) -> AbstractContextManager[None]:
        """What is saved of y in this block is computed again in backward, if the recomputation is selective."""
        if norm is None or not self.selective:
            return nullcontext()
        return recomputed(y_ND, functools.partial(norm.again, sum_ND.detach()))


def entered(norm: Norm | None, x_ND: Tensor, branch_ND: Tensor | None) -> tuple[Tensor, Tensor]:
    """(x + branch, what a layer reads of it)."""
    if norm is not None:
        normed: tuple[Tensor, Tensor] = norm(x_ND, branch_ND)
        return normed
    x_ND = x_ND if branch_ND is None else x_ND + branch_ND
    return x_ND, x_ND


class GPT(nn.Module):
    """One rank's part of one pipeline stage of the model.

    Args:
        shape: of the function it computes.
        place: which part this is; blocks are named by their number in the whole model.
        groups: the ranks along each axis: "tp", "cp" if ranks share rows of tokens, those of experts.
        kernels: implementations of the small operations.
        recompute: what backward recomputes. seed: of the run, for dropout. exchanges, expert_buffer: see
            `Dispatch`.

    Attributes:
        loss_function: a user's function: (logits [B, S, vocab_size], batch) -> the sum of the loss, or the losses of
            tokens [B, S], which are summed; None: the model's own.
        hooks: called at the borders of blocks.
        block_type: of its blocks; a family that differs in nothing else gives another.
    """

    block_type: type[Block] = Block

    @classmethod
    def class_for(cls, shape: Any) -> type[GPT]:
        """The class of models of a shape, in a family that has several."""
        return cls

    @staticmethod
    def scan_sizes(shape: Any) -> ScanSizes | None:
        """The sizes of the mixers of a shape; None if it has none."""
        return None

    def __init__(
        self,
        shape: GPTShape,
        place: Place,
        *,
        groups: Mapping[str, Group],
        kernels: Kernels,
        recompute: RecomputeSection,
        seed: int,
        exchanges: bool = False,
        expert_buffer: float = 0.0,
    ) -> None:
        super().__init__()
        self.shape, self.place, self.kernels = shape, place, kernels
        tp, self.cp = groups["tp"], groups.get("cp", Group.single("cp"))
        self.loss_function: LossFunction | None = None
        self.hooks = BlockHooks()
        self.parallel = Parallel(tp, sequence_parallel=place.sequence_parallel and tp.size > 1)
        if place.is_first or (place.is_last and shape.embeds_last):
            self.embedding = self._vocabulary()
        if shape.position == "learned" and place.is_first:
            self.positions = PositionEmbedding(shape.max_position, shape.hidden_size)
        self.drop_embedding = Dropout(shape.hidden_dropout, seed=seed, layer=0, site="embedding", kernels=kernels)
        blocks, selective = place.blocks(shape.num_layers), recompute.mode == "selective"
        block = functools.partial(
            self.block_type, shape, self.parallel, kernels=kernels, seed=seed, selective=selective
        )
        if shape.moe is not None:  # blocks of other families have no experts
            block = functools.partial(block, groups=groups, exchanges=exchanges, expert_buffer=expert_buffer)
        self.blocks = nn.ModuleDict({str(i): block(number=i) for i in blocks})
        for module in self.blocks.modules():
            if isinstance(module, LatentAttention):
                module.keys_again = recompute.mla_up_proj
        self.recomputes_all = full = recompute.mode == "full"
        self.chunks = chunks(blocks, method=recompute.method, layers=recompute.layers if full else len(blocks))
        if not full:
            self.chunks = [RecomputedChunk(blocks, False)]
        if place.is_last:
            self.final_norm = make_norm(shape, kernels)
            if not shape.tie_embeddings:
                self.head = self._vocabulary()
            self.mtp = nn.ModuleDict({str(depth): self._depth(depth, block, seed) for depth in range(shape.mtp_layers)})
        self._table = functools.cache(self._make_table)  # recorded passes read it: none may be freed

    def forward(self, received: Tensors, batch: Microbatch) -> Tensors:
        """Pass the residual stream from stage to stage, [N or N / tp, D], including what the last block adds to it.

        The first stage receives nothing; the last gives -log p(label) of the unmasked tokens, in nats: (sum, [N]).
        """
        x_ND, branch_ND = self._through_blocks(received, batch)
        if not self.place.is_last:
            assert branch_ND is not None, "a stage without blocks"
            return (x_ND + branch_ND,)
        _, hidden_ND = self.final_norm(x_ND, branch_ND)
        if self.loss_function is not None:
            outputs = summed(self.loss_function(self._whole_logits(x_ND, branch_ND, batch), batch), batch)
        else:
            outputs = self._loss(hidden_ND, batch.labels_BS.flatten(), batch.loss_mask_BS.flatten(), batch)
        if self.mtp and batch.losses is not None and torch.is_grad_enabled():
            self._predict_later(hidden_ND, batch, batch.losses)
        return outputs

    def _loss(self, hidden_ND: Tensor, labels_N: Tensor, weight_N: Tensor, batch: Microbatch | None = None) -> Tensors:
        """(sum, [N]) of the model's own loss, from what the last norm gives; of pairs, if the microbatch has them."""
        sequences = None
        if batch is not None and (pairs := batch.pairs) is not None:
            sequences, weight_N = pair_sequences(batch, pairs, cp=self.cp), pairs.trained_BS.flatten()
        return head_loss(
            self._scaled(hidden_ND),
            self._head(),
            labels_N=labels_N,
            weight_N=weight_N,
            kernels=self.kernels,
            softcap=self.shape.logit_softcap,
            sequences=sequences,
        )

    def _predict_later(self, hidden_ND: Tensor, batch: Microbatch, losses: dict[str, NamedLoss]) -> None:
        """The losses of later tokens, from what the head reads for the next ones."""
        context, shape = self._context(batch), self.shape
        names = later_losses(shape)
        for name, depth, tokens in zip(
            names, self.mtp.values(), later_tokens(batch, names, factor=shape.mtp_factor, cp=self.cp), strict=True
        ):
            run = functools.partial(self._deepen, cast(Depth, depth), context)
            embedded_ND = cast(Depth, depth).drop_embedding(self._token_rows(tokens.tokens_N), context.places)
            hidden_ND = keep_input(run, embedded_ND, hidden_ND) if self.recomputes_all else run(embedded_ND, hidden_ND)
            total, *_ = self._loss(hidden_ND, tokens.labels_N, tokens.weight_N)
            losses[name] = NamedLoss(total, tokens.weight_N.sum(), seeded=True)

    def loss_weights(self, batch: Microbatch) -> Mapping[str, Tensor]:
        """See Stage: rows and all their tokens for the losses of experts, those that each depth predicts."""
        shape, (rows, length), weights = self.shape, batch.tokens_BS.shape, dict[str, Tensor]()
        if expert_losses(shape):
            sizes = {ROWS: rows, TOKENS: rows * length * self.cp.size}
            device = batch.tokens_BS.device
            weights |= {name: torch.full((), float(size), device=device) for name, size in sizes.items()}
        counted = later_counts(batch, shape.mtp_layers, cp=self.cp) if shape.mtp_layers else ()
        return weights | dict(zip(later_losses(shape), counted, strict=True))

    @staticmethod
    def _deepen(depth: Depth, context: Context, embedded_ND: Tensor, hidden_ND: Tensor) -> Tensor:
        x_ND, branch_ND = cast(Block, depth.block)(depth.read(embedded_ND, hidden_ND), None, context)
        _, hidden_ND = depth.final_norm(x_ND, branch_ND)
        return hidden_ND

    def _depth(self, depth: int, block: Callable[..., Block], seed: int) -> Depth:
        shape, number = self.shape, self.shape.num_layers + depth
        site = Dropout(shape.hidden_dropout, seed=seed, layer=number + 1, site="embedding", kernels=self.kernels)
        further = block(number=number, like=shape.mtp_like)
        return Depth(shape, self.parallel, block=further, dropout=site, kernels=self.kernels)

    @property
    def hooked(self) -> range:
        """From 0, before the first block, to the border after the last."""
        blocks = self.place.blocks(self.shape.num_layers)
        return range(0 if self.place.is_first else blocks.start + 1, blocks.stop + 1 + self.place.is_last)

    def received(self, batch: Microbatch) -> Tensors:
        """The buffer for the residual stream of the previous stage."""
        return () if self.place.is_first else self._stream(batch)

    def given(self, batch: Microbatch) -> Tensors:
        """The buffer for the gradient of the residual stream from the next stage."""
        return () if self.place.is_last else self._stream(batch)

    def _stream(self, batch: Microbatch) -> Tensors:
        tokens = self.parallel.local_tokens(batch.tokens_BS.numel())
        like = next(self.parameters())
        return (torch.empty(tokens.stop - tokens.start, self.shape.hidden_size, dtype=like.dtype, device=like.device),)

    def logits(self, tokens_BS: Tensor, received: Tensors = ()) -> Tensor:
        """Logits of the last stage for this rank's vocabulary rows, with padding: int64[B, S] -> [B, S, V].

        Args:
            received: from the previous stage; none for a model of a single stage.
        """
        batch = only_tokens(tokens_BS)
        return self._local_logits(*self._through_blocks(received, batch)).view(*tokens_BS.shape, -1)

    def next_buffers(self, counts: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Biases of experts: raised where an expert had less than its share of the step's tokens, or else lowered."""
        buffers, moe = dict(self.named_buffers()), self.shape.moe
        next_of: dict[str, Tensor] = {}
        for name in (name for name in buffers if name.endswith(_EXPERT_BIAS)):
            assert moe is not None, "the model has experts"
            block = cast(Block, self.get_submodule(name.removesuffix(_EXPERT_BIAS)))
            load_E = counts[f"experts_{block.number}"][: moe.num_experts]
            change_E = torch.sign(load_E.sum() - moe.num_experts * load_E)  # whole numbers: exact
            next_of[name] = buffers[name] + moe.expert_bias_rate * change_E
        return next_of

    def decode_states(self) -> Mapping[int, DecodeState]:
        """See `Stage`."""
        every = kinds(self.shape)
        return {i: decode_state(self.shape, every[i]) for i in self.place.blocks(self.shape.num_layers)}

    def next_logits(self, received: Tensors, batch: Microbatch, at_M: Tensor) -> Tensor:
        """See `Stage`."""
        x_ND, branch_ND = self._through_blocks(received, batch)
        return self._local_logits(x_ND[at_M], None if branch_ND is None else branch_ND[at_M])

    def whole_logits(self, batch: Microbatch) -> Tensor:
        """Logits of a single-stage model, gathered over tp, without padding; differentiable: [B, S, vocab_size]."""
        logits_BSV = self._whole_logits(*self._through_blocks((), batch), batch)
        return leave_block(self.hooks, self.hooked[-1], x=logits_BSV)

    def _whole_logits(self, x_ND: Tensor, branch_ND: Tensor | None, batch: Microbatch) -> Tensor:
        logits_NV = gather_columns(self._local_logits(x_ND, branch_ND), self.parallel.tp)
        return logits_NV[:, : self.shape.vocab_size].unflatten(0, batch.tokens_BS.shape)

    def _local_logits(self, x_ND: Tensor, branch_ND: Tensor | None) -> Tensor:
        y_ND, rows = self._before_head(x_ND, branch_ND), self._head()
        logits_NV = column_product(y_ND, rows, weight=rows.weight, parallel=self.parallel)
        return capped(logits_NV, self.shape.logit_softcap)

    def _before_head(self, x_ND: Tensor, branch_ND: Tensor | None) -> Tensor:
        """What the head reads."""
        return self._scaled(self.final_norm(x_ND, branch_ND)[1])

    def _scaled(self, y_ND: Tensor) -> Tensor:
        """The factor of logits is applied here, to fewer numbers."""
        return y_ND if self.shape.logit_scale == 1 else y_ND * self.shape.logit_scale

    def _enter(self, batch: Microbatch, places: TokenPlaces | None) -> Tensor:
        """The first residual stream."""
        return self.drop_embedding(self._embedded(batch), places)

    def _embedded(self, batch: Microbatch) -> Tensor:
        """The tokens' embeddings, with learned positions."""
        tokens_BS = batch.tokens_BS
        x_ND = self._token_rows(tokens_BS.flatten())
        if self.shape.position == "learned":
            mine = self.parallel.local_tokens(tokens_BS.numel())
            where = batch.positions_BS if batch.positions_BS is not None else batch.columns_S
            if where is None:
                where = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
            where_N = where.expand(tokens_BS.shape).flatten()[mine]
            x_ND = x_ND + self.positions(where_N)
        return x_ND

    def _token_rows(self, tokens_N: Tensor) -> Tensor:
        """Embeddings of tokens, without positions."""
        x_ND: Tensor = self.embedding(tokens_N)
        return x_ND if self.shape.embedding_multiplier == 1 else x_ND * self.shape.embedding_multiplier

    def _through_blocks(self, received: Tensors, batch: Microbatch) -> tuple[Tensor, Tensor | None]:
        """The residual stream after the last block, and what that adds to it; enters the head on the last stage."""
        context = self._context(batch)
        if not received:
            self.hooks.before_forward(0)
        stream: tuple[Tensor, Tensor | None] = (received[0] if received else self._enter(batch, context.places), None)
        for chunk in self.chunks:
            run = functools.partial(self._run, chunk.blocks, context)
            stream = keep_input(run, *stream) if chunk.again else run(*stream)
        if self.place.is_last:
            adds = torch.is_grad_enabled()  # the loss computes its gradient in the forward pass
            stream = enter_block(self.hooks, self.hooked[-1], stream=stream, adds=adds)
        return stream

    def _run(
        self, blocks: Iterable[int], context: Context, x_ND: Tensor, branch_ND: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        for i in blocks:
            if i + 1 == self.hooked[0]:
                self.hooks.before_forward(i + 1)
            else:
                x_ND, branch_ND = enter_block(self.hooks, i + 1, stream=(x_ND, branch_ND))
            x_ND, branch_ND = cast(Block, self.blocks[str(i)])(x_ND, branch_ND, context.of_block(i))
        return x_ND, branch_ND

    def _context(self, batch: Microbatch) -> Context:
        """Positions, documents and dropout draws of a microbatch, for the blocks."""
        (rows, length), places = batch.tokens_BS.shape, None
        turn = self._rotations(batch) if self.shape.position == "rope" else None
        where = batch.positions_BS if batch.positions_BS is not None else batch.columns_S
        if turn is not None and where is not None:
            turn = turn.at(where)
        documents = None if batch.bounds is None else Documents(batch.bounds, batch.longest)
        drops = self.shape.hidden_dropout or self.shape.scores.dropout
        assert not drops or batch.samples_B is not None or not torch.is_grad_enabled(), "dropout needs sample numbers"
        if self.shape.hidden_dropout and batch.samples_B is not None:
            places = token_places(
                batch.samples_B, length, mine=self.parallel.local_tokens(rows * length), columns_S=batch.columns_S
            )
        context = None if batch.columns_S is None else ContextRows(self.cp, batch.columns_S)
        sequences = Sequences(rows, length, turn, documents, batch.samples_B, context, batch.step)
        return Context(sequences, places, batch, self.cp)

    def _vocabulary(self) -> VocabularyEmbedding:
        shape = self.shape
        return VocabularyEmbedding(
            shape.vocab_size, shape.padded_vocab_size, width=shape.hidden_size, parallel=self.parallel
        )

    def _head(self) -> VocabularyEmbedding:
        return self.embedding if self.shape.tie_embeddings else self.head

    def _row_length(self, batch: Microbatch) -> int:
        """Tokens of a row on this rank."""
        return batch.tokens_BS.shape[1]

    def _rotations(self, batch: Microbatch) -> Rotations:
        """Those of all positions in a row, or of every position that a step of generation may have."""
        device, rope = batch.tokens_BS.device, self.shape.rope
        if batch.step is not None:
            return self._table(batch.step.longest, device, True)
        length = self._row_length(batch) * self.cp.size
        rounded = power_of_two(length)  # rows of any length share a few tables
        if rope.scaling == "longrope" and length <= rope.original_length:  # longer tables have other frequencies
            rounded = min(rounded, rope.original_length)
        return self._table(rounded, device, False).at(slice(length))

    def _make_table(self, length: int, device: torch.device, generates: bool) -> Rotations:
        rope, dtype = self.shape.rope, next(self.parameters()).dtype
        make = functools.partial(rotation, head_dim=self.shape.turned_width, dtype=dtype, device=device)

        def table(rope: RopeShape) -> Rotation:
            """With longrope, a step of generation has short and long rows: the table of the short comes first."""
            if not generates or self.shape.rope.scaling != "longrope":
                return make(length, rope=rope)
            short, long = make(self.shape.rope.original_length, rope=rope), make(length, rope=rope)
            return Rotation(torch.cat((short.cosine, long.cosine)), torch.cat((short.sine, long.sine)))

        full = table(rope=rope)
        return Rotations(full, full if rope.in_windows == rope else table(rope=rope.in_windows))


def make_norm(shape: GPTShape, kernels: Kernels) -> Norm:
    """The norm that the shape names."""
    return Norm(shape.hidden_size, shape.norm_shape, kernels=kernels)


def build_gpt(
    shape: GPTShape,
    place: Place,
    *,
    groups: Mapping[str, Group],
    dtype: torch.dtype,
    device: torch.device,
    config: RunConfig | None = None,
    allocate: bool = True,
    model: type[GPT] = GPT,
) -> GPT:
    """Allocate a stage with uninitialized weights directly in its dtype on its device.

    Args:
        groups: axis -> ranks along it: "tp", and "cp" if rows are divided.
        config: for kernels, recomputation and seed; None: the fastest kernels, and nothing is recomputed.
        allocate: False: parameters stay on "meta", to be replaced by the caller.
        model: GPT, or a family's class; see `GPT.class_for`.
    """
    model = model.class_for(shape)
    kernels = choose_kernels(device, dtype, config.kernels if config else None, scans=model.scan_sizes(shape))
    recompute, seed = (config.recompute, config.run.seed) if config else (RecomputeSection(), 0)
    with torch.device("meta"):
        dispatch = dict[str, Any]()
        if config is not None and shape.moe is not None:
            dispatch = {"exchanges": exchanges_tokens(config), "expert_buffer": config.mesh.expert_buffer or 0.0}
        built = model(shape, place, groups=groups, kernels=kernels, recompute=recompute, seed=seed, **dispatch)
        if shape.lora is not None:
            add_adapters(built, parameter_table(shape, place), scale=shape.lora.scale)
    for layer in built.modules():
        if isinstance(layer, Layer):
            layer.main_gradients.add_product = kernels.add_product
    if not allocate:
        return built.to(dtype)
    # Not to_empty: for tensors without data that imports sympy, 0.4 s in each process.
    return built.to(dtype)._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
