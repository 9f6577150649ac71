"""How fast, how lean and how exact `mdata dedup` is, beside rensa, datasketch and datatrove; and a model of 10 TB.

    python benchmarks/webtext.py sign CORPUS.jsonl --peers PYTHON [--megabytes 400 4 16] [--rounds 3]
    python benchmarks/webtext.py match [--documents 5000000] [--parts 4]
    python benchmarks/webtext.py recall [--pairs 2000]
    python benchmarks/webtext.py text CORPUS.jsonl --out FOLDER [--gb 20]
    python benchmarks/webtext.py model [--sign 65e6 --match 1.5e6 ...]

sign: MB of text for each processor second of one thread, from lines of JSON to signatures: ours as the command, in a
process of its own, with its sorted runs; the peers in the environment of PYTHON (pip install rensa datasketch
"datatrove[io,processing]" "xxhash<4"), without files. Rounds alternate, and ratios are those within a round. match:
signatures of documents that do not exist, a third of them near-duplicates, are written as `sign` would, then matched
and grouped under a limit of memory. recall: pairs of texts with a known share of common 5-grams, against
1 - (1 - J^r)^b. text: files for a whole run: 70 % of the documents are drawn from the words of CORPUS by their
frequencies, 20 % are copies with 0.2 to 40 % of their words replaced (the rates of the oracle's corpus), 5 % equal
copies, and 5 % beginnings. model: what 10 TB on 100 nodes take, from rates that the other tables print.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measured import Measured, machine, measure

PERMUTATIONS, NGRAM = 112, 5
SIMILARITIES = (0.6, 0.7, 0.8, 0.9)
LIMITS_MIB = {
    "match": 256,
    "group": 200,
}  # of memory besides an interpreter with the libraries; group: 8 B a document more


def shingles_of(text: str) -> list[str]:
    """The n-grams of words that rensa and datasketch are given, as their manuals do it."""
    words = text.lower().split()
    return [" ".join(words[first : first + NGRAM]) for first in range(len(words) - NGRAM + 1)]


def rensa(texts: Sequence[str]) -> None:
    """RMinHash with as many permutations."""
    from rensa import RMinHash  # type: ignore[import-not-found, unused-ignore]

    for text in texts:
        made = RMinHash(num_perm=PERMUTATIONS, seed=1)
        made.update(shingles_of(text))
        made.digest()


def datasketch(texts: Sequence[str]) -> None:
    """MinHash.update_batch."""
    from datasketch import MinHash  # type: ignore[import-not-found, unused-ignore]

    for text in texts:
        made = MinHash(num_perm=PERMUTATIONS)
        made.update_batch([shingle.encode() for shingle in shingles_of(text)])


def datatrove(texts: Sequence[str]) -> None:
    """The shingles and the signature of MinhashDedupSignature."""
    from datatrove.pipeline.dedup import MinhashDedupSignature  # type: ignore[import-not-found, unused-ignore]
    from datatrove.pipeline.dedup.minhash import MinhashConfig  # type: ignore[import-not-found, unused-ignore]
    from datatrove.utils.hashing import HashConfig  # type: ignore[import-not-found, unused-ignore]

    config = MinhashConfig(hash_config=HashConfig(hash_fc="xxhash", precision=64))
    step = MinhashDedupSignature("/dev/null", config)
    for text in texts:
        shingles = step.get_shingles(text)
        if shingles.size:
            step.get_signature(shingles)


PEERS: dict[str, Callable[[Sequence[str]], None]] = {"rensa": rensa, "datasketch": datasketch, "datatrove": datatrove}


def run_peer(name: str, corpus: Path, megabytes: float) -> None:
    """In the peers' environment: print processor seconds and MB, from lines to signatures."""
    import orjson

    lines, size = [], 0
    with corpus.open("rb") as file:
        for line in file:
            lines.append(line)
            size += len(line)
            if size >= megabytes * 1e6:
                break
    PEERS[name]([orjson.loads(lines[0])["text"]])  # imports, and datatrove's tokenizer
    begun = time.process_time()
    PEERS[name]([orjson.loads(line)["text"] for line in lines])
    print(json.dumps({"mb": size / 1e6, "cpu_s": time.process_time() - begun}))


