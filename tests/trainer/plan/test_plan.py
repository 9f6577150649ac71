"""Derived numbers by hand, every rule between sections broken once, the learning rate at its edge cases."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata import UsageError
from trainer.config.sections import (
    CheckpointSection,
    DataSection,
    KernelsSection,
    MeshSection,
    ModelSection,
    OptimizerSection,
    PrecisionSection,
    RecomputeSection,
    RunConfig,
    RunSection,
    TrainSection,
)
from trainer.models.gpt.shape import padded_vocab_size
from trainer.plan.check import DataFacts, check
from trainer.plan.plan import make_plan

FACTS = DataFacts(
    vocab_size=1000, largest_id=999, eod=0, fingerprint="f", num_tokens=5000, components=(("a", 2000), ("b", 3000))
)


def config(**changes: dict[str, Any]) -> RunConfig:
    """A small sound configuration with the keys of some sections changed."""
    sections: dict[str, Any] = {
        "run": RunSection(folder="run"),
        "model": ModelSection(num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2),
        "data": DataSection(blend="mix.json"),
        "mesh": MeshSection(tp=2),
        "train": TrainSection(sequence_length=32, global_batch=8, micro_batch=2, steps=100),
        "optimizer": OptimizerSection(lr=1e-3, warmup_steps=10),
        "precision": PrecisionSection(),
        "recompute": RecomputeSection(),
        "kernels": KernelsSection(),
    }
    for name, keys in changes.items():
        sections[name] = dataclasses.replace(sections[name], **keys)
    return RunConfig(**sections)


def test_derived_numbers_by_hand():
    plan = make_plan(config(), 4, facts=FACTS)
    assert (plan.tp, plan.dp, plan.num_microbatches, plan.tokens_per_step) == (2, 2, 2, 256)
    assert (plan.head_dim, plan.heads_per_rank, plan.kv_heads_per_rank) == (16, 2, 1)
    assert plan.ffn_hidden_size == 192  # 8/3 x 64 = 170.67, rounded up to 64s
    assert (plan.vocab_size, plan.padded_vocab_size) == (1000, 1024)
    assert (plan.schedule.counter, plan.schedule.warmup, plan.schedule.decay) == ("steps", 10, 100)
    attention, mlp, norms = 64 * (64 + 32 + 32 + 64), 3 * 64 * 192, 2 * 64
    assert plan.num_parameters == 1000 * 64 + 2 * (attention + mlp + norms) + 64
    assert plan.flops_per_token == 6 * plan.num_parameters + 12 * 2 * 64 * 32


def test_heads_of_a_width_of_their_own():
    """What 4 heads of 24 features cost beside a stream of 66, which 4 does not divide."""
    plan = make_plan(config(model={"head_dim": 24, "hidden_size": 66, "ffn_hidden_size": 64}), 2, facts=FACTS)
    assert (plan.head_dim, plan.heads_per_rank, plan.kv_heads_per_rank) == (24, 2, 1)
    attention, mlp, norms = 66 * (96 + 48 + 48 + 96), 3 * 66 * 64, 2 * 66
    assert plan.num_parameters == 1000 * 66 + 2 * (attention + mlp + norms) + 66
    assert plan.flops_per_token == 6 * plan.num_parameters + 12 * 2 * 96 * 32


@pytest.mark.parametrize(
    ("model", "documents", "attended"),
    [
        ({"window": 8}, (), 8 + 8),
        ({"window": 8, "window_interval": 2}, (), 8 + 32),
        ({"window": 64}, (), 32 + 32),
        ({}, (4, 20), 12 + 12),
        ({"window": 8, "window_interval": 2}, (4, 20), 6 + 12),
    ],
)
def test_attention_is_counted_within_windows_and_documents(model, documents, attended):
    """Two layers, rows of 32 tokens; tokens whose documents have 4 and 20 tokens are equally many."""
    plan = make_plan(config(model=model), 2, facts=dataclasses.replace(FACTS, document_lengths=documents))
    assert plan.flops_per_token == 6 * plan.num_parameters + 12 * 64 * attended


def test_a_window_shortens_attention_by_the_published_numbers():
    """Mistral-7B at 32k tokens: 12 x 32 layers x 4096 x 4096 operations of attention a token, not x 32768."""
    mistral = config(
        mesh={"tp": 1},
        model={
            "num_layers": 32,
            "hidden_size": 4096,
            "num_heads": 32,
            "num_kv_heads": 8,
            "ffn_hidden_size": 14336,
            "vocab_size": 32000,
            "tie_embeddings": False,
        },
        train={"sequence_length": 32768},
    )
    windowed = dataclasses.replace(mistral, model=dataclasses.replace(mistral.model, window=4096))
    full, short = (make_plan(c, 2, facts=None).flops_per_token for c in (mistral, windowed))
    assert full - short == 12 * 32 * 4096 * (32768 - 4096)
    assert short == 49_106_411_520


def test_tables_that_are_only_looked_up_cost_no_operations():
    plan = make_plan(config(model={"tie_embeddings": False, "position": "learned"}), 2, facts=FACTS)
    multiplied = plan.num_parameters - 1000 * 64 - 32 * 64
    assert plan.flops_per_token == 6 * multiplied + 12 * 2 * 64 * 32


@pytest.mark.parametrize(
    ("model", "ffn"),
    [
        ({"activation": "gelu"}, 256),
        ({"activation": "gelu_erf"}, 256),
        ({"activation": "swiglu"}, 192),
        ({"activation": "swiglu", "hidden_size": 96}, 256),  # 8/3 x 96 is 256 exactly
        ({"activation": "gelu", "ffn_hidden_size": 100}, 100),
    ],
)
def test_the_inner_size_follows_from_the_activation_where_it_is_not_set(model, ffn):
    assert make_plan(config(model=model), 2, facts=FACTS).ffn_hidden_size == ffn


@given(st.integers(1, 300_000), st.integers(1, 16))
def test_padded_vocabulary_is_the_smallest_that_fits(vocab_size, tp):
    padded = padded_vocab_size(vocab_size, tp)
    assert padded % (128 * tp) == 0 and 0 <= padded - vocab_size < 128 * tp


def test_padding_of_gpt2_as_megatron_pads_it():
    assert [padded_vocab_size(50257, tp) for tp in (1, 2, 8)] == [50304, 50432, 51200]


@pytest.mark.parametrize(
    ("changes", "world", "text"),
    [
        (
            {"model": {"num_kv_heads": None}, "mesh": {"tp": 3}},
            3,
            "model.num_heads=4 is not a multiple of mesh.tp=3; choose mesh.tp from 1, 2, 4",
        ),
        (
            {"model": {"num_heads": 12, "hidden_size": 96, "num_kv_heads": 3}, "mesh": {"tp": 4}},
            4,
            "model.num_kv_heads=3 is neither a multiple nor a divisor of mesh.tp=4; set mesh.tp=1",
        ),
        (
            {"model": {"position": "learned", "rope_scaling": "linear", "rope_factor": 2.0}},
            2,
            "model.rope_scaling='linear' needs model.position=\"rope\"; set that, or leave model.rope_scaling out",
        ),
        (
            {"model": {"activation": "relu", "activation_clamp": 2.0}},
            2,
            "model.activation_clamp=2.0 needs model.activation from swiglu, geglu, geglu_tanh, quick_geglu; "
            "set that, or leave model.activation_clamp out",
        ),
        (
            {"model": {"rope_scaling": "yarn", "rope_factor": 4.0}},
            2,
            'model.rope_scaling="yarn" needs model.rope_original_length, the tokens of a sequence before scaling; '
            "set it, such as to 8192",
        ),
        (
            {"model": {"rope_scaling": "ntk", "rope_factor": 2.0, "head_dim": 2}},
            2,
            'model.rope_scaling="ntk" needs more than 2 rotated features of a head; raise model.head_dim',
        ),
        (
            {"model": {"rope_scaling": "linear"}},
            2,
            'model.rope_scaling="linear" changes nothing with model.rope_factor=1; set the factor by which '
            "sequences may be longer, or leave model.rope_scaling out",
        ),
        (
            {"optimizer": {"name": "sgd", "beta1": 0.8}},
            2,
            'optimizer.beta1=0.8 applies only to optimizer.name="adamw" and "muon", not "sgd"; '
            "leave optimizer.beta1 out",
        ),
        (
            {"optimizer": {"momentum": 0.8}},
            2,
            'optimizer.momentum=0.8 applies only to optimizer.name="sgd", not "adamw"; leave optimizer.momentum out',
        ),
        (
            {"recompute": {"mode": "full", "layers": 3}},
            2,
            "recompute.layers=3 is more than model.num_layers=2; choose at most 2",
        ),
        (
            {"recompute": {"mode": "selective", "method": "block"}},
            2,
            "recompute.method='block' applies only to recompute.mode=\"full\"; set that, or leave recompute.method out",
        ),
        (
            {"recompute": {"layers": 9}},
            2,
            'recompute.layers=9 applies only to recompute.mode="full"; set that, or leave recompute.layers out',
        ),
        (
            {"model": {"rope_fraction": 0.01}},
            2,
            'model.rope_fraction=0.01 of 16 features of a head rotates none; raise it, or choose model.position="none"',
        ),
        (
            {"model": {"ffn_hidden_size": 99}},
            2,
            "model.ffn_hidden_size=99 is not a multiple of mesh.tp=2; set mesh.tp=1",
        ),
        (
            {"mesh": {"sequence_parallel": True}, "train": {"sequence_length": 31}},
            2,
            "train.sequence_length=31 is not a multiple of mesh.tp=2; set mesh.tp=1",
        ),
        (
            {},
            3,
            "3 ranks are not a multiple of mesh.tp=2; start 2 ranks, or choose mesh.tp from 1",
        ),
        (
            {"mesh": {"cp": 3}, "train": {"sequence_length": 36}},
            8,
            "8 ranks are not a multiple of mesh.tp=2 x mesh.cp=3; start 6 ranks, or choose mesh sizes whose product "
            "divides 8",
        ),
        (
            {"mesh": {"cp": 4}, "train": {"sequence_length": 36}},
            8,
            "train.sequence_length=36 is not a multiple of 8: with mesh.cp=4 a sample is split into 2 x 4 chunks; "
            "choose a multiple, such as 40, or a smaller mesh.cp",
        ),
        (
            {"mesh": {"cp": 3, "tp": 4, "sequence_parallel": True}, "train": {"sequence_length": 40}},
            12,
            "train.sequence_length=40 is not a multiple of 12: with mesh.cp=3 a sample is split into 2 x 3 chunks, and "
            "a rank's tokens are split over mesh.tp=4; choose a multiple, such as 48, or a smaller mesh.cp",
        ),
        (
            {"train": {"global_batch": 9}},
            4,
            "train.global_batch=9 is not a multiple of train.micro_batch=2 x 2 data-parallel ranks; "
            "choose a multiple, such as 12",
        ),
        (
            {"train": {"global_batch": 6, "micro_batch": 4}},
            4,
            "train.global_batch=6 is not a multiple of train.micro_batch=4 x 2 data-parallel ranks; "
            "set train.micro_batch=3, or choose a multiple, such as 8",
        ),
        (
            {"model": {"hidden_size": 66}},
            2,
            "model.hidden_size=66 is not a multiple of model.num_heads=4; choose a multiple, such as 68, "
            "or set model.head_dim",
        ),
        (
            {"model": {"head_dim": 15}},
            2,
            "model.head_dim=15 is odd, but rope rotates features in pairs; choose an even head size, "
            'or model.position="learned"',
        ),
        (
            {"model": {"hidden_size": 60}},
            2,
            "model.hidden_size=60 / model.num_heads=4 is odd, but rope rotates features in pairs; "
            'choose an even head size, or model.position="learned"',
        ),
        (
            {"model": {"num_kv_heads": 3}, "mesh": {"tp": 1}},
            1,
            "model.num_heads=4 is not a multiple of model.num_kv_heads=3; choose model.num_kv_heads from 1, 2, 4",
        ),
        (
            {"model": {"max_position": 16, "position": "learned"}},
            2,
            "train.sequence_length=32 is longer than model.max_position=16; shorten the sequence, "
            "set model.max_position to at least 32, or leave it out",
        ),
        (
            {"optimizer": {"warmup_steps": 101}},
            2,
            "optimizer.warmup_steps=101 is more than train.steps=100; warm up for fewer steps, or raise train.steps",
        ),
        (
            {"optimizer": {"decay_steps": 5}},
            2,
            "optimizer.warmup_steps=10 is more than optimizer.decay_steps=5; "
            "warm up for fewer steps, or raise optimizer.decay_steps",
        ),
        (
            {"optimizer": {"min_lr": 0.01}},
            2,
            "optimizer.min_lr=0.01 is more than optimizer.lr=0.001; choose an optimizer.min_lr of at most 0.001",
        ),
        (
            {"model": {"vocab_size": 500}},
            2,
            "model.vocab_size=500 is too small for mix.json: its tokenizer has 1000 entries and its largest "
            "token id is 999; set model.vocab_size to at least 1000, or leave it out",
        ),
        (
            {"train": {"sequence_length": 2000}},
            2,
            "train.sequence_length=2000 needs 2001 tokens (the last label is one more), but a has 2000 for "
            "training; choose at most 1999, or add text",
        ),
        (
            {"train": {"steps": None}},
            2,
            "the run has no length; set one of train.steps, train.samples and train.tokens",
        ),
        (
            {"train": {"samples": 5}},
            2,
            "train.steps=100 and train.samples=5 are set; a run has one length, keep one of them",
        ),
        (
            {"train": {"steps": None, "tokens": 255}},
            2,
            "train.tokens=255 is less than the first step, which reads 256 tokens; choose at least 256",
        ),
        (
            {"optimizer": {"warmup_tokens": 64}},
            2,
            "optimizer.warmup_steps=10 and optimizer.warmup_tokens=64 are set; keep one of them",
        ),
        (
            {"optimizer": {"warmup_fraction": 0.5}},
            2,
            "optimizer.warmup_steps=10 and optimizer.warmup_fraction=0.5 are set; keep one of them",
        ),
        (
            {"optimizer": {"decay_samples": 79}},
            2,
            "optimizer.warmup_steps=10 is more than optimizer.decay_samples=79; "
            "warm up for fewer samples, or raise optimizer.decay_samples",
        ),
        (
            {"optimizer": {"init_lr": 1.0}},
            2,
            "optimizer.init_lr=1 is more than optimizer.lr=0.001; choose an optimizer.init_lr of at most 0.001",
        ),
        (
            {"optimizer": {"schedule": "wsd"}},
            2,
            'optimizer.schedule="wsd" needs a length of its decay; set optimizer.wsd_decay_steps, _samples or _tokens',
        ),
        (
            {"optimizer": {"schedule": "wsd", "wsd_decay_samples": 801}},
            2,
            "optimizer.wsd_decay_samples=801 is longer than the schedule, of 800 samples; choose at most that many",
        ),
        (
            {"optimizer": {"wsd_decay_steps": 7}},
            2,
            'optimizer.wsd_decay_steps=7 applies only to optimizer.schedule="wsd"; leave it out',
        ),
        (
            {"precision": {"fp8": "current"}},
            2,
            'precision.fp8="current" needs precision.dtype="bf16", the type of everything but the products of linear '
            'layers, not "fp32"; set precision.dtype="bf16"',
        ),
        (
            {"precision": {"fp8_format": "e4m3"}},
            2,
            "precision.fp8_format='e4m3' has no effect with precision.fp8=\"none\"; "
            'leave it out, or set precision.fp8="delayed"',
        ),
        (
            {"precision": {"dtype": "bf16", "fp8": "current", "fp8_margin": 1}},
            2,
            'precision.fp8_margin=1 has no effect with precision.fp8="current"; '
            'leave it out, or set precision.fp8="delayed"',
        ),
        (
            {"precision": {"dtype": "bf16", "fp8": "delayed", "fp8_first_last_bf16": 1}},
            2,
            "precision.fp8_first_last_bf16=1 at both ends leaves no layer of model.num_layers=2 in FP8; "
            'lower it, or set precision.fp8="none"',
        ),
        (
            {"precision": {"dtype": "bf16", "fp8": "delayed"}, "model": {"ffn_hidden_size": 80}},
            2,
            "model.ffn_hidden_size / mesh.tp is 40, but FP8 matrices must have multiples of 16 rows and columns; "
            'choose 48, or set precision.fp8="none"',
        ),
        (
            {
                "precision": {"dtype": "bf16", "fp8": "blockwise"},
                "model": {"ffn_hidden_size": 192, "hidden_size": 256, "head_dim": 128},
                "train": {"micro_batch": 4},
            },
            2,
            "model.ffn_hidden_size / mesh.tp is 96, but FP8 matrices must have multiples of 128 rows and columns with "
            "scales of blocks; choose 128, or set another precision.fp8",
        ),
        (
            {"kernels": {"optimizer": "apex"}, "optimizer": {"name": "sgd"}},
            2,
            'kernels.optimizer="apex" supports only optimizer.name="adamw", not "sgd"; set kernels.optimizer="auto"',
        ),
        (
            {"kernels": {"attention": "transformer_engine"}, "model": {"window": 4}},
            2,
            'kernels.attention="transformer_engine" supports only causal attention over whole rows, '
            'which no layer has with these options of the model; set kernels.attention="auto"',
        ),
        (
            {"kernels": {"attention": "transformer_engine"}, "mesh": {"cp": 2}},
            4,
            'kernels.attention="transformer_engine" with mesh.cp=2; it does not support rows that ranks share: '
            'set kernels.attention="auto", or mesh.cp=1',
        ),
        (
            {"kernels": {"attention": "transformer_engine"}, "data": {"document_masks": True}},
            2,
            'kernels.attention="transformer_engine" supports only causal attention over whole rows, '
            'which no layer has with data.document_masks; set kernels.attention="auto"',
        ),
        (
            {"optimizer": {"weight_decay_end": 0.2}},
            2,
            'optimizer.weight_decay_end=0.2 needs optimizer.weight_decay_schedule="linear" or "cosine"; '
            "set one, or leave it out",
        ),
        (
            {"precision": {"gradients": "params"}},
            2,
            'precision.gradients="params" changes nothing with precision.dtype="fp32"; choose "bf16" or "fp16", '
            "or leave precision.gradients out",
        ),
        (
            {"optimizer": {"muon_ns_steps": 3}},
            2,
            'optimizer.muon_ns_steps=3 applies only to optimizer.name="muon"; set that, or leave '
            "optimizer.muon_ns_steps out",
        ),
        (
            {"optimizer": {"name": "muon", "muon_coefficient_type": "quintic", "muon_ns_steps": 6}},
            2,
            "optimizer.muon_ns_steps=6 is not a multiple of the five polynomials of "
            'optimizer.muon_coefficient_type="quintic"; choose 5 or 10, or "simple"',
        ),
    ],
)
def test_each_rule_names_its_values_and_a_remedy(changes, world, text):
    assert check(config(**changes), world, facts=FACTS) == [text]
    with pytest.raises(UsageError) as error:
        make_plan(config(**changes), world, facts=FACTS)
    assert text in str(error.value)


def test_a_sound_configuration_has_no_problems():
    assert check(config(), 4, facts=FACTS) == []
    assert check(config(), 4, facts=None) == []


def test_the_data_says_whether_there_is_a_best_checkpoint_to_keep():
    """data.valid and data.split do not say it: a blend may name validation sets."""
    best = dataclasses.replace(config(train={"eval_interval": 10}), checkpoint=CheckpointSection(keep_best=2))
    lacking = dataclasses.replace(FACTS, has_valid=False)
    assert check(best, 2, facts=FACTS) == check(best, 2, facts=None) == []
    assert check(best, 2, facts=lacking) == [
        "checkpoint.keep_best=2 would keep nothing: the data has no validation set; "
        "set data.valid, or checkpoint.keep_best=0"
    ]
    at_the_end = dataclasses.replace(best, train=config().train)
    for facts in (FACTS, None):
        assert check(at_the_end, 2, facts=facts) == [
            "checkpoint.keep_best=2 would keep nothing: without train.eval_interval it validates at the end only; "
            "set train.eval_interval, or checkpoint.keep_best=0"
        ]


def test_all_problems_come_at_once():
    broken = config(
        mesh={"tp": 3},
        optimizer={"warmup_steps": 101, "min_lr": 1.0},
        model={"vocab_size": 5},
        train={"micro_batch": 3},
    )
    found = check(broken, 6, facts=FACTS)
    assert len(found) == 6  # heads, kv heads, batch, warmup, min_lr, vocabulary; 192 is a multiple of 3
    with pytest.raises(UsageError, match="this configuration has 6 problems:\n  - "):
        make_plan(broken, 6, facts=FACTS)


def unknown(**known: Any) -> DataFacts:
    """Facts of a prefix without a manifest, but for those that are known."""
    return DataFacts(
        **{"vocab_size": None, "largest_id": None, "eod": None, "fingerprint": None, "num_tokens": 5000, **known}
    )


def test_foreign_data_wants_a_vocabulary():
    assert check(config(), 2, facts=unknown()) == [
        "model.vocab_size is not set, and mix.json names no tokenizer; "
        "record it with mdata adopt, or set model.vocab_size"
    ]
    assert check(config(), 2, facts=unknown(largest_id=7)) == [
        "model.vocab_size is not set, and mix.json names no tokenizer; "
        "record it with mdata adopt, or set model.vocab_size to at least 8"
    ]
    assert check(config(model={"vocab_size": 8}), 2, facts=unknown(largest_id=7)) == []
    assert check(config(model={"vocab_size": 7}), 2, facts=unknown(largest_id=7)) == [
        "model.vocab_size=7 is too small for mix.json: its tokenizer has an unknown number of entries and its "
        "largest token id is 7; set model.vocab_size to at least 8, or leave it out"
    ]


def test_without_data_a_plan_wants_a_vocabulary():
    assert make_plan(config(model={"vocab_size": 300}), 2, facts=None).padded_vocab_size == 512
    with pytest.raises(UsageError, match=r"set model\.vocab_size"):
        make_plan(config(), 2, facts=None)


def test_an_id_outside_its_own_tokenizer_is_told():
    problems = check(config(), 2, facts=dataclasses.replace(FACTS, largest_id=1000))
    assert problems == [
        "mix.json holds token id 1000, outside its tokenizer's 1000 entries; "
        "it was made with another tokenizer, preprocess it again"
    ]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("size", [1 << 40, (1 << 62) + (1 << 40), (1 << 63) - 25])
def test_a_size_of_any_kind_is_judged_without_counting_up_to_it(size):
    """Nothing is done once for each of 2^40 layers, ranks or features: these would not end."""
    sections = dataclasses.fields(RunConfig)
    keys = [(s.name, key) for s in sections for key, value in vars_of(getattr(config(), s.name)) if type(value) is int]
    assert len(keys) > 20
    for section, key in keys:
        whole = config(model={"vocab_size": 9})
        changed = dataclasses.replace(whole, **{section: dataclasses.replace(getattr(whole, section), **{key: size})})
        if not check(changed, 2, facts=None):
            make_plan(changed, 2, facts=None)
    wide = config(model={"hidden_size": size, "num_heads": size, "num_kv_heads": 3}, mesh={"tp": 7})
    assert any("set mesh.tp=1" in problem for problem in check(wide, 7, facts=None))


def vars_of(section: Any) -> list[tuple[str, Any]]:
    return [(field.name, getattr(section, field.name)) for field in dataclasses.fields(section)]
