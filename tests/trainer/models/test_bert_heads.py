"""BERT's heads for rows: every layout, padding, first weights of another model, folders of transformers."""

from __future__ import annotations

import functools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import mdata
from mdata import UsageError
from mdata.loader.loader import Batch
from tests.helpers.ranks import run_ranks
from tests.trainer.engines import SEQUENCE, assemble, check_same_gradients, layouts, logical, reduced, small_config
from trainer.config.sections import (
    BertSection,
    ClassifySamplesSection,
    DataSection,
    MeshSection,
    OptimizerSection,
    TrainSection,
)
from trainer.convert.compare import build_model, logits_of
from trainer.convert.convert import ConvertOptions, convert, open_model
from trainer.convert.hf_config import to_hf
from trainer.models.family import family_of
from trainer.parallel.collectives import all_reduce_
from trainer.plan.check import check
from trainer.run.data import to_device

SOAK = pytest.mark.soak
LABELS = ("no", "yes", "maybe")
ROWS, CHOICES = 12, 3


def _config(task="classify", *, sharding="state", dropout=0.0, **mesh):
    config = small_config("gpt2", optimizer=OptimizerSection(lr=1e-2, sharding=sharding))
    labels = LABELS if task == "classify" else ()
    model = replace(config.model, family="bert", bert=BertSection(task=task, labels=labels), activation="gelu_erf")
    choices = ClassifySamplesSection(choices=CHOICES) if task == "choice" else None
    return replace(
        config,
        model=replace(model, num_layers=4, attention_dropout=0.0, hidden_dropout=dropout),
        data=DataSection(blend="rows.json", kind="classify", classify=choices),
        train=TrainSection(global_batch=ROWS, micro_batch=2, sequence_length=SEQUENCE, steps=3),
        mesh=MeshSection(**mesh),
    )


def _microbatches(engine, step, multiple=0):
    """This rank's part of seeded rows of several lengths; a few have no label."""
    generator = np.random.default_rng(step)
    choices, batch = engine.config.data.rows_per_sample, engine.plan.global_batch
    shape = (batch, choices, SEQUENCE) if choices > 1 else (batch, SEQUENCE)
    real = (np.arange(SEQUENCE) < generator.integers(3, SEQUENCE + 1, (*shape[:-1], 1))).astype(np.int64)
    fields = {
        "text": generator.integers(0, 250, shape) * real,
        "types": generator.integers(0, 2, shape) * real,
        "labels": generator.integers(-1, 3, batch),
        "padding_mask": real,
    }
    fields["loss_mask"] = (fields["labels"] >= 0).astype(np.int64)
    kind = mdata.Classify(choices=choices if choices > 1 else None)
    plan, dp = engine.plan, engine.dp
    rows = np.arange(batch).reshape(plan.num_microbatches, dp.size, plan.micro_batch)[:, dp.rank]
    batches = [Batch(x + step * batch, mdata.FieldRows({k: v[x] for k, v in fields.items()}, kind)) for x in rows]
    how = {"vocab_size": 250, "numbered": True, "multiple": multiple}
    return [to_device(batch, engine.world.device, **how) for batch in batches]


def _three_steps(context, config, multiple=0):
    engine = layouts(context, config)
    totals = engine.add_gradients(_microbatches(engine, 0, multiple))
    gradients = reduced(engine)
    for axis in ("data", "pp"):
        all_reduce_(totals, engine.world.groups[axis])
    engine.buffers.forget()
    reports = [engine.step(_microbatches(engine, step, multiple), 1e-2).read() for step in range(3)]
    weights = logical(engine.optimizer.owned, engine.optimizer.state["weight"])
    dp, size = engine.dp, engine.plan.micro_batch
    batches = [
        replace(batch, components_B=torch.arange(size) + size * (dp.size * number + dp.rank))
        for number, batch in enumerate(_microbatches(engine, 5, multiple))
    ]
    logits = engine.class_logits(batches, num_samples=ROWS, classes=3)
    return {
        "gradients": gradients,
        "weights": weights,
        "numbers": [(report.loss, report.grad_norm, report.num_tokens) for report in reports],
        "totals": totals.tolist(),
        "logits": logits.tolist(),
    }


