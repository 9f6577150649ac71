"""BERT: its layouts, both places of norms, its heads and losses, its sizes. Megatron's numbers: tests/oracles."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from tests.helpers.examples import examples
from tests.helpers.ranks import run_ranks
from tests.trainer.engines import (
    GLOBAL_BATCH,
    SEQUENCE,
    assemble,
    check_same_gradients,
    layouts,
    logical,
    on_device,
    reduced,
    small_config,
)
from trainer.config.presets import PRESETS
from trainer.config.sections import (
    BertSamplesSection,
    BertSection,
    DataSection,
    LoRASection,
    MeshSection,
    MoESection,
    MTPSection,
    OptimizerSection,
    RecomputeSection,
)
from trainer.convert.model_keys import model_config
from trainer.layers.embedding import VocabularyEmbedding
from trainer.layers.head import VocabularyBias, head_loss
from trainer.models.bert.model import Bert
from trainer.models.family import family_of
from trainer.models.stage import Microbatch
from trainer.parallel.collectives import Group, all_reduce_
from trainer.parallel.params import Place, num_elements
from trainer.plan.check import check
from trainer.run.data import real_tokens

SOAK = pytest.mark.soak
PUBLISHED = {  # elements of the tensors of presets
    "bert-base": 110_106_428,
    "bert-large": 336_226_108,
    "megatron-bert-345m": 334_723_458,
    "megatron-bert-1.3b": 1_277_591_938,
}
LAYOUTS = [
    (4, {"tp": 2, "pp": 2, "sequence_parallel": True}, "state"),
    (2, {}, "parameters"),
    pytest.param(2, {"tp": 2}, "state", marks=SOAK),
    pytest.param(2, {"tp": 2, "sequence_parallel": True}, "none", marks=SOAK),
    pytest.param(2, {"pp": 2}, "state", marks=SOAK),
    pytest.param(2, {"pp": 2, "schedule": "zb_h1"}, "state", marks=SOAK),
    pytest.param(2, {"pp": 2, "schedule": "zb_v"}, "gradients", marks=SOAK),
    pytest.param(2, {"pp": 2, "schedule": "interleaved"}, "state", marks=SOAK),
    pytest.param(4, {"tp": 2, "pp": 2}, "gradients", marks=SOAK),
    pytest.param(4, {"tp": 2, "sequence_parallel": True}, "parameters", marks=SOAK),
    pytest.param(4, {"tp": 4, "sequence_parallel": True}, "state", marks=SOAK),
    pytest.param(8, {"tp": 2, "pp": 2, "sequence_parallel": True}, "gradients", marks=SOAK),
]


def _config(*, norm="pre", average="token", recompute="none", dropout=0.0, sharding="state", head=True, **mesh):
    config = small_config("gpt2", optimizer=OptimizerSection(lr=1e-2, sharding=sharding))
    section = BertSection(norm=norm, binary_head=head)
    model = replace(config.model, family="bert", bert=section, num_layers=4, activation="gelu_erf")
    model = replace(model, attention_dropout=dropout, hidden_dropout=dropout)
    return replace(
        config,
        model=model,
        data=DataSection(blend="unused", kind="bert", bert=BertSamplesSection(head=head)),
        train=replace(config.train, loss_average=average),
        mesh=MeshSection(**mesh),
        recompute=RecomputeSection(mode=recompute),
    )


def _rows(step, batch=GLOBAL_BATCH):
    """A global batch of pairs whose rows have different lengths, masked tokens and weights."""
    generator = np.random.default_rng(step)
    shape = (batch, SEQUENCE)
    tokens, labels = (torch.from_numpy(generator.integers(0, 250, shape)) for _ in range(2))
    lengths = torch.from_numpy(generator.integers(4, SEQUENCE + 1, batch)).int()
    real = torch.arange(SEQUENCE) < lengths[:, None]
    mask = torch.from_numpy((generator.random(shape) < 0.3).astype(np.float32)) * real
    types = (torch.arange(SEQUENCE) >= lengths[:, None] // 2).long() * real
    swapped = torch.from_numpy(generator.integers(0, 2, batch))
    return Microbatch(
        tokens_BS=tokens,
        labels_BS=labels,
        loss_mask_BS=mask,
        lengths_B=lengths,
        types_BS=types,
        swapped_B=swapped,
        samples_B=torch.arange(batch) + step * batch,
    )


def _microbatches(engine, step, multiple=0):
    """This rank's part of a global batch; without padding if the multiple of tokens is told."""
    plan, dp = engine.plan, engine.dp
    whole, fields = _rows(step, plan.global_batch), ("tokens_BS", "labels_BS", "loss_mask_BS", "lengths_B", "types_BS")
    parts = [
        replace(whole, **{name: getattr(whole, name)[rows] for name in (*fields, "swapped_B", "samples_B")})
        for rows in torch.arange(plan.global_batch).view(plan.num_microbatches, dp.size, -1)[:, dp.rank]
    ]
    return [on_device(_packed(part, multiple) if multiple else part, engine.world.device) for part in parts]


