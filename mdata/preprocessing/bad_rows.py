"""What happens to rows that cannot be taken: stop, skip, or skip and keep them in a file.

Rows come in the order of the input, so which row stops a run does not depend on the number of workers. The
quarantine file has one JSON object a line: file, row, kind, reason, and the raw line ("line", or
"line_base64" where it is not UTF-8); of a row whose text the tokenizer refused, that text.
"""

from __future__ import annotations

import base64
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

from mdata.errors import BadInputError
from mdata.indexed.append_file import Kept, Spool
from mdata.manifest.types import CorpusManifest
from mdata.preprocessing.preprocess_options import PreprocessOptions
from mdata.progress import Progress
from mdata.sources.record_batch import Problem

# Beyond these a line for each would bury everything else; all are counted, and kept if there is a quarantine.
_LINES_SHOWN = 5


class ProblemPolicy:
    """Takes the bad rows of one run.

    Args:
        options: on_error, quarantine and max_errors.
        progress: hears of the first few.
        kept: how much of the quarantine file an earlier run surely wrote.

    Attributes:
        spool: the quarantine file in the making, where there is one.
    """

    def __init__(self, options: PreprocessOptions, progress: Progress, *, kept: Kept | None = None) -> None:
        self._options = options
        self._progress = progress
        self._shown = 0
        self.spool = Spool(Path(options.quarantine), kept) if options.quarantine else None

    def take(self, problem: Problem, path: str, *, rows_before: int, bad_before: int) -> None:
        """One bad row.

        Raises:
            BadInputError: the policy is to stop, or more rows are bad than may be.
        """
        error = problem.as_error(path, rows_before)
        if self._options.on_error == "stop":
            raise error
        if self.spool:
            self.spool.append(_quarantined(problem, path, rows_before))
        limit = self._options.max_errors
        if limit is not None and not limit.endswith("%") and bad_before + 1 > Fraction(limit):
            raise _too_many(bad_before + 1, None, limit, last=error)
        if self._shown < _LINES_SHOWN:
            self._progress.note(f"skipped {path}:{rows_before + problem.row}: {problem.reason}")
        elif self._shown == _LINES_SHOWN:
            self._progress.note("skipped more rows, which are counted and not shown")
        self._shown += 1

    def check_share(self, bad: int, rows: int) -> None:
        """When all is read: refuse a larger share of bad rows than may be.

        Raises:
            BadInputError: with both numbers.
        """
        limit = self._options.max_errors
        if limit is not None and limit.endswith("%") and bad > rows * Fraction(limit[:-1]) / 100:
            raise _too_many(bad, rows, limit)

    def checkpoint(self) -> Kept | None:
        """Make the quarantine file lasting so far; what a later run can keep of it."""
        return self.spool.sync() if self.spool else None

    def place(self) -> None:
        """Give the quarantine file its name."""
        if self.spool:
            self.spool.sync()
            self.spool.place()

    def folders(self) -> set[Path]:
        """Where the quarantine file is in the making, if there is one."""
        return {self.spool.path.parent} if self.spool else set()

    def close(self, *, keep: bool) -> None:
        """Stop writing; a file without its name is kept for a run that continues, or removed."""
        if self.spool and keep:
            self.spool.close()
        elif self.spool:
            self.spool.remove()


def check_limit(limit: str | None, manifest: CorpusManifest) -> None:
    """Refuse a finished corpus with more bad rows than may be now.

    Raises:
        BadInputError: with both numbers.
    """
    if limit is None or manifest.provenance is None:
        return
    bad, rows = sum(manifest.provenance.skipped.values()), sum(file.rows for file in manifest.provenance.inputs)
    if bad > (rows * Fraction(limit[:-1]) / 100 if limit.endswith("%") else Fraction(limit)):
        raise _too_many(bad, rows, limit)


def _too_many(bad: int, rows: int | None, limit: str, *, last: BadInputError | None = None) -> BadInputError:
    return BadInputError(
        f"too many bad rows{f', the last: {str(last).splitlines()[0]}' if last else ''}",
        found=f"{bad} bad rows" if rows is None else f"{bad} of {rows} rows",
        expected=f"at most {limit} (max_errors)",
        fix="correct or remove them, or raise --max-errors",
    )


def _quarantined(problem: Problem, path: str, rows_before: int) -> bytes:
    kept: dict[str, Any] = {
        "file": path,
        "row": rows_before + problem.row,
        "kind": problem.kind,
        "reason": problem.reason,
    }
    if problem.line is not None:
        try:
            kept["line"] = problem.line.decode()
        except UnicodeDecodeError:
            kept["line_base64"] = base64.b64encode(problem.line).decode()
    return json.dumps(kept, ensure_ascii=False).encode() + b"\n"
