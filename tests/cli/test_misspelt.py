"""Every command of both programs names a misspelt option first, whatever else is wrong, and its nearest spelling."""

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