def _packed(batch, multiple):
    """The microbatch with its real tokens told."""
    told = real_tokens(batch.lengths_B.numpy(), SEQUENCE, multiple, torch.device("cpu"))
    assert told is None or len(told.flat_M) % multiple == 0
    return replace(batch, real=told)


def _gradients(context, config, multiple=0):
    """Reduced gradients of one step, its totals, and what three steps report and make of the weights."""
    engine = layouts(context, config)
    totals = engine.add_gradients(_microbatches(engine, 0, multiple), own_means=config.train.loss_average == "megatron")
    gradients = reduced(engine)
    for axis in ("data", "pp"):
        all_reduce_(totals, engine.world.groups[axis])
    engine.buffers.forget()
    reports = [engine.step(_microbatches(engine, step, multiple), 1e-2).read() for step in range(3)]
    weights = logical(engine.optimizer.owned, engine.optimizer.state["weight"])
    numbers = [(report.loss, report.grad_norm, *report.named_losses.values()) for report in reports]
    return {"gradients": gradients, "weights": weights, "numbers": numbers, "totals": totals.tolist()}


def _whole(config, ranks, *multiple):
    results = run_ranks(_gradients, ranks, config, *multiple)
    whole = {key: assemble([part for one in results for part in one[key]]) for key in ("gradients", "weights")}
    return {**results[0], **whole}


@functools.cache
def _alone(**options):
    return _whole(_config(**options), 1)


def _check_same(got, expected):
    check_same_gradients(got["gradients"], expected["gradients"])
    np.testing.assert_allclose(got["totals"], expected["totals"], rtol=1e-12)
    np.testing.assert_allclose(got["numbers"], expected["numbers"], rtol=1e-9)
    for name, values in expected["weights"].items():
        np.testing.assert_allclose(got["weights"][name], values, rtol=1e-7, atol=1e-9, err_msg=name)


@pytest.mark.parametrize(
    ("norm", "average"),
    [
        ("post", "megatron"),
        *(pytest.param(*x, marks=SOAK) for x in (("pre", "token"), ("pre", "megatron"), ("post", "token"))),
    ],
)
@pytest.mark.parametrize(("ranks", "mesh", "sharding"), LAYOUTS)
def test_a_layout_changes_nothing(ranks, mesh, sharding, norm, average):
    got = _whole(_config(norm=norm, average=average, sharding=sharding, **mesh), ranks)
    _check_same(got, _alone(norm=norm, average=average))


