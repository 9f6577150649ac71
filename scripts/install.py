"""Make `.venv` with everything that a make target needs, once; a second run only looks at a stamp.

    python3 scripts/install.py train dev             names of pyproject's optional dependencies

Steps: prerequisites by name; the virtual environment; torch (an installed one of a fitting version is
linked, else the download's size is said first); what else is missing, at the versions of constraints.txt;
the project itself, editable. The stamp is written last, so that an interrupted run is done again. Standard
library only, because it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import urllib.parse
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "installed.json"
UNDERWAY = VENV / "install-underway"
LINK_NAME = "zz_linked_torch.pth"  # sorted last, and a .pth file extends the end of the path
CONSTRAINTS = ROOT / "constraints.txt"
INPUTS = ("pyproject.toml", "CMakeLists.txt", "constraints.txt", "scripts/install.py", "mdata_cpp")
PACKAGES = ("mdata", "trainer", "cli")
BUILD_TOOLS = ["cmake>=3.25", "ninja>=1.11"]
PREREQUISITES = "sudo apt-get install python3-venv python3-dev g++ make"

LOOK_FOR_TORCH = """
import json, sys, torch, numpy
assert float(torch.from_numpy(numpy.ones(2)).sum()) == 2
sites = [p for p in sys.path if p.rstrip("/").endswith(("site-packages", "dist-packages"))]
print(json.dumps({"version": torch.__version__, "sites": sites, "python": sys.version_info[:2]}))
"""

CHECK_REQUIREMENTS = """
import json, sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from pip._vendor.packaging.requirements import Requirement
wanted, pinned = json.load(sys.stdin)
pins = {r.name.lower().replace("_", "-"): r.specifier for r in map(Requirement, pinned)}
missing, outside = [], []
for text in wanted:
    need = Requirement(text)
    if need.marker is not None and not need.marker.evaluate():
        continue
    name = need.name.lower().replace("_", "-")
    try:
        found = distribution(need.name)
    except PackageNotFoundError:
        missing.append(text)
        continue
    inside = Path(found.locate_file("")).resolve().is_relative_to(Path(sys.prefix).resolve())
    exact = inside and name in pins and not pins[name].contains(found.version, prereleases=True)
    if exact or not need.specifier.contains(found.version, prereleases=True):
        missing.append(text)
for text in pinned:
    try:
        found = distribution(Requirement(text).name)
    except PackageNotFoundError:
        continue
    if not Path(found.locate_file("")).resolve().is_relative_to(Path(sys.prefix).resolve()):
        outside.append(text)
print(json.dumps([missing, outside]))
"""


def main() -> int:
    """Install what is missing; 0, or 2 with the reason on stderr."""
    parser = argparse.ArgumentParser(description="make .venv with everything that a make target needs")
    parser.add_argument("extras", nargs="*", help="names of optional dependencies in pyproject.toml")
    parser.add_argument("--torch-index", default="", help="package index that torch comes from")
    arguments = parser.parse_args()
    _leave_own_venv()
    _check_prerequisites()
    fingerprint = _fingerprint()
    done = _read_stamp(fingerprint)
    if set(arguments.extras) <= done:
        return 0
    extras = sorted(done | set(arguments.extras))
    STAMP.unlink(missing_ok=True)
    _make_venv()
    wanted = _requirements(extras)
    _provide_torch(wanted, arguments.torch_index)
    _provide(wanted)
    _install_project()
    _write_stamp(fingerprint, extras)
    return 0


def say(text: str) -> None:
    """One line of what is going on."""
    print(f"install: {text}", flush=True)


def fail(text: str) -> SystemExit:
    """The reason for stopping, for `raise`."""
    print(f"install: error: {text}", file=sys.stderr, flush=True)
    return SystemExit(2)


def _leave_own_venv() -> None:
    """Started by .venv's own python (it is activated): go on with the one that it was made from."""
    if Path(sys.prefix).resolve() == VENV.resolve():
        base = getattr(sys, "_base_executable", sys.executable)
        os.execv(base, [base, str(Path(__file__).resolve()), *sys.argv[1:]])


