"""A server from start to end: HTTP in this process, the model in the ranks' processes.

The port is bound before the model is loaded, so that a port in use is reported at once; until the model is loaded,
requests get status 503. SIGTERM and Ctrl-C finish open requests, and refuse new ones and those that have not arrived
completely; a second one ends at once. Open requests get an error then, and when a rank has ended or hangs, in which
case the server ends with the rank's error. Clients that do not read their answers are hung up on.
"""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn

from mdata import UsageError
from mdata.errors import counted
from trainer.serve.app import Server
from trainer.serve.free_lists import freeze_loaded
from trainer.serve.openai_api import Served
from trainer.serve.processes import POLL_S, Ranks
from trainer.serve.service import Service

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
READ_S = 10.0  # for clients to read the last of their answers, after a signal
FLUSH_S = 5.0  # for the errors of open requests to be sent, once a rank has ended
STOP_S = 1.0  # the same after a second signal; and for handlers to end, once their clients are gone


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits on clients.

    Args:
        rows: sequences that may be open. body_bytes: of a request. key: the API key; "": none.
    """

    rows: int = 1024
    body_bytes: int = 8 << 20
    key: str = ""


def bound_socket(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        UsageError: the address cannot be used.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"cannot listen on {host}:{port}", found=str(error), fix="give another --port or --host"
        ) from error
    listener.listen(2048)
    return listener


class _Uvicorn(uvicorn.Server):
    """Signals are handled in this module, not by uvicorn, which would raise them again at the end."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them alone."""
        yield

    async def cut(self, after_s: float) -> None:
        """Hang up on all clients, in some seconds, and soon after that end whatever their handlers do."""
        await asyncio.sleep(after_s)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await asyncio.sleep(STOP_S)
        self.force_exit = True


async def serve(
    served: Served, ranks: Ranks, listener: socket.socket, limits: Limits, *, tell: Callable[[str], None]
) -> None:
    """Serve until a signal arrives or a rank ends.

    Args:
        tell: prints a line for the user.

    Raises:
        MdataError: the error of a rank. RankFault: a rank ended with a bug.
    """
    service = Service(ranks.connection, most_rows=limits.rows)
    host, port = listener.getsockname()[:2]
    local = ipaddress.ip_address(host).is_loopback and not limits.key
    hosts = frozenset((host, *LOCAL_HOSTS)) if local else frozenset[str]()
    server = Server(served, service, key=limits.key, hosts=hosts, most_bytes=limits.body_bytes)
    config = uvicorn.Config(
        server.app(), log_config=None, access_log=False, lifespan="off", server_header=False, ws="none"
    )
    http = _Uvicorn(config)

    async def stop_gently() -> None:
        while service.running_rows:
            await asyncio.sleep(POLL_S)
        await http.cut(READ_S)

    def stop(number: signal.Signals) -> None:
        if service.stopping.is_set():
            service.fail("the server was stopped before this request ended")
            tasks.append(asyncio.ensure_future(http.cut(STOP_S)))
        else:
            left = service.running_rows
            tell(f"{number.name}: sequences left to finish: {left}; a second {number.name} ends at once")
            tasks.append(asyncio.ensure_future(stop_gently()))
        service.stopping.set()
        http.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    serving = asyncio.ensure_future(http.serve(sockets=[listener]))
    ended = asyncio.ensure_future(ranks.ended(service))
    announced = asyncio.ensure_future(_announce(service, f"{served.model.name} is served at {address}", tell))
    tasks = [ended, announced]
    freeze_loaded()
    try:
        await asyncio.wait({serving, ended}, return_when=asyncio.FIRST_COMPLETED)
        if ended.done() and not serving.done():
            error = ranks.error()
            service.fail(f"the server lost a rank: {error}".replace("\n", " "))
            http.should_exit = True
            tasks.append(asyncio.ensure_future(http.cut(FLUSH_S)))
            await serving
            raise error
        await serving
    finally:
        for task in tasks:
            task.cancel()
        service.close()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


async def _announce(service: Service, text: str, tell: Callable[[str], None]) -> None:
    await service.ready.wait()
    size = f"{service.cache_bytes / 2**30:.1f} GiB on each rank"
    if service.cache_tokens:
        tell(f"KV cache: {counted(service.cache_tokens, 'token')} over all sequences, {size} (--cache-tokens)")
    else:
        tell(f"states of the sequences of a batch, of any length: {size} (--max-batch)")
    tell(text)
