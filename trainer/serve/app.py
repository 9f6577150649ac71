"""The HTTP side of a server: routes, limits, API keys, errors in the form of each API, streams, metrics.

What is unusual: when a client disconnects, streaming or waiting, its rows are cancelled; a body needs the Content-Type
application/json, so that web pages of other sites cannot post to a server on this machine without a CORS preflight.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from trainer.serve import megatron_api, openai_api
from trainer.serve.errors import ApiError
from trainer.serve.fields import parsed_body
from trainer.serve.free_lists import FreeLists
from trainer.serve.openai_api import Completion, Served
from trainer.serve.rows import RowDelta, beams_of, pieces
from trainer.serve.service import OpenRequest, Service

T = TypeVar("T")
PAGE = Path(__file__).parent / "page.html"
OPEN_PATHS = ("/", "/health")  # without a key
LONG_BODY = 1 << 16  # bytes
CLOSED = 499  # the client disconnected; nobody reads this status, but it is counted
# The page runs only its own inline script and style, and loads nothing.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"


@dataclass
class Server:
    """The state that handlers share.

    Args:
        key: the API key that clients must send; "": none. most_bytes: limit on a body.
        hosts: accepted names in the Host header, against DNS rebinding by a web page; empty: any.
    """

    served: Served
    service: Service
    key: str = ""
    hosts: frozenset[str] = frozenset()
    most_bytes: int = 8 << 20
    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)
    first_tokens: int = 0
    first_token_s: float = 0.0
    _parsing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _free_lists: FreeLists = field(default_factory=FreeLists)

    def app(self) -> Starlette:
        """The application."""
        routes = [
            Route("/", self._page, methods=["GET"]),
            Route("/health", self._health, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/models/{name:path}", self._model, methods=["GET"]),
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/api", self._megatron, methods=["PUT"]),
        ]
        handlers: Mapping[Any, Any] = {
            ApiError: self._refused,
            HTTPException: self._http_error,
            ClientDisconnect: lambda request, error: Response(status_code=CLOSED),
        }
        app = Starlette(routes=routes, exception_handlers=handlers)
        app.add_middleware(_Guard, server=self)
        return app

    def counted(self, path: str, status: int, seconds: float) -> None:
        """Count a request."""
        self.requests[path, status] += 1
        self.seconds[path] = self.seconds.get(path, 0.0) + seconds
        self._free_lists.count(1)

    # ---- small answers

    async def _page(self, request: Request) -> Response:
        headers = {"content-security-policy": POLICY, "x-content-type-options": "nosniff", "cache-control": "no-cache"}
        return Response(PAGE.read_bytes(), media_type="text/html", headers=headers)

    async def _health(self, request: Request) -> Response:
        service = self.service
        if service.failure:
            state = "failed"
        else:
            state = "stopping" if service.stopping.is_set() else "ready" if service.ready.is_set() else "loading"
        facts = {"status": state, "model": self.served.model.name, "step": self.served.model.step}
        return _json(facts, status=200 if state == "ready" else 503)

    async def _models(self, request: Request) -> Response:
        return _json(openai_api.models_of(self.served))

    async def _model(self, request: Request) -> Response:
        (model,) = openai_api.models_of(self.served)["data"]
        if request.path_params["name"] != model["id"]:
            raise ApiError(404, f"unknown model; this server has {model['id']}", code="model_not_found", param="model")
        return _json(model)

    async def _metrics(self, request: Request) -> Response:
        return Response("\n".join(self._metric_lines()) + "\n", media_type="text/plain; version=0.0.4")

    def _metric_lines(self) -> list[str]:
        service, lines = self.service, list[str]()

        def metric(name: str, kind: str, help_text: str, values: Mapping[str, float]) -> None:
            lines.append(f"# HELP mtrain_{name} {help_text}")
            lines.append(f"# TYPE mtrain_{name} {kind}")
            lines.extend(f"mtrain_{name}{labels} {value:.15g}" for labels, value in values.items())

        by_status = {f'{{path="{path}",status="{status}"}}': float(n) for (path, status), n in self.requests.items()}
        metric("requests_total", "counter", "Requests answered.", by_status)
        by_path = {f'{{path="{path}"}}': seconds for path, seconds in self.seconds.items()}
        metric("request_seconds_total", "counter", "Time spent on these requests.", by_path)
        for name, text in (
            ("prompt_tokens", "Tokens of prompts."),
            ("tokens", "Tokens generated."),
            ("rows", "Sequences requested."),
            ("rows_cancelled", "Sequences ended by a stop string or by their client."),
        ):
            metric(f"{name}_total", "counter", text, {"": service.totals[name]})
        metric("first_token_seconds_sum", "counter", "Total time to first token.", {"": self.first_token_s})
        metric("first_token_seconds_count", "counter", "Requests that got a first token.", {"": self.first_tokens})
        metric(
            "rows_open", "gauge", "Open sequences, with those that wait or are not yet read.", {"": service.open_rows}
        )
        metric("rows_allowed", "gauge", "Limit on open sequences (--max-queue).", {"": service.most_rows})
        metric("ready", "gauge", "1 once the model is loaded.", {"": service.ready.is_set() and not service.failure})
        for name, value in service.load.items():
            metric(f"engine_{name}", "gauge", f"The engine's {name.replace('_', ' ')}.", {"": value})
        return lines

    # ---- texts

    async def _completions(self, request: Request) -> Response:
        return await self._answered(request, openai_api.completion)

    async def _chat(self, request: Request) -> Response:
        return await self._answered(request, openai_api.chat_completion)

    async def _answered(self, request: Request, parse: Callable[[Served, Mapping[str, Any]], Completion]) -> Response:
        self.service.check()
        served = replace(self.served, capacity=self.service.capacity)
        completion = await self._off_the_loop(lambda body: parse(served, parsed_body(body)), await self._body(request))
        headers = _ignored(completion.options.ignored)
        run = self.service.begin([row.request for row in completion.rows])
        if completion.options.stream:
            return _EventStream(self._events(completion, run), self.service, run, headers)
        answer = await _while_connected(request, self._gathered(run, completion.rows))
        return _json(openai_api.answer_of(completion, answer), headers=headers)

    async def _gathered(self, run: OpenRequest, rows: Sequence[Any]) -> list[list[RowDelta]]:
        """All pieces of each row."""
        of_rows: list[list[RowDelta]] = [[] for _ in rows]
        began_s = time.monotonic()
        async with contextlib.aclosing(pieces(self.service, run, rows)) as stream:
            async for number, piece in stream:
                if not any(of_rows):
                    self._first_token(began_s)
                of_rows[number].append(piece)
        return of_rows

    async def _events(self, completion: Completion, run: OpenRequest) -> AsyncIterator[bytes]:
        began_s, first = time.monotonic(), True
        for chunk in openai_api.first_chunks(completion):
            yield _event(chunk)
        try:
            async with contextlib.aclosing(pieces(self.service, run, completion.rows)) as stream:
                async for number, piece in stream:
                    if first:
                        self._first_token(began_s)
                        first = False
                    if piece.text or completion.top is not None or completion.rows[number].finish_reason:
                        yield _event(openai_api.chunk_of(completion, number, piece))
        except ApiError as error:
            yield _event(_openai_error(error))
            return
        if (last := openai_api.last_chunk(completion)) is not None:
            yield _event(last)
        yield b"data: [DONE]\n\n"

    def _first_token(self, began_s: float) -> None:
        self.first_tokens += 1
        self.first_token_s += time.monotonic() - began_s

    async def _megatron(self, request: Request) -> Response:
        self.service.check()
        served = self.served
        most, strict = served.most_tokens, served.strict
        job = await self._off_the_loop(
            lambda body: megatron_api.job_of(served.model, _megatron_body(body), most_tokens=most, strict=strict),
            await self._body(request),
        )
        headers = _ignored(job.unknown)
        if job.search is not None:
            beams = await _while_connected(request, beams_of(self.service, self.service.begin([job.search])))
            return _json(megatron_api.beam_answer(served.model, job, beams), headers=headers)
        run = self.service.begin([row.request for row in job.rows])
        answer = await _while_connected(request, self._gathered(run, job.rows))
        return _json(megatron_api.answer_of(served.model, job, answer), headers=headers)

    async def _off_the_loop(self, parse: Callable[[bytes], T], body: bytes) -> T:
        """Parse a body; a long one is parsed in a thread, so that other answers continue meanwhile."""
        if len(body) < LONG_BODY:
            return parse(body)
        async with self._parsing:  # templates are run one at a time
            return await asyncio.to_thread(parse, body)

    async def _body(self, request: Request) -> bytes:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and request.url.path == "/api":
            raise ApiError(415, megatron_api.NO_JSON_TYPE)
        if kind != "application/json":
            raise ApiError(415, f"the Content-Type is {kind or 'missing'}, expected application/json")
        said = request.headers.get("content-length", "")
        too_long = ApiError(413, f"the body is longer than {self.most_bytes:,} bytes (--max-body)")
        if said.isdecimal() and int(said[:20]) > self.most_bytes:
            raise too_long

        async def received() -> bytes:
            parts, size = list[bytes](), 0
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                if size > self.most_bytes:
                    raise too_long
            return b"".join(parts)

        # A client that sends only a part of its request must not keep a server from stopping.
        body = await _unless(self.service.stopping.wait(), received())
        if body is None:
            self.service.check()
        assert body is not None, "check refuses while the server stops"
        return body

    # ---- refusals

    async def _refused(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError), "registered for this type"
        headers = {429: {"retry-after": "1"}, 503: {"retry-after": "5"}, 401: {"www-authenticate": "Bearer"}}
        return self.refusal(request.url.path, error, headers.get(error.status, {}))

    async def _http_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), "registered for this type"
        text = {404: f"no such path: {request.url.path[:200]}", 405: "the method is not allowed here"}
        if request.url.path == "/api" and error.status_code == 405:
            allowed = {"allow": "OPTIONS, PUT, GET, HEAD"}
            if request.method in ("GET", "HEAD"):
                return self.refusal("/api", ApiError(404, "this is for PUT"), {})
            if request.method == "OPTIONS":
                return Response(headers=allowed)
            return self.refusal("/api", ApiError(405, megatron_api.WRONG_METHOD), allowed)
        refused = ApiError(error.status_code, text.get(error.status_code, str(error.detail)))
        return self.refusal(request.url.path, refused, dict(error.headers or {}))

    def refusal(self, path: str, error: ApiError, headers: Mapping[str, str]) -> Response:
        """An error in the format of the API to which the path belongs."""
        if path == "/api":
            detail = {} if error.detail is None else {"detail": error.detail}
            return _json({"message": error.text, **detail}, status=error.status, headers=headers)
        return _json(_openai_error(error), status=error.status, headers=headers)


class _Guard:
    """Checks the key before anything else, and counts what is answered."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], *, server: Server) -> None:
        self._app, self._server = app, server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s, path, status = time.monotonic(), scope["path"], CLOSED

        async def counting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        route = path if path in (*OPEN_PATHS, "/metrics", "/api") or path.startswith("/v1/") else "other"
        route = "/v1/models" if route.startswith("/v1/models") else route
        try:
            if not self._is_for_us(scope):
                error = ApiError(
                    403, "this server accepts only requests addressed to localhost (set --api-key to allow others)"
                )
                await self._server.refusal(path, error, {})(scope, receive, counting)
            elif path in OPEN_PATHS or self._is_allowed(scope):
                await self._app(scope, receive, counting)
            else:
                error = ApiError(
                    401,
                    "missing or wrong API key, expected the header Authorization: Bearer KEY",
                    code="invalid_api_key",
                )
                response = self._server.refusal(path, error, {"www-authenticate": "Bearer"})
                await response(scope, receive, counting)
        finally:
            if route.startswith("/v1/") and route not in ("/v1/completions", "/v1/chat/completions", "/v1/models"):
                route = "other"
            self._server.counted(route, status, time.monotonic() - began_s)

    def _is_for_us(self, scope: Scope) -> bool:
        if not self._server.hosts:
            return True
        host = next((value for name, value in scope["headers"] if name == b"host"), b"").decode("latin-1")
        return re.sub(r":\d*$", "", host).strip("[]").lower() in self._server.hosts

    def _is_allowed(self, scope: Scope) -> bool:
        if not self._server.key:
            return True
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._server.key.encode())


