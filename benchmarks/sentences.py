"""Speed of sentence splitting, alone and in preprocess, compared with NLTK and Megatron's tool.

    python benchmarks/sentences.py --corpus corpus/100MB.jsonl --nltk-data FOLDER [--tables rates whole] \
        [--bert vocab.txt --cache peers --megatron Megatron-LM --python312 python3.12]

`rates`: MB of text per processor second for each language and mode, one process, ours and NLTK taking turns, NLTK on
the first --nltk-megabytes; on English prose of the corpus, and for English on its code and other languages too
(records name their kind; prose is taken for English where nine in ten characters are ASCII). `whole`: --split-sentences
with BertWordPieceLowerCase on --megabytes of English prose, whole processes from a cold interpreter to the last file:
`mdata-N` with its own engines, `mdata-N-tokenizers` with the library's WordPiece, and Megatron's two passes, which its
user starts one after the other (their seconds are added). The first turn of ours warms the page cache and does not
count; hashes of .bin and .idx are compared with the first program's. Ratios hold within one run of this file only.
benchmarks/README.md tells how to make the corpus and the peers.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from measured import Measured, measure
from preprocess import ROOT, print_table, sha256
from preprocess_peers import PEERS, prepare, variables

sys.path.insert(0, str(ROOT))

NLTK = "nltk==3.10.4"
LANGUAGES = ("english", "german", "french")
# Times the wall seconds of Megatron's two passes, with the libraries and with our own engines.
BARS = {"mdata-2": 8.0, "mdata-2-tokenizers": 4.5}


def main() -> int:
    """Measure and print the tables."""
    arguments = parse()
    with tempfile.TemporaryDirectory(dir=arguments.cache) as folder:
        for name in arguments.tables:
            print(f"\n{name}: {arguments.corpus.name}", flush=True)
            print_table(rates(arguments) if name == "rates" else whole(arguments, Path(folder)))
    return 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="made by benchmarks/text_corpus.py")
    parser.add_argument("--nltk-data", type=Path, required=True, help="the folder that holds tokenizers/punkt_tab")
    parser.add_argument("--megabytes", type=float, default=10)
    parser.add_argument("--nltk-megabytes", type=float, default=2)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--tables", nargs="+", default=["rates"], choices=["rates", "whole"])
    parser.add_argument("--bert", type=Path, help="bert-uncased/vocab.txt")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cache", type=Path, help="folder of the peers' environments and of outputs")
    parser.add_argument("--megatron", type=Path, help="a checkout of Megatron-LM")
    parser.add_argument("--python312", help="the interpreter Megatron's environment is made with")
    arguments = parser.parse_args()
    if "whole" in arguments.tables and not (arguments.bert and arguments.cache):
        parser.error("`whole` needs --bert and --cache")
    for name in ("corpus", "nltk_data", "bert", "cache", "megatron"):
        path = getattr(arguments, name)
        setattr(arguments, name, path and path.resolve())
    return arguments


def texts_of(corpus: Path, kind: str, megabytes: float) -> list[str]:
    """The first texts of a kind, about that much UTF-8."""
    texts, size = [], 0.0
    with corpus.open(encoding="utf-8") as lines:
        for record in map(json.loads, lines):
            text = record["text"]
            data = text.encode()
            if record["kind"] != kind or (kind == "prose" and 10 * len(data.decode("ascii", "ignore")) < 9 * len(text)):
                continue
            texts.append(text)
            size += len(data) / 1e6
            if size >= megabytes:
                break
    return texts


def rates(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One process: ours and NLTK on each kind, language and mode."""
    subjects = [("prose", language) for language in LANGUAGES] + [("code", "english"), ("multilingual", "english")]
    loaded = {kind: texts_of(arguments.corpus, kind, arguments.megabytes) for kind in dict(subjects)}
    return [
        rate(arguments, loaded[kind], kind=kind, language=language, keep=keep)
        for kind, language in subjects
        for keep in (False, True)
    ]


def rate(arguments: argparse.Namespace, texts: list[str], *, kind: str, language: str, keep: bool) -> dict[str, Any]:
    """Both engines, in turns."""
    from mdata.sentences.splitter import build_splitter, load_splitter

    where = str(arguments.nltk_data)
    start = time.process_time()
    ours = load_splitter(language, keep_newlines=keep, nltk_data=where)
    load = time.process_time() - start
    nltk = build_splitter(ours.files, language=language, keep_newlines=keep, engine="nltk")
    few = list(beginning(texts, arguments.nltk_megabytes))
    same = ours.split_batch(few) == nltk.split_batch(few)
    found: dict[str, list[float]] = {"ours": [], "nltk": []}
    for _ in range(arguments.runs):
        for name, splitter, part in (("ours", ours, texts), ("nltk", nltk, few)):
            start = time.process_time()
            splitter.split_batch(part)
            found[name].append(sum(len(text.encode()) for text in part) / 1e6 / (time.process_time() - start))
    fast, slow = (statistics.median(found[name]) for name in ("ours", "nltk"))
    return {
        "text": kind,
        "language": language,
        "mode": "keep-newlines" if keep else "",
        f"{ours.engine} MB/CPU-s": round(fast, 1),
        "nltk MB/CPU-s": round(slow, 2),
        "times": round(fast / slow, 1),
        "load CPU-s": round(load, 3),
        "result": "same sentences" if same else "DIFFERENT",
    }


