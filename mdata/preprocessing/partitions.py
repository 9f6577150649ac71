"""Partitions: which one a document belongs to, and their names.

Megatron's partitions: without keep_sequential_samples row j (from 0, over all files) goes to partition j mod P; with
it, partition i has the rows i k to (i + 1) k - 1 where k = ceil(rows / P). Held-out documents go to a separate result
instead. How they are merged: mdata/preprocessing/joining.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mdata.preprocessing.preprocess_options import PreprocessOptions


@dataclass(frozen=True)
class Partitions:
    """Partitions 0 to `count` - 1, then one for held-out documents if there are any.

    Attributes:
        count: number of partitions; 1: all documents in one.
        rows_each: rows of each partition if they are runs of rows; None: every P-th row.
        holdout: whether documents are held out.
    """

    count: int
    rows_each: int | None
    holdout: bool

    @property
    def numbers(self) -> range:
        """The numbers of all partitions, including the held-out one."""
        return range(self.count + self.holdout)

    @property
    def step(self) -> int:
        """Rows from one document of a partition to the next."""
        return 1 if self.rows_each is not None else self.count

    def of_rows(self, rows: npt.NDArray[np.int64], held: npt.NDArray[np.bool_] | None) -> npt.NDArray[np.int64]:
        """int64[d]: the partition of each document, by its row (from 0, over all files) and whether it is held out."""
        numbers = rows % self.count if self.rows_each is None else rows // self.rows_each
        return numbers if held is None else np.where(held, self.count, numbers)

    def name(self, key: str, number: int) -> str:
        """The name of a corpus in results: the key, with "/part0" or "/holdout" after it."""
        if number == self.count:
            return f"{key}/holdout"
        return key if self.count == 1 else f"{key}/part{number}"

    def prefixes(self, options: PreprocessOptions) -> dict[str, Path]:
        """The name of each result -> the path of its files without endings; merged corpora come last."""

        def prefix(middle: str, key: str) -> Path:
            return Path(f"{options.output_prefix}{middle}_{key}_{options.level}")

        by_name: dict[str, Path] = {}
        for number in self.numbers:
            middle = "_holdout" if number == self.count else "" if self.count == 1 else f"_{number}"
            by_name |= {self.name(key, number): prefix(middle, key) for key in options.json_keys}
        return by_name | {key: prefix("", key) for key in options.json_keys if self.count > 1}
