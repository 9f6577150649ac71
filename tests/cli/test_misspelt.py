"""Every command of both programs names a misspelt or abbreviated option first, whatever else is wrong, and the option
that was most likely meant."""

from __future__ import annotations

import pytest

from cli import mdata, mtrain

COMMANDS = [
    pytest.param(program, command.name, id=f"{program.__name__}-{command.name}")
    for program in (mdata, mtrain)
    for command in program.COMMANDS
]


@pytest.mark.parametrize(("program", "name"), COMMANDS)
@pytest.mark.parametrize(("misspelt", "meant"), [("--jsno", "--json"), ("--dbeug", "--debug"), ("-jsno", "--json")])
def test_a_misspelt_option_is_named_first(capsys, program, name, misspelt, meant):
    assert program.main([name, misspelt]) == 2
    first, *rest = capsys.readouterr().err.splitlines()
    assert first.partition("error: ")[2].startswith(f"unrecognized arguments: {misspelt}"), first
    assert rest == [f"  try: {meant}? See {first.partition(':')[0]} {name} --help"]


@pytest.mark.parametrize(("program", "name"), COMMANDS)
def test_an_abbreviation_is_refused(capsys, program, name):
    assert program.main([name, "--verb"]) == 2
    first, *rest = capsys.readouterr().err.splitlines()
    assert first.partition("error: ")[2].startswith("unrecognized arguments: --verb"), first
    assert rest == [f"  try: --verbose? See {first.partition(':')[0]} {name} --help"]


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("--dataset x", "--input"),  # not --dataset-impl
        ("--dataset-i mmap", "--dataset-impl"),
        ("--out=x", "--output-prefix"),
        ("--json_k x", "--json-keys"),
        ("--max-t 9 --on-err skip", "--max-tokens, --on-error"),
        ("--min-t 9 --max 9", "--min-tokens, --max-tokens or --max-record-bytes or --max-errors or --max-documents"),
    ],
)
def test_every_option_that_an_abbreviation_fits_is_named(capsys, words, meant):
    needed = ["--input", "a", "--output-prefix", "o", "--tokenizer-type", "ByteTokenizer"]
    assert mdata.main(["preprocess", *needed, *words.split()]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"  try: {meant}? See mdata preprocess --help"


@pytest.mark.parametrize(
    ("command", "word", "meant"),
    [
        ("serve", "--tensor-parallel-size", "mesh.tp=VALUE? See "),
        ("serve", "--tp", "mesh.tp=VALUE? See "),
        ("serve", "--pipeline-model-parallel-size", "mesh.pp=VALUE? See "),
        ("generate", "--tp", "--nproc? See "),
        ("generate", "--pipeline-parallel-size", "--pp? See "),
        ("eval", "--tensor-parallel-size", "--tp? See "),
        ("train", "--tp", "mesh.tp=VALUE? See "),
    ],
)
def test_ranks_by_the_names_of_other_programs(capsys, command, word, meant):
    assert mtrain.main([command, "model", word, "2"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"  try: {meant}mtrain {command} --help"


@pytest.mark.parametrize(
    "words",
    [
        "preprocess --input a.jsonl --output-prefix out --input b.jsonl",
        "dedup --input a.jsonl --output out --input=b.jsonl",
        "train-tokenizer --json-keys text --input a.jsonl --json-keys title",
        "blend --train-data-path a --train-data-path b",
        "clean --steps fix --input a.jsonl --steps gopher",
    ],
)
def test_a_list_given_by_two_options_is_refused(capsys, words):
    """argparse drops the first list, so that half of the input would be missing without a word."""
    assert mdata.main(words.split()) == 2
    option = words.split()[-2] if "=" not in words else "--input"
    expected = f"mdata: error: {option} is given twice\n  try: give all values after one {option}\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("command", ["train run.toml", "check run.toml", "finetune model data", "launch local"])
@pytest.mark.parametrize("word", ["--resume", "--auto_resume", "--resume-from-checkpoint=last", "--load runs/first"])
def test_a_run_is_continued_by_the_same_command(capsys, command, word):
    assert mtrain.main([*command.split(), *word.split()]) == 2
    advice = capsys.readouterr().err.splitlines()[-1]
    assert advice.startswith("  try: leave it out: the same command continues from the newest checkpoint in run.folder")
    assert "checkpoint.init_from=FOLDER" in advice


@pytest.mark.parametrize("name", ["preprocess", "clean", "decontaminate", "filter", "dedup", "extract"])
def test_work_on_texts_is_continued_by_the_same_command(capsys, name):
    assert mdata.main([name, "--resume"]) == 2
    expected = "  try: run the same command again: it continues where it was stopped"
    assert capsys.readouterr().err.splitlines()[-1] == expected


def test_words_after_two_dashes_are_no_options(capsys):
    assert mdata.main(["inspect", "--quiet", "--", "-x.json"]) == 2
    assert "-x.json: No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "word", "meant"),
    [
        ("preprocess", "--input-path", "--input"),
        ("dedup", "--num-buckets", "--bands"),
        ("dedup", "--hashes_per_bucket", "--rows"),
        ("clean", "--filters", "--steps"),
    ],
)
def test_options_by_the_names_of_datatrove(capsys, command, word, meant):
    assert mdata.main([command, word, "2"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"  try: {meant}? See mdata {command} --help"
