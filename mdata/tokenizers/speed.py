"""What there is on this machine, and how fast it is here: types, engines, their versions, MB/s.

Speed is that of `encode_batch` on one thread, over text that the engine has not seen before: the sources of
this Python's standard library, in the order of their names, a file a text. A text repeated would flatter the
engines that remember words. Each engine gets as much of it as it takes in about a second.
"""

from __future__ import annotations

import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from itertools import islice
from pathlib import Path
from types import MappingProxyType

from mdata.errors import UsageError
from mdata.tokenizers.engines import ENGINES, EXACT, WORDPIECE
from mdata.tokenizers.folder import write_folder
from mdata.tokenizers.learners import Task, learn
from mdata.tokenizers.protocol import Tokenizer, TokenizerSpec
from mdata.tokenizers.registry import available, load_tokenizer

SMALL_VOCABULARY = 4096
_LEARN_FROM_CHARS = 2_000_000
_BATCH_CHARS = 1 << 20
_MOST_S = 1.0
_WORDPIECE = (WORDPIECE, EXACT)
_ENGINES_OF = MappingProxyType(
    {
        "GPT2BPETokenizer": tuple(name for name in ENGINES if name != WORDPIECE),
        "BertWordPieceLowerCase": _WORDPIECE,
        "BertWordPieceCase": _WORDPIECE,
        "NullTokenizer": (),
        "ByteTokenizer": (),
    }
)


@dataclass(frozen=True)
class Measured:
    """What one engine did with one tokenizer.

    Args:
        engine: its name.
        mb_per_s: megabytes of UTF-8 a second; None where it was not taken.
        load_s: seconds until it was ready, the comparison with the exact one included.
        text_bytes: how much text it was measured on.
        why_not: why it was not taken.
    """

    engine: str
    mb_per_s: float | None
    load_s: float | None
    text_bytes: int
    why_not: str | None


def engine_versions() -> dict[str, str | None]:
    """Every engine, from the fastest, with its version; None where it is not installed."""
    return {name: _version(name) for name in ENGINES}


def engines_of_types() -> dict[str, tuple[str, ...]]:
    """Every type that can be loaded, with the engines that may serve it; none where it needs no library."""
    return {name: _ENGINES_OF.get(name, ENGINES) for name in available()}


def measure(spec: TokenizerSpec) -> list[Measured]:
    """Measure each engine with this tokenizer; one that cannot be taken tells why.

    Raises:
        UsageError: the tokenizer cannot be loaded at all.
    """
    if not engines_of_types().get(spec.type, ENGINES):
        return [_measured(load_tokenizer(spec), 0.0)]
    return [_measure_engine(name, spec) for name in engines_of_types().get(spec.type, ENGINES)]


def learnt_here(folder: Path) -> TokenizerSpec:
    """A small tokenizer, learnt from the beginning of the sample and put into a folder."""
    texts = islice(_texts(), _count(_LEARN_FROM_CHARS))
    made = learn(Task(kind="byte-bpe", vocab_size=SMALL_VOCABULARY), texts)
    write_folder(folder, {"tokenizer.json": made["tokenizer.json"]})
    return TokenizerSpec(type="HuggingFaceTokenizer", model=str(folder))


def _measure_engine(name: str, spec: TokenizerSpec) -> Measured:
    started = time.perf_counter()
    try:
        tokenizer = load_tokenizer(replace(spec, engine=name))
    except UsageError as error:
        if name == ENGINES[-1]:
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
        if seconds > _MOST_S:
            break
    return Measured(tokenizer.engine, text_bytes / seconds / 1e6, load_s, text_bytes, None)


def _reason(error: str) -> str:
    """The line that says what was found, else the first."""
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


def _texts() -> Iterator[str]:
    for path in _files():
        try:
            yield path.read_text(encoding="utf-8")
        except (OSError, UnicodeError):
            continue


def _count(chars: int) -> int:
    """How many of the texts have that many characters together."""
    seen = 0
    for count, text in enumerate(_texts(), 1):
        seen += len(text)
        if seen >= chars:
            return count
    return len(_files())


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
