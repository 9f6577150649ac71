"""The vocabulary file of WordPiece: one entry per line; the line number (from 0) is its id.

White space at a line's end is not part of the entry (so CR LF files are fine), and only LF ends a line. An empty line
takes an id too; for a repeated entry the last line counts, which leaves a gap in the ids. A file without an entry for
unknown words, or one that is not UTF-8, is refused by name and line. `as_definition` writes the same as a
tokenizer.json, with BERT's treatment of texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mdata.errors import UsageError, counted
from mdata.tokenizers.base.helpers import decode_text

UNKNOWN, CLS, SEP = "[UNK]", "[CLS]", "[SEP]"
PREFIX = "##"
# Entries that a vocabulary lacks get the next ids in this order.
NAMED = (UNKNOWN, SEP, "[PAD]", CLS, "[MASK]")
LONGEST_WORD_CHARS = 100

# Unicode's White_Space; Python's definition also has U+001C to U+001F.
_BLANKS = "\t\n\x0b\x0c\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))


def read_vocabulary(content: bytes, name: str) -> dict[str, int]:
    """The entries of a file, in the order of their first lines.

    Raises:
        UsageError: not UTF-8 text, or no entry for unknown words.
    """
    lines = decode_text(content, name).split("\n")
    if not lines[-1]:
        del lines[-1]
    vocabulary = {line.rstrip(_BLANKS): id for id, line in enumerate(lines)}
    if UNKNOWN not in vocabulary:
        raise UsageError(
            f"{name}: no entry {UNKNOWN} for words that the vocabulary cannot spell",
            found=f"{counted(len(lines), 'line')}, the first {lines[0][:40]!r}" if lines else "an empty file",
            fix="a vocab.txt of BERT's form: one entry a line",
        )
    return vocabulary


def as_definition(vocabulary: Mapping[str, int], *, lower: bool, surrounding: tuple[int, int]) -> dict[str, Any]:
    """The same as a tokenizer.json.

    Args:
        vocabulary: entry -> id.
        lower: whether letters are lowercased and lose their accents.
        surrounding: the ids of [CLS] and [SEP], which surround every text.
    """
    parts = [_special(CLS), {"Sequence": {"id": "A", "type_id": 0}}, _special(SEP)]
    named = zip((CLS, SEP), surrounding, strict=True)
    special = {name: {"id": name, "ids": [id], "tokens": [name]} for name, id in named}
    clean = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": lower}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": {"type": "BertNormalizer", **clean},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {"type": "TemplateProcessing", "single": parts, "pair": parts, "special_tokens": special},
        "decoder": {"type": "WordPiece", "prefix": PREFIX, "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": UNKNOWN,
            "continuing_subword_prefix": PREFIX,
            "max_input_chars_per_word": LONGEST_WORD_CHARS,
            "vocab": dict(vocabulary),
        },
    }


def _special(name: str) -> dict[str, Any]:
    return {"SpecialToken": {"id": name, "type_id": 0}}
