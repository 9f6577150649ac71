"""The checkpoints in a folder, on a disk or in object storage: which one to resume from and which to prune.

A checkpoint is a folder named step-N with an index.json of step N in it; folders of other names ("step-old", "step-4
(copy)") are neither read nor removed. `latest` names the one to resume from. If it is missing or names no checkpoint,
the newest intact one is used, with a warning; if it names a damaged one, nothing is used. Only intact checkpoints up to
that step count towards `keep`, because a run that went back to an older checkpoint leaves later ones of an abandoned
curve. A step-N that is a link to a folder is read like any other; neither it nor its target is ever removed, and it
does not count towards `keep`. Links inside a checkpoint are not followed. What differs in storage: object_folder.py.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mdata import DamageError, MdataError, UsageError
from mdata.errors import few, os_errors_named
from mdata.util import atomic_io
from trainer.checkpoint.format import Index, RunState, parse_index
from trainer.checkpoint.index_fields import IndexFault
from trainer.checkpoint.location import Location, checkpoints_of
from trainer.checkpoint.object_folder import LATEST, latest_name, point_to_objects, remove_folder, remove_unfinished
from trainer.checkpoint.stored_files import INDEX, NOTHING, Files, LocalFiles, files_of, folders_in

_NAME = re.compile(r"step-([1-9][0-9]{0,17})")
_LEFTOVER = re.compile(r"\.step-[0-9]+\.([0-9a-z-]+\.)?(partial|removed)")
_OURS = re.compile(r"rank-.*|tokenizer/.*|index.*")  # names in a checkpoint that nobody else should give


class _Misnamed(IndexFault):
    """A checkpoint of another step than its folder's name."""


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The checkpoint to resume from.

    Attributes:
        folder: None if there is no checkpoint. warning: for the user, why it is not the one that `latest` names.
    """

    folder: Location | None
    warning: str | None = None


def folder_name(step: int) -> str:
    """The folder of a step's checkpoint inside `checkpoints/`."""
    return f"step-{step}"


def find_checkpoint(root: Location) -> ResumePoint:
    """The checkpoint to resume from, in a run's `checkpoints` folder or wherever the run keeps them.

    Raises:
        DamageError: there are checkpoints, but `latest` names none of them and none is intact.
    """
    pointer = root / LATEST
    named = _latest_name(root)
    if named is not None and _NAME.fullmatch(named) and files_of(root / named).exists():
        return ResumePoint(root / named)
    problem = f"{pointer} is missing" if named is None else f"{pointer} names no checkpoint of its folder ({named!r})"
    intact = next(whole_checkpoints(root), None)
    if intact is not None:
        return ResumePoint(intact, f"{problem}; using the newest intact checkpoint, {intact.name}")
    damaged = [folder.name for folder, _ in _checkpoints(root)]
    if named is None and not damaged:
        return ResumePoint(None)
    raise DamageError(
        problem,
        found=f"{', '.join(damaged)}, and none is intact" if damaged else "no such checkpoint in the folder",
        expected="the name of a checkpoint, such as step-400",
        fix=f"restore the checkpoints from a copy, or move {root} away to begin at step 1",
    )


def checkpoint_at(location: Location, *, name: str = "latest") -> ResumePoint:
    """The checkpoint that a user names: itself, its run folder, or the folder with a run's checkpoints.

    Args:
        name: of one of several, such as "step-400"; "latest": see `find_checkpoint`.
    """
    absent = isinstance(location, Path) and not location.is_dir()
    if absent or not isinstance(files_of(location).look(INDEX), str):
        return ResumePoint(location)
    root = location
    if isinstance(location, Path):
        checkpoints = checkpoints_of(location)
        root = checkpoints if not isinstance(checkpoints, Path) or checkpoints.is_dir() else location
    elif _latest_name(location) is None and _latest_name(location / "checkpoints") is not None:
        root = location / "checkpoints"  # a copy of a run folder
    return find_checkpoint(root) if name == "latest" else ResumePoint(root / name)


def latest_checkpoint(root: Location) -> Location | None:
    """Like `find_checkpoint`, but drops the warning."""
    return find_checkpoint(root).folder


