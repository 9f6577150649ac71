"""Corpora of labelled rows, for samples of kind "classify".

A row is a document: label and name (`label_ids`), then its texts. Texts are tokenized without the special tokens that
some tokenizers add, because samples add their own. Of choices, each question with its option is cut to `most_choice`
ids, so that some of the article has room beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from mdata.errors import BadInputError, UsageError, os_errors_named
from mdata.indexed.pair_format import smallest_dtype
from mdata.manifest.sidecars import tokenizer_facts
from mdata.manifest.types import CorpusManifest, InputFile, Provenance
from mdata.preprocessing.corpus_writer import CorpusContent, CorpusWriter
from mdata.preprocessing.encode import Encoded
from mdata.preprocessing.placing import Staged
from mdata.progress import SILENT, Progress
from mdata.rewriting.rewritten import Rewriting, write_results
from mdata.sources.labelled import LEVEL, LabelledFile, RowName, Task, label_ids
from mdata.tokenizers.base.tokenizer import IdArray, TextRefused, Tokenizer
from mdata.tokenizers.registry import build_tokenizer, config_of
from mdata.util.regular_files import modified_ns
from mdata.version import __version__

MOST_CHOICE = 128  # ids of a question with its option: MAX_QA_LENGTH of Megatron-LM
_VERSION = 1
_AT_ONCE = 4096  # rows


def without_ends(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer, which adds no special tokens to texts."""
    adds = "include_special_tokens" in getattr(type(tokenizer), "OPTIONS", ())
    if not adds or tokenizer.options.get("include_special_tokens") is False:
        return tokenizer
    name, files, options, engine = config_of(tokenizer)
    return build_tokenizer(name, files, engine=engine, options={**options, "include_special_tokens": False})


def write_labelled(
    sets: Mapping[Path, Sequence[LabelledFile]],
    tokenizer: Tokenizer,
    *,
    task: Task,
    most_choice: int = MOST_CHOICE,
    overwrite: bool = False,
    progress: Progress = SILENT,
) -> dict[Path, CorpusManifest]:
    """Write a corpus for each prefix, or find it written; the manifest of each.

    Args:
        sets: prefix -> the files whose rows it has, in their order. tokenizer: what it adds to texts is left out.
        most_choice: ids of a question with its option.

    Raises:
        UsageError: other files have these names, or files without rows. BadInputError: a text has no ids.
    """
    tokenizer = without_ends(tokenizer)
    made_by = {prefix: _made_by(files, task, most_choice) for prefix, files in sets.items()}

    def make(prefix: Path) -> Staged:
        return _write(prefix, sets[prefix], tokenizer, made_by[prefix], progress)

    rewriting = Rewriting(
        f"tokenizing rows of task {task}",
        f"a corpus of these rows of task {task}",
        [*sets],
        make=make,
        differs=lambda prefix, existing: _differs(made_by[prefix], tokenizer, existing),
        overwrite=overwrite,
    )
    return {prefix: written.manifest for prefix, written in write_results(rewriting, progress).items()}


def _made_by(files: Sequence[LabelledFile], task: Task, most_choice: int) -> dict[str, Any]:
    hashes = []
    for file in files:
        with os_errors_named("reading labelled rows"):
            hashes += [[path.name, blake3(path.read_bytes()).hexdigest()] for path in file.files]
    skipped = {kind: sum(file.skipped[kind] for file in files) for file in files for kind in file.skipped}
    made_by: dict[str, Any] = {
        "labelled": _VERSION,
        "task": task,
        "labels": list(files[0].labels),
        "files": hashes,
        "skipped": skipped,
    }
    if files[0].columns:
        made_by["columns"] = files[0].columns
    return made_by | ({} if files[0].labels else {"most_choice": most_choice})


def _differs(made_by: Mapping[str, Any], tokenizer: Tokenizer, existing: CorpusManifest) -> str | None:
    if existing.provenance is None or existing.provenance.options != made_by:
        return "it was made of other rows or settings"
    fingerprint = existing.tokenizer.fingerprint if existing.tokenizer else None
    return None if fingerprint == tokenizer.fingerprint else "it was made with another tokenizer"


def _write(
    prefix: Path,
    files: Sequence[LabelledFile],
    tokenizer: Tokenizer,
    made_by: Mapping[str, Any],
    progress: Progress,
) -> Staged:
    if not any(file.rows for file in files):
        raise UsageError(f"{', '.join(str(file.files[0]) for file in files)}: no rows", found=str(made_by["skipped"]))
    most = made_by.get("most_choice")
    writer = CorpusWriter(prefix, smallest_dtype(tokenizer.vocab_size).name, step=1)
    try:
        progress.begin(f"tokenizing {prefix.name}", sum(len(file.rows) for file in files), unit="rows")
        before = 0
        for file in files:
            for first in range(0, len(file.rows), _AT_ONCE):
                _append(writer, file, slice(first, first + _AT_ONCE), tokenizer, most=most, before=before)
                progress.advance(len(file.rows[first : first + _AT_ONCE]))
            before += len(file.files)
        progress.end()
        provenance = Provenance(
            program=f"mdata {__version__}",
            options=dict(made_by),
            inputs=[_input(path) for file in files for path in file.files],
            records=0,
            skipped={kind: count for kind, count in made_by["skipped"].items() if count},
            special_in_text=None,
            origins=None,
        )
        return writer.stage(
            CorpusContent(LEVEL, tokenizer_facts(tokenizer), tokenizer.files, provenance, writer.statistics())
        )
    finally:
        writer.close(keep=True)


def _append(
    writer: CorpusWriter, file: LabelledFile, part: slice, tokenizer: Tokenizer, *, most: int | None, before: int
) -> None:
    """Add rows; `before`: files that were read earlier."""
    rows = file.rows[part]
    counts = [len(row.texts) for row in rows]
    try:
        ids, lengths = tokenizer.encode_batch([text for row in rows for text in row.texts])
    except TextRefused as refused:
        row = rows[int(np.searchsorted(np.cumsum(counts), refused.index, side="right"))]
        raise BadInputError(f"{file.files[row.file]}:{row.row}: {refused.reason}") from refused
    texts, sequences = iter(np.split(ids, np.cumsum(lengths)[:-1])), list[IdArray]()
    for row in rows:
        sequences.append(np.array(label_ids(RowName(row.uid, row.label)), np.int32))
        mine = [next(texts) for _ in row.texts]
        sequences += mine if most is None else [mine[0], *(text[:most] for text in mine[1:])]
    encoded = Encoded(
        tokens=np.concatenate(sequences).astype(smallest_dtype(tokenizer.vocab_size)),
        lengths=np.array([*map(len, sequences)], np.int64),
        document_ends=np.cumsum(np.array(counts, np.int64) + 1),
        text_bytes=np.array([sum(len(text.encode()) for text in row.texts) for row in rows], np.int64),
        special_in_text=0,
    )
    places = np.array([before + row.file for row in rows], np.int64)
    writer.append(encoded, places, rows=np.array([row.row for row in rows], np.int64))


def _input(path: Path) -> InputFile:
    with os_errors_named(f"reading {path}"):
        facts, data = path.stat(), path.read_bytes()
    digest = blake3(blake3(data).digest()).hexdigest()
    return InputFile(
        path=str(path),
        bytes=facts.st_size,
        modified_ns=modified_ns(facts),
        hash=digest,
        block_bytes=max(1, facts.st_size),
        rows=data.count(b"\n") + (not data.endswith(b"\n")),
    )
