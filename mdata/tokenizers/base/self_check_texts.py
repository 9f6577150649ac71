"""Fixed texts for which an engine must give the exact engine's ids before it is used.

They contain what engines were seen to disagree on, or may disagree on: every kind of white space alone and in runs,
contractions and letters that lowercase to them, numbers and digits of many scripts, combining marks, joined emoji,
control characters, unassigned code points, added tokens in difficult contexts and beside each other, long runs,
concatenated vocabulary entries, and a sample of all code points.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle, product

from mdata.tokenizers.base.byte_level import to_bytes
from mdata.tokenizers.base.tokenizer_json import AddedToken
from mdata.tokenizers.base.unicode14 import unassigned

_BLANKS = (
    "\t\n\x0b\x0c\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u180e\u2000\u2007\u200a\u200b\u2028\u2029\u202f\u205f\u3000\ufeff"
)
_CONTRACTIONS = (
    "I'm you're he'll we've I'd it's don't 'S 'T 'LL 'Re 'vE 'D'M ''s 's's ' s '\u017f '\u212a x'\u017f \u2019s "
    "'ll'll'l 're're'r 've'v 'd'd'd'  'm\n'm\t's 1's $'s _'s a'b'c'd"
)
_NUMBERS = (
    "0 00 123 1234567890 1,234.5 \u0663\u0664 \u096a\u096b7 \u0e51\u0e52 \uff11\uff12 \u2160\u216b \xbd\xb2\xb9 "
    "\u4e8c\u3007 \U0001d7d8\U0001d7ff \u2460\u24ea \u0bf0\u0bf1 \U00012400 a1b2 1a 1\u0301 7\u20e3"
)
_MARKS = (
    "e\u0301 \u0301 a\u0301\u0302\u0303b \u0915\u094d\u0937\u093f \u0e01\u0e33 \u1100\u1161\u11a8 "
    "\uac00 \u05e9\u05c1 A\u030a\xc5\u212b \u0345x"
)
_EMOJI = (
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea\U0001f1eb \u2764\ufe0f\u2764\ufe0e "
    "\U0001f44d\U0001f3fd\U0001f44d x\U0001f600y \u200d\u200d \U000e0067\U000e007f"
)
_SCRIPTS = (
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002 \u3053\u3093\u306b\u3061\u306f\u30ab\u30bf\u30ab\u30ca \uc548\ub155 "
    "\u041f\u0440\u0438\u0432\u0435\u0442 \u0645\u0631\u062d\u0628\u0627\u060c "
    "\u05e9\u05dc\u05d5\u05dd \u0928\u092e\u0938\u094d\u0924\u0947 "
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \u10d2\u10d0 "
    "\u1f00\u03c3\u03c2 \u01c5\u0130\u0131\xdf \U00010400\U00010428 \U00020000\U0002fa1d"
)
_CODE = (
    'def f(x):\n    return x[-1]  # why?\n\n\n\tif (a!=b&&c->d){++i;}\r\n<a href="x">&nbsp;</a>\n  - item\n\n'
    "http://a.b/c?d=e&f=g#h  __init__ a_b CamelCase snake_case 0xFF 1e-9 ... --- === \\n \\\\ ``` '''x''' \"\"\""
)
_EDITIONS = (
    "\u08e2 \u2e48 \u166d \u180e \u1dfb \U0002b820 \U0002b91f \U0002b920 \U0002ceaf \x85 \ufffd \ue000 \U0010fffd "
    "\uf900 \ufad9 \U0002f800 \U0002fa1d \u037e \u1fef \u226e \u2260 \u2000 \u0340 \u0f73 \u0f81 \U0001f9ff"
)
_MARKS_IN_ORDER = (
    "a\u302e\u0323\u0301b a\u1dfb\u302e\u302f a\U0001d166\U0001d16d\U0001d165 \U0001d15e\U0001d16e "
    "\U0001d160\u302e\u0345\u1dfb x\u0301\u200b\u302e\u1dfb \u1bf2\u302e\u0334 \u302e\u0903\u1dfb \u302e "
    "\u4e2d\u1dfb\u302e \u1ebf\u1ec7 \u1e69\u1e9b\u0323"
)
_CASES = (
    "\u0130I\u0131 \u1e9e\xdf \u03a3\u03a3 \u01c4\u01c5\u01c6 \u1f88 \u10a0\u10d0\u1c90 \u13a0\uab70 \u212a\u212b "
    "\U00010400 \U0001e900"
)
_LONG = (
    "a",
    " ",
    "\n",
    "7",
    "!",
    "\t",
    "\u4e2d",
    "\u0301",
    "\U0001f468\u200d",
    "ab",
    "\r\n",
    " \n",
    "'s",
    " a",
    "=",
    "\xa0",
)
_MAX_ADDED = 48
_MAX_BESIDE = 24
_LONGEST_BESIDE, _LONGEST_SHARED = 256, 32  # characters: there is a text for each pair, and for each end in common
_MAX_ENTRIES = 1600


def byte_level_texts(entries: Sequence[str], added: Sequence[str]) -> list[str]:
    """The texts for byte-level BPE."""
    return [*_common(), *_glued(entries), *_around(added)]


def llama_texts(entries: Sequence[str], added: Sequence[str]) -> list[str]:
    """The texts for BPE over whole texts, in which U+2581 replaces blanks."""
    texts = [*_common(), *_around(added), *_around(["\u2581", "<0x41>"])]
    words = entries[:: max(1, len(entries) // _MAX_ENTRIES)]
    for size in (1, 2, 3):
        glued = ["".join(words[at : at + size]) for at in range(0, len(words) - size, 3)]
        texts += ["".join(glued).replace("\u2581", " "), " ".join(glued), "\n".join(glued).replace("\u2581", "")]
    return texts


def wordpiece_texts(entries: Sequence[str], added: Sequence[str]) -> list[str]:
    """The texts for WordPiece like BERT's."""
    return [*_common(), *_editions(), *_lengths(), *_glued_words(entries), *_around(added)]


