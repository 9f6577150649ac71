"""One microbatch in one stage: forward, then backward in one part or two.

`Pass` computes immediately and is used once. Its methods only take and return tensors, and all that the forward pass
keeps for backward belongs to the object, so that graphs.py can record each method once and replay it for other
microbatches. Gradients of the *sum* of the loss accumulate in the layers' main gradients; nothing is divided here,
because the number of tokens of the step is known only at its end. Only for a mean of microbatch means, each
microbatch's sum is divided by its own number of tokens. Losses of other names (models/stage.py) begin backward with a
gradient that makes them come out right after the later division. Of losses, sums and counts are kept, never means: the
divisor of a mean is known only after all ranks have reported. They stay on the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from trainer.layers.base import Layer, weights_later
from trainer.models.stage import Microbatch, NamedLoss, Stage, Tensors


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
    """One microbatch in one stage."""

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
        tokens = batch.whole_loss_tokens
        factor = loss_factor(tokens, own_means=self.loss.own_means, scale=scale)
        losses = {name: loss for name, loss in named.items() if loss.sum.requires_grad and loss.factor}
        seeds = []
        for loss in losses.values():
            n, weight = tokens, loss.weight
            if loss.of_step is not None and batch.of_step is not None:
                n, weight = batch.of_step.tokens, batch.of_step.weights[loss.of_step]
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
        mask_BS, options, tokens = batch.loss_mask_BS, self.loss, batch.whole_loss_tokens
        factor = loss_factor(tokens, own_means=options.own_means, scale=scale)
        if factor is not None:  # the loss computes its gradient in its forward pass: only the mask can scale it
            outputs = self.stage(received, dataclasses.replace(batch, loss_mask_BS=mask_BS.double() * factor))
        else:
            outputs = self.stage(received, batch)
        totals = loss_sums(outputs, batch, factor=factor, num_components=options.num_components)
        return outputs[:1], totals


def _take_gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None, "the stage used the tensors that it received"
    gradient, tensor.grad = tensor.grad, None
    return gradient


def loss_factor(tokens: Tensor, *, own_means: bool, scale: Tensor | None) -> Tensor | None:
    """The factor of a microbatch's loss; None: 1."""
    if not own_means:
        return scale
    share = 1 / tokens.clamp(min=1).double()
    return share if scale is None else share * scale


def loss_sums(outputs: Tensors, batch: Microbatch, *, factor: Tensor | None, num_components: int) -> Tensor:
    """A microbatch's part of the totals of Executor.run, or of the first of them."""
    (loss, *losses), mask_BS = outputs, batch.loss_mask_BS
    pairs = [(loss.detach().double().view(1), mask_BS.sum().double().view(1))]
    if num_components:  # a user's loss may return only its sum
        add_up = partial(by_component, batch=batch, num_components=num_components)
        pairs += [(add_up(losses_N), add_up(mask_BS)) for losses_N in losses]
    scaled = ((sums if factor is None else sums / factor, tokens) for sums, tokens in pairs)
    return torch.cat([part for pair in scaled for part in pair])


def with_named(
    totals: Tensor | None,
    losses: Mapping[str, NamedLoss],
    counts: Mapping[str, Tensor],
    *,
    names: Sequence[str],
    lengths: Mapping[str, int],
    before: int,
    device: torch.device,
) -> Tensor:
    """The totals, then sum and weight of each named loss, then the counts: fp64, 0 where a stage added nothing.

    Args:
        totals: the first `before` numbers, or fewer; None: zeros. names, lengths: that the family lists.
    """
    assert losses.keys() <= set(names), f"the family does not list the losses {sorted(losses.keys() - set(names))}"
    assert counts.keys() <= lengths.keys(), f"the family does not list {sorted(counts.keys() - lengths.keys())}"
    place = before + 2 * len(names)
    out = torch.zeros(place + sum(lengths.values()), dtype=torch.float64, device=device)
    if totals is not None:
        out[: len(totals)] = totals
    for number, name in enumerate(names):
        if (loss := losses.get(name)) is not None:
            first = before + 2 * number
            out[first], out[first + 1] = loss.sum.detach(), loss.weight
    for name, length in lengths.items():
        if name in counts:
            out[place : place + length] = counts[name]
        place += length
    return out


def by_component(values: Tensor, batch: Microbatch, *, num_components: int) -> Tensor:
    """Sums of values of tokens, [N] or [B, S], over the rows or tokens of each component: fp64[num_components].

    Not index_add_: on a GPU its order of additions differs between runs; and NaN times zero stays NaN.
    """
    assert batch.components_B is not None, "rows do not say their component"
    rows_B = values.reshape(len(batch.components_B), -1).sum(1, dtype=torch.float64)
    numbers_K = torch.arange(num_components, device=values.device)
    return torch.where(batch.components_B[:, None] == numbers_K, rows_B[:, None], 0.0).sum(0)
