"""Make benchmark corpora from the text a machine holds: English prose, code and other languages, by default 50/30/20.

    python benchmarks/text_corpus.py --out FOLDER --size 100MB --size 400MB /usr/share/doc /usr/share/man ROOT ...

Each size becomes FOLDER/SIZE.jsonl: one file a document, shuffled, shares and sizes counted in bytes of JSONL. No text
stands in it twice, because an encoder remembers words and a small text repeated would flatter it: of prose and other
languages a line of 20 characters or more is taken once in the whole corpus (what repeats on every page of a manual is
left out), and a source file is left out when more than half of it was seen. HTML loses its tags, manual pages their
requests; catalogues (.mo, .po) give their translations. Prose is told from other languages by its words, not its path.
When the roots hold too little the program says how much there is and makes nothing, or with --less the largest corpus
that keeps the shares. The same roots and seed give the same bytes. benchmarks/README.md says which packages hold text.
"""

from __future__ import annotations

import argparse
import gzip
import html
import json
import mmap
import multiprocessing
import os
import random
import re
import string
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

SHARES = {"prose": 0.5, "code": 0.3, "multilingual": 0.2}
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}

SMALLEST_CHARACTERS = 300
SAMPLE_CHARACTERS = 8000  # that tell the language
LARGEST_BYTES = 1 << 20  # of a file, unpacked; larger ones are tables and dumps more often than text
LINE_CHARACTERS = 20  # shorter lines repeat in any text ("return 0;")
READ_AT_ONCE = 1024  # files
SEEN_BITS = 34  # 2 GiB of address space, touched where lines fall: 80 million lines collide in 0.5 % of cases

