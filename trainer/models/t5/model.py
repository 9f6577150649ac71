"""T5: an encoder and a decoder in one list of blocks, which pipeline stages divide anywhere.

Covers Megatron's form (LayerNorm, biases, learned or rotary positions, scores divided by the root of the head's size)
and the original one (RMSNorm, no biases, relative positions, scores not divided). From stage to stage travel

    in the encoder  its stream, the decoder's embeddings, the tables of relative positions of both stacks
    in the decoder  its stream, the encoder's output, the decoder's table

so that the embedding and the tables are parameters of the first stage alone. What a stage passes on unchanged is a view
of what it received, so that its gradient comes back by itself, and is added to those of the stage's own blocks.

Shapes: B rows, S tokens of the decoder, T of the encoder, N = B * S, M = B * T, D hidden, R buckets, H local heads.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from trainer.config.sections import RecomputeSection
from trainer.kernels.table import Kernels
from trainer.layers.attention import PackedTokens
from trainer.layers.base import Parallel, as_input
from trainer.layers.block_hooks import enter_block
from trainer.layers.cross_attention import (
    CrossAttention,
    CrossRows,
    RelativeBias,
    far_biases,
    relative_bias,
    share,
)
from trainer.layers.dropout import Dropout, token_places
from trainer.layers.head import VocabularyBias, head_loss
from trainer.layers.recompute import keep_input
from trainer.models.family import DecodeState
from trainer.models.gpt.model import GPT, Block, Context, build_gpt, entered, make_norm
from trainer.models.stage import EncoderTokens, Microbatch, RealTokens, Tensors, only_tokens, summed
from trainer.models.t5.shape import (
    Kind,
    T5Shape,
    attention_shape,
    cross_shape,
    decode_state,
    kinds,
    of_stacks,
    scores_of,
)
from trainer.parallel.collectives import Group
from trainer.parallel.conjugates import gather_columns
from trainer.parallel.params import Place


class T5Block(Block):
    """A block of the encoder, or of the decoder with cross attention between attention and MLP."""

    attention_shape = staticmethod(attention_shape)

    def __init__(
        self, shape: T5Shape, parallel: Parallel, *, number: int, kernels: Kernels, seed: int, selective: bool
    ) -> None:
        super().__init__(shape, parallel, number=number, kernels=kernels, seed=seed, selective=selective)
        if number < shape.encoder_layers:
            return
        site = functools.partial(Dropout, seed=seed, layer=number + 1, kernels=kernels)
        weights = site(shape.scores.dropout, site="cross_weights") if shape.scores.dropout else None
        self.cross_norm = make_norm(shape, kernels)
        self.cross = CrossAttention(cross_shape(shape), parallel, kernels=kernels, dropout=weights)
        self.drop_cross = site(shape.hidden_dropout, site="cross")

    def decode(
        self, x_ND: Tensor, branch_ND: Tensor | None, context: Context, *, read_MD: Tensor, rows: CrossRows
    ) -> tuple[Tensor, Tensor]:
        """The same of a decoder block, which also reads the encoder's output."""
        x_ND, branch_ND = self.attend(x_ND, branch_ND, context)
        x_ND, y_ND = entered(self.cross_norm, x_ND, branch_ND)
        with self.recomputed(self.cross_norm, x_ND, y_ND):
            branch_ND = self.drop_cross(self.cross(y_ND, read_MD, rows), context.places)
        return self.feed_forward(x_ND, branch_ND, context)


class _Rows(NamedTuple):
    """The data of one microbatch for the blocks of both stacks."""

    encoder: Context
    decoder: Context
    cross: CrossRows


