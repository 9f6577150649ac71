"""BERT's forward pass: a GPT's blocks with attention to both sides, another embedding and other heads.

Pre-norm blocks are a GPT's. Post-norm ones (Devlin et al. 2019) normalize each sum, and the first is the embedding's.
The heads read all tokens of the microbatch on each tp rank: under sequence parallelism they are gathered once, and each
rank takes its own tokens' part of the gradient, which all ranks compute alike. Masked tokens are selected before the
head. Where a microbatch tells its real tokens, they are computed as documents of one row, without the padding; else
padding is computed too, and nothing reads it.

Shapes: as in models/gpt/model.py, where N are the tokens that are computed; M masked tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.config.sections import RecomputeSection
from trainer.kernels.table import Kernels
from trainer.layers.base import Parallel, as_input
from trainer.layers.dropout import Dropout, TokenPlaces, token_places
from trainer.layers.embedding import PositionEmbedding
from trainer.layers.head import VocabularyBias, head_loss
from trainer.layers.linear import Linear, column_product
from trainer.models.bert.shape import SENTENCE_LOSS, BertShape
from trainer.models.gpt.model import GPT, Block, Context, build_gpt, make_norm
from trainer.models.stage import NO_PAIR, Microbatch, NamedLoss, Tensors, only_tokens, summed
from trainer.parallel.collectives import Group
from trainer.parallel.conjugates import gather_columns, gather_rows
from trainer.parallel.params import Place


class PostNormBlock(Block):
    """norm(x + attention(x)), then norm(x + mlp(x))."""

    def forward(self, x_ND: Tensor, branch_ND: Tensor | None, context: Context) -> tuple[Tensor, Tensor | None]:
        """See `Block`; the sums are normalized here, so nothing is left to add."""
        assert branch_ND is None, "the block before has added it"
        assert self.attention_out_norm is not None and self.mlp_out_norm is not None, "block_norm is not output"
        branch_ND = self.drop_attention(self.attention(x_ND, context.sequences), context.places)
        sum_ND, y_ND = self.attention_out_norm(x_ND, branch_ND)
        with self.recomputed(self.attention_out_norm, sum_ND, y_ND):
            branch_ND = self.drop_mlp(self.mlp(y_ND, recompute=self.selective), context.places)
        return self.mlp_out_norm(y_ND, branch_ND)[1], None


class Transform(nn.Module):
    """What the head reads of a token: norm(gelu(dense(x)))."""

    def __init__(self, shape: BertShape, kernels: Kernels) -> None:
        super().__init__()
        self.dense, self.norm = _dense(shape.hidden_size, shape.hidden_size), make_norm(shape, kernels)
        self.approximate = "none" if shape.head_activation == "gelu_erf" else "tanh"

    def forward(self, x_MD: Tensor) -> Tensor:
        y_MD: Tensor = self.norm(F.gelu(self.dense(x_MD), approximate=self.approximate))[1]
        return y_MD


class Bert(GPT):
    """One rank's part of one pipeline stage of the model. See `GPT`."""

    shape: BertShape

    @classmethod
    def class_for(cls, shape: BertShape) -> type[GPT]:
        """See `GPT`."""
        return PostNormBert if shape.is_post_norm else cls

    def __init__(
        self,
        shape: BertShape,
        place: Place,
        *,
        groups: Mapping[str, Group],
        kernels: Kernels,
        recompute: RecomputeSection,
        seed: int,
    ) -> None:
        super().__init__(shape, place, groups=groups, kernels=kernels, recompute=recompute, seed=seed)
        width, tp = shape.hidden_size, self.parallel.tp
        self.whole_rows = Parallel(tp, sequence_parallel=False)
        if place.is_first and shape.token_types:
            self.types = PositionEmbedding(shape.token_types, width)
        if place.is_first and shape.is_post_norm:
            self.embedding_norm = make_norm(shape, self.kernels)
        if not place.is_last:
            return
        if shape.is_post_norm:
            del self.final_norm
        if shape.classes:
            self.pooler, self.classifier = _dense(width, width), _dense(width, shape.classes)
            self.drop_pooled = Dropout(
                shape.hidden_dropout, seed=seed, layer=shape.num_layers + 1, site="pooled", kernels=self.kernels
            )
            return
        self.transform = Transform(shape, self.kernels)
        self.head_bias = VocabularyBias(shape.padded_vocab_size // tp.size)
        if shape.binary_head:
            self.pooler, self.binary_head = _dense(width, width), _dense(width, 2)

    def forward(self, received: Tensors, batch: Microbatch) -> Tensors:
        """See `GPT`; the last stage also adds the loss of pairs, if there are pairs."""
        x_ND, branch_ND = self._through_blocks(received, batch)
        if not self.place.is_last:
            return (x_ND if branch_ND is None else x_ND + branch_ND,)
        y_ND = self._encoded(x_ND, branch_ND)
        if self.shape.classes:
            return self._classified(y_ND, batch)
        if self.shape.binary_head and batch.losses is not None and batch.swapped_B is not None:
            batch.losses[SENTENCE_LOSS] = _pair_loss(self._pair_logits(y_ND, batch), batch.swapped_B)
        if self.loss_function is not None:
            return summed(self.loss_function(self._all_logits(y_ND, batch), batch), batch)
        weight_N = batch.loss_mask_BS.flatten()
        masked_M = _masked(weight_N) if batch.predicted_M is None else batch.predicted_M
        loss, losses_M = head_loss(
            self.transform(y_ND.index_select(0, _computed_at(masked_M, batch))),
            self.embedding,
            labels_N=batch.labels_BS.flatten()[masked_M],
            weight_N=weight_N[masked_M],
            kernels=self.kernels,
            bias=self.head_bias,
            parallel=self.whole_rows,
        )
        return loss, torch.zeros_like(weight_N, dtype=losses_M.dtype).index_copy(0, masked_M, losses_M)

    def loss_weights(self, batch: Microbatch) -> Mapping[str, Tensor]:
        """See Stage: the rows with pairs."""
        if not self.shape.binary_head or batch.swapped_B is None:
            return {}
        return {SENTENCE_LOSS: (batch.swapped_B != NO_PAIR).sum()}

    def logits(self, tokens_BS: Tensor, received: Tensors = ()) -> Tensor:
        """See `GPT`; of a head for rows those of each row: [B, classes]."""
        if self.shape.classes:
            return self.class_logits(only_tokens(tokens_BS), received)
        return super().logits(tokens_BS, received)

    def class_logits(self, batch: Microbatch, received: Tensors = ()) -> Tensor:
        """Of the last stage: the logits of samples' classes or choices: fp32[samples, C]."""
        return self._class_logits(self._encoded(*self._through_blocks(received, batch)), batch)

    def _class_logits(self, y_ND: Tensor, batch: Microbatch) -> Tensor:
        pooled_BD = self.pooler(self._first_tokens(y_ND, batch)).tanh()
        places = None
        if batch.samples_B is not None:
            places = TokenPlaces(batch.samples_B, torch.zeros_like(batch.samples_B))
        logits_BC: Tensor = self.classifier(self.drop_pooled(pooled_BD, places))
        logits_BC = logits_BC.to(torch.promote_types(logits_BC.dtype, torch.float32))
        return logits_BC.view(-1, batch.choices) if batch.choices else logits_BC

    def _classified(self, y_ND: Tensor, batch: Microbatch) -> Tensors:
        """The sum of the losses of samples, and each at the first token of its first row."""
        logits_RC = self._class_logits(y_ND, batch)
        if self.loss_function is not None:
            return summed(self.loss_function(logits_RC, batch), batch)
        rows = batch.choices or 1
        labels_R, weight_R = (values_BS[::rows, 0] for values_BS in (batch.labels_BS, batch.loss_mask_BS))
        losses_R = F.cross_entropy(logits_RC, labels_R, reduction="none") * weight_R
        losses_N = torch.zeros(batch.tokens_BS.numel(), dtype=losses_R.dtype, device=losses_R.device)
        losses_N[:: rows * batch.tokens_BS.shape[1]] = losses_R.detach()
        return losses_R.sum(dtype=torch.float64), losses_N

    def pair_logits(self, batch: Microbatch) -> Tensor:
        """Of a stage that is the whole model: logits of "follows" and "does not follow": [B, 2]."""
        return self._pair_logits(self._encoded(*self._through_blocks((), batch)), batch)

    def _through_blocks(self, received: Tensors, batch: Microbatch) -> tuple[Tensor, Tensor | None]:
        return super()._through_blocks(received, batch.of_real_tokens())

    def _stream(self, batch: Microbatch) -> Tensors:
        return super()._stream(batch if batch.real is None else replace(batch, tokens_BS=batch.real.flat_M))

    def _encoded(self, x_ND: Tensor, branch_ND: Tensor | None) -> Tensor:
        """All tokens after the last norm, on each tp rank."""
        if self.shape.is_post_norm:
            y_ND = x_ND
        else:
            _, y_ND = self.final_norm(x_ND, branch_ND)
        return gather_rows(y_ND, self.parallel.tp) if self.parallel.sequence_parallel else y_ND

    def _pair_logits(self, y_ND: Tensor, batch: Microbatch) -> Tensor:
        logits_B2: Tensor = self.binary_head(self.pooler(self._first_tokens(y_ND, batch)).tanh())
        return logits_B2

    def _first_tokens(self, y_ND: Tensor, batch: Microbatch) -> Tensor:
        """What the heads of rows read: [B, D]."""
        if batch.real is None:
            return y_ND.view(*batch.tokens_BS.shape, -1)[:, 0].contiguous()
        return y_ND.index_select(0, batch.real.bounds[: len(batch.tokens_BS)])

    def _whole_logits(self, x_ND: Tensor, branch_ND: Tensor | None, batch: Microbatch) -> Tensor:
        return self._all_logits(self._encoded(x_ND, branch_ND), batch)

    def _all_logits(self, y_ND: Tensor, batch: Microbatch) -> Tensor:
        if batch.real is not None:  # a user's loss reads whole rows
            y_ND = y_ND.new_zeros(batch.tokens_BS.numel(), y_ND.shape[1]).index_copy(0, batch.real.flat_M, y_ND)
        logits_NV = gather_columns(self._logits_of(y_ND), self.parallel.tp)
        return logits_NV[:, : self.shape.vocab_size].unflatten(0, batch.tokens_BS.shape)

    def _local_logits(self, x_ND: Tensor, branch_ND: Tensor | None) -> Tensor:
        return self._logits_of(self._encoded(x_ND, branch_ND))

    def _logits_of(self, y_ND: Tensor) -> Tensor:
        rows = self.embedding
        logits_NV = column_product(self.transform(y_ND), rows, weight=rows.weight, parallel=self.whole_rows)
        return logits_NV + as_input(self.head_bias, "bias").to(logits_NV.dtype)

    def _enter(self, batch: Microbatch, places: TokenPlaces | None) -> Tensor:
        """The first residual stream: types are added, and the sum is normalized before dropout.

        Where there is one type, as in RoBERTa, a second text has it too.
        """
        x_ND = super()._enter(batch, None)
        if self.shape.token_types:
            types_BS = batch.types_BS if self.shape.token_types > 1 else None
            types_BS = torch.zeros_like(batch.tokens_BS) if types_BS is None else types_BS
            mine = self.parallel.local_tokens(batch.tokens_BS.numel())
            x_ND = x_ND + self.types(types_BS.flatten()[mine])
        if self.shape.is_post_norm:
            x_ND = self.embedding_norm(x_ND)[1]
        return self.drop_embedding(x_ND, places)

    def _row_length(self, batch: Microbatch) -> int:
        """Of the rows whose real tokens are computed as one, too."""
        return batch.tokens_BS.shape[1] if batch.real is None else batch.labels_BS.shape[1]

    def _context(self, batch: Microbatch) -> Context:
        context = super()._context(batch)
        context = context._replace(sequences=replace(context.sequences, lengths_B=batch.lengths_B))
        if batch.real is None or context.places is None or batch.samples_B is None:
            return context
        length, flat_M = self._row_length(batch), batch.real.flat_M
        mine = self.parallel.local_tokens(len(flat_M))
        return context._replace(places=token_places(batch.samples_B, length, mine=mine, flat_M=flat_M))


class PostNormBert(Bert):
    """The model of Devlin et al. 2019."""

    block_type = PostNormBlock


def _dense(inputs: int, outputs: int) -> Linear:
    """A layer that is not divided."""
    undivided = Parallel(Group.single("tp"), sequence_parallel=False)
    return Linear(inputs, outputs, parallel=undivided, bias=True, column=True)


def _masked(weight_N: Tensor) -> Tensor:
    """The tokens that count in the loss: int64[M]. Their number is not known on a device without data: all count."""
    if weight_N.device.type == "meta":
        return torch.arange(len(weight_N), device=weight_N.device)
    return weight_N.nonzero().squeeze(1)


def _computed_at(masked_M: Tensor, batch: Microbatch) -> Tensor:
    """The places of flat tokens among those that are computed."""
    if batch.real is None:
        return masked_M
    flat_M = batch.real.flat_M
    place_N = torch.zeros(batch.tokens_BS.numel(), dtype=torch.int64, device=flat_M.device)
    return place_N.index_copy(0, flat_M, torch.arange(len(flat_M), device=flat_M.device))[masked_M]


def _pair_loss(logits_B2: Tensor, swapped_B: Tensor) -> NamedLoss:
    wide = logits_B2.to(torch.promote_types(logits_B2.dtype, torch.float32))
    total = F.cross_entropy(wide, swapped_B, ignore_index=NO_PAIR, reduction="sum")
    return NamedLoss(total, (swapped_B != NO_PAIR).sum(), of_step=SENTENCE_LOSS)


build_bert = functools.partial(build_gpt, model=Bert)
