"""Continue prompts with a trained model, or fill their masks with an encoder (BERT).

The same command gives the same text, in any batch and on any number of ranks: --nproc N, or those of torchrun or Slurm.
Without a prompt the text begins like a document; --num-samples N writes N such texts. With --output, a line of JSON for
each text is appended to a file; the same command, given again after an interruption, continues where it stopped.

Examples:
  mtrain generate runs/first --prompt 'Once upon a time' --max-tokens 100
  mtrain generate Llama-3.2-1B --input prompts.jsonl --output texts.jsonl --temperature 0
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdata.errors import UsageError, counted
from mdata.progress import SILENT

from .console import Console
from .mtrain_model import add_model_arguments, opened, ran_on_ranks

if TYPE_CHECKING:
    from trainer.tasks.loaded_model import Model
    from trainer.tasks.sampling import Sampling

_DEFAULTS = {"temperature": 0.8, "top_p": 0.95}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `mtrain generate --help`."""
    add_model_arguments(parser, dp=False)
    add = parser.add_argument_group("texts").add_argument
    add("--prompt", action="append", metavar="TEXT", help="text to continue; may be repeated")
    add("--input", type=Path, metavar="FILE", help='JSON Lines of {"prompt": TEXT or [IDS]}')
    add("--strict", action="store_true", help="refuse other keys in --input (default: ignore them)")
    add("--output", type=Path, metavar="FILE", help="append a line of JSON for each text")
    add("--num-samples", type=int, metavar="N", help="N texts of each prompt (default: 1)")
    add("--add-bos", action="store_true", help="begin a prompt with the begin-of-text token")
    add("--max-tokens", type=int, metavar="N", help="maximum number of new tokens (default: 64, or what fits)")
    add("--min-tokens", type=int, default=0, metavar="N", help="minimum number of new tokens (default: 0)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this string; may be repeated")
    add("--ignore-eod", action="store_true", help="continue after an end-of-document token")
    add("--sliding", action="store_true", help="let the oldest tokens fall out of a full context")
    add("--log-probs", type=int, metavar="N", help="report log probabilities and N likeliest tokens")
    add("--prompt-log-probs", action="store_true", help="with --log-probs: for the prompt, too")
    add("--batch-size", type=int, default=8, metavar="N", help="texts computed together (default: 8)")
    add = parser.add_argument_group("choosing tokens").add_argument
    add("--seed", type=int, default=1234, metavar="N", help="random seed (default: 1234)")
    add("--greedy", action="store_true", help="always take the most likely token")
    add("--temperature", type=float, metavar="T", help="softmax temperature; 0: greedy (default: 0.8)")
    add(
        "--top-k", type=int, metavar="K", help="choose among the K likeliest (default: all); masks: show K (default: 5)"
    )
    add("--top-p", type=float, metavar="P", help="nucleus sampling threshold (default: 0.95)")
    add(
        "--min-p", type=float, metavar="P", help="minimum probability, as a share of the likeliest token's (default: 0)"
    )
    add(
        "--top-p-decay",
        type=float,
        default=0.0,
        metavar="X",
        help="multiply top-p by this after each token (default: none)",
    )
    add("--top-p-bound", type=float, default=0.0, metavar="P", help="lower bound of the decaying top-p (default: 0)")
    add(
        "--repetition-penalty",
        type=float,
        metavar="X",
        help="penalize tokens of the prompt and the text (default: none)",
    )
    add(
        "--presence-penalty",
        type=float,
        default=0.0,
        metavar="X",
        help="penalize tokens that occur in the text (default: 0)",
    )
    add(
        "--frequency-penalty",
        type=float,
        default=0.0,
        metavar="X",
        help="penalize tokens for each occurrence in the text (default: 0)",
    )
    add("--logit-bias", action="append", default=[], metavar="ID=X", help="add X to a token's logit; may be repeated")
    add = parser.add_argument_group("beam search").add_argument
    add("--beam-width", type=int, metavar="K", help="search over K rows; nothing is drawn")
    add("--length-penalty", type=float, metavar="X", help="exponent of the length (default: 1)")
    add("--num-results", type=int, metavar="N", help="best texts of each prompt (default: 1)")


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Generate, and print each prompt with its continuation."""
    from trainer.tasks.generate import check_prompts, read_prompts

    _check(arguments)
    rules = _rules(arguments, {})
    if problems := rules.problems():
        raise UsageError("cannot generate: " + "; ".join(problems))
    by_line = {} if arguments.input is None else read_prompts(arguments.input, strict=arguments.strict)
    prompts: list[str | list[int]] = [*(arguments.prompt or []), *by_line.values()]
    if ran_on_ranks(arguments, console, command="generate"):
        return
    with opened(arguments, console, command="generate") as model:
        model.check_tokens()
        check_prompts(model, by_line, arguments.input)
        if model.fills_masks:
            _fill(model, prompts, arguments=arguments, console=console)
            return
        if model.start is not None and not prompts:
            raise UsageError(
                "this model needs a prompt to answer",
                expected="--prompt or --input",
                fix=f"mtrain generate {arguments.model} --prompt 'The capital of <extra_id_0> is Paris.'",
            )
        rules = _rules(arguments, model.recommended)
        recommended = {key: value for key, value in model.recommended.items() if getattr(rules, key) == value}
        if recommended and model.world.is_main:
            values = ", ".join(f"{key} {value}" for key, value in recommended.items())
            console.note(f"from the model's generation_config.json: {values}")
        _generate(model, prompts or [""], rules, arguments=arguments, console=console)


def _generate(
    model: Model,
    prompts: list[str | list[int]],
    rules: Sampling,
    *,
    arguments: argparse.Namespace,
    console: Console,
) -> None:
    from trainer.tasks.generate import (
        Generated,
        answer_facts,
        continue_rows,
        sample_requests,
        write_generated,
        write_samples,
    )

    ids = [model.encode(prompt, add_bos=arguments.add_bos) if isinstance(prompt, str) else prompt for prompt in prompts]
    shown = [prompt if isinstance(prompt, str) else _text(model, prompt) for prompt in prompts]
    if arguments.beam_width is not None:
        _search(model, ids, shown, rules, arguments=arguments, console=console)
        return
    samples = 1 if arguments.num_samples is None else arguments.num_samples
    requests = sample_requests(
        ids,
        rules,
        samples=samples,
        log_probs=arguments.log_probs,
        prompt_log_probs=arguments.prompt_log_probs,
    )
    texts = [text for text in shown for _ in range(samples)]
    with console.progress() as progress:
        listener = progress if model.world.is_main else SILENT
        if arguments.output is not None:
            size = {"batch_size": arguments.batch_size, "sliding": arguments.sliding}
            done = write_samples(model, requests, arguments.output, texts=texts, progress=listener, **size)
            answers = []
        else:
            answers = continue_rows(model, requests, sliding=arguments.sliding, batch_size=arguments.batch_size)
    if not model.world.is_main:
        return
    if arguments.output is not None:
        text = f"{counted(len(requests), 'text')} in {arguments.output}" + (
            f", {done:,} of them from an earlier run" if done else ""
        )
        console.result(text, {"output": str(arguments.output), "texts": len(requests), "from_before": done})
        return
    made = [
        Generated(prompt, answer.text, model.step, answer.finish_reason)
        for prompt, answer in zip(texts, answers, strict=True)
    ]
    write_generated(model, made)
    facts = [{**dataclasses.asdict(text), **answer_facts(answer)} for text, answer in zip(made, answers, strict=True)]
    console.result("\n\n".join(f"{text.prompt}{_between(model)}{text.text}" for text in made), {"texts": facts})


def _between(model: Model) -> str:
    """What separates a prompt from its text: nothing where the text continues it."""
    return "" if model.start is None else "\n"


# Options that a model of masks has no use for; none is set by default.
_OF_NEW_TOKENS = (
    "output", "beam_width", "num_samples", "add_bos", "max_tokens", "min_tokens", "stop", "ignore_eod", "sliding",
    "log_probs", "prompt_log_probs", "greedy", "temperature", "top_p", "min_p", "top_p_decay", "top_p_bound",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias",
)  # fmt: skip


def _fill(model: Model, prompts: list[str | list[int]], *, arguments: argparse.Namespace, console: Console) -> None:
    from trainer.tasks.fill_mask import fill_masks

    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    ignored = [
        f"--{name.replace('_', '-')}" for name in _OF_NEW_TOKENS if getattr(arguments, name) not in (None, 0, [])
    ]
    if ignored or len(texts) < len(prompts) or not texts:
        raise UsageError(
            "this model fills masks in a prompt",
            found=f"{' and '.join(ignored)}, which it would ignore" if ignored else "",
            expected="--prompt or --input with texts, and --top-k if more or fewer tokens are to be shown",
            fix=f"mtrain generate {arguments.model} --prompt 'The capital of [MASK] is Paris.'",
        )
    filled = fill_masks(model, texts, top=arguments.top_k or 5)
    if model.world.is_main:
        console.result("\n\n".join(text.lines() for text in filled), {"texts": [text.facts() for text in filled]})


def _search(
    model: Model,
    ids: list[list[int]],
    shown: list[str],
    rules: Sampling,
    *,
    arguments: argparse.Namespace,
    console: Console,
) -> None:
    from trainer.tasks.generate import DEFAULT_TOKENS, search_beams
    from trainer.tasks.text_stream import decoded_after

    facts, parts = [], []
    for prompt, text in zip(ids, shown, strict=True):
        before = prompt if model.start is None else []
        beams = search_beams(
            model,
            prompt,
            width=arguments.beam_width,
            max_tokens=arguments.max_tokens or min(DEFAULT_TOKENS, max(1, model.context - max(1, len(before)))),
            length_penalty=1.0 if arguments.length_penalty is None else arguments.length_penalty,
            count=1 if arguments.num_results is None else arguments.num_results,
            rules=rules,
        )
        for beam in beams:
            new = decoded_after(model.tokenizer, before, beam.tokens) if model.tokenizer else str(list(beam.tokens))
            parts.append(f"{text}{_between(model)}{new}")
            facts.append({"prompt": text, "text": new, "tokens": list(beam.tokens), "score": beam.score})
    if model.world.is_main:
        console.result("\n\n".join(parts), {"texts": facts})


def _text(model: Model, ids: list[int]) -> str:
    model.check_ids(ids)
    return model.tokenizer.decode(ids) if model.tokenizer is not None else " ".join(map(str, ids))


def _rules(arguments: argparse.Namespace, recommended: Any) -> Sampling:
    """The rules of the command line, and what it leaves open as the model recommends it."""
    from trainer.tasks.sampling import Sampling

    names = {field.name for field in dataclasses.fields(Sampling)} & set(vars(arguments))
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    given |= {"stop": tuple(arguments.stop), "logit_bias": _bias(arguments.logit_bias)}
    return Sampling(**{**_DEFAULTS, **recommended, **given})


def _bias(entries: list[str]) -> dict[int, float]:
    biases = {}
    for entry in entries:
        token, _, value = entry.partition("=")
        try:
            biases[int(token)] = float(value)
        except ValueError as error:
            raise UsageError(f"--logit-bias {entry} is not valid", expected="ID=X, such as 198=-5") from error
    return biases


def _check(arguments: argparse.Namespace) -> None:
    """Refuse options that do not go together."""
    wrong = [
        (arguments.batch_size < 1, f"--batch-size {arguments.batch_size} is below 1"),
        (
            arguments.num_samples is not None and arguments.num_samples < 1,
            f"--num-samples {arguments.num_samples} is below 1",
        ),
        (arguments.log_probs is not None and not 0 <= arguments.log_probs <= 1000, "--log-probs is not in 0 to 1000"),
        (arguments.prompt_log_probs and arguments.log_probs is None, "--prompt-log-probs needs --log-probs"),
        (arguments.strict and arguments.input is None, "--strict is for the keys of --input"),
        (
            arguments.beam_width is None and (arguments.num_results, arguments.length_penalty) != (None, None),
            "--num-results and --length-penalty need --beam-width; --num-samples draws several texts",
        ),
        (
            arguments.beam_width is not None and bool(arguments.output or arguments.num_samples or arguments.stop),
            "--beam-width cannot be combined with --output, --num-samples (--num-results) or --stop",
        ),
    ]
    if problems := [text for bad, text in wrong if bad]:
        raise UsageError("cannot generate: " + "; ".join(problems), fix="mtrain generate --help")
