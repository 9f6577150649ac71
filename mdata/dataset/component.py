"""One corpus of a dataset, the check for damaged files when a read fails, and a dataset in a line of text.

An .idx is compared with its hash once, before the first use of its tables. One that is written over later, while it is
mapped, can make arithmetic go wrong anywhere: a run outside of the tokens, a row longer than it is. After such an error
the hash is taken again: an .idx that was altered is damage with a name; of one that is as it was the error passes, as a
bug. Where nothing goes wrong nothing is checked: `mdata verify` finds what was written over since.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType

from mdata.corpus.corpus import Corpus
from mdata.errors import MdataError
from mdata.samples.base import Samples

_NAMED = 3
_BY_WRONG_NUMBERS = (LookupError, ValueError, ArithmeticError, MemoryError)


@dataclass(frozen=True)
class Component:
    """One corpus of a dataset: its part in the split has `num_tokens`; `samples` makes them rows."""

    name: str
    corpus: Corpus
    samples: Samples
    num_tokens: int

    @cached_property
    def damage_check(self) -> DamageCheck:
        """The block in which `samples` are read; many threads may be in it at once."""
        return DamageCheck(self.corpus)


@dataclass(frozen=True)
class DamageCheck:
    """A block that reads samples of a corpus. Not a generator: that would add a tenth to the cost of one sample.

    Raises:
        DamageError: the read failed, and an .idx is not the one that the manifest names.
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


def facts_in_short(
    num_samples: int | None, names: Sequence[str], *, options: Mapping[str, object], data_id: str
) -> str:
    """What Python shows of a dataset: how it is read, how many samples there are, of which corpora, and the data id."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    facts = [f"{name} {value!r}" for name, value in options.items()]
    facts.append("no end" if num_samples is None else f"{num_samples:,} samples")
    facts += [f"of {', '.join(names[:_NAMED])}{more}", f"data id {data_id[:12]}"]
    return f"<mdata.Dataset {', '.join(facts)}>"
