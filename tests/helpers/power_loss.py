"""What a power loss may leave: a program's calls as events, and every disk state that is consistent with them.

`recorded` notes each write, truncation, sync, and each change of a name below a folder. `Disk` takes these events one
by one; `Disk.crashes` gives the trees that may be found after the last of them: bytes that were not synced are present,
missing, partly present, or zeros; a name that was created, moved or removed is certain only after its folder was
synced, and until then all such changes may be lost, or kept, or any single one of them. `Kept.restore` puts such a tree
in place of the folder, with each file's original inode. The model is strict: no known file system does worse.
"""

from __future__ import annotations

import os
import shutil
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

Tree = tuple[tuple[str, int, bytes | None], ...]  # path, inode, content (None: a folder), sorted by path


class Named(NamedTuple):
    """Names of one folder now refer to these inodes (None: removed); one atomic change."""

    folder: int
    names: tuple[tuple[str, int | None], ...]
    made_folder: bool = False


class Wrote(NamedTuple):
    """Bytes of a file were written."""

    file: int
    offset: int
    data: bytes


class Cut(NamedTuple):
    """A file has this size now."""

    file: int
    size: int


class Synced(NamedTuple):
    """The changes of a file's bytes, or of a folder's names, are on disk."""

    node: int


Event = Named | Wrote | Cut | Synced


