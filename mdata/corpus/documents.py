"""Documents of a corpus by number or by origin: their sequences, and the file and row each came from.

Numbers count from 0 over all shards, in the order of the files. Origins are known where `mdata preprocess`
wrote them (the origins sidecar); a pair of another program has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from mdata.corpus.corpus import Corpus
from mdata.corpus.origins import OriginsTable, open_origins
from mdata.errors import DamageError, UsageError, counted
from mdata.manifest.contained_paths import file_inside, path_inside
from mdata.util.option_synonyms import nearest


class Origin(NamedTuple):
    """Where a document came from: the input's path as it was given, and the row, from 1."""

    path: str
    row: int


class DocumentReader:
    """Reads documents by number or origin.

    Attributes:
        origins: content of the sidecar; None if there is none or it is missing.
        missing: the path of a sidecar that the manifest names but that is missing, otherwise None.

    Raises:
        DamageError: the sidecar is damaged. UsageError: it is not a regular file, or lies outside the corpus' folder.
    """

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus
        provenance = corpus.manifest.provenance
        self._inputs = [file.name for file in provenance.inputs] if provenance else []
        self.origins: OriginsTable | None = None
        self.missing: Path | None = None
        if provenance is not None and provenance.origins is not None:
            path = path_inside(corpus.path, provenance.origins.path, allow_outside=corpus.allow_outside)
            if path.exists():
                self.origins = open_origins(
                    file_inside(corpus.path, provenance.origins.path, allow_outside=corpus.allow_outside)
                )
            else:
                self.missing = path

    def origin(self, number: int) -> Origin | None:
        """The origin of a document; None if unknown.

        Raises:
            DamageError: the sidecar lacks the document, or names an input that the manifest does not.
        """
        if self.origins is None:
            return None
        file, row = self.origins.of_document(number)
        if file >= len(self._inputs):
            raise DamageError(
                f"{self.origins.path} does not belong to {self.corpus.path}",
                found=f"document {number} comes from input {file}",
                expected=f"one of its {counted(len(self._inputs), 'input')}, counted from 0",
                fix="restore the file that preprocess wrote next to the manifest",
            )
        return Origin(self._inputs[file], row)

    def from_origin(self, place: str) -> list[int]:
        """The documents that came from "FILE:ROW".

        Args:
            place: the file as given to preprocess, or the end of its path, and the row, from 1.

        Raises:
            UsageError: unknown origins, no such input, or no document of this row.
        """
        if self.origins is None:
            raise UsageError(
                f"{self.corpus.name}: the origins of its documents are not known",
                found=f"{self.missing} is missing" if self.missing else "no origins sidecar",
                fix="give document numbers instead",
            )
        path, row = parse_origin(place)
        file = self._input(path)
        numbers = self.origins.documents_of(file, row)
        numbers = [number for number in numbers if number < self.corpus.num_documents]
        if not numbers:
            raise UsageError(
                f"{self._inputs[file]}:{row} is not the origin of any document in {self.corpus.name}",
                expected="a row that was taken, not held out and not in another part",
            )
        return numbers

    def _input(self, path: str) -> int:
        """The number of the input that a path names."""
        if self._inputs.count(path) == 1:
            return self._inputs.index(path)
        wanted = Path(path).parts
        hits = [i for i, input_path in enumerate(self._inputs) if Path(input_path).parts[-len(wanted) :] == wanted]
        if len(hits) == 1:
            return hits[0]
        if hits:
            raise UsageError(
                f"{path} matches the paths of {len(hits)} inputs", found=", ".join(self._inputs[i] for i in hits[:3])
            )
        names = {Path(input_path).name: input_path for input_path in self._inputs}
        close = nearest(Path(path).name, names)
        raise UsageError(
            f"{path} is not an input of {self.corpus.name}",
            found=counted(len(self._inputs), "input") if len(self._inputs) > 3 else ", ".join(self._inputs),
            fix=f"{names[close]}?" if close else None,
        )


_MOST_DIGITS = 19  # rows fit 64 bits; Python itself refuses to parse thousands of digits


def parse_origin(place: str) -> tuple[str, int]:
    """File and row of "FILE:ROW".

    Raises:
        UsageError: not of this form.
    """
    path, _, row = place.rpartition(":")
    if not path or not row.isdecimal() or len(row) > _MOST_DIGITS or not 1 <= int(row) < 1 << 63:
        raise UsageError(
            f"origin {place!r} is not a row of a file", expected="FILE:ROW, such as a.jsonl:17; rows count from 1"
        )
    return path, int(row)


def select(text: str, num_documents: int) -> Iterator[int]:
    """The document numbers that a text such as "0:10,42,-3:" selects; ranges as in Python, in the order given.

    Raises:
        UsageError: not of this form, or a single document that does not exist.
    """
    return chain.from_iterable([_range(part.strip(), num_documents) for part in text.split(",")])


def _range(part: str, num_documents: int) -> range:
    start, colon, stop = part.partition(":")
    try:
        if colon:
            bounds = slice(int(start) if start else None, int(stop) if stop else None)
            return range(*bounds.indices(num_documents))
        number = int(part)
    except ValueError as error:
        raise UsageError(f"documents {part!r}", expected="numbers and ranges such as 0:10,42,-3:") from error
    if not -num_documents <= number < num_documents:
        raise UsageError(f"document {number}", expected=f"one of the {num_documents}, counted from 0")
    return range(number % num_documents, number % num_documents + 1)
