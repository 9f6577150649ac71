"""A proxy inside this process through which a store reaches its own origin, and no other.

obstore follows redirects to wherever a server points, and has no option against it. It drops the Authorization header
then, but not a session token, an encryption key, or a signed query (sent on as the Referer). So its connections to S3,
Google Cloud and Azure go through this proxy: to the storage, which is the first host that it asks for, and to the
services that issue credentials. Encrypted connections are tunnels, whose content this process cannot see. The
environment's own proxies are used as usual (HTTPS_PROXY, NO_PROXY). The proxy runs only when a store is used.
"""

from __future__ import annotations

import base64
import os
import re
import socket
import threading
import urllib.request
from collections.abc import Mapping
from functools import cache
from socketserver import StreamRequestHandler, ThreadingTCPServer
from urllib.parse import unquote, urlsplit

_CONNECT_TIMEOUT_S = 5
_BUFFER_BYTES = 1 << 18
_HEAD_BYTES = 1 << 16
# Where obstore asks for credentials: instance metadata, and the token services of the three clouds.
_CREDENTIAL_HOSTS = re.compile(
    r"169\.254\.(169\.254|170\.2|170\.23):80|\[fd00:ec2::(23|254)\]:80|metadata(\.google\.internal)?:80"
    r"|sts(-fips)?(\.[a-z0-9-]+)?\.amazonaws\.com(\.cn)?:443"
    r"|(www|oauth2|sts|iamcredentials|accounts)\.(googleapis|google)\.com:443"
    r"|login\.(microsoftonline\.(com|us|de)|chinacloudapi\.cn):443"
)
_CREDENTIAL_VARIABLES = re.compile(r"(AWS|AZURE|IDENTITY|MSI|GOOGLE|GCE)_\w+")
_STORAGE_VARIABLES = re.compile(r"AWS_ENDPOINT(_URL(_S3)?)?|AZURE_(STORAGE_)?ENDPOINT")
# Status codes that no storage uses; if a tunnel is refused, the store reports only that it failed.
REFUSED, NO_CONNECTION = 497, 597


