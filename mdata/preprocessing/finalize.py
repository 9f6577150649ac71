"""The end of a run: results are completed with their manifests and get their final names in one transaction.

Partitions are joined afterwards, which is a second transaction: a run that is killed between the two finds the
partitions finished. A merge that was interrupted starts over.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import UNSET

from mdata.corpus.corpus import open_corpus
from mdata.manifest.sidecars import manifest_path, tokenizer_facts
from mdata.manifest.types import CorpusManifest, InputFile, InputSection, Provenance, Statistics
from mdata.preprocessing.bad_rows import BadRowPolicy
from mdata.preprocessing.corpus_writer import CorpusContent, CorpusWriter
from mdata.preprocessing.finished import is_finished
from mdata.preprocessing.journal import Journal
from mdata.preprocessing.placing import Staged, place, remove_leftovers
from mdata.preprocessing.plan import Job, printable_path
from mdata.preprocessing.run_state import InputState, RunState
from mdata.sources.input_files import SourceFile
from mdata.util.background import map_files
from mdata.version import __version__


def finalize_all(
    job: Job, state: RunState, *, journal: Journal, writers: dict[str, CorpusWriter | None], policy: BadRowPolicy
) -> dict[str, CorpusManifest]:
    """Finish every result; returns the manifests by name. A writer that is None was finished by an earlier run.

    Raises:
        ResourceError, UsageError: a file operation failed; the same command continues from here.
    """
    prefixes = job.prefixes
    done = {name for name, writer in writers.items() if writer is None}
    done |= {name for name in prefixes.keys() - writers.keys() if is_finished(job, state, name=name)}
    made = {name: open_corpus(manifest_path(prefixes[name])).manifest for name in done}
    merges = [name for name in prefixes if name not in writers and name not in done]
    contents = {name: _content(job, state, name, one.statistics()) for name, one in writers.items() if one}
    open_writers = {name: writer for name, writer in writers.items() if writer}
    results = map_files(lambda name: open_writers[name].stage(contents[name]), [*open_writers])
    staged = dict(zip(open_writers, results, strict=True))
    if staged:
        if policy.quarantine:
            policy.quarantine.sync()
            policy.quarantine.check_name()
        # The quarantine file belongs to all results, so it is renamed after the old manifests are removed.
        quarantine = [policy.quarantine.path] if policy.quarantine else []
        place(journal, [*staged.values()], replaced=[prefixes[name] for name in merges], also=quarantine)
    made |= {name: one.manifest for name, one in staged.items()}
    for name, writer in writers.items():
        if writer:
            writer.close(keep=False)
            writers[name] = None
    if merges:
        joined = [_merge(job, state, name, made=made) for name in merges]
        place(journal, joined)
        made |= {name: one.manifest for name, one in zip(merges, joined, strict=True)}
    map_files(remove_leftovers, [*prefixes.values()])
    return {name: made[name] for name in prefixes}


def _merge(job: Job, state: RunState, key: str, *, made: Mapping[str, CorpusManifest]) -> Staged:
    from mdata.preprocessing.joining import add_statistics, merge_partitions

    prefixes = job.prefixes
    names = [job.partitions.name(key, number) for number in range(job.partitions.count)]
    writer = CorpusWriter(prefixes[key], job.spec.dtype, step=job.partitions.step)
    keep = False
    try:
        merge_partitions([prefixes[name] for name in names], writer)
        known = [made[name].statistics for name in names]
        statistics = add_statistics([one for one in known if one is not None])
        staged = writer.stage(_content(job, state, key, statistics))
        keep = True
        return staged
    finally:
        writer.close(keep=keep)


def _content(job: Job, state: RunState, name: str, statistics: Statistics) -> CorpusContent:
    tokenizer = job.tokenizer
    facts = tokenizer_facts(tokenizer)
    provenance = _provenance(job, state, name=name)
    # A note, not an option: all engines give the same ids, so the corpus does not depend on the engine.
    notes = {"engine": tokenizer.engine}
    return CorpusContent(job.options.level, facts, tokenizer.files, provenance, statistics, notes)


def _provenance(job: Job, state: RunState, *, name: str) -> Provenance:
    """What decided the content of a result; the number of workers does not."""
    return Provenance(
        program=f"mdata {__version__}",
        options=job.recorded_options(name),
        inputs=[_input_file(job, file, source) for file, source in zip(state.inputs, job.files, strict=True)],
        records=0,
        skipped=dict(sorted(state.skipped.items())),
        special_in_text=state.special[job.options.json_keys.index(name.partition("/")[0])],
        origins=None,
        filtered=state.filtered or UNSET,
    )


def _input_file(job: Job, file: InputState, source: SourceFile) -> InputFile:
    assert file.hash is not None, f"{file.path} was not read to its end"
    part = source.section
    pieces = b"".join(file.digests).hex()
    return InputFile(
        path=printable_path(source.path),
        bytes=file.size_bytes,
        modified_ns=file.modified_ns,
        hash=file.hash,
        block_bytes=job.options.chunk_bytes,
        rows=file.rows,
        section=InputSection(start=part.start, stop=part.stop, total=part.total, pieces=pieces) if part else UNSET,
    )
