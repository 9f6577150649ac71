"""A vocab.txt and a text: refused by name and line, or read as the library reads it; the same ids by either engine.

The input is the file, two bytes 00, and the text. The first byte chooses the type.
"""

from __future__ import annotations

from tokenizers.models import WordPiece

from fuzz.harness import scratch
from fuzz.record_lines import check_message
from mdata.errors import UsageError
from mdata.tokenizers.registry import build_tokenizer
from mdata.tokenizers.types.wordpiece import CASE, LOWER, VOCAB_FILE
from mdata.tokenizers.types.wordpiece_vocab import UNKNOWN, read_vocabulary

MOST_TEXT = 400


def check(data: bytes) -> None:
    """One file and a text."""
    content, _, rest = data[1:].partition(b"\0\0")
    path = scratch() / "x.txt"
    path.write_bytes(content)
    try:
        vocabulary = read_vocabulary(content, "x.txt")
    except UsageError as error:
        check_message(str(error))
        assert str(error).startswith("x.txt:"), str(error)
        assert library_entries(str(path)).get(UNKNOWN) is None, "the library takes it"
        return
    assert vocabulary == library_entries(str(path))
    text = rest.decode("utf-8", "replace")[:MOST_TEXT]
    texts = [text, " ".join(vocabulary)[:MOST_TEXT], "".join(vocabulary)[:MOST_TEXT], ""]
    name = CASE if data[:1] > b"\x7f" else LOWER
    try:
        exact, ours = (
            build_tokenizer(name, {VOCAB_FILE: content}, engine=engine) for engine in ("tokenizers", "mdata")
        )
    except UsageError as error:
        check_message(str(error))
        assert "would get an id that is taken" in str(error), str(error)
        return
    assert exact.vocab_size == ours.vocab_size and exact.fingerprint == ours.fingerprint
    for mine, theirs in zip(ours.encode_batch(texts), exact.encode_batch(texts), strict=True):
        assert mine.tolist() == theirs.tolist(), texts


def library_entries(path: str) -> dict[str, int]:
    """What the library reads; nothing where it refuses."""
    try:
        return dict(WordPiece.read_file(path))
    # It raises bare Exception.
    except Exception:
        return {}
