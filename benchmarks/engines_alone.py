"""An engine's own rate: texts in memory to ids in memory, with nothing of ours around it.

    python benchmarks/engines_alone.py ENGINE PROCESSES CORPUS VOCAB

Reads the jsonl first, then starts as many processes, each with an equal share of the documents and a tokenizer that has
seen no text; all begin together, and the time runs until the last has its ids. Prints one line of JSON. Each library is
called in the fastest way it offers for one thread: gigatoken and tokenizers take a batch, tiktoken a text.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from preprocess_peers import END_OF_TEXT, tokenizer_json

BATCH = 512
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"


def command(engine: str, processes: int, *, corpus: Path, vocab: Path) -> list[str]:
    """The words after the interpreter."""
    return [__file__, engine, str(processes), str(corpus), str(vocab)]


def gigatoken(vocab: Path) -> Callable[[Sequence[str]], int]:
    """Batches, one thread."""
    from gigatoken import Tokenizer

    tokenizer = Tokenizer.from_json(tokenizer_json(vocab))
    backend = tokenizer.backend

    def encode(texts: Sequence[str]) -> int:
        return sum(len(backend.encode(text)) for text in texts)

    return encode


def tiktoken(vocab: Path) -> Callable[[Sequence[str]], int]:
    """Text by text into numpy arrays."""
    from tiktoken import Encoding

    ids = json.loads((vocab / "vocab.json").read_text(encoding="utf-8"))
    special = {END_OF_TEXT: ids.pop(END_OF_TEXT)}
    symbols = bytes_of_symbols()
    ranks = {bytes(symbols[character] for character in symbol): rank for symbol, rank in ids.items()}
    encoding = Encoding("gpt2", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)

    def encode(texts: Sequence[str]) -> int:
        return sum(len(encoding.encode_to_numpy(text, allowed_special="all")) for text in texts)

    return encode


def tokenizers(vocab: Path) -> Callable[[Sequence[str]], int]:
    """Batches without offsets, one thread (TOKENIZERS_PARALLELISM)."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(tokenizer_json(vocab))

    def encode(texts: Sequence[str]) -> int:
        return sum(len(encoding.ids) for encoding in tokenizer.encode_batch_fast(list(texts)))

    return encode


ENGINES = {"gigatoken": gigatoken, "tiktoken": tiktoken, "tokenizers": tokenizers}


def bytes_of_symbols() -> dict[str, int]:
    """GPT-2's printable character for each byte, the other way round."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(rest)}


def work(engine: str, vocab: Path, texts: Sequence[str], *, ready, answers) -> None:
    """One process: load, wait for the others, encode, tell when it ended and how many ids there were."""
    encode = ENGINES[engine](vocab)
    ready.wait()
    start = time.monotonic()
    tokens = sum(encode(texts[place : place + BATCH]) for place in range(0, len(texts), BATCH))
    answers.put((start, time.monotonic(), tokens))


def main() -> int:
    """Measure one engine."""
    engine, processes, corpus, vocab = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
    with corpus.open(encoding="utf-8", newline="\n") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    fork = multiprocessing.get_context("fork")
    ready, answers = fork.Barrier(processes), fork.SimpleQueue()
    workers = [
        fork.Process(
            target=work, args=(engine, vocab, texts[k::processes]), kwargs={"ready": ready, "answers": answers}
        )
        for k in range(processes)
    ]
    for worker in workers:
        worker.start()
    found = [answers.get() for _ in workers]
    for worker in workers:
        worker.join()
    seconds = max(end for _, end, _ in found) - min(start for start, _, _ in found)
    text_bytes = sum(len(text.encode()) for text in texts)
    print(json.dumps({"seconds": seconds, "text_bytes": text_bytes, "tokens": sum(tokens for _, _, tokens in found)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
