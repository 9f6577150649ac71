"""A tokenizer's files in a folder, written so that files of two tokenizers are never mixed.

A process that is killed between two files leaves an incomplete folder: it is refused, and the same command writes it
again. A mixture would look complete and give wrong ids.

Beside a corpus the folder is named after its content, so that all corpora with the same tokenizer in one place share
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from blake3 import blake3

from mdata.util import atomic_io, file_lock


def folder_name(files: Mapping[str, bytes]) -> str:
    """The name of the folder for these files beside a corpus; equal files share one folder."""
    content = blake3()
    for name in sorted(files):
        content.update(f"{name} {len(files[name])}\n".encode() + files[name])
    return f"tokenizer-{content.hexdigest(length=8)}"


def lock_path(folder: Path) -> Path:
    """The lock of a tokenizer's folder while it is written."""
    folder = folder.absolute()  # so that "." has a name
    return folder.with_name(f".{folder.name}.lock")


def write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write the files that differ from existing ones; on an error, a folder that was created here is removed again.

    Raises:
        OSError: from the file system.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Runs that end at the same time share the folder: one writes, the others wait and then find it.
    with file_lock.wait_for(lock_path(folder)):
        made = not folder.exists()
        folder.mkdir(exist_ok=True)
        try:
            there = {name for name in files if (folder / name).is_file()}
            changed = [name for name in files if name not in there or (folder / name).read_bytes() != files[name]]
            # Some readers load tokenizer.json alone, so it is written after the files beside it.
            changed.sort(key=lambda name: name == "tokenizer.json")
            atomic_io.atomic_writes({folder / name: files[name] for name in changed})
            atomic_io.sync_folder(folder.parent)
        except BaseException:
            if made:
                with suppress(OSError):  # the first error is reported
                    for name in files:
                        (folder / name).unlink(missing_ok=True)
                    folder.rmdir()
            raise
