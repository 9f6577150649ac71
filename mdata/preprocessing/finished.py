"""From files in the making to corpora: the end of a run, and recognising that there is nothing to do.

Every step may be the last one of this process: what got its names is recognised by the next run and not made
again, and a merge that was cut off begins anew.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mdata.corpus.corpus import open_corpus
from mdata.corpus.verify import verify
from mdata.errors import MdataError, UsageError
from mdata.indexed.pair_format import bin_path
from mdata.manifest.io import load_manifest
from mdata.manifest.lineage import lineage_of
from mdata.manifest.sidecars import manifest_path
from mdata.manifest.types import CorpusManifest, InputFile, Provenance
from mdata.preprocessing.bad_rows import check_limit
from mdata.preprocessing.corpus_writer import Sink
from mdata.preprocessing.finalize import write_corpus
from mdata.preprocessing.merge import added, merge_parts
from mdata.preprocessing.placement import Placing, remove_partials
from mdata.preprocessing.plan import Job, printable_path
from mdata.preprocessing.preprocess_options import content_options
from mdata.preprocessing.resume import difference, input_changed
from mdata.preprocessing.run_state import InputState, Ledger
from mdata.util import atomic_io
from mdata.version import __version__

_SHOWN = 5  # results that are in the way


@dataclass(frozen=True)
class PreprocessResult:
    """What was made: for each name the manifest and where it lies.

    A name is the key ("text"), with "/part0" ... for parts and "/holdout" for the held-out share.

    Attributes:
        finished_before: nothing was done, because all of it was there already.
        resumed: an earlier run was continued.
    """

    manifests: dict[str, CorpusManifest]
    paths: dict[str, Path]
    finished_before: bool = False
    resumed: bool = False


def finished_before(job: Job) -> PreprocessResult | None:
    """The result, if a run of this very job on these very inputs was finished and all of it is there.

    Raises:
        BadInputError: it was finished with more bad rows than may be now.
    """
    paths = {name: manifest_path(prefix) for name, prefix in job.prefixes().items()}
    if any(_not_ours(job, name, path) for name, path in paths.items()):
        return None
    for path in paths.values():
        if reason := _damage(path):
            job.progress.note(f"{path} will be made again: {reason}")
            return None
    found = {name: _corpus_at(path) for name, path in paths.items()}
    kept = job.options.quarantine
    known = [manifest.provenance for manifest in found.values() if manifest.provenance]
    if kept is not None and any(sum(one.skipped.values()) for one in known) and not Path(kept).is_file():
        job.progress.note(f"the results will be made again: the quarantine file {kept} is missing")
        return None
    # The limit decides nothing in a result, so another may have been in force.
    for manifest in found.values():
        check_limit(job.options.max_errors, manifest)
    return PreprocessResult(found, paths, finished_before=True)


def check_replaced(job: Job, placing: Placing) -> None:
    """Refuse to replace what is no result of this job, unless that is asked for; then say what is replaced.

    Args:
        job: it may mend its own results without asking.
        placing: the files that an unfinished run placed; those are no results yet.

    Raises:
        UsageError: names each file, and in what it differs.
    """
    found = {path: reason for name, path in _results(job) if (reason := _in_the_way(job, name, path, placing=placing))}
    kept = job.options.quarantine
    if kept is not None and Path(kept).exists() and not placing.names_quarantine(Path(kept)):
        ours = all(_not_ours(job, name, path) is None for name, path in _results(job))
        found |= {} if ours else {Path(kept): "the quarantine file of an unknown run"}
    lines = [f"{path}: {reason}" for path, reason in found.items()]
    if lines and not job.options.overwrite:
        raise UsageError(
            "other results already exist and are not replaced",
            found="; ".join(lines[:_SHOWN]) + (f"; and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""),
            expected="no results, or those of the same input and options",
            fix="another output prefix, or --overwrite (overwrite=True) to replace them",
        )
    for line in lines:
        path, _, reason = line.partition(": ")
        job.progress.note(f"{path} will be replaced: {reason}")


def _results(job: Job) -> list[tuple[str, Path]]:
    return [(name, manifest_path(prefix)) for name, prefix in job.prefixes().items()]


def _in_the_way(job: Job, name: str, path: Path, *, placing: Placing) -> str | None:
    """Why what has the names of a result is none of this job; None: it is, or nothing is there."""
    if path.exists():
        return _not_ours(job, name, path)
    there = [file for file in map(path.with_suffix, (".idx", ".bin")) if file.exists()]
    if not there or placing.names(path.with_suffix(".bin")):
        return None
    return f"{there[0].name} exists without a manifest"


def _not_ours(job: Job, name: str, path: Path) -> str | None:
    """Why a manifest does not speak of a result of this job; None: it does."""
    if not path.is_file():
        return "it is not a file"
    try:
        return _other_job(job, name, _corpus_at(path))
    except MdataError as error:
        return str(error).splitlines()[0]


def _corpus_at(path: Path) -> CorpusManifest:
    found = load_manifest(path)
    if not isinstance(found, CorpusManifest):
        raise UsageError(f"{path} is the manifest of a blend")
    return found


def _damage(path: Path) -> str | None:
    """The first thing that is gone or altered in a finished corpus, the content of its .bin aside."""
    problems = verify(path).problems
    return str(problems[0]).splitlines()[0] if problems else None


def finish_all(job: Job, ledger: Ledger, *, sinks: dict[str, Sink | None]) -> dict[str, CorpusManifest]:
    """Give every result its names; a sink that is None was finished by an earlier run.

    Raises:
        ResourceError, UsageError: the file system refused; the same command continues from here.
    """
    made: dict[str, CorpusManifest] = {}
    prefixes = job.prefixes()
    for name, sink in list(sinks.items()):
        if sink is None:
            made[name] = open_corpus(manifest_path(prefixes[name])).manifest
            continue
        provenance = provenance_of(job, ledger, name=name, records=sink.writer.state.documents)
        made[name] = write_corpus(
            sink,
            level=job.options.level,
            tokenizer=job.tokenizer,
            provenance=provenance,
            statistics=sink.statistics(),
        )
        sink.close(keep=False)
        sinks[name] = None
    for name in prefixes.keys() - sinks.keys():
        if is_finished(job, ledger, name=name):
            remove_partials(prefixes[name])
            made[name] = open_corpus(manifest_path(prefixes[name])).manifest
        else:
            made[name] = _merge(job, ledger, name, made=made)
    return {name: made[name] for name in prefixes}


def _merge(job: Job, ledger: Ledger, key: str, *, made: Mapping[str, CorpusManifest]) -> CorpusManifest:
    prefixes = job.prefixes()
    names = [job.routes.name(key, part) for part in range(job.routes.partitions)]
    sink = Sink(prefixes[key], job.spec.dtype, step=job.routes.step)
    try:
        merge_parts([prefixes[name] for name in names], sink)
        known = [made[name].statistics for name in names]
        counts = added([one for one in known if one is not None])
        provenance = provenance_of(job, ledger, name=key, records=sink.writer.state.documents)
        level = job.options.level
        return write_corpus(sink, level=level, tokenizer=job.tokenizer, provenance=provenance, statistics=counts)
    finally:
        sink.close(keep=False)


def stale_parts(job: Job) -> list[str]:
    """What earlier runs of this prefix left that this job does not make: parts and held-out parts, in words."""
    ours, options = {prefix.name for prefix in job.prefixes().values()}, job.options
    folder, stem = Path(options.output_prefix).parent, re.escape(Path(options.output_prefix).name)
    keys = "|".join(map(re.escape, options.json_keys))
    pattern = re.compile(rf"{stem}_([0-9]+|holdout)_({keys})_{options.level}\.json")
    lines = []
    for path in sorted(folder.iterdir()):
        if pattern.fullmatch(path.name) is None or path.stem in ours:
            continue
        try:
            found = lineage_of(_corpus_at(path))
        except MdataError:
            continue
        if found is not None and found.role != "whole":
            lines.append(f"{path} is {found.what} of an earlier run and is kept; remove its files if unneeded")
    return lines


def provenance_of(job: Job, ledger: Ledger, *, name: str, records: int) -> Provenance:
    """How one result came to be: what decided the content; the number of workers did not."""
    key = name.partition("/")[0]
    return Provenance(
        program=f"mdata {__version__}",
        options=_recorded_options(job, name),
        inputs=[_input_file(job, state) for state in ledger.inputs],
        records=records,
        skipped=dict(sorted(ledger.skipped.items())),
        special_in_text=ledger.special[job.options.json_keys.index(key)],
        origins=None,
    )


def is_finished(job: Job, ledger: Ledger, *, name: str) -> bool:
    """Whether a result is whole and of this job and what was taken: its manifest, which comes last, says so."""
    prefix = job.prefixes()[name]
    path = manifest_path(prefix)
    if atomic_io.partial_path(bin_path(prefix)).exists() or not path.is_file():
        return False
    try:
        found = open_corpus(path).manifest
    except MdataError:
        return False
    known = found.provenance
    return (
        known is not None
        and _other_options(job, name, found) is None
        and len(ledger.inputs) == len(job.files)
        and [one.hash for one in known.inputs] == [state.hash for state in ledger.inputs]
        and _damage(path) is None
    )


def _recorded_options(job: Job, name: str) -> dict[str, Any]:
    recorded = {**content_options(job.options), "result": name}
    if job.spec.splitter is not None:
        recorded["sentence_tables"] = job.spec.splitter.fingerprint
    if job.spec.chat is not None:
        template = job.spec.chat.template
        recorded["chat_template"] = {"name": template.name, "fingerprint": template.fingerprint}
    return recorded


def _input_file(job: Job, state: InputState) -> InputFile:
    assert state.hash is not None, f"{state.path} was not read to its end"
    return InputFile(
        path=state.path,
        bytes=state.size_bytes,
        modified_ns=state.modified_ns,
        hash=state.hash,
        block_bytes=job.options.piece_bytes,
        rows=state.rows,
    )


def _other_job(job: Job, name: str, found: CorpusManifest) -> str | None:
    """In what a finished corpus differs from what this job would make; None: in nothing."""
    if reason := _other_options(job, name, found):
        return reason
    known = found.provenance
    assert known is not None, "what has no provenance was not made by this command"
    if len(known.inputs) != len(job.files):
        return f"it was made from {len(known.inputs)} inputs; {len(job.files)} are given"
    for number, (file, input) in enumerate(zip(job.files, known.inputs, strict=True)):
        if printable_path(file.path) == "-":
            return "standard input cannot be compared with the earlier input"
        known_as = number, input.path, input.hash
        if known_as not in job.compared:
            state = InputState(input.path, input.bytes, input.modified_ns, hash=input.hash)
            job.compared[known_as] = input_changed(job, file, known=state)
        if reason := job.compared[known_as]:
            return reason
    return None


def _other_options(job: Job, name: str, found: CorpusManifest) -> str | None:
    """The same, inputs aside."""
    known = found.provenance
    if known is None or found.tokenizer is None:
        return "it was not made by this command"
    # What becomes of bad rows decides nothing where there are none, and how many may be, nothing in a result.
    aside = ("max_errors",) if any(known.skipped.values()) else ("max_errors", "on_error")
    options = [{**dict(given), **dict.fromkeys(aside)} for given in (known.options, _recorded_options(job, name))]
    before = {"options": options[0], "tokenizer": found.tokenizer.fingerprint}
    return difference(before, {"options": options[1], "tokenizer": job.tokenizer.fingerprint})
