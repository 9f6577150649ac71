"""Makes every system call, by any library, fail: commands run in forks of one process that has everything imported.

`python -m tests.helpers.failing_calls FOLDER SHARE [SEED [COMMANDS]]` creates a small set of files, counts the calls of
each command, and makes calls fail, once or from then on; it prints one JSON line for each case that did not end as
required. `SHARE` of all cases are run, chosen by their hashes with the seed: 1 means all. 100 cases take about 7 s.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).with_suffix(".c")
ROOT = Path(__file__).parents[2]
CODES = (
    "EIO", "ENOSPC", "EDQUOT", "EROFS", "EACCES", "EPERM", "EMFILE", "ENFILE", "ENOMEM", "ESTALE", "EMLINK", "ELOOP",
    "ENAMETOOLONG", "ETIMEDOUT", "EINTR", "EAGAIN", "EBUSY", "ETXTBSY", "EFBIG", "EXDEV", "ENOTCONN", "EHOSTDOWN",
    "ENOENT", "EISDIR", "ENOTDIR", "EEXIST", "EINVAL", "ENODEV", "EUCLEAN", "EREMOTEIO",
)  # fmt: skip
# Python, like most libraries, repeats a call that a signal interrupts, so one that always is never ends.
ONCE_ONLY = {"EINTR"}
WATCHED = "/watched/"
_LIMIT_S = 60


class Case(NamedTuple):
    """Call `at` of a command fails with `code`; `lasting`: so do all later calls."""

    command: str
    at: int
    code: str
    lasting: bool

    def chosen(self, share: float, seed: int = 0) -> bool:
        return zlib.crc32(repr((seed, *self)).encode()) < share * 2**32


class Outcome(NamedTuple):
    """How a case ended: the exit code (negative: a signal), the call that failed, and stderr."""

    code: int
    call: str
    said: str


def built(folder: Path) -> Path:
    """The library to preload."""
    library = folder / "failing_calls.so"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
    return library


def problems(folder: Path, *, share: float, seed: int = 0, only: str = "") -> list[dict[str, object]]:
    """The cases that ended badly, found in a separate process; the last line has the number of cases run.

    `only`: beginnings of commands' names, between commas.
    """
    words = [sys.executable, "-m", __name__, str(folder), str(share), str(seed), only]
    done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def preload(folder: Path) -> None:
    """Restart this program with the library preloaded, unless it is already."""
    if hasattr(ctypes.CDLL(None), "failing_calls_arm"):
        return
    environment = {**os.environ, "LD_PRELOAD": str(built(folder)), "TOKENIZERS_PARALLELISM": "false"}
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    os.execve(sys.executable, sys.orig_argv, environment)


def commands(there: Path) -> dict[str, list[str]]:
    """The commands by name; their arguments contain the folder of the files."""
    corpus, mix = str(there / "web_text_document"), str(there / "mix.json")
    tokenizer = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(there / "tokenizer")]
    preprocess = ["preprocess", *tokenizer, "--workers", "1", "--output-prefix", str(there / "new" / "out"), "--input"]
    cache = ["--cache", str(there / "cache")]
    reading = ["--sequence-length", "32"]
    return {
        "preprocess": [*preprocess, str(there / "web.jsonl"), "--append-eod"],
        "preprocess again": [*preprocess, str(there / "code.jsonl"), "--output-prefix", f"{there}/web", "--overwrite"],
        "preprocess gzip": [*preprocess, str(there / "web.jsonl.gz"), "--on-error", "skip"],
        "preprocess parquet": [*preprocess, str(there / "web.parquet")],
        "blend": ["blend", "0.5", corpus, "0.5", str(there / "code_text_document"), "-o", str(there / "n.json")],
        "blend toml": ["blend", str(there / "blend.toml"), "-o", str(there / "n.json")],
        "build": ["build", mix, *reading, "--order", "megatron", "--train-samples", "50", *cache],
        "build packed": ["build", f"{corpus}.json", *reading, "--kind", "packed", *cache],
        "verify": ["verify", mix],
        "verify full": ["verify", "--full", f"{corpus}.json"],
        "inspect": ["inspect", f"{corpus}.json"],
        "inspect bare": ["inspect", str(there / "bare")],
        "cat": ["cat", corpus, "--documents", "0:3"],
        "cat origin": ["cat", corpus, "--origin", "web.jsonl:2"],
        "adopt": ["adopt", str(there / "bare"), "--full", *tokenizer],
        "adopt convert": ["adopt", str(there / "old"), "--convert", str(there / "new" / "pair")],
        "trace": ["trace", mix, *reading, "--sample", "3", "--text"],
        "report": ["report", mix, "-o", str(there / "page.html")],
        "train-tokenizer": [
            "train-tokenizer", "--input", str(there / "web.jsonl"), "--output", str(there / "t"), "--vocab-size", "280",
        ],
        "mtrain check": ["check", str(there / "run.toml")],
    }  # fmt: skip


def make_world(there: Path) -> None:
    """Write two corpora, their blend, a bare pair, compressed inputs, and a run's configuration."""
    import gzip

    import pyarrow as pa
    import pyarrow.parquet as pq

    from tests.helpers.legacy_pairs import write_legacy
    from tests.helpers.runs import make_mix

    there.mkdir(parents=True)
    make_mix(there, ["web", "code"])
    lines = (there / "web.jsonl").read_bytes()
    (there / "web.jsonl.gz").write_bytes(gzip.compress(lines))
    texts = [json.loads(line)["text"] for line in lines.splitlines()]
    pq.write_table(pa.table({"text": texts}), there / "web.parquet")
    write_legacy(there / "old", [[[1, 2, 3], [4]], [[5, 6]]])
    for ending in (".bin", ".idx"):
        shutil.copy(there / f"web_text_document{ending}", there / f"bare{ending}")
    named = (f'[[component]]\npath = "{there}/{name}_text_document.json"\nweight = 1\n' for name in ("web", "code"))
    (there / "blend.toml").write_text("".join(named))
    (there / "run.toml").write_text(
        f'[run]\nfolder = "{there}/run"\n[model]\nnum_layers = 2\nhidden_size = 64\nnum_heads = 4\n'
        f'[data]\nblend = "{there}/mix.json"\n'
        "[train]\nsequence_length = 32\nglobal_batch = 4\nmicro_batch = 2\nsteps = 4\n[optimizer]\nlr = 1e-3\n"
    )


