"""A server over HTTP: answers and streams, refusals with their status, keys, limits, clients that leave, bad input."""

from __future__ import annotations

import json
import random
import re
import shlex
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from mdata.chat.jinja_template import JinjaTemplate
from tests.helpers.examples import SOAK
from tests.helpers.house_rules import ROOT
from tests.helpers.processes import wait_until
from tests.helpers.serving import running
from trainer.tasks.engine import DecodeEngine
from trainer.tasks.generate import search_beams

PROMPT = {"prompt": "the man", "max_tokens": 6, "seed": 3}


def choices(reply):
    assert reply.status == 200, reply.body
    return reply.body["choices"]


def test_a_completion_and_its_stream_say_the_same(server):
    body = {**PROMPT, "n": 2, "logprobs": 2, "echo": True, "prompt": ["the man", [104, 105]]}
    whole = server.ask("/v1/completions", body)
    texts = [choice["text"] for choice in choices(whole)]
    assert len(texts) == 4 and texts[0] != texts[1] and all(text.startswith("the man") for text in texts[:2])
    events = server.events("/v1/completions", {**body, "stream_options": {"include_usage": True}})
    assert events.pop() == "[DONE]"
    usage = events.pop()
    assert usage["choices"] == [] and usage["usage"] == whole.body["usage"]
    for number, choice in enumerate(whole.body["choices"]):
        parts = [event["choices"][0] for event in events if event["choices"][0]["index"] == number]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts][-1] == choice["finish_reason"] == "length"
        for key, values in choice["logprobs"].items():
            assert [value for part in parts for value in part["logprobs"][key]] == values, key


def test_a_text_depends_on_its_seed_alone(server):
    alone = choices(server.ask("/v1/completions", PROMPT))[0]["text"]
    beside = choices(server.ask("/v1/completions", {**PROMPT, "prompt": ["the man", "another"]}))
    assert beside[0]["text"] == alone != choices(server.ask("/v1/completions", {**PROMPT, "seed": 4}))[0]["text"]


@pytest.mark.parametrize("most", [0, 1])
def test_echo_scores_a_prompt(server, model, most):
    body = {"prompt": [104, 105, 106, 107], "max_tokens": most, "logprobs": 1, "echo": True, "temperature": 0}
    (choice,) = choices(reply := server.ask("/v1/completions", body))
    said = choice["logprobs"]
    assert {len(values) for values in said.values()} == {4 + most}
    assert said["token_logprobs"][0] is None is said["top_logprobs"][0] and said["text_offset"][:2] == [0, 1]
    wanted = model.score([[104, 105, 106, 107]]).log_prob_BS[0].tolist()
    assert said["token_logprobs"][1:4] == pytest.approx(wanted, abs=1e-5)
    assert reply.body["usage"] == {"prompt_tokens": 4, "completion_tokens": most, "total_tokens": 4 + most}


def test_a_text_ends_before_a_stop_string(server):
    text = choices(server.ask("/v1/completions", {**PROMPT, "max_tokens": 20}))[0]["text"]
    (choice,) = choices(server.ask("/v1/completions", {**PROMPT, "max_tokens": 20, "stop": [text[3:5], "never"]}))
    assert choice["text"] == text[: text.index(text[3:5])] and choice["finish_reason"] == "stop"


