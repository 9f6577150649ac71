"""Recorded passes of random models in random layouts give the bits of passes that are computed.

Models and layouts are those of tests/trainer/models/test_random_models.py, without experts, whose plain products ask
the host where the rows of an expert end. MDATA_SOAK multiplies the number of draws.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.helpers.examples import SOAK
from tests.trainer.engines import microbatches
from tests.trainer.models import test_random_models
from tests.trainer.pipeline import test_graphs
from trainer.config.sections import KernelsSection, RunConfig
from trainer.plan.check import why_not_beside, why_not_recorded

PLAIN = KernelsSection(loss="plain", optimizer="plain")


def _drawn(seed: int, kind: str) -> tuple[RunConfig, int, bool]:
    """(configuration, ranks, whether passes run beside each other), without cp, whose masks a tape cannot make."""
    for config, ranks, _ in test_random_models._valid(seed, kind):
        mesh, train = config.mesh, config.train
        sharing = ranks // mesh.pp // mesh.tp
        count = train.global_batch // sharing // train.micro_batch
        excluded = config.model.moe is not None or mesh.cp > 1 or ranks > 2 or count < 2
        if excluded or why_not_recorded(config, sharing=sharing):
            continue
        beside = not why_not_beside(replace(config, kernels=replace(PLAIN, cuda_graphs="on")))
        recorded = sharing == 1 or count > 2  # the first and the last are computed there
        return replace(config, kernels=PLAIN), ranks, bool(seed % 2) and beside and recorded
    raise AssertionError("the draws have no end")


@pytest.mark.soak
@pytest.mark.scaled
@pytest.mark.parametrize("kind", ["", *test_random_models.OTHERS])
@pytest.mark.parametrize("seed", range(SOAK))
def test_recorded_passes_of_a_random_model_give_the_same_bits(seed, kind):
    config, ranks, beside = _drawn(seed, kind)
    print(config, ranks, beside)  # shown where it fails
    rows = test_graphs._padded if config.data.kind in ("bert", "t5") else microbatches
    test_graphs._check_the_same_bits(ranks, config, beside=beside, rows=rows)
