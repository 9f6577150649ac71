"""A published checkpoint of Megatron-LM, which is a zip archive, as a folder that all processes of a host share.

The first process to need it unpacks it while the others wait. The folder lies among the host's temporary files, under a
name made of the archive's path, size and time of change; the last process to end removes it. Files are unpacked beside
their place and moved when they are complete, so what a killed process left is never taken for the checkpoint.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from blake3 import blake3

from mdata import DamageError, UsageError
from mdata.errors import os_errors_named
from mdata.util import atomic_io, file_lock
from trainer.convert.megatron_folder import LATEST

_MEMBERS = re.compile(rf"{re.escape(LATEST)}|(release|iter_\d{{7}})/mp_rank_\d{{2}}(_\d{{3}})?/model_optim_rng\.pt")


def unpacked(path: Path) -> Path:
    """The folder of the checkpoint in an archive, until this process ends.

    Raises:
        UsageError: there is no checkpoint in it, or no room for it. DamageError: the archive is damaged.
    """
    status = path.stat()
    return _unpacked(path.resolve(), status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=2)
def _unpacked(path: Path, size: int, time: int) -> Path:
    name = blake3(b"%s %d %d" % (os.fsencode(path), size, time)).hexdigest(length=8)
    folder = Path(tempfile.gettempdir(), f"mtrain-zip-{os.getuid()}-{name}")
    try:
        with (
            zipfile.ZipFile(path) as archive,
            os_errors_named("unpacking an archive"),
            file_lock.wait_for(folder.with_suffix(".lock")),
        ):
            members = _members(archive, path)
            files = folder / "files"
            _make_own(folder)
            used = file_lock.share(folder / "used")
            try:
                if not _is_complete(files, members):
                    _unpack(archive, members, files)
            except BaseException:
                _release(folder, used)
                raise
    except (zipfile.BadZipFile, zlib.error) as error:
        raise DamageError(f"{path} is damaged", found=str(error), fix="download it again") from error
    atexit.register(_leave, folder, used)
    return files if (files / LATEST).is_file() else files / members[0].filename.partition("/")[0]


def _members(archive: zipfile.ZipFile, path: Path) -> list[zipfile.ZipInfo]:
    members = [member for member in archive.infolist() if _MEMBERS.fullmatch(member.filename)]
    if not any(member.filename.endswith(".pt") for member in members):
        names = ", ".join(archive.namelist()[:5]) or "nothing"
        problem, expected = f"{path} holds no checkpoint of Megatron-LM", f"{LATEST} and release/"
        raise UsageError(problem, found=names, expected=expected)
    if any(member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for member in members):
        raise UsageError(f"{path} has a compression that is not read", fix="unpack it, and give the folder")
    return members


def _make_own(folder: Path) -> None:
    """Make the folder for this user alone; temporary files are in a place where all users write."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise UsageError(f"{folder} belongs to another user", fix="remove it, or set TMPDIR to a folder of your own")


def _is_complete(files: Path, members: Sequence[zipfile.ZipInfo]) -> bool:
    """Whether all files are there; programs that clean up temporary files may have removed some."""
    paths = [(files / member.filename, member.file_size) for member in members]
    return all(path.is_file() and path.stat().st_size == size for path, size in paths)


def _unpack(archive: zipfile.ZipFile, members: Sequence[zipfile.ZipInfo], files: Path) -> None:
    partial = files.with_name("partial")
    for left in (partial, files):
        shutil.rmtree(left, ignore_errors=True)
    for member in members:
        archive.extract(member, partial)
    atomic_io.rename(partial, files)


def _leave(folder: Path, used: int) -> None:
    with file_lock.wait_for(folder.with_suffix(".lock")):
        _release(folder, used)


def _release(folder: Path, used: int) -> None:
    """Stop using the folder, while its lock is held; the last process to do so removes it."""
    if file_lock.is_last(used):
        shutil.rmtree(folder, ignore_errors=True)
    os.close(used)