@pytest.mark.parametrize("norm", [pytest.param("pre", marks=SOAK), "post"])
@pytest.mark.parametrize(
    ("ranks", "mesh"), [(2, {"tp": 2, "sequence_parallel": True}), pytest.param(2, {"pp": 2}, marks=SOAK)]
)
def test_dropout_and_recomputation_are_independent_of_the_layout(ranks, mesh, norm):
    expected = _alone(norm=norm, dropout=0.2)
    assert expected["numbers"] != _alone(norm=norm)["numbers"]
    _check_same(_whole(_config(norm=norm, dropout=0.2, recompute="full", **mesh), ranks), expected)
    _check_same(_whole(_config(norm=norm, recompute="selective"), 1), _alone(norm=norm))


@pytest.mark.parametrize(
    ("ranks", "mesh", "norm"),
    [
        (4, {"tp": 2, "pp": 2, "sequence_parallel": True}, "post"),
        pytest.param(1, {}, "post", marks=SOAK),
        pytest.param(2, {"tp": 2}, "pre", marks=SOAK),
        pytest.param(4, {"pp": 2, "schedule": "interleaved"}, "pre", marks=SOAK),
    ],
)
def test_padding_can_be_left_out_in_every_layout(ranks, mesh, norm):
    """Microbatches of other sizes, with dropout of the same features."""
    plain, divided = (_config(norm=norm, dropout=0.2, **own) for own in ({}, mesh))
    plain, divided = (replace(x, model=replace(x.model, attention_dropout=0.0)) for x in (plain, divided))
    _check_same(_whole(divided, ranks, 2), _whole(plain, 1))


def test_without_padding_the_length_of_rows_decides_about_rotations():
    """Not the number of real tokens, which are one row for the blocks: with longrope angles depend on the length."""
    factors = {"rope_short_factors": (1.0, 1.5, 2.0, 3.0), "rope_long_factors": (2.0, 4.0, 5.0, 6.0)}
    rope = {"position": "rope", "rope_scaling": "longrope", "rope_factor": 2.0, "rope_original_length": SEQUENCE}
    config = _config()
    config = replace(config, model=replace(config.model, **rope, **factors))
    config = replace(config, train=replace(config.train, micro_batch=GLOBAL_BATCH))
    _check_same(_whole(config, 1, 2), _whole(config, 1))


def test_a_model_without_pairs_has_neither_types_nor_their_loss():
    got = _alone(head=False)
    assert not [name for name in got["weights"] if name.startswith(("types", "pooler", "binary_head"))]
    assert len(got["numbers"][0]) == 2 and len(got["totals"]) == 2


def _model(**options):
    config = _config(**options)
    family = family_of(config)
    built = family.build(
        family.shape(config, 250),
        Place(),
        groups={"tp": Group.single("tp")},
        dtype=torch.float64,
        device=torch.device("cpu"),
    )
    torch.manual_seed(0)
    for parameter in built.parameters():
        parameter.data.normal_(std=0.2)
    return built


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_the_head_of_masked_tokens_is_that_of_all(norm):
    model, batch = _model(norm=norm), replace(_rows(0), losses={})
    logits = model.whole_logits(batch)
    every = F.cross_entropy(logits.flatten(0, 1), batch.labels_BS.flatten(), reduction="none")
    expected = (every * batch.loss_mask_BS.flatten()).sum()
    names, values = zip(*model.named_parameters(), strict=True)
    wanted = torch.autograd.grad(expected, values, allow_unused=True)
    loss, losses_N = model((), batch)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(losses_N, every.detach() * batch.loss_mask_BS.flatten())
    for name, got, gradient in zip(names, torch.autograd.grad(loss, values, allow_unused=True), wanted, strict=True):
        assert (got is None) == (gradient is None), name
        if got is not None:
            torch.testing.assert_close(got, gradient, msg=name)