def read_index(folder: Location) -> Index:
    """A checkpoint's index, checked together with the sizes of its files; their content is checked when it is read.

    Raises:
        UsageError: there is no such folder. DamageError: the checkpoint is incomplete or damaged.
    """
    files = files_of(folder)
    if not files.exists():
        raise _none_there(folder)
    try:
        index = _read_index(folder, files)
    except IndexFault as error:
        part, _, inside = error.place.partition("/")
        name, place = (part, inside) if part.endswith(".json") else (INDEX, error.place)
        problem_text = f"{folder / name} is damaged" + (f" at {place}" if place else "")
        raise DamageError(problem_text, found=error.shown, expected=error.expected, fix=instead(folder)) from error
    if problem := _file_problem(files, index):
        name, actual, expected = problem
        raise DamageError(f"{folder / name} is damaged", found=actual, expected=expected, fix=instead(folder))
    return index


def _none_there(folder: Location) -> UsageError:
    fix = "give a folder with index.json in it"
    if isinstance(folder, Path) and folder.exists():
        return UsageError(f"{folder} is a file", expected="a checkpoint (a folder step-N), or a run folder", fix=fix)
    others = sorted(steps_in(folder.parent)) if _NAME.fullmatch(folder.name) else []
    there = few([folder_name(step) for step in others], 8) if others else None
    return UsageError(f"there is no checkpoint at {folder}", expected=there, fix=fix)


def run_state(folder: Location) -> RunState:
    """The state of the run in this checkpoint."""
    return read_index(folder).run


def instead(folder: Location) -> str:
    """The remedy for a checkpoint that cannot be used."""
    others = [path for path in whole_checkpoints(folder.parent) if path != folder]
    if not others:
        return "restore it from a copy; there is no other intact checkpoint in its folder"
    # A later one may be of a curve that this run has left.
    earlier = (path for path in others if _NAME.fullmatch(folder.name) and step_of(path) < step_of(folder))
    other = next(earlier, others[0])
    return (
        f"restore it from a copy, or write {other.name} into {folder.parent / LATEST} to continue from that one; "
        "checkpoint.load=latest-valid looks for the newest valid one by itself"
    )


def check_written(folder: Location, *, index: bytes | None = None) -> None:
    """Verify a checkpoint before it is committed: the index, coverage, and the sizes of all files.

    Args:
        index: the content of its index, if not written yet.

    Raises:
        DamageError: a file differs from what was written.
    """
    files = files_of(folder)
    try:
        problem = _file_problem(files, _read_index(folder, files) if index is None else parse_index(index, files.read))
    except IndexFault as error:
        problem = (error.place or INDEX, error.shown, error.expected)
    if problem:
        name, actual, expected = problem
        fix = "check the system's log: the file system or the storage lost what was written"
        raise DamageError(f"a checkpoint was not written: {folder / name}", found=actual, expected=expected, fix=fix)


def remove_leftovers(root: Location) -> None:
    """Delete leftovers of crashed saves; no save may be in flight."""
    if not isinstance(root, Path):
        remove_unfinished(root)
        return
    for leftover in root.iterdir() if root.is_dir() else ():
        if _LEFTOVER.fullmatch(leftover.name):
            if leftover.is_symlink():
                leftover.unlink()  # otherwise a save would write through the link
            shutil.rmtree(leftover, ignore_errors=True)


def remove_old(root: Location, keep: int, *, every: int = 0, best: Collection[int] = ()) -> None:
    """Delete intact checkpoints except the newest `keep`, and leftovers of crashed saves.

    The one that `latest` names and later ones always stay: later ones belong to an abandoned curve and do not count.
    Damaged ones stay too.

    Args:
        every: keep multiples of this step; 0: none. best: further steps to keep.
    """
    remove_leftovers(root)
    there = [(folder, files) for folder, files in _checkpoints(root) if not _is_link(folder)]
    if len(there) <= keep:
        return
    current = _latest_name(root) or ""
    last = step_of(root / current) if _NAME.fullmatch(current) else math.inf
    num_intact = 0
    for folder, files in there:
        step = step_of(folder)
        stays = folder.name == current or (every and step % every == 0) or step in best
        # What is to stay need not be read once enough newer ones are known to be whole.
        if step > last or (num_intact >= keep and stays) or not _is_whole(folder, files):
            continue
        num_intact += 1
        if num_intact > keep:
            with suppress(OSError):
                _remove(folder)


def make_room(final: Location) -> None:
    """Clear the place of a new checkpoint: remove an older one of the same step; rename anything else.

    Raises:
        UsageError: in storage, where nothing can be renamed, a checkpoint of another step is there.
    """
    if not isinstance(final, Path):
        if not files_of(final).exists():
            return
        if _is_misnamed(final):
            problem = f"{final} is a checkpoint of another step, and stands where one is to be written"
            raise UsageError(problem, fix="give it another name, and start again")
        remove_folder(final)
    elif final.is_dir() and not _is_link(final) and (final / INDEX).is_file() and not _is_misnamed(final):
        _remove(final)  # a step that is done again after a resume from before it
    elif os.path.lexists(final):
        _put_aside(final)


