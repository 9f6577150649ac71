"""The first moments of a process: Ctrl-C during imports, and standard streams that are closed."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cli.mdata import main
from cli.start import DISTRIBUTION, PACKAGES, InterruptsEndAtOnce, foreign_package
from mdata.version import DISTRIBUTION as DISTRIBUTION_OF_VERSION
from tests.helpers.corpora import write_pair

ROOT = Path(__file__).parents[2]

# Sends SIGINT to itself when a module is about to be imported, as a quick user does. An import may swallow what a
# handler raises (a destructor, a broad except); the process must end all the same.
INTERRUPTING = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path, target=None):
        if name == {name!r}:
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except BaseException:
                pass
sys.meta_path.insert(0, Finder())
from cli.{program} import main
sys.exit(main({argv!r}))
"""


TRAIN = "train-tokenizer --vocab-size 300 --output o"


@pytest.mark.parametrize(
    ("program", "name", "argv"),
    [
        ("mdata", "cli.console", []),
        ("mdata", "numpy", ["inspect", "x"]),
        ("mdata", "mdata.corpus.corpus", ["inspect", "x"]),
        ("mdata", "cli.inspect", ["inspect", "x"]),
        ("mtrain", "argparse", ["train", "x"]),
        ("mtrain", "mdata.errors", ["train", "x"]),
    ],
)
def test_ctrl_c_during_imports(program, name, argv):
    code = INTERRUPTING.format(program=program, name=name, argv=argv)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 130 and done.stdout == ""
    assert done.stderr == f"{program}: interrupted\n"


def test_in_another_thread_signals_are_left_alone():
    before = signal.getsignal(signal.SIGINT)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: InterruptsEndAtOnce("prog").__enter__()).result()
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("program", ["mdata", "mtrain"])
def test_nothing_is_imported_before(program):
    """What the interpreter has not loaded by itself, other than our three small modules."""
    code = f"import os, sys; before = set(sys.modules); import cli.{program}; print(sorted(set(sys.modules) - before))"
    # -S: without what an editable installation imports to find us.
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(ast.literal_eval(done.stdout)) <= {"__future__", "cli", "cli.start", f"cli.{program}"}


@pytest.mark.parametrize("module", ["cli.preprocess", "cli.blend", "cli.mtrain_train"])
def test_arrow_is_imported_for_its_files_only(module):
    """It takes a quarter of a second, which jsonl and training would pay for nothing."""
    code = f"import sys, {module}; print('pyarrow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_after_the_block_ctrl_c_is_what_it_was():
    before = signal.getsignal(signal.SIGINT)
    with InterruptsEndAtOnce("prog"):
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


CLOSED = ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"]


@pytest.mark.parametrize("closed", CLOSED)
def test_closed_standard_streams(tmp_path, closed):
    """No error, and no file of ours gets the number of a closed stream."""
    write_pair(tmp_path / "x", [[3]])
    words = f"{sys.executable} -m cli.mdata adopt --full {tmp_path}/x {closed}"
    done = subprocess.run(["sh", "-c", words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done
    assert main(["verify", "--full", str(tmp_path / "x")]) == 0


@pytest.mark.parametrize("closed", CLOSED)
def test_no_file_gets_the_number_of_a_closed_stream(closed):
    code = (
        "import os, sys; from cli.start import keep_standard_streams; keep_standard_streams();"
        " sys.exit(os.open(os.devnull, os.O_RDONLY))"
    )
    words = ["sh", "-c", f'"$0" -c "{code}" {closed}', sys.executable]
    assert subprocess.run(words, cwd=ROOT, capture_output=True, check=False).returncode >= 3


def test_an_encoding_without_the_character(tmp_path):
    code = "import sys; from cli.console import Console; c = Console('p'); c.result('caf\\u00e9 \\u4e16', {})"
    env = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, env=env, check=False)
    assert done.stdout == b"caf\xe9 \\u4e16\n" and done.stderr == b""


@pytest.mark.parametrize("words", ["preprocess --output-prefix o --tokenizer-type ByteTokenizer", TRAIN])
def test_a_closed_stdin_is_no_empty_input(tmp_path, words):
    line = f"{sys.executable} -m cli.mdata {words} --input - "
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for closed, code, heard in (("<&-", 2, "standard input is closed"), ("</dev/null", None, "")):
        done = subprocess.run(
            ["sh", "-c", line + closed], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == (code or (2 if words == TRAIN else 0)) and heard in done.stderr
        assert ("closed" in done.stderr) == bool(heard) and "Traceback" not in done.stderr
        assert bool(list(tmp_path.iterdir())) == (not done.returncode)


# Signals itself when the command is done: in an exit handler, and when modules are taken down.
LATE = """
import atexit, os, sys
from cli.mdata import main
class Late:
    def __del__(self, kill=os.kill, pid=os.getpid()):
        kill(pid, {number})
late = Late()
if {in_handler}:
    atexit.register(Late)
sys.argv[1:] = {words!r}
sys.exit(main())
"""


@pytest.mark.parametrize("in_handler", [True, False])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("words", "code"), [(["--version"], 0), (["no-command"], 2)])
def test_a_signal_behind_the_end_changes_nothing(words, code, number, in_handler):
    program = LATE.format(number=int(number), in_handler=in_handler, words=words)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, "Exception" in done.stderr, "Traceback" in done.stderr) == (code, False, False), done
    assert done.stdout.startswith("mdata") == (code == 0)


