"""What can go wrong, as types that carry their exit code.

An error speaks to the user in one to four lines: what happened, the values found, what was expected, what to do.
Every error that a user can cause is one of these; anything else that reaches the command line is a fault of ours
(exit code 1). The command line turns them into text and exit codes in `cli/console.py`; nothing here prints.
"""

from __future__ import annotations


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
        lines = [what]
        lines += [f"  found: {found}"] if found else []
        lines += [f"  expected: {expected}"] if expected else []
        lines += [f"  try: {fix}"] if fix else []
        super().__init__("\n".join(lines))


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


class StoppedError(MdataError):
    """Stopped early on request; run the same command again to continue (exit code 75)."""

    exit_code = 75