def test_tokens_that_the_host_told_are_those_of_the_mask():
    model, batch = _model(), replace(_rows(0), losses={})
    masked = batch.loss_mask_BS.flatten().nonzero().squeeze(1)
    others = (batch.loss_mask_BS.flatten() == 0).nonzero().squeeze(1)
    told = replace(batch, predicted_M=torch.cat((masked, others[:5])).sort().values)
    results = [model((), each) for each in (batch, told)]
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)
    names, values = zip(*model.named_parameters(), strict=True)
    gradients = [torch.autograd.grad(loss, values, allow_unused=True) for loss, _ in results]
    for name, *both in zip(names, *gradients, strict=True):
        if both[0] is not None or both[1] is not None:
            torch.testing.assert_close(*both, rtol=1e-10, atol=1e-12, msg=name)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(model((), replace(batch, predicted_M=masked[1:]))[0], results[0][0])


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_model_without_padding_is_that_of_padded_rows(norm):
    """Losses of tokens and pairs, logits of real tokens, and every gradient."""
    model, results = _model(norm=norm), []
    names, values = zip(*model.named_parameters(), strict=True)
    padded = _rows(3)
    packed = _packed(padded, 16)
    for batch in (padded, packed):
        losses = {}
        loss, losses_N = model((), replace(batch, losses=losses))
        gradients = torch.autograd.grad(loss + losses["sop"].sum, values)
        real = torch.arange(SEQUENCE) < batch.lengths_B[:, None]
        results.append((loss, losses_N, losses["sop"].sum, model.whole_logits(batch)[real], *gradients))
        assert len(model._stream(batch)[0]) == (GLOBAL_BATCH * SEQUENCE if batch is padded else len(packed.real.flat_M))
    for name, expected, got in zip(["loss", "losses", "sop", "logits", *names], *results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12, msg=name)
    other = torch.where(torch.arange(SEQUENCE) < padded.lengths_B[:, None], padded.tokens_BS, 7)
    assert torch.equal(model((), replace(packed, tokens_BS=other, losses={}))[0], results[1][0])


def test_rows_without_padding_are_whole_ones():
    told = functools.partial(real_tokens, length=SEQUENCE, device=torch.device("cpu"))
    assert told(np.array([SEQUENCE] * 3), multiple=8) is None
    assert told(np.array([SEQUENCE, SEQUENCE - 1]), multiple=8) is None, "one more token completes the rows"
    flat, bounds, longest = told(np.array([3, SEQUENCE - 2, 2]), multiple=8)
    places = [*range(3), *range(SEQUENCE, 2 * SEQUENCE - 2), 2 * SEQUENCE, 2 * SEQUENCE + 1]
    assert flat[: len(places)].tolist() == places and len(set(flat.tolist())) == len(flat) == -len(places) % 8 + len(
        places
    )
    assert bounds.tolist() == [0, 3, SEQUENCE + 1, SEQUENCE + 3, len(flat)] and longest == SEQUENCE - 2


@examples(60)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=9),
    multiple=st.sampled_from([1, 4, 8, 30]),
    few_sizes=st.booleans(),
)
def test_real_tokens_are_rows_and_parts_of_padding_that_are_no_longer(lengths, multiple, few_sizes):
    length, device = 12, torch.device("cpu")
    told = real_tokens(np.array(lengths), length, multiple, device, few_sizes=few_sizes)
    if told is None:
        return
    flat, bounds, longest = told
    rows = [range(row * length, row * length + tokens) for row, tokens in enumerate(lengths)]
    real = [place for row in rows for place in row]
    assert flat.tolist()[: len(real)] == real and len(set(flat.tolist())) == len(flat)
    assert len(flat) % multiple == 0 and len(flat) < len(lengths) * length
    sizes = np.diff(bounds).tolist()
    assert sizes[: len(rows)] == list(map(len, rows)) and bounds[0] == 0 and bounds[-1] == len(flat)
    assert max(sizes) <= longest <= length and min(sizes) >= 0
    if few_sizes:  # shapes and numbers that a recording depends on
        fewer = real_tokens(np.array(lengths) - (np.array(lengths) > 1), length, multiple, device, few_sizes=True)
        assert fewer is None or (fewer.longest, len(fewer.bounds)) == (longest, len(bounds))


