"""Exit codes and message texts of every way in which a command can end."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest

from cli.console import Command, command_parser, run
from cli.mdata import COMMANDS as MDATA
from cli.mdata import main as mdata
from cli.mtrain import COMMANDS as MTRAIN
from cli.mtrain import main as mtrain
from mdata import errors
from mdata.util.option_synonyms import nearest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Write a one-command module whose main has the given body; returns run(argv) for it."""

    def make(body: str):
        name = f"made_up_{abs(hash(body))}"
        module = "import os, signal\nfrom pathlib import Path\nfrom mdata import errors\n"
        module += "def add_arguments(parser):\n    parser.add_argument('--size', type=int, default=1)\n"
        module += "def main(arguments, console):\n" + textwrap.indent(body, "    ")
        (tmp_path / f"{name}.py").write_text(module)
        monkeypatch.syspath_prepend(str(tmp_path))
        table = (Command("work", "does it", module=name), Command("other", "never", module="cli.no_such_module"))
        return lambda *argv: run("prog", table, description="a program of ours.", argv=argv)

    return make


@pytest.mark.parametrize(
    ("body", "code", "text"),
    [
        ("pass", 0, ""),
        ("return 7", 7, ""),
        (
            "raise errors.UsageError('no such thing', found='a', expected='b', fix='c')",
            2,
            "prog: error: no such thing\n  found: a\n  expected: b\n  try: c\n",
        ),
        ("raise errors.BadInputError('x.jsonl:3: not JSON')", 3, "prog: error: x.jsonl:3: not JSON\n"),
        (
            "raise errors.DamageError('x' * 3000, found='y' * 1100, fix='z' * 1200)",
            4,
            f"prog: error: {'x' * 500} ... (2000 more characters) ... {'x' * 500}\n  found: {'y' * 491} "
            f"... (109 more characters) ... {'y' * 500}\n  try: {'z' * 1200}\n",
        ),
        ("raise errors.DamageError('torn')", 4, "prog: error: torn\n"),
        ("raise errors.ResourceError('no disk')", 5, "prog: error: no disk\n"),
        ("raise errors.StoppedError('time is up')", 75, "prog: error: time is up\n"),
        ("raise MemoryError", 5, "prog: error: out of memory\n  try: "),
        ('raise RuntimeError("can\'t start new thread")', 5, "prog: error: starting a thread: Resource temporarily"),
        pytest.param(
            "os.symlink('x', 'x'); Path('x').resolve()",
            2,
            "prog: error: {cwd}/x: Too many levels of symbolic links",
            marks=pytest.mark.skipif(sys.version_info >= (3, 13), reason="resolve leaves a loop as it is"),
        ),
        ("Path('').with_name('x')", 2, "prog: error: a path has no file name\n  found: .\n"),
        ("open('a\\0b')", 2, "prog: error: a path contains a NUL byte"),
        ("os.stat('a\\0b')", 2, "prog: error: a path contains a NUL byte"),
        ("raise type('PanicException', (BaseException,), {})('a bug')", 1, "prog: error: PanicException: a bug\n"),
        ("raise KeyboardInterrupt", 130, "prog: interrupted\n"),
        ("open('/nowhere/at/all')", 2, "prog: error: /nowhere/at/all: No such file or directory\n  try: "),
        ("raise OSError(28, 'x', '/full/disk')", 5, "prog: error: /full/disk: No space left on device\n"),
        ("raise OSError(24, 'x')", 5, "prog: error: Too many open files\n  try: raise the limit"),
        (
            "raise ModuleNotFoundError(name='torch')",
            2,
            "prog: error: this command needs torch, which is not installed\n",
        ),
        ("raise ModuleNotFoundError('x', name='mdata.x')", 1, "prog: error: ModuleNotFoundError: x\n"),
        ("{}['key']", 1, "prog: error: KeyError: 'key'\n  this is a bug in prog; run again with --debug"),
        (
            "os.kill(os.getpid(), signal.SIGTERM)",
            75,
            "prog: error: stopped by SIGTERM\n  try: run the same command again\n",
        ),
    ],
)
def test_each_ending_has_its_code_and_text(command, tmp_path, monkeypatch, capsys, body, code, text):
    monkeypatch.chdir(tmp_path)
    assert command(body)("work") == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(text.replace("{cwd}", str(tmp_path)))
    assert "Traceback" not in err
    assert len(err.splitlines()) <= 4


def test_sigterm_handler_is_put_back(command):
    before = signal.getsignal(signal.SIGTERM)
    command("pass")("work")
    assert signal.getsignal(signal.SIGTERM) is before


