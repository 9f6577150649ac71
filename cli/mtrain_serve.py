"""Serve a trained model over HTTP: OpenAI's API, Megatron-LM's PUT /api, and a web page to try it.

Clients of /v1/completions and /v1/chat/completions work unchanged, and so does Megatron-LM's text_generation_cli.py.
mesh.tp and mesh.pp split the model over ranks on this machine, which the command starts. Listens on localhost only
unless --host is given. SIGTERM or Ctrl-C finishes open requests first; a second one ends the server at once.

Examples:
  mtrain serve runs/first
  mtrain serve Llama-3.2-1B mesh.tp=2 --host 0.0.0.0 --port 8000 --api-key KEY
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from mdata.errors import UsageError
from mdata.util.commands import command_line
from trainer.parallel.placement import Placement

from .console import Console, Parser
from .mtrain_model import add_chat_template, add_folder_arguments

if TYPE_CHECKING:
    from trainer.serve.openai_api import Served
    from trainer.tasks.loaded_model import Model

KEY = "MTRAIN_API_KEY"


def add_arguments(parser: Parser) -> None:
    """See `mtrain serve --help`."""
    parser.axes = ("mesh.tp", "mesh.pp")
    add_folder_arguments(parser)
    add = parser.add_argument
    add("mesh", nargs="*", metavar="mesh.AXIS=N", help="mesh.tp and mesh.pp: ranks along each axis (default: 1)")
    add_chat_template(parser)
    add = parser.add_argument_group("the server").add_argument
    add("--host", default="127.0.0.1", metavar="HOST", help="address to listen on (default: 127.0.0.1)")
    add("--port", type=int, default=8000, metavar="N", help="0: any free port (default: 8000)")
    add("--api-key", metavar="KEY", help=f"key that clients must send (default: {KEY}, otherwise none)")
    add = parser.add_argument_group("limits").add_argument
    add("--max-batch", type=int, default=16, metavar="N", help="sequences per batch (default: 16)")
    add(
        "--cache-tokens",
        type=int,
        metavar="N",
        help="tokens in the KV cache, over all sequences (default: by free memory)",
    )
    add("--max-queue", type=int, default=1024, metavar="N", help="open sequences, then status 429 (default: 1024)")
    add(
        "--max-request-tokens",
        type=int,
        metavar="N",
        help="tokens of one request, over all its sequences (default: no limit)",
    )
    add(
        "--max-body",
        type=int,
        default=8 << 20,
        metavar="BYTES",
        help="request body size, then status 413 (default: 8 MiB)",
    )
    add("--strict", action="store_true", help="reject requests with unknown fields (default: ignore these)")


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Start the ranks and serve until stopped by a signal."""
    import asyncio

    from trainer.serve.processes import Ranks
    from trainer.serve.serving import Limits, bound_socket, serve

    mesh = _mesh(arguments.mesh)
    _check(arguments)
    served = _served(arguments, console)
    key = os.environ.get(KEY, "") if arguments.api_key is None else arguments.api_key
    limits = Limits(rows=arguments.max_queue, body_bytes=arguments.max_body, key=key)
    settings = {
        "model": arguments.model,
        "checkpoint": arguments.checkpoint,
        "tokenizer": arguments.tokenizer,
        "set": arguments.set,
        "dtype": arguments.dtype,
        "weights": arguments.weights,
        "max_batch": arguments.max_batch,
        "cache_tokens": arguments.cache_tokens,
        **mesh,
    }
    with (
        bound_socket(arguments.host, arguments.port) as listener,
        tempfile.TemporaryDirectory(prefix="mtrain-") as folder,
    ):
        ranks = Ranks(command_line("mtrain_rank"), Path(folder), settings, nproc=mesh["tp"] * mesh["pp"])
        try:
            asyncio.run(serve(served, ranks, listener, limits, tell=console.note))
        finally:
            ranks.end()


def _served(arguments: argparse.Namespace, console: Console) -> Served:
    from trainer.checkpoint.location import location_of
    from trainer.parallel.mesh import Mesh
    from trainer.parallel.world import join_world
    from trainer.tasks.loaded_model import Model

    with console.progress() as progress:
        model = Model.load(
            location_of(arguments.model),
            world=join_world(Mesh(1), placement=Placement(), device_type="cpu"),
            checkpoint=arguments.checkpoint,
            tokenizer=arguments.tokenizer,
            settings=arguments.set,
            forward=False,
            progress=progress,
        )
    if model.recommended:
        shown = ", ".join(f"{name} {value}" for name, value in model.recommended.items())
        console.note(f"request defaults from the model's generation_config.json: {shown}")
    return dataclasses.replace(
        served_model(model, arguments.model, template=arguments.chat_template),
        strict=arguments.strict,
        most_tokens=arguments.max_request_tokens,
        created=int(time.time()),
    )


def served_model(model: Model, name: str, *, template: str | None) -> Served:
    """A model with its template.

    Args:
        name: as the user gave it. template: see --chat-template; None: no template is no error.

    Raises:
        UsageError: the model has no tokenizer, or the given template cannot be used.
    """
    from mdata.chat.prompt import answer_ends
    from mdata.chat.templates import choose_template
    from trainer.serve.openai_api import Served
    from trainer.tasks.loaded_model import template_of_run

    if model.tokenizer is None:
        raise UsageError(f"{name} has no tokenizer", fix="give a folder that has one: --tokenizer FOLDER")
    recorded = template_of_run(model.run_folder) if model.run_folder is not None and template is None else None
    today = datetime.date.today().isoformat()
    try:
        if recorded is None:
            chosen = choose_template(template, model.tokenizer, date=today)
        else:
            chosen = recorded.of(model.tokenizer, date=today)
    except UsageError as error:
        if template is not None:
            raise
        return Served(model=model, no_template=str(error).splitlines()[0])
    return Served(model=model, template=chosen, turn_ends=answer_ends(chosen, model.tokenizer))


def _mesh(words: list[str]) -> dict[str, int]:
    mesh = {"tp": 1, "pp": 1}
    for word in words:
        name, _, value = word.partition("=")
        axis = name.removeprefix("mesh.")
        if not name.startswith("mesh.") or axis not in mesh or not value.isdecimal() or int(value) < 1:
            raise UsageError(f"cannot parse {word}", expected="mesh.tp=N or mesh.pp=N, N >= 1")
        mesh[axis] = int(value)
    return mesh


def _check(arguments: argparse.Namespace) -> None:
    counts = {name: getattr(arguments, name.replace("-", "_")) for name in ("max-batch", "max-queue", "max-body")}
    optional = {"max-request-tokens": arguments.max_request_tokens, "cache-tokens": arguments.cache_tokens}
    counts |= {name: value for name, value in optional.items() if value is not None}
    if problems := [f"--{name} {value} is below 1" for name, value in counts.items() if value < 1]:
        raise UsageError("cannot serve: " + "; ".join(problems))
    if not 0 <= arguments.port < 2**16:
        raise UsageError(f"--port {arguments.port} is out of range", expected="0 to 65535")
    if arguments.api_key == "" or not (arguments.api_key or "").isascii():
        raise UsageError("--api-key is empty or not ASCII", fix="use ASCII letters and digits, or leave it out")
