"""MB of text that a tokenizer turns into ids per processor second, compared with the library that it replaces.

    python benchmarks/tokenizer_rates.py --corpus corpus/100MB.jsonl --vocab FOLDER [--megabytes 10] [--runs 3]

FOLDER holds gpt2/ (vocab.json, merges.txt), bert-uncased/vocab.txt, mistral/tokenizer.model, sp/unigram4k.model and
tiktoken/bytes_first_16k.json; what is missing is left out of the table. The corpus is one that text_corpus.py made: its
records name their kind (prose, code, multilingual), and each kind is measured by itself. Every measurement is a process
of its own that sees its text for the first time, in batches of 512 documents, on one thread; what counts is the
processor time of encoding, loading left out. "mdata" is the type's own `encode_batch`, with the engine that it takes by
itself; the other column is a plain loop around the library, the fastest way it offers to one thread. Both must give the
same ids: the table says where they do not. Medians of runs that take turns. (Named so because
a script "tokenizers.py" would hide the library from its neighbours.)
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mdata.tokenizers.base.tokenizer import TokenizerSpec

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("prose", "code", "multilingual")
BATCH = 512
OURS = "mdata"
# A document, as arrays of ids; what a library's plain loop gives for a batch.
Encode = Callable[[Sequence[str]], Sequence[Sequence[int]]]


@dataclass(frozen=True)
class Subject:
    """One tokenizer: Megatron's type with its files, and the plain loop around the library it replaces."""

    type: str
    files: dict[str, str]
    library: str
    options: tuple[tuple[str, object], ...] = ()


SUBJECTS = {
    "GPT-2 BPE": Subject(
        "GPT2BPETokenizer", {"vocab_file": "gpt2/vocab.json", "merge_file": "gpt2/merges.txt"}, "tokenizers"
    ),
    "BERT uncased": Subject("BertWordPieceLowerCase", {"vocab_file": "bert-uncased/vocab.txt"}, "tokenizers"),
    "SentencePiece BPE (mistral)": Subject("Llama2Tokenizer", {"model": "mistral/tokenizer.model"}, "sentencepiece"),
    "SentencePiece unigram": Subject("SentencePieceTokenizer", {"model": "sp/unigram4k.model"}, "sentencepiece"),
    "tiktoken ranks": Subject(
        "TikTokenizer", {"model": "tiktoken/bytes_first_16k.json"}, "tiktoken", (("vocab_size", 17000),)
    ),
}


def ours(subject: Subject, vocab: Path) -> tuple[Encode, str]:
    """What `mdata preprocess` calls, and the engine that does it."""
    import mdata

    files = {name: str(vocab / path) for name, path in subject.files.items()}
    tokenizer = mdata.load_tokenizer(TokenizerSpec(type=subject.type, options=subject.options, **files))

    def encode(texts: Sequence[str]) -> Sequence[Sequence[int]]:
        return tokenizer.encode_batch(texts)[:1]

    return encode, tokenizer.engine


def with_tokenizers(subject: Subject, vocab: Path) -> tuple[Encode, str]:
    """The `tokenizers` library, built from the same files."""
    from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

    files = {name: str(vocab / path) for name, path in subject.files.items()}
    if "merge_file" in files:
        library = Tokenizer(models.BPE.from_file(files["vocab_file"], files["merge_file"]))
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    else:
        library = Tokenizer(models.WordPiece.from_file(files["vocab_file"], unk_token="[UNK]"))
        library.normalizer = normalizers.BertNormalizer(lowercase=True)
        library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        library.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
        ends = [(name, library.token_to_id(name)) for name in ("[SEP]", "[CLS]")]
        library.post_processor = processors.BertProcessing(*ends)

    def encode(texts: Sequence[str]) -> Sequence[Sequence[int]]:
        return [encoding.ids for encoding in library.encode_batch_fast(list(texts))]

    return encode, "tokenizers"


def with_sentencepiece(subject: Subject, vocab: Path) -> tuple[Encode, str]:
    """The `sentencepiece` library."""
    from sentencepiece import SentencePieceProcessor

    library = SentencePieceProcessor(model_file=str(vocab / subject.files["model"]))

    def encode(texts: Sequence[str]) -> Sequence[Sequence[int]]:
        return [library.encode(text) for text in texts]

    return encode, "sentencepiece"