def test_a_users_loss_gets_the_logits_of_all_tokens_and_the_fields_of_its_kind():
    model, batch = _model(), replace(_rows(0), losses={})
    own, _ = model((), batch)
    wanted = torch.autograd.grad(own, model.types.weight)

    def loss(logits, given):
        assert logits.shape == (GLOBAL_BATCH, SEQUENCE, 250) and given.types_BS is batch.types_BS
        each = F.cross_entropy(logits.flatten(0, 1), given.labels_BS.flatten(), reduction="none")
        return each.view(given.labels_BS.shape) * given.loss_mask_BS

    model.loss_function = loss
    total, losses_N = model((), batch)
    torch.testing.assert_close(total, own)
    torch.testing.assert_close(torch.autograd.grad(total, model.types.weight), wanted)
    assert len(losses_N) == GLOBAL_BATCH * SEQUENCE and batch.losses["sop"].weight == GLOBAL_BATCH


def test_a_batch_without_masked_tokens_has_loss_0():
    batch = _rows(0)
    loss, losses_N = _model()((), replace(batch, loss_mask_BS=torch.zeros_like(batch.loss_mask_BS)))
    loss.backward()
    assert loss.item() == 0 and not losses_N.any()


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_padding_is_not_seen(norm):
    model, batch = _model(norm=norm), _rows(1)
    other = torch.where(torch.arange(SEQUENCE) < batch.lengths_B[:, None], batch.tokens_BS, 7)
    assert not torch.equal(other, batch.tokens_BS)
    seen, again = (model.whole_logits(replace(batch, tokens_BS=x)) for x in (batch.tokens_BS, other))
    for row, length in enumerate(batch.lengths_B):
        torch.testing.assert_close(seen[row, :length], again[row, :length])
        cut = {name: getattr(batch, name)[row : row + 1, :length] for name in ("tokens_BS", "types_BS")}
        alone = model.whole_logits(replace(batch, lengths_B=None, **cut))
        torch.testing.assert_close(alone[0], seen[row, :length])


def _plain(model, batch):
    """The original's arithmetic in a few lines: logits of tokens, and of pairs."""
    shape, W = model.shape, dict(model.named_parameters())
    width, heads = shape.hidden_size, shape.num_heads

    def linear(x, name):
        return F.linear(x, W[f"{name}.weight"], W[f"{name}.bias"])

    def norm(x, name):
        return F.layer_norm(x, (width,), W[f"{name}.weight"], W[f"{name}.bias"], shape.norm_epsilon)

    post, length = shape.is_post_norm, batch.tokens_BS.shape[1]
    x = W["embedding.weight"][batch.tokens_BS] + W["positions.weight"][:length] + W["types.weight"][batch.types_BS]
    x = norm(x, "embedding_norm") if post else x
    real = (torch.arange(length) < batch.lengths_B[:, None])[:, None, None]
    for i in range(shape.num_layers):
        block = f"blocks.{i}"
        y = x if post else norm(x, f"{block}.attention_norm")
        q, k, v = linear(y, f"{block}.attention.qkv").unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=real).transpose(1, 2).flatten(2)
        x = x + linear(y, f"{block}.attention.out")
        x = norm(x, f"{block}.attention_out_norm") if post else x
        y = x if post else norm(x, f"{block}.mlp_norm")
        x = x + linear(F.gelu(linear(y, f"{block}.mlp.up")), f"{block}.mlp.down")
        x = norm(x, f"{block}.mlp_out_norm") if post else x
    x = x if post else norm(x, "final_norm")
    y = norm(F.gelu(linear(x, "transform.dense")), "transform.norm")
    logits = y @ W["embedding.weight"][:250].t() + W["head_bias.bias"][:250]
    return logits, linear(linear(x[:, 0], "pooler").tanh(), "binary_head")


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_both_places_of_norms_are_the_plain_arithmetic(norm):
    model, batch = _model(norm=norm), _rows(2)
    logits, pairs = _plain(model, batch)
    torch.testing.assert_close(model.whole_logits(batch), logits)
    torch.testing.assert_close(model.pair_logits(batch), pairs)
    named = {}
    model((), replace(batch, losses=named))
    torch.testing.assert_close(named["sop"].sum, F.cross_entropy(pairs, batch.swapped_B, reduction="sum"))
    named = {}
    ignored = batch.swapped_B.clone()
    ignored[0] = -1
    model((), replace(batch, losses=named, swapped_B=ignored))
    assert named["sop"].weight == GLOBAL_BATCH - 1


