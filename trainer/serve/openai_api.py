"""OpenAI's completions and chat completions: turns a body into rows to continue, and rows into an answer.

Pure except for the id and time of an answer, so that tests need no server. Unknown fields are ignored and listed;
fields that ask for an unsupported answer are rejected by name.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mdata import Tokenizer, UsageError
from mdata.chat.loss_spans import Template, TemplateRefused
from mdata.chat.prompt import answer_prompt
from mdata.errors import counted
from mdata.tokenizers.base.tokenizer import TextRefused
from trainer.serve.errors import ApiError
from trainer.serve.fields import Fields, is_whole, shortened
from trainer.serve.rows import LARGEST_SEED, OpenRow, RowDelta, TokenFact, make_row, tokenizer_of
from trainer.tasks.loaded_model import Model
from trainer.tasks.sampling import Sampling

DEFAULT_TOKENS, MOST_TOP, MOST_ROWS, MOST_MESSAGES = 16, 20, 128, 1000
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_NO_TOOLS = "this server has no function calling"


@dataclass(frozen=True, kw_only=True)
class Served:
    """The model that a server offers, and its limits.

    Args:
        model: without weights. template: of chats; None: there is none, for the reason `no_template`.
        turn_ends: ids that end an answer in a chat besides those of the model.
        strict: refuse unknown fields. most_tokens: rows x (prompt + new tokens) of a request; None: any.
        created: when the server started. capacity: tokens that a row can have; 0: those of the context.
    """

    model: Model
    template: Template | None = None
    no_template: str = ""
    turn_ends: frozenset[int] = frozenset()
    strict: bool = False
    most_tokens: int | None = None
    created: int = 0
    capacity: int = 0


@dataclass(frozen=True)
class Options:
    """The fields that completions and chats share. usage: whether a stream ends with it. ignored: unknown fields."""

    rules: Sampling
    stream: bool
    usage: bool
    ignored: list[str]


@dataclass
class Completion:
    """A request as rows, and the form of its answer.

    Args:
        chat: whether the answer has the form of chats.
        top: report log probabilities, and this many of the likeliest tokens; None: not reported.
        samples: rows of each prompt, one after the other.
    """

    served: Served
    rows: list[OpenRow]
    chat: bool
    options: Options
    top: int | None
    id: str
    samples: int
    created: int = field(default_factory=lambda: int(time.time()))
    offsets: list[int] = field(default_factory=list)  # of the next token in each row's text


def completion(served: Served, body: Mapping[str, Any]) -> Completion:
    """A body of /v1/completions.

    Raises:
        ApiError: invalid; names the field.
    """
    fields, model, id = Fields(body), served.model, f"cmpl-{secrets.token_hex(12)}"
    _check_name(served, fields)
    prompts = _prompts(model, fields.take("prompt"), add_bos=fields.flag("add_BOS"))
    fields.refuse("suffix", unless=("",), text="only the end of a text can be continued")
    most = fields.whole("max_tokens", DEFAULT_TOKENS, least=0, most=2**31)
    top: int | None = fields.whole("logprobs", -1, least=0, most=MOST_TOP)
    top = None if top == -1 else top
    echo, samples = fields.flag("echo"), fields.whole("n", 1, least=1, most=MOST_ROWS)
    fields.refuse("best_of", unless=(samples, 1), text="request more texts with n and choose among them")
    options = _options(served, fields, most=most)
    rows = [
        make_row(
            model,
            f"{id}-{number * samples + sample}",
            ids,
            options.rules,
            most=most,
            number=number,
            sample=sample,
            top=top,
            echo=text if echo else None,
        )
        for number, (text, ids) in enumerate(prompts)
        for sample in range(samples)
    ]
    return _checked(Completion(served, rows, False, options, top, id, samples))


def chat_completion(served: Served, body: Mapping[str, Any]) -> Completion:
    """A body of /v1/chat/completions.

    Raises:
        ApiError: invalid; names the field.
    """
    fields, model, id = Fields(body), served.model, f"chatcmpl-{secrets.token_hex(12)}"
    _check_name(served, fields)
    messages = _messages(fields.take("messages"))
    for name in ("tools", "functions"):
        fields.refuse(name, unless=([],), text=_NO_TOOLS)
    for name in ("tool_choice", "function_call"):
        fields.refuse(name, unless=("none", "auto"), text=_NO_TOOLS)
    fields.refuse("response_format", unless=({"type": "text"},), text="answers are text")
    fields.refuse("modalities", unless=(["text"],), text="answers are text")
    fields.refuse("audio", unless=(), text="answers are text")
    ids = _chat_prompt(served, messages)
    max_tokens, max_completion_tokens = fields.take("max_tokens"), fields.take("max_completion_tokens")
    limit = Fields({"max_tokens": max_tokens if max_completion_tokens is None else max_completion_tokens})
    room = min(model.context, served.capacity or model.context) - len(ids)
    most = limit.whole("max_tokens", max(1, room), least=1, most=2**31)
    log_probs, count = fields.flag("logprobs"), fields.whole("top_logprobs", 0, least=0, most=MOST_TOP)
    if count and not log_probs:
        raise _invalid("top_logprobs", f"top_logprobs is {count}, but logprobs is not true")
    samples = fields.whole("n", 1, least=1, most=MOST_ROWS)
    options, top = _options(served, fields, most=most), count if log_probs else None
    rows = [
        make_row(model, f"{id}-{sample}", ids, options.rules, most=most, sample=sample, top=top, ends=served.turn_ends)
        for sample in range(samples)
    ]
    return _checked(Completion(served, rows, True, options, top, id, samples))


def _options(served: Served, fields: Fields, *, most: int) -> Options:
    """The options that completions and chats share."""
    recommended = served.model.recommended
    number = fields.number
    seed = fields.whole("seed", secrets.randbelow(LARGEST_SEED), least=-(2**63), most=2**64 - 1)
    top_k = fields.whole("top_k", int(recommended.get("top_k", 0)), least=-1, most=2**31)
    rules = Sampling(
        max_tokens=max(most, 1),
        min_tokens=fields.whole("min_tokens", 0, least=0, most=2**31),
        temperature=number("temperature", recommended.get("temperature", 1.0)),
        top_k=max(top_k, 0),
        top_p=number("top_p", recommended.get("top_p", 1.0)),
        min_p=number("min_p", recommended.get("min_p", 0.0)),
        top_p_decay=number("top_p_decay", 0.0),
        top_p_bound=number("top_p_bound", 0.0),
        repetition_penalty=number("repetition_penalty", recommended.get("repetition_penalty", 1.0)),
        presence_penalty=number("presence_penalty", 0.0),
        frequency_penalty=number("frequency_penalty", 0.0),
        logit_bias=fields.bias("logit_bias"),
        stop=fields.texts("stop"),
        ignore_eod=fields.flag("ignore_eos"),
        seed=seed % LARGEST_SEED,
    )
    try:
        rules.check(served.model.vocab_size)
    except UsageError as error:
        raise ApiError(400, str(error).removeprefix("cannot generate: ")) from error
    stream, stream_options = fields.flag("stream"), fields.take("stream_options")
    if stream_options is not None and not (stream and isinstance(stream_options, dict)):
        text = f"stream_options is {shortened(stream_options)}, expected an object, with stream set to true"
        raise _invalid("stream_options", text)
    usage = Fields(stream_options or {}).flag("include_usage")
    fields.refuse("use_beam_search", unless=(False,), text="use beam_width of PUT /api")
    for name in ("user", "metadata", "store", "parallel_tool_calls", "service_tier"):
        fields.take(name)
    ignored = fields.unknown()
    if ignored and served.strict:
        raise _invalid(ignored[0], f"unknown fields: {', '.join(ignored)[:200]}")
    return Options(rules, stream, usage, ignored)


def _invalid(param: str, text: str) -> ApiError:
    return ApiError(400, text, param=param)


def _check_name(served: Served, fields: Fields) -> None:
    name = fields.take("model")
    if name is not None and not isinstance(name, str):
        raise _invalid("model", f"model is {shortened(name)}, expected a string")
    if name is not None and name != served.model.name:
        text = f"unknown model {shortened(name)}; this server has {served.model.name}"
        raise ApiError(404, text, param="model", code="model_not_found")


def _checked(request: Completion) -> Completion:
    """The request with the offsets of its first tokens, if it is not too large."""
    rows, most_tokens = request.rows, request.served.most_tokens
    if len(rows) > MOST_ROWS:
        raise _invalid("n", f"{counted(len(rows), 'text')} requested, expected at most {MOST_ROWS} per request")
    total = sum(len(row.request.prompt) + row.most for row in rows)
    if most_tokens is not None and total > most_tokens:
        text = f"prompts and new tokens are {total:,}, expected at most {most_tokens:,} (--max-request-tokens)"
        raise ApiError(400, text)
    request.offsets = [0] * len(rows)
    for number, row in enumerate(rows):
        if row.echo is None and not request.chat and request.top is not None:
            request.offsets[number] = len(tokenizer_of(request.served.model).decode(row.request.prompt))
    return request


def _prompts(model: Model, value: object, *, add_bos: bool) -> list[tuple[str, list[int]]]:
    """Texts and ids of each prompt: a text, texts, ids, or lists of ids."""
    several = isinstance(value, list) and not all(is_whole(entry) for entry in value)
    listed = value if several else [value]
    assert isinstance(listed, list), "a list of prompts"
    if len(listed) > MOST_ROWS:
        raise _invalid("prompt", f"{counted(len(listed), 'prompt')}, expected at most {MOST_ROWS} per request")
    return [_prompt(model, prompt, add_bos=add_bos) for prompt in listed]


def _prompt(model: Model, prompt: object, *, add_bos: bool) -> tuple[str, list[int]]:
    try:
        if isinstance(prompt, str):
            return prompt, model.encode(prompt, add_bos=add_bos)
        if isinstance(prompt, list) and prompt and all(is_whole(entry) for entry in prompt):
            model.check_ids(prompt)
            return tokenizer_of(model).decode(prompt), list(prompt)
    except UsageError as error:
        raise _invalid("prompt", str(error)) from error
    raise _invalid("prompt", f"prompt is {shortened(prompt)}, expected a string, token ids, or a list of either")


def _messages(value: object) -> list[tuple[str, str]]:
    if not isinstance(value, list) or not value:
        raise _invalid("messages", f"messages is {shortened(value)}, expected a list of at least one message")
    if len(value) > MOST_MESSAGES:
        raise _invalid("messages", f"{counted(len(value), 'message')}, expected at most {MOST_MESSAGES}")
    return [_message(number, message) for number, message in enumerate(value)]


def _message(number: int, message: object) -> tuple[str, str]:
    table = message if isinstance(message, dict) else {}
    role, content = table.get("role"), table.get("content")
    if isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
        parts = [part.get("text") for part in content]
        content = "".join(parts) if all(isinstance(part, str) for part in parts) else None
    if not isinstance(role, str) or role not in ROLES or not isinstance(content, str):
        expected = f"a role ({', '.join(ROLES)}) and text content"
        raise _invalid("messages", f"messages[{number}] is {shortened(message)}, expected {expected}")
    if not content.isascii() and content.encode(errors="replace").decode() != content:
        raise _invalid("messages", f"messages[{number}] is not UTF-8 text")
    return ROLES[role], content


def _chat_prompt(served: Served, messages: Sequence[tuple[str, str]]) -> list[int]:
    if served.template is None:
        text = f"the model has no chat template: {served.no_template}; use /v1/completions, or start the server with "
        raise _invalid("messages", f"{text}--chat-template plain")
    try:
        return answer_prompt(served.template, tokenizer_of(served.model), messages)
    except (TemplateRefused, TextRefused) as refused:
        raise _invalid("messages", str(refused)) from refused


# ---- answers


def answer_of(request: Completion, pieces: Sequence[Sequence[RowDelta]]) -> dict[str, Any]:
    """The complete answer, from the pieces of each row."""
    choices = []
    for number, (row, of_row) in enumerate(zip(request.rows, pieces, strict=True)):
        text = "".join(piece.text for piece in of_row)
        content = {"message": {"role": "assistant", "content": text}} if request.chat else {"text": text}
        log_probs = _log_probs(request, number, [token for piece in of_row for token in piece.tokens])
        choices.append({"index": number, **content, "logprobs": log_probs, "finish_reason": row.finish_reason})
    return {**_head(request, chunk=False), "choices": choices, "usage": _usage(request)}


def first_chunks(request: Completion) -> Iterator[dict[str, Any]]:
    """The chunks before any text: in a chat, the role of each row."""
    if request.chat:
        for number in range(len(request.rows)):
            yield _chunk(request, number, {"role": "assistant", "content": ""}, None, None)


def chunk_of(request: Completion, number: int, piece: RowDelta) -> dict[str, Any]:
    """A piece of one row."""
    row = request.rows[number]
    content: Any = piece.text
    if request.chat:
        content = {"content": piece.text} if piece.text else {}
    return _chunk(request, number, content, _log_probs(request, number, piece.tokens), row.finish_reason or None)


def last_chunk(request: Completion) -> dict[str, Any] | None:
    """The token counts, if requested."""
    return {**_head(request, chunk=True), "choices": [], "usage": _usage(request)} if request.options.usage else None


def _chunk(request: Completion, number: int, content: Any, log_probs: Any, reason: str | None) -> dict[str, Any]:
    key = "delta" if request.chat else "text"
    choice = {"index": number, key: content, "logprobs": log_probs, "finish_reason": reason}
    usage = {"usage": None} if request.options.usage else {}
    return {**_head(request, chunk=True), "choices": [choice], **usage}


def _head(request: Completion, *, chunk: bool) -> dict[str, Any]:
    kind = ("chat.completion.chunk" if chunk else "chat.completion") if request.chat else "text_completion"
    return {"id": request.id, "object": kind, "created": request.created, "model": request.served.model.name}


def _usage(request: Completion) -> dict[str, int]:
    # A prompt counts once, however many samples it has.
    prompt = sum(len(row.request.prompt) for row in request.rows[:: request.samples])
    completion = sum(len(row.tokens) for row in request.rows)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _log_probs(request: Completion, number: int, tokens: Sequence[TokenFact]) -> dict[str, Any] | None:
    if request.top is None:
        return None
    tokenizer = tokenizer_of(request.served.model)
    texts = [tokenizer.decode([fact.token]) for fact in tokens]
    if request.chat:
        content = [
            {**_entry(text, fact.log_prob), "top_logprobs": [_entry(tokenizer.decode([i]), v) for i, v in fact.top]}
            for text, fact in zip(texts, tokens, strict=True)
        ]
        return {"content": content, "refusal": None}
    offsets = []
    for text in texts:
        offsets.append(request.offsets[number])
        request.offsets[number] += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [fact.log_prob for fact in tokens],
        "top_logprobs": [None if fact.log_prob is None else _by_text(tokenizer, fact.top) for fact in tokens],
        "text_offset": offsets,
    }


def _by_text(tokenizer: Tokenizer, top: Sequence[tuple[int, float]]) -> dict[str, float]:
    """Among tokens with the same text, the likeliest counts."""
    table: dict[str, float] = {}
    for token, log_prob in top:
        table.setdefault(tokenizer.decode([token]), log_prob)
    return table


def _entry(text: str, log_prob: float | None) -> dict[str, Any]:
    return {"token": text, "logprob": log_prob, "bytes": list(text.encode(errors="replace"))}


def models_of(served: Served) -> dict[str, Any]:
    """The answer of /v1/models."""
    model = {"id": served.model.name, "object": "model", "created": served.created, "owned_by": "mtrain"}
    facts = {"max_model_len": served.model.context, "step": served.model.step, "chats": served.template is not None}
    return {"object": "list", "data": [{**model, **facts}]}
