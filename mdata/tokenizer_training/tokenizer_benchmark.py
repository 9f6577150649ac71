"""Tokenizer types, the engines on this machine with their versions, and their speed in MB/s.

Speed is that of `encode_batch` on one thread, over text that the engine has not seen before: the sources of this
Python's standard library, sorted by name, one file per text. Repeated text would favor engines that cache words. Each
engine gets as much text as it encodes in about half a second. If no tokenizer is named, small ones of each kind are
trained on the beginning of that text.
"""

from __future__ import annotations

import string
import sysconfig
import time
from base64 import b64encode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from math import inf
from pathlib import Path
from types import MappingProxyType

from mdata.errors import UsageError
from mdata.tokenizer_training.trainers import Task, train
from mdata.tokenizers.base.byte_level import to_bytes
from mdata.tokenizers.base.tokenizer import Tokenizer, TokenizerSpec
from mdata.tokenizers.base.tokenizer_folder import write_folder
from mdata.tokenizers.registry import load_tokenizer
from mdata.tokenizers.tiktoken.tiktoken_ranks import SINGLE_BYTES
from mdata.version import __version__

SMALL_VOCABULARY = 4096
# From the fastest to the slowest of each kind; "mdata" is our own C++.
ENGINES = ("gigatoken", "tiktoken", "mdata", "tokenizers", "sentencepiece")
_TRAIN_CHARS = 1_000_000
_BATCH_CHARS = 1 << 19
_MAX_S = 0.5


@dataclass(frozen=True)
class TypeFacts:
    """The files that a type needs, and its engines, the exact one last; empty if no library is needed."""

    needs: str
    engines: tuple[str, ...]


