"""Every kind that can be trained: the same bytes each time, loadable by Megatron's names, and texts survive."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Engine

import mdata
from mdata.tokenizer_training import trainers
from mdata.tokenizer_training.train import TrainedTokenizer, train_tokenizer
from mdata.tokenizer_training.train_options import TrainOptions
from mdata.tokenizer_training.trainers import Task, _sentences, train
from mdata.tokenizers.base.tokenizer_folder import write_folder
from tests.conftest import ROOT
from tests.helpers.failures import crash_at, durable_calls

WORDS = ["stone", "river", "bridge", "Caf\u00e9", "na\u00efve", "\u0441\u043b\u043e\u0432\u043e", "2026", "17"]
WORDS += [a + b + c for a in ("st", "br", "l", "cl") for b in ("a", "o", "i") for c in ("n", "nd", "ver", "mp", "ck")]
KINDS = ("byte-bpe", "wordpiece", "sentencepiece-bpe", "sentencepiece-unigram")
SIZES = {"byte-bpe": 300, "wordpiece": 140, "sentencepiece-bpe": 90, "sentencepiece-unigram": 60}
TYPES = {
    "byte-bpe": ["GPT2BPETokenizer", "HuggingFaceTokenizer"],
    "wordpiece": ["BertWordPieceCase", "HuggingFaceTokenizer"],
    "sentencepiece-bpe": ["SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"],
    "sentencepiece-unigram": ["SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"],
}


@pytest.fixture
def here(monkeypatch):
    """Learn in this process, which is quicker; that the other one gives the same has a test of its own."""

    def learn_here(task, texts, *, progress):
        try:
            return train(task, texts)
        except RuntimeError as error:
            raise trainers.refusal(str(error)) from error

    monkeypatch.setattr(sys.modules["mdata.tokenizer_training.train"], "train_in_process", learn_here)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "x.jsonl"
    rows = [" ".join(WORDS[(i * k + i * i) % len(WORDS)] for k in range(1, 12)) for i in range(300)]
    path.write_text("".join(json.dumps({"text": row + "."}) + "\n" for row in rows))
    return path


def made(text: Path, output: Path, kind: str, **options) -> TrainedTokenizer:
    size = options.pop("vocab_size", SIZES[kind])
    return train_tokenizer([text], output, kind=kind, vocab_size=size, options=TrainOptions(**options))


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def visible_content(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in content(folder).items() if not name.startswith(".")}


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_files_each_time_and_every_type_reads_them(text, tmp_path, kind):
    first = made(text, tmp_path / "a", kind)
    made(text, tmp_path / "b", kind)
    assert content(tmp_path / "a") == content(tmp_path / "b")
    assert first.entries == SIZES[kind] and not first.there_before
    assert [spec.type for spec in first.specs] == TYPES[kind]
    loaded = [mdata.load_tokenizer(spec) for spec in first.specs]
    sample = "stone na\u00efve \u0441\u043b\u043e\u0432\u043e 17."
    ids = [tokenizer.encode_batch([sample])[0].tolist() for tokenizer in loaded]
    assert all(one == ids[0] for one in ids) and len(ids[0]) < len(sample)
    around = (len("[CLS]"), -len("[SEP]")) if kind == "wordpiece" else (0, None)
    decoded = loaded[0].decode(ids[0])[slice(*around)]
    assert decoded.replace(" ", "") == sample.replace(" ", "")
    assert {"byte-bpe": 0, "wordpiece": 3}.get(kind, 2) == first.tokenizer.eod
    assert train_tokenizer([text], tmp_path / "a", kind=kind, vocab_size=SIZES[kind]).there_before


@pytest.mark.usefixtures("here")
def test_wordpiece_entries(text, tmp_path):
    made(text, tmp_path / "a", "wordpiece", special_tokens=("[X]",))
    entries = (tmp_path / "a/vocab.txt").read_text().splitlines()
    assert entries[:6] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[X]"] and len(set(entries)) == len(entries)
    characters = sorted(set("".join(WORDS) + "."))
    assert entries[6 : 6 + 2 * len(characters)] == [*characters, *(f"##{c}" for c in characters)]
    assert "stone" in entries


@pytest.mark.usefixtures("here")
def test_wordpiece_of_lower_case(text, tmp_path):
    tokenizer = made(text, tmp_path / "a", "wordpiece", lower_case=True).tokenizer
    assert tokenizer.name == "BertWordPieceLowerCase"
    ids, _ = tokenizer.encode_batch(["STONE CAF\u00c9", "stone cafe"])
    assert ids[: len(ids) // 2].tolist() == ids[len(ids) // 2 :].tolist()
    entries = (tmp_path / "a/vocab.txt").read_text().splitlines()[5:]
    assert "stone" in entries and not any(entry != entry.lower() for entry in entries)
    whole = Engine.from_file(str(tmp_path / "a/tokenizer.json"))
    assert whole.encode("STONE CAF\u00c9").ids == ids[: len(ids) // 2].tolist()


@pytest.mark.usefixtures("here")
def test_rare_characters_are_unknown(text, tmp_path):
    path = tmp_path / "y.jsonl"
    path.write_text(text.read_text() + json.dumps({"text": "\u4e16"}) + "\n")
    entries = {}
    for share in (1.0, 0.999):
        made(path, tmp_path / str(share), "wordpiece", character_coverage=share)
        entries[share] = (tmp_path / str(share) / "vocab.txt").read_text().splitlines()
    assert "\u4e16" in entries[1.0] and "\u4e16" not in entries[0.999]
    with pytest.raises(mdata.UsageError, match=r"too small for the characters of this text(.|\n)*at least \d+ entries"):
        made(path, tmp_path / "z", "wordpiece", vocab_size=40)


@pytest.mark.usefixtures("here")
def test_special_tokens_are_known_to_each_type(text, tmp_path):
    done = made(text, tmp_path / "a", "byte-bpe", special_tokens=("<|im_start|>", "<|im_end|>"))
    for spec in done.specs:
        tokenizer = mdata.load_tokenizer(spec)
        assert tokenizer.encode_batch(["<|im_end|>"])[0].tolist() == [2] and tokenizer.eod == 0


@pytest.mark.usefixtures("here")
def test_the_form_of_llama2(text, tmp_path):
    import sentencepiece

    done = made(text, tmp_path / "a", "sentencepiece-bpe", preset="llama2", vocab_size=340)
    assert done.specs[0].type == "Llama2Tokenizer" and done.tokenizer.name == "Llama2Tokenizer"
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "a/tokenizer.model"))
    assert [model.IdToPiece(i) for i in range(4)] == ["<unk>", "<s>", "</s>", "<0x00>"]
    assert model.IsByte(3) and model.pad_id() == -1
    assert model.Decode(model.Encode("a  \u4e16 12\n\tb")) == "a  \u4e16 12\n\tb"
    pieces = [model.IdToPiece(i) for i in range(259, model.GetPieceSize())]
    assert "1" in pieces and not [p for p in pieces if len(p) > 1 and any(c.isdigit() for c in p)]


@pytest.mark.usefixtures("here")
def test_options_of_sentencepiece(text, tmp_path):
    import sentencepiece

    done = made(
        text,
        tmp_path / "a",
        "sentencepiece-unigram",
        pad=True,
        user_symbols=("<sep>",),
        special_tokens=("<ctl>",),
        byte_fallback=True,
        split_digits=True,
        normalization="identity",
        vocab_size=330,
    )
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "a/tokenizer.model"))
    assert done.entries == model.GetPieceSize() <= 330 and model.pad_id() == 3 and model.IdToPiece(3) == "<pad>"
    assert model.IsControl(model.PieceToId("<ctl>")) and "<sep>" in model.EncodeAsPieces("stone<sep>river")
    assert model.PieceToId("2026") == model.unk_id()


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("kind", "options", "message"), [
    ("wordpiece", {"vocab_size": 10**9}, r"a vocabulary of 1000000000 is too large(.|\n)*at most 16777216"),
    ("byte-bpe", {"vocab_size": 256}, r"a vocabulary of 256 is too small(.|\n)*at least 257"),
    ("byte-bpe", {"vocab_size": 258, "special_tokens": ("<a>", "<b>")}, "at least 259"),
    ("wordpiece", {"vocab_size": 4}, "at least 5"),
    ("sentencepiece-bpe", {"vocab_size": 258, "preset": "llama2"}, "at least 259"),
    ("byte-bpe", {"lower_case": True}, r"lower_case has no meaning for byte-bpe(.|\n)*wordpiece"),
    ("wordpiece", {"preset": "llama2"}, r"preset has no meaning for wordpiece(.|\n)*sentencepiece-unigram"),
    ("wordpiece", {"character_coverage": 0.1}, r"character_coverage=0\.1"),
    ("byte-bpe", {"sample_bytes": 0}, "sample_bytes=0"),
    ("byte-bpe", {"special_tokens": ("a", "a")}, "must be different"),
    ("byte-bpe", {"special_tokens": ("",)}, "must be different and not empty"),
    ("sentencepiece-bpe", {"preset": "llama9"}, "preset='llama9'"),
    ("sentencepiece-bpe", {"vocab_size": 20}, r"sentencepiece cannot train on these texts(.|\n)*required_chars"),
])  # fmt: skip
def test_what_cannot_be_trained(text, tmp_path, kind, options, message):
    with pytest.raises(mdata.UsageError, match=message):
        made(text, tmp_path / "a", kind, **options)
    assert not (tmp_path / "a").exists()


def test_an_unknown_kind(text, tmp_path):
    with pytest.raises(mdata.UsageError, match=r"kind='word-piece'(.|\n)*wordpiece\?"):
        train_tokenizer([text], tmp_path / "a", kind="word-piece", vocab_size=300)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("line", ["", '{"text": " "}\n', '{"text": []}\n'])
def test_nothing_to_learn_from(tmp_path, kind, line):
    (tmp_path / "x.jsonl").write_text(line)
    with pytest.raises(mdata.UsageError, match="there is no text to train on"):
        made(tmp_path / "x.jsonl", tmp_path / "a", kind)
    assert not (tmp_path / "a").exists()


@pytest.mark.usefixtures("here")
def test_another_tokenizer_is_kept_unless_it_may_go(text, tmp_path):
    made(text, tmp_path / "a", "byte-bpe")
    before = content(tmp_path / "a")
    with pytest.raises(mdata.UsageError, match=r"holds another tokenizer(.|\n)*merges\.txt(.|\n)*or --overwrite"):
        made(text, tmp_path / "a", "byte-bpe", vocab_size=290)
    with pytest.raises(mdata.UsageError, match=r"holds another tokenizer(.|\n)*vocab\.json(.|\n)*another folder$"):
        made(text, tmp_path / "a", "wordpiece", overwrite=True)
    assert content(tmp_path / "a") == before
    made(text, tmp_path / "a", "byte-bpe", vocab_size=290, overwrite=True)
    assert len(json.loads((tmp_path / "a/vocab.json").read_text())) == 290


@pytest.mark.parametrize("output", ["a file", "a file/a", "a file/a/b"])
def test_an_output_that_cannot_be_a_folder_is_refused_before_the_text_is_read(text, tmp_path, monkeypatch, output):
    monkeypatch.setattr(sys.modules["mdata.tokenizer_training.train"], "take_sample", pytest.fail)
    (tmp_path / "a file").touch()
    with pytest.raises(mdata.UsageError, match=r"writing the tokenizer to .*a file.*: Not a directory\n  try: use ano"):
        made(text, tmp_path / output, "byte-bpe")


def test_a_folder_that_takes_no_files_is_refused_before_the_text_is_read(text, monkeypatch):
    monkeypatch.setattr(sys.modules["mdata.tokenizer_training.train"], "take_sample", pytest.fail)
    with pytest.raises(mdata.MdataError, match=r"writing the tokenizer to /proc/1/a: /proc/1: "):
        made(text, Path("/proc/1/a"), "byte-bpe")


@pytest.mark.usefixtures("here")
def test_the_current_folder_can_be_the_output(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made(text, Path(), "byte-bpe")
    assert {path.name for path in tmp_path.iterdir()} >= {"tokenizer.json", "vocab.json", "merges.txt"}


@pytest.mark.usefixtures("here")
def test_failures_of_the_disk(text, tmp_path, monkeypatch):
    with durable_calls(monkeypatch) as calls:
        made(text, tmp_path / "a", "wordpiece")
    assert len(calls.seen) >= 12
    for number in range(len(calls.seen)):
        output = tmp_path / f"b{number}"
        with durable_calls(monkeypatch, number), pytest.raises(mdata.ResourceError, match="No space left"):
            made(text, output, "wordpiece")
        assert not output.exists()


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("kind", ["byte-bpe", pytest.param("wordpiece", marks=pytest.mark.soak), "sentencepiece-bpe"])
def test_a_crash_while_overwriting_leaves_no_mixture(text, tmp_path, kind):
    made(text, tmp_path / "old", kind)
    made(text, tmp_path / "new", kind, special_tokens=("<new>",))
    old, new = visible_content(tmp_path / "old"), visible_content(tmp_path / "new")
    changed = {name for name in new if old[name] != new[name]}
    assert len(changed) > 1 or kind == "sentencepiece-bpe"
    output = tmp_path / "x"
    n, crashed = 0, True
    while crashed:
        shutil.rmtree(output, ignore_errors=True)
        shutil.copytree(tmp_path / "old", output)
        crashed = crash_at(n, lambda: write_folder(output, new))
        there = visible_content(output)
        there_changed = {name: there[name] for name in changed & set(there)}
        assert there_changed.items() <= old.items() or there_changed.items() <= new.items(), f"a mixture after call {n}"
        assert there_changed if kind == "sentencepiece-bpe" else "tokenizer.json" not in there or set(there) == set(new)
        write_folder(output, new)
        assert visible_content(output) == new
        n += 1
    assert n > 3


def test_long_lines_are_cut_where_no_piece_can_notice():
    line = " ".join(f"word{number}" for number in range(5000))
    parts = list(_sentences(iter([line, "a\nb\n\nc", "x" * 5000, "\u2581\0"])))
    assert all(0 < len(part) <= 2048 for part in parts)
    cut = parts.index("a")
    assert " ".join(parts[:cut]) == line
    assert parts[cut:] == ["a", "b", "c", "x" * 2048, "x" * 2048, "x" * 904, "  "]


def test_a_child_that_dies_is_told(monkeypatch):
    with pytest.raises(mdata.ResourceError, match=r"the training process died(.|\n)*exit code"):
        trainers.train_in_process(Task(kind="byte-bpe", vocab_size=-1), iter(["a"]))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(mdata.ResourceError, match="exit code 1"):
        trainers.train_in_process(Task(kind="wordpiece", vocab_size=10), iter(["a" * 10**6] * 10))


def test_an_error_of_the_input_ends_the_child():
    def texts():
        yield "a"
        raise mdata.BadInputError("this row")

    with pytest.raises(mdata.BadInputError, match="this row"):
        trainers.train_in_process(Task(kind="byte-bpe", vocab_size=300), texts())


def test_the_child_gives_what_learn_gives(text):
    texts = [json.loads(line)["text"] for line in text.read_text().splitlines()]
    for kind in ("byte-bpe", "sentencepiece-bpe"):
        task = Task(kind=kind, vocab_size=300 if kind == "byte-bpe" else 80)
        assert trainers.train_in_process(task, iter(texts)) == train(task, iter(texts))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_stopped_while_it_learns(tmp_path, number, code):
    """At once, with one line, without files and without a process that goes on."""
    path = tmp_path / "x.jsonl"
    words = (f"w{n:x}q{n * n:x}" for n in range(400_000))
    path.write_text("".join(json.dumps({"text": " ".join(islice(words, 1000))}) + "\n" for _ in range(400)))
    line = [sys.executable, "-m", "cli.mdata", "train-tokenizer", "--kind", "sentencepiece-unigram", "--vocab-size"]
    line += ["8000", "--input", str(path), "--output", str(tmp_path / "a")]
    child = subprocess.Popen(line, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        learner = _child_of(child.pid)
        time.sleep(0.5)
        child.send_signal(number)
        _, error = child.communicate(timeout=20)
    finally:
        child.kill()
    assert child.returncode == code and "Traceback" not in error
    assert not (tmp_path / "a").exists()
    assert not Path(f"/proc/{learner}").exists()


def _child_of(process: int) -> int:
    for _ in range(600):
        for task in Path(f"/proc/{process}/task").iterdir():
            if children := (task / "children").read_text().split():
                return int(children[0])
        time.sleep(0.05)
    raise AssertionError(f"process {process} of {os.getpid()} started none")