def point_to(final: Location) -> None:
    """Make `latest` name this checkpoint."""
    if not isinstance(final, Path):
        point_to_objects(final)
        return
    pointer = final.parent / LATEST
    if pointer.is_dir() and not pointer.is_symlink():
        _put_aside(pointer)  # no file can be put where a folder is
    atomic_io.atomic_write(pointer, final.name.encode())


def _is_link(folder: Location) -> bool:
    return isinstance(folder, Path) and folder.is_symlink()


def _put_aside(final: Path) -> None:
    names = (final.with_name(f"{final.name}.not-ours-{number}") for number in range(1, 1 << 30))
    atomic_io.rename(final, next(path for path in names if not os.path.lexists(path)))


def _remove(folder: Location) -> None:
    """Delete a checkpoint; rename first, so a partial delete is never visible."""
    if not isinstance(folder, Path):
        remove_folder(folder)
        return
    gone = folder.with_name(f".{folder.name}.removed")
    shutil.rmtree(gone, ignore_errors=True)
    atomic_io.rename(folder, gone)
    atomic_io.sync_folder(folder.parent)
    shutil.rmtree(gone, ignore_errors=True)


def _checkpoints(root: Location) -> list[tuple[Location, Files]]:
    """The folders that are checkpoints by name and have an index, with their files, newest first."""
    candidates = [(root / name, files) for name, files in folders_in(root).items() if _NAME.fullmatch(name)]
    candidates = [(folder, files) for folder, files in candidates if files.look(INDEX) != NOTHING]
    return sorted(candidates, key=lambda candidate: step_of(candidate[0]), reverse=True)


def steps_in(root: Location) -> frozenset[int]:
    """The steps that have checkpoints, intact or not."""
    return frozenset(step_of(folder) for folder, _ in _checkpoints(root))


def step_of(folder: Location) -> int:
    """The step in a checkpoint's name."""
    return int(folder.name.removeprefix("step-"))


def _is_misnamed(folder: Location) -> bool:
    """Whether it is a checkpoint of another step than its name says, such as a copy made by hand."""
    try:
        _read_index(folder, files_of(folder))
    except _Misnamed:
        return True
    except IndexFault:
        pass
    return False


def whole_checkpoints(root: Location) -> Iterator[Location]:
    """Checkpoints with a valid index and files of the right sizes, newest first."""
    return (folder for folder, files in _checkpoints(root) if _is_whole(folder, files))


def _is_whole(folder: Location, files: Files) -> bool:
    try:
        return _file_problem(files, _read_index(folder, files)) is None
    except (IndexFault, MdataError):
        return False


def _read_index(folder: Location, files: Files) -> Index:
    index = parse_index(_content(files, INDEX), lambda name: _content(files, name))
    if _NAME.fullmatch(folder.name) and index.run.step != step_of(folder):
        raise _Misnamed("run/step", index.run.step, f"{step_of(folder)}, the step in its folder's name")
    return index


def _content(files: Files, name: str) -> bytes:
    if isinstance(size_or_fault := files.look(name), str):
        raise IndexFault("" if name == INDEX else name, size_or_fault, "a file")
    return files.read(name)


def _file_problem(files: Files, index: Index) -> tuple[str, str, str] | None:
    """(name, found, expected) of the first file that differs from the index; None: all agree."""
    sizes = {name: file.bytes for some in (index.files, index.extras) for name, file in some.items()}
    for name, size in sizes.items():
        stands = files.look(name)
        actual = stands if isinstance(stands, str) else f"{stands} bytes"
        if actual != (expected := f"{size} bytes"):
            return name, actual, expected
    listed = {INDEX, *sizes, *index.parts}
    for name in files.names():
        if name not in listed and _OURS.fullmatch(name):
            return name, "a file that the index does not list", "no such file: it belongs to another checkpoint"
    return None


def _latest_name(root: Location) -> str | None:
    """The content of `latest`; None if there is no such file."""
    if not isinstance(root, Path):
        return latest_name(root)
    pointer = root / LATEST
    with os_errors_named("reading which checkpoint is the latest"):
        if LocalFiles(root).look(LATEST) == NOTHING:
            return None
        if not pointer.is_file():
            return ""
        with pointer.open("rb") as file:
            return file.read(100).decode(errors="replace").strip()
