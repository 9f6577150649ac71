"""One corpus of a dataset, and the door through which its samples are read.

Arrays that are kept, and numbers that were looked up before, speak of the .idx that lay there then. Where another of
the same size lies there now, arithmetic over both can go wrong anywhere: a run outside of the tokens, a row longer than
it is. After such an error the .idx is held against its hash: one that was altered is damage with a name; of one that is
as it was the error passes, as a fault of ours. Reading pays nothing for it. Where nothing goes wrong nothing is looked
at: an altered .idx that fits well enough is found by `mdata verify` alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mdata.corpus import Corpus
from mdata.errors import DamageError, MdataError
from mdata.samples.kind import SampleKind


@dataclass(frozen=True)
class Component:
    """One corpus of a dataset: its part in the split has `num_tokens`; `samples` makes them rows."""

    name: str
    corpus: Corpus
    samples: SampleKind
    num_tokens: int

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Wherever `samples` are asked for rows, or for what they read.

        Raises:
            DamageError: they could not be read, and an .idx is not the one that the corpus speaks of.
        """
        try:
            yield
        except (LookupError, ValueError, ArithmeticError, MemoryError) as error:
            damage = None if isinstance(error, MdataError) else _altered_index(self.corpus)
            if damage is None:
                raise
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
