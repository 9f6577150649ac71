"""The part that every command shares: exit codes, error lines, progress, and finding the command by its name.

`run` is the whole life of a process: it imports only the module of the chosen command, parses, calls it, and turns any
error into an exit code and one to four lines on stderr. Unusual: commands are modules named by strings, so that
`--help` imports none of them; and a reader that closed the pipe (`mdata inspect x | head`) is not an error.

Exit codes: 0 done; 1 a bug in mdata or mtrain; 2 usage; 3 bad input; 4 damage; 5 out of a resource; 75 stopped on
request, run again; 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import errno
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from itertools import takewhile
from types import MappingProxyType, ModuleType
from typing import Any, Literal, NoReturn

from mdata.errors import (
    MdataError,
    ResourceError,
    StoppedError,
    UsageError,
    explain_os_error,
    hide_secrets,
    install_command,
)
from mdata.progress import Progress, Silent
from mdata.util.option_synonyms import asks_to_resume, nearest, renamed_options, synonym
from mdata.util.stop_signals import stop_requests
from mdata.version import __version__

from .help import HelpFormatter, overview, split_examples
from .start import INTERRUPTED, Command, InterruptsEndAtOnce, foreign_package
from .terminal import forget_standard_output, say, standard_error, standard_output

__all__ = ["SAME_COMMAND", "Command", "Console", "Parser", "ReaderGone", "run"]

# A long option with only one dash; not a number or a single letter.
_ONE_DASH = re.compile(r"-[A-Za-z]{3}")
_REQUIRED = "the following arguments are required: "
_CHOICES = re.compile(r"argument .*: invalid choice: '([^']*)' \(choose from (.*)\)")
SAME_COMMAND = "run the same command again: it continues where it was stopped"
_MOST_ADVISED = 4  # options that an abbreviation may stand for
_MAY_BE_EMPTY = ("TEXT", "KEY")  # metavars; a key of a JSON object may be empty
_MAY_BE_BLANK = (*_MAY_BE_EMPTY, "TOKEN")  # a token may be white space
_EXTRAS = MappingProxyType(
    {
        "torch": "train",
        "safetensors": "train",
        "tomli_w": "train",
        "ray": "ray",
        "lm_eval": "eval",
        "starlette": "serve",
        "uvicorn": "serve",
    }
)


class ReaderGone(Exception):
    """The reader of our stdout has closed it."""


class Parser(argparse.ArgumentParser):
    """argparse whose errors are ours, with the nearest option's name for a misspelt or abbreviated one.

    Abbreviations are refused: one can be the name of another program's option (`--dataset`), and a new option makes
    it ambiguous. Two that scripts for Megatron-LM use, `--json-key` and `--vocab`, are options here.

    Attributes:
        settings: names of settings, which are given as words without dashes. axes: those of a command without others.
        no_option: advice for an unknown option that resembles no other.
        resume: advice for --resume and the like, in a command that continues by itself.
        words: the command line; argparse reports missing options before it looks for unknown ones.
    """

    no_option: str | None = None
    resume: str | None = None
    settings: Callable[[], list[str]] | None = None
    axes: Sequence[str] = ()
    words: Sequence[str] = ()

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": HelpFormatter, "allow_abbrev": False, **options})
        self.color = False  # Python 3.14 would colour the help
        self.register("type", int, _whole_number)
        self.register("action", None, _StoreOnce)
        self.register("action", "store", _StoreOnce)

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """The values of an option or argument; an empty path would be the current folder, and other values nothing."""
        for text in arg_strings:
            if not text.strip() and action.metavar not in (_MAY_BE_BLANK if text else _MAY_BE_EMPTY):
                value = "blank" if text else "empty"
                raise argparse.ArgumentError(action, f"the value is {value}; is it a shell variable that is not set?")
        return super()._get_values(action, arg_strings)

    def _print_message(self, message: str, file: Any = None) -> None:
        say(message, standard_output())

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage; a misspelt option is reported first: it may cause the other errors."""
        if message.startswith(_REQUIRED):
            for action in self._actions:
                if not action.option_strings and action.choices:
                    one_of = f"{action.dest} ({', '.join(map(str, action.choices))})"
                    message = re.sub(rf"(?<= ){action.dest}(?=,|$)", one_of, message, count=1)
        before, separator, unknown = message.partition("unrecognized arguments: ")
        misspelt = self._unknown_options()
        if misspelt and not separator:
            unknown = " ".join(misspelt)
            message = f"unrecognized arguments: {unknown}; {before}"
        # After a word too many, the options may be those of another command.
        words = [] if separator and not unknown.startswith("-") else misspelt or unknown.split(" ")[:1]
        fixes = [fix for word in words if (fix := self._meant(word.partition("=")[0]))]
        if choice := _CHOICES.match(message):
            fixes = [fix] if (fix := nearest(choice[1], re.findall(r"[^', ]+", choice[2]))) else []
        help_hint = f"{self.prog} --help"
        fix = f"{', '.join(fixes)}? See {help_hint}" if fixes else (unknown and self.no_option) or help_hint
        if self.resume and any(asks_to_resume(word.partition("=")[0]) for word in words):
            fix = self.resume
        raise UsageError(message, fix=fix)

    def set_from_file(self, namespace: argparse.Namespace, values: Mapping[str, Any], *, place: str) -> None:
        """Set options to values of a file, as if they had been given, unless they are given in `words`.

        Args:
            values: by the names of options, without dashes before them; true: an option without a value.
            place: where they are, for messages.

        Raises:
            UsageError: no such option, or not a value for it.
        """
        words = [word.partition("=")[0] for word in takewhile("--".__ne__, self.words) if word.startswith("--")]
        actions = self._option_string_actions
        given = {actions[word].dest for word in words if word in actions}
        for name, value in values.items():
            option = f"--{name.replace('_', '-')}"
            action = actions.get(option)
            if action is None or action.required or action.dest == "config":
                meant = None if action else self._meant(option)
                fix = f"{meant.removeprefix('--')}?" if meant else "leave it out"
                raise UsageError(f"{place}: {name} cannot be set there", fix=fix)
            texts = [] if value is True else list(map(str, value if isinstance(value, list) else [value]))
            number = action.nargs
            is_single = len(texts) == 1 and not isinstance(value, bool)
            takes = not texts if number == 0 else is_single if number is None else bool(texts)
            if not takes or isinstance(value, dict):
                expected = "true" if number == 0 else "one value" if number is None else "a list"
                raise UsageError(f"{place}: {name} = {value!r}"[:200], expected=expected)
            if action.dest not in given:
                try:
                    action(self, namespace, self._get_values(action, texts), option)
                except argparse.ArgumentError as error:
                    raise UsageError(f"{place}: {error}") from error

    def _meant(self, word: str) -> str | None:
        """The option or setting that a word means or abbreviates, or that is closest to it."""
        actions = [action for action in self._actions if action.dest != "help"]
        options = [option for action in actions for option in action.option_strings]
        if meant := synonym(word, self.settings() if self.settings else self.axes):
            return f"{meant}=VALUE"
        if not word or (meant := synonym(word, options)):
            return meant
        prefix = word.replace("_", "-")
        firsts = (next((name for name in action.option_strings if name.startswith(prefix)), None) for action in actions)
        if 0 < len(abbreviated := list(filter(None, firsts))) <= _MOST_ADVISED:
            return " or ".join(abbreviated)
        return nearest(f"-{word}" if _ONE_DASH.match(word) else word, options)

    def _unknown_options(self) -> list[str]:
        """The words that look like options but are not."""
        words = [word.partition("=")[0] for word in takewhile("--".__ne__, self.words)]
        options = [word for word in words if word.startswith("--") or _ONE_DASH.match(word)]
        return [
            option for option in options if option not in self._option_string_actions and not self._has_value(option)
        ]

    def _has_value(self, word: str) -> bool:
        """Whether a word is an option of one letter with its value (`-omix.json`)."""
        return any(match[0].nargs != 0 for match in self._get_option_tuples(word))


