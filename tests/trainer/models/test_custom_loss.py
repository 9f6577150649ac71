"""A user's own loss: the page's program runs, and its gradients are those of the built-in loss in every layout."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.helpers.ranks import RankError, run_ranks
from tests.trainer.engines import assemble, check_same_gradients, layouts, logical, microbatches, reduced
from tests.trainer.models.test_options import _config
from trainer.run.engine import Engine

PAGE = Path(__file__).parents[3] / "docs" / "howto" / "custom_loss.md"


def _loss(logits_BSV, batch):
    losses = cross_entropy(logits_BSV.flatten(0, 1), batch.labels_BS.flatten(), reduction="none")
    return (losses * batch.loss_mask_BS.flatten()).sum()


def _gradients(context, config, own):
    engine = layouts(context, config)
    if own:
        engine.model.loss_function = _loss
    batches = microbatches(engine, 0)
    totals = engine.add_gradients(batches)
    return totals[0].item(), reduced(engine)


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (4, True)])
def test_the_same_loss_as_a_function_of_logits_has_the_same_gradients(tp, sequence_parallel):
    options = {"logit_softcap": 1.5, "num_kv_heads": 4}
    ((loss, parts),) = run_ranks(_gradients, 1, _config(options), False)
    results = run_ranks(_gradients, tp, _config(options, tp=tp, sequence_parallel=sequence_parallel), True)
    assert {round(got, 9) for got, _ in results} == {round(loss, 9)}
    check_same_gradients(assemble([part for _, found in results for part in found]), assemble(parts))


@pytest.mark.parametrize("shape", [(4,), (2, 1), (1, 2, 2)])
def test_a_loss_of_another_shape_is_refused(shape):
    with pytest.raises(RankError, match=r"gave a tensor of another shape[\s\S]*expected: a sum"):
        run_ranks(_refused, 1, _config({}), shape)


def _refused(context, config, shape):
    engine = layouts(context, config)
    engine.model.loss_function = lambda logits, batch: torch.zeros(shape)
    engine.step(microbatches(engine, 0), 1e-2)


def _programs():
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def _own_step(context, config):
    """Weights and numbers after two steps of the page's function; the older model is the one at the start."""
    page: dict[str, Any] = {}
    exec(_programs()[1], page)
    engine = layouts(context, config)
    other = Engine(config, engine.plan, world=engine.world)
    found = [page["step"](engine, other, microbatches(engine, n), 1e-2) for n in range(2)]
    return found, logical(engine.optimizer.owned, engine.optimizer.state["weight"])


def test_the_pages_own_step_trains_alike_in_every_layout():
    _, program = _programs()
    assert len(program.splitlines()) <= 34
    ((expected, parts),) = run_ranks(_own_step, 1, _config({}))
    assert expected[1][0] != expected[0][0]
    results = run_ranks(_own_step, 4, _config({}, tp=2, sequence_parallel=True))
    for found, _ in results:
        np.testing.assert_allclose(found, expected, rtol=1e-9)
    check_same_gradients(assemble([part for _, held in results for part in held]), assemble(parts))


def test_the_pages_program_trains(tmp_path):
    program, _ = _programs()
    assert len(program.splitlines()) <= 36
    (tmp_path / "run.toml").write_text(
        '[run]\nfolder = "x"\n[model]\nnum_layers = 1\nhidden_size = 16\nnum_heads = 2\nvocab_size = 64\n'
        '[data]\nblend = "mock"\n[train]\nsequence_length = 8\nglobal_batch = 8\nmicro_batch = 8\nsteps = 3\n'
        "[optimizer]\nlr = 0.01\n"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    losses = [float(x) for x in re.findall(r"loss ([0-9.]+)", run.stdout)]
    assert len(losses) == 3 and np.isfinite(losses).all()
    assert (tmp_path / "x" / "checkpoints" / "step-3").is_dir() and "stopped after step 3" in run.stdout
