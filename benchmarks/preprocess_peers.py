"""The other programs that turn jsonl into .bin/.idx, each in an environment of its own, for benchmarks/preprocess.py.

    python benchmarks/preprocess_peers.py --cache FOLDER [--megatron CHECKOUT] [--python312 PYTHON] [--peers NAME ...]

makes the environments under FOLDER once (about 3 GB with Megatron's) and says which peers can run. `byhand` is what a
skilled user writes in an hour: the fastest engine reads the file itself, numpy puts the end-of-document ids in, all of
it in memory, nothing checked. `megatron` is tools/preprocess_data.py and `megatron-fast` preprocess_data_fast.py of a
checkout of Megatron-LM that the user names (its head wants Python 3.12); offline they find "gpt2" as a folder where
they are started. `datatrove` is its Megatron writer. Unusual: this file starts itself inside those environments with
--run, where it imports nothing of ours. A peer that cannot be set up is a line that says why, never an error.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

MEGATRON_PACKAGES = (
    "torch==2.13.0 triton numpy==2.4.6 packaging omegaconf sentencepiece tiktoken"
    " transformers==5.14.1 tokenizers==0.22.2 gigatoken==0.10.0"
)
PACKAGES = {
    "byhand": "gigatoken==0.10.0 numpy awkward",
    "megatron": MEGATRON_PACKAGES,
    "datatrove": "datatrove[io,processing]==0.10.1",
}
END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class Peer:
    """One program with one number of workers.

    Attributes:
        name: as in the table, with the workers behind a dash.
        environment: its folder under the cache; several peers may share one.
        workers: processes or threads that encode.
        command: from a job to the words to run.
        outputs: the prefix's ending that its files get.
        slow: under 5 MB/s, so that it runs fewer times.
        variables: environment variables of its process.
    """

    name: str
    environment: str
    workers: int
    command: Callable[[Job], list[str]]
    outputs: str = "_text_document"
    slow: bool = False
    variables: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """What a peer is asked to do, and where its environments lie."""

    cache: Path
    megatron: Path | None
    corpus: Path
    vocab: Path
    prefix: Path

    def python(self, environment: str) -> str:
        """The interpreter of an environment."""
        return str(self.cache / environment / "bin" / "python")


def by_hand(threads: int) -> Peer:
    """gigatoken and numpy."""

    def command(job: Job) -> list[str]:
        words = [job.python("byhand"), __file__, "--run", "byhand", "--workers", str(threads)]
        return [*words, str(job.corpus), str(job.vocab), str(job.prefix)]

    return Peer(f"byhand-{threads}", "byhand", threads, command, variables={"RAYON_NUM_THREADS": str(threads)})


def megatron(workers: int) -> Peer:
    """tools/preprocess_data.py."""

    def command(job: Job) -> list[str]:
        return [*megatron_words(job, "preprocess_data.py"), "--workers", str(workers)]

    variables = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return Peer(f"megatron-{workers}", "megatron", workers, command, slow=True, variables=variables)


def megatron_fast(threads: int) -> Peer:
    """tools/preprocess_data_fast.py."""

    def command(job: Job) -> list[str]:
        return [*megatron_words(job, "preprocess_data_fast.py"), "--use-gigatoken"]

    variables = {"HF_HUB_OFFLINE": "1", "RAYON_NUM_THREADS": str(threads)}
    return Peer(f"megatron-fast-{threads}", "megatron", threads, command, variables=variables)


def megatron_words(job: Job, tool: str) -> list[str]:
    """What both tools take."""
    words = [job.python("megatron"), str(job.megatron / "tools" / tool), "--input", str(job.corpus)]
    words += ["--output-prefix", str(job.prefix), "--tokenizer-type", "GPT2BPETokenizer", "--append-eod"]
    return [*words, "--vocab-file", str(job.vocab / "vocab.json"), "--merge-file", str(job.vocab / "merges.txt")]


def datatrove() -> Peer:
    """datatrove's MegatronDocumentTokenizer; one file is one task for it."""

    def command(job: Job) -> list[str]:
        words = [job.python("datatrove"), __file__, "--run", "datatrove"]
        return [*words, str(job.corpus), str(job.vocab), str(job.prefix)]

    variables = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    return Peer("datatrove-1", "datatrove", 1, command, outputs="", slow=True, variables=variables)


PEERS = {
    peer.name: peer
    for peer in (
        *(by_hand(1), by_hand(2)),
        *(megatron_fast(1), megatron_fast(2)),
        *(megatron(1), megatron(2)),
        datatrove(),
    )
}


