"""The decode engine, with continuous batching: each step computes parts of prompts and one token of every running row.

The scheduler is a function of the requests and cancellations so far, so all ranks of a model run it and agree without
communication; only chosen tokens are sent. A row waits until the cache has room for its prompt. If pages run out, the
youngest row is preempted and recomputed later, with the tokens that it had. Every draw is f(seed, number, sample,
position), so a text depends neither on its neighbours nor on preemption. On a GPU the host reads the tokens of a
step while the next one runs: the end of a text is seen one token late, and that token is dropped. Not done here: stop
strings (the caller finds them with text_stream.py, and cancels), and sharing pages between equal prompts.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mdata import UsageError
from mdata.errors import counted
from trainer.parallel.collectives import all_reduce_
from trainer.tasks.decoder import CHUNK, PAGE_TOKENS, Decoder
from trainer.tasks.loaded_model import Model
from trainer.tasks.sampling import Sampling, biased, check_chosen, choose, penalized, uniform

WARM_UP_TOKENS = 2  # the second one comes from a decoding step
IDLE_CHUNKS = 4  # of prompts per step, while no row is being continued


class Request(NamedTuple):
    """A prompt to continue.

    Args:
        id: names it in tokens; unique among open requests.
        sampling: its max_tokens, stop and keep_stop are ignored here.
        max_tokens: new tokens at most; 0 with `echo`: the prompt is only scored.
        top_logprobs: how many of the likeliest tokens to report at each position.
        echo: report the prompt's tokens first, with their log probabilities.
        number: of the prompt in its file, and sample: of that prompt; the draws depend on both, see `uniform`.
        sliding: drop the oldest tokens when the context is full; otherwise such a request is refused.
        text: the user's prompt if the model has an encoder, which reads it; `prompt` is then the token with which the
            decoder begins.
    """

    id: str
    prompt: Sequence[int]
    sampling: Sampling
    max_tokens: int
    top_logprobs: int = 0
    echo: bool = False
    number: int = 0
    sample: int = 0
    sliding: bool = False
    text: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Token:
    """One token of a request's text, or a notice that it was cancelled.

    Args:
        id: of the request. token: -1 with "cancelled".
        logprob: of the logits with their bias, before penalties and filters; nan for the first token of a prompt.
        top: the likeliest tokens at this position, with their log probabilities.
        finish: why the text ends with this token: "stop" (it ends a text), "length" or "cancelled"; None: it
            continues.
        prompt: whether it is a token of the prompt.
    """

    id: str
    token: int
    logprob: float
    top: list[tuple[int, float]]
    finish: str | None
    prompt: bool = False


class Load(NamedTuple):
    """Running rows, waiting rows, and pages of the cache."""

    running: int
    waiting: int
    pages_used: int
    pages: int


@dataclass(slots=True, eq=False)
class _Row:
    """The text of a request.

    Attributes:
        tokens: of the prompt, and new ones that the host has read. ahead: chosen tokens that the host has not read yet.
        first: the first token of the context, once older ones were dropped.
        slot: in the page table; -1: waiting. cached: tokens from `first` on whose keys are in pages.
        long: whether they were computed as those of a row of more than `Decoder.restart` tokens.
        told: tokens of the prompt that were reported.
    """

    request: Request
    tokens: list[int]
    ahead: int = 0
    first: int = 0
    slot: int = -1
    cached: int = 0
    long: bool = False
    told: int = 0
    ended: bool = False

    @property
    def length(self) -> int:
        """Tokens of the context."""
        return len(self.tokens) + self.ahead - self.first

    @property
    def num_new(self) -> int:
        return len(self.tokens) + self.ahead - len(self.request.prompt)

    @property
    def tells_prompt(self) -> bool:
        """Whether tokens of the prompt remain to be reported."""
        return self.request.echo and self.told < len(self.request.prompt)

    @property
    def reads_text(self) -> bool:
        """Whether its next token cannot be chosen before the last one was read."""
        rules = self.request.sampling
        penalties = rules.repetition_penalty != 1 or rules.presence_penalty or rules.frequency_penalty
        return bool(penalties or rules.blocked_after or rules.min_tokens or self.request.sliding)


class _Prefill(NamedTuple):
    """The next tokens of a row."""

    row: _Row
    num_tokens: int


class _Flight(NamedTuple):
    """A step's choices that the host has not read yet: rows, tokens, log probabilities, and the likeliest [B, n]."""

    rows: list[_Row]
    results: tuple[Tensor, ...]
    arrived: torch.cuda.Event | None