def added_token_texts(tokens: Sequence[AddedToken]) -> list[str]:
    """Added tokens in white space of every kind, beside each other, and overlapping at their ends.

    Tokens that strip white space, or begin or end with it, come first: some of their characters belong to two tokens.
    """
    odd, others = list[AddedToken](), list[AddedToken]()
    for token in tokens:
        if len(token.content) <= _LONGEST_BESIDE:
            is_odd = token.lstrip or token.rstrip or token.content != token.content.strip()
            (odd if is_odd else others).append(token)
    chosen = [t.content for some in (odd, others) for t in some[:: max(1, len(some) // _MAX_BESIDE)][:_MAX_BESIDE]]
    texts = ["x".join(f"{blank}{content}{blank}{blank}" for blank in _BLANKS) for content in chosen]
    for (first, second), blank in zip(product(chosen, repeat=2), cycle(_BLANKS)):
        texts += [first + second, f"{first}{blank}{second}{blank}{first}", f"{first}{first}{second}{second}"]
        shared = range(1, min(len(first), len(second), _LONGEST_SHARED + 1))
        texts += [first + second[size:] for size in shared if first.endswith(second[:size])]
    return texts


def _common() -> list[str]:
    return ["", *_written(), *_blanks(), *_runs(), *_controls(), *_sample()]


def _editions() -> Iterator[str]:
    """Characters that Unicode 8, BERT's edition, treats differently from later ones; kept marks, in any order."""
    for text in (_EDITIONS, _MARKS_IN_ORDER, _CASES):
        yield text
        yield text.replace(" ", "")
        yield "".join(f"a{c}B {c}{c}" for c in text)


def _lengths() -> Iterator[str]:
    """Words about as long as a word may be, in characters of several kinds."""
    for length in (98, 99, 100, 101, 102, 199, 200, 201):
        for unit in ("a", "E\u0301", "\xe9", "\uac01", "\u0915", "\u302e", "\U0001d15e", "\u200bz"):
            yield f"{unit * length} b{unit * (length // 2)} {unit * (length // 3)}"


def _glued_words(entries: Sequence[str]) -> Iterator[str]:
    """Entries side by side and joined, with and without the prefix that marks a continuation."""
    words = entries[:: max(1, len(entries) // _MAX_ENTRIES)]
    bare = [word.lstrip("#") for word in words]
    for size in (1, 2, 3):
        yield " ".join("".join(bare[at : at + size]) for at in range(0, len(bare) - size, 3))
    yield " ".join(words)
    yield " ".join(f"{first.upper()}{second.title()}" for first, second in zip(bare[::2], bare[1::2], strict=False))


def _written() -> Iterator[str]:
    for text in (_CONTRACTIONS, _NUMBERS, _MARKS, _EMOJI, _SCRIPTS, _CODE):
        yield text
        yield text.upper()
        yield text.replace(" ", "")
        yield text.replace(" ", "  ") + " "


def _blanks() -> Iterator[str]:
    for blank in _BLANKS:
        yield from (blank, blank * 2, f"a{blank}b", f"a{blank}{blank}b", f" {blank}1", f"{blank} .{blank}\n")
    yield _BLANKS
    yield "x".join(_BLANKS) + " ".join(_BLANKS) + "\n".join(reversed(_BLANKS))


def _runs() -> Iterator[str]:
    for unit in _LONG:
        yield from (unit * length for length in (2, 3, 15, 16, 17, 31, 33, 300))
        yield f"x{unit * 70}y {unit * 9} z"


def _controls() -> Iterator[str]:
    yield "".join(chr(code) for code in range(0xA1))
    yield "".join(f"{chr(code)}a {chr(code)}" for code in (*range(0x20), 0x7F, 0xAD, 0x200E, 0x2060, 0xFFF9, 0xFFFD))
    yield "\x00" * 5 + "a\x00b\x7f"


def _sample() -> Iterator[str]:
    """Some of every 256 code points, each in several contexts; without newer ones, which fast engines never receive."""
    wanted = [64 * page + (37 * page + 11) % 64 for page in range(0x3400 // 64)]
    wanted += [256 * page + (37 * page + 11) % 256 for page in range(0x34, 0x320)]
    wanted += [0xE0001, 0xE01EF, 0xF0000, 0x10FFFD]
    codes = [code for code in wanted if not 0xD800 <= code < 0xE000 and not unassigned()[code]]
    for start in range(0, len(codes), 64):
        part = [chr(code) for code in codes[start : start + 64]]
        yield "".join(f"{character}a{character}{character} {character}1" for character in part)
        yield "".join(part)


def _glued(entries: Sequence[str]) -> Iterator[str]:
    """Concatenated vocabulary entries: words that need many merges, and merges that compete."""
    step = max(1, len(entries) // _MAX_ENTRIES)
    words = []
    for entry in entries[::step]:
        try:
            words.append(to_bytes(entry).decode())
        except UnicodeError:
            continue
    for size in (1, 2, 3):
        yield " ".join("".join(words[at : at + size]).strip() for at in range(0, len(words) - size, 3))


def _around(added: Sequence[str]) -> Iterator[str]:
    step = max(1, len(added) // _MAX_ADDED)
    for token in added[::step]:
        yield from (token, token * 2, f"a{token}b", f" {token} ", f"\n{token}\t\t", f"x  {token}  y", token.swapcase())
        yield from (f"{token[:-1]} {token[1:]}", f"<{token}>", f"1{token}\u0301", f"'{token}'s", f"\xa0{token}\u3000")
    yield "".join(added[:_MAX_ADDED])
    yield " ".join(reversed(added[:_MAX_ADDED]))
