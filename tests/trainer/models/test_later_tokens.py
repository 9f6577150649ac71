"""Multi-token prediction: what each depth predicts, its losses in every layout, what it counts, and what it refuses."""

from __future__ import annotations

import gc
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.helpers.examples import SOAK
from tests.helpers.ranks import run_ranks
from tests.trainer.engines import (
    SEQUENCE,
    assemble,
    check_same_gradients,
    layouts,
    microbatches,
    reduced,
    small_config,
    with_documents,
)
from trainer.config.sections import (
    MeshSection,
    MLASection,
    MoESection,
    MTPSection,
    RecomputeSection,
    RunConfig,
)
from trainer.models.family import family_of
from trainer.models.gpt.cost import flops_per_token
from trainer.models.gpt.memory import activation_bytes
from trainer.models.gpt.mtp import later_counts, later_tokens
from trainer.models.gpt.shape import gpt_shape
from trainer.models.stage import Microbatch
from trainer.parallel.collectives import Group
from trainer.parallel.params import Place, num_elements
from trainer.plan.check import check


def config_of(*, mesh: MeshSection | None = None, recompute: RecomputeSection | None = None, **model) -> RunConfig:
    config = small_config("llama", mesh=mesh or MeshSection(), recompute=recompute or RecomputeSection())
    given = {"mtp": MTPSection(num_layers=2, loss_factor=0.3)} | model
    return replace(config, model=replace(config.model, **given))


def _gradients(context, config, documents, average):
    engine = layouts(context, replace(config, train=replace(config.train, loss_average=average)))
    batches = microbatches(engine, 0)
    totals = engine.add_gradients(with_documents(batches) if documents else batches, own_means=average == "megatron")
    return totals.numpy(), reduced(engine)


def _whole(config, ranks=1, *, documents=False, average="token"):
    """(means of the losses of later tokens, gradients), of all ranks."""
    results = run_ranks(_gradients, ranks, config, documents, average)
    tp = config.mesh.tp
    totals = sum(totals for totals, _ in results) / tp
    means = [totals[at] / totals[at + 1] for at in (2, 4)]
    return means, assemble([part for _, parts in results for part in parts])


LAYOUTS = [
    (2, MeshSection(tp=2, sequence_parallel=True)),
    (2, MeshSection(tp=2)),
    (2, MeshSection(cp=2)),
    (4, MeshSection(pp=2)),
    (2, MeshSection(pp=2, schedule="zb_v")),
    (4, MeshSection(tp=2, cp=2, sequence_parallel=True)),
]


@pytest.mark.scaled
@pytest.mark.parametrize(
    ("documents", "tied", "average"), [(False, False, "megatron"), (True, True, "token")], ids=["rows", "documents"]
)
def test_every_layout_has_the_losses_and_gradients_of_one_rank(documents, tied, average):
    """Also where the first and the last stage are on one rank, as in zb_v, or each have a copy of the embedding."""
    how = {"documents": documents, "average": average}
    layers = {"num_layers": 4, "tie_embeddings": tied, "window": 5, "window_interval": 2}
    means, expected = _whole(config_of(**layers), **how)
    for ranks, mesh in LAYOUTS if SOAK > 1 else LAYOUTS[documents::2]:
        got_means, got = _whole(config_of(mesh=mesh, **layers), ranks, **how)
        assert got_means == pytest.approx(means, rel=1e-12), mesh
        check_same_gradients(got, expected)


EXPERTS = MoESection(
    num_experts=4, ffn_hidden_size=16, score="sigmoid", expert_bias=True, balance="none", layers=(0, 1),
    shared_ffn_hidden_size=16,
)  # fmt: skip
LATENT = MLASection(q_lora_rank=12, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)


def test_further_layers_with_experts_and_latents_in_every_layout():
    """DeepSeek-V3's form: experts where the last layer has them, also in further layers, over ep and pp."""
    model = {"moe": EXPERTS, "mla": LATENT, "head_dim": None, "num_kv_heads": None, "tie_embeddings": False}
    means, expected = _whole(config_of(**model))
    assert "mtp.1.block.mlp.experts.down.weight" in expected
    for ranks, mesh in (
        (2, MeshSection(ep=2)),
        (4, MeshSection(tp=2, pp=2, sequence_parallel=True)),
        (4, MeshSection(tp=2, ep=2, etp=1, pp=2, sequence_parallel=True)),
    ):
        got_means, got = _whole(config_of(mesh=mesh, **model), ranks)
        assert got_means == pytest.approx(means, rel=1e-12), mesh
        check_same_gradients(got, expected)


@pytest.mark.parametrize("documents", [False, True])
def test_microbatches_of_several_rows_change_nothing(documents):
    """Though their rows have different numbers of loss tokens."""
    config = config_of()
    means, expected = _whole(config, documents=documents)
    got_means, got = _whole(replace(config, train=replace(config.train, micro_batch=2)), documents=documents)
    assert got_means == pytest.approx(means, rel=1e-12)
    check_same_gradients(got, expected)


