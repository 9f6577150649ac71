"""Slurm's commands: batch scripts, their submission, and errors in Slurm's own words.

Shared by jobs in parts (on_slurm.py) and by training runs (trainer/launching/on_slurm.py). No state is kept here.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from mdata.errors import ResourceError, UsageError, os_errors_named
from mdata.util import atomic_io


def batch_script(options: Sequence[str], commands: str) -> str:
    """The text of a script for sbatch: its options, one a line, then the commands."""
    return "\n".join(["#!/bin/bash", *(f"#SBATCH {shlex.quote(option)}" for option in options), commands]) + "\n"


def write_script(path: Path, text: str) -> None:
    """Write a file for Slurm; makes its folder."""
    with os_errors_named("writing a batch script"):
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_io.atomic_write(path, text.encode())


def sbatch(options: Sequence[str], script: Path) -> str:
    """Submit a script; returns the job id.

    Args:
        options: given before the script; they take precedence over those inside it.

    Raises:
        UsageError: Slurm is not here, or rejects the job. ResourceError: Slurm does not answer with a job id.
    """
    answer = run_slurm(["sbatch", "--parsable", *options, str(script)]).strip()
    job_id = answer.rpartition("\n")[2].split(";")[0]  # a site's sbatch may print lines of its own before it
    if not job_id.isdecimal():
        fix = "see with squeue whether the job was submitted; ask the site about its sbatch"
        raise ResourceError("sbatch printed no job id", found=answer[-200:] or "nothing", fix=fix)
    return job_id


def squeue(*options: str, fields: Sequence[str]) -> list[list[str]]:
    """The jobs that Slurm knows, each with the texts of these fields, such as "%T"; see `sbatch`.

    Raises:
        ResourceError: a line has other fields: overlooking a job could start it twice.
    """
    words = ["squeue", "--noheader", *options, f"--format={'|'.join(fields)}"]
    rows = []
    for line in filter(str.strip, run_slurm(words).splitlines()):
        row = line.strip().split("|")
        if len(row) != len(fields):
            raise ResourceError(
                "a line of squeue cannot be read",
                found=line[:200],
                expected=f"what `{shlex.join(words)}` prints by itself",
                fix="ask the site about its squeue",
            )
        rows.append(row)
    return rows


def run_slurm(words: Sequence[str]) -> str:
    """The output of one of Slurm's commands; see `sbatch`."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", check=True)
    except FileNotFoundError as error:
        raise UsageError(
            f"{words[0]} is not installed on this machine",
            expected="a machine from which jobs are submitted to Slurm",
            fix="run this command there, or `launch local` here",
        ) from error
    except subprocess.CalledProcessError as error:
        said = " ".join(str(error.stderr).split())
        if words[0] == "sbatch" and "Unable to contact slurm controller" not in said:
            raise UsageError("Slurm rejected the job", found=said, fix="change the options for Slurm") from error
        raise ResourceError(f"{words[0]} failed", found=said, fix="run again when Slurm responds") from error
    return done.stdout
