"""Input in object storage: which objects an address, a folder or a pattern names, by the same rules as on disk.

An address that ends in a slash is a folder; so is one that names no object but has objects below it. A pattern is an
address with *, ? or [: `*` stops at a slash and `**` does not. Hidden names and results of mdata are skipped as in
folders on a disk. Imported only for addresses, as it imports object storage.
"""

from __future__ import annotations

import glob
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePosixPath

from mdata.errors import UsageError
from mdata.object_storage.address import Address, parse_address
from mdata.object_storage.facts import ObjectFacts
from mdata.object_storage.reading import list_objects, look_at_object, read_range
from mdata.sources.folder_files import PathFilter, SkippedFiles, is_result, pattern_expression, reason_to_skip

_LOOKED_AT_ONCE = 16


def objects_of(
    name: str, endings: tuple[str, ...], *, all_endings: tuple[str, ...], filter: PathFilter, skipped: SkippedFiles
) -> list[ObjectFacts]:
    """The objects that an argument names, sorted by key.

    Args:
        name: an address, the address of a folder, or a pattern.
        endings, all_endings, filter, skipped: as in `folder_files.files_below`.

    Raises:
        UsageError: no object, no bucket, or no access. ResourceError: the storage does not answer.
    """
    address = parse_address(name)
    if glob.has_magic(address.key):
        return _matching(address, skipped)
    if address.key and not address.key.endswith("/"):
        try:
            return [look_at_object(address)]
        except UsageError as missing:
            if address.scheme in ("http", "https") or "nothing is there" not in str(missing):
                raise
            folder = address.with_key(f"{address.key}/")
            objects = list_objects(folder)
            if not objects:
                raise
        return _below(folder, objects, endings, all_endings=all_endings, filter=filter, skipped=skipped)
    return _below(address, list_objects(address), endings, all_endings=all_endings, filter=filter, skipped=skipped)


def first_bytes(objects: Sequence[ObjectFacts], count: int) -> list[bytes]:
    """The first bytes of each object, by several threads.

    Raises:
        UsageError, ResourceError: as `read_range`.
    """
    with ThreadPoolExecutor(_LOOKED_AT_ONCE) as pool:
        return list(pool.map(lambda facts: read_range(facts, 0, stop=min(count, facts.size_bytes)), objects))


def _below(
    folder: Address,
    objects: Sequence[ObjectFacts],
    endings: tuple[str, ...],
    *,
    all_endings: tuple[str, ...],
    filter: PathFilter,
    skipped: SkippedFiles,
) -> list[ObjectFacts]:
    keys, root = _paths(objects), PurePosixPath(folder.key)
    taken, here = [], SkippedFiles()
    for facts in objects:
        if facts.address.key.endswith("/"):
            continue  # web consoles create it for an empty folder
        path = PurePosixPath(facts.address.key)
        reason = reason_to_skip(
            path, endings, all_endings=all_endings, folder=root, filter=filter, exists=keys.__contains__
        )
        if reason is None:
            taken.append(facts)
        else:
            here.add(reason, str(facts.address))
    if not taken:
        raise UsageError(
            f"{folder}: no input in this folder", found=str(here) or "no object", expected="files that mdata reads"
        )
    skipped.update(here)
    return taken


def _paths(objects: Sequence[ObjectFacts]) -> frozenset[PurePosixPath]:
    return frozenset(PurePosixPath(facts.address.key) for facts in objects)


def _matching(pattern: Address, skipped: SkippedFiles) -> list[ObjectFacts]:
    first = min(pattern.key.index(sign) for sign in "*?[" if sign in pattern.key)
    folder = pattern.with_key(pattern.key[: pattern.key[:first].rfind("/") + 1])
    objects = list_objects(folder)
    keys = _paths(objects)
    taken = []
    for facts in objects:
        path = PurePosixPath(facts.address.key)
        if not pattern_expression(pattern.key).fullmatch(facts.address.key) or facts.address.key.endswith("/"):
            continue
        if is_result(path, keys.__contains__):
            skipped.add("own result", str(facts.address))
        else:
            taken.append(facts)
    if not taken:
        raise UsageError(f"{pattern}: no object matches this pattern", fix="check the folder; quote the pattern")
    return taken
