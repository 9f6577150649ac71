"""RWKVTokenizer: the vocabulary of RWKV's World models, `rwkv_vocab_v20230424.txt`.

A line is an id, a Python literal and its number of bytes: `33 ' ' 1`, or `129 b'\\x80' 1` for bytes that are no text.
From the left, the longest entry that the UTF-8 goes on with is taken (mdata_cpp/wordpiece_trie.hpp; slow twin:
tests/reference/rwkv.py). Id 0 is in no line: it ends documents, and no text can contain it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Self

from blake3 import blake3

from mdata import _core
from mdata.errors import UsageError
from mdata.tokenizers.base.helpers import (
    LARGEST_ID,
    check_engine_name,
    decode_text,
    plain_special_tokens,
    read_file,
    refuse_surrogates,
)
from mdata.tokenizers.base.tokenizer import IdArray, LengthArray, TokenizerSpec

NAME = "RWKVTokenizer"
FILE = "rwkv_vocab.txt"
END_OF_DOCUMENT, END_TEXT = 0, "<|endoftext|>"
_LINE = re.compile(r"""([0-9]{1,10}) (b?(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")) ([0-9]{1,9})""")


class RWKVTokenizer:
    """See `mdata.tokenizers.base.tokenizer.Tokenizer`."""

    name = NAME
    OPTIONS = ("special_in_text",)
    engine = "mdata"
    notes: tuple[str, ...] = ()
    eod, bos = END_OF_DOCUMENT, None

    @classmethod
    def load(cls, spec: TokenizerSpec, options: Mapping[str, Any]) -> Self:
        """See TokenizerType."""
        if spec.model is None:
            raise UsageError(f"{NAME} needs a vocabulary", fix="--tokenizer-model rwkv_vocab_v20230424.txt")
        check_engine_name(spec.engine, (cls.engine,), used_for=NAME)
        plain_special_tokens(options)  # for its check: no text can contain the only special token
        return cls(read_file(spec.model, NAME), spec.model)

    @classmethod
    def build(cls, files: Mapping[str, bytes], options: Mapping[str, Any], *, engine: str) -> Self:
        """See TokenizerType."""
        plain_special_tokens(options)
        return cls(files[FILE], FILE)

    def __init__(self, content: bytes, name: str) -> None:
        self.files: Mapping[str, bytes] = {FILE: content}
        self.options: Mapping[str, Any] = {}
        self.special_ids: Mapping[str, int] = {END_TEXT: END_OF_DOCUMENT}
        self._ids = read_vocabulary(content, name)
        self.vocab_size = max(self._ids.values()) + 1
        self._trie = _core.GreedyTrie(self._ids)

    @cached_property
    def fingerprint(self) -> str:
        """Of entries and ids, however the file writes them."""
        entries = sorted((id, token.hex()) for token, id in self._ids.items())
        return blake3(f"{NAME} {entries}".encode()).hexdigest()

    @cached_property
    def _tokens(self) -> dict[int, bytes]:
        return {END_OF_DOCUMENT: END_TEXT.encode(), **{id: token for token, id in self._ids.items()}}

    def encode_batch(self, texts: Sequence[str]) -> tuple[IdArray, LengthArray]:
        """See the protocol."""
        try:
            return self._trie.encode(list(texts))
        except UnicodeEncodeError:
            refuse_surrogates(texts)
            raise

    def special_in_text(self, ids: IdArray, num_texts: int) -> int:
        """See the protocol."""
        return 0

    def decode(self, ids: Sequence[int]) -> str:
        """See the protocol; bytes that are not UTF-8, and ids without an entry, become U+FFFD."""
        return b"".join(self._tokens.get(int(id), b"\xff") for id in ids).decode(errors="replace")


def read_vocabulary(content: bytes, name: str) -> dict[bytes, int]:
    """The entries of a vocabulary and their ids.

    Raises:
        UsageError: not such a file, an entry or id is there twice, or a byte has no entry; names the line.
    """
    ids, lines = dict[bytes, int](), dict[int, int]()
    for number, line in enumerate(decode_text(content, name).split("\n"), 1):
        if not (line := line.removesuffix("\r")):
            continue
        token, id = _entry(line, f"{name}:{number}")
        if token in ids or id in lines:
            line_before = lines[ids.get(token, id)]
            raise UsageError(f"{name}:{number}: the entry or its id is in line {line_before} already", found=line[:60])
        ids[token], lines[id] = id, number
    if missing := [byte for byte in range(256) if bytes([byte]) not in ids]:
        raise UsageError(f"{name}: byte {missing[0]} has no entry, so texts with it have no ids")
    return ids


def _entry(line: str, place: str) -> tuple[bytes, int]:
    expected = "an id, a Python literal and its number of bytes, as in: 33 ' ' 1"
    if (match := _LINE.fullmatch(line)) is None:
        raise UsageError(f"{place}: not an entry of a vocabulary", found=line[:60], expected=expected)
    try:
        literal = ast.literal_eval(match[2])
        token = literal if isinstance(literal, bytes) else literal.encode()
    except (ValueError, SyntaxError) as error:
        raise UsageError(f"{place}: not a Python literal", found=f"{match[2][:60]}: {error}") from error
    if len(token) != int(match[3]) or not token:
        raise UsageError(f"{place}: an entry of {len(token)} bytes", found=line[:60], expected=f"{match[3]} bytes")
    if not END_OF_DOCUMENT < int(match[1]) <= LARGEST_ID - 1:
        raise UsageError(f"{place}: the id {match[1]}", expected=f"1 to {LARGEST_ID - 1}; 0 ends documents")
    return token, int(match[1])
