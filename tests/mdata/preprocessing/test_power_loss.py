"""A power loss at any call of `preprocess`: no unfinished file looks finished, and the same command completes the job.

Every state that tests/helpers/power_loss.py gives is restored on disk. A manifest in it must be correct, and an .idx
must describe the .bin beside it, because Megatron checks no more; then the command runs again and gives the right
bytes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import mdata
from mdata.indexed.pair_format import bin_path, idx_path
from tests.helpers.examples import SOAK
from tests.helpers.failures import assert_what_is_visible_is_true
from tests.helpers.power_loss import recorded, states
from tests.mdata.preprocessing.test_preprocess import contents, options
from tests.mdata.preprocessing.test_resume import corpus, whole_job

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("loaded_once")]

EVERY = 31  # of the states, without SOAK
Pair = tuple[bytes, bytes]


def job(inputs: tuple[str, ...], folder: Path, **changes) -> mdata.PreprocessOptions:
    words = {"json_keys": ("text",), "chunk_bytes": 700, **changes}
    return options(folder, **{**vars(whole_job(inputs, folder)), **words})


def results(folder: Path) -> dict[str, bytes]:
    """What is there, but for a lock that its holder took away without waiting until that was on the device."""
    return {name: data for name, data in contents(folder).items() if not name.startswith(".tokenizer-")}


def pairs(folder: Path) -> dict[str, Pair]:
    """The pairs that somebody who looks for an .idx finds."""
    found = {}
    for path in folder.glob("[!.]*.idx"):
        prefix = path.with_suffix("")
        found[prefix.name] = (bin_path(prefix).read_bytes(), idx_path(prefix).read_bytes())
    return found


def assert_nothing_false_looks_finished(folder: Path, allowed: list[dict[str, Pair]]) -> None:
    assert_what_is_visible_is_true(folder)
    for name, pair in pairs(folder).items():
        assert pair in [known[name] for known in allowed if name in known], f"{name}.idx speaks of another .bin"


@pytest.mark.scaled
@pytest.mark.parametrize("before", ["nothing", "other options", "part of the input"])
def test_after_a_loss_of_power_at_any_call(tmp_path, before):
    inputs = corpus(tmp_path / "in")
    folder = tmp_path / "out"
    folder.mkdir()
    mdata.preprocess(job(inputs, tmp_path / "whole", quarantine=str(folder / "bad.jsonl")))
    expected = contents(tmp_path / "whole") | {"bad.jsonl": (folder / "bad.jsonl").read_bytes()}
    allowed = [pairs(tmp_path / "whole")]
    (folder / "bad.jsonl").unlink()
    if before != "nothing":
        words = {"append_eod": False} if before == "other options" else {"input": inputs[:1]}
        mdata.preprocess(job(inputs, folder, **words))
        allowed.append(pairs(folder))
    with recorded(folder, tmp_path / "beside") as kept:
        mdata.preprocess(job(inputs, folder, overwrite=True))
    assert contents(folder) == expected
    found = list(states(kept))
    assert len(found) > 300
    for _, tree in found if SOAK > 1 else found[::EVERY]:
        kept.restore(tree)
        assert_nothing_false_looks_finished(folder, allowed)
        mdata.preprocess(job(inputs, folder, overwrite=True))
        assert results(folder) == expected, [name for name, _, _ in tree]
