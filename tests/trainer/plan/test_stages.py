"""Layers over stages and stages over ranks: published sizes, sums over stages, splits, and what is refused."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata import UsageError
from tests.trainer.engines import small_config
from trainer.config.presets import PRESETS
from trainer.config.sections import MeshSection, ModelSection, RunConfig
from trainer.models.family import family_of
from trainer.parallel.params import Place
from trainer.plan.check import check
from trainer.plan.plan import make_plan
from trainer.plan.stages import balanced_layers, block_weights, embedding_layers, head_layers, rank_parameters


def _config(preset: str = "", *, batch: int = 8, layers: int = 8, **mesh: Any) -> RunConfig:
    config = small_config("llama")
    model = replace(config.model, num_layers=layers)
    if preset:
        model = ModelSection(**{"vocab_size": 50257, **PRESETS[preset]})
    train = replace(config.train, global_batch=batch, micro_batch=1, sequence_length=16)
    return replace(config, model=model, train=train, mesh=MeshSection(**mesh))


def test_gpt2_large_at_tp_2_and_pp_2():
    plan = make_plan(_config("gpt2-large", tp=2, pp=2), 4, facts=None)
    assert plan.padded_vocab_size == 50432
    assert plan.parameters_per_stage == (210_753_280, 209_445_120)
    assert plan.parameters_per_rank == 210_753_280


@pytest.mark.parametrize(
    ("preset", "tp", "mesh"),
    [
        ("gpt2-large", 2, {"pp": 4, "schedule": "interleaved", "virtual_pipeline": 3}),
        ("gpt2-large", 1, {"pp": 3, "schedule": "zb_v"}),
        ("gpt2", 1, {"pp": 5, "stage_balance": "flops"}),
        ("gpt2", 2, {"pp": 2, "layers_per_stage": (7, 5)}),
        ("gpt3-175b", 8, {"pp": 16}),
    ],
)
def test_the_pieces_of_all_ranks_are_the_model(preset, tp, mesh):
    """Each element once: those that several stages or tp ranks hold are counted in the first."""
    config = _config(preset, batch=mesh["pp"] * 2, tp=tp, **mesh)
    plan = make_plan(config, tp * mesh["pp"], facts=None)
    total = 0
    for rank in range(plan.pp):
        for tp_rank in range(tp):
            places = plan.pipeline.places(rank, Place(tp_rank=tp_rank, tp_size=tp))
            for spec in rank_parameters(family_of(config), plan.shape, places=places):
                first = not ("tp" in spec.copies and tp_rank) and not ("ends" in spec.copies and rank)
                size = 0
                for piece in spec.pieces:
                    count = 1
                    for extent in piece.size:
                        count *= extent
                    size += count
                total += size * first
    assert total == plan.num_parameters


PLACEMENTS = [(0,), (0, 1), (0, 1, 2), (0, 1, 0, 1), (0, 1, 1, 0), (0, 1, 2, 0, 1, 2), (0, 1, 2, 2, 1, 0)]


@given(st.integers(1, 10), st.sampled_from(PLACEMENTS), st.floats(0, 3), st.floats(0, 12))
def test_no_division_leaves_the_busiest_rank_less(layers, stage_ranks, embedding, head):
    """Against every division; with several stages a rank has their sum to do."""
    if len(stage_ranks) > layers:
        return

    def most(split: tuple[int, ...]) -> float:
        costs = [0.0] * (max(stage_ranks) + 1)
        for count, rank in zip(split, stage_ranks, strict=True):
            costs[rank] += count
        costs[stage_ranks[0]] += embedding
        costs[stage_ranks[-1]] += head
        return max(costs)

    split = balanced_layers((1.0,) * layers, stage_ranks, ends=(embedding, head))
    assert len(split) == len(stage_ranks) and sum(split) == layers and min(split) >= 1
    others = itertools.product(range(1, layers + 1), repeat=len(stage_ranks) - 1)
    divisions = ((*first, layers - sum(first)) for first in others if sum(first) < layers)
    assert most(split) == pytest.approx(min(map(most, divisions)))


@given(
    st.lists(st.sampled_from([0.5, 1.0, 2.5]), min_size=4, max_size=10),
    st.sampled_from([(0, 1), (0, 1, 2), (0, 1, 0, 1)]),
    st.floats(0, 6),
)
def test_blocks_of_several_kinds_are_divided_by_their_work(weights, stage_ranks, head):
    """Within half of the heaviest block, once it is moved, of the best division; never worse than equal numbers."""

    def most(split: tuple[int, ...]) -> float:
        costs, starts = [0.0] * (max(stage_ranks) + 1), itertools.accumulate(split, initial=0)
        for start, count, rank in zip(starts, split, stage_ranks, strict=False):
            costs[rank] += sum(weights[start : start + count])
        costs[stage_ranks[-1]] += head
        return max(costs)

    split = balanced_layers(weights, stage_ranks, ends=(0.0, head))
    assert len(split) == len(stage_ranks) and sum(split) == len(weights) and min(split) >= 1
    assert most(split) <= most(balanced_layers((1.0,) * len(weights), stage_ranks, ends=(0.0, head))) + 1e-9
    others = itertools.product(range(1, len(weights) + 1), repeat=len(stage_ranks) - 1)
    divisions = ((*first, len(weights) - sum(first)) for first in others if sum(first) < len(weights))
    assert most(split) <= min(map(most, divisions)) + max(weights) + 1e-9


def test_a_layer_with_a_window_counts_less_than_one_without():
    config = _config(pp=2, stage_balance="flops")
    model = replace(config.model, window=64, window_interval=2)
    config = replace(config, model=model, train=replace(config.train, sequence_length=4096))
    shape = make_plan(config, 2, facts=None).shape
    weights = block_weights(config, shape, document_lengths=(4096,))
    assert sum(weights) == pytest.approx(8) and weights[0] == weights[2] < weights[1] == weights[3]
    assert family_of(config).kinds(shape) == ("window", "full") * 4
    one_kind = replace(model, window_interval=None)
    shape = make_plan(replace(config, model=one_kind), 2, facts=None).shape
    assert block_weights(config, shape, document_lengths=(4096,)) == (1.0,) * 8


def test_the_head_counts_in_layers():
    plan = make_plan(_config("gpt2-large", pp=2, stage_balance="flops"), 2, facts=None)
    assert plan.pipeline.layers_per_stage == (20, 16), "the head is 3.2 layers"


def test_the_embedding_counts_by_the_memory_that_it_moves():
    config = _config("gpt2", pp=3, stage_balance="flops")
    config = replace(config, train=replace(config.train, sequence_length=1024))
    shape, whole = make_plan(config, 3, facts=None).shape, {"document_lengths": (1024,)}
    embedding = embedding_layers(config, shape, **whole)
    assert 0.02 < embedding < 0.2, "14 bytes of about 90 for each feature of a token, beside a layer's products"
    wide = replace(config, model=replace(config.model, hidden_size=12288, num_heads=96))
    assert embedding_layers(wide, make_plan(wide, 3, facts=None).shape, **whole) < embedding / 4
    layout = make_plan(config, 3, facts=None).pipeline
    head = head_layers(config, shape, **whole)
    assert layout.stage_costs == pytest.approx(
        [a + b for a, b in zip(layout.layers_per_stage, (embedding, 0, head), strict=True)]
    )
    # The first stage has a layer less when its embedding is more than one.
    assert balanced_layers((1.0,) * 10, (0, 1, 2, 3), ends=(0.0, 2.0)) == (3, 3, 3, 1)
    assert balanced_layers((1.0,) * 10, (0, 1, 2, 3), ends=(1.5, 2.0)) == (2, 4, 3, 1)


def test_the_head_counts_beside_layers_by_what_they_attend_to():
    """Of 8 layers every second has a window: they count as the mean of both kinds, whichever come first."""
    config = _config(pp=2, stage_balance="flops")
    config = replace(config, train=replace(config.train, sequence_length=4096))
    whole = {"document_lengths": (4096,)}

    def head(documents: dict[str, Any] = whole, **model: Any) -> float:
        changed = replace(config, model=replace(config.model, **model))
        return head_layers(changed, make_plan(changed, 2, facts=None).shape, **documents)

    assert head(window=4096) == head() < head(window=256, window_interval=2) < head(window=256)
    assert 2 / head(window=256, window_interval=2) == pytest.approx(1 / head() + 1 / head(window=256))
    assert head({"document_lengths": (256, 256)}) == head(window=256)


@pytest.mark.parametrize(
    ("ranks", "options", "problem"),
    [
        (
            16,
            {"pp": 16},
            "mesh.pp=16 stages are more than model.num_layers=8; choose mesh.pp=8, or a deeper model",
        ),
        (
            8,
            {"pp": 8, "schedule": "interleaved"},
            "mesh.pp=8 x 2 stages per rank = 16 stages are more than model.num_layers=8; choose mesh.pp=4, "
            'mesh.schedule="1f1b", or a deeper model',
        ),
        (
            4,
            {"pp": 4, "schedule": "interleaved", "virtual_pipeline": 3},
            'choose mesh.pp=2, mesh.schedule="1f1b" without mesh.virtual_pipeline, or a deeper model',
        ),
        (
            2,
            {"pp": 2, "schedule": "zb_v", "virtual_pipeline": 5},
            "2 stages per rank, not 5; leave mesh.virtual_pipeline out",
        ),
        (
            4,
            {"pp": 4, "schedule": "interleaved", "batch": 6},
            "mesh.schedule=interleaved with a batch of 6 samples: interleaved needs microbatches in a multiple of "
            'the pipeline ranks, and 6 mod 4 = 2; choose train.global_batch=8, or mesh.schedule="1f1b"',
        ),
        (2, {"pp": 2, "virtual_pipeline": 2}, "1f1b has 1 stage per rank, not 2; leave mesh.virtual_pipeline out, or"),
        (2, {"pp": 2, "layers_per_stage": (4, 3)}, "has 7 layers in all, and model.num_layers=8; make them equal"),
        (2, {"pp": 2, "layers_per_stage": (8,)}, "has 1 number for 2 stages; give one for each"),
        (2, {"pp": 2, "layers_per_stage": (8, 0)}, "has a stage without layers; give each at least 1"),
        (1, {"schedule": "zb_v"}, "mesh.schedule='zb_v' applies only to mesh.pp above 1; set that, or leave"),
        (3, {"pp": 2}, "3 ranks are not a multiple of mesh.tp=1 x mesh.pp=2; start 2 ranks, or"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(ranks, options, problem):
    config = _config(**options)
    assert any(problem in found for found in check(config, ranks, facts=None)), check(config, ranks, facts=None)
    with pytest.raises(UsageError):
        make_plan(config, ranks, facts=None)


def test_stages_that_a_schedule_does_not_have_are_one_problem():
    """Fewer ranks would not help, and interleaved would need more layers: neither is advised."""
    config = _config(layers=4, pp=2, schedule="zb_v", virtual_pipeline=3)
    (problem,) = check(config, 4, facts=None)
    assert problem.endswith("zb_v has 2 stages per rank, not 3; leave mesh.virtual_pipeline out")
    (problem,) = check(_config(layers=3, pp=2, schedule="interleaved"), 2, facts=None)
    assert problem.endswith('choose mesh.schedule="1f1b", or a deeper model'), "one rank has no schedule"


@pytest.mark.parametrize(
    ("ranks", "options", "advice"),
    [
        (16, {"pp": 16, "batch": 1}, "choose a deeper model"),
        (6, {"pp": 3, "schedule": "zb_v", "layers": 4, "batch": 8}, 'choose mesh.schedule="1f1b", or a deeper model'),
        (6, {"pp": 3, "schedule": "zb_v", "layers": 4, "batch": 9}, 'choose mesh.pp=2, mesh.schedule="1f1b", or a'),
        # Two microbatches on four pipeline ranks, where interleaved wants a multiple.
        (8, {"pp": 8, "schedule": "interleaved", "batch": 4}, 'choose mesh.schedule="1f1b", or a deeper model'),
    ],
)
def test_fewer_stages_are_advised_only_where_the_batch_can_be_divided(ranks, options, advice):
    config = _config(**options)
    assert any(advice in found for found in check(config, ranks, facts=None)), check(config, ranks, facts=None)


def test_a_step_of_a_ramp_counts_as_a_batch():
    config = _config(pp=16, batch=8)
    config = replace(config, train=replace(config.train, batch_ramp="1 1 56"))
    assert any("choose a deeper model" in found for found in check(config, 16, facts=None))


def test_all_problems_come_at_once():
    problems = check(_config(pp=16, batch=7, schedule="interleaved", layers_per_stage=(1, 0)), 16, facts=None)
    assert len(problems) == 5


def test_gpipe_keeps_more_than_1f1b():
    from trainer.plan.memory import activation_bytes_per_stage

    held = {}
    for schedule in ("gpipe", "1f1b"):
        config = _config(pp=4, schedule=schedule, batch=16)
        held[schedule] = activation_bytes_per_stage(config, make_plan(config, 4, facts=None))
    assert held["gpipe"][1] == 16 * held["1f1b"][1] // 3 and held["1f1b"][0] > held["1f1b"][1] > held["1f1b"][2]
