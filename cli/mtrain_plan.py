"""Print what follows from a run's configuration: layout, batches, model, learning rate, memory, kernels.

The data is opened to learn the vocabulary; where it is not there yet, model.vocab_size has to be set.
"""

from __future__ import annotations

import argparse
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
    from trainer.plan.facts import plan_facts
    from trainer.plan.plan import make_plan

    config, world_size = read_run_arguments(arguments)
    plan = make_plan(config, world_size, facts=_facts(config, console))
    rows = [(name, f"{value:,}") for name, value in plan_rows(plan)] + _memory_rows(config, plan)
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value:>15}" for name, value in rows]
    console.result("\n".join(lines + _kernel_lines(config, plan)), plan_facts(config, plan))
    return 0


def plan_rows(plan: Plan) -> list[tuple[str, int]]:
    """The plan's numbers in reading order, by their names for people."""
    return [
        ("ranks", plan.world_size),
        ("tensor-parallel ranks (tp)", plan.tp),
        ("context-parallel ranks (cp)", plan.cp),
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


def _memory_rows(config: RunConfig, plan: Plan) -> list[tuple[str, str]]:
    """Estimates for one rank; what is held outside of tensors is not in them."""
    from trainer.errors import size_text
    from trainer.plan.memory import activation_bytes, state_bytes

    return [
        ("memory per rank: weights, gradients, optimizer", size_text(state_bytes(config, plan))),
        ("  activations of a microbatch", size_text(activation_bytes(config, plan))),
        ("  recomputation", config.recompute.mode),
    ]


def _kernel_lines(config: RunConfig, plan: Plan) -> list[str]:
    """For each kind of device the kernels and their reasons; this machine's kind first."""
    import torch

    from trainer.plan.kernel_choice import DEVICES, kernel_choices

    here = "gpu" if torch.cuda.is_available() else "cpu"
    lines = []
    for device in sorted(DEVICES, key=lambda device: device != here):
        lines += ["", f"kernels on a {device.upper()}" + (", as on this machine" if device == here else "")]
        for choice in kernel_choices(config, plan, device=device):
            lines.append(f"  {choice.operation}: {choice.kernel}; {choice.reason}")
            lines += [f"    not {kernel}: {reason}" for kernel, reason in choice.others]
    return lines


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
