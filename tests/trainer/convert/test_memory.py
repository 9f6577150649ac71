"""Memory of conversions and of first weights does not grow with the model: a process of its own is measured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MOST = 256 << 20  # less than the largest tensor, of 287 MB
PAIRS = [
    *(("mtrain", to) for to in ("hf", "torch_dist", "mp_rank", "mtrain")),
    *((of, "mtrain") for of in ("hf", "torch_dist", "mp_rank")),
]
pytestmark = pytest.mark.slow


def side(*words: str | Path) -> tuple[int, int]:
    """(bytes of all weights, by how much memory grew)"""
    command = [sys.executable, "-m", "tests.trainer.convert.memory_side", *map(str, words)]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, cwd=root)
    assert done.returncode == 0, done.stderr
    total, grown = map(int, done.stdout.split())
    return total, grown


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, int]]:
    """Of each format the same model, and the memory that it took to make it of a run folder."""
    root = tmp_path_factory.mktemp("memory")
    side("save", root / "mtrain")
    made = {"mtrain": (root / "mtrain", 0)}
    for to in ("hf", "torch_dist", "mp_rank"):
        made[to] = root / to, side("convert", root / "mtrain", root / to, to)[1]
    return made


@pytest.mark.parametrize(("of", "to"), PAIRS)
def test_a_conversion_holds_pieces(of: str, to: str, folders: dict[str, tuple[Path, int]], tmp_path: Path) -> None:
    grown = folders[to][1] or side("convert", folders[of][0], tmp_path / "new", to)[1]
    print(f"{of} to {to}: {grown / 2**20:.0f} MiB")
    assert 0 < grown <= MOST


@pytest.mark.parametrize("of", ["mtrain", "hf", "torch_dist", "mp_rank"])
def test_first_weights_take_their_place_and_pieces(of: str, folders: dict[str, tuple[Path, int]]) -> None:
    total, grown = side("first", folders[of][0])
    print(f"{of}: {(grown - total) / 2**20:.0f} MiB beside {total / 2**20:.0f} MiB of weights")
    assert total * 0.9 < grown <= total + MOST
