"""One corpus of a dataset, the check for damaged files when a read fails, and a one-line description of a dataset.

The hash of an .idx is checked once, before its tables are first used. If the file is overwritten later, while it is
mapped, any arithmetic on it can fail: a run beyond the tokens, or a row that is too long. After such an error the hash
is computed again. If the .idx has changed, the error becomes a DamageError that names the file; if not, the error is a
bug and passes through. Reads that succeed are not checked: `mdata verify` finds files that were overwritten.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType

from mdata.corpus.corpus import Corpus
from mdata.errors import MdataError, counted
from mdata.samples.base import Samples

_NAMED = 3
_BY_WRONG_NUMBERS = (LookupError, ValueError, ArithmeticError, MemoryError)


@dataclass(frozen=True)
class Component:
    """One corpus of a dataset: its part of the split has `num_tokens`; `samples` turns them into rows."""

    name: str
    corpus: Corpus
    samples: Samples
    num_tokens: int

    @cached_property
    def damage_check(self) -> DamageCheck:
        """The context in which `samples` are read; many threads may be inside it at once."""
        return DamageCheck(self.corpus)


@dataclass(frozen=True)
class DamageCheck:
    """A context for reading samples of a corpus. Not a generator, which would add a tenth to the cost of one sample.

    Raises:
        DamageError: the read failed, and an .idx differs from the one that the manifest names.
    """

    corpus: Corpus

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, _BY_WRONG_NUMBERS) and not isinstance(error, MdataError):
            alterations = (reader.alteration() for reader in self.corpus.readers)
            damage = next((alteration for alteration in alterations if alteration is not None), None)
            if damage is not None:
                raise damage from error


def facts_in_short(
    num_samples: int | None, names: Sequence[str], *, options: Mapping[str, object], data_id: str
) -> str:
    """The `repr` of a dataset: its kind and order, its number of samples, its corpora, and the data id."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    facts = [f"{name} {value!r}" for name, value in options.items()]
    facts.append("no end" if num_samples is None else counted(num_samples, "sample"))
    facts += [f"of {', '.join(names[:_NAMED])}{more}", f"data id {data_id[:12]}"]
    return f"<mdata.Dataset {', '.join(facts)}>"
