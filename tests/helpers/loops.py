"""Datasets of each kind and a sampler that can be restored, for loops over torch's DataLoader.

The sampler is that of a user's own training loop: global batches in mdata's order, and the number of consumed samples
as its only state. Batches that workers read ahead are not consumed, so the loop counts the batches it received.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Sampler

import mdata
from mdata.loader.sampler import global_batch
from tests.helpers.corpora import write_pair
from tests.helpers.masked import make_vocabulary
from tests.helpers.open_by_keys import open_by_keys

BATCH, STEPS, SEED = 4, 6, 7
KINDS = ("native", "blend", "blocks", "megatron", "documents", "packed", "bert", "bert megatron", "t5")
GPT: dict[str, dict[str, Any]] = {
    "native": {"document_masks": True},
    "blend": {"document_masks": True},
    "blocks": {"shuffle_block": 8},
    "megatron": {"order": "megatron", "document_masks": True},
    "documents": {"kind": "document"},
    "packed": {"kind": "packed", "document_masks": True},
}


class Resumed(Sampler[int]):
    """The sample numbers of all batches of a run after the consumed ones."""

    def __init__(self, state: dict[str, int] | None = None) -> None:
        self.consumed = state["consumed"] if state else 0

    def __iter__(self) -> Iterator[int]:
        for first in range(self.consumed, BATCH * STEPS, BATCH):
            yield from global_batch(first, BATCH, seed=SEED).tolist()

    def __len__(self) -> int:
        return BATCH * STEPS - self.consumed

    def state(self, batches: int) -> dict[str, int]:
        """The state after this many batches of this sampler."""
        return {"consumed": self.consumed + batches * BATCH}


def write_corpora(folder: Path) -> None:
    """Two corpora of documents, a blend of them, and one of sentences."""
    write_pair(folder / "a", [[9]] * 30)
    write_pair(folder / "b", [[7]] * 50, tokens=np.arange(350) + 1000)
    mdata.make_blend(["1", str(folder / "a"), "2", str(folder / "b")], folder / "mix.json")
    sentences = [[(7 * d + 5 * s * s) % 19 + 1 for s in range(d * 3 % 10)] for d in range(60)]
    places = np.arange(sum(map(sum, sentences)))
    write_pair(folder / "s_text_sentence", sentences, tokens=places * places * 7 // 3 % 59, code=8)


def opened(folder: Path, name: str) -> mdata.Dataset:
    """The dataset of one of KINDS."""
    if name in GPT:
        path = folder / ("mix.json" if name == "blend" else "a")
        return open_by_keys(path, sequence_length=8, num_samples=BATCH * STEPS, **GPT[name])
    kind, _, order = name.partition(" ")
    more: dict[str, Any] = {"decoder_length": 32} if kind == "t5" else {}
    more |= {"order": order or "native", "num_samples": BATCH * STEPS, "vocabulary": make_vocabulary()}
    return open_by_keys(folder / "s_text_sentence", kind=kind, sequence_length=48, **more)


def loader_of(dataset: Any, sampler: Resumed | None = None, *, workers: int = 0, **more: Any) -> DataLoader:
    """A torch DataLoader as a user would write it."""
    chosen = Resumed() if sampler is None else sampler
    return DataLoader(dataset, batch_size=BATCH, sampler=chosen, num_workers=workers, **more)
