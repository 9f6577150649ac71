"""`preprocess`: plan, workers, one ordered writer per key, manifest last.

The parent plans byte ranges, hands them to workers, and takes the results back in the order of the input,
so the files do not depend on the number of workers or the size of units. Nothing has a final name until
everything is tokenized. Then, key by key: the old manifest goes, the pair takes its place (see
mdata/indexed/writer.py), the sidecar and the tokenizer's folder follow, the manifest comes last.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from mdata.errors import UsageError, os_errors_named
from mdata.indexed import IndexedWriter, smallest_dtype
from mdata.manifest import CorpusManifest, InputFile, Provenance, Statistics
from mdata.preprocess.encode import Encoded, EncodedBlock, EncodeSpec
from mdata.preprocess.finish import manifest_path, write_corpus
from mdata.preprocess.options import PreprocessOptions, check_options, result_prefix
from mdata.preprocess.workers import Task, WorkerSetup, encode_here, encode_in_workers
from mdata.progress import SILENT, Progress
from mdata.sources import SourceFile, Unit, blocks, check_unchanged, find_files, plan_units
from mdata.tokenizers import Tokenizer, load_tokenizer
from mdata.version import __version__


@dataclass(frozen=True)
class PreprocessResult:
    """What was made: for each key the manifest and where it lies."""

    manifests: dict[str, CorpusManifest]
    paths: dict[str, Path]


@dataclass(frozen=True)
class _Job:
    """Everything that is known before the first line is tokenized."""

    options: PreprocessOptions
    files: Sequence[SourceFile]
    tokenizer: Tokenizer
    spec: EncodeSpec
    progress: Progress


def preprocess(options: PreprocessOptions, progress: Progress = SILENT) -> PreprocessResult:
    """Turn text into token files and manifests, with Megatron's rules for what a document is.

    With more than one worker the caller's main module must be importable (`if __name__ == "__main__"`), because
    workers are spawned.

    Raises:
        UsageError: options, input or tokenizer that cannot be used.
        BadInputError: a record that cannot be taken, by file and row; nothing is left behind.
        ResourceError: disk, memory or a worker was lost; nothing is left behind.
    """
    check_options(options)
    files = find_files(options.input)
    tokenizer = load_tokenizer(options.tokenizer_type, options.tokenizer_model or '', **dict(options.tokenizer_options))
    spec = EncodeSpec(options.json_keys, _eod_to_append(options, tokenizer))
    job = _Job(options, files, tokenizer, spec, progress)
    with os_errors_named("making the output folder"):
        Path(options.output_prefix).parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        sinks = [stack.enter_context(_Sink(result_prefix(options, key), tokenizer)) for key in options.json_keys]
        records = _fill(sinks, job)
        inputs = [_input_facts(file) for file in files]
        manifests, paths = {}, {}
        for key, sink in zip(options.json_keys, sinks, strict=True):
            provenance = _provenance(options, key, inputs=inputs, records=records)
            manifests[key] = write_corpus(
                sink.writer,
                sink.prefix,
                tokenizer=tokenizer,
                provenance=provenance,
                statistics=sink.statistics(),
            )
            paths[key] = manifest_path(sink.prefix)
    return PreprocessResult(manifests, paths)


def _eod_to_append(options: PreprocessOptions, tokenizer: Tokenizer) -> int | None:
    if options.append_eod and tokenizer.eod is None:
        raise UsageError(
            f"append_eod: the tokenizer {options.tokenizer_model} has no end-of-document token",
            expected="an eos_token (or sep_token) in tokenizer_config.json",
            fix="name one there, or leave append_eod out",
        )
    return tokenizer.eod if options.append_eod else None


class _Sink:
    """The ordered writer of one key and what is counted on the way."""

    def __init__(self, prefix: Path, tokenizer: Tokenizer) -> None:
        self.prefix = prefix
        self.writer = IndexedWriter(prefix, smallest_dtype(tokenizer.vocab_size))
        self.num_tokens = 0
        self._document_lengths = np.zeros(65, np.int64)
        self._text_bytes = 0

    def __enter__(self) -> _Sink:
        return self

    def __exit__(self, *_: object) -> None:
        self.writer.abandon()

    def take(self, encoded: Encoded) -> None:
        """Append whole documents."""
        self.writer.append(encoded.tokens, encoded.lengths, document_ends=encoded.document_ends)
        self.num_tokens += len(encoded.tokens)
        self._document_lengths += length_histogram(encoded)
        self._text_bytes += encoded.text_bytes

    def statistics(self) -> Statistics:
        """What was counted."""
        bins = np.trim_zeros(self._document_lengths, "b").tolist()
        return Statistics(document_lengths=bins, text_bytes=self._text_bytes)


def length_histogram(encoded: Encoded) -> npt.NDArray[np.int64]:
    """Documents by length: int64[65], [0] without tokens, [k] with 2^(k-1) to 2^k - 1 tokens."""
    token_ends = np.concatenate(([0], np.cumsum(encoded.lengths)))
    lengths = np.diff(token_ends[encoded.document_ends], prepend=0)
    # frexp's exponent is the number of binary digits, exact below 2^53.
    return np.bincount(np.frexp(lengths.astype(np.float64))[1], minlength=65).astype(np.int64)


def _fill(sinks: Sequence[_Sink], job: _Job) -> int:
    """Tokenize everything into the sinks, in the order of the input; returns the number of records."""
    job.progress.begin("tokenizing", sum(file.size_bytes for file in job.files), unit="B")
    records = rows_of_file = 0
    current = None
    with closing(_encoded(job)) as results:
        for task, block in results:
            if task.unit.file is not current:
                current, rows_of_file = task.unit.file, 0
            if block.problem:
                raise block.problem.as_error(task.unit.file.path, rows_of_file)
            for sink, encoded in zip(sinks, block.parts, strict=True):
                sink.take(encoded)
            rows_of_file += block.rows
            records += block.rows
            tokens = sum(sink.num_tokens for sink in sinks)
            job.progress.advance(task.file_bytes, tokens=tokens, documents=records)
    job.progress.end()
    return records


def _encoded(job: _Job) -> Generator[tuple[Task, EncodedBlock], None, None]:
    """Tasks and their results in the order of the input, by worker processes where they are of use."""
    options = job.options
    units = plan_units(job.files, options.unit_bytes)
    tasks = _tasks(units, options.unit_bytes)
    one_task = len(units) < 2 and all(file.compression == "none" for file in job.files)
    if options.workers == 1 or one_task:
        yield from encode_here(tasks, job.tokenizer, spec=job.spec)
        return
    setup = WorkerSetup(options.tokenizer_type, job.tokenizer.files, job.tokenizer.options, job.spec)
    yield from encode_in_workers(tasks, setup, num_workers=options.workers)


def _tasks(units: Sequence[Unit], unit_bytes: int) -> Iterator[Task]:
    """A plain unit is read by who encodes it; compressed text is unpacked here and handed out in blocks."""
    for unit in units:
        if unit.file.compression == "none":
            yield Task(unit, None, unit.stop - unit.start)
        else:
            for block in blocks(unit, unit_bytes):
                yield Task(unit, block.data, block.file_bytes)


def _input_facts(file: SourceFile) -> InputFile:
    """Hash a file that was read; it must be as it was when the work was planned."""
    with os_errors_named("reading the input"):
        digest = blake3().update_mmap(file.path).hexdigest()
    check_unchanged(file)
    return InputFile(path=printable_path(file.path), bytes=file.size_bytes, modified_ns=0, hash=digest, block_bytes=1, rows=0)


def printable_path(path: Path) -> str:
    """A path as text, with the bytes that are not UTF-8 written as \\x.."""
    return os.fsencode(path).decode(errors="backslashreplace")


def _provenance(options: PreprocessOptions, key: str, *, inputs: list[InputFile], records: int) -> Provenance:
    """What decided the content; the number of workers did not."""
    recorded = {
        "append_eod": options.append_eod,
        "json_key": key,
        "tokenizer_type": options.tokenizer_type,
    }
    return Provenance(
        program=f"mdata {__version__}",
        options=recorded,
        inputs=inputs,
        records=records,
        skipped={},
        special_in_text=None,
        origins=None,
    )
