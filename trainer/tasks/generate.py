"""Texts from a trained model: prompts are continued by the rules of sampling.py, or by beam search.

Every draw is f(seed, request, sample, position), so a text can be reproduced with any layout, with other prompts beside
it, or after an interruption: sample i of a file of samples is always the same. engine.py computes tokens; this module
handles texts: stop strings, files, and the order of answers. Any number of ranks may serve any checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from mdata import DamageError, UsageError
from mdata.errors import counted, errors_wanted_by, os_errors_named
from mdata.progress import SILENT, Progress
from mdata.util import atomic_io
from mdata.util.canonical_json import hash_of
from mdata.util.regular_files import regular_file
from trainer.tasks.beam import Beam, Beams
from trainer.tasks.decoder import BeamCache
from trainer.tasks.engine import DecodeEngine, Request, Token
from trainer.tasks.loaded_model import Model
from trainer.tasks.sampling import Sampling, biased, check_chosen
from trainer.tasks.text_stream import TextStream

DEFAULT_TOKENS = 64
BATCH_SIZE = 8
AHEAD = 4  # batches of requests that the engine has at a time, so that a slow one does not hold up the others
MOST_LINE = 64 << 20  # bytes of a line of prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A text to continue.

    Args:
        ids: of the prompt. rules: of sampling.
        number: of the request, and of the sample of that request; the draws depend on both.
        log_probs: how many of the likeliest tokens are reported at each position besides the text's own; None: no log
            probabilities. 0: only those of the text's tokens.
        prompt_log_probs: report those of the prompt, too.
    """

    ids: tuple[int, ...]
    rules: Sampling
    number: int = 0
    sample: int = 0
    log_probs: int | None = None
    prompt_log_probs: bool = False


