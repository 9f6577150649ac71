"""Errors of the trainer: out of memory, with the phase that ran out and the amount, and a lost rank; who reports them.

On a GPU PyTorch reports out of memory with its own RuntimeError type, on a CPU (as do libraries below it) with a plain
RuntimeError and a message, numpy with MemoryError. `out_of_memory_in` marks a function or a block as a phase and turns
all of them into a ResourceError (exit code 5). The innermost phase is reported. run/launch.py handles a rank that the
system kills without a message. Imports no torch: a rank that was stopped while importing torch cannot import it again,
and still has to write its report.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from mdata import ResourceError

SENTENCES = (
    "out of memory",  # CUDA, NCCL, and the runtime below them
    "can't allocate memory",  # PyTorch's allocator on a CPU
    "not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
)
FEWER_TOKENS = "a smaller train.micro_batch, recompute.mode, a shorter train.sequence_length, or a larger mesh.tp"
MORE_RANKS = "more ranks (a larger mesh.tp, or more data-parallel ones), or a smaller model"


def host_name() -> str:
    """This machine's name; in a job of Slurm, Slurm's name for it."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


def rank_here(rank: int) -> str:
    """A rank of this machine, for messages: "rank 3 on gpu017"."""
    return f"rank {rank} on {host_name()}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on any device."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sentence in str(error) for sentence in SENTENCES)


def amount_asked(text: str) -> str | None:
    """The requested amount in an allocator's message: "2.00 GiB"; None if it has none."""
    match = re.search(r"allocate (\d[\d.]*) ?(bytes|[KMGTPE]i?B)", text)
    if match is None:
        return None
    return size_text(int(match[1])) if match[2] == "bytes" and match[1].isdecimal() else f"{match[1]} {match[2]}"


class OutOfMemoryError(ResourceError):
    """Memory ran out; has the parts of the message, so that callers can add to them.

    Attributes:
        phase: what was being done. found: the requested amount. fix: what the user can change.
    """

    phase = found = fix = ""


@contextmanager
def out_of_memory_in(phase: str, *, fix: str) -> Iterator[None]:
    """Turn out-of-memory errors in a block, or in a decorated function, into an OutOfMemoryError.

    Args:
        phase: "the forward and backward passes".
        fix: what the user can change.

    Raises:
        OutOfMemoryError: the block ran out of memory; other errors pass through.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise out_of_memory_error(f"out of memory in {phase}", found=found_text(error), fix=fix) from error


def found_text(error: BaseException) -> str:
    """The requested, free and held amounts, if the message has them; otherwise the message."""
    reason = " ".join(str(error).split())
    asked = amount_asked(reason)
    free = re.search(r"total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free", reason)
    left = f", {free[2]} of the GPU's {free[1]} free" if free else ""
    held = re.search(r"([\d.]+ \w+) is allocated by PyTorch", reason)
    held_text = f", {held[1]} held by PyTorch" if held else ""
    return f"tried to allocate {asked}{left}{held_text}" if asked else reason[:200] or type(error).__name__


def size_text(count: int) -> str:
    """Bytes in a readable unit."""
    value, unit = float(count), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{count} bytes" if unit == "bytes" else f"{value:.2f} {unit}"


def out_of_memory_error(phase: str, *, found: str, fix: str, needs: str | None = None) -> OutOfMemoryError:
    """The error for a phase that ran out of memory; `needs`: what has to fit."""
    error = OutOfMemoryError(phase, found=found, expected=f"room for {needs}" if needs else None, fix=fix)
    error.phase, error.found, error.fix = phase, found, fix
    return error


class LostRankError(ResourceError):
    """Another rank has ended: the cause is in its report; this rank only cannot continue."""
