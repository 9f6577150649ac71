"""One microbatch in one stage: forward, then backward in one part or two.

`Pass` computes immediately and is used once. Its methods only take and return tensors, and all that the forward pass
keeps for backward belongs to the object, so that graphs.py can record each method once and replay it for other
microbatches. Gradients of the *sum* of the loss accumulate in the layers' main gradients; nothing is divided here,
because the number of tokens of the step is known only at its end. Only for a mean of microbatch means, each
microbatch's sum is divided by its own number of tokens. Losses of other names (models/stage.py) begin backward with a
gradient that makes them come out right after the later division.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from trainer.layers.base import Layer, weights_later
from trainer.models.stage import Microbatch, NamedLoss, Stage, Tensors
from trainer.pipeline.loss_sums import loss_factor, loss_sums, with_named


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LossOptions:
    """What the last stage does with its loss.

    Args:
        own_means: gradients are those of the sum of microbatch means; the returned values do not change.
        num_components: of the blend; 0: no losses by component.
        names: of the losses that stages add beside that of the labels.
        counts: name -> how many numbers stages add beside losses.
    """

    own_means: bool = False
    num_components: int = 0
    names: tuple[str, ...] = ()
    counts: Mapping[str, int] = dataclasses.field(default_factory=dict, hash=False)

    @property
    def before(self) -> int:
        """Numbers before those of named losses."""
        return 2 + 2 * self.num_components

    @property
    def num_totals(self) -> int:
        """Numbers that a microbatch adds up: see Executor.run."""
        return self.before + 2 * len(self.names) + sum(self.counts.values())


class Pass:
    """One microbatch in one stage.

    Args:
        layers: all layers of the stage.
        is_last: whether the stage ends in the loss.
    """

    def __init__(self, stage: Stage, layers: Sequence[Layer], *, is_last: bool, loss: LossOptions) -> None:
        self.stage, self.layers, self.is_last, self.loss = stage, layers, is_last, loss
        self._outputs: tuple[GradientEdge, ...] = ()
        self._received: Tensors = ()
        self._seeds: Tensors = ()  # gradients of the losses of other names, the last of the outputs
        self._later: list[Callable[[], None]] = []

    def forward(self, received: Tensors, batch: Microbatch, scale: Tensor | None) -> tuple[Tensors, Tensor | None]:
        """(the tensors for the next stage, None); in the last stage (none, the microbatch's part of the totals).

        Args:
            received: from the previous stage; none at the first.
            scale: scalar by which gradients are multiplied; the totals do not change. None: 1.
        """
        train = torch.is_grad_enabled()
        for tensor in received:
            tensor.requires_grad_(train)
        named: dict[str, NamedLoss] = {}
        counts: dict[str, Tensor] = {}
        if self.loss.names or self.loss.counts:
            batch = dataclasses.replace(batch, losses=named, counts=counts)
        totals: Tensor | None
        if self.is_last:
            outputs, totals = self._with_loss(received, batch, scale)
        else:
            outputs, totals = self.stage(received, batch), None
        if self.loss.names or self.loss.counts:
            totals = with_named(
                totals,
                named,
                counts,
                names=self.loss.names,
                lengths=self.loss.counts,
                before=self.loss.before,
                device=batch.tokens_BS.device,
            )
        if train:
            self._seeds, added = self._seeded(named, batch, scale)
            self._outputs, self._received = tuple(map(get_gradient_edge, (*outputs, *added))), received
        return (() if self.is_last else tuple(tensor.detach() for tensor in outputs)), totals

    def _seeded(
        self, named: Mapping[str, NamedLoss], batch: Microbatch, scale: Tensor | None
    ) -> tuple[Tensors, Tensors]:
        """(gradients with which the losses of other names begin, these losses)."""
        if not named:
            return (), ()
        tokens = _loss_tokens(batch)
        factor = loss_factor(tokens, own_means=self.loss.own_means, scale=scale)
        losses = {name: loss for name, loss in named.items() if loss.sum.requires_grad and loss.factor}
        seeds = []
        for loss in losses.values():
            n, weight = tokens, loss.weight
            if loss.of_step and not self.loss.own_means:
                assert batch.step_tokens is not None and batch.step_pairs is not None, "the step's sums are not known"
                n, weight = batch.step_tokens, batch.step_pairs
            if loss.seeded:
                seeds.append(torch.ones_like(loss.sum))
                continue
            share = loss.factor * n.double() / torch.where(weight > 0, weight, 1)
            seeds.append((share * (1.0 if factor is None else factor)).to(loss.sum.dtype))
        return tuple(seeds), tuple(loss.sum for loss in losses.values())

    def backward(self, gradients: Tensors) -> Tensors:
        """Returns the gradients of the received tensors; adds those of the weights.

        Args:
            gradients: of the outputs; none at the last stage.
        """
        hooks, blocks = self.stage.hooks, self.stage.hooked
        hooks.before_backward(blocks[-1])
        given = gradients or (None,) * (len(self._outputs) - len(self._seeds))
        torch.autograd.backward(self._outputs, (*given, *self._seeds))
        hooks.after_backward(blocks[0])
        received, self._received, self._outputs, self._seeds = self._received, (), (), ()
        return tuple(_take_gradient(tensor) for tensor in received)

    def input_gradients(self, gradients: Tensors) -> Tensors:
        """`backward` without the products of weights, which `weight_gradients` computes."""
        hooks = self.stage.hooks
        with weights_later(self.layers) as later:
            self._later = hooks.later = later
            input_gradients = self.backward(gradients)
        hooks.later = None
        return input_gradients

    @torch.no_grad()
    def weight_gradients(self) -> None:
        """The products that `input_gradients` left out."""
        later, self._later = self._later, []
        for add in later:
            add()

    def _with_loss(self, received: Tensors, batch: Microbatch, scale: Tensor | None) -> tuple[Tensors, Tensor]:
        mask_BS, options, tokens = batch.loss_mask_BS, self.loss, _loss_tokens(batch)
        factor = loss_factor(tokens, own_means=options.own_means, scale=scale)
        if factor is not None:  # the loss computes its gradient in its forward pass: only the mask can scale it
            outputs = self.stage(received, dataclasses.replace(batch, loss_mask_BS=mask_BS.double() * factor))
        else:
            outputs = self.stage(received, batch)
        totals = loss_sums(outputs, batch, factor=factor, num_components=options.num_components)
        return outputs[:1], totals


def _loss_tokens(batch: Microbatch) -> Tensor:
    """Of the whole microbatch, on all ranks that share its rows."""
    return batch.loss_mask_BS.sum() if batch.loss_tokens is None else batch.loss_tokens


def _take_gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None, "the stage used the tensors that it received"
    gradient, tensor.grad = tensor.grad, None
    return gradient
