"""Talk with a trained model in this terminal.

The template is the tokenizer's own, or ChatML where it has its tokens; --chat-template plain works with any tokenizer.
Ctrl-C stops an answer, Ctrl-D leaves, /clear forgets the conversation. Lines of a file or a pipe are answered one after
the other. For a model that needs several GPUs: mtrain serve MODEL mesh.tp=2, then mtrain client.

Examples:
  mtrain chat Llama-3.2-1B-Instruct
  mtrain chat runs/first --chat-template plain --temperature 0.5 --system 'Be brief.'
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from mdata.errors import UsageError

from .console import Console
from .conversation import Stop, Turn, converse
from .mtrain_model import add_folder_arguments

_DEFAULTS = {"temperature": 0.8, "top_p": 0.95}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `mtrain chat --help`."""
    add_folder_arguments(parser)
    parser.add_argument(
        "--chat-template",
        metavar="NAME",
        help='"tokenizer", "chatml", "plain" or a file of Jinja (default: the tokenizer\'s own, else ChatML)',
    )
    add_talk_arguments(parser)


def add_talk_arguments(parser: argparse.ArgumentParser) -> None:
    """What a conversation begins with, and how tokens are chosen."""
    talk = parser.add_argument_group("the conversation")
    talk.add_argument("--system", default="", metavar="TEXT", help="what the conversation begins with")
    talk.add_argument("--max-tokens", type=int, metavar="N", help="of an answer (default: as the context allows)")
    talk.add_argument("--temperature", type=float, metavar="T", help="0: always the likeliest token (default: 0.8)")
    talk.add_argument("--top-p", type=float, metavar="P", help="nucleus sampling threshold (default: 0.95)")
    talk.add_argument("--top-k", type=int, metavar="K", help="choose among the K likeliest (default: all)")
    talk.add_argument("--seed", type=int, metavar="N", help="random seed (default: a new one for each answer)")


def talk_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of a request that the command line gives."""
    names = ("max_tokens", "temperature", "top_p", "top_k", "seed")
    return {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}


def main(arguments: argparse.Namespace, console: Console) -> int:
    """Load the model and converse."""
    from trainer.checkpoint.location import location_of
    from trainer.serve.errors import ApiError
    from trainer.serve.openai_api import chat_completion
    from trainer.tasks.engine import Engine
    from trainer.tasks.loaded_model import Model

    from .mtrain_serve import served_model

    with console.progress() as progress:
        model = Model.load(
            location_of(arguments.model),
            checkpoint=arguments.checkpoint,
            tokenizer=arguments.tokenizer,
            settings=arguments.set,
            dtype=arguments.dtype,
            progress=progress,
        )
    served = served_model(model, arguments.model, template=arguments.chat_template)
    if served.template is None:
        raise UsageError(
            f"a chat needs a template: {served.no_template}", fix="--chat-template plain, or mtrain generate"
        )
    options = {**_DEFAULTS, **model.recommended, **talk_options(arguments)}
    engine = Engine(model, max_batch=1)

    def answer(turns: Sequence[Turn], stop: Stop) -> Iterator[str]:
        messages = [{"role": role, "content": content} for role, content in turns]
        try:
            (row,) = chat_completion(served, {**options, "messages": messages}).rows
        except ApiError as error:
            raise UsageError(error.text, fix="/clear forgets the conversation") from error
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
    return 0
