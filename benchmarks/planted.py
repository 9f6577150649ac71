"""Web text with planted faults on its way to a blend: what each command of the way finds, and what it takes.

    python benchmarks/planted.py CORPUS.jsonl --out FOLDER [--gb 1]

CORPUS is one of text_corpus.py: its prose gives the words of English documents, its other languages those of foreign
ones. Of the documents 62 % are new, 20 % copies with 0.2 to 40 % of their words replaced (the rates of the oracle's
corpus), 5 % equal copies, 5 % in another language, 5 % with UTF-8 that was read as Windows-1252, and 3 % have a test
item inside, in other case and punctuation. Each row says what it is, so that the rows which reach the end are counted
by kind. Then `clean`, `dedup`, `decontaminate`, `preprocess` and `blend` run, each one command line as in
docs/howto/clean.md. Prints what is left of each kind after each command, copies by their similarity, and time and
memory; exits 1 if a planted fault is left that must be found, or a new document is lost.
"""

from __future__ import annotations

import argparse
import io
import itertools
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
import zstandard
from measured import Measured, measure
from webtext import RATES

from mdata import open_corpus

SHARES = {"new": 0.62, "near copy": 0.2, "equal copy": 0.05, "foreign": 0.05, "mojibake": 0.05, "test item": 0.03}
BANDS, ROWS, NGRAM = 14, 8, 5  # of `mdata dedup`
POOL = 20_000  # documents that copies are made of
ITEMS, ITEM_WORDS = 300, 30
MARKS = ("\u2019s", "\u201cso", "\u2014", "café", "über")  # their bytes have characters in Windows-1252
BROKEN = tuple(mark.encode().decode("cp1252") for mark in MARKS)


class Words:
    """Words as often as they occur in some texts."""

    def __init__(self, texts: list[str]) -> None:
        numbers: dict[str, int] = {}
        drawn_from = [numbers.setdefault(word, len(numbers)) for text in texts for word in text.split()]
        self.urn, self.words = np.array(drawn_from, np.int32), np.array(list(numbers), object)

    def draw(self, generator: np.random.Generator, count: int) -> np.ndarray:
        """So many words, object[count]."""
        return self.words[self.urn[generator.integers(0, len(self.urn), count)]]