@dataclass(slots=True)
class Answer:
    """The continuation of a prompt.

    Attributes:
        tokens: new ids, including the one that ended the text. text: without an end-of-document token.
        finish_reason: "stop" (the end of a document, or a stop string) or "length".
        log_probs: of `tokens`. top: of each of them, the likeliest tokens with their log probabilities.
        prompt_log_probs: of the prompt's tokens from the second on. prompt_top: the likeliest at those places.
    """

    request: GenerationRequest
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    log_probs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    prompt_log_probs: list[float] = field(default_factory=list)
    prompt_top: list[list[tuple[int, float]]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Generated:
    """One text: the prompt, what the model added, the checkpoint's step if it has one, and why it ended."""

    prompt: str
    text: str
    step: int | None
    finish_reason: str = ""


def continue_rows(
    model: Model, requests: Sequence[GenerationRequest], *, sliding: bool = False, batch_size: int | None = None
) -> list[Answer]:
    """Continue several prompts together; each as if it were alone.

    Args:
        sliding: drop the oldest tokens when the context is full; otherwise such a request is refused.
        batch_size: requests that are computed at a time; None: all.

    Raises:
        UsageError: rules out of range, or a prompt and its tokens are longer than the model's context.
    """
    return list(answers_of(model, requests, sliding=sliding, batch_size=batch_size or max(1, len(requests))))


def answers_of(
    model: Model, requests: Sequence[GenerationRequest], *, sliding: bool = False, batch_size: int = BATCH_SIZE
) -> Iterator[Answer]:
    """The answers of `continue_rows`, in order, each as soon as it and all before it are complete."""
    most = [_max_tokens(model, request, sliding=sliding) for request in requests]
    if not requests:
        return
    rows, longest = min(batch_size, len(requests)), 0
    for request, new in zip(requests, most, strict=True):
        longest = max(longest, min(_before(model, request.ids) + new, model.context))
    engine = DecodeEngine(model, max_batch=rows, longest=longest)
    opened, added = dict[str, tuple[Answer, TextStream | None]](), 0
    for number in range(len(requests)):
        while added < min(len(requests), number + AHEAD * rows):
            opened[str(added)] = Answer(requests[added]), _stream(model, requests[added])
            engine.add(_engine_request(requests[added], str(added), most[added], sliding=sliding))
            added += 1
        answer, stream = opened[str(number)]
        while not answer.finish_reason:
            for token in engine.step():
                if token.id in opened and token.finish != "cancelled":
                    _take(token, *opened[token.id], engine=engine)
        del opened[str(number)]
        if stream is not None:
            stream.finish()
            answer.text, answer.finish_reason = stream.text, "stop" if stream.stopped else answer.finish_reason
        yield answer


def search_beams(
    model: Model,
    ids: Sequence[int],
    *,
    width: int,
    max_tokens: int,
    length_penalty: float = 1.0,
    early_stopping: bool | Literal["never"] = False,
    count: int = 1,
    rules: Sampling | None = None,
    ends: frozenset[int] | None = None,
) -> list[Beam]:
    """The `count` best texts that a beam search finds after a prompt, best first.

    Args:
        early_stopping: see `Beams`.
        rules: only their bias and blocked tokens are used; nothing is drawn.
        ends: token ids that end a text; None: those of the model.

    Raises:
        UsageError: numbers out of range, or a prompt and its tokens are longer than the model's context.
        DamageError: the model's logits are not numbers.
    """
    beams = Beams(width, max_tokens, model.ends if ends is None else ends, length_penalty, early_stopping)
    if not 1 <= count <= width:
        raise UsageError(
            f"a beam search over {counted(width, 'row')} cannot return {counted(count, 'text')}",
            expected=f"1 to {width}",
        )
    _check_room(model, _before(model, ids), max_tokens)
    if not ids:
        raise UsageError("the prompt has no tokens", fix="give some text to continue")
    model.check_ids(ids)
    search = BeamSearch(model, ids, beams, rules)
    while not beams.done:
        search.step()
    return beams.results(count)


class BeamSearch:
    """A beam search after one prompt, step by step.

    Args:
        beams: in their initial state; they hold the results, and tell when the search is done.
        rules: see `search_beams`.
    """

    def __init__(self, model: Model, ids: Sequence[int], beams: Beams, rules: Sampling | None = None) -> None:
        self.beams, self._rules, self._last = beams, rules, ids[-1]
        self._cache = BeamCache(model, ids, width=beams.width, max_tokens=beams.max_tokens)

    def step(self) -> None:
        """Compute the next token of all rows.

        Raises:
            DamageError: the model's logits are not numbers.
        """
        logits_BV = self._cache.logits(self.beams.rows, self.beams.parents)
        if self._rules is not None:
            lasts = [row[-1] if row else self._last for row in self.beams.rows]
            logits_BV = torch.stack([biased(logits_BV[i], self._rules, last=last) for i, last in enumerate(lasts)])
        log_probs_BV, vocabulary = logits_BV.log_softmax(-1), logits_BV.shape[-1]
        check_chosen(torch.where(log_probs_BV.isnan().any(-1), vocabulary, 0).tolist(), vocabulary)
        self.beams.advance(log_probs_BV)


def write_generated(model: Model, texts: Sequence[Generated]) -> None:
    """Write the latest texts to the run folder, for its report; does nothing for a model of another folder."""
    if model.run_folder is None or not model.world.is_main:
        return
    lines = [{"prompt": text.prompt, "text": text.text, "step": text.step} for text in texts]
    content = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    atomic_io.atomic_write(model.run_folder / "generated.jsonl", content.encode(errors="surrogatepass"))


def read_prompts(path: Path, *, strict: bool = False) -> dict[int, str | list[int]]:
    """The prompts of a JSON Lines file, by line from 1: texts or lists of token ids under the key "prompt".

    Args:
        strict: refuse other keys, which are otherwise ignored.

    Raises:
        UsageError: there is no such file, or a line is something else; names it.
    """
    prompts = dict[int, str | list[int]]()
    with os_errors_named("reading the prompts"):
        lines = regular_file(path).read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if len(line) > MOST_LINE:
            raise UsageError(
                f"{path}, line {number} is too long",
                found=counted(len(line), "byte"),
                expected=f"at most {MOST_LINE:,}",
            )
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        table = value if isinstance(value, dict) else {}
        prompt: Any = table.get("prompt")
        ids = isinstance(prompt, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in prompt)
        if not isinstance(prompt, str) and not ids:
            raise UsageError(
                f"{path}, line {number} has no prompt",
                found=repr(line[:80].decode(errors="replace")),
                expected='{"prompt": "some text"}, or a list of token ids in its place',
            )
        if strict and (others := sorted(table.keys() - {"prompt"})):
            raise UsageError(f"{path}, line {number} has unknown keys", found=", ".join(others), expected="prompt")
        prompts[number] = prompt
    if not prompts:
        raise UsageError(f"{path} has no prompts", expected='lines such as {"prompt": "some text"}')
    return prompts


def check_prompts(model: Model, prompts: Mapping[int, str | list[int]], path: Path) -> None:
    """Refuse prompts of `read_prompts` with ids outside the model's vocabulary.

    Raises:
        UsageError: names the line and the id.
    """
    for line, prompt in prompts.items():
        if not isinstance(prompt, str):
            with errors_wanted_by(f"{path}, line {line}"):
                model.check_ids(prompt)


def write_samples(
    model: Model,
    requests: Sequence[GenerationRequest],
    output: Path,
    *,
    texts: Sequence[str],
    batch_size: int = BATCH_SIZE,
    sliding: bool = False,
    progress: Progress = SILENT,
) -> int:
    """Continue all requests, and append a line for each to `output`; returns the number already there.

    A repeated call continues after the last complete line. Each line names the job that wrote it, so lines of other
    models, prompts or rules are not mixed with these; the number of samples is not part of the job.

    Args:
        texts: the prompt of each request, as its line shows it.

    Raises:
        UsageError: `output` has lines of another job, or is not a file of samples.
    """
    done = _lines_there(output, model, requests) if model.world.is_main else 0
    done = model.world_count(done)
    progress.begin("generate", len(requests), unit="texts")
    progress.advance(done)
    fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666) if model.world.is_main else -1
    try:
        answers = answers_of(model, requests[done:], sliding=sliding, batch_size=batch_size)
        for i, answer in enumerate(answers, done):
            if fd >= 0:
                with atomic_io.named_in_errors(output):
                    atomic_io.write_all(fd, _line(answer, i, texts[i], model=model))
                    atomic_io.sync(fd)
            progress.advance(1)
    finally:
        if fd >= 0:
            os.close(fd)
    progress.end()
    return done


