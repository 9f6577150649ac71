"""All errors, as types that carry their exit code.

An error message for the user has one to four lines: what happened, the values found, what was expected, what to do.
Every error that a user can cause is one of these types; any other exception that reaches the command line is a bug
(exit code 1). `cli/console.py` turns them into text and exit codes; nothing here prints.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from mdata.version import DISTRIBUTION


class MdataError(Exception):
    """Base of all errors with a message for the user.

    Args:
        problem: one sentence, with the file, row or field by name.
        found: the values that were found.
        expected: what was expected in their place.
        fix: what the user can do now.

    Attributes:
        problem, found: as given, for a command that has other advice.
    """

    exit_code = 1

    def __init__(
        self, problem: str, *, found: str | None = None, expected: str | None = None, fix: str | None = None
    ) -> None:
        super().__init__(_in_lines(problem, found=found, expected=expected, fix=fix))
        self.problem, self.found = problem, found


class UsageError(MdataError, ValueError):
    """A wrong option or configuration, or a missing file (exit code 2)."""

    exit_code = 2


class OtherResultsError(UsageError):
    """Results of other input or options are where these would be; only an option such as --overwrite replaces them."""


class BadInputError(MdataError, ValueError):
    """A record of the input that the current policy does not accept (exit code 3)."""

    exit_code = 3


class DamageError(MdataError):
    """A file, written by mdata or not, that is truncated, inconsistent or altered (exit code 4)."""

    exit_code = 4


class ResourceError(MdataError):
    """Out of disk, memory, descriptors or worker processes (exit code 5)."""

    exit_code = 5


class StoppedError(BaseException):
    """Stopped early on request; run the same command again to continue (exit code 75).

    Like KeyboardInterrupt it is not an Exception (nor an MdataError), so code that catches errors and continues does
    not catch it. It may be raised anywhere; see mdata/util/stop_signals.py.
    """

    exit_code = 75

    def __init__(self, problem: str, *, fix: str | None = None) -> None:
        super().__init__(_in_lines(problem, fix=fix))


# A file of strangers may hold a value as long as itself.
_LONGEST_LINE = 1000


def _in_lines(problem: str, *, found: str | None = None, expected: str | None = None, fix: str | None = None) -> str:
    lines = [problem]
    lines += [f"  found: {found}"] if found else []
    lines += [f"  expected: {expected}"] if expected else []
    lines += [f"  try: {fix}"] if fix else []
    return "\n".join(map(_shortened, hide_secrets("\n".join(lines)).split("\n")))


def _shortened(line: str) -> str:
    """The line without its middle if it is too long; what the user can do is kept whole."""
    if len(line) <= _LONGEST_LINE or line.startswith("  try: "):
        return line
    kept = _LONGEST_LINE // 2
    return f"{line[:kept]} ... ({len(line) - 2 * kept} more characters) ... {line[-kept:]}"


# Keys of storage often hold a slash, so a password may, too; but "host:80/" has none.
_USER = re.compile(r"(\b[A-Za-z][A-Za-z0-9+.-]*:/{1,2})([^\s/'\"\[:]+:(?!\d+/)[^\s'\"]*|[^\s/'\"]+)@")
_QUERY = re.compile(r"(\b[A-Za-z][A-Za-z0-9+.-]*:/{1,2}[^\s?'\"]*\?)[^\s'\"]*=[^\s'\"]*")


def hide_secrets(text: str) -> str:
    """The text without user names, passwords and queries of URLs, which users give in unexpected places."""
    if ":/" not in text:
        return text
    return _QUERY.sub(r"\1***", _USER.sub(r"\1***@", text))


def install_command(extra: str) -> str:
    """How to install an extra, for messages: from this checkout if it is one, otherwise from the index."""
    checkout = Path(__file__).resolve().parent.parent
    if (checkout / "pyproject.toml").is_file():
        return f'pip install ".[{extra}]" in {checkout}'
    return f'pip install "{DISTRIBUTION}[{extra}]"'


_DEVICE = "see the system's log; the device may be failing"
_PATH = "check the path and its permissions"
_FOLDER_STANDS = "use another path: there is a folder where a file should be"
_FILE_STANDS = "use another path: there is a file where a folder should be"
_OTHER_PLACE = "use another path: this file system or kind of file does not support the operation"

# Errors caused by the user's path or permissions, and what to do. All others describe the machine's state (`_MACHINE`,
# `_DEVICE`), except those that only a bug can cause (`_OURS`).
_USAGE = MappingProxyType(
    {
        errno.ENOENT: _PATH,
        errno.EACCES: _PATH,
        errno.EPERM: _PATH,
        errno.ENOTDIR: _FILE_STANDS,
        errno.EEXIST: _FILE_STANDS,
        errno.EISDIR: _FOLDER_STANDS,
        errno.EROFS: "use another path: this file system is read-only",
        errno.ENAMETOOLONG: "use a shorter path",
        errno.ELOOP: "use another path: the symbolic links of this one form a loop",
        errno.EMLINK: "use another path: the folder already has as many entries as its file system allows",
        errno.EINVAL: _PATH,
        errno.ETXTBSY: "use another path: this file is a running program",
        errno.EXDEV: "use paths on the same file system",
        errno.ESPIPE: "use a regular file: a pipe can only be read once, from its start",
        errno.ENXIO: _OTHER_PLACE,
        errno.ENODEV: _OTHER_PLACE,
        errno.ENOTSUP: _OTHER_PLACE,
        errno.ENOSYS: _OTHER_PLACE,
        errno.ENOTTY: _OTHER_PLACE,
    }
)
_MACHINE = MappingProxyType(
    {
        errno.ENOSPC: "free some disk space, or write to another file system",
        errno.EDQUOT: "free some of your disk quota, or write to another file system",
        errno.EFBIG: "write to a file system that supports larger files",
        errno.EMFILE: "raise the limit on open files (ulimit -n), or use fewer workers or partitions",
        errno.ENFILE: "close other programs; the system is out of open files",
        errno.ENOMEM: "use fewer workers, or a machine with more memory",
        errno.EAGAIN: "use fewer workers; the limit on processes is reached",
        errno.EINTR: "run again",
        errno.EBUSY: "run again when no other program is using it",
        errno.ESTALE: "run again: another machine removed or replaced the file",
    }
)
_OURS = frozenset({errno.EBADF, errno.EFAULT})
_PARTIAL = re.compile(r"(^|/)\.([^/]+)\.partial$")  # of atomic_io.partial_path: a user knows only the file's own name
_OF_CLASS = MappingProxyType({FileNotFoundError: errno.ENOENT, PermissionError: errno.EACCES})


def explain_os_error(error: OSError, doing: str | None = None) -> MdataError:
    """An error of the operating system as an error of mdata: usage (2), resource (5), or a bug (1).

    Every errno has a kind. An error without one comes from a library that reads or writes: its class may have a kind,
    otherwise it is resource.

    Args:
        error: the caught error.
        doing: what was being done, for errors without a file name ("writing out_text_document.bin").
    """
    number = error.errno or _number_in(str(error))
    reason = os.strerror(number) if number else str(error) or type(error).__name__
    number = number or _OF_CLASS.get(type(error), 0)
    names = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, str | bytes)]
    where = " -> ".join(dict.fromkeys(map(_own_name, names)))
    parts = (doing, "" if doing and doing.endswith(where) else where, reason)
    problem = ": ".join(part for part in parts if part)
    if number in _OURS:
        return MdataError(problem)
    if number == errno.ENOENT and names and not os.path.exists(folder := Path(names[0]).parent):  # noqa: PTH110
        return UsageError(problem, fix=f"check the path: there is no folder {folder}")
    if number in _USAGE:
        return UsageError(problem, fix=_USAGE[number])
    return ResourceError(problem, fix=_MACHINE.get(number, _DEVICE))


def _own_name(path: str) -> str:
    """A file's own name for that of its temporary; what stands in the way of the temporary keeps its name."""
    # Not pathlib, whose questions raise for a path that is too long.
    in_the_way = os.path.isdir(path) or os.path.islink(path)  # noqa: PTH112, PTH114
    return path if in_the_way else _PARTIAL.sub(r"\1\2", path)


