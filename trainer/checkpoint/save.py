"""Writing checkpoints: named slices of logical tensors, in safetensors, with the index committed last.

    checkpoints/step-400/rank-00000.safetensors   slices that rank 0 holds
                         rank-00000.json          side index: their places, types and hashes
                         tokenizer/...            as in the run folder
                         index.json               names and hashes of all of these, the run's state
    checkpoints/latest                            "step-400"

A slice is a rectangle of a logical tensor, so any layout reads any other; padding and copies are never stored. Each
weight and moment is stored in the optimizer's precision, so resuming on the same layout is bit exact. Each rank streams
its slices into a temporary folder and writes its side index last. Once all of those exist, rank 0 verifies, writes the
index and renames the folder; it only looks at files, so nothing here is a collective. `latest` moves after that: a
crash leaves the older checkpoint intact. Object storage cannot rename: there slices are put at their final place, side
indexes under a temporary name, and putting index.json is the commit.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, cast

from blake3 import blake3
from torch import Tensor

from mdata import MdataError, ResourceError
from mdata.errors import explain_os_error
from mdata.object_storage.uploading import put_stream
from mdata.util import atomic_io
from trainer.checkpoint.folder import check_written, folder_name, make_room, point_to, steps_in
from trainer.checkpoint.format import HashedFile, RunState, dump_index, dump_part
from trainer.checkpoint.location import Location, ObjectFolder
from trainer.checkpoint.object_folder import put, put_all, remove_others, remove_unfinished, try_to_write
from trainer.checkpoint.rank_file import OwnedState, RankFile, part_name
from trainer.checkpoint.stored_files import INDEX, files_of, listed
from trainer.errors import host_name, rank_here, size_text
from trainer.parallel.collectives import Group, gather_objects

T = TypeVar("T")
LOOKS = 10  # at a folder in which files are being renamed, until all are seen
SPARE_BYTES = 1 << 20  # of disk space, for indexes, configurations and a tokenizer
SYNC_BYTES = 64 << 20  # are put on the device at a time, beside the writing; smaller requests took longer


@dataclass(frozen=True, slots=True)
class Target:
    """Where one save goes.

    Args:
        root: the run's `checkpoints` folder, shared by all ranks; or its place in object storage.
        run: the state of the run. attempt: letters and digits, unique among saves of this root; equal on all ranks.
        extras: further files, such as the tokenizer's, by name.
        total_bytes: of all ranks' slices; 0: not known.
        check_owner: on rank 0, raises an error where another start of the run writes to this root now.
    """

    root: Location
    run: RunState
    attempt: str
    extras: Mapping[str, bytes] = field(default_factory=dict)
    total_bytes: int = 0
    check_owner: Callable[[], None] = lambda: None

    @property
    def name(self) -> str:
        """Of the checkpoint's folder in `root`."""
        return folder_name(self.run.step)

    @property
    def partial_name(self) -> str:
        """Of the temporary folder in `root`; in storage it holds the side indexes of a save in flight."""
        return f".{self.name}.{self.attempt}.partial"


def save_checkpoint(target: Target, shard: OwnedState, *, state: Mapping[str, Tensor], world: Group) -> Location:
    """Write one checkpoint; it exists under its name when this returns, on every rank.

    Args:
        state: name -> flat tensor of its owned runs.
        world: the axis of all ranks.

    Raises:
        MdataError: a rank could not write; all ranks fail, and nothing that looks finished is left.
    """
    try:
        together(world, lambda: clear_place(target) if world.rank == 0 else None)
        together(world, lambda: write_part(target, world.rank, shard=shard, state=state))
        together(world, lambda: commit(target, world.size) if world.rank == 0 else None)
    except BaseException:
        discard(target, world.rank)
        raise
    return target.root / target.name


def clear_place(target: Target) -> None:
    """In storage, remove an older checkpoint of this step before any rank writes; on a disk, `commit` does it."""
    target.check_owner()
    if not isinstance(target.root, Path):
        make_room(target.root / target.name)


def write_part(target: Target, rank: int, *, shard: OwnedState, state: Mapping[str, Tensor]) -> None:
    """Write one rank's slices, and then its side index.

    Raises:
        ResourceError: there is less room than all ranks need (rank 0 looks), or the storage does not answer.
        OSError: from the file system.
    """
    content, name = RankFile(rank, shard, state=state), part_name(rank)
    if not isinstance(target.root, Path):
        place = target.root / target.name / content.name
        put_stream(lambda: content, place.address, size_bytes=content.size_bytes, store=place.store)
        put(target.root / target.partial_name / name, dump_part(content.part))
        return
    folder = target.root / target.partial_name
    folder.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        _check_fits(target.root, target.total_bytes, extras=target.extras, begun=folder)
    with atomic_io.atomic_file(folder / content.name) as fd:
        written = begun = 0
        for piece in content:
            atomic_io.write_all(fd, piece)
            written += len(piece)
            if written - begun >= SYNC_BYTES:
                atomic_io.sync_soon(fd, begun, count=written - begun)
                begun = written
    atomic_io.atomic_write(folder / name, dump_part(content.part))


