"""How fast does `mdata preprocess` read text in object storage, compared with the same text on a disk?

    python benchmarks/objects.py --corpus FILE.jsonl --vocab FOLDER [--rounds N]

The server is one process on loopback that answers ranges of one file over HTTP by sendfile; its own rate is measured
first, by as many streams as mdata opens, without mdata. Runs take turns, with GPT-2's vocabulary and 2 workers; each
is a whole process, memory is the peak of proportional shares, and results are compared. Times are medians of rounds.
Signatures and TLS of real storage are not measured.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
import tempfile
from pathlib import Path

from measured import machine, measure
from range_server import server_seconds, serving

STREAMS = 4  # as many as mdata opens


def main() -> int:
    """Serve, measure, print."""
    arguments = parse()
    with serving(arguments.corpus.parent) as folder:
        report(arguments, f"{folder}/{arguments.corpus.name}")
    return 0


def report(arguments, url):
    """The server's rate, then the rounds."""
    megabytes = arguments.corpus.stat().st_size / 1e6
    print(machine())
    print(f"server alone: {megabytes / server_seconds(url, arguments.corpus.stat().st_size, streams=STREAMS):.0f} MB/s")
    found = {"disk": [], "storage": []}
    hashes = set()
    for turn in range(arguments.rounds + 1):
        for name, source in (("disk", arguments.corpus), ("storage", url)):
            with tempfile.TemporaryDirectory() as folder:
                one = measure(command(arguments, source), Path(folder), pss_hz=0 if turn else 5)
                assert one.code == 0, one.output
                hashes.add(hashlib.sha256(Path(folder, "x_text_document.bin").read_bytes()).hexdigest())
            if turn:
                found[name].append(one.wall_s)
            else:
                print(f"{name}: RSS {one.rss_bytes / 1e6:.0f} MB, PSS {one.pss_bytes / 1e6:.0f} MB")
    assert len(hashes) == 1, "the bytes of .bin differ"
    rates = {name: megabytes / statistics.median(times) for name, times in found.items()}
    print(f"disk {rates['disk']:.1f} MB/s, storage {rates['storage']:.1f} MB/s", found)
    print(f"storage / disk: {rates['storage'] / rates['disk']:.3f} (bar 0.9); the bytes are the same")


def command(arguments, source):
    """The run, in the folder that it is started in."""
    vocab = ["--vocab-file", arguments.vocab / "vocab.json", "--merge-file", arguments.vocab / "merges.txt"]
    options = ["--tokenizer-type", "GPT2BPETokenizer", *vocab, "--append-eod", "--workers", "2"]
    return [sys.executable, "-m", "mdata", "preprocess", "--input", source, "--output-prefix", "x", *options]


def parse():
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=lambda text: Path(text).resolve(), required=True)
    parser.add_argument("--vocab", type=lambda text: Path(text).resolve())
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
