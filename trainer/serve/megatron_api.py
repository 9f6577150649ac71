"""Megatron-LM's `PUT /api` of 2023: the same fields, order of checks, error texts and answers.

What differs (docs/howto/serve.md): every rejected request gets status 400 and {"message": TEXT}, which Megatron's own
client reads, where the original answered most of them with 200; an integer is accepted for a float, and a boolean is
not an integer; temperature 0 is greedy; prompts must be strings; each row ends after its own number of tokens, and
always at an end-of-document token.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mdata import UsageError
from mdata.errors import counted
from trainer.serve.errors import ApiError
from trainer.serve.fields import is_number, is_whole
from trainer.serve.rank import Found, Search
from trainer.serve.rows import LARGEST_SEED, OpenRow, RowDelta, make_row, tokenizer_of
from trainer.tasks.loaded_model import Model
from trainer.tasks.sampling import Sampling

MOST_PROMPTS, MOST_TOP_K, MOST_TEMPERATURE = 128, 1000, 100.0
MOST_BEAMS = 128  # Megatron has no limit but memory
TOO_LONG = "Length of prompt + tokens_to_generate longer than allowed"
WRONG_METHOD = "The method is not allowed for the requested URL."
NO_JSON = "The browser (or proxy) sent a request that this server could not understand."
NO_JSON_TYPE = "Did not attempt to load JSON data because the request Content-Type was not 'application/json'."
TOO_LONG_BEAM = "context length + tokens_to_generate too large"


class CheckedFields(NamedTuple):
    """The fields of a body, checked. beam_width: None: no beam search. stop_token: None: the model's."""

    prompts: list[str]
    tokens_to_generate: int
    logprobs: bool
    temperature: float
    top_k: int
    top_p: float
    top_p_decay: float
    top_p_bound: float
    add_BOS: bool
    stop_on_double_eol: bool
    stop_on_eol: bool
    prevent_newline_after_colon: bool
    random_seed: int
    beam_width: int | None
    stop_token: int | None
    length_penalty: float


FIELDS = frozenset((*CheckedFields._fields, "no_log"))


class ParsedRequest(NamedTuple):
    """A request as rows, or as a beam search. unknown: the fields that are not in `FIELDS`."""

    fields: CheckedFields
    rows: list[OpenRow]
    search: Search | None
    unknown: list[str]


def checked(body: Mapping[str, Any]) -> CheckedFields:
    """The fields, in Megatron's order of checks.

    Raises:
        ApiError: with Megatron's text.
    """
    prompts = _prompts(body)
    most = body.get("tokens_to_generate", 64)
    _demand(is_whole(most), "tokens_to_generate must be an integer greater than 0")
    _demand(most >= 0, "tokens_to_generate must be an integer greater than or equal to 0")
    logprobs = _flag(body, "logprobs")
    _demand(most > 0 or logprobs, "tokens_to_generate=0 implies logprobs should be True")
    temperature = body.get("temperature", 1.0)
    _demand(
        is_number(temperature) and 0 <= temperature <= MOST_TEMPERATURE,
        "temperature must be a positive number less than or equal to 100.0",
    )
    top_k = body.get("top_k", 0)
    _demand(is_whole(top_k), "top_k must be an integer equal to or greater than 0 and less than or equal to 1000")
    _demand(0 <= top_k <= MOST_TOP_K, "top_k must be equal to or greater than 0 and less than or equal to 1000")
    top_p, decay, bound = _nucleus(body, top_k)
    add_bos = _flag(body, "add_BOS")
    _demand(add_bos or all(prompts), "Empty prompts require add_BOS=true")
    stop_on_double_eol, stop_on_eol = _flag(body, "stop_on_double_eol"), _flag(body, "stop_on_eol")
    prevent_newline_after_colon = _flag(body, "prevent_newline_after_colon")
    seed = _seed(body)
    _flag(body, "no_log")
    width = body.get("beam_width", 0)
    _demand(is_whole(width), "beam_width must be integer")
    _demand(width >= 1 or "beam_width" not in body, "beam_width must be an integer > 1")
    _demand(not width or len(prompts) == 1, "When doing beam_search, batch size must be 1")
    stop_token = body.get("stop_token", -1)
    _demand(is_whole(stop_token), "stop_token must be an integer")
    penalty = body.get("length_penalty", 1.0)
    _demand(is_number(penalty), "length_penalty must be a float")
    return CheckedFields(
        prompts=prompts,
        tokens_to_generate=most,
        logprobs=logprobs,
        temperature=float(temperature),
        top_k=top_k,
        top_p=top_p,
        top_p_decay=decay,
        top_p_bound=bound,
        add_BOS=add_bos,
        stop_on_double_eol=stop_on_double_eol,
        stop_on_eol=stop_on_eol,
        prevent_newline_after_colon=prevent_newline_after_colon,
        random_seed=seed,
        beam_width=width or None,
        stop_token=stop_token if "stop_token" in body else None,
        length_penalty=float(penalty),
    )


