"""What happens to bad rows: stop, skip, or skip and write them to the quarantine file.

Rows come in the order of the input, so which row stops a run does not depend on the number of workers. The quarantine
file has one JSON object per line: file, row, kind, reason, the member of an archive, and the raw line ("line", or
"line_base64" if it is not UTF-8); for a row whose text the tokenizer refused, that text.
"""

from __future__ import annotations

import base64
import json
import re
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

from mdata.errors import BadInputError, UsageError, counted
from mdata.indexed.append_file import AppendFile, SyncPoint
from mdata.manifest.types import CorpusManifest
from mdata.progress import Progress
from mdata.sources.record_batch import BadRow

# Rows, or a share of at most 100 %.
_LIMIT = re.compile(r"[0-9]{1,18}|(?=[.0-9])(100(\.0{1,30})?|[0-9]{0,2}(\.[0-9]{1,30})?)%")
# More lines would bury everything else; all bad rows are counted.
_LINES_SHOWN = 5


class BadRowOptions(Protocol):
    """The options on bad rows, see `PreprocessOptions`."""

    @property
    def on_error(self) -> str:
        """What a bad row does."""

    @property
    def quarantine(self) -> str | None:
        """The file for bad rows."""

    @property
    def max_errors(self) -> str | None:
        """How many may be bad."""


def check_bad_row_options(options: BadRowOptions) -> None:
    """Refuse wrong values, and those without effect, before anything is read.

    Raises:
        UsageError: names the option and its value.
    """
    if options.on_error not in ("stop", "skip", "quarantine"):
        raise UsageError(f"on_error={options.on_error}", expected="stop, skip or quarantine")
    if (options.on_error == "quarantine") != (options.quarantine is not None):
        raise UsageError(
            f"on_error={options.on_error} with quarantine={options.quarantine}",
            expected="on_error=quarantine together with a file for the bad rows",
        )
    check_max_errors(options.max_errors)
    if options.max_errors is not None and options.on_error == "stop":
        raise UsageError(
            "max_errors has no effect with on_error=stop", fix="on_error=skip (--on-error skip) or quarantine"
        )


def check_max_errors(limit: str | None) -> None:
    """Raise UsageError for a limit that is neither rows nor a share."""
    if limit is not None and not _LIMIT.fullmatch(limit):
        raise UsageError(
            f"max_errors={limit[:60]}",
            expected='a number of rows of at most 18 digits, or a share such as "0.5%" with at most 30 after the point',
        )


class BadRowPolicy:
    """Handles the bad rows of one run.

    Args:
        options: on_error, quarantine and max_errors.
        key_option: of the command, for the names of keys.
        progress: receives a note on each of the first few.
        resume: state from which to continue the quarantine file of an earlier run.
    """

    def __init__(
        self,
        options: BadRowOptions,
        progress: Progress,
        *,
        key_option: str = "--json-keys",
        resume: SyncPoint | None = None,
    ) -> None:
        self._options, self._key_option = options, key_option
        self._progress = progress
        self._shown = 0
        self.quarantine = AppendFile(Path(options.quarantine), resume) if options.quarantine else None

    def handle(self, bad_row: BadRow, path: str, *, rows_before: int, bad_before: int) -> None:
        """Apply the policy to one bad row.

        Raises:
            BadInputError: the policy is to stop, or the row exceeds max_errors.
        """
        error = bad_row.as_error(path, rows_before, key_option=self._key_option)
        if self._options.on_error == "stop":
            raise error
        if self.quarantine:
            self.quarantine.append(_quarantine_line(bad_row, path, rows_before))
        limit = self._options.max_errors
        if limit is not None and not limit.endswith("%") and bad_before + 1 > Fraction(limit):
            raise _too_many(bad_before + 1, None, limit, last=error)
        if self._shown < _LINES_SHOWN:
            self._progress.note(f"skipped {bad_row.place(path, rows_before)}: {bad_row.reason}")
        elif self._shown == _LINES_SHOWN:
            self._progress.note("skipped more rows; they are counted but not shown")
        self._shown += 1

    def check_share(self, bad: int, rows: int) -> None:
        """After all input was read: compare the share of bad rows with max_errors.

        Raises:
            BadInputError: it is larger; with both numbers.
        """
        limit = self._options.max_errors
        if limit is not None and limit.endswith("%"):
            _check_limit(bad, rows, limit)

    def close(self, *, keep: bool) -> None:
        """Stop writing; an uncommitted quarantine file is kept for a run that continues, or removed."""
        if self.quarantine and keep:
            self.quarantine.close()
        elif self.quarantine:
            self.quarantine.discard()


def check_manifest(limit: str | None, manifest: CorpusManifest) -> None:
    """Compare the bad rows of a finished corpus with max_errors.

    Raises:
        BadInputError: there are more; with both numbers.
    """
    if limit is not None and manifest.provenance is not None:
        provenance = manifest.provenance
        _check_limit(sum(provenance.skipped.values()), sum(file.rows for file in provenance.inputs), limit)


def _check_limit(bad: int, rows: int, limit: str) -> None:
    if bad > (rows * Fraction(limit[:-1]) / 100 if limit.endswith("%") else Fraction(limit)):
        raise _too_many(bad, rows, limit)


def _too_many(bad: int, rows: int | None, limit: str, *, last: BadInputError | None = None) -> BadInputError:
    return BadInputError(
        f"too many bad rows{f', the last: {str(last).splitlines()[0]}' if last else ''}",
        found=counted(bad, "bad row") if rows is None else f"{bad} of {rows} rows",
        expected=f"at most {limit} (max_errors)",
        fix="correct or remove them, or raise --max-errors",
    )


def _quarantine_line(bad_row: BadRow, path: str, rows_before: int) -> bytes:
    entry: dict[str, Any] = {
        "file": path,
        "row": rows_before + bad_row.row,
        "kind": bad_row.kind,
        "reason": bad_row.reason,
    }
    if bad_row.member:
        entry["member"] = bad_row.member
    if bad_row.line is not None:
        try:
            entry["line"] = bad_row.line.decode()
        except UnicodeDecodeError:
            entry["line_base64"] = base64.b64encode(bad_row.line).decode()
    return json.dumps(entry, ensure_ascii=False).encode() + b"\n"
