"""Where checkpoints are stored: a folder of a file system, or one in object storage.

A local folder is a `Path`; an address is an `ObjectFolder`, which joins names like a path. stored_files.py reads there;
object_folder.py writes there. This module only looks at text, except for the config.toml of a run folder.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdata import UsageError
from mdata.errors import os_errors_named
from mdata.object_storage.address import Address, address_of, is_address, neither, parse_address, scheme_of
from mdata.object_storage.stores import open_store
from mdata.util.config_text import load_toml
from trainer.config.sections import RunConfig

if TYPE_CHECKING:
    from obstore.store import ObjectStore


WRITTEN = ("s3", "gs", "az")
READ = (*WRITTEN, "http", "https")


class Connection:
    """A client of a storage, opened on first use: that costs a handshake, and often a request for credentials.

    A copy in another process opens its own.
    """

    def __init__(self) -> None:
        self._store: ObjectStore | None = None

    def open(self, address: Address) -> ObjectStore:
        """The client, for any object at the place of this address."""
        if self._store is None:
            self._store = open_store(address)
        return self._store

    def __reduce__(self) -> tuple[type[Connection], tuple[()]]:
        return Connection, ()


@dataclass(frozen=True, slots=True)
class ObjectFolder:
    """A folder in object storage, or an object in one; the key of its address ends without a slash.

    All folders that are reached from one by name or parent share its connection.
    """

    address: Address
    connection: Connection = field(default_factory=Connection, compare=False, repr=False)

    def __str__(self) -> str:
        return str(self.address)

    def __truediv__(self, name: str) -> ObjectFolder:
        key = f"{self.address.key}/{name}" if self.address.key else name
        return ObjectFolder(self.address.with_key(key), self.connection)

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.address.name

    @property
    def parent(self) -> ObjectFolder:
        """The folder around it."""
        return ObjectFolder(self.address.with_key(self.address.key.rpartition("/")[0]), self.connection)

    @property
    def store(self) -> ObjectStore:
        """The client that reads and writes there.

        Raises:
            UsageError: obstore is not installed, or the configuration of the storage is wrong.
        """
        return self.connection.open(self.address)

    @property
    def inside(self) -> Address:
        """The prefix of the keys of all objects in it."""
        return self.address.with_key(f"{self.address.key}/" if self.address.key else "")

    @property
    def is_listed(self) -> bool:
        """Whether the storage can list its objects; a web server cannot."""
        return self.address.scheme not in ("http", "https")


Location = Path | ObjectFolder


def location_of(text: str | Path) -> Location:
    """The folder that a text names, by address or path.

    Raises:
        UsageError: an address of another scheme, with too few slashes, without a bucket, or with credentials in it.
    """
    if not is_address(text):
        if meant := address_of(text):
            _check_scheme(meant, READ, "read from", fix="download the folder first")
            raise neither(text, str(parse_address(meant)))
        return Path(text)
    _check_scheme(str(text), READ, "read from", fix="download the folder first")
    address = parse_address(str(text))
    return ObjectFolder(address.with_key("/".join(part for part in address.key.split("/") if part)))


def check_destination(text: str) -> None:
    """Check that checkpoints can be written to the place that a text names, as far as the text shows.

    Raises:
        UsageError: as `location_of`, and for web servers.
    """
    if meant := text if is_address(text) else address_of(text):
        _check_scheme(meant, WRITTEN, "write to", fix="write there, and copy the checkpoints afterwards")
    location_of(text)


def _check_scheme(text: str, schemes: tuple[str, ...], does: str, *, fix: str) -> None:
    if (scheme := scheme_of(text)) not in (*schemes, "file"):  # parse_address says what a file:// is
        *most, last = (f"{name}://" for name in schemes)
        raise UsageError(
            f"mtrain does not {does} {scheme}://",
            expected=f"a path, or an address that begins with {', '.join(most)} or {last}",
            fix="download the folder first, with hf download" if scheme == "hf" and schemes == READ else fix,
        )


def checkpoints_folder(config: RunConfig) -> Location:
    """Where a run keeps its checkpoints."""
    return _checkpoints(Path(config.run.folder), config.checkpoint.folder)


def checkpoints_of(run_folder: Path) -> Location:
    """Where the run of a run folder keeps its checkpoints, by its config.toml; the folder may have been moved."""
    path = run_folder / "config.toml"
    if not path.is_file():
        return run_folder / "checkpoints"
    with os_errors_named("reading a run's configuration"):
        text = path.read_text(encoding="utf-8", errors="replace")
    try:
        section: Any = load_toml(text).get("checkpoint", {})
    except ValueError as error:
        raise UsageError(f"{path} is not TOML", found=str(error), fix="restore it") from error
    named = section.get("folder") if isinstance(section, dict) else None
    return _checkpoints(run_folder, named if isinstance(named, str) else None)


def _checkpoints(run_folder: Path, named: str | None) -> Location:
    return location_of(named) if named else run_folder / "checkpoints"
