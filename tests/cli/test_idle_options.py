"""No option is silently ignored: one without effect in a combination is reported, or refused."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest

import mdata
from cli import preprocess_options
from cli.console import Parser
from cli.mdata import COMMANDS, main
from mdata.preprocessing.plan import NEEDS
from tests.helpers.corpora import write_pair
from tests.helpers.notes import Notes

# The options of each command that count in every combination, with the reason where it is not plain.
ALWAYS = {
    "preprocess": {
        "--input", "--output-prefix", "--json-keys", "--tokenizer-type", "--split-sentences", "--append-eod", "--chat",
        "--workers", "--partitions", "--shard",
        "--input-format", "--text-template", "--where", "--skip-rows", "--holdout", "--on-error", "--max-record-bytes",
        "--skip", "--limit", "--min-tokens", "--max-tokens", "--tokens-column",
        "--dry-run", "--overwrite", "--dataset-impl",  # one value, which is what is written
    },
    "train-tokenizer": {
        "--input", "--output", "--vocab-size", "--kind", "--json-keys", "--input-format", "--max-record-bytes",
        "--on-error", "--special-tokens", "--overwrite",  # it permits
        "--sample-bytes", "--seed",  # the size of the input decides, and a note says how much is learnt from
    },
    "blend": {
        "--output", "--dry-run", "--sequence-length", "--split-shares", "--tokens",
        "--tokenizer-unknown", "--allow-overlap", "--allow-outside",  # they permit
    },
    "build": {
        "--data-path", "--sequence-length", "--order", "--kind", "--whole", "--seed", "--cache", "--threads",
        "--tokenizer-unknown", "--allow-outside",  # they permit
    },
    "adopt": {"--full", "--convert", "--level", "--tokenizer-type"},
    "stage": {
        "--steps", "--samples", "--cache", "--cache-size", "--sequence-length", "--seed", "--order", "--kind",
        "--split", "--split-shares", "--num-samples", "--option", "--allow-outside",
    },
}  # fmt: skip
BYTE = ["--tokenizer-type", "ByteTokenizer"]
# By command: words in which each of the others has no effect.
IDLE = {
    "preprocess": {
        "--lang": ["german"], "--keep-newlines": [], "--nltk-data": ["x"], "--chat-template": ["plain"],
        "--chat-train-on": ["all"], "--keep-sequential-samples": [], "--text-documents": ["paragraph"],
        "--chat-schema": ["alpaca"], "--chat-date": ["2026-11-27"],
        "--engine": ["gigatoken"], "--tokenizer-model": ["x"], "--vocab-file": ["x"], "--merge-file": ["x"],
        "--vocab-size": ["9"], "--null-tokenizer-eod-id": ["3"], "--tokenizer-special-tokens": ["<a>"],
        "--tokenizer-hf-no-include-special-tokens": [], "--tokenizer-sentencepiece-legacy": [],
        "--no-tokenizer-sentencepiece-ignore-extra-whitespaces": [], "--tiktoken-pattern": ["v1"],
        "--tiktoken-num-special-tokens": ["9"], "--special-tokens-in-text": ["plain"], "--compat": ["megatron-2023"],
        "--include": ["*.gz"], "--exclude": ["*.gz"], "--quarantine": ["q", "--on-error", "skip"],
        "--max-errors": ["5"], "--verify-input": [], "--work-folder": ["x"],
        **{name: {0: [], 1: ["7"], "+": ["7"]}[count] for name, count in preprocess_options.IGNORED.items()},
        **{name: ["x"] for name in preprocess_options.REFUSED},
    },
    "train-tokenizer": {
        "--text-documents": ["paragraph"], "--include": ["*.gz"], "--exclude": ["*.gz"], "--lower-case": [],
        "--character-coverage": ["0.9"], "--preset": ["llama2"], "--byte-fallback": [], "--split-digits": [],
        "--pad": [], "--user-symbols": ["a"], "--normalization": ["nfkc"],
    },
    "blend": {
        "--samples": ["9"], "--alpha": ["0.5", "1", "a", "2", "b"], "--exhaustive": ["1", "a", "2", "b"],
        "--redistribute": ["a", "b"], "--merge-same": [], "--train-data-path": ["a", "--data-args-path", "words"],
        "--valid-data-path": ["a", "--data-args-path", "words"], "--test-data-path": ["a", "--data-args-path", "words"],
        "--per-split-data-args-path": ["x", "--data-args-path", "words"],
        "--data-args-path": ["words", "--train-data-path", "a"], "--from": ["a.json", "a"], "--at-sample": ["9", "a"],
        "--set": ["a=1", "--remove", "b"], "--add": ["1", "b"], "--remove": ["a"], "--replace": ["a=b"],
    },
    "build": {
        "--split-shares": ["9,1,0", "--whole"], "--train-samples": ["9"],
        "--valid-samples": ["9", "--order", "megatron"], "--test-samples": ["9", "--order", "megatron", "--whole"],
        "--blend-surplus": ["0.1"],
        "--no-extra-token": ["--kind", "bert"], "--keep-partial": [], "--longer": ["drop"], "--decoder-length": ["8"],
        "--no-head": [], "--short-probability": ["0.2"],
    },
    "adopt": {
        "--threads": ["2", *BYTE], "--fairseq-ids-plus-one": BYTE, "--tokenizer-model": ["x"], "--vocab-file": ["x"],
        "--merge-file": ["x"], "--vocab-size": ["9"], "--null-tokenizer-eod-id": ["3"],
        "--tokenizer-special-tokens": ["<a>"], "--tokenizer-hf-no-include-special-tokens": [],
        "--tokenizer-sentencepiece-legacy": [], "--no-tokenizer-sentencepiece-ignore-extra-whitespaces": [],
        "--tiktoken-pattern": ["v1"], "--tiktoken-num-special-tokens": ["9"], "--special-tokens-in-text": ["plain"],
        "--compat": ["megatron-2023"],
    },
    "stage": {
        "--dp-ranks": ["0:1"], "--global-batch": ["4"], "--rampup-batch-size": ["1", "1", "9"],
        "--micro-batch": ["1"], "--dp": ["2"], "--dataloader-type": ["cyclic"],
        "--no-data-sharding": [], "--blend": ["b"], "--validation": ["b"], "--test": ["b"],
    },
}  # fmt: skip
WORDS = {
    "preprocess": ["--input", "x.jsonl", "--output-prefix", "out", *BYTE, "--workers", "1"],
    "train-tokenizer": ["--input", "x.jsonl", "--output", "tok", "--vocab-size", "300"],
    "blend": ["-o", "mix.json"],
    "build": ["a", "--sequence-length", "8"],
    "adopt": ["a"],
    "stage": ["a", "--sequence-length", "8", "--cache", "c", "--samples", "0:3"],
}
CASES = [(command, option, words) for command, cases in IDLE.items() for option, words in cases.items()]


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": "some text here"}) + "\n")
    (tmp_path / "words").write_text("a b")
    for name, length in (("a", 40), ("b", 41)):
        write_pair(tmp_path / name, [[length]])
    return tmp_path


@pytest.mark.parametrize("command", sorted(IDLE))
def test_every_option_of_the_parser_is_judged(command):
    parser = Parser(prog="mdata")
    import_module(next(one.module for one in COMMANDS if one.name == command), "cli").add_arguments(parser)
    there = {action.option_strings[0]: action.option_strings for action in parser._actions if action.option_strings}
    judged = ALWAYS[command] | set(IDLE[command])
    assert not ALWAYS[command] & set(IDLE[command])
    unknown = [name for name, names in there.items() if name != "-h" and not judged & set(names)]
    assert not unknown, "say in this file where these have no effect, or that they always have one"
    assert judged <= {name for names in there.values() for name in names}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("command", "option", "words"), CASES)
def test_an_option_without_effect_is_told_or_refused(capsys, command, option, words):
    code = main([command, *WORDS[command], option, *words])
    heard = capsys.readouterr().err
    field = option.removeprefix("--").replace("-", "_")
    assert option in heard or field in heard or field.removeprefix("no_") in heard, (code, heard)
    assert "--help" not in heard, "the words are wrong"


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("option", NEEDS)
def test_the_python_function_tells_too(option):
    value = {"keep_newlines": True, "keep_sequential_samples": True, "text_documents": "paragraph", "lang": "german"}
    value |= {"chat_train_on": "all", "chat_schema": "alpaca", "engine": "gigatoken", "chat_template": "plain"}
    value["chat_date"] = "2026-11-27"
    notes = Notes()
    given = {option: value.get(option, "x")}
    options = mdata.PreprocessOptions(
        input=("x.jsonl",), output_prefix="out", tokenizer_type="ByteTokenizer", workers=1, **given
    )
    mdata.preprocess(options, notes)
    assert any(f"--{option.replace('_', '-')} (needs " in note for note in notes.lines), notes.lines