def _steps(context, config):
    engine = layouts(context, config)
    reports = [engine.step(microbatches(engine, step), 1e-2).read() for step in range(3)]
    return [(report.loss, report.grad_norm, *report.named_losses.values()) for report in reports]


def test_steps_with_divided_parameters_are_those_of_one_rank():
    model = {"moe": EXPERTS, "mla": LATENT, "head_dim": None, "num_kv_heads": None, "tie_embeddings": False}
    (expected,) = run_ranks(_steps, 1, config_of(**model))
    config = config_of(mesh=MeshSection(ep=2), **model)
    config = replace(config, optimizer=replace(config.optimizer, sharding="parameters"))
    for found in run_ranks(_steps, 2, config):
        np.testing.assert_allclose(found, expected, rtol=1e-10)


def test_recomputation_changes_no_bit():
    means, expected = _whole(config_of())
    for recompute in (RecomputeSection(mode="selective"), RecomputeSection(mode="full")):
        got_means, got = _whole(config_of(recompute=recompute))
        assert got_means == means
        for name, reference in expected.items():
            np.testing.assert_array_equal(got[name], reference, err_msg=f"{name} {recompute}")


def _twin(context, documents, average):
    """The objective as a plain formula, with the model's own blocks: (of each depth sums and counts, gradients)."""
    engine = layouts(context, config_of())
    model, total, further = engine.model, 0.0, ([], [])
    batches = microbatches(engine, 0)
    for batch in with_documents(batches) if documents else batches:
        x, branch = model._through_blocks((), batch)
        _, h = model.final_norm(x, branch)
        bounds = batch.bounds.tolist() if documents else [0, SEQUENCE]
        n = batch.loss_mask_BS.double().sum()
        own = F.cross_entropy(h @ model.head.weight[:250].T, batch.labels_BS[0], reduction="none")
        total = total + (own * batch.loss_mask_BS[0]).sum() / (n if average == "megatron" else 1)
        for k, depth in enumerate(model.mtp.values(), 1):
            tokens, labels, mask = torch.zeros(3, SEQUENCE, dtype=torch.float64)
            for first, stop in itertools.pairwise(bounds):
                for at in range(first, stop - k):
                    tokens[at], labels[at], mask[at] = (
                        x[0, at + k] for x in (batch.tokens_BS, batch.labels_BS, batch.loss_mask_BS)
                    )
            h = model._deepen(depth, model._context(batch), model.embedding(tokens.long()), h)
            losses = F.cross_entropy(h @ model.head.weight[:250].T, labels.long(), reduction="none")
            further[k - 1].append(((losses * mask).sum(), mask.sum()))
    means = []
    for of_depth in further:
        if average == "megatron":  # of the means of microbatches
            of_depth = [(one / count, 1) for one, count in of_depth]
        one, count = map(sum, zip(*of_depth, strict=True))
        means.append((one / count).item())
        n = sum(batch.loss_mask_BS.double().sum() for batch in batches) if average == "token" else len(batches)
        total = total + 0.3 / 2 * n * one / count
    total.backward()
    return means, model.head.weight.grad[:250].numpy(), reduced(engine)


@pytest.mark.parametrize(("documents", "average"), [(False, "megatron"), (True, "token")])
def test_the_objective_is_the_mean_of_each_depth(documents, average):
    """One microbatch after the other: means of masked losses of the step, times factor / depths and tokens."""
    ((told, of_head, parts),) = run_ranks(_twin, 1, documents, average)
    means, expected = _whole(config_of(), documents=documents, average=average)
    assert means == pytest.approx(told, rel=1e-10)
    check_same_gradients(expected, assemble(parts) | {"head.weight": of_head})


def test_tokens_of_a_depth_are_those_of_the_same_document():
    tokens = torch.arange(1, 9).view(1, 8)
    mask = torch.tensor([[1.0, 1, 1, 0, 1, 1, 1, 1]])
    batch = Microbatch(
        tokens_BS=tokens,
        labels_BS=tokens + 1,
        loss_mask_BS=mask,
        bounds=torch.tensor([0, 3, 8], dtype=torch.int32),
        longest=5,
    )
    one, two = later_tokens(batch, ("mtp_1", "mtp_2"), factor=0.5, cp=Group.single("cp"))
    assert one.tokens_N.tolist() == [2, 3, 0, 5, 6, 7, 8, 0]
    assert two.labels_N.tolist() == [4, 0, 0, 7, 8, 9, 0, 0]
    assert (two.weight_N > 0).tolist() == [True, False, False, True, True, True, False, False]
    assert one.weight_N.sum() == pytest.approx(0.25 * 7)
    assert [float(count) for count in later_counts(batch, 2, cp=Group.single("cp"))] == [6, 4]
    nothing = replace(batch, bounds=torch.arange(9, dtype=torch.int32))
    later = later_tokens(nothing, ("mtp_1", "mtp_2"), factor=1, cp=Group.single("cp"))
    assert not any(x.weight_N.any() for x in later)