def _demand(holds: bool, text: str) -> None:
    if not holds:
        raise ApiError(400, text)


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name, False)
    _demand(isinstance(value, bool), f"{name} must be a boolean value")
    return bool(value)


def _prompts(body: Mapping[str, Any]) -> list[str]:
    _demand("prompts" in body, "prompts argument required")
    _demand("max_len" not in body, "max_len is no longer used.  Replace with tokens_to_generate")
    _demand("sentences" not in body, "sentences is no longer used.  Replace with prompts")
    prompts = body["prompts"]
    _demand(
        isinstance(prompts, list) and all(isinstance(prompt, str) for prompt in prompts),
        "prompts is not a list of strings",
    )
    _demand(bool(prompts), "prompts is empty")
    _demand(len(prompts) <= MOST_PROMPTS, f"Maximum number of prompts is {MOST_PROMPTS}")
    return list(prompts)


def _nucleus(body: Mapping[str, Any], top_k: int) -> tuple[float, float, float]:
    top_p, decay = body.get("top_p", 0.0), body.get("top_p_decay", 0.0)
    _demand(is_number(top_p), "top_p must be a positive float less than or equal to 1.0")
    _demand(not (top_p > 0 and top_k > 0), "cannot set both top-k and top-p samplings.")
    _demand(0 <= top_p <= 1, "top_p must be less than or equal to 1.0")
    _demand(is_number(decay), "top_p_decay must be a positive float less than or equal to 1.0")
    _demand(top_p > 0 or "top_p_decay" not in body, "top_p_decay cannot be set without top_p")
    _demand(0 <= decay <= 1, "top_p_decay must be less than or equal to 1.0")
    bound = body.get("top_p_bound", 0.0)
    _demand(is_number(bound), "top_p_bound must be a positive float less than or equal to top_p")
    if "top_p_bound" in body:
        _demand(top_p > 0, "top_p_bound cannot be set without top_p")
        _demand(0 < bound <= top_p, "top_p_bound must be greater than 0 and less than top_p")
    return float(top_p), float(decay), float(bound)


def _seed(body: Mapping[str, Any]) -> int:
    if "random_seed" not in body:
        return -1
    seed = body["random_seed"]
    _demand(is_whole(seed), "random_seed must be integer")
    _demand(seed >= 0, "random_seed must be a positive integer")
    return int(seed)


