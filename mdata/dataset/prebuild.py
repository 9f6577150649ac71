"""Making offline every array that a run would build at its start, or finding that it is there.

A run that opens the same data with the same options then maps them at once: the arrays of Megatron's order and blends,
the rows of packed samples, the mappings of BERT and T5. The native order of GPT samples and of single documents is
computed, so there is nothing to build for it. What is built for a split is what `open_dataset` would: this opens each
split once and lists what came of it. Other nodes and other runs need nothing told; arrays are found by what they are.
"""

from __future__ import annotations

import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mdata.array_cache.cache import Cache
from mdata.blend.open_blend import open_blend
from mdata.dataset.dataset import Dataset
from mdata.dataset.dataset_options import WHOLE, DatasetOptions, MegatronOrder
from mdata.order.data_split import SPLITS, split_edges
from mdata.progress import SILENT, Progress


@dataclass(frozen=True)
class BuiltArrays:
    """Arrays of one split: rows, bytes and seconds of making or finding them; the component is None for a blend."""

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
    """What `build` did: samples of each split (None: without end), its arrays, and the process' memory at most."""

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
    """Make every array that datasets of these options need, for each split that has a share.

    Args:
        path: a manifest, a prefix, or Megatron's words.
        options: of the run; its `split` "whole" builds that alone. Arrays go to its `cache`, or as cache.py says.
        num_samples: asked for in Megatron's order, by split; a split that is not there: one epoch.
        progress: receives a note on what is built.

    Raises:
        UsageError, DamageError, ResourceError: as `open_dataset`.
    """
    blend = open_blend(path, **options.opening)
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
        for kept in cache.log:
            assert kept.path is not None, "all is kept"
            facts = (kept.path, kept.rows, kept.num_bytes, kept.seconds, kept.built)
            arrays.append(BuiltArrays(split, kept.name, names.get(kept.corpus), *facts))
    return BuildResult(samples, tuple(arrays), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