# Two ranks in one process. The threads of gloo work on the last collective until the end of the process: main gives
# the interpreter away neither while they finish it, nor until Python begins to take itself down.
LATE_THREADS = """
from cli.start import ProcessEnd
end = ProcessEnd()
import atexit, datetime, sys, threading, time
import torch
import torch.distributed as dist
store, ranks = dist.HashStore(), []
def join(rank):
    ranks.append(dist.ProcessGroupGloo(store, rank, 2, datetime.timedelta(seconds=60)))
threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
tensors = [torch.zeros(8), torch.zeros(8)]
ranks[0].allreduce([tensors[0]])
def hold():
    sys.setswitchinterval(1e6)
    ranks[1].allreduce([tensors[1]])
    until = time.monotonic() + 1
    while time.monotonic() < until:
        pass
    print("all exit handlers ran")
atexit.register(hold)
end.decide(5)
"""


def test_threads_of_gloo_do_not_abort_a_process_that_is_done():
    done = subprocess.run([sys.executable, "-c", LATE_THREADS], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (5, "all exit handlers ran\n", "")


@pytest.mark.parametrize(
    ("program", "files", "words"),
    [
        ("mdata", {"mdata/__init__.py": ""}, ["inspect", "x"]),
        ("mdata", {"mdata/__init__.py": "", "mdata/errors.py": "class Error(Exception): pass\n"}, ["--version"]),
        ("mdata", {"mdata/__init__.py": "print 'Python 2'\n"}, ["--help"]),
        ("mdata", {"mdata/other.py": ""}, ["--help"]),  # a namespace package
        ("mtrain", {"trainer/__init__.py": "raise AttributeError('x')\n"}, ["plan", "run.toml"]),
        ("mtrain", {"trainer/__init__.py": "from trainer.trainer import Trainer\n"}, ["check", "run.toml"]),
    ],
)
def test_a_foreign_package_of_our_name_is_told(program, files, words, tmp_path):
    """Others have taken both names on the index; pip puts one over the other."""
    name = next(iter(files)).partition("/")[0]
    about = "Metadata-Version: 2.1\nName: other-things\nVersion: 1.2\n"
    files |= {"other_things-1.2.dist-info/METADATA": about, "other_things-1.2.dist-info/top_level.txt": f"{name}\n"}
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    root = Path(__file__).resolve().parents[2]
    # A namespace package comes last on the path: ours is not in it.
    (tmp_path / "cli").symlink_to(root / "cli")
    if name == "trainer":
        (tmp_path / "mdata").symlink_to(root / "mdata")
    # Without site (-S) there is no hook that finds an editable installation before everything on the path.
    others = [entry for entry in sys.path if entry and Path(entry).resolve() != root]
    code = f"import sys; sys.path[1:] = {others!r}\nfrom cli.{program} import main\nsys.exit(main({words!r}))"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2, done.stderr
    lines = done.stderr.splitlines()
    assert lines[0] == f"{program}: error: the package {name} that Python imports is not that of mdata-mtrain"
    assert str(tmp_path / name) in lines[1] and lines[1].endswith(", of the distribution other-things")
    assert lines[2].startswith("  try: pip uninstall other-things") and len(lines) == 3


def test_our_own_packages_are_not_foreign():
    assert DISTRIBUTION == DISTRIBUTION_OF_VERSION and PACKAGES == ("mdata", "trainer")
    assert foreign_package() is None
