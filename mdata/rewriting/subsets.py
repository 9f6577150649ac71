"""`split` and `sample`: some of a corpus' documents as corpora of their own, in its order.

A split gives each part a run of documents: those whose first token lies in the part's share of all tokens. A sample
takes documents in the order of a seeded permutation until it has enough tokens, so a larger sample with the same seed
contains the smaller one. Memory holds at most a block of document numbers.

Slow twin: tests/reference/subsets.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np

from mdata.corpus.corpus import Corpus, open_corpus
from mdata.corpus.paths import check_prefix
from mdata.errors import UsageError, counted
from mdata.manifest.types import CorpusManifest
from mdata.mixing.shares import fraction_of
from mdata.order.permutation import Permutation
from mdata.preprocessing.placing import Staged
from mdata.progress import SILENT, Progress
from mdata.rewriting.taken_documents import DocumentSource, DocumentWriter, new_corpus, write_corpora
from mdata.util.arrays import Int64s
from mdata.util.random_keys import derive_key

_BLOCK = 1 << 20


def split(
    path: str | Path,
    output_prefix: str,
    *,
    shares: Sequence[str],
    names: Sequence[str] | None = None,
    progress: Progress = SILENT,
) -> dict[Path, CorpusManifest]:
    """Write runs of a corpus' documents as `{output_prefix}_{name}_{level}`.

    Args:
        path: the corpus.
        output_prefix: begins the names of the results.
        shares: of the tokens, as numbers in text, such as ["98", "1", "1"]; their sum is the whole.
        names: one for each; None: "1", "2" ...
        progress: receives the tokens written.

    Raises:
        UsageError: invalid shares or names, or other corpora with the names of results.
        DamageError: the corpus is damaged.
    """
    check_prefix(output_prefix)
    source = DocumentSource(open_corpus(path))
    weights = _weights(shares)
    called = list(names) if names is not None else [str(number) for number in range(1, len(weights) + 1)]
    if len(called) != len(weights) or len(set(called)) < len(called) or any("/" in name or not name for name in called):
        expected = f"{len(weights)} different names without a slash, one for each share"
        raise UsageError(f"names {' '.join(called)}", expected=expected)
    bounds = _bounds(source, weights)
    of = {"split_of": f"{source.corpus.id[:16]} by {','.join(shares)}", **_earlier_splits(source.corpus.manifest)}
    prefixes = [Path(f"{output_prefix}_{name}_{source.corpus.manifest.level}") for name in called]
    made_by = {prefix: {"split": f"{number}/{len(weights)}", **of} for number, prefix in enumerate(prefixes, 1)}

    def make(prefix: Path) -> Staged:
        number = prefixes.index(prefix)
        with new_corpus(source, prefix) as writer:
            for block in _blocks(bounds[number], bounds[number + 1]):
                _append(writer, block, progress)
            return writer.stage(made_by[prefix])

    return write_corpora(
        source,
        made_by,
        make=make,
        command=f"split of {source.corpus.id[:16]} by {' '.join(shares)}",
        called=f"this part of {source.corpus.name}",
        doing=f"splitting {source.corpus.name}",
        num_tokens=source.corpus.num_tokens,
        progress=progress,
    )


def sample(
    path: str | Path, output_prefix: str, *, tokens: int, seed: int = 0, progress: Progress = SILENT
) -> tuple[Path, CorpusManifest]:
    """Write a random sample of a corpus' documents, in their order, as `{output_prefix}_{level}`.

    Args:
        path: the corpus.
        output_prefix: begins the name of the result.
        tokens: at least this many; the last document drawn reaches the number.
        seed: decides which documents are drawn.
        progress: receives the tokens written.

    Raises:
        UsageError: the corpus has fewer tokens, or another one has the name of the result.
        DamageError: the corpus is damaged.
    """
    check_prefix(output_prefix)
    source = DocumentSource(open_corpus(path))
    corpus = source.corpus
    if not corpus.num_tokens:
        raise UsageError(f"{corpus.path} has no tokens, so nothing can be drawn from it")
    if not 1 <= tokens <= corpus.num_tokens:
        raise UsageError(f"tokens={tokens}", expected=f"1 to {corpus.num_tokens}, the tokens of {corpus.path}")
    permutation = Permutation(corpus.num_documents, derive_key("sample-documents", seed, corpus.id))
    result = Path(f"{output_prefix}_{corpus.manifest.level}")
    made_by = {"sample_of": corpus.id[:16], "sample_tokens": tokens, "sample_seed": seed}

    def make(prefix: Path) -> Staged:
        drawn = _drawn(source, permutation, tokens)
        with new_corpus(source, prefix) as writer:
            for block in _blocks(0, corpus.num_documents):
                _append(writer, block[permutation.inverse(block) < drawn], progress)
            return writer.stage(made_by)

    made = write_corpora(
        source,
        {result: made_by},
        make=make,
        command=f"sample of {corpus.id[:16]}, {counted(tokens, 'token')}, seed {seed}",
        called=f"this sample of {corpus.name}",
        doing=f"sampling {corpus.name}",
        num_tokens=tokens,
        progress=progress,
    )
    return result, made[result]


def _append(writer: DocumentWriter, numbers: Int64s, progress: Progress) -> None:
    for batch in writer.source.batches(numbers):
        before = writer.num_tokens
        writer.append_numbers(batch)
        progress.advance(writer.num_tokens - before)


def _earlier_splits(manifest: CorpusManifest) -> dict[str, list[list[str]]]:
    """The splits from which a corpus came, as its parts record them: [what was split and how, which part] of each."""
    options = manifest.provenance.options if manifest.provenance else {}
    if "split_of" not in options:
        return {}
    return {"earlier_splits": [*options.get("earlier_splits", ()), [options["split_of"], options["split"]]]}


def _weights(shares: Sequence[str]) -> list[Fraction]:
    try:
        weights = [fraction_of(share) for share in shares]
    except (ValueError, ZeroDivisionError):
        weights = []
    if not weights or min(weights) < 0 or sum(weights) <= 0:
        raise UsageError(
            f"shares {' '.join(shares)[:200]}", expected="numbers of 0 or more, such as 98 1 1, not all zero"
        )
    return weights


def _bounds(source: DocumentSource, weights: Sequence[Fraction]) -> list[int]:
    """The first document of each part, and one past the last: where the cumulative shares of tokens are reached."""
    corpus, before = source.corpus, Fraction(0)
    bounds = [0]
    for weight in weights[:-1]:
        before += weight
        bounds.append(max(bounds[-1], _first_document_from(corpus, -(-corpus.num_tokens * before // sum(weights)))))
    return [*bounds, corpus.num_documents]


def _first_document_from(corpus: Corpus, token: int) -> int:
    """The first document that begins at this token or later."""
    low, high = 0, corpus.num_documents
    while low < high:
        middle = (low + high) // 2
        begins = int(corpus.gatherer.documents(np.array([middle]))[0][0])
        low, high = (middle + 1, high) if begins < token else (low, middle)
    return low


def _drawn(source: DocumentSource, permutation: Permutation, tokens: int) -> int:
    """How many documents of the permuted order are needed for this many tokens."""
    missing = tokens
    for places in _blocks(0, permutation.n):
        running = np.cumsum(source.num_tokens(permutation.forward(places)))
        if running[-1] >= missing:
            return int(places[0]) + int(np.searchsorted(running, missing)) + 1
        missing -= int(running[-1])
    return permutation.n


def _blocks(first: int, stop: int) -> Iterator[Int64s]:
    for begin in range(first, stop, _BLOCK):
        yield np.arange(begin, min(begin + _BLOCK, stop))
