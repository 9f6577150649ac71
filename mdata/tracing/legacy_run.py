"""Legacy: the record of a run that has no data.json, from config.toml and the other files of its folder.

Only for run folders written before data.json existed (mdata 0.1.0 and older); nothing else in mdata reads a trainer's
configuration. config.toml has the settings, plan.json the derived numbers and the data id, events.jsonl and
metrics.jsonl the number of ranks and the global batch of each start of the run. The files are read as TOML and JSON,
with only the fields listed here; a key of [data] or [train] that this version does not know is refused, because it
might decide the order.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from mdata.dataset.dataset_options import OPTION_KEYS, MegatronOrder, NativeOrder, document_mask_keys
from mdata.dataset.eval_sets import EvaluationSplit, samples_asked
from mdata.dataset.run_paths import StartedIn
from mdata.errors import DamageError, UsageError, os_errors_named
from mdata.loader.batch_sizes import BatchSizes, by_steps, constant, read_ramp
from mdata.tracing.run_record import RecordedSets, RecordedSpan, RunRecord, samples_until, span_of
from mdata.util.config_text import parse_json, parse_toml
from mdata.util.option_synonyms import nearest
from mdata.util.regular_files import regular_file

_RESTORE = "restore the file from a copy of the run folder"
# Keys that this version knows: those of [data] that are not options of a dataset, and those of [train].
_OTHER_DATA = ("blend", "split", "valid", "test", "allow_overlap", "prefetch", "order_samples", "skip")
_STEPS = ("sequence_length", "global_batch", "batch_ramp", "batch_schedule", "micro_batch")
_LENGTHS = ("steps", "samples", "tokens")
_EVALUATION = ("evaluate", "eval_interval", "eval_samples")
_TRAIN = (*_STEPS, *_LENGTHS, *_EVALUATION, "exit_interval", "loss_average", "log_interval", "dpo_beta")
_CHECKPOINTS = {("mtrain-checkpoint", 1), ("mtrain-checkpoint", 2)}


@dataclass(frozen=True, kw_only=True)
class _LegacyRun:
    """The files of a run folder, as far as they exist."""

    folder: Path
    config: Mapping[str, Any]
    plan: Mapping[str, Any]

    def number(self, section: str, key: str) -> int:
        """An integer setting of config.toml."""
        value = self.config.get(section, {}).get(key)
        if type(value) is not int:
            problem = f"{self.folder / 'config.toml'}: {section}.{key} is not an integer"
            raise DamageError(problem, found=repr(value), fix=_RESTORE)
        return value


def is_legacy_run(folder: str | Path) -> bool:
    """Whether a path is the folder of a run."""
    return (Path(folder) / "config.toml").is_file()


def legacy_record(folder: Path) -> RunRecord:
    """The record of a run that has none.

    Raises:
        UsageError: keys that this version does not know. DamageError: a file that cannot be read.
    """
    run = _LegacyRun(folder=folder, config=_toml(folder / "config.toml"), plan=_json(folder / "plan.json") or {})
    options = _options(run)
    blend, planned = run.config["data"].get("blend"), run.plan.get("steps")
    if not isinstance(blend, str):
        raise DamageError(f"{folder / 'config.toml'}: data.blend is not a path", found=repr(blend), fix=_RESTORE)
    places = run.plan.get("started_in")
    places = places if isinstance(places, dict) else {}
    here, absolute = (place if isinstance(place := places.get(key), str) else None for key in ("from_here", "absolute"))
    return RunRecord(
        num_steps=planned if type(planned) is int else _steps_asked(run),
        spans=tuple(_spans(run, blend)),
        options=options,
        identity=dict(_identity(run)),
        valid=_sets(run, "valid"),
        test=_sets(run, "test"),
        started_in=StartedIn(from_here=here, absolute=absolute),
    )


def _sets(run: _LegacyRun, split: EvaluationSplit) -> RecordedSets | None:
    settings = run.config["train"]
    if not settings.get("evaluate", True):
        return None
    limit, interval = settings.get("eval_samples", 0), settings.get("eval_interval", 0) if split == "valid" else 0
    return RecordedSets(
        paths=tuple(run.config["data"].get(split, ())),
        num_samples=samples_asked(limit, steps=_steps_asked(run), interval=interval),
        eval_samples=limit,
        interval=interval,
    )


def _options(run: _LegacyRun) -> dict[str, Any]:
    """The options with which the run read its data."""
    data = dict(run.config.get("data", {}))
    _check_keys(run, "data", [*OPTION_KEYS, *_OTHER_DATA])
    _check_keys(run, "train", _TRAIN)
    given: dict[str, Any] = {key: data[key] for key in data if key not in _OTHER_DATA}
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    order, wanted = str(given.get("order", NativeOrder.name)), bool(given.pop("document_masks", False))
    given |= document_mask_keys(order=order, wanted=wanted)
    if order == MegatronOrder.name and "num_samples" not in given:
        given["num_samples"] = data.get("order_samples") or _samples_asked(run)
    of_run: dict[str, Any] = {
        "sequence_length": run.number("train", "sequence_length"),
        "seed": run.number("run", "seed"),
    }
    of_run["split_shares"] = str(data.get("split", "100,0,0"))
    given["cache"] = given.get("cache") or None
    return of_run | given


def _steps_asked(run: _LegacyRun) -> int:
    """The run's length in steps, with the batch sizes of config.toml."""
    unit, amount = _length(run)
    return amount if unit == "steps" else _sizes(run).within(_samples_asked(run))


