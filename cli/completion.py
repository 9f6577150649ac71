"""Print a script that lets bash, zsh or fish complete commands, options, their values and the settings of a run.

The script covers the commands of this version; print it again after an update.

Examples:
  mdata completion bash > ~/.local/share/bash-completion/completions/mdata
  mtrain completion fish > ~/.config/fish/completions/mtrain.fish
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

from .console import Console, Parser, command_parser
from .start import Command

SETTING = "section.key"  # metavar of an option whose value is the name of a setting
_SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a command: its names, what follows it (choices, if there are any), and its help."""

    names: Sequence[str]
    takes_value: bool
    choices: Sequence[str]
    help: str


@dataclass(frozen=True, slots=True)
class Words:
    """What may follow the name of a command; `settings`: section.key -> its values, where they can be listed."""

    summary: str
    options: Sequence[Option]
    arguments: Sequence[str]
    settings: Mapping[str, Sequence[str]]


def add_arguments(parser: Parser) -> None:
    """The shell."""
    parser.add_argument("shell", choices=_SHELLS, help="the shell that will read the script")


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Print the script."""
    program = console.program
    commands = {command.name: _words(program, command) for command in _table(program)}
    script = {"bash": _bash, "zsh": _zsh, "fish": _fish}[arguments.shell](program, commands)
    console.result(script, {"shell": arguments.shell, "script": script})


def _table(program: str) -> Sequence[Command]:
    commands: Sequence[Command] = import_module(f".{program}", __package__).COMMANDS
    return commands


def _words(program: str, command: Command) -> Words:
    parser = command_parser(program, command, import_module(command.module, __package__))
    options, arguments = [], []
    settings: Mapping[str, Sequence[str]] = {}
    if any(action.metavar == SETTING for action in parser._actions) or parser.settings is not None:
        from trainer.config.describe import describe

        settings = {key.name: key.choices for key in describe()}
    for action in parser._actions:
        choices = [*settings] if action.metavar == SETTING else [str(choice) for choice in action.choices or ()]
        if not action.option_strings:
            arguments += choices
        elif action.help != argparse.SUPPRESS:
            text = " ".join(((action.help or "") % {}).split())
            options.append(Option(action.option_strings, action.nargs != 0, choices, text))
    return Words(command.summary, options, arguments, {} if parser.settings is None else settings)


def _values(commands: Mapping[str, Words]) -> dict[str, Sequence[str]]:
    """The values of each option and setting that has a list of them, as shell patterns "command:name"."""
    values: dict[str, Sequence[str]] = {}
    for name, words in commands.items():
        for option in words.options:
            if option.choices:
                values |= {f"{name}:{spelling}": option.choices for spelling in option.names}
        values |= {f"*:{key}": choices for key, choices in words.settings.items() if choices}
    return values


def _names(words: Words) -> list[str]:
    return [name for option in words.options for name in option.names]


def _cases(cases: Mapping[str, str], *, indent: int) -> str:
    """The branches of a `case`; patterns are quoted but for a star."""
    return "\n".join(f"{' ' * indent}{pattern}) {body} ;;" for pattern, body in cases.items())


def _bash(program: str, commands: Mapping[str, Words]) -> str:
    """`=` ends a word in bash: key=value comes as three words."""
    values = {pattern: f"words={_quoted(' '.join(choices))}" for pattern, choices in _values(commands).items()}
    names = {name: f"words={_quoted(' '.join(_names(words)))}" for name, words in commands.items()}
    arguments = {name: _quoted(" ".join(words.arguments)) for name, words in commands.items() if words.arguments}
    by_command = {name: f"words={text}" for name, text in arguments.items()}
    with_settings = [name for name, words in commands.items() if words.settings]
    if with_settings:
        by_command["|".join(with_settings)] = "settings=1"
    keys = next((list(commands[name].settings) for name in with_settings), [])
    sections = list(dict.fromkeys(key.partition(".")[0] for key in keys))
    return f"""# bash completion of {program}, printed by "{program} completion bash".
