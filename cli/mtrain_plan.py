"""Print the numbers that follow from a run's configuration: layout, batches, model, learning rate.

The data is opened to learn the vocabulary; where it is not there yet, model.vocab_size has to be set.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from cli.console import Console, Parser
from cli.mtrain_options import add_run_arguments, read_run_arguments

if TYPE_CHECKING:
    from trainer.config.sections import RunConfig
    from trainer.plan.check import DataFacts
    from trainer.plan.plan import Plan


def add_arguments(parser: Parser) -> None:
    """See `mtrain plan --help`."""
    add_run_arguments(parser)


def main(arguments: argparse.Namespace, console: Console) -> int:
    """Print the plan as a table."""
    from trainer.plan.plan import make_plan

    config, world_size = read_run_arguments(arguments)
    plan = make_plan(config, world_size, facts=_facts(config, console))
    rows = plan_rows(plan)
    width = max(len(name) for name, _ in rows)
    table = "\n".join(f"{name:<{width}}  {value:>15,}" for name, value in rows)
    console.result(table, dataclasses.asdict(plan))
    return 0


def plan_rows(plan: Plan) -> list[tuple[str, int]]:
    """The plan's numbers in reading order, by their names for people."""
    return [
        ("ranks", plan.world_size),
        ("tensor-parallel ranks (tp)", plan.tp),
        ("data-parallel ranks (dp)", plan.dp),
        ("steps", plan.steps),
        *_schedule_rows(plan),
        ("tokens per sample", plan.sequence_length),
        ("samples per step", plan.global_batch),
        ("samples per microbatch", plan.micro_batch),
        ("microbatches per rank and step", plan.num_microbatches),
        ("tokens per step", plan.tokens_per_step),
        ("tokens in the run", plan.num_samples * plan.sequence_length),
        ("vocabulary", plan.vocab_size),
        ("  padded", plan.padded_vocab_size),
        ("head size", plan.head_dim),
        ("hidden size of the MLP", plan.ffn_hidden_size),
        ("heads per rank", plan.heads_per_rank),
        ("key and value heads per rank", plan.kv_heads_per_rank),
        ("parameters", plan.num_parameters),
        ("  per rank, with padding", plan.parameters_per_rank),
        ("floating-point operations per token", plan.flops_per_token),
    ]


def _schedule_rows(plan: Plan) -> list[tuple[str, int]]:
    """Where the learning rate changes, in steps, or in samples where some length of it is given so."""
    lengths = plan.schedule
    unit = "" if lengths.counter == "steps" else "samples "
    decay = [("of WSD's decay", lengths.wsd_decay)] if lengths.wsd_decay else []
    numbers = [("of warmup", lengths.warmup), *decay, ("until the end of the decay", lengths.decay)]
    return [(f"  {unit}{name}", round(number)) for name, number in numbers]


def _facts(config: RunConfig, console: Console) -> DataFacts | None:
    from mdata import UsageError
    from trainer.run.data import open_data

    try:
        return open_data(config).facts
    except UsageError as error:
        if not config.model.vocab_size:
            raise
        console.note(f"mtrain: warning: planned without the data: {error}")
        return None
