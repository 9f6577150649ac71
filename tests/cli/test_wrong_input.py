"""What users mistype: the message names the file or option as they gave it, and what to do instead."""

from __future__ import annotations

import errno
import io
import json
import os
import shlex
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from cli import mdata, mtrain
from tests.helpers.corpora import write_pair
from tests.trainer.convert.hf_models import save

BYTES = ("--tokenizer-type", "ByteTokenizer")
MDATA = [
    ("split c --output new/ --shares 1 1", "output prefix 'new/' has no name after its folder\n  try: new/NAME"),
    ("split c --output 'new/ ' --shares 1 1", "output prefix 'new/ ' has no name after its folder\n  try: new/NAME"),
    ("sample c --output new/ --tokens 5", "try: new/NAME"),
    ("shuffle c --output new/", "try: new/NAME"),
    ("split c --output s --shares 1 -1", "numbers of 0 or more"),
    ("inspect c --documents -1", "'-1' is not an integer of at least 0"),
    ("trace run --step 1 --rows -1", "argument --rows: '-1' is not"),
    ("trace run --step 1 --length -1", "argument --length: '-1' is not"),
    ("trace run --step 1 --component a", "--component does not apply to --step\n  expected: it with --document or"),
    ("trace run --sample 1 --dp-rank 0", "--dp-rank does not apply to --sample\n  expected: it with --step"),
    ("trace run --token 1 --until-step 3", "--until-step does not apply to --token\n  expected: it with --document"),
    ("trace c --sequence-length 2 --sample 0 --dp 0", "steps need --global-batch"),
    ("trace nix --step 1", "there is no nix\n  expected: a run folder, or the path"),
    ("inspect c another", "unrecognized arguments: another\n  try: mdata inspect --help"),
    ("inspect run", "try: this is the folder of a run: mtrain status run, mdata trace run"),
    ("blend --dry-run c --split-shares a,b", "the split string cannot be used\n  found: 'a,b'"),
    ("report c --split-shares many", "the split string cannot be used\n  found: 'many'"),
    ("build c -S 8 --kind ber", "try: bert? See mdata build --help"),
    ("launch locl --parts 2 -- preprocess", "try: local? See mdata launch --help"),
    ("launch local --parts 2 preprocess --input t.jsonl", "-- preprocess ...: the command and its options follow"),
    ("launch local --parts 2 --time 2:00 -- preprocess", "--time does not apply to local\n  expected: launch slurm"),
    ("clean --input t.jsonl --output o --steps c4 --on-error quarantine", "try: --on-error quarantine FILE"),
    ("clean --input t.jsonl --output o --steps url --url-domains run", "a list of blocked addresses: run: Is a dir"),
    (
        "preprocess --input t.jsonl --output-prefix o --skip-rows t.jsonl",
        "t.jsonl has no dedup.json\n  expected: a folder",
    ),
    ("extract --input t.jsonl --input-format html --output o --removed no/x", "creating no/x: No such file or dir"),
    ("scores run", "run is a folder\n  expected: a file of lines of JSON"),
]
MTRAIN = [
    ("convert m new --to mp_rank --tp 0", "--tp 0 --pp 1\n  expected: 1 or more, each"),
    ("-v train run", "-v stands before the command\n  try: mtrain COMMAND -v"),
    ("train run", "try: run/config.toml, the configuration of this run folder"),
    ("config --key trian", "did you mean train?"),
    ("finetune m t.jsonl --task mnl", "try: mnli? See mtrain finetune --help"),
    ("convert m --output hf --to hf", "try: mtrain convert SOURCE TARGET --to FORMAT"),
    ("init --yes --output run", "--output run: this is a folder\n  try: give another --output"),
    ("init --yes --overwrite --output pipe", "--output pipe: this is not a regular file\n  try: give another --output"),
    ("finetune m chats.jsonl --overwrite --output pipe", "--output pipe: this is not a regular file"),
    ("init --yes --output no/run.toml", "--output no/run.toml: there is no folder no"),
    ("init --yes --data mock --gpus 0 --model llama3.2-1c", "try: llama3.2-1b?"),
    ("generate m --input ids.jsonl", "ids.jsonl, line 2: token 99999 is outside the vocabulary"),
    ("logits m --input ids.jsonl --output l", "ids.jsonl, line 2: token 99999 is outside the vocabulary"),
    (
        "logits m --input ok.jsonl --output no/l",
        "error: no/l: No such file or directory\n  try: check the path: there is no",
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus, a text, prompts, a model and the folder of a run."""
    folder = tmp_path_factory.mktemp("wrong")
    write_pair(folder / "c", [[1, 2, 3], [4, 5]])
    (folder / "t.jsonl").write_text('{"text": "a"}\n')
    (folder / "ok.jsonl").write_text('{"prompt": [5, 6]}\n')
    (folder / "ids.jsonl").write_text('{"prompt": [5, 6]}\n{"prompt": [5, 99999]}\n')
    (folder / "run").mkdir()
    os.mkfifo(folder / "pipe")
    for name in ("data.json", "config.toml"):
        (folder / "run" / name).touch()
    save("llama2", folder / "m")
    return folder


@pytest.mark.parametrize(
    ("program", "line", "said"),
    [
        pytest.param(program, *case, id=case[0])
        for program, cases in ((mdata, MDATA), (mtrain, MTRAIN))
        for case in cases
    ],
)
def test_wrong_input_is_answered_by_what_is_right(folder, monkeypatch, capsys, program, line, said):
    monkeypatch.chdir(folder)
    words = shlex.split(line)
    if words[0] == "preprocess":
        words += BYTES
    assert program.main(words) == 2
    assert said in capsys.readouterr().err


def test_rows_left_out_are_explained_by_the_option_that_did_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("t.jsonl").write_text('{"text": "a"}\n' * 5)
    for option in ("--limit", "--skip"):
        words = ("preprocess", "--input", "t.jsonl", "--output-prefix", f"o{option}", *BYTES, option, "2")
        assert mdata.main(words) == 0
        assert f"rows filtered out: by {option}\n" in capsys.readouterr().err


def test_a_manifest_may_stand_for_its_pair(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_pair(tmp_path / "c", [[1, 2, 3], [4, 5]])
    assert mdata.main(("adopt", "c")) == 0
    assert mdata.main(("adopt", "c.json")) == 0
    assert not Path("c.json.json").exists()


def test_thresholds_of_steps_that_do_not_run_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("t.jsonl").write_text('{"text": "a"}\n')
    words = ["clean", "--input", "t.jsonl", "--output", "o", "--steps", "length"]
    idle = ["--gopher-min-words", "7", "--languages", "de", "--no-c4-policy"]
    assert mdata.main([*words, *idle, "--length-min-words", "1"]) == 0
    needs = (
        "--gopher-min-words (needs --steps gopher), --no-c4-policy (needs --steps c4), --languages (needs --steps lang"
    )
    assert f"mdata: options without effect here: {needs}" in capsys.readouterr().err


def test_thresholds_that_remove_nothing_or_everything_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("t.jsonl").write_text('{"text": "a"}\n')
    words = ["clean", "--input", "t.jsonl", "--output", "o", "--steps"]
    assert mdata.main([*words, "length"]) == 2
    assert (
        "step length has no limit\n  try: give one, such as --length-min-words or --length" in capsys.readouterr().err
    )
    assert mdata.main([*words, "gopher", "--gopher-max-words", "10"]) == 2
    assert "--gopher-min-words is 50, above --gopher-max-words\n  found: 10\n" in capsys.readouterr().err
    assert mdata.main([*words, "fineweb", "--fineweb-short-line", "-1"]) == 2
    expected = "--fineweb-short-line is -1\n  expected: 0 or more\n  try: --fineweb-max-short-lines -1 switches the"
    assert expected in capsys.readouterr().err
    assert not Path("o").exists()
    assert mdata.main([*words, "gopher", "--gopher-max-words", "10", "--gopher-min-words", "-1"]) == 0


def test_texts_of_another_job_are_no_corpus(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("t.jsonl").write_text('{"text": "a"}\n')
    assert mdata.main(("clean", "--input", "t.jsonl", "--output", "o", "--steps", "c4")) == 0
    assert mdata.main(("report", "o")) == 2
    assert "o holds the texts of mdata clean, no tokens\n  try: what was removed is counted in o/clean.report" in (
        capsys.readouterr().err
    )


def test_a_model_that_ranks_cannot_share_is_named_with_what_fits(folder, monkeypatch, capsys):
    from trainer.convert.convert import open_model
    from trainer.tasks.loaded_model import check_ranks

    model = open_model(folder / "m", checkpoint="latest", settings=())
    check_ranks(model, 1, 1)
    with pytest.raises(ValueError, match=r"cannot be divided over tp=7 x pp=1 ranks") as refused:
        check_ranks(model, 7, 1)
    assert "expected: tp 1 or 2" in str(refused.value)
    assert "global_batch" not in str(refused.value)


@pytest.fixture
def answering() -> Iterator[list[bytes]]:
    """A server that answers every question with the last of these bodies; its port is the first of them."""
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(b'{"data": [{"id": "m"}]}')

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self._answer(bodies[-1])

        def _answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    bodies.append(str(server.server_port).encode())
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield bodies
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("mode", [(), ("--complete",)])
@pytest.mark.parametrize(
    ("events", "code", "said"),
    [
        (["{}", '{"choices": []}', '{"choices": [{"text": "hi", "delta": {"content": "hi"}}]}'], 0, "hi"),
        (["5"], 2, "does not stream answers as OpenAI's API does\n  found: 5"),
        (['{"choices": 3}'], 2, 'found: {"choices": 3}'),
        (['{"error": "boom"}'], 5, ": boom"),
        (['{"error": {"message": "boom"}}'], 5, ": boom"),
        (None, 2, "found: <html>"),
    ],
)
def test_answers_of_a_server_that_is_not_ours(answering, monkeypatch, capsys, mode, events, code, said):
    port = answering[0].decode()
    answering.append(
        b"<html>\n" if events is None else "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]).encode()
    )
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert mtrain.main(("client", f"127.0.0.1:{port}", *mode)) == code
    printed = capsys.readouterr()
    assert said in (printed.err if code else printed.out)


@pytest.mark.parametrize(
    ("last", "code"),
    [("", 5), ('data: {"choices": [{"finish_reason": "stop"}]}\n\n', 0), ("data: [DONE]\n\n", 0)],
)
def test_an_answer_that_was_cut_off_is_not_taken_for_a_complete_one(answering, monkeypatch, capsys, last, code):
    answering.append(('data: {"choices": [{"delta": {"content": "hi"}}]}\n\n' + last).encode())
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert mtrain.main(("client", f"127.0.0.1:{answering[0].decode()}")) == code
    printed = capsys.readouterr()
    assert printed.out.startswith("hi") and ("was lost" in printed.err) == bool(code)


def test_a_model_without_a_tokenizer_is_scored_with_that_of_the_corpus(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("t.jsonl").write_text('{"text": "a b"}\n{"text": "c"}\n')
    make = ("preprocess", "--input", "t.jsonl", "--output-prefix", "t", "--tokenizer-type", "HuggingFaceTokenizer")
    assert mdata.main((*make, "--tokenizer-model", str(folder / "m"), "--append-eod")) == 0
    shutil.copytree(folder / "m", "bare")
    for path in Path("bare").glob("*token*"):
        if path.name != "generation_config.json":
            path.unlink()
    capsys.readouterr()
    scores = []
    for model in (str(folder / "m"), "bare"):
        words = ("eval", model, "--task", "perplexity", "--data", "t_text_document", "--json")
        assert mtrain.main(words) == 0
        scores.append(json.loads(capsys.readouterr().out)["total"])
    assert scores[0] == scores[1]
    assert scores[1]["bytes"]


def test_weights_that_may_not_be_read_are_not_called_damaged(folder, monkeypatch, capsys):
    opened = Path.open

    def locked(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.suffix == ".safetensors":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *arguments, **options)

    monkeypatch.chdir(folder)
    monkeypatch.setattr(Path, "open", locked)
    assert mtrain.main(["generate", "m", "--prompt", "a"]) == 2
    assert "reading the weights: m/model.safetensors: Permission denied\n  try: check the" in capsys.readouterr().err
