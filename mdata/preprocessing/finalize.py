"""The end of a run: each result gets its final names and then its manifest, in an order in which no manifest is wrong.

The old manifest is removed and its absence synced; the pair and its origins are renamed; the block hashes and the
tokenizer's files follow; the manifest is written last. If a step fails, the renames are undone and everything stays for
a run that continues; if the process dies in between, the next run undoes them (mdata/preprocessing/resume.py). Results
that are finished by then are recognized and not made again; a merge that was interrupted starts over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from blake3 import blake3
from msgspec import UNSET

from mdata.corpus.corpus import open_corpus
from mdata.errors import os_errors_named
from mdata.indexed.append_file import remove_synced
from mdata.manifest.io import save_manifest
from mdata.manifest.sidecars import hashes_path, manifest_path, tokenizer_facts
from mdata.manifest.types import (
    FORMAT,
    VERSION,
    BlockHashes,
    CorpusManifest,
    InputFile,
    InputSection,
    Origins,
    Provenance,
    Shard,
    Statistics,
    TokenDtype,
)
from mdata.preprocessing.bad_rows import BadRowPolicy
from mdata.preprocessing.corpus_writer import CorpusWriter, origins_path
from mdata.preprocessing.finished import is_finished
from mdata.preprocessing.journal import Journal
from mdata.preprocessing.partitions import add_statistics, merge_partitions
from mdata.preprocessing.plan import Job, printable_path
from mdata.preprocessing.resume import commit_record, remove_partials
from mdata.preprocessing.run_state import InputState, RunState
from mdata.sources.input_files import SourceFile
from mdata.tokenizers.base.tokenizer_folder import folder_name, write_folder
from mdata.util import atomic_io
from mdata.version import __version__


def finalize_all(
    job: Job, state: RunState, *, journal: Journal, writers: dict[str, CorpusWriter | None], policy: BadRowPolicy
) -> dict[str, CorpusManifest]:
    """Finish every result; returns the manifests by name. A writer that is None was finished by an earlier run.

    Raises:
        ResourceError, UsageError: the file system refused; the same command continues from here.
    """
    prefixes = job.prefixes()
    done = {name for name, writer in writers.items() if writer is None}
    done |= {name for name in prefixes.keys() - writers.keys() if is_finished(job, state, name=name)}
    journal.append(commit_record([writer.prefix for writer in writers.values() if writer], job.options.quarantine))
    # Manifests describe files of these names no more. The quarantine file, which belongs to all results, is renamed
    # after the old manifests are gone and before the new ones are there, when nobody looks for what is missing.
    for name in prefixes.keys() - done:
        remove_synced(manifest_path(prefixes[name]))
    if policy.quarantine:
        policy.quarantine.sync()
        policy.quarantine.commit()
    made: dict[str, CorpusManifest] = {}
    for name in [*writers, *(name for name in prefixes if name not in writers)]:
        if name in done:
            remove_partials(prefixes[name])
            made[name] = open_corpus(manifest_path(prefixes[name])).manifest
        elif writer := writers.get(name):
            made[name] = write_corpus(job, state, writer=writer, name=name, statistics=writer.statistics())
            writer.close(keep=False)
            writers[name] = None
        else:
            made[name] = _merge(job, state, name, made=made)
    return {name: made[name] for name in prefixes}


def _merge(job: Job, state: RunState, key: str, *, made: Mapping[str, CorpusManifest]) -> CorpusManifest:
    prefixes = job.prefixes()
    names = [job.partitions.name(key, number) for number in range(job.partitions.count)]
    writer = CorpusWriter(prefixes[key], job.spec.dtype, step=job.partitions.step)
    try:
        merge_partitions([prefixes[name] for name in names], writer)
        known = [made[name].statistics for name in names]
        statistics = add_statistics([one for one in known if one is not None])
        return write_corpus(job, state, writer=writer, name=key, statistics=statistics)
    finally:
        writer.close(keep=False)


def write_corpus(
    job: Job, state: RunState, *, writer: CorpusWriter, name: str, statistics: Statistics
) -> CorpusManifest:
    """Finish one pair and everything beside it; returns its manifest.

    Raises:
        ResourceError, UsageError: the file system refused; nothing that looks finished is left.
    """
    prefix, tokenizer = writer.prefix, job.tokenizer
    with os_errors_named(f"finishing {prefix}"):
        remove_synced(manifest_path(prefix))
        facts = writer.pair.commit()
        try:
            origins = Origins(path=origins_path(prefix).name, hash=writer.origins.commit())
            hashes = b"".join(facts.block_hashes)
            atomic_io.atomic_write(hashes_path(prefix), hashes)
            if tokenizer.files:
                write_folder(prefix.parent / folder_name(tokenizer.files), tokenizer.files)
            shard = Shard(
                path=prefix.name,
                documents=facts.documents,
                sequences=facts.sequences,
                tokens=facts.tokens,
                bytes=facts.bin_bytes,
                contiguous=True,
                largest_id=facts.largest_id,
                idx_hash=facts.idx_hash,
                blocks=BlockHashes(path=hashes_path(prefix).name, hash=blake3(hashes).hexdigest()),
            )
            manifest = CorpusManifest(
                format=FORMAT,
                version=VERSION,
                id="",
                checksum="",
                dtype=cast(TokenDtype, facts.dtype),
                level=job.options.level,
                verified=True,
                tokenizer=tokenizer_facts(tokenizer),
                shards=[shard],
                provenance=_provenance(job, state, name=name, records=facts.documents, origins=origins),
                statistics=statistics,
            )
            return save_manifest(manifest, manifest_path(prefix))
        except BaseException:
            remove_synced(manifest_path(prefix))
            writer.pair.roll_back()
            writer.origins.roll_back()
            hashes_path(prefix).unlink(missing_ok=True)
            raise


def _provenance(job: Job, state: RunState, *, name: str, records: int, origins: Origins) -> Provenance:
    """What decided the content of a result; the number of workers did not."""
    return Provenance(
        program=f"mdata {__version__}",
        options=job.recorded_options(name),
        inputs=[_input_file(job, file, source) for file, source in zip(state.inputs, job.files, strict=True)],
        records=records,
        skipped=dict(sorted(state.skipped.items())),
        special_in_text=state.special[job.options.json_keys.index(name.partition("/")[0])],
        origins=origins,
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
