"""Parts in object storage joined there: their small files are copied to a disk and merged, and the result is uploaded.

By reference, manifests, origins and the tokenizer are copied, a few bytes for each document, and the pairs of the parts
stay where they are. For a copy, whole parts are fetched, every block checked, so the folder needs room for the corpus
twice. Everything is written to storage as by `mdata preprocess`: the manifest last. Nothing but the merged corpus
changes there; as storage has no locks, one machine at a time may merge a job.
"""

from __future__ import annotations

import glob
import re
import shutil
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from mdata.corpus.fetch import CorpusCopy
from mdata.errors import MdataError, UsageError, counted, os_errors_named
from mdata.indexed.pair_format import bin_path, idx_path
from mdata.manifest.sidecars import hashes_paths, manifest_path
from mdata.object_storage.address import Address, parse_address
from mdata.object_storage.facts import ObjectFacts
from mdata.object_storage.reading import list_objects, read_range
from mdata.object_storage.stores import open_store
from mdata.object_storage.uploading import check_writable, remove_objects
from mdata.preprocessing.bad_rows import check_max_errors
from mdata.preprocessing.uploads import publish_corpus
from mdata.progress import SILENT, Progress
from mdata.rewriting.found_parts import FoundPart, FoundResult, check_pairs, find_parts
from mdata.rewriting.merge import MergeResult, join
from mdata.util.atomic_io import atomic_write

_THREADS = 8


def merge_stored(
    output_prefix: str,
    *,
    work_folder: Path | None = None,
    copy: bool = False,
    overwrite: bool = False,
    parts: int | None = None,
    max_errors: str | None = None,
    progress: Progress = SILENT,
) -> list[MergeResult]:
    """Do what `merge` does for parts whose output prefix is an address.

    Args:
        output_prefix: s3://, gs:// or az://, as it was given to preprocess.
        work_folder: on a disk; None: a temporary folder, which only a merge by reference may use.
        copy, overwrite, parts, max_errors, progress: as for `merge`.

    Raises:
        UsageError: as `merge`; no work folder for a copy; no access. DamageError: a part does not match its manifest.
        BadInputError: too many bad rows. ResourceError: the storage or the disk fails.
    """
    check_max_errors(max_errors)
    prefix = parse_address(output_prefix)
    check_writable(prefix)
    if copy and work_folder is None:
        raise UsageError(
            f"the parts of {prefix} are in object storage, and no work folder is named for --copy",
            expected="--work-folder FOLDER on a disk with room for the corpus twice",
            fix="name one, or merge by reference, without --copy",
        )
    with _folder(work_folder, prefix.name) as folder, _named(folder, prefix):
        stored = _StoredParts(prefix, folder)
        results = find_parts(str(folder / prefix.name), count=parts)
        check_pairs(prefix, results, size_of=stored.size_of)
        stored.fetch(results, everything=copy, progress=progress)
        # The files that a manifest names are in storage, not beside its copy.
        merged = join(
            results,
            copy=copy,
            overwrite=overwrite,
            max_errors=max_errors,
            progress=progress,
            damage=lambda path: None,
        )
        return [stored.publish(corpus, copy=copy, progress=progress) for corpus in merged]


