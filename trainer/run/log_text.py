"""The log of a run for people: a header, then a line for each evaluation, checkpoint and skipped step.

metrics.jsonl and events.jsonl have the same facts for programs; MetricsWriter prints these lines as it writes those
files, so the log always has the same content. Speed and the loss of a step are shown by the progress display
(cli/progress.py). Pure except for the name of the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from trainer.config.sections import RunConfig
from trainer.plan.plan import Plan

if TYPE_CHECKING:
    import torch

    from trainer.run.resume import Start


def header(config: RunConfig, plan: Plan, *, start: Start, device: str) -> Iterator[str]:
    """The model, the device and the data of a run, and where it starts.

    Args:
        device: of this rank, see `device_text`.
    """
    others = "".join(f"{axis} {size} x " for axis, size in (("cp", plan.cp), ("pp", plan.pp)) if size > 1)
    layout = f"tp {plan.tp} x {others}dp {plan.dp}" + (", sequence parallel" if config.mesh.sequence_parallel else "")
    ranks = "1 rank" if plan.world_size == 1 else f"{plan.world_size} ranks ({layout})"
    yield f"{plan.num_parameters:,} parameters in {config.precision.dtype} on {ranks}, {device}"
    tokens = f"{plan.global_batch:,} samples x {plan.sequence_length:,} tokens"
    steps = f"steps {start.done.steps + 1:,} to {plan.steps:,} of {tokens}"
    init_from = config.checkpoint.init_from
    fresh = f"weights of {init_from}" if init_from else f"new weights from seed {config.run.seed}"
    origin = f"resumed from {start.folder}" if start.folder else fresh
    microbatches = f"{plan.num_microbatches} microbatch{'es' * (plan.num_microbatches != 1)}"
    yield f"{steps}, in {microbatches} of {plan.micro_batch:,} per rank; {origin}"
    yield from start.notes


def device_text(device: torch.device) -> str:
    """ "cuda:0 (NVIDIA H200)", or "cpu with 8 threads"."""
    import torch

    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device} with {torch.get_num_threads()} threads"


def losses_text(step: int, values: Mapping[str, Any]) -> Iterator[str]:
    """The losses of the evaluations in a line of metrics.jsonl, if there were any."""
    for key, name in (("valid", "validation"), ("test", "test")):
        if losses := values.get(key):
            yield f"step {step:,}: {name} loss " + ", ".join(f"{corpus} {loss:.4f}" for corpus, loss in losses.items())


def event_text(kind: str, facts: Mapping[str, Any]) -> str | None:
    """The line for an event of events.jsonl; None for events that are reported elsewhere."""
    if kind == "saved":
        return f"step {facts['step']:,}: checkpoint {facts['checkpoint']} written in {facts['seconds']:.1f} s"
    if kind == "skipped" and facts.get("loss_tokens") == 0:
        return f"step {facts['step']:,}: skipped, none of its tokens counts in the loss"
    if kind == "skipped":
        return f"step {facts['step']:,}: skipped, gradient norm {facts['grad_norm']}, loss {facts['loss']:.4f}"
    return None
