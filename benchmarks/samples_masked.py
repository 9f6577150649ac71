"""BERT and T5 samples per processor second, compared with megatron-core's datasets over the same files.

    python -m venv /tmp/megatron && /tmp/megatron/bin/pip install torch==2.13.0 megatron-core==0.16.1
    python benchmarks/samples_masked.py --megatron-python /tmp/megatron/bin/python [--runs 5] [--json FILE]

Makes a corpus of random ids (documents of 2 to 22 sentences of 5 to 45 tokens, every third id goes on with a word) and
reads the same randomly chosen samples on both sides: BERT of 512 tokens, T5 of 512 and 128, with their usual masking.
megatron-core stays in an environment of its own: this file starts itself there with --peer, where it imports nothing of
ours. What counts is the processor time of one process for the samples; imports and the mapping come before. In
Megatron's order both must give the same bytes: exits 1 if they do not. Medians of runs that take turns.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

KINDS = ("bert", "t5")
SEED, IDS, SENTINELS, CONTINUES = 1234, 30000, 100, 3
DOCUMENTS, BATCH = 20_000, 512
SPECIAL = {"pad": 0, "cls": 2, "sep": 3, "mask": 4, "bos": 5, "eos": 6}
LENGTHS = {"bert": (512,), "t5": (512, 128)}


def make_corpus(prefix: Path) -> None:
    """The pair, with struct and numpy alone."""
    random = np.random.default_rng(1)
    per_document = random.integers(2, 23, DOCUMENTS)
    lengths = random.integers(5, 46, int(per_document.sum())).astype("<i4")
    tokens = random.integers(7, IDS, int(lengths.sum())).astype("<u2")
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1]))
    tables = [lengths, (starts * 2).astype("<i8"), np.concatenate(([0], np.cumsum(per_document))).astype("<i8")]
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, len(lengths), DOCUMENTS + 1)
    prefix.with_name(prefix.name + ".idx").write_bytes(head + b"".join(table.tobytes() for table in tables))
    prefix.with_name(prefix.name + ".bin").write_bytes(tokens.tobytes())


def chosen(length: int, count: int) -> list[int]:
    """Which samples are read."""
    return np.random.default_rng(2).integers(0, length, count).tolist()


def ours(prefix: Path, kind: str, order: str) -> Any:
    """Our samples of the corpus."""
    import mdata
    from mdata.samples.bert import BertSamples
    from mdata.samples.masked import SentenceOrder
    from mdata.samples.special_tokens import MaskedVocabulary
    from mdata.samples.t5 import T5Samples

    vocabulary = MaskedVocabulary(
        ids=tuple(range(IDS + SENTINELS)),
        continuations=tuple(range(9, IDS, CONTINUES)),
        sentinels=tuple(range(IDS, IDS + SENTINELS)),
        **SPECIAL,
    )
    corpus = mdata.open_corpus(prefix)
    more: dict[str, Any] = {"order": SentenceOrder(name=order, seed=SEED), "sequence_length": LENGTHS[kind][0]}
    documents = (0, corpus.num_documents)
    if kind == "bert":
        return BertSamples(corpus, documents, options=mdata.Bert(vocabulary=vocabulary), **more)
    options = mdata.T5(decoder_length=LENGTHS[kind][1], vocabulary=vocabulary)
    return T5Samples(corpus, documents, options=options, **more)


class PeerTokenizer:
    """What megatron-core asks of a tokenizer."""

    def __init__(self) -> None:
        names = range(IDS + SENTINELS)
        self.inv_vocab = {id: f"##{id}" if 9 <= id < IDS and id % CONTINUES == 0 else str(id) for id in names}
        self.additional_special_tokens_ids = list(range(IDS, IDS + SENTINELS))
        self.unique_identifiers = {"class": "benchmark"}
        for name, id in SPECIAL.items():
            setattr(self, name, id)


def megatron(prefix: Path, kind: str, cache: Path) -> Any:
    """megatron-core's dataset of the same samples."""
    import torch
    from megatron.core.datasets import bert_dataset, t5_dataset
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    torch.distributed.get_rank = lambda: 0  # it asks for the rank without a process group
    shared: dict[str, Any] = {
        "random_seed": SEED,
        "sequence_length": LENGTHS[kind][0],
        "blend": ([str(prefix)], None),
        "split": "100,0,0",
        "path_to_cache": str(cache),
        "tokenizer": PeerTokenizer(),
        "masking_probability": 0.15,
        "short_sequence_probability": 0.1,
        "masking_max_ngram": 3 if kind == "bert" else 10,
        "masking_do_full_word": True,
        "masking_do_permutation": False,
        "masking_use_longer_ngrams": False,
        "masking_use_geometric_distribution": kind == "t5",
    }
    if kind == "bert":
        make: Any = bert_dataset.BERTMaskedWordPieceDataset
        config: Any = bert_dataset.BERTMaskedWordPieceDatasetConfig(classification_head=True, **shared)
    else:
        make = t5_dataset.T5MaskedWordPieceDataset
        config = t5_dataset.T5MaskedWordPieceDatasetConfig(sequence_length_decoder=LENGTHS[kind][1], **shared)
    documents = np.arange(DOCUMENTS, dtype=np.int32)
    # One sample is asked for, so that its mapping is one epoch.
    return make(IndexedDataset(str(prefix)), str(prefix), documents, 1, Split.train, config)


