"""One corpus of a dataset, the door through which its samples are read, and a dataset in a line of text.

An .idx is compared with its hash once, before the first use of its tables. One that is written over later, while it is
mapped, can make arithmetic go wrong anywhere: a run outside of the tokens, a row longer than it is. After such an error
the hash is taken again: an .idx that was altered is damage with a name; of one that is as it was the error passes, as a
fault of ours. Where nothing goes wrong nothing is looked at: `mdata verify` finds what was written over since.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING

from mdata.corpus import Corpus
from mdata.errors import MdataError
from mdata.samples.kind import SampleKind

if TYPE_CHECKING:
    from mdata.dataset import Dataset

_NAMED = 3
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
        DamageError: they could not be read, and an .idx is no longer the one that the corpus speaks of.
    """

    corpus: Corpus

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, _BY_WRONG_NUMBERS) and not isinstance(error, MdataError):
            found = (reader.alteration() for reader in self.corpus.readers)
            damage = next((one for one in found if one is not None), None)
            if damage is not None:
                raise damage from error


def repr_of(dataset: Dataset) -> str:
    """What Python shows of a dataset: what a sample is, how many there are, of which corpora, and the data id."""
    options, names = dataset.options, [component.name for component in dataset.components]
    ends = "no end" if dataset.num_samples is None else f"{dataset.num_samples:,} samples"
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    facts = (
        f"kind {options.kind!r}",
        f"order {options.order!r}",
        f"split {options.split!r}",
        f"sequence_length {options.sequence_length}",
        ends,
        f"of {', '.join(names[:_NAMED])}{more}",
        f"data id {dataset.data_id[:12]}",
    )
    return f"<mdata.Dataset {', '.join(facts)}>"
