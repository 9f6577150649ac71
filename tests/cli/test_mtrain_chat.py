"""`mtrain chat` and `mtrain client`: conversations from lines, Ctrl-C in an answer, a model here and one served."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from cli.console import Console
from cli.conversation import Stop, Turn, converse
from cli.mtrain import main
from mdata.errors import UsageError
from tests.helpers.serving import Running, running
from tests.trainer.convert.hf_models import save
from tests.trainer.serve.conftest import EndlessEngine
from trainer.serve.openai_api import Served
from trainer.tasks.loaded_model import Model

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama2", tmp_path_factory.mktemp("hf") / "tiny", max_position_embeddings=256)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    from cli.mtrain_serve import served_model

    with running(served_model(Model.load(str(folder)), "tiny", template="plain")) as server:
        yield server


def test_a_run_is_asked_with_the_template_of_its_conversations(folder, tmp_path):
    from cli.mtrain_serve import served_model

    (tmp_path / "tokenizer_facts.json").write_text('{"chat_template": "plain"}')
    model = Model.load(str(folder))
    assert served_model(model, "tiny", template=None).template is None
    of_run = dataclasses.replace(model, run_folder=tmp_path)
    assert served_model(of_run, "run", template=None).template.name == "plain"
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    facts = {"chat_template": "mine.jinja", "chat_template_source": source}
    (tmp_path / "tokenizer_facts.json").write_text(json.dumps(facts))
    assert served_model(of_run, "run", template=None).template.source == source
    assert served_model(of_run, "run", template="plain").template.name == "plain"


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch):
    return lambda text: monkeypatch.setattr("sys.stdin", io.StringIO(text))


def said(capsys: pytest.CaptureFixture[str]) -> list[Any]:
    found = json.loads(capsys.readouterr().out)
    return list(found["messages"])


def test_a_chat_here_and_with_a_server_say_the_same(folder, server, lines, capsys):
    options = (
        "--max-tokens",
        "6",
        "--seed",
        "5",
        "--temperature",
        "1",
        "--top-p",
        "1",
        "--system",
        "Be brief.",
        "--json",
    )
    lines("the man\n\nhello\n")
    assert main(["chat", str(folder), "--chat-template", "plain", *options]) == 0
    here = said(capsys)
    assert [turn["role"] for turn in here] == ["system", "user", "assistant", "user", "assistant"]
    lines("the man\nhello\n")
    assert main(["client", server.url, *options]) == 0
    assert said(capsys) == here and here[2]["content"] != here[4]["content"]


def test_lines_are_continued(server, lines, capsys):
    lines("the man\n")
    assert (
        main(["client", server.url.removeprefix("http://"), "--complete", "--max-tokens", "6", "--temperature", "0"])
        == 0
    )
    out, err = capsys.readouterr()
    body = {"prompt": "the man", "max_tokens": 6, "temperature": 0}
    wanted = server.ask("/v1/completions", body).body["choices"][0]["text"]
    assert (
        out.encode(errors="backslashreplace").count(b"\n") >= 1
        and len(out) >= len(wanted)
        and "tiny at 127.0.0.1" in err
    )


def test_a_line_that_is_refused_loses_no_earlier_answers(lines, capsys):
    def answer(turns: Sequence[Turn], stop: Stop) -> Iterator[str]:
        if len(turns) > 1:
            raise UsageError("too long")
        yield "fine"

    lines("one\ntwo\n")
    with pytest.raises(UsageError, match="too long"):
        converse(Console("mtrain", json=True), answer)
    assert [turn["content"] for turn in said(capsys)] == ["one", "fine"]


def test_ctrl_c_stops_the_answer_alone(lines, capsys):
    heard = list[Sequence[Turn]]()

    def answer(turns: Sequence[Turn], stop: Stop) -> Iterator[str]:
        heard.append(turns)
        for word in ("one", "two", "three"):
            if stop.asked:
                return
            yield word
            if word == "two" and len(heard) == 1:
                signal.raise_signal(signal.SIGINT)

    lines("first\nsecond\n/clear\nthird")
    converse(Console("mtrain"), answer, system="s")
    out, err = capsys.readouterr()
    assert out == "onetwo\nonetwothree\nonetwothree\n" and err == "(stopped)\n"
    assert heard[1] == [("system", "s"), ("user", "first"), ("assistant", "onetwo"), ("user", "second")]
    assert heard[2] == [("system", "s"), ("user", "third")]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_hangs_up_on_a_server_that_is_silent(folder, lines, capsys):
    from cli.mtrain_serve import served_model

    with running(served_model(Model.load(str(folder)), "tiny", template="plain"), engine=EndlessEngine()) as server:

        def press() -> None:
            while not server.engine.rows:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

        presser = threading.Thread(target=press)
        presser.start()
        lines("hello\n")
        assert main(["client", server.url]) == 0
        presser.join()
        assert "(stopped)" in capsys.readouterr().err
        while server.engine.rows:
            time.sleep(0.01)


def test_a_closed_input_is_an_empty_one(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", None)
    converse(Console("mtrain", json=True), lambda turns, stop: iter(["never"]))
    assert said(capsys) == []


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("a" * 300, "try: a shorter line, or a smaller --max-tokens"),
        ("hello\r\n" + "a" * 250, "try: /clear starts a new conversation"),
        ("a\udcff", ""),
    ],
)
def test_advice_is_for_what_was_refused(text, advice, folder, lines, capsys):
    lines(text)
    assert main(["chat", str(folder), "--chat-template", "plain", "--max-tokens", "2"]) == 2
    err = capsys.readouterr().err
    assert advice in err and err.count("try:") == bool(advice)


def test_a_line_of_windows_ends_before_its_end(lines, capsys):
    lines("a\r\nb \n")
    converse(Console("mtrain", json=True), lambda turns, stop: iter([turns[-1][1]]))
    assert [turn["content"] for turn in said(capsys)] == ["a", "a", "b ", "b "]


@pytest.mark.timeout(20)
def test_a_stop_while_a_request_is_sent_hangs_up(folder):
    from cli.conversation import Stop
    from cli.mtrain_client import RemoteServer
    from cli.mtrain_serve import served_model

    with running(served_model(Model.load(str(folder)), "tiny", template="plain"), engine=EndlessEngine()) as server:
        stop = Stop()
        stop(signal.SIGINT, None)
        remote = RemoteServer(server.url, key="")
        assert list(remote.stream("/v1/completions", {"prompt": "a", "stream": True}, stop)) == []


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("chat", "MODEL"), 2, "a chat needs a template: the tokenizer has no token <|im_start|>"),
        (("chat", "MODEL", "--chat-template", "plain", "--temperature", "-1"), 2, "temperature=-1.0"),
        (("chat", "MODEL", "--chat-template", "plain", "--max-tokens", "300"), 2, "the context of tiny is 256 tokens"),
        (("client", "127.0.0.1:9"), 2, "nothing answers at 127.0.0.1:9"),
        (("client", "http://[", "--complete"), 2, "http://[ is not a server address"),
        (("client", "URL", "--complete", "--system", "Be brief."), 2, "--system has no effect with --complete"),
        (("client", "URL", "--model", "other"), 2, 'unknown model "other"'),
        (("client", "URL", "--api-key", "KEY", "--top-k", "-2"), 2, "top_k is -2"),
    ],
)
def test_bad_input_is_named(words, code, text, folder, server, lines, capsys):
    lines("hello\n")
    given = {"MODEL": str(folder), "URL": server.url}
    assert main([given.get(word, word) for word in words]) == code
    assert text in capsys.readouterr().err


USERS = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "code", "text"),
    [
        (USERS, 2, "error: --system: message 1: role 'system' is unknown to the chat template, which writes nothing"),
        ("{% if messages[0].role == 'system' %}{{ raise_exception('none') }}{% endif %}" + USERS, 2, "--system: the"),
        ("{% if messages[0].role == 'system' %}{% endif %}" + USERS, 0, "the chat template leaves the system message"),
        ("{% if messages[0].role != 'system' %}{{ raise_exception('it begins') }}{% endif %}{{ messages }}", 0, ""),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", 0, ""),
    ],
)
def test_a_system_message_that_a_template_does_not_write_is_named_once(
    source, code, text, folder, lines, tmp_path, capsys
):
    template = tmp_path / "template.jinja"
    template.write_text(source)
    lines("the man\nhello\n")
    words = ["chat", str(folder), "--chat-template", str(template), "--system", "brief", "--max-tokens", "2"]
    assert main(words) == code
    err = capsys.readouterr().err
    assert text in err and err.count("the chat template") == bool(text)


def test_a_template_is_found_or_missing(folder):
    from cli.mtrain_serve import served_model

    model = Model.load(str(folder), forward=False)
    assert model.module is None
    served = served_model(model, "tiny", template=None)
    assert isinstance(served, Served) and served.template is None and "which ChatML needs" in served.no_template
