"""The rows of input files that a job leaves out: written by `dedup`, read by `preprocess --skip-rows`.

A folder with `dedup.json`, which names each file with its size, rows and hash, and `removed.bits`: one bit for each row
of each file, rows counted before any filter, each file beginning at a byte. The hash of a file is that of the
concatenated hashes of its chunks, as in manifests, so it is known when the file has been read. `chunks.bin` has the
rows and the hash of each chunk, for parts of a job that read a section of a file; a section of parquet is compared by
the file's footer instead. Nothing is copied.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from mdata.errors import DamageError, UsageError, counted
from mdata.sources.input_files import SourceFile
from mdata.util import atomic_io

FACTS, BITS, CHUNKS = "dedup.json", "removed.bits", "chunks.bin"
FORMAT = 1
CHUNK = np.dtype([("rows", "<u8"), ("digest", "V32")])


@dataclass(frozen=True)
class ReadFile:
    """A file that was read to its end.

    Args:
        path: as an absolute path, or the address of an object.
        rows: bad and filtered ones included. hash: see the top. removed: number of rows to leave out. chunks: number of
            chunks. footer: the hash of a parquet file's footer; empty for other formats.
    """

    path: str
    size_bytes: int
    rows: int
    hash: str
    removed: int = 0
    chunks: int = 0
    footer: str = ""


def footer_hash(file: SourceFile) -> str:
    """The hash of a parquet file's footer; empty for other formats."""
    if file.format != "parquet":
        return ""
    from mdata.sources.parquet import footer_of  # pyarrow: a quarter of a second of a command's start

    return footer_of(file)[0]


class FileRows(NamedTuple):
    """The rows to leave out of a file, or of the section that a job reads.

    Args:
        file: the file that `dedup` read. removed: bool[rows]. hash: of the content that is read; empty: already
            compared.
    """

    file: ReadFile
    removed: npt.NDArray[np.bool_]
    hash: str