class OriginGuard(ThreadingTCPServer):
    """Takes the connections of one store from construction on; its threads end with the process.

    Attributes:
        origin: "host:port" of the storage; None until the store asks for it.
        refused: another "host:port" to which the storage redirected; None: there was none.
        url: of this proxy, for the store.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 1024  # a store opens many connections at once, and one that finds no room waits for a second

    def __init__(self, environment: Mapping[str, str]) -> None:
        """URLs in variables such as AWS_CONTAINER_CREDENTIALS_FULL_URI name more credential services."""
        self.origin: str | None = None
        self.refused: str | None = None
        self._services = {
            authority(value)
            for name, value in environment.items()
            if _CREDENTIAL_VARIABLES.fullmatch(name)
            and not _STORAGE_VARIABLES.fullmatch(name)
            and re.match("https?://", value)
        }
        self._lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), _Connection)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, name="mdata-origin-guard", daemon=True).start()

    def allows(self, place: str) -> bool:
        """Whether the store may connect to "host:port"; the first that is not a credential service is its origin."""
        if place in self._services or _CREDENTIAL_HOSTS.fullmatch(place):
            return True
        with self._lock:
            self.origin = self.origin or place
            if place != self.origin:
                self.refused = place
            return place == self.origin

    def handle_error(self, request: object, client_address: object) -> None:
        """Nothing: the store itself reports a broken connection."""


def authority(url: str) -> str:
    """Host and port of a URL, always with the port: "host:443"."""
    parts = urlsplit(url)
    host = (parts.hostname or "").lower()
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class _Connection(StreamRequestHandler):
    """One connection of the store: a tunnel, or plain requests, each of which is checked."""

    server: OriginGuard
    disable_nagle_algorithm = True

    def handle(self) -> None:
        upstream: socket.socket | None = None
        connected_to = None
        try:
            while head := self._head():
                method, target, version = head[0].split(" ")
                place = authority(f"https://{target}" if method == "CONNECT" else target)
                if not self.server.allows(place) or connected_to not in (None, place):
                    self._answer(REFUSED)
                    return
                if upstream is None:
                    try:
                        upstream, connected_to = _connect("https" if method == "CONNECT" else "http", place), place
                    except OSError:
                        self._answer(NO_CONNECTION)
                        return
                    if method == "CONNECT":
                        self.connection.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                        _start_copying(self.connection, upstream)
                        _copy(upstream, self.connection)
                        return
                    _start_copying(upstream, self.connection)
                parts = urlsplit(target)
                path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
                upstream.sendall("\r\n".join([f"{method} {path} {version}", *head[1:], "", ""]).encode("latin-1"))
                self._send_body(head[1:], upstream)
        except (OSError, ValueError):
            return  # the connection ends here, and the store reports it
        finally:
            if upstream is not None:
                _end(upstream)

    def _head(self) -> list[str]:
        lines: list[str] = []
        room = _HEAD_BYTES
        while (line := self.rfile.readline(room)) not in (b"\r\n", b""):
            lines.append(line.decode("latin-1").rstrip("\r\n"))
            room -= len(line)
            if room <= 0:
                raise ValueError("the head of a request is too long")
        return lines

    def _send_body(self, headers: list[str], upstream: socket.socket) -> None:
        pairs = (header.partition(":") for header in headers)
        left = next((int(value) for name, _, value in pairs if name.lower() == "content-length"), 0)
        while left and (data := self.rfile.read1(min(left, _BUFFER_BYTES))):
            upstream.sendall(data)
            left -= len(data)

    def _answer(self, status: int) -> None:
        self.connection.sendall(b"HTTP/1.1 %d -\r\nContent-Length: 0\r\nConnection: close\r\n\r\n" % status)


def _connect(scheme: str, place: str) -> socket.socket:
    """A connection to a place, through a tunnel of the environment's proxy where one is set for it."""
    host, _, port = place.rpartition(":")
    proxy = urllib.request.getproxies().get(scheme)
    if not proxy or urllib.request.proxy_bypass(place):
        return _unbuffered(socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S))
    parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    upstream = socket.create_connection((parts.hostname or "", parts.port or 80), timeout=_CONNECT_TIMEOUT_S)
    login = base64.b64encode(f"{unquote(parts.username or '')}:{unquote(parts.password or '')}".encode()).decode()
    header = f"Proxy-Authorization: Basic {login}\r\n" if parts.username else ""
    upstream.sendall(f"CONNECT {place} HTTP/1.1\r\nHost: {place}\r\n{header}\r\n".encode("latin-1"))
    with upstream.makefile("rb", buffering=0) as answer:
        status = answer.readline(_HEAD_BYTES).split(b" ")
        while answer.readline(_HEAD_BYTES) not in (b"\r\n", b""):
            pass
    if status[1:2] != [b"200"]:
        upstream.close()
        raise OSError("the proxy refused the connection")
    return _unbuffered(upstream)


def _unbuffered(upstream: socket.socket) -> socket.socket:
    upstream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    upstream.settimeout(None)  # obstore's own timeouts end a request
    return upstream


def _start_copying(source: socket.socket, target: socket.socket) -> None:
    threading.Thread(target=_copy, args=(source, target), name="mdata-origin-guard", daemon=True).start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Forward data until one side closes; then close both, so that neither waits for the other."""
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    try:
        while count := source.recv_into(buffer):
            target.sendall(buffer[:count])
    except OSError:
        pass
    finally:
        _end(source)
        _end(target)


def _end(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # already closed


def guard_of(place: str, environment: Mapping[str, str]) -> OriginGuard:
    """This process's guard for a place ("s3://bucket") with the current environment settings."""
    settings = {
        name: value for name, value in environment.items() if _CREDENTIAL_VARIABLES.fullmatch(name) or name == "HOME"
    }
    return _guard(os.getpid(), place, tuple(sorted(settings.items())))


@cache
def _guard(process: int, place: str, settings: tuple[tuple[str, str], ...]) -> OriginGuard:
    return OriginGuard(dict(settings))
