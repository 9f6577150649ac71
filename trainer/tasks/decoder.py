"""A model with a key-value cache: takes new tokens of rows, returns the logits after them.

What a block keeps is declared by its kind (`DecodeState`). State of tokens is a tensor of pages for each of its names,
and blocks that see equally many tokens share a page table; state of rows is a tensor with an entry for each slot. A
call computes one token of each row (decoding) or parts of prompts (prefill), which pass through the layers as flat
tokens, as in training, from any number of rows. A model with an encoder reads the text of a row once, when the row
begins.

Shapes: N new tokens of B rows, M positions whose logits are wanted, V entries of the vocabulary.
"""

from __future__ import annotations

import functools
import math
import os
import warnings
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from trainer.errors import out_of_memory_in
from trainer.kernels.recording import CudaLane
from trainer.layers.paged import PagedRows, PagedStep, Pages, ReadRows, RowStates
from trainer.models.family import DecodeState
from trainer.models.stage import Microbatch
from trainer.parallel.collectives import all_reduce_, start_receive_, start_send
from trainer.tasks.loaded_model import Model
from trainer.tasks.pages import Copy, PagePool, PageTable, pages_for

PAGE_TOKENS = 16
CHUNK = 512  # tokens of a prefill
GPU_SHARE, CPU_SHARE = 0.85, 0.5  # of the free memory, if no cache size is given
RECORDED_TOLERANCE = 0.05  # allowed difference of a recorded step, as a share of the largest logit
UNKNOWN_FREE = 4 << 30  # bytes, on systems that do not report free memory


