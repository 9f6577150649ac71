"""From files in the making to corpora: the end of a run, and recognising that there is nothing to do.

Every step may be the last one of this process: what got its names is recognised by the next run and not made
again, and a merge that was cut off begins anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mdata import durable
from mdata.corpus import open_corpus
from mdata.errors import MdataError
from mdata.indexed.format import bin_path
from mdata.manifest import CorpusManifest, InputFile, Provenance
from mdata.manifest.facts import manifest_path
from mdata.preprocess.finish import write_corpus
from mdata.preprocess.job import Job, printable_path
from mdata.preprocess.journal import Journal
from mdata.preprocess.ledger import InputState, Ledger
from mdata.preprocess.merge import added, merge_parts
from mdata.preprocess.options import content_options
from mdata.preprocess.problems import check_limit
from mdata.preprocess.resume import difference, input_changed
from mdata.preprocess.sinks import Sink
from mdata.verify import verify
from mdata.version import __version__


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
    """The result, if a run of this very job on these very inputs was finished; says why not if another was.

    Raises:
        BadInputError: it was finished with more bad rows than may be now.
    """
    paths = {name: manifest_path(prefix) for name, prefix in job.prefixes().items()}
    found: dict[str, CorpusManifest] = {}
    for name, path in paths.items():
        if not path.is_file():
            return None
        try:
            found[name] = open_corpus(path).manifest
            reason = _other_job(job, name, found[name]) or _damage(path)
        except MdataError as error:
            reason = str(error).splitlines()[0]
        if reason:
            job.progress.note(f"{path} will be replaced: {reason}")
            return None
    # The limit decides nothing in a result, so another may have been in force.
    for manifest in found.values():
        check_limit(job.options.max_errors, manifest)
    return PreprocessResult(found, paths, finished_before=True)


def _damage(path: Path) -> str | None:
    """The first thing that is gone or altered in a finished corpus, the content of its .bin aside."""
    problems = verify(path).problems
    return str(problems[0]).splitlines()[0] if problems else None


def finish_all(
    job: Job, ledger: Ledger, *, sinks: dict[str, Sink | None], journal: Journal, merged: frozenset[str]
) -> dict[str, CorpusManifest]:
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
        if name in merged:
            made[name] = open_corpus(manifest_path(prefixes[name])).manifest
        else:
            made[name] = _merge(job, ledger, name, made=made)
            journal.append({"kind": "merged", "key": name})
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
    """Whether a result of this very run got all its names: its manifest, which comes last, speaks of what was taken."""
    prefix = job.prefixes()[name]
    path = manifest_path(prefix)
    if durable.partial_path(bin_path(prefix)).exists() or not path.is_file():
        return False
    try:
        known = open_corpus(path).manifest.provenance
    except MdataError:
        return False
    hashes = [state.hash for state in ledger.inputs]
    return (
        known is not None
        and known.options == _recorded_options(job, name)
        and [one.hash for one in known.inputs] == hashes
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
    known = found.provenance
    if known is None or found.tokenizer is None:
        return "it was not made by this command"
    # What becomes of bad rows decides nothing where there are none, and how many may be, nothing in a result.
    aside = ("max_errors",) if any(known.skipped.values()) else ("max_errors", "on_error")
    options = [{**dict(given), **dict.fromkeys(aside)} for given in (known.options, _recorded_options(job, name))]
    before = {"options": options[0], "tokenizer": found.tokenizer.fingerprint}
    now = {"options": options[1], "tokenizer": job.tokenizer.fingerprint}
    if reason := difference(before, now):
        return reason
    if len(known.inputs) != len(job.files):
        return f"it was made of {len(known.inputs)} inputs, {len(job.files)} are given"
    kept = job.options.quarantine
    if kept is not None and any(known.skipped.values()) and not Path(kept).is_file():
        return f"the quarantine file {kept} is not there"
    for file, input in zip(job.files, known.inputs, strict=True):
        if printable_path(file.path) == "-":
            return "standard input cannot be compared with what it was"
        state = InputState(input.path, input.bytes, input.modified_ns, hash=input.hash)
        if reason := input_changed(job, file, known=state):
            return reason
    return None
