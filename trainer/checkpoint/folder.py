"""The checkpoints that a run's folder holds: which one a run goes on from, and which old ones go.

A checkpoint is a folder named step-N with an index.json of step N in it; folders of other names ("step-old", "step-4
(copy)") are not ours: they are neither read nor removed. `latest` names the one to go on from. Where it is missing or
names none, the newest whole one is taken, which is for the caller to say; where it names one that is damaged, nothing
is taken. Only whole checkpoints up to that step are counted against `keep`: a run that went back to an older one has
later ones of a curve that it left. No link is followed to a file.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import stat
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mdata import DamageError, MdataError, UsageError
from mdata.errors import os_errors_named
from mdata.util import atomic_io
from trainer.checkpoint.format import Index, RunState, parse_index
from trainer.checkpoint.index_fields import IndexFault

INDEX, LATEST = "index.json", "latest"
_NAME = re.compile(r"step-([1-9][0-9]{0,17})")
_LEFTOVER = re.compile(r"\.step-[0-9]+\.([0-9a-z-]+\.)?(partial|removed)")
_OURS = re.compile(r"rank-.*|tokenizer/.*|index.*")  # names in a checkpoint that nobody else should give


class _Misnamed(IndexFault):
    """A checkpoint of another step than that of its folder's name."""


@dataclass(frozen=True, slots=True)
class Found:
    """Where a run goes on from.

    Attributes:
        folder: None where there is no checkpoint. warning: why it is not the one that `latest` names, for the user.
    """

    folder: Path | None
    warning: str | None = None


def folder_name(step: int) -> str:
    """The folder of a step's checkpoint inside `checkpoints/`."""
    return f"step-{step}"


def find_checkpoint(root: Path) -> Found:
    """The checkpoint to go on from in a run's `checkpoints` folder.

    Raises:
        DamageError: there are checkpoints, but `latest` names none of them and none is intact.
    """
    pointer = root / LATEST
    named = _first_bytes(pointer)
    if named is not None and _NAME.fullmatch(named) and (root / named).is_dir():
        return Found(root / named)
    problem = f"{pointer} is missing" if named is None else f"{pointer} names no checkpoint of its folder ({named!r})"
    whole = next(whole_checkpoints(root), None)
    if whole is not None:
        return Found(whole, f"{problem}; using the newest intact checkpoint, {whole.name}")
    damaged = [folder.name for folder in _checkpoints(root)]
    if named is None and not damaged:
        return Found(None)
    raise DamageError(
        problem,
        found=f"{', '.join(damaged)}, and none is intact" if damaged else "no such checkpoint in the folder",
        expected="the name of a checkpoint, such as step-400",
        fix=f"restore the checkpoints from a copy, or move {root} away to begin at step 1",
    )


def latest_checkpoint(root: Path) -> Path | None:
    """The checkpoint that `find` finds, for who need not say how."""
    return find_checkpoint(root).folder


def read_index(folder: Path) -> Index:
    """A checkpoint's index, checked, and its files' sizes with it; their content is checked where it is read.

    Raises:
        UsageError: there is no such folder. DamageError: it is not a whole checkpoint.
    """
    if not folder.is_dir():
        raise UsageError(f"there is no checkpoint at {folder}", fix="give a folder with index.json in it")
    try:
        index = _read_index(folder)
    except IndexFault as error:
        part, _, inside = error.place.partition("/")
        name, place = (part, inside) if part.endswith(".json") else (INDEX, error.place)
        what = f"{folder / name} is damaged" + (f" at {place}" if place else "")
        raise DamageError(what, found=error.shown, expected=error.expected, fix=instead(folder)) from error
    if problem := _file_problem(folder, index):
        name, found, expected = problem
        raise DamageError(f"{folder / name} is damaged", found=found, expected=expected, fix=instead(folder))
    return index


def run_state(folder: Path) -> RunState:
    """Where the run was when this checkpoint was written."""
    return read_index(folder).run


def instead(folder: Path) -> str:
    """What to do without a checkpoint that was there."""
    others = [path for path in whole_checkpoints(folder.parent) if path != folder]
    if not others:
        return "restore it from a copy; there is no other intact checkpoint in its folder"
    # A later one may be of a curve that this run has left.
    earlier = (path for path in others if _NAME.fullmatch(folder.name) and step_of(path) < step_of(folder))
    other = next(earlier, others[0])
    return f"restore it from a copy, or write {other.name} into {folder.parent / LATEST} to continue from that one"


def check_partial(partial: Path) -> None:
    """Verify what is about to get a checkpoint's name: the index, coverage, and the sizes of all files.

    Raises:
        DamageError: it is not what was written.
    """
    try:
        problem = _file_problem(partial, _read_index(partial))
    except IndexFault as error:
        problem = (error.place or INDEX, error.shown, error.expected)
    if problem:
        name, found, expected = problem
        fix = "look at the system's log: the file system did not keep what was written"
        raise DamageError(f"a checkpoint was not written: {partial / name}", found=found, expected=expected, fix=fix)


def partial_folder(root: Path, step: int, *, attempt: str) -> Path:
    """Where the ranks write a checkpoint before it has its name; `attempt` is that of no other save."""
    return root / f".{folder_name(step)}.{attempt}.partial"