def _number_in(said: str) -> int:
    """The errno in the message of a Rust library, whose errors have no number; 0: there is none."""
    match = re.search(r"\(os error (\d+)\)$", said)
    return int(match[1]) if match else 0


@contextmanager
def os_errors_named(doing: str) -> Iterator[None]:
    """Turn an OSError in the block into one of our errors that says what was being done."""
    try:
        yield
    except OSError as error:
        raise explain_os_error(error, doing) from error


@contextmanager
def errors_wanted_by(who: str) -> Iterator[None]:
    """Prefix errors in the block with what needed the file: "mix.json: component books"."""
    try:
        yield
    except MdataError as error:
        raise wanted_by(who, error) from error


def wanted_by(who: str, error: MdataError) -> MdataError:
    """The same error, prefixed with what needed the file."""
    return type(error)(f"{who}: {error}")


def joined(errors: Sequence[MdataError], most: int = 8) -> MdataError:
    """One error for several: the first ones, and how many more; a DamageError if one of them is."""
    kind = DamageError if any(isinstance(error, DamageError) for error in errors) else type(errors[0])
    more = [f"{len(errors) - most} more"] if len(errors) > most else []
    return errors[0] if len(errors) == 1 else kind("\n".join([*map(str, errors[:most]), *more]))


def few(names: Sequence[str], most: int = 8) -> str:
    """The first of some names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def counted(number: float, singular: str, plural: str | None = None) -> str:
    """A count with its noun, "1 row" or "2,000 rows"; `plural`: where the noun does not simply take an s."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"