def answer_facts(answer: Answer) -> dict[str, Any]:
    """The fields of an answer in a line of samples and in --json."""
    facts: dict[str, Any] = {"text": answer.text, "finish_reason": answer.finish_reason, "tokens": answer.tokens}
    request = answer.request
    if request.log_probs is not None:
        facts["log_probs"] = answer.log_probs
        if request.log_probs:
            facts["top_log_probs"] = answer.top
    if request.prompt_log_probs:
        facts["prompt_tokens"] = list(request.ids)
        facts["prompt_log_probs"] = [None, *answer.prompt_log_probs]
        if request.log_probs:
            facts["prompt_top_log_probs"] = [None, *answer.prompt_top]
    return facts


def _engine_request(request: GenerationRequest, id: str, most: int, *, sliding: bool) -> Request:
    return Request(
        id=id,
        prompt=request.ids,
        sampling=request.rules,
        max_tokens=most,
        top_logprobs=request.log_probs or 0,
        echo=request.prompt_log_probs,
        number=request.number,
        sample=request.sample,
        sliding=sliding,
    )


def _take(token: Token, answer: Answer, stream: TextStream | None, *, engine: DecodeEngine) -> None:
    """Add a token to an answer, which may end it."""
    request = answer.request
    if token.prompt:
        if not math.isnan(token.logprob):
            answer.prompt_log_probs.append(token.logprob)
            if request.log_probs:
                answer.prompt_top.append(token.top)
        return
    if answer.finish_reason:  # a token that came after a stop string
        return
    answer.tokens.append(token.token)
    if request.log_probs is not None:
        answer.log_probs.append(token.logprob)
        answer.top.append(token.top)
    answer.finish_reason = token.finish or ""
    if stream is None or token.finish == "stop":
        return
    stream.add(token.token, stops=len(answer.tokens) >= request.rules.min_tokens)
    if stream.stopped:
        answer.finish_reason = "stop"
        engine.cancel(token.id)


def _stream(model: Model, request: GenerationRequest) -> TextStream | None:
    rules, tokenizer = request.rules, model.tokenizer
    if tokenizer is None:
        if rules.stop:
            raise UsageError("stop strings need a tokenizer", found="a model without one", fix="--tokenizer FOLDER")
        return None
    before = request.ids if model.start is None else ()
    return TextStream(tokenizer, before, stop=rules.stop, keep_stop=rules.keep_stop)