def test_a_chat_and_its_stream(server):
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "seed": 1, "logprobs": True}
    body["top_logprobs"] = 2
    (choice,) = choices(server.ask("/v1/chat/completions", body))
    assert choice["message"]["role"] == "assistant" and len(choice["logprobs"]["content"][0]["top_logprobs"]) == 2
    events = [event["choices"][0] for event in server.events("/v1/chat/completions", body)[:-1]]
    assert events[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(event["delta"].get("content", "") for event in events) == choice["message"]["content"]
    assert events[-1]["finish_reason"] == "length"
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    body["messages"] = [{"role": "user", "content": parts}]
    assert choices(server.ask("/v1/chat/completions", body))[0] == choice


def test_megatrons_interface(server, model):
    reply = server.ask(
        "/api", {"prompts": ["the", "a man"], "tokens_to_generate": 3, "top_k": 1, "logprobs": True}, method="PUT"
    )
    assert reply.status == 200 and reply.body["text"][0].startswith("the")
    assert list(map(len, reply.body["segments"])) == [6, 8] and list(map(len, reply.body["logprobs"])) == [5, 7]
    greedy = {"prompt": "the", "max_tokens": 3, "temperature": 0}
    assert "the" + choices(server.ask("/v1/completions", greedy))[0]["text"] == reply.body["text"][0]
    reply = server.ask("/api", {"prompts": ["the"], "tokens_to_generate": 4, "beam_width": 3}, method="PUT")
    beams = search_beams(model, model.encode("the"), width=3, max_tokens=4, count=3)
    assert reply.body["scores"] == pytest.approx([beam.score for beam in beams], abs=1e-5)
    for penalty in (1e300, -1e300):
        body = {"prompts": ["the"], "tokens_to_generate": 4, "beam_width": 3, "length_penalty": penalty}
        reply = server.ask("/api", body, method="PUT")
        assert reply.status == 400 and "is out of range" in reply.body["message"]
    reply = server.ask("/api", {"prompts": ["the"], "tokens_to_generate": 100, "beam_width": 3}, method="PUT")
    assert (reply.status, reply.body["message"]) == (400, "context length + tokens_to_generate too large")
    assert reply.body["detail"].startswith("3 prompt tokens + 100 new ones")


MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("completions", b"{", 400, "the body is not JSON"),
        ("completions", b'{"prompt": NaN}', 400, "the body is not JSON"),
        ("completions", b"[" * 100_000, 400, "the body is not JSON"),
        ("completions", b"[]", 400, "not an object"),
        ("completions", {}, 400, "prompt is null"),
        ("completions", {"prompt": ""}, 200, ""),
        ("completions", {"prompt": []}, 400, "prompt is []"),
        ("completions", {"prompt": [[1], "a", {}]}, 400, "prompt is {}"),
        ("completions", {"prompt": [300]}, 400, "token 300 is outside the vocabulary; expected: 0 to"),
        ("completions", {"prompt": [-1]}, 400, "token -1 is outside the vocabulary"),
        ("completions", {"prompt": "a" * 65}, 400, "the prompt has 65 tokens and 16 new ones"),
        ("completions", {"prompt": "a", "max_tokens": 64}, 400, "the context of tiny is 64 tokens in total"),
        ("completions", {"prompt": "a", "max_tokens": "5"}, 400, 'max_tokens is "5", expected an integer'),
        ("completions", {"prompt": "a", "max_tokens": True}, 400, "max_tokens is true"),
        ("completions", {"prompt": "a", "temperature": "hot"}, 400, 'temperature is "hot", expected a number'),
        ("completions", {"prompt": "a", "temperature": -1}, 400, "temperature=-1.0"),
        ("completions", {"prompt": "a", "top_p": 0}, 400, "top_p=0.0"),
        ("completions", {"prompt": "a", "logit_bias": {"300": 1}}, 400, "token 300, the vocabulary has 300"),
        ("completions", {"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias is"),
        ("completions", {"prompt": "a", "stop": [""]}, 400, "an empty stop string"),
        ("completions", {"prompt": "a", "stop": 5}, 400, "stop is 5"),
        ("completions", {"prompt": "a", "n": 129}, 400, "n is 129"),
        ("completions", {"prompt": ["a"] * 100, "n": 2}, 400, "200 texts requested"),
        ("completions", {"prompt": "a", "logprobs": 21}, 400, "logprobs is 21"),
        ("completions", {"prompt": "a", "stream_options": {}}, 400, "stream_options"),
        ("completions", {"prompt": "a", "suffix": "b"}, 400, "suffix is not supported"),
        ("completions", {"prompt": "a", "best_of": 3}, 400, "best_of is not supported"),
        ("completions", {"prompt": "a", "model": "gpt-4"}, 404, "this server has tiny"),
        ("chat/completions", {"messages": []}, 400, "messages is []"),
        ("chat/completions", {"messages": [{"role": "robot", "content": "a"}]}, 400, "messages[0] is"),
        ("chat/completions", {"messages": [{"role": "user"}]}, 400, "and text content"),
        ("chat/completions", {"messages": MESSAGES, "tools": [{}]}, 400, "tools is not supported"),
        ("chat/completions", {"messages": MESSAGES, "top_logprobs": 2}, 400, "but logprobs is not true"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a" * 80}]}, 400, "the context of tiny"),
        ("models/other", None, 404, "this server has tiny"),
        ("nothing", None, 404, "no such path: /v1/nothing"),
        ("completions", None, 405, "the method is not allowed here"),
    ],
)
def test_bad_input_is_named(server, path, body, status, text):
    reply = server.ask(f"/v1/{path}", body)
    assert reply.status == status, reply.body
    assert text in json.dumps(reply.body) or text in reply.body["error"]["message"]


def test_only_json_is_taken(server, served):
    assert server.ask("/v1/completions", b"{}", headers={"content-type": "text/plain"}).status == 415
    with running(served, most_bytes=100) as small:
        assert small.ask("/v1/completions", b" " * 101).status == 413
        assert (
            small.ask("/api", b" " * 101, method="PUT").body["message"].startswith("the body is longer than 100 bytes")
        )


def test_a_request_is_as_long_as_the_cache_and_its_last_token(served, model):
    with running(served, engine=DecodeEngine(model, cache_tokens=20, page_tokens=4)) as small:
        reply = small.ask("/v1/completions", {"prompt": [104] * 10, "max_tokens": 12})
        assert reply.status == 400 and "22 tokens, expected at most 21 (--cache-tokens)" in str(reply.body)
        assert small.ask("/v1/completions", {"prompt": [104] * 10, "max_tokens": 11}).status == 200


def test_unknown_fields_are_ignored_and_named_or_refused(server, served):
    reply = server.ask("/v1/completions", {**PROMPT, "zoom": 1, "user": "me"})
    assert reply.status == 200 and reply.headers["x-ignored-fields"] == "zoom"
    with running(replace(served, strict=True, most_tokens=20)) as strict:
        assert "unknown fields: zoom" in strict.ask("/v1/completions", {**PROMPT, "zoom": 1}).body["error"]["message"]
        body = {"prompts": ["a"], "tokens_to_generate": 1}
        assert strict.ask("/api", {**body, "zoom": 1}, method="PUT").body == {"message": "unknown fields: zoom"}
        assert (
            "are 26, expected at most 20" in strict.ask("/v1/completions", {**PROMPT, "n": 2}).body["error"]["message"]
        )
        reply = strict.ask("/api", {**body, "prompts": ["a" * 10, "b"]}, method="PUT")
        assert reply.body["message"] == "Too many tokens.  22 is greater than 20"


def test_a_key(served):
    with running(served, key="open sesame") as server:
        given = {"content-type": "application/json"}
        assert server.ask("/health").status == 200 and server.ask("/", headers={}).status == 200
        for headers in (given, {**given, "authorization": "Bearer open"}, {**given, "authorization": "\xff"}):
            reply = server.ask("/v1/completions", PROMPT, headers=headers)
            assert reply.status == 401 and reply.body["error"]["code"] == "invalid_api_key"
        assert server.ask("/metrics").status == 401 == server.ask("/api", {}, method="PUT").status
        assert (
            server.ask("/v1/completions", PROMPT, headers={**given, "authorization": "Bearer open sesame"}).status
            == 200
        )


def test_a_local_server_is_called_by_its_own_name(served):
    with running(served, hosts=frozenset(("127.0.0.1", "localhost", "::1"))) as server:
        for host, status in (("localhost:80", 200), ("[::1]:80", 200), ("LOCALHOST", 200), ("evil.example:80", 403)):
            assert server.ask("/v1/models", headers={"host": host}).status == status, host


def test_without_a_template_a_chat_says_what_is_missing(served):
    with running(replace(served, template=None, no_template="the tokenizer has none")) as server:
        reply = server.ask("/v1/chat/completions", {"messages": MESSAGES})
        message = reply.body["error"]["message"]
        assert reply.status == 400 and "no chat template: the tokenizer has none; use /v1/completions" in message
        assert server.ask("/v1/models").body["data"][0]["chats"] is False


def test_a_system_message_that_the_template_does_not_have_is_refused(served):
    template = JinjaTemplate(
        "own", "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}", ()
    )
    with running(replace(served, template=template)) as server:
        messages = [{"role": "user", "content": "Hi"}]
        assert server.ask("/v1/chat/completions", {"messages": messages}).status == 200
        reply = server.ask("/v1/chat/completions", {"messages": [{"role": "system", "content": "x"}, *messages]})
        assert reply.status == 400 and "message 1: role 'system' is unknown" in reply.body["error"]["message"]


def test_models_health_and_metrics(server):
    (model,) = server.ask("/v1/models").body["data"]
    assert (
        model["id"] == "tiny"
        and model["max_model_len"] == 64
        and model["chats"]
        and server.ask("/v1/models/tiny").body == model
    )
    assert server.ask("/health").body == {"status": "ready", "model": "tiny", "step": model["step"]}
    server.ask("/v1/completions", PROMPT)
    lines = server.ask("/metrics").body.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert float(values['mtrain_requests_total{path="/v1/completions",status="200"}']) >= 1
    assert (
        float(values["mtrain_tokens_total"]) >= 6
        and values["mtrain_rows_open"] == "0" == values["mtrain_engine_running"]
    )
    names = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    assert {key.partition("{")[0] for key in values} <= names


def test_metrics_count_every_token_of_a_long_life(served):
    with running(served) as server:
        server.server.service.totals["tokens"] = 12_345_678
        server.server.seconds["/v1/completions"] = 98_765.4321
        server.server.first_token_s = 1 / 3
        server.ask("/v1/completions", {**PROMPT, "max_tokens": 1})
        lines = server.ask("/metrics").body.splitlines()
    assert "mtrain_tokens_total 12345679" in lines
    values = dict(line.rsplit(" ", 1) for line in lines)
    assert float(values['mtrain_request_seconds_total{path="/v1/completions"}']) > 98_765.4321
    assert float(values["mtrain_first_token_seconds_sum"]) > 1 / 3


def opened(server, body) -> socket.socket:
    """A connection that has sent a request."""
    host, port = server.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    connection = socket.create_connection((host, int(port)), timeout=60)
    lines = [
        "POST /v1/completions HTTP/1.1",
        "host: x",
        "content-type: application/json",
        f"content-length: {len(data)}",
    ]
    connection.sendall("\r\n".join([*lines, "", ""]).encode() + data)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_rows_and_a_full_server_says_so(endless, stream):
    with opened(endless, {"prompt": ["a", "b"], "max_tokens": 60, "stream": stream}):
        wait_until(lambda: len(endless.engine.rows) == 2)
        full = endless.ask("/v1/completions", {"prompt": "c"})
        assert full.status == 429 and full.headers["retry-after"] == "1"
        assert "2 sequences are open and 1 more" in full.body["error"]["message"]
    wait_until(lambda: not endless.engine.rows)
    assert endless.server.service.open_rows == 0 and len(endless.engine.cancelled) == 2


def test_the_ranks_end_and_open_requests_get_an_error(endless):
    with opened(endless, {"prompt": "a", "max_tokens": 60, "stream": True}) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
        service = endless.server.service
        service._loop.call_soon_threadsafe(service.fail, "rank 1 was killed by SIGKILL")
        said = b""
        while part := connection.recv(65536):
            said += part
            if b"killed" in said:
                break
    assert b'"message":"rank 1 was killed by SIGKILL"' in said and b"[DONE]" not in said
    assert endless.ask("/v1/completions", PROMPT).status == 500 and endless.ask("/health").status == 503


def test_the_lines_of_the_docs_work(server):
    text = (ROOT / "docs/howto/serve.md").read_text(encoding="utf-8")
    lines = [line for line in text.replace("\\\n", "").splitlines() if line.startswith("curl ")]
    assert len(lines) == 4
    for line in lines:
        words = [word.replace("localhost:8000", server.url) for word in shlex.split(line)]
        done = subprocess.run([*words, "--silent", "--fail"], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, (line, done)
        assert "text" in done.stdout or "ready" in done.stdout or done.stdout.endswith("data: [DONE]\n\n")


def test_the_page_loads_nothing_and_may_load_nothing(server):
    reply = server.ask("/", headers={})
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert not re.findall(r"""(?:src|href|@import|url\()\s*=?\s*["']?(?!data:)(?:https?:|//)""", reply.body)
    assert "/v1/chat/completions" in reply.body and "prefers-color-scheme: dark" in reply.body


def test_a_long_body_is_read_beside_the_loop(server):
    reply = server.ask("/v1/completions", {"prompt": "a" * 200_000})
    assert reply.status == 400 and "the prompt has 200,000 tokens" in reply.body["error"]["message"]
    reply = server.ask("/api", {"prompts": ["a" * 200_000]}, method="PUT")
    assert reply.body["message"] == "Length of prompt + tokens_to_generate longer than allowed"


def test_the_openai_package(server):
    openai = pytest.importorskip("openai", reason="the openai package is not installed")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any")
    asked = {"model": "tiny", "prompt": "the man", "max_tokens": 4, "seed": 1}
    whole = client.completions.create(**asked, logprobs=2, echo=True).choices[0]
    assert len(whole.logprobs.tokens) == 11 and whole.text.startswith("the man")
    parts = list(client.completions.create(**asked, stream=True))
    assert "the man" + "".join(part.choices[0].text for part in parts) == whole.text
    chat = {"model": "tiny", "messages": MESSAGES, "max_tokens": 4, "seed": 1}
    said = client.chat.completions.create(**chat, logprobs=True, top_logprobs=2).choices[0]
    parts = list(client.chat.completions.create(**chat, stream=True))
    assert "".join(part.choices[0].delta.content or "" for part in parts) == said.message.content
    with pytest.raises(openai.BadRequestError, match=r"temperature=-1\.0"):
        client.completions.create(**asked, temperature=-1)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_thousand_clients_and_a_cache_too_small(served, model):
    prompts = [f"client {i}" for i in range(1000)]
    engine = DecodeEngine(model, cache_tokens=100, max_batch=16)
    with running(served, engine=engine, rows=1000) as server:

        def text(prompt: str) -> str:
            body = {"prompt": prompt, "max_tokens": 20, "seed": 5}
            reply = server.ask("/v1/completions", body, timeout_s=1800)  # the last of them waits for all others
            return str(choices(reply)[0]["text"])

        with ThreadPoolExecutor(1000) as pool:
            together = list(pool.map(text, prompts))
    with running(served) as server:
        assert [text(prompt) for prompt in prompts[::20]] == together[::20]


# ---- drawn requests

NAMES = (
    "prompt", "messages", "max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "stop", "stream", "logprobs",
    "echo", "seed", "logit_bias", "model", "suffix", "best_of", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "ignore_eos", "min_tokens", "add_BOS", "stream_options", "tools", "top_logprobs",
    "max_completion_tokens", "response_format", "prompts", "tokens_to_generate", "beam_width", "length_penalty",
    "random_seed", "stop_token", "stop_on_eol", "stop_on_double_eol", "top_p_decay", "top_p_bound",
    "prevent_newline_after_colon", "no_log", "max_len",
)  # fmt: skip
GOOD = {
    "/v1/completions": {"prompt": "the", "max_tokens": 2},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/api": {"prompts": ["the"], "tokens_to_generate": 2},
}


def drawn_value(draw: random.Random, depth: int = 0):
    kinds = [
        lambda: draw.choice([None, True, False]),
        lambda: draw.choice([0, 1, 2, 3, 5, -1, 64, 65, 300, 10**6, 2**31, 2**63, 2**64, -(2**63), 10**30]),
        lambda: draw.choice([0.0, 0.5, 1.0, -0.5, 1.5, 1e-9, 1e30, 1e308, -1e308]),
        lambda: "".join(draw.choice("ab\n:\0\u00e9\u4e2d\U0001f600 ") for _ in range(draw.randrange(12))),
        lambda: draw.choice(["\ud800", "tiny", "user", "text", "x" * 200, "<|endoftext|>", "{{ 1 }}"]),
        lambda: [drawn_value(draw, depth + 1) for _ in range(draw.randrange(4))],
        lambda: {
            draw.choice([*NAMES, "role", "content", "type", "text", "5", "-1"]): drawn_value(draw, depth + 1)
            for _ in range(3)
        },
    ]
    return draw.choice(kinds[: 5 if depth > 3 else None])()


def drawn_request(draw: random.Random):
    path = draw.choice(list(GOOD))
    body = dict(GOOD[path]) if draw.random() < 0.9 else {}
    for _ in range(draw.randrange(4)):
        body[draw.choice(NAMES)] = drawn_value(draw)
    data = json.dumps(body).encode()
    if draw.random() < 0.1:
        place = draw.randrange(len(data))
        data = data[:place] + bytes([draw.randrange(256)]) + data[place + draw.randrange(3) :]
    return path, data


def ask_drawn(server, draw: random.Random, count: int) -> dict[int, int]:
    statuses: dict[int, int] = {}
    for _ in range(count):
        path, data = drawn_request(draw)
        reply = server.ask(path, data, method="PUT" if path == "/api" else "POST")
        assert reply.status in (200, 400, 404), (path, data, reply.status, reply.body)
        statuses[reply.status] = statuses.get(reply.status, 0) + 1
    assert server.server.service.open_rows == 0
    return statuses


@pytest.mark.scaled
def test_drawn_requests_are_answered_or_refused(server):
    statuses = ask_drawn(server, random.Random(46), 80 * SOAK)
    assert min(statuses[200], statuses[400]) > 12, statuses


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_ten_thousand_drawn_requests(server):
    ask_drawn(server, random.Random(7), 10_000)
