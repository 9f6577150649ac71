"""Speed and memory of `mdata preprocess`, compared with the programs that one would use instead.

    python benchmarks/preprocess.py --vocab FOLDER --cache FOLDER [--megatron CHECKOUT] --corpus FILE [FILE ...]

Every run is a whole process from a cold interpreter to the last file, GPT-2's vocabulary, --append-eod. All programs
take turns, so that a busy moment of the machine meets each of them; times are medians. The first turn warms the page
cache and samples PSS, and its times do not count; slow peers have --slow-runs turns, which do. After each run the
hashes of .bin and .idx are compared with ours. Tables: `whole` (all programs), `start` (a corpus of one line),
`engines` (each engine alone in memory against our run with it), `scaling` (--workers beside the engine's own scaling
with as many processes, and beside one worker while the other cores do something else). Ratios hold within one run of
this file only. benchmarks/README.md tells how to prepare.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from busy_cores import busy_cores
from engines_alone import ENGINES
from engines_alone import command as alone_command
from measured import machine, measure
from preprocess_peers import PEERS, Job, prepare, variables

ROOT = Path(__file__).resolve().parents[1]
BARS = {
    "wall against byhand-2": 1.3,
    "RSS MB": 1300.0,
    "CPU a MB, 2 workers against 1": 1.1,
    "start-up s": 1.5,
    "of the engine's own rate": 0.95,
    "efficiency": 0.8,
}


def main() -> int:
    """Measure what was asked for, print the tables, write the JSON."""
    arguments = parse()
    bench = Bench(arguments)
    tables: dict[str, Any] = {}
    for corpus in arguments.corpus:
        for name in arguments.tables:
            print(f"\n{name}: {corpus.name}, {corpus.stat().st_size / 1e6:.1f} MB", flush=True)
            rows, bars = getattr(bench, name)(corpus)
            print_table(rows)
            for bar in bars:
                print(bar)
            tables[f"{name} {corpus.name}"] = {"rows": rows, "bars": bars}
    if arguments.json:
        facts = {"machine": machine(), "options": sys.argv[1:], "tables": tables, "runs": bench.runs}
        arguments.json.write_text(json.dumps(facts, indent=1) + "\n")
    return 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", nargs="+", type=Path, required=True, help="made by benchmarks/text_corpus.py")
    parser.add_argument("--vocab", type=Path, required=True, help="folder of GPT-2's vocab.json and merges.txt")
    parser.add_argument("--cache", type=Path, required=True, help="folder of the peers' environments and of outputs")
    parser.add_argument("--megatron", type=Path, help="a checkout of Megatron-LM")
    parser.add_argument("--python312", help="the interpreter Megatron's environment is made with")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2], help="of ours; default 1 2")
    parser.add_argument("--engine", help="passed to ours in whole, start and scaling; default: its own choice")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=["tiktoken", "tokenizers"])
    parser.add_argument("--engine-mb", type=float, default=20, help="beginning of the corpus that `engines` takes")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--slow-runs", type=int, default=1, help="of Megatron's and datatrove's ordinary tools")
    parser.add_argument("--tables", nargs="+", default=["whole"], choices=["whole", "start", "engines", "scaling"])
    parser.add_argument("--json", type=Path, help="write all runs and tables there")
    arguments = parser.parse_args()
    arguments.cache = arguments.cache.resolve()
    arguments.corpus = [corpus.resolve() for corpus in arguments.corpus]
    return arguments


class Bench:
    """Runs commands in turns and keeps what each took."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.options = arguments
        self.runs: list[dict[str, Any]] = []
        self.pss_hz = 0.0
        self.vocab = arguments.vocab.resolve()
        megatron = arguments.megatron and arguments.megatron.resolve()
        self.megatron = megatron
        needed = arguments.peers if "whole" in arguments.tables else []
        self.trouble = prepare(needed, arguments.cache, megatron=megatron, python312=arguments.python312)

    def whole(self, corpus: Path) -> tuple[list[dict[str, Any]], list[str]]:
        """Ours and the peers on one corpus."""
        peers = [name for name in self.options.peers if name not in self.trouble]
        subjects = {f"mdata-{n}": False for n in self.options.workers} | {name: PEERS[name].slow for name in peers}
        found = self.take_turns(subjects, lambda name: self.run(name, corpus))
        rows = [self.row(name, found[name], corpus, found) for name in subjects]
        rows += [{"program": name, "result": reason} for name, reason in self.trouble.items()]
        return rows, list(whole_bars(found))

    def start(self, corpus: Path) -> tuple[list[dict[str, Any]], list[str]]:
        """Start-up: everything but the text."""
        with corpus.open("rb") as lines, tempfile.TemporaryDirectory(dir=self.options.cache) as folder:
            line = Path(folder, "line.jsonl")
            line.write_bytes(lines.readline())
            subjects = {f"mdata-{n}": False for n in self.options.workers}
            found = self.take_turns(subjects, lambda name: self.run(name, line))
            rows = [self.row(name, found[name], line, found) for name in subjects]
        return rows, [bar("start-up s", wall(found[name]), "at most", f"{name}: ") for name in subjects]

    def engines(self, corpus: Path) -> tuple[list[dict[str, Any]], list[str]]:
        """Each engine alone in memory, and our whole run with it less its start-up, on the beginning of a corpus."""
        rows: list[dict[str, Any]] = []
        bars: list[str] = []
        with tempfile.TemporaryDirectory(dir=self.options.cache) as folder:
            part, line = beginning(corpus, Path(folder), int(self.options.engine_mb * 1e6))
            for engine in self.options.engines:
                found = self.take_turns(
                    dict.fromkeys(("alone-1", "start", "mdata-1", "mdata-2"), False),
                    lambda name, engine=engine: self.run_engine(name, engine, line if name == "start" else part),
                )
                alone = statistics.median(run["rate"] for run in found["alone-1"])
                size = part.stat().st_size / 1e6
                ours = size / (wall(found["mdata-1"]) - wall(found["start"]))
                more = cpu(found["mdata-2"]) / cpu(found["mdata-1"])
                row = {"engine": engine, "MB": round(size, 1), "alone MB/s": round(alone, 2)}
                row |= {"ours MB/s": round(ours, 2), "ours/alone": round(ours / alone, 3)}
                rows.append(row | {"CPU 2 workers/1": round(more, 3), "start-up s": round(wall(found["start"]), 2)})
                bars.append(bar("of the engine's own rate", ours / alone, "at least", f"{engine}: "))
                bars.append(bar("CPU a MB, 2 workers against 1", more, "at most", f"{engine}: "))
        return rows, bars

    def scaling(self, corpus: Path) -> tuple[list[dict[str, Any]], list[str]]:
        """Ours with each number of workers, and the engine alone with as many processes."""
        engine = self.options.engine or "gigatoken"
        counts = self.options.workers
        subjects = {f"{kind}-{n}": False for n in counts for kind in ("mdata", "alone", "busy")}
        with tempfile.TemporaryDirectory(dir=self.options.cache) as folder:
            _, line = beginning(corpus, Path(folder), 1)
            found = self.take_turns(
                {"start": False} | subjects,
                lambda name: self.run_engine(name, engine, line if name == "start" else corpus),
            )
        size, started = corpus.stat().st_size / 1e6, wall(found["start"])
        rows, bars = [], []
        for n in counts:
            ours = size / (wall(found[f"mdata-{n}"]) - started)
            busy = size / (wall(found[f"busy-{n}"]) - started)
            alone = statistics.median(run["rate"] for run in found[f"alone-{n}"])
            if n == counts[0]:
                ours_first, alone_first = ours / n, alone / n
            rows.append(
                {
                    "workers": n,
                    "wall s": round(wall(found[f"mdata-{n}"]), 2),
                    "ours MB/s": round(ours, 1),
                    "efficiency": round(ours / n / ours_first, 3),
                    "busy core MB/s": round(busy, 1),
                    "of busy cores": round(ours / n / busy, 3),
                    f"{engine} alone MB/s": round(alone, 1),
                    "its efficiency": round(alone / n / alone_first, 3),
                    "RSS MB": rss(found[f"mdata-{n}"]),
                }
            )
            bars.append(bar("efficiency", ours / n / ours_first, "at least", f"{n} workers: "))
            bars.append(bar("efficiency", ours / n / busy, "at least", f"{n} workers, of busy cores: "))
        return rows, bars

    def take_turns(self, subjects: dict[str, bool], run) -> dict[str, list[dict[str, Any]]]:
        """All subjects (name: is it slow?), once a round, each round beginning with another; the runs that count."""
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in subjects}
        names = list(subjects)
        for turn in range(self.options.runs + 1):
            start = turn % len(names)
            for name in names[start:] + names[:start]:
                slow = subjects[name]
                if slow and turn >= self.options.slow_runs:
                    continue
                self.pss_hz = (1 if slow else 20) if turn == 0 else 0
                facts = run(name) | {"counts": slow or turn > 0}
                self.runs.append(facts)
                found[name].append(facts)
                print(f"  {name}: {facts['wall_s']:.2f} s" + (" (warm-up)" if not facts["counts"] else ""), flush=True)
        return found

    def run_engine(self, name: str, engine: str, corpus: Path) -> dict[str, Any]:
        """`alone-N`: the engine with N processes; `start` and `mdata-N`: ours with this engine; `busy-N`: ours with one
        worker beside others who leave it, and what it writes, two of N cores."""
        kind, _, count = name.partition("-")
        if kind == "busy":
            with busy_cores(max(0, int(count) - 2)):
                return self.run("mdata-1", corpus, engine=engine)
        if kind != "alone":
            return self.run(f"mdata-{count or 1}", corpus, engine=engine)
        words = [sys.executable, *alone_command(engine, int(count), corpus=corpus, vocab=self.vocab)]
        with tempfile.TemporaryDirectory(dir=self.options.cache) as folder:
            one_thread = os.environ | {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
            done = measure(words, Path(folder), variables=one_thread, pss_hz=self.pss_hz)
        if done.code:
            raise SystemExit(f"{engine} alone failed:\n{done.output}")
        facts = json.loads(done.output.splitlines()[-1])
        rate = corpus.stat().st_size / 1e6 / facts["seconds"]
        return asdict(done) | {"program": f"{engine} {name}", "corpus": corpus.name, "rate": rate} | facts

    def run(self, name: str, corpus: Path, *, engine: str | None = None) -> dict[str, Any]:
        """One whole process, and the hashes of what it wrote."""
        with tempfile.TemporaryDirectory(dir=self.options.cache) as scratch:
            folder = Path(scratch)
            prefix = folder / "out"
            if name in PEERS:
                job = Job(self.options.cache, self.megatron, corpus, self.vocab, prefix)
                shutil.copytree(self.options.cache / "gpt2", folder / "gpt2")
                ending, words, environment = PEERS[name].outputs, PEERS[name].command(job), variables(PEERS[name])
            else:
                ending, environment = "_text_document", None
                words = self.ours(name.rpartition("-")[2], corpus, prefix, engine=engine or self.options.engine)
            done = measure(words, folder, variables=environment, pss_hz=self.pss_hz)
            hashes = None if done.code else [sha256(Path(f"{prefix}{ending}{end}")) for end in (".bin", ".idx")]
        return asdict(done) | {"program": name, "corpus": corpus.name, "hashes": hashes}

    def ours(self, workers: str, corpus: Path, prefix: Path, *, engine: str | None) -> list[str]:
        """Our command line; started through -c, so that it runs this checkout from any folder."""
        code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from cli.mdata import main; sys.exit(main())"
        words = [sys.executable, "-c", code, "preprocess", "--input", str(corpus), "--output-prefix", str(prefix)]
        words += ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", str(self.vocab / "vocab.json")]
        words += ["--merge-file", str(self.vocab / "merges.txt"), "--append-eod", "--workers", workers]
        return words + (["--engine", engine] if engine else [])

    def row(self, name: str, runs: list[dict[str, Any]], corpus: Path, found: dict[str, Any]) -> dict[str, Any]:
        """What the table says of one program."""
        failed = [run for run in runs if run["code"]]
        if failed:
            last = (failed[0]["output"].strip() or "no message").splitlines()[-1]
            return {"program": name, "result": f"failed: {last[:120]}"}
        walls = [run["wall_s"] for run in runs if run["counts"]]
        size = corpus.stat().st_size / 1e6
        peer = found.get("byhand-2")
        return {
            "program": name,
            "runs": len(walls),
            "wall s": round(wall(runs), 2),
            "from-to": f"{min(walls):.2f}-{max(walls):.2f}",
            "CPU s": round(cpu(runs), 2),
            "MB/s": round(size / wall(runs), 1),
            "RSS MB": rss(runs),
            "PSS MB": round(max(run["pss_bytes"] for run in runs) / 1e6),
            "others' CPU s": round(statistics.median(run["others_s"] for run in runs if run["counts"]), 1),
            "against byhand-2": round(wall(runs) / wall(peer), 2) if peer and not peer[0]["code"] else "",
            "result": compared(runs, found),
        }


def compared(runs: list[dict[str, Any]], found: dict[str, Any]) -> str:
    """Whether all runs of a program wrote the bytes that the first program of the table wrote."""
    first_name, first = next(iter(found.items()))
    hashes = {tuple(run["hashes"]) for run in runs}
    if len(hashes) > 1:
        return "DIFFERENT from run to run"
    if first[0]["hashes"] is None:
        return f"{first_name} wrote nothing"
    (own,) = hashes
    equal = [end for end, a, b in zip((".bin", ".idx"), own, first[0]["hashes"], strict=True) if a == b]
    return "same bytes" if len(equal) == 2 else f"DIFFERENT from {first_name}" + (f", {equal[0]} same" if equal else "")


def whole_bars(found: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    """The bars that the table of whole processes can judge."""
    ours, peer, one = (found.get(name, [{"code": 1}]) for name in ("mdata-2", "byhand-2", "mdata-1"))
    if not ours[0]["code"]:
        if not peer[0]["code"]:
            yield bar("wall against byhand-2", wall(ours) / wall(peer), "at most")
        yield bar("RSS MB", rss(ours), "at most")
        if not one[0]["code"]:
            yield bar("CPU a MB, 2 workers against 1", cpu(ours) / cpu(one), "at most")


def bar(name: str, value: float, way: str, what: str = "") -> str:
    """One line that judges a value."""
    kept = value <= BARS[name] if way == "at most" else value >= BARS[name]
    return f"{'kept  ' if kept else 'MISSED'}  {what}{name}: {value:.4g}, {way} {BARS[name]:g}"


def beginning(corpus: Path, folder: Path, size: int) -> tuple[Path, Path]:
    """Files of the first lines of a corpus, about `size` bytes, and of its first line."""
    with corpus.open("rb") as lines:
        data = b"".join(lines.readlines(size))
    part, line = folder / "part.jsonl", folder / "line.jsonl"
    part.write_bytes(data)
    line.write_bytes(data[: data.index(b"\n") + 1])
    return part, line


def wall(runs: Sequence[dict[str, Any]]) -> float:
    """Median seconds of the runs that count."""
    return statistics.median(run["wall_s"] for run in runs if run["counts"])


def cpu(runs: Sequence[dict[str, Any]]) -> float:
    """Median processor seconds of the runs that count."""
    return statistics.median(run["cpu_s"] for run in runs if run["counts"])


def rss(runs: Sequence[dict[str, Any]]) -> int:
    """Largest RSS of any run, in MB."""
    return round(max(run["rss_bytes"] for run in runs) / 1e6)


def sha256(path: Path) -> str:
    """Of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """One line a row, aligned."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = [columns, *([str(row.get(column, "")) for column in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


if __name__ == "__main__":
    sys.exit(main())