def sign(arguments: argparse.Namespace) -> None:
    """Ours and each peer, in turns."""
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder, "whole.jsonl")
        with whole.open("wb") as out:
            while out.tell() < arguments.megabytes[0] * 1e6:
                out.write(arguments.corpus.read_bytes())
        rates: dict[str, list[float]] = {name: [] for name in ("mdata", *PEERS)}
        for number in range(arguments.rounds):
            made = Path(folder, f"out-{number}")
            words = ["-m", "mdata", "dedup", "sign", "--input", str(whole), "--output", str(made), "--workers", "1"]
            done = measure([sys.executable, *words], Path(folder))
            assert done.code == 0, done.output
            shutil.rmtree(made)
            rates["mdata"].append(whole.stat().st_size / 1e6 / done.cpu_s)
            for name in PEERS:
                size = arguments.megabytes[2 if name == "rensa" else 1]
                peer = [str(arguments.peers), __file__, "peer", name, str(arguments.corpus), str(size)]
                peer_done = measure(peer, Path(folder))
                assert peer_done.code == 0, peer_done.output
                facts = json.loads(peer_done.output.splitlines()[-1])
                rates[name].append(facts["mb"] / facts["cpu_s"])
    print(f"{'sign':12} {'MB/s a core':>12} {'mdata is':>10}")
    for name, of_rounds in rates.items():
        ratios = [ours / theirs for ours, theirs in zip(rates["mdata"], of_rounds, strict=True)]
        times = "" if name == "mdata" else f"{statistics.median(ratios):8.1f} x"
        print(f"{name:12} {statistics.median(of_rounds):12.2f} {times:>10}")


def write_signed(job: Any, documents: int, parts: int) -> None:
    """What `sign` leaves of so many documents: a third repeat an earlier one with J from 0.6 to 1."""
    import numpy as np

    from mdata import _core
    from mdata.dedup.signing import RUN_DOCUMENTS
    from mdata.sources.sections import PartNumber

    draw = np.random.default_rng(1)
    options = job.options
    each = documents // parts
    repeats = draw.random(documents) < 1 / 3
    repeats[:1000] = False
    of = (draw.random(documents) * np.arange(documents)).astype(np.int64)
    chance = draw.uniform(0.6, 1, documents) ** options.rows
    names: dict[int, list[Any]] = {part: [] for part in range(parts)}
    paths = {}
    for part in range(parts):
        task = PartNumber(part + 1, parts)
        job.data_path("sign", task, "").mkdir(parents=True)
        for run, start in enumerate(range(part * each, (part + 1) * each, RUN_DOCUMENTS)):
            stop = min(start + RUN_DOCUMENTS, (part + 1) * each)
            path = job.data_path("sign", task, f"{run:05}.run")
            paths[path] = (part, start, stop)
            names[part].append([path.name, [stop - start] * (1 + options.bands)])
    files = {path: path.open("wb") for path in paths}
    for section in range(1 + options.bands):
        keys = draw.integers(0, 2**64, documents, np.uint64)
        same = repeats & (draw.random(documents) < (chance if section else 0.02))
        keys[same] = keys[of[same]]
        for path, (part, start, stop) in paths.items():
            numbers = np.arange(start - part * each, stop - part * each, dtype=np.uint64)
            columns = [keys[start:stop], *([] if section else [keys[start:stop]]), numbers]
            records = np.column_stack(columns)
            _core.sort_records(records)
            files[path].write(records.data)
    for file in files.values():
        file.close()
    for part in range(parts):
        task = PartNumber(part + 1, parts)
        read = [{"number": 0, "section": None, "chunk_rows": [each], "digests": "0" * 64, "is_whole": True}]
        job.data_path("sign", task, "files.json").write_text(json.dumps(read))
        facts = {"rows": each, "texts": each, "runs": names[part]}
        job.done_path("sign", task).write_text(json.dumps(facts))