CODE = {".py", ".pyx", ".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".hh"}
CATALOGUES = {".mo", ".po"}
HTML = {".html", ".htm", ".xhtml"}
TEXT = {".txt", ".md", ".rst", ".adoc", ".texi", ".docbook", ".xml", ".page", ".info", ".tex", ".pod", ".rtxt"}
# The same words in thousands of packages, or names and numbers in place of sentences.
LEFT_OUT = re.compile(r"(?i)^(copyright|licen[cs]e|copying|changelog|changes|news\.debian|authors|contributors|todo)")
ROFF = re.compile(r"\.[1-9][a-z]{0,4}(\.gz)?$")

TAGS = re.compile(r"(?is)<(script|style|head|nav)\b.*?</\1\s*>|<!--.*?-->|<[?!/a-z][^<>]*>")
BLOCKS = re.compile(r"(?i)(?=</?(?:p|div|li|tr|h[1-6]|pre|br|td|dt|dd|ul|ol|table|section|para|title)\b)")
ROFF_REQUEST = re.compile(r"(?m)^[.'](\\\"|[a-zA-Z]{1,2}\b).*$\n?")
ROFF_KEPT = re.compile(r"(?m)^\.(B|I|BR|BI|IR|RB|RI|IB|SH|SS|TP|IP|Sh|Nm|Fl|Ar|Op|It|Xr|Em)\b ?")
ROFF_ESCAPE = re.compile(r"\\(f[A-Za-z0-9]|f\[.*?\]|s[-+]?\d|[&|^/,]|\((?:en|em|bu)|\*\(..)")
ENGLISH = re.compile(r"\b(the|of|and|to|is|in|for|that|with|be|this|or|are|not|can)\b")
WORD = re.compile(r"\w+")
MSGSTR = re.compile(r'^msgstr(?:\[\d+\])? ((?:"(?:[^"\\\n]|\\.)*"\s*)+)', re.MULTILINE)
QUOTED = re.compile(r'"((?:[^"\\\n]|\\.)*)"')


def main() -> int:
    """Read the roots once, then write each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("roots", nargs="+", type=Path, help="folders to take text from")
    parser.add_argument("--out", type=Path, required=True, help="folder of the corpora")
    parser.add_argument("--size", action="append", required=True, help="such as 100MB or 4GB; may be repeated")
    parser.add_argument("--less", action="store_true", help="when there is too little text, make what can be made")
    parser.add_argument("--shares", default="50/30/20", help="per cent of prose, code, others; default 50/30/20")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    SHARES.update(zip(SHARES, (int(share) / 100 for share in arguments.shares.split("/")), strict=True))
    sizes = {name: size_bytes(name) for name in arguments.size}
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=arguments.out) as spool:
        found = collect(arguments.roots, max(sizes.values()), spool, seed=arguments.seed)
        enough = True
        for name, size in sizes.items():
            enough &= write_corpus(arguments.out / f"{name}.jsonl", size, spool, found=found, options=arguments)
    return 0 if enough or arguments.less else 1


def size_bytes(name: str) -> int:
    """Bytes of `400MB`."""
    number, unit = name[:-2], name[-2:].upper()
    if unit not in UNITS or not number.replace(".", "", 1).isdigit():
        raise SystemExit(f"size {name!r}: a number with KB, MB or GB was expected")
    return int(float(number) * UNITS[unit])


Places = dict[str, list[tuple[int, int]]]  # (start, bytes) in the spool of each document, by kind


def collect(roots: Sequence[Path], wanted: int, spool, *, seed: int) -> Places:
    """Distinct documents of the roots in a seeded order, as JSON lines in the spool, until each kind has enough."""
    files = {"code": [], "text": []}
    for path, group in candidates(roots):
        files[group].append(path)
    for group in files.values():
        random.Random(seed).shuffle(group)
    found: Places = {kind: [] for kind in SHARES}
    sums, counts, seen = Counter(), Counter(), Seen()
    for path, kind, text in documents(files, lambda kind: sums[kind] < wanted * SHARES[kind]):
        if kind is None:
            counts[text] += 1
        elif sums[kind] >= wanted * SHARES[kind]:
            counts[f"{kind} beyond need"] += 1
        elif len(text := seen.new_text(text, whole=kind == "code")) < SMALLEST_CHARACTERS:
            counts["nothing new in it"] += 1
        else:
            line = json.dumps({"text": text, "kind": kind, "source": str(path)}, ensure_ascii=False).encode() + b"\n"
            found[kind].append((spool.tell(), len(line)))
            spool.write(line)
            sums[kind] += len(line)
    for kind, places in found.items():
        print(f"{kind}: {sums[kind] / 1e6:.1f} MB of distinct text in {len(places)} documents")
    print(f"repeated text left out: {seen.repeated_characters / 1e6:.1f} million characters; files left out: {counts}")
    return found


def documents(files: dict[str, list[Path]], wanted: Callable[[str], bool]) -> Iterator[tuple[Path, str | None, str]]:
    """(path, kind, text) of the files in order, read by all cores, as long as a kind of the group is wanted."""
    with multiprocessing.get_context("spawn").Pool() as pool:
        for group, paths in files.items():
            kinds = ["code"] if group == "code" else ["prose", "multilingual"]
            for start in range(0, len(paths), READ_AT_ONCE):
                if not any(map(wanted, kinds)):
                    break
                some = paths[start : start + READ_AT_ONCE]
                answers = pool.starmap(document, [(path, group) for path in some], chunksize=16)
                yield from ((path, *answer) for path, answer in zip(some, answers, strict=True))


def candidates(roots: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    """Files that may hold text, each once, with their group: code or text."""
    for root in roots:
        for folder, folders, names in os.walk(root):
            folders.sort()
            for name in sorted(names):
                ending = Path(name.removesuffix(".gz")).suffix.lower()
                if ending in CODE:
                    yield Path(folder, name), "code"
                elif LEFT_OUT.match(name):
                    continue
                elif ending in TEXT | HTML | CATALOGUES or ROFF.search(name) or (not ending and "/doc/" in folder):
                    yield Path(folder, name), "text"


def document(path: Path, group: str) -> tuple[str | None, str]:
    """(kind, text) of a file, or (None, why it is left out)."""
    try:
        if path.is_symlink() or path.stat().st_size > LARGEST_BYTES:
            return None, "a link or too large"
        data = path.read_bytes()
        if data.startswith(b"\x1f\x8b"):
            data = gzip.decompress(data)
        if len(data) > LARGEST_BYTES:
            return None, "a link or too large"
        text = plain_text(path, data)
    except (OSError, EOFError, ValueError, LookupError, struct.error):
        return None, "unreadable or not UTF-8"
    text = text.replace("\r\n", "\n")
    if "\0" in text or len(text) < SMALLEST_CHARACTERS:
        return None, "binary or short"
    return ("code", text) if group == "code" else language(text)


def plain_text(path: Path, data: bytes) -> str:
    """The text without the marks of its format."""
    ending = Path(path.name.removesuffix(".gz")).suffix.lower()
    if ending == ".mo":
        return "\n\n".join(mo_texts(data))
    if ending == ".po":
        return "\n\n".join(po_texts(data.decode()))
    text = data.decode()
    if ending in HTML | {".xml", ".docbook", ".page"} or text[:200].lstrip().lower().startswith(("<!doctype", "<html")):
        text = html.unescape(TAGS.sub("", BLOCKS.sub("\n", text)))
        return re.sub(r"\s*\n\s*", "\n", text)
    if ROFF.search(path.name):
        text = ROFF_REQUEST.sub("", ROFF_KEPT.sub("", text))
        return ROFF_ESCAPE.sub("", text).replace("\\-", "-")
    return text


def language(text: str) -> tuple[str | None, str]:
    """English by its small words; another language by letters outside ASCII; tables and symbols are neither."""
    sample = text[:SAMPLE_CHARACTERS].lower()
    words = WORD.findall(sample)
    letters = sum(map(str.isalpha, sample))
    if letters < len(sample) / 2 or not words:
        return None, "more signs than letters"
    foreign = letters - sum(map(sample.count, string.ascii_lowercase))
    if len(ENGLISH.findall(sample)) > len(words) / 12 and foreign < letters / 20:
        return "prose", text
    return ("multilingual", text) if foreign > letters / 200 else (None, "neither English nor another language")


def mo_texts(data: bytes) -> Iterator[str]:
    """The translations of a compiled catalogue, in its own character set."""
    order = "<" if data[:4] == b"\xde\x12\x04\x95" else ">"
    count, _, table = struct.unpack(f"{order}3I", data[8:20])
    charset = "utf-8"
    for place in range(table, table + 8 * count, 8):
        size, start = struct.unpack(f"{order}2I", data[place : place + 8])
        entry = data[start : start + size].decode(charset)
        if place == table and (named := re.search(r"charset=([\w-]+)", entry)):
            charset = named[1]
        else:
            yield from entry.split("\0")


def po_texts(text: str) -> Iterator[str]:
    """The translations of a catalogue's source; its header is the first and left out."""
    for number, found in enumerate(MSGSTR.findall(text)):
        entry = "".join(QUOTED.findall(found))
        if number and entry:
            yield entry.replace("\\n", "\n").replace('\\"', '"').replace("\\t", "\t").replace("\\\\", "\\")


class Seen:
    """Which lines were taken before: one bit a line in a large bitmap, by a hash of the line without its indent."""

    def __init__(self) -> None:
        self.bits = mmap.mmap(-1, 1 << (SEEN_BITS - 3))
        self.repeated_characters = 0

    def new_text(self, text: str, *, whole: bool) -> str:
        """The lines not seen before; with `whole` all lines, or none when more than half are old."""
        kept, old, new = [], 0, 0
        for line in text.split("\n"):
            key = line.strip()
            if len(key) < LINE_CHARACTERS:
                kept.append(line)
            elif self._add(key):
                new += len(key)
                kept.append(line)
            else:
                old += len(key)
                kept += [line] if whole else []
        if new == 0 or (whole and old > new):
            self.repeated_characters += len(text)
            return ""
        self.repeated_characters += 0 if whole else old
        return re.sub(r"\n{3,}", "\n\n", "\n".join(kept))

    def _add(self, line: str) -> bool:
        """Whether the line is new; it is not afterwards."""
        place = int.from_bytes(blake2b(line.encode(), digest_size=8).digest()) >> (64 - SEEN_BITS)
        byte, bit = place >> 3, 1 << (place & 7)
        if self.bits[byte] & bit:
            return False
        self.bits[byte] |= bit
        return True


def write_corpus(path: Path, size: int, spool, *, found: Places, options: argparse.Namespace) -> bool:
    """One corpus of `size` bytes, or with --less as many as keep the shares; whether there was enough text."""
    have = {kind: sum(length for _, length in places) for kind, places in found.items()}
    possible = min(have[kind] / share for kind, share in SHARES.items() if share)
    enough = possible >= size
    if not enough:
        held = ", ".join(f"{kind} {amount / 1e6:.1f} MB" for kind, amount in have.items())
        print(f"{path.name}: only {possible / 1e6:.1f} MB can be made of distinct text ({held})")
        if not options.less:
            return False
        size = int(possible)
    chosen = []
    for kind, places in found.items():
        taken = 0
        for start, length in places:
            if taken + length > size * SHARES[kind]:
                continue
            chosen.append((start, length))
            taken += length
    random.Random(options.seed).shuffle(chosen)
    with path.open("wb") as out:
        for start, length in chosen:
            spool.seek(start)
            out.write(spool.read(length))
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB, {len(chosen)} documents")
    return enough


if __name__ == "__main__":
    sys.exit(main())
