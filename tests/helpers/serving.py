"""A server of a model in this process, without processes for its ranks: HTTP in one thread, the engine in another."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import uvicorn

from trainer.serve.app import Server
from trainer.serve.openai_api import Served
from trainer.serve.rank import EventPipes, Ready, serve_rank
from trainer.serve.service import Service
from trainer.serve.serving import bound_socket
from trainer.tasks.engine import DecodeEngine


class Reply(NamedTuple):
    """The answer to a request."""

    status: int
    body: Any
    headers: Any


class Running(NamedTuple):
    """A server; `server` and `engine` belong to its threads."""

    url: str
    server: Server
    engine: DecodeEngine

    def ask(
        self, path: str, body: Any = None, *, method: str | None = None, headers: Any = None, timeout_s: float = 60
    ) -> Reply:
        """The reply to a request with a JSON body, or with bytes as they are."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        given = {"content-type": "application/json"} if headers is None else headers
        request = urllib.request.Request(self.url + path, data, given, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as reply:
                return Reply(reply.status, _decoded(reply.read()), reply.headers)
        except urllib.error.HTTPError as error:
            with error:
                return Reply(error.code, _decoded(error.read()), error.headers)

    def events(self, path: str, body: Any) -> list[Any]:
        """The events of a stream; "[DONE]" stays a string."""
        text = self.ask(path, {**body, "stream": True}).body
        assert isinstance(text, str), text
        return [_decoded(line.removeprefix("data: ").encode()) for line in text.split("\n\n") if line]


def _decoded(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode()


@contextmanager
def running(
    served: Served, *, engine: DecodeEngine | None = None, rows: int = 64, model: Any = None, **limits: Any
) -> Iterator[Running]:
    """A server that runs while the block does.

    Args:
        model: with weights; None: that of `served`. limits: see `Server`.
    """
    model = model or served.model
    engine = engine or DecodeEngine(model)
    here, there = multiprocessing.Pipe()
    started, holder = threading.Event(), dict[str, Any]()

    def answer() -> None:
        link = EventPipes(server=there)
        link.reply(Ready(engine.capacity))
        serve_rank(engine, model, link)

    async def listen() -> None:
        service = Service(here, most_rows=rows)
        server = Server(served, service, **limits)
        config = uvicorn.Config(server.app(), log_config=None, access_log=False, lifespan="off")
        http = uvicorn.Server(config)
        holder.update(server=server, http=http, service=service)
        await service.ready.wait()
        started.set()
        await http.serve(sockets=[holder["socket"]])
        service.close()

    with bound_socket("127.0.0.1", 0) as listener:
        holder["socket"] = listener
        threads = [threading.Thread(target=answer), threading.Thread(target=asyncio.run, args=(listen(),))]
        for thread in threads:
            thread.start()
        assert started.wait(30), "the server does not start"
        try:
            yield Running(f"http://127.0.0.1:{listener.getsockname()[1]}", holder["server"], engine)
        finally:
            holder["http"].should_exit = True
            for thread in threads:
                thread.join(30)
            assert not any(thread.is_alive() for thread in threads), "the server does not end"
