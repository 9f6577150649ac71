"""Jobs in parts on real engines, with seeded kills of tasks, workers and the launcher; as tests and as a program:

    python -m tests.cluster.kills --engine slurm --mb 2000 --parts 64 --kills 20 [--command clean] [--folder /dev/shm]

A job is launched again and again until all of it is done, while its processes are killed at random moments. Then its
files must be those of a single run: of preprocess the corpus by reference and the copy, of dedup all files, and of
clean, extract and decontaminate the texts of all parts one after the other, and the counts of their reports.
"""

from __future__ import annotations

import argparse
import bz2
import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import mdata
from mdata.launching.job_folder import Job, load_job, read_state
from tests.helpers.house_rules import ROOT
from tests.helpers.pages import DUMP_END, DUMP_HEAD, answer, html, sentences, warc_record, wiki_page
from tests.helpers.ray_cluster import ray_cluster
from tests.helpers.slurm import slurm

RESULTS = (".bin", ".idx", ".json", ".origins", ".blake3")
MOST_LAUNCHES = 60


@dataclass
class Engine:
    """How jobs are launched.

    Attributes:
        words: of `mdata launch`, the engine first.
        environment: of the launcher.
        is_idle: whether nothing of a job that was launched runs any more, besides the launcher.
    """

    words: list[str]
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    is_idle: Callable[[], bool] = lambda: True


def engine(name: str, folder: Path, stack: ExitStack) -> Engine:
    """An engine with what it needs: a cluster of this machine that ends with the stack."""
    if name == "slurm":
        cluster = stack.enter_context(slurm(folder / "slurm", nodes=2, cpus=2, max_array=41))
        return Engine(
            ["slurm", "--cpus", "1"], cluster.environment, lambda: not cluster.run("squeue", "-h", "-t", "R,PD,CG")
        )
    if name == "ray":
        address = stack.enter_context(ray_cluster(nodes=2, cpus=1))
        return Engine(["ray", "--cpus", "1", "--address", address])
    return Engine(["local", "--at-once", "2", "--cpus", "1"])


