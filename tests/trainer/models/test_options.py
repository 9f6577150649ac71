"""Every option of the model in every layout, with documents, with dropout and with recomputation, against one rank."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.helpers.examples import soaked
from tests.helpers.ranks import run_ranks
from tests.trainer.engines import (
    SEQUENCE,
    assemble,
    check_same_gradients,
    kept_bytes,
    layouts,
    logical,
    microbatches,
    reduced,
    small_config,
)
from trainer.config.sections import MeshSection, MLASection, RecomputeSection
from trainer.models.gpt.memory import block_bytes
from trainer.models.gpt.shape import gpt_shape
from trainer.parallel.params import Place

LATENT = MLASection(q_lora_rank=12, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)
WIDE_VALUES = MLASection(kv_lora_rank=20, qk_nope_head_dim=4, qk_rope_head_dim=6, v_head_dim=12, mscale_all_dim=0.7)
LATENTS = {"mla": LATENT, "head_dim": None, "num_kv_heads": None, "rope_interleaved": True}
OPTIONS = {
    "qwen3": {"qk_norm": True},
    "qk-layernorm": {"qk_norm": True, "norm": "layernorm", "bias": "qkv"},
    "multi-query": {"num_kv_heads": 1, "bias": True},
    "gemma": {"attention_softcap": 2.0, "logit_softcap": 1.5, "activation": "geglu_tanh", "window": 5},
    "sinks": {"attention_sinks": "learned", "window": 4, "window_interval": 2, "qk_norm": True},
    "alibi": {"position": "alibi", "activation": "squared_relu", "attention_sinks": "zero"},
    "rope": {"rope_fraction": 0.5, "rope_interleaved": True, "rope_interval": 2, "attention_scale": 0.3},
    "olmo": {"block_norm": "output", "qk_norm": "all_heads", "window": 5, "window_interval": 2, "num_layers": 4}
    | {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_length": 8, "rope_window_theta": 10000.0},
    "gemma2": {"block_norm": "both", "norm_zero_centered": True, "embedding_multiplier": 5.6},
    "granite": {"residual_multiplier": 0.3, "logit_scale": 0.25, "embedding_multiplier": 12.0, "tie_embeddings": True},
    "cohere": {"norm": "layernorm", "norm_bias": False, "qk_norm": "own_head", "rope_fraction": 0.5},
    "longrope": {"rope_scaling": "longrope", "rope_factor": 2.0, "rope_original_length": 8}
    | {"rope_short_factors": (1.0,) * 4, "rope_long_factors": (1.0, 1.5, 2.0, 8.0)},
    "mla": LATENTS | {"norm_zero_centered": True},
    "mla-yarn": LATENTS
    | {"mla": WIDE_VALUES, "window": 5, "attention_sinks": "learned"}
    | {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_length": 8},
    "clamped": {"activation_clamp": 0.2, "activation_offset": 1.0, "position": "none"},
    "dropout": {"hidden_dropout": 0.2, "attention_dropout": 0.1, "position": "learned"},
    "dropout-multi-query": {"hidden_dropout": 0.2, "attention_dropout": 0.1, "num_kv_heads": 1},
}


def _config(options, *, tp=1, sequence_parallel=False, micro_batch=1, dtype="fp64", recompute=None):
    config = small_config("llama", dtype=dtype)
    return replace(
        config,
        model=replace(config.model, **options),
        mesh=MeshSection(tp=tp, sequence_parallel=sequence_parallel),
        train=replace(config.train, micro_batch=micro_batch),
        recompute=recompute or RecomputeSection(),
    )


def _with_documents(batch):
    """Documents of unequal lengths, one of which is a single token and one a whole row."""
    rows, length = batch.tokens_BS.shape
    inner = [bound for row in range(rows) for bound in ([0, 1, 6] if row % 2 == 0 else [0])]
    starts = torch.tensor([row * length for row in range(rows) for _ in ([0] * 3 if row % 2 == 0 else [0])])
    bounds = torch.cat((starts + torch.tensor(inner), torch.tensor([rows * length]))).to(torch.int32)
    token = torch.arange(rows * length)
    start = bounds[torch.searchsorted(bounds, token, right=True) - 1]
    return replace(batch, positions_BS=(token - start).view(rows, length), bounds=bounds, longest=length)


def _gradients(context, config, documents):
    engine = layouts(context, config)
    batches = microbatches(engine, 0)
    batches = [_with_documents(batch) for batch in batches] if documents else batches
    totals = engine.add_gradients(batches)
    return totals.tolist(), reduced(engine)


def _whole(config, ranks, documents=False):
    results = run_ranks(_gradients, ranks, config, documents)
    return results[0][0][0], assemble([part for _, parts in results for part in parts])


@pytest.mark.parametrize(
    "name", soaked(OPTIONS, but=["mla", "dropout-multi-query", "sinks", "gemma2", "alibi", "olmo"])
)
def test_every_layout_has_the_gradients_of_one_rank(name):
    """tp 4 is more than the 2, or 1, key-value heads: some are held by two or four ranks."""
    loss, expected = _whole(_config(OPTIONS[name]), 1)
    for tp, sequence_parallel in ((2, True), (4, False), (4, True)):
        got_loss, got = _whole(_config(OPTIONS[name], tp=tp, sequence_parallel=sequence_parallel, micro_batch=2), tp)
        assert got_loss == pytest.approx(loss, rel=1e-12)
        check_same_gradients(got, expected)


def test_an_option_changes_the_function():
    losses = {name: _whole(_config(options), 1)[0] for name, options in ({"none": {}} | OPTIONS).items()}
    assert len(set(losses.values())) == len(losses)


@pytest.mark.parametrize("name", ["none", "multi-query", "sinks", "alibi", "rope"])
def test_documents_in_a_row_are_documents_alone(name):
    """The loss and every gradient of rows of documents are the sums of those of the documents."""
    config = _config({} if name == "none" else OPTIONS[name], micro_batch=4)
    loss, expected = _whole(config, 1, documents=True)
    ((alone, parts),) = run_ranks(_documents_alone, 1, config)
    assert alone == pytest.approx(loss, rel=1e-12)
    check_same_gradients(assemble(parts), expected)


def _documents_alone(context, config):
    engine = layouts(context, config)
    total = 0.0
    for batch in map(_with_documents, microbatches(engine, 0)):
        bounds = batch.bounds.tolist()
        for first, stop in itertools.pairwise(bounds):
            cut = [x.flatten()[first:stop].view(1, -1) for x in (batch.tokens_BS, batch.labels_BS, batch.loss_mask_BS)]
            loss, _ = engine.model((), type(batch)(tokens_BS=cut[0], labels_BS=cut[1], loss_mask_BS=cut[2]))
            loss.backward()
            total += loss.item()
    return total, logical(engine.optimizer.owned, engine.buffers.gradients.values)


RECOMPUTES = [
    RecomputeSection(mode="selective"),
    RecomputeSection(mode="full", layers=1),
    RecomputeSection(mode="full", layers=2),
    RecomputeSection(mode="full", method="block", layers=1),
]


RECOMPUTED = ["none", "gemma", "sinks", "dropout", "alibi", "olmo", "gemma2", "cohere", "mla"]


@pytest.mark.parametrize("name", soaked(RECOMPUTED, but=["dropout", "mla"]))
def test_recomputation_changes_no_bit(name):
    for dtype, tp, sequence_parallel in (("fp64", 1, False), ("bf16", 1, False), ("bf16", 2, True)):
        options = {} if name == "none" else OPTIONS[name]
        how = {"dtype": dtype, "tp": tp, "sequence_parallel": sequence_parallel}
        loss, expected = _whole(_config(options, **how), tp)
        for recompute in RECOMPUTES:
            got_loss, got = _whole(_config(options, recompute=recompute, **how), tp)
            assert got_loss == loss
            for key, reference in expected.items():
                np.testing.assert_array_equal(got[key], reference, err_msg=f"{key} {recompute}")


@pytest.mark.parametrize(
    "options",
    [
        {"qk_norm": True},
        {"qk_norm": "own_head", "norm": "layernorm"},
        {"qk_norm": "all_heads", "block_norm": "output"},
        {"block_norm": "both", "norm_zero_centered": True},
        LATENTS,
        {**LATENTS, "mla": replace(LATENT, q_lora_rank=None, v_head_dim=16)},
    ],
)
def test_memory_knows_what_norms_keep(options):
    for mode in ("none", "selective"):
        config = _config(options, recompute=RecomputeSection(mode=mode))
        (measured,) = run_ranks(kept_bytes, 1, config)
        how = {"tokens": SEQUENCE, "element": 8, "recompute": config.recompute}
        table = 2 * SEQUENCE * gpt_shape(config, 250).turned_width // 2 * 8
        assert 2 * block_bytes(gpt_shape(config, 250), Place(), **how) + table == measured, mode


def test_recomputation_keeps_less():
    none, selective, full = (
        run_ranks(kept_bytes, 1, _config({}, recompute=RecomputeSection(mode=mode)))[0]
        for mode in ("none", "selective", "full")
    )
    tokens, width, inner, blocks, size = SEQUENCE, 32, 64, 2, 8
    assert none - selective == blocks * tokens * (2 * width + inner) * size
    assert full < selective / 2
    shape = gpt_shape(_config({}), 250)
    for mode, measured in (("none", none), ("selective", selective)):
        how = {"tokens": tokens, "element": size, "recompute": RecomputeSection(mode=mode)}
        said = blocks * block_bytes(shape, Place(), **how)  # the first sum is the input; the last block's is not made
        assert said + 2 * tokens * 4 * size == measured  # and the tables of rotation


def test_dropout_is_a_function_of_the_sample_and_not_of_when_it_comes():
    """Steps draw anew, and the same step the same; evaluation drops nothing."""
    ((same, other, without),) = run_ranks(_dropped, 1, _config(OPTIONS["dropout"]))
    assert same[0] == same[1] and same[0] != other
    (plain,) = run_ranks(_dropped, 1, _config({"position": "learned"}))
    assert without == pytest.approx(plain[2], rel=1e-14)  # attention with dropout is another kernel


def _dropped(context, config):
    engine = layouts(context, config)
    batch = microbatches(engine, 0)[0]
    later = replace(batch, samples_B=batch.samples_B + 4)
    first, again, other = (engine.model((), each)[0].item() for each in (batch, batch, later))
    with torch.no_grad():
        return (first, again), other, engine.model((), batch)[0].item()