@dataclass(frozen=True, eq=False)
class RowSet:
    """Rows of some files.

    Attributes:
        chunk_bytes: size of the chunks that are hashed.
        files: in the order in which they were read. removed: bool[rows] of each.
        fingerprint: a hash of the whole set.
    """

    folder: Path
    chunk_bytes: int
    files: tuple[ReadFile, ...]
    removed: tuple[npt.NDArray[np.bool_], ...]
    fingerprint: str

    @classmethod
    def open(cls, folder: str | Path) -> Self:
        """Read it.

        Raises:
            UsageError: the folder has no finished result. DamageError: its files do not match.
        """
        path = Path(folder) / FACTS
        try:
            text, bits = path.read_bytes(), np.fromfile(path.with_name(BITS), np.uint8)
        except (FileNotFoundError, NotADirectoryError) as error:
            expected = "a folder that mdata dedup, or mdata clean --rows-only, has finished"
            raise UsageError(f"{folder} has no {Path(error.filename).name}", expected=expected) from error
        try:
            facts = json.loads(text)
            files = tuple(ReadFile(**file) for file in facts["files"])
            chunk_bytes = int(facts["chunk_bytes"])
        except (ValueError, KeyError, TypeError) as error:
            raise DamageError(f"{path} is damaged", found=str(error)[:200], fix=f"make {folder} again") from error
        sizes = [-(-file.rows // 8) for file in files]
        if len(bits) != sum(sizes):
            damaged = path.with_name(BITS)
            raise DamageError(f"{damaged} has another size", found=f"{len(bits)} bytes", expected=f"{sum(sizes)}")
        parts = np.split(bits, np.cumsum(sizes)[:-1]) if files else []
        removed = tuple(
            np.unpackbits(part, count=file.rows, bitorder="little").view(np.bool_)
            for file, part in zip(files, parts, strict=True)
        )
        for file, rows in zip(files, removed, strict=True):
            if int(rows.sum()) != file.removed:
                found = f"{int(rows.sum())} bits of {file.path}"
                raise DamageError(f"{path.with_name(BITS)} is damaged", found=found, expected=str(file.removed))
        return cls(Path(folder), chunk_bytes, files, removed, blake3(text + bits.tobytes()).hexdigest())

    def number_of(self, file: SourceFile) -> int:
        """The index in `files` of an input: found by its path, otherwise by its name and size.

        Raises:
            UsageError: none of them, or the file has another size now.
        """
        path = path_of(file)
        numbers = [number for number, candidate in enumerate(self.files) if candidate.path == path]
        numbers = numbers or [
            number
            for number, candidate in enumerate(self.files)
            if (Path(candidate.path).name, candidate.size_bytes) == (Path(path).name, file.size_bytes)
        ]
        if len(numbers) != 1:
            raise UsageError(
                f"{self.folder} does not say which rows of {file.path} to skip",
                found=f"{counted(len(numbers), 'file')} with its path, or its name and size",
                fix="run mdata dedup on the same input",
            )
        if self.files[numbers[0]].size_bytes != file.size_bytes:
            sizes = f"{file.size_bytes} bytes", f"{self.files[numbers[0]].size_bytes}, as when mdata dedup read it"
            raise UsageError(f"{file.path} has changed", found=sizes[0], expected=sizes[1], fix="run mdata dedup again")
        return numbers[0]

    def rows_of(self, file: SourceFile) -> FileRows:
        """The rows of an input, or of the section that is read.

        Raises:
            UsageError: see `number_of`, or a section that cannot be compared. DamageError: chunks.bin is damaged.
        """
        number = self.number_of(file)
        read, removed = self.files[number], self.removed[number]
        if file.section is None:
            return FileRows(read, removed, read.hash)
        start, stop = file.section[:2]
        if file.format == "parquet":
            from mdata.sources.parquet import footer_of

            footer, group_rows = footer_of(file)
            if footer != read.footer:
                raise self._changed(read, footer, read.footer)
            first, last = sum(group_rows[:start]), sum(group_rows[:stop])
            return FileRows(read, removed[first:last], "")
        if file.format == "arrow" or not read.chunks:
            raise UsageError(
                f"--shard divides {file.path}, and --skip-rows counts the rows of whole files here",
                fix="run mdata dedup again"
                if file.format != "arrow"
                else "give the input as more files, or run without --shard",
            )
        chunks = self.chunks_of(number)
        first, last = start // self.chunk_bytes, -(-stop // self.chunk_bytes)
        rows_before = int(chunks["rows"][:first].sum())
        rows = int(chunks["rows"][first:last].sum())
        hash = blake3(chunks["digest"][first:last].tobytes()).hexdigest()
        return FileRows(read, removed[rows_before : rows_before + rows], hash)

    def chunks_of(self, number: int) -> npt.NDArray[Any]:
        """`CHUNK` of a file.

        Raises:
            UsageError: there is no chunks.bin. DamageError: it does not fit dedup.json.
        """
        path = self.folder / CHUNKS
        before = sum(file.chunks for file in self.files[:number])
        try:
            chunks = np.fromfile(path, CHUNK, self.files[number].chunks, offset=before * CHUNK.itemsize)
        except FileNotFoundError as error:
            raise UsageError(f"{self.folder} has no {CHUNKS}", expected="a folder of mdata dedup") from error
        file = self.files[number]
        if blake3(chunks["digest"].tobytes()).hexdigest() != file.hash or int(chunks["rows"].sum()) != file.rows:
            raise DamageError(f"{path} is damaged", found=f"other chunks of {file.path}", fix="run mdata dedup again")
        return chunks

    def check(self, rows: FileRows, hash: str) -> None:
        """Refuse a file whose content differs from the one that `dedup` read.

        Raises:
            UsageError: another hash.
        """
        if rows.hash and hash != rows.hash:
            raise self._changed(rows.file, hash, rows.hash)

    def _changed(self, file: ReadFile, found: str, expected: str) -> UsageError:
        return UsageError(
            f"{file.path} is not the file that mdata dedup read, so its rows in {self.folder} are wrong",
            found=f"hash {found[:16]}",
            expected=expected[:16],
            fix="run mdata dedup again",
        )


def path_of(file: SourceFile) -> str:
    """An input's absolute path, or its address."""
    return str(file.path.resolve()) if isinstance(file.path, Path) else str(file.path)


def write_row_set(
    folder: Path,
    files: Sequence[ReadFile],
    removed: npt.NDArray[np.bool_],
    *,
    chunks: npt.NDArray[Any],
    chunk_bytes: int,
    facts: Mapping[str, Any],
) -> None:
    """Write all files in one transaction.

    Args:
        removed: bool[all rows], those of the files one after the other. chunks: `CHUNK` of all files.
        facts: the other entries of dedup.json.
    """
    parts = np.split(removed, np.cumsum([file.rows for file in files])[:-1]) if files else []
    bits = b"".join(np.packbits(part, bitorder="little").tobytes() for part in parts)
    counted = [
        dataclasses.asdict(dataclasses.replace(file, removed=int(part.sum())))
        for file, part in zip(files, parts, strict=True)
    ]
    text = json.dumps({"format": FORMAT, **facts, "chunk_bytes": chunk_bytes, "files": counted}, indent=1) + "\n"
    written = {CHUNKS: chunks.tobytes(), BITS: bits, FACTS: text.encode()}
    atomic_io.atomic_writes({folder / name: data for name, data in written.items()})
