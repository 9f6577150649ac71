"""Builds ahead of time every array that a run would build at its start; existing ones are kept.

A run that opens the same data with the same options then only maps them: the arrays of Megatron's order and blends, the
rows of packed samples, the mappings of BERT and T5. The native order of GPT samples and single documents is computed on
the fly and needs no arrays. Each split is opened once with `open_dataset`, so exactly the arrays that it needs are
built, and the result lists them. Other nodes and runs need no further setup: the cache finds arrays by a hash of what
determines them.
"""

from __future__ import annotations

import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mdata.array_cache.cache import Cache
from mdata.dataset.dataset import Dataset, open_for
from mdata.dataset.dataset_options import WHOLE, DatasetOptions, MegatronOrder
from mdata.order.data_split import SPLITS, split_edges
from mdata.progress import SILENT, Progress


@dataclass(frozen=True)
class BuiltArrays:
    """Arrays of one split: rows, bytes, and seconds to build or find them; `component` is None for a blend's."""

    split: str
    name: str
    component: str | None
    path: Path
    rows: int
    num_bytes: int
    seconds: float
    built: bool


@dataclass(frozen=True)
class BuildResult:
    """What `build` did: the samples of each split (None: endless), its arrays, and the peak memory of the process."""

    samples: Mapping[str, int | None]
    arrays: tuple[BuiltArrays, ...]
    peak_bytes: int


def build(
    path: str | Path | Sequence[str],
    options: DatasetOptions,
    *,
    num_samples: Mapping[str, int] | None = None,
    progress: Progress = SILENT,
) -> BuildResult:
    """Build every array that datasets with these options need, for each split that has a share.

    Args:
        path: a manifest, a prefix, or Megatron's --data-path.
        options: of the run; with `split` "whole" only that is built. Arrays go to its `cache`, or the default of
            cache.py.
        num_samples: requested in Megatron's order, by split; a missing split gets one epoch.
        progress: receives a note on each array that is built.

    Raises:
        UsageError, DamageError, ResourceError: as `open_dataset`.
    """
    blend = open_for(path, options)
    edges = split_edges(options.split_shares)
    splits = [split for i, split in enumerate(SPLITS) if edges[i + 1] > edges[i]]
    samples: dict[str, int | None] = {}
    arrays: list[BuiltArrays] = []
    for split in [WHOLE] if options.split == WHOLE else splits:
        asked = (num_samples or {}).get(split) if isinstance(options.order, MegatronOrder) else None
        cache = Cache(options.cache, mapped=options.mode == "mmap", all=True, progress=progress)
        dataset = Dataset(blend, replace(options, split=split, num_samples=asked), cache=cache)
        samples[split] = dataset.num_samples
        names = {component.corpus.id: component.name for component in dataset.components}
        for entry in cache.log:
            assert entry.path is not None, "all is kept"
            facts = (entry.path, entry.rows, entry.num_bytes, entry.seconds, entry.built)
            arrays.append(BuiltArrays(split, entry.name, names.get(entry.corpus), *facts))
    return BuildResult(samples, tuple(arrays), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