def _whole(config, ranks, *multiple):
    results = run_ranks(_three_steps, ranks, config, *multiple)
    whole = {key: assemble([part for one in results for part in one[key]]) for key in ("gradients", "weights")}
    return {**results[0], **whole}


@functools.cache
def _alone(task, dropout=0.0):
    return _whole(_config(task, dropout=dropout), 1)


def _check_same(got, expected):
    check_same_gradients(got["gradients"], expected["gradients"])
    for name in ("totals", "numbers", "logits"):
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-8, atol=1e-10, err_msg=name)
    for name, values in expected["weights"].items():
        np.testing.assert_allclose(got["weights"][name], values, rtol=1e-7, atol=1e-9, err_msg=name)


@pytest.mark.parametrize(
    ("task", "ranks", "mesh", "sharding"),
    [
        ("choice", 4, {"tp": 2, "pp": 2, "sequence_parallel": True}, "state"),
        ("classify", 3, {}, "parameters"),
        pytest.param("classify", 4, {"tp": 2, "pp": 2, "sequence_parallel": True}, "gradients", marks=SOAK),
        pytest.param("choice", 2, {"tp": 2}, "state", marks=SOAK),
        pytest.param("choice", 3, {}, "gradients", marks=SOAK),
        pytest.param("classify", 2, {"pp": 2, "schedule": "zb_h1"}, "state", marks=SOAK),
        pytest.param("classify", 2, {"pp": 2, "schedule": "interleaved"}, "none", marks=SOAK),
    ],
)
def test_a_layout_changes_nothing(task, ranks, mesh, sharding):
    _check_same(_whole(_config(task, sharding=sharding, dropout=0.2, **mesh), ranks), _alone(task, 0.2))


@pytest.mark.parametrize("task", ["choice", pytest.param("classify", marks=SOAK)])
def test_padding_can_be_left_out(task):
    _check_same(_whole(_config(task, dropout=0.2), 1, 2), _alone(task, 0.2))


@pytest.mark.parametrize("task", ["classify", "choice"])
def test_the_size_of_microbatches_changes_nothing(task):
    """Each row drops the same features, wherever it stands."""
    config = _config(task, dropout=0.2)
    _check_same(_whole(replace(config, train=replace(config.train, micro_batch=6)), 1), _alone(task, 0.2))


def test_the_loss_is_the_mean_over_rows_with_a_label():
    found = _alone("classify")
    labelled = found["totals"][1]
    assert labelled < ROWS and found["numbers"][0][2] == labelled
    assert found["numbers"][0][0] == pytest.approx(found["totals"][0] / labelled, rel=1e-6)


# ---- folders of transformers


def _saved(folder, name, **settings):
    import transformers

    sizes = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 64, "max_position_embeddings": 32, "hidden_dropout_prob": 0.0}
    torch.manual_seed(1)
    kind = transformers.MegatronBertConfig if name.startswith("Megatron") else transformers.BertConfig
    getattr(transformers, name)(kind(**sizes, **settings)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "settings", "classes"),
    [
        ("BertForSequenceClassification", {"id2label": dict(enumerate(LABELS))}, LABELS),
        ("MegatronBertForMultipleChoice", {}, ()),
    ],
)
def test_there_and_back(tmp_path, name, settings, classes):
    folder = _saved(tmp_path / "theirs", name, **settings)
    model = open_model(folder)
    assert family_of(model.config).classes(model.config) == classes
    tokens = torch.randint(0, 60, (3, 16), generator=torch.Generator().manual_seed(0))
    ours = build_model(model).logits(tokens)
    assert ours.shape == (3, len(classes) or 1)
    torch.testing.assert_close(ours, logits_of(model, tokens), rtol=0, atol=1e-5)
    convert(folder, tmp_path / "run", options=ConvertOptions(to="mtrain", check=False))
    convert(tmp_path / "run", tmp_path / "back", options=ConvertOptions(to="hf"))
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "back"))
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    said = json.loads((tmp_path / "back/config.json").read_text())
    assert said["architectures"] == [name]
    assert [said["id2label"][str(number)] for number in range(len(classes))] == list(classes)