class DecodeEngine:
    """Continues requests with a model.

    Args:
        cache_tokens: of all rows; None: as many as fit into free memory, at most those of `max_batch` longest rows.
        max_batch: rows per batch. prefill_chunk: tokens of a row's prompt per step, and of all prompts while rows are
            being continued.
        longest: tokens that a row will have; None: those of the model's context.

    Attributes:
        capacity: tokens that a row can have. cache_bytes: on this rank.
        cache_tokens: capacity of the cache for all rows; 0: the model keeps only states of rows.
    """

    def __init__(
        self,
        model: Model,
        *,
        cache_tokens: int | None = None,
        max_batch: int = 16,
        prefill_chunk: int = CHUNK,
        page_tokens: int = PAGE_TOKENS,
        longest: int | None = None,
    ) -> None:
        for name, value in (("max_batch", max_batch), ("prefill_chunk", prefill_chunk), ("page_tokens", page_tokens)):
            if value < 1:
                raise UsageError(f"{name}={value} is below 1")
        if cache_tokens is not None and cache_tokens < 1:
            raise UsageError(f"cache_tokens={cache_tokens} is below 1", expected="tokens that the cache holds, >= 1")
        model.check_continues()
        self.model, self._chunk, self._max_batch = model, prefill_chunk, max_batch
        self._decoder = Decoder(
            model,
            cache_tokens=cache_tokens,
            max_rows=max_batch,
            chunk=prefill_chunk,
            page_tokens=page_tokens,
            longest=longest,
        )
        self.capacity = self._decoder.capacity
        self._table = self._decoder.table
        pages = max(pool.pages for pool in self._table.pools)
        self.cache_tokens = pages * page_tokens if self._decoder.keeps_tokens else 0
        self.cache_bytes = self._decoder.cache_bytes
        self._waiting, self._running = deque[_Row](), list[_Row]()  # both in the order of arrival
        self._cancelled = list[Token]()
        self._flight: _Flight | None = None
        self._lags = model.world.device.type == "cuda"
        self._last_S = torch.zeros(max_batch, dtype=torch.int64, device=model.world.device)  # chosen last, by slot

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            UsageError: it can never be served; nothing has changed.
        """
        request = self._with_text(request)
        self._check(request)
        first = max(0, len(request.prompt) - self.model.context)  # where it slides
        self._waiting.append(_Row(request, list(request.prompt), first=first, told=first))

    def _with_text(self, request: Request) -> Request:
        """The request in the form that a model with an encoder needs."""
        model = self.model
        if model.start is None:
            return request
        model.check_ids(request.prompt)
        if not 0 < len(request.prompt) <= model.reads:
            raise UsageError(
                f"a text of {len(request.prompt):,} tokens does not fit the encoder of {model.name}",
                expected=f"1 to {model.reads:,}",
            )
        if request.echo:
            raise UsageError(
                "a model with an encoder has no log probabilities of its prompt", fix="do not ask for them"
            )
        return request._replace(prompt=(model.start,), text=request.prompt)

    def cancel(self, id: str) -> None:
        """End a request; the next step reports it. Does nothing if it is not open."""
        for row in [*self._running, *self._waiting]:
            if row.request.id == id:
                self._end(row)
                self._cancelled.append(Token(id, -1, math.nan, [], "cancelled"))

    @property
    def busy(self) -> bool:
        """Whether a step would compute or report something."""
        return bool(self._waiting or self._running or self._cancelled or self._flight)

    def load(self) -> Load:
        """The load: rows, and how full the cache is."""
        pages = sum(pool.pages for pool in self._table.pools)
        return Load(len(self._running), len(self._waiting), self._table.used, pages)

    def step(self) -> list[Token]:
        """Compute parts of prompts and the next token of each row; returns the tokens that the host has read by now.

        Raises:
            DamageError: the model's logits are not numbers.
        """
        reports, self._cancelled = self._cancelled, []
        if not self._lags or any(row.reads_text for row in self._running):
            reports += self._read()
        work = self._scheduled()
        if work is None:
            reports += self._read()
            work = self._scheduled()
            assert work is not None, "rows whose tokens were read can be preempted"
        before, self._flight = self._flight, None
        news = self._launch(*work)
        if before is not None:
            reports += self._taken(before)
        reports += news
        if not self._lags:
            reports += self._read()
        return reports

    def warm_up(self) -> None:
        """Decode batches of 1, 2, 4, ... rows and prefill the largest chunk, before there are requests.

        This compiles kernels, records graphs and takes memory, so that the first requests are as fast as later ones.
        Texts do not depend on it.
        """
        assert not self.busy, "there are requests"
        most = min(self.capacity, self.model.context) - 1
        if most < 1:
            return
        longest = min(most, self._chunk) if self.model.start is None else self.model.reads
        rules = Sampling(greedy=True, ignore_eod=True)
        sizes = [1 << i for i in range(self._max_batch.bit_length())] + [self._max_batch]
        for rows, length in [*((size, 1) for size in sizes), (-(-IDLE_CHUNKS * self._chunk // longest), longest)]:
            for row in range(rows):
                self.add(Request(f"warm-up {row}", [0] * length, rules, max_tokens=WARM_UP_TOKENS))
            while self.busy:
                self.step()

    def _check(self, request: Request) -> None:
        model = self.model
        request.sampling.check(model.vocab_size)
        model.check_ids(request.prompt)
        length, most = len(request.prompt), request.max_tokens
        if not length:
            raise UsageError("the prompt has no tokens", fix="give a text to continue")
        if most < (0 if request.echo else 1) or request.top_logprobs < 0:
            raise UsageError(
                "invalid request",
                found=f"max_tokens={most}, top_logprobs={request.top_logprobs}",
                expected="max_tokens >= 1 (>= 0 with echo), top_logprobs >= 0",
            )
        if any(row.request.id == request.id for row in (*self._running, *self._waiting)):
            raise UsageError(f"a request with the id {request.id!r} is open already")
        if request.sliding and min(length + most, model.context) <= self.capacity:
            return
        if not request.sliding and (length > model.context or length + most > model.context + 1):
            raise UsageError(
                f"the prompt and the new tokens do not fit the context of {model.name}",
                found=f"{counted(length, 'token')} of the prompt and {most:,} new ones",
                expected=f"at most {model.context:,} together",
                fix="a shorter prompt or fewer new tokens",
            )
        if length + most - 1 > self.capacity:  # the last token is never read again
            raise UsageError(
                "the prompt and the new tokens do not fit the KV cache",
                found=f"{counted(length, 'token')} of the prompt and {most:,} new ones",
                expected=f"at most {self.capacity + 1:,} together",
                fix="a larger cache (more memory or ranks), a shorter prompt, or fewer new tokens",
            )

    def _end(self, row: _Row) -> None:
        row.ended = True
        if row.slot >= 0:
            self._table.close(row.slot)
            self._running.remove(row)
        else:
            self._waiting.remove(row)

    def _preempt(self, row: _Row) -> None:
        """Free the pages of a row, and put it at the head of the queue."""
        self._table.close(row.slot)
        self._running.remove(row)
        row.slot, row.cached = -1, 0
        self._waiting.appendleft(row)

    def _scheduled(self) -> tuple[list[_Prefill], list[_Row]] | None:
        """The work of a step; None if it would preempt a row whose last token was not read yet."""
        prefills, decodes, budget = list[_Prefill](), list[_Row](), self._budget()
        for row in tuple(self._running):
            if row.slot < 0 or row.num_new >= max(1, row.request.max_tokens):
                continue  # preempted for an older one, or all its tokens are already chosen
            if row.length > self.model.context:
                self._slide(row)
            if self._decoder.is_long(row.length) and not row.long:
                if self._flight is not None:
                    return None
                self._begin_anew(row)
            left = row.length - row.cached
            decode = left == 1 and not row.tells_prompt
            count = 1 if decode else min(left, self._chunk, budget)
            if not count:
                continue
            while not self._table.extend(row.slot, row.cached + count):
                if self._flight is not None:
                    return None
                self._preempt(self._running[-1])
                if row.slot < 0:
                    break
            if row.slot < 0:
                break  # it was the youngest
            if decode:
                decodes.append(row)
            else:
                prefills.append(_Prefill(row, count))
                budget -= count
        while self._waiting and budget and self._table.free_slots and self._has_room(self._waiting[0]):
            row = self._waiting.popleft()
            row.slot, row.long = self._table.open(), self._decoder.is_long(row.length)
            self._running.append(row)
            count = min(row.length, self._chunk, budget)
            extended = self._table.extend(row.slot, count)
            assert extended, "there was room"
            prefills.append(_Prefill(row, count))
            budget -= count
        return prefills, decodes

    def _budget(self) -> int:
        """Prompt tokens of the next step: more if no row is being continued and no logits of prompts are kept."""
        rows = (*self._running, *itertools.islice(self._waiting, self._max_batch))
        busy = any(row.tells_prompt for row in rows) or any(
            row.length - row.cached == 1 and row.num_new < row.request.max_tokens for row in self._running
        )
        return self._chunk if busy else IDLE_CHUNKS * self._chunk

    def _has_room(self, row: _Row) -> bool:
        """Whether a row's prompt fits beside the pages that running rows need for their prompts and one more token."""
        others = [max(0, other.length + 1 - other.cached) for other in self._running]
        return not self._running or self._table.room_for([*others, row.length + 1], chunk=self._chunk)

    def _begin_anew(self, row: _Row) -> None:
        """Compute all tokens of a row again."""
        self._table.close(row.slot)
        row.slot, row.cached, row.long = self._table.open(), 0, self._decoder.is_long(row.length)

    def _slide(self, row: _Row) -> None:
        """Start the context later: all positions change, so nothing cached can be kept."""
        row.first = len(row.tokens) + row.ahead - self.model.context
        self._begin_anew(row)

    def _launch(self, prefills: Sequence[_Prefill], decodes: Sequence[_Row]) -> list[Token]:
        """Start the work of a step; returns the prompt tokens to report."""
        rows, logits, scored_tokens = list[_Row](), list[Tensor](), list[Token]()
        if prefills:
            ready, logits_BV, scored_tokens = self._prefill(prefills)
            rows += ready
            logits += [] if logits_BV is None else [logits_BV]
        if decodes:
            local_BV = self._decoder.decode(
                [row.slot for row in decodes],
                [row.length for row in decodes],
                self._inputs(decodes),
                long=[row.long for row in decodes],
            )
            for row in decodes:
                row.cached += 1
                self._table.forget(row.slot, row.cached)
            rows += decodes
            logits += [] if local_BV is None else [self.model.gathered_vocabulary(local_BV)]
        if rows:
            self._choose(rows, None if not logits else logits[0] if len(logits) == 1 else torch.cat(logits))
        return scored_tokens

    def _inputs(self, rows: Sequence[_Row]) -> Tensor:
        """The last token of each row: int64[B]."""
        read_B = self._decoder.moved(np.array([-1 if row.ahead else row.tokens[-1] for row in rows]))
        if not any(row.ahead for row in rows):
            return read_B
        slot_B = self._decoder.moved(np.array([row.slot for row in rows]))
        return torch.where(read_B < 0, self._last_S[slot_B], read_B)

    def _prefill(self, parts: Sequence[_Prefill]) -> tuple[list[_Row], Tensor | None, list[Token]]:
        """Compute parts of prompts: the rows that are complete now, the logits after them, and tokens of prompts."""
        tokens, starts, places = list[list[int]](), list[int](), list[int]()
        ready, scored, offset = list[_Row](), list[tuple[_Row, int]](), 0
        ends = list[int]()
        for row, count in parts:
            start, stop = row.first + row.cached, row.first + row.cached + count
            tokens.append(row.tokens[start:stop])
            starts.append(row.cached)
            if row.tells_prompt:
                asked = range(max(start, row.told - 1), min(stop, len(row.request.prompt) - 1))
                scored += [(row, at + 1) for at in asked]
                places += [offset + at - start for at in asked]
            if row.cached + count == row.length:
                ready.append(row)
                ends.append(offset + count - 1)
            offset += count
        for row, _ in parts:
            if row.request.text and not row.cached:
                self._decoder.read(row.slot, row.request.text)
        slots, long = [row.slot for row, _ in parts], [row.long for row, _ in parts]
        local_MV = self._decoder.prefill(slots, starts, tokens, [*places, *ends], long=long)
        scored_tokens = self._scores_told(scored, None if local_MV is None else local_MV[: len(places)], parts)
        for row, count in parts:
            row.cached += count
            self._table.forget(row.slot, row.cached)
            if not row.request.max_tokens and not row.tells_prompt:
                self._end(row)  # it was only to be scored
        kept = [place for place, row in enumerate(ready, len(places)) if not row.ended]
        ready = [row for row in ready if not row.ended]
        if local_MV is None or not ready:
            return ready, None, scored_tokens
        return ready, self.model.gathered_vocabulary(local_MV[kept]), scored_tokens

    def _scores_told(
        self, scored: Sequence[tuple[_Row, int]], local_MV: Tensor | None, parts: Sequence[_Prefill]
    ) -> list[Token]:
        """The tokens of prompts whose log probabilities are now known."""
        tokens = list[Token]()
        for row, _ in parts:
            if row.tells_prompt and row.told == row.first:
                tokens.append(self._prompt_token(row, math.nan, []))
        if not scored:
            return tokens
        labels_M1 = torch.tensor([[row.request.prompt[at]] for row, at in scored], device=self.model.world.device)
        scores = self.model.scores(
            None if local_MV is None else local_MV[:, None],
            labels_M1,
            top=max(row.request.top_logprobs for row, _ in scored),
            biases=[row.request.sampling.logit_bias for row, _ in scored],
        )
        log_probs = scores.log_prob_BS[:, 0].tolist()
        tops = [] if scores.top_BSN is None else [part[:, 0].tolist() for part in scores.top_BSN]
        for place, (row, _) in enumerate(scored):
            likeliest = list(zip(tops[1][place], tops[0][place], strict=True)) if tops else []
            tokens.append(self._prompt_token(row, log_probs[place], likeliest[: row.request.top_logprobs]))
        return tokens

    def _prompt_token(self, row: _Row, log_prob: float, top: list[tuple[int, float]]) -> Token:
        request = row.request
        token = request.prompt[row.told]
        row.told += 1
        last = row.told == len(request.prompt) and not request.max_tokens
        return Token(request.id, token, log_prob, top, "length" if last else None, prompt=True)

    def _choose(self, rows: list[_Row], logits_BV: Tensor | None) -> None:
        """Choose the next token of each row on the last stage, and send it to all ranks."""
        model, device = self.model, self.model.world.device
        top = min(max(row.request.top_logprobs for row in rows), model.vocab_size)
        if logits_BV is None:
            results: tuple[Tensor, ...] = (
                torch.zeros(len(rows), dtype=torch.int64, device=device),
                torch.zeros(len(rows), device=device),
            )
            if top:
                values = torch.zeros(len(rows), top, device=device)
                results += (values, values.long())
        else:
            results = chosen_tokens(rows, logits_BV, top=top, ends=model.ends)
        pp = model.world.groups["pp"]
        results = tuple(all_reduce_(part, pp) for part in results)
        if self._lags:
            self._last_S[self._decoder.moved(np.array([row.slot for row in rows]))] = results[0]
        arrived = None
        if device.type == "cuda":
            here = tuple(torch.empty(part.shape, dtype=part.dtype, pin_memory=True) for part in results)
            for target, part in zip(here, results, strict=True):
                target.copy_(part, non_blocking=True)
            arrived, results = torch.cuda.Event(), here
            arrived.record()
        for row in rows:
            row.ahead += 1
        self._flight = _Flight(rows, results, arrived)

    def _read(self) -> list[Token]:
        """Wait for the choices of the last step."""
        flight, self._flight = self._flight, None
        return [] if flight is None else self._taken(flight)

    def _taken(self, flight: _Flight) -> list[Token]:
        """Append the chosen tokens to their rows."""
        if flight.arrived is not None:
            flight.arrived.synchronize()
        tokens, log_probs, *tops = (part.tolist() for part in flight.results)
        check_chosen(tokens, self.model.vocab_size)
        taken = []
        for place, row in enumerate(flight.rows):
            if row.ended:  # by the token before, or cancelled
                continue
            row.ahead -= 1
            row.tokens.append(tokens[place])
            top = list(zip(tops[1][place], tops[0][place], strict=True)) if tops else []
            finish = self._finish(row)
            if finish is not None:
                self._end(row)
            request = row.request
            top = top[: request.top_logprobs]
            taken.append(Token(request.id, tokens[place], log_probs[place], top, finish))
        return taken

    def _finish(self, row: _Row) -> str | None:
        request = row.request
        if row.tokens[-1] in self.model.ends and not request.sampling.ignore_eod:
            return "stop"
        return "length" if len(row.tokens) - len(request.prompt) >= request.max_tokens else None