def _objective(context, config):
    """The step's objective as the definition says, and its gradient of the binary head, against the engine's."""
    engine = layouts(context, config)
    engine.add_gradients(_microbatches(engine, 0), own_means=config.train.loss_average == "megatron")
    held = dict(engine.model.named_parameters())
    stage = engine.executor.stages[0]
    plain, rows = _model(), _rows(0)
    for name, parameter in plain.named_parameters():
        parameter.data.copy_(held[name].data)
    assert isinstance(stage, Bert)
    if config.train.loss_average == "token":
        logits, pairs = _plain(plain, rows)
        each = F.cross_entropy(logits.flatten(0, 1), rows.labels_BS.flatten(), reduction="none")
        mask = rows.loss_mask_BS.flatten()
        value, divisor = (each * mask).sum() / mask.sum() + F.cross_entropy(pairs, rows.swapped_B), mask.sum()
    else:
        value, divisor = 0.0, GLOBAL_BATCH
        for batch in (on_device(x, torch.device("cpu")) for x in _microbatches(engine, 0)):
            logits, pairs = _plain(plain, batch)
            each = F.cross_entropy(logits[0], batch.labels_BS[0], reduction="none")
            mean = (each * batch.loss_mask_BS[0]).sum() / batch.loss_mask_BS[0].sum()
            value = value + (mean + F.cross_entropy(pairs, batch.swapped_B)) / GLOBAL_BATCH
    value.backward()
    mine = assemble(reduced(engine, divisor))
    return mine, {name: parameter.grad for name, parameter in plain.named_parameters()}