def _check_prerequisites() -> None:
    """Stop, naming everything at once, where this machine cannot build the project."""
    if sys.version_info < (3, 11):  # noqa: UP036 - any python3 may run this file
        version = ".".join(map(str, sys.version_info[:3]))
        raise fail(f"Python 3.11 or newer is needed; this is {version}\n  try: make PYTHON=python3.12 ...")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    compiler = os.environ.get("CXX", "").split()[:1] or ["c++"]
    needs = {
        "python3-venv": all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")),
        "python3-dev": header.exists(),
        "g++": shutil.which(compiler[0]) or shutil.which("g++"),
        "make": shutil.which("make"),
    }
    missing = [name for name, there in needs.items() if not there]
    if missing:
        raise fail(f"missing: {', '.join(missing)}\n  try, on Debian and Ubuntu: {PREREQUISITES}")


def _fingerprint() -> str:
    """Hash of everything that decides what an install makes.

    Of Python modules that is their names: they are read where they lie, but an editable install lists them.
    """
    digest = hashlib.sha256(str(sys.version_info[:2]).encode())
    for module in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        digest.update(module.relative_to(ROOT).as_posix().encode() + b"\0")
    for name in INPUTS:
        path = ROOT / name
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                digest.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _read_stamp(fingerprint: str) -> set[str]:
    """The extras that are installed; "" stands for the base, so that nothing installed is the empty set."""
    try:
        stamp = json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return set()
    return set(stamp["extras"]) if stamp.get("fingerprint") == fingerprint and PYTHON.exists() else set()


def _write_stamp(fingerprint: str, extras: list[str]) -> None:
    partial = STAMP.with_suffix(".partial")
    partial.write_text(json.dumps({"fingerprint": fingerprint, "extras": extras}))
    partial.replace(STAMP)


def _make_venv() -> None:
    """A virtual environment that runs; one whose install was interrupted is emptied first."""
    same = f"import pip, sys; sys.exit(sys.version_info[:2] != {sys.version_info[:2]})"
    usable = PYTHON.exists() and not UNDERWAY.exists()
    if usable and subprocess.run([PYTHON, "-c", same], capture_output=True).returncode == 0:
        return
    say(f"making {VENV.name} with {sys.executable} ({sys.version.split()[0]})")
    _run([sys.executable, "-m", "venv", "--clear", str(VENV)], "cannot make the virtual environment")
    pin = next((line for line in _pins() if line.startswith("pip==")), "pip")
    words = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", pin]
    if subprocess.run(words, capture_output=True).returncode:
        say("pip stays at its version; there seems to be no network")


def _requirements(extras: list[str]) -> list[str]:
    """What pyproject.toml asks for: the base, the extras, and what it takes to build."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    optional = project["project"]["optional-dependencies"]
    unknown = [name for name in extras if name not in optional]
    if unknown:
        raise fail(f"pyproject.toml has no optional dependencies {unknown}; it has {sorted(optional)}")
    wanted = list(project["project"]["dependencies"]) + project["build-system"]["requires"] + BUILD_TOOLS
    return list(dict.fromkeys(wanted + [text for name in extras for text in optional[name]]))


def _provide_torch(wanted: list[str], index: str) -> None:
    """Link a torch that is installed already, or download one after saying how much that is."""
    requirement = next((text for text in wanted if text.startswith("torch")), None)
    if requirement is None or not _unsatisfied([requirement])[0] or _link_torch(requirement):
        return
    where = ["--index-url", index] if index else []
    size = _download_size([*where, requirement])
    say(f"torch is not installed; its download with what it needs is {size}")
    if not index:
        say("smaller and without GPU: make quickstart TORCH_INDEX=<index address from PyTorch's install page>")
    if _pip([*where, requirement]):
        missing = ", ".join(_unsatisfied(wanted)[0])
        raise fail(f"{requirement} could not be installed; missing are: {missing}\n  try: set TORCH_INDEX")


def _link_torch(requirement: str) -> bool:
    """Append the packages of the Python that runs this to .venv's path if a fitting torch is among them."""
    result = subprocess.run([sys.executable, "-P", "-c", LOOK_FOR_TORCH], capture_output=True, text=True)
    if result.returncode:
        return False
    facts = json.loads(result.stdout.splitlines()[-1])
    link = _site_packages() / LINK_NAME
    link.write_text("".join(f"{folder}\n" for folder in facts["sites"]))
    if _unsatisfied([requirement])[0]:
        link.unlink()
        say(f"the installed torch {facts['version']} does not fit {requirement}")
        return False
    say(f"using the installed torch {facts['version']} of {sys.executable}")
    return True


