"""One long call of each native function that releases the GIL (and one of numpy's), and a check that it does.

`python -m tests.helpers.native_calls` prints {name: whether another thread ran during the call}. A thread that waits
for the GIL requests it after the switch interval, 1,000 s here, so it runs only when another thread releases the GIL.
Between the two reads of the counter only the call itself can do that: a call that keeps the GIL is never seen to
release it, however often it is repeated. A call that releases it may take it back before the other thread is awake, so
it is tried again.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mdata import _core
from mdata.indexed.mapped_files import identity_of, pooled
from mdata.order.megatron_order import repeated

N = 300_000
TRIES = 300
Call = Callable[[], Any]
Calls = Iterator[tuple[str, Call]]


def let_go(call: Call, counter: list[int]) -> bool:
    """Whether the counting thread ran during a call; nothing else in here releases the GIL."""
    call()  # The first one may import something, which lets go.
    for _ in range(TRIES):
        before = counter[0]
        call()
        if counter[0] != before:
            return True
    return False


def count_forever(counter: list[int]) -> None:
    """Count, releasing the GIL after each step."""
    while True:
        counter[0] += 1
        time.sleep(0)


def orders() -> Calls:
    """Permutations, blends and Megatron's arrays."""
    places, ones = np.arange(N), np.ones(N, np.int64)
    permutation, tree = _core.Permutation(N, 1, 2), _core.BlendTree([3, 2, 1])
    yield "Permutation.forward", lambda: permutation.forward(places)
    yield "Permutation.inverse", lambda: permutation.inverse(places)
    yield "shuffled_range", lambda: _core.shuffled_range(5, N, 1, 2)
    components, inside = tree.locate(places)
    yield "BlendTree.locate", lambda: tree.locate(places)
    yield "BlendTree.inverse", lambda: tree.inverse(components, inside)
    generator, cards = _core.Mersenne(1), np.arange(N)
    yield "Mersenne.shuffle", lambda: generator.shuffle(cards)
    yield "Mersenne.swap_onwards", lambda: generator.swap_onwards(ones)
    numbers, shares, thirds = np.empty(N, np.int16), np.full(3, 1 / 3), np.full(3, N // 3)
    yield "fill_blend", lambda: _core.fill_blend(shares, numbers, ones)
    yield "fill_blend_once", lambda: _core.fill_blend_once(thirds, numbers, ones)
    lengths, order, rows = np.full(N, 9, np.int32), np.arange(N), np.empty(N, np.int64)
    yield "fill_sample_index", lambda: _core.fill_sample_index(lengths, order, 16, 1, 1, rows)
    yield "order.megatron.repeated", lambda: repeated(cards, 9)


def tables() -> Calls:
    """Tables of an .idx, packing and the mapping of sentences."""
    sizes, boundaries = np.full(N, 9, np.int32), np.arange(0, N + 1, 3)
    pointers, end = _core.pointers_from_lengths(sizes, 2, 0)
    yield "pointers_from_lengths", lambda: _core.pointers_from_lengths(sizes, 2, 0)
    yield "check_sequences", lambda: _core.check_sequences(sizes, pointers, 2, end, 0)
    yield "check_boundaries", lambda: _core.check_boundaries(boundaries, N, -1)
    documents = np.arange(N) % 97
    yield "pack_documents", lambda: _core.pack_documents(documents, 64, 1000)
    yield "megatron_mapping", lambda: _core.megatron_mapping(boundaries, sizes, 30, 3, 2, 1, N, 1)
    yield "keyed_mapping", lambda: _core.keyed_mapping(boundaries, sizes, 30, 3, 2, 1, 2, 0)
    records = np.column_stack((np.arange(N) // 2, np.arange(N))).astype(np.uint64)
    edges = np.column_stack((np.arange(N) // 2, np.arange(N))).astype(np.uint64)
    yield "sort_records", lambda: _core.sort_records(records)
    yield "join_groups", lambda: _core.join_groups(np.arange(N), edges)
    text = bytes(np.arange(N) % 251 // 3)
    yield "suffix_array", lambda: _core.suffix_array(text)
    yield "repeated_ranges", lambda: _core.repeated_ranges(text, np.array([N]), 50)
    yield "flatten_groups", lambda: _core.flatten_groups(np.arange(N))


def rows_of_tokens(num_sequences: int = 20_000, length: int = 16) -> Calls:
    """The batched read: its parts, and all of them in one call."""
    lengths = np.full(num_sequences, length, np.int32)
    pointers, _ = _core.pointers_from_lengths(lengths, 2, 0)
    boundaries, total = np.arange(num_sequences + 1), num_sequences * length
    store = _core.TokenStore("uint16", [(np.zeros(2 * total, np.uint8), None, total)])
    as_bytes = tuple(array.view(np.uint8) for array in (lengths, pointers, boundaries))
    index = _core.SequenceIndex(2, [(*as_bytes, total)])
    blocks = _core.BlockShuffle(index, 0, num_sequences, 64)
    rows = total // 64
    starts, counts, out = np.arange(rows - 1) * 64, np.full(rows - 1, 65), np.empty((rows - 1, 65), np.int64)
    yield "TokenStore.gather", lambda: store.gather(starts, counts, None, None, out, 0, 1)
    yield "SequenceIndex.cuts", lambda: index.cuts(starts, counts)
    spans = np.array([[first, 0, first + 4, 0] for first in range(0, num_sequences - 4, 4)]).reshape(-1)
    yield "SequenceIndex.pieces", lambda: index.pieces(boundaries[:-1], spans, 1)
    yield "SequenceIndex.documents", lambda: index.documents(boundaries[:-1])
    yield "SequenceIndex.odd_sequences", lambda: index.odd_sequences(starts, counts)
    yield "BlockShuffle.pieces", lambda: blocks.pieces(1, 2, starts, counts, 64, 1)
    rules, loss = _core.RowRules(None, 0, True, True), np.empty((rows - 1, 64), np.float32)
    positions, permutation = np.empty((rows - 1, 64), np.int64), _core.Permutation(rows - 1, 1, 2)
    yield "finish_rows", lambda: _core.finish_rows(out, counts, None, loss, positions, rules)
    samples, fields = np.arange(rows - 1), (out, loss, positions)
    yield "read_native", lambda: _core.read_native(store, index, permutation, samples, (0, 0, 65), fields, rules, 1)
    ends, places = index.cuts(np.arange(rows - 1) * 64, np.full(rows - 1, 64))
    yield "cumulative_lengths", lambda: _core.cumulative_lengths(ends, places, 64)


def masked_rows(num_rows: int = 500, length: int = 64) -> Calls:
    """Samples of BERT and T5, and rows rearranged for fill in the middle."""
    numbers, targets, ends = np.arange(num_rows), np.full(num_rows, length - 4), np.arange(2, 2 * num_rows + 1, 2)
    sizes, tokens = np.full(2 * num_rows, 25, np.int32), np.arange(50 * num_rows) % 40 + 10
    rows = _core.MaskedRows(numbers, targets, ends, sizes, tokens)
    vocabulary = _core.MaskVocabulary(2, 3, 4, np.zeros(50, np.uint8), np.arange(50))
    rule, draws = _core.MaskRule(0.15, 3, True, False, False, False), _core.KeyedDraws(1, 2)
    bert, t5 = _core.BertForm(length, True, 0, False), _core.T5Form(length, length, 5, 6, np.arange(50, 90), 0, False)
    of_bert, of_t5 = (
        [np.empty((num_rows, 1 if f in narrow else length), np.int64).reshape(-1) for f in range(7)]
        for narrow in ({3, 6}, {4})
    )
    yield "bert_samples", lambda: _core.bert_samples(bert, vocabulary, rule, draws, rows, of_bert)
    yield "t5_samples", lambda: _core.t5_samples(t5, vocabulary, rule, draws, rows, of_t5)
    fim = _core.FimRule([1, 2, 3, 0], None, [], 0.5, 0.5, 0.5)
    text, full = np.full((num_rows, 1000), 7), np.full(num_rows, 1000)
    yield "fim_rows", lambda: _core.fim_rows(fim, (1, 2), numbers, text, numbers, full, 1000, 0)


def texts() -> Calls:
    """Functions that work on texts."""
    some = ["a word. Another one, b c d e f g. " * 50] * 40
    splitter = _core.Punkt(["mr"], [], {}, [], keep_newlines=False, slice_chars=100_000)
    yield "Punkt.split", lambda: splitter.split(some, {})
    entries = {f"word{number}": number for number in range(20_000)}
    treatment = (True, True, True, True)
    make = lambda: _core.WordPiece(entries, {}, 0, "##", 100, treatment)  # noqa: E731
    yield "WordPiece.__init__", make
    words = make()
    yield "WordPiece.encode", lambda: words.encode(some, [1], [2])
    tokens = {bytes([byte]): byte for byte in range(256)} | {
        f"word{number}".encode(): number for number in range(20_000)
    }
    yield "GreedyTrie.__init__", lambda: _core.GreedyTrie(tokens)
    trie = _core.GreedyTrie(tokens)
    yield "GreedyTrie.encode", lambda: trie.encode(some)
    pieces = ["<unk>", "\N{LOWER ONE EIGHTH BLOCK}", "w", "o", "r", "d", "wo", "rd"]
    scores = -np.arange(len(pieces), dtype=np.float32)
    subwords = _core.SentencePiece(pieces, scores, bytes([2, *[1] * 7]), b"", True, False, False)
    yield "SentencePiece.encode", lambda: subwords.encode(some)
    numbers = np.arange(1, 113, dtype=np.uint64)
    signer = _core.MinHashSigner(numbers, numbers, 8, 5)
    yield "MinHashSigner.sign", lambda: signer.sign(some)
    hashes = np.arange(50_000, dtype=np.uint64)
    yield "MinHashSigner.minima", lambda: signer.minima(hashes)
    yield "MinHashSigner.ngram_sets", lambda: signer.ngram_sets(some)
    yield "word_spans", lambda: _core.word_spans("".join(some))
    yield "word_counts", lambda: _core.word_counts(some)
    yield "gopher_measures", lambda: _core.gopher_measures(some, ["the"])
    yield "repetition_measures", lambda: _core.repetition_measures(some)
    yield "fineweb_measures", lambda: _core.fineweb_measures(some, 30)
    yield "c4_lines", lambda: _core.c4_lines(some, True, True, 5, 3, 1000, True, True, True, True)
    yield "third_longest_lines", lambda: _core.third_longest_lines(some)
    yield "collapsed", lambda: _core.collapsed(some)
    index = _core.NgramIndex(some[:1], 13, 8)
    yield "NgramIndex.__init__", lambda: _core.NgramIndex(some, 13, 8)
    yield "NgramIndex.match", lambda: index.match(some)
    yield "openwebtext_words", lambda: _core.openwebtext_words("".join(some))
    yield "doubtful_lines", lambda: _core.doubtful_lines(some)


def files(folder: Path) -> Calls:
    """Functions that read files."""
    path = folder / "file"
    path.write_bytes(bytes(1 << 22))
    file, name = pooled(path, identity_of(path.stat())), bytes(path)
    yield "PooledFile.read", lambda: file.read(0, 1 << 22)
    yield "map_file", lambda: [_core.map_file(name) for _ in range(100)]
    with path.open("rb") as opened:
        slices = [(opened.fileno(), 0, 1 << 18, 0)]
        yield "RunMerger.records", lambda: _core.RunMerger(slices, 2, 1 << 16).records(1 << 18)
        yield "RunMerger.edges", lambda: _core.RunMerger(slices, 2, 1 << 16).edges(1 << 18, False)
        sets = np.full((100, 6), (opened.fileno(), 0, 1 << 16) * 2, np.uint64)
        yield "common_words", lambda: _core.common_words(sets)


def main() -> None:
    """Print the results, with a call that keeps the GIL as a control."""
    sys.setswitchinterval(1e3)
    counter = [0]
    threading.Thread(target=count_forever, args=(counter,), daemon=True).start()
    seen = {"control": let_go(lambda: sum(range(10_000)), counter)}
    with tempfile.TemporaryDirectory() as folder:
        for calls in (orders(), tables(), rows_of_tokens(), masked_rows(), texts(), files(Path(folder))):
            seen |= {name: let_go(call, counter) for name, call in calls}
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