def _with_own_loss(context):
    """Gradients with the model's loss, and with one like it of a user."""

    def loss(logits_BSV, batch):
        losses_N = F.cross_entropy(logits_BSV.flatten(0, 1), batch.labels_BS.flatten(), reduction="none")
        return (losses_N * batch.loss_mask_BS.flatten()).sum()

    found = []
    for own in (None, loss):
        engine = layouts(context, config_of(), loss=own)
        engine.add_gradients(microbatches(engine, 0))
        found.append(assemble(reduced(engine)))
    return found


def test_a_loss_of_a_user_is_beside_those_of_later_tokens():
    ((expected, got),) = run_ranks(_with_own_loss, 1)
    check_same_gradients(got, expected)


def _evaluated(context):
    engine = layouts(context, config_of())
    before = engine.evaluate(microbatches(engine, 0))
    report = engine.step(microbatches(engine, 0), 1e-3).read()
    return before, report.loss, dict(report.named_losses)


def test_losses_of_later_tokens_are_reported_apart():
    ((before, loss, named),) = run_ranks(_evaluated, 1)
    assert loss == pytest.approx(before, rel=1e-12)
    assert list(named) == ["mtp_1", "mtp_2"] and all(value > 4 for value in named.values())


def _kept(context, config):
    """Bytes that a forward pass with its losses leaves for backward."""
    engine = layouts(context, config)
    batch = replace(microbatches(engine, 0)[0], losses={})
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        outputs = engine.model((), batch)
    assert outputs[0].requires_grad
    return sum(event.self_cpu_memory_usage for event in profile.events())


@pytest.mark.parametrize("mode", ["none", "full"])
def test_memory_of_further_layers(mode):
    recompute = RecomputeSection(mode=mode)
    how = {"tokens": SEQUENCE, "element": 8, "recompute": recompute}
    configs = [config_of(recompute=recompute, mtp=mtp) for mtp in (MTPSection(num_layers=2), None)]
    measured = [run_ranks(_kept, 1, config)[0] for config in configs]
    told = [activation_bytes(gpt_shape(config, 250), Place(), **how) for config in configs]
    assert told[0] - told[1] == pytest.approx(measured[0] - measured[1], rel=0.05)


def test_numbers():
    config = config_of()
    shape, family = gpt_shape(config, 250), family_of(config)
    plain = replace(shape, mtp_layers=0)
    specs = family.parameters(shape, Place())
    own = [spec for spec in specs if spec.name.startswith("mtp.0.")]
    block = [spec for spec in specs if spec.name.startswith("blocks.0.")]
    assert num_elements(own) == num_elements(block) + 2 * 32 * 32 + 3 * 32
    more = flops_per_token(shape, (16,)) - flops_per_token(plain, (16,))
    assert more == 2 * (6 * (num_elements(own) + 250 * 32) + 12 * 4 * 8 * 16)
    last, first = Place(stage=1, num_stages=2), Place(stage=0, num_stages=2)
    how = {"tokens": 16, "document_lengths": (16,), "element": 2, "recompute": RecomputeSection()}
    costs = [family.stage_cost(shape, place, **how) for place in (first, last)]
    assert costs[0] == family.stage_cost(plain, first, **how)
    assert costs[1].product_flops - family.stage_cost(plain, last, **how).product_flops == pytest.approx(
        2 * 16 * 6 * (num_elements(own) - 5 * 32 + 256 * 32)
    )
    place = Place(stage=1, num_stages=2, tp_size=2, sequence_parallel=True)
    full = how | {"recompute": RecomputeSection(mode="full")}
    found, without = (family.stage_cost(of, place, **full) for of in (shape, plain))
    assert (
        found.sent_bytes == 3 * without.sent_bytes and found.passes == 3 * without.passes
    )  # 3 blocks, one of the model
    names = {spec.name: spec for spec in family.parameters(shape, last)}
    assert names["embedding.weight"].partial == ("ends",) and "head.weight" in names


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ({"position": "learned"}, 'model.position="learned" cannot be used with [model.mtp]'),
        ({"mtp": MTPSection(num_layers=16)}, "leaves no token of train.sequence_length=16"),
        ({"family": "gpt_neox"}, '[model.mtp] is for model.family="gpt"'),
        ({"hidden_size": 33, "head_dim": 8}, "model.hidden_size=33 is not a multiple of mesh.tp=2"),
    ],
)
def test_wrong_keys_are_refused(model, problem):
    found = check(config_of(mesh=MeshSection(tp=2), **model), 2, facts=None)
    assert any(problem in line for line in found), found