def digest(samples: list[dict[str, Any]]) -> str:
    """Of all fields of all samples."""
    found = hashlib.sha256()
    for sample in samples:
        for name in sorted(sample):
            found.update(name.encode() + np.asarray(sample[name], np.int64).tobytes())
    return found.hexdigest()


def rate(read: Callable[[Any], Any], numbers: list[Any], count: int) -> float:
    """Samples per processor second of a loop over numbers, or over lists of them."""
    start = time.process_time()
    for number in numbers:
        read(number)
    return count / (time.process_time() - start)


def peer_side(prefix: Path, kind: str, *, cache: Path, count: int) -> dict[str, Any]:
    """The other side of a run, in its own environment."""
    dataset = megatron(prefix, kind, cache)
    numbers = chosen(len(dataset), count)
    first = digest([dataset[k] for k in numbers[:100]])  # which also warms it
    return {"rate": rate(dataset.__getitem__, numbers, count), "digest": first}


def our_side(prefix: Path, kind: str, count: int) -> dict[str, Any]:
    """Our side of a run: one by one, and in batches into arrays used again."""
    rates: dict[str, Any] = {}
    for order in ("megatron", "native"):
        samples = ours(prefix, kind, order)
        numbers = chosen(len(samples.rows), count)
        first = digest([samples.sample(k) for k in numbers[:100]])
        if order == "megatron":
            rates["digest"] = first
        out = samples.allocate(BATCH)
        samples.read(numbers[:BATCH], out)
        whole = numbers[: count // BATCH * BATCH]
        batches = [whole[at : at + BATCH] for at in range(0, len(whole), BATCH)]
        rates[f"{order}, one by one"] = rate(samples.sample, numbers, count)
        rates[f"{order}, batches of {BATCH}"] = rate(partial(samples.read, out=out), batches, len(whole))
    return rates


def main() -> int:
    """Measure, or do the peer's part where megatron-core is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megatron-python", help="the interpreter that has megatron-core")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--samples", type=int, default=2000, help="that megatron-core reads; we read ten times as many")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    parser.add_argument("--peer", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer:
        prefix = arguments.folder / "x_text_sentence"
        print(json.dumps(peer_side(prefix, arguments.peer, cache=arguments.folder / "cache", count=arguments.samples)))
        return 0
    if not arguments.megatron_python:
        parser.error("--megatron-python is needed: the interpreter of an environment with megatron-core")
    with tempfile.TemporaryDirectory() as folder:
        make_corpus(Path(folder) / "x_text_sentence")
        rows = [row for kind in KINDS for row in measured(kind, Path(folder), arguments)]
    for row in rows:
        print(f"{row['kind']:5} {row['reader']:28} {row['rate']:10,.0f} samples/s {row['ratio']:7.1f}x   {row['same']}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0 if all(row["same"] != "DIFFERENT" for row in rows) else 1


def measured(kind: str, folder: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of the table for one kind."""
    command = [arguments.megatron_python, __file__, "--peer", kind, "--folder", str(folder)]
    command += ["--samples", str(arguments.samples)]
    peers, own = [], []
    for _ in range(arguments.runs):
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        peers.append(json.loads(done.stdout.splitlines()[-1]))
        own.append(our_side(folder / "x_text_sentence", kind, 10 * arguments.samples))
    base = statistics.median(peer["rate"] for peer in peers)
    same = "same bytes" if {run["digest"] for run in (*peers, *own)} == {own[0]["digest"]} else "DIFFERENT"
    rows = [{"kind": kind, "reader": "megatron-core", "rate": base, "ratio": 1.0, "same": ""}]
    for name in (name for name in own[0] if name != "digest"):
        found = statistics.median(run[name] for run in own)
        told = same if name.startswith("megatron") else ""
        rows.append({"kind": kind, "reader": f"mdata {name}", "rate": found, "ratio": found / base, "same": told})
    return rows


if __name__ == "__main__":
    sys.exit(main())
