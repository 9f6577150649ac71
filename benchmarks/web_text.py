"""How fast is web text cleaned and decontaminated, beside ftfy and datatrove?

    python benchmarks/web_text.py TEXT.jsonl --peers PYTHON

TEXT.jsonl has a "text" in each row, such as a corpus of text_corpus.py. PYTHON is that of an environment with
datatrove[processing]==0.10.1, spacy and ftfy, and is run on the same texts. Rates are MB of UTF-8 for each CPU second
of one process; "end to end" includes reading and writing files. Test items are drawn from random words.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from mdata import _core
from mdata.cleaning import rules
from mdata.cleaning.clean import CleanRules, clean
from mdata.cleaning.decontaminate import DecontaminateRules, decontaminate
from mdata.cleaning.text_job import TextJobOptions
from mdata.cleaning.text_repair import fixed

ROUNDS = 3
FILTERS = ("gopher-repetition", "gopher", "c4", "fineweb")
PEER = """
import json, sys, time
texts = [json.loads(line)["text"] for line in open(sys.argv[1], encoding="utf-8")]
size = sum(len(text.encode()) for text in texts) / 1e6
def rate(name, work):
    begun = time.process_time()
    for text in texts:
        work(text)
    print(json.dumps([name, size / (time.process_time() - begun)]), flush=True)
import ftfy
rate("ftfy", ftfy.fix_text)
from datatrove.data import Document
from datatrove.pipeline import filters
for name, filter in (
    ("gopher-repetition", filters.GopherRepetitionFilter()), ("gopher", filters.GopherQualityFilter()),
    ("c4", filters.C4QualityFilter()), ("fineweb", filters.FineWebQualityFilter()),
):
    filter.filter(Document(text="A text. " * 9, id="0"))
    rate(f"datatrove {name}", lambda text: filter.filter(Document(text=text, id="0")))
"""


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--peers", metavar="PYTHON", help="the Python of an environment with datatrove, spacy and ftfy")
    parser.add_argument("--items", type=int, default=20_000, help="test items of 60 words (default: 20000)")
    parser.add_argument("--peer-mb", type=float, default=2, help="MB of text that peers get (default: 2)")
    arguments = parser.parse_args()
    texts = [json.loads(line)["text"] for line in arguments.text.read_text(encoding="utf-8").splitlines()]
    size = sum(len(text.encode()) for text in texts) / 1e6
    print(f"{size:.1f} MB in {len(texts):,} texts; MB of text for each CPU second of one process")

    def show(name: str, work: Callable[[], object]) -> None:
        best = min(_seconds(work) for _ in range(ROUNDS))
        print(f"{name:<32} {size / best:8.1f}", flush=True)

    show("fix", lambda: fixed(texts))
    show("gopher-repetition", lambda: rules.repetition_reasons(texts, rules.RepetitionRules()))
    show("gopher", lambda: rules.gopher_reasons(texts, rules.GopherRules()))
    show("c4", lambda: rules.c4_texts(texts, rules.C4Rules()))
    show("fineweb", lambda: rules.fineweb_reasons(texts, rules.FineWebRules()))
    draws = random.Random(1)
    words = ["".join(draws.choices("abcdefghij", k=6)) for _ in range(20_000)]
    items = [" ".join(draws.choices(words, k=60)) for _ in range(arguments.items)]
    items += [" ".join(draws.choices(words, k=count)) for count in range(8, 13)]
    index = _core.NgramIndex(items, 13, 8)
    show(f"n-grams of {len(items):,} items", lambda: index.match(texts))
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        (folder / "eval.jsonl").write_text("".join(json.dumps({"text": item}) + "\n" for item in items))
        numbers = iter(range(1000))

        def options() -> TextJobOptions:
            return TextJobOptions(input=arguments.text, output=folder / str(next(numbers)), workers=1, on_error="skip")

        show("all filters, end to end", lambda: clean(options(), CleanRules(steps=FILTERS)))
        against = DecontaminateRules(against=(str(folder / "eval.jsonl"),))
        show("decontaminate, end to end", lambda: decontaminate(options(), against))
        if arguments.peers:
            _show_peers(texts, arguments.peer_mb, arguments.peers, folder)
    return 0


def _seconds(work: Callable[[], object]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun


def _show_peers(texts: list[str], most_mb: float, python: str, folder: Path) -> None:
    some, size = [], 0
    for text in texts:
        if size > most_mb * 1e6:
            break
        some.append(text)
        size += len(text.encode())
    (folder / "some.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in some))
    with subprocess.Popen([python, "-c", PEER, str(folder / "some.jsonl")], stdout=subprocess.PIPE, text=True) as peer:
        assert peer.stdout is not None, "a pipe"
        for line in peer.stdout:
            if line.startswith("["):
                name, rate = json.loads(line)
                print(f"{name:<32} {rate:8.2f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
