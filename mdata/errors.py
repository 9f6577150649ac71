"""What can go wrong, as types that carry their exit code.

An error speaks to the user in one to four lines: what happened, the values found, what was expected, what
to do. Every error that a user can cause is one of these; anything else that reaches the command line is a
fault of ours (exit code 1). The command line turns them into text and exit codes in `cli/console.py`;
nothing here prints.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager


class MdataError(Exception):
    """Base of all errors with a message for the user.

    Args:
        what: one sentence, with the file, row or field by name.
        found: the values that were found.
        expected: what was expected in their place.
        fix: what the user can do now.
    """

    exit_code = 1

    def __init__(
        self, what: str, *, found: str | None = None, expected: str | None = None, fix: str | None = None
    ) -> None:
        super().__init__(_in_lines(what, found=found, expected=expected, fix=fix))


class UsageError(MdataError, ValueError):
    """A wrong option, configuration, or a file that is not there (exit code 2)."""

    exit_code = 2


class BadInputError(MdataError, ValueError):
    """A record of the input that cannot be taken under the policy in force (exit code 3)."""

    exit_code = 3


class DamageError(MdataError):
    """A file of ours or a foreign one that is truncated, inconsistent or altered (exit code 4)."""

    exit_code = 4


class ResourceError(MdataError):
    """Out of disk, memory, descriptors or worker processes (exit code 5)."""

    exit_code = 5


class StoppedError(BaseException):
    """Stopped early on request; run the same command again to continue (exit code 75).

    Like KeyboardInterrupt it is no Exception, and no MdataError: whoever catches errors in order to go on does not
    catch it. It may be raised anywhere; see mdata/signals.py.
    """

    exit_code = 75

    def __init__(self, what: str, *, fix: str | None = None) -> None:
        super().__init__(_in_lines(what, fix=fix))


def _in_lines(what: str, *, found: str | None = None, expected: str | None = None, fix: str | None = None) -> str:
    lines = [what]
    lines += [f"  found: {found}"] if found else []
    lines += [f"  expected: {expected}"] if expected else []
    lines += [f"  try: {fix}"] if fix else []
    return "\n".join(lines)


_NO_RESOURCE = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.EFBIG,
    errno.EIO,
    errno.EAGAIN,
}
_NOT_USABLE = {
    errno.ENOENT,
    errno.EACCES,
    errno.EPERM,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.EROFS,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.EINVAL,
}


def explain_os_error(error: OSError, doing: str | None = None) -> MdataError:
    """What the operating system said, as one of our kinds: resource (5), usage (2), or a fault of ours (1).

    Args:
        error: what was caught.
        doing: what we were about, for errors that carry no file name ("writing out_text_document.bin").
    """
    reason = os.strerror(error.errno) if error.errno else str(error)
    where = " -> ".join(
        os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, str | bytes)
    )
    what = ": ".join(part for part in (doing, where, reason) if part)
    if error.errno in _NO_RESOURCE:
        return ResourceError(
            what, fix=_RESOURCE_FIXES.get(error.errno, "see the system's log; the device may be failing")
        )
    if error.errno in _NOT_USABLE:
        return UsageError(what, fix=_PATH_FIXES.get(error.errno, "check the path and its permissions"))
    return MdataError(what)


_RESOURCE_FIXES = {
    errno.ENOSPC: "free some disk space, or write to another file system",
    errno.EDQUOT: "free some of your disk quota, or write to another file system",
    errno.EFBIG: "write to a file system that takes larger files",
    errno.EMFILE: "raise the limit of open files (ulimit -n), or use fewer workers or partitions",
    errno.ENFILE: "close other programs; the system is out of open files",
    errno.ENOMEM: "use fewer workers, or a machine with more memory",
    errno.EAGAIN: "use fewer workers; the limit of processes is reached",
}


_PATH_FIXES = {
    errno.EEXIST: "another path: a file stands where a folder is to be",
    errno.ENOTDIR: "another path: a file stands where a folder is to be",
    errno.EISDIR: "another path: a folder stands where a file is to be",
}


@contextmanager
def os_errors_named(doing: str) -> Iterator[None]:
    """Turn an OSError of the block into one of our kinds that says what was being done."""
    try:
        yield
    except OSError as error:
        raise explain_os_error(error, doing) from error


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The name a user most likely meant, by meaning or by spelling, or None when nothing is near."""
    import difflib

    from mdata.synonyms import synonym

    known = list(names)
    found = synonym(name, known) or next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.6)), None)
    return None if found == name else found


def few(names: Sequence[str], most: int = 8) -> str:
    """Names in a row, the first of them and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