def _max_tokens(model: Model, request: GenerationRequest, *, sliding: bool) -> int:
    request.rules.check(model.vocab_size)
    model.check_ids(request.ids)
    if not request.ids:
        raise UsageError("the prompt has no tokens", fix="give some text to continue")
    before = _before(model, request.ids)
    given, room = request.rules.max_tokens, model.context - before
    if sliding:
        return given or DEFAULT_TOKENS
    # The token after a full context can still be chosen.
    if given is None and room >= 0:
        return max(1, min(DEFAULT_TOKENS, room))
    _check_room(model, before, given or DEFAULT_TOKENS)
    return given or DEFAULT_TOKENS


def _before(model: Model, ids: Sequence[int]) -> int:
    """Number of tokens before the new ones: those of the prompt, unless an encoder reads it."""
    return len(ids) if model.start is None else 1


def _check_room(model: Model, prompt: int, new: int) -> None:
    if prompt + new > model.context:
        raise UsageError(
            f"the prompt and the new tokens do not fit the context of {model.name}",
            found=f"{counted(prompt, 'token')} of the prompt and {new:,} new ones",
            expected=f"at most {model.context:,} together",
            fix="a shorter prompt, fewer --max-tokens, or --sliding, which forgets the oldest tokens",
        )


def _job(model: Model, request: GenerationRequest) -> str:
    """Identifies what a line of samples depends on."""
    rules = dataclasses.asdict(request.rules)
    # Keys of JSON objects are texts.
    rules |= {key: sorted(rules[key].items()) for key in ("logit_bias", "blocked_after")}
    reported = [request.log_probs, request.prompt_log_probs]
    facts = [
        model.name,
        1 if model.step is None else model.step,  # as earlier versions wrote it
        model.vocab_size,
        rules,
        list(request.ids),
        request.number,
        request.sample,
        reported,
        *([model.weights] if model.weights else []),
    ]
    return hash_of(json.dumps(facts))[:16]


def _lines_there(output: Path, model: Model, requests: Sequence[GenerationRequest]) -> int:
    """The number of complete lines of these requests in a file; a line cut by an interruption is removed."""
    if not output.exists():
        return 0
    content = regular_file(output).read_bytes()
    complete = content[: content.rfind(b"\n") + 1]
    lines = complete.splitlines()
    if len(lines) > len(requests):
        raise UsageError(
            f"{output} has more samples than are asked for",
            found=counted(len(lines), "line"),
            expected=f"at most {len(requests):,}",
            fix="name another --output",
        )
    for number, (line, request) in enumerate(zip(lines, requests, strict=False), 1):
        job = _job(model, request)
        try:
            value = json.loads(line)
        except ValueError as error:
            raise DamageError(f"{output}, line {number} is not JSON", fix="name another --output") from error
        if not isinstance(value, Mapping) or value.get("job") != job:
            raise UsageError(
                f"{output} has lines of another model, prompt or option",
                found=f"line {number}: job {value.get('job') if isinstance(value, Mapping) else None}",
                expected=f"job {job}",
                fix="name another --output, or give the same command again",
            )
    if len(complete) < len(content):
        os.truncate(output, len(complete))
    return len(lines)


def _line(answer: Answer, index: int, prompt: str, *, model: Model) -> bytes:
    job = _job(model, answer.request)
    facts = {"index": index, "prompt": prompt, **answer_facts(answer), "step": model.step, "job": job}
    return (json.dumps(facts, ensure_ascii=False) + "\n").encode(errors="replace")


def sample_requests(
    prompts: Iterable[Sequence[int]],
    rules: Sampling,
    *,
    samples: int = 1,
    log_probs: int | None = None,
    prompt_log_probs: bool = False,
) -> list[GenerationRequest]:
    """The requests of `samples` texts for each prompt, in the order of the prompts; see `GenerationRequest`."""
    return [
        GenerationRequest(
            ids=tuple(ids),
            rules=rules,
            number=number,
            sample=sample,
            log_probs=log_probs,
            prompt_log_probs=prompt_log_probs,
        )
        for number, ids in enumerate(prompts)
        for sample in range(samples)
    ]
