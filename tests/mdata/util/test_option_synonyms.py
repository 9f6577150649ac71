"""Option names of other programs lead to ours: on every command line, in configurations, in names of types."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from cli.console import Parser
from cli.mdata import COMMANDS as MDATA
from cli.mtrain import COMMANDS as MTRAIN
from mdata.errors import UsageError
from mdata.tokenizers.registry import _MODULES, load_tokenizer
from mdata.util.option_synonyms import RENAMED_OPTIONS, SYNONYMS, nearest, normal, renamed_options
from trainer.config.parse import key_names


def parser_of(command: object) -> Parser:
    module = import_module(command.module, "cli")
    made = Parser(prog=command.name)
    module.add_arguments(made)
    return made


def options() -> set[str]:
    return {one for command in (*MDATA, *MTRAIN) for a in parser_of(command)._actions for one in a.option_strings}


def test_every_word_leads_to_a_name_that_exists():
    known = options() | set(key_names()) | set(_MODULES)
    for word, names in SYNONYMS.items():
        assert word == normal(word) and names
        assert set(names) <= known, word


def test_renamed_options_lead_to_options_of_their_commands():
    commands = {f"{name} {one.name}": one for name, table in (("mdata", MDATA), ("mtrain", MTRAIN)) for one in table}
    for command, renamed in RENAMED_OPTIONS.items():
        there = parser_of(commands[command])._option_string_actions
        assert set(renamed.values()) <= set(there) and not set(renamed) & set(there), command


def test_old_options_are_replaced_and_told():
    words = ["a", "--folder=b=c", "--folder", "d", "--", "--folder"]
    current, lines = renamed_options("mdata fetch", words)
    assert current == ["a", "--output=b=c", "--output", "d", "--", "--folder"]
    assert lines == ["mdata fetch --folder is now --output; the old name works until 0.2"] * 2
    assert renamed_options("mdata cat", words) == (words, [])


@pytest.mark.parametrize(
    ("typed", "known", "meant"),
    [
        ("--num-proc", ["--workers", "--input"], "--workers"),
        ("--num_proc", ["--workers"], "--workers"),
        ("--APPEND_EOD", ["--append-eod"], "--append-eod"),
        ("gpt2bpetokenizer", list(_MODULES), "GPT2BPETokenizer"),
        ("learning_rate", ["lr", "min_lr"], "lr"),
        ("learning_rate", key_names(), "optimizer.lr"),
        ("tp", key_names(), "mesh.tp"),
        ("steps", key_names(), "train.steps"),
        ("--worker", ["--workers"], "--workers"),
        ("--num-proc", ["--colour"], None),
        ("same", ["same"], None),
    ],
)
def test_by_meaning_then_by_spelling(typed, known, meant):
    assert nearest(typed, known) == meant


@pytest.mark.parametrize(
    ("command", "words", "hint"),
    [
        ("preprocess", ["--num-proc", "8"], r"--workers\?"),
        ("preprocess", ["--add-eos"], r"--append-eod\?"),
        ("train", ["run.toml", "--tp", "2"], r"mesh\.tp=VALUE\?"),
        ("train", ["run.toml", "--learning-rate", "1"], r"optimizer\.lr=VALUE\?"),
    ],
)
def test_a_command_line_says_what_was_meant(command, words, hint):
    found = next(one for one in (*MDATA, *MTRAIN) if one.name == command)
    needed = ["--input", "a", "--output-prefix", "o", "--tokenizer-type", "T"] if command == "preprocess" else []
    with pytest.raises(UsageError, match=hint):
        parser_of(found).parse_intermixed_args([*needed, *words])


def test_a_tokenizer_type_in_another_spelling():
    with pytest.raises(UsageError, match=r"try: GPT2BPETokenizer\?"):
        load_tokenizer("gpt2bpetokenizer", model=Path("x"))
