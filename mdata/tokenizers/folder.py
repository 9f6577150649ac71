"""A tokenizer's files in a folder, written so that a reader finds each file old or new, never in part.

Beside a corpus the folder is named by its content, so that all corpora of one tokenizer in one place share
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from blake3 import blake3

from mdata import durable


def folder_name(files: Mapping[str, bytes]) -> str:
    """The name under which these files are kept beside a corpus: the same files share one folder."""
    content = blake3()
    for name in sorted(files):
        content.update(f"{name} {len(files[name])}\n".encode() + files[name])
    return f"tokenizer-{content.hexdigest(length=8)}"


def write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write the files that differ from what is there; on an error a folder made here is taken away again.

    Raises:
        OSError: what the file system said.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Runs that end at the same time share the folder: one writes, the others wait and find it there.
    with durable.waited_for(folder.with_name(f".{folder.name}.lock")):
        made = not folder.exists()
        folder.mkdir(exist_ok=True)
        try:
            for name, content in files.items():
                path = folder / name
                if not path.is_file() or path.read_bytes() != content:
                    durable.atomic_write(path, content)
            durable.sync_folder(folder.parent)
        except BaseException:
            if made:
                with suppress(OSError):  # what went wrong first is what is told
                    for name in files:
                        (folder / name).unlink(missing_ok=True)
                    folder.rmdir()
            raise