class _StoreOnce(argparse._StoreAction):
    """Stores values; a second list for one option is refused, because argparse would silently drop the first."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        """Store the values; see argparse."""
        if option and isinstance(values, list) and getattr(namespace, self.dest, self.default) is not self.default:
            raise UsageError(f"{option} is given twice", fix=f"give all values after one {option}")
        super().__call__(parser, namespace, values, option)


def _whole_number(text: str) -> int:
    """Parser for `type=int`: all counts and numbers have 64 bits."""
    value = int(text)
    if not -(1 << 63) <= value < 1 << 63:
        raise argparse.ArgumentTypeError(f"{text} is not a 64-bit number")
    return value


class Console:
    """The output of a command: results to stdout, everything else to stderr.

    Args:
        program: the name that begins an error line, "mdata" or "mtrain".
        json: results as one JSON document instead of text.
        quiet: no progress and no notes, only results and errors.
        verbose: progress every second; time and memory at the end.
    """

    def __init__(self, program: str, *, json: bool = False, quiet: bool = False, verbose: bool = False) -> None:
        self.program = program
        self.json, self.quiet, self.verbose = json, quiet, verbose
        self.words: Sequence[str] = ()  # the command line
        self.report: Callable[[int, str], None] | None = None  # of a rank: tells its launcher an exit code and an error

    def end(self, code: int, text: str) -> NoReturn:
        """Print or report an error, if there is one, and end this process at once, from any thread."""
        try:
            if code and self.report is not None:
                self.report(code, text)
            elif code:
                self.error(text)
        finally:
            os._exit(code)

    def result(self, text: str, facts: Mapping[str, Any]) -> None:
        """Print the result: `text`, or with --json `facts` (JSON types)."""
        if self.json:
            from json import dumps

            text = dumps(facts, ensure_ascii=False, indent=2, sort_keys=True)
        self.write(text.rstrip("\n") + "\n")
        self.flush()

    def write(self, text: str, *, raw: bool = False) -> None:
        """Print a part of a long result; `raw`: a text that goes to a pipe or file unchanged."""
        with _output_errors_named():
            say(text, standard_output(), raw=raw)

    def flush(self) -> None:
        """Flush stdout."""
        stream = standard_output()
        if stream is not None:
            with _output_errors_named():
                stream.flush()

    def note(self, text: str) -> None:
        """Print a line on stderr, unless --quiet: progress or a warning."""
        if not self.quiet:
            self.tell(text)

    def tell(self, text: str) -> None:
        """Print a line on stderr even with --quiet: an error, or how the command ended."""
        # Writing may fail: a closed pipe, a full disk for the log, no stderr at all.
        stream = standard_error()
        with suppress(OSError, AttributeError):
            say(hide_secrets(text.rstrip("\n")) + "\n", stream)
            stream.flush()  # type: ignore[union-attr]

    def error(self, text: str) -> None:
        """Print an error in the common form."""
        self.tell(f"{self.program}: error: {text}")

    @contextmanager
    def progress(
        self, *, log_format: Literal["text", "json"] | None = None, continues: bool = False
    ) -> Iterator[Progress]:
        """A progress display on stderr for the block: a bar on a terminal, otherwise a JSON line every 10 s.

        Args:
            log_format: run.log_format of a training run, whose lines are those of `RunLog` instead.
            continues: the command continues where Ctrl-C ended it, and says so then.
        """
        if self.quiet:
            yield Silent()
            return
        from .progress import LINE_INTERVAL_S, BarProgress, ConsoleProgress, LineProgress

        interval_s = 1.0 if self.verbose else LINE_INTERVAL_S
        stream = standard_error()
        listener: ConsoleProgress
        if stream is not None and stream.isatty():
            listener = BarProgress(stream, program=self.program)
        elif log_format is not None:
            from .run_log import RunLog

            listener = RunLog(self.note, program=self.program, format=log_format, interval_s=interval_s)
        else:
            listener = LineProgress(self.note, program=self.program, interval_s=interval_s)
        try:
            try:
                yield listener
            finally:
                listener.close()
        except KeyboardInterrupt:
            if continues:
                self.note(f"{self.program}: the same command continues")
            raise


@contextmanager
def _output_errors_named() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as error:
        raise ReaderGone from error
    except OSError as error:
        raise explain_os_error(error, "writing to standard output") from error


def run(program: str, commands: Sequence[Command], *, description: str, argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code.

    Args:
        program: the console script's name.
        commands: the subcommands, in the order in which `--help` lists them.
        description: one sentence for `--help`.
        argv: the words after the program's name; default `sys.argv[1:]`.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    console, begun = Console(program), time.monotonic()
    console.words = words
    try:
        _check_words(words)
        with stop_requests(_stopped):
            code = dispatch(console, description, commands, words)
        console.flush()
        if console.verbose:
            console.note(f"{program}: {_used(time.monotonic() - begun)}")
        return code
    # Catch everything here: a user must never need to read a traceback.
    except BaseException as error:
        return _report(error, console, debug="--debug" in words)


def _used(seconds: float) -> str:
    """Time and memory of this process and of those that it waited for."""
    import resource

    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return f"{__version__}, {seconds:,.1f} s, {peak / 2**10:,.0f} MiB of memory at peak in one process"


def _check_words(words: Sequence[str]) -> None:
    """Refuse words that no shell can pass: most words are, or contain, names of files."""
    for word in words:
        try:
            fits = "\0" not in os.fsdecode(os.fsencode(word))
        except UnicodeEncodeError:
            fits = False
        if not fits:
            raise UsageError(f"{word[:80]!r} cannot be passed to the operating system", expected="text without NUL")


def dispatch(console: Console, description: str, commands: Sequence[Command], words: list[str]) -> int:
    """Run the command that the words name and return its exit code; errors are raised."""
    if not words or words[0] in ("-h", "--help"):
        console.result(overview(console.program, description, commands), {})
        return 0
    if words[0] == "--version":
        console.result(f"{console.program} {__version__}", {})
        return 0
    chosen = next((command for command in commands if command.name == words[0]), None)
    if chosen is None and words[0].startswith("-"):
        raise UsageError(f"{words[0]} stands before the command", fix=f"{console.program} COMMAND {words[0]}")
    if chosen is None:
        close = nearest(words[0], [command.name for command in commands])
        hint = f"{console.program} --help"
        raise UsageError(f"no command {words[0]!r}", fix=f"{close}? See {hint}" if close else hint)
    with InterruptsEndAtOnce(console.program):
        module = import_module(chosen.module, __package__)
    parser = command_parser(console.program, chosen, module)
    own, command = _parted(words[1:]) if getattr(module, "TAKES_COMMAND", False) else (words[1:], [])
    own, renamed = renamed_options(parser.prog, own)
    console.quiet = not {"-q", "--quiet"}.isdisjoint(own)
    for line in renamed:
        console.note(line)
    parser.words = own
    parser.set_defaults(command=command)
    try:
        # Options may stand between words, except with "--", which parse_intermixed_args would drop.
        arguments = parser.parse_args(own) if "--" in own else parser.parse_intermixed_args(own)
    except SystemExit:  # --help has printed; argparse's errors never come here, see Parser.error
        return 0
    console.json, console.quiet, console.verbose = arguments.json, arguments.quiet, arguments.verbose
    return int(module.main(arguments, console) or 0)


def command_parser(program: str, command: Command, module: ModuleType) -> Parser:
    """The parser of a command, with the options that all commands have."""
    description, examples = split_examples(module.__doc__ or command.summary)
    parser = Parser(prog=f"{program} {command.name}", description=description, add_help=False)
    module.add_arguments(parser)
    common = parser.add_argument_group("options of every command")
    common.add_argument("-h", "--help", action="help", help="show this text")
    common.add_argument("--json", action="store_true", help="results as JSON on stdout")
    common.add_argument("-q", "--quiet", action="store_true", help="print only results and errors")
    common.add_argument("-v", "--verbose", action="store_true", help="show progress every second, then time and memory")
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.epilog = "\n\n".join(filter(None, [parser.epilog, examples])) or None
    return parser


def _parted(words: list[str]) -> tuple[list[str], list[str]]:
    """The words before "--", which belong to this command, and those after it, which belong to another."""
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def _stopped() -> StoppedError:
    return StoppedError("stopped by SIGTERM", fix="run the same command again")


def _report(error: BaseException, console: Console, *, debug: bool) -> int:
    if isinstance(error, ReaderGone):
        forget_standard_output()
        return 0
    if debug:
        import traceback

        console.tell("".join(traceback.format_exception(error)))
    if isinstance(error, KeyboardInterrupt):
        console.tell(f"{console.program}: interrupted")
        return INTERRUPTED
    known_error = _as_known(error)
    if known_error is None:
        hint = f"this is a bug in {console.program}; run again with --debug and report what it prints"
        console.error(f"{_in_one_line(error)}\n  {hint}")
        return 1
    console.error(str(known_error))
    return known_error.exit_code


def _as_known(error: BaseException) -> MdataError | StoppedError | None:
    """The error as one of our types; None for a bug."""
    if isinstance(error, OSError):
        error = explain_os_error(error)
    if isinstance(error, ValueError | RuntimeError):
        error = _as_the_system_said(error)
    if isinstance(error, MemoryError):
        error = ResourceError("out of memory", fix="use fewer workers, or a machine with more memory")
    if isinstance(error, ModuleNotFoundError) and (extra := _EXTRAS.get(error.name or "")):
        error = UsageError(f"this command needs {error.name}, which is not installed", fix=install_command(extra))
    if isinstance(error, ImportError | AttributeError | SyntaxError) and (text := foreign_package()):
        error = UsageError(text)
    return error if isinstance(error, MdataError | StoppedError) and error.exit_code != 1 else None


def _as_the_system_said(error: ValueError | RuntimeError) -> BaseException:
    """Errors that Python reports with its own message, where other calls give an error of the system."""
    said = str(error)
    if "embedded null" in said:  # in Python 3.13 behind the name of the call
        return UsageError("a path contains a NUL byte, which no file system allows", fix="another path")
    if said.endswith("has an empty name"):
        return UsageError("a path has no file name", found=said.split("'")[1], fix="a path that ends in a file name")
    if said.startswith("Symlink loop from "):
        return explain_os_error(OSError(errno.ELOOP, "", said.removeprefix("Symlink loop from ").strip("'")))
    if said == "can't start new thread":
        return explain_os_error(OSError(errno.EAGAIN, ""), "starting a thread")
    return error


def _in_one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
