"""Perplexity of corpora: each corpus of a blend, each of its groups, and all together, per token and per byte.

Each document is scored alone, beginning with the begin-of-text id (or that of a document's end), in adjacent windows
that predict each token once. Bits per byte do not depend on the tokenizer: use them to compare models. The shares of a
blend are not used: all of its documents are read once, or the first of each corpus.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mdata
from mdata import UsageError
from mdata.progress import SILENT, Progress
from trainer.tasks.score import ScoredSpan, Scorer, row_length

CHUNK = 4096  # windows that are in memory


@dataclass(slots=True)
class Sums:
    """Counts and sums of scored documents.

    Attributes:
        nats: the sum of -log p. bytes: of the documents' texts in UTF-8.
    """

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    nats: float = 0.0

    def add(self, other: Sums) -> None:
        """Add another's counts and sums."""
        self.documents += other.documents
        self.tokens += other.tokens
        self.bytes += other.bytes
        self.nats += other.nats

    def facts(self) -> dict[str, Any]:
        """The sums and derived numbers; None where nothing was scored."""
        loss = self.nats / self.tokens if self.tokens else None
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "loss": loss,
            "ppl": None if loss is None else math.exp(min(loss, 700.0)),
            "bits_per_byte": self.nats / math.log(2) / self.bytes if self.bytes else None,
        }


def document_spans(ids: Sequence[int], *, begin: int, context: int) -> list[ScoredSpan]:
    """The windows of one document: each token is predicted once, the first from `begin`."""
    row = [begin, *ids]
    return [ScoredSpan(row[start : start + context + 1], 1) for start in range(0, len(row) - 1, context)]


def perplexity(
    model: Scorer,
    data: str | Sequence[str],
    *,
    max_documents: int | None = None,
    sequence_length: int | None = None,
    batch_size: int = 8,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Loss, perplexity and bits per byte of a corpus or blend, as `mdata.open_blend` names it.

    A model without a tokenizer gets that of each corpus.

    Args:
        max_documents: of each corpus, from its first; None: all.
        sequence_length: tokens of a window; None: the model's context.

    Raises:
        UsageError: there is no such data, or it does not belong to the model's tokenizer.
    """
    length = row_length(model, sequence_length)
    if max_documents is not None and max_documents < 1:
        raise UsageError(f"--max-documents {max_documents} is below 1")
    blend = mdata.open_blend(data, evaluation=True)
    corpora, groups, total = dict[str, Any](), dict[str, Sums](), Sums()
    for part, corpus in zip(blend.manifest.components, blend.corpora, strict=True):
        _check_ids(model, corpus)
        spoken = model.tokenizer or corpus.load_tokenizer()
        count = min(corpus.num_documents, max_documents or corpus.num_documents)
        documents = (corpus.document(number).tolist() for number in range(count))
        sums = _scored(model, documents, spoken, length=length, batch_size=batch_size, progress=progress)
        corpora[part.name] = {"group": part.group, **sums.facts()}
        total.add(sums)
        if part.group is not None:
            groups.setdefault(part.group, Sums()).add(sums)
    return {
        "task": "perplexity",
        "sequence_length": length,
        "corpora": corpora,
        "groups": {name: sums.facts() for name, sums in groups.items()},
        "total": total.facts(),
    }


def perplexity_text(facts: dict[str, Any]) -> str:
    """A line for each corpus, each group and the total."""
    rows = [*facts["corpora"].items(), *((f"[{name}]", scores) for name, scores in facts["groups"].items())]
    lines = []
    for name, scores in [*rows, ("total", facts["total"])]:
        if scores["loss"] is None:
            lines.append(f"{name}: no tokens")
            continue
        per_byte = "" if scores["bits_per_byte"] is None else f" | bits per byte {scores['bits_per_byte']:.4f}"
        lines.append(
            f"{name}: loss {scores['loss']:.4f} | ppl {scores['ppl']:.3f}{per_byte} | {scores['tokens']:,} tokens"
        )
    return "\n".join(lines)


def _scored(
    model: Scorer,
    documents: Iterable[list[int]],
    spoken: mdata.Tokenizer | None,
    *,
    length: int,
    batch_size: int,
    progress: Progress,
) -> Sums:
    own = () if spoken is None else (spoken.eod,)
    ends = model.ends or {token for token in own if token is not None}
    first = model.bos if model.bos is not None or spoken is None else spoken.bos
    begin = first if first is not None else min(ends, default=None)
    if begin is None:
        raise UsageError(f"{model.name} has no token that begins a text", fix="a tokenizer with one")
    sums = Sums()
    for chunk in _chunks(documents, length):
        spans = [span for ids in chunk for span in document_spans(_begun(ids, begin), begin=begin, context=length)]
        scores = model.score_spans(spans, batch_size=batch_size, greedy=False, progress=progress)
        sums.documents += len(chunk)
        sums.tokens += sum(len(span.ids) - span.first for span in spans)
        sums.nats -= math.fsum(score.log_prob for score in scores)
        if spoken is not None:
            texts = (spoken.decode([token for token in ids if token not in ends]) for ids in chunk)
            sums.bytes += sum(len(text.encode(errors="replace")) for text in texts)
    return sums


def _begun(ids: list[int], begin: int) -> list[int]:
    """The document without its own begin-of-text id, which is not predicted."""
    return ids[1:] if len(ids) > 1 and ids[0] == begin else ids


def _chunks(documents: Iterable[list[int]], length: int) -> Iterator[list[list[int]]]:
    chunk, windows = list[list[int]](), 0
    for ids in documents:
        chunk.append(ids)
        windows += len(ids) // length + 1
        if windows >= CHUNK:
            yield chunk
            chunk, windows = [], 0
    if chunk:
        yield chunk


def _check_ids(model: Scorer, corpus: mdata.Corpus) -> None:
    """Check that the ids are those of the model's tokenizer."""
    largest, ours = corpus.largest_id, model.tokenizer
    if largest is not None and largest >= model.rows:
        raise UsageError(
            f"{corpus.name} has ids that {model.name} does not have",
            found=f"id {largest}",
            expected=f"0 to {model.rows - 1}",
            fix="give data that was made with the tokenizer of the model",
        )
    theirs = corpus.load_tokenizer()
    if ours is None or theirs is None or ours.fingerprint == theirs.fingerprint:
        return
    text = "The year is 1969."
    ids = theirs.encode_batch([text])[0].tolist()
    if max(ids, default=0) >= model.rows or ours.decode(ids).strip() != theirs.decode(ids).strip():
        raise UsageError(
            f"{corpus.name} was made with another tokenizer than that of {model.name}",
            found=f"{theirs.name} in the corpus, {ours.name} in the model: other ids of one text",
            fix="preprocess the texts with the tokenizer of the model",
        )