@dataclass
class Disk:
    """A folder as the program sees it, and the part that is certainly on disk.

    Args:
        root: the inode of the folder.
        files: inode -> bytes, and folders: inode -> names, of what is there at the start; all of it is on the device.
    """

    root: int
    files: dict[int, bytes] = field(default_factory=dict)
    folders: dict[int, dict[str, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folders.setdefault(self.root, {})
        self._lasting_files = dict(self.files)
        self._lasting_folders = {node: dict(names) for node, names in self.folders.items()}
        self._pending: list[Named] = []

    def take(self, event: Event) -> None:
        """Apply one more call."""
        if isinstance(event, Named):
            self._name(event)
        elif isinstance(event, Wrote):
            old = self.files[event.file].ljust(event.offset, b"\0")
            self.files[event.file] = old[: event.offset] + event.data + old[event.offset + len(event.data) :]
        elif isinstance(event, Cut):
            self.files[event.file] = self.files[event.file][: event.size].ljust(event.size, b"\0")
        elif event.node in self.files:
            self._lasting_files[event.node] = self.files[event.node]
        else:
            for change in self._pending:
                if change.folder == event.node:
                    _apply(self._lasting_folders[event.node], change)
            self._pending = [change for change in self._pending if change.folder != event.node]

    def crashes(self) -> Iterator[Tree]:
        """The trees that a power loss at this point may leave."""
        every = range(len(self._pending))
        for fill in (_now, _lasting, _half, _zeros):
            yield self._tree(set(every), fill)
        yield self._tree(set(), _lasting)
        yield self._tree(set(), _now)
        for one in every:
            yield self._tree({one}, _lasting)
            yield self._tree({one}, _now)
            yield self._tree(set(every) - {one}, _lasting)
            yield self._tree(set(every) - {one}, _now)

    def _name(self, event: Named) -> None:
        for _, node in event.names:
            if node is not None and node not in self.files and node not in self.folders:
                into: dict[int, Any] = self.folders if event.made_folder else self.files
                into[node] = {} if event.made_folder else b""
                lasting: dict[int, Any] = self._lasting_folders if event.made_folder else self._lasting_files
                lasting[node] = {} if event.made_folder else b""
        _apply(self.folders[event.folder], event)
        self._pending.append(event)

    def _tree(self, kept: set[int], fill: Callable[[bytes, bytes], bytes]) -> Tree:
        folders = {node: dict(names) for node, names in self._lasting_folders.items()}
        for number, change in enumerate(self._pending):
            if number in kept:
                _apply(folders[change.folder], change)
        return tuple(sorted(self._below(self.root, "", folders, fill)))

    def _below(
        self, folder: int, path: str, folders: dict[int, dict[str, int]], fill: Callable[[bytes, bytes], bytes]
    ) -> Iterator[tuple[str, int, bytes | None]]:
        for name, node in folders[folder].items():
            if node in folders:
                yield path + name, node, None
                yield from self._below(node, f"{path}{name}/", folders, fill)
            else:
                yield path + name, node, fill(self._lasting_files[node], self.files[node])


def _apply(names: dict[str, int], change: Named) -> None:
    for name, node in change.names:
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


def _now(lasting: bytes, now: bytes) -> bytes:
    return now


def _lasting(lasting: bytes, now: bytes) -> bytes:
    return lasting


def _shared(lasting: bytes, now: bytes) -> int:
    """The length of the unchanged prefix."""
    places = range(min(len(lasting), len(now)))
    return next((place for place in places if lasting[place] != now[place]), len(places))


def _half(lasting: bytes, now: bytes) -> bytes:
    """Only the first half of the new bytes."""
    same = _shared(lasting, now)
    return now[: same + (len(now) - same) // 2]


def _zeros(lasting: bytes, now: bytes) -> bytes:
    """The new size, but none of the new bytes."""
    same = _shared(lasting, now)
    return now[:same].ljust(len(now), b"\0")


class Kept:
    """The inodes of a folder, held by second names beside it so that no other file gets their numbers."""

    def __init__(self, root: Path, beside: Path) -> None:
        self.root, self.beside = root, beside
        self.events: list[Event] = []
        self._promises: list[int] = []
        self.nodes = {root.stat().st_ino}
        self._held: list[int] = []
        beside.mkdir()
        files: dict[int, bytes] = {}
        folders: dict[int, dict[str, int]] = {}
        for folder in (root, *(path for path in sorted(root.rglob("*")) if path.is_dir())):
            self.hold(folder)
            folders[folder.stat().st_ino] = {path.name: path.stat().st_ino for path in folder.iterdir()}
        for path in (path for path in root.rglob("*") if path.is_file()):
            self.hold(path)
            files[path.stat().st_ino] = path.read_bytes()
        self._start = files, folders

    def disk(self) -> Disk:
        """The folder before the first event."""
        files, folders = self._start
        return Disk(self.root.stat().st_ino, dict(files), {node: dict(names) for node, names in folders.items()})

    def promise(self) -> None:
        """The program has just reported that something is on disk."""
        self._promises.append(len(self.events))

    def promised(self, number: int) -> int:
        """How many promises were made before event `number`."""
        return bisect_right(self._promises, number)

    def hold(self, path: Path) -> int:
        """Keep the inode; returns its number."""
        facts = path.stat()
        self.nodes.add(facts.st_ino)
        if path.is_dir():
            self._held.append(os.open(path, os.O_RDONLY))
        elif not (self.beside / str(facts.st_ino)).exists():
            os.link(path, self.beside / str(facts.st_ino))
        return facts.st_ino

    def release(self) -> None:
        """Release the folders."""
        while self._held:
            os.close(self._held.pop())

    def restore(self, tree: Tree) -> None:
        """Make the folder equal to the tree."""
        for path in self.root.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for path, node, content in tree:
            if content is None:
                (self.root / path).mkdir()
                continue
            (self.beside / str(node)).write_bytes(content)
            os.link(self.beside / str(node), self.root / path)


@contextmanager
def recorded(root: Path, beside: Path) -> Iterator[Kept]:
    """Record all operations below `root`, by any thread of this process, while the block runs.

    Args:
        root: the folder. beside: a folder that is made, on the same file system, for the second names.
    """
    kept = Kept(root, beside)
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, make in _WATCHED.items():
                patch.setattr(os, name, make(getattr(os, name), kept))
            yield kept
    finally:
        kept.release()


def states(kept: Kept) -> Iterator[tuple[int, Tree]]:
    """(promises made, tree) for each different tree that a power loss between two calls may leave."""
    disk, seen = kept.disk(), set()
    for number, event in enumerate((None, *kept.events)):
        if event is not None:
            disk.take(event)
        for tree in disk.crashes():
            state = (kept.promised(number), tree)
            if state not in seen:
                seen.add(state)
                yield state


def _place(path: Any, dir_fd: int | None = None) -> tuple[Path, str]:
    """The folder and the name in it."""
    where = Path(os.fsdecode(path))
    if dir_fd is not None:
        where = Path(f"/proc/self/fd/{dir_fd}").readlink() / where
    return where.parent, where.name


def _node_of(folder: Path, kept: Kept) -> int | None:
    """The inode of a folder that is watched."""
    try:
        node = folder.stat().st_ino
    except FileNotFoundError:
        return None
    return node if node in kept.nodes else None


def _opening(real: Any, kept: Kept) -> Any:
    def call(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        folder, name = _place(path, dir_fd)
        new = bool(flags & os.O_CREAT) and not os.path.lexists(folder / name)
        fd: int = real(path, flags, mode, dir_fd=dir_fd)
        watched = _node_of(folder, kept) if flags & (os.O_CREAT | os.O_TRUNC) else None
        if watched is not None and new:
            kept.events.append(Named(watched, ((name, kept.hold(folder / name)),)))
        elif watched is not None and flags & os.O_TRUNC:
            kept.events.append(Cut(os.fstat(fd).st_ino, 0))
        return fd

    return call


def _making(real: Any, kept: Kept) -> Any:
    def call(path: Any, *more: Any, **options: Any) -> None:
        real(path, *more, **options)
        folder, name = _place(path, options.get("dir_fd"))
        watched = _node_of(folder, kept)
        if watched is not None:
            kept.events.append(Named(watched, ((name, kept.hold(folder / name)),), made_folder=True))

    return call


def _removing(real: Any, kept: Kept) -> Any:
    def call(path: Any, *, dir_fd: int | None = None) -> None:
        folder, name = _place(path, dir_fd)
        watched = _node_of(folder, kept)
        real(path, dir_fd=dir_fd)
        if watched is not None:
            kept.events.append(Named(watched, ((name, None),)))

    return call


def _renaming(real: Any, kept: Kept) -> Any:
    def call(source: Any, target: Any) -> None:
        (folder, name), (to_folder, to_name) = _place(source), _place(target)
        watched = _node_of(folder, kept)
        assert watched is None or folder.samefile(to_folder), "the model knows no moves between folders"
        node = os.stat(source).st_ino  # noqa: PTH116
        real(source, target)
        if watched is not None:
            kept.events.append(Named(watched, ((name, None), (to_name, node))))

    return call


def _writing(real: Any, kept: Kept) -> Any:
    def call(fd: int, data: Any) -> int:
        node = os.fstat(fd).st_ino
        watched = node in kept.nodes
        offset = os.lseek(fd, 0, os.SEEK_CUR) if watched else 0
        count: int = real(fd, data)
        if watched:
            kept.events.append(Wrote(node, offset, bytes(memoryview(data).cast("B")[:count])))
        return count

    return call


def _writing_at(real: Any, kept: Kept) -> Any:
    def call(fd: int, data: bytes, offset: int) -> int:
        count: int = real(fd, data, offset)
        if os.fstat(fd).st_ino in kept.nodes:
            kept.events.append(Wrote(os.fstat(fd).st_ino, offset, bytes(data[:count])))
        return count

    return call


def _cutting(real: Any, kept: Kept) -> Any:
    def call(fd: int, size: int) -> None:
        real(fd, size)
        if os.fstat(fd).st_ino in kept.nodes:
            kept.events.append(Cut(os.fstat(fd).st_ino, size))

    return call


def _syncing(real: Any, kept: Kept) -> Any:
    def call(fd: int) -> None:
        real(fd)
        if os.fstat(fd).st_ino in kept.nodes:
            kept.events.append(Synced(os.fstat(fd).st_ino))

    return call


_WATCHED: dict[str, Callable[[Any, Kept], Any]] = {
    "open": _opening, "mkdir": _making, "unlink": _removing, "remove": _removing, "rmdir": _removing,
    "rename": _renaming, "replace": _renaming, "write": _writing, "pwrite": _writing_at, "ftruncate": _cutting,
    "fsync": _syncing, "fdatasync": _syncing,
}  # fmt: skip