def job_of(model: Model, body: Mapping[str, Any], *, most_tokens: int | None, strict: bool = False) -> ParsedRequest:
    """A body of `PUT /api` as rows.

    Args:
        most_tokens: rows x the longest; None: any. strict: reject unknown fields.

    Raises:
        ApiError: with Megatron's text; the numbers are its `detail`.
    """
    fields, unknown = checked(body), sorted(body.keys() - FIELDS)
    if unknown and strict:
        raise ApiError(400, f"unknown fields: {', '.join(unknown)[:200]}")
    try:
        prompts = [model.encode(prompt, add_bos=fields.add_BOS) for prompt in fields.prompts]
    except UsageError as error:
        raise ApiError(400, str(error)) from error
    check_size(prompts, fields.tokens_to_generate, most=most_tokens)
    longest = max(map(len, prompts))
    if longest + fields.tokens_to_generate > model.context:
        raise ApiError(
            400,
            TOO_LONG if fields.beam_width is None else TOO_LONG_BEAM,
            detail=f"{counted(longest, 'prompt token')} + {fields.tokens_to_generate:,} new ones, "
            f"expected at most {model.context:,} in total",
        )
    rules, id = _rules(model, fields), f"api-{secrets.token_hex(12)}"
    ends = frozenset(() if fields.stop_token is None else (fields.stop_token,))
    if fields.beam_width is not None:
        if fields.beam_width > MOST_BEAMS:
            raise ApiError(400, f"beam_width must be at most {MOST_BEAMS}")
        if fields.tokens_to_generate == 0:
            raise ApiError(400, "beam search needs tokens_to_generate >= 1")
        width, most = fields.beam_width, fields.tokens_to_generate
        search = Search(id, prompts[0], width, most, fields.length_penalty, ends or model.ends, rules)
        return ParsedRequest(fields, [], search, unknown)
    rows = [
        make_row(
            model,
            f"{id}-{number}",
            ids,
            rules,
            most=fields.tokens_to_generate,
            number=number,
            top=0 if fields.logprobs else None,
            echo="" if fields.logprobs else None,
            ends=ends,
        )
        for number, ids in enumerate(prompts)
    ]
    return ParsedRequest(fields, rows, None, unknown)


def check_size(prompts: Sequence[Sequence[int]], new: int, *, most: int | None) -> None:
    """Reject a request with too many tokens, counted as Megatron does: each row as long as the longest.

    Raises:
        ApiError: with Megatron's text.
    """
    total = len(prompts) * (max(map(len, prompts)) + new)
    if most is not None and total > most:
        raise ApiError(400, f"Too many tokens.  {total} is greater than {most}")


def _rules(model: Model, fields: CheckedFields) -> Sampling:
    seed = fields.random_seed if fields.random_seed >= 0 else secrets.randbelow(LARGEST_SEED)
    return Sampling(
        max_tokens=max(fields.tokens_to_generate, 1),
        temperature=fields.temperature,
        top_k=fields.top_k,
        top_p=fields.top_p or 1.0,
        top_p_decay=fields.top_p_decay,
        top_p_bound=fields.top_p_bound,
        blocked_after=newlines_after_colon(model) if fields.prevent_newline_after_colon else {},
        stop=("\n\n",) if fields.stop_on_double_eol else ("\n",) if fields.stop_on_eol else (),
        keep_stop=True,
        seed=seed % LARGEST_SEED,
    )


@functools.lru_cache(maxsize=2)
def newlines_after_colon(model: Model) -> dict[int, tuple[int, ...]]:
    """For a colon's token id, all ids that begin with a newline: they may not follow it."""
    tokenizer = tokenizer_of(model)
    lines = tuple(i for i in range(tokenizer.vocab_size) if tokenizer.decode([i]).startswith("\n"))
    return {tokenizer.encode_batch([":"])[0].tolist()[-1]: lines}


def answer_of(model: Model, job: ParsedRequest, pieces: Sequence[Sequence[RowDelta]]) -> dict[str, Any]:
    """The answer: prompt and new text of each row, its tokens as texts, and log probabilities from the second on."""
    tokenizer = tokenizer_of(model)
    sequences = [[*row.request.prompt, *row.tokens] for row in job.rows]
    log_probs = None
    if job.fields.logprobs:
        log_probs = [
            [fact.log_prob for piece in of_row for fact in piece.tokens if fact.log_prob is not None]
            for of_row in pieces
        ]
    return {
        "text": [tokenizer.decode(ids) for ids in sequences],
        "segments": [[tokenizer.decode([i]) for i in ids] for ids in sequences],
        "logprobs": log_probs,
    }


def beam_answer(model: Model, job: ParsedRequest, result: Found) -> dict[str, Any]:
    """The answer of a beam search, best first."""
    tokenizer, search = tokenizer_of(model), job.search
    assert search is not None, "a request for a beam search"
    sequences = [[*search.prompt, *beam.tokens] for beam in result.beams]
    return {
        "text": [tokenizer.decode(ids) for ids in sequences],
        "segments": [[tokenizer.decode([i]) for i in ids] for ids in sequences],
        "scores": [beam.score for beam in result.beams],
    }
