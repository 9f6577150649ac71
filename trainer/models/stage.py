"""The interface of a model: microbatches in, tensors from stage to stage, a loss out.

A model is one or more pipeline stages. Each is a function of tensors, so that whatever a family passes from one stage
to the next (hidden states, and those of an encoder) is sent in the same way.

Shapes: B rows, S tokens of a row, N = B * S, batch-major.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from mdata import UsageError
from trainer.kernels.table import Kernels
from trainer.layers.block_hooks import BlockHooks
from trainer.layers.paged import PagedStep
from trainer.models.family import DecodeState
from trainer.parallel.collectives import Group
from trainer.parallel.context import columns_of

Tensors = tuple[Tensor, ...]


NO_PAIR = -1  # in Microbatch.swapped_B, of a row that does not count


class NamedLoss(NamedTuple):
    """A loss of a microbatch beside that of its labels, whose denominator is another one.

    The objective of a step has factor x its mean over the step: the quotient of the sums of `sum` and of `weight`,
    however the step is divided into microbatches. The step's gradient is divided by all loss tokens N, so backward
    begins with factor x N / the step's weight, which is known before (`Stage.loss_weights`).

    Where it is not known, the objective of the microbatch has factor x n x sum / weight, n being its loss tokens: a
    mean over microbatches, each weighted by its tokens; for a mean of microbatch means, a plain one (Megatron's rule).
    Sum and weight are those of the whole microbatch on each rank of tp and cp, and gradients add up as those of other
    values.

    Args:
        sum: scalar, differentiable. weight: scalar. Reported is the quotient of both sums over the step.
        factor: by which its mean counts in the objective.
        of_step: the name of its weight among those of the step; None: it has a mean of its own in each microbatch.
        seeded: the sum is multiplied by all of that already, as is the weight, because its gradient is computed in the
            forward pass; both are this rank's part.
    """

    sum: Tensor
    weight: Tensor
    factor: float = 1.0
    of_step: str | None = None
    seeded: bool = False


class StepSums(NamedTuple):
    """Of all microbatches of a step, over all ranks.

    Args:
        tokens: fp64 scalar, the sum of the mask. weights: fp64 scalars, those of `Stage.loss_weights`.
    """

    tokens: Tensor
    weights: Mapping[str, Tensor]


class RealTokens(NamedTuple):
    """The tokens of padded rows that are computed: real ones, and as much padding as makes their number a multiple.

    Args:
        flat_M: int64[M], their places among the B * S tokens: row after row, then the padding.
        bounds: int32[B + 1 + P], where rows begin among them, then the P parts of the padding, and M. No part is longer
            than a row.
        longest: tokens of the longest of all, or more.
    """

    flat_M: Tensor
    bounds: Tensor
    longest: int


class EncoderTokens(NamedTuple):
    """What the encoder of a model with two stacks reads.

    Args:
        tokens_BS: int64[B, S of the encoder]. lengths_B: int32[B], real tokens of each row; the rest is padding.
        real: the tokens that a model without padding computes; None: all.
    """

    tokens_BS: Tensor
    lengths_B: Tensor
    real: RealTokens | None = None


class PairRows(NamedTuple):
    """Pairs of conversations in the rows of a microbatch, for DPO (models/preferences.py).

    Args:
        number_BS: int64[B, S], ascending: which conversation each token belongs to, 2i chosen and 2i + 1 rejected.
        trained_BS: fp32[B, S], 1 where the label's log probability counts.
        reference_K: fp64, that of each whole conversation under the reference model. beta: of the loss.
    """

    number_BS: Tensor
    trained_BS: Tensor
    reference_K: Tensor
    beta: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """One microbatch on the device.

    Args:
        tokens_BS, labels_BS: int64[B, S]. loss_mask_BS: fp32[B, S], the weight of each token's loss. In a model with
            an encoder and a decoder these are the decoder's.
        samples_B: int64[B], global sample numbers; None if nothing depends on them.
        positions_BS: int64[B, S] if positions restart in each document; None: 0 to S - 1 in each row.
        bounds: int32, where documents begin and end in the N flat tokens, from 0 to N; None: each row is one.
        longest: tokens of the longest document between bounds.
        columns_S: int64[S], positions in their rows of this rank's tokens under context parallelism; bounds are then
            those of whole rows. None: whole rows.
        loss_tokens: fp32 scalar, the sum of the mask over whole rows; None: that of loss_mask_BS.
        components_B: int64[B], the blend component of each row, or int64[N], that of each token; None: losses by
            component are not requested.
        lengths_B: int32[B], real tokens of each row; the rest is padding. None: rows have no padding.
        real: the tokens that a model without padding computes; None: all.
        types_BS: int64[B, S], 0 for tokens of the first text of a row, 1 for those of the second; None: one text.
        predicted_M: int64[M], the flat tokens for which a head of masked tokens computes logits, all with a loss among
            them; None: those with a loss, for which the host waits for a GPU.
        swapped_B: int64[B], 1 where the second text does not follow the first, for the loss of pairs; -1: does not
            count. None: no pairs.
        of_step: the sums of the step; None: no loss needs them, or its microbatches count one by one.
        pairs: the conversations of rows that are pairs, whose loss mask has 1 at one token of each pair; None: other
            rows.
        encoder: what the encoder reads; None: the model has one stack.
        step: a step of generation, whose tokens [1, N] are new ones of several rows; None: whole rows.
        choices: rows of a sample, next to each other, of which the head says which is right. The first has the label
            and the loss of all in its first token, as each row has where it has a class. None: rows are samples.
        losses: where stages put losses beside that of the labels, by the names that their family lists.
        counts: where stages put numbers that are summed over the step, such as the tokens of each expert, by the names
            that their family lists: those of this rank's part of the rows, the same on each tp rank.
    """

    tokens_BS: Tensor
    labels_BS: Tensor
    loss_mask_BS: Tensor
    samples_B: Tensor | None = None
    positions_BS: Tensor | None = None
    bounds: Tensor | None = None
    longest: int = 0
    columns_S: Tensor | None = None
    loss_tokens: Tensor | None = None
    components_B: Tensor | None = None
    lengths_B: Tensor | None = None
    real: RealTokens | None = None
    types_BS: Tensor | None = None
    predicted_M: Tensor | None = None
    swapped_B: Tensor | None = None
    of_step: StepSums | None = None
    pairs: PairRows | None = None
    encoder: EncoderTokens | None = None
    choices: int | None = None
    losses: dict[str, NamedLoss] | None = None
    counts: dict[str, Tensor] | None = None
    step: PagedStep | None = None

    @property
    def whole_loss_tokens(self) -> Tensor:
        """The sum of the mask over whole rows, on each of the ranks that share them."""
        return self.loss_mask_BS.sum() if self.loss_tokens is None else self.loss_tokens

    def of_real_tokens(self) -> Microbatch:
        """What the blocks read: the real tokens in one row whose documents are the rows; itself if all are computed."""
        if self.real is None:
            return self
        (flat_M, bounds, longest), types_BS = self.real, self.types_BS
        return replace(
            self,
            tokens_BS=self.tokens_BS.flatten()[flat_M][None],
            positions_BS=(flat_M % self.tokens_BS.shape[1])[None],
            types_BS=None if types_BS is None else types_BS.flatten()[flat_M][None],
            bounds=bounds,
            longest=longest,
            lengths_B=None,
        )

    def on_context_rank(self, cp: Group) -> Microbatch:
        """The part that one of the ranks that share its rows holds; itself if there is only one."""
        if cp.size == 1:
            return self
        length, device = self.tokens_BS.shape[1], self.tokens_BS.device
        mine_S = torch.tensor(columns_of(length, rank=cp.rank, size=cp.size), device=device)
        return replace(
            self,
            tokens_BS=self.tokens_BS[:, mine_S],
            labels_BS=self.labels_BS[:, mine_S],
            loss_mask_BS=self.loss_mask_BS[:, mine_S],
            positions_BS=None if self.positions_BS is None else self.positions_BS[:, mine_S],
            columns_S=mine_S,
            loss_tokens=self.loss_mask_BS.sum(),
            pairs=self.pairs
            and self.pairs._replace(
                number_BS=self.pairs.number_BS[:, mine_S], trained_BS=self.pairs.trained_BS[:, mine_S]
            ),
        )


def only_tokens(tokens_BS: Tensor) -> Microbatch:
    """Rows of which no loss is asked: int64[B, S]."""
    nothing = torch.zeros(0, device=tokens_BS.device)
    return Microbatch(tokens_BS=tokens_BS, labels_BS=nothing, loss_mask_BS=nothing)


LossFunction = Callable[[Tensor, Microbatch], Tensor]
"""A user's loss: (logits [B, S, vocab_size], microbatch) -> the sum of the loss, or the losses of all tokens [B, S]."""


class Stage(Protocol):
    """One pipeline stage of a model on one rank; an nn.Module whose parameters are those of its table."""

    kernels: Kernels
    hooks: BlockHooks
    loss_function: LossFunction | None  # a user's; None: the model's own

    @property
    def hooked(self) -> range:
        """The blocks of the stage, by their numbers in its hooks."""

    def __call__(self, received: Tensors, batch: Microbatch) -> Tensors:
        """Compute the tensors for the next stage from those of the previous one (none at the first).

        The last returns (sum of the loss, losses of the N tokens); a user's loss may leave out the second.
        """

    def loss_weights(self, batch: Microbatch) -> Mapping[str, Tensor]:
        """The weights of the microbatch's named losses that have a mean over the step, by names of the family's choice.

        Scalars, of whole rows, the same on all ranks but those of data parallelism; called by all ranks.
        """

    def received(self, batch: Microbatch) -> Tensors:
        """Empty tensors like those that the previous stage sends for a microbatch; none at the first stage."""

    def given(self, batch: Microbatch) -> Tensors:
        """Empty tensors like those that this stage sends to the next; none at the last stage."""

    def whole_logits(self, batch: Microbatch) -> Tensor:
        """Of a stage that is the whole model: logits [B, S, vocab_size], complete on each tp rank, differentiable."""

    def decode_states(self) -> Mapping[int, DecodeState]:
        """What its blocks keep between the tokens that they generate, by their numbers in the model."""

    def next_logits(self, received: Tensors, batch: Microbatch, at_M: Tensor) -> Tensor:
        """Of the last stage in a step of generation: logits after these of the N tokens, this rank's entries: [M, V].

        A stage before it is called as in training.
        """

    def modules(self) -> Iterator[nn.Module]: ...

    def named_parameters(self) -> Any: ...

    def get_submodule(self, target: str) -> nn.Module: ...


class BufferedStage(Stage, Protocol):
    """A stage of a family with buffers: module buffers under the names of its table, which are fp32 in a run."""

    def next_buffers(self, counts: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The values after this step. Called by all ranks; they are taken over only if the step is applied.

        Args:
            counts: fp64, the sums over the whole step of what stages put into `Microbatch.counts`.
        """


def summed(loss: Tensor, batch: Microbatch) -> Tensors:
    """The result of a user's loss function, in the form that the last stage returns.

    Raises:
        UsageError: the result is neither a sum nor the losses of all tokens.
    """
    if not loss.dim():
        return (loss,)
    if loss.shape != batch.tokens_BS.shape:
        found, rows = f"shape {list(loss.shape)}", list(batch.tokens_BS.shape)
        expected = f"a sum (no dims), or the loss of each token, {rows}"
        raise UsageError("the loss function gave a tensor of another shape", found=found, expected=expected)
    return loss.sum(dtype=torch.float64), loss.detach().flatten()


def joined(stages: Sequence[nn.Module]) -> nn.Module:
    """The parameters of a rank's stages under their names in the whole model.

    Parameters that two stages have under one name, such as a tied embedding, are shared from here on.
    """
    if len(stages) == 1:
        return stages[0]
    module = nn.Module()
    for stage in stages:
        for name, child in list(stage.named_children()):
            existing = module._modules.get(name)
            if existing is None:
                module.add_module(
                    name, nn.ModuleDict(dict(child.items())) if isinstance(child, nn.ModuleDict) else child
                )
            elif isinstance(existing, nn.ModuleDict) and isinstance(child, nn.ModuleDict):
                existing.update(dict(child.items()))  # blocks, by their numbers
            else:
                stage.add_module(name, existing)
    return module
