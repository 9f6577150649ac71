"""Run the fuzzers: `python fuzz/run.py --seconds 600`, or `--replay` to run every kept input once.

Each target gets the seconds in turn (--jobs of them side by side), beginning from fuzz/corpus/TARGET; what it finds
new goes to build/fuzz/TARGET and survives between runs. A crash, a hang of 30 s, 2 GiB of memory or a broken rule ends
the run with exit code 1, and the input is written to build/fuzz/failures. --keep adds to the corpus the few new inputs
that reach new code. The Python targets need atheris; the C++ one is built with clang's libFuzzer under address and
undefined-behaviour sanitizers, or with gcc and a plain mutation loop where there is no clang.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

CORPUS = ROOT / "fuzz" / "corpus"
BUILD = ROOT / "build" / "fuzz"
FAILURES = BUILD / "failures"
PYTHON_TARGETS = (
    "index_reader", "legacy_reader", "record_lines", "packed_text", "parquet_rows", "arrow_rows",
    "warc_records", "other_rows", "punkt_tables",
    "sentencepiece_model", "wordpiece_vocabulary",
    "gpt2_files", "rank_files", "tokenizer_json", "manifest", "origins", "journal", "run_toml",
    "checkpoint_index", "foreign_pickles",
)  # fmt: skip
CPP_TARGETS = (
    "index_blocks", "gather", "native_rows", "fim", "megatron_order", "masked",
    "punkt_split", "sentencepiece_bpe", "wordpiece",
)  # fmt: skip
LONGEST = {"packed_text": 1024}  # a packed file may stand for a million times its size
LIMITS = ("-timeout=30", "-rss_limit_mb=2048", "-print_final_stats=1", "-verbosity=0")


def main() -> int:
    """Fuzz or replay; 0 when nothing broke."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    targets = (*PYTHON_TARGETS, *CPP_TARGETS)
    parser.add_argument("--targets", nargs="+", choices=targets, default=targets)
    parser.add_argument("--seconds", type=int, default=60, help="for each target; default 60")
    parser.add_argument("--jobs", type=int, default=1, help="targets, or --replay's compilers, at once; default 1")
    parser.add_argument("--seed", type=int, default=0, help="of the mutations; default: another one each time")
    parser.add_argument("--replay", action="store_true", help="run every kept input once, without atheris")
    parser.add_argument("--keep", action="store_true", help="add new inputs that reach new code to the corpus")
    arguments = parser.parse_args()
    if arguments.replay:
        return replay_all(arguments.targets, arguments.jobs)
    FAILURES.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(arguments.jobs) as threads:
        codes = list(threads.map(lambda target: fuzz(target, arguments), arguments.targets))
    for target, code in zip(arguments.targets, codes, strict=True):
        print(f"{target}: {'nothing found' if code == 0 else f'FAILED, exit code {code}'}")
    return 1 if any(codes) else 0


def fuzz(target: str, arguments: argparse.Namespace) -> int:
    """One target for its seconds; its exit code."""
    work = BUILD / target
    work.mkdir(parents=True, exist_ok=True)
    command = start_of(target)
    limits = [*LIMITS, f"-artifact_prefix={FAILURES}/{target}-", f"-max_len={LONGEST.get(target, 4096)}"]
    fuzzing = [*command, *limits, f"-max_total_time={arguments.seconds}", f"-seed={arguments.seed}"]
    done = subprocess.run([*fuzzing, str(work), str(CORPUS / target)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    told = [line for line in done.stderr.splitlines() if line.startswith(("stat::number", "Done"))]
    print(f"{target}: {' '.join(told) or 'no runs'}", flush=True)
    if done.returncode:
        print(done.stderr[-4000:], f"inputs that break a rule: {FAILURES}/{target}-*", sep="\n", flush=True)
    elif arguments.keep:
        # Counters left out, an input is new when it reaches new code, not when it runs a loop once more.
        merge = [*command, *limits, "-merge=1", "-use_counters=0", str(CORPUS / target), str(work)]
        subprocess.run(merge, cwd=ROOT, check=True, stderr=subprocess.DEVNULL)
    return done.returncode


def start_of(target: str) -> list[str]:
    """The program that runs a target, built first: C++, or a script around fuzz/harness.py."""
    if target in CPP_TARGETS:
        return [str(build(target))]
    if importlib.util.find_spec("atheris") is None:
        raise SystemExit("the Python targets need atheris: pip install atheris")
    launcher = BUILD / f"{target}.sh"
    words = shlex.join([sys.executable, "-m", "fuzz.harness", target])
    launcher.write_text(f'#!/bin/sh\ncd {shlex.quote(str(ROOT))} && exec {words} "$0" "$@"\n')
    launcher.chmod(0o755)
    return [str(launcher)]


def build(target: str, *, optimize: str = "-O1") -> Path:
    """Compile a C++ target under the sanitizers."""
    BUILD.mkdir(parents=True, exist_ok=True)
    source, program = ROOT / "fuzz" / f"{target}.cpp", BUILD / f"{target}.bin"
    flags = ["-std=c++20", optimize, "-g", "-fno-sanitize-recover=all", f"-I{ROOT / 'mdata_cpp'}", "-o", str(program)]
    if clang := shutil.which(os.environ.get("CLANGXX", "clang++")):
        subprocess.run([clang, "-fsanitize=fuzzer,address,undefined", *flags, str(source)], check=True)
    else:
        words = [shutil.which("g++") or "c++", "-fsanitize=address,undefined", *flags]
        subprocess.run([*words, str(source), str(ROOT / "fuzz" / "driver.cpp")], check=True)
    return program


def replay_all(targets: Sequence[str], jobs: int) -> int:
    """Every kept input once; `jobs` C++ targets are compiled at a time, beside the Python ones that run meanwhile.

    Without optimization: the inputs take no time, and compiling half of it.
    """
    with ThreadPoolExecutor(jobs) as threads:
        programs = {t: threads.submit(build, t, optimize="-O0") for t in targets if t in CPP_TARGETS}
        return max([replay(target, programs.get(target)) for target in targets])


def replay(target: str, program: Future[Path] | None) -> int:
    """Every kept input of a target, in its program or by its Python `check`; 1 when one breaks a rule."""
    inputs = sorted(path for path in (CORPUS / target).iterdir() if path.is_file())
    code = 0
    if program is not None:
        words = [program.result(), *inputs]
        code = subprocess.run(words, cwd=ROOT, stderr=subprocess.DEVNULL).returncode
    else:
        check = importlib.import_module(f"fuzz.{target}").check
        for path in inputs:
            check(path.read_bytes())
    print(f"{target}: {len(inputs)} inputs, {'nothing found' if code == 0 else 'FAILED'}", flush=True)
    return 1 if code else 0


if __name__ == "__main__":
    sys.exit(main())
