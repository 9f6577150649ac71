"""data.document_masks: a row has the losses and gradients of its separate documents, also in whole runs."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import mdata
from mdata.loader.loader import BatchPlan, collate
from tests.helpers.corpora import write_pair
from tests.helpers.examples import soaked
from tests.helpers.ranks import RankError, run_ranks
from tests.helpers.runs import make_chat, make_corpora, write_jsonl
from trainer.config.sections import (
    DataSection,
    MeshSection,
    ModelSection,
    OptimizerSection,
    PrecisionSection,
    RunConfig,
    RunSection,
    TrainSection,
)
from trainer.models.stage import Microbatch
from trainer.parallel.mesh import Mesh, mesh_of
from trainer.plan.check import check
from trainer.plan.plan import make_plan
from trainer.run.data import COUNTED_ROWS, COUNTED_TOKENS, documents_of, open_data, to_device, training_batches
from trainer.run.engine import Engine
from trainer.run.metrics import read_metrics
from trainer.run.train import train

LENGTH = 64
CHOICES = {
    "native": {},
    "blocks": {"shuffle_block": 8},
    "packed": {"kind": "packed"},
    "megatron": {"order": "megatron"},
}
MODELS = {"rope": {}, "learned": {"position": "learned"}}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """Documents of 5 to 120 words, most of which are shorter than a row."""
    folder = tmp_path_factory.mktemp("corpora")
    return make_corpora(folder, {"web": write_jsonl(folder / "web.jsonl", 1)})["web"]


def config_of(corpus, folder, *, tp=1, cp=1, sequence_parallel=False, masks=True, model=None, **data) -> RunConfig:
    return RunConfig(
        run=RunSection(folder=str(folder), seed=7),
        model=ModelSection(
            **{"num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "init_std": 0.2, **(model or {})}
        ),
        data=DataSection(
            **{
                "blend": str(corpus),
                "split": "80,20",
                "cache": str(folder / "cache"),
                "document_masks": masks,
                **data,
            }
        ),
        mesh=MeshSection(tp=tp, cp=cp, sequence_parallel=sequence_parallel),
        train=TrainSection(
            sequence_length=LENGTH, global_batch=4, micro_batch=2, steps=4, eval_interval=2, eval_samples=3
        ),
        optimizer=OptimizerSection(lr=1e-2),
        precision=PrecisionSection(dtype="fp64"),
    )


def _train(context, config):
    train(config, context.join(mesh_of(config, context.world)))


def _curve(config, ranks):
    run_ranks(_train, ranks, config)
    return [
        (line["loss"], line["grad_norm"], *(line.get("valid") or {}).values())
        for line in read_metrics(Path(config.run.folder))
    ]


def _documents_by_hand(dataset, config, samples):
    """(row, first, stop) of each document of some samples: from the trace of the index, or the id that ends one."""
    found = []
    for row, sample in enumerate(samples):
        tokens = dataset[sample]["tokens"]
        if config.data.order == "megatron":
            inner = [int(place) + 1 for place in np.flatnonzero(tokens == dataset.eod)]
        else:
            (component,), (inside,) = dataset.locate(np.array([sample]))
            pieces = dataset.components[component].samples.pieces(int(inside))
            inner = list(itertools.accumulate(piece.length for piece in pieces if piece.length))
        cuts = [0, *(place for place in inner if place < LENGTH), LENGTH]
        found += [(row, first, stop) for first, stop in itertools.pairwise(cuts)]
    return found


def _first_step(context, config):
    """What the first step's loss and gradient norm are where every document is a row of its own."""
    data = open_data(config)
    plan = make_plan(config, 1, facts=data.facts)
    world = context.join(Mesh(1, 1))
    engine = Engine(config, plan, world=world, fresh=True)
    first = mdata.Loader(data.train, BatchPlan(global_batch=4, micro_batch=4, seed=config.run.seed), consumed=0)
    (batch,) = next(iter(first))
    total, tokens = 0.0, 0.0
    for row, start, stop in _documents_by_hand(data.train, config, batch.samples.tolist()):
        cut = [
            torch.from_numpy(np.ascontiguousarray(array[row : row + 1, start:stop]))
            for array in (batch.tokens, batch.labels, batch.loss_mask)
        ]
        alone = Microbatch(tokens_BS=cut[0], labels_BS=cut[1], loss_mask_BS=cut[2])
        loss, _ = engine.model((), alone)
        total, tokens = total + loss.item(), tokens + cut[2].sum().item()
    return total / tokens


