"""Errors of the trainer: out of memory, with the phase that ran out and the amount, and a lost rank.

PyTorch reports running out of memory as a RuntimeError of its own on a GPU, as a plain RuntimeError with a sentence on
a CPU and in libraries below it, numpy as MemoryError. `out_of_memory_in` marks a function or a block as a phase and
turns all of them into a ResourceError (exit code 5). The innermost phase is the one reported. A rank that the system
kills without a message is handled in run/launch.py. Imports no torch: a rank that was stopped while it imported torch
cannot import it a second time, and has to write its report.
"""

from __future__ import annotations

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


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on any device."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sentence in str(error) for sentence in SENTENCES)


def amount_asked(text: str) -> str | None:
    """What was asked for, from an allocator's sentence: "2.00 GiB"; None where it does not say."""
    found = re.search(r"allocate (\d[\d.]*) ?(bytes|[KMGTPE]i?B)", text)
    if found is None:
        return None
    return size_text(int(found[1])) if found[2] == "bytes" and found[1].isdecimal() else f"{found[1]} {found[2]}"


class OutOfMemoryError(ResourceError):
    """Memory ran out; the parts of the message, so that more can be said by who knows more.

    Attributes:
        phase: what was going on. found: what was asked for. fix: what the user can change.
    """

    phase = found = fix = ""


@contextmanager
def out_of_memory_in(phase: str, *, fix: str) -> Iterator[None]:
    """Turn running out of memory in a block, or in a function that this decorates, into an error that says so.

    Args:
        phase: "the forward and backward passes".
        fix: what the user can change.

    Raises:
        OutOfMemoryError: the block ran out of memory; other errors go through.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise out_of_memory_error(f"out of memory in {phase}", found=found_text(error), fix=fix) from error


def found_text(error: BaseException) -> str:
    """What was asked for, what a GPU had left and what was held, if the message has them; else the message."""
    reason = " ".join(str(error).split())
    asked = amount_asked(reason)
    free = re.search(r"total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free", reason)
    left = f", {free[2]} of the GPU's {free[1]} free" if free else ""
    held = re.search(r"([\d.]+ \w+) is allocated by PyTorch", reason)
    kept = f", {held[1]} held by PyTorch" if held else ""
    return f"tried to allocate {asked}{left}{kept}" if asked else reason[:200] or type(error).__name__


def size_text(count: int) -> str:
    """Bytes in the unit that people would take."""
    value, unit = float(count), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{count} bytes" if unit == "bytes" else f"{value:.2f} {unit}"


def out_of_memory_error(phase: str, *, found: str, fix: str, needs: str | None = None) -> OutOfMemoryError:
    """The error for a phase in which memory ran out; `needs`: what has to fit."""
    error = OutOfMemoryError(phase, found=found, expected=f"room for {needs}" if needs else None, fix=fix)
    error.phase, error.found, error.fix = phase, found, fix
    return error


class LostRankError(ResourceError):
    """Another rank is gone: the cause is in its report, this rank only cannot continue."""
