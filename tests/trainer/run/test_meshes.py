"""Meshes with everything else that changes how a step is computed: gradients and losses against one rank, pairwise.

The numerics policy is that of test_parallel.py. `make soak` runs all rows of the cover, `make test` some small ones. A
new option is one line of OPTIONS and one of `_config`.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.helpers.examples import soaked
from tests.helpers.pairwise import Row, pairwise
from tests.helpers.ranks import run_ranks
from tests.trainer.engines import assemble, check_same_gradients, small_config
from tests.trainer.optim.test_sharding import _same_bits, _train
from tests.trainer.run.mesh_steps import gradients, train_steps
from trainer.config.sections import MeshSection, RecomputeSection, RunConfig
from trainer.plan.check import check

BATCH = 8  # microbatches for eight pipeline ranks
MESHES = tuple(
    (tp, cp, pp, ranks // (tp * cp * pp))
    for ranks in (2, 4, 8)
    for tp, cp, pp in itertools.product((1, 2, 4, 8), repeat=3)
    if ranks % (tp * cp * pp) == 0
)
OPTIONS: dict[str, tuple[Any, ...]] = {
    "mesh": MESHES,
    "schedule": ("1f1b", "gpipe", "interleaved", "zb_h1", "zb_v"),
    "recompute": ("none", "selective", "full"),
    "uneven": (False, True),
    "shape": ("gpt2", "llama"),
    "tied": (False, True),
    "documents": (False, True),
    "sequence_parallel": (False, True),
    "sharding": ("state", "none", "gradients", "parameters"),
    "overlap_grad_reduce": (True, False),
    "overlap_param_gather": (True, False),
}
OF_DATA = ("sharding", "overlap_grad_reduce", "overlap_param_gather")  # without effect on one data-parallel rank


def _ranks(row: Row) -> int:
    return int(np.prod(row["mesh"]))  # type: ignore[call-overload]


def _config(row: Row, *, dtype: str = "fp64") -> RunConfig:
    tp, cp, pp, _ = row["mesh"]  # type: ignore[misc]
    schedule = str(row["schedule"])
    stages = pp * (2 if schedule in ("interleaved", "zb_v") and pp > 1 else 1)
    layers = stages + 1 if row["uneven"] else max(2, stages)
    config = small_config(str(row["shape"]), dtype=dtype)
    model = replace(config.model, num_layers=layers, num_heads=8, head_dim=4, tie_embeddings=bool(row["tied"]))
    by_hand = (2, *(1 for _ in range(stages - 1))) if row["uneven"] and stages > 1 else ()
    mesh = MeshSection(
        tp=tp,
        cp=cp,
        pp=pp,
        schedule=schedule,  # type: ignore[arg-type]
        layers_per_stage=by_hand,
        sequence_parallel=bool(row["sequence_parallel"]),
    )
    if row["shape"] == "gpt2":
        model = replace(model, num_kv_heads=8)
    optimizer = replace(config.optimizer, **{name: row[name] for name in OF_DATA})  # type: ignore[arg-type]
    train, recompute = replace(config.train, global_batch=BATCH), RecomputeSection(mode=row["recompute"])  # type: ignore[arg-type]
    return replace(config, model=model, mesh=mesh, optimizer=optimizer, train=train, recompute=recompute)


def _valid(row: Row) -> bool:
    tp, cp, pp, dp = row["mesh"]  # type: ignore[misc]
    if pp == 1 and (row["schedule"] != "1f1b" or row["uneven"]):
        return False
    if cp * dp == 1 and any(row[name] != OPTIONS[name][0] for name in OF_DATA):
        return False
    return not (row["sequence_parallel"] and tp == 1)


ROWS = pairwise(OPTIONS, valid=_valid, seed=25)
# Of each schedule a row with two data-parallel ranks in two stages, and one of each other mesh of four in stages.
SMALL = [
    *{row["schedule"]: row for row in ROWS if row["mesh"] == (1, 1, 2, 2)}.values(),
    *{row["mesh"]: row for row in ROWS if row["mesh"] in ((2, 1, 2, 1), (1, 2, 2, 1))}.values(),
]


def _alone(config: RunConfig) -> RunConfig:
    optimizer = replace(config.optimizer, sharding="none", overlap_grad_reduce=False, overlap_param_gather=False)
    return replace(config, mesh=MeshSection(), optimizer=optimizer, recompute=RecomputeSection())


@functools.cache
def _whole(config: RunConfig, ranks: int, documents: bool) -> Any:
    results = run_ranks(gradients, ranks, config, documents, timeout_s=300)
    assert all(totals == results[0][0] for totals, _ in results)
    return results[0][0], assemble([part for _, parts in results for part in parts])


def _check_gradients(row: Row) -> None:
    config, documents = _config(row), bool(row["documents"])
    alone, expected = _whole(_alone(config), 1, documents)
    totals, got = _whole.__wrapped__(config, _ranks(row), documents)
    np.testing.assert_allclose(totals, alone, rtol=1e-12)
    check_same_gradients(got, expected)


@functools.cache
def _losses(config: RunConfig, ranks: int, documents: bool, steps: int) -> list[list[float]]:
    return run_ranks(train_steps, ranks, config, documents, steps, timeout_s=600)


def _check_losses(row: Row, *, steps: int = 20) -> None:
    config, documents = _config(row, dtype="fp32"), bool(row["documents"])
    (alone,) = _losses(_alone(config), 1, documents, steps)
    assert alone[steps - steps % 4 - 4] < alone[0] - 0.05, "the same batch again"
    for losses in _losses.__wrapped__(config, _ranks(row), documents, steps):
        np.testing.assert_allclose(losses, alone, rtol=1e-4)


def _name(row: Row) -> str:
    tp, cp, pp, dp = row["mesh"]  # type: ignore[misc]
    words = [name for name in ("uneven", "tied", "documents", "sequence_parallel", *OF_DATA[1:]) if row[name]]
    chosen = (str(row[name]) for name in ("shape", "schedule", "recompute", "sharding"))
    return "-".join([f"tp{tp}", f"cp{cp}", f"pp{pp}", f"dp{dp}", *chosen, *words])


def test_the_cover_is_of_pairs_and_every_row_can_run():
    assert len(MESHES) == 4 + 10 + 20 and len(ROWS) < 170
    assert not [problem for row in ROWS for problem in check(_config(row), _ranks(row), facts=None)]
    pairs = {(row["mesh"], row["schedule"]) for row in ROWS}
    assert pairs == {(m, s) for m in MESHES for s in OPTIONS["schedule"] if m[2] > 1 or s == "1f1b"}


@pytest.mark.parametrize("row", soaked(ROWS, but=SMALL[::2]), ids=_name)
def test_gradients_of_rows(row):
    _check_gradients(row)


@pytest.mark.parametrize("row", SMALL[2:3], ids=_name)
def test_losses_of_a_few_rows(row):
    _check_losses(row, steps=8)  # of twenty those of test_parallel.py are compared, and all rows of the cover by soak


@pytest.mark.soak
@pytest.mark.parametrize("row", ROWS, ids=_name)
def test_losses_of_every_row(row):
    _check_losses(row)


@pytest.mark.soak
@pytest.mark.parametrize("row", [row for row in ROWS if _ranks(row) > row["mesh"][0] * row["mesh"][2]], ids=_name)
def test_overlap_and_delays_change_no_bit_of_any_row_with_data_parallel_ranks(row):
    """Weights after three steps: communication in turn, and overlapped with every rank late at random."""
    config, ranks = _config(row, dtype="fp32"), _ranks(row)
    in_turn, overlapped = (
        replace(config, optimizer=replace(config.optimizer, overlap_grad_reduce=overlap, overlap_param_gather=overlap))
        for overlap in (False, True)
    )
    documents = bool(row["documents"])
    _same_bits(run_ranks(_train, ranks, in_turn, None, documents), run_ranks(_train, ranks, overlapped, 7, documents))