@pytest.mark.parametrize("choice", soaked(CHOICES, but=["megatron"]))
def test_the_losses_of_a_run_are_those_of_documents_alone(corpus, tmp_path, choice):
    """The first step's loss; then tp 2, with and without sequence parallelism, cp 2 and dp 2 have the same curve."""
    config = config_of(corpus, tmp_path / "alone", **CHOICES[choice])
    curve = _curve(config, 1)
    (by_hand,) = run_ranks(_first_step, 1, config)
    assert curve[0][0] == pytest.approx(by_hand, rel=1e-12)
    layouts = {"tp": {"tp": 2}, "sp": {"tp": 2, "sequence_parallel": True}, "cp": {"cp": 2}, "dp": {}}
    for name, mesh in layouts.items():
        layout = config_of(corpus, tmp_path / name, **mesh, **CHOICES[choice])
        for step, expected in zip(_curve(layout, 2), curve, strict=True):
            assert step == pytest.approx(expected, rel=1e-9), name
    without = _curve(config_of(corpus, tmp_path / "without", masks=False, **CHOICES[choice]), 1)
    for step, (seen, own) in enumerate(zip(without, curve, strict=True)):
        assert seen[0] != pytest.approx(own[0], rel=1e-6), step
    assert [len(line) for line in without] == [2, 3, 2, 3]
    assert without[1][2] != pytest.approx(curve[1][2], rel=1e-6)


SOAK = pytest.mark.soak
LAYOUTS = [
    (2, {"tp": 2, "sequence_parallel": True}),
    (2, {"cp": 2}),
    (2, {"pp": 2}),
    *(
        pytest.param(ranks, mesh, marks=SOAK)
        for ranks, mesh in [
            (1, {}),
            (2, {}),
            (2, {"tp": 2}),
            (2, {"pp": 2, "schedule": "zb_h1"}),
            (2, {"pp": 2, "schedule": "zb_v"}),
            (2, {"pp": 2, "schedule": "interleaved"}),
            (4, {"tp": 2, "cp": 2, "sequence_parallel": True}),
            (4, {"tp": 2, "pp": 2, "sequence_parallel": True}),
            (4, {"cp": 2, "pp": 2}),
            (4, {"cp": 2}),
            (8, {"tp": 2, "cp": 2, "pp": 2, "sequence_parallel": True}),
        ]
    ),
]


def _packed_step(context, config, *, apart=False):
    """(loss, gradient norm) of the first step; `apart`: each document is a microbatch of its own, on one rank."""
    data, world = open_data(config), context.join(mesh_of(config, context.world))
    plan = make_plan(config, context.world, facts=data.facts)
    engine = Engine(config, plan, world=world, fresh=True)
    read = next(iter(training_batches(data, config, plan=plan, dp=world.groups["dp"], consumed=0)))
    batches = [engine.microbatch(batch) for batch in read]
    if apart:
        batches = [
            Microbatch(
                tokens_BS=batch.tokens_BS.flatten()[None, first:stop],
                labels_BS=batch.labels_BS.flatten()[None, first:stop],
                loss_mask_BS=batch.loss_mask_BS.flatten()[None, first:stop],
            )
            for batch in batches
            for first, stop in itertools.pairwise(batch.bounds.tolist())
        ]
        assert len(batches) >= 2 * sum(len(batch.samples) for batch in read)
    report = engine.step(batches, 1e-3).read()
    return report.loss, report.grad_norm


@pytest.fixture(scope="module")
def documents_alone(corpus, tmp_path_factory):
    """(kind, model) -> (configuration, loss and gradient norm of the documents of its rows, one by one)."""
    folder, made = tmp_path_factory.mktemp("alone"), {}

    def alone(kind, model):
        if (kind, model) not in made:
            data = {"blend": str(make_chat(folder)), "masks": False} if kind == "chat" else {}
            config = config_of(corpus, folder, kind=kind, model={"num_layers": 4, **MODELS[model]}, **data)
            config = replace(config, train=replace(config.train, sequence_length=6 * LENGTH))
            made[kind, model] = config, run_ranks(partial(_packed_step, apart=True), 1, config)[0]
        return made[kind, model]

    return alone


@pytest.mark.parametrize(("ranks", "mesh"), LAYOUTS, ids=str)
@pytest.mark.parametrize(
    ("kind", "model"),
    [
        ("packed", "rope"),
        pytest.param("packed", "learned", marks=SOAK),
        pytest.param("chat", "rope", marks=SOAK),
    ],
)
def test_packed_rows_are_their_documents_alone(documents_alone, kind, model, ranks, mesh):
    """To 1e-12, in every layout: the mean over the step's loss tokens, and the gradient of all parameters."""
    config, alone = documents_alone(kind, model)
    steps = run_ranks(_packed_step, ranks, replace(config, mesh=MeshSection(**mesh)))
    for step in steps:
        assert step == pytest.approx(alone, rel=1e-12)