class Decoder:
    """The cache of a model on this rank, and the forward pass over it.

    Args:
        cache_tokens: tokens that blocks without a window keep, of all rows; None: as fit into the free memory, at most
            those of `max_rows` rows.
        max_rows: rows at a time. chunk: tokens of one prefill at most.
        longest: tokens that a row will have; None: those of the model's context.

    Attributes:
        table: the pages of each row. capacity: tokens that a row can have.
        keeps_tokens: whether blocks of any stage keep state of each token; otherwise pages have no tensors and only
            limit the tokens of rows.
        restart: tokens beyond which a row is "long", see `DecodeState`; the context if no row is.
        records: whether decoding is recorded as CUDA graphs, for 1, 2, 4, ... rows; the same on all ranks.

    Raises:
        UsageError: the model has an encoder, and stages on several ranks.
    """

    def __init__(
        self,
        model: Model,
        *,
        cache_tokens: int | None,
        max_rows: int,
        chunk: int = CHUNK,
        page_tokens: int = PAGE_TOKENS,
        longest: int | None = None,
    ) -> None:
        self.model, self.chunk, self.page_tokens = model, chunk, page_tokens
        self._longest_row = min(longest or model.context, model.context)
        every: Mapping[int, DecodeState] = model.module.decode_states()
        states = {block: state for block, state in every.items() if state.per == "token"}
        of_rows = {block: state for block, state in every.items() if state.per == "row"}
        self.restart = min((state.restart or model.context for state in states.values()), default=model.context)
        lasts = self._lasts(states)
        self.keeps_tokens, lasts = bool(lasts), lasts or [0]
        like = next(model.module.parameters())
        page_bytes = dict.fromkeys(lasts, 0)
        for state in states.values():
            numbers = sum(math.prod(self._local(state, shape)) for shape in state.tensors.values())
            page_bytes[self._last(state)] += numbers * like.element_size() * page_tokens
        row_pages = -(-self._longest_row // page_tokens)
        pages = max_rows * row_pages if cache_tokens is None else -(-cache_tokens // page_tokens)
        counts = self._page_counts(pages, lasts, max_rows)
        row_bytes = sum(self._bytes(state, name) for state in of_rows.values() for name in state.tensors)
        if cache_tokens is None:
            free = _free_bytes(model) - (max_rows + 1) * row_bytes
            while pages > 1 and sum(counts[last] * page_bytes[last] for last in lasts) > free:
                pages = pages * 9 // 10
                counts = self._page_counts(pages, lasts, max_rows)
        pools = [PagePool(counts[last], last=last or None) for last in lasts]
        self.capacity = min(self._longest(pool) for pool in pools)
        self.table = PageTable(pools, page_tokens=page_tokens, slots=max_rows, longest=self._longest_row)
        self.cache_bytes = sum((counts[last] + 1) * page_bytes[last] for last in lasts) + (max_rows + 1) * row_bytes
        with out_of_memory_in("the cache of keys and values", fix="a smaller cache, or more ranks"):
            self._tensors = {
                block: self._zeros(state, state.tensors, counts[self._last(state)] + 1, page_tokens)
                for block, state in states.items()
            }
            self._states = {  # the last slot is that of padded rows
                block: self._zeros(state, state.tensors, max_rows + 1) for block, state in of_rows.items()
            }
            self._read = {
                block: self._zeros(state, state.of_encoder, max_rows, model.reads) for block, state in states.items()
            }
        self._read_lengths = np.zeros(max_rows, dtype=np.int32)
        self.records = model.world.device.type == "cuda" and model.start is None
        self._recorded, self._max_rows = dict[int, _Recording](), max_rows
        self._pool_of = {block: lasts.index(self._last(state)) for block, state in states.items()}

    @torch.no_grad()
    def read(self, slot: int, tokens: Sequence[int]) -> None:
        """Run the encoder on the text of a row, before its first tokens."""
        with out_of_memory_in("reading a text", fix="shorter texts, or fewer rows at a time"):
            batch = self.model.module.text(self.moved(np.array(tokens, dtype=np.int64)))
            kept, given = self.model.module.read(self._received(batch), batch)
            self._send(given)
            for block, tensors in kept.items():
                for name, values in tensors.items():
                    self._read[block][name][slot, : len(tokens)] = values
        self._read_lengths[slot] = len(tokens)

    def share_states(self, slots: Sequence[int], new_slots: Sequence[int]) -> None:
        """Copy the states of rows to rows that continue them."""
        old, new = list(slots), list(new_slots)
        for tensors in self._states.values():
            for tensor in tensors.values():
                tensor[new] = tensor[old]

    def share_read(self, slots: Sequence[int], new_slots: Sequence[int]) -> None:
        """Copy the encoder's states of rows to rows that continue them."""
        old, new = list(slots), list(new_slots)
        for tensors in self._read.values():
            for tensor in tensors.values():
                tensor[new] = tensor[old]
        self._read_lengths[new] = self._read_lengths[old]

    @torch.no_grad()
    def prefill(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        tokens: Sequence[Sequence[int]],
        at: Sequence[int],
        *,
        long: Sequence[bool],
    ) -> Tensor | None:
        """Add tokens to rows that have pages for them, and compute logits after some of the tokens.

        Args:
            starts: tokens that each row has already. at: numbers among all new tokens, in their order.
            long: which rows have, or will have, more than `restart` tokens.

        Returns:
            this rank's entries of the logits, with padding: [M, V]; None but on the last stage.
        """
        counts = tuple(map(len, tokens))
        lengths = tuple(start + count for start, count in zip(starts, counts, strict=True))
        places = [np.arange(start, stop) for start, stop in zip(starts, lengths, strict=True)]
        length_B, width, index = self.moved(np.array(lengths, dtype=np.int32)), self._width(lengths), list(slots)
        rows = []
        for pool, pages in enumerate(self.table.tables):
            place_N = np.concatenate(
                [self.table.places(pool, slot, positions) for slot, positions in zip(slots, places, strict=True)]
            )
            rows.append(PagedRows(self.moved(pages[index, :width]), length_B, self.moved(place_N), counts, lengths))
        flat_N = np.array([token for row in tokens for token in row], dtype=np.int64)
        where = [place + self.restart * is_long for place, is_long in zip(places, long, strict=True)]
        position_N, at_M = np.concatenate(where), np.array(at, dtype=np.int64)
        slot_B = np.array(slots, dtype=np.int64)
        states = self._row_states(self.moved(slot_B), counts, tuple(starts))
        slot_N = np.repeat(slot_B, counts)
        return self._forward(self.moved(flat_N), self.moved(position_N), self.moved(at_M), rows, slot_N, states)

    @torch.no_grad()
    def decode(
        self, slots: Sequence[int], lengths: Sequence[int], tokens_B: Tensor, *, long: Sequence[bool]
    ) -> Tensor | None:
        """Add one token to each row, and compute the logits after it.

        Args:
            lengths: tokens of each row, with this one. tokens_B: int64, on the device. long: as for `prefill`.

        Returns:
            as `prefill`, [B, V].
        """
        if self.records:
            size, width = min(_power_of_2(len(slots)), self._max_rows), self.table.tables[0].shape[1]
            inputs = self.moved(self._decode_inputs(slots, lengths, long, size=size, width=width))
            if (recording := self._recording(tokens_B, inputs, size=size, width=width)) is not None:
                logits_BV = recording.replay(tokens_B, inputs)
                return None if logits_BV is None else logits_BV[: len(slots)]
        size, width = len(slots), self._width(lengths)
        inputs = self.moved(self._decode_inputs(slots, lengths, long, size=size, width=width))
        return self._decode(tokens_B, inputs, size=size, width=width, slot_B=np.array(slots, dtype=np.int64))

    def _recording(self, tokens_B: Tensor, inputs: Tensor, *, size: int, width: int) -> _Recording | None:
        """The recorded step for this number of rows, made at its first use and tried with the inputs of that step.

        None on all ranks, also later, if a rank cannot record it or its result differs.
        """
        if size in self._recorded:
            return self._recorded[size]
        recording, problem = None, ""
        try:
            recording = _Recording(self, size, width)
        except RuntimeError as error:
            problem = f"recording fails: {str(error).partition(chr(10))[0]}"
        if not self._any(problem) and recording is not None:
            problem = self._difference(recording, tokens_B, inputs, width=width)
            if not self._any(problem):
                self._recorded[size] = recording
                return recording
        self.records = False
        self._recorded.clear()
        reason = problem or "another rank cannot use them"
        warnings.warn(f"decoding runs without CUDA graphs, and slower: {reason}", RuntimeWarning, stacklevel=2)
        return None

    def _difference(self, recording: _Recording, tokens_B: Tensor, inputs: Tensor, *, width: int) -> str:
        """How a recording differs from the step that it repeats; empty if it does not.

        States of rows are restored each time: the caller's step is the one that counts.
        """
        padded_B = functional.pad(tokens_B, (0, recording.size - len(tokens_B)))
        held = [(tensor, tensor.clone()) for tensors in self._states.values() for tensor in tensors.values()]
        expected_BV = self._decode(padded_B, inputs, size=recording.size, width=width)
        for tensor, before in held:
            tensor.copy_(before)
        replayed_BV = recording.replay(tokens_B, inputs)
        for tensor, before in held:
            tensor.copy_(before)
        if replayed_BV is None or expected_BV is None:
            return ""
        replayed_BV, expected_BV = replayed_BV[: len(tokens_B)].float(), expected_BV[: len(tokens_B)].float()
        largest, difference = expected_BV.abs().amax(), (replayed_BV - expected_BV).abs().amax()
        if bool(difference <= RECORDED_TOLERANCE * largest) or bool(
            expected_BV.isnan().any()
        ):  # NaN has its own message
            return ""
        return f"a logit differs by {float(difference):.3g}, the largest is {float(largest):.3g}"

    def _any(self, problem: str) -> bool:
        """Whether any rank has a problem, on all ranks."""
        flag = torch.tensor(float(bool(problem)), device=self.model.world.device)
        for axis in ("tp", "pp"):
            all_reduce_(flag, self.model.world.groups[axis], op="max")
        return bool(flag)

    def _decode_inputs(
        self, slots: Sequence[int], lengths: Sequence[int], long: Sequence[bool], *, size: int, width: int
    ) -> np.ndarray:
        """All inputs of a decoding step in one array, to be moved to the device at once; see `_decode`.

        Padded rows have one token, in page 0, and a slot that belongs to no row.
        """
        index, count = list(slots), len(slots)
        last_B = np.array(lengths, dtype=np.int64) - 1
        inputs = np.zeros((3 + len(self.table.tables) * width, size), dtype=np.int32)
        inputs[0, :count], inputs[1] = last_B + self.restart * np.array(long, dtype=np.int64), 1
        inputs[1, :count] += last_B.astype(np.int32)
        inputs[2], inputs[2, :count] = self._max_rows, index
        for number, pages in enumerate(self.table.tables):
            first = 3 + number * width
            inputs[first : first + width].reshape(size, width)[:count] = pages[index, :width]
        return inputs.reshape(-1)

    def _decode(
        self, tokens_B: Tensor, inputs: Tensor, *, size: int, width: int, slot_B: np.ndarray | None = None
    ) -> Tensor | None:
        sizes = [size, size, size, *([size * width] * len(self.table.tables))]
        position_B, length_B, states_B, *tables = inputs.split(sizes)
        rows = [PagedRows(table.view(size, width), length_B) for table in tables]
        states = self._row_states(states_B.long())
        return self._forward(tokens_B, position_B, torch.arange(size, device=tokens_B.device), rows, slot_B, states)

    def _row_states(
        self, slot_B: Tensor, counts: tuple[int, ...] = (), starts: tuple[int, ...] = ()
    ) -> dict[int, RowStates]:
        return {block: RowStates(tensors, slot_B, counts, starts) for block, tensors in self._states.items()}

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copy pages, in the order given."""
        for block, tensors in self._tensors.items():
            mine = [copy for copy in copies if copy.pool == self._pool_of[block]]
            if mine:
                source, target = ([getattr(copy, name) for copy in mine] for name in ("source", "target"))
                for tensor in tensors.values():
                    tensor[target] = tensor[source]

    def _forward(
        self,
        tokens_N: Tensor,
        position_N: Tensor,
        at_M: Tensor,
        rows: Sequence[PagedRows],
        slot_N: np.ndarray | None,
        states: Mapping[int, RowStates],
    ) -> Tensor | None:
        model, read = self.model, None
        if model.start is not None and slot_N is not None:
            read = ReadRows(self._read, self.moved(slot_N), self.moved(self._read_lengths[slot_N]))
        with out_of_memory_in("generating", fix="fewer rows at a time, shorter prefills, or a smaller cache"):
            pages = {block: Pages(tensors, rows[self._pool_of[block]]) for block, tensors in self._tensors.items()}
            nothing = torch.zeros(0, device=tokens_N.device)
            batch = Microbatch(
                tokens_BS=tokens_N[None],
                labels_BS=nothing,
                loss_mask_BS=nothing,
                positions_BS=position_N[None],
                step=PagedStep(pages, model.context, read, states),
            )
            received, pp = self._received(batch), model.world.groups["pp"]
            if pp.rank + 1 == pp.size:
                logits: Tensor = model.module.next_logits(received, batch, at_M)
                return logits
            self._send(model.module(received, batch))
            return None

    def _received(self, batch: Microbatch) -> tuple[Tensor, ...]:
        """The tensors that the previous stage sends."""
        pp, received = self.model.world.groups["pp"], tuple(self.model.module.received(batch))
        for buffer in received:
            start_receive_(buffer, self.model.world.links[pp.rank - 1, pp.rank]).wait()
        return received

    def _send(self, tensors: Sequence[Tensor]) -> None:
        """Send to the next stage."""
        pp = self.model.world.groups["pp"]
        for tensor in tensors:
            start_send(tensor.contiguous(), self.model.world.links[pp.rank, pp.rank + 1]).wait()

    @functools.cached_property
    def lane(self) -> CudaLane:
        """Where decoding steps are recorded: one at a time is in use, and each result is read before the next."""
        return CudaLane(self.model.world.device)

    def is_long(self, length: int) -> bool:
        """Whether a row of this length is computed as a long one."""
        return self.restart < min(length, self.model.context)

    def _width(self, lengths: Sequence[int]) -> int:
        """Pages of the longest row."""
        return -(-max(lengths) // self.page_tokens)

    def moved(self, array: np.ndarray) -> Tensor:
        """The array on the device, without waiting for running kernels."""
        return moved(torch.from_numpy(np.ascontiguousarray(array)), self.model.world.device)

    def _local(self, state: DecodeState, shape: tuple[int, ...]) -> tuple[int, ...]:
        """This rank's part of a tensor that a block keeps of a token."""
        tp = self.model.world.groups["tp"].size
        return (max(1, shape[0] // tp), *shape[1:]) if state.divided else shape

    def _zeros(self, state: DecodeState, shapes: Mapping[str, tuple[int, ...]], *sizes: int) -> dict[str, Tensor]:
        """This rank's part of each tensor: [*sizes, ...]."""
        device = next(self.model.module.parameters()).device
        return {
            name: torch.zeros(*sizes, *self._local(state, shape), dtype=self._dtype(state, name), device=device)
            for name, shape in shapes.items()
        }

    def _dtype(self, state: DecodeState, name: str) -> torch.dtype:
        dtype = next(self.model.module.parameters()).dtype
        return torch.promote_types(dtype, torch.float32) if name in state.wide else dtype

    def _bytes(self, state: DecodeState, name: str) -> int:
        """Bytes of this rank's part of what a block keeps of a row under a name."""
        return math.prod(self._local(state, state.tensors[name])) * self._dtype(state, name).itemsize

    def _last(self, state: DecodeState) -> int:
        """The window of such a block, in tokens; 0: the whole context."""
        return 0 if state.last is None or state.last >= self.model.context else state.last

    def _lasts(self, states: Mapping[int, DecodeState]) -> list[int]:
        """The windows of the blocks of all stages, so that every rank has the same tables; 0 comes first."""
        flags = torch.zeros(self.model.context, device=self.model.world.device)
        for state in states.values():
            flags[self._last(state)] = 1
        all_reduce_(flags, self.model.world.groups["pp"], op="max")
        return [int(last) for last in flags.nonzero().flatten().tolist()]

    def _page_counts(self, pages: int, lasts: Sequence[int], max_rows: int) -> dict[int, int]:
        """Pages of each pool: the given number, but no more than the windows of all rows need."""
        return {last: max(1, min(pages, max_rows * self._needed(last))) for last in lasts}

    def _needed(self, last: int) -> int:
        """Pages of the longest row."""
        return pages_for(self._longest_row, last=last or None, chunk=self.chunk, page_tokens=self.page_tokens)

    def _longest(self, pool: PagePool) -> int:
        """Tokens of a row that has the pool to itself."""
        fits = self._needed(pool.last or 0) <= pool.pages
        return self._longest_row if fits else min(self._longest_row, pool.pages * self.page_tokens)


class _Recording:
    """A decoding step of some number of rows as a CUDA graph; its inputs and its result stay where they are.

    It contains collectives of tp and messages of pp, so all ranks record and replay the same steps in the same order.
    """

    def __init__(self, decoder: Decoder, size: int, width: int) -> None:
        device, self.size = decoder.model.world.device, size
        self._tokens_B = torch.zeros(size, dtype=torch.int64, device=device)
        self._inputs = decoder.moved(decoder._decode_inputs([], [], [], size=size, width=width))
        self._logits_BV: Tensor | None = None

        def run() -> None:
            self._logits_BV = decoder._decode(self._tokens_B, self._inputs, size=size, width=width)

        lane = decoder.lane
        with lane.beside(None):
            for _ in range(2):  # compiles kernels, makes tables and opens communicators, which cannot be recorded
                run()
        lane.join()
        self._logits_BV = None
        self._recorded = lane.record(run)

    def replay(self, tokens_B: Tensor, inputs: Tensor) -> Tensor | None:
        """The logits, which the next replay overwrites; None but on the last stage."""
        self._tokens_B[: len(tokens_B)] = tokens_B
        self._inputs.copy_(inputs)
        self._recorded.replay()
        return self._logits_BV


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device; the host does not wait for running kernels."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _free_bytes(model: Model) -> float:
    """Bytes that the cache may take, the same on all ranks."""
    device = model.world.device
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0] * GPU_SHARE
    elif "SC_AVPHYS_PAGES" in os.sysconf_names:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * CPU_SHARE
    else:
        free = UNKNOWN_FREE
    negated_free = torch.tensor(-free, dtype=torch.float64, device=device)
    for axis in ("tp", "pp"):
        all_reduce_(negated_free, model.world.groups[axis], op="max")
    return float(-negated_free)


class BeamCache:
    """The rows of a beam search after one prompt, which share the pages of their common tokens."""

    def __init__(self, model: Model, ids: Sequence[int], *, width: int, max_tokens: int) -> None:
        text, ids = (ids, [model.start]) if model.start is not None else ((), ids)
        own = 2 * width * (-(-max_tokens // PAGE_TOKENS) + 2)  # pages of rows before and after a step
        self._decoder = Decoder(
            model,
            cache_tokens=(own - (-len(ids) // PAGE_TOKENS)) * PAGE_TOKENS,
            max_rows=2 * width,
            longest=len(ids) + max_tokens,
        )
        self._decoder.records = False  # a recording costs more than the steps of one search
        self._text = tuple(text)
        self._ids, self._slots, self._length = list(ids), list[int](), 0
        self._long = self._decoder.is_long(len(ids) + max_tokens)  # from the first token on, unlike in `DecodeEngine`

    def logits(self, rows: Sequence[Sequence[int]], parents: Sequence[int]) -> Tensor:
        """Logits after each row, on all ranks: fp32[B, V].

        Args:
            rows: new tokens, one more than in the last call. parents: of each, its place in the last call.
        """
        decoder, model, table = self._decoder, self._decoder.model, self._decoder.table
        if not self._slots:
            self._slots = [table.open()]
            if self._text:
                decoder.read(self._slots[0], self._text)
            for start in range(0, len(self._ids), decoder.chunk):
                part = self._ids[start : start + decoder.chunk]
                self._extend(start + len(part))
                local_BV = decoder.prefill(self._slots, [start], [part], [len(part) - 1], long=[self._long])
            return model.whole_vocabulary(local_BV, 1)
        forks = [table.fork(self._slots[parent], self._length) for parent in parents]
        for slot in self._slots:
            table.close(slot)
        decoder.copy([copy for fork in forks if fork is not None for copy in fork[1]])
        before, self._slots = self._slots, [fork[0] for fork in forks if fork is not None]
        decoder.share_states([before[parent] for parent in parents], self._slots)
        if self._text:
            decoder.share_read([before[parent] for parent in parents], self._slots)
        assert len(self._slots) == len(rows), "the cache was made for all of them"
        self._extend(self._length + 1)
        last_B = torch.tensor([row[-1] for row in rows], device=model.world.device)
        local_BV = decoder.decode(self._slots, [self._length] * len(rows), last_B, long=[self._long] * len(rows))
        return model.whole_vocabulary(local_BV, len(rows))

    def _extend(self, length: int) -> None:
        for slot in self._slots:
            self._decoder.table.forget(slot, self._length)
            extended = self._decoder.table.extend(slot, length)
            assert extended, "the cache was made for all of them"
        self._length = length
