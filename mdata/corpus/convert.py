"""Converts pairs of older formats (TNTIDX, fairseq's) to an ordinary .bin/.idx pair with a manifest.

Tokens and documents stay the same, and so does the token type if MMIDIDX has it; uint32 and uint64 become int32 or, for
larger ids, int64. The .bin is read once and written through the normal writer, in memory of some MiB or the largest
document. Files get their final names only after everything is written, the manifest last. Repeating a finished
conversion finds the result unchanged. Whether fairseq wrote its ids plus one is not detected: the caller says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mdata.corpus.adopt import Adopted, adopt, adopt_written, check_largest_id
from mdata.corpus.corpus import check_integers
from mdata.corpus.paths import prefix_of
from mdata.errors import UsageError, os_errors_named
from mdata.indexed.legacy import DocumentGroup, LegacyReader, legacy_form_of
from mdata.indexed.pair_format import DTYPES, bin_path, idx_path
from mdata.indexed.reader import IndexedReader
from mdata.indexed.writer import IndexedWriter
from mdata.manifest.sidecars import hashes_path, level_named, manifest_path, tokenizer_facts
from mdata.manifest.types import Level
from mdata.progress import SILENT, Progress
from mdata.tokenizers.base.tokenizer import Tokenizer


def convert(
    prefix: str | Path,
    new_prefix: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    level: Level | None = None,
    fairseq_ids_plus_one: bool = False,
    progress: Progress = SILENT,
) -> Adopted:
    """Convert a pair of an older format to MMIDIDX with a manifest; the old pair is only read.

    Args:
        prefix: of the old pair; `x.bin` and `x.idx` work too.
        new_prefix: of the new pair.
        tokenizer: the one that made the ids; None if unknown.
        level: default "sentence" for a prefix that ends so, else "document".
        fairseq_ids_plus_one: the ids were written by fairseq's builder of TNTIDX, which adds 1 to each; subtract it.
        progress: receives the bytes written and notes on decisions.

    Raises:
        UsageError: no such pair, or not of an older format; values that are not token ids; other files at the new
            prefix; or ids that the tokenizer does not have.
        DamageError: the old pair is damaged.
        BadInputError: a sequence too long for MMIDIDX.
        ResourceError: the disk is full, or another error of the file system.
    """
    prefix, new_prefix = prefix_of(Path(prefix)), prefix_of(Path(new_prefix))
    if prefix.resolve() == new_prefix.resolve():
        raise UsageError(
            f"{new_prefix} is the prefix of the old pair", expected="another one: the old pair is not changed"
        )
    _refuse_another_format(prefix)
    named = [named_level for named_level in map(level_named, (prefix, new_prefix)) if named_level != "document"]
    level = level or (named[0] if named else "document")
    with LegacyReader(prefix) as old:
        _check_values(old, prefix, plus_one=fairseq_ids_plus_one)
        _note_assumptions(old, prefix, plus_one=fairseq_ids_plus_one, progress=progress)
        source = _Source(old, prefix, fairseq_ids_plus_one, progress)
        dtype = _new_dtype(source)
        if idx_path(new_prefix).exists():
            _refuse_other_content(source, new_prefix, dtype)
            with IndexedWriter(new_prefix, dtype):
                pass  # also removes temporary files of a conversion that was killed at its very end
            return adopt(new_prefix, tokenizer, level=level, full=True, progress=progress)
        _refuse_another_file(source, new_prefix, dtype)
        return _write(source, new_prefix, dtype=dtype, tokenizer=tokenizer, level=level)


class _Source:
    """The documents of an old pair with their new ids."""

    def __init__(self, old: LegacyReader, prefix: Path, plus_one: bool, progress: Progress) -> None:
        self.old, self.prefix, self.progress = old, prefix, progress
        self._plus_one = plus_one

    def groups(self, doing: str) -> Iterator[DocumentGroup]:
        """All documents, in groups."""
        self.progress.begin(f"{doing} {self.prefix.name}", self.old.num_bytes, unit="B")
        for group in self.old.groups():
            yield self._changed(group)
            self.progress.advance(group.tokens.nbytes)
        self.progress.end()

    def _changed(self, group: DocumentGroup) -> DocumentGroup:
        if not group.tokens.size:
            return group
        smallest = int(group.tokens.min()) - self._plus_one
        if smallest < 0 and self._plus_one and smallest == -1:
            raise UsageError(
                f"{self.prefix}: its ids were not written with 1 added",
                found="the value 0",
                expected="1 or more",
                fix="leave out --fairseq-ids-plus-one",
            )
        if smallest < 0:
            raise UsageError(f"{self.prefix} holds negative values", expected="token ids")
        return group._replace(tokens=group.tokens - group.tokens.dtype.type(1)) if self._plus_one else group


def _refuse_another_format(prefix: Path) -> None:
    if legacy_form_of(prefix) is None:
        IndexedReader(prefix)  # a valid pair is already converted; opening any other says what is wrong with it
        raise UsageError(f"{prefix} is already in the MMIDIDX format", fix=f"mdata adopt {prefix}, without --convert")


def _check_values(old: LegacyReader, prefix: Path, *, plus_one: bool) -> None:
    check_integers(prefix, old.dtype)
    if plus_one and old.form != "fairseq's TNTIDX":
        raise UsageError(
            f"--fairseq-ids-plus-one does not apply: {prefix} is {old.form}, which stores ids unchanged",
            fix="leave it out",
        )


def _note_assumptions(old: LegacyReader, prefix: Path, *, plus_one: bool, progress: Progress) -> None:
    if not old.has_boundaries and old.num_sequences:
        lost = " (lost in a merge)" if old.form == "Megatron's TNTIDX" else ""
        progress.note(
            f"{prefix} has no document boundaries{lost}: each of its {old.num_sequences:,} sequences becomes a document"
        )
    if old.form == "fairseq's TNTIDX" and not plus_one:
        progress.note(
            f"{prefix} is {old.form}; fairseq's own builder adds 1 to every id, and the ids are kept as they are:"
            " subtract it with --fairseq-ids-plus-one"
        )


def _new_dtype(source: _Source) -> np.dtype[np.generic]:
    """The token type of the new pair; for types that MMIDIDX lacks, the largest id decides."""
    if source.old.dtype in DTYPES.values():
        return source.old.dtype
    largest = max((int(g.tokens.max()) for g in source.groups("reading") if g.tokens.size), default=0)
    for name in ("int32", "int64"):
        if largest <= np.iinfo(name).max:
            source.progress.note(f"{source.prefix} is {source.old.dtype.name}, written as {name}")
            return np.dtype(name)
    raise UsageError(f"{source.prefix} holds ids beyond int64", found=f"id {largest}")


def _write(
    source: _Source, new_prefix: Path, *, dtype: np.dtype[np.generic], tokenizer: Tokenizer | None, level: Level
) -> Adopted:
    with os_errors_named("creating the output's folder"):
        new_prefix.parent.mkdir(parents=True, exist_ok=True)
    with IndexedWriter(new_prefix, dtype) as writer:
        for group in source.groups("converting"):
            writer.append(group.tokens, group.lengths, document_ends=group.document_ends)
        if tokenizer is not None:
            check_largest_id(source.prefix, writer.state.largest_id, tokenizer=tokenizer_facts(tokenizer))
        try:
            facts = writer.commit()
            return adopt_written(new_prefix, tokenizer, level=level, facts=facts, progress=source.progress)
        except BaseException:
            if not manifest_path(new_prefix).exists():
                writer.roll_back()
                hashes_path(new_prefix).unlink(missing_ok=True)
            raise


def _refuse_another_file(source: _Source, new_prefix: Path, dtype: np.dtype[np.generic]) -> None:
    """A killed conversion may have left only its .bin; it is written again only if the bytes are the same."""
    for path in (bin_path(new_prefix), manifest_path(new_prefix)):
        if path.exists() and (path != bin_path(new_prefix) or not _is_equal_bin(source, path, dtype)):
            raise UsageError(f"{path} already exists", fix="give another new prefix, or remove it")


def _refuse_other_content(source: _Source, new_prefix: Path, dtype: np.dtype[np.generic]) -> None:
    """Refuse an existing pair that differs from what would be written."""
    made = IndexedReader(new_prefix)
    same = (made.dtype, made.num_documents, made.num_sequences, made.num_tokens) == (
        dtype,
        source.old.num_documents,
        source.old.num_sequences,
        source.old.num_tokens,
    )
    if not (same and made.contiguous and _is_equal(source, made)):
        raise UsageError(
            f"{idx_path(new_prefix)} already exists and has other content", fix="give another new prefix, or remove it"
        )


def _is_equal_bin(source: _Source, path: Path, dtype: np.dtype[np.generic]) -> bool:
    """Whether a .bin without an .idx holds exactly the ids of the source."""
    if path.stat().st_size != source.old.num_tokens * dtype.itemsize:
        return False
    with path.open("rb") as file:
        for group in source.groups("comparing"):
            if file.read(group.tokens.size * dtype.itemsize) != group.tokens.astype(dtype).tobytes():
                return False
    return True


def _is_equal(source: _Source, made: IndexedReader) -> bool:
    token = sequence = document = 0
    for tokens, lengths, ends in source.groups("comparing"):
        same = (
            np.array_equal(made.tokens(token, len(tokens)), tokens)
            and np.array_equal(made.lengths[sequence : sequence + len(lengths)], lengths)
            and np.array_equal(made.boundaries[document + 1 : document + 1 + len(ends)], ends + sequence)
        )
        if not same:
            return False
        token, sequence, document = token + len(tokens), sequence + len(lengths), document + len(ends)
    return True