def chosen_tokens(rows: Sequence[_Row], logits_BV: Tensor, *, top: int, ends: Iterable[int]) -> tuple[Tensor, ...]:
    """The next token of each row, its log probability, and with `top` the values and ids of the likeliest."""
    rules = [row.request.sampling for row in rows]
    if any(rule.logit_bias or rule.blocked_after for rule in rules):
        logits_BV = torch.stack(
            [
                biased(logits_V, row.request.sampling, last=row.tokens[-1])
                for logits_V, row in zip(logits_BV, rows, strict=True)
            ]
        )
    penalties_BV = logits_BV
    if any(row.reads_text for row in rows):
        ends_here = [token for token in ends if token < logits_BV.shape[-1]]
        penalties_BV = torch.stack(
            [
                penalized(
                    logits_V,
                    row.request.sampling,
                    prompt=row.request.prompt,
                    new=row.tokens[len(row.request.prompt) :],
                    ends=ends_here,
                )
                for logits_V, row in zip(logits_BV, rows, strict=True)
            ]
        )
    draws = [
        0.0 if rule.is_greedy else uniform(rule.seed, row.request.number, row.num_new, sample=row.request.sample)
        for row, rule in zip(rows, rules, strict=True)
    ]
    token_B = choose(penalties_BV, rules, steps=[row.num_new for row in rows], uniforms=draws)
    log_probs_BV = logits_BV.log_softmax(-1)
    log_prob_B = log_probs_BV.gather(-1, token_B.clamp(max=logits_BV.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
    if not top:
        return token_B, log_prob_B
    values, ids = log_probs_BV.sort(dim=-1, descending=True, stable=True)
    return token_B, log_prob_B, values[:, :top].contiguous(), ids[:, :top].contiguous()
