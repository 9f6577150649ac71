"""The text of --help: of a program, and of one command.

Paragraphs wrap to the width of the terminal; indented lines, such as examples, stay as they are, so that they can be
copied. A command's help is its module's docstring, whose last paragraph "Examples:" comes after the options. Nothing is
coloured.
"""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

from .start import Command

EXAMPLES = "Examples:\n"
_MOST_CHOICES = 32  # characters


class HelpFormatter(argparse.HelpFormatter):
    """argparse's formatter, for descriptions of several paragraphs and a usage without the optional options."""

    def _format_usage(self, usage: str | None, actions: Iterable[argparse.Action], groups: Any, prefix: Any) -> str:
        words = [self._prog, *(_form(action) for action in actions if action.option_strings and action.required)]
        words += ["[options]", *(_form(action) for action in actions if not action.option_strings)]
        text = f"usage: {usage or ' '.join(words)}"
        return textwrap.fill(text, self._width, subsequent_indent=" " * 7, break_on_hyphens=False) + "\n\n"

    def _metavar_formatter(self, action: argparse.Action, default_metavar: str) -> Callable[[int], tuple[str, ...]]:
        if action.metavar is None and action.option_strings and _many_choices(action):
            return lambda size: ("NAME",) * size
        return super()._metavar_formatter(action, default_metavar)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        text = super()._format_action_invocation(action)
        # Too long with its other names: the first one will do.
        return text if len(text) + self._current_indent <= self._width else text.partition(", ")[0]

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        if action.nargs != argparse.ONE_OR_MORE:
            return super()._format_args(action, default_metavar)
        return f"{self._metavar_formatter(action, default_metavar)(1)[0]} ..."

    def _expand_help(self, action: argparse.Action) -> str:
        text = super()._expand_help(action)
        if action.metavar is None and action.option_strings and _many_choices(action):
            text += f"; one of {', '.join(map(str, action.choices or ()))}"
        return text

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(textwrap.indent(line, indent) for line in wrapped(text, width))


def _many_choices(action: argparse.Action) -> bool:
    """Whether the choices of an option are too long to stand in its place in the list of options."""
    return len(",".join(map(str, action.choices or ()))) > _MOST_CHOICES


def _form(action: argparse.Action) -> str:
    """An option or argument as the usage shows it."""
    choices = f"{{{','.join(map(str, action.choices))}}}" if action.choices else None
    value = str(action.metavar or choices or action.dest)
    if action.nargs == "+":
        value += " ..."
    if action.option_strings:
        return f"{action.option_strings[0]} {value}"
    return f"[{value} ...]" if action.nargs == "*" else value


def wrapped(text: str, width: int) -> list[str]:
    """The lines of a text, paragraphs wrapped to a width; indented and empty lines are unchanged."""
    lines: list[str] = []
    for is_paragraph, block in groupby(text.strip("\n").split("\n"), key=lambda line: line[:1] not in ("", " ")):
        if is_paragraph:
            paragraph = " ".join(block)
            lines += textwrap.wrap(paragraph, width, break_long_words=False, break_on_hyphens=False)
        else:
            lines += block
    return lines


def overview(program: str, description: str, commands: Sequence[Command]) -> str:
    """The help of a program: its commands, by group."""
    columns = shutil.get_terminal_size().columns - 2
    width = max(len(command.name) for command in commands)
    lines = [*wrapped(f"{program}: {description}", columns), "", f"usage: {program} COMMAND [options]"]
    for group, members in groupby(commands, key=lambda command: command.group):
        lines += ["", f"{group}:"]
        for command in members:
            first, *more = textwrap.wrap(command.summary, max(columns - width - 4, 20)) or [""]
            lines.append(f"  {command.name:<{width}}  {first}")
            lines += [" " * (width + 4) + line for line in more]
    last = f"{program} COMMAND --help lists a command's options; {program} --version prints the version."
    return "\n".join([*lines, "", *wrapped(last, columns)])


def split_examples(text: str) -> tuple[str, str]:
    """A docstring without its examples, and the examples."""
    description, heading, examples = text.partition(EXAMPLES)
    return description.rstrip(), f"{heading}{examples}".rstrip()