def match(arguments: argparse.Namespace) -> None:
    """Matching and grouping: documents a processor second, and memory under its limit."""
    from mdata.dedup.plan import DedupJob, DedupOptions

    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        (folder / "a.jsonl").write_text('{"text": "x"}\n')
        options = DedupOptions(input=folder / "a.jsonl", output=folder / "out")
        write_signed(DedupJob(options), arguments.documents, arguments.parts)
        words = ["--input", str(folder / "a.jsonl"), "--output", str(folder / "out"), "--workers", "1"]
        bare = measure([sys.executable, "-c", "import mdata.dedup.dedup, cli.dedup"], folder, variables=_path())
        took: dict[str, Measured] = {}
        print(f"{arguments.documents:,} documents in {arguments.parts} parts, {options.bands} bands")
        print(f"{'stage':8} {'CPU s':>8} {'documents/CPU s':>16} {'RSS MiB':>9} {'limit of data, MiB':>19}")
        for stage in ("match", "group"):
            more = 8 * arguments.documents if stage == "group" else 0
            limit = bare.rss_bytes + (LIMITS_MIB[stage] << 20) + more
            command = ["prlimit", f"--data={limit}", sys.executable, "-m", "mdata", "dedup", stage, *words]
            took[stage] = measure(command, folder)
            assert took[stage].code == 0, took[stage].output
            rate = arguments.documents / took[stage].cpu_s
            mib = took[stage].rss_bytes >> 20
            print(f"{stage:8} {took[stage].cpu_s:8.2f} {rate:16,.0f} {mib:9} {limit >> 20:19}")
        total = sum(done.cpu_s for done in took.values())
        print(f"{'both':8} {total:8.2f} {arguments.documents / total:16,.0f}")


def _path() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}


def planted(similarity: float, pairs: int, draw: random.Random) -> tuple[list[str], float]:
    """Pairs of texts with a common beginning, and the share of 5-grams that they have in common."""
    grams = 200
    common = round(2 * grams * similarity / (1 + similarity))
    texts = []
    for _ in range(pairs):
        words = [f"w{draw.getrandbits(60)}" for _ in range(2 * grams + NGRAM)]
        same = words[: common + NGRAM - 1]
        rest = grams - common
        texts += [" ".join([*same, *words[len(same) : len(same) + rest]]), " ".join([*same, *words[-rest:]])]
    return texts, common / (2 * grams - common)


def recall(arguments: argparse.Namespace) -> None:
    """Found pairs against the formula; and, verified, none below the threshold."""
    from mdata.dedup.dedup import dedup
    from mdata.dedup.plan import DedupOptions

    bands, rows, threshold = 14, 8, 0.75
    print(f"{'J':>6} {'found':>7} {'expected':>9} {'sigma':>6} {'off by':>9} {f'verified {threshold}':>14}")
    with tempfile.TemporaryDirectory() as name:
        for similarity in SIMILARITIES:
            texts, share = planted(similarity, arguments.pairs, random.Random(f"{similarity}"))
            path = Path(name, f"{similarity}.jsonl")
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
            found = []
            for verify in (0.0, threshold):
                out = Path(name, f"{similarity}-{verify}")
                found.append(dedup(DedupOptions(input=path, output=out, verify=verify)).removed)
            chance = 1 - (1 - share**rows) ** bands
            sigma = (arguments.pairs * chance * (1 - chance)) ** 0.5
            off = (found[0] - arguments.pairs * chance) / max(sigma, 1e-9)
            print(f"{share:6.3f} {found[0]:7} {arguments.pairs * chance:9.1f} {sigma:6.1f} {off:6.1f} sd {found[1]:14}")
            assert found[1] == (found[0] if share >= threshold else 0), "a false positive, or a pair that was lost"


RATES = (0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.12, 0.15, 0.2, 0.25, 0.3, 0.4)


