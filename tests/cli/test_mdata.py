"""The mdata command from the command line: results, exit codes, messages, signals, import costs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import mdata
from cli.mdata import COMMANDS, main
from mdata.util import atomic_io
from tests.helpers.manifests import assert_valid

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
TOKENIZER = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(GOLDEN / "tokenizer")]


def preprocess(folder: Path, *more: str, source: Path = GOLDEN / "corpus.jsonl", name: str = "out") -> int:
    return main(["preprocess", "--input", str(source), "--output-prefix", str(folder / name), *TOKENIZER, *more])


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize("given", [None, "3"])
def test_numpy_starts_no_threads_for_matrices_that_nobody_multiplies(given):
    """On 16 cores they cost 2 s of processor time at each start. What the user says of them holds."""
    code = (
        "import cli.mdata, os\ntry: cli.mdata.main(['--version'])\nfinally: print(os.environ['OPENBLAS_NUM_THREADS'])"
    )
    variables = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    variables |= {} if given is None else {"OPENBLAS_NUM_THREADS": given}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == (given or "1")


def test_from_text_to_a_blend(tmp_path, capsys, monkeypatch):
    """Tokenizer, two corpora, a blend, a look inside, a verification: each command takes what the one before made."""
    monkeypatch.chdir(tmp_path)
    for name, word in (("code", "return"), ("prose", "river")):
        lines = [json.dumps({"text": f"{word} {i} {word} and {word}"}) + "\n" for i in range(30)]
        Path(f"{name}.jsonl").write_text("".join(lines))
    both = ["--input", "code.jsonl", "prose.jsonl"]
    assert main(["train-tokenizer", *both, "--vocab-size", "270", "--output", "tok"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "tok: 270 entries, end of document 0"
    assert told[2] == "  or: mdata preprocess --tokenizer-type HuggingFaceTokenizer --tokenizer-model tok"
    for name in ("code", "prose"):
        options = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "tok", "--append-eod"]
        given = ["--input", f"{name}.jsonl", "--output-prefix", f"d/{name}", "--workers", "1", *options]
        assert main(["preprocess", *given, "--log-interval", "100", "--json"]) == 0
        (made,) = json.loads(capsys.readouterr().out)["corpora"]
        assert made["manifest"] == f"d/{name}_text_document.json" and made["documents"] == 30
        assert_valid(Path(made["manifest"]))
    words = ["0.7", "d/code_text_document.json", "0.3", "d/prose_text_document"]
    assert main(["blend", *words, "-o", "mix.json", "--tokens", "10000"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].split() == ["component", "share", "achieved", "tokens", "documents", "read", "epochs"]
    assert out[1].split()[:3] == ["code", "0.7", "0.7"] and out[2].split()[:3] == ["prose", "0.3", "0.3"]
    assert_valid(Path("mix.json"))
    assert main(["inspect", "mix.json", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [part["weight"] for part in facts["components"]] == [7, 3]
    assert main(["inspect", "d/code_text_document.bin"]) == 0
    out = capsys.readouterr().out
    assert "'return 0 return and return<|endoftext|>'" in out and "HuggingFaceTokenizer" in out
    assert main(["verify", "mix.json", "--full"]) == 0
    assert "no damage; checked every byte of .bin" in capsys.readouterr().out


def test_inspect_of_a_bare_pair_says_what_is_not_known(tmp_path, capsys):
    assert preprocess(tmp_path) == 0
    (tmp_path / "out_text_document.json").unlink()
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "out_text_document"), "--documents", "1"]) == 0
    out = capsys.readouterr().out
    assert "no tokenizer is known" in out and "verified     False" in out
    assert main(["inspect", str(tmp_path / "out_text_document"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["tokenizer"] is None and len(facts["first_documents"]) == 3


def test_two_keys_give_two_lines(tmp_path, capsys):
    (tmp_path / "x.jsonl").write_text('{"a": "one", "b": "two"}\n')
    assert preprocess(tmp_path, "--json-keys", "a", "b", source=tmp_path / "x.jsonl") == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_without_special_tokens_is_recorded(tmp_path):
    assert preprocess(tmp_path, "--tokenizer-hf-no-include-special-tokens") == 0
    manifest = mdata.load_manifest(tmp_path / "out_text_document.json")
    assert manifest.tokenizer.options == {"include_special_tokens": False}


WRONG = [
    (["preprocess", "--tokenizer-metadata", "x"], 2, "--tokenizer-metadata is not in this version of mdata"),
    (
        ["preprocess", "--inptu", "x"],
        2,
        "error: unrecognized arguments: --inptu; the following arguments are required: --input, ",
    ),
    (["preprocess", "-inptu", "x"], 2, "--tokenizer-type\n  try: --input? See mdata"),
    (["preprocess", "--workers", "x", "--inptu", "--on-eror=a"], 2, "try: --input, --on-error? See mdata"),
    (["preprocess", "--workers", "x", "--inptu"], 2, "--inptu; argument --workers: invalid int value"),
    (["launch", "local", "--parts", "3", "--", "preprocess", "--inptu"], 2, "try: --input? See mdata preprocess"),
    (["preprocess", "--input=x", "--output-prfix=y"], 2, "try: --output-prefix? See mdata preprocess --help"),
    (["preprocess", "--input=x", "--output-prefix", "y"], 2, "are required: --tokenizer-type\n  try: mdata preprocess"),
    (["preprocess", "--input", "a", "--", "--inptu"], 2, "--tokenizer-type\n  try: mdata preprocess"),
    (["preprocess"], 2, "the following arguments are required: --input, --output-prefix, --tokenizer-type"),
    (["launch", "--parts", "2"], 2, "are required: engine (local, slurm, ray)\n"),
    (["completion"], 2, "are required: shell (bash, zsh, fish)\n"),
    (["blend", "-o", "x.json"], 2, "no data is given"),
    (["blend", "1", "a"], 2, "no output file is given"),
    (["blend", "1", "a", "-o", "x.json", "--samples", "3"], 2, "--samples needs --sequence-length"),
    (["inspect", "nothing-there"], 2, "nothing-there: neither a manifest nor a .bin/.idx pair exists there"),
    (["verify", "nothing-there"], 2, "nothing-there: neither a manifest nor a .bin/.idx pair exists there"),
    (["train-tokenizer", "--input", "none", "--vocab-size", "300", "--output", "t"], 2, "none: No such file"),
    (["inspct"], 2, "try: inspect? See mdata --help"),
]


@pytest.mark.parametrize(("argv", "code", "text"), WRONG)
def test_a_wrong_command_line_is_told_in_few_lines_and_leaves_no_file(tmp_path, monkeypatch, capsys, argv, code, text):
    monkeypatch.chdir(tmp_path)
    assert main(argv) == code
    out, err = capsys.readouterr()
    assert text in err and err.startswith("mdata: error: ") and out == ""
    assert len(err.splitlines()) <= 4
    assert files(tmp_path) == set()


def test_bad_input_is_code_3_with_file_and_row(tmp_path, capsys):
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n{"text": "b"\n')
    assert preprocess(tmp_path / "o", source=tmp_path / "x.jsonl") == 3
    err = capsys.readouterr().err
    assert f"mdata: error: {tmp_path}/x.jsonl:2: not JSON: Expecting ',' delimiter at column 13\n" in err
    assert all(name.startswith(".") for name in files(tmp_path / "o"))


def test_damage_is_code_4(tmp_path, capsys):
    assert preprocess(tmp_path) == 0
    (tmp_path / "out_text_document.bin").write_bytes(b"")
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "out_text_document.json")]) == 4
    out, err = capsys.readouterr()
    assert "1 problem;" in out and "out_text_document.bin is not the one that" in err
    assert main(["inspect", str(tmp_path / "out_text_document")]) == 4


def test_a_full_disk_is_code_5(tmp_path, capsys, monkeypatch):
    def full(fd: int, data: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic_io, "write", full)
    assert preprocess(tmp_path) == 5
    err = capsys.readouterr().err
    assert "mdata: error: writing " in err and "No space left on device\n  try: free some disk space" in err
    assert all(name.startswith(".") for name in files(tmp_path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_no_permission_is_code_2(tmp_path, capsys):
    (tmp_path / "x.jsonl").write_text("{}\n")
    (tmp_path / "x.jsonl").chmod(0)
    assert preprocess(tmp_path, source=tmp_path / "x.jsonl") == 2
    assert "Permission denied" in capsys.readouterr().err


def test_an_output_folder_that_cannot_be_made_is_code_2(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert preprocess(tmp_path / "file" / "sub") == 2
    assert "making the output folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "code", "text"),
    [
        (signal.SIGINT, 130, "mdata: the same command continues\nmdata: interrupted\n"),
        (signal.SIGTERM, 75, "mdata: error: stopped by SIGTERM"),
    ],
)
def test_a_signal_in_the_middle_keeps_the_old_result(tmp_path, number, code, text):
    """The whole process group gets the signal, as from a terminal; workers must not add a word. What is there to
    continue from is hidden.
    """
    assert preprocess(tmp_path) == 0
    before = {name: (tmp_path / name).read_bytes() for name in files(tmp_path) if (tmp_path / name).is_file()}
    source = tmp_path / "large.jsonl"
    source.write_text('{"text": "many words that take a while to go through"}\n' * 400_000)
    words = ["preprocess", "--input", str(source), "--output-prefix", str(tmp_path / "out"), "--overwrite", *TOKENIZER]
    child = subprocess.Popen(
        [sys.executable, "-m", "cli.mdata", *words, "--workers", "2"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    partial = tmp_path / ".out_text_document.bin.partial"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (partial.exists() and partial.stat().st_size):
        assert child.poll() is None, child.communicate()
        time.sleep(0.02)
    os.killpg(child.pid, number)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out) == (code, "")
    assert text in err and "Traceback" not in err
    assert err.count("the same command") == 1  # rows that are kept are counted in another line
    source.unlink()
    found = {name: (tmp_path / name).read_bytes() for name in files(tmp_path) if (tmp_path / name).is_file()}
    assert {name: content for name, content in found.items() if not name.startswith(".")} == before


@pytest.mark.parametrize(
    ("command", "function", "words"),
    [
        ("clean", "clean", ["--steps", "fix"]),
        ("extract", "extract", []),
        ("filter", "filter_by_scores", ["--by", "s.jsonl", "--keep-lowest", "0.5"]),
        ("decontaminate", "decontaminate", ["--against", "b.jsonl"]),
        ("dedup", "dedup", []),
    ],
)
def test_ctrl_c_says_that_the_same_command_continues(command, function, words, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"cli.{command}.{function}", interrupted)
    assert main([command, "--input", "x.jsonl", "--output", "out", *words]) == 130
    assert capsys.readouterr().err == "mdata: the same command continues\nmdata: interrupted\n"


def test_help_imports_nothing_heavy():
    heavy = ["torch", "tokenizers", "tqdm", "transformers"]
    code = (
        "import sys, cli.mdata, mdata\n"
        f"codes = [cli.mdata.main([]), cli.mdata.main(['--help']), cli.mdata.main(['preprocess', '--help'])]\n"
        f"sys.exit(repr((codes, [m for m in {heavy} if m in sys.modules])))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "([0, 0, 0], [])"
    assert all(command.name in done.stdout for command in COMMANDS)


@pytest.mark.parametrize("command", [command.name for command in COMMANDS])
def test_each_command_has_help(command, capsys):
    assert main([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: mdata {command} ") and "--debug" in out and "--json" in out


def test_public_names_exist():
    assert len(set(mdata.__all__)) == len(mdata.__all__)
    assert all(hasattr(mdata, name) for name in mdata.__all__)


@pytest.mark.parametrize(("words", "code"), [(["--version"], 0), (["verify", "nothing"], 2), (["blnd"], 2)])
def test_python_m_mdata_is_the_command(words, code):
    ways = [[sys.executable, "-m", module, *words] for module in ("mdata", "cli.mdata")]
    answers = [subprocess.run(way, cwd=ROOT, capture_output=True, text=True, check=False) for way in ways]
    assert answers[0].returncode == answers[1].returncode == code
    assert (answers[0].stdout, answers[0].stderr) == (answers[1].stdout, answers[1].stderr)
    assert "mdata" in answers[0].stdout + answers[0].stderr


def test_python_m_mdata_has_workers(tmp_path):
    words = [
        "preprocess",
        "--input",
        str(GOLDEN / "corpus.jsonl"),
        "--output-prefix",
        str(tmp_path / "out"),
        *TOKENIZER,
    ]
    command = [sys.executable, "-m", "mdata", *words, "--workers", "2"]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    assert preprocess(tmp_path, name="again") == 0
    assert (tmp_path / "out_text_document.bin").read_bytes() == (tmp_path / "again_text_document.bin").read_bytes()


def test_who_walks_the_package_starts_no_command():
    code = "import sys, mdata.__main__\nprint([name for name in sys.modules if name.startswith('cli')])"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout == "[]\n"