class T5(GPT):
    """One rank's part of one pipeline stage of the model; see `GPT`."""

    block_type = T5Block
    shape: T5Shape

    def __init__(
        self,
        shape: T5Shape,
        place: Place,
        *,
        groups: Mapping[str, Group],
        kernels: Kernels,
        recompute: RecomputeSection,
        seed: int,
    ) -> None:
        super().__init__(shape, place, groups=groups, kernels=kernels, recompute=recompute, seed=seed)
        self.chunks = of_stacks(self.chunks, shape.encoder_layers)
        heads, blocks = shape.num_heads // self.parallel.tp.size, place.blocks(shape.num_layers)
        # Another layer's number, so that the two embeddings drop other features.
        self.drop_decoder = Dropout(
            shape.hidden_dropout, seed=seed, layer=shape.num_layers + 1, site="embedding", kernels=kernels,
        )  # fmt: skip
        if shape.is_relative and place.is_first:
            self.encoder_bias = RelativeBias(shape.relative_buckets, heads)
            self.decoder_bias = RelativeBias(shape.relative_buckets, heads)
        if shape.encoder_layers - 1 in blocks:
            self.encoder_norm = make_norm(shape, self.kernels)
        self._step_tables: Tensors = ()  # of the decoder, for steps of generation
        if shape.head_bias and place.is_last:
            self.head_bias = VocabularyBias(shape.padded_vocab_size // self.parallel.tp.size)

    def forward(self, received: Tensors, batch: Microbatch) -> Tensors:
        """See `GPT.forward`."""
        if batch.step is not None:
            x_ND, branch_ND = self._step(received, batch)
            return (x_ND if branch_ND is None else x_ND + branch_ND,)
        x_ND, branch_ND, beside = self._through(received, batch)
        if not self.place.is_last:
            x_ND = x_ND.view_as(x_ND) if branch_ND is None else x_ND + branch_ND
            return (x_ND, *(x.view_as(x) for x in beside))
        if self.loss_function is not None:
            return summed(self.loss_function(self._whole_logits(x_ND, branch_ND, batch), batch), batch)
        labels_N, weight_N, real = batch.labels_BS.flatten(), batch.loss_mask_BS.flatten(), batch.real
        loss, losses_N = head_loss(
            self._before_head(x_ND, branch_ND),
            self._head(),
            labels_N=labels_N if real is None else labels_N[real.flat_M],
            weight_N=weight_N if real is None else weight_N[real.flat_M],
            kernels=self.kernels,
            softcap=self.shape.logit_softcap,
            bias=self.head_bias if self.shape.head_bias else None,
        )
        return loss, losses_N if real is None else _of_rows(losses_N, batch)

    def _whole_logits(self, x_ND: Tensor, branch_ND: Tensor | None, batch: Microbatch) -> Tensor:
        if batch.real is None:
            return super()._whole_logits(x_ND, branch_ND, batch)
        logits_NV = gather_columns(self._local_logits(x_ND, branch_ND), self.parallel.tp)
        return _of_rows(logits_NV[:, : self.shape.vocab_size], batch).unflatten(0, batch.tokens_BS.shape)

    def _through_blocks(self, received: Tensors, batch: Microbatch) -> tuple[Tensor, Tensor | None]:
        if batch.step is not None:
            return self._step(received, batch)
        x_ND, branch_ND, _ = self._through(received, batch)
        return x_ND, branch_ND

    def _through(self, received: Tensors, batch: Microbatch) -> tuple[Tensor, Tensor | None, Tensors]:
        """(the stream after the last block, what that adds to it, what else the next stage gets)."""
        blocks, first_of_decoder = self.place.blocks(self.shape.num_layers), self.shape.encoder_layers
        rows = self._rows(batch)
        if not received:
            self.hooks.before_forward(0)
            received = self._enter_both(batch, rows)
        x_ND, beside_ND, *tables = received
        branch_ND: Tensor | None = None
        beside: Tensors = (beside_ND, *tables)
        if blocks.start < first_of_decoder:
            biases = self._biases(tables[:1], rows.encoder, both=True)
            rows = rows._replace(encoder=self._with_mask(rows.encoder, "encoder", biases, x_ND.dtype))
            run = functools.partial(self._encode, rows)
            x_ND, branch_ND, entering_ND, *passed = self._chunked(
                run, range(blocks.start, min(blocks.stop, first_of_decoder)), (x_ND, None, beside_ND, *biases, *tables)
            )
            tables = passed[len(biases) :]
            beside = (entering_ND, *tables)
            if blocks.stop >= first_of_decoder:
                _, output_MD = self.encoder_norm(x_ND, branch_ND)
                x_ND, branch_ND, tables = entering_ND, None, tables[1:]
                beside = (output_MD, *tables)
        if blocks.stop > first_of_decoder:
            biases = self._biases(tables, rows.decoder, both=False)
            rows = rows._replace(decoder=self._with_mask(rows.decoder, "decoder", biases, x_ND.dtype))
            run = functools.partial(self._decode, rows)
            stream = (x_ND, None, share(beside[0], self.parallel), *biases)
            x_ND, branch_ND, *_ = self._chunked(run, range(max(blocks.start, first_of_decoder), blocks.stop), stream)
        if self.place.is_last:
            adds = torch.is_grad_enabled()  # the loss computes its gradient in the forward pass
            x_ND, branch_ND = enter_block(self.hooks, self.hooked[-1], stream=(x_ND, branch_ND), adds=adds)
        return x_ND, branch_ND, beside

    def _chunked(self, run: Any, blocks: range, stream: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
        for chunk in self.chunks:
            if chunk.blocks.start in blocks:
                call = functools.partial(run, chunk.blocks)
                stream = keep_input(call, *stream) if chunk.again else call(*stream)
        return stream

    def _crossed(self, number: int, stream: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
        """The stream after the border before a block."""
        if number + 1 == self.hooked[0]:
            self.hooks.before_forward(number + 1)
            return stream
        return enter_block(self.hooks, number + 1, stream=stream)

    def _encode(self, rows: _Rows, blocks: Iterable[int], *stream: Tensor | None) -> tuple[Any, ...]:
        """Blocks of the encoder: (stream, branch, the decoder's embeddings, own biases, tables) to the same."""
        for i in blocks:
            x_ND, branch_ND, entering_ND, *rest = self._crossed(i, stream)
            context = _with_bias(rows.encoder, rest if self.shape.is_relative else [])
            x_ND, branch_ND = cast(T5Block, self.blocks[str(i)])(x_ND, branch_ND, context)
            stream = (x_ND, branch_ND, entering_ND, *rest)
        return stream

    def _decode(self, rows: _Rows, blocks: Iterable[int], *stream: Tensor | None) -> tuple[Any, ...]:
        """Blocks of the decoder: (stream, branch, the encoder's output, whole, own biases) to the same."""
        for i in blocks:
            x_ND, branch_ND, read_MD, *rest = self._crossed(i, stream)
            context = _with_bias(rows.decoder, rest)
            block = cast(T5Block, self.blocks[str(i)])
            x_ND, branch_ND = block.decode(x_ND, branch_ND, context, read_MD=read_MD, rows=rows.cross)
            stream = (x_ND, branch_ND, read_MD, *rest)
        return stream

    def _biases(self, tables: Iterable[Tensor], context: Context, *, both: bool) -> Tensors:
        length, longest = context.sequences.length, self.shape.relative_distance
        return tuple(relative_bias(table, length, both=both, longest=longest) for table in tables)

    def _with_mask(self, context: Context, stack: Kind, biases: Tensors, dtype: torch.dtype) -> Context:
        """The rows of a stack with the mask that its kernels read instead of biases, shared by all blocks."""
        if not biases:
            return context
        sequences, scores = context.sequences, scores_of(self.shape, stack)
        mask_BHST = self.kernels.bias_mask(biases[0], scores, sequences.lengths_B, dtype, self.shape.head_dim)
        return context._replace(sequences=replace(sequences, mask_BHST=mask_BHST))

    def _enter_both(self, batch: Microbatch, rows: _Rows) -> Tensors:
        """What the first block gets: both embeddings, and the tables of both stacks."""
        tokens_BT, _, read = _encoder(batch)
        x_MD, x_ND = (self._embedded(_computed(batch, *x)) for x in ((tokens_BT, read), (batch.tokens_BS, batch.real)))
        x_MD = self.drop_embedding(x_MD, rows.encoder.places)
        x_ND = self.drop_decoder(x_ND, rows.decoder.places)
        tables = (self.encoder_bias(), self.decoder_bias()) if self.shape.is_relative else ()
        return (x_MD, x_ND, *tables)

    def _rows(self, batch: Microbatch) -> _Rows:
        tokens_BT, lengths_B, read = _encoder(batch)
        encoder = self._context(replace(batch, tokens_BS=tokens_BT, positions_BS=None, bounds=None))
        encoder = encoder._replace(sequences=replace(encoder.sequences, lengths_B=lengths_B))
        encoder, decoder = self._packed(encoder, batch, read), self._packed(self._context(batch), batch, batch.real)
        rows, length = batch.tokens_BS.shape
        cross = CrossRows(
            rows,
            length,
            tokens_BT.shape[1],
            lengths_B,
            batch.samples_B,
            packed=decoder.sequences.packed,
            read=encoder.sequences.packed,
        )
        return _Rows(encoder, decoder, cross)

    def _packed(self, context: Context, batch: Microbatch, real: RealTokens | None) -> Context:
        """The same for a stack whose padding is not computed."""
        if real is None:
            return context
        flat_M, sequences, places = real.flat_M, context.sequences, context.places
        if places is not None and batch.samples_B is not None:
            mine = self.parallel.local_tokens(len(flat_M))
            places = token_places(batch.samples_B, sequences.length, mine=mine, flat_M=flat_M)
        packed = PackedTokens.of(flat_M, sequences.batch * sequences.length)
        return context._replace(sequences=replace(sequences, packed=packed), places=places)

    def decode_states(self) -> Mapping[int, DecodeState]:
        """See `Stage`; blocks of the encoder keep nothing."""
        first = self.shape.encoder_layers
        return {number: state for number, state in self._states() if number >= first}

    def _states(self) -> Iterator[tuple[int, DecodeState]]:
        kind_of = kinds(self.shape)
        return ((i, decode_state(self.shape, kind_of[i])) for i in self.place.blocks(self.shape.num_layers))

    def text(self, tokens_T: Tensor) -> Microbatch:
        """A text for `read`; the decoder's tokens have no effect."""
        lengths_B = torch.tensor([len(tokens_T)], dtype=torch.int32, device=tokens_T.device)
        return replace(only_tokens(tokens_T[None]), encoder=EncoderTokens(tokens_T[None], lengths_B))

    def read(self, received: Tensors, batch: Microbatch) -> tuple[dict[int, dict[str, Tensor]], Tensors]:
        """What the blocks of the decoder keep of a text that the encoder reads, and what the next stage gets.

        Returns:
            block -> name -> [T, H, K]; and the tensors.
        """
        rows, blocks, first = self._rows(batch), self.place.blocks(self.shape.num_layers), self.shape.encoder_layers
        x_MD, beside_ND, *tables = received or self._enter_both(batch, rows)
        if blocks.start < first:
            biases = self._biases(tables[:1], rows.encoder, both=True)
            rows = rows._replace(encoder=self._with_mask(rows.encoder, "encoder", biases, x_MD.dtype))
            mine = range(blocks.start, min(blocks.stop, first))
            x_MD, branch_MD, *_ = self._encode(rows, mine, x_MD, None, beside_ND, *biases, *tables)
            if blocks.stop < first:
                return {}, (x_MD if branch_MD is None else x_MD + branch_MD, beside_ND, *tables)
            # From here on the decoder's stream comes first, and the encoder's output is beside it.
            x_MD, beside_ND, tables = beside_ND, self.encoder_norm(x_MD, branch_MD)[1], tables[1:]
        self._step_tables, read_MD, kept = tuple(tables), share(beside_ND, self.parallel), {}
        for number in range(max(blocks.start, first), blocks.stop):
            keys = cast(T5Block, self.blocks[str(number)]).cross.keys(read_MD, rows.cross)
            kept[number] = dict(zip(("key", "value"), (x[0] for x in keys), strict=True))
        return kept, () if self.place.is_last else (x_MD, beside_ND, *tables)

    def _step(self, received: Tensors, batch: Microbatch) -> tuple[Tensor, Tensor | None]:
        """A step of generation: new tokens of the decoder, for rows whose texts the encoder has read."""
        context, step, blocks = self._context(batch), batch.step, self.place.blocks(self.shape.num_layers)
        assert step is not None and step.read is not None, "called for rows whose texts are read"
        x_ND, branch_ND = received[0] if received else self._embedded(batch), None
        if self.shape.is_relative and blocks.stop > self.shape.encoder_layers:
            far_HD = far_biases(*self._step_tables, longest=self.shape.relative_distance)
            context = context._replace(sequences=replace(context.sequences, far_HD=far_HD))
        for number in range(max(blocks.start, self.shape.encoder_layers), blocks.stop):
            block, own, read = cast(T5Block, self.blocks[str(number)]), context.of_block(number), step.read
            x_ND, branch_ND = block.attend(x_ND, branch_ND, own)
            x_ND, y_ND = entered(block.cross_norm, x_ND, branch_ND)
            kept = read.tensors[number]
            branch_ND = block.cross.step(y_ND, kept=kept, slot_N=read.slot_N, length_N=read.length_N)
            x_ND, branch_ND = block.feed_forward(x_ND, branch_ND, own)
        return x_ND, branch_ND

    def logits(self, tokens_BS: Tensor, received: Tensors = ()) -> Tensor:
        """See `GPT.logits`; both stacks read the same tokens, none of which is padding."""
        lengths_B = torch.full((len(tokens_BS),), tokens_BS.shape[1], dtype=torch.int32, device=tokens_BS.device)
        batch = replace(only_tokens(tokens_BS), encoder=EncoderTokens(tokens_BS, lengths_B))
        return self._local_logits(*self._through_blocks(received, batch)).view(*tokens_BS.shape, -1)

    def _local_logits(self, x_ND: Tensor, branch_ND: Tensor | None) -> Tensor:
        logits_NV = super()._local_logits(x_ND, branch_ND)
        return logits_NV + as_input(self.head_bias, "bias").to(logits_NV.dtype) if self.shape.head_bias else logits_NV

    def received(self, batch: Microbatch) -> Tensors:
        """See `Stage`; in a step of generation the stream alone."""
        if batch.step is not None:
            return super().received(batch)
        return () if self.place.is_first else self._at_border(self.place.blocks(self.shape.num_layers).start, batch)

    def given(self, batch: Microbatch) -> Tensors:
        """See `Stage`."""
        return () if self.place.is_last else self._at_border(self.place.blocks(self.shape.num_layers).stop, batch)

    def _at_border(self, number: int, batch: Microbatch) -> Tensors:
        """Buffers for what enters this block."""
        tokens_BT, _, read = _encoder(batch)
        stacks = ((tokens_BT, read), (batch.tokens_BS, batch.real))
        sizes = (tokens_BS if real is None else real.flat_M for tokens_BS, real in stacks)
        encoder, decoder = (self._stream(replace(batch, tokens_BS=x))[0] for x in sizes)
        in_encoder, tables = number < self.shape.encoder_layers, list[Tensor]()
        if self.shape.is_relative:
            heads, wide = (
                self.shape.num_heads // self.parallel.tp.size,
                torch.promote_types(encoder.dtype, torch.float32),
            )
            count = 2 if in_encoder else 1
            tables = [
                torch.empty(self.shape.relative_buckets, heads, dtype=wide, device=encoder.device) for _ in range(count)
            ]
        return (encoder, decoder, *tables) if in_encoder else (decoder, encoder, *tables)


def _with_bias(context: Context, biases: list[Tensor]) -> Context:
    if not biases:
        return context
    return context._replace(sequences=replace(context.sequences, bias_HST=biases[0]))


def _computed(batch: Microbatch, tokens_BS: Tensor, real: RealTokens | None) -> Microbatch:
    """The tokens of a stack that are computed, as one row, with their positions."""
    if real is None:
        return replace(batch, tokens_BS=tokens_BS, positions_BS=None)
    positions_M = real.flat_M % tokens_BS.shape[1]
    return replace(batch, tokens_BS=tokens_BS.flatten()[real.flat_M][None], positions_BS=positions_M[None])


def _of_rows(x_M: Tensor, batch: Microbatch) -> Tensor:
    """What the decoder computed, among all tokens of its rows; 0 for the others."""
    assert batch.real is not None, "called for rows without padding"
    return x_M.new_zeros(batch.tokens_BS.numel(), *x_M.shape[1:]).index_copy(0, batch.real.flat_M, x_M)


def _encoder(batch: Microbatch) -> Any:
    assert batch.encoder is not None, "a microbatch of a model with two stacks has what the encoder reads"
    return batch.encoder


build_t5 = functools.partial(build_gpt, model=T5)
