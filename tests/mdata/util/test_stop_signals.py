"""Stop requests take effect, whatever a library does with them: at random moments of a run with each engine."""

from __future__ import annotations

import importlib
import json
import os
import random
import shutil
import signal
import threading
import time
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import mdata
from mdata import StoppedError
from mdata.errors import MdataError, UsageError
from mdata.manifest.io import load_manifest
from mdata.preprocessing.finished import PreprocessResult
from mdata.sentences.splitter import build_splitter, load_splitter
from mdata.tokenizer_training.tokenizer_benchmark import train_small_tokenizers
from mdata.util.stop_signals import LibraryError, library_errors, raise_pending_stop, stop_requests
from tests.helpers.runs import write_jsonl
from tests.mdata.sentences import visible

GOLDEN = Path(__file__).parents[2] / "golden"
HF = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(GOLDEN / "tokenizer")}
CHUNK_BYTES = 4000
MOMENTS, MANY = 4, 200


def stopped() -> StoppedError:
    return StoppedError("asked to stop")


def test_a_request_is_no_error_that_anyone_catches_to_go_on():
    assert not issubclass(StoppedError, Exception) and not issubclass(StoppedError, MdataError)
    assert StoppedError.exit_code == 75
    assert str(StoppedError("time is up", fix="run again")) == "time is up\n  try: run again"


@pytest.mark.parametrize(("number", "kind"), [(signal.SIGTERM, StoppedError), (signal.SIGINT, KeyboardInterrupt)])
@pytest.mark.parametrize("end", [lambda: None, lambda: {}["what the library made of it"], raise_pending_stop])
def test_a_request_that_was_dropped_is_raised_later(number, kind, end):
    before = signal.getsignal(number)
    with pytest.raises(kind), stop_requests(stopped):
        drop(number)
        end()
    assert signal.getsignal(number) is before
    raise_pending_stop()


def test_a_destructor_that_drops_a_request_says_nothing(capsys):
    class Left:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0)

    with pytest.raises(StoppedError, match="asked to stop"), stop_requests(stopped):
        Left()
        raise_pending_stop()
    assert capsys.readouterr() == ("", "")


def drop(number: int) -> None:
    """What a destructor does, or a library that clears Python's error."""
    with suppress(BaseException):
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("kinds", [(), (RuntimeError,)])
@pytest.mark.parametrize("translated", [RuntimeError, type("PanicException", (BaseException,), {})])
def test_a_library_may_give_a_request_another_name(kinds, translated):
    with pytest.raises(StoppedError, match="asked to stop"), stop_requests(stopped), library_errors(*kinds):
        drop(signal.SIGTERM)
        raise translated("interrupted by a callback")


def test_errors_of_libraries_are_one_line():
    with pytest.raises(LibraryError, match=r"^no such thing$"), library_errors(ValueError):
        raise ValueError("no  such\n thing")
    with pytest.raises(LibraryError, match=r"^KeyError$"), library_errors():
        raise KeyError
    with pytest.raises(KeyError, match="of ours"), library_errors(ValueError):
        raise KeyError("a fault of ours")
    with pytest.raises(TypeError), library_errors(passed=(TypeError,)):
        raise TypeError
    with pytest.raises(KeyboardInterrupt), library_errors():
        raise KeyboardInterrupt


def test_ignored_signals_stay_ignored_and_threads_have_none():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stop_requests(stopped):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)

    def in_a_thread() -> None:
        with stop_requests(stopped):
            heard.append(signal.getsignal(signal.SIGTERM))
        raise_pending_stop()

    heard: list[object] = []
    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    assert heard == [signal.getsignal(signal.SIGTERM)]


class Run(NamedTuple):
    """One way in which a run uses a library."""

    changes: dict[str, object]
    level: str = "document"


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Run]:
    """Every engine, and every library that reads."""
    folder = tmp_path_factory.mktemp("signals")
    jsonl = write_jsonl(folder / "x.jsonl", seed=1)
    texts = [json.loads(line)["text"] for line in jsonl.read_text().splitlines()]
    pq.write_table(pa.table({"text": texts}), folder / "x.parquet", row_group_size=10)
    chats = [[{"role": "user", "content": text}, {"role": "assistant", "content": text[:20]}] for text in texts]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    (folder / "template").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    tables = str(visible.write(folder / "nltk"))
    plain = {"input": (str(jsonl),), "on_error": "skip", "workers": 1, "chunk_bytes": CHUNK_BYTES, "checkpoint_s": 0.0}
    found = {f"byte-level BPE, {name}": Run({**plain, **HF, "engine": name}) for name in ("gigatoken", "tiktoken")}
    found["byte-level BPE, tokenizers"] = Run({**plain, **HF, "engine": "tokenizers"})
    for form, spec in islice(train_small_tokenizers(folder), 4):
        given = {"tokenizer_type": spec.type, "tokenizer_model": spec.model, "vocab_file": spec.vocab_file}
        for engine in ENGINES_OF.get(form, ()):
            found[f"{form}, {engine}"] = Run({**plain, **given, "engine": engine})
    found["parquet"] = Run({**plain, **HF, "input": (str(folder / "x.parquet"),)})
    chat = {"chat": True, "chat_template": str(folder / "template"), "json_keys": ("messages",), "append_eod": True}
    found["jinja"] = Run({**plain, **HF, **chat, "input": (str(folder / "chats.jsonl"),)}, "chat")
    split = {"split_sentences": True, "nltk_data": tables, "lang": "ours"}
    found["sentences"] = Run({**plain, **HF, **split}, "sentence")
    return found


