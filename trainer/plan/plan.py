"""All derived numbers of a run, computed once.

`make_plan` turns a valid configuration into a frozen `Plan`. Derived numbers are not written back into the
configuration, and no other code computes them a second time. Pure.
"""

from __future__ import annotations

import dataclasses

from trainer.config.parse import problems_error
from trainer.config.sections import RunConfig
from trainer.models.family import ModelShape, family_of
from trainer.parallel.params import Place
from trainer.plan.check import DataFacts, check
from trainer.plan.lengths import ScheduleLengths, run_length, schedule_lengths
from trainer.plan.nearest_layout import nearest_layout, nearest_layout_text
from trainer.plan.stages import (
    PipelineLayout,
    count_parameters,
    flops_per_token,
    pipeline_layout,
    rank_parameters,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All derived numbers of a run.

    Args:
        world_size, tp, cp, pp, dp: ranks, and their layout. pipeline: the stages.
        ep, etp: ranks that share the experts, and each expert.
        sequence_length: tokens of a row, of which a sample has rows_per_sample; tokens_per_step: of a global batch.
        num_microbatches: forward passes of a rank in one step.
        steps, num_samples: of the whole run.
        heads_per_rank, kv_heads_per_rank: attention heads of one tp rank.
        shape: the model, independent of the layout except for the padding of its vocabulary.
        num_parameters: of the logical model, without padding. active_parameters: those that compute a token, in a model
            with experts.
        trained_parameters: those that are not frozen.
        parameters_per_rank: most elements that the first rank of a tp group holds, with padding.
        parameters_per_stage: the same for each pipeline rank.
        flops_per_token: floating-point operations of forward and backward, as the family counts them.
        document_lengths: of the documents around evenly spaced tokens of the run's rows; (sequence_length,) if rows are
            attended to as a whole, or the data is unknown.
        warmup_steps, decay_steps: ends of warmup and decay, in steps.
    """

    world_size: int
    tp: int
    cp: int
    pp: int
    dp: int
    ep: int
    etp: int
    pipeline: PipelineLayout
    sequence_length: int
    global_batch: int
    micro_batch: int
    rows_per_sample: int
    num_microbatches: int
    tokens_per_step: int
    num_samples: int
    heads_per_rank: int
    kv_heads_per_rank: int
    shape: ModelShape
    num_parameters: int
    active_parameters: int
    trained_parameters: int
    parameters_per_rank: int
    parameters_per_stage: tuple[int, ...]
    flops_per_token: int
    document_lengths: tuple[int, ...]
    steps: int
    schedule: ScheduleLengths

    def place(self, *, tp_rank: int = 0, ep_rank: int = 0, sequence_parallel: bool = False) -> Place:
        """A rank's position on the axes that decide which parameters it holds, but the pipeline."""
        return Place(
            tp_rank=tp_rank,
            tp_size=self.tp,
            ep_rank=ep_rank,
            ep_size=self.ep,
            etp_size=self.etp,
            sequence_parallel=sequence_parallel,
        )

    @property
    def sample_tokens(self) -> int:
        """Tokens of a sample."""
        return self.rows_per_sample * self.sequence_length

    @property
    def edp(self) -> int:
        """Ranks with copies of an expert."""
        return self.tp * self.cp * self.dp // (self.etp * self.ep)

    @property
    def sharing(self) -> int:
        """Ranks that share a parameter, at most: with mesh.etp below mesh.tp more have an expert than have the rest."""
        return max(self.dp * self.cp, self.edp)

    @property
    def head_dim(self) -> int:
        """Features of one attention head."""
        return self.shape.head_dim

    @property
    def ffn_hidden_size(self) -> int:
        """Inner features of the MLP, over all ranks."""
        return self.shape.ffn_hidden_size

    @property
    def vocab_size(self) -> int:
        """Rows of the logical embedding."""
        return self.shape.vocab_size

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding over all ranks, with padding."""
        return self.shape.padded_vocab_size


def make_plan(
    config: RunConfig, world_size: int, *, facts: DataFacts | None = None, done_steps: int = 0, done_samples: int = 0
) -> Plan:
    """The derived numbers of a run on `world_size` ranks.

    Args:
        facts: of the training data (`open_data(config).facts`); None: unknown.
        done_steps, done_samples: already done by a run that continues; its end may depend on them.

    Raises:
        UsageError: lists every problem of the configuration.
    """
    problems = check(config, world_size, facts=facts)
    vocab_size = config.model.vocab_size or (facts.vocab_size if facts else None)
    if problems or not vocab_size:
        unknown = "model.vocab_size is not set and the data names no tokenizer; set model.vocab_size"
        nearest = nearest_layout_text(nearest_layout(config, world_size, facts=facts))
        raise problems_error("this configuration", problems or [unknown], fix=nearest)
    family, train, tp = family_of(config), config.train, config.mesh.tp
    shape = family.shape(config, vocab_size)
    cp, pp, length = config.mesh.cp, config.mesh.pp, run_length(config.train, steps=done_steps, samples=done_samples)
    document_lengths = (facts and facts.document_lengths) or (train.sequence_length,)
    dp = world_size // (tp * cp * pp)
    pipeline = pipeline_layout(config, shape, document_lengths=document_lengths)
    ep, etp = config.mesh.ep, config.mesh.etp or tp
    like = Place(tp_size=tp, ep_size=ep, etp_size=etp)
    held = [rank_parameters(family, shape, places=pipeline.places(rank, like)) for rank in range(pp)]
    held_counts = tuple(sum(spec.numel for spec in specs) for specs in held)
    counts = count_parameters(family, shape)
    return Plan(
        world_size=world_size,
        tp=tp,
        cp=cp,
        pp=pp,
        dp=dp,
        ep=ep,
        etp=etp,
        pipeline=pipeline,
        sequence_length=train.sequence_length,
        global_batch=train.global_batch,
        micro_batch=train.micro_batch,
        rows_per_sample=config.data.rows_per_sample,
        num_microbatches=train.global_batch // (train.micro_batch * dp),
        tokens_per_step=train.global_batch * config.data.rows_per_sample * train.sequence_length,
        num_samples=length.samples,
        heads_per_rank=shape.num_heads // tp,
        kv_heads_per_rank=max(1, shape.num_kv_heads // tp),
        shape=shape,
        num_parameters=counts.total,
        active_parameters=counts.active,
        trained_parameters=counts.trained,
        parameters_per_rank=max(held_counts),
        parameters_per_stage=held_counts,
        flops_per_token=flops_per_token(family, shape, document_lengths=document_lengths),
        document_lengths=document_lengths,
        steps=length.steps,
        schedule=schedule_lengths(config),
    )
