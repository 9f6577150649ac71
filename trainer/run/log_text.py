"""The log of a run for people: a header, then lines for measurements, evaluations, checkpoints and skipped steps.

metrics.jsonl and events.jsonl have the same facts for programs; MetricsWriter prints these lines as it writes those
files, so the log always has the same content. The measurements of a step are a line where there is no terminal
(`step_text`, printed by cli/run_log.py), and a progress bar where there is one. Pure except for the name of the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mdata.errors import counted
from trainer.config.sections import RunConfig
from trainer.plan.plan import Plan
from trainer.run.rank_times import held_up_text

if TYPE_CHECKING:
    import torch

    from trainer.run.resume import Start


def header(config: RunConfig, plan: Plan, *, start: Start, device: str) -> Iterator[str]:
    """The model, the device and the data of a run, and where it starts."""
    others = "".join(f"{axis} {size} x " for axis, size in (("cp", plan.cp), ("pp", plan.pp)) if size > 1)
    layout = f"tp {plan.tp} x {others}dp {plan.dp}" + (", sequence parallel" if config.mesh.sequence_parallel else "")
    ranks = counted(plan.world_size, "rank") + (f" ({layout})" if plan.world_size > 1 else "")
    some = {"active": plan.active_parameters, "trained": plan.trained_parameters}
    parts = "".join(f" ({count:,} {name})" for name, count in some.items() if count < plan.num_parameters)
    yield f"{counted(plan.num_parameters, 'parameter')}{parts} in {config.precision.dtype} on {ranks}, {device}"
    tokens = f"{counted(plan.global_batch, 'sample')} x {counted(plan.sequence_length, 'token')}"
    steps = f"steps {start.done.steps + 1:,} to {plan.steps:,} of {tokens}"
    init_from = config.checkpoint.init_from
    fresh = f"weights of {init_from}" if init_from else f"new weights from seed {config.run.seed}"
    origin = f"resumed from {start.folder}" if start.folder else fresh
    microbatches = counted(plan.num_microbatches, "microbatch", "microbatches")
    yield f"{steps}, in {microbatches} of {plan.micro_batch:,} per rank; {origin}"
    yield from start.notes


def device_text(device: torch.device) -> str:
    """ "cuda:0 (NVIDIA H200)", or "cpu with 8 threads"."""
    import torch

    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device} with {counted(torch.get_num_threads(), 'thread')}"


def step_text(values: Mapping[str, Any], *, eta_s: float | None = None) -> str:
    """The measurements of a step in one line; unknown values are left out.

    Args:
        values: a line of metrics.jsonl, and with it `steps`, of the whole run, and `device`, "cuda" or "cpu".
        eta_s: seconds left.
    """
    each = "GPU" if values.get("device") == "cuda" else "rank"
    formats = (
        ("step_time_s", _time_of_a_step),
        ("tflops", lambda rate: f"{rate:.3g} TFLOP/s/{each}"),
        ("mfu", lambda share: f"MFU {100 * share:.1f} %"),
        ("loss", lambda loss: f"loss {loss:.4f}"),
        ("lr", lambda rate: f"lr {_scientific(rate)}"),
        ("grad_norm", lambda norm: f"grad norm {norm:.3g}"),
        ("params_norm", lambda norm: f"params norm {norm:.4g}"),
        ("num_zeros", lambda count: f"zeros {count:,}"),
        ("loss_scale", lambda scale: f"loss scale {scale:g}"),
        ("consumed_tokens", lambda count: f"{short_count(count)} tokens"),
        ("memory_bytes", lambda count: f"{count / 1e9:.1f} GB"),
        ("data_wait", lambda share: f"data wait {share:.0%}" if share >= 0.01 else ""),
        ("ranks", held_up_text),
    )
    texts = [text(values[key]) for key, text in formats if values.get(key) is not None]
    place = f"step {values['step']}/{values['steps']}"
    end = f"ETA {duration_text(eta_s)}" if eta_s is not None else ""
    return " | ".join(filter(None, (place, *texts, end)))


def _time_of_a_step(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms" if seconds < 10 else f"{seconds:.1f} s"


def _scientific(value: float) -> str:
    """ "2.9e-4"; three digits at most."""
    digits, _, exponent = f"{value:.2e}".partition("e")
    return f"{float(digits):g}e{int(exponent)}" if value else "0"


def short_count(count: int) -> str:
    """ "1.23 B", "512 k", "12"."""
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            value = count / size
            return f"{value:.{max(0, 3 - len(str(int(value))))}f} {unit}"
    return str(count)


def duration_text(seconds: float) -> str:
    """ "2 d 5 h", "3 h 12 min", "12 min", "40 s"."""
    minutes = round(seconds / 60)
    if seconds < 60:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


def losses_text(step: int, values: Mapping[str, Any]) -> Iterator[str]:
    """The losses of the evaluations and the scores of tasks in a line of metrics.jsonl, if there were any."""
    names = {"valid": "validation loss", "test": "test loss", "accuracy": "accuracy", "tasks": "tasks"}
    for key, name in names.items():
        if numbers := values.get(key):
            yield f"step {step:,}: {name} " + ", ".join(f"{of} {number:.4f}" for of, number in numbers.items())


def event_text(kind: str, facts: Mapping[str, Any]) -> str | None:
    """The line for an event of events.jsonl; None for events that are reported elsewhere."""
    if kind == "saved":
        return f"step {facts['step']:,}: checkpoint {facts['checkpoint']} written in {facts['seconds']:.1f} s"
    if kind == "skipped" and facts.get("loss_tokens") == 0:
        return f"step {facts['step']:,}: skipped, none of its tokens counts in the loss"
    if kind == "spike":
        limits = f"limits {facts['loss_limit']:.4f} and {facts['grad_norm_limit']:.4g}"
        numbers = f"loss {facts['loss']:.4f}, gradient norm {facts['grad_norm']:.4g} ({limits})"
        return f"step {facts['step']:,}: spike, {numbers}; {facts['page']}"
    if kind == "rollback":
        first, last = facts["samples"]
        skipped = f"samples {first:,} to {last:,} are skipped"
        return f"step {facts['step']:,}: rolling back to {facts['checkpoint']}; {skipped} from now on"
    if kind == "skip" and facts.get("why") == "spike":
        return f"step {facts['step']:,}: skipped as a spike, loss {facts['loss']:.4f}, norm {facts['grad_norm']:.4g}"
    if kind == "skip" and facts.get("why") == "data.skip":
        return f"step {facts['step']:,}: skipped, its samples are in data.skip"
    if kind == "skipped":
        return f"step {facts['step']:,}: skipped, gradient norm {facts['grad_norm']}, loss {facts['loss']:.4f}"
    return None