@pytest.mark.parametrize("average", ["token", "megatron"])
def test_the_gradient_is_that_of_the_means_of_tokens_and_pairs(average):
    ((mine, wanted),) = run_ranks(_objective, 1, _config(average=average))
    for name in ("binary_head.weight", "pooler.bias", "types.weight", "transform.dense.weight", "positions.weight"):
        np.testing.assert_allclose(mine[name], wanted[name], rtol=1e-9, atol=1e-12, err_msg=name)
    np.testing.assert_allclose(mine["embedding.weight"], wanted["embedding.weight"][:250], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(mine["head_bias.bias"], wanted["head_bias.bias"][:250], rtol=1e-9, atol=1e-12)


def test_the_bias_of_logits_without_main_gradients():
    torch.manual_seed(1)
    model = _model()
    rows, bias = model.embedding, model.head_bias
    assert isinstance(rows, VocabularyEmbedding) and isinstance(bias, VocabularyBias)
    x = torch.randn(7, 32, dtype=torch.float64, requires_grad=True)
    labels, weight = torch.arange(7) * 3, torch.rand(7, dtype=torch.float64)
    loss, _ = head_loss(x, rows, labels_N=labels, weight_N=weight, kernels=model.kernels, chunk_tokens=3, bias=bias)
    logits = F.linear(x, rows.weight[:250], bias.bias[:250])
    expected = (F.cross_entropy(logits, labels, reduction="none") * weight).sum()
    leaves = (x, rows.weight, bias.bias)
    for got, wanted in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(got, wanted)


def test_presets_have_the_published_number_of_parameters():
    assert {name for name, keys in PRESETS.items() if keys.get("family") == "bert"} == PUBLISHED.keys()
    for name, count in PUBLISHED.items():
        config = model_config({"preset": name}, where="", context=512)
        shape = family_of(config).shape(config, config.model.vocab_size)
        assert num_elements(family_of(config).parameters(shape, Place())) == count, name
        assert check(config, 1, facts=None) == []


def test_operations_are_those_of_both_sides_and_of_masked_tokens():
    config = model_config({"preset": "bert-base"}, where="", context=512)
    family = family_of(config)
    shape = family.shape(config, 30522)
    blocks = 12 * (8 * 768**2 + 4 * 768 * 3072 + 4 * 512 * 768)
    biases = 12 * 2 * 0
    head = 0.15 * (2 * 768**2 + 2 * 768 * 30522)
    assert family.flops_per_token(shape, (512,)) == pytest.approx(3 * (blocks + biases + head), rel=1e-9)
    causal = replace(shape, scores=replace(shape.scores, causal=True))
    how = {"tokens": 512, "document_lengths": (512,), "element": 2, "recompute": RecomputeSection()}
    both, half = (family.stage_cost(x, Place(), **how).attention_flops for x in (shape, causal))
    assert both == pytest.approx(2 * half, rel=1e-9)


@pytest.mark.parametrize(
    ("changes", "mesh", "named"),
    [
        ({"window": 4}, {}, "model.window=4 has no meaning"),
        ({"position": "alibi"}, {}, 'model.position="alibi" has no form for tokens on both sides'),
        ({"block_norm": "output"}, {}, 'model.bert.norm="post" is where sums are normalized'),
        ({"tie_embeddings": False}, {}, "model.tie_embeddings=false has no meaning"),
        ({"activation": "relu"}, {}, 'the head cannot use model.activation="relu"'),
        ({"bert": BertSection(token_types=1)}, {}, "model.bert.token_types=1 gives both texts of a pair the same type"),
        ({}, {"cp": 2}, "mesh.cp=2 divides rows for causal attention"),
    ],
)
def test_what_an_encoder_lacks_is_refused_by_name(changes, mesh, named):
    config = _config(**mesh)
    problems = [*family_of(config).problems(replace(config, model=replace(config.model, **changes)))]
    assert len(problems) == 1 and named in problems[0]
    gpt = replace(config, model=replace(config.model, family="gpt"))
    assert any('[model.bert] is for model.family="bert"' in line for line in check(gpt, 1, facts=None))


@pytest.mark.parametrize(
    "foreign",
    [{"lora": LoRASection(rank=4)}, {"mtp": MTPSection(num_layers=1)}, {"moe": MoESection(num_experts=8, top_k=64)}],
)
def test_a_section_of_another_family_is_one_problem(foreign):
    config = _config()
    before = check(config, 1, facts=None)
    after = check(replace(config, model=replace(config.model, **foreign)), 1, facts=None)
    (problem,) = [problem for problem in after if problem not in before]
    assert problem.startswith(f"[model.{next(iter(foreign))}] is for model.family=")


def test_another_place_of_norms_is_another_model():
    pre, post = (_config(norm=norm) for norm in ("pre", "post"))
    family = family_of(pre)
    keys = [family.function(family.shape(config, 250)) for config in (pre, post)]
    assert {name for name in keys[0] if keys[0][name] != keys[1][name]} == {"bert.norm"}
    assert family.effective(_config(head=False))["bert.token_types"] == 0


def test_a_head_for_pairs_needs_pairs():
    config = _config()
    single = replace(config, data=replace(config.data, bert=BertSamplesSection(head=False)))
    (problem,) = family_of(config).problems(single)
    assert "data.bert.head=false makes rows of one text" in problem
    shape = family_of(config).shape(
        replace(config, data=replace(config.data, bert=BertSamplesSection(mask_probability=0.3))), 250
    )
    assert shape.predicted == 0.3
