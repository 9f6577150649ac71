"""Results that exist already: whether they are what this job would write, and whether they may be replaced.

A result is complete if its manifest is valid and its .idx, which gets its name last, is there. It belongs to this job
if it records the same options, tokenizer and inputs; anything else is replaced only with --overwrite.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mdata.corpus.corpus import open_corpus
from mdata.corpus.paths import unfinished_file
from mdata.corpus.verify import verify
from mdata.errors import MdataError, OtherResultsError, UsageError, counted
from mdata.indexed.pair_format import bin_path
from mdata.manifest.io import load_manifest
from mdata.manifest.sidecars import manifest_path
from mdata.manifest.types import CorpusManifest
from mdata.object_storage.address import Address
from mdata.preprocessing.bad_rows import check_manifest
from mdata.preprocessing.plan import JobPlan, input_name, printable_path
from mdata.preprocessing.resume import difference, input_changed, other_engine
from mdata.preprocessing.run_state import InputState, JobState
from mdata.util import atomic_io

_SHOWN = 5  # files that must not be replaced


@dataclass(frozen=True)
class PreprocessResult:
    """The manifests of a run, and their paths, by name.

    A name is the key ("text"), with "/part0" ... for partitions and "/holdout" for held-out documents.

    Attributes:
        finished_before: nothing was done, because all results existed.
        resumed: an earlier run was continued.
    """

    manifests: dict[str, CorpusManifest]
    paths: Mapping[str, Path | Address]
    finished_before: bool = False
    resumed: bool = False


def finished_before(job: JobPlan) -> PreprocessResult | None:
    """The result, if a run of the same job on the same inputs has finished and all its files exist.

    Raises:
        BadInputError: it has more bad rows than max_errors, which may have changed since.
    """
    paths = job.manifests
    if any(not_ours(job, name, path=path) for name, path in paths.items()):
        return None
    if any(map(unfinished_file, job.prefixes.values())):
        return None  # the run that was naming them is completed first
    for path in paths.values():
        if reason := first_damage(path):
            job.progress.note(f"{path} will be written again: {reason}")
            return None
    manifests = {name: corpus_manifest(path) for name, path in paths.items()}
    quarantine = job.options.quarantine
    provenances = [manifest.provenance for manifest in manifests.values() if manifest.provenance]
    has_bad_rows = any(any(provenance.skipped.values()) for provenance in provenances)
    if quarantine is not None and has_bad_rows and not Path(quarantine).is_file():
        job.progress.note(f"the results will be written again: the quarantine file {quarantine} is missing")
        return None
    for manifest in manifests.values():
        check_manifest(job.options.max_errors, manifest)
    return PreprocessResult(manifests, paths, finished_before=True)


def check_replaced(job: JobPlan) -> None:
    """Refuse to replace results of other jobs without --overwrite; with it, note what is replaced.

    Raises:
        OtherResultsError: names each file, and how it differs.
    """
    paths = job.manifests
    reasons = {path: reason for name, path in paths.items() if (reason := _obstacle(job, name, path))}
    quarantine = job.options.quarantine and Path(job.options.quarantine)
    if quarantine and quarantine.exists():
        ours = all(not_ours(job, name, path=path) is None for name, path in paths.items())
        reasons |= {} if ours else {quarantine: "the quarantine file of an unknown run"}
    lines = [f"{path}: {reason}" for path, reason in reasons.items()]
    if lines and not job.options.overwrite:
        raise OtherResultsError(
            "other results already exist and are not replaced",
            found="; ".join(lines[:_SHOWN]) + (f"; and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""),
            expected="no results, or those of the same input and options",
            fix="another output prefix, or --overwrite (overwrite=True) to replace them",
        )
    for path, reason in reasons.items():
        job.progress.note(f"{path} will be replaced: {reason}")


def is_finished(job: JobPlan, state: JobState, *, name: str) -> bool:
    """Whether a result is complete and of this job and these inputs, by its manifest."""
    prefix = job.prefixes[name]
    path = manifest_path(prefix)
    if atomic_io.partial_path(bin_path(prefix)).exists() or not path.is_file():
        return False
    try:
        manifest = open_corpus(path).manifest
    except MdataError:
        return False
    provenance = manifest.provenance
    return (
        provenance is not None
        and _other_options(job, name, manifest) is None
        and other_engine(job, manifest.notes.get("engine")) is None
        and len(state.inputs) == len(job.files)
        and [file.hash for file in provenance.inputs] == [file.hash for file in state.inputs]
        and first_damage(path) is None
    )


def stale_partitions(job: JobPlan) -> list[str]:
    """Notes on partitions and held-out results of earlier runs of this prefix that this job does not write."""
    names, options = {prefix.name for prefix in job.prefixes.values()}, job.options
    folder, stem = Path(options.output_prefix).parent, re.escape(Path(options.output_prefix).name)
    keys = "|".join(map(re.escape, options.json_keys))
    pattern = re.compile(rf"{stem}_([0-9]+|holdout)_({keys})_{options.level}\.json")
    lines = []
    for path in sorted(folder.iterdir()):
        if pattern.fullmatch(path.name) is None or path.stem in names:
            continue
        from mdata.manifest.lineage import lineage_of

        try:
            lineage = lineage_of(corpus_manifest(path))
        except MdataError:
            continue
        if lineage is not None and lineage.role != "whole":
            lines.append(f"{path} is {lineage.description} of an earlier run and is kept; remove its files if unneeded")
    return lines


def _obstacle(job: JobPlan, name: str, path: Path) -> str | None:
    """Why a result must not be replaced; None: it belongs to this job, or does not exist."""
    if path.exists():
        return not_ours(job, name, path=path)
    files = [file for file in map(path.with_suffix, (".idx", ".bin")) if file.exists()]
    return f"{files[0].name} exists without a manifest" if files else None


def not_ours(job: JobPlan, name: str, *, path: Path) -> str | None:
    """Why a manifest does not describe a result of this job; None: it does."""
    if not path.is_file():
        return "it is not a file"
    try:
        return _other_job(job, name, corpus_manifest(path))
    except MdataError as error:
        return str(error).splitlines()[0]


def corpus_manifest(path: Path) -> CorpusManifest:
    """Read the manifest of a corpus.

    Raises:
        UsageError: a blend's manifest, or no file. DamageError: it was altered.
    """
    manifest = load_manifest(path)
    if not isinstance(manifest, CorpusManifest):
        raise UsageError(f"{path} is the manifest of a blend", expected="the manifest of a corpus")
    return manifest


def first_damage(path: Path) -> str | None:
    """The first file of a finished corpus that is missing or changed; the content of its .bin is not read."""
    problems = verify(path).problems
    return str(problems[0]).splitlines()[0] if problems else None


def _other_job(job: JobPlan, name: str, manifest: CorpusManifest) -> str | None:
    """How a finished corpus differs from what this job would write; None: no difference."""
    provenance = manifest.provenance
    if provenance is None:
        return "it was not made by this command"
    if len(provenance.inputs) != len(job.files):
        return f"it was made from {counted(len(provenance.inputs), 'input')}; this command gives {len(job.files)}"
    for file, input in zip(job.files, provenance.inputs, strict=True):
        if input_name(file) != input.name:  # says more than an option that differs, too
            return f"the input was {input.name}, is {input_name(file)}"
    if reason := _other_options(job, name, manifest) or other_engine(job, manifest.notes.get("engine")):
        return reason
    for number, (file, input) in enumerate(zip(job.files, provenance.inputs, strict=True)):
        if printable_path(file.path) == "-":
            return "standard input cannot be compared with the earlier input"
        known_as = number, input.path, input.hash
        if known_as not in job.compared:
            state = InputState(input.name, input.bytes, input.modified_ns, hash=input.hash)
            job.compared[known_as] = input_changed(job, file, recorded=state)
        if reason := job.compared[known_as]:
            return reason
    return None


def _other_options(job: JobPlan, name: str, manifest: CorpusManifest) -> str | None:
    """`_other_job` without the inputs."""
    provenance = manifest.provenance
    if provenance is None or manifest.tokenizer is None:
        return "it was not made by this command"
    # max_errors never changes a result, and on_error only where there are bad rows. The fingerprint compares templates.
    ignored = ("max_errors", "chat_template_source", *(() if any(provenance.skipped.values()) else ("on_error",)))
    old, new = (
        {**dict(options), **dict.fromkeys(ignored)} for options in (provenance.options, job.recorded_options(name))
    )
    return difference(
        {"options": old, "tokenizer": manifest.tokenizer.fingerprint},
        {"options": new, "tokenizer": job.tokenizer.fingerprint},
    )