def test_what_is_no_class_is_refused(tmp_path):
    folder = _saved(tmp_path / "theirs", "BertForSequenceClassification", problem_type="multi_label_classification")
    with pytest.raises(UsageError, match="problem_type"):
        open_model(folder)
    with pytest.raises(UsageError, match="Megatron-Core has no head"):
        convert(
            _saved(tmp_path / "choice", "BertForMultipleChoice"),
            tmp_path / "core",
            options=ConvertOptions(to="torch_dist"),
        )


def _first_weights(context, config):
    engine = layouts(context, config)
    return logical(engine.optimizer.owned, engine.optimizer.state["weight"])


def test_a_head_that_the_first_weights_lack_is_drawn(tmp_path):
    folder = _saved(tmp_path / "theirs", "BertForMaskedLM")
    model = open_model(folder)
    config = _config()
    bert = replace(model.config.model.bert, task="classify", labels=LABELS)
    config = replace(
        config,
        model=replace(model.config.model, bert=bert, vocab_size=60),
        checkpoint=replace(config.checkpoint, init_from=str(folder)),
    )
    found = assemble(run_ranks(_first_weights, 1, config)[0])
    theirs = load_file(folder / "model.safetensors")
    np.testing.assert_array_equal(found["types.weight"], theirs["bert.embeddings.token_type_embeddings.weight"])
    assert found["classifier.weight"].shape == (3, 32) and not found["classifier.bias"].any()
    assert 0.01 < found["classifier.weight"].std() < 0.03 and 0.01 < found["pooler.weight"].std() < 0.03
    assert not {"transform.dense.weight", "head_bias.bias"} & found.keys()
    half = replace(config, mesh=MeshSection(tp=2))
    parts = [part for one in run_ranks(_first_weights, 2, half) for part in one]
    for name, values in assemble(parts).items():
        np.testing.assert_array_equal(values, found[name], err_msg=name)


def test_texts_of_a_row_share_the_only_type():
    """As RoBERTa's do; the rows of samples say 1 for the second text."""
    config = _config()
    section = replace(config.model.bert, token_types=1)
    config = replace(config, model=replace(config.model, bert=section))
    assert not check(config, 1, facts=None)
    one = _whole(config, 1)
    assert one["gradients"]["types.weight"].shape[0] == 1 and one["gradients"]["types.weight"].any()
    _check_same(_whole(replace(config, mesh=MeshSection(tp=2, sequence_parallel=True)), 2), one)


@pytest.mark.parametrize(
    ("bert", "data", "named"),
    [
        ({"task": "classify"}, {}, "name at least 2 classes"),
        ({"task": "masked", "labels": ()}, {}, 'does not fit model.bert.task="masked"'),
        ({"task": "choice", "labels": ()}, {}, "data.classify.choices is not set"),
        ({"task": "choice", "labels": LABELS}, {"classify": ClassifySamplesSection(choices=4)}, "leave them out"),
        ({"labels": ("a", "a")}, {}, "has a name twice"),
        ({}, {"order": "megatron"}, 'needs data.order="native"'),
    ],
)
def test_what_does_not_fit_is_named(bert, data, named):
    config = _config()
    section = replace(config.model.bert, **({"labels": ()} if bert == {"task": "classify"} else {}), **bert)
    config = replace(config, model=replace(config.model, bert=section), data=replace(config.data, **data))
    assert named in "\n".join(check(config, 1, facts=None))


def test_rows_of_other_families_are_named_once():
    config = _config()
    masked = replace(config.model, bert=BertSection())
    config = replace(config, model=masked, data=replace(config.data, kind="gpt", classify=None))
    assert [line for line in check(config, 1, facts=None) if 'data.kind="gpt"' in line] == [
        'data.kind="gpt" is not what model.family="bert" trains on; set data.kind="bert" or "classify", or '
        'model.family="gpt" or model.family="gpt_neox" or model.family="mamba"'
    ]


def test_the_settings_of_other_models_are_what_they_were():
    config = _config()
    masked = replace(config, model=replace(config.model, bert=BertSection()))
    assert "id2label" not in to_hf(masked, 250, model_type="megatron-bert")
    assert not {"bert.task", "bert.labels"} & family_of(masked).effective(masked).keys()
