"""Rules between the length of a run and the lengths and values of its schedules.

Each problem is one line with the conflicting values and advice. Lengths may be in different units: they are compared in
the unit in which the schedules count (lengths.py). Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress

from mdata import UsageError
from trainer.config.sections import OptimizerSection, RunConfig
from trainer.plan.lengths import (
    SCHEDULE_LENGTHS,
    RunLength,
    ScheduleLengths,
    batch_sizes,
    given_lengths,
    run_length,
    schedule_lengths,
)


def schedule_problems(config: RunConfig) -> Iterator[str]:
    """Every problem of the run's length and of its schedules."""
    run, unclear = given_lengths(config.train), list(_unclear(config.optimizer))
    if not run:
        yield "the run has no length; set one of train.steps, train.samples and train.tokens"
    if len(run) > 1:
        yield f"{_settings('train.', run)} are set; a run has one length, keep one of them"
    yield from unclear
    if len(run) == 1 and not unclear:
        with suppress(UsageError):  # an invalid ramp is reported separately
            yield from _length_problems(config, schedule_lengths(config), run_length(config))
    yield from _value_problems(config.optimizer)


def _unclear(optimizer: OptimizerSection) -> Iterator[str]:
    """Lengths that are given twice."""
    for prefix in SCHEDULE_LENGTHS:
        given: dict[str, float] = dict(given_lengths(optimizer, prefix))
        if prefix == "warmup_" and optimizer.warmup_fraction:
            given["fraction"] = optimizer.warmup_fraction
        if len(given) > 1:
            yield f"{_settings(f'optimizer.{prefix}', given)} are set; keep one of them"


def _length_problems(config: RunConfig, lengths: ScheduleLengths, run: RunLength) -> Iterator[str]:
    optimizer, whole = config.optimizer, _settings("train.", given_lengths(config.train))
    if run.steps < 1:
        yield _less_than_a_step(config, whole)
        return
    end = run.steps if lengths.counter == "steps" else run.samples
    # A schedule with a length of its own may be longer than this run, which may then end within the warmup.
    if lengths.warmup > lengths.decay:
        limit = _settings("optimizer.decay_", given_lengths(optimizer, "decay_")) if lengths.decay < end else whole
        fraction = {"fraction": optimizer.warmup_fraction}
        warmup = _settings("optimizer.warmup_", given_lengths(optimizer, "warmup_") or fraction)
        fewer, raised = f"fewer {lengths.counter}", limit.partition("=")[0]
        yield f"{warmup} is more than {limit}; warm up for {fewer}, or raise {raised}"
    given = given_lengths(optimizer, "wsd_decay_")
    if given and optimizer.schedule != "wsd":
        yield f'{_settings("optimizer.wsd_decay_", given)} applies only to optimizer.schedule="wsd"; leave it out'
    if optimizer.schedule == "wsd" and not given:
        yield 'optimizer.schedule="wsd" needs a length of its decay; set optimizer.wsd_decay_steps, _samples or _tokens'
    elif optimizer.schedule == "wsd" and lengths.wsd_decay > lengths.decay:
        wsd_decay, most = _settings("optimizer.wsd_decay_", given), f"{lengths.decay:g} {lengths.counter}"
        yield f"{wsd_decay} is longer than the schedule, of {most}; choose at most that many"


def _less_than_a_step(config: RunConfig, whole: str) -> str:
    samples, unit = batch_sizes(config).at(0), "samples"
    if config.train.tokens:
        samples, unit = samples * config.train.sequence_length, "tokens"
    return f"{whole} is less than the first step, which reads {samples} {unit}; choose at least {samples}"


def _value_problems(optimizer: OptimizerSection) -> Iterator[str]:
    for name in ("min_lr", "init_lr"):
        if getattr(optimizer, name) > optimizer.lr:
            yield (
                f"optimizer.{name}={getattr(optimizer, name):g} is more than optimizer.lr={optimizer.lr:g}; "
                f"choose an optimizer.{name} of at most {optimizer.lr:g}"
            )
    own, least = optimizer.embedding_lr, optimizer.embedding_min_lr
    if own and max(least, optimizer.init_lr) > own:
        name = "embedding_min_lr" if least > own else "init_lr"
        value = getattr(optimizer, name)
        yield (
            f"optimizer.{name}={value:g} is more than optimizer.embedding_lr={own:g}; choose at most {own:g}, or a "
            "larger optimizer.embedding_lr"
        )
    if least and not own:
        yield f"optimizer.embedding_min_lr={least:g} needs optimizer.embedding_lr; set both, or leave it out"
    if optimizer.weight_decay_schedule != "constant":
        return
    given = given_lengths(optimizer, "weight_decay_")
    given_text = _settings(
        "optimizer.weight_decay_", {"end": optimizer.weight_decay_end} if optimizer.weight_decay_end else given
    )
    if given_text:
        yield f'{given_text} needs optimizer.weight_decay_schedule="linear" or "cosine"; set one, or leave it out'


def _settings(prefix: str, given: Mapping[str, float]) -> str:
    """ "a=1 and b=2"."""
    return " and ".join(f"{prefix}{unit}={amount}" for unit, amount in given.items())
