"""`clean`: texts repaired and filtered by steps (mdata/cleaning/steps.py), as new files or as rows to leave out."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from mdata.cleaning.steps import Cleaner, CleanRules
from mdata.cleaning.text_job import KEEP, Edit, TextBatch, TextJobOptions, TextJobResult, TextWork, run_text_job
from mdata.errors import UsageError
from mdata.progress import SILENT, Progress


@dataclass
class _Clean:
    """See `TextWork`."""

    rules: CleanRules
    cleaner: Cleaner | None = None

    name, writes = "clean", True

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.rules.url.key,) if "url" in self.rules.steps else ()

    def record(self) -> dict[str, Any]:
        return self.rules.record()

    def prepare(self) -> None:
        self.cleaner = Cleaner(self.rules)

    def edit(self, batch: TextBatch) -> tuple[list[Edit], Counter[str]]:
        assert self.cleaner is not None, "prepared before"
        cleaned, reasons = self.cleaner.clean(batch.texts, batch.others[0] if batch.others else [])
        edits = [
            Edit(reason) if reason else KEEP if new == text else Edit(texts=(new,))
            for text, new, reason in zip(batch.texts, cleaned, reasons, strict=True)
        ]
        return edits, Counter()

    def summary(self, counts: Counter[str]) -> dict[str, Any]:
        return {}


def clean(options: TextJobOptions, rules: CleanRules, progress: Progress = SILENT) -> TextJobResult:
    """Repair and filter texts; an interrupted command continues.

    Raises:
        UsageError: unusable options, rules or input, or the folder holds a result of other options.
        BadInputError: a bad row, compressed data or parquet is damaged.
        ResourceError: the disk or memory ran out; run again to continue.
    """
    return run_text_job(options, clean_work(options, rules), progress)


def clean_work(options: TextJobOptions, rules: CleanRules) -> TextWork:
    """The work on the texts of a job.

    Raises:
        UsageError: options and rules that do not go together.
    """
    if options.rows_only and rules.changing:
        raise UsageError(
            f"rows_only writes no texts, and these steps change them: {', '.join(rules.changing)}",
            fix="leave one of the two out",
        )
    return _Clean(rules)
