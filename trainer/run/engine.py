"""A model, its buffers and its optimizer on one rank: everything that a step, a validation or a checkpoint needs.

`Engine` is the one place where a plan becomes tensors. `step` trains on one global batch, `evaluate` sums the loss
without gradients, `load` reads the state of a checkpoint of any layout; saving.py writes one. The loop around them is
train.py; text generation is in tasks/generate.py.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from mdata import Batch, Dataset, UsageError
from mdata.errors import wanted_by
from trainer.checkpoint.background import HostCopies
from trainer.checkpoint.folder import run_state
from trainer.checkpoint.format import RunState
from trainer.checkpoint.load import load_into
from trainer.checkpoint.location import Location, location_of
from trainer.checkpoint.rank_file import OwnedState
from trainer.checkpoint.save import Target, save_checkpoint, together
from trainer.config.parse import dump_config
from trainer.config.sections import KernelsSection, RunConfig
from trainer.convert.adapters import base_of, check_base, weights_hash
from trainer.convert.convert import open_model
from trainer.convert.first_state import heads_to_draw, read_model, read_tensors
from trainer.convert.model_folder import ModelFolder, with_new_rows
from trainer.errors import FEWER_TOKENS, MORE_RANKS, out_of_memory_in
from trainer.kernels.recording import CudaLane, Recorder
from trainer.layers.experts import Experts
from trainer.models.family import family_of
from trainer.models.float8_layers import use_float8
from trainer.models.preferences import LOSS_NAMES
from trainer.models.stage import BufferedStage, LossFunction, Microbatch, StepSums, joined
from trainer.optim.buffers import Buffers
from trainer.optim.layout import make_layout
from trainer.optim.model_buffers import STATE, ModelBuffers
from trainer.optim.optimizer import Optimizer, norm_group
from trainer.optim.ownership import Ownership, owned_by
from trainer.optim.scaler import LossScaler, scale_rule
from trainer.parallel.collectives import all_reduce_, gather_objects
from trainer.parallel.init import ElementRange, initialize_
from trainer.parallel.params import SHARD_AXES, Place, is_first_copy
from trainer.parallel.world import World
from trainer.pipeline.executor import Executor
from trainer.pipeline.graphs import StageGraphs
from trainer.plan.check import uses_graphs
from trainer.plan.plan import Plan
from trainer.plan.stages import rank_buffers, rank_parameters
from trainer.run.data import TOKENS_MULTIPLE, References, numbered_conversations, to_device
from trainer.run.run_folder import versions
from trainer.run.step_report import NO_LIMITS, Moment, PendingReport, SpikeLimits, mean, numbers_beside

HOPPER = (9, 0)  # the compute capability from which on PyTorch has grouped products that do not wait for the host
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
_MIX = -0x61C8864680B583EB  # 2^64 / the golden ratio, as a signed number (Knuth 1973, section 6.4)
EVALUATED_PER_RANK = 4  # microbatches of an evaluation that go through a pipeline together, for each of its ranks


class Engine:
    """One rank's share of the training state.

    Args:
        config: of the run. plan: its derived numbers. world: this rank's place.
        fresh: whether to draw the initial weights, or to read the state of checkpoint.init_from (a checkpoint is
            loaded otherwise).
        first: which folder of checkpoint.init_from that is; None: the newest.
        loss: replaces the model's own.
    """

    @out_of_memory_in("setting up the model and its optimizer", fix=MORE_RANKS)
    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        *,
        world: World,
        fresh: bool = True,
        first: Location | None = None,
        loss: LossFunction | None = None,
    ) -> None:
        self.config, self.plan, self.world, self.loss_average = config, plan, world, config.train.loss_average
        self.tp, self.cp, self.dp, self.everyone = (world.groups[axis] for axis in ("tp", "cp", "dp", "world"))
        tp, sequence_parallel = self.tp, config.mesh.sequence_parallel
        like = plan.place(tp_rank=tp.rank, ep_rank=world.groups["ep"].rank, sequence_parallel=sequence_parallel)
        family, places = family_of(config), plan.pipeline.places(world.groups["pp"].rank, like)
        self.layout = make_layout(
            rank_parameters(family, plan.shape, places=places),
            {axis: world.mesh.size(axis) for axis in SHARD_AXES},
            bucket_size=config.optimizer.bucket_size or 0,
        )
        dtype = DTYPES[config.precision.dtype]
        build = functools.partial(
            family.build, groups=world.groups, dtype=dtype, device=world.device, config=config, allocate=False
        )
        stages = [build(plan.shape, place) for place in places]
        self.model = joined(stages)
        numbered = {place.stage: stage for place, stage in zip(places, stages, strict=True)}
        self._training = functools.lru_cache(maxsize=8)(plan.pipeline.lowered)
        self._evaluation = functools.lru_cache(maxsize=8)(plan.pipeline.forward)
        recorder = self._recorder(config.kernels)
        graphs = None
        if recorder is not None:
            shared, overlap = plan.sharing > 1, plan.pipeline.ahead > 0
            graphs = StageGraphs(recorder, shared=shared, overlap=overlap, channel=world.channel.use)
        self.loss_names = (*family.losses(plan.shape), *(LOSS_NAMES if config.data.kind == "pairs" else ()))
        self.references: References | None = None
        self.counts = family.counts(plan.shape)
        self.executor = Executor(
            numbered,
            world.groups["pp"].rank,
            links=world.links,
            graphs=graphs,
            loss_names=self.loss_names,
            counts=self.counts,
        )
        buffers = rank_buffers(family, plan.shape, places=places)
        self.model_buffers = ModelBuffers(self.model, buffers, device=world.device) if buffers else None
        self.float8 = use_float8(
            self.model,
            config,
            whole=self.model if plan.pp == 1 else build(plan.shape, like),
            num_layers=plan.shape.num_layers,
            device=world.device,
        )
        self.buffers = Buffers(
            self.model,
            self.layout,
            owned=owned_by(self.layout, {axis: world.groups[axis].rank for axis in SHARD_AXES}),
            device=world.device,
            sharding=config.optimizer.sharding,
            in_params_dtype=config.precision.gradients == "params",
        )
        # By the parameters of one rank: which ones q, k and v have depends on the layout.
        table = family.parameters(plan.shape, Place()) if config.spikes.action != "off" else ()
        groups = {piece.name: norm_group(spec.name) for spec in table if not spec.frozen for piece in spec.pieces}
        self.optimizer = Optimizer(
            self.buffers,
            config.optimizer,
            groups=world.groups,
            kernels=stages[0].kernels,
            recorder=recorder,
            norm_groups=groups,
        )
        for stage in stages:
            stage.hooks, stage.loss_function = self.optimizer.hooks, loss
        self.copies = HostCopies()
        # A scale that is 1 has no place in the arithmetic of other precisions.
        self.scaler = LossScaler(scale_rule(config.precision), world.device) if dtype == torch.float16 else None
        self.base = ""  # the hash of frozen weights, once they are read
        if fresh and (settings := config.checkpoint).init_from:
            self._read_first_state(first or location_of(settings.init_from), moments=settings.init_optimizer)
        elif fresh:
            self._draw_weights()

    def _recorder(self, kernels: KernelsSection) -> Recorder | None:
        """The recorder of CUDA graphs; None: passes and updates are not recorded."""
        if kernels.cuda_graphs == "on" and self.world.device.type == "cpu":
            expected = 'a GPU, or kernels.cuda_graphs="auto"'
            raise UsageError('kernels.cuda_graphs="on" cannot be used', found="a CPU", expected=expected)
        device = self.world.device
        if device.type != "cuda" or not uses_graphs(self.config, sharing=self.plan.sharing):
            return None
        if self.config.model.moe is not None and torch.cuda.get_device_capability(device) < HOPPER:
            raise UsageError(
                'kernels.cuda_graphs="on" cannot be used: on this GPU products of experts wait for the host',
                found=torch.cuda.get_device_name(device),
                expected='a GPU of Hopper or later, or kernels.cuda_graphs="auto"',
            )
        return functools.partial(CudaLane, device)

    @property
    def most_overflows(self) -> int:
        """Steps in a row that may be skipped while the loss scale is on its way down."""
        return self.scaler.rule.most_overflows if self.scaler is not None else 0

    def microbatch(
        self,
        batch: Batch,
        *,
        components: np.ndarray | None = None,
        skipped: np.ndarray | None = None,
        dataset: Dataset | None = None,
    ) -> Microbatch:
        """A batch of a loader on this rank's device.

        Args:
            components: int64[B], the blend component of each row, if the report of the step should have their losses.
            skipped: bool[B], rows that do not count in the loss; None: all count.
            dataset: of the batch; DPO needs it to find the reference's log probabilities.

        Raises:
            UsageError: an id is outside the model's vocabulary (possible only in a foreign corpus).
        """
        model = self.config.model
        reference = None
        if self.references is not None:
            assert dataset is not None, "a batch of pairs without its data set"
            reference = self.references.of(dataset, batch)
        return to_device(
            batch,
            self.world.device,
            vocab_size=self.plan.vocab_size,
            numbered=bool(model.hidden_dropout or model.attention_dropout),
            cp=self.cp,
            components=components,
            skipped=skipped,
            multiple=self._real_multiple,
            few_sizes=self.executor.graphs is not None,
            reference=reference,
            beta=self.config.train.dpo_beta,
        )

    @property
    def _real_multiple(self) -> int:
        """The multiple of the real tokens of a microbatch; 0: padding is computed, as no kernel is fast without it."""
        is_wide = self.config.precision.dtype not in ("bf16", "fp16")
        if is_wide or self.config.model.attention_dropout or self.world.device.type != "cuda":
            return 0
        return math.lcm(TOKENS_MULTIPLE, self.plan.tp)

    def whole_logits(self, batch: Microbatch) -> Tensor:
        """Logits [B, S, vocab_size] without a step, complete on each tp rank, differentiable; not with mesh.pp > 1."""
        if self.plan.pp > 1:
            raise UsageError("whole_logits needs all layers on one rank", found=f"mesh.pp={self.plan.pp}")
        logits: Tensor = self.executor.stages[0].whole_logits(batch)
        return logits

    def step(
        self,
        microbatches: Sequence[Microbatch],
        learning_rate: float,
        *,
        embedding_rate: float | None = None,
        weight_decay: float | None = None,
        votes: Callable[[], Sequence[float]] = tuple,
        num_components: int = 0,
        measure: bool = False,
        limits: SpikeLimits = NO_LIMITS,
    ) -> PendingReport:
        """Train on this rank's microbatches of one global batch; does not wait for the device.

        Args:
            embedding_rate: of the token embedding and the output head, under optimizer.embedding_lr; None: the same.
            weight_decay: of this step; None: optimizer.weight_decay.
            votes: gives the first of this rank's `Votes`, or all; asked late, summed with the loss.
            num_components: of the blend, where the microbatches say of which one each row is: the report then has the
                loss of each.
            measure: whether the report has the norm of the parameters and the number of zero gradients, which takes
                one more sum over all ranks.
            limits: of the loss and the norm; under spikes.action = "skip" a step above them changes nothing.
        """
        own_means = self.loss_average == "megatron"
        scale, gradient_scale = self._scales(len(microbatches), own_means=own_means)
        counts = self.add_gradients(
            microbatches, own_means=own_means, scale=gradient_scale, num_components=num_components
        )
        has_loss = self.plan.pipeline.stage_ranks[-1] == self.world.groups["pp"].rank
        means = torch.full_like(counts[1:2], len(microbatches) * has_loss)
        divisor = means if own_means else counts[1:2]
        # Numbers that are equal on all tp ranks count on the first; microbatches are the same on all cp ranks.
        sums = torch.cat((divisor, counts)) * float(self.tp.rank == 0)
        sums[0] *= float(not own_means or self.cp.rank == 0)
        totals = torch.cat((sums, numbers_beside(votes(), sums)))
        decay = self.optimizer.settings.weight_decay if weight_decay is None else weight_decay
        self.copies.before_update()
        began = self._moment()
        result = self.optimizer.step(
            learning_rate,
            totals,
            embedding_rate=embedding_rate,
            weight_decay=decay,
            scale=gradient_scale,
            limits=limits if self.config.spikes.action == "skip" else None,
        )
        sync = (began, self._moment())
        if self.float8 is not None:
            self.float8.update(result.applied, self.everyone)
        if self.model_buffers is not None:
            counted = self._counted(result.totals[1:], num_components)
            for stage in self.executor.stages.values():
                self.model_buffers.update(cast(BufferedStage, stage).next_buffers(counted), applied=result.applied)
        if self.scaler is not None:  # without loss tokens there was nothing that could overflow
            self.scaler.update_(~result.grad_norm.isfinite(), counts=result.totals[2] > 0)
        done = torch.stack((result.grad_norm, result.applied.double(), scale))
        numbers = torch.cat((done, result.totals[1:], result.squares))
        if measure:
            numbers = torch.cat((numbers, self.optimizer.norm_and_zeros()))
        return PendingReport(
            numbers,
            (learning_rate, decay),
            num_components=num_components,
            loss_names=self.loss_names,
            counts=self.counts,
            measured=measure,
            sync=sync,
            limits=limits,
            num_groups=len(self.optimizer.norm_groups),
        )

    def _counted(self, totals: Tensor, num_components: int) -> dict[str, Tensor]:
        """The counts in the totals of a step; see Executor.run."""
        first = 2 + 2 * num_components + 2 * len(self.loss_names)
        parts = totals[first : first + sum(self.counts.values())].split([*self.counts.values()])
        return dict(zip(self.counts, parts, strict=True))

    def _moment(self) -> Moment:
        """A time stamp of this rank's device; None without other ranks to wait for."""
        if self.world.world_size == 1:
            return None
        if self.world.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def norms_by_group(self, squares: Sequence[float]) -> dict[str, float]:
        """The gradient norm of each group of parameters, from the squares of a report; a collective, which waits."""
        sums = torch.tensor(squares, dtype=torch.float64, device=self.world.device)
        return dict(zip(self.optimizer.norm_groups, all_reduce_(sums, self.everyone).sqrt().tolist(), strict=True))

    @out_of_memory_in("the forward and backward passes", fix=FEWER_TOKENS)
    def add_gradients(
        self,
        microbatches: Sequence[Microbatch],
        *,
        own_means: bool = False,
        scale: Tensor | None = None,
        num_components: int = 0,
    ) -> Tensor:
        """Forward and backward of all microbatches by the schedule; see Executor.run."""
        schedule = self._training(len(microbatches))
        if not own_means:
            microbatches = self._with_step_sums(microbatches)
        return self.executor.run(
            schedule, microbatches, own_means=own_means, scale=scale, num_components=num_components
        )

    def _with_step_sums(self, microbatches: Sequence[Microbatch]) -> Sequence[Microbatch]:
        """Microbatches with the sums of the step that losses of other names begin with; as they are without such."""
        weigh = next(iter(self.executor.stages.values())).loss_weights
        weights = [weigh(batch) for batch in microbatches]
        if not weights[0]:
            return microbatches
        parts = [
            torch.stack((batch.whole_loss_tokens.double(), *(weight.double() for weight in own.values())))
            for batch, own in zip(microbatches, weights, strict=True)
        ]
        tokens, *sums = all_reduce_(torch.stack(parts).sum(0), self.dp).unbind()
        of_step = StepSums(tokens, dict(zip(weights[0], sums, strict=True)))
        return [replace(batch, of_step=of_step) for batch in microbatches]

    def _scales(self, num_microbatches: int, *, own_means: bool) -> tuple[Tensor, Tensor | None]:
        """(loss scale of this step, what gradients are multiplied by).

        The gradient of a sum over thousands of tokens is divided by their number, and by that of the microbatches,
        before it is scaled, so that a scale means what it means elsewhere, where the loss is a mean.
        """
        if self.scaler is None:
            return torch.ones((), dtype=torch.float64, device=self.world.device), None
        scale = self.scaler.scale.clone()
        each = 1 if self.config.data.kind == "classify" else self.plan.sequence_length
        tokens = 1 if own_means else self.plan.micro_batch * each
        return scale, scale / (tokens * num_microbatches)

    def is_finite(self, loss: float) -> bool:
        """Whether every rank's loss, weights and moments are finite; the same answer on all ranks."""
        parts = [values[span] for name, values in self.state.items() for span in self.shard.owned[name].spans()]
        extremes = [torch.stack(torch.aminmax(part)) for part in parts if part.numel()]
        bad = torch.cat(extremes).isfinite().logical_not().any() if extremes else torch.zeros((), dtype=torch.bool)
        flag = bad.to(self.world.device, torch.float32).reshape(1) + (not math.isfinite(loss))
        return all_reduce_(flag, self.everyone, op="max").item() == 0

    def check_expert_buffers(self, step: int) -> None:
        """Whether the tokens of experts fitted in buffers of mesh.expert_buffer; a collective.

        Raises:
            UsageError: they did not, on some rank; the step has changed nothing.
        """
        layers = (layer for layer in self.model.modules() if isinstance(layer, Experts))
        loads = [layer.dispatch.overflow for layer in layers if layer.dispatch.overflow is not None]
        largest = torch.stack(loads).max() if loads else torch.zeros((), dtype=torch.float64, device=self.world.device)
        load = all_reduce_(largest.reshape(1).clone(), self.everyone, op="max").item()
        if load:
            raise UsageError(
                f"step {step} changed nothing: the experts of a rank had more tokens than fit in its buffer",
                found=f"{load:.2f} times an even load, mesh.expert_buffer={self.config.mesh.expert_buffer:g}",
                fix="raise it, balance experts more strongly, or leave it out: buffers then have the size needed",
            )

    @out_of_memory_in("the forward pass of an evaluation", fix=FEWER_TOKENS)
    @torch.no_grad()
    def evaluate(self, microbatches: Iterable[Microbatch]) -> float:
        """Mean loss over the loss tokens of all data-parallel ranks' microbatches, nats per token; NaN without any."""
        totals = torch.zeros(2, dtype=torch.float64, device=self.world.device)
        for sums in self._forward(microbatches):
            totals += sums[:2]
        for axis in ("pp", "data"):
            all_reduce_(totals, self.world.groups[axis])
        loss_sum, num_tokens = totals.tolist()
        return mean(loss_sum, num_tokens)

    @out_of_memory_in("the forward pass of an evaluation", fix=FEWER_TOKENS)
    @torch.no_grad()
    def row_sums(
        self, microbatches: Sequence[Microbatch], *, num_rows: int, loss: LossFunction | None = None
    ) -> Tensor:
        """The sum of the losses of each row, on all ranks: fp64[num_rows].

        Args:
            microbatches: of this rank, which are as many on each; `components_B` holds the number of each row among
                those of all ranks.
            loss: of the tokens; None: -log p of the labels, in nats, also in a run with a loss of its own.
        """
        sums = self._sums(microbatches, num_rows, loss)
        for axis in ("pp", "data"):
            all_reduce_(sums, self.world.groups[axis])
        return sums

    def _sums(self, microbatches: Sequence[Microbatch], count: int, loss: LossFunction | None) -> Tensor:
        """This rank's sums of losses by `components_B`, without gradients: fp64[count]."""
        with self._other_loss(loss):
            schedule = self._evaluation(len(microbatches))
            totals = self.executor.run(schedule, microbatches, num_components=count)
        return totals[2 : 2 + count].contiguous()

    @contextmanager
    def _other_loss(self, loss: LossFunction | None) -> Iterator[None]:
        """A block in which stages compute this loss; None: the model's own."""
        stages = self.executor.stages.values()
        before = [stage.loss_function for stage in stages]
        for stage in stages:
            stage.loss_function = loss
        try:
            yield
        finally:
            for stage, function in zip(stages, before, strict=True):
                stage.loss_function = function

    def _forward(self, microbatches: Iterable[Microbatch]) -> Iterator[Tensor]:
        """The sums of an evaluation's microbatches, of as many at a time as a pipeline takes together."""
        rest = iter(microbatches)
        while batches := list(itertools.islice(rest, self.evaluated_together)):
            yield self.executor.run(self._evaluation(len(batches)), batches)

    @property
    def evaluated_together(self) -> int:
        """Microbatches of an evaluation that go through the pipeline together."""
        return 1 if self.plan.pp == 1 else EVALUATED_PER_RANK * self.plan.pp

    def conversations(self, batch: Batch) -> Microbatch:
        """A batch of pairs whose tokens say their conversation, for `conversation_sums`."""
        rows = to_device(batch, self.world.device, vocab_size=self.plan.vocab_size)
        numbers_BS, mine = numbered_conversations(rows), rows.on_context_rank(self.cp)
        own_BS = numbers_BS if mine.columns_S is None else numbers_BS[:, mine.columns_S]
        return replace(mine, components_B=own_BS.flatten())

    @out_of_memory_in("the forward pass of the reference model", fix=FEWER_TOKENS)
    @torch.no_grad()
    def conversation_sums(self, microbatches: Sequence[Microbatch], counts: Sequence[int]) -> list[np.ndarray]:
        """-log p of each conversation's trained tokens, in nats, of this rank's microbatches: float64 arrays.

        Args:
            microbatches: from `conversations`, as many on each rank. counts: their numbers of conversations.
        """
        numbered = []
        for batch, offset in zip(microbatches, itertools.accumulate(counts[:-1], initial=0), strict=True):
            assert batch.components_B is not None, "from conversations"
            numbered.append(replace(batch, components_B=batch.components_B + offset))
        sums = self._sums(numbered, sum(counts), None)
        for axis in ("pp", "cp"):
            all_reduce_(sums, self.world.groups[axis])
        return np.split(sums.cpu().numpy(), np.cumsum(counts)[:-1])

    def weights_hash(self) -> str:
        """A hash of all weights, whatever the layout: the sum of a hash of each number's bits, modulo 2^64.

        Frozen weights count by their own hash, which checkpoints hold too.
        """
        weight = self.optimizer.state["weight"]
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()]
        total = torch.zeros((), dtype=torch.int64, device=self.world.device)
        for run, segment in self.optimizer.owns["weight"].segments():
            if not is_first_copy(segment.rules.copies, lambda axis: self.world.groups[axis].rank):
                continue
            first = run.first + segment.start - run.start
            mixed = weight[first : first + segment.stop - segment.start].view(bits).long() * _MIX
            mixed = (mixed ^ (mixed >> 29)) * _MIX
            total += (mixed ^ (mixed >> 32)).sum()
        return f"{all_reduce_(total, self.everyone).item() % (1 << 64):016x}{self.base}"

    @out_of_memory_in("the forward pass of an evaluation", fix=FEWER_TOKENS)
    @torch.no_grad()
    def class_logits(self, microbatches: Iterable[Microbatch], *, num_samples: int, classes: int) -> Tensor:
        """The logits of a head that classifies rows, or chooses one, on all ranks: fp64[num_samples, classes].

        Args:
            microbatches: of this rank, which are as many on each; `components_B` holds the number of each sample among
                those of all ranks, -1 for one that is not wanted.
        """
        table = torch.zeros(num_samples + 1, classes, dtype=torch.float64, device=self.world.device)

        def keep(logits_RC: Tensor, batch: Microbatch) -> Tensor:
            assert batch.components_B is not None, "samples have numbers"
            table[batch.components_B] = logits_RC.double()
            return table.new_zeros(())

        with self._other_loss(keep):
            for _ in self._forward(microbatches):
                pass  # `keep` has the logits
        logits = table[:-1].contiguous()
        for axis in ("pp", "data"):
            all_reduce_(logits, self.world.groups[axis])
        return logits

    @property
    def state(self) -> dict[str, Tensor]:
        """All tensors of the training state: the optimizer's, and the model's buffers."""
        buffers = {} if self.model_buffers is None else {STATE: self.model_buffers.values}
        return {**self.optimizer.state, **buffers}

    @property
    def _buffers_held(self) -> dict[str, Ownership]:
        return {} if self.model_buffers is None else {STATE: self.model_buffers.holds}

    @property
    def shard(self) -> OwnedState:
        """The part of the state that this rank stores."""
        owned = {**self.optimizer.owns, **self._buffers_held}
        return OwnedState(owned, {axis: group.rank for axis, group in self.world.groups.items()})

    def with_scale(self, run: RunState) -> RunState:
        """The run's state with this engine's loss scale, its state of FP8 scaling, and the hash of frozen weights."""
        run = replace(run, base=self.base)
        if self.scaler is not None:
            run = replace(run, scaler=self.scaler.to_numbers())
        return run if self.float8 is None else replace(run, float8=self.float8.to_numbers())

    def save(
        self, root: str | Location, *, step: int, consumed_samples: int = 0, data: Dataset | None = None
    ) -> Location:
        """Write a checkpoint that any layout can load, on all ranks together; its folder, {root}/step-{step}.

        Args:
            root: the folder of the checkpoints, seen by all ranks, or an address.
            step: finished steps. consumed_samples: training samples that they read.
            data: the training data; recorded, so that a run that continues can refuse other data.

        Raises:
            MdataError: a rank could not write; all ranks stop, and nothing that looks finished is left.
        """
        run = RunState(
            step=step,
            consumed_samples=consumed_samples,
            data_id="" if data is None else data.data_id,
            data={} if data is None else data.identity,
            optimizer_steps=self.optimizer.steps,
            config=dump_config(self.config),
            versions=versions(self.world),
        )
        attempt = gather_objects(secrets.token_hex(4), self.everyone)[0]
        target = Target(_location(root), self.with_scale(run), attempt)
        return save_checkpoint(target, self.shard, state=self.state, world=self.everyone)

    @out_of_memory_in("reading a checkpoint", fix=MORE_RANKS)
    def load(self, folder: str | Location) -> RunState:
        """Continue from a checkpoint of any layout; an error of one rank is raised by all."""
        folder = _location(folder)
        run, optimizer = run_state(folder), self.optimizer
        if (init_from := self.config.checkpoint.init_from) and self.buffers.frozen.runs:
            self._read_frozen(location_of(init_from), expected=run.base, where=str(folder))
        optimizer.gathers.release()  # of parameters, which may be the main weights

        def read() -> None:
            load_into(self.state, folder, owned={**optimizer.holds, **self._buffers_held})

        together(self.everyone, read, doing="reading a checkpoint")
        self._continue(run)
        return run

    def _continue(self, run: RunState) -> None:
        self.optimizer.loaded(run.optimizer_steps)
        if self.scaler is not None and run.scaler:
            self.scaler.load(run.scaler)
        if self.float8 is not None:
            self.float8.load(run.float8)

    @out_of_memory_in("reading the first weights", fix=MORE_RANKS)
    def _read_first_state(self, folder: Location, *, moments: bool) -> None:
        """Begin with the weights of another run, optionally with its moments; an error of one rank is raised by all."""
        wanted = self.optimizer.holds if moments else {"weight": self.optimizer.holds["weight"]}
        wanted = {**wanted, **self._buffers_held}
        if self.buffers.frozen.runs:
            self._read_frozen(folder)
        self.optimizer.gathers.release()

        def read() -> RunState:
            model = self._first_model(folder)
            if not self.buffers.frozen.runs:
                drawn = heads_to_draw(self.config, model, self.plan.vocab_size)
                read_model(self.state, model, owned=wanted, without=drawn)
                if drawn:
                    self._draw(wanted["weight"], self.optimizer.state["weight"], names=drawn)
            elif model.adapter is not None:
                read_tensors(self.state, model.adapter.source, owned=wanted)
            else:
                # Adapters are drawn; what is trained beside them begins with the weights of the folder.
                table = [slot.spec for slot, *_ in wanted["weight"].parameters()]
                drawn = frozenset(spec.name for spec in table if ".lora_" in spec.name)
                adapters = frozenset(piece.name for spec in table if spec.name in drawn for piece in spec.pieces)
                read_model(self.state, model, owned=wanted, without=adapters)
                self._draw(wanted["weight"], self.optimizer.state["weight"], names=drawn)
            return model.run

        run = together(self.everyone, read, doing="reading the first weights")[0]
        if moments:
            self._continue(run)
        else:
            self.optimizer.loaded(0)

    def _first_model(self, folder: Location) -> ModelFolder:
        """The model of checkpoint.init_from, which may have moved since the run began."""
        first, where = self.config.checkpoint.new_rows_from, f"checkpoint.init_from = {folder}"
        try:
            model = open_model(folder)
            return with_new_rows(model, first, self.plan.vocab_size, where=where) if first else model
        except UsageError as error:
            raise wanted_by(f"checkpoint.init_from = {self.config.checkpoint.init_from}", error) from error

    def _read_frozen(self, folder: Location, *, expected: str = "", where: str = "") -> None:
        """Read the frozen weights on all ranks; rank 0 compares them with their hash in the checkpoint `where`."""
        self.optimizer.gathers.release()

        def read() -> str:
            base = base_of(self._first_model(folder))
            actual = weights_hash(base) if self.world.is_main else ""
            if self.world.is_main and expected:
                check_base(base, actual, expected=expected, where=where)
            read_model({"weight": self.buffers.parameters.values}, base, owned={"weight": self.buffers.frozen})
            return actual

        self.base = together(self.everyone, read, doing="reading the frozen weights")[0]

    def _draw_weights(self) -> None:
        """Initialize the main weights that this rank holds, unrounded, and from them the model."""
        self._draw(self.optimizer.holds["weight"], self.optimizer.state["weight"])
        self._draw(self.buffers.frozen, self.buffers.parameters.values)
        self.optimizer.publish()
        if self.model_buffers is not None:
            self.model_buffers.draw(self.config.run.seed)

    def _draw(self, held: Ownership, values: Tensor, *, names: Collection[str] | None = None) -> None:
        """The first values of these runs, which lie in a flat tensor: of all parameters, or of those named."""
        runs = (
            ElementRange(slot.spec, low, high, values[first : first + high - low])
            for slot, low, high, first in held.parameters()
            if names is None or slot.spec.name in names
        )
        threads = max(1, len(os.sched_getaffinity(0)) // self.world.local_world_size)
        initialize_(runs, seed=self.config.run.seed, threads=threads)


def _location(folder: str | Location) -> Location:
    return location_of(folder) if isinstance(folder, str) else folder
