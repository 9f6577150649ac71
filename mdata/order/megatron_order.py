"""The order of Megatron's GPT dataset: document, sample and shuffle index, equal to Megatron's bit for bit.

A run of T tokens is read E times, E the smallest number of epochs that gives the requested samples. The documents of
all epochs are shuffled together; if less than 80 % of the last epoch's samples are needed, its documents are shuffled
separately, and so are its samples. Sample k begins at token k q of the shuffled documents. All of it is a pure function
of the lengths and the request, drawn from one MT19937 (formats: Megatron-LM's gpt_dataset.py and helpers.cpp).

Errors of the original are not reproduced (F1 to F3 and F18 in docs/design/order.md): the number of samples with a kept
partial one is exact (there: rounded to single precision), a kept partial sample after an empty last document begins at
the right place (there: at offset -1), a split without tokens is refused (there: an endless loop), and document numbers
have 64 bits if needed. Slow twin: tests/reference/megatron_order.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mdata._core import Mersenne, fill_sample_index
from mdata.errors import ResourceError, UsageError, counted
from mdata.util.machine_limits import available_bytes

# The last epoch is shuffled separately if less than this part of it is needed.
_SEPARATE_BELOW = 0.80
_MOST_TOKENS = 1 << 62
_SIGNED_32 = np.iinfo(np.int32).max
_UNSIGNED_32 = np.iinfo(np.uint32).max

Lengths = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class MegatronRequest:
    """What Megatron's indices depend on, besides the lengths.

    Args:
        first, stop: the range of the split's sequences in the file.
        sequence_length: tokens per sample, q.
        num_samples: requested; None: one epoch.
        seed: of the generator, below 2^32.
        extra_token: a sample reads one more token than its length, so that its last token has a label.
        keep_partial: keep the last, partial sample (Megatron: validation only).
    """

    first: int
    stop: int
    sequence_length: int
    num_samples: int | None
    seed: int
    extra_token: bool = True
    keep_partial: bool = False


@dataclass(frozen=True)
class MegatronPlan:
    """The numbers that follow from the tokens of the split alone.

    Attributes:
        tokens_per_epoch: T.
        epochs: E.
        separate: whether the last epoch is shuffled separately.
        samples: rows of the order, C.
        cut: samples of the first shuffle; all of them if nothing is shuffled separately.
    """

    tokens_per_epoch: int
    epochs: int
    separate: bool
    samples: int
    cut: int


@dataclass(frozen=True)
class MegatronIndices:
    """The three arrays.

    Attributes:
        documents: [E n] numbers of sequences in the file, int32 (int64 in a file of 2^31 sequences or more).
        samples: [C + 1, 2] position in `documents` and offset in that document, int32 or int64.
        shuffle: [C] rows of `samples` in the order of training, uint32 (int64 from 2^32 - 2 on).
    """

    documents: npt.NDArray[Any]
    samples: npt.NDArray[Any]
    shuffle: npt.NDArray[Any]


def plan(tokens_per_epoch: int, request: MegatronRequest) -> MegatronPlan:
    """Epochs and samples, from the number of tokens in the split.

    Raises:
        UsageError: a split without tokens, an invalid request, or one of more than 2^62 tokens.
    """
    q, extra, wanted = request.sequence_length, int(request.extra_token), request.num_samples
    _check(tokens_per_epoch, request)
    epochs = 1 if wanted is None else max(1, -(-(wanted * q + extra) // tokens_per_epoch))
    inputs = epochs * tokens_per_epoch - extra
    if inputs >= _MOST_TOKENS:
        raise UsageError(f"{wanted} samples of {q} tokens are more than 2^62 tokens")
    # An empty range has -1 inputs; Megatron's division rounds toward zero, so it has no samples.
    samples = -(-inputs // q) if request.keep_partial else max(inputs, 0) // q
    separate, cut = False, samples
    if epochs > 1 and wanted is not None:
        before = ((epochs - 1) * tokens_per_epoch - extra) // q
        whole_epochs = (tokens_per_epoch - extra) // q
        separate = wanted - before < int(_SEPARATE_BELOW * whole_epochs)
        cut = before if separate else samples
    return MegatronPlan(tokens_per_epoch, epochs, separate, max(samples, 0), cut)


def _check(tokens_per_epoch: int, request: MegatronRequest) -> None:
    if request.sequence_length < 1:
        raise UsageError("the sequence length is not positive", found=str(request.sequence_length))
    if not 0 <= request.seed <= _UNSIGNED_32:
        raise UsageError(f"seed {request.seed}", expected="from 0 to 2^32 - 1, the range of Megatron's generator")
    if request.num_samples is not None and request.num_samples < 0:
        raise UsageError(counted(request.num_samples, "sample"), expected="0 or more")
    if tokens_per_epoch == 0 and request.num_samples is not None:
        raise UsageError(
            "the split has no tokens, so no number of epochs gives the requested samples",
            found=f"sequences {request.first} to {request.stop}",
            fix="give the split a larger share, or add text",
        )


def build(lengths: Lengths, request: MegatronRequest, *, threads: int = 1) -> MegatronIndices:
    """The three indices.

    Memory: 4 bytes for each document of all epochs, 8 and 4 for each sample (twice that if a number does not fit). The
    lengths are not copied, even if unaligned in a mapped file; the only other array holds one epoch's documents, before
    the others exist.

    Args:
        lengths: int32[n], tokens of every sequence of the file.
        request: what to build.
        threads: for filling the sample index.

    Raises:
        UsageError: see `plan`; a range outside the file. ResourceError: not enough memory.
    """
    from concurrent.futures import ThreadPoolExecutor

    if not 0 <= request.first <= request.stop <= len(lengths):
        raise UsageError(f"sequences {request.first} to {request.stop}", expected=f"within 0 to {len(lengths)}")
    lengths = np.ascontiguousarray(lengths, np.int32)  # no copy if the type matches
    inside = lengths[request.first : request.stop]
    sizes = plan(int(inside.sum(dtype=np.int64)), request)
    _check_room(request, sizes)
    generator = Mersenne(request.seed)
    documents = _documents(request, sizes, generator)
    with ThreadPoolExecutor(1) as pool:
        # It draws no random numbers, so it can run while the samples are shuffled.
        samples = pool.submit(_samples, lengths, documents, request=request, sizes=sizes, threads=threads)
        shuffle = _shuffle(sizes, generator)
        return MegatronIndices(documents, samples.result(), shuffle)


def _check_room(request: MegatronRequest, sizes: MegatronPlan) -> None:
    """Refuse arrays that do not fit in memory before any is built."""
    documents = sizes.epochs * (request.stop - request.first)
    needed = documents * _document_type(request).itemsize
    needed += (sizes.samples + 1) * 2 * _sample_type(request, sizes).itemsize
    needed += sizes.samples * _shuffle_type(sizes).itemsize
    available = available_bytes()
    if available is not None and needed > available:
        wanted = "one epoch" if request.num_samples is None else counted(request.num_samples, "sample")
        raise ResourceError(
            f"the arrays of Megatron's order do not fit in memory: {wanted} of {request.sequence_length:,} tokens",
            found=f"{available:,} bytes available",
            expected=f"{needed:,} bytes, for {counted(documents, 'document')} of {counted(sizes.epochs, 'epoch')} and "
            f"{counted(sizes.samples, 'sample')}",
            fix="use fewer samples, a machine with more memory, or the native order, which needs no arrays",
        )


def _document_type(request: MegatronRequest) -> np.dtype[Any]:
    return np.dtype(np.int32 if request.stop <= _SIGNED_32 else np.int64)


def _sample_type(request: MegatronRequest, sizes: MegatronPlan) -> np.dtype[Any]:
    places = sizes.epochs * (request.stop - request.first)
    return np.dtype(np.int32 if max(request.stop, places) <= _SIGNED_32 else np.int64)


def _shuffle_type(sizes: MegatronPlan) -> np.dtype[Any]:
    return np.dtype(np.uint32 if sizes.samples < _UNSIGNED_32 - 1 else np.int64)


def repeated(once: npt.NDArray[Any], times: int) -> npt.NDArray[Any]:
    """[n] -> [times * n], repeated; unlike `np.tile` it lets other threads run meanwhile."""
    rows = np.empty((times, len(once)), once.dtype)
    rows[:] = once
    return rows.reshape(-1)


def _documents(request: MegatronRequest, sizes: MegatronPlan, generator: Mersenne) -> npt.NDArray[Any]:
    once: npt.NDArray[Any] = np.arange(request.first, request.stop, dtype=_document_type(request))
    documents = once if sizes.epochs == 1 else repeated(once, sizes.epochs)
    cut = len(documents) - len(once) if sizes.separate else len(documents)
    generator.shuffle(documents[:cut])
    generator.shuffle(documents[cut:])
    return documents


def _samples(
    lengths: Lengths, documents: npt.NDArray[Any], *, request: MegatronRequest, sizes: MegatronPlan, threads: int
) -> npt.NDArray[Any]:
    rows = np.zeros((sizes.samples + 1, 2), _sample_type(request, sizes))
    extra, q = int(request.extra_token), request.sequence_length
    fill_sample_index(lengths, documents, q, extra, threads, rows.reshape(-1))
    if sizes.samples and sizes.samples * q + extra > sizes.epochs * sizes.tokens_per_epoch:
        rows[sizes.samples] = _end(lengths, documents, extra)
    return rows


def _end(lengths: Lengths, documents: npt.NDArray[Any], extra: int) -> tuple[int, int]:
    """Where a partial sample ends: the last token that can be an input, in the last document that has one."""
    place = len(documents) - 1
    while place > 0 and lengths[documents[place]] < extra:
        place -= 1
    return place, int(lengths[documents[place]]) - extra


def _shuffle(sizes: MegatronPlan, generator: Mersenne) -> npt.NDArray[Any]:
    shuffle: npt.NDArray[Any] = np.arange(sizes.samples, dtype=_shuffle_type(sizes))
    generator.shuffle(shuffle[: sizes.cut])
    generator.shuffle(shuffle[sizes.cut :])
    return shuffle
