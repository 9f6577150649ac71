"""Models with many options drawn together, in layouts drawn with them, against one rank with microbatches of a row.

BERT, T5 and models with adapters are drawn as well. A checkpoint of a decoder is also read in another drawn layout, and
each generates with any cache what its twin without one does; update rules have drawn options. Other tests take one
option, or each pair of some; faults of three that meet are found here. The rows of a batch differ in their loss tokens.
Draws that `check` refuses are drawn again. MDATA_SOAK multiplies their number.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.examples import SOAK
from tests.helpers.ranks import run_ranks
from tests.trainer.engines import (
    assemble,
    check_same_gradients,
    draw_adapters,
    layouts,
    logical,
    microbatches,
    save_engine,
    small_config,
)
from tests.trainer.models import test_bert, test_bert_heads, test_moe, test_t5
from tests.trainer.tasks import test_engine
from trainer.checkpoint.format import RunState
from trainer.config.sections import (
    BertSamplesSection,
    BertSection,
    ClassifySamplesSection,
    DataSection,
    GPTNeoXSection,
    LoRASection,
    MambaSection,
    MeshSection,
    MLASection,
    ModelSection,
    MoESection,
    MTPSection,
    OptimizerSection,
    RecomputeSection,
    RunConfig,
    SpikesSection,
    T5SamplesSection,
    T5Section,
)
from trainer.models.family import family_of
from trainer.models.stage import Microbatch
from trainer.optim.schedules import rates
from trainer.parallel.init import ElementRange, initialize_
from trainer.parallel.mesh import mesh_of
from trainer.parallel.params import Place
from trainer.plan.check import check
from trainer.plan.lengths import schedule_lengths
from trainer.plan.plan import make_plan
from trainer.run.engine import Engine
from trainer.run.step_report import NO_LIMITS, SpikeLimits
from trainer.tasks.engine import DecodeEngine
from trainer.tasks.loaded_model import Model

ANY: Mapping[str, Sequence[Any]] = {
    "num_layers": (1, 2, 3, 4, 5),
    "hidden_size": (16, 32, 48),
    "num_heads": (2, 4, 8),
    "num_kv_heads": (1, 2, 4, 8),
    "head_dim": (4, 8),
    "vocab_size": (251, 256, 257),
    "ffn_hidden_size": (16, 32, 40, 48),
    "norm": ("rmsnorm", "layernorm"),
    "activation": ("swiglu", "geglu", "geglu_tanh", "quick_geglu", "gelu", "gelu_erf", "relu", "squared_relu"),
    "position": ("rope", "rope", "learned", "alibi", "none"),
    "tie_embeddings": (False, True),
    "bias": (False, True, "qkv"),
}
SOMETIMES: Mapping[str, Sequence[Any]] = {
    "rope_fraction": (0.5,),
    "rope_interleaved": (True,),
    "rope_interval": (2, 3),
    "qk_norm": (True, "own_head", "all_heads"),
    "window": (1, 3, 5, 40),
    "window_interval": (2, 3),
    "attention_sinks": ("zero", "learned"),
    "attention_softcap": (2.0,),
    "attention_scale": (0.3,),
    "logit_softcap": (3.0,),
    "logit_scale": (0.5,),
    "embedding_multiplier": (2.0,),
    "residual_multiplier": (0.5,),
    "norm_zero_centered": (True,),
    "norm_bias": (False,),
    "block_norm": ("output", "both"),
    "hidden_dropout": (0.2,),
    "attention_dropout": (0.1,),
    "activation_clamp": (0.5,),
    "activation_offset": (1.0,),
}
SCALINGS = ("linear", "ntk", "yarn", "llama3")
RULES = ("adamw", "adamw", "sgd", "muon")
OFTEN, RARELY = 0.4, 0.15


def _drawn(chance: random.Random) -> tuple[RunConfig, int, bool]:
    """(configuration, ranks, whether rows have documents); `check` may refuse it."""
    pick = chance.choice
    ranks = pick((2, 4, 4))
    tp, cp, pp = pick(
        [sizes for sizes in itertools.product((1, 2, 4), (1, 1, 2), (1, 2, 4)) if ranks % np.prod(sizes) == 0]
    )
    model = _model(chance)
    mesh: dict[str, Any] = {"tp": tp, "cp": cp, "pp": pp, "sequence_parallel": tp > 1 and chance.random() < 0.6}
    if pp > 1:
        mesh["schedule"] = pick(("1f1b", "gpipe", "interleaved", "zb_h1", "zb_v"))
        mesh["stage_balance"] = pick(("layers", "flops"))
    if model.moe is not None:
        mesh |= {
            "ep": pick((1, 2, 4)),
            "etp": pick((None, None, 1)),
            "expert_dispatch": pick(("auto", "gather", "all_to_all")),
        }
    sharding, recompute = pick(("state", "none", "gradients", "parameters")), pick(("none", "selective", "full"))
    overlap = {f"overlap_{name}": pick((False, True)) for name in ("grad_reduce", "param_gather")}
    method = {"method": pick(("uniform", "block")), "layers": pick((1, 2))} if recompute == "full" else {}
    base, documents = small_config("llama"), chance.random() < OFTEN
    config = replace(
        base,
        model=model,
        mesh=MeshSection(**mesh),
        optimizer=OptimizerSection(name=pick(RULES), lr=1e-3, sharding=sharding, **overlap),
        recompute=RecomputeSection(mode=recompute, **method),
        train=replace(base.train, micro_batch=pick((1, 1, 2)), global_batch=8),
        data=replace(base.data, document_masks=documents),
    )
    return config, ranks, documents


def _model(chance: random.Random) -> ModelSection:
    pick = chance.choice
    family = pick(("gpt", "gpt", "gpt", "gpt_neox", "mamba"))
    values = _values(chance) | {"family": family}
    if family == "gpt_neox":
        values["gpt_neox"] = GPTNeoXSection(
            parallel_residual=pick((True, True, False)), shared_norm=pick((False, True))
        )
    if family == "mamba":
        pattern = "".join(pick("MMM*-E") for _ in range(values["num_layers"]))
        values["mamba"] = MambaSection(
            pattern=pattern,
            num_heads=pick((4, 8)),
            head_dim=pick((4, 8)),
            num_groups=pick((1, 2, 4)),
            state_size=pick((4, 8)),
            conv_kernel=pick((2, 4)),
            chunk_size=pick((2, 4, 8)),
        )
        values["moe"] = _experts(chance) if "E" in pattern else None
    if family == "gpt" and chance.random() < OFTEN:
        values["moe"] = _experts(chance)
    if family == "gpt" and chance.random() < RARELY:
        ranks = {"q_lora_rank": pick((None, 12)), "kv_lora_rank": 16, "v_head_dim": pick((4, 6))}
        values["mla"] = MLASection(qk_nope_head_dim=pick((4, 8)), qk_rope_head_dim=4, **ranks)
        values |= {"head_dim": None, "num_kv_heads": None}
    if family == "gpt" and chance.random() < RARELY:
        values["mtp"] = MTPSection(num_layers=pick((1, 2)), loss_factor=0.3)
    return ModelSection(**values)


def _values(chance: random.Random) -> dict[str, Any]:
    """Of keys that no section of a family has."""
    pick = chance.choice
    values = {name: pick(options) for name, options in ANY.items()}
    values |= {name: pick(options) for name, options in SOMETIMES.items() if chance.random() < RARELY}
    if values["position"] == "rope" and chance.random() < RARELY:
        values |= {"rope_scaling": pick(SCALINGS), "rope_factor": 2.0, "rope_original_length": 8}
    return values


def _bert(chance: random.Random) -> tuple[ModelSection, DataSection]:
    pick = chance.choice
    task, head = pick(("masked", "masked", "classify", "choice")), pick((False, True))
    section = BertSection(
        norm=pick(("pre", "post")),
        binary_head=head,
        token_types=pick((None, 0, 2, 3)),
        head_activation=pick(("gelu", "gelu_erf")),
        task=task,
        labels=test_bert_heads.LABELS if task == "classify" else (),
    )
    samples = ClassifySamplesSection(choices=test_bert_heads.CHOICES) if task == "choice" else None
    data = DataSection(blend="unused", kind="classify", classify=samples)
    if task == "masked":
        data = DataSection(blend="unused", kind="bert", bert=BertSamplesSection(head=head))
    return ModelSection(**_values(chance) | {"family": "bert", "bert": section, "tie_embeddings": True}), data


def _t5(chance: random.Random) -> tuple[ModelSection, DataSection]:
    pick, values, (encoder, decoder) = chance.choice, _values(chance), chance.choices((1, 2, 3), k=2)
    buckets = {"relative_buckets": pick((4, 8, 9)), "relative_distance": pick((6, 40))}
    section = T5Section(encoder_layers=encoder, head_bias=pick((False, True)), **buckets)
    values |= {"position": pick(("relative", values["position"])), "num_kv_heads": None}
    data = DataSection(blend="unused", kind="t5", t5=T5SamplesSection(decoder_length=test_t5.DECODER))
    return ModelSection(**values | {"family": "t5", "t5": section, "num_layers": encoder + decoder}), data


def _adapted(chance: random.Random) -> tuple[ModelSection, DataSection]:
    return replace(_model(chance), lora=_lora(chance)), DataSection(blend="mock")


def _lora(chance: random.Random) -> LoRASection:
    targets = ("q", "k", "v", "out", "gate", "up", "down")
    return LoRASection(
        rank=chance.choice((1, 3, 4)),
        alpha=chance.choice((None, 6.0)),
        targets=tuple(name for name in targets if chance.random() < 0.5),
        modules_to_save=tuple(name for name in ("embedding", "head") if chance.random() < OFTEN),
    )


def _experts(chance: random.Random) -> MoESection:
    pick, values = chance.choice, dict[str, Any]()
    score = pick(("softmax", "sigmoid"))
    if chance.random() < OFTEN:
        values |= {"capacity_factor": pick((0.5, 1.0, 2.0)), "drop": pick(("weight", "position"))}
    if chance.random() < OFTEN:
        values |= {"shared_ffn_hidden_size": pick((8, 16)), "shared_gate": pick((False, True))}
    if chance.random() < RARELY:
        values |= {"groups": 2, "groups_per_token": 1, "group_score": pick(("sum", "max"))}
    return MoESection(
        num_experts=pick((2, 4, 8)),
        top_k=pick((1, 2, 3)),
        ffn_hidden_size=pick((8, 16)),
        interval=pick((1, 1, 2)),
        score=score,
        normalize_weights=pick((False, True)),
        weight_scale=pick((None, 2.5)),
        expert_bias=score == "sigmoid" and pick((False, True)),
        balance=pick(("sequence", "none")),
        balance_factor=pick((0.0, 0.1, 1.0)),
        z_loss_factor=pick((0.0, 0.01)),
        **values,
    )


def _valid(seed: int, kind: str = "") -> Iterator[tuple[RunConfig, int, bool]]:
    chance = random.Random(f"{kind}{seed}")
    while True:
        config, ranks, documents = _drawn(chance)
        if kind:
            model, data = OTHERS[kind](chance)
            config = replace(config, model=model, data=data)
        if config.train.micro_batch == 1 and chance.random() < OFTEN:  # which the mean of means depends on
            config = replace(config, train=replace(config.train, loss_average="megatron"))
        if not check(config, ranks, facts=None) and not check(_alone(config), 1, facts=None):
            yield config, ranks, documents


def _alone(config: RunConfig) -> RunConfig:
    optimizer = replace(config.optimizer, sharding="none", overlap_grad_reduce=False, overlap_param_gather=False)
    train = replace(config.train, micro_batch=1)
    return replace(config, mesh=MeshSection(), optimizer=optimizer, recompute=RecomputeSection(), train=train)


@pytest.mark.scaled
@pytest.mark.parametrize("seed", range(3 * SOAK))
def test_a_random_model_in_a_random_layout_is_that_of_one_rank(seed):
    config, ranks, documents = next(_valid(seed))
    changed = {
        (field.name, value)
        for section in (config.model, config.mesh, config.optimizer, config.recompute)
        for field in dataclasses.fields(section)
        if (value := getattr(section, field.name)) is not None
    }
    print(sorted(changed, key=str), ranks, documents)  # shown where it fails
    _check_same(test_moe._whole(config, ranks, documents), test_moe._whole(_alone(config), 1, documents))


def _check_same(got: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    check_same_gradients(got["gradients"], expected["gradients"])
    np.testing.assert_allclose(got["losses"], expected["losses"], rtol=1e-9)
    for one, other in zip(got["named"], expected["named"], strict=True):
        assert one == pytest.approx(other, rel=1e-9)
    for name, values in expected["weights"].items():  # AdamW makes a gradient that is 0 but for rounding larger
        np.testing.assert_allclose(got["weights"][name], values, rtol=1e-5, atol=1e-6, err_msg=name)
    for name, values in expected["buffers"].items():
        np.testing.assert_array_equal(got["buffers"][name], values, err_msg=name)


OTHERS: Mapping[str, Callable[[random.Random], tuple[ModelSection, DataSection]]] = {
    "bert": _bert,
    "t5": _t5,
    "adapters": _adapted,
}
ROWS: Mapping[str, Callable[..., list[Microbatch]]] = {
    "bert": test_bert._microbatches,
    "classify": test_bert_heads._microbatches,
    "t5": test_t5._microbatches,
}


@pytest.mark.scaled
@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("seed", range(SOAK))
def test_a_random_model_of_another_kind_in_a_random_layout_is_that_of_one_rank(seed, kind):
    """Padding is left out, too, where a GPU would."""
    config, ranks, documents = next(_valid(seed, kind))
    print(config, ranks)  # shown where it fails
    documents, rows = documents and kind == "adapters", ROWS.get(config.data.kind, microbatches)
    expected = test_moe._whole(_alone(config), 1, documents, rows)
    if config.data.kind in ROWS and not config.model.attention_dropout:
        rows = functools.partial(rows, multiple=4)
    _check_same(test_moe._whole(config, ranks, documents, rows), expected)


def _two_layouts(seed: int) -> list[tuple[RunConfig, int]]:
    """Of one random model, in fp32 and without documents, with their ranks."""
    chance = random.Random(seed)
    while True:
        drawn = [_drawn(chance) for _ in range(2)]
        (first, *_), rule = drawn[0], chance.choice(("adamw", "sgd", "muon"))
        both = [
            (
                replace(
                    config,
                    model=first.model,
                    data=first.data,
                    optimizer=replace(config.optimizer, name=rule),
                    precision=replace(config.precision, dtype="fp32"),
                ),
                ranks,
            )
            for config, ranks, _ in drawn
        ]
        if not any(check(config, ranks, facts=None) for config, ranks in both):
            return both


def _held(engine: Engine) -> list[tuple[str, Any, np.ndarray]]:
    optimizer, buffers = engine.optimizer, engine.model_buffers
    parts = [] if buffers is None else logical(buffers.holds, buffers.values)
    for kind, values in optimizer.state.items():
        parts += [(f"{kind}/{name}", *rest) for name, *rest in logical(optimizer.owns[kind], values)]
    return parts


def _saved(context: Any, config: RunConfig, root: Path) -> Any:
    engine = layouts(context, config)
    for step in range(2):
        engine.step(microbatches(engine, step), 1e-3).read()
    run = RunState(step=2, consumed_samples=16, data_id="id", data={}, optimizer_steps=2, config="x = 1\n")
    save_engine(engine, root, run=run)
    return _held(engine), engine.step(microbatches(engine, 2), 1e-3).read().loss


def _read(context: Any, config: RunConfig, folder: Path) -> Any:
    engine = layouts(context, config, fresh=False)
    engine.load(folder)
    return _held(engine), engine.step(microbatches(engine, 2), 1e-3).read().loss


@pytest.mark.scaled
@pytest.mark.parametrize("seed", range(SOAK))
def test_a_checkpoint_of_a_random_model_is_read_in_another_layout(seed, tmp_path):
    (config, ranks), (other, of_other) = _two_layouts(seed)
    print(config, ranks, other, of_other)  # shown where it fails
    saved = run_ranks(_saved, ranks, config, tmp_path)
    read = run_ranks(_read, of_other, other, tmp_path / "step-2")
    expected, found = (assemble([part for parts, _ in results for part in parts]) for results in (saved, read))
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)
    assert read[0][1] == pytest.approx(saved[0][1], rel=1e-4)


def _options(chance: random.Random, rule: str) -> dict[str, Any]:
    """Options of an update rule and its schedules; epsilon is above the rounding of gradients that are 0."""
    pick = chance.choice
    values = {
        "schedule": pick(("cosine", "linear", "inverse_sqrt")),
        "warmup_fraction": pick((None, 0.3)),
        "embedding_lr": pick((None, 2e-2)),
        "weight_decay": pick((0.0, 0.5)),
        "weight_decay_schedule": pick(("constant", "linear")),
        "clip_norm": pick((0.0, 0.1, 1.0)),
        "beta1": pick((0.9, 0.5)),
        "momentum": pick((0.9, 0.0)),
        "epsilon": 1e-4,
        "bucket_size": pick((None, 1, 500)),
    }
    if rule == "muon":
        values |= {
            "muon_nesterov": pick((True, False)),
            "muon_ns_steps": pick((1, 5, 6)),
            "muon_coefficient_type": pick(("simple", "quintic")),
            "muon_scale_mode": pick(("spectral", "shape_scaling", "unit_rms_norm")),
        }
    return values


def _two_rules(seed: int) -> tuple[list[tuple[RunConfig, int]], list[SpikeLimits]]:
    """Two layouts of a random model and update rule with their ranks, and limits of four steps, which skip some."""
    chance = random.Random(f"rules{seed}")
    while True:
        drawn = [_drawn(chance) for _ in range(2)]
        first, *_ = drawn[0]
        model = replace(first.model, lora=_lora(chance)) if chance.random() < RARELY else first.model
        options, spikes = _options(chance, first.optimizer.name), SpikesSection(action="skip")
        both = [
            (
                replace(
                    config,
                    model=model,
                    data=replace(first.data, document_masks=False),
                    train=replace(config.train, steps=8),
                    optimizer=replace(config.optimizer, name=first.optimizer.name, **options),
                    spikes=spikes,
                ),
                ranks,
            )
            for config, ranks, _ in drawn
        ]
        if not any(check(config, ranks, facts=None) for config, ranks in (*both, (_alone(both[0][0]), 1))):
            skips = SpikeLimits(*chance.choice(((0.0, math.inf), (math.inf, 0.0))))
            return both, [skips if chance.random() < 0.3 else NO_LIMITS for _ in range(4)]


def _reported(context: Any, config: RunConfig, limits: Mapping[int, SpikeLimits], root: Path | None = None) -> Any:
    """What steps report, from a checkpoint of the first of them if it is not step 0, and the state behind the last."""
    begin, lengths, reports = min(limits), schedule_lengths(config), []
    engine = layouts(context, config, fresh=begin == 0 or config.model.lora is not None)
    if begin:
        engine.load(str(root))
    elif config.model.lora is not None:
        draw_adapters(engine)
    for step, of_step in limits.items():
        at = rates(config.optimizer, lengths, steps=step, samples=8 * step, batch=8)
        report = engine.step(
            [replace(batch, components_B=batch.samples_B % 3) for batch in microbatches(engine, step)],
            at.learning_rate,
            embedding_rate=at.embedding_learning_rate,
            weight_decay=at.weight_decay,
            num_components=3,
            measure=True,
            limits=of_step,
        ).read()
        reports.append((report, engine.norms_by_group(report.group_squares)))
    if root is not None and not begin:
        done = {"step": len(limits), "consumed_samples": 16, "optimizer_steps": engine.optimizer.steps}
        save_engine(engine, root, run=RunState(**done, data_id="id", data={}, config="x = 1\n"))
    return reports, _held(engine), engine.optimizer.steps


@pytest.mark.scaled
@pytest.mark.parametrize("seed", range(SOAK))
def test_a_random_rule_updates_alike_in_two_layouts_one_after_the_other(seed, tmp_path):
    """Steps that are skipped as spikes, too; whatever a step can report is that of one rank."""
    ((config, ranks), (other, of_other)), drawn = _two_rules(seed)
    print(config, ranks, other, of_other, drawn)  # shown where it fails
    limits = dict(enumerate(drawn))
    (expected, held, updates), *_ = run_ranks(_reported, 1, _alone(config), limits)
    before, after = {step: limits[step] for step in (0, 1)}, {step: limits[step] for step in (2, 3)}
    first = run_ranks(_reported, ranks, config, before, tmp_path)
    second = run_ranks(_reported, of_other, other, after, tmp_path / "step-2")
    for (found, norms), (report, by_group) in zip([*first[0][0], *second[0][0]], expected, strict=True):
        assert found.applied == report.applied and found.num_tokens == report.num_tokens
        for key in ("loss", "grad_norm", "params_norm", "component_losses"):
            assert getattr(found, key) == pytest.approx(getattr(report, key), rel=1e-8, nan_ok=True), key
        assert found.named_losses == pytest.approx(report.named_losses, rel=1e-8)
        assert found.counts.keys() == report.counts.keys()
        for key, numbers in report.counts.items():
            assert found.counts[key] == pytest.approx(numbers), key
        assert norms == pytest.approx(by_group, rel=1e-6, abs=1e-10)
    assert second[0][2] == updates
    whole, last = (assemble(parts) for parts in (held, [part for _, parts, _ in second for part in parts]))
    assert last.keys() == whole.keys()
    for name, values in whole.items():
        np.testing.assert_allclose(last[name], values, rtol=1e-6, atol=1e-9, err_msg=name)


def _generates(context: Any, config: RunConfig, seed: int) -> None:
    """Drawn requests, which arrive at drawn steps, against the twin that computes whole contexts, with drawn sizes."""
    chance, family, shape = random.Random(seed), family_of(config), make_plan(config, context.world, facts=None).shape
    world = context.join(mesh_of(config, context.world))
    tp = world.groups["tp"]
    place = Place(tp_rank=tp.rank, tp_size=tp.size)
    module = family.build(shape, place, groups={"tp": tp}, dtype=torch.float32, device=world.device)
    named = dict(module.named_parameters())
    for spec in family.parameters(shape, module.place):
        if spec.name in named:  # the others are buffers
            initialize_([ElementRange(spec, 0, spec.numel, named[spec.name].data.view(-1))], seed=3)
    for values in module.buffers():
        values.copy_(torch.linspace(-0.1, 0.1, values.numel()).view_as(values))
    sizes = {"vocab_size": shape.vocab_size, "rows": shape.vocab_size, "context": test_engine.CONTEXT}
    model = Model(module=module, world=world, ends=frozenset((test_engine.END,)), **sizes)
    asked = test_engine.drawn_requests(chance, 6)
    wanted = test_engine.twins(model, asked)
    for cache_tokens in (None, 60):
        engine = DecodeEngine(
            model,
            max_batch=chance.choice((1, 3, 6)),
            prefill_chunk=chance.choice((5, 7, 512)),
            page_tokens=chance.choice((1, 2, 4, 16)),
            cache_tokens=cache_tokens,
        )
        engine._lags = chance.random() < 0.5
        found = test_engine.run(engine, asked, arrives=lambda: chance.random() < 0.4)
        test_engine.compare(found, wanted)
        assert engine.load()[:3] == (0, 0, 0)


def _generator(seed: int) -> tuple[RunConfig, int]:
    """(configuration, ranks) of a random model that drops nothing."""
    chance, base = random.Random(seed), small_config("llama")
    while True:
        model = _model(chance)
        moe = model.moe and replace(model.moe, capacity_factor=None, drop="weight")
        model = replace(model, moe=moe, mtp=None, hidden_dropout=0.0, attention_dropout=0.0)
        tp, train = chance.choice((1, 2)), replace(base.train, sequence_length=test_engine.CONTEXT)
        config = replace(base, model=model, mesh=MeshSection(tp=tp), train=train)
        if not check(config, tp, facts=None):
            return config, tp


@pytest.mark.scaled
@pytest.mark.parametrize("seed", range(SOAK))
def test_a_random_model_generates_what_whole_contexts_give(seed):
    config, ranks = _generator(seed)
    print(config.model, ranks)  # shown where it fails
    run_ranks(_generates, ranks, config, seed)
