"""One corpus of a dataset, and the door through which its samples are read.

Arrays that are kept, and numbers that were looked up before, speak of the .idx that lay there then. Where another of
the same size lies there now, arithmetic over both can go wrong anywhere: a run outside of the tokens, a row longer than
it is. After such an error the .idx is held against its hash: one that was altered is damage with a name; of one that is
as it was the error passes, as a fault of ours. Where nothing goes wrong nothing is looked at: an altered .idx that fits
well enough is found by `mdata verify` alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from types import TracebackType

from mdata.corpus import Corpus
from mdata.errors import DamageError, MdataError
from mdata.samples.kind import SampleKind

_BY_WRONG_NUMBERS = (LookupError, ValueError, ArithmeticError, MemoryError)


@dataclass(frozen=True)
class Component:
    """One corpus of a dataset: its part in the split has `num_tokens`; `samples` makes them rows."""

    name: str
    corpus: Corpus
    samples: SampleKind
    num_tokens: int

    @cached_property
    def reading(self) -> Reading:
        """The block in which `samples` are asked for rows, or for what they read; many may be in it at once."""
        return Reading(self.corpus)


@dataclass(frozen=True)
class Reading:
    """A block that reads samples of a corpus; a generator in its place would cost a tenth of a single sample.

    Raises:
        DamageError: they could not be read, and an .idx is not the one that the corpus speaks of.
    """

    corpus: Corpus

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, _BY_WRONG_NUMBERS) and not isinstance(error, MdataError):
            damage = _altered_index(self.corpus)
            if damage is not None:
                raise damage from error


def _altered_index(corpus: Corpus) -> DamageError | None:
    """Which .idx is not what the corpus' manifest (of a bare pair: its opening) says; None if all are."""
    from mdata.indexed.blocks import hash_file  # takes thread pools along

    for shard, reader in zip(corpus.manifest.shards, corpus.readers, strict=True):
        try:
            found = hash_file(reader.idx_path)
        except OSError as error:
            found = str(error)
        if found != shard.idx_hash:
            return DamageError(
                f"{reader.idx_path} is not the one that {corpus.path.name} describes, so no sample can be read by it",
                found=f"hash {found}",
                expected=f"hash {shard.idx_hash}",
                fix=f"`mdata verify {corpus.path}` tells more; fetch both files of the pair again, or make it again",
            )
    return None
