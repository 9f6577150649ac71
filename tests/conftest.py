"""What all tests share: the oracle folder, soak tests left out unless asked for, and a closing line that counts.

Oracle data (tokenizers, and files and sample orders that other programs wrote) is too large for the repository. It
is looked for in the folder that MDATA_ORACLES names, by default ../shared/data beside the checkout; without it
those tests are skipped with the reason, and the closing line says how many.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]
ORACLE_TESTS = pytest.StashKey[dict[str, str]]()  # test -> "run" or "skipped"


# A property test without @examples; `make soak` raises all counts by the same factor (tests/helpers/examples.py).
settings.register_profile("ours", max_examples=100 * int(os.environ.get("MDATA_SOAK", "1")), deadline=None)
settings.load_profile("ours")


def oracle_folder() -> Path:
    """Where oracle data would be."""
    return Path(os.environ.get("MDATA_ORACLES") or ROOT.parent / "shared" / "data")


@pytest.fixture
def oracles(request: pytest.FixtureRequest) -> Path:
    """The folder with oracle data; the test is skipped where there is none."""
    folder = oracle_folder()
    there = folder.is_dir()
    request.config.stash[ORACLE_TESTS][request.node.nodeid] = "run" if there else "skipped"
    if not there:
        pytest.skip(f"no oracle data in {folder}; set MDATA_ORACLES")
    return folder


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ORACLE_TESTS] = {}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "soak" in str(config.getoption("markexpr", "")):
        return
    asleep = [item for item in items if item.get_closest_marker("soak")]
    if asleep:
        config.hook.pytest_deselected(items=asleep)
        items[:] = [item for item in items if item not in set(asleep)]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    outcomes = list(config.stash[ORACLE_TESTS].values())
    run, skipped = outcomes.count("run"), outcomes.count("skipped")
    terminalreporter.write_line(f"oracle data: {run} tests used it, {skipped} skipped without it")
