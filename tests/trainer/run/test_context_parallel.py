"""Context parallelism: ranks that share each row compute the losses and gradients of one rank with whole rows."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.helpers.slow_attention import Slow
from tests.trainer.engines import (
    assemble,
    check_same_gradients,
    layouts,
    microbatches,
    reduced,
    small_config,
    with_documents,
)
from trainer.config.sections import MeshSection, RecomputeSection
from trainer.kernels import table
from trainer.parallel.collectives import all_reduce_

# name -> (shape, changes of the model section, recomputation); the masks of microbatches: see _masked
MODELS = {
    "llama": ("llama", {}, "none"),
    "gpt2": ("gpt2", {}, "selective"),
    "window": ("llama", {"window": 5, "window_interval": 2, "attention_sinks": "learned"}, "none"),
    "alibi": ("llama", {"position": "alibi", "attention_softcap": 2.0}, "full"),
    "olmo": (
        "llama",
        {"block_norm": "output", "qk_norm": "all_heads", "residual_multiplier": 0.5}
        | {"window": 5, "window_interval": 2, "rope_window_theta": 1e5},
        "selective",
    ),
    "dropout": ("llama", {"hidden_dropout": 0.2, "attention_dropout": 0.2, "qk_norm": True}, "full"),
}
# (ranks, tp, cp, sequence parallel)
LAYOUTS = [(2, 1, 2, False), (4, 1, 4, False), (4, 2, 2, True), (4, 1, 2, False)]


def _config(name, layout, *, loss_average="token"):
    shape, model, recompute = MODELS[name]
    _, tp, cp, sequence_parallel = layout
    config = small_config(shape, recompute=RecomputeSection(mode=recompute))
    return replace(
        config,
        model=replace(config.model, **model),
        mesh=MeshSection(tp=tp, cp=cp, sequence_parallel=sequence_parallel),
        train=replace(config.train, loss_average=loss_average),
    )


def _masked(batches, how):
    """The batches with masks that divide badly over ranks: all loss at a row's beginning, on one token, or nowhere."""
    out = []
    for batch in batches:
        length = batch.tokens_BS.shape[1]
        columns = torch.arange(length) if batch.columns_S is None else batch.columns_S
        keep = {"begin": columns < 5, "one": columns == 3, "none": columns < 0}.get(how)
        if keep is None:
            out.append(batch)
            continue
        mask = keep.float().expand(batch.tokens_BS.shape)
        total = None if batch.loss_tokens is None else torch.tensor({"begin": 5.0, "one": 1.0, "none": 0.0}[how])
        out.append(replace(batch, loss_mask_BS=mask, loss_tokens=total))
    return out


def _gradients(context, config, masks, documents):
    engine = layouts(context, config)
    batches = _masked(microbatches(engine, 0), masks)
    if documents:
        batches = with_documents(batches)
    own_means = config.train.loss_average == "megatron"
    totals = engine.add_gradients(batches, own_means=own_means)
    totals = all_reduce_(totals, engine.world.groups["data"])
    return totals.tolist(), reduced(engine)


def _whole(config, ranks, masks="", documents=False):
    results = run_ranks(_gradients, ranks, config, masks, documents)
    (totals,) = {tuple(totals) for totals, _ in results}
    return totals, assemble([part for _, parts in results for part in parts])


def _check(name, layout, masks="", *, documents=False, loss_average="token"):
    alone = _config(name, (1, 1, 1, False), loss_average=loss_average)
    total, expected = _whole(alone, 1, masks, documents)
    got_total, got = _whole(_config(name, layout, loss_average=loss_average), layout[0], masks, documents)
    np.testing.assert_allclose(got_total, total, rtol=1e-12)
    assert any(np.abs(g).max() > 0 for g in expected.values()) == (masks != "none")
    check_same_gradients(got, expected)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda v: "-".join(map(str, v)))
def test_fp64_gradients_equal_those_of_one_rank(layout):
    _check("llama", layout)


def _gradients_beside(context, config):
    """With a kernel for chunks, and how often it was called."""
    library = replace(table.LIBRARY, chunk_kernel=Slow)
    with patch.object(table, "LIBRARY", library), patch.object(Slow, "forward", wraps=Slow.forward) as forward:
        return *_gradients(context, config, "", documents=False), forward.call_count


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("layout", [(4, 1, 4, False), (4, 2, 2, True)], ids=lambda v: "-".join(map(str, v)))
def test_attention_beside_communication(name, layout):
    alone = _config(name, (1, 1, 1, False))
    total, expected = _whole(alone, 1)
    results = run_ranks(_gradients_beside, 4, _config(name, layout))
    assert all(calls > 0 for _, _, calls in results)
    for totals, _, _ in results:
        np.testing.assert_allclose(totals, total, rtol=1e-12)
    check_same_gradients(assemble([part for _, parts, _ in results for part in parts]), expected)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "llama"])
def test_every_form_of_attention_and_recomputation(name):
    _check(name, (2, 1, 2, False))


@pytest.mark.parametrize("name", ["llama", "window"])
def test_documents_within_rows(name):
    _check(name, (2, 1, 2, False), documents=True)


@pytest.mark.parametrize("masks", ["begin", "one", "none"])
@pytest.mark.parametrize("loss_average", ["token", "megatron"])
def test_masks_that_divide_badly_over_the_ranks(masks, loss_average):
    """One rank may have all the loss of a microbatch, or none; a mean over microbatches counts whole rows."""
    _check("llama", (2, 1, 2, False), masks, loss_average=loss_average)


def _losses(context, config):
    engine = layouts(context, config)
    found = [engine.step(microbatches(engine, step), 1e-2).read() for step in range(3)]
    return [(report.loss, report.grad_norm, report.num_tokens) for report in found], engine.evaluate(
        microbatches(engine, 9)
    )


@pytest.mark.parametrize("loss_average", ["token", "megatron"])
def test_steps_and_evaluations_are_those_of_one_rank(loss_average):
    alone = _config("llama", (1, 1, 1, False), loss_average=loss_average)
    ((steps, loss),) = run_ranks(_losses, 1, alone)
    for got, evaluated in run_ranks(_losses, 4, _config("llama", (4, 2, 2, False), loss_average=loss_average)):
        np.testing.assert_allclose(got, steps, rtol=1e-9)
        assert evaluated == pytest.approx(loss, rel=1e-9)