def _samples_asked(run: _LegacyRun) -> int:
    """Samples for which Megatron's order was built."""
    unit, amount = _length(run)
    if unit == "steps":
        return amount * max(_sizes(run).sizes)
    return amount if unit == "samples" else amount // run.number("train", "sequence_length")


def _length(run: _LegacyRun) -> tuple[str, int]:
    """The run's length as given: in steps, samples or tokens."""
    unit = next((unit for unit in ("samples", "tokens") if run.config["train"].get(unit)), "steps")
    return unit, run.number("train", unit)


def _sizes(run: _LegacyRun) -> BatchSizes:
    if schedule := run.config["train"].get("batch_schedule", ""):
        return by_steps(schedule, sequence_length=run.number("train", "sequence_length"))
    return read_ramp(run.config["train"].get("batch_ramp", ""), size=run.number("train", "global_batch"))


def _check_keys(run: _LegacyRun, section: str, known_keys: Sequence[str]) -> None:
    for key, value in run.config.get(section, {}).items():
        if key not in known_keys:
            close = nearest(key, known_keys)
            raise UsageError(
                f"{run.folder / 'config.toml'} was written by another version: this one has no key {section}.{key}",
                found=f"{key} = {value!r}",
                fix="use the mdata that trained it" + (f"; or is it {close}?" if close else ""),
            )


def _identity(run: _LegacyRun) -> Mapping[str, Any]:
    """The fields that decided the order, from the newest checkpoint; empty without one."""
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
    identity = state.get("data") if isinstance(state, dict) else None
    return identity if isinstance(identity, dict) else {}


def _spans(run: _LegacyRun, blend: str) -> list[RecordedSpan]:
    """The spans of the run with their sizes: from the starts in events.jsonl, and the counters in metrics.jsonl."""
    sizes, planned = _sizes(run), run.plan.get("dp")
    starts = _starts(run.folder) or [_RunStart(0, None, {})]
    replicas, counters = _replica_sizes(run, starts), _counters(run.folder)
    spans: list[RecordedSpan] = []
    for number, (step, world_size, _) in enumerate(starts):
        before = samples_until(spans, step) if spans else 0
        end = starts[number + 1].step if number + 1 < len(starts) else None
        span = span_of(
            sizes,
            steps_before=step,
            samples_before=before,
            micro_batch=run.number("train", "micro_batch"),
            data_ranks=world_size // replicas[number] if world_size else planned,
            blend=blend if end is None else None,
            data_id=run.plan.get("data_id") if end is None else None,
        )
        # The last start has the sizes of config.toml; an earlier one may have had others.
        seen = next((s for s in counters if s > step and end is not None and s <= end), None)
        if seen is not None and samples_until([*spans, span], seen) != counters[seen]:
            size = constant(max(1, (counters[seen] - before) // (seen - step)))
            span = msgspec.structs.replace(span, global_batch=size.table, ramp_samples=None)
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


def _replica_sizes(run: _LegacyRun, starts: Sequence[_RunStart]) -> list[int]:
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
        raise DamageError(f"{path} is not a TOML file", found=str(error), fix=_RESTORE) from error


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
        raise DamageError(f"{where} is not JSON", found=str(error), fix=_RESTORE) from error
    if not isinstance(value, dict):
        raise DamageError(f"{where} is not a JSON object", found=repr(value)[:80], fix=_RESTORE)
    return value
