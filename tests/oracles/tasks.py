"""`python -m tests.oracles.tasks FOLDER`: compare a folder of the form of oracle/tasks with the product.

A line for each kind, then `N of M cases equal`; exit code 0 only if all are. An unknown kind, a case that cannot be
read and an empty folder are failures. Where Megatron-LM is wrong (docs/howto/score.md, docs/howto/generate.md), a case
is compared up to where the stated difference begins.

Options: `--kind NAME` (may be repeated) compares only that kind.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

import mdata
from mdata import MdataError, UsageError
from mdata.cleaning import scores
from mdata.loader.loader import Batch
from mdata.rewriting.labelled import MOST_CHOICE, write_labelled
from mdata.samples.classify import pair
from mdata.sources.labelled import LABELS, NUM_CHOICES, LabelledFile, clean_text, read_labelled, set_name
from mdata.tokenizers.base.tokenizer import TokenizerSpec
from mdata.tokenizers.registry import load_tokenizer
from tests.helpers.ranks import RankContext, run_ranks
from tests.oracles.frame import MALFORMED, Case, Program, unknown, unlike, unreadable
from tests.trainer.engines import assemble, layouts, reduced
from trainer.config.sections import ClassifySamplesSection
from trainer.convert.convert import open_model
from trainer.serve import megatron_api
from trainer.serve.errors import ApiError
from trainer.serve.openai_api import Served, completion
from trainer.serve.openai_api import answer_of as openai_answer
from trainer.serve.rows import OpenRow, RowDelta
from trainer.tasks import engine as decoding
from trainer.tasks.beam import Finished
from trainer.tasks.engine import DecodeEngine, Token
from trainer.tasks.generate import Answer, GenerationRequest, continue_rows, search_beams
from trainer.tasks.lambada import lambada, passage
from trainer.tasks.loaded_model import Model
from trainer.tasks.sampling import (
    Sampling,
    choose,
    drawn,
    filtered,
    likeliest,
    penalized,
    top_p_at,
    uniform,
)
from trainer.tasks.wikitext import detokenize, detokenizer_by_path, wikitext, windows

GREEDY = Sampling(greedy=True)
DRAWS, LEAST_P = 200_000, 1e-4
LOG_PROB, LOSS = 1e-4, 1e-5


class Folder:
    """The files of an oracle folder, and its models, each opened once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.model = functools.lru_cache(maxsize=None)(self._model)

    def json(self, name: str) -> Any:
        return json.loads((self.root / name).read_text(encoding="utf-8"))

    def _model(self, name: str) -> Model:
        """By its name or by a sentence that begins with its path, such as "models/gpt2_tiny in fp32"."""
        path = name.split()[0].rstrip(";,")
        return Model.load(self.root / (path if path.startswith("models/") else f"models/{path}"))


# ---- one step


def filters(folder: Folder, name: str) -> Iterator[Case]:
    tensors = load_file(folder.root / name.replace(".json", ".safetensors"))
    for case in folder.json(name)["cases"]:
        yield Case("filters", case["id"], functools.partial(_filter, case, tensors))