def test_debug_adds_the_traceback_before_the_message(command, capsys):
    assert command("raise errors.UsageError('wrong')")("work", "--debug") == 2
    err = capsys.readouterr().err
    assert err.startswith("Traceback") and err.endswith("prog: error: wrong\n")


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["wrok"], "prog: error: no command 'wrok'\n  try: work? See prog --help\n"),
        (["work", "--sise", "3"], "unrecognized arguments: --sise 3\n  try: --size? See prog work --help\n"),
        (["work", "--hemp"], "unrecognized arguments: --hemp\n  try: prog work --help\n"),
        (
            ["work", "--size", str(1 << 63)],
            "argument --size: 9223372036854775808 is not a 64-bit number\n  try: prog work --help\n",
        ),
        (["work", "--size", "many"], "argument --size: invalid int value: 'many'\n  try: prog work --help\n"),
    ],
)
def test_usage_errors_name_the_nearest(command, capsys, argv, text):
    assert command("pass")(*argv) == 2
    assert capsys.readouterr().err.endswith(text)


def test_help_lists_commands_without_importing_them(command, capsys):
    assert command("pass")("--help") == 0
    out = capsys.readouterr().out
    assert "work   does it" in out and "other  never" in out
    assert command("pass")() == 0
    assert command("pass")("work", "--help") == 0
    assert "--size" in capsys.readouterr().out


def test_result_is_text_or_json(command, capsys):
    main = command("console.result('two lines', {'b': 1, 'a': None})")
    assert main("work") == 0
    assert capsys.readouterr().out == "two lines\n"
    assert main("work", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": 1}


NOISY = """
console.note("a note")
with console.progress() as progress:
    progress.begin("counting", 2, unit="x")
    progress.note("a warning")
    progress.end()
console.result("done", {})
if arguments.size == 2:
    raise errors.UsageError("wrong")
"""


def test_quiet_leaves_results_and_errors(command, capsys):
    main = command(NOISY)
    assert main("work") == 0
    assert "a note" in (err := capsys.readouterr().err) and "prog: a warning" in err and '"counting"' in err
    for word in ("-q", "--quiet"):
        assert main("work", word) == 0
        assert capsys.readouterr() == ("done\n", "")
        assert main("work", "--size", "2", word) == 2
        assert capsys.readouterr() == ("done\n", "prog: error: wrong\n")
    assert command("os.kill(os.getpid(), signal.SIGINT)")("work", "-q") == 130
    assert capsys.readouterr().err == "prog: interrupted\n"


def test_verbose_tells_time_and_memory_and_more_progress(command, capsys, monkeypatch):
    body = 'with console.progress() as progress:\n    console.write(f"{progress._interval_s:g}\\n")'
    assert command(body)("work", "-v") == 0
    out, err = capsys.readouterr()
    assert out == "1\n" and re.fullmatch(r"prog: \S+, [0-9.]+ s, [0-9,]+ MiB of memory at peak in one process\n", err)
    assert command(body)("work") == 0
    assert capsys.readouterr() == ("10\n", "")


@pytest.mark.parametrize("variables", [{}, {"NO_COLOR": "1"}, {"FORCE_COLOR": "1"}], ids=str)
def test_nothing_is_coloured(variables):
    """On a terminal: neither help nor errors. Python 3.14 and some libraries would, unless NO_COLOR is set."""
    for words in (["verify", "--help"], ["verify", "nothing.json"], ["--help"]):
        ours, theirs = os.openpty()
        command = [sys.executable, "-m", "cli.mdata", *words]
        environment = {**os.environ, "TERM": "xterm-256color", **variables}
        subprocess.run(command, cwd=ROOT, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, check=False)
        os.close(theirs)
        shown = b""
        with suppress(OSError):  # the end, on Linux
            while part := os.read(ours, 1 << 16):
                shown += part
        os.close(ours)
        assert b"mdata" in shown and b"\x1b" not in shown and b"u001b" not in shown


MACHINE = "ENOSPC EDQUOT EMFILE ENFILE ENOMEM EIO EFBIG EAGAIN EINTR EBUSY ESTALE ETIMEDOUT ENOTCONN EHOSTDOWN ENOLCK"
PATHS = "ENOENT EACCES EPERM EISDIR ENOTDIR EEXIST EROFS ENAMETOOLONG ELOOP EMLINK EXDEV ETXTBSY EINVAL ESPIPE ENXIO"
OURS = "EBADF EFAULT"


def test_every_number_has_a_code():
    """What a system can say is never a fault of ours, but for what only we can cause."""
    numbers = {0, 4095, *errno.errorcode} - {getattr(errno, name) for name in OURS.split()}
    kinds = {type(errors.explain_os_error(OSError(number, "said"))) for number in numbers}
    assert kinds == {errors.UsageError, errors.ResourceError}
    told = errors.explain_os_error(PermissionError("Operation not permitted (os error 1)"))
    assert type(told) is errors.UsageError and "os error" not in str(told)
    told = errors.explain_os_error(FileNotFoundError("Unable to find 'x.jsonl'"))
    assert type(told) is errors.UsageError and "Unable to find 'x.jsonl'" in str(told) and "check the path" in str(told)
    told = errors.explain_os_error(OSError("the library's own words"))
    assert type(told) is errors.ResourceError and str(told).startswith("the library's own words\n  try: ")


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        *((getattr(errno, name), errors.ResourceError) for name in MACHINE.split()),
        *((getattr(errno, name), errors.UsageError) for name in PATHS.split()),
        *((getattr(errno, name), errors.MdataError) for name in OURS.split()),
    ],
)
def test_os_errors_become_our_kinds(number, kind):
    error = errors.explain_os_error(OSError(number, "", "a", None, "b"), "moving")
    assert type(error) is kind
    assert str(error).startswith(f"moving: a -> b: {os.strerror(number)}")


