"""Runs a lowered schedule on one rank: all forward and backward passes happen here.

Does not decide the order of actions (generators.py) or updates (optimizer.py). Gradients of the *sum* of the loss
accumulate; nothing is divided here, because the number of tokens of the step is known only at its end. Only for a mean
of microbatch means, each microbatch's sum is divided by its own number of tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from trainer.layers.base import Layer, weights_later
from trainer.layers.block_hooks import BlockHooks
from trainer.models.stage import Microbatch, Stage, Tensors
from trainer.parallel.collectives import Group
from trainer.pipeline.actions import Action, Link, Schedule
from trainer.pipeline.loss_sums import loss_factor, loss_sums
from trainer.pipeline.messages import Messages

WAIT_S = 50.0  # for a message; a peer that gives none for so long is named
FIRST_WAIT_S = 600.0  # in the first step, in which a peer may compile its kernels

Key = tuple[int, int]  # stage, microbatch


@dataclasses.dataclass(slots=True)
class _Kept:
    """The state that a forward pass keeps for its backward pass: tensors where gradients enter and leave."""

    outputs: tuple[GradientEdge, ...]
    inputs: Tensors


class Executor:
    """A rank's stages, and its links to the neighbours.

    Args:
        stages: by their numbers. rank: on the pipeline.
        links: as in World.
        wait_s: on CPUs, the longest wait for a message, except in the first run.

    Attributes:
        watch: called with each action before it runs, and with None after the last one.
    """

    def __init__(
        self, stages: Mapping[int, Stage], rank: int = 0, *, links: Mapping[Link, Group], wait_s: float = WAIT_S
    ) -> None:
        self.stages, self.rank, self.links, self.wait_s = dict(stages), rank, links, wait_s
        self._layers = {number: _layers(stage) for number, stage in self.stages.items()}
        self.watch: Callable[[Action | None], None] = lambda action: None
        self._runs = 0

    def run(
        self,
        schedule: Schedule,
        microbatches: Sequence[Microbatch],
        *,
        own_means: bool = False,
        scale: Tensor | None = None,
        num_components: int = 0,
    ) -> Tensor:
        """Run the rank's actions in order; the layers add gradients to their main gradients.

        Args:
            schedule: lowered. Without backward passes it should be run without gradients.
            own_means: gradients are those of the sum of microbatch means; the returned values do not change.
            scale: scalar by which gradients are multiplied; the returned values do not change. None: 1.
            num_components: of the blend; 0: no losses by component.

        Returns:
            fp64[2 + 2 num_components] on the device: the sum of the loss and the number of loss tokens of this rank's
            microbatches, then the sums of each component, then their numbers of tokens; zeros on ranks without the last
            stage.

        Raises:
            LostRankError: a peer has ended, or sent no message in time; names the action and the peer.
        """
        wait_s = self.wait_s if self._runs else FIRST_WAIT_S
        run = _Run(self, schedule, microbatches, num_components=num_components, wait_s=wait_s)
        run.own_means, run.scale = own_means, scale
        for action in schedule.actions[self.rank]:
            self.watch(action)
            run.do(action)
        run.finish()
        self.watch(None)
        self._runs += 1
        return run.totals

    def layers(self, stage: int) -> Sequence[Layer]:
        """All layers of a stage of this rank."""
        return self._layers[stage]


class _Run:
    """One step in progress."""

    def __init__(
        self,
        executor: Executor,
        schedule: Schedule,
        microbatches: Sequence[Microbatch],
        *,
        num_components: int,
        wait_s: float,
    ) -> None:
        self.executor, self.schedule, self.microbatches = executor, schedule, microbatches
        self.messages = Messages(schedule, executor.rank, links=executor.links, wait_s=wait_s)
        self.own_means = False
        self.scale: Tensor | None = None
        device = microbatches[0].tokens_BS.device
        self.num_components = num_components
        self.totals = torch.zeros(2 + 2 * num_components, dtype=torch.float64, device=device)
        self.kept: dict[Key, _Kept] = {}
        self.weights: dict[Key, list[Callable[[], None]]] = {}
        ends = (action for action in schedule.actions[executor.rank] if action.kind in ("B", "W"))
        self.last = {action.stage: action for action in ends}  # for each stage, the action that completes its gradients

    def do(self, action: Action) -> None:
        """Run one action of this rank."""
        if action.kind.startswith("SEND"):
            self.messages.send(action)
        elif action.kind.startswith("RECV"):
            self.messages.begin_receive(action, self._buffers(action))
        elif action.kind == "F":
            self._forward(action)
        elif action.kind == "W":
            self._hooks(action)
            with torch.no_grad():
                for add in self.weights.pop((action.stage, action.microbatch)):
                    add()
        else:
            self._backward(action)

    def finish(self) -> None:
        """Wait until all sends have finished."""
        self.messages.finish()
        for stage in self.executor.stages.values():
            stage.hooks.last_microbatch = False  # a backward pass run by other code does not end a step
        left = [*self.kept, *self.weights]
        assert not left, f"the schedule left {left[:4]} without what follows"

    def _forward(self, action: Action) -> None:
        _, number, microbatch = action
        stage, batch = self.executor.stages[number], self.microbatches[microbatch]
        inputs = self.messages.take(Action("RECV_F", number, microbatch)) if number else ()
        train = torch.is_grad_enabled()
        for tensor in inputs:
            tensor.requires_grad_(train)
        if number + 1 == self.schedule.num_stages:
            outputs = self._loss(stage, inputs, batch)
        else:
            outputs = stage(inputs, batch)
            self.messages.give(Action("SEND_F", number, microbatch), tuple(tensor.detach() for tensor in outputs))
        if train:
            self.kept[number, microbatch] = _Kept(tuple(map(get_gradient_edge, outputs)), inputs)

    def _loss(self, stage: Stage, inputs: Tensors, batch: Microbatch) -> Tensors:
        mask_BS, tokens = batch.loss_mask_BS, batch.loss_mask_BS.sum()
        whole = tokens if batch.loss_tokens is None else batch.loss_tokens
        factor = loss_factor(whole, own_means=self.own_means, scale=self.scale)
        if factor is not None:  # the loss computes its gradient in its forward pass: only the mask can scale it
            outputs = stage(inputs, dataclasses.replace(batch, loss_mask_BS=mask_BS.double() * factor))
        else:
            outputs = stage(inputs, batch)
        counted = loss_sums(outputs, batch, factor=factor, num_components=self.num_components)
        self.totals[: len(counted)] += counted
        return outputs[:1]

    def _backward(self, action: Action) -> None:
        kind, number, microbatch = action
        kept = self.kept.pop((number, microbatch))
        last = number + 1 == self.schedule.num_stages
        gradients = (None,) if last else self.messages.take(Action("RECV_B", number, microbatch))
        hooks, blocks = self._hooks(action), self.executor.stages[number].hooked
        if kind == "I":
            with weights_later(self.executor.layers(number)) as later:
                hooks.later = later
                _backward(kept.outputs, gradients, hooks=hooks, blocks=blocks)
            self.weights[number, microbatch], hooks.later = later, None
        else:
            _backward(kept.outputs, gradients, hooks=hooks, blocks=blocks)
        if number:
            self.messages.give(Action("SEND_B", number, microbatch), tuple(_gradient(tensor) for tensor in kept.inputs))

    def _hooks(self, action: Action) -> BlockHooks:
        """The hooks of an action's stage, informed whether gradients are complete after it."""
        hooks = self.executor.stages[action.stage].hooks
        hooks.last_microbatch = self.last.get(action.stage) == action
        return hooks

    def _buffers(self, receive: Action) -> Tensors:
        """The buffers for a received message."""
        stage, batch = self.executor.stages[receive.stage], self.microbatches[receive.microbatch]
        return stage.received(batch) if receive.kind == "RECV_F" else stage.given(batch)


def _backward(
    outputs: tuple[GradientEdge, ...], gradients: Sequence[Tensor | None], *, hooks: BlockHooks, blocks: range
) -> None:
    """The backward pass of a stage; autograd calls the borders in between."""
    hooks.before_backward(blocks[-1])
    torch.autograd.backward(outputs, gradients)
    hooks.after_backward(blocks[0])


def _gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None, "a stage that does not use what it received"
    gradient, tensor.grad = tensor.grad, None
    return gradient


def _layers(stage: Any) -> list[Layer]:
    return [module for module in stage.modules() if isinstance(module, Layer)]