def text(arguments: argparse.Namespace) -> None:
    """Files of a GB of text each, packed by zstd."""
    import numpy as np
    import orjson
    import zstandard

    numbers: dict[str, int] = {}
    drawn_from: list[int] = []  # each word as often as it occurs
    with arguments.corpus.open("rb") as lines:
        for line in lines:
            drawn_from += (numbers.setdefault(word, len(numbers)) for word in orjson.loads(line)["text"].split())
    urn, vocabulary = np.array(drawn_from, np.int32), np.array(list(numbers), object)
    arguments.out.mkdir(parents=True)
    draw = np.random.default_rng(1)

    def words(count: int) -> Any:
        return urn[draw.integers(0, len(urn), count)]

    pool: list[Any] = []
    for number in range(arguments.gb):
        size = 0
        with zstandard.open(arguments.out / f"{number:03}.jsonl.zst", "wb", zstandard.ZstdCompressor(1)) as out:
            while size < 1e9:
                kind = draw.random()
                if kind < 0.7 or not pool:
                    document = words(int(draw.integers(20, 1200)))
                    pool.append(document)
                    if len(pool) > 20_000:
                        pool[int(draw.integers(len(pool)))] = pool.pop()
                else:
                    document = pool[int(draw.integers(len(pool)))].copy()
                    if kind < 0.9:
                        changed = draw.random(len(document)) < RATES[int(draw.integers(len(RATES)))]
                        document[changed] = words(int(changed.sum()))
                    elif kind < 0.95:
                        document = document[: max(10, len(document) // 2)]
                line = orjson.dumps({"text": " ".join(vocabulary[document].tolist())}) + b"\n"
                out.write(line)
                size += len(line)


@dataclass(frozen=True)
class Cluster:
    """What the model is told.

    Attributes:
        text_bytes: of the input. document_bytes: the mean. nodes, cores: of each node.
        sign: bytes a core second. match: documents a core second, all bands. group: documents a second.
        disk: bytes a second of the shared file system, all nodes together.
        repeats: share of documents that are in a pair of a band.
    """

    text_bytes: float
    document_bytes: float
    nodes: int
    cores: int
    sign: float
    match: float
    group: float
    disk: float
    repeats: float


def model(arguments: argparse.Namespace) -> None:
    """Files, memory and time of each stage."""
    of = Cluster(**{name: getattr(arguments, name) for name in Cluster.__dataclass_fields__})
    documents = of.text_bytes / of.document_bytes
    bands, parts, ranges = 14, of.nodes * 10, 15
    records = documents * (24 + 16 * bands)
    runs = parts * -(-(documents / parts) // (1 << 19))
    edges = documents * of.repeats * bands * 16
    cores = of.nodes * of.cores
    seconds = {
        "sign": max(of.text_bytes / (of.sign * cores), (of.text_bytes + records) / of.disk),
        "match": max(documents / of.match / min(ranges, cores), records / of.disk),
        "group": max(documents / of.group, edges / of.disk),
    }
    print(
        f"{of.text_bytes / 1e12:g} TB of text, {documents / 1e9:.2f} G documents, {of.nodes} nodes of {of.cores} cores"
    )
    print(f"{'stage':8} {'tasks':>7} {'seconds':>9} {'files':>8} {'GB written':>11} {'GiB of memory a task':>21}")
    rows = [
        ("sign", parts, runs + 2 * parts, records, 0.6),
        ("match", ranges, 2 * ranges, edges, 0.3),
        ("group", 1, 4, documents / 8, 8 * documents / 2**30 + 0.2),
    ]
    for name, tasks, files, written, memory in rows:
        print(f"{name:8} {tasks:7} {seconds[name]:9,.0f} {files:8,.0f} {written / 1e9:11,.1f} {memory:21.1f}")
    print(f"{'all':8} {'':7} {sum(seconds.values()):9,.0f}")


def main() -> int:
    """Run one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tables = parser.add_subparsers(dest="table", required=True)
    table = tables.add_parser("sign")
    table.add_argument("corpus", type=Path)
    table.add_argument("--peers", type=Path, required=True, help="the interpreter of an environment with the peers")
    table.add_argument("--megabytes", type=float, nargs=3, default=(400, 4, 16), help="for mdata, slow peers, rensa")
    table.add_argument("--rounds", type=int, default=3)
    table = tables.add_parser("match")
    table.add_argument("--documents", type=int, default=5_000_000)
    table.add_argument("--parts", type=int, default=4)
    table.add_argument("--folder", type=Path, help="where the files go; default: the system's")
    tables.add_parser("recall").add_argument("--pairs", type=int, default=2000)
    table = tables.add_parser("text")
    table.add_argument("corpus", type=Path)
    table.add_argument("--out", type=Path, required=True)
    table.add_argument("--gb", type=int, default=20)
    table = tables.add_parser("model")
    defaults = {"text-bytes": 10e12, "document-bytes": 4000, "sign": 65e6, "match": 1.5e6, "group": 5e6, "disk": 20e9}
    for name, default in {**defaults, "repeats": 0.3}.items():
        table.add_argument(f"--{name}", type=float, default=default)
    table.add_argument("--nodes", type=int, default=100)
    table.add_argument("--cores", type=int, default=32)
    table = tables.add_parser("peer")  # in the peers' environment
    table.add_argument("name", choices=PEERS)
    table.add_argument("corpus", type=Path)
    table.add_argument("size", type=float)
    arguments = parser.parse_args()
    if arguments.table == "peer":
        run_peer(arguments.name, arguments.corpus, arguments.size)
        return 0
    if arguments.table == "sign":
        arguments.corpus, arguments.peers = arguments.corpus.resolve(), arguments.peers.absolute()
    if arguments.table not in ("model", "text"):
        print(json.dumps(machine()))
    {"sign": sign, "match": match, "recall": recall, "text": text, "model": model}[arguments.table](arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