def _provide(wanted: list[str]) -> None:
    """Install what is missing, at the pinned versions; stop with all names if that cannot be done."""
    missing, outside = _unsatisfied(wanted)
    if not missing:
        return
    say(f"installing {len(missing)} packages and what they need: {' '.join(missing)}")
    kept = VENV / "constraints.txt"  # a linked package keeps its version
    kept.write_text("\n".join(pin for pin in _pins() if pin not in outside) + "\n")
    words = ["--quiet", "--constraint", str(kept)]
    if not _pip([*words, *missing], constrain=False):
        return
    needed = [text for text in missing if not _in_path(text)]
    if needed and (needed == missing or _pip([*words, *needed], constrain=False)):
        raise fail(f"these packages are missing and could not be installed: {', '.join(needed)}")


def _in_path(requirement: str) -> bool:
    """A build tool that the system has serves where its package cannot be had."""
    return requirement in BUILD_TOOLS and shutil.which(requirement.split(">")[0]) is not None


def _install_project() -> None:
    # The distribution's former name; its files would shadow those of a later build.
    former = [path for path in _site_packages().glob("mdata-*.dist-info") if (path / "direct_url.json").is_file()]
    if former:
        subprocess.run([str(PYTHON), "-m", "pip", "uninstall", "--quiet", "--yes", "mdata"], check=False)
    say("building the project (editable)")
    words = ["--quiet", "--no-build-isolation", "--no-deps", "--editable", str(ROOT)]
    if _pip(words, mark=False):
        raise fail("the project could not be built; the compiler's messages stand above")


def _unsatisfied(wanted: list[str]) -> tuple[list[str], list[str]]:
    """(requirements not met in .venv, pins of packages that come from outside it)."""
    question = json.dumps([wanted, _pins()])
    words = [str(PYTHON), "-c", CHECK_REQUIREMENTS]
    answer = subprocess.run(words, input=question, capture_output=True, text=True, check=True)
    missing, outside = json.loads(answer.stdout)
    return missing, outside


def _pins() -> list[str]:
    lines = (line.strip() for line in CONSTRAINTS.read_text().splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def _site_packages() -> Path:
    words = [str(PYTHON), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    return Path(subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip())


def _pip(words: list[str], *, constrain: bool = True, mark: bool = True) -> int:
    """pip install in .venv; a mark says that .venv may be incomplete until pip has come to its own end."""
    limits = ["--constraint", str(CONSTRAINTS)] if constrain else []
    if mark:
        UNDERWAY.touch()
    command = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", *limits, *words]
    code = subprocess.run(command).returncode
    if code >= 0:
        UNDERWAY.unlink(missing_ok=True)
    return code


def _run(words: list[str], problem: str) -> None:
    if subprocess.run(words).returncode:
        raise fail(f"{problem}; the reason stands above\n  try, on Debian and Ubuntu: {PREREQUISITES}")


def _download_size(words: list[str]) -> str:
    """How much pip would download, as text; asks pip and then the servers, and never fails."""
    command = [str(PYTHON), "-m", "pip", "install", "--quiet", "--dry-run", "--report", "-"]
    try:
        answer = subprocess.run(
            [*command, "--constraint", str(CONSTRAINTS), *words], capture_output=True, text=True, timeout=300
        )
        report = json.loads(answer.stdout)
        urls = [item["download_info"]["url"] for item in report["install"]]
        total = sum(_size_bytes(url) for url in urls)
    except (OSError, ValueError, KeyError, subprocess.TimeoutExpired):
        return "of unknown size"
    return f"{total / 1e6:,.0f} MB in {len(urls)} archives"


def _size_bytes(url: str) -> int:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "file":
        return Path(urllib.parse.unquote(parts.path)).stat().st_size
    request = urllib.request.Request(urllib.parse.urldefrag(url).url, method="HEAD")
    with urllib.request.urlopen(request, timeout=30) as answer:
        return int(answer.headers["Content-Length"])


if __name__ == "__main__":
    raise SystemExit(main())
