"""Shell completion: bash completes commands, options, values, settings and files; zsh and fish read their scripts."""

from __future__ import annotations

import os
import pty
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from cli import mdata, mtrain
from trainer.config.parse import key_names

PROGRAMS = {"mdata": mdata, "mtrain": mtrain}


@pytest.fixture(scope="module")
def scripts(tmp_path_factory) -> Path:
    """A folder with the script of each program for each shell."""
    folder = tmp_path_factory.mktemp("scripts")
    for name, program in PROGRAMS.items():
        for shell in ("bash", "zsh", "fish"):
            with pytest.MonkeyPatch.context() as patch, (folder / f"{name}.{shell}").open("w") as file:
                patch.setattr("sys.stdout", file)
                assert program.main(["completion", shell]) == 0
    return folder


def completed(scripts: Path, line: str) -> list[str]:
    """What bash proposes for the last word of a line; words as bash divides them at "="."""
    words = line.replace("=", " = ").split(" ")
    if len(words) > 1 and words[-1] == "" and line.endswith("="):
        del words[-1]
    program = words[0]
    code = f"source {scripts}/{program}.bash; compopt() {{ :; }}; COMP_WORDS=({' '.join(map(shlex.quote, words))}); "
    code += f"COMP_CWORD={len(words) - 1}; _{program}; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    return subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("mdata ver", ["verify"]),
        ("mdata --ver", ["--version"]),
        ("mdata cat --doc", ["--documents"]),
        ("mdata preprocess --input-format par", ["parquet"]),
        ("mdata preprocess --input-format=par", ["parquet"]),
        ("mdata build --kind b", ["bert"]),
        ("mdata train-tokenizer --kind b", ["byte-bpe"]),
        ("mdata launch sl", ["slurm"]),
        ("mdata sample --output-p", []),
        ("mtrain train mod", ["model."]),
        (
            "mtrain check run.toml model.norm",
            ["model.norm=", "model.norm_epsilon=", "model.norm_bias=", "model.norm_zero_centered="],
        ),
        ("mtrain plan run.toml model.norm=", ["rmsnorm", "layernorm"]),
        ("mtrain prove run.toml model.norm=rm", ["rmsnorm"]),
        ("mtrain train run.toml train.evaluate=f", ["false"]),
        ("mtrain config --key model.num_l", ["model.num_layers"]),
        ("mtrain generate mod", []),
    ],
)
def test_bash_completes(scripts, line, words):
    assert completed(scripts, line) == words


def test_every_command_and_setting_is_there(scripts):
    for name, program in PROGRAMS.items():
        assert set(completed(scripts, f"{name} ")) >= {command.name for command in program.COMMANDS}
    sections = completed(scripts, "mtrain train ")
    lines = [f"mtrain train {section}" for section in sections if section.endswith(".")]
    assert [key for line in lines for key in completed(scripts, line)] == [f"{key}=" for key in key_names()]


def test_bash_completes_files(scripts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mix.json").touch()
    assert completed(scripts, "mdata verify mi") == ["mix.json"]
    assert completed(scripts, "mtrain train mi") == ["mix.json"]


def test_bash_completes_a_typed_line(scripts, tmp_path):
    """At a terminal: readline inserts the reply behind "=", and no space behind a setting."""
    end = "that is all"
    typed = "\x01printf '<%s>' \x05\r"  # the completed line, as words
    lines = (
        f"source {scripts}/mtrain.bash\rmtrain pl\t--ra\t8 model.norm=rm\tmesh.t\t2{typed}echo {end[:4]}' '{end[5:]}\r"
    )
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(tmp_path)
        os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], {"PATH": os.environ["PATH"], "TERM": "dumb"})
    shown = b""
    os.write(terminal, lines.encode())
    while end.encode() not in shown.replace(b"\r\n", b""):
        shown += os.read(terminal, 1 << 12)
    os.write(terminal, b"exit\r")
    os.waitpid(process, 0)
    os.close(terminal)
    assert b"<mtrain><plan><--ranks><8><model.norm=rmsnorm><mesh.tp=2>" in shown, shown


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_shell_reads_its_script(scripts, shell, program):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run([shell, "-n", f"{scripts}/{program}.{shell}"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("mdata ver", {"verify"}),
        ("mdata cat --doc", {"--documents"}),
        ("mtrain train model.norm=rm", {"model.norm=rmsnorm"}),
    ],
)
def test_fish_completes(scripts, tmp_path, line, words):
    code = f"source {scripts}/{line.split()[0]}.fish; complete -C {shlex.quote(line)}"
    environment = {**os.environ, "HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    done = subprocess.run(["fish", "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert {shown.split("\t")[0] for shown in done.stdout.splitlines()} == words
