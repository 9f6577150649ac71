"""Reads the run folder of `mtrain train` for tracing: which data, in which order, in which steps, on which ranks.

config.toml has the settings, plan.json the derived numbers and the data id, events.jsonl and metrics.jsonl the number
of ranks and the global batch of each start of the run. The files are read as TOML and JSON, with only the fields listed
here; a key of [data] or [train] that this version does not know is refused, because it might decide the order. Paths in
config.toml are relative to the folder where the run was started, which plan.json records (`data_found`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from mdata.dataset.dataset import Dataset
from mdata.dataset.dataset_options import OPTION_KEYS, DatasetOptions, MegatronOrder, NativeOrder, document_mask_keys
from mdata.dataset.eval_sets import EvaluationSplit, evaluated_samples, evaluation_sets, samples_asked
from mdata.dataset.mock_data import MOCK
from mdata.dataset.run_paths import data_found
from mdata.errors import DamageError, UsageError, os_errors_named
from mdata.loader.batch_sizes import BatchSizes, by_steps, constant, read_ramp
from mdata.progress import SILENT, Progress
from mdata.tracing.eval_steps import EvaluationSteps
from mdata.tracing.run_steps import Steps, StepSpan
from mdata.tracing.tracer import Tracer
from mdata.util.config_text import parse_json, parse_toml
from mdata.util.option_synonyms import nearest
from mdata.util.regular_files import regular_file

# Keys that this version knows: those of [data] that are not options of a dataset, and those of [train].
_OTHER_DATA = ("blend", "split", "valid", "test", "allow_overlap", "prefetch")
_STEPS = ("sequence_length", "global_batch", "batch_ramp", "batch_schedule", "micro_batch")
_LENGTHS = ("steps", "samples", "tokens")
_EVALUATION = ("evaluate", "eval_interval", "eval_samples")
_TRAIN = (*_STEPS, *_LENGTHS, *_EVALUATION, "exit_interval", "loss_average", "log_interval")
_CHECKPOINTS = {("mtrain-checkpoint", 1), ("mtrain-checkpoint", 2)}
_SHOWN = 4


@dataclass(frozen=True, kw_only=True)
class _RunFolder:
    """The files of a run folder, as far as they exist."""

    folder: Path
    config: Mapping[str, Any]
    plan: Mapping[str, Any]

    def number(self, section: str, key: str) -> int:
        """An integer setting of config.toml."""
        value = self.config.get(section, {}).get(key)
        if type(value) is not int:
            problem = f"{self.folder / 'config.toml'}: {section}.{key} is not a whole number"
            raise DamageError(problem, found=repr(value))
        return value


def is_run(path: str | Path) -> bool:
    """Whether a path is the folder of a run."""
    return (Path(path) / "config.toml").is_file()


def trace_run(
    folder: str | Path,
    *,
    blend: str | None = None,
    validation: str | None = None,
    test: str | None = None,
    progress: Progress = SILENT,
) -> Tracer:
    """Open the data of a run as the run did: its training data, or one of its validation or test sets.

    Args:
        folder: the run folder.
        blend: the data, if it has been moved.
        validation, test: the name of a set, in place of the training data; at most one of them.
        progress: receives a note on arrays that are built.

    Raises:
        UsageError: not a run folder, an unknown version, no such set, or data that differs from the run's.
        DamageError: a file that cannot be read.
    """
    folder = Path(folder)
    if not is_run(folder):
        raise UsageError(f"{folder} is not a run folder", expected="config.toml, as `mtrain train` writes it")
    config, plan = _toml(folder / "config.toml"), _json(folder / "plan.json") or {}
    if isinstance(config.get("data"), dict):
        config = {**config, "data": data_found(config["data"], folder, plan)}
    run = _RunFolder(folder=folder, config=config, plan=plan)
    options = _options(run)
    if run.config.get("data", {}).get("blend") == MOCK:
        raise UsageError(f"{folder} was trained on mock data: its tokens come from no document")
    path = blend or run.config.get("data", {}).get("blend")
    if not isinstance(path, str):
        raise DamageError(f"{folder / 'config.toml'}: data.blend is not a path", found=repr(path))
    try:
        dataset = Dataset.from_options(path, options, progress=progress)
    except UsageError as error:
        if blend or Path(path).exists():
            raise
        fix = "run from the folder in which the run was started, or give the data's new path with --blend"
        raise UsageError(str(error).splitlines()[0], fix=fix) from error
    _check_data(run, dataset)
    planned = run.plan.get("steps")
    total = planned if type(planned) is int else _steps_asked(run)
    steps = Steps(_spans(run), seed=options.seed, in_order=isinstance(options.order, MegatronOrder), total=total)
    if validation is not None and test is not None:
        raise UsageError("both a validation set and a test set are named", expected="one of them")
    if validation is not None:
        return _trace_set(run, dataset, steps, split="valid", name=validation, progress=progress)
    if test is not None:
        return _trace_set(run, dataset, steps, split="test", name=test, progress=progress)
    return Tracer(dataset, steps)


def _trace_set(
    run: _RunFolder, train: Dataset, steps: Steps, *, split: EvaluationSplit, name: str, progress: Progress
) -> Tracer:
    settings = run.config["train"]
    limit, interval = settings.get("eval_samples", 0), settings.get("eval_interval", 0) if split == "valid" else 0
    paths = run.config["data"].get(split, ())
    asked = samples_asked(limit, steps=_steps_asked(run), interval=interval)
    sets: Mapping[str, Dataset] = {}
    if settings.get("evaluate", True):
        sets = evaluation_sets(train, split, paths=paths, num_samples=asked, allow_overlap=True, progress=progress)
    if name not in sets:
        kind = "validation" if split == "valid" else "test"
        close = nearest(name, sets)
        raise UsageError(
            f"the run has no {kind} set called {name}",
            expected=", ".join(sets) or f"the run has no {kind} set",
            fix=f"{close}?" if close else None,
        )
    evaluated = evaluated_samples(sets[name], limit)
    return Tracer(sets[name], EvaluationSteps(evaluated, steps, interval=interval))


def _options(run: _RunFolder) -> DatasetOptions:
    """The options with which the run read its data."""
    data = dict(run.config.get("data", {}))
    _check_keys(run, "data", [*OPTION_KEYS, *_OTHER_DATA])
    _check_keys(run, "train", _TRAIN)
    options: dict[str, Any] = {key: data[key] for key in data if key not in _OTHER_DATA}
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    order, wanted = str(options.get("order", NativeOrder.name)), bool(options.pop("document_masks", False))
    options |= document_mask_keys(order=order, wanted=wanted)
    if order == MegatronOrder.name and "num_samples" not in options:
        options["num_samples"] = _samples_asked(run)
    of_run: dict[str, Any] = {
        "sequence_length": run.number("train", "sequence_length"),
        "seed": run.number("run", "seed"),
    }
    of_run["split_shares"] = str(data.get("split", "100,0,0"))
    options["cache"] = options.get("cache") or None
    options["tokenizer_unknown"] = "ok"  # a trace only reads; the run has already checked whether corpora may be mixed
    return DatasetOptions.from_keys(of_run | options)


def _steps_asked(run: _RunFolder) -> int:
    """The run's length in steps, with the batch sizes of config.toml."""
    unit, amount = _length(run)
    return amount if unit == "steps" else _sizes(run).within(_samples_asked(run))