ENGINES_OF = {
    "the same as ranks": ("gigatoken", "tiktoken"),
    "WordPiece": ("mdata", "tokenizers"),
    "SentencePiece BPE": ("mdata", "sentencepiece"),
}
NAMES = [
    *(f"byte-level BPE, {name}" for name in ("gigatoken", "tiktoken", "tokenizers")),
    *(f"{form}, {engine}" for form, engines in ENGINES_OF.items() for engine in engines),
    "parquet",
    "jinja",
    "sentences",
]


class Timer:
    """Calls the handler of SIGTERM from a timer of the system: a library may hold Python's lock meanwhile."""

    def __init__(self) -> None:
        self.fired = False

    def __call__(self, number: int, frame: object) -> None:
        self.fired = True
        signal.getsignal(signal.SIGTERM)(signal.SIGTERM, frame)

    @contextmanager
    def after(self, delay_s: float):
        before = signal.signal(signal.SIGALRM, self)
        signal.setitimer(signal.ITIMER_REAL, max(delay_s, 1e-6))
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


@pytest.fixture
def timer(monkeypatch) -> Timer:
    """A timer; no chunk may be begun after it has fired."""
    timer = Timer()
    workers = importlib.import_module("mdata.preprocessing.worker_pool")
    real = workers.encode_chunk

    def encode_chunk(*arguments, **more):
        assert not timer.fired, "a chunk was begun after the request to stop"
        return real(*arguments, **more)

    monkeypatch.setattr(workers, "encode_chunk", encode_chunk)
    return timer


def preprocess(run: Run, folder: Path) -> PreprocessResult:
    return mdata.preprocess(mdata.PreprocessOptions(output_prefix=str(folder / "out"), **run.changes))


def check_moments(run: Run, folder: Path, timer: Timer, *, moments: int) -> None:
    """A request at each of so many moments is the request; what was made of it, and of what follows, is right."""
    began = time.perf_counter()
    whole = preprocess(run, folder / "whole").manifests
    took_s = time.perf_counter() - began
    draw = random.Random(moments)
    again = folder / "again"
    for moment in range(moments):
        shutil.rmtree(again, ignore_errors=True)
        again.mkdir()
        timer.fired = False
        outcome = "done"
        try:
            with stop_requests(stopped), timer.after(draw.random() * took_s):
                preprocess(run, again)
        except StoppedError:
            outcome = "stopped"
        assert outcome == ("stopped" if timer.fired else "done"), moment
        path = again / f"out_text_{run.level}.json"
        if path.exists():
            assert load_manifest(path).id == next(iter(whole.values())).id
    timer.fired = False
    made = preprocess(run, again).manifests
    assert {name: manifest.id for name, manifest in made.items()} == {n: m.id for n, m in whole.items()}
    assert [m.provenance.skipped for m in made.values()] == [m.provenance.skipped for m in whole.values()]


@pytest.mark.parametrize("name", NAMES)
def test_a_request_is_heard_inside_of_each_library(runs, tmp_path, timer, name):
    check_moments(runs[name], tmp_path, timer, moments=MOMENTS)


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_a_request_is_heard_at_200_moments(runs, tmp_path, timer, name):
    check_moments(runs[name], tmp_path, timer, moments=MANY)


@pytest.mark.parametrize("moments", [MOMENTS, pytest.param(MANY, marks=pytest.mark.soak)])
def test_a_request_is_heard_while_nltk_splits(tmp_path, moments):
    def split() -> None:
        files = load_splitter("ours", nltk_data=str(visible.write(folder))).files
        splitter = build_splitter(files, language="ours", keep_newlines=False, engine="nltk")
        splitter.split_batch([" ".join(visible.WORDS)] * 50)

    folder, timer, draw = tmp_path / "0", Timer(), random.Random(moments)
    began = time.perf_counter()
    split()
    took_s = time.perf_counter() - began
    for moment in range(moments):
        folder, timer.fired = tmp_path / str(moment + 1), False
        outcome = "done"
        try:
            with stop_requests(stopped), timer.after(draw.random() * took_s):
                split()
        except StoppedError:
            outcome = "stopped"
        assert outcome == ("stopped" if timer.fired else "done"), moment


class Dropping:
    """A library that drops what comes while it works, or makes an error of its own of it."""

    def __init__(self, real: object, how: str) -> None:
        self._real, self._how = real, how

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)

    def encode_batch_fast(self, *arguments: object, **more: object) -> object:
        drop(signal.SIGTERM)
        if self._how == "another name":
            raise Exception("interrupted")
        return self._real.encode_batch_fast(*arguments, **more)


@pytest.mark.parametrize("how", ["dropped", "another name"])
def test_a_row_is_never_bad_because_of_a_request(tmp_path, runs, monkeypatch, timer, how):
    """With one worker the library works in the process that hears the request."""
    engines = importlib.import_module("mdata.tokenizers.engines.libraries")
    real = engines._load_tokenizers_library
    monkeypatch.setattr(engines, "_load_tokenizers_library", lambda definition: Dropping(real(definition), how))
    with pytest.raises(StoppedError, match="asked to stop"), stop_requests(stopped):
        preprocess(runs["byte-level BPE, tokenizers"], tmp_path)
    assert not list(tmp_path.glob("out*"))


def test_a_library_that_refuses_still_refuses(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "no such model"}}')
    with stop_requests(stopped), pytest.raises(UsageError, match="not a tokenizer"):
        mdata.load_tokenizer("HuggingFaceTokenizer", tmp_path)
