"""The pairs of a corpus, opened as its manifest describes them.

With up to 1,000 shards, each pair is opened and its header compared with the manifest. With more, only the file sizes
are compared: a file is opened when it is first read, and must then still be the file whose size was compared. The hash
of the tables is always compared before their first use. So 100,000 shards cost two system calls each. A process may
have about 65,000 maps, so with more than 20,000 shards none is mapped, in either mode.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mdata.errors import DamageError
from mdata.indexed.mapped_files import look_at
from mdata.indexed.pair_format import MAGIC, VERSION, IdxHeader, bin_path, dtype_code, idx_path
from mdata.indexed.reader import Described, IndexedReader, Mode, PairFacts
from mdata.manifest.contained_paths import shards_inside
from mdata.manifest.types import CorpusManifest, Shard
from mdata.util.gc_pause import gc_paused

MOST_OPENED = 1_000
MOST_MAPPED = 20_000


def open_shards(
    path: Path, content: CorpusManifest, *, mode: Mode, checked: bool, allow_outside: bool
) -> list[IndexedReader]:
    """A reader for each shard of a corpus.

    Args:
        path: of the manifest.
        content: the manifest.
        mode: "mmap" or "pread".
        checked: check the tables of up to 1,000 shards now, not at their first use.
        allow_outside: the manifest may name files outside its folder.

    Raises:
        UsageError: a pair is missing, or lies outside the folder. DamageError: it differs from the one that the
            manifest describes.
    """
    prefixes = shards_inside(path, [shard.path for shard in content.shards], allow_outside=allow_outside)
    pairs = list(zip(prefixes, content.shards, strict=True))
    if len(pairs) > MOST_OPENED:
        how: Mode = "pread" if len(pairs) > MOST_MAPPED else mode
        with gc_paused():
            return [_described_reader(path, prefix, shard, dtype=content.dtype, mode=how) for prefix, shard in pairs]
    readers = []
    for prefix, shard in pairs:
        described = Described(path, shard.idx_hash)
        reader = IndexedReader(prefix, mode=mode, contiguous=shard.contiguous, described=described)
        readers.append(reader)
    for shard, reader in zip(content.shards, readers, strict=True):
        _check_pair(path, content.dtype, shard=shard, reader=reader)
        if checked:
            reader.check()
    return readers


def _described_reader(path: Path, prefix: Path, shard: Shard, *, dtype: str, mode: Mode) -> IndexedReader:
    """A reader that opens its files at the first read of tokens or tables."""
    code = dtype_code(np.dtype(dtype))
    index, tokens = look_at(idx_path(prefix)), look_at(bin_path(prefix))
    wanted = IdxHeader(MAGIC, VERSION, code, shard.sequences, shard.documents + 1).index_bytes
    problems = [
        (file, f"{file_facts[2]} bytes", f"{size} bytes")
        for file, file_facts, size in ((idx_path(prefix), index, wanted), (bin_path(prefix), tokens, shard.bytes))
        if file_facts[2] != size
    ]
    if problems:
        raise _not_described(path, problems)
    facts = PairFacts(code, shard.sequences, shard.documents, shard.contiguous, index, tokens, compared=False)
    return IndexedReader(prefix, mode=mode, described=Described(path, shard.idx_hash), known_facts=facts)


def _check_pair(path: Path, dtype: str, *, shard: Shard, reader: IndexedReader) -> None:
    """Refuse a pair that differs from its manifest; the error names the file that differs."""
    facts: list[tuple[Path, str, object, object]] = [
        (reader.idx_path, "token type", reader.dtype.name, dtype),
        (reader.idx_path, "documents", reader.num_documents, shard.documents),
        (reader.idx_path, "sequences", reader.num_sequences, shard.sequences),
        (reader.bin_path, "bytes", reader.bin_bytes, shard.bytes),
        (reader.bin_path, "tokens", reader.bin_bytes // np.dtype(dtype).itemsize, shard.tokens),
    ]
    wrong = [
        (file, f"{name}: {actual}", f"{name}: {described}")
        for file, name, actual, described in facts
        if actual != described
    ]
    if wrong:
        raise _not_described(path, wrong)


def _not_described(path: Path, wrong: list[tuple[Path, str, str]]) -> DamageError:
    """The error about files of a pair, with the values found and those of the manifest."""
    files = list(dict.fromkeys(str(file) for file, *_ in wrong))
    remedy = f"copy {files[0]} again, or make the pair again"
    both = f"copy the pair again, or remove {path.name} to use the pair as it is"
    return DamageError(
        f"{' and '.join(files)} {'is not the one' if len(files) == 1 else 'are not those'} that {path.name} describes",
        found=", ".join(actual for _, actual, _ in wrong),
        expected=", ".join(expected for *_, expected in wrong),
        fix=remedy if len(files) == 1 else both,
    )