def _samples_asked(run: _RunFolder) -> int:
    """Samples for which Megatron's order was built."""
    unit, amount = _length(run)
    if unit == "steps":
        return amount * max(_sizes(run).sizes)
    return amount if unit == "samples" else amount // run.number("train", "sequence_length")


def _length(run: _RunFolder) -> tuple[str, int]:
    """The run's length as given: in steps, samples or tokens."""
    unit = next((unit for unit in ("samples", "tokens") if run.config["train"].get(unit)), "steps")
    return unit, run.number("train", unit)


def _sizes(run: _RunFolder) -> BatchSizes:
    if schedule := run.config["train"].get("batch_schedule", ""):
        return by_steps(schedule, sequence_length=run.number("train", "sequence_length"))
    return read_ramp(run.config["train"].get("batch_ramp", ""), size=run.number("train", "global_batch"))


def _check_keys(run: _RunFolder, section: str, allowed: Sequence[str]) -> None:
    for key, value in run.config.get(section, {}).items():
        if key not in allowed:
            close = nearest(key, allowed)
            raise UsageError(
                f"{run.folder / 'config.toml'} was written by another version: this one has no key {section}.{key}",
                found=f"{key} = {value!r}",
                fix="use the mdata that trained it" + (f"; or is it {close}?" if close else ""),
            )


def _check_data(run: _RunFolder, dataset: Dataset) -> None:
    """Refuse data whose order differs from the run's.

    Raises:
        UsageError: names the fields that differ, if a checkpoint records them.
    """
    expected = run.plan.get("data_id")
    if expected is None or expected == dataset.data_id:
        return
    before = _identity(run)
    now = dataset.identity
    names = [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)] if before else []
    raise UsageError(
        f"{run.folder} was trained on different data, or in a different order",
        found=", ".join(f"{name} {now.get(name)}" for name in names[:_SHOWN]) or f"data id {dataset.data_id}",
        expected=", ".join(f"{name} {before.get(name)}" for name in names[:_SHOWN]) or f"data id {expected}",
        fix="restore the data of the run, or give its path with --blend",
    )


