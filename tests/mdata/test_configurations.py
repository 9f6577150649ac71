"""Random configurations equal to the slow twins: some hundreds of each family, and 10,000 of each in `make soak`."""

from __future__ import annotations

import pytest

from tests.helpers.examples import SOAK
from tests.mdata.configurations import FAMILIES, run

QUICK = 200
AT_LENGTH = 10_000

TOKENS = {
    "no token", "one token", "S + x - 1", "S + x", "S + x + 1", "2 S + x - 1", "2 S + x", "2 S + x + 1",
    "exact fit", "one more than an exact fit", "one less than an exact fit", "any",
}  # fmt: skip
SPLITS = {"empty first", "empty last", "empty between", "one sequence", "part of a file", "whole file"}
ASKED = {
    "one epoch", "no sample", "one sample", "whole epochs", "one more than whole epochs", "one less than whole epochs",
    "80 % of the last epoch", "more than 80 % of the last epoch", "less than 80 % of the last epoch", "any number",
}  # fmt: skip
PASSES = {"shuffled", "one pass", "refused"}
EDGES = {
    "megatron order": TOKENS | SPLITS | ASKED | {"partial kept", "refused"},
    "megatron gpt": TOKENS | SPLITS | ASKED | {"partial kept", "refused"},
    "native order": TOKENS | SPLITS | PASSES | {"network"},
    "native gpt": TOKENS | SPLITS | PASSES,
    "one document": PASSES | {"cut", "drop", "empty document"},
    "packed": PASSES | {"cut", "drop", "window 1", "window 2", "window 1000"},
    "mapping": {"least 1", "least 2", "least 3", "asked", "not asked", "rows", "refused"},
    "masked": {"bert native", "bert megatron", "bert file", "t5 native", "t5 megatron", "t5 file", "no room"},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_configuration_is_the_twins_and_every_edge_is_met(family):
    met = run(family, range(QUICK))
    assert EDGES[family] <= set(met), f"never met: {EDGES[family] - set(met)}"


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", FAMILIES)
def test_ten_thousand_of_each(family):
    # Beyond the quick ones; a larger MDATA_SOAK makes it longer yet.
    met = run(family, range(QUICK, QUICK + AT_LENGTH * max(1, SOAK // 20)))
    assert EDGES[family] <= set(met)