def planted_rows(english: Words, foreign: list[Words], items: list[np.ndarray], *, size: float) -> Iterator[bytes]:
    """Lines of JSON until there are `size` bytes; `rate` is the share of a copy's words that are replaced."""
    generator = np.random.default_rng(1)
    kinds, shares = list(SHARES), list(SHARES.values())
    pool: list[np.ndarray] = []
    while size > 0:
        kind, rate = kinds[int(generator.choice(len(kinds), p=shares))], 0.0
        length = int(generator.integers(60, 1200))
        if kind.endswith("copy") and pool:
            words = pool[int(generator.integers(len(pool)))].copy()
            if kind == "near copy":
                rate = RATES[int(generator.integers(len(RATES)))]
                changed = generator.random(len(words)) < rate
                words[changed] = english.draw(generator, int(changed.sum()))
        elif kind == "foreign":
            words = foreign[int(generator.integers(len(foreign)))].draw(generator, length)
        else:
            kind = "new" if kind.endswith("copy") else kind
            words = english.draw(generator, length)
            if kind == "mojibake":
                words[generator.integers(0, length, 1 + length // 50)] = generator.choice(BROKEN)
            elif kind == "test item":
                item = [disguised(word, generator) for word in items[int(generator.integers(len(items)))]]
                at = int(generator.integers(length))
                words = np.concatenate((words[:at], item, words[at:]))
            elif len(pool) < POOL:
                pool.append(words)
            else:
                pool[int(generator.integers(POOL))] = words
        line = orjson.dumps({"text": " ".join(words.tolist()), "kind": kind, "rate": rate}) + b"\n"
        size -= len(line)
        yield line


def disguised(word: str, generator: np.random.Generator) -> str:
    """The same to an n-gram of `mdata decontaminate`."""
    return (word.upper(), f"({word}", f"{word},", word)[int(generator.integers(4))]


def prepare(corpus: Path, out: Path, gb: float) -> None:
    """Files of a GB at most, and the test set."""
    texts: dict[str, list[str]] = {}
    with corpus.open("rb") as lines:
        for line in lines:
            row = orjson.loads(line)
            texts.setdefault(row["kind"], []).append(row["text"])
    english = Words(texts["prose"])
    foreign = [Words([text]) for text in texts["multilingual"] if len(text.split()) >= 200]
    letters = Words([word for text in texts["prose"] for word in text.split() if re.fullmatch("[a-z]{3,}", word)])
    generator = np.random.default_rng(2)
    items = [letters.draw(generator, ITEM_WORDS) for _ in range(ITEMS)]
    (out / "items.jsonl").write_bytes(b"".join(orjson.dumps({"text": " ".join(item)}) + b"\n" for item in items))
    (out / "text").mkdir()
    rows = planted_rows(english, foreign, items, size=gb * 1e9)
    for number in itertools.count():
        size = 0
        with zstandard.open(out / f"text/{number:03}.jsonl.zst", "wb", zstandard.ZstdCompressor(1)) as file:
            for line in rows:
                file.write(line)
                size += len(line)
                if size >= 1e9:
                    break
            else:
                return


def commands(tokenizer: str) -> dict[str, str]:
    """The way, as docs/howto/clean.md has it."""
    return {
        "clean": "clean --input text --steps fix language gopher-repetition --output cleaned --compression zstd",
        "dedup": "dedup --input cleaned --output repeats --write-text",
        "decontaminate": "decontaminate --input repeats/text --against items.jsonl --mode split --output apart",
        "preprocess": f"preprocess --input apart --output-prefix fit --append-eod {tokenizer}",
        "blend": "blend fit_text_document.json -o fit.json",
    }


def rows_in(folder: Path) -> Iterator[dict[str, Any]]:
    """The rows of a folder's files."""
    for path in sorted(folder.glob("*.jsonl*")):
        with zstandard.open(path, "rb") if path.suffix == ".zst" else path.open("rb") as file:
            yield from map(orjson.loads, io.BufferedReader(file))


class Rows(NamedTuple):
    """What the rows of a folder are.

    Args:
        kinds: rows by kind. rates: near copies by the share of their words that was replaced.
        faults: a line for each row that has broken characters or a test item.
    """

    kinds: Counter[str]
    rates: Counter[float]
    faults: list[str]


def counted(rows: Iterator[dict[str, Any]], items: list[str]) -> Rows:
    """The rows by what was planted in them, and what is left of it."""
    kinds, rates, faults = Counter[str](), Counter[float](), list[str]()
    runs = {tuple(item.split()[start : start + 13]) for item in items for start in range(ITEM_WORDS - 12)}
    for row in rows:
        kinds[row["kind"]] += 1
        if row["kind"] == "near copy":
            rates[row["rate"]] += 1
        elif row["kind"] == "mojibake" and any(mark in row["text"] for mark in BROKEN):
            faults.append(f"mojibake in {row['text'][:60]!r}")
        elif row["kind"] == "test item":
            words = re.findall(r"[\w']+", row["text"].lower())
            if any(tuple(words[start : start + 13]) in runs for start in range(len(words) - 12)):
                faults.append(f"an item in {row['text'][:60]!r}")
    return Rows(kinds, rates, faults)


def main() -> int:
    """Plant, run, count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="a folder that does not exist")
    parser.add_argument("--gb", type=float, default=1)
    parser.add_argument("--tokenizer", default="--tokenizer-type ByteTokenizer", help="options of preprocess")
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True)
    prepare(arguments.corpus, out, arguments.gb)
    taken: dict[str, Measured] = {}
    for name, words in commands(arguments.tokenizer).items():
        taken[name] = measure([sys.executable, "-m", "mdata", *words.split()], out)
        if taken[name].code:
            sys.exit(f"mdata {words} ended with {taken[name].code}\n{taken[name].output}")
    folders = {"planted": "text", "clean": "cleaned", "dedup": "repeats/text", "decontaminate": "apart"}
    items = [row["text"] for row in map(orjson.loads, (out / "items.jsonl").read_bytes().splitlines())]
    stages = {name: counted(rows_in(out / folder), items) for name, folder in folders.items()}
    return report(stages, taken, documents=open_corpus(out / "fit_text_document").num_documents)


def report(stages: dict[str, Rows], taken: dict[str, Measured], *, documents: int) -> int:
    """Print the tables; 1 if a planted fault is left or a new document is lost."""
    print(f"{'rows':14}" + "".join(f"{name:>15}" for name in stages))
    for kind in SHARES:
        print(f"{kind:14}" + "".join(f"{rows.kinds[kind]:15,}" for rows in stages.values()))
    planted, cleaned, unique, last = stages.values()
    print(f"\n{'replaced':>9} {'similarity':>11} {'copies':>8} {'found':>7} {'expected':>9}")
    for rate in sorted(cleaned.rates):
        same = (1 - rate) ** NGRAM
        similarity = same / (2 - same)
        share, expected = 1 - unique.rates[rate] / cleaned.rates[rate], 1 - (1 - similarity**ROWS) ** BANDS
        print(f"{rate:9} {similarity:11.3f} {cleaned.rates[rate]:8,} {share:7.3f} {expected:9.3f}")
    print(f"\n{'command':14} {'wall s':>8} {'CPU s':>8} {'MiB':>7} {'CPU s of others':>16}")
    for name, run in taken.items():
        print(f"{name:14} {run.wall_s:8.1f} {run.cpu_s:8.1f} {run.rss_bytes / 2**20:7.0f} {run.others_s:16.1f}")
    wrong = last.faults[:5]
    if cleaned.kinds["foreign"] > 0.02 * planted.kinds["foreign"]:
        wrong.append(f"{cleaned.kinds['foreign']} foreign documents of {planted.kinds['foreign']} stayed")
    if unique.kinds["equal copy"]:
        wrong.append(f"{unique.kinds['equal copy']} equal copies stayed")
    if not 0.99 * planted.kinds["new"] <= unique.kinds["new"] == cleaned.kinds["new"]:
        wrong.append(f"of {planted.kinds['new']} new documents {unique.kinds['new']} stayed")
    if any(last.kinds[kind] != unique.kinds[kind] for kind in ("new", "mojibake")):
        wrong.append("decontaminate took documents without an item")
    if documents != last.kinds.total():
        wrong.append(f"{last.kinds.total()} rows became {documents} documents")
    print(*wrong, sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