def run_command(words: list[str]) -> int:
    """Run a command like the console scripts."""
    from cli import mdata, mtrain
    from cli.console import run

    if words[0] == "check":
        return run("mtrain", mtrain.COMMANDS, description="", argv=words)
    return run("mdata", mdata.COMMANDS, description="", argv=words)


class Forks:
    """Runs commands on copies of the files, each in a fork of this process."""

    def __init__(self, folder: Path) -> None:
        self._pristine = folder / "pristine" / WATCHED.strip("/")
        self._copy = folder / "copy" / WATCHED.strip("/")
        make_world(self._copy)
        self._pristine.parent.mkdir()
        shutil.copytree(self._copy, self._pristine)
        self._said = folder / "said"
        self._library = ctypes.CDLL(None)
        self._library.failing_calls_name.restype = ctypes.c_char_p
        self.commands = commands(self._copy)

    def warm(self, name: str) -> None:
        """Import what a command imports."""
        self._fresh()
        with self._said.open("w") as said:
            before = os.dup(1), os.dup(2)
            os.dup2(said.fileno(), 1), os.dup2(said.fileno(), 2)
            code = run_command(self.commands[name])
            for number, fd in enumerate(before, 1):
                os.dup2(fd, number)
                os.close(fd)
        assert code == 0, (name, code, self._said.read_text())

    def count(self, name: str) -> int:
        """The number of calls that a command makes."""
        return int(self.run(Case(name, -1, "EIO", False)).call)

    def run(self, case: Case) -> Outcome:
        """Run one case; if no call fails, its `call` is the number of calls."""
        self._fresh()
        child = os.fork()
        if child == 0:
            self._run_and_exit(case)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said, _, call = self._said.read_text(errors="replace").rpartition("\n")
        return Outcome(code, call, said)

    def _fresh(self) -> None:
        shutil.rmtree(self._copy, ignore_errors=True)
        shutil.copytree(self._pristine, self._copy)

    def _run_and_exit(self, case: Case) -> None:
        code = 99
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(_LIMIT_S)
            fd = os.open(self._said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(fd, 1), os.dup2(fd, 2)
            self._library.failing_calls_arm(WATCHED.encode(), case.at, getattr(errno, case.code), int(case.lasting))
            code = run_command(self.commands[case.command])
            sys.stdout.flush()
        finally:
            seen = self._library.failing_calls_disarm()
            name = self._library.failing_calls_name().decode()
            os.write(2, f"\n{seen if case.at < 0 else name}".encode())
            os._exit(code)


def expected(code: str) -> int:
    """The exit code for an error of the system, from the table of mdata.errors."""
    from mdata.errors import explain_os_error

    return explain_os_error(OSError(getattr(errno, code), "")).exit_code


def cases(name: str, calls: int) -> Iterator[Case]:
    """Every call with every error, failing once or from then on."""
    for at in range(calls):
        for code in CODES:
            yield Case(name, at, code, False)
            if code not in ONCE_ONLY:
                yield Case(name, at, code, True)


# Where Python asks whether a file can be sought in it does not tell the number; a lock that is refused is held.
_MEANS = {"lseek": 5, "flock": 2}
# Only a descriptor that does not block answers so, of which we open none; Python's files read None then.
_NEVER = {("read", "EAGAIN")}


def fault(case: Case, outcome: Outcome) -> str | None:
    """What is wrong with how a case ended."""
    if "Traceback" in outcome.said:
        return "a traceback"
    # A manifest, an index or a piece that cannot be read whole is damage; what nobody needs may fail in silence.
    never = (outcome.call, case.code) in _NEVER and outcome.code > 0
    if not never and outcome.code not in (0, expected(case.code), 4, _MEANS.get(outcome.call)):
        return f"exit code {outcome.code}, not {expected(case.code)}"
    return None


def main(folder: Path, share: float, seed: int = 0, only: str = "") -> None:
    """Print the bad cases, then how many were run."""
    preload(folder)
    forks = Forks(folder)
    ran = 0
    names = [name for name in forks.commands if name.startswith(tuple(only.split(",")))]
    for name in names:
        forks.warm(name)
    for name in names:
        calls = forks.count(name)
        for case in cases(name, calls):
            if not case.chosen(share, seed):
                continue
            ran += 1
            outcome = forks.run(case)
            if problem := fault(case, outcome):
                print(json.dumps({"case": case, "problem": problem, **outcome._asdict()}), flush=True)
        print(json.dumps({"command": name, "calls": calls}), flush=True)
    print(json.dumps({"ran": ran}), flush=True)


if __name__ == "__main__":
    place, part, *more = sys.argv[1:]
    main(Path(place), float(part), int(more[0]) if more else 0, *more[1:])
