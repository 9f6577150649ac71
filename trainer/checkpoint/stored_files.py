"""The files of a checkpoint, read from a disk or from object storage, behind one interface: `Files`.

Files and objects are read at any offset, by the number of threads that is fast there. Objects are listed once, and each
request names the version that was listed, so that no reader mixes two versions. Web servers list nothing: there, each
object is looked up by its name.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from mdata.errors import os_errors_named
from mdata.object_storage.facts import ObjectFacts
from mdata.object_storage.reading import list_objects, look_at_object, object_there, read_range
from trainer.checkpoint.location import Location, ObjectFolder

if TYPE_CHECKING:
    from obstore.store import ObjectStore

INDEX = "index.json"
NOTHING = "no such file"
AHEAD = 16  # small objects that are read or put at the same time
_READ_TOGETHER = re.compile(r"rank-[0-9]{5,9}\.json")


class BlockReader(Protocol):
    """A file that several threads read in parts.

    Attributes:
        threads: the number that is fast there.
    """

    threads: int

    def read_into(self, block: memoryview, at: int) -> None:
        """Fill the block with the bytes that start at this offset.

        Raises:
            EOFError: the file ends before the block is full.
        """


class Files(Protocol):
    """The files in a folder, by their names there, such as "tokenizer/tokenizer.json"."""

    def exists(self) -> bool:
        """Whether the folder exists; in storage, which has no folders, whether it holds a committed checkpoint."""

    def look(self, name: str) -> int | str:
        """The size of a file in bytes, or a text that tells the user what is there instead. Links are not followed."""

    def names(self) -> Iterable[str]:
        """The names of all files and folders, sorted; of a web server, those already looked up."""

    def read(self, name: str) -> bytes:
        """The content of a file."""

    def open(self, name: str) -> AbstractContextManager[BlockReader]:
        """Open a file to read it in parts."""


def files_of(folder: Location) -> Files:
    """The files in a folder."""
    return LocalFiles(folder) if isinstance(folder, Path) else ObjectFiles(folder)


def folders_in(root: Location) -> dict[str, Files]:
    """The folders in a folder with their files, by name; empty if the storage cannot list."""
    if isinstance(root, Path):
        return {path.name: LocalFiles(path) for path in root.iterdir()} if root.is_dir() else {}
    by_folder: dict[str, dict[str, ObjectFacts]] = {}
    for name, facts in listed(root).items():
        folder, _, inside = name.partition("/")
        if inside:
            by_folder.setdefault(folder, {})[inside] = facts
    return {name: ObjectFiles(root / name, inside) for name, inside in by_folder.items()}


def listed(folder: ObjectFolder) -> dict[str, ObjectFacts]:
    """All objects in a folder, by their names there; empty if the storage cannot list."""
    skip = len(folder.inside.key)
    objects = list_objects(folder.inside, folder.store) if folder.is_listed else []
    return {facts.address.key[skip:]: facts for facts in objects}


class LocalFiles:
    """`Files` of a folder on a disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def exists(self) -> bool:
        """See `Files`."""
        return self._folder.is_dir()

    def look(self, name: str) -> int | str:
        """See `Files`."""
        inner = name.rpartition("/")[0]
        if inner and (self._folder / inner).is_symlink():
            return "a file in a folder that is a link"
        try:
            status = (self._folder / name).lstat()
        except (FileNotFoundError, NotADirectoryError):
            return NOTHING
        if stat.S_ISREG(status.st_mode):
            return status.st_size
        return "a link" if stat.S_ISLNK(status.st_mode) else "not a regular file"

    def names(self) -> Iterable[str]:
        """See `Files`."""
        return [path.relative_to(self._folder).as_posix() for path in sorted(self._folder.rglob("*"))]

    def read(self, name: str) -> bytes:
        """See `Files`."""
        with os_errors_named("reading a checkpoint"):
            return (self._folder / name).read_bytes()

    @contextmanager
    def open(self, name: str) -> Iterator[BlockReader]:
        """See `Files`."""
        with os_errors_named("reading a checkpoint"), (self._folder / name).open("rb", buffering=0) as file:
            yield LocalBlocks(file.fileno())


class LocalBlocks:
    """`BlockReader` of an open file."""

    threads = 4  # each reads, hashes and copies 1 to 2 GB/s

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def read_into(self, block: memoryview, at: int) -> None:
        """See `BlockReader`."""
        done = 0
        while done < len(block):
            num_read = os.preadv(self._fd, [block[done:]], at + done)
            if num_read == 0:
                raise EOFError
            done += num_read


class ObjectFiles:
    """`Files` of a folder in object storage, as of the creation of this object.

    Args:
        facts: size and version of each object by its name; None lists them.
    """

    def __init__(self, folder: ObjectFolder, facts: Mapping[str, ObjectFacts] | None = None) -> None:
        self._folder, self._store = folder, folder.store
        self._facts: dict[str, ObjectFacts | None] = {**(listed(folder) if facts is None else facts)}
        self._contents: dict[str, bytes] = {}

    def exists(self) -> bool:
        """See `Files`."""
        return self._find(INDEX) is not None

    def look(self, name: str) -> int | str:
        """See `Files`."""
        facts = self._find(name)
        return NOTHING if facts is None else facts.size_bytes

    def names(self) -> Iterable[str]:
        """See `Files`."""
        return sorted(name for name, facts in self._facts.items() if facts is not None)

    def read(self, name: str) -> bytes:
        """See `Files`. Side indexes are fetched together: a reader that needs one needs all of them."""
        if name not in self._contents:
            alike = [item for item in self.names() if _READ_TOGETHER.fullmatch(item)]
            names = alike if name in alike else [name]
            with ThreadPoolExecutor(min(AHEAD, len(names)), thread_name_prefix="checkpoint-objects") as pool:
                wanted = [(facts, facts.size_bytes) for facts in map(self._known, names)]
                contents = pool.map(lambda item: read_range(item[0], 0, stop=item[1], store=self._store), wanted)
                self._contents |= zip(names, contents, strict=True)
        return self._contents[name]

    @contextmanager
    def open(self, name: str) -> Iterator[BlockReader]:
        """See `Files`."""
        yield ObjectBlocks(self._known(name), self._store)

    def _find(self, name: str) -> ObjectFacts | None:
        if name not in self._facts and not self._folder.is_listed:
            self._facts[name] = object_there((self._folder / name).address, self._store)
        return self._facts.get(name)

    def _known(self, name: str) -> ObjectFacts:
        return self._find(name) or look_at_object((self._folder / name).address, self._store)


class ObjectBlocks:
    """`BlockReader` of an object."""

    threads = 8  # blocks that are on their way at the same time

    def __init__(self, facts: ObjectFacts, store: ObjectStore) -> None:
        self._facts, self._store = facts, store

    def read_into(self, block: memoryview, at: int) -> None:
        """See `BlockReader`."""
        stop = at + len(block)
        if not 0 <= at <= stop <= self._facts.size_bytes:
            raise EOFError
        block[:] = read_range(self._facts, at, stop=stop, store=self._store)
