"""Runs a lowered schedule on one rank: the one place where forward and backward passes happen.

Knows nothing of the order of actions (generators.py) or of updates (optimizer.py). Gradients of the *sum* of the loss
accumulate; nothing is divided here, because how many tokens the step has is only known when all of it was seen. Only
for a mean of microbatch means, each microbatch's sum is divided by its own tokens.

Sends do not hold up computation, and receives begin where the schedule says, before their tensors are needed. On CPUs
each message is preceded by its action, so that one that was taken for another is an error and not a wrong number.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from trainer.errors import LostRankError
from trainer.layers.base import Layer, weights_later
from trainer.models.stage import Microbatch, Stage, Tensors
from trainer.parallel.collectives import Group, Pending, start_receive_, start_send
from trainer.pipeline.actions import Action, Link, Schedule

WAIT_S = 50.0  # for a message; a peer that gives none for so long is named
FIRST_WAIT_S = 600.0  # in the first step, in which a peer may compile its kernels
_KINDS = ("SEND_F", "SEND_B")

Key = tuple[int, int]  # stage, microbatch


@dataclasses.dataclass(slots=True)
class _Kept:
    """What a forward pass leaves for its backward pass: where gradients enter, and where they come out."""

    outputs: tuple[GradientEdge, ...]
    inputs: Tensors


class Executor:
    """A rank's stages, and its links to the neighbours.

    Args:
        stages: by their numbers. rank: on the pipeline.
        links: as in World.
        wait_s: on CPUs, the longest wait for a message but in the first run.
    """

    def __init__(
        self, stages: Mapping[int, Stage], rank: int = 0, *, links: Mapping[Link, Group], wait_s: float = WAIT_S
    ) -> None:
        self.stages, self.rank, self.links, self.wait_s = dict(stages), rank, links, wait_s
        self._layers = {number: _layers(stage) for number, stage in self.stages.items()}
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
        """Do the rank's actions in order; the layers add gradients to their main gradients.

        Args:
            schedule: lowered. Without backward passes it should be run without gradients.
            own_means: gradients are those of the sum of microbatch means; what is returned stays the same.
            scale: scalar by which gradients are multiplied; what is returned stays the same. None: 1.
            num_components: of the blend; 0: losses by component are not wanted.

        Returns:
            fp64[2 + 2 num_components] on the device: the sum of the loss and the number of loss tokens of this rank's
            microbatches, then the sums of each component, then their numbers of tokens; zeros on ranks without the last
            stage.

        Raises:
            LostRankError: a peer is gone, or gave no message in time; the action and the peer are named.
        """
        wait_s = self.wait_s if self._runs else FIRST_WAIT_S
        run = _Run(self, schedule, microbatches, num_components=num_components, wait_s=wait_s)
        run.own_means, run.scale = own_means, scale
        for action in schedule.actions[self.rank]:
            run.do(action)
        run.finish()
        self._runs += 1
        return run.totals

    def layers(self, stage: int) -> Sequence[Layer]:
        """All layers of a stage of this rank."""
        return self._layers[stage]


class _Run:
    """One step on its way."""

    def __init__(
        self,
        executor: Executor,
        schedule: Schedule,
        microbatches: Sequence[Microbatch],
        *,
        num_components: int,
        wait_s: float,
    ) -> None:
        self.executor, self.schedule, self.microbatches, self.wait_s = executor, schedule, microbatches, wait_s
        self.own_means = False
        self.scale: Tensor | None = None
        device = microbatches[0].tokens_BS.device
        self.num_components = num_components
        self.totals = torch.zeros(2 + 2 * num_components, dtype=torch.float64, device=device)
        self.kept: dict[Key, _Kept] = {}
        self.weights: dict[Key, list[Callable[[], None]]] = {}
        self.ready: dict[Action, Tensors] = {}  # by the receive that brings them, or would if they had to travel
        self.coming: dict[Action, list[Pending]] = {}
        self.leaving: deque[tuple[Action, Pending]] = deque()

    def do(self, action: Action) -> None:
        """One action of this rank."""
        if action.kind.startswith("SEND"):
            self._send(action)
        elif action.kind.startswith("RECV"):
            self._begin_receive(action)
        elif action.kind == "F":
            self._forward(action)
        elif action.kind == "W":
            with torch.no_grad():
                for add in self.weights.pop((action.stage, action.microbatch)):
                    add()
        else:
            self._backward(action)

    def finish(self) -> None:
        """Wait until everything that was sent has left."""
        while self.leaving:
            self._wait(*self.leaving.popleft())
        left = [*self.kept, *self.weights, *self.coming, *self.ready]
        assert not left, f"the schedule left {left[:4]} without what follows"

    def _forward(self, action: Action) -> None:
        _, number, microbatch = action
        stage, batch = self.executor.stages[number], self.microbatches[microbatch]
        inputs = self._take(Action("RECV_F", number, microbatch)) if number else ()
        train = torch.is_grad_enabled()
        for tensor in inputs:
            tensor.requires_grad_(train)
        if number + 1 == self.schedule.num_stages:
            outputs = self._loss(stage, inputs, batch)
        else:
            outputs = stage(inputs, batch)
            self._give(Action("SEND_F", number, microbatch), tuple(tensor.detach() for tensor in outputs))
        if train:
            self.kept[number, microbatch] = _Kept(tuple(map(get_gradient_edge, outputs)), inputs)

    def _loss(self, stage: Stage, inputs: Tensors, batch: Microbatch) -> Tensors:
        mask_BS, tokens = batch.loss_mask_BS, batch.loss_mask_BS.sum()
        whole = tokens if batch.loss_tokens is None else batch.loss_tokens
        factor = _factor(whole, own_means=self.own_means, scale=self.scale)
        if factor is not None:  # the loss makes its gradient in its forward pass: only the mask reaches it
            outputs = stage(inputs, dataclasses.replace(batch, loss_mask_BS=mask_BS.double() * factor))
        else:
            outputs = stage(inputs, batch)
        counted = _counted(outputs, batch, factor, self.num_components)
        self.totals[: len(counted)] += counted
        return outputs[:1]

    def _backward(self, action: Action) -> None:
        kind, number, microbatch = action
        kept = self.kept.pop((number, microbatch))
        last = number + 1 == self.schedule.num_stages
        gradients = (None,) if last else self._take(Action("RECV_B", number, microbatch))
        if kind == "I":
            with weights_later(self.executor.layers(number)) as later:
                torch.autograd.backward(kept.outputs, gradients)
            self.weights[number, microbatch] = later
        else:
            torch.autograd.backward(kept.outputs, gradients)
        if number:
            self._give(Action("SEND_B", number, microbatch), tuple(_gradient(tensor) for tensor in kept.inputs))

    def _give(self, send: Action, tensors: Tensors) -> None:
        """Tensors for another stage: as they are to one of this rank, else until they are sent."""
        receive = self.schedule.partner(send)
        local = receive.stage in self.executor.stages
        self.ready[receive if local else send] = tensors

    def _take(self, receive: Action) -> Tensors:
        """What another stage has for this one."""
        if receive not in self.coming:
            return self.ready.pop(receive)
        head, *parts = self.coming.pop(receive)
        said = self._wait(receive, head)
        assert said.is_cuda or said.tolist() == _header(self.schedule.partner(receive)), (
            f"rank {self.executor.rank} waited for {receive}, and was sent the message {said.tolist()}"
        )
        return tuple(self._wait(receive, part) for part in parts)

    def _send(self, send: Action) -> None:
        link = self.executor.links[self.schedule.link(send)]
        while self.leaving and self.leaving[0][1].is_done:  # its memory is free again
            self._wait(*self.leaving.popleft())
        tensors = self.ready.pop(send)
        with _named(self, send):
            if not tensors[0].is_cuda:
                self.leaving.append((send, start_send(torch.tensor(_header(send)), link)))
            self.leaving += [(send, start_send(tensor.contiguous(), link)) for tensor in tensors]

    def _begin_receive(self, receive: Action) -> None:
        link = self.executor.links[self.schedule.link(receive)]
        batch = self.microbatches[receive.microbatch]
        if receive.kind == "RECV_F":
            buffers = self.executor.stages[receive.stage].received(batch)
        else:
            buffers = self.executor.stages[receive.stage].given(batch)
        with _named(self, receive):
            said = torch.zeros(3, dtype=torch.int64)
            head = Pending(buffers[0]) if buffers[0].is_cuda else start_receive_(said, link)
            self.coming[receive] = [head, *(start_receive_(buffer, link) for buffer in buffers)]

    def _wait(self, action: Action, pending: Pending) -> Tensor:
        with _named(self, action):
            return pending.wait_at_most(self.wait_s)


@contextmanager
def _named(run: _Run, action: Action) -> Iterator[None]:
    """Say which message an error of a connection is about, and whose."""
    try:
        yield
    except RuntimeError as error:
        rank = run.executor.rank
        link = run.schedule.link(action)
        peer = link[0] if link[1] == rank else link[1]
        raise LostRankError(
            f"pipeline rank {rank} cannot finish {action}, a message {'from' if link[0] == peer else 'to'} "
            f"pipeline rank {peer}",
            found=str(error).splitlines()[0][:200].encode("ascii", "ignore").decode().strip(),
            fix="check the output of the other ranks: one of them has ended or hangs",
        ) from error


def _gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None, "a stage that does not use what it received"
    gradient, tensor.grad = tensor.grad, None
    return gradient


def _header(send: Action) -> list[int]:
    return [_KINDS.index(send.kind), send.stage, send.microbatch]


def _layers(stage: Any) -> list[Layer]:
    return [module for module in stage.modules() if isinstance(module, Layer)]


def _counted(outputs: Tensors, batch: Microbatch, factor: Tensor | None, num_components: int) -> Tensor:
    """What a microbatch adds to the totals, or to the first of them."""
    (loss, *losses), mask_BS = outputs, batch.loss_mask_BS
    pairs = [(loss.detach().double().view(1), mask_BS.sum().double().view(1))]
    if num_components:  # a user's loss may say only its sum
        add_up = partial(by_component, batch=batch, num_components=num_components)
        pairs += [(add_up(losses_N), add_up(mask_BS)) for losses_N in losses]
    scaled = ((sums if factor is None else sums / factor, tokens) for sums, tokens in pairs)
    return torch.cat([part for pair in scaled for part in pair])


def by_component(values: Tensor, batch: Microbatch, *, num_components: int) -> Tensor:
    """Sums of values of tokens, [N] or [B, S], over the rows of each component: fp64[num_components].

    Not index_add_: on a GPU its order of sums is another in each run, and times zero a NaN stays one.
    """
    assert batch.components_B is not None, "rows do not say their component"
    rows_B = values.reshape(len(batch.components_B), -1).sum(1, dtype=torch.float64)
    numbers_K = torch.arange(num_components, device=values.device)
    return torch.where(batch.components_B[:, None] == numbers_K, rows_B[:, None], 0.0).sum(0)


def _factor(tokens: Tensor, *, own_means: bool, scale: Tensor | None) -> Tensor | None:
    """What the loss of a microbatch is multiplied by; None: 1."""
    if not own_means:
        return scale
    share = 1 / tokens.clamp(min=1).double()
    return share if scale is None else share * scale
