"""The files of a run folder and of each checkpoint that do not change during a run; the folder's lock and claim.

data.json, config.toml, plan.json, the tokenizer's files and its facts. Files that a run appends to are in metrics.py.
`folder_problems` finds out before a run why its folders cannot be written.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import torch

from mdata import __version__
from mdata.chat.templates import CHATML, PLAIN, recorded_template
from mdata.dataset.run_paths import StartedIn
from mdata.errors import DamageError, UsageError, os_errors_named
from mdata.object_storage.address import address_of, is_address
from mdata.tracing.run_folder import find_record, is_run
from mdata.tracing.run_record import (
    RECORD,
    RecordedSpan,
    RunRecord,
    SampleRanges,
    merged_ranges,
    parse_record,
    ranges_without,
    read_record,
    write_record,
)
from mdata.util import atomic_io, file_lock
from trainer.checkpoint.folder import read_index
from trainer.checkpoint.load import read_extras
from trainer.checkpoint.location import Location, ObjectFolder, checkpoints_folder
from trainer.config.parse import dump_config
from trainer.config.sections import RunConfig
from trainer.convert.megatron_folder import LATEST as MEGATRON_LATEST
from trainer.parallel.world import World
from trainer.plan.facts import plan_facts
from trainer.plan.lengths import skipped_ranges
from trainer.plan.plan import Plan
from trainer.run.attempt import Attempt, claim, newest_attempt, this_attempt
from trainer.run.data import RunData, record_of
from trainer.run.resume import Start

TAKE_OVER_S = 90.0  # for the lock of an attempt that was replaced: its ranks end within a minute


@dataclasses.dataclass(frozen=True, slots=True)
class Owner:
    """This start of a run, which has claimed the run folder and that of the checkpoints.

    Args:
        attempt: None on ranks other than 0, which write no file that another attempt could write.
    """

    attempt: Attempt | None = None
    folder: Path = Path()
    checkpoints: Location = Path()

    def facts(self) -> dict[str, Any]:
        """Of this attempt, for events.jsonl."""
        a = self.attempt
        if a is None:
            return {}
        setup_s = round(time.time() - a.time_s, 3)
        return {"attempt": a.attempt, "host": a.host, "process": a.process, "job": a.job, "setup_s": setup_s}

    def check_folder(self) -> None:
        """Raise a SupersededError if a newer attempt has claimed the run folder since."""
        if self.attempt is not None:
            self.attempt.check(self.folder)

    def check_checkpoints(self) -> None:
        """The same for the folder of the checkpoints."""
        if self.attempt is not None:
            self.attempt.check(self.checkpoints)


@contextmanager
def owned_folder(config: RunConfig, world: World) -> Iterator[Owner]:
    """Rank 0 locks and claims the run folder and that of the checkpoints: two runs would overwrite each other's files.

    Object storage has no locks, only the claim (attempt.py). An attempt that replaces one whose ranks are still alive
    claims first, so that they end, and then waits for their lock.
    """
    if not world.is_main:
        yield Owner()
        return
    folder, checkpoints = Path(config.run.folder), checkpoints_folder(config)
    local = {place.absolute(): place for place in (folder, checkpoints) if isinstance(place, Path)}  # may be one folder
    inside = not isinstance(checkpoints, ObjectFolder) and checkpoints.absolute().is_relative_to(folder.absolute())
    claimed: list[Location] = [folder] if inside else [folder, checkpoints]
    attempt = this_attempt(os.environ)
    with ExitStack() as stack:
        with os_errors_named("reading the run folder"):
            takes_over = attempt.restarts(newest_attempt(folder))
        for place in local.values():
            with os_errors_named("making the run folder"):
                place.mkdir(parents=True, exist_ok=True)
                if takes_over and place in claimed:
                    claim(place, attempt)
            _lock(place, stack, remove=place != folder, patience_s=TAKE_OVER_S if takes_over else 0)
        with os_errors_named("claiming the run folder"):
            numbers = [claim(place, attempt) for place in claimed]
        yield Owner(dataclasses.replace(attempt, attempt=numbers[0]), folder, claimed[-1])


def _lock(place: Path, stack: ExitStack, *, remove: bool, patience_s: float) -> None:
    """Lock a folder until the stack ends.

    Args:
        patience_s: how long to wait for a holder that this attempt takes over. After that the claim of the folder is
            enough: a machine that is gone for good never gives up a lock that is only a name in a file.
    """
    until = time.monotonic() + patience_s
    while True:
        try:
            stack.enter_context(file_lock.hold(place / ".lock", remove=remove))
            return
        except UsageError:
            if not patience_s:
                raise
        if time.monotonic() > until:
            return
        time.sleep(0.2)


def folder_problems(config: RunConfig, *, anywhere: bool = False) -> Iterator[str]:
    """Why the run's folders cannot be made or written, if that can be seen; neither is made.

    Args:
        anywhere: without what another machine may allow: permission, and the end of a run that trains there now.
    """
    run, usual = config.run.folder, Path(config.run.folder, "checkpoints")
    checkpoints = config.checkpoint.folder or (str(usual) if os.path.lexists(usual) else "")
    takes_over = this_attempt(os.environ).restarts(newest_attempt(Path(run))) if Path(run).is_dir() else False
    holders = set[str]()  # usually of both folders: one run, one problem
    for key, folder in (("run.folder", run), ("checkpoint.folder", checkpoints)):
        if is_address(folder) or address_of(folder):
            if key == "run.folder":
                yield f"{key}={folder!r} is an address; choose a folder, and set checkpoint.folder to the address"
            continue
        if not folder:
            continue
        place = Path(folder).absolute()
        there = next(path for path in (place, *place.parents) if os.path.lexists(path))
        if not there.is_dir():
            obstacle = "a file" if there.exists() else "a broken link"
            yield f"{key}={folder!r} cannot be created: {there} is {obstacle}; choose another folder"
        elif not os.access(there, os.W_OK | os.X_OK):
            if anywhere:
                continue
            read_only = os.statvfs(there).f_flag & os.ST_RDONLY
            why = f"{there} is on a read-only file system" if read_only else f"no permission for {there}"
            yield f"{key}={folder!r} is not writable: {why}; choose another folder"
        elif not _stores_files(there):
            yield f"{key}={folder!r} is not writable: {there} stores no files; choose another folder"
        elif (holder := file_lock.held_by(place / ".lock")) and not (takes_over or anywhere or holder in holders):
            holders.add(holder)
            yield f"{key}={folder!r} is in use: {holder} trains there; wait for it, end it, or choose another folder"
    # Otherwise the run of --load X --save X would silently begin at step 1.
    if not config.checkpoint.init_from and (Path(run) / MEGATRON_LATEST).exists() and not checkpoints:
        continued = f"checkpoint.init_from={run!r}, with init_optimizer, init_schedule and init_data to continue it"
        yield f"run.folder={run!r} holds a checkpoint of Megatron-LM; choose another folder, and set {continued}"


def _stores_files(folder: Path) -> bool:
    """Whether there can be files in a folder: /proc and its like have none, though root may write there.

    They have no blocks; but some FUSE mounts have none either, so a file without a name is tried there.
    """
    try:
        if not os.statvfs(folder).f_blocks:
            tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


def write_run_files(config: RunConfig, plan: Plan, *, data: RunData, start: Start, note: Callable[[str], None]) -> Path:
    """Write the files that do not change during a run: data.json, config.toml, plan.json, tokenizer.

    Args:
        note: called if earlier steps of the run cannot be traced.
    """
    folder, checkpoint = Path(config.run.folder), config.checkpoint
    if checkpoint.folder and not is_address(checkpoint.folder):  # others read the file in another working directory
        checkpoint = dataclasses.replace(checkpoint, folder=str(Path(checkpoint.folder).absolute()))
    (folder / "tokenizer").mkdir(parents=True, exist_ok=True)
    # First, because the earlier spans of a run without data.json are read from its config.toml.
    with _record_locked(folder):
        record = _record(config, plan, data=data, start=start, note=note)
        with suppress(UsageError, DamageError):  # recorded while this start began
            meanwhile = _recorded_skip(folder, data, resumes=start.folder is not None) or ()
            record = msgspec.structs.replace(record, skip=merged_ranges(record.skip, meanwhile))
        write_record(folder, record)
    files = {
        "config.toml": dump_config(dataclasses.replace(config, checkpoint=checkpoint)).encode(),
        "plan.json": _json({**plan_facts(config, plan), "data_id": data.train.data_id}),
        **tokenizer_files(data),
    }
    for name, content in files.items():
        atomic_io.atomic_write(folder / name, content)
    return folder


def with_recorded_skip(
    config: RunConfig, data: RunData, *, newest: Location | None, tell: Callable[[str], None]
) -> RunConfig:
    """The configuration, including the samples that data.json records as skipped; on rank 0.

    Args:
        newest: the checkpoint that the run continues from; without data.json its copy counts.
        tell: called if data.json cannot be read, so that the copy counts, too.
    """
    folder = Path(config.run.folder)
    try:
        recorded = _recorded_skip(folder, data, resumes=newest is not None)
    except (UsageError, DamageError) as error:
        recorded = None
        tell(f"skipped samples are not read from data.json: {str(error).splitlines()[0]}")
    if recorded is None:
        recorded = () if newest is None else _checkpoint_skip(newest)
    if not recorded:
        return config
    ranges = merged_ranges(skipped_ranges(config.data.skip), recorded)
    skip = tuple(f"{first}-{last}" for first, last in ranges)
    return dataclasses.replace(config, data=dataclasses.replace(config.data, skip=skip))


def record_skip(folder: Path, ranges: SampleRanges) -> None:
    """Add samples to those that data.json records as skipped; the next start of the run does not train on them.

    Raises:
        UsageError: no data.json there, or written by a later version. DamageError: it cannot be read.
    """
    _change_skip(folder, lambda recorded: merged_ranges(recorded, ranges))


def unrecord_skip(folder: Path, samples: tuple[int, int]) -> None:
    """Remove the samples from a first to a last one from those that data.json records as skipped.

    Raises:
        UsageError, DamageError: as `record_skip`.
    """
    _change_skip(folder, lambda recorded: ranges_without(recorded, samples))


def _change_skip(folder: Path, change: Callable[[SampleRanges], tuple[tuple[int, int], ...]]) -> None:
    with _record_locked(folder):
        record = read_record(folder)
        if record is None:
            fix = "start the run once more: it writes one"
            raise UsageError(f"{folder} has no {RECORD} that could record skipped samples", fix=fix)
        write_record(folder, msgspec.structs.replace(record, skip=change(record.skip)))


def _record_locked(folder: Path) -> AbstractContextManager[None]:
    """Lock data.json, which a starting run and `mtrain skip` change."""
    return file_lock.wait_for(folder / f".{RECORD}.lock")


def _recorded_skip(folder: Path, data: RunData, *, resumes: bool) -> SampleRanges | None:
    """The skipped samples of data.json; None: there is no such file, or one of another order of data.

    Args:
        resumes: the run continues from a checkpoint, whose order is compared elsewhere.
    """
    record = read_record(folder)
    if record is None or not (resumes or record.now.data_id == data.train.data_id):
        return None
    return record.skip


def _checkpoint_skip(checkpoint: Location) -> SampleRanges:
    extras = read_extras(checkpoint, read_index(checkpoint), names=[RECORD])
    return parse_record(extras[RECORD], f"{checkpoint}/{RECORD}").skip if RECORD in extras else ()


def _record(config: RunConfig, plan: Plan, *, data: RunData, start: Start, note: Callable[[str], None]) -> RunRecord:
    """The content of data.json for a run that starts or continues."""
    folder, done = Path(config.run.folder), start.done
    earlier, why = _earlier_spans(folder, start) if done.steps else ((), "")
    record = record_of(
        config,
        plan,
        data=data,
        steps=done.steps,
        samples=done.samples,
        earlier=earlier,
        started_in=_started_in(folder),
    )
    if unknown := record.spans[0].steps_before:
        why = why or f"those that are recorded do not end at sample {done.samples:,}"
        note(f"steps 1 to {unknown:,} cannot be traced: {why}")
    return record


def _earlier_spans(folder: Path, start: Start) -> tuple[Sequence[RecordedSpan], str]:
    """The spans of the steps that are done, from the checkpoint or else the run folder; () and why, if unknown."""
    checkpoint, why = start.folder or start.first, "nothing is recorded of them"
    try:
        extras = {} if checkpoint is None else read_extras(checkpoint, read_index(checkpoint), names=[RECORD])
        if RECORD in extras:
            return parse_record(extras[RECORD], f"{checkpoint}/{RECORD}").spans, ""
    except (UsageError, DamageError) as error:  # also a folder of another program
        why = str(error).splitlines()[0]
    try:
        return (find_record(folder).spans, "") if start.folder and is_run(folder) else ((), why)
    except (UsageError, DamageError) as error:
        return (), str(error).splitlines()[0]


def _started_in(folder: Path) -> StartedIn:
    """The folder of relative paths in config.toml, for readers in other folders."""
    here = Path.cwd()
    return StartedIn(from_here=os.path.relpath(here, folder.resolve()), absolute=str(here))


def tokenizer_files(data: RunData) -> dict[str, bytes]:
    """The files that decide ids, by name in the folder, so that `generate` needs no corpus."""
    files = {f"tokenizer/{name}": content for name, content in data.train.tokenizer_files.items()}
    if tokenizer := data.train.tokenizer:
        facts = {"type": tokenizer.type, "options": tokenizer.options, "fingerprint": tokenizer.fingerprint}
        facts |= _recorded_template(data)
        files["tokenizer_facts.json"] = _json(facts)
    return files


def _recorded_template(data: RunData) -> dict[str, Any]:
    """The template of the run's conversations, for chats with the model; {}: several, or the tokenizer's own."""
    provenances = [part.corpus.manifest.provenance for part in data.train.components]
    (made, *others) = {recorded_template(provenance.options) if provenance else None for provenance in provenances}
    if others or made is None or (made.source is None and made.name not in (CHATML, PLAIN)):
        return {}
    return made.facts


def record_file(folder: Path) -> dict[str, bytes]:
    """data.json as name -> content: checkpoints have it too, for a run that continues without its run folder."""
    return {RECORD: (folder / RECORD).read_bytes()}


def versions(world: World) -> dict[str, Any]:
    """The programs that write a checkpoint, and the layout; for information only."""
    mesh = world.mesh
    layout = {axis: mesh.size(axis) for axis in ("tp", "cp", "pp", "dp")}
    return {"mtrain": __version__, "torch": torch.__version__, "ranks": world.world_size, **layout}


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()
