"""The first inputs of the fuzz targets that read tokenizers' files and split text; fuzz/seeds.py writes them."""

from __future__ import annotations

import json
import struct


def sentencepiece_model() -> dict[str, bytes]:
    """A file of nine pieces, raw, built, and with bytes replaced."""
    from fuzz.sentencepiece_model import GOOD as good
    from fuzz.sentencepiece_model import built

    seeds = {
        "raw": b"\0" + built(good),
        "built": b"\2" + good,
        "empty": b"\0",
        "changed": b"\1\0\0\0\0\5\0\7",
    }
    return seeds | {f"built-{kind}": b"\2" + good[:5] + bytes([kind]) + good[6:] for kind in range(7)}


SENTENCES = (
    'One. Two? (Three!) "Four." -- Five... a?b e.g. St. Then A. Bach, 3. of 1,5. x-mr. He\n\nMr. Six.) -- "Seven!" '
)


def punkt_split() -> dict[str, bytes]:
    """Prose and all bytes, in each mode, as they are and as numbers of awkward characters."""
    seeds = {f"prose-{choice}": bytes([choice]) + SENTENCES.encode() for choice in (0, 1)}
    return seeds | {f"bytes-{choice}": bytes([choice, *range(0, 256, 1 + choice)]) for choice in range(8)}


def punkt_tables() -> dict[str, bytes]:
    """Sound tables, and one file at fault in each of the others."""
    sound = [
        b"mr\nst\ne.g\n. . \n\xce\xbf\xcf\x82",
        b"st\tthen\n##number##\tof",
        b"then\t34\nof\t96\nbach\t4\n",
        b"he\nit",
    ]
    text = SENTENCES.encode() + "\u039f\u03a3. \u201cit\u201d \U0001fae8. \u0130.\xa0x".encode()
    changes = (
        (0, b"a\r\n"),
        (0, b"a\n\nb"),
        (1, b"a\tb\tc"),
        (2, b"a\t1x"),
        (2, b"a\t200"),
        (3, b"\xff"),
        (0, b"a\xe2\x80\xa8"),
    )
    seeds = {"sound": b"\0".join([*sound, text]), "empty": b"", "no-tables": b"\0" * 4 + text}
    for number, (at, content) in enumerate(changes):
        seeds[f"fault-{number}"] = b"\0".join([*sound[:at], content, *sound[at + 1 :], text])
    return seeds


def gpt2_files() -> dict[str, bytes]:
    """Pairs, alone and behind the 256 bytes: choice, length of the vocabulary, vocabulary, merges."""
    pairs = {
        "good": (b'{"he": 256, "ll": 257, "hell": 258, "<|endoftext|>": 259}', b"#version: 0.2\nh e\nl l\nhe ll\n"),
        "plain": (b'{"he": 300, "ll": 256}', b"h e\r\nl l"),
        "wrong": (b'{"he": 256,\n "x": -1, "y": 1.5, "he": 257}', b"h e\nh  e\nx\n\xff e\n"),
        "gap": (b'{"ll": 0, "lo": 9999, "[X]": 5}', b"l l\nl l\n#version: l\n"),
    }
    return {
        f"{name}-{choice}": bytes([choice]) + struct.pack("<H", len(vocabulary)) + vocabulary + merges
        for name, (vocabulary, merges) in pairs.items()
        for choice in (0, 1, 3, 5)
    }


def rank_files() -> dict[str, bytes]:
    """Entries and lines behind the 256 bytes, good and bad, and files without these."""
    first = b'{"rank": 256, "token_bytes": "aGU=", "token_str": "he"}, '
    listed = first + b'{"rank": 257, "token_bytes": "bGw=", "token_str": null}]'
    lines = b"aGU= 256\nbGw= 257\r\n\n/w0= 300\n"
    return {
        "list": b"\x43" + listed,
        "list-small": b"\x03" + listed,
        "list-wrong": b"\x43" + listed.replace(b"257", b"300").replace(b"aGU=", b"aGU"),
        "lines": b"\x45" + lines,
        "lines-cut": b"\x41" + lines,
        "lines-wrong": b"\x05" + lines + b"aGU= 301\n%% 5\nYQ== x\n",
        "raw-list": b"\0[" + listed,
        "raw-lines": b"\4" + lines,
    }


