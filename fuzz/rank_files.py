"""The readers of TikTokenizer's files: a tokenizer or a UsageError, whatever the bytes.

The first byte chooses the options, and whether the 256 bytes stand before the rest, as entries of a list or as lines.
Lines that are taken mean what tiktoken's own reader makes of them; every entry of a list is where it should be.
"""

from __future__ import annotations

import base64
import json

from fuzz.record_lines import check_message
from mdata.errors import UsageError
from mdata.tokenizers.tiktoken.tiktoken_ranks import SINGLE_BYTES, is_list, read_lines, read_list
from mdata.tokenizers.types.tiktoken import EXACT, LINES_FILE, LIST_FILE, TikTokenizer

TEXTS = ["hello he\n  lo <s></s> \xe9\u4f60", "", " 'll aaaa\x00"]
LINES = b"".join(base64.b64encode(byte) + b" %d\n" % rank for rank, byte in enumerate(SINGLE_BYTES))
ENTRIES = json.dumps(
    [
        {"rank": rank, "token_bytes": base64.b64encode(byte).decode(), "token_str": None}
        for rank, byte in enumerate(SINGLE_BYTES)
    ]
)[:-1].encode()


def check(data: bytes) -> None:
    """One file."""
    choice, content = (data[0] if data else 0), data[1:]
    if choice & 1:
        content = ENTRIES + b", " + content if choice & 2 else LINES + content
    options = {"num_special_tokens": 7, "vocab_size": 263 + (choice >> 5)}
    if not is_list(content) and choice & 4:
        del options["vocab_size"]
    try:
        ranks = read_list(content, "x") if is_list(content) else read_lines(content, "x")
        check_ranks(ranks, content)
        files = {LIST_FILE if is_list(content) else LINES_FILE: content}
        tokenizer = TikTokenizer(files, options, engine=EXACT)
    except UsageError as error:
        check_message(str(error))
        return
    ids, lengths = tokenizer.encode_batch(TEXTS)
    assert len(ids) == lengths.sum()
    # Bytes that need not be UTF-8 became pieces, and these the text again.
    assert tokenizer.decode(ids.tolist()) == "".join(TEXTS)
    assert tokenizer.special_in_text(ids, len(TEXTS)) == 2
    assert max(ids.tolist()) < tokenizer.vocab_size


def check_ranks(ranks: dict[bytes, int], content: bytes) -> None:
    """What was read is what stands there."""
    if is_list(content):
        assert list(ranks) == [base64.b64decode(entry["token_bytes"]) for entry in json.loads(content)]
        assert list(ranks.values()) == list(range(len(ranks)))
    else:
        pairs = [line.split() for line in content.split(b"\n") if line.strip()]
        assert ranks == {base64.b64decode(token): int(rank) for token, rank in pairs}
        assert len(set(ranks.values())) == len(pairs)
