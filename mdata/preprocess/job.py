"""A job: everything that is known before the first record is tokenized.

The inputs as they are now, the tokenizer, how records are read and where documents go; and the words by which
a journal tells whether an earlier run was of this same job.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from mdata.errors import UsageError
from mdata.indexed import smallest_dtype
from mdata.preprocess.encode import HOLDOUT_BITS, EncodeSpec
from mdata.preprocess.options import PreprocessOptions, content_options
from mdata.preprocess.routes import Routes, merged_prefix
from mdata.progress import Progress
from mdata.sources import ReadSpec, SourceFile, parse, pieces, read_piece
from mdata.tokenizers import Tokenizer, TokenizerSpec, load_tokenizer


@dataclass(frozen=True)
class Job:
    """See `plan_job`."""

    options: PreprocessOptions
    files: Sequence[SourceFile]
    tokenizer: Tokenizer
    spec: EncodeSpec
    routes: Routes
    progress: Progress

    @property
    def num_keys(self) -> int:
        """Keys, each of which gives corpora of its own."""
        return len(self.options.json_keys)

    @property
    def input_bytes(self) -> int:
        """Size of all inputs as they lie on disk."""
        return sum(file.size_bytes for file in self.files)

    def prefixes(self) -> dict[str, Path]:
        """Name of each result -> prefix of its files; merged corpora come last."""
        options = self.options
        found = {
            self.routes.name(key, route): self.routes.prefix(options, key, route=route)
            for route in range(self.routes.num_routes)
            for key in options.json_keys
        }
        if self.routes.partitions > 1:
            found |= {key: merged_prefix(options, key) for key in options.json_keys}
        return found

    def words(self) -> dict[str, Any]:
        """What makes it this job and no other, inputs aside: JSON types."""
        return {
            "journal": 1,
            "options": content_options(self.options),
            "outputs": sorted(str(prefix) for prefix in self.prefixes().values()),
            "tokenizer": self.tokenizer.fingerprint,
        }

    def beside(self, ending: str) -> Path:
        """A hidden file of this job in the output's folder."""
        prefix = Path(self.options.output_prefix)
        # Jobs with other keys may run at the same time; a name has at most 255 bytes.
        keys = "+".join(self.options.json_keys)[:80]
        return prefix.with_name(f".{prefix.name}_{keys}.{ending}")


def useful_workers(options: PreprocessOptions, files: Sequence[SourceFile]) -> int:
    """Workers that would find something to do: no more than there are pieces, if those can be counted."""
    if any(file.streamed for file in files):
        return options.workers
    return min(options.workers, -(-sum(file.size_bytes for file in files) // options.unit_bytes))


def plan_job(options: PreprocessOptions, files: Sequence[SourceFile], *, progress: Progress) -> Job:
    """Load the tokenizer, decide the routes.

    Raises:
        UsageError: options or a tokenizer that cannot be used.
    """
    tokenizer = load_tokenizer(tokenizer_spec(options))
    for note in tokenizer.notes:
        progress.note(note)
    read = ReadSpec(
        json_keys=options.json_keys,
        text_documents=options.text_documents,
        max_record_bytes=options.max_record_bytes,
        keep_bad_lines=options.on_error == "quarantine",
    )
    holdout = Fraction(options.holdout)
    spec = EncodeSpec(
        read,
        _eod_to_append(options, tokenizer),
        smallest_dtype(tokenizer.vocab_size).name,
        int(holdout * 2**HOLDOUT_BITS),
    )
    routes = Routes(options.partitions, _rows_per_part(options, files, read), holdout > 0)
    return Job(options, files, tokenizer, spec, routes, progress)


def tokenizer_spec(options: PreprocessOptions) -> TokenizerSpec:
    """The tokenizer that the options ask for."""
    return TokenizerSpec(
        type=options.tokenizer_type,
        model=options.tokenizer_model,
        vocab_file=options.vocab_file,
        merge_file=options.merge_file,
        options=options.tokenizer_options,
        engine=options.engine,
    )


def printable_path(path: Path) -> str:
    """A path as text, with the bytes that are not UTF-8 written as \\x.."""
    return os.fsencode(path).decode(errors="backslashreplace")


def _eod_to_append(options: PreprocessOptions, tokenizer: Tokenizer) -> int | None:
    if options.append_eod and tokenizer.eod is None:
        raise UsageError(
            f"append_eod: the tokenizer {options.tokenizer_model} has no end-of-document token",
            expected="an eos_token (or sep_token) in tokenizer_config.json",
            fix="name one there, or leave append_eod out",
        )
    return tokenizer.eod if options.append_eod else None


def _rows_per_part(options: PreprocessOptions, files: Sequence[SourceFile], read: ReadSpec) -> int | None:
    """ceil(rows / P) where parts are runs of rows: needs a pass over the input that only counts."""
    if options.partitions == 1 or not options.keep_sequential_samples:
        return None
    rows = 0
    for piece in pieces(files, options.unit_bytes, spec=read):
        rows += parse(piece.source.format, read_piece(piece, read), spec=read).rows
    return max(1, -(-rows // options.partitions))
