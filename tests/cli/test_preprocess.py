"""The command line of `mdata preprocess`: the effect of each option, and docs/reference/megatron_preprocess.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import mdata
from cli import preprocess, preprocess_options
from cli.console import Command, Parser, command_parser
from cli.mdata import main
from mdata.util.machine_limits import usable_cores

ROOT = Path(__file__).parents[2]
NEEDED = ("--input", "a.jsonl", "--output-prefix", "out", "--tokenizer-type", "GPT2BPETokenizer")


def parser() -> Parser:
    return command_parser("mdata", Command("preprocess", "", module=".preprocess"), preprocess)


def options(*words: str, needed: tuple[str, ...] = NEEDED) -> mdata.PreprocessOptions:
    return preprocess.options_of(parser().parse_intermixed_args([*needed, *words]))[0]


def ignored(*words: str) -> tuple[str, ...]:
    return preprocess.options_of(parser().parse_intermixed_args([*NEEDED, *words]))[1]


def test_defaults_are_megatrons():
    given = mdata.PreprocessOptions(input=("a.jsonl",), output_prefix="out", tokenizer_type="GPT2BPETokenizer")
    assert options() == given
    assert given.workers == usable_cores() and ignored() == ()


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["--input", "a", "b", "-"], "input", ("a", "b", "-")),
        (["--include", "*.gz", "en/**"], "include", ("*.gz", "en/**")),
        (["--exclude", "old"], "exclude", ("old",)),
        (["--json-keys", "a", "b"], "json_keys", ("a", "b")),
        (["--json-key", "body"], "json_keys", ("body",)),
        (["--tokenizer-model", "m"], "tokenizer_model", "m"),
        (["--vocab-file", "v"], "vocab_file", "v"),
        (["--vocab", "v"], "vocab_file", "v"),
        (["--merge-file", "m"], "merge_file", "m"),
        (["--append-eod"], "append_eod", True),
        (["--workers", "7"], "workers", 7),
        (["--partitions", "3"], "partitions", 3),
        (["--chat"], "json_keys", ("messages",)),
        (["--chat", "--json-keys", "talk"], "json_keys", ("talk",)),
        (["--chat", "--chat-template", "chatml"], "chat_template", "chatml"),
        (["--chat-train-on", "last"], "chat_train_on", "last"),
        (["--keep-sequential-samples"], "keep_sequential_samples", True),
        (["--engine", "tiktoken"], "engine", "tiktoken"),
        (["--input-format", "parquet"], "input_format", "parquet"),
        (["--text-documents", "paragraph"], "text_documents", "paragraph"),
        (["--holdout", "0.01"], "holdout", "0.01"),
        (["--on-error", "skip"], "on_error", "skip"),
        (["--on-error", "quarantine", "q"], "quarantine", "q"),
        (["--on-error", "quarantine", "--quarantine", "q"], "on_error", "quarantine"),
        (["--quarantine", "q"], "on_error", "quarantine"),
        (["--max-errors", "0.5%"], "max_errors", "0.5%"),
        (["--max-record-bytes", "3M"], "max_record_bytes", 3 << 20),
        (["--max-record-bytes", "70"], "max_record_bytes", 70),
        (["--verify-input"], "verify_input", True),
        (["--tokenizer-special-tokens", "a", "b"], "tokenizer_options", (("special_tokens", ["a", "b"]),)),
        (["--special-tokens-in-text", "plain"], "tokenizer_options", (("special_in_text", "plain"),)),
    ],
)
def test_an_option_comes_to_its_field(words, field, value):
    needed = NEEDED[2:] if "--input" in words else NEEDED
    assert getattr(options(*words, needed=needed), field) == value


def test_options_of_the_type():
    null = ("--input", "a", "--output-prefix", "o", "--tokenizer-type", "NullTokenizer")
    given = options("--vocab-size", "1000", "--null-tokenizer-eod-id", "7", needed=null)
    assert given.tokenizer_options == (("vocab_size", 1000), ("eod_id", 7))
    face = ("--input", "a", "--output-prefix", "o", "--tokenizer-type", "HuggingFaceTokenizer")
    given = options("--tokenizer-hf-no-include-special-tokens", needed=face)
    assert given.tokenizer_options == (("include_special_tokens", False),)


@pytest.mark.parametrize(("name", "nargs"), preprocess_options.IGNORED.items())
def test_an_ignored_option_changes_nothing_and_is_named(name, nargs):
    words = [name, *{0: [], 1: ["7"], "+": ["7", "8"]}[nargs]]
    assert options(*words) == options()
    assert ignored(*words, *words) == (name,)


@pytest.mark.parametrize(
    "name", ["--vocab-size", "--null-tokenizer-eod-id", "--tokenizer-hf-no-include-special-tokens"]
)
def test_an_option_of_another_type_is_named(name):
    words = [name] if "hf" in name else [name, "9"]
    assert options(*words).tokenizer_options == () and ignored(*words) == (name,)


def test_other_ids_are_never_asked_for_in_vain():
    # The type refuses what it cannot do, so it must hear of it.
    words = ["--tokenizer-type", "ByteTokenizer", "--compat", "megatron-2023"]
    assert options(*words).tokenizer_options == (("compat", "megatron-2023"),) and ignored(*words) == ()


@pytest.mark.parametrize("name", preprocess_options.REFUSED)
def test_what_would_change_the_files_is_refused_by_name(capsys, name):
    assert main(["preprocess", *NEEDED, name]) == 2
    assert capsys.readouterr().err == f"mdata: error: {name} is not in this version of mdata\n  try: leave it out\n"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--dataset-impl", "lazy"], "--dataset-impl lazy is a format that mdata does not write"),
        (["--dataset-impl", "cached"], "try: leave it out"),
        (["--on-error", "ignore"], "--on-error ignore\n  expected: stop, skip, or quarantine FILE"),
        (["--on-error", "skip", "q"], "--on-error skip q"),
        (["--on-error", "quarantine"], "needs a file"),
        (["--on-error", "skip", "--quarantine", "q"], "needs --on-error quarantine, not --on-error skip"),
        (["--max-record-bytes", "many"], "'many' is not a size such as 64M"),
        (["--engine", "fast"], "invalid choice: 'fast'"),
        (["--tokenizer-metadata", "x"], "--tokenizer-metadata is not in this version"),
    ],
)
def test_a_wrong_option_ends_with_code_2_and_is_named(capsys, words, text):
    assert main(["preprocess", *NEEDED, *words]) == 2
    err = capsys.readouterr().err
    assert text in err and len(err.splitlines()) <= 4


def test_mmap_is_taken_without_a_word():
    assert options("--dataset-impl", "mmap") == options() and ignored("--dataset-impl", "mmap") == ()


def test_one_line_names_what_has_no_effect(capsys, monkeypatch):
    def stop(*_: object) -> None:
        raise mdata.StoppedError("that was enough")

    monkeypatch.setattr(mdata, "preprocess", stop)
    words = ["--log-interval", "100", "--find-optimal-num-workers", "--workers-to-check", "4", "8", "--vocab-size", "9"]
    assert main(["preprocess", *NEEDED, *words]) == 75
    first = capsys.readouterr().err.splitlines()[0]
    assert first == (
        "mdata: accepted but ignored: --log-interval, --find-optimal-num-workers, --workers-to-check,"
        " --vocab-size; --dry-run suggests the best number of workers"
    )


def test_the_page_and_the_parser_name_the_same_options():
    """Every option of the parser stands in the first column of the page, and no other does."""
    page = (ROOT / "docs" / "reference" / "megatron_preprocess.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `--")]
    on_page = [name for row in rows for name in re.findall(r"`(--[a-z-]+)`", row)]
    there = [
        name for action in parser()._actions for name in action.option_strings if name[:2] == "--" and name != "--help"
    ]
    assert sorted(on_page) == sorted(there)


def test_help_is_short_enough_to_read(capsys):
    assert main(["preprocess", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 110 and max(map(len, lines)) <= 120


def test_a_dry_run_names_the_files_and_writes_nothing(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    for name in ("a.jsonl", "b.jsonl", "old.jsonl"):
        (tmp_path / "in" / name).write_text('{"text": "some text"}\n' * 9)
    words = ["--input", f"{tmp_path}/in", "--output-prefix", f"{tmp_path}/out", "--tokenizer-type", "ByteTokenizer"]
    assert main(["preprocess", *words, "--include", "*.jsonl", "--exclude", "old*", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "a.jsonl" in shown and "b.jsonl" in shown and "old.jsonl" not in shown
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
