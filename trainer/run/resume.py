"""Continues from a checkpoint: some settings must not differ; changes of others are reported.

`find_start` reads the run folder's newest checkpoint and decides how the run starts: another model or another order of
data is refused; every other setting that differs is reported. Unusual: without optimizer.decay_*, the horizon of the
learning rate is that of the run's first start, so that a longer run neither rewinds nor stretches a decay in progress.
Reads the checkpoint's index; changes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from mdata import UsageError
from mdata.errors import counted
from mdata.loader.resume_check import other_length, resumes
from mdata.tokenizers.base.tokenizer import TokenizerConfig
from mdata.tokenizers.registry import WITHOUT_FILES
from mdata.util.config_text import load_toml
from trainer.checkpoint.folder import ResumePoint, find_checkpoint, read_index
from trainer.checkpoint.format import Index, RunState
from trainer.checkpoint.load import find_valid
from trainer.checkpoint.location import Location, checkpoints_folder, location_of
from trainer.checkpoint.object_folder import LATEST
from trainer.checkpoint.save import together
from trainer.config.parse import parse_config, problems_error, sub_sections, value_text
from trainer.config.sections import OptimizerSection, RunConfig, TrainSection
from trainer.convert.convert import open_model
from trainer.convert.first_state import FirstState, first_state
from trainer.models.family import family_of
from trainer.optim.schedules import Rates, rates
from trainer.parallel.collectives import gather_objects
from trainer.parallel.world import World
from trainer.plan.lengths import batch_sizes, given_lengths, horizon, run_length, schedule_lengths, sizes_setting
from trainer.run.data import RunData

SETTINGS = {  # part of the data's identity -> the key that a user sets; other parts have no key
    "blend": "data.blend",
    "blend_weights": "data.blend",
    "blend_surplus": "data.blend_surplus",
    "document_masks": "data.document_masks",
    "longer": "data.longer",
    "order": "data.order",
    "reset_attention_mask": "data.document_masks",
    "reset_position_ids": "data.document_masks",
    "sample_kind": "data.kind",
    "seed": "run.seed",
    "sequence_length": "train.sequence_length",
    "shuffle_block": "data.shuffle_block",
    "split_shares": "data.split",
}


class Counted(NamedTuple):
    """Steps and samples, as the schedules count them."""

    steps: int
    samples: int


@dataclass(frozen=True, slots=True)
class Done:
    """The progress of training: finished steps, and the position in the data stream.

    Args:
        skipped_steps, skipped_samples: how many of them changed nothing, because the gradient was not finite.
        schedule_steps, schedule_samples, moment_steps: offsets of schedules and moments; see RunState.
    """

    steps: int
    samples: int
    skipped_steps: int = 0
    skipped_samples: int = 0
    schedule_steps: int = 0
    schedule_samples: int = 0
    moment_steps: int = 0

    def after(self, samples: int) -> Done:
        """The progress after one more step of this many samples."""
        return dataclasses.replace(self, steps=self.steps + 1, samples=self.samples + samples)

    def skipping(self, samples: int) -> Done:
        """The progress after a step of this many samples turns out to have been skipped."""
        return dataclasses.replace(
            self, skipped_steps=self.skipped_steps + 1, skipped_samples=self.skipped_samples + samples
        )

    def scheduled(self, optimizer: OptimizerSection) -> Counted:
        """The steps and samples that the schedules count."""
        steps, samples = self.steps + self.schedule_steps, self.samples + self.schedule_samples
        if optimizer.count_skipped:
            return Counted(steps, samples)
        return Counted(steps - self.skipped_steps, samples - self.skipped_samples)


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """How a run starts.

    Args:
        done: the progress so far.
        folder: the checkpoint to resume from; None: a new run.
        config: the requested one, with the ends of its schedules filled in.
        changes: settings that differ from the checkpoint: name -> (before, now).
        notes: the changes and their consequences as text, a line each.
        first: the folder of a new run's first state, which may be one of several in checkpoint.init_from; None: drawn.
        spikes: the state of the spike detector; empty: none.
    """

    done: Done
    folder: Location | None
    config: RunConfig
    changes: Mapping[str, tuple[Any, Any]]
    notes: tuple[str, ...]
    first: Location | None = None
    spikes: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        """The start for events.jsonl: its position, and the settings that differ from the checkpoint."""
        return {
            "step": self.done.steps,
            "checkpoint": self.folder.name if self.folder else None,
            "changed": {name: {"before": before, "now": now} for name, (before, now) in self.changes.items()},
        }


def find_start(config: RunConfig, data: RunData, *, point: ResumePoint | None = None) -> Start:
    """Decide where and how the run continues, or refuse.

    Args:
        point: the checkpoint; None: that of `find_checkpoint`.

    Raises:
        UsageError: the model, the update rule or the order of the data differs from the checkpoint; names the settings.
        DamageError: the checkpoint is incomplete or damaged.
    """
    start = _start(config, data, point or find_checkpoint(checkpoints_folder(config)))
    return dataclasses.replace(start, notes=(*data.notes, *start.notes))


def _start(config: RunConfig, data: RunData, resume_point: ResumePoint) -> Start:
    folder = resume_point.folder
    if folder is None:
        return _first_start(config, data)
    run = (index := read_index(folder)).run
    stored, _ = parse_config(load_toml(run.config))
    conflicts = _conflicts(config, stored, resume_point, run=run, data=data)
    if conflicts:
        raise problems_error(f"continuing {folder.name}", [*map(str, conflicts)]) if conflicts[1:] else conflicts[0]
    done = done_in(run)
    checkpoint_notes = (*_seen_notes(resume_point, index), *_length_notes(config, data, run))
    if stored is None:
        note = f"{folder.name} has settings that this version does not know, so changed settings are not reported"
        return Start(
            done=done,
            folder=folder,
            config=with_horizon(config, None),
            changes={},
            notes=(*checkpoint_notes, note),
            spikes=run.spikes,
        )
    before = with_horizon(stored, None)
    now = with_horizon(config, before)
    changes = changed_settings(before, now)
    notes = tuple(_notes(changes, before=before, now=now, asked=config, folder=folder, done=done))
    notes = (*checkpoint_notes, *notes)
    return Start(done=done, folder=folder, config=now, changes=changes, notes=notes, spikes=run.spikes)


def conflicts_without_data(config: RunConfig, resume_point: ResumePoint) -> list[UsageError]:
    """Why a run cannot continue from a checkpoint, apart from its data, which cannot be opened."""
    if resume_point.folder is None:
        return []
    run = read_index(resume_point.folder).run
    stored, _ = parse_config(load_toml(run.config))
    return _conflicts(config, stored, resume_point, run=run, data=None)


def _conflicts(
    config: RunConfig, stored: RunConfig | None, resume_point: ResumePoint, *, run: RunState, data: RunData | None
) -> list[UsageError]:
    """Every reason why the run may not continue from a checkpoint."""
    folder = resume_point.folder
    assert folder is not None, "a checkpoint exists"
    conflicts = [
        *_model_conflict(config, stored, data=data, folder=folder),
        *(_data_conflict(data, run, folder, asked=config, stored=stored) if data is not None else ()),
        *_optimizer_conflict(config, stored, folder),
        *_rate_conflict(config, stored, done_in(run)),
        *_frozen_conflict(config),
    ]
    if conflicts and resume_point.warning:
        fix = f"write the name of another checkpoint into {folder.parent / LATEST}"
        conflicts.append(UsageError(resume_point.warning, fix=fix))
    return conflicts


def done_in(run: RunState) -> Done:
    """The progress recorded in a checkpoint."""
    return Done(
        steps=run.step,
        samples=run.consumed_samples,
        skipped_steps=run.step - (run.optimizer_steps - run.moment_steps),
        skipped_samples=run.skipped_samples,
        schedule_steps=run.schedule_steps,
        schedule_samples=run.schedule_samples,
        moment_steps=run.moment_steps,
    )


def _first_start(config: RunConfig, data: RunData) -> Start:
    """The start of a run without a checkpoint: at step 1, or where checkpoint.init_from ended."""
    rows, made = config.model.vocab_size or data.facts.vocab_size or 0, data.train.tokenizer
    files = data.train.tokenizer_files
    can_be_loaded = made is not None and (bool(files) or made.type in WITHOUT_FILES)
    tokenizer = TokenizerConfig(made.type, files, made.options, "tokenizers") if made and can_be_loaded else None
    first = first_state(config, rows, tokenizer=tokenizer, data_ids=data.facts.num_ids)
    if first is None:
        now = with_horizon(config, None)
        return Start(done=Done(0, 0), folder=None, config=now, changes={}, notes=())
    other = first.config if config.checkpoint.init_schedule else None
    now = with_horizon(config, with_horizon(other, None) if other else None)
    done = first_done(now, first)
    notes = list(first.notes)
    if config.checkpoint.init_data:
        if first.run is not None and first.run.data:
            remedy = "restore what differs, or set checkpoint.init_data=false to begin with the first sample"
            for conflict in _data_conflict(
                data, first.run, first.folder, asked=config, stored=first.config, fix=remedy
            ):
                raise conflict
        else:
            notes.append(f"{first.folder} does not record its training data, so the order is not compared")
        notes.append(
            f"steps and data continue from it, after step {done.steps:,} and {counted(done.samples, 'sample')}"
        )
    if config.checkpoint.init_schedule:
        if not given_lengths(config.optimizer, "decay_"):
            end = run_length(now.train, steps=done.steps, samples=done.samples).steps
            for conflict in _rates_of_zero(now, done, first=done.steps + 1, last=end):
                raise conflict
        rate = _rates(now, done, batch=batch_sizes(now.train).at(done.samples)).learning_rate
        notes.append(f"the schedules continue from it: the learning rate of step {done.steps + 1:,} is {rate:g}")
        notes += _horizon_notes(config, now, done)
    return Start(done=done, folder=None, config=now, changes={}, notes=tuple(notes), first=first.folder)


def first_done(config: RunConfig, first: FirstState) -> Done:
    """The progress of a run that begins with the state of another.

    Raises:
        UsageError: the folder contains no resumable training state, or its run is longer than this one.
    """
    settings = config.checkpoint
    asked = [f"checkpoint.{key}" for key in ("init_schedule", "init_data") if getattr(settings, key)]
    if first.run is None:
        if asked:
            raise UsageError(
                f"{' and '.join(asked)}: {first.folder} contains no resumable training state",
                expected="a training checkpoint of mtrain or Megatron-LM",
                fix=f"set {' and '.join(asked)} to false",
            )
        return Done(0, 0)
    before = done_in(first.run)
    steps, samples = (before.steps, before.samples) if settings.init_data else (0, 0)
    if steps >= (end := run_length(config.train, steps=steps, samples=samples).steps):
        (unit,) = given_lengths(config.train)
        raise UsageError(
            "checkpoint.init_data: the steps of checkpoint.init_from count as this run's, and none is left",
            found=f"step {steps:,} and {counted(samples, 'sample')} in {first.folder}; this run ends at step {end:,}",
            fix=f"set train.{unit} to the length of both runs together, or checkpoint.init_data=false",
        )
    schedule = before.scheduled(config.optimizer) if settings.init_schedule else Counted(0, 0)
    return Done(
        steps,
        samples,
        schedule_steps=schedule.steps - steps,
        schedule_samples=schedule.samples - samples,
        moment_steps=first.run.optimizer_steps * settings.init_optimizer - steps,
    )


def found_by_one(config: RunConfig, *, every_byte: bool = True) -> ResumePoint:
    """The checkpoint to resume from, by checkpoint.load.

    Args:
        every_byte: see `find_valid`.

    Raises:
        DamageError: there are checkpoints and none of them can be used.
    """
    root = checkpoints_folder(config)
    return find_checkpoint(root) if config.checkpoint.load == "latest" else find_valid(root, every_byte=every_byte)


def found_by_all(config: RunConfig, world: World) -> ResumePoint:
    """The same checkpoint on every rank; if every byte is compared, rank 0 does that for all."""
    if config.checkpoint.load == "latest":
        return found_by_one(config)
    resume_point = together(
        world.groups["world"], lambda: found_by_one(config) if world.is_main else None, doing="comparing a checkpoint"
    )[0]
    assert resume_point is not None, "rank 0 looks"
    return resume_point


def check_agreed(start: Start, *, world: World) -> None:
    """Refuse to start if ranks found different checkpoints: their collectives would not match.

    Raises:
        UsageError: the ranks do not share the folder of checkpoints, or checkpoint.init_from.
    """
    mine, config = (start.done, start.first), start.config
    everyone = gather_objects(mine, world.groups["world"])
    if set(everyone) == {mine}:
        return
    expected = "one folder that all machines share"
    if len({done for done, _ in everyone}) > 1:
        folder, actual = checkpoints_folder(config), "steps " + ", ".join(str(done.steps) for done, _ in everyone)
    else:
        assert config.checkpoint.init_from is not None, "a first state is read from there"
        folder, actual = location_of(config.checkpoint.init_from), ", ".join(str(first) for _, first in everyone)
        expected += ", which no run is writing to; or name one checkpoint in it"
    raise UsageError(f"the ranks do not see the same checkpoints in {folder}", found=actual, expected=expected)


def with_horizon(config: RunConfig, before: RunConfig | None) -> RunConfig:
    """The configuration with explicit ends of schedules: its own, else those of the run so far, else the run's end."""
    optimizer = config.optimizer
    keys = horizon(config, before, prefix="decay_")
    if optimizer.weight_decay_schedule != "constant":
        keys |= horizon(config, before, prefix="weight_decay_")
    written_out: Any = keys
    return dataclasses.replace(config, optimizer=dataclasses.replace(optimizer, **written_out))


