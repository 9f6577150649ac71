"""Chat with a server in the terminal: `mtrain serve`, or any other with OpenAI's API.

Each line is a message; with --complete, a prompt to continue. Ctrl-C stops an answer, Ctrl-D quits, /clear starts a new
conversation. HOST may include a port (default: 8000) and may start with https://.

Examples:
  mtrain client localhost
  mtrain client gpu7:8000 --complete --max-tokens 100
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from mdata.errors import ResourceError, UsageError

from .console import Console
from .conversation import Stop, Turn, converse
from .mtrain_chat import add_talk_arguments, talk_options

KEY, PORT, CONNECT_S = "MTRAIN_API_KEY", 8000, 20.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `mtrain client --help`."""
    parser.add_argument("host", metavar="HOST", help="server address, such as localhost:8000")
    parser.add_argument("--complete", action="store_true", help="continue each line instead of chatting")
    parser.add_argument("--model", metavar="NAME", help="model to use (default: the server's first)")
    parser.add_argument("--api-key", metavar="KEY", help=f"key of the server (default: {KEY})")
    add_talk_arguments(parser, **dict.fromkeys(("max_tokens", "temperature", "top_p", "top_k"), "the server's"))


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Ask the server for its model, and converse."""
    if arguments.complete and arguments.system:
        raise UsageError("--system has no effect with --complete, which continues lines", fix="leave one of them out")
    key = os.environ.get(KEY, "") if arguments.api_key is None else arguments.api_key
    server = RemoteServer(arguments.host, key=key)
    name = arguments.model or server.model()
    console.note(f"{name} at {server.address}")
    options = {**talk_options(arguments), "model": name, "stream": True}

    def answer(turns: Sequence[Turn], stop: Stop) -> Iterator[str]:
        if arguments.complete:
            yield from server.stream("/v1/completions", {**options, "prompt": turns[-1][1]}, stop)
            return
        messages = [{"role": role, "content": content} for role, content in turns]
        yield from server.stream("/v1/chat/completions", {**options, "messages": messages}, stop)

    converse(console, answer, system=arguments.system, keeps=not arguments.complete)


class RemoteServer:
    """A server at the other end.

    Args:
        host: see HOST. key: API key; "": none.

    Raises:
        UsageError: `host` cannot be parsed.
    """

    def __init__(self, host: str, *, key: str) -> None:
        try:
            parts = urlsplit(host if "://" in host else f"http://{host}")
            name, port = parts.hostname, parts.port
        except ValueError:
            name = None
        if not name or parts.scheme not in ("http", "https"):
            raise UsageError(f"{host} is not a server address", expected="such as localhost, gpu7:8000 or https://gpu7")
        self._host, self._secure = name, parts.scheme == "https"
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._port = port or (443 if self._secure else PORT)
        self._headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
        self.address = f"{self._host}:{self._port}"

    def model(self) -> str:
        """The name of its first model."""
        with self._asked("GET", "/v1/models", None) as connection:
            models = self._json(connection.getresponse())
        try:
            return str(models["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise UsageError(f"{self.address} lists no models", found=str(models)[:200]) from error

    def stream(self, path: str, body: dict[str, Any], stop: Stop) -> Iterator[str]:
        """The pieces of an answer."""
        with suppress(_Stopped), self._asked("POST", path, body) as connection:
            connection.at_stop(stop)
            response = connection.getresponse()
            if response.status != http.client.OK:
                self._json(response)
            answered, ended, first = False, False, b""
            for line in response:
                first = first or line
                if line.startswith(b"data: "):
                    answered = True
                    if line.strip() == b"data: [DONE]" or (yield from self._texts(line.removeprefix(b"data: "))):
                        ended = True
            if not answered and not stop.asked:
                raise self._strange(first)
            if not ended and not stop.asked:  # without chunks a lost connection is an end of file
                raise ResourceError(f"the connection to {self.address} was lost", found="an answer without its end")

    def _texts(self, event: bytes) -> Generator[str, None, bool]:
        """The pieces of one event, and whether it ends the answer.

        One about something else (its `choices` are empty or missing) has none.
        """
        ended = False
        try:
            facts = json.loads(event)
            error = facts.get("error")
            for choice in () if error else facts.get("choices") or ():
                ended = bool(choice.get("finish_reason")) or ended
                yield choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        except (AttributeError, TypeError) as problem:
            raise self._strange(event) from problem
        if error:
            raise ResourceError(f"{self.address}: {error.get('message') if isinstance(error, dict) else error}")
        return ended

    def _strange(self, answer: bytes) -> UsageError:
        return UsageError(
            f"{self.address} does not stream answers as OpenAI's API does",
            found=answer[:200].decode(errors="replace").strip() or "an empty answer",
            expected='lines such as data: {"choices": [...]}',
        )

    def _asked(self, method: str, path: str, body: Any) -> _Connection:
        connection = _Connection(self._host, self._port, secure=self._secure, address=self.address)
        connection.ask(method, self._base + path, body, self._headers)
        return connection

    def _json(self, response: http.client.HTTPResponse) -> Any:
        data = response.read(1 << 20)
        try:
            value = json.loads(data)
        except ValueError:
            value = None
        if response.status != http.client.OK:
            error = value.get("error") if isinstance(value, dict) else None
            text = error.get("message") if isinstance(error, dict) else data[:200].decode(errors="replace")
            raise UsageError(f"{self.address} rejected the request: {text}", found=f"status {response.status}")
        return value


class _Stopped(Exception):
    """The user stopped the answer."""


class _Connection:
    """One request; errors of the network are named, and none is raised once a stop was asked for."""

    def __init__(self, host: str, port: int, *, secure: bool, address: str) -> None:
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._http, self._address, self._stop = kind(host, port, timeout=CONNECT_S), address, Stop()

    def __enter__(self) -> _Connection:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._http.close()
        if isinstance(error, OSError | http.client.HTTPException | ValueError) and not isinstance(error, UsageError):
            if self._stop.asked:
                raise _Stopped
            raise ResourceError(f"the connection to {self._address} was lost", found=str(error) or None) from error

    def ask(self, method: str, path: str, body: Any, headers: dict[str, str]) -> None:
        """Connect and send."""
        try:
            self._http.connect()
            self._http.sock.settimeout(None)  # a long prompt takes its time
            self._http.request(method, path, None if body is None else json.dumps(body), headers)
        except OSError as error:
            raise UsageError(
                f"nothing answers at {self._address}", found=str(error), fix="start a server: mtrain serve MODEL"
            ) from error

    def at_stop(self, stop: Stop) -> None:
        """End what is being read when a stop is asked for."""
        end = self._http.sock
        self._stop = stop

        def hang_up() -> None:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

        stop.at_once = hang_up
        if stop.asked:  # while the request was sent
            hang_up()

    def getresponse(self) -> http.client.HTTPResponse:
        """See http.client."""
        return self._http.getresponse()