class _EventStream(StreamingResponse):
    """Server-sent events; the rows are cancelled even if the client disconnects before the first one."""

    def __init__(
        self, events: AsyncIterator[bytes], service: Service, run: OpenRequest, headers: Mapping[str, str]
    ) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache", **headers})
        self._service, self._run = service, run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._service.leave(self._run)


async def _while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of work that is cancelled when the client disconnects.

    Raises:
        ClientDisconnect: it did.
    """
    result = await _unless(_gone(request), work)
    if result is None:
        raise ClientDisconnect
    return result


async def _unless(end: Coroutine[Any, Any, Any], work: Coroutine[Any, Any, T]) -> T | None:
    """The result of work, which is not None; None if `end` came first and the work was cancelled."""
    task, ended = asyncio.ensure_future(work), asyncio.ensure_future(end)
    try:
        await asyncio.wait({task, ended}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for future in (task, ended):
            future.cancel()
        await asyncio.gather(task, ended, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _megatron_body(body: bytes) -> dict[str, Any]:
    """As `parsed_body`, with the text of Megatron's server."""
    try:
        return parsed_body(body)
    except ApiError as error:
        raise ApiError(400, megatron_api.NO_JSON, detail=error.text) from error


def _json(value: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(_dumped(value), status_code=status, media_type="application/json", headers=dict(headers or {}))


def _event(value: object) -> bytes:
    return b"data: " + _dumped(value) + b"\n\n"


def _dumped(value: object) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)


def _openai_error(error: ApiError) -> dict[str, Any]:
    return {"error": {"message": error.text, "type": error.kind, "param": error.param, "code": error.code}}


def _ignored(names: Sequence[str]) -> dict[str, str]:
    """A header that lists the ignored fields."""
    shown = ", ".join(name for name in names if name.isascii() and name.isprintable())[:200]
    return {"x-ignored-fields": shown} if shown else {}