def _identity(run: _RunFolder) -> Mapping[str, Any]:
    """The fields that decided the order, from the newest checkpoint; empty if there is none."""
    root = run.folder / "checkpoints"
    try:
        newest = (root / "latest").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return {}
    if not re.fullmatch(r"step-[0-9]{1,18}", newest):  # a damaged pointer may name any file
        return {}
    index = _json(root / newest / "index.json") or {}
    known_format = (index.get("format"), index.get("version")) in _CHECKPOINTS
    state = index.get("run") if known_format else None
    recorded = state.get("data") if isinstance(state, dict) else None
    return recorded if isinstance(recorded, dict) else {}


def _spans(run: _RunFolder) -> list[StepSpan]:
    """The spans of the run with their sizes: from the starts in events.jsonl, and the counters in metrics.jsonl."""
    sizes = _sizes(run)
    micro_batch = run.number("train", "micro_batch")
    planned = run.plan.get("dp")
    starts = _starts(run.folder) or [_RunStart(0, None, {})]
    replicas = _replica_sizes(run, starts)
    counters = _counters(run.folder)
    spans: list[StepSpan] = []
    for number, (step, world_size, _) in enumerate(starts):
        before = sum(Steps(spans, seed=0).bounds(step)) if spans else 0
        end = starts[number + 1][0] if number + 1 < len(starts) else None
        span = StepSpan(
            sizes=sizes,
            steps_before=step,
            samples_before=before,
            micro_batch=micro_batch,
            dp_size=world_size // replicas[number] if world_size else planned,
        )
        # The last start has the sizes of config.toml; an earlier one may have had others.
        counted_step = next((s for s in counters if s > step and end is not None and s <= end), None)
        if (
            counted_step is not None
            and sum(Steps([*spans, span], seed=0).bounds(counted_step)) != counters[counted_step]
        ):
            span = replace(span, sizes=constant(max(1, (counters[counted_step] - before) // (counted_step - step))))
        spans.append(span)
    return spans


def _counters(folder: Path) -> dict[int, int]:
    """Finished steps -> consumed samples, from metrics.jsonl."""
    lines = ((line.get("step"), line.get("consumed_samples")) for line in _lines(folder / "metrics.jsonl"))
    return {step: samples for step, samples in lines if type(step) is int and type(samples) is int}


class _RunStart(NamedTuple):
    """A start of a run: finished steps, ranks, and the settings that differ from the checkpoint's, with both values."""

    step: int
    world_size: int | None
    changed: Mapping[str, Any]


def _starts(folder: Path) -> list[_RunStart]:
    """Each start that still counts: a later start from an earlier step replaces others."""
    starts: list[_RunStart] = []
    for event in _lines(folder / "events.jsonl"):
        if event.get("event") != "start" or not isinstance(event.get("step"), int):
            continue
        starts = [start for start in starts if start.step < event["step"]]
        changed = event.get("changed")
        starts.append(_RunStart(event["step"], event.get("world_size"), changed if isinstance(changed, dict) else {}))
    return starts if starts and starts[0].step == 0 else []


def _replica_sizes(run: _RunFolder, starts: Sequence[_RunStart]) -> list[int]:
    """How many ranks read the same rows in each start: config.toml has the mesh of the last one."""
    mesh = {axis: run.config.get("mesh", {}).get(axis, 1) for axis in ("tp", "cp", "pp")}
    sizes: list[int] = []
    for start in reversed(starts):
        sizes.append(math.prod(mesh.values()))
        for axis in mesh:
            match start.changed.get(f"mesh.{axis}"):
                case {"before": int(before)} if before > 0:
                    mesh[axis] = before
    return sizes[::-1]


def _toml(path: Path) -> dict[str, Any]:
    with os_errors_named("reading a run's configuration"):
        content = regular_file(path).read_bytes()
    try:
        return parse_toml(content.decode())
    except ValueError as error:
        raise DamageError(f"{path} is not a TOML file", found=str(error)) from error


def _json(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None if there is no file."""
    if not path.is_file():
        return None
    with os_errors_named("reading a run folder"):
        content = path.read_bytes()
    return _object(content, f"{path}")


def _lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file, one per line; an incomplete last line is left out."""
    if not path.is_file():
        return []
    with os_errors_named("reading a run folder"):
        complete_lines, _, _ = path.read_bytes().rpartition(b"\n")
    return [_object(line, f"{path}, line {n}") for n, line in enumerate(complete_lines.split(b"\n"), 1) if line]


def _object(content: bytes, where: str) -> dict[str, Any]:
    try:
        value = parse_json(content)
    except ValueError as error:
        raise DamageError(f"{where} is not JSON", found=str(error)) from error
    if not isinstance(value, dict):
        raise DamageError(f"{where} is not a JSON object", found=repr(value)[:80])
    return value
