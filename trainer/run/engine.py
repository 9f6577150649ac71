"""A model, its buffers and its optimizer on one rank: everything that a step, a validation or a checkpoint needs.

`build` is the one place where a plan becomes tensors. The rest are the verbs: `step` trains on one global batch,
`evaluate` sums the loss without gradients, `save` and `load` exchange the state with a checkpoint of any layout.
The loop around them is train.py; what is generated from the weights is generate.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint.folder import run_state
from trainer.checkpoint.format import RunState
from trainer.checkpoint.load import load_state
from trainer.checkpoint.save import Shard, save_checkpoint, together
from trainer.config.sections import RunConfig
from trainer.errors import FEWER_TOKENS, MORE_RANKS, out_of_memory_in
from trainer.models.gpt import GPT, build_gpt
from trainer.models.gpt_params import parameter_table
from trainer.optim.layout import BufferLayout, Slot, make_layout
from trainer.optim.optimizer import STATE_NAMES, Buffers, Optimizer
from trainer.parallel.collectives import Axis, all_reduce_
from trainer.parallel.init import initialize_
from trainer.parallel.world import World
from trainer.pipeline.actions import one_stage
from trainer.pipeline.executor import Microbatch, run_actions
from trainer.plan.plan import Plan

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step, over all ranks.

    Args:
        loss: mean over the step's loss tokens, nats per token; NaN without any. num_tokens: those tokens.
        grad_norm: before clipping. applied: False where the step was skipped for a norm that is not finite, which it is
            without loss tokens, too.
        votes: the sums over all ranks of what each of them asked for.
    """

    loss: float
    num_tokens: int
    grad_norm: float
    applied: bool
    votes: tuple[float, ...] = ()


class Engine:
    """One rank's share of the training state.

    Args:
        config: of the run. plan: its derived numbers. world: this rank's place.
        fresh: whether to draw the initial weights (a checkpoint is loaded otherwise).
    """

    @out_of_memory_in("setting up the model and its optimizer", fix=MORE_RANKS)
    def __init__(self, config: RunConfig, plan: Plan, *, world: World, fresh: bool = True) -> None:
        self.plan, self.world = plan, world
        self.tp, self.dp, self.everyone = world.axes["tp"], world.axes["dp"], world.axes["world"]
        self.layout = rank_layout(config, plan, tp=self.tp, dp=self.dp)
        self.model = build_gpt(
            plan.shape,
            self.tp,
            sequence_parallel=config.mesh.sequence_parallel,
            dtype=DTYPES[config.precision.dtype],
            device=world.device,
        )
        self.buffers = Buffers(self.model, self.layout)
        self.optimizer = Optimizer(self.buffers, config.optimizer, tp=self.tp, dp=self.dp, kernels=self.model.kernels)
        if fresh:
            self._draw_weights(config.run.seed)

    def step(
        self,
        microbatches: Sequence[Microbatch],
        learning_rate: float,
        *,
        votes: Callable[[], tuple[float, ...]] = tuple,
    ) -> StepReport:
        """Train on this rank's microbatches of one global batch.

        Args:
            votes: what this rank asks all ranks for, as small whole numbers; asked late, summed with the loss.
        """
        sums = run_actions(one_stage(len(microbatches)), self.model, microbatches=microbatches)
        totals = all_reduce_(torch.cat((sums, sums.new_tensor(votes()))), self.dp)
        if asked_here := totals[2:].numel():
            all_reduce_(totals[-asked_here:], self.tp)
        result = self.optimizer.step(learning_rate, totals[1])
        # One wait for the device.
        numbers = torch.stack((result.grad_norm, result.applied.double(), *totals)).tolist()
        grad_norm, applied, loss_sum, num_tokens, *asked = numbers
        loss = loss_sum / num_tokens if num_tokens else math.nan
        return StepReport(loss, int(num_tokens), grad_norm, bool(applied), tuple(asked))

    def is_finite(self, loss: float) -> bool:
        """Whether every rank's loss, weights and moments are finite; the same answer on all ranks."""
        extremes = [torch.stack(torch.aminmax(part)) for part in self.optimizer.state.values() if part.numel()]
        bad = torch.cat(extremes).isfinite().logical_not().any() if extremes else torch.zeros((), dtype=torch.bool)
        flag = bad.to(self.world.device, torch.float32).reshape(1) + (not math.isfinite(loss))
        return all_reduce_(flag, self.everyone, op="max").item() == 0

    @out_of_memory_in("the forward pass of an evaluation", fix=FEWER_TOKENS)
    @torch.no_grad()
    def evaluate(self, microbatches: Iterable[Microbatch]) -> float:
        """Mean loss over the loss tokens of all data-parallel ranks' microbatches, nats per token; NaN without any."""
        totals = torch.zeros(2, dtype=torch.float64, device=self.world.device)
        for batch in microbatches:
            loss = self.model.loss_sum(batch.tokens_BS, batch.labels_BS, loss_mask_BS=batch.loss_mask_BS)
            totals += torch.stack((loss.double(), batch.loss_mask_BS.sum().double()))
        loss_sum, num_tokens = all_reduce_(totals, self.dp).tolist()
        return float(loss_sum / num_tokens) if num_tokens else math.nan

    @out_of_memory_in("writing a checkpoint", fix=MORE_RANKS)
    def save(self, root: Path, run: RunState) -> Path:
        """Write a checkpoint; see save_checkpoint."""
        return save_checkpoint(root, run, shard=self._shard(), state=self.optimizer.state, world=self.everyone)

    @out_of_memory_in("reading a checkpoint", fix=MORE_RANKS)
    def load(self, folder: Path) -> RunState:
        """Continue from a checkpoint of any layout; an error of one rank is raised by all."""
        run = run_state(folder)
        dtype = self.optimizer.state["weight"].dtype
        state: dict[str, torch.Tensor] = {}

        def read() -> None:
            state.update(load_state(folder, self._shard(), names=STATE_NAMES, dtype=dtype))

        together(self.everyone, read, doing="reading a checkpoint")
        self.optimizer.load(state, run.optimizer_steps)
        return run

    def _draw_weights(self, seed: int) -> None:
        """Initialize the main weights, unrounded, and from them the model's."""
        optimizer, weight = self.optimizer, self.optimizer.state["weight"]
        for slot in self.layout.slots:
            low, high = max(slot.start, optimizer.start), min(slot.start + slot.spec.numel, optimizer.stop)
            if low < high:
                drawn = torch.empty(slot.spec.shape, dtype=weight.dtype)
                initialize_(drawn, slot.spec, seed=seed)
                mine = drawn.view(-1)[low - slot.start : high - slot.start]
                weight[low - optimizer.start : high - optimizer.start].copy_(mine)
        optimizer.publish()

    def _shard(self) -> Shard:
        return Shard(self.layout, self.optimizer.start, self.optimizer.stop, owns_copies=self.tp.rank == 0)


