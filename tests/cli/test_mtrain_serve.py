"""`mtrain serve` as processes: ranks share a model, a signal lets open requests end, and a killed process takes all."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import statistics
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from cli.mtrain import main
from mdata.util.commands import command_line
from tests.helpers.processes import is_alive, wait_until
from tests.helpers.serving import Reply, Running
from tests.trainer.convert.hf_models import save
from trainer.tasks.generate import GenerationRequest, continue_rows
from trainer.tasks.loaded_model import Model
from trainer.tasks.sampling import Sampling

pytest.importorskip("transformers")
pytest.importorskip("starlette")
REQUESTS = 10_000  # of the memory soak
ERROR_S = 10.0  # within which an open request has its error


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save("llama2", tmp_path_factory.mktemp("hf") / "tiny"))


class Process:
    """A server, the lines it prints, and its ranks."""

    def __init__(self, *words: str) -> None:
        command = [*command_line("mtrain"), "serve", *words, "--port", "0"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self._told = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        assert self._told.wait(120), self.lines
        address = next(found for line in self.lines if (found := re.search(r"served at (http://\S+)", line)))
        self.url = address[1]

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if "served at" in line:
                self._told.set()
        self._told.set()

    def ask(self, path: str, body: object = None) -> Reply:
        return Running(self.url, None, None).ask(path, body)  # type: ignore[arg-type]

    def ranks(self) -> list[int]:
        """Their process ids, by rank."""
        ours = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                parent = int(stat.read_bytes().rpartition(b")")[2].split()[1])
                environment = (stat.parent / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            rank = next((int(entry[5:]) for entry in environment if entry.startswith(b"RANK=")), None)
            if parent == self.process.pid and rank is not None:
                ours.append((rank, int(stat.parent.name)))
        return [pid for _, pid in sorted(ours)]

    def end(self) -> tuple[int, str]:
        """Exit code and all lines."""
        code = self.process.wait(60)
        self._reader.join(60)
        return code, "".join(self.lines)


@contextmanager
def started(*words: str) -> Iterator[Process]:
    server = Process(*words)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
        server.end()
        assert server.process.stderr is not None
        server.process.stderr.close()


def opened(server: Process, *, stream: bool, texts: int = 1, unsent: int = 0) -> socket.socket:
    """A connection that has asked for a text, without the last bytes of the request."""
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    data = json.dumps({"prompt": "the", "max_tokens": 40, "stream": stream, "ignore_eos": True, "n": texts}).encode()
    connection = socket.create_connection((host, int(port)), timeout=60)
    lines = ["POST /v1/completions HTTP/1.1", "host: localhost", "connection: close", "content-type: application/json"]
    head = "\r\n".join([*lines, f"content-length: {len(data)}", "", ""]).encode()
    connection.sendall(head + data[: len(data) - unsent])
    return connection


def rest(connection: socket.socket) -> bytes:
    said = b""
    while part := connection.recv(65536):
        said += part
    return said


def test_a_signal_lets_open_requests_end(model):
    with started(model) as server:
        (rank,) = server.ranks()
        os.kill(rank, signal.SIGSTOP)
        with opened(server, stream=True) as connection, opened(server, stream=True, unsent=9) as incomplete:
            connection.recv(1)
            while b"mtrain_rows_open 1" not in urllib.request.urlopen(f"{server.url}/metrics").read():
                time.sleep(0.01)
            server.process.terminate()
            while not any("SIGTERM" in line for line in server.lines):
                time.sleep(0.01)
            os.kill(rank, signal.SIGCONT)
            assert rest(connection).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            assert b"503 Service Unavailable" in rest(incomplete), "it need not arrive for the server to end"
            code, lines = server.end()
        assert code == 0 and "SIGTERM: sequences left to finish: 1;" in lines
        assert re.search(r"KV cache: 1,024 tokens over all sequences, 0\.0 GiB on each rank", lines), "16 of 64"
        wait_until(lambda: not any(map(is_alive, [rank])))


def test_a_second_signal_ends_open_requests_with_an_error(model):
    with started(model) as server:
        (rank,) = server.ranks()
        os.kill(rank, signal.SIGSTOP)
        with opened(server, stream=True) as connection:
            connection.recv(1)
            server.process.terminate()
            while not any("SIGTERM" in line for line in server.lines):
                time.sleep(0.01)
            server.process.terminate()
            said = rest(connection)
            os.kill(rank, signal.SIGCONT)
        assert b"the server was stopped before this request ended" in said and b"[DONE]" not in said
        code, lines = server.end()
        assert code == 0 and "Traceback" not in lines
        wait_until(lambda: not any(map(is_alive, [rank])))


@pytest.mark.parametrize("signals", [2, pytest.param(1, marks=pytest.mark.soak)])
def test_a_client_that_reads_nothing_does_not_keep_a_server(model, signals):
    """The first signal gives it 10 s."""
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 40, "n": 120, "top_logprobs": 20}
    data = json.dumps({**body, "ignore_eos": True, "logprobs": True, "stream": True}).encode()
    with started(model, "--chat-template", "plain") as server, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, _, port = server.url.removeprefix("http://").rpartition(":")
        connection.connect((host, int(port)))
        head = f"host: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\n" + head.encode() + data)
        wait_until(lambda: f"mtrain_tokens_total {120 * 40}" in server.ask("/metrics").body)
        for _ in range(signals):
            server.process.terminate()
            while not any("SIGTERM" in line for line in server.lines):
                time.sleep(0.01)
        code, lines = server.end()
    assert "sequences left to finish: 0;" in lines, "the ranks wait for nothing"
    assert code == 0 and "Traceback" not in lines


@pytest.mark.parametrize(
    ("when", "rank"),
    [
        ("streaming", 1),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in (("prefill", 1), ("decode", 0), ("decode", 1))),
    ],
)
def test_a_killed_rank_ends_requests_and_ranks(model, when, rank):
    with started(model, "mesh.tp=2") as server:
        body = {"prompt": "the", "max_tokens": 20, "seed": 1}
        rules = Sampling(max_tokens=20, temperature=1.0, top_p=1.0, seed=1)
        (alone,) = continue_rows(Model.load(model), [GenerationRequest(ids=(116, 104, 101), rules=rules)])
        reply = server.ask("/v1/completions", {**body, "prompt": [116, 104, 101]})
        assert reply.body["choices"][0]["text"] == alone.text, "as on one rank"
        ranks = server.ranks()
        if when == "prefill":
            os.kill(ranks[1], signal.SIGSTOP)
        with opened(server, stream=when == "streaming", texts=100) as connection:
            if when == "streaming":
                connection.recv(1000)
            elif when == "decode":
                while float(re.findall(r"mtrain_tokens_total (\d+)", server.ask("/metrics").body)[0]) < 50:
                    time.sleep(0.01)
            began_s = time.monotonic()
            os.kill(ranks[rank], signal.SIGKILL)
            said = rest(connection)
            assert time.monotonic() - began_s < ERROR_S
        assert f"rank {rank} was killed by SIGKILL".encode() in said and b"[DONE]" not in said
        code, lines = server.end()
        assert code == 5 and f"rank {rank} was killed by SIGKILL" in lines
        wait_until(lambda: not any(map(is_alive, ranks)))


@pytest.mark.soak  # the waiting itself: tests/trainer/serve/test_processes.py
@pytest.mark.parametrize(("mesh", "rank"), [("mesh.tp=1", 0), ("mesh.tp=2", 0), ("mesh.tp=2", 1)])
def test_a_stopped_rank_ends_requests_and_ranks(model, mesh, rank):
    with started(model, mesh) as server:
        ranks = server.ranks()
        with opened(server, stream=True, texts=100) as connection:
            connection.recv(1000)
            os.kill(ranks[rank], signal.SIGSTOP)
            said = rest(connection)
        assert f"rank {rank} did not respond for 8 s".encode() in said and b"[DONE]" not in said
        code, lines = server.end()
        assert code == 5 and f"rank {rank} did not respond for 8 s; rank {rank} was last in " in lines
        wait_until(lambda: not any(map(is_alive, ranks)))


@pytest.mark.parametrize("stream", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_a_killed_server_takes_its_ranks_along(model, stream):
    with started(model, "mesh.pp=2" if not stream else "mesh.tp=1") as server:
        ranks = server.ranks()
        os.kill(ranks[-1], signal.SIGSTOP)
        with opened(server, stream=stream):
            server.process.kill()
            server.process.wait(60)
            wait_until(lambda: not any(map(is_alive, ranks)))


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_ten_thousand_requests_leave_no_memory_behind(model):
    """Neither in the server nor in its rank: less than 1 byte a token.

    Prompts are few, because tokenizers keep a bounded number of words.
    """
    with started(model) as server:
        pids, tokens, points = [server.process.pid, *server.ranks()], 0, list[tuple[int, ...]]()

        def ask(number: int) -> int:
            body = {"prompt": f"client {number % 40}", "max_tokens": 16, "n": 4, "seed": number, "logprobs": number % 3}
            reply = server.ask("/v1/completions", body)
            assert reply.status == 200, reply.body
            return int(reply.body["usage"]["completion_tokens"])

        with ThreadPoolExecutor(8) as pool:
            for first in range(0, REQUESTS, REQUESTS // 40):
                tokens += sum(pool.map(ask, range(first, first + REQUESTS // 40)))
                points.append((tokens, *(_resident_bytes(pid) for pid in pids)))
    so_far, *sizes = zip(*points[8:], strict=True)  # of the last four fifths
    assert len(sizes) == 2
    for name, resident in zip(("server", "rank"), sizes, strict=True):
        slope = statistics.linear_regression(so_far, resident).slope
        assert slope < 1, f"the {name} grows by {slope:.2f} bytes a token: {resident}"


def _resident_bytes(pid: int) -> int:
    """Without pages of files, which the system drops and reads again."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(re.findall(r"RssAnon:\s+(\d+)", status)[0])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("MODEL", "mesh.dp=2"), "cannot parse mesh.dp=2"),
        (("MODEL", "mesh.tp=0"), "expected: mesh.tp=N or mesh.pp=N"),
        (("MODEL", "--max-queue", "0"), "--max-queue 0 is below 1"),
        (("MODEL", "--port", "70000"), "--port 70000 is out of range"),
        (("MODEL", "--api-key", ""), "--api-key is empty"),
        (("MODEL", "--chat-template", "chatml"), "has no token <|im_start|>"),
        (("MODEL", "--host", "no.such.host.invalid"), "cannot listen on no.such.host.invalid:8000"),
        (("nowhere",), "nowhere"),
    ],
)
def test_bad_input_is_named(words, text, model, capsys):
    assert main(["serve", *(model if word == "MODEL" else word for word in words)]) == 2
    assert text in capsys.readouterr().err
