"""Joins the inputs of a job from the sections that its parts read. Pure.

The sections of a file must be contiguous from its beginning to its end; then their rows add up, their pieces give the
hash that a single run would have computed, and the rows of each part become rows of the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from blake3 import blake3
from msgspec import UNSET

from mdata.errors import UsageError
from mdata.manifest.types import InputFile


@dataclass(frozen=True)
class Placed:
    """The position of one part's inputs among those of the job: for each, its number and the rows before it."""

    numbers: list[int] = field(default_factory=list)
    rows_before: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class JoinedInputs:
    """The inputs of a job, and the position of each part's inputs among them."""

    files: list[InputFile]
    placed: list[Placed]


class _OpenFile:
    """A file whose sections are being joined."""

    def __init__(self, first: InputFile) -> None:
        self.known = first
        self.rows = self.reached = 0
        self._hasher = blake3()

    def take(self, file: InputFile, part: int) -> None:
        """Add the next section."""
        assert file.section, "a section is joined to sections"
        if (file.path, file.bytes, file.section.start) != (self.known.path, self.known.bytes, self.reached):
            raise _gap(self, f"part {part} goes on with {file.name}")
        self._hasher.update(bytes.fromhex(file.section.pieces))
        self.rows += file.rows
        self.reached = file.section.stop

    @property
    def is_whole(self) -> bool:
        return bool(self.known.section) and self.reached == self.known.section.total  # type: ignore[union-attr]

    def joined(self) -> InputFile:
        return msgspec.structs.replace(self.known, rows=self.rows, hash=self._hasher.hexdigest(), section=UNSET)


def join_inputs(parts: Sequence[Sequence[InputFile]]) -> JoinedInputs:
    """Join the inputs that the parts of a job read, in order.

    Raises:
        UsageError: a section is missing.
    """
    files: list[InputFile] = []
    placed = []
    opened: _OpenFile | None = None
    for number, inputs in enumerate(parts, 1):
        here = Placed()
        for file in inputs:
            if opened is None and file.section:
                opened = _OpenFile(file)
            here.numbers.append(len(files))
            here.rows_before.append(opened.rows if opened else 0)
            if opened is None:
                files.append(file)
                continue
            if not file.section:
                raise _gap(opened, f"part {number} goes on with {file.path}")
            opened.take(file, number)
            if opened.is_whole:
                files.append(opened.joined())
                opened = None
        placed.append(here)
    if opened is not None:
        raise _gap(opened, "the last part ends")
    return JoinedInputs(files, placed)


def _gap(opened: _OpenFile, then: str) -> UsageError:
    section = opened.known.section
    return UsageError(
        f"{opened.known.path}: the parts do not make the whole of this input",
        found=f"read up to {opened.reached}, then {then}",
        expected=f"sections up to {section.total if section else opened.known.bytes}",
        fix="make the parts again, from one and the same input",
    )
