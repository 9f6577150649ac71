"""Datasets of each kind and a sampler that can be restored, for loops over torch's DataLoader.

The sampler is what a training loop of one's own would have: global batches as mdata deals them, and the number of
consumed samples as its only state. Batches that workers read ahead are not consumed, so the loop counts what it got.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Sampler

import mdata
from mdata.sampler import global_batch
from mdata.samples.bert import BertOptions, BertSamples
from mdata.samples.masked import MaskedSamples
from mdata.samples.t5 import T5Options, T5Samples
from tests.helpers.corpora import write_pair
from tests.helpers.masked import make_vocabulary

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


class Mapped:
    """Samples of BERT and T5 as a map from numbers to samples."""

    def __init__(self, samples: MaskedSamples) -> None:
        self.samples = samples

    def __getitem__(self, k: int) -> dict[str, np.ndarray]:
        return self.samples.sample(k)

    def __len__(self) -> int:
        return BATCH * STEPS


class Resumed(Sampler[int]):
    """The numbers of all batches of a run behind those that are consumed."""

    def __init__(self, state: dict[str, int] | None = None) -> None:
        self.consumed = state["consumed"] if state else 0

    def __iter__(self) -> Iterator[int]:
        for first in range(self.consumed, BATCH * STEPS, BATCH):
            yield from global_batch(first, BATCH, seed=SEED).tolist()

    def __len__(self) -> int:
        return BATCH * STEPS - self.consumed

    def state(self, batches: int) -> dict[str, int]:
        """After so many batches of this sampler."""
        return {"consumed": self.consumed + batches * BATCH}


def write_corpora(folder: Path) -> None:
    """Two corpora of documents, a blend of them, and one of sentences."""
    write_pair(folder / "a", [[9]] * 30)
    write_pair(folder / "b", [[7]] * 50, tokens=np.arange(350) + 1000)
    mdata.make_blend(["1", str(folder / "a"), "2", str(folder / "b")], folder / "mix.json")
    sentences = [[(7 * d + 5 * s * s) % 19 + 1 for s in range(d * 3 % 10)] for d in range(60)]
    places = np.arange(sum(map(sum, sentences)))
    write_pair(folder / "s_text_sentence", sentences, tokens=places * places * 7 // 3 % 59, code=8)


def opened(folder: Path, name: str) -> mdata.Dataset | Mapped:
    """The dataset of one of KINDS."""
    if name in GPT:
        path = folder / ("mix.json" if name == "blend" else "a")
        return mdata.open(path, sequence_length=8, num_samples=BATCH * STEPS, **GPT[name])
    corpus = mdata.open_corpus(folder / "s_text_sentence")
    shared: dict[str, Any] = {"vocabulary": make_vocabulary(), "order": "megatron" if "megatron" in name else "native"}
    if name == "t5":
        options = T5Options(encoder_length=48, decoder_length=32)
        return Mapped(T5Samples(corpus, (0, corpus.num_documents), options=options, **shared))
    return Mapped(BertSamples(corpus, (0, corpus.num_documents), options=BertOptions(sequence_length=48), **shared))


def loader_of(dataset: Any, sampler: Resumed | None = None, *, workers: int = 0, **more: Any) -> DataLoader:
    """A loader as one would write it."""
    chosen = Resumed() if sampler is None else sampler
    return DataLoader(dataset, batch_size=BATCH, sampler=chosen, num_workers=workers, **more)