def with_tiktoken(subject: Subject, vocab: Path) -> tuple[Encode, str]:
    """The `tiktoken` library with the list's ranks, Megatron's second pattern and its special tokens."""
    from base64 import b64decode

    from tiktoken import Encoding

    entries = json.loads((vocab / subject.files["model"]).read_text(encoding="utf-8"))
    special = 1000
    ranks = {b64decode(entry["token_bytes"]): entry["rank"] for entry in entries}
    names = ["<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>"]
    names += [f"<SPECIAL_{number}>" for number in range(len(names), special)]
    kept = dict(sorted(ranks.items(), key=lambda pair: pair[1])[: dict(subject.options)["vocab_size"] - special])
    numbers = {name: len(kept) + place for place, name in enumerate(names)}
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    start = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{start}{upper}*{lower}+|{start}{upper}+{lower}*|\p{{N}}"
    pattern = words + r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    library = Encoding("ranks", pat_str=pattern, mergeable_ranks=kept, special_tokens=numbers)
    ids = np.concatenate([np.arange(len(kept)) + special, np.arange(special)])

    def encode(texts: Sequence[str]) -> Sequence[Sequence[int]]:
        return [ids[library.encode_to_numpy(text, allowed_special="all")] for text in texts]

    return encode, "tiktoken"


LIBRARIES = {"tokenizers": with_tokenizers, "sentencepiece": with_sentencepiece, "tiktoken": with_tiktoken}


def texts_of(corpus: Path, kind: str, *, megabytes: float) -> list[str]:
    """The first texts of a kind, so many bytes of them."""
    texts, left = [], megabytes * 1e6
    with corpus.open(encoding="utf-8", newline="\n") as lines:
        for line in lines:
            record = json.loads(line)
            if record["kind"] == kind:
                texts.append(record["text"])
                left -= len(record["text"].encode())
            if left <= 0:
                break
    return texts


def one_measurement(arguments: argparse.Namespace) -> dict[str, object]:
    """In a process of its own: load, encode, tell the processor time, the ids' hash and the engine."""
    subject = SUBJECTS[arguments.subject]
    texts = texts_of(arguments.corpus, arguments.kind, megabytes=arguments.megabytes)
    make = ours if arguments.side == OURS else LIBRARIES[subject.library]
    encode, engine = make(subject, arguments.vocab)
    found = []
    begun = time.process_time()
    for start in range(0, len(texts), BATCH):
        found.append(encode(texts[start : start + BATCH]))
    seconds = time.process_time() - begun
    hasher = hashlib.sha256()
    for batch in found:
        for ids in batch:
            hasher.update(np.asarray(ids, np.int32).tobytes())
    text_bytes = sum(len(text.encode()) for text in texts)
    return {"mb_per_cpu_s": text_bytes / 1e6 / seconds, "ids": hasher.hexdigest(), "engine": engine}


def measure(arguments: argparse.Namespace, subject: str, *, kind: str, side: str) -> dict[str, object]:
    """The same, from outside."""
    words = ["--corpus", arguments.corpus, "--vocab", arguments.vocab, "--megabytes", arguments.megabytes]
    words += ["--subject", subject, "--kind", kind, "--side", side]
    threads = dict.fromkeys(("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    variables = {**os.environ, **threads, "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, __file__, *map(str, words)], cwd=ROOT, env=variables, capture_output=True, check=True
    )
    return json.loads(done.stdout)


def table(arguments: argparse.Namespace) -> list[dict[str, object]]:
    """One row for each tokenizer and kind of text; sides take turns."""
    rows = []
    for name, subject in SUBJECTS.items():
        if not all((arguments.vocab / path).is_file() for path in subject.files.values()):
            continue
        for kind in KINDS:
            runs = {side: [] for side in (OURS, subject.library)}
            for _ in range(arguments.runs):
                for side, found in runs.items():
                    found.append(measure(arguments, name, kind=kind, side=side))
            mine, theirs = (statistics.median(run["mb_per_cpu_s"] for run in found) for found in runs.values())
            equal = len({run["ids"] for found in runs.values() for run in found}) == 1
            engine = runs[OURS][0]["engine"]
            row = {"tokenizer": name, "text": kind, "engine": engine, "library": subject.library}
            rows.append({**row, "MB/s": mine, "library MB/s": theirs, "ratio": mine / theirs, "same ids": equal})
            print(
                f"{name:28} {kind:13} {engine:14} {mine:8.1f}   {subject.library:14} {theirs:8.2f}   "
                f"x{mine / theirs:6.1f}   {'same ids' if equal else 'OTHER IDS'}",
                flush=True,
            )
    return rows


def main() -> int:
    """Print the table, or (in a child) make one measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--vocab", type=Path, required=True)
    parser.add_argument("--megabytes", type=float, default=10)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--subject", choices=tuple(SUBJECTS), help=argparse.SUPPRESS)
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.corpus, arguments.vocab = arguments.corpus.resolve(), arguments.vocab.resolve()
    if arguments.subject:
        print(json.dumps(one_measurement(arguments)))
        return 0
    rows = table(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