def commit(target: Target, num_ranks: int) -> None:
    """Commit what all ranks have written: verify it, give it its name, and point `latest` to it.

    Raises:
        DamageError: the files differ from what was written. OSError: from the file system. ResourceError: the
            storage does not answer.
    """
    files = files_of(target.root / target.partial_name)
    contents = {name: files.read(name) for name in map(part_name, range(num_ranks))}
    index = dump_index(target.run, _hashed(contents), extras=_hashed(target.extras))
    target.check_owner()
    if isinstance(target.root, Path):
        _commit_folder(target.root / target.partial_name, target.root / target.name, index, extras=target.extras)
    else:
        _commit_objects(target.root / target.name, index, {**contents, **target.extras})
    point_to(target.root / target.name)


def _commit_folder(partial: Path, final: Path, index: bytes, *, extras: Mapping[str, bytes]) -> None:
    for name, content in extras.items():
        (partial / name).parent.mkdir(exist_ok=True)
        atomic_io.atomic_write(partial / name, content)
    atomic_io.atomic_write(partial / INDEX, index)
    check_written(partial)
    make_room(final)
    atomic_io.rename(partial, final)
    atomic_io.sync_folder(final.parent)


def _commit_objects(final: ObjectFolder, index: bytes, contents: Mapping[str, bytes]) -> None:
    put_all(final, contents)
    remove_others(final, keep=contents)
    check_written(final, index=index)
    put(final / INDEX, index)


def _hashed(contents: Mapping[str, bytes]) -> dict[str, HashedFile]:
    return {name: HashedFile(len(content), blake3(content).hexdigest()) for name, content in contents.items()}


def missing_parts(target: Target, num_ranks: int) -> list[int]:
    """The ranks whose side index does not exist yet."""
    if not isinstance(target.root, Path):
        there = listed(target.root / target.partial_name)
        return [rank for rank in range(num_ranks) if part_name(rank) not in there]
    partial = target.root / target.partial_name
    return [rank for rank in range(num_ranks) if not (partial / part_name(rank)).exists()]


def discard(target: Target, rank: int) -> None:
    """Remove what was written, on rank 0; the next save removes what storage refuses to delete now."""
    if rank != 0:
        return
    if isinstance(target.root, Path):
        shutil.rmtree(target.root / target.partial_name, ignore_errors=True)
    else:
        with suppress(MdataError):
            remove_unfinished(target.root)


def check_target(root: Location, needed_bytes: int) -> None:
    """Check that a checkpoint can be written there.

    Raises:
        ResourceError: it does not fit on the disk, or the storage does not answer. UsageError: no bucket, no
            credentials, no permission.
    """
    if isinstance(root, Path):
        _check_fits(root, needed_bytes)
    else:
        try_to_write(root)


def _check_fits(
    root: Path, slices_bytes: int, *, extras: Mapping[str, bytes] | None = None, begun: Path | None = None
) -> None:
    """Check that a checkpoint fits beside the existing ones; see `check_room`."""
    if not slices_bytes:
        return
    # Headers and side indexes take some 250 bytes per slice.
    others = slices_bytes // 1024 + SPARE_BYTES + sum(map(len, (extras or {}).values()))
    there = sorted(steps_in(root)) if root.is_dir() else []
    old = f"remove an old checkpoint such as {folder_name(there[0])}, " if len(there) > 1 else ""
    fix = f"{old}free some disk space, or set checkpoint.folder to another file system"
    check_room(root, slices_bytes + others, subject="a checkpoint", fix=fix, begun=begun)


def check_room(place: Path, needed_bytes: int, *, subject: str, fix: str, begun: Path | None = None) -> None:
    """Check that a file system has room for a write; a file system that does not report its size passes.

    Args:
        place: the file or folder that will be written; it need not exist yet.
        subject, fix: for the message: what will be written, and what to do if there is too little room.
        begun: a folder in which other ranks may have written part of it already.

    Raises:
        ResourceError: there is too little room.
    """
    usage = shutil.disk_usage(next(path for path in (place, *place.absolute().parents) if path.is_dir()))
    if not usage.total:  # some FUSE file systems
        return
    # Read after the free space: bytes that are written in between count twice; in the other order they count never.
    there = _bytes_in(begun) if begun else 0
    if usage.free + there < needed_bytes:
        raise ResourceError(
            f"{subject} does not fit into {place}",
            found=f"{size_text(usage.free)} free on {host_name()}",
            expected=f"{size_text(needed_bytes - there)}",
            fix=fix,
        )


def _bytes_in(folder: Path) -> int:
    """Bytes of the files in a folder, while others write and rename them."""
    for _ in range(LOOKS):
        with suppress(FileNotFoundError):
            return sum(path.stat().st_size for path in folder.iterdir())
        time.sleep(0.05)  # a file has another name now
    return 0


def together(world: Group, action: Callable[[], T], *, doing: str = "writing a checkpoint") -> list[T]:
    """Do something on every rank; if one fails, all raise its error, so that none waits for it."""
    outcome: T | MdataError
    try:
        outcome = action()
    except OSError as error:
        outcome = explain_os_error(error, f"{rank_here(world.rank)} {doing}")
    except MdataError as error:
        outcome = error
    values = gather_objects(outcome, world)
    for value in values:
        if isinstance(value, MdataError):
            raise value
    return cast(list[T], values)