_{program}() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} command=${{COMP_WORDS[1]}}
    local words= settings=
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        COMPREPLY=($(compgen -W {_quoted(" ".join([*commands, "--help", "--version"]))} -- "$cur"))
        return
    fi
    if [[ $cur == = ]]; then
        cur=
    elif [[ $before == = ]]; then
        before=${{COMP_WORDS[COMP_CWORD-2]}}
    fi
    case $command:$before in
{_cases(values, indent=8)}
    esac
    if [[ -n $words ]]; then
        COMPREPLY=($(compgen -W "$words" -- "$cur"))
        return
    fi
    if [[ $cur == -* ]]; then
        case $command in
{_cases(names, indent=12)}
        esac
        COMPREPLY=($(compgen -W "$words" -- "$cur"))
        return
    fi
    case $command in
{_cases(by_command, indent=8)}
    esac
    if [[ -n $settings && $cur == *.* && $cur != */* ]]; then
        words={_quoted(" ".join(f"{key}=" for key in keys))}
    elif [[ -n $settings && $cur != */* ]]; then
        words={_quoted(" ".join(f"{section}." for section in sections))}
    fi
    COMPREPLY=($(compgen -W "$words" -- "$cur") $(compgen -f -- "$cur"))
    if [[ ${{#COMPREPLY[@]}} == 1 && ( $COMPREPLY == *= || $COMPREPLY == *. ) ]]; then
        compopt -o nospace
    fi
}} 2> /dev/null
complete -o bashdefault -o default -F _{program} {program}
"""


def _zsh(program: str, commands: Mapping[str, Words]) -> str:
    values = {pattern: f"compadd -- {' '.join(choices)}; return" for pattern, choices in _values(commands).items()}
    described = {name: _described(words) for name, words in commands.items()}
    options = {name: f"options=({text})" for name, text in described.items()}
    by_command = {
        name: f"compadd -- {' '.join(words.arguments)}" for name, words in commands.items() if words.arguments
    }
    with_settings = [name for name, words in commands.items() if words.settings]
    if with_settings:
        keys = [f"{key}=" for key in commands[with_settings[0]].settings]
        by_command["|".join(with_settings)] = f"compadd -S '' -- {' '.join(keys)}"
    names = " ".join(_quoted(f"{name}:{words.summary}") for name, words in commands.items())
    return f"""#compdef {program}
# zsh completion of {program}, printed by "{program} completion zsh".
_{program}() {{
    local command=$words[2] before=$words[CURRENT-1]
    local -a commands options
    if ((CURRENT == 2)); then
        commands=({names})
        _describe command commands
        return
    fi
    if [[ $PREFIX == *=* ]]; then
        before=${{PREFIX%%=*}}
        compset -P '*='
    fi
    case $command:$before in
{_cases(values, indent=8)}
    esac
    if [[ $PREFIX == -* ]]; then
        case $command in
{_cases(options, indent=12)}
        esac
        _describe option options
        return
    fi
    case $command in
{_cases(by_command, indent=8)}
    esac
    _files
}}
if [[ $funcstack[1] == _{program} ]]; then
    _{program} "$@"
else
    compdef _{program} {program}
fi
"""


def _described(words: Words) -> str:
    return " ".join(_quoted(f"{name}:{option.help}") for option in words.options for name in option.names)


def _fish(program: str, commands: Mapping[str, Words]) -> str:
    lines = [f'# fish completion of {program}, printed by "{program} completion fish".']
    for name, words in commands.items():
        summary = _fish_quoted(words.summary)
        lines.append(f"complete -c {program} -f -n __fish_use_subcommand -a {name} -d {summary}")
        start = f"complete -c {program} -n '__fish_seen_subcommand_from {name}'"
        for option in words.options:
            spelled = " ".join(f"-l {s[2:]}" if s.startswith("--") else f"-s {s[1:]}" for s in option.names)
            value = f" -x -a {_fish_quoted(' '.join(option.choices))}" if option.choices else " -r"
            lines.append(f"{start} {spelled}{value if option.takes_value else ''} -d {_fish_quoted(option.help)}")
        candidates = [*words.arguments]
        for key, choices in words.settings.items():
            candidates += [f"{key}={choice}" for choice in choices] or [f"{key}="]
        if candidates:
            lines.append(f"{start} -a {_fish_quoted(' '.join(candidates))}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