def tokenizer_json() -> dict[str, bytes]:
    """Each kind of definition as it is, with some parts exchanged, and raw."""
    from fuzz.tokenizer_json import BASES

    exchanges = {"none": b"", "one": b"\x31\x07\x05", "three": b"\x54\x11\x19\x06\x02\x24\x4a\x90\x0e"}
    seeds = {
        f"{number}-{name}": bytes([number << 1 | 128]) + edits
        for number in range(len(BASES))
        for name, edits in exchanges.items()
    }
    small = [(number, json.dumps(base)) for number, base in enumerate(BASES) if len(json.dumps(base)) < 2000]
    tokens = b'"eos_token": {"content": "</s>"}, "added_tokens_decoder": {"9": {"content": "<x>"}}'
    config = b'\0{"tokenizer_class": "LlamaTokenizer", ' + tokens + b"}"
    return seeds | {f"raw-{number}": b"\1" + text.encode() + config for number, text in small}


def sentencepiece_bpe() -> dict[str, bytes]:
    """A few pieces with and without bytes to fall back on, rules of normalization, blanks and other letters."""
    pieces = b"\x00a\x00b\x00_\x11ab\x21_a\xe2<x>"
    text = "ab  a\u2581b<x>\u00e9\u4e2d\U0001f600 aab \u2581 ".encode()
    rules = bytes([1, 0x08, 0x61, 0x09, 0x62, 0x06, 0x00, 0x80]) * 2 + b"xy\0z\0\0\0\0"
    seeds = {f"flags-{flags}": bytes([flags, 6, 0]) + pieces + text for flags in range(16)}
    return seeds | {f"rules-{flags}": bytes([flags, 6, 7]) + pieces + rules + text for flags in range(16, 32, 3)}


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "a", "##a", "##b", "ab", "caf\u00e9", "\u4e2d", "!", "#"]
WORDPIECE_TEXT = (
    "The cab! [CLS]caf\u00e9 Ab\u0301a\u302e\u1bf2 \u4e2d\uac01 \u0378 <extra_id_7>\x00\u1f80\u0130#".encode()
)


def wordpiece() -> dict[str, bytes]:
    """A small vocabulary with every treatment and prefix; each fourth entry is an added token."""
    parts = b"\xff".join([*(word.encode() for word in WORDS), b"[CLS", b"\xc3", WORDPIECE_TEXT])
    seeds = {f"words-{choice}": bytes([choice, 100 if choice % 3 else 3]) + parts for choice in range(0, 64, 5)}
    return seeds | {"bytes": bytes([15, 9, *range(255, -1, -1)]), "empty": b"\x0f\x09"}


def wordpiece_vocabulary() -> dict[str, bytes]:
    """Good files, odd ones, and ones that are refused."""
    good = "\n".join(WORDS).encode()
    files = {
        "good": good + b"\n",
        "crlf": good.replace(b"\n", b"\r\n"),
        "blank": good.replace(b"a\n", b"\n", 1),
        "twice": good + b"\na",
        "spaces": good.replace(b"\n", b"\xe3\x80\x80\t\n"),
        "mark": b"\xef\xbb\xbf" + good,
        "no-unknown": good.replace(b"[UNK]", b"[unk]"),
        "few": b"the\n[UNK]",
        "no-text": good + b"\n\xe9",
        "empty": b"",
    }
    return {
        f"{name}-{kind}": bytes([kind]) + file + b"\0\0" + WORDPIECE_TEXT
        for name, file in files.items()
        for kind in (0, 255)
    }