def write_mix(folder: Path, num_bytes: int) -> None:
    """Plain, packed and parquet text of about so many bytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True)
    draw = random.Random(7)
    words = ["time", "year", "people", "way", "day", "thing", "world", "school", "state", "child"]
    block = [" ".join(draw.choice(words) for _ in range(draw.randint(0, 400))) for _ in range(400)]
    size = sum(map(len, block))

    def lines(number: int) -> bytes:
        return "".join(json.dumps({"text": f"{number} {text}"}) + "\n" for text in block).encode()

    with (folder / "a.jsonl").open("wb") as plain:
        for number in range(max(1, num_bytes * 6 // 10 // size)):
            plain.write(lines(number))
    for name in "bcde":
        with gzip.open(folder / f"{name}.jsonl.gz", "wb", compresslevel=1) as packed:
            for number in range(max(1, num_bytes * 2 // 10 // 4 // size)):
                packed.write(lines(number))
    with pq.ParquetWriter(folder / "f.parquet", pa.schema([("text", pa.string())])) as writer:
        for number in range(max(1, num_bytes * 2 // 10 // size)):
            writer.write_table(pa.table({"text": [f"{number} {text}" for text in block]}))


def write_mix_and_items(folder: Path, num_bytes: int) -> None:
    """The same, and beside the folder test items that are in it."""
    write_mix(folder, num_bytes)
    with (folder / "a.jsonl").open() as lines:
        texts = [json.loads(next(lines))["text"].split()[1:31] for _ in range(100)]
    items = "".join(json.dumps({"text": " ".join(words)}) + "\n" for words in texts if len(words) == 30)
    (folder.parent / "items.jsonl").write_text(items)


def write_pages(folder: Path, num_bytes: int) -> None:
    """Packed WARC files and a packed dump of MediaWiki, of about so many unpacked bytes."""
    folder.mkdir(parents=True)
    draw = random.Random(7)
    texts = [sentences(draw, 60) for _ in range(100)]
    count = max(1, num_bytes // 5 // sum(map(len, texts)))
    for name in "abcd":
        with (folder / f"{name}.warc.gz").open("wb") as packed:
            for number in range(count):
                for text in texts:
                    record = warc_record(answer(html(f"{number} {text}")), number=number)
                    packed.write(gzip.compress(record, compresslevel=1))
    with bz2.open(folder / "e.xml.bz2", "wb", compresslevel=1) as dump:
        dump.write(DUMP_HEAD)
        for number in range(count):
            dump.write(b"".join(wiki_page(f"P {number}", text, number=number) for text in texts))
        dump.write(DUMP_END)


def survive(
    one: Engine,
    folder: Path,
    *,
    parts: int,
    kills: int,
    draw: random.Random,
    within_s: float,
    out: str,
    words: Callable[[str], list[str]],
) -> tuple[int, int]:
    """Launch until nothing is left to run, and kill on the way; returns how many launches and kills it took."""
    environment = {**one.environment, "PYTHONPATH": _path()}
    command = [sys.executable, "-m", "mdata", "launch", *one.words, "--parts", str(parts), "--", *words(out)]
    launches = killed = 0
    while launches < MOST_LAUNCHES:
        launches += 1
        with (folder / "launch.log").open("ab") as log:
            launcher = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        due = time.monotonic() + draw.uniform(0.3, within_s)
        while launcher.poll() is None or not one.is_idle():
            time.sleep(0.05)
            if killed < kills and time.monotonic() > due:
                killed += _kill(launcher, folder / out, draw)
                due = time.monotonic() + draw.uniform(0.1, within_s)
        if (folder / f"{out}.job").exists() and not load_job(folder / out).to_run():
            return launches, killed
    raise AssertionError(f"not done after {launches} launches; see {folder}")


def _path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def preprocess(out: str) -> list[str]:
    """The command, with a journal record every tenth of a second that passes."""
    return ["preprocess", "--input", "in", "--output-prefix", out, "--tokenizer-type", "ByteTokenizer", "--append-eod"]


def _on_texts(*words: str) -> Callable[[str], list[str]]:
    return lambda out: [words[0], "--input", "in", "--output", out, *words[1:]]


def _kill(launcher: subprocess.Popen[bytes], prefix: Path, draw: random.Random) -> int:
    """Kill the launcher, the process of a part, or its parent, such as a worker of Ray; 0: nothing runs."""
    with suppress(mdata.MdataError):
        job = load_job(prefix)
        numbers = [number for phase in job.phases for number in phase.numbers]
        running = [pid for number in numbers if (pid := _pid(job, number))]
        targets = [launcher.pid] * (launcher.poll() is None) + 2 * running
        targets += [parent for pid in running if "ray::" in _name(parent := _parent(pid))]
        if targets:
            with suppress(ProcessLookupError):
                os.kill(draw.choice(targets), signal.SIGKILL)
                return 1
    return 0


def _pid(job: Job, number: int) -> int | None:
    state = read_state(job, number)
    ours = state is not None and state.event == "started" and "launch_part" in _name(state.pid)
    return state.pid if state and ours else None


def _name(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    return ""


def _parent(pid: int) -> int:
    with suppress(OSError, ValueError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def check(folder: Path, out: str) -> None:
    """By reference the documents of one run, and as a copy its very files but for the hash of parquet that was cut."""
    whole, merged = (mdata.open_corpus(folder / f"{name}_text_document.json") for name in ("one", out))
    assert len(merged.readers) > 1 and merged.num_tokens == whole.num_tokens
    assert (merged.lengths == whole.lengths).all()
    step = 1 << 22
    for start in range(0, whole.num_tokens, step):
        count = min(step, whole.num_tokens - start)
        assert (merged.read(start, count) == whole.read(start, count)).all(), start
    origins = [(folder / f"{name}_text_document.origins").read_bytes() for name in ("one", out)]
    assert origins[0] == origins[1]
    _mdata(["merge", out, "--copy", "--overwrite"], folder)
    for ending in RESULTS:
        one, copy = (folder / f"{name}_text_document{ending}" for name in ("one", out))
        if ending != ".json":
            assert one.read_bytes() == copy.read_bytes(), ending
    assert whole.id == mdata.open_corpus(folder / f"{out}_text_document.json").id


def check_texts(folder: Path, out: str) -> None:
    """The texts of one run in the order of the parts, its counts, and nothing that work in progress leaves."""
    one, parts = (sorted((folder / name).glob("**/*.jsonl")) for name in ("one", out))
    assert b"".join(path.read_bytes() for path in one) == b"".join(path.read_bytes() for path in parts) != b""
    (whole,) = (folder / "one").glob("*.report")
    reports = sorted((folder / out).glob(f"part-*/{whole.name}"))
    counts = [_counts(path) for path in (whole, *reports)]
    assert counts[0] == sum(counts[1:], Counter())
    joined = folder / out / whole.name
    assert not joined.exists() or json.loads(joined.read_text())["result"] == json.loads(whole.read_text())["result"]
    left = {path for path in (folder / out).glob("**/*") if path.is_file()}
    assert left - {*parts, *reports, joined} == set()


def _counts(report: Path) -> Counter[str]:
    """How many rows came, stayed and fell, and why."""
    result = json.loads(report.read_text())["result"]
    return Counter({name: result[name] for name in ("rows", "kept", "changed", "bad", "filtered")} | result["removed"])


def check_dedup(folder: Path, out: str) -> None:
    """The files of one run alone, and nothing else."""
    made = [{path.name: path.read_bytes() for path in (folder / name).iterdir()} for name in ("one", out)]
    assert made[0].keys() == made[1].keys() - {".lock"}
    assert all(made[1][name] == data for name, data in made[0].items())


@dataclass(frozen=True)
class Work:
    """A command that is run in parts.

    Attributes:
        words: of the command line, by the name of the output.
        check: compares that output with `one`, of a run alone, in a folder.
        write: makes the folder of inputs, of about so many bytes.
    """

    words: Callable[[str], list[str]]
    check: Callable[[Path, str], None]
    write: Callable[[Path, int], None] = write_mix


WORK = {
    "preprocess": Work(preprocess, check),
    "dedup": Work(_on_texts("dedup", "--verify", "0.7"), check_dedup),
    "clean": Work(_on_texts("clean", "--steps", "fix", "length", "collapse", "--length-min-words", "50"), check_texts),
    "extract": Work(_on_texts("extract"), check_texts, write_pages),
    "decontaminate": Work(_on_texts("decontaminate", "--against", "items.jsonl"), check_texts, write_mix_and_items),
}


def _mdata(words: list[str], folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mdata", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": _path()},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def run(
    name: str,
    folder: Path,
    *,
    num_bytes: int,
    parts: int,
    kills: int,
    seed: int,
    within_s: float,
    command: str = "preprocess",
) -> str:
    """One job on one engine from beginning to end; what happened, as text."""
    work = WORK[command]
    work.write(folder / "in", num_bytes)
    begun = time.monotonic()
    _mdata(work.words("one"), folder)
    alone_s, begun = time.monotonic() - begun, time.monotonic()
    with ExitStack() as stack:
        one = engine(name, folder, stack)
        draw = random.Random(f"{seed} {name}")
        launches, killed = survive(
            one, folder, parts=parts, kills=kills, draw=draw, within_s=within_s, out=f"{name}-out", words=work.words
        )
    took_s = time.monotonic() - begun
    work.check(folder, f"{name}-out")
    happened = f"{parts} parts, {killed} kills, {launches} launches, {took_s:.0f} s (one run alone {alone_s:.0f} s)"
    return f"{command}, {name}: {happened}"


def main() -> int:
    """Run as a program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("local", "slurm", "ray"), required=True)
    parser.add_argument("--mb", type=int, default=2000)
    parser.add_argument("--parts", type=int, default=64)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--command", choices=tuple(WORK), default="preprocess")
    parser.add_argument("--within", type=float, default=1.2, help="seconds from one kill to the next, at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where the files go; default: the system's")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    size, kills = arguments.mb * 10**6, arguments.kills
    print(
        run(
            arguments.engine,
            folder,
            num_bytes=size,
            parts=arguments.parts,
            kills=kills,
            seed=arguments.seed,
            within_s=arguments.within,
            command=arguments.command,
        )
    )
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
