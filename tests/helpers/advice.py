"""Whether the options that a message names are options of the command that says it, or of one that it names.

A message comes from code that several commands share, so it may advise an option that this command does not have. The
check runs at every error that a test of tests/cli causes (tests/cli/conftest.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module

import cli.mdata
import cli.mtrain
from cli.console import command_parser

_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9_-]*")
_COMMAND = re.compile(r"\b(mdata|mtrain) ([a-z][a-z-]*)")
_OTHER_PROGRAM = re.compile(r"\b(torchrun|ray start|hf download|pip install|Megatron-LM|pretrain_\w+\.py)\b")
COMMANDS = {"mdata": cli.mdata.COMMANDS, "mtrain": cli.mtrain.COMMANDS}


@cache
def options_of(program: str, name: str) -> frozenset[str]:
    """All options of a command; none if there is no such command."""
    command = next((command for command in COMMANDS.get(program, ()) if command.name == name), None)
    if command is None:
        return frozenset()
    return frozenset(command_parser(program, command, import_module(command.module, "cli"))._option_string_actions)


def foreign_options(message: str, program: str, words: Sequence[str]) -> list[str]:
    """The options in a message that a user of this command line cannot give.

    Args:
        words: the command line after the program. An option may be one of it, of its command (or of the command after
            `--`), of a command that the line of the message names before it, or of another program named so.
    """
    if not words or not options_of(program, words[0]):  # a misspelt command
        return []
    if words[0] == "config":  # its messages name arguments of Megatron-LM
        return []
    inner = words[words.index("--") + 1 :] if "--" in words else []
    own = {word.partition("=")[0] for word in words}
    own |= options_of(program, words[0])
    own |= options_of(program, inner[0]) if inner else frozenset()
    own |= options_of("mtrain", "train") if inner and program == "mtrain" else frozenset()
    return [option for option, named in options_in(message) if option not in own and not named]


def options_in(message: str) -> Iterator[tuple[str, bool | None]]:
    """Each option, and whether a command that its line names before it has it; None: the line names no command."""
    for line in message.split("\n"):
        for match in _OPTION.finditer(line):
            before = line[: match.start()]
            commands = [command for command in _COMMAND.findall(before) if options_of(*command)]
            if _OTHER_PROGRAM.search(before):
                yield match[0], True
            else:
                yield match[0], any(match[0] in options_of(*command) for command in commands) if commands else None
