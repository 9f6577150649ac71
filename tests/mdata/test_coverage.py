"""Every sample of an epoch once, every token as often as documented: brute force on small corpora, for each kind.

Tokens encode their positions, so that samples show what they have read. A new kind of sample is one more row of KINDS.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mdata
from mdata._core import KeyedStream
from mdata.samples.bert import BertSamples
from mdata.samples.special_tokens import MaskedVocabulary
from mdata.samples.t5 import T5Samples
from mdata.util.random_keys import derive_key
from tests.helpers.corpora import write_pair
from tests.helpers.masked import make_samples
from tests.helpers.open_by_keys import open_by_keys
from tests.reference import fim as fim_twin

BASE = 100  # the first token; smaller ids are special, and padding
P, M, S, EOD = 1, 2, 3, 4  # of fill-in-the-middle
LENGTH = 8
# Documents of sequences: empty ones at both ends and between, one longer than a row, one of a token, exact fits.
GPT = [[], [9], [5, 3], [], [1], [9, 2, 4], [16], [8], [0], [7], [2], [30], [9, 0, 3], [4], [6], [5], [0, 0]]
SENTENCES = [[3, 4, 5], [], [6], [2, 2, 2, 2, 2], [9, 1], [5, 5, 5, 5], [513, 2], [4, 0, 3], [7, 8]]


def texts(documents: list[list[int]]) -> list[list[int]]:
    """The tokens of each document."""
    ends = np.cumsum([0, *map(sum, documents)]) + BASE
    return [list(range(*ends)) for ends in pairwise(ends.tolist())]


def corpus(folder: Path, documents: list[list[int]], *, name: str = "x", ended: bool = False) -> Path:
    """Written, each token its place; or the last one of a document EOD."""
    tokens = np.arange(sum(map(sum, documents))) + BASE
    if ended:
        tokens[[text[-1] - BASE for text in texts(documents) if text]] = EOD
    write_pair(folder / name, documents, tokens=tokens)
    return folder / name


Reads = Callable[[Any, int], list[int]]


def inputs(data: mdata.Dataset, k: int) -> list[int]:
    """The tokens of a sample that have a label."""
    row = data[k]
    assert np.array_equal(row["labels"][row["loss_mask"] == 1], row["tokens"][row["loss_mask"] == 1] + 1)
    return row["tokens"][row["loss_mask"] == 1].tolist()


def fed(data: mdata.Dataset, k: int) -> list[int]:
    """The tokens of a sample that a model reads, whether they have a label or not."""
    return [token for token in data[k]["tokens"].tolist() if token >= BASE]


def whole(data: mdata.Dataset, k: int) -> list[int]:
    """All tokens of a row, the last label as well."""
    row = data.read([k]).text[0]
    return [token for token in row.tolist() if token >= BASE]


def trained(data: mdata.Dataset, k: int) -> list[int]:
    """The labels of a sample that have loss."""
    row = data[k]
    assert np.array_equal(row["labels"][row["loss_mask"] == 1], row["tokens"][row["loss_mask"] == 1] + 1)
    return row["labels"][row["loss_mask"] == 1].tolist()


def put_back(data: mdata.Dataset, k: int) -> list[int]:
    """The tokens of a row that was rearranged, what its length cut off included: its twin tells them."""
    samples, rows = data.components[0].samples, np.zeros((1, LENGTH + 1), np.int64)
    count = samples.kind.gather(np.array([k]), rows).counts[0]
    key = derive_key("fim sample v1", data.options.seed, data.corpus_ids[0])
    rule = fim_twin.Rule(prefix=P, middle=M, suffix=S, eod=EOD, rate=RATE)
    found = fim_twin.row(
        rows[0, :count].tolist(), rule, parts=fim_twin.Tokens(), draws=KeyedStream(key.low, key.high, k)
    )
    assert data[k]["tokens"].tolist() == [*found, *[0] * LENGTH][:LENGTH]
    return [token for token in found if token >= BASE]


def unmasked(samples: BertSamples | T5Samples, k: int) -> list[int]:
    """The tokens of a text, with what was masked put back."""
    sample = samples.sample(k)
    assert not sample["truncated"]
    if isinstance(samples, T5Samples):
        found = [*sample["text_enc"].tolist(), *sample["labels"].tolist()]
    else:
        found = np.where(sample["loss_mask"] == 1, sample["labels"], sample["text"]).tolist()
    return [token for token in found if token >= BASE]


@dataclass(frozen=True)
class Kind:
    """A kind of sample over a small corpus.

    Args:
        open: makes it from a folder.
        reads: the tokens of a sample.
        tokens: what an epoch can read, each once.
        skipped: how many of them an epoch leaves out at most.
        epochs: how many are read; None: what is there, read `times` times.
        times: how often the one pass reads each token.
        never: the last so many tokens are read in no epoch.
    """

    open: Callable[[Path], Any]
    reads: Reads
    tokens: Iterable[int]
    skipped: int = 0
    epochs: int | None = 30
    times: int = 1
    never: int = 0


def opened(documents: list[list[int]], *, name: str = "x", **options: Any) -> Callable[[Path], mdata.Dataset]:
    return lambda folder: open_by_keys(corpus(folder, documents, name=name), sequence_length=LENGTH, **options)


def rearranged(**options: Any) -> Callable[[Path], mdata.Dataset]:
    fim = {"fim_rate": RATE, "fim_level": "token", "fim_tokens": (P, M, S, 0, EOD), "extra_token": False}
    return lambda folder: open_by_keys(corpus(folder, GPT, ended=True), sequence_length=LENGTH, **fim, **options)


def masked(kind: type, **options: Any) -> Callable[[Path], Any]:
    ids = MaskedVocabulary(
        ids=tuple(range(2000)), cls=2, sep=3, mask=4, bos=5, eos=6, pad=0, sentinels=tuple(range(10, 60))
    )

    def make(folder: Path) -> Any:
        found = mdata.open_corpus(corpus(folder, SENTENCES, name="x_text_sentence"))
        return make_samples(kind, found, (0, found.num_documents), vocabulary=ids, **options)

    return make


def sentences(least: int) -> list[int]:
    """The tokens of documents with so many sentences, none of them too long."""
    usable = [len(sizes) >= least and (len(sizes) == 1 or max(sizes) <= 512) for sizes in SENTENCES]
    return [token for text, fits in zip(texts(SENTENCES), usable, strict=True) if fits for token in text]


ALL = [token for text in texts(GPT) for token in text]
SEQUENCES = [length for document in GPT for length in document]
HALF = ALL[sum(SEQUENCES[: len(SEQUENCES) // 2]) :]
INSIDE = (len(ALL) - 1 - LENGTH + 1) // LENGTH * LENGTH  # tokens that an epoch reads, wherever it begins
BEHIND = len(ALL) - 1 - INSIDE - (LENGTH - 1)  # what even the last offset, S - 1, does not reach
PAIRS, SINGLE = sentences(2), sentences(1)
FITTING = [token for text in texts(GPT) if 2 <= len(text) <= LENGTH + 1 for token in text]
FITTING_LABELS = [token for text in texts(GPT) if len(text) <= LENGTH + 1 for token in text[:-1]]
HAVE_LABELS = [token for text in texts(GPT) for token in text[:-1]]
CUT = [token for text in texts(GPT) for token in text[: LENGTH + 1]]
# Trained are a conversation's sequences of odd number; its first token has no label.
LABELS = [
    [token for token in range(start, stop) if turn % 2 and token > text[0]]
    for document, text in zip(GPT, texts(GPT), strict=True)
    for turn, (start, stop) in enumerate(pairwise(np.cumsum([text[0] if text else 0, *document]).tolist()))
]
TRAINED = [token for labels in LABELS for token in labels]
TRAINED_FITTING = [token for token in TRAINED if any(token in text and len(text) <= LENGTH + 1 for text in texts(GPT))]
RATE = 0.7
LAST = {text[-1] for text in texts(GPT) if text}
NOT_ENDS = [token for token in ALL if token not in LAST]
BERT: dict[str, Any] = {"sequence_length": 200, "short_probability": 0.0}
T5: dict[str, Any] = {**BERT, "decoder_length": 200}

KINDS = {
    "gpt": Kind(opened(GPT), inputs, ALL[:-1], skipped=2 * LENGTH - 2, never=BEHIND),
    "gpt without the extra token": Kind(
        opened(GPT, extra_token=False), fed, ALL, skipped=2 * LENGTH - 2, never=BEHIND + 1
    ),
    "gpt in blocks": Kind(opened(GPT, shuffle_block=4), fed, ALL, skipped=2 * LENGTH),
    "gpt, one pass": Kind(opened(GPT, split="whole"), inputs, ALL[:-1], epochs=None),
    "gpt of a part": Kind(opened(GPT, split="valid", split_shares="50,50"), inputs, HALF[:-1], epochs=None),
    "megatron, one epoch": Kind(opened(GPT, order="megatron"), fed, ALL, skipped=LENGTH, epochs=None),
    "megatron, three epochs": Kind(
        opened(GPT, order="megatron", num_samples=3 * len(ALL) // LENGTH - 1),
        fed,
        ALL,
        skipped=LENGTH,
        epochs=None,
        times=3,
    ),
    "megatron, partial kept": Kind(
        opened(GPT, order="megatron", split="valid", split_shares="0,100", keep_partial=True),
        fed,
        ALL,
        skipped=1,
        epochs=None,
    ),
    "one document, cut": Kind(opened(GPT, kind="document"), whole, CUT),
    "one document, longer left out": Kind(opened(GPT, kind="document", longer="drop"), whole, FITTING),
    "packed": Kind(opened(GPT, kind="packed"), inputs, HAVE_LABELS),
    "packed, longer left out": Kind(opened(GPT, kind="packed", longer="drop"), inputs, FITTING_LABELS),
    "packed, one pass": Kind(opened(GPT, kind="packed", split="whole"), inputs, HAVE_LABELS, epochs=None),
    "chat": Kind(opened(GPT, name="x_chat", kind="chat"), trained, TRAINED),
    "chat, longer left out": Kind(opened(GPT, name="x_chat", kind="chat", longer="drop"), trained, TRAINED_FITTING),
    "chat, one pass": Kind(opened(GPT, name="x_chat", kind="chat", split="whole"), trained, TRAINED, epochs=None),
    "fill in the middle": Kind(
        rearranged(),
        put_back,
        NOT_ENDS,
        skipped=2 * LENGTH - 2,
        never=sum(token not in LAST for token in ALL[-BEHIND - 1 :]),
    ),
    "fill in the middle, one pass": Kind(rearranged(split="whole"), put_back, NOT_ENDS, epochs=None),
    "fill in the middle, megatron": Kind(rearranged(order="megatron"), put_back, NOT_ENDS, skipped=LENGTH, epochs=None),
    "bert": Kind(masked(BertSamples, **BERT), unmasked, PAIRS),
    "bert, one pass": Kind(masked(BertSamples, **BERT, order="file"), unmasked, PAIRS, epochs=None),
    "bert, megatron": Kind(masked(BertSamples, **BERT, order="megatron"), unmasked, PAIRS, epochs=None),
    "t5": Kind(masked(T5Samples, **T5), unmasked, SINGLE),
    "t5, megatron": Kind(masked(T5Samples, **T5, order="megatron"), unmasked, SINGLE, epochs=None),
}


def per_epoch(data: Any) -> int:
    """Samples of an epoch."""
    if isinstance(data, mdata.Dataset):
        return data.components[0].samples.samples_per_epoch
    return len(data.rows)


@pytest.mark.parametrize("name", KINDS)
def test_an_epoch_reads_every_token_as_often_as_the_design_says(tmp_path, name):
    kind = KINDS[name]
    data = kind.open(tmp_path)
    tokens = Counter(kind.tokens)
    assert tokens and set(tokens.values()) == {1}
    if kind.epochs is None:
        passes = [range(data.num_samples)]
    else:
        assert data.num_samples is None
        n = per_epoch(data)
        passes = [range(epoch * n, epoch * n + n) for epoch in range(kind.epochs)]
    ever: set[int] = set()
    for numbers in passes:
        seen = Counter(token for k in numbers for token in kind.reads(data, k))
        assert set(seen) <= set(tokens), f"read besides: {sorted(set(seen) - set(tokens))[:5]}"
        assert max(seen.values()) <= kind.times, "a token more than once"
        missing = kind.times * len(tokens) - seen.total()
        assert 0 <= missing <= kind.skipped, f"{missing} tokens are missing"
        ever |= set(seen)
    if kind.epochs is not None:
        assert sorted(ever) == list(tokens)[: len(tokens) - kind.never]


def test_the_corpus_has_a_tail_that_no_offset_reaches():
    assert 0 < BEHIND < LENGTH - 1


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.epochs])
def test_another_epoch_is_another_order_of_the_same_samples(tmp_path, name):
    kind = KINDS[name]
    data = kind.open(tmp_path)
    n = per_epoch(data)
    epochs = [[tuple(sorted(kind.reads(data, k))) for k in range(epoch * n, epoch * n + n)] for epoch in range(4)]
    assert len(set(map(tuple, epochs))) == 4