def changed_settings(before: RunConfig, now: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Every setting that differs: "section.key" -> (before, now)."""
    old, new = dataclasses.asdict(before), dataclasses.asdict(now)
    return {
        f"{section}.{key}": (old[section][key], value)
        for section, keys in new.items()
        for key, value in keys.items()
        if old[section][key] != value
    }


def _seen_notes(resume_point: ResumePoint, index: Index) -> Iterator[str]:
    """Notes for the user on the checkpoint itself."""
    if resume_point.warning:
        yield resume_point.warning
    if not index.hashed:
        yield (
            f"{resume_point.folder} was written by an older version, without hashes: "
            "damage to its content cannot be detected"
        )


def _length_notes(config: RunConfig, data: RunData, run: RunState) -> Iterator[str]:
    """A note if another length of the run changes the data id, in Megatron's order."""
    before = other_length(data.train, run.data)
    if before is not None:
        (unit,) = given_lengths(config.train)
        length, now = f"train.{unit}={getattr(config.train, unit)}", data.train.identity["num_samples"]
        yield (
            f"{length} builds Megatron's order for {counted(now, 'sample')} in place of {before:,}: a new data id, "
            f"{data.train.data_id[:12]}, with the same samples"
        )


def _notes(
    changes: Mapping[str, tuple[Any, Any]],
    *,
    before: RunConfig,
    now: RunConfig,
    asked: RunConfig,
    folder: Location,
    done: Done,
) -> Iterator[str]:
    if changes:
        changes_text = ", ".join(
            f"{name} {value_text(old)} -> {value_text(new)}" for name, (old, new) in changes.items()
        )
        yield f"changed since {folder.name}: {changes_text}"
    was, will = (_rates(c, done, batch=batch_sizes(now.train).at(done.samples)) for c in (before, now))
    names = ["learning_rate", *(["embedding_learning_rate"] if now.optimizer.embedding_lr else []), "weight_decay"]
    for name in names:
        old, new = getattr(was, name), getattr(will, name)
        if old != new:
            rate_text = f"the {name.replace('_', ' ')} of step {done.steps + 1} is {new:g}"
            yield f"{rate_text}; with the checkpoint's settings it would be {old:g}"
    yield from _horizon_notes(asked, now, done)


def _ends(train: TrainSection, done: Done) -> dict[str, int]:
    """The end of the run in its schedules, which may continue those of another run (checkpoint.init_schedule)."""
    before = {
        "steps": done.schedule_steps,
        "samples": done.schedule_samples,
        "tokens": done.schedule_samples * train.sequence_length,
    }
    return {unit: amount + before[unit] for unit, amount in given_lengths(train).items()}


def _horizon_notes(asked: RunConfig, now: RunConfig, done: Done) -> Iterator[str]:
    """Note a decay that ends elsewhere than the run without being requested."""
    planned, wanted = given_lengths(now.optimizer, "decay_"), _ends(now.train, done)
    if now.optimizer.schedule != "constant" and not given_lengths(asked.optimizer, "decay_") and planned != wanted:
        (unit, end), (unit_now, end_now) = *planned.items(), *wanted.items()
        yield (
            f"the learning rate reaches optimizer.min_lr={now.optimizer.min_lr:g} at {_place(unit, end)}, as planned "
            f"when the run began; set optimizer.decay_{unit_now}={end_now} to let it decay until "
            f"{_place(unit_now, end_now)}"
        )


def _rates(config: RunConfig, done: Done, *, batch: int) -> Rates:
    at = done.scheduled(config.optimizer)
    return rates(config.optimizer, schedule_lengths(config), steps=at.steps, samples=at.samples, batch=batch)


def _place(unit: str, amount: int) -> str:
    """ "step 5", "sample 100", "token 1000"."""
    return f"{unit.removesuffix('s')} {amount}"


def _data_conflict(
    data: RunData,
    run: RunState,
    folder: Location,
    *,
    asked: RunConfig,
    stored: RunConfig | None,
    fix: str = "restore what differs, or start a new run in another run.folder",
) -> Iterator[UsageError]:
    """The error if the data stream differs from the checkpoint's."""
    before, now = run.data, data.train.identity
    changed = [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]
    if resumes(data.train, before, consumed=run.consumed_samples):
        return
    if "sample_kind" in changed:  # decides these too
        changed = [name for name in changed if name != "extra_token" and name not in sub_sections("data")]
    if changed == ["num_samples"]:
        (unit,) = given_lengths(asked.train)
        fix = (
            f"this length changes the epochs of Megatron's order, and with them its samples: restore train.{unit}, or "
            "train on in another run.folder, from the first sample, with checkpoint.init_from, init_optimizer and "
            "init_schedule; data.order_samples=N, set when a run begins, lets it grow to N samples"
        )
    if changed == ["blend"] and data.train.continues is not None:
        parent, until = data.train.continues
        fix = (
            f"it continues blend {parent[:16]} at sample {until}: train with that one until a checkpoint before this "
            "sample, or make one change of the checkpoint's blend"
        )
    yield UsageError(
        f"{folder} was trained on different data, or in a different order",
        found=", ".join(dict.fromkeys(_setting_text(name, now.get(name), asked, other=stored) for name in changed)),
        expected=", ".join(
            dict.fromkeys(_setting_text(name, before.get(name), stored, other=asked) for name in changed)
        ),
        fix=fix,
    )


def _setting_text(name: str, value: object, config: RunConfig | None, *, other: RunConfig | None) -> str:
    """The setting behind a part of the data's identity, with the part's value if the setting does not show it."""
    if config is None or other is None or name not in (*SETTINGS, *sub_sections("data"), "num_samples"):
        return f"{name} {value}"
    if name == "num_samples":
        lengths, samples = given_lengths(config.train), f"{value} samples"
        if "steps" in lengths:
            lengths["global_batch"] = config.train.global_batch
            if config.train.batch_schedule:
                return f"train.steps={lengths['steps']} with {sizes_setting(config.train)} ({samples})"
        return " x ".join(f"train.{key}={amount}" for key, amount in lengths.items()) + f" ({samples})"
    if name in sub_sections("data"):
        own_options, other_options = (
            {} if o is None else dataclasses.asdict(o) for o in (config.data.of_kind, other.data.of_kind)
        )
        differing = [(key, value) for key, value in own_options.items() if other_options.get(key) != value]
        if config.data.kind != other.data.kind or not differing:
            return f"data.kind={value_text(config.data.kind)}" + ("" if differing else f" ({name} {value})")
        return ", ".join(f"data.{name}.{key}={value_text(value)}" for key, value in differing)
    section, key = SETTINGS[name].split(".")
    own, others = (getattr(getattr(settings, section), key) for settings in (config, other))
    text = f"{section}.{key}{'=' if own is not None else ' '}{value_text(own)}"
    return text if own != others and name != "blend" else f"{text} ({name} {value})"  # a path may name other data


def _rate_conflict(asked: RunConfig, stored: RunConfig | None, done: Done) -> Iterator[UsageError]:
    """The error if added steps would change nothing, unless requested."""
    if stored is None or len(given_lengths(asked.train)) != 1 or given_lengths(asked.optimizer, "decay_"):
        return
    before = with_horizon(stored, None)
    now = with_horizon(asked, before)
    end_before, end = (run_length(c.train, steps=done.steps, samples=done.samples).steps for c in (stored, asked))
    yield from _rates_of_zero(now, done, first=max(done.steps, end_before) + 1, last=end)


def _rates_of_zero(now: RunConfig, done: Done, *, first: int, last: int) -> Iterator[UsageError]:
    """The error if later steps would change nothing, because the decay to 0 ends before them."""
    lengths, sizes = schedule_lengths(now), batch_sizes(now.train)
    samples = sizes.after(max(0, first - 1 - done.steps), consumed=done.samples)
    at = dataclasses.replace(done, steps=first - 1, samples=samples).scheduled(now.optimizer)
    ended = (at.steps if lengths.counter == "steps" else at.samples) >= lengths.decay
    if first > last or not ended:
        return
    of_first = rates(now.optimizer, lengths, steps=at.steps, samples=at.samples, batch=sizes.at(samples))
    if of_first.learning_rate or of_first.embedding_learning_rate:
        return
    ((unit, end),) = given_lengths(now.optimizer, "decay_").items()
    ((unit_now, end_now),) = _ends(now.train, done).items()
    yield UsageError(
        f"{f'steps {first} to {last}' if last > first else f'step {first}'} would run at learning rate 0",
        found=f"optimizer.min_lr=0, which the decay reaches at {_place(unit, end)}, as planned when the run began",
        fix=f"set optimizer.decay_{unit_now}={end_now} to let it decay until {_place(unit_now, end_now)}, or a larger "
        f"optimizer.min_lr; optimizer.decay_{unit}={end} trains them at rate 0",
    )


def _model_conflict(
    config: RunConfig, stored: RunConfig | None, *, data: RunData | None, folder: Location
) -> Iterator[UsageError]:
    """The error if the model's function differs: not every change of [model] changes a tensor's shape."""
    before, now = (_function(c, data) if c else {} for c in (stored, config))
    if changed := sorted(name for name in before.keys() & now.keys() if before[name] != now[name]):
        yield UsageError(
            f"{folder} was trained with a different model",
            found=", ".join(f"{name} {now[name]}" for name in changed),
            expected=", ".join(f"{name} {before[name]}" for name in changed),
            fix="restore [model], or start a new run in another run.folder",
        )


def _optimizer_conflict(config: RunConfig, stored: RunConfig | None, folder: Location) -> Iterator[UsageError]:
    """The error if the checkpoint lacks the state of this update rule."""
    if stored is not None and stored.optimizer.name != config.optimizer.name:
        yield UsageError(
            f"{folder} was trained with another update rule",
            found=f"optimizer.name {config.optimizer.name}",
            expected=f"optimizer.name {stored.optimizer.name}",
            fix="restore optimizer.name, or start a new run in another run.folder",
        )


def _frozen_conflict(config: RunConfig) -> Iterator[UsageError]:
    """Adapters whose frozen weights cannot be read; the engine compares their hash."""
    if config.model.lora is not None and (first := config.checkpoint.init_from) is not None:
        try:
            open_model(location_of(first))
        except UsageError as error:
            yield UsageError(f"checkpoint.init_from = {first}: {error}")


def _function(config: RunConfig, data: RunData | None) -> dict[str, Any]:
    """The settings that decide the model's function: see `Family.function`."""
    vocab_size = config.model.vocab_size or (data and data.facts.vocab_size)
    if not vocab_size:
        return {}
    family = family_of(config)
    return {"family": config.model.family, **family.function(family.shape(config, vocab_size))}