def _filter(case: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> str:
    logits, key = tensors[f"{case['id']}.logits"], case["id"]
    wanted = tensors.get(f"{key}.hf_probs", tensors[f"{key}.megatron_probs"]).float()
    if case["top_k"] == 1:
        found, sizes = torch.nn.functional.one_hot(likeliest(logits), logits.shape[-1]).float(), [1] * len(logits)
    else:
        rows = len(logits)
        probabilities, tokens, size = filtered(
            logits,
            temperature_B=torch.full((rows,), case["temperature"]),
            top_k_B=torch.full((rows,), case["top_k"]),
            top_p_B=torch.full((rows,), case["top_p"] or 1.0, dtype=torch.float64),
            min_p_B=torch.zeros(rows),
        )
        kept = torch.where(torch.arange(logits.shape[-1]) < size.unsqueeze(-1), probabilities, 0)
        found = torch.zeros_like(kept).scatter(1, tokens, kept / kept.sum(-1, keepdim=True)).float()
        sizes = size.tolist()
    if sizes != case["kept_hf"]:
        return f"keeps {sizes} instead of {case['kept_hf']}"
    if len(set(logits.flatten().tolist())) < logits.numel():  # which of equal tokens a nucleus keeps is free
        found, wanted = found.sort()[0], wanted.sort()[0]
    return _far(found, wanted, 2e-6)


def rules(folder: Folder, name: str) -> Iterator[Case]:
    for number, case in enumerate(folder.json(name)):
        yield Case("rules", str(number), functools.partial(_rule, case))


def _rule(case: Mapping[str, Any]) -> str:
    """Differences: 0 is greedy, filters go together, padding is no candidate, k may be the vocabulary or more."""
    given = dict(case["kwargs"])
    vocabulary = given.pop("vocab_size", 12)
    logits = torch.zeros(1, 12)
    logits[0, 11] = 30.0
    top_p = given.pop("top_p", 0.0)
    options = {"temperature": 1.0, **given, "top_p": top_p if top_p else 1.0}
    refused = Sampling(**options).problems()
    if (top_p > 1 or top_p < 0) != bool(refused):
        return f"refused: {refused}"
    if refused:
        return ""
    token = int(choose(logits[:, :vocabulary], [Sampling(**options)], steps=[0], uniforms=[0.5]))
    wanted = case["result"]
    if vocabulary == 12 and isinstance(wanted, int) and token != wanted:
        return f"token {token} instead of {wanted}"
    return "" if 0 <= token < vocabulary else f"token {token} is padding"


def processors(folder: Folder, name: str) -> Iterator[Case]:
    table = folder.json(name)
    logits, ids = torch.tensor(table["logits"]), table["input_ids"]
    for number, case in enumerate(table["cases"]):
        yield Case("filters", f"processor {number}", functools.partial(_processor, case, logits, ids))


def _processor(case: Mapping[str, Any], logits: torch.Tensor, ids: Sequence[Sequence[int]]) -> str:
    if case["processor"] == "min_p":
        ones = torch.ones(len(logits))
        sizes = {"top_k_B": torch.zeros(len(logits), dtype=torch.int64), "top_p_B": ones}
        _, tokens, size = filtered(logits, temperature_B=ones, min_p_B=torch.full_like(ones, case["value"]), **sizes)
        found = [sorted(row[:count].tolist()) for row, count in zip(tokens, size, strict=True)]
        kept = [[token for token, stays in enumerate(row) if stays] for row in case["kept"]]
        return "" if found == kept else f"keeps {found} instead of {kept}"
    if case["processor"] == "repetition_penalty":
        penalty = Sampling(repetition_penalty=case["value"])
        rows = [penalized(row, penalty, prompt=seen, new=[]) for row, seen in zip(logits, ids, strict=True)]
        return _far(torch.stack(rows), torch.tensor(case["scores"]), 1e-5)
    raise KeyError(case["processor"])


def draws(model: Model, case: Mapping[str, Any]) -> str:
    asked = Sampling(temperature=case["temperature"], top_k=case["top_k"], top_p=case["top_p"])
    logits = model.logits(model.encode(case["prompt"]))[-1:]
    head = filtered(
        logits,
        temperature_B=torch.tensor([asked.temperature]),
        top_k_B=torch.tensor([asked.top_k]),
        top_p_B=torch.tensor([asked.top_p], dtype=torch.float64),
        min_p_B=torch.zeros(1),
    )
    counts, wide = torch.zeros(logits.shape[-1]), 2000
    for start in range(0, DRAWS, wide):
        points = torch.tensor([uniform(1, request, 0) for request in range(start, start + wide)])
        tokens = drawn(*(part.expand(wide, *part.shape[1:]) for part in head), uniform_B=points)
        counts += tokens.bincount(minlength=len(counts))
    wanted = torch.zeros(len(counts), dtype=torch.float64)
    wanted[[int(token) for token in case["probs"]]] = torch.tensor(list(case["probs"].values()), dtype=torch.float64)
    listed = len(case["probs"]) == case["kept"]  # otherwise only the likeliest are
    if listed and counts[wanted == 0].any():
        return f"draws {int(counts[wanted == 0].count_nonzero())} tokens outside the kept set"
    expected = (wanted / wanted.sum() if listed else wanted) * DRAWS
    often = expected >= 5
    groups = [(counts[often].double(), expected[often])]
    if (rare := DRAWS - float(expected[often].sum())) >= 5:
        groups.append((counts[~often].double().sum().unsqueeze(0), torch.tensor([rare], dtype=torch.float64)))
    square = sum(float(((seen - due) ** 2 / due).sum()) for seen, due in groups)
    freedom = sum(len(seen) for seen, _ in groups) - 1
    p = float(torch.special.gammaincc(torch.tensor(freedom / 2).double(), torch.tensor(square / 2).double()))
    return (
        "" if freedom == 0 or p > LEAST_P else f"chi-square {square:.1f} of {freedom} degrees of freedom, p = {p:.1e}"
    )


# ---- whole texts


def megatron_texts(folder: Folder, name: str) -> Iterator[Case]:
    table = folder.json(name)
    model = functools.partial(folder.model, table["model"])
    for number, case in enumerate(table["cases"]):
        request, label = case["request"], case.get("name", "stops")
        if label.startswith("top_p decay"):
            kind, compare = "decay", functools.partial(_decay, case)
        elif "error" in case["result"]:
            kind, compare = "limits", functools.partial(_limit, model, case)
        else:
            stops = label == "stops" or "stop_on" in label or "prevent_newline" in label
            kind = "stops" if stops else "batches" if len(request["prompts"]) > 1 else "greedy"
            compare = functools.partial(_megatron_text, model, case)
        yield Case(kind, f"{label} {number}", compare)


def _decay(case: Mapping[str, Any]) -> str:
    """Steps are counted from a row's own first token; Megatron-LM counts from the shortest prompt's."""
    request = case["request"]
    asked = {key.replace("_sampling", ""): request[key] for key in request if key.startswith("top_p")}
    if not asked.get("top_p_decay"):
        asked.pop("top_p_bound", None)
    options = Sampling(**asked)
    wanted = case["result"].get("top_p_each_step", [])
    found = [top_p_at(options, step) for step in range(len(wanted))]
    return _far(torch.tensor(found), torch.tensor(wanted), 1e-6) if wanted else ""


def _limit(model: Callable[[], Model], case: Mapping[str, Any]) -> str:
    request, error = case["request"], case["result"]["error"]
    if "Too many tokens" in error:
        prompts = [model().encode(prompt) for prompt in request["prompts"]]
        text = error.removeprefix("ValueError: ")
        try:
            megatron_api.check_size(prompts, request["tokens_to_generate"], most=int(text.rpartition(" ")[2]))
        except ApiError as refused:
            return _little_cache(model(), request) if refused.text == text else f"{refused.text!r} instead of {text!r}"
        return "is not refused"
    try:
        continue_rows(model(), [_request(model(), request, prompt, n=i) for i, prompt in enumerate(request["prompts"])])
    except UsageError:
        return ""
    return "is not refused"


def _little_cache(model: Model, request: Mapping[str, Any]) -> str:
    """Difference: rows that the cache does not hold together wait, and their texts are those of rows alone."""
    prompts, most = [model.encode(prompt) for prompt in request["prompts"]], request["tokens_to_generate"]
    engine = DecodeEngine(model, cache_tokens=50, max_batch=len(prompts), page_tokens=2)
    for number, prompt in enumerate(prompts):
        engine.add(decoding.Request(str(number), prompt, GREEDY, max_tokens=most, echo=not most))
    told: dict[str, list[Token]] = {str(number): [] for number in range(len(prompts))}
    while engine.busy:
        for token in engine.step():
            told[token.id].append(token)
    for number, prompt in enumerate(prompts):
        found = [token.token for token in told[str(number)]]
        if most:
            (alone,) = continue_rows(
                model, [GenerationRequest(ids=tuple(prompt), rules=replace(GREEDY, max_tokens=most))]
            )
            if found != alone.tokens:
                return f"row {number}: {found} instead of {alone.tokens}"
        else:
            scores = model.score([prompt]).log_prob_BS[0].tolist() if len(prompt) > 1 else []
            if found != prompt or (bad := _unlike([token.logprob for token in told[str(number)]][1:], scores)):
                return f"row {number}: {bad or found}"
    return ""


def _request(model: Model, request: Mapping[str, Any], prompt: str, *, n: int, bias: Any = None) -> GenerationRequest:
    blocked = _no_newline_after_colon(model) if request.get("prevent_newline_after_colon") else {}
    stop = ("\n\n",) if request.get("stop_on_double_eol") else ("\n",) if request.get("stop_on_eol") else ()
    asked = replace(
        GREEDY,
        max_tokens=request["tokens_to_generate"],
        logit_bias={int(token): value for token, value in (bias or {}).items()},
        blocked_after=blocked,
        stop=stop,
        keep_stop=True,
    )
    ids = tuple(model.encode(prompt, add_bos=request.get("add_BOS", False)))
    return GenerationRequest(ids=ids, rules=asked, number=n, log_probs=0, prompt_log_probs=True)


@functools.lru_cache(maxsize=8)
def _no_newline_after_colon(model: Model) -> dict[int, tuple[int, ...]]:
    tokenizer = model.tokenizer
    assert tokenizer is not None
    lines = tuple(i for i in range(model.vocab_size) if tokenizer.decode([i]).startswith("\n"))
    return {tokenizer.encode_batch([":"])[0].tolist()[-1]: lines}


def _megatron_text(open_model: Callable[[], Model], case: Mapping[str, Any]) -> str:
    model, request, result, bias = open_model(), case["request"], case["result"], case.get("logit_bias")
    prompts, log_probs = request["prompts"], result["logprobs"] or [None] * len(request["prompts"])
    if request["tokens_to_generate"] == 0:
        rows = [model.encode(prompt, add_bos=request.get("add_BOS", False)) for prompt in prompts]
        scores = model.score(rows)
        found = [scores.log_prob_BS[i, : len(row) - 1].tolist() for i, row in enumerate(rows)]
        return next((bad for mine, theirs in zip(found, log_probs, strict=True) if (bad := _unlike(mine, theirs))), "")
    requests = [_request(model, request, prompt, n=i, bias=bias) for i, prompt in enumerate(prompts)]
    for row, answer in enumerate(continue_rows(model, requests)):
        given = len(answer.request.ids)
        # Rows that have ended go on in `tokens`.
        ended = len(result["segments"][row]) if "segments" in result else len(log_probs[row]) + 1
        theirs = result["tokens"][row][:ended]
        if theirs[:given] != list(answer.request.ids):
            return f"prompt {row}: other ids"
        if bad := _unlike_row(model, answer, theirs[given:], result["text"][row]):
            return f"row {row}: {bad}"
        mine = [*answer.prompt_log_probs, *answer.log_probs]
        if log_probs[row] is not None:
            common = min(len(mine), given - 1 + _common(answer.tokens, theirs[given:]))
            # After a colon we block more tokens, and the others share their probability.
            after = [token in answer.request.rules.blocked_after for token in theirs[:common]]
            pairs = [(a, b) for a, b, free in zip(mine, log_probs[row], after, strict=False) if not free or a < b]
            if bad := _unlike([a for a, _ in pairs], [b for _, b in pairs]):
                return f"row {row}: {bad}"
    return ""


def _unlike_row(model: Model, answer: Answer, theirs: Sequence[int], text: str) -> str:
    """Stated differences: a row ends by its own count and at an end of document; a stop is seen in new text alone; no
    token that begins with a newline follows a colon."""
    tokenizer, rules = model.tokenizer, answer.request.rules
    assert tokenizer is not None
    whole = list(theirs)
    ends = [i + 1 for i, token in enumerate(theirs) if token in model.ends]
    theirs = whole[: min([*ends, answer.request.rules.max_tokens or len(whole)])]
    same = _common(answer.tokens, theirs)
    if answer.tokens == theirs:
        said = tokenizer.decode([*answer.request.ids, *answer.tokens])
        return "" if theirs != whole or said == text else f"text {said!r} instead of {text!r}"
    last = [*answer.request.ids, *theirs][len(answer.request.ids) + same - 1]
    if same < len(theirs) and theirs[same] in rules.blocked_after.get(last, ()):
        return ""
    across = rules.stop == ("\n\n",) and same == len(theirs) == 1 and tokenizer.decode([theirs[0]]) == "\n"
    if across and tokenizer.decode(answer.request.ids).endswith("\n"):
        return ""
    return f"tokens {answer.tokens} instead of {theirs}"


def transformers_texts(folder: Folder, name: str) -> Iterator[Case]:
    modes = {
        "greedy": ("greedy", _hf_greedy),
        "greedy, batch": ("batches", _hf_batch),
        "beam": ("beams", _hf_beam),
        "stop_strings": ("stops", _hf_stop),
        "score": ("greedy", _hf_score),
        "next token distribution": ("draws", draws),
    }
    for number, case in enumerate(folder.json(name)):
        mode = "greedy, batch" if case["mode"].startswith("greedy, batch") else case["mode"]
        if mode not in modes:
            yield Case(mode, str(number), functools.partial(unknown, mode))
            continue
        kind, compare = modes[mode]
        yield Case(kind, f"{case['mode']} {number}", functools.partial(_on, folder, case, compare))


def _on(folder: Folder, case: Mapping[str, Any], compare: Callable[[Model, Mapping[str, Any]], str]) -> str:
    return compare(folder.model(case["model"]), case)


def _hf_greedy(model: Model, case: Mapping[str, Any]) -> str:
    asked = replace(GREEDY, max_tokens=len(case["new_ids"]))
    top = len(case["top5"][0])  # at the first places
    (answer,) = continue_rows(
        model, [GenerationRequest(ids=tuple(model.encode(case["prompt"])), rules=asked, log_probs=top)]
    )
    if list(answer.request.ids) != case["prompt_ids"] or answer.tokens != case["new_ids"]:
        return f"tokens {answer.tokens} instead of {case['new_ids']}"
    return _unlike(answer.log_probs, case["logprobs"]) or _unlike_top(answer.top[: len(case["top5"])], case["top5"])


def _hf_batch(model: Model, case: Mapping[str, Any]) -> str:
    asked = replace(GREEDY, max_tokens=len(case["new_ids"][0]))
    requests = [
        GenerationRequest(ids=tuple(model.encode(p)), rules=asked, number=i) for i, p in enumerate(case["prompts"])
    ]
    for answer, theirs in zip(continue_rows(model, requests), case["new_ids"], strict=True):
        if answer.tokens != theirs[: len(answer.tokens)] or set(theirs[len(answer.tokens) :]) - model.ends:
            return f"tokens {answer.tokens} instead of {theirs}"
    return ""


def _hf_beam(model: Model, case: Mapping[str, Any]) -> str:
    found = search_beams(
        model,
        model.encode(case["prompt"]),
        width=case["num_beams"],
        max_tokens=case["max_new_tokens"],
        length_penalty=case["length_penalty"],
        early_stopping=case["early_stopping"],
        count=len(case["new_ids"]),
    )
    rows = [[token for token in row if token not in model.ends] for row in case["new_ids"]]
    if [list(beam.tokens) for beam in found] != rows:
        return f"rows {[beam.tokens for beam in found]} instead of {rows}"
    return _unlike([beam.score for beam in found], case["scores"])


def _hf_stop(model: Model, case: Mapping[str, Any]) -> str:
    asked = replace(GREEDY, stop=tuple(case["stop"]), max_tokens=max(len(case["new_ids"]), 1))
    (answer,) = continue_rows(model, [GenerationRequest(ids=tuple(model.encode(case["prompt"])), rules=asked)])
    return "" if answer.tokens == case["new_ids"] else f"tokens {answer.tokens} instead of {case['new_ids']}"


def _hf_score(model: Model, case: Mapping[str, Any]) -> str:
    if model.encode(case["prompt"]) != case["ids"]:
        return "other ids"
    return _unlike(model.score([case["ids"]]).log_prob_BS[0].tolist(), case["logprobs"][1:])


def beams(folder: Folder, name: str) -> Iterator[Case]:
    table = folder.json(name)
    for number, case in enumerate(table["cases"]):
        compare = functools.partial(_megatron_beam, functools.partial(folder.model, table["model"]), case)
        yield Case("beams", str(number), compare)


def _megatron_beam(open_model: Callable[[], Model], case: Mapping[str, Any]) -> str:
    """Differences: rows are cut after their stop; what does not fit the context is refused; prompts may be several."""
    model, request, result = open_model(), case["request"], case["result"]
    most, add_bos = request["tokens_to_generate"], request.get("add_BOS", False)
    ids = model.encode(request["prompts"][0], add_bos=add_bos)
    asked = _request(model, {**request, "tokens_to_generate": max(most, 1)}, request["prompts"][0], n=0).rules
    try:
        found = search_beams(
            model,
            ids,
            width=request["beam_size"],
            max_tokens=most,
            length_penalty=request.get("length_penalty", 1.0),
            count=request.get("num_return_gen", 1),
            rules=asked,
            ends=frozenset((request["stop_token"],)) if "stop_token" in request else None,
        )
    except UsageError as error:
        too_long = len(ids) + most > model.context
        return "" if too_long or "ValueError" in result.get("error", "") else f"refused: {error}"
    if "error" in result:
        return "" if len(request["prompts"]) > 1 else "is not refused"
    assert model.tokenizer is not None
    eod = min(model.ends)
    rows = [[*ids, *beam.tokens, *[eod] * (most - len(beam.tokens))] for beam in found]
    if "tokens" in result and rows != result["tokens"]:
        return f"rows {rows} instead of {result['tokens']}"
    if [model.tokenizer.decode(row) for row in rows] != result["text"]:
        return f"texts instead of {result['text']}"
    return _unlike([beam.score for beam in found], result["scores"])


def hypotheses(folder: Folder, name: str) -> Iterator[Case]:
    for number, case in enumerate(folder.json(name)):
        yield Case("beams", f"hypotheses {number}", functools.partial(_hypotheses, case))


def _hypotheses(case: Mapping[str, Any]) -> str:
    finished = Finished(case["num_beams"], case["length_penalty"], case["early_stopping"])
    for number, call in enumerate(case["log"]):
        token, total, length = call["add"]
        finished.add((token,), total, length=length, stopped=True)
        kept = sorted(beam.tokens[0] for beam in finished.beams)
        worst = min(beam.score for beam in finished.beams)
        done = finished.is_done(call["best_sum_logprobs"], length=call["cur_len"])
        if kept != sorted(call["kept"]) or abs(worst - call["worst"]) > 1e-9 or done != call["done"]:
            return f"call {number}: keeps {kept}, worst {worst}, done {done}"
    return ""


# ---- servers


def megatron_server(folder: Folder, name: str) -> Iterator[Case]:
    table = folder.json(name)
    model = functools.partial(folder.model, "gpt2_tiny")
    for number, case in enumerate(table["rows"]):
        yield Case("server", f"rows {number}", functools.partial(_megatron_request, model, case))
    for number, case in enumerate(table["other"]):
        yield Case("server", f"other {number}", functools.partial(_megatron_http, model, case))


def _megatron_request(open_model: Callable[[], Model], case: Mapping[str, Any]) -> str:
    """Differences: a refusal has status 400; numbers may be integers, and no boolean is one; temperature 0 is greedy;
    prompts are strings; the end-of-document token stops a beam search unless a token is named."""
    body, called, theirs = case["request"], case.get("called"), case["body"]
    if body.get("prompts") == ["raise"]:  # the stand-in for a model raised by itself
        body = {**body, "tokens_to_generate": 10**6}
        try:
            megatron_api.job_of(open_model(), body, most_tokens=None)
        except ApiError as error:
            return "" if error.text == theirs else f"{error.text!r} instead of {theirs!r}"
        return "is not refused"
    floats = ("top_p", "top_p_decay", "top_p_bound", "length_penalty")
    integer = any(isinstance(body.get(key), int) and f"{key} must be a" in theirs for key in floats)
    try:
        asked = megatron_api.checked(body)
    except ApiError as error:
        no_integer = any(body.get(key) is True for key in ("tokens_to_generate", "random_seed", "beam_width"))
        no_text = any(not isinstance(prompt, str) for prompt in body.get("prompts") or [])
        if error.status == 400 and (error.text == theirs or (called and no_integer) or no_text or integer):
            return ""
        return f"status {error.status}, {error.text!r} instead of {theirs!r}"
    if called is None:
        return "" if integer or body.get("temperature") == 0 else f"is not refused with {theirs!r}"
    mine = {
        "prompts": asked.prompts,
        "tokens_to_generate": asked.tokens_to_generate,
        "return_output_log_probs": asked.logprobs,
        "top_k_sampling": asked.top_k,
        "top_p_sampling": asked.top_p,
        "top_p_decay": asked.top_p_decay,
        "top_p_bound": asked.top_p_bound,
        "temperature": asked.temperature,
        "add_BOS": asked.add_BOS,
        "use_eod_token_for_early_termination": True,
        "stop_on_double_eol": asked.stop_on_double_eol,
        "stop_on_eol": asked.stop_on_eol,
        "prevent_newline_after_colon": asked.prevent_newline_after_colon,
        "random_seed": asked.random_seed,
        "function": "generate" if asked.beam_width is None else "beam_search",
        "beam_size": asked.beam_width,
        "num_return_gen": asked.beam_width,
        "stop_token": 50256 if asked.stop_token is None else asked.stop_token,
        "length_penalty": asked.length_penalty,
    }
    unlike = [f"{key} {mine[key]} instead of {value}" for key, value in called.items() if mine[key] != value]
    return ", ".join(unlike)


def _megatron_http(open_model: Callable[[], Model], case: Mapping[str, Any]) -> str:
    """Differences: the page is at /, and its other answers are those of a model."""
    from tests.helpers.serving import running

    with running(Served(model=open_model())) as server:
        note, line = case.get("note"), {"prompts": ["Hello world"], "tokens_to_generate": 1}
        if note == "GET /":
            reply = server.ask("/", headers={})
            return "" if reply.status == 200 and "<html" in reply.body else f"status {reply.status}"
        if note == "bad JSON":
            reply = server.ask("/api", b"{", method="PUT")
        elif note == "no Content-Type":
            reply = server.ask("/api", b"{}", method="PUT", headers={"content-type": ""})
        elif note:
            reply = server.ask("/api", line, method="PUT")
        else:
            reply = server.ask("/api", method=case["method"], headers={})
        same_form = isinstance(reply.body, dict) and reply.body.keys() == (case.get("body") or {}).keys()
        if reply.status != case["status"] or case.get("allow") not in (None, reply.headers.get("allow")):
            return f"status {reply.status}, allow {reply.headers.get('allow')}"
        if case.get("body") and (
            not same_form if case["status"] == 200 else reply.body["message"] != case["body"]["message"]
        ):
            return f"{reply.body} instead of {case['body']}"
    return ""


def openai(folder: Folder, name: str) -> Iterator[Case]:
    for number, case in enumerate(folder.json(name)["cases"]):
        yield Case("openai", str(number), functools.partial(_openai, folder, case))


def _openai(folder: Folder, case: Mapping[str, Any]) -> str:
    """The whole answer of the server but for its name and time, from the functions that it calls."""
    body, model = case["request"], folder.model(case["request"]["model"])
    asked = completion(Served(model=model), body)
    ((row, pieces),) = answered(DecodeEngine(model), asked.rows)
    answer = openai_answer(asked, [pieces])
    (choice,) = answer["choices"]
    # What scores a prompt alone makes no tokens.
    new = row.tokens if body["max_tokens"] else []
    mine = (choice["text"], choice["finish_reason"], answer["usage"]["prompt_tokens"], new, answer["model"])
    theirs = (case["text"], case["finish_reason"], case["prompt_tokens"], case["new_ids"], body["model"])
    if mine != theirs:
        return f"{mine} instead of {theirs}"
    if "logprobs" not in case:
        return "" if choice["logprobs"] is None else "log probabilities that nobody asked for"
    theirs = case["logprobs"]
    facts = [fact for piece in pieces for fact in piece.tokens]
    if [fact.token for fact in facts] != theirs["token_ids"]:
        return f"log probabilities of {[fact.token for fact in facts]} instead of {theirs['token_ids']}"
    said, text = choice["logprobs"], choice["text"] if body.get("echo") else model.tokenizer.decode(row.request.prompt)
    if said["tokens"] != theirs["tokens"] or said["text_offset"][0] != (0 if body.get("echo") else len(text)):
        return f"tokens {said['tokens']} at {said['text_offset']} instead of {theirs['tokens']}"
    tops = [fact.top if fact.log_prob is not None else None for fact in facts]
    return _unlike(said["token_logprobs"], theirs["token_logprobs"]) or _unlike_top(tops, theirs["top"])


def answered(engine: DecodeEngine, rows: Sequence[OpenRow]) -> list[tuple[OpenRow, list[RowDelta]]]:
    """Rows with their pieces, from an engine without a server."""
    by_id = {row.request.id: (row, list[RowDelta]()) for row in rows}
    for row in rows:
        engine.add(row.request)
    while engine.busy:
        for token in engine.step():
            row, pieces = by_id[token.id]
            if row.finish_reason:
                continue
            if (piece := row.take(token)) is not None:
                pieces.append(piece)
            if row.finish_reason:
                engine.cancel(token.id)
    return list(by_id.values())


# ---- evaluation


def detokenizers(folder: Folder, name: str) -> Iterator[Case]:
    table = folder.json(name)
    for number, case in enumerate(table["strings"]):
        yield Case("detokenizers", str(number), functools.partial(_detokenized, case))
    for case in table["choice_by_path"]:
        yield Case("detokenizers", case["path"], functools.partial(_chosen, case))


def _detokenized(case: Mapping[str, Any]) -> str:
    found = {kind: detokenize(case["text"], kind=kind) for kind in ("wiki", "ptb")}
    return next((f"{kind}: {found[kind]!r}" for kind in found if found[kind] != case[kind]), "")


def _chosen(case: Mapping[str, Any]) -> str:
    found = detokenizer_by_path(case["path"])
    wanted = case["chosen"] and case["chosen"].removesuffix("_detokenizer").replace("wikitext", "wiki")
    return "" if found == wanted else f"{found} instead of {wanted}"


def wikitexts(folder: Folder, name: str) -> Iterator[Case]:
    table = folder.json(name)
    for number, case in enumerate(table["cases"]):
        yield Case("wikitext", f"{case['file']} {number}", functools.partial(_wikitext, folder, table, case))


def _wikitext(folder: Folder, table: Mapping[str, Any], case: Mapping[str, Any]) -> str:
    model, path = folder.model(table["model"]), folder.root / "data" / "wikitext" / case["file"]
    length, overlap = case["sequence_length" if "sequence_length" in case else "seq_length"], case["overlapping_eval"]
    overlap = max(1, overlap)
    try:
        found = wikitext(model, path, sequence_length=length, overlap=overlap, batch_size=4)
    except UsageError:
        return "" if overlap > length else "is refused"
    if overlap > length:
        return "an overlap beyond the sequence is not refused"
    counts = ("windows", "windows_that_score", "targets", "num_original_tokens", "num_tokenized_tokens")
    if bad := [f"{key} {found[key]} instead of {case[key]}" for key in counts if found[key] != case[key]]:
        return ", ".join(bad)
    if abs(found["avg_loss"] - case["avg_loss"]) > LOSS or abs(found["token_ratio"] - case["token_ratio"]) > 1e-9:
        return f"loss {found['avg_loss']} instead of {case['avg_loss']}"
    if any(abs(found[key] / case[key] - 1) > LOG_PROB for key in ("ppl", "adjusted_ppl")):
        return f"perplexity {found['ppl']}, adjusted {found['adjusted_ppl']}"
    parts = windows(found["num_tokenized_tokens"], sequence_length=length, overlap=overlap)
    scored = [[part.start, part.stop - part.first] for part in parts]
    theirs = [window[:2] for window in case.get("first_windows", []) if window[1]]
    return "" if scored[: len(theirs)] == theirs else f"windows {scored[:4]} instead of {theirs[:4]}"


def lambadas(folder: Folder, name: str) -> Iterator[Case]:
    table = folder.json(name)
    for number, case in enumerate(table["results"]):
        yield Case("lambada", f"{case['file']} {number}", functools.partial(_lambada, folder, table, case))


def _lambada(folder: Folder, table: Mapping[str, Any], case: Mapping[str, Any]) -> str:
    """Difference: a row that is too long for Megatron-LM loses its beginning."""
    model, path = folder.model(table["model"]), folder.root / "data" / "lambada" / case["file"]
    texts = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    for number, (text, theirs) in enumerate(zip(texts, case["examples"], strict=True)):
        if tuple(passage(model, text, strict=case["strict"])) != (theirs["tokens"], theirs["labels"]):
            return f"passage {number}: other ids"
    found = lambada(model, path, strict=case["strict"], sequence_length=table["seq_length"], batch_size=3)
    long = sum("error" in example for example in case["examples"])
    if found["cut"] != long or found["total"] != case["total"]:
        return f"{found['total']} passages, {found['cut']} cut, instead of {case['total']} and {long}"
    right = case["number_correct"]
    return "" if right <= found["number_correct"] <= right + long else f"{found['number_correct']} instead of {right}"


def harness(folder: Folder, name: str) -> Iterator[Case]:
    for model, table in folder.json(name)["models"].items():
        asked = functools.lru_cache(maxsize=1)(
            functools.partial(_harness_results, folder, model, tuple(table["results"]))
        )
        for task, wanted in table["results"].items():
            samples = table["samples"].get(task, [])
            yield Case("lm_eval", f"{model} {task}", functools.partial(_harness_task, asked, task, wanted, samples))


def _harness_results(folder: Folder, model: str, tasks: tuple[str, ...]) -> dict[str, Any]:
    from trainer.tasks.harness import evaluate_tasks

    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    with contextlib.chdir(folder.root):
        return evaluate_tasks(
            folder.model(model), tasks, max_length=64, include_path=folder.root / "lm_eval", log_samples=True
        )


def _harness_task(
    asked: Callable[[], dict[str, Any]], task: str, wanted: Mapping[str, float], samples: Sequence[Mapping[str, Any]]
) -> str:
    try:
        found = asked()
    except ImportError as error:
        return f"lm_eval is not installed: {error}"
    for metric, value in wanted.items():
        if not math.isclose(found["results"][task][metric], value, rel_tol=1e-3, abs_tol=1e-6):
            return f"{metric} {found['results'][task][metric]} instead of {value}"
    for mine, theirs in zip(found["samples"][task], samples, strict=True):
        answers, expected = (json.loads(json.dumps(one["resps"])) for one in (mine, theirs))
        if not _same_answers(answers, expected):
            return f"{answers} instead of {expected}"
    return ""


def _same_answers(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, list) and isinstance(theirs, list):
        return len(mine) == len(theirs) and all(map(_same_answers, mine, theirs))
    if isinstance(mine, float) and isinstance(theirs, int | float):
        return abs(mine - theirs) <= 1e-3
    return bool(mine == theirs)


# ---- classification


VOCABULARY = ("vocab.txt", "../../vocab/bert-uncased/vocab.txt")  # of the readers' ids, in the folder or beside it


def glue_readers(folder: Folder, name: str) -> Iterator[Case]:
    for case in folder.json(name):
        label = f"{case['file']} {case['max_seq_length']}"
        yield Case("readers", label, functools.partial(_glue, folder, case))


def _glue(folder: Folder, case: Mapping[str, Any]) -> str:
    """Differences: MNLI's "-" and blank lines are left out and counted; a test set's label is unknown, not 0."""
    path, task = folder.root / "data" / case["file"], Path(case["file"]).parts[1].lower()
    wanted = case["result"]
    try:
        read, samples = _labelled(folder, path, task, length=case["max_seq_length"])
    except MdataError as error:
        named = f"{path}:" in str(error) and str(error).split(f"{path}:")[1][:1].isdigit()
        return "" if "error" in wanted and named else f"is refused: {error}"
    if "error" in wanted:
        known = {"without a consensus", "blank"}
        return "" if read.skipped.keys() & known else f"is read, where Megatron-LM stops with {wanted['error']!r}"
    if len(wanted["warnings"]) != sum(read.skipped.values()):
        return f"{dict(read.skipped)} are left out instead of {wanted['warnings']}"
    is_test = all(row.label is None for row in read.rows)
    for row, found, theirs in zip(read.rows, samples, wanted["rows"], strict=True):
        label = 0 if is_test else row.label
        mine = (int(row.uid), label, *row.texts, *found)
        if mine != (theirs["uid"], theirs["label"], theirs["text_a"], theirs["text_b"], theirs["ids"], theirs["types"]):
            return f"{mine} instead of {theirs}"
    return ""


def race_readers(folder: Folder, name: str) -> Iterator[Case]:
    for case in folder.json(name):
        label = f"{case['folder']} {case['max_seq_length']} {case['max_qa_length']}"
        yield Case("readers", label, functools.partial(_race, folder, case))


def _race(folder: Folder, case: Mapping[str, Any]) -> str:
    path = folder.root / "data" / case["folder"]
    try:
        read, samples = _labelled(
            folder, path, "race", length=case["max_seq_length"], most_choice=case["max_qa_length"]
        )
    except MdataError as error:
        named = f"{path}" in str(error) and any(f".txt:{row}:" in str(error) for row in range(1, 1000))
        return "" if "error" in case and named else f"is refused: {error}"
    if "error" in case:
        return f"is read, where Megatron-LM stops with {case['error']!r}"
    for row, (ids, types), theirs in zip(read.rows, samples, case["samples"], strict=True):
        firsts = [kinds.index(1) if 1 in kinds else len(kinds) for kinds in types]
        if (int(row.uid), row.label, ids) != (theirs["uid"], theirs["label"], theirs["ids"]):
            return f"{(row.uid, row.label, ids)} instead of {theirs}"
        if "first_context" in theirs and firsts != theirs["first_context"]:
            return f"contexts begin at {firsts} instead of {theirs['first_context']}"
    return ""


def _labelled(
    folder: Folder, path: Path, task: Any, *, length: int, most_choice: int = MOST_CHOICE
) -> tuple[LabelledFile, list[tuple[Any, Any]]]:
    """The rows of a file, and what samples have of each: ids and types up to the padding."""
    read = read_labelled(path, task)
    vocabulary = next(file for name in VOCABULARY if (file := folder.root / name).exists())
    tokenizer = load_tokenizer(TokenizerSpec(type="BertWordPieceLowerCase", vocab_file=str(vocabulary)))
    if not read.rows:
        return read, []
    with tempfile.TemporaryDirectory() as scratch:
        prefix = Path(scratch) / "rows"
        write_labelled({prefix: [read]}, tokenizer, task=task, most_choice=most_choice)
        kind = mdata.Classify(choices=None if read.labels else NUM_CHOICES)
        dataset = mdata.open_dataset(f"{prefix}.json", sequence_length=length, kind=kind, split="whole")
        fields = dataset.read(range(len(dataset))).fields
    if fields["labels"].tolist() != [-1 if row.label is None else row.label for row in read.rows]:
        raise ValueError(f"labels {fields['labels'].tolist()}")
    arrays = (fields["text"], fields["types"], fields["padding_mask"])
    kept = [
        [(ids[real == 1].tolist(), types[real == 1].tolist()) for ids, types, real in zip(*row, strict=True)]
        for row in zip(*(array.reshape(len(read.rows), -1, length) for array in arrays), strict=True)
    ]
    if read.labels:
        return read, [row for (row,) in kept]
    return read, [tuple(map(list, zip(*row, strict=True))) for row in kept]  # type: ignore[misc]


def pairs(folder: Folder, name: str) -> Iterator[Case]:
    """Difference: names of data sets are those of their files, which Megatron-LM strips characters off."""
    table = folder.json(name)
    for number, case in enumerate(table["pairs"]):
        yield Case("pairs", str(number), functools.partial(_pair, case))
    for number, case in enumerate(table["clean_text"]):
        yield Case("pairs", f"text {number}", functools.partial(_cleaned, case))
    for case in table["dataset_names"]:
        yield Case("pairs", case["path"], functools.partial(_set_named, case))


def _pair(case: Mapping[str, Any]) -> str:
    length = case["max"]
    ids, types = pair(case["a"], case["b"], length=length, cls=101, sep=102)
    missing = [0] * (length - len(ids))
    mine = (ids + missing, types + missing, [1] * len(ids) + missing)
    return "" if mine == (case["ids"], case["types"], case["paddings"]) else f"{mine}"


def _cleaned(case: Mapping[str, Any]) -> str:
    found = clean_text(case["text"])
    return "" if found == case["cleaned"] else f"{found!r} instead of {case['cleaned']!r}"


def _set_named(case: Mapping[str, Any]) -> str:
    folders = case["task"] == "RACE"
    found = set_name(Path(case["path"].rstrip("/")), folder=folders)
    theirs = case["name"] if folders else Path(case["path"]).stem
    return "" if found == theirs else f"{found!r} instead of {theirs!r}"


def heads(folder: Folder, name: str) -> Iterator[Case]:
    for case in folder.json(name):
        yield Case("heads", case["kind"], functools.partial(_head, folder, case))


def _head(folder: Folder, case: Mapping[str, Any]) -> str:
    """Logits, loss, accuracy and gradients of an engine that begins with these weights as a Hugging Face folder."""
    file = load_file(folder.root / f"tasks/head_{case['kind']}.safetensors")
    sizes, labels = case["config"], list(LABELS.get(case["kind"], ()))
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        model.mkdir()
        save_file({n.removeprefix("weights/"): x.float() for n, x in file.items() if n.startswith("weights/")},
                  model / "model.safetensors")  # fmt: skip
        settings = {
            "model_type": "megatron-bert", "hidden_size": sizes["hidden"], "num_hidden_layers": sizes["layers"],
            "num_attention_heads": sizes["heads"], "intermediate_size": sizes["ffn"], "vocab_size": sizes["vocab"],
            "max_position_embeddings": sizes["positions"], "layer_norm_eps": sizes["eps"], "hidden_act": "gelu",
            "architectures": [f"MegatronBertFor{'SequenceClassification' if labels else 'MultipleChoice'}"],
            "id2label": dict(enumerate(labels)),
        }  # fmt: skip
        (model / "config.json").write_text(json.dumps(settings))
        logits, totals, parts = run_ranks(_head_rank, 1, model, file, len(case["shape"]) == 3)[0]
    found = {name: torch.from_numpy(values) for name, values in assemble(parts).items()}
    right = int((torch.tensor(logits).argmax(-1) == file["batch/labels"]).sum())
    loss = totals[0] / totals[1]
    if (right, totals[1]) != (case["correct"], case["of"]) or abs(loss - case["loss"]) > LOSS:
        return f"loss {loss}, {right} of {totals[1]} right, instead of {case}"
    if bad := _far(torch.tensor(logits), file["out/logits"], LOSS):
        return f"logits: {bad}"
    names = {
        "types.weight": "bert.embeddings.token_type_embeddings.weight",
        "pooler.weight": "bert.pooler.dense.weight",
        "pooler.bias": "bert.pooler.dense.bias",
        "classifier.weight": "classifier.weight",
        "classifier.bias": "classifier.bias",
        "blocks.0.attention.q.weight": "bert.encoder.layer.0.attention.self.query.weight",
    }
    if set(names.values()) != {name.removeprefix("out/grad.") for name in file if name.startswith("out/grad.")}:
        return "gradients of other tensors"
    bad = [f"{ours}: {far}" for ours, theirs in names.items()
           if (far := _far(found[ours].float(), file[f"out/grad.{theirs}"], LOSS))]  # fmt: skip
    return f"gradients of {', '.join(bad)}" if bad else ""


def _head_rank(context: RankContext, model: Path, file: Mapping[str, torch.Tensor], chooses: bool) -> Any:
    ids, types, real, labels = (file[f"batch/{name}"] for name in ("ids", "types", "padding_mask", "labels"))
    opened, choices = open_model(model), ids.shape[1] if chooses else None
    data = replace(opened.config.data, blend="rows.json", classify=ClassifySamplesSection(choices=choices))
    train = replace(opened.config.train, sequence_length=ids.shape[-1], micro_batch=len(ids), global_batch=len(ids))
    config = replace(
        opened.config,
        data=data,
        train=train,
        model=replace(opened.config.model, vocab_size=opened.vocab_size),
        checkpoint=replace(opened.config.checkpoint, init_from=str(model)),
        precision=replace(opened.config.precision, dtype="fp32"),
    )
    engine = layouts(context, config)
    fields = {"text": ids, "types": types, "labels": labels, "padding_mask": real, "loss_mask": torch.ones_like(labels)}
    rows = mdata.FieldRows({name: x.numpy() for name, x in fields.items()}, mdata.Classify(choices=choices))
    batch = engine.microbatch(Batch(np.arange(len(ids)), rows))
    with torch.no_grad():
        logits = engine.model.class_logits(batch)
    totals = engine.add_gradients([batch]).tolist()
    return logits.tolist(), totals, reduced(engine, totals[1])


# ---- scores of texts


def toxicity(folder: Folder, name: str) -> Iterator[Case]:
    expected = folder.json(name)
    for part, compare in (("filter", _toxicity_filter), ("metrics", _toxicity_metrics)):
        yield Case("detoxify", part, functools.partial(compare, folder.root / "data/toxicity", expected[part]))


def _toxicity_filter(data: Path, expected: Mapping[str, Any]) -> str:
    lines = scores.read_scores(data / "annotated.jsonl", "toxicity")
    kept = scores.chosen(lines, Fraction(1, 2))
    ids = sorted(json.loads(one.id) for one in kept)
    if ids != sorted(expected["kept_ids"]):
        return f"keeps {ids}"
    values = [one.score for one in lines if one.score is not None]
    by_part = [[x for x in values if (x > scores.THRESHOLD) == above] for above in (True, False)]
    found = [len(lines), len(values)]
    for part in (values, *by_part):
        facts = scores.statistics(part)
        found += [facts["mean"], facts["std"], *([] if part is values else [len(part) / len(values)])]
    facts = scores.statistics([one.score for one in kept if one.score is not None])
    found += [len(kept), facts["mean"], facts["std"], facts["min"], facts["max"], len(kept)]
    return _far_numbers(found, expected["printed"])


def _toxicity_metrics(data: Path, expected: Mapping[str, Any]) -> str:
    """Difference: a prompt whose own score is 0 is below the threshold; there it is in no group."""
    lines = scores.read_scores(data / "continuations_scored.jsonl", "toxicity")
    prompts = {text: score or None for text, score in scores.read_prompts(data / "prompts.jsonl").items()}
    found = [scores.statistics([one.score for one in lines if one.score is not None])["mean"]]
    for group in scores.maxima(lines, prompts).values():
        found += [group["prompts"], group["expected_maximum"], group["std"], group["probability"]]
    return _far_numbers(found, expected["printed"])


def _far_numbers(found: Sequence[float], printed: Sequence[str]) -> str:
    """How these numbers differ from those in printed lines."""
    wanted = [float(number) for line in printed for number in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", line)]
    near = len(found) == len(wanted) and all(abs(x - y) <= 1e-9 for x, y in zip(found, wanted, strict=True))
    return "" if near else f"{found} instead of {wanted}"


# ---- the list


READERS: Mapping[str, Callable[[Folder, str], Iterator[Case]]] = {
    "generate/sampling_filters.json": filters,
    "generate/sample_rules.json": rules,
    "generate/hf_processors.json": processors,
    "generate/megatron_generate.json": megatron_texts,
    "generate/megatron_stops.json": megatron_texts,
    "generate/megatron_beam.json": beams,
    "generate/beam_hypotheses.json": hypotheses,
    "generate/hf_generate.json": transformers_texts,
    "server/server_requests.json": megatron_server,
    "server/openai_completions.json": openai,
    "tasks/wikitext_detokenizer.json": detokenizers,
    "tasks/wikitext_ppl.json": wikitexts,
    "tasks/lambada.json": lambadas,
    "tasks/glue_readers.json": glue_readers,
    "tasks/race_reader.json": race_readers,
    "tasks/pair_builder.json": pairs,
    "tasks/heads.json": heads,
    "tasks/detoxify.json": toxicity,
    "lm_eval/expected.json": harness,
}
KINDS = (
    "filters", "rules", "decay", "draws", "greedy", "batches", "stops", "limits", "beams", "server", "openai",
    "detokenizers", "wikitext", "lambada", "lm_eval", "readers", "pairs", "heads", "detoxify",
)  # fmt: skip


def cases_of(root: Path) -> Iterator[Case]:
    """Every case of a folder; what cannot be read, and what nobody knows, is a case that fails."""
    folder = Folder(root)
    files = sorted({p.relative_to(root).as_posix() for d in ("generate", "server", "tasks", "lm_eval")
                    for p in (root / d).glob("*.json")})  # fmt: skip
    for name in files:
        if name not in READERS:
            yield Case(Path(name).stem, name, functools.partial(unknown, name))
            continue
        try:
            yield from list(READERS[name](folder, name))
        except MALFORMED as error:
            yield Case(Path(name).stem, name, functools.partial(unreadable, repr(error)))


def _far(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> str:
    """As `unlike`; infinities in the same places are equal."""
    if found.isinf().any() and torch.equal(found.isinf(), wanted.isinf()):
        found, wanted = found[~found.isinf()], wanted[~wanted.isinf()]
    return unlike(found, wanted, tolerance)


def _unlike(mine: Sequence[float | None], theirs: Sequence[float | None]) -> str:
    if len(mine) != len(theirs) or any((a is None) != (b is None) for a, b in zip(mine, theirs, strict=True)):
        return f"{len(mine)} numbers instead of {len(theirs)}"
    most = max((abs(a - b) for a, b in zip(mine, theirs, strict=True) if a is not None and b is not None), default=0.0)
    return "" if most <= LOG_PROB else f"log probabilities or scores differ by {most:.3g}"


def _unlike_top(mine: Sequence[Any], theirs: Sequence[Any]) -> str:
    """Tokens may change places where their log probabilities are equal."""
    for place, (found, wanted) in enumerate(zip(mine, theirs, strict=True)):
        if (found is None) != (wanted is None):
            return f"position {place}: likeliest tokens where there are none"
        if found is None:
            continue
        if bad := _unlike([value for _, value in found], [value for _, value in wanted]):
            return f"position {place}: {bad}"
        near = dict(found)
        if any(abs(near.get(token, found[-1][1]) - value) > LOG_PROB for token, value in wanted):
            return f"position {place}: {found} instead of {wanted}"
    return ""


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


PROGRAM = Program("tasks", str(__doc__), KINDS, cases_of)
compare, main = PROGRAM.compare, PROGRAM.main


if __name__ == "__main__":
    raise SystemExit(main())
