"""A run's checkpoints in object storage: what is written and removed there.

    s3://bucket/run/step-400/rank-00000.safetensors ...        as on a disk
    s3://bucket/run/step-400/index.json                        put last: the checkpoint exists once this object does
    s3://bucket/run/latest                                     "step-400", put after that
    s3://bucket/run/.step-400.ATTEMPT.partial/rank-00000.json  a rank's side index while a save is in flight

Objects cannot be renamed, so slices go to their final place at once. Removing a checkpoint begins with its index. There
are no locks: only one run at a time may write to a folder.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor

from mdata.object_storage.reading import look_at_object, object_there, read_range
from mdata.object_storage.uploading import put_stream, remove_objects
from trainer.checkpoint.format import file_of_part
from trainer.checkpoint.location import ObjectFolder
from trainer.checkpoint.stored_files import AHEAD, INDEX, listed

LATEST = "latest"
_TEST = ".write-test-"
_LEFTOVER = re.compile(r"\.step-[0-9]+\.[0-9a-z-]+\.partial/.*|\.write-test-.*", re.DOTALL)
_IN_STEP = re.compile(r"(step-[1-9][0-9]{0,17})/(.*)", re.DOTALL)
_WRITTEN = re.compile(r"rank-[0-9]{5,9}\.(safetensors|json)|tokenizer/[^/]*|tokenizer_facts\.json")


def put(place: ObjectFolder, content: bytes) -> None:
    """Write one small object."""
    put_stream(lambda: [content], place.address, size_bytes=len(content), store=place.store)


def put_all(folder: ObjectFolder, contents: Mapping[str, bytes]) -> None:
    """Write small objects into a folder, several at once."""
    with ThreadPoolExecutor(AHEAD, thread_name_prefix="checkpoint-objects") as pool:
        for _ in pool.map(lambda item: put(folder / item[0], item[1]), contents.items()):
            pass


def latest_name(root: ObjectFolder) -> str | None:
    """The name in `latest`; None if there is no such object."""
    facts = object_there((root / LATEST).address, root.store)
    if facts is None:
        return None
    return read_range(facts, 0, stop=min(100, facts.size_bytes), store=root.store).decode(errors="replace").strip()


def point_to_objects(final: ObjectFolder) -> None:
    """Make `latest` name this checkpoint."""
    put(final.parent / LATEST, final.name.encode())


def remove_folder(folder: ObjectFolder) -> None:
    """Remove all objects of a folder, a checkpoint's index first, so that a partly removed one is never found."""
    facts = listed(folder)
    if INDEX in facts:
        remove_objects([facts.pop(INDEX).address], folder.store)
    remove_objects([object_facts.address for object_facts in facts.values()], folder.store)


def remove_others(folder: ObjectFolder, *, keep: Collection[str]) -> None:
    """Remove leftovers of killed saves of this step: objects of ranks that this save does not have.

    Args:
        keep: names to keep; a side index keeps the file that it describes too.
    """
    current = {*keep, *(file_of_part(name) for name in keep)}
    objects = listed(folder).items()
    remove_objects(
        [facts.address for name, facts in objects if name not in current and _WRITTEN.fullmatch(name)], folder.store
    )


def remove_unfinished(root: ObjectFolder) -> None:
    """Remove leftovers of killed saves; no save may be in flight.

    In folders step-N without an index, these are the objects that a save writes. The folder that `latest` names stays.
    """
    facts, named = listed(root), latest_name(root)
    gone = [object_facts.address for name, object_facts in facts.items() if _LEFTOVER.fullmatch(name)]
    for name, object_facts in facts.items():
        match = _IN_STEP.fullmatch(name)
        if match and _WRITTEN.fullmatch(match[2]) and f"{match[1]}/{INDEX}" not in facts and match[1] != named:
            gone.append(object_facts.address)
    remove_objects(gone, root.store)


def try_to_write(root: ObjectFolder) -> None:
    """Check with a small object that objects can be written there, listed and removed.

    Raises:
        UsageError: no bucket, no credentials, no permission, or a web server. ResourceError: the storage does not
            respond.
    """
    place = root / f"{_TEST}{secrets.token_hex(8)}"
    put(place, b"mtrain tries whether it can write here\n")
    look_at_object(place.address, root.store)
    listed(place)
    remove_objects([place.address], root.store)
