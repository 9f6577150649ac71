"""Results in object storage: written to a work folder as usual, then uploaded, the manifest last.

The journal and the temporary files stay in the work folder, so a run that was stopped or killed continues there to the
same bytes; results that are already in storage, by their hash, are not sent again. After the upload the results in the
work folder are removed. If storage holds a manifest of the same job, nothing is left to do; one of another job is
replaced only with --overwrite, and is removed before any file that it names is replaced. Two machines that write to one
prefix at the same time are not protected from each other: storage has no locks.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from mdata.errors import OtherResultsError, UsageError, os_errors_named
from mdata.indexed.mapped_files import hash_file
from mdata.indexed.pair_format import bin_path, idx_path
from mdata.manifest.sidecars import HASHES_ENDINGS
from mdata.manifest.types import CorpusManifest
from mdata.object_storage.address import Address, parse_address
from mdata.object_storage.reading import object_there, read_range
from mdata.object_storage.stores import open_store
from mdata.object_storage.uploading import put_file, remove_object
from mdata.preprocessing.finished import PreprocessResult, corpus_manifest, not_ours
from mdata.preprocessing.placing import RESULT_ENDINGS
from mdata.preprocessing.plan import JobPlan
from mdata.preprocessing.preprocess_options import PreprocessOptions
from mdata.progress import Progress
from mdata.util.atomic_io import atomic_write


class Uploads:
    """The results of one run whose output prefix is an address.

    Raises:
        UsageError: the address is not writable, or there is no work folder.
    """

    def __init__(self, options: PreprocessOptions, progress: Progress) -> None:
        prefix = parse_address(options.output_prefix)
        if prefix.scheme not in ("s3", "gs", "az"):
            raise UsageError(f"{prefix}: mdata does not write to {prefix.scheme}://", expected="s3://, gs:// or az://")
        if options.work_folder is None:
            raise UsageError(
                f"output prefix {prefix} is in object storage, and no work folder is named",
                expected="--work-folder FOLDER on a disk with room for the results, which are made there first",
            )
        self._folder = prefix.with_key(prefix.key.removesuffix(prefix.name))
        self._progress = progress
        self._overwrite = options.overwrite
        self.local_options = replace(options, output_prefix=str(Path(options.work_folder, prefix.name)))

    def finished(self, job: JobPlan) -> PreprocessResult | None:
        """The results, if all of them are in storage already, made by this same job.

        Raises:
            OtherResultsError: results of another job are there, and --overwrite was not given.
        """
        paths = {name: self._address(prefix, ".json") for name, prefix in job.prefixes.items()}
        manifests: dict[str, CorpusManifest] = {}
        others = []
        with TemporaryDirectory() as folder:
            for name, address in paths.items():
                facts = object_there(address)
                if facts is None:
                    continue
                path = Path(folder, address.name)
                atomic_write(path, read_range(facts, 0, stop=facts.size_bytes))
                if reason := not_ours(job, name, path=path):
                    others.append(f"{address}: {reason}")
                else:
                    manifests[name] = corpus_manifest(path)
        if others and not self._overwrite:
            raise OtherResultsError(
                "other results already exist and are not replaced",
                found="; ".join(others),
                fix="another output prefix, or --overwrite (overwrite=True) to replace them",
            )
        for line in others:
            self._progress.note(f"{line}; it will be replaced")
        if len(manifests) < len(paths) or not all(self._is_whole(paths[name], manifests[name]) for name in paths):
            return None
        return PreprocessResult(manifests, dict(paths), finished_before=True)

    def publish(self, result: PreprocessResult) -> PreprocessResult:
        """Upload the results of the work folder, then remove them from it; also remove leftovers of a killed run.

        Raises:
            UsageError, ResourceError: the upload was refused or failed; the same command continues from here.
        """
        local = {name: path for name, path in result.paths.items() if isinstance(path, Path)}
        for path in local.values():
            publish_corpus(path, self._folder, progress=self._progress)
        with os_errors_named("removing results from the work folder"):
            self._remove_local(result)
        paths = {name: self._folder.with_key(self._folder.key + path.name) for name, path in local.items()}
        return replace(result, paths={**result.paths, **paths})

    def _remove_local(self, result: PreprocessResult) -> None:
        work = Path(self.local_options.output_prefix).parent
        for name, place in result.paths.items():
            manifest = work / place.name
            if manifest.exists() and corpus_manifest(manifest).id != result.manifests[name].id:
                continue  # a result that was never uploaded
            # The manifest and the .idx first, so that the remaining files do not look finished.
            for path in (manifest, manifest.with_suffix(".idx"), *_beside(manifest)):
                path.unlink(missing_ok=True)
        left = list(work.iterdir()) if work.is_dir() else []
        # Another part may be at work in this folder, and need them for its own upload.
        for folder in left if all(path.name.startswith("tokenizer-") for path in left) else ():
            shutil.rmtree(folder)

    def _address(self, prefix: Path, ending: str) -> Address:
        return self._folder.with_key(f"{self._folder.key}{prefix.name}{ending}")

    def _is_whole(self, manifest: Address, content: CorpusManifest) -> bool:
        """Whether the pair beside a manifest exists with the right size."""
        folder = manifest.key.removesuffix(manifest.name)
        for shard in content.shards:
            pair = (bin_path(Path(shard.path)), idx_path(Path(shard.path)))
            tokens, index = (object_there(manifest.with_key(f"{folder}{path.name}")) for path in pair)
            if tokens is None or index is None or tokens.size_bytes != shard.bytes:
                self._progress.note(f"{manifest} will be written again: its pair is missing or has another size")
                return False
        return True


def publish_corpus(manifest: Path, folder: Address, *, progress: Progress) -> Address:
    """Put a corpus on a disk into a folder in storage, its manifest last; the manifest's address.

    Args:
        manifest: of the corpus, whose files are beside it.
        folder: its key is empty or ends with a slash. A manifest of another corpus there is removed first.
        progress: receives files.

    Raises:
        UsageError, ResourceError: the upload was refused or failed.
    """
    content = corpus_manifest(manifest)
    tokenizer = content.tokenizer.folder if content.tokenizer else None
    files = {file: file.name for file in _beside(manifest)}
    if tokenizer is not None:
        files |= {file: f"{tokenizer}/{file.name}" for file in sorted((manifest.parent / tokenizer).iterdir())}
    address = folder.with_key(folder.key + manifest.name)
    store = open_store(address)
    with os_errors_named("reading the result"):
        hashes = {file: hash_file(file) for file in (*files, manifest)}
    there = object_there(address)
    if there is not None and read_range(there, 0, stop=there.size_bytes) != manifest.read_bytes():
        remove_object(address, store)
        older = manifest.stem + HASHES_ENDINGS[1]
        if older not in files.values():
            remove_object(folder.with_key(folder.key + older), store)
    progress.begin(f"uploading {manifest.stem}", len(files) + 1, unit="files")
    try:
        for file, name in files.items():
            put_file(file, folder.with_key(folder.key + name), file_hash=hashes[file], store=store)
            progress.advance(1)
        put_file(manifest, address, file_hash=hashes[manifest], store=store)
        progress.advance(1)
    finally:
        progress.end()
    return address


def _beside(manifest: Path) -> Iterator[Path]:
    """The files of a result except its manifest and its tokenizer."""
    names = (manifest.with_name(manifest.stem + ending) for ending in RESULT_ENDINGS if ending != ".json")
    return (path for path in names if path.is_file())
