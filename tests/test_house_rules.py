"""The house rules, enforced by tests so that nobody has to remember them; CONTRIBUTING.md lists them in words."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.helpers import house_rules as house

# (rule, place) -> why this place may break the rule. An entry that is no longer needed fails.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("no blanket except", "cli/console.py"): "the one place that turns any error into an exit code and a message",
    ("no blanket except", "cli/mtrain_rank.py"): "a rank hands its error to the process that started it",
    ("no blanket except", "mdata/util/background.py"): "a background thread hands its error to the other thread",
    ("atomic_io is the door", "trainer/launching/on_ray.py"): "its tasks are sent by their code, and append to a log",
    ("atomic_io is the door", "trainer/run/metrics.py"): "lines are appended to a file that is read while it grows",
    ("atomic_io is the door", "trainer/tasks/generate.py"): "an interrupted file of samples is continued",
    ("one door to the terminal", "cli/start.py"): "a fixed line before anything is imported, and no name in it",
    (
        "no blanket except",
        "mdata/preprocessing/fork_server.py",
    ): "a worker hands its error to the parent, which raises",
    ("requests to stop pass", "cli/console.py"): "the one place that turns a request to stop into an exit code",
    ("requests to stop pass", "cli/mtrain_rank.py"): "a rank hands it to the process that started it",
    ("requests to stop pass", "cli/mtrain_ray.py"): "a process in the background says in the job's folder how it ended",
    ("requests to stop pass", "mdata/util/background.py"): "it is kept until the thread has ended, then raised",
}

# For each rule a file that breaks it and one that does not: a rule that cannot fail is no rule.
SAMPLES = {
    "import direction": (
        "trainer/x.py",
        "from mdata.indexed import reader",
        "from mdata import UsageError\nimport torch",
    ),
    "no global": ("mdata/x.py", "def f():\n global y\n y = 1", "y = 1"),
    "collectives in one file": (
        "trainer/x.py",
        "import torch.distributed as dist\ndist.all_reduce(x)",
        "import functools\nimport torch.distributed as dist\nfunctools.reduce(f, x)\ndist.get_rank()",
    ),
    "no print": ("mdata/x.py", "print(1)", "console.print(1)"),
    "one door to the terminal": (
        "cli/x.py",
        "import sys\nsys.stdout.write(name)",
        "console.write(name)\nsay(name, standard_output())",
    ),
    "module docstring": ("mdata/x.py", "x = 1", '"""One line."""'),
    "no blanket except": (
        "mdata/x.py",
        "try: f()\nexcept (OSError, Exception): x = 1",
        "try: f()\nexcept OSError: x = 1",
    ),
    "requests to stop pass": (
        "mdata/x.py",
        "try: f()\nexcept BaseException as error: raise UsageError('no') from error",
        "try: f()\nexcept BaseException:\n g()\n raise",
    ),
    "closed once": ("mdata/x.py", "import os\nos.close(self._fd)", "import os\nfd = os.open(p, 0)\nos.close(fd)"),
    "atomic_io is the door": ("trainer/x.py", "path.replace(other)", "text.replace('a', 'b')\nopen(path, 'rb')"),
    "assert has a message": ("mdata/x.py", "assert x", "assert x, 'because'"),
    "no stub": ("mdata/x.py", "raise NotImplementedError('soon')", "raise ValueError('no')"),
    "no environment at import": (
        "mdata/x.py",
        "import os\nX = os.environ.get('X')",
        "import os\ndef f(): return os.environ",
    ),
}
MORE_OFFENCES = [
    ("import direction", "mdata/x.py", "def f():\n import torch"),
    ("import direction", "mdata/x.py", "from trainer.config.sections import RunConfig"),
    ("import direction", "trainer/x.py", "from cli.console import run"),
    ("import direction", "trainer/x.py", "import mdata.indexed.reader"),
    ("collectives in one file", "trainer/x.py", "from torch.distributed import all_gather"),
    ("collectives in one file", "trainer/x.py", "from torch import distributed as d\nd.barrier()"),
    ("collectives in one file", "trainer/x.py", "import torch\ntorch.distributed.broadcast(x, 0)"),
    ("collectives in one file", "trainer/parallel/collectives.py", "import torch.distributed as d\nd.new_group([0])"),
    ("no blanket except", "mdata/x.py", "try: f()\nexcept: raise"),
    ("requests to stop pass", "mdata/x.py", "try: f()\nexcept: x = 1"),
    ("requests to stop pass", "cli/x.py", "try: f()\nexcept (OSError, KeyboardInterrupt): x = 1"),
    ("requests to stop pass", "mdata/x.py", "def f():\n try: g()\n except StoppedError:\n  if x: return\n  raise"),
    ("requests to stop pass", "mdata/x.py", "with contextlib.suppress(OSError, BaseException): f()"),
    ("one door to the terminal", "cli/x.py", "print(name)"),
    ("one door to the terminal", "cli/x.py", "import os\nos.write(1, name)"),
    ("one door to the terminal", "cli/x.py", "self._stream.write(name)"),
    ("one door to the terminal", "cli/x.py", "from sys import stderr"),
    ("one door to the terminal", "cli/x.py", "import sys\nf(file=sys.__stderr__)"),
    ("module docstring", "mdata/x.py", "# a comment\nx = 1"),
    ("atomic_io is the door", "mdata/x.py", "import os\nos.replace(a, b)"),
    ("atomic_io is the door", "mdata/x.py", "path.open('ab')"),
    ("atomic_io is the door", "mdata/x.py", "import os\nos.open(path, os.O_RDWR | os.O_CLOEXEC)"),
    ("atomic_io is the door", "mdata/x.py", "open(path, mode='w')"),
    ("atomic_io is the door", "mdata/x.py", "Path(path).write_text(x)"),
]  # fmt: skip


@pytest.fixture(scope="module")
def sources():
    return house.sources()


@pytest.mark.parametrize("name", house.RULES)
def test_rule_holds(name, sources):
    found = [finding for source in sources for finding in house.RULES[name].findings(source)]
    allowed = {place for rule, place in EXCEPTIONS if rule == name}
    broken = [f"{place}: {problem}" for place, problem in found if place not in allowed]
    assert not broken, f"{name}:\n" + "\n".join(broken)
    assert allowed <= {place for place, _ in found}, f"{name}: an exception is no longer needed"


@pytest.mark.parametrize("name", house.TEXT_RULES)
def test_text_rule_holds(name):
    found = [finding for source in house.texts() for finding in house.TEXT_RULES[name](source)]
    assert not found, f"{name}:\n" + "\n".join(f"{place}: {problem}" for place, problem in found)


def test_sources_are_found(sources):
    assert {"mdata", "trainer", "cli"} == {source.package for source in sources}
    assert len(sources) > 20


@pytest.mark.parametrize("name", house.RULES)
def test_rule_can_fail(name):
    path, bad, good = SAMPLES[name]
    assert house.RULES[name].findings(house.parse(path, bad))
    assert not house.RULES[name].findings(house.parse(path, good))


@pytest.mark.parametrize(("name", "path", "text"), MORE_OFFENCES)
def test_rule_sees_other_forms(name, path, text):
    assert house.RULES[name].findings(house.parse(path, text))


def test_text_rules_can_fail():
    path = "/".join(["", "home", "someone", "data"])
    assert list(house.no_machine_paths(house.parse("README.md", f"see {path}\n")))
    assert not list(house.no_machine_paths(house.parse("README.md", "docs/home/x and https://a.org/home/b\n")))


def test_exceptions_name_rules_and_reasons():
    assert {rule for rule, _ in EXCEPTIONS} <= set(house.RULES)
    assert all(len(reason) > 20 for reason in EXCEPTIONS.values())


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        ("import mdata", ["torch", "tokenizers", "safetensors", "trainer"]),
        ("from cli.mdata import main; main(['--help'])", ["torch", "tokenizers", "safetensors", "trainer"]),
        # What each rank of a run imports: these would more than double the CPU time of its start.
        ("import trainer.run.train, trainer.run.launch", ["torch._dynamo", "torch.distributed.checkpoint", "sympy"]),
    ],
)
def test_imports_stay_light(statement, heavy):
    code = f"import sys\n{statement}\nprint([m for m in {heavy} if m in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=house.ROOT)
    assert answer.stdout.splitlines()[-1] == "[]"
