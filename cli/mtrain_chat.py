"""Chat with a trained model in the terminal.

Uses the chat template of the run's conversations or of the tokenizer, or ChatML if the tokenizer has its tokens;
--chat-template plain works with any.
Ctrl-C stops an answer, Ctrl-D quits, /clear starts a new conversation. Input from a file or pipe is answered line by
line. For a model that needs several GPUs: mtrain serve MODEL mesh.tp=2, then mtrain client.

Examples:
  mtrain chat Llama-3.2-1B-Instruct
  mtrain chat runs/first --chat-template plain --temperature 0.5 --system 'Be brief.'
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from mdata.errors import UsageError

from .console import Console
from .conversation import Stop, Turn, converse
from .mtrain_model import add_chat_template, add_folder_arguments

if TYPE_CHECKING:
    from trainer.serve.errors import ApiError
    from trainer.serve.openai_api import Served

_DEFAULTS = {"temperature": 0.8, "top_p": 0.95}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `mtrain chat --help`."""
    add_folder_arguments(parser)
    add_chat_template(parser)
    config = "from generation_config.json, otherwise"
    add_talk_arguments(
        parser,
        max_tokens="up to the context",
        temperature=f"{config} {_DEFAULTS['temperature']}",
        top_p=f"{config} {_DEFAULTS['top_p']}",
        top_k=f"{config} all",
    )


def add_talk_arguments(parser: argparse.ArgumentParser, **defaults: str) -> None:
    """The system message and the sampling options.

    Args:
        defaults: what the help says of the default of an option.
    """
    talk = parser.add_argument_group("the conversation")
    talk.add_argument("--system", default="", metavar="TEXT", help="system message")
    talk.add_argument(
        "--max-tokens", type=int, metavar="N", help=f"tokens per answer (default: {defaults['max_tokens']})"
    )
    talk.add_argument("--temperature", type=float, metavar="T", help=f"0: greedy (default: {defaults['temperature']})")
    talk.add_argument(
        "--top-p", type=float, metavar="P", help=f"nucleus sampling threshold (default: {defaults['top_p']})"
    )
    talk.add_argument(
        "--top-k", type=int, metavar="K", help=f"sample from the K likeliest tokens (default: {defaults['top_k']})"
    )
    talk.add_argument("--seed", type=int, metavar="N", help="random seed (default: a new one for each answer)")


def talk_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The request fields given on the command line."""
    names = ("max_tokens", "temperature", "top_p", "top_k", "seed")
    return {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Load the model and converse."""
    from trainer.checkpoint.location import location_of
    from trainer.serve.errors import ApiError
    from trainer.serve.openai_api import chat_completion
    from trainer.tasks.engine import DecodeEngine
    from trainer.tasks.loaded_model import Model

    from .mtrain_serve import served_model

    with console.progress() as progress:
        model = Model.load(
            location_of(arguments.model),
            checkpoint=arguments.checkpoint,
            tokenizer=arguments.tokenizer,
            settings=arguments.set,
            dtype=arguments.dtype,
            weights=arguments.weights,
            progress=progress,
        )
    model.check_continues()
    served = served_model(model, arguments.model, template=arguments.chat_template)
    if served.template is None:
        raise UsageError(
            f"a chat needs a template: {served.no_template}", fix="give --chat-template plain, or use mtrain generate"
        )
    if arguments.system:
        _check_system(served, arguments.system, console)
    options = {**_DEFAULTS, **model.recommended, **talk_options(arguments)}
    engine = DecodeEngine(model, max_batch=1)

    def answer(turns: Sequence[Turn], stop: Stop) -> Iterator[str]:
        messages = [{"role": role, "content": content} for role, content in turns]
        try:
            (row,) = chat_completion(served, {**options, "messages": messages}).rows
        except ApiError as error:
            raise UsageError(error.text, fix=_advice(error, turns)) from error
        engine.add(row.request)
        try:
            while engine.busy and not row.finish_reason and not stop.asked:
                for token in engine.step():
                    piece = None if row.finish_reason else row.take(token)
                    if piece is not None and piece.text:
                        yield piece.text
        finally:
            engine.cancel(row.request.id)
            while engine.busy:
                engine.step()

    converse(console, answer, system=arguments.system)


def _advice(error: ApiError, turns: Sequence[Turn]) -> str | None:
    """How a conversation that is too long gets an answer; None for other errors."""
    if error.code != "context_length_exceeded":
        return None
    begun = any(role == "assistant" for role, _ in turns)
    return "/clear starts a new conversation" if begun else "a shorter line, or a smaller --max-tokens"


def _check_system(served: Served, system: str, console: Console) -> None:
    """Refuse a system message that the template refuses; warn if the template leaves it out."""
    from mdata.chat.loss_spans import TemplateRefused
    from mdata.chat.prompt import answer_prompt
    from mdata.tokenizers.base.tokenizer import TextRefused
    from trainer.serve.rows import tokenizer_of

    assert served.template is not None, "main has checked it"
    tokenizer, user = tokenizer_of(served.model), ("user", "a")
    try:
        ids = answer_prompt(served.template, tokenizer, [("system", system), user])
    except (TemplateRefused, TextRefused) as refused:
        raise UsageError(f"--system: {refused}", fix="leave it out, or say it in the first line") from refused
    with suppress(TemplateRefused):  # it needs a system message, so it writes it
        if ids == answer_prompt(served.template, tokenizer, [user]):
            console.note("the chat template leaves the system message out")
