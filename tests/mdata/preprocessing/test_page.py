"""Every command of docs/howto/preprocess.md is run, in order, and the page's statements about files are checked."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mdata
from tests.mdata.preprocessing.test_preprocess import GOLDEN

pytestmark = pytest.mark.slow  # it starts many processes
PAGE = (GOLDEN.parents[1] / "docs" / "howto" / "preprocess.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
# The console script's own code: what is installed may be elsewhere.
MDATA = f'mdata() {{ "{sys.executable}" -c "from cli.mdata import main; raise SystemExit(main())" "$@"; }}\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where all commands of the page have run."""
    folder = tmp_path_factory.mktemp("page")
    shutil.copytree(GOLDEN, folder, dirs_exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(GOLDEN.parents[1])}
    lines = [line for block in BLOCKS for line in block.splitlines()]
    assert len(lines) > 12
    for line in lines:
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", MDATA + line], cwd=folder, env=environment, capture_output=True, text=True
        )
        said = re.search(r"# exit code (\d+)$", line)
        assert done.returncode == (int(said[1]) if said else 0), f"{line}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        (folder / "said").open("a").write(done.stdout + done.stderr)
    return folder


def counts(folder: Path, name: str) -> int:
    return mdata.load_manifest(folder / "out" / f"{name}_text_document.json").shards[0].documents


def test_the_files_of_the_first_run_are_there(folder):
    names = re.findall(r"`(out/corpus_text_document\.[\w.]+)`", PAGE)
    assert len(names) == 4
    for name in [*names, "out/corpus_text_document.idx"]:
        assert (folder / name).is_file(), name
    hashes = json.loads((GOLDEN / "hashes.json").read_text())
    assert mdata.load_manifest(folder / "out" / "corpus_text_document.json").id == hashes["with_eod"]["id"]


def test_what_the_page_says_of_rows_and_parts_is_so(folder):
    assert [counts(folder, name) for name in ("mixed", "kept", "half")] == [2, 2, 2]
    assert not (folder / "out" / "few_text_document.json").exists()
    kept = [json.loads(line) for line in (folder / "out" / "bad.jsonl").read_text().splitlines()]
    assert [(entry["row"], entry["kind"]) for entry in kept] == [(2, "bad-value"), (3, "blank")]
    assert [counts(folder, f"parts_{part}") for part in range(3)] == [4, 3, 3] and counts(folder, "parts") == 10
    assert [counts(folder, f"runs_{part}") for part in range(3)] == [4, 4, 2] and counts(folder, "runs") == 10
    assert counts(folder, "split") + counts(folder, "split_holdout") == 10
    assert counts(folder, "stdin") == 10
    assert "continuing an earlier run" not in (folder / "said").read_text().split("mixed")[0]
