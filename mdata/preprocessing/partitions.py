"""Which of the results a document belongs to: the whole, a part of it, or the held-out share.

Megatron's parts: without keep_sequential_samples row j (from 0, over all files) goes to part j mod P; with
it, part i takes rows i k to (i + 1) k - 1 where k = ceil(rows / P). Held-out documents go to no part.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mdata.preprocessing.preprocess_options import PreprocessOptions


@dataclass(frozen=True)
class Routes:
    """Where documents go: parts 0 to `partitions` - 1, then the held-out route if there is one.

    Attributes:
        partitions: number of parts; 1: all in one.
        rows_per_part: rows of each part where parts are runs of rows; None: every P-th row.
        holdout: whether there is a held-out route, the last.
    """

    partitions: int
    rows_per_part: int | None
    holdout: bool

    @property
    def num_routes(self) -> int:
        """Parts, and the held-out route."""
        return self.partitions + self.holdout

    @property
    def step(self) -> int:
        """Rows from one document of a part to the next."""
        return 1 if self.rows_per_part is not None else self.partitions

    def of(self, rows: npt.NDArray[np.int64], held: npt.NDArray[np.bool_] | None) -> npt.NDArray[np.int64]:
        """The route of each document: int64[d], from its row (from 0, over all files) and whether it is held out."""
        if self.rows_per_part is None:
            route = rows % self.partitions
        else:
            route = rows // self.rows_per_part
        return route if held is None else np.where(held, self.partitions, route)

    def name(self, key: str, route: int) -> str:
        """How the result calls a corpus: the key, with "/part0" or "/holdout" after it."""
        if route == self.partitions:
            return f"{key}/holdout"
        return key if self.partitions == 1 else f"{key}/part{route}"

    def prefix(self, options: PreprocessOptions, key: str, *, route: int) -> Path:
        """Where the files of one key and route go, without their endings."""
        middle = "_holdout" if route == self.partitions else "" if self.partitions == 1 else f"_{route}"
        return Path(f"{options.output_prefix}{middle}_{key}_{options.level}")


def merged_prefix(options: PreprocessOptions, key: str) -> Path:
    """Where the parts of one key go together."""
    return Path(f"{options.output_prefix}_{key}_{options.level}")