class _StoredParts:
    """The objects beside an output prefix, and a folder into which their manifests are copied."""

    def __init__(self, prefix: Address, folder: Path) -> None:
        self._prefix, self._folder, self._store = prefix, folder, open_store(prefix)
        self._place = prefix.with_key(prefix.key.removesuffix(prefix.name))
        listed = list_objects(prefix, self._store)
        self._objects = {facts.address.key[len(self._place.key) :]: facts for facts in listed}
        of_parts = re.compile(re.escape(prefix.name) + r"-[0-9]{5}-of-[0-9]{5}_[^/]+\.json")
        of_results = re.compile(re.escape(prefix.name) + r"_[^/]+\.(json|idx|bin)")
        begin = glob.escape(prefix.name)
        for path in folder.glob(f"{begin}*"):  # of an earlier merge; blocks of parts that it fetched stay
            if of_results.fullmatch(path.name) or of_parts.fullmatch(path.name):
                path.unlink()
        for path in folder.glob(f".{begin}*.journal"):  # its results may be of other parts
            path.unlink()
        manifests = [facts for name, facts in self._objects.items() if of_parts.fullmatch(name)]
        manifests += [
            facts for name, facts in self._objects.items() if of_results.fullmatch(name) and name[-5:] == ".json"
        ]
        with ThreadPoolExecutor(_THREADS) as pool:
            deque(pool.map(self._manifest, manifests), maxlen=0)
        self._pairs = [name for name in self._objects if of_results.fullmatch(name) and name[-5:] != ".json"]

    def _manifest(self, facts: ObjectFacts) -> None:
        text = read_range(facts, 0, stop=facts.size_bytes, store=self._store)
        atomic_write(self._folder / facts.address.name, text)

    def size_of(self, file: Path) -> int | None:
        """The bytes of the object that has this name beside the prefix."""
        facts = self._objects.get(file.name)
        return None if facts is None else facts.size_bytes

    def fetch(self, results: Sequence[FoundResult], *, everything: bool, progress: Progress) -> None:
        """Copy what a merge reads of the parts: everything, or their origins and the tokenizer."""
        parts = [part for result in results for part in result.parts]
        if not everything:
            # `merge` has to know that such a name is taken. For a copy it may be what a failed upload left.
            for name in self._pairs:
                (self._folder / name).touch()
            for result in results:
                self._copy_of(result.parts[0], SILENT).tokenizer_of(result.parts[0].manifest)
            with ThreadPoolExecutor(_THREADS) as pool:
                deque(pool.map(lambda part: self._copy_of(part, SILENT).origins_of(part.manifest), parts), maxlen=0)
            return
        progress.begin(
            f"fetching {counted(len(parts), 'part')}", sum(p.manifest.shards[0].bytes for p in parts), unit="B"
        )
        try:
            for part in parts:
                self._copy_of(part, progress).files_of(part.manifest)
        finally:
            progress.end()

    def _copy_of(self, part: FoundPart, progress: Progress) -> CorpusCopy:
        path = manifest_path(part.prefix)
        return CorpusCopy(self._place.with_key(self._place.key + path.name), path, progress=progress, ours=True)

    def publish(self, merged: MergeResult, *, copy: bool, progress: Progress) -> MergeResult:
        """Upload a merged corpus, unless it was there before."""
        path = Path(merged.path)
        if merged.there_before:
            return replace(merged, path=self._place.with_key(self._place.key + path.name))
        address = publish_corpus(path, self._place, progress=progress)
        if not copy:  # the pair of a corpus that was replaced
            pair = path.with_suffix("")
            old = [file.name for file in (bin_path(pair), idx_path(pair), *hashes_paths(pair))]
            remove_objects([self._objects[name].address for name in old if name in self._objects], self._store)
        return replace(merged, path=address)


@contextmanager
def _folder(work_folder: Path | None, name: str) -> Iterator[Path]:
    """An own folder in the work folder, which is removed when the block ends well; or a temporary one."""
    if work_folder is None:
        with TemporaryDirectory(prefix="mdata-merge-") as temporary:
            yield Path(temporary)
        return
    folder = work_folder / f"{name}.merge"
    with os_errors_named(f"writing to {work_folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    yield folder
    with os_errors_named(f"removing {folder}"):
        shutil.rmtree(folder)


@contextmanager
def _named(folder: Path, prefix: Address) -> Iterator[None]:
    """Let errors name objects, not their copies."""
    try:
        yield
    except MdataError as error:
        place = str(prefix).removesuffix(prefix.name)
        raise type(error)(str(error).replace(f"{folder}/", place)) from error