def beginning(texts: list[str], megabytes: float) -> Iterator[str]:
    """The first texts."""
    size = 0
    for text in texts:
        if size >= megabytes * 1e6:
            return
        size += len(text.encode())
        yield text


def whole(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Whole processes: ours, and Megatron's two passes."""
    corpus = folder / "prose.jsonl"
    with corpus.open("w", encoding="utf-8") as out:
        for text in texts_of(arguments.corpus, "prose", arguments.megabytes):
            out.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    count = arguments.workers
    subjects = {
        f"mdata-{count}": ours(arguments, []),
        f"mdata-{count}-tokenizers": ours(arguments, ["--engine", "tokenizers"]),
    }
    found: dict[str, list[tuple[Measured, list[str]]]] = {name: [] for name in subjects}
    for _ in range(arguments.runs + 1):
        for name, words in subjects.items():
            found[name].append(run(words, folder, corpus, passes=1))
    peer = f"megatron-{count}"
    trouble = prepare([peer], arguments.cache, megatron=arguments.megatron, python312=arguments.python312)
    if not trouble:
        found[peer] = [
            run(megatron(arguments, folder), folder, corpus, passes=2, environment=nltk_for(arguments, peer))
        ]
    hashes = found[f"mdata-{count}"][0][1]
    walls = {name: statistics.median(one.wall_s for one, _ in runs[len(runs) > 1 :]) for name, runs in found.items()}
    rows = [
        {
            "program": name,
            "wall s": round(walls[name], 2),
            "CPU s": round(statistics.median(one.cpu_s for one, _ in runs[len(runs) > 1 :]), 2),
            "times": round(walls[peer] / walls[name], 2) if peer in walls else "",
            "bar": BARS.get(name, ""),
            "others' CPU s": round(statistics.median(one.others_s for one, _ in runs), 1),
            "result": "same bytes" if all(other == hashes for _, other in runs) else "DIFFERENT",
        }
        for name, runs in found.items()
    ]
    return rows + [{"program": name, "result": reason} for name, reason in trouble.items()]


def ours(arguments: argparse.Namespace, more: list[str]) -> list[str]:
    """Our command line, but for input and output."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from cli.mdata import main; sys.exit(main())"
    words = [sys.executable, "-c", code, "preprocess", "--split-sentences", "--nltk-data", str(arguments.nltk_data)]
    words += ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", str(arguments.bert)]
    return [*words, "--workers", str(arguments.workers), *more]


def megatron(arguments: argparse.Namespace, folder: Path) -> list[str]:
    """Megatron's command line; offline it finds the model's name as a folder where it is started."""
    named = folder / "bert-large-uncased"
    named.mkdir(exist_ok=True)
    (named / "config.json").write_text('{"model_type": "bert"}\n')
    (named / "tokenizer_config.json").write_text('{"do_lower_case": true, "model_max_length": 512}\n')
    tool = arguments.megatron / "tools" / "preprocess_data.py"
    words = [str(arguments.cache / "megatron" / "bin" / "python"), str(tool), "--split-sentences"]
    words += ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", str(arguments.bert)]
    return [*words, "--workers", str(arguments.workers)]


def nltk_for(arguments: argparse.Namespace, peer: str) -> dict[str, str]:
    """NLTK in a folder of its own beside Megatron's environment, which has none; the variables that lead to it.

    With NLTK_DATA set the tool wants the pickle; without it NLTK takes punkt_tab in its place, from a home's nltk_data.
    """
    folder, home = arguments.cache / "nltk", arguments.cache / "home"
    if not (folder / "nltk").exists():
        python = str(arguments.cache / "megatron" / "bin" / "python")
        words = [python, "-m", "pip", "install", "--quiet", "--target", str(folder), NLTK]
        subprocess.run(words, check=True)
    tables = Path("tokenizers", "punkt_tab")
    shutil.copytree(arguments.nltk_data / tables, home / "nltk_data" / tables, dirs_exist_ok=True)
    found = variables(PEERS[peer]) | {"PYTHONPATH": str(folder), "HOME": str(home), "HF_HUB_OFFLINE": "1"}
    found.pop("NLTK_DATA", None)
    return found


def run(
    words: list[str], folder: Path, corpus: Path, *, passes: int, environment: dict[str, str] | None = None
) -> tuple[Measured, list[str]]:
    """One or two processes, their seconds added, and the hashes of what they wrote."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        place = Path(scratch)
        for entry in folder.iterdir():
            if entry.name == "bert-large-uncased":
                shutil.copytree(entry, place / entry.name)
        copy = place / "in.jsonl"
        shutil.copyfile(corpus, copy)
        command = [*words, "--input", str(copy), "--output-prefix", str(place / "out")]
        parts = [measure(command, place, variables=environment or dict(os.environ)) for _ in range(passes)]
        for part in parts:
            if part.code:
                raise SystemExit(f"{words[0]} failed:\n{part.output}")
        hashes = [sha256(place / f"out_text_sentence{end}") for end in (".bin", ".idx")]
    total = replace(
        parts[-1],
        wall_s=sum(part.wall_s for part in parts),
        cpu_s=sum(part.cpu_s for part in parts),
        others_s=sum(part.others_s for part in parts),
    )
    print(
        f"  {Path(words[0]).name} {' '.join(words[-2:])}: {' + '.join(f'{part.wall_s:.2f}' for part in parts)} s",
        flush=True,
    )
    return total, hashes


if __name__ == "__main__":
    sys.exit(main())