_BERT = TypeFacts("--vocab-file vocab.txt", ("mdata", "tokenizers"))
_SENTENCEPIECE = TypeFacts("--tokenizer-model FILE, a SentencePiece model", ("mdata", "sentencepiece"))
TYPES = MappingProxyType(
    {
        "GPT2BPETokenizer": TypeFacts(
            "--vocab-file vocab.json --merge-file merges.txt", ("gigatoken", "tiktoken", "tokenizers")
        ),
        "BertWordPieceLowerCase": _BERT,
        "BertWordPieceCase": _BERT,
        "SentencePieceTokenizer": _SENTENCEPIECE,
        "GPTSentencePieceTokenizer": _SENTENCEPIECE,
        "Llama2Tokenizer": _SENTENCEPIECE,
        "HuggingFaceTokenizer": TypeFacts(
            "--tokenizer-model FOLDER, one with tokenizer.json", ("gigatoken", "tiktoken", "mdata", "tokenizers")
        ),
        "TikTokenizer": TypeFacts("--tokenizer-model FILE, ranks in .json or .tiktoken", ("gigatoken", "tiktoken")),
        "NullTokenizer": TypeFacts("--vocab-size N", ()),
        "ByteTokenizer": TypeFacts("nothing", ()),
        "RWKVTokenizer": TypeFacts("--tokenizer-model FILE, as rwkv_vocab_v20230424.txt", ()),
    }
)
# Options for BPE like Llama 2's.
_LLAMA = MappingProxyType(
    {"byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False}
)


@dataclass(frozen=True)
class Measured:
    """The result of one engine with one tokenizer.

    Args:
        engine: its name.
        mb_per_s: megabytes of UTF-8 a second; None if it cannot be used.
        load_s: seconds until it was ready, including the comparison with the exact one.
        text_bytes: amount of text in the measurement.
        why_not: why it cannot be used.
    """

    engine: str
    mb_per_s: float | None
    load_s: float | None
    text_bytes: int
    why_not: str | None


def engine_versions() -> dict[str, str | None]:
    """Every engine with its version; None: not installed."""
    return {name: __version__ if name == "mdata" else _version(name) for name in ENGINES}


def measure(spec: TokenizerSpec) -> list[Measured]:
    """Measure each engine with this tokenizer, or say why it cannot be used.

    Raises:
        UsageError: the tokenizer cannot be loaded at all.
    """
    engines = TYPES[spec.type].engines if spec.type in TYPES else ()
    if not engines:
        return [_measured(load_tokenizer(spec), 0.0)]
    return [_measure_engine(name, spec, exact=engines[-1]) for name in engines]


def train_small_tokenizers(folder: Path) -> Iterator[tuple[str, TokenizerSpec]]:
    """Train a small tokenizer of each kind and write it into a folder; yields (name, spec)."""
    made = _train(Task(kind="byte-bpe", vocab_size=SMALL_VOCABULARY), folder)
    vocabulary, merges = str(folder / "vocab.json"), str(folder / "merges.txt")
    yield "byte-level BPE", TokenizerSpec(type="GPT2BPETokenizer", vocab_file=vocabulary, merge_file=merges)
    write_folder(folder, {"ranks.tiktoken": _as_ranks(made["merges.txt"].decode())})
    yield "the same as ranks", TokenizerSpec(type="TikTokenizer", model=str(folder / "ranks.tiktoken"))
    characters = "".join(filter(str.isprintable, string.printable)).replace(" ", "")
    wordpiece = Task(kind="wordpiece", vocab_size=SMALL_VOCABULARY, characters=characters.lower(), lower_case=True)
    _train(wordpiece, folder)
    yield "WordPiece", TokenizerSpec(type="BertWordPieceLowerCase", vocab_file=str(folder / "vocab.txt"))
    _train(Task(kind="sentencepiece-bpe", vocab_size=SMALL_VOCABULARY, sentencepiece=_LLAMA), folder)
    yield "SentencePiece BPE", TokenizerSpec(type="Llama2Tokenizer", model=str(folder / "tokenizer.model"))
    _train(Task(kind="sentencepiece-unigram", vocab_size=SMALL_VOCABULARY), folder)
    yield "SentencePiece unigram", TokenizerSpec(type="SentencePieceTokenizer", model=str(folder / "tokenizer.model"))
    yield "bytes", TokenizerSpec(type="ByteTokenizer")


def _train(task: Task, folder: Path) -> Mapping[str, bytes]:
    made = train(task, _texts(_TRAIN_CHARS))
    write_folder(folder, made)
    return made


def _as_ranks(merges: str) -> bytes:
    """The bytes and the results of merges as a .tiktoken file."""
    results = [to_bytes(line.replace(" ", "")) for line in merges.splitlines()[1:]]
    lines = (b64encode(token) + b" %d" % rank for rank, token in enumerate([*SINGLE_BYTES, *dict.fromkeys(results)]))
    return b"\n".join(lines)


def _measure_engine(name: str, spec: TokenizerSpec, *, exact: str) -> Measured:
    started = time.perf_counter()
    try:
        tokenizer = load_tokenizer(replace(spec, engine=name))
    except UsageError as error:
        if name == exact:
            raise
        return Measured(name, None, None, 0, _reason(str(error)))
    return _measured(tokenizer, time.perf_counter() - started)


def _measured(tokenizer: Tokenizer, load_s: float) -> Measured:
    if tokenizer.name == "NullTokenizer":
        batches = iter([[" ".join(str(number % tokenizer.vocab_size) for number in range(500_000))]])
    else:
        batches = _batches()
    seconds, text_bytes = 0.0, 0
    for batch in batches:
        started = time.perf_counter()
        tokenizer.encode_batch(batch)
        seconds += time.perf_counter() - started
        text_bytes += sum(len(text.encode()) for text in batch)
        if seconds > _MAX_S:
            break
    return Measured(tokenizer.engine, text_bytes / seconds / 1e6, load_s, text_bytes, None)


def _reason(error: str) -> str:
    """The line of an error that says what was found, otherwise the first."""
    lines = [line.strip() for line in error.splitlines()]
    return next((line.removeprefix("found: ") for line in lines if line.startswith("found: ")), lines[0])


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _files() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    inner = [path for path in root.glob("*/*.py") if path.parent.name not in ("site-packages", "dist-packages")]
    return sorted(root.glob("*.py")) + sorted(inner)


def _texts(max_chars: float = inf) -> Iterator[str]:
    """Texts, until they have `max_chars` characters together."""
    num_chars = 0
    for path in _files():
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeError):
            continue
        yield text
        num_chars += len(text)
        if num_chars >= max_chars:
            return


def _batches() -> Iterator[list[str]]:
    batch, size = list[str](), 0
    for text in _texts():
        batch.append(text)
        size += len(text)
        if size >= _BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