def prepare(names: Sequence[str], cache: Path, *, megatron: Path | None, python312: str | None) -> dict[str, str]:
    """Make what is missing; for each peer that cannot run, why."""
    trouble: dict[str, str] = {}
    made: dict[str, str | None] = {}
    for name in names:
        environment = PEERS[name].environment
        if environment == "megatron" and (megatron is None or not (megatron / "tools" / "preprocess_data.py").exists()):
            trouble[name] = "no checkout of Megatron-LM given (--megatron)"
            continue
        if environment not in made:
            python = (python312 or shutil.which("python3.12") or "") if environment == "megatron" else sys.executable
            made[environment] = make_environment(environment, cache, python)
        if made[environment]:
            trouble[name] = made[environment]
    (cache / "gpt2").mkdir(parents=True, exist_ok=True)
    (cache / "gpt2" / "config.json").write_text('{"model_type": "gpt2"}\n')
    facts = {"tokenizer_class": "GPT2Tokenizer", "model_max_length": 1024}
    (cache / "gpt2" / "tokenizer_config.json").write_text(json.dumps(facts) + "\n")
    return trouble


def make_environment(name: str, cache: Path, python: str) -> str | None:
    """A virtual environment with the packages of the name; why not, if it cannot be made."""
    folder = cache / name
    done = folder / "complete"
    if done.exists() and done.read_text() == PACKAGES[name]:
        return None
    if not python:
        return "no python3.12 found (--python312)"
    shutil.rmtree(folder, ignore_errors=True)
    commands = [[python, "-m", "venv", str(folder)], [str(folder / "bin/python"), "-m", "pip", "install", "--quiet"]]
    for words in (commands[0], commands[1] + PACKAGES[name].split()):
        try:
            ran = subprocess.run(words, capture_output=True, text=True, timeout=1800)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"cannot make its environment: {error}"
        if ran.returncode:
            return f"cannot make its environment: {(ran.stderr.strip() or 'no message').splitlines()[-1][:200]}"
    done.write_text(PACKAGES[name])
    return None


def variables(peer: Peer) -> dict[str, str]:
    """The environment of a peer's process: ours, without what points Python at our packages."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return kept | peer.variables


def tokenizer_json(vocab: Path) -> str:
    """A tokenizer.json of GPT-2's vocab.json and merges.txt."""
    lines = (vocab / "merges.txt").read_text(encoding="utf-8").split("\n")
    merges = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    ids = json.loads((vocab / "vocab.json").read_text(encoding="utf-8"))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    facts = {
        "version": "1.0",
        "added_tokens": [{"id": ids[END_OF_TEXT], "content": END_OF_TEXT, "special": True, **flags}],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": ids, "merges": merges},
    }
    return json.dumps(facts)


def run_by_hand(corpus: Path, vocab: Path, prefix: Path, *, threads: int) -> None:
    """In the peer's environment: everything in memory, files written at the end."""
    import awkward
    import gigatoken
    import numpy as np

    tokenizer = gigatoken.Tokenizer.from_json(tokenizer_json(vocab))
    encoded = tokenizer.encode_files(gigatoken.JsonlFileSource([str(corpus)]), parallel=threads > 1)
    lengths = awkward.num(encoded).to_numpy()
    ids = awkward.flatten(encoded).to_numpy().astype(np.uint16)
    np.insert(ids, np.cumsum(lengths), 50256).tofile(f"{prefix}_text_document.bin")
    lengths = (lengths + 1).astype(np.int32)
    pointers = np.zeros(len(lengths), np.int64)
    np.cumsum(2 * lengths[:-1].astype(np.int64), out=pointers[1:])
    with Path(f"{prefix}_text_document.idx").open("wb") as out:
        out.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, len(lengths), len(lengths) + 1))
        for table in (lengths, pointers, np.arange(len(lengths) + 1)):
            table.tofile(out)


def run_datatrove(corpus: Path, vocab: Path, prefix: Path) -> None:
    """In the peer's environment: its own reader, tokenizer and writer."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens.megatron_tokenizer import MegatronDocumentTokenizer

    folder = Path(f"{prefix}.datatrove")
    folder.mkdir()
    (folder / "tokenizer.json").write_text(tokenizer_json(vocab))
    steps = [
        JsonlReader(str(corpus.parent), glob_pattern=corpus.name),
        MegatronDocumentTokenizer(
            output_folder=str(folder), tokenizer_name_or_path=str(folder / "tokenizer.json"), eos_token=END_OF_TEXT
        ),
    ]
    LocalPipelineExecutor(pipeline=steps, tasks=1, workers=1, logging_dir=str(folder / "logs")).run()
    for ending in (".bin", ".idx"):
        (found,) = folder.glob(f"*{ending}")
        found.rename(f"{prefix}{ending}")


def main() -> int:
    """Set the peers up, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, help="folder of the environments")
    parser.add_argument("--megatron", type=Path, help="a checkout of Megatron-LM")
    parser.add_argument("--python312", help="the interpreter Megatron's environment is made with")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--run", choices=("byhand", "datatrove"), help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run == "byhand":
        run_by_hand(*map(Path, arguments.words), threads=arguments.workers)
        return 0
    if arguments.run == "datatrove":
        run_datatrove(*map(Path, arguments.words))
        return 0
    if arguments.cache is None:
        parser.error("--cache is needed: a folder for the environments")
    trouble = prepare(
        arguments.peers, arguments.cache.resolve(), megatron=arguments.megatron, python312=arguments.python312
    )
    for name in arguments.peers:
        print(f"{name:<16} {trouble.get(name, 'ready')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