@pytest.mark.parametrize(
    ("number", "stands"), [(errno.EEXIST, "file"), (errno.ENOTDIR, "file"), (errno.EISDIR, "folder")]
)
def test_what_stands_in_the_way_is_told(number, stands):
    assert f"try: use another path: there is a {stands} where" in str(errors.explain_os_error(OSError(number, "", "a")))


def test_nearest_name():
    assert nearest("--inptu", ["--input", "--output"]) == "--input"
    assert nearest("zebra", ["--input"]) is None


def test_a_reader_that_leaves_is_no_error():
    """`prog work | head -1`: no traceback, no complaint at exit, code 0."""
    code = "import sys; from cli.console import Console, run, Command\nimport cli.mdata as m\n"
    code += "class M: add_arguments=staticmethod(lambda p: None)\n"
    code += "M.main=staticmethod(lambda a, c: [c.result('x' * 70000, {}) for _ in range(100)] and None)\n"
    code += "sys.modules['made_up'] = M\n"
    code += "sys.exit(run('prog', [Command('w', 's', module='made_up')], description='d', argv=['w']))"
    child = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    child.stdout.read(10)
    child.stdout.close()
    assert child.stderr.read() == b""
    assert child.wait() == 0
    child.stderr.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux only")
def test_a_full_disk_below_the_output_is_named():
    with Path("/dev/full").open("wb") as full:
        child = subprocess.run([sys.executable, "-m", "mdata", "--help"], cwd=ROOT, stdout=full, stderr=subprocess.PIPE)
    assert child.returncode == 5
    assert child.stderr.startswith(
        b"mdata: error: writing to standard output: No space left on device\n  try: free some"
    )


@pytest.mark.parametrize(("program", "commands"), [("mdata", MDATA), ("mtrain", MTRAIN)])
@pytest.mark.parametrize("value", ["", " ", "\t\n"], ids=["empty", "space", "tab"])
def test_no_option_takes_an_empty_or_blank_path(program, commands, value):
    """Path("") is the current folder, and a result would be written there; Path(" ") is a name that nobody means."""
    for command in commands:
        parser = command_parser(program, command, import_module(command.module, "cli"))
        for action in parser._actions:
            if not action.option_strings or action.nargs == 0 or action.metavar in ("TEXT", "KEY"):
                continue
            if value and action.metavar == "TOKEN":
                continue
            option = action.option_strings[-1]
            number = action.nargs if isinstance(action.nargs, int) else 1
            for words in ([option, *[value] * number], [f"{option}={value}"]):
                with pytest.raises(errors.UsageError, match=re.escape(option)):
                    parser.parse_intermixed_args(words)


@pytest.mark.parametrize(
    ("program", "line", "argument"),
    [
        (mdata, "dedup --input texts.jsonl --output=", "--output"),
        (mdata, "extract --input texts.jsonl --output ''", "--output"),
        (mdata, "preprocess --input texts.jsonl --tokenizer-type ByteTokenizer --output-prefix=''", "--output-prefix"),
        (mdata, "preprocess --input texts.jsonl '' --tokenizer-type ByteTokenizer --output-prefix a", "--input"),
        (mdata, "adopt ''", "PREFIX"),
        (mdata, "adopt ' '", "PREFIX"),
        (mdata, "dedup --input texts.jsonl --output ' '", "--output"),
        (mtrain, "report ''", "RUN"),
        (mtrain, "convert --to hf a ''", "TARGET"),
    ],
)
def test_an_empty_word_is_named_and_nothing_is_written(program, line, argument, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("texts.jsonl").write_text('{"text": "a"}\n')
    assert program(shlex.split(line)) == 2
    value = "blank" if "' '" in line else "empty"
    assert f"error: argument {argument}: the value is {value}; is it a shell variable" in capsys.readouterr().err
    assert [path.name for path in Path().iterdir()] == ["texts.jsonl"]
