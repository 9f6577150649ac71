"""The readers of vocab.json and merges.txt: a tokenizer or a UsageError, whatever the bytes.

The first byte chooses the options and whether the 256 bytes are put into the vocabulary first; the next two say where
the vocabulary ends and the merges begin. A tokenizer that comes out encodes a text, is built again from its files, and
is the same.
"""

from __future__ import annotations

import json

import numpy as np

from fuzz.record_lines import check_message
from mdata.errors import UsageError
from mdata.tokenizers.base.byte_level import ALPHABET
from mdata.tokenizers.engines.libraries import EXACT
from mdata.tokenizers.types.gpt2 import MERGE_FILE, VOCAB_FILE, GPT2BPETokenizer, check_merges, check_vocabulary

TEXTS = ["hello he\n  lo <|endoftext|> \xe9\u4f60[X]", "", " 'll aaaa\x00"]
FRIENDLY = json.dumps({symbol: id for id, symbol in enumerate(ALPHABET)})[:-1].encode() + b", "


def check(data: bytes) -> None:
    """One pair of files."""
    choice, place, rest = (data[0] if data else 0), int.from_bytes(data[1:3], "little"), data[3:]
    vocabulary, merges = rest[:place], rest[place:]
    if choice & 1:
        # What follows the brace that opens the vocabulary comes after the bytes.
        vocabulary = FRIENDLY + vocabulary.lstrip()[1:]
    options = {"special_tokens": ["[X]", "lo"]} if choice & 2 else {}
    options |= {"special_in_text": "plain"} if choice & 4 else {}
    try:
        tokenizer = load(vocabulary, merges, options)
    except UsageError as error:
        check_message(str(error))
        return
    again = GPT2BPETokenizer.build(tokenizer.files, tokenizer.options, engine=EXACT)
    assert again.fingerprint == tokenizer.fingerprint
    for ours, theirs in zip(tokenizer.encode_batch(TEXTS), again.encode_batch(TEXTS), strict=True):
        assert np.array_equal(ours, theirs)
    tokenizer.special_in_text(tokenizer.encode_batch(TEXTS)[0], len(TEXTS))
    tokenizer.decode(tokenizer.encode_batch(TEXTS)[0].tolist())
    assert tokenizer.vocab_size > 0 and tokenizer.eod is not None


def load(vocabulary: bytes, merges: bytes, options: dict[str, object]) -> GPT2BPETokenizer:
    """As `GPT2BPETokenizer.load`, without a file system."""
    entries = check_vocabulary(vocabulary, "vocab.json")
    parts = (entries, check_merges(merges, entries, name="merges.txt"))
    files = {VOCAB_FILE: vocabulary, MERGE_FILE: merges}
    tokenizer = GPT2BPETokenizer(files, options, engine=EXACT, parts=parts)
    tokenizer.select_engine(EXACT)
    return tokenizer
