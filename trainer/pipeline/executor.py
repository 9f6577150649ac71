"""Runs a lowered schedule on one rank: all forward and backward passes happen here.

Does not decide the order of actions (generators.py), and does not compute updates (optimizer.py). passes.py computes
the actions; on a GPU it may be recorded and replayed (graphs.py). Messages are always sent from here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from trainer.layers.base import Layer
from trainer.models.stage import Microbatch, Stage, Tensors
from trainer.parallel.collectives import Group
from trainer.pipeline.actions import Action, Link, Schedule
from trainer.pipeline.graphs import ComputedPass, ReplayedPass, StageGraphs
from trainer.pipeline.messages import Messages
from trainer.pipeline.passes import LossOptions, Pass

WAIT_S = 50.0  # for a message; a peer that gives none for so long is named
FIRST_WAIT_S = 600.0  # in the first step, in which a peer may compile its kernels

Key = tuple[int, int]  # stage, microbatch
AnyPass = Pass | ReplayedPass | ComputedPass


class Executor:
    """A rank's stages, and its links to the neighbours.

    Args:
        stages: by their numbers. rank: on the pipeline.
        links: as in World.
        wait_s: on CPUs, the longest wait for a message, except in the first run.
        graphs: of the stages' passes; None: passes are not recorded.
        loss_names: of the losses that stages add beside that of the labels. counts: name -> how many numbers they add.

    Attributes:
        watch: called with each action before it runs, and with None after the last one.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        rank: int = 0,
        *,
        links: Mapping[Link, Group],
        wait_s: float = WAIT_S,
        graphs: StageGraphs | None = None,
        loss_names: tuple[str, ...] = (),
        counts: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.loss_names, self.counts = loss_names, dict(counts)
        self.stages, self.rank, self.links, self.wait_s, self.graphs = dict(stages), rank, links, wait_s, graphs
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
            fp64[2 + 2 num_components + 2 x names + counts] on the device: the sum of the loss and the number of loss
            tokens of this rank's microbatches, then the sums of each component, then their numbers of tokens; zeros on
            ranks without the last stage. Then sum and weight of each named loss of its stages, and their counts.

        Raises:
            LostRankError: a peer has ended, or sent no message in time; names the action and the peer.
        """
        wait_s = self.wait_s if self._runs else FIRST_WAIT_S
        loss = LossOptions(
            own_means=own_means, num_components=num_components, names=self.loss_names, counts=self.counts
        )
        run = _StepRun(self, schedule, microbatches, loss=loss, scale=scale, wait_s=wait_s)
        for action in schedule.actions[self.rank]:
            self.watch(action)
            run.do(action)
        run.finish()
        self.watch(None)
        self._runs += 1
        if self.graphs is not None and torch.is_grad_enabled():
            self.graphs.after_step()
        return run.totals

    def layers(self, stage: int) -> Sequence[Layer]:
        """All layers of a stage of this rank."""
        return self._layers[stage]


class _StepRun:
    """One step in progress."""

    def __init__(
        self,
        executor: Executor,
        schedule: Schedule,
        microbatches: Sequence[Microbatch],
        *,
        loss: LossOptions,
        scale: Tensor | None,
        wait_s: float,
    ) -> None:
        self.executor, self.schedule, self.microbatches = executor, schedule, microbatches
        self.loss, self.scale = loss, scale
        self.messages = Messages(schedule, executor.rank, links=executor.links, wait_s=wait_s)
        device = microbatches[0].tokens_BS.device
        self.totals = torch.zeros(loss.num_totals, dtype=torch.float64, device=device)
        self.counted: list[Tensor] = []
        self.passes: dict[Key, AnyPass] = {}
        actions = schedule.actions[executor.rank]
        self.first = {action.stage: action.microbatch for action in reversed(actions) if action.kind == "F"}
        # For each stage, the action that completes its gradients.
        self.last = {action.stage: action for action in actions if action.kind in ("B", "W")}

    def do(self, action: Action) -> None:
        """Run one action of this rank."""
        if action.kind.startswith("SEND"):
            self.messages.send(action)
        elif action.kind.startswith("RECV"):
            self.messages.begin_receive(action, self._buffers(action))
        elif action.kind == "F":
            self._forward(action)
        else:
            self._backward(action)

    def finish(self) -> None:
        """Wait until all sends have finished."""
        self.messages.finish()
        if (graphs := self.executor.graphs) is not None:
            graphs.join()
        for counted in self.counted:
            self.totals[: len(counted)] += counted
        for stage in self.executor.stages.values():
            stage.hooks.last_microbatch = False  # a backward pass run by other code does not end a step
        assert not self.passes, f"the schedule left {[*self.passes][:4]} without the actions that follow"

    def _forward(self, action: Action) -> None:
        _, number, microbatch = action
        batch = self.microbatches[microbatch]
        received = self.messages.take(Action("RECV_F", number, microbatch)) if number else ()
        stage_pass = self._pass(action, batch)
        outputs, counted = stage_pass.forward(received, batch, self.scale)
        if number + 1 < self.schedule.num_stages:
            self.messages.give(Action("SEND_F", number, microbatch), outputs)
        if counted is not None:
            self.counted.append(counted)
        if torch.is_grad_enabled():
            self.passes[number, microbatch] = stage_pass

    def _pass(self, action: Action, batch: Microbatch) -> AnyPass:
        """The pass of a microbatch through a stage: a recorded one if possible, otherwise computed now."""
        executor, (_, number, microbatch) = self.executor, action
        is_last = number + 1 == self.schedule.num_stages
        make = partial(Pass, executor.stages[number], executor.layers(number), is_last=is_last, loss=self.loss)
        if executor.graphs is None:
            return make()
        completes = number in self.last and self.last[number].microbatch == microbatch
        may_branch = is_last and executor.stages[number].loss_function is not None
        return executor.graphs.take(
            number,
            make,
            batch=batch,
            ends=(microbatch == self.first[number], completes),
            loss=self.loss,
            recordable=torch.is_grad_enabled() and not may_branch,
        )

    def _backward(self, action: Action) -> None:
        kind, number, microbatch = action
        self.executor.stages[number].hooks.last_microbatch = self.last.get(number) == action
        stage_pass = self.passes[number, microbatch] if kind == "I" else self.passes.pop((number, microbatch))
        if kind == "W":
            stage_pass.weight_gradients()
        else:
            last = number + 1 == self.schedule.num_stages
            gradients = () if last else self.messages.take(Action("RECV_B", number, microbatch))
            gradients_out = stage_pass.backward(gradients) if kind == "B" else stage_pass.input_gradients(gradients)
            if number:
                self.messages.give(Action("SEND_B", number, microbatch), gradients_out)

    def _buffers(self, receive: Action) -> Tensors:
        """The buffers for a received message."""
        stage, batch = self.executor.stages[receive.stage], self.microbatches[receive.microbatch]
        return stage.received(batch) if receive.kind == "RECV_F" else stage.given(batch)


def _layers(stage: Any) -> list[Layer]:
    return [module for module in stage.modules() if isinstance(module, Layer)]