def test_documents_of_less_than_a_step_are_not_counted(corpus, tmp_path):
    config = config_of(corpus, tmp_path / "run")
    short = replace(config, train=replace(config.train, steps=None, samples=1))
    facts = open_data(short).facts
    assert facts.document_lengths == ()
    assert any("is less than the first step" in problem for problem in check(short, 1, facts=facts))


@pytest.mark.parametrize("choice", CHOICES)
def test_attention_is_counted_inside_the_documents_of_the_rows(corpus, tmp_path, choice):
    """The lengths that a plan counts with are those of the documents that attention keeps apart in the run's rows."""
    config = config_of(corpus, tmp_path / "run", **CHOICES[choice])
    data = open_data(config)
    numbers = np.unique(np.linspace(0, 4 * 4 - 1, COUNTED_ROWS, dtype=np.int64))  # 4 steps of 4 samples
    assert numbers.tolist() == list(range(16))
    documents = documents_of(collate(data.train, numbers))
    assert documents is not None
    lengths = np.diff(documents.bounds)
    of_tokens = np.sort(np.repeat(lengths, lengths))
    middles = ((np.arange(COUNTED_TOKENS) + 0.5) / COUNTED_TOKENS * len(of_tokens)).astype(np.int64)
    assert data.facts.document_lengths == tuple(of_tokens[middles].tolist())
    plan = make_plan(config, 1, facts=data.facts)
    whole = make_plan(config, 1, facts=open_data(config_of(corpus, tmp_path, masks=False, **CHOICES[choice])).facts)
    attended = of_tokens[middles].mean()
    assert whole.flops_per_token - plan.flops_per_token == pytest.approx(12 * 2 * 32 * (LENGTH - attended), abs=1)


def test_learned_positions_begin_anew(corpus, tmp_path):
    config = config_of(corpus, tmp_path / "run", model={"position": "learned"})
    (by_hand,) = run_ranks(_first_step, 1, config)
    assert _curve(config, 1)[0][0] == pytest.approx(by_hand, rel=1e-12)


def _evaluated(context, config, alone):
    """The loss of the first rows of the validation set, as the engine measures it."""
    data = open_data(config)
    world = context.join(Mesh(1, 1))
    engine = Engine(config, make_plan(config, 1, facts=data.facts), world=world, fresh=True)
    valid, samples = data.valid["valid"], np.arange(3)
    batch = collate(valid, samples)
    moved = to_device(batch, world.device, vocab_size=engine.plan.vocab_size)
    if not alone:
        return engine.evaluate([moved])
    found = []
    for row, start, stop in _documents_by_hand(valid, config, samples.tolist()):
        cut = [x[row : row + 1, start:stop] for x in (moved.tokens_BS, moved.labels_BS, moved.loss_mask_BS)]
        found.append(Microbatch(tokens_BS=cut[0], labels_BS=cut[1], loss_mask_BS=cut[2]))
    return engine.evaluate(found)


@pytest.mark.parametrize("choice", ["native", "megatron"])
def test_an_evaluation_keeps_documents_apart(corpus, tmp_path, choice):
    config = config_of(corpus, tmp_path / "run", **CHOICES[choice])
    ((together,), (alone,)) = (run_ranks(_evaluated, 1, config, how) for how in (False, True))
    assert together == pytest.approx(alone, rel=1e-12)


def test_the_identity_of_the_data_says_so(corpus, tmp_path):
    """Without masks it is as before; a checkpoint does not go on with the other."""
    for choice, names in (("native", {"document_masks"}), ("megatron", {"reset_position_ids", "reset_attention_mask"})):
        on, off = (
            open_data(config_of(corpus, tmp_path / "x", masks=masks, **CHOICES[choice])).train
            for masks in (True, False)
        )
        assert on.identity.keys() - off.identity.keys() == names
    config = config_of(corpus, tmp_path / "run")
    run_ranks(_train, 1, config)
    config = replace(config, optimizer=replace(config.optimizer, decay_steps=5))
    longer = replace(config.train, steps=5)
    other = replace(config, train=longer, data=replace(config.data, document_masks=False))
    with pytest.raises(RankError, match=r"found: data\.document_masks=False"):
        run_ranks(_train, 1, other)
    run_ranks(_train, 1, replace(config, train=longer))


def test_rows_of_one_document_have_no_use_for_it(corpus, tmp_path):
    (problem,) = check(config_of(corpus, tmp_path, kind="document"), 1, facts=None)
    assert problem.startswith('data.document_masks=true changes nothing with data.kind="document"')


def test_megatrons_rule_needs_the_id_that_ends_a_document(tmp_path):
    write_pair(tmp_path / "bare", [[1] * 300])
    config = config_of(tmp_path / "bare", tmp_path / "run", order="megatron")
    with pytest.raises(mdata.UsageError, match="needs the id that ends a document"):
        open_data(config)
