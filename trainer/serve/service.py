"""The ranks as the server's process sees them: requests go in and tokens come out, in one event loop.

Two threads read and write the pipe to rank 0, so that a full pipe never stops the loop. A run is one or more rows whose
tokens come in one stream; leaving a run cancels its rows, which frees their places. Once a rank has ended, every open
run raises, and no new one begins.
"""

from __future__ import annotations

import asyncio
import os
import queue
import socket
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from trainer.serve.errors import ApiError
from trainer.serve.rank import Cancel, Event, Ready, RefusedRequest, Reply, Search
from trainer.tasks.engine import Request, Token


def hang_up(connection: Connection) -> None:
    """Make both ends read an end of file; closing would not wake the reading thread."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


class OpenRequest:
    """The rows of one request of a client, while they are open; iterate over their replies."""

    def __init__(self, service: Service, requests: Sequence[Request | Search]) -> None:
        self.open_ids = {request.id for request in requests}
        self.replies: asyncio.Queue[Reply | ApiError] = asyncio.Queue()
        self._service = service

    def end(self, id: str) -> None:
        """End a row before its last token."""
        if id in self.open_ids:
            self.open_ids.discard(id)
            self._service.leave(self, [id])

    async def __aiter__(self) -> AsyncIterator[Reply]:
        """Replies of all rows, until each of them has ended.

        Raises:
            ApiError: the ranks have ended, or rejected a row.
        """
        while self.open_ids:
            reply = await self.replies.get()
            if isinstance(reply, ApiError):
                raise reply
            if reply.id not in self.open_ids:
                continue  # it came after `end`
            if isinstance(reply, RefusedRequest):
                raise ApiError(400, reply.text)
            if reply.finish is not None:
                self.open_ids.discard(reply.id)
                self._service.forget(reply.id)
            yield reply


class Service:
    """See the module; to be made inside the event loop.

    Args:
        connection: to rank 0. most_rows: limit on open rows, including those that wait.

    Attributes:
        ready: the model is loaded. stopping: no new run may begin. failure: why the ranks ended.
        load: the engine's last numbers. totals: counters for /metrics.
        capacity, cache_tokens, cache_bytes: see `DecodeEngine`.
    """

    def __init__(self, connection: Connection, *, most_rows: int) -> None:
        self.ready, self.stopping, self.failure = asyncio.Event(), asyncio.Event(), ""
        self.load: Mapping[str, float] = {}
        self.totals = {"prompt_tokens": 0, "tokens": 0, "rows": 0, "rows_cancelled": 0}
        self.most_rows, self.capacity, self.cache_tokens, self.cache_bytes = most_rows, 0, 0, 0
        self._connection, self._loop = connection, asyncio.get_running_loop()
        self._runs: dict[str, OpenRequest] = {}
        self._running: set[str] = set()
        self._outgoing: queue.SimpleQueue[list[Event] | None] = queue.SimpleQueue()
        for target in (self._read, self._write):
            threading.Thread(target=target, daemon=True).start()

    @property
    def open_rows(self) -> int:
        """Rows whose tokens have not all been read, so that clients that do not read cannot fill the memory."""
        return len(self._runs)

    @property
    def running_rows(self) -> int:
        """Rows that the ranks have not ended."""
        return len(self._running)

    def begin(self, requests: Sequence[Request | Search]) -> OpenRequest:
        """Send rows to the ranks. The caller must call `leave` at the end, also after an error.

        Raises:
            ApiError: 429: too many rows are open; 503: the server is loading or stopping.
        """
        self.check()
        if self.open_rows + len(requests) > self.most_rows:
            raise ApiError(
                429,
                f"the server is full: {self.open_rows} sequences are open and {len(requests)} more were requested, "
                f"expected at most {self.most_rows} (--max-queue)",
                kind="rate_limit_error",
            )
        longest = max(len(request.prompt) + request.max_tokens for request in requests)
        if longest > self.capacity + 1:  # the last token is never read again
            raise ApiError(
                400,
                f"the request does not fit the KV cache: {longest:,} tokens, expected at most {self.capacity + 1:,} "
                "(--cache-tokens)",
                code="context_length_exceeded",
            )
        run = OpenRequest(self, requests)
        self._runs |= dict.fromkeys(run.open_ids, run)
        self._running |= run.open_ids
        self.totals["rows"] += len(requests)
        self.totals["prompt_tokens"] += sum(len(request.prompt) for request in requests)
        self._outgoing.put(list(requests))
        return run

    def forget(self, id: str) -> None:
        """A row has ended by itself, and its tokens were read."""
        self._runs.pop(id, None)

    def check(self) -> None:
        """Refuse a request that cannot be served now.

        Raises:
            ApiError: 503, or 500 after a failure.
        """
        if self.failure:
            raise ApiError(500, self.failure, kind="server_error")
        if self.stopping.is_set():
            raise ApiError(503, "the server is stopping", kind="server_error")
        if not self.ready.is_set():
            raise ApiError(503, "the model is still loading", kind="server_error")

    def leave(self, run: OpenRequest, ids: Sequence[str] | None = None) -> None:
        """Cancel rows of a run that are still open; None: all of them."""
        left = [id for id in (run.open_ids if ids is None else ids) if self._runs.pop(id, None) is not None]
        self._running.difference_update(left)
        if left and not self.failure:
            self.totals["rows_cancelled"] += len(left)
            self._outgoing.put([Cancel(id) for id in left])

    def fail(self, text: str) -> None:
        """The ranks have ended: every open run gets an error."""
        if self.failure:
            return
        self.failure = text
        for run in set(self._runs.values()):
            run.replies.put_nowait(ApiError(500, text, kind="server_error"))
        self._runs.clear()
        self._running.clear()

    def close(self) -> None:
        """End the threads, and thereby the ranks."""
        self._outgoing.put(None)
        hang_up(self._connection)

    def _received(self, message: Any) -> None:
        if isinstance(message, Ready):
            self.capacity, self.cache_tokens, self.cache_bytes = message
            self.ready.set()
            return
        replies, self.load = message
        for reply in replies:
            self.totals["tokens"] += isinstance(reply, Token) and not reply.prompt and reply.token >= 0
            if isinstance(reply, RefusedRequest) or reply.finish is not None:
                self._running.discard(reply.id)
            if (run := self._runs.get(reply.id)) is not None:
                run.replies.put_nowait(reply)

    def _read(self) -> None:
        # The end of the pipe is the end of a rank, which `Ranks.ended` notices; the loop may be closed by then.
        with suppress(EOFError, OSError, RuntimeError):
            while True:
                self._loop.call_soon_threadsafe(self._received, self._connection.recv())

    def _write(self) -> None:
        with suppress(OSError):
            while (events := self._outgoing.get()) is not None:
                self._connection.send(events)