def rank_layout(config: RunConfig, plan: Plan, *, tp: Axis, dp: Axis) -> BufferLayout:
    """The buffers of the rank at these places."""
    specs = parameter_table(
        plan.shape, tp_size=tp.size, tp_rank=tp.rank, sequence_parallel=config.mesh.sequence_parallel
    )
    return make_layout(specs, dp_size=dp.size)


@out_of_memory_in("setting up the model", fix="more ranks: each holds a part of the model")
def load_model(folder: Path, config: RunConfig, *, plan: Plan, world: World) -> GPT:
    """The weights alone, for generation: no optimizer, no sequence parallelism, from a checkpoint of any layout."""
    tp = world.axes["tp"]
    specs = parameter_table(plan.shape, tp_size=tp.size, tp_rank=tp.rank)
    layout = make_layout(specs, dp_size=1)
    dtype = DTYPES[config.precision.dtype]
    shard = Shard(layout, 0, layout.size, owns_copies=False)
    main = torch.promote_types(dtype, torch.float32)
    weights = load_state(folder, shard, names=["weight"], dtype=main)["weight"]
    model = build_gpt(plan.shape, tp, sequence_parallel=False, dtype=dtype, device=world.device)
    named = dict(model.named_parameters())
    for slot in layout.slots:
        flat = weights[slot.start : slot.start + slot.spec.numel]
        named[slot.spec.name].data.copy_(flat.view(slot.spec.shape))
    return model.eval()


def held_parameters(layout: BufferLayout) -> dict[str, Any]:
    """What one rank holds, for ranks.json: counts, and each parameter with its logical pieces."""
    split = sum(_real(slot) for slot in layout.slots if slot.spec.over_tp == "split")
    copied = sum(_real(slot) for slot in layout.slots if slot.spec.over_tp != "split")
    return {
        "split_parameters": split,
        "copied_parameters": copied,
        "buffer_elements": layout.size,
        "parameters": [
            {
                "name": slot.spec.name,
                "shape": list(slot.spec.shape),
                "over_tp": slot.spec.over_tp,
                "pieces": [{"name": p.name, "start": list(p.start), "size": list(p.size)} for p in slot.spec.pieces],
            }
            for slot in layout.slots
        ],
    }


def _real(slot: Slot) -> int:
    """Elements of a slot that are not padding."""
    return sum(torch.Size(piece.size).numel() for piece in slot.spec.pieces)