def remove_leftovers(root: Path) -> None:
    """Delete temporary folders of crashed saves; no save may be in flight."""
    for leftover in root.iterdir() if root.is_dir() else ():
        if _LEFTOVER.fullmatch(leftover.name):
            shutil.rmtree(leftover, ignore_errors=True)


def remove_old(root: Path, keep: int, *, every: int = 0, best: Collection[int] = ()) -> None:
    """Delete whole checkpoints but the newest `keep`, and temporary folders of crashed saves.

    What `latest` names always stays, and so do later ones: those that a run left when it went back to an older one take
    no place of those that it writes. A damaged one stays too.

    Args:
        every: steps that are multiples of it stay; 0: none. best: further steps that stay.
    """
    remove_leftovers(root)
    if len(_checkpoints(root)) <= keep:
        return
    current = _first_bytes(root / LATEST) or ""
    last = step_of(root / current) if _NAME.fullmatch(current) else math.inf
    for folder in [folder for folder in whole_checkpoints(root) if step_of(folder) <= last][keep:]:
        step = step_of(folder)
        if (every and step % every == 0) or step in best:
            continue
        if folder.name != current and not folder.is_symlink():
            with suppress(OSError):
                _remove(folder)


def make_room(final: Path) -> None:
    """Take away what stands where a checkpoint is to be: an older one of the same step; else it gets another name."""
    if final.is_dir() and not final.is_symlink() and (final / INDEX).is_file() and not _is_misnamed(final):
        _remove(final)  # a step that is done again after a resume from before it
    elif os.path.lexists(final):
        _put_aside(final)


def point_to(final: Path) -> None:
    """Make `latest` name this checkpoint."""
    pointer = final.parent / LATEST
    if pointer.is_dir() and not pointer.is_symlink():
        _put_aside(pointer)  # no file can be put where a folder is
    atomic_io.atomic_write(pointer, final.name.encode())


def _put_aside(final: Path) -> None:
    names = (final.with_name(f"{final.name}.not-ours-{number}") for number in range(1, 1 << 30))
    atomic_io.rename(final, next(path for path in names if not os.path.lexists(path)))


def _remove(folder: Path) -> None:
    """Delete a checkpoint: first it surely loses its name, so that nobody finds a part of it under that."""
    gone = folder.with_name(f".{folder.name}.removed")
    shutil.rmtree(gone, ignore_errors=True)
    atomic_io.rename(folder, gone)
    atomic_io.sync_folder(folder.parent)
    shutil.rmtree(gone, ignore_errors=True)


def _checkpoints(root: Path) -> list[Path]:
    """The folders that are checkpoints by name and have an index, newest first."""
    found = [path for path in root.iterdir() if _NAME.fullmatch(path.name)] if root.is_dir() else []
    found = [path for path in found if os.path.lexists(path / INDEX)]
    return sorted(found, key=step_of, reverse=True)


def step_of(folder: Path) -> int:
    """The step in a checkpoint's name."""
    return int(folder.name.removeprefix("step-"))


def _is_misnamed(folder: Path) -> bool:
    """Whether it is a checkpoint of another step than that of its name: a copy that somebody keeps."""
    try:
        _read_index(folder)
    except _Misnamed:
        return True
    except IndexFault:
        pass
    return False


def whole_checkpoints(root: Path) -> Iterator[Path]:
    """Those whose index and whose files' sizes are right, newest first."""
    for folder in _checkpoints(root):
        try:
            index = _read_index(folder)
        except (IndexFault, MdataError):
            continue
        if _file_problem(folder, index) is None:
            yield folder


def _read_index(folder: Path) -> Index:
    index = parse_index(_content(folder, INDEX), lambda name: _content(folder, name))
    if _NAME.fullmatch(folder.name) and index.run.step != step_of(folder):
        raise _Misnamed("run/step", index.run.step, f"{step_of(folder)}, the step in its folder's name")
    return index


def _content(folder: Path, name: str) -> bytes:
    with os_errors_named("reading a checkpoint"):
        if (kind := _kind(folder / name)) != "file":
            raise IndexFault("" if name == INDEX else name, kind, "a file")
        return (folder / name).read_bytes()


def _file_problem(folder: Path, index: Index) -> tuple[str, str, str] | None:
    """(name, found, expected) of the first file that is not what the index says; None: all are."""
    sizes = {name: file.bytes for files in (index.files, index.extras) for name, file in files.items()}
    for name, size in sizes.items():
        kind = _kind(folder / name)
        found = f"{(folder / name).stat().st_size} bytes" if kind == "file" else kind
        if found != (expected := f"{size} bytes"):
            return name, found, expected
    known = {INDEX, *sizes, *index.parts}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if name not in known and _OURS.fullmatch(name):
            return name, "a file that the index does not list", "no such file: it belongs to another checkpoint"
    return None


def _kind(path: Path) -> str:
    """What a name stands for, itself: nothing is followed out of the folder."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return "no such file"
    return "file" if stat.S_ISREG(mode) else "a link" if stat.S_ISLNK(mode) else "not a regular file"


def _first_bytes(pointer: Path) -> str | None:
    """What `latest` says; None where there is no such file."""
    with os_errors_named("reading which checkpoint is the latest"):
        if _kind(pointer) == "no such file":
            return None
        if not pointer.is_file():
            return ""
        with pointer.open("rb") as file:
            return file.read(100).decode(errors="replace").strip()
