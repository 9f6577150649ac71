"""Logits, losses and gradients of Megatron's own models: every decoder-only variant without experts."""

from __future__ import annotations

import json

import pytest
import torch

from tests.trainer.engines import microbatch, small_config
from tests.trainer.models.megatron import fill, load, ours, shape_of
from trainer.arithmetic import round_up
from trainer.config.sections import RecomputeSection
from trainer.layers.rope import frequencies
from trainer.layers.shapes import RopeShape
from trainer.models.gpt.model import GPT, build_gpt
from trainer.parallel.collectives import Group
from trainer.parallel.params import Place

COVERED = (
    "gpt_fused_bias_gelu",
    "gpt_geglu_biases",
    "gpt_gelu_tanh",
    "gpt_grouped_query_bias",
    "gpt_kv_channels_12",
    "gpt_multi_query",
    "gpt_no_positions",
    "gpt_qk_layer_scaling",
    "gpt_qk_layernorm",
    "gpt_relu",
    "gpt_rmsnorm_learned",
    "gpt_rope_biases",
    "gpt_squared_relu",
    "gpt_untied",
    "llama_fused_swiglu",
    "llama_multi_query",
    "llama_no_rope_every_2nd",
    "llama_qk_rmsnorm",
    "llama_qkv_bias_only",
    "llama_rope_interleaved",
    "llama_rope_interpolation_4",
    "llama_rope_llama3_scaling",
    "llama_rope_partial_50",
    "llama_sliding_window_8",
    "llama_sliding_window_every_2nd_full",
    "llama_softmax_learnable_sink",
    "llama_softmax_off_by_one",
    "llama_softmax_scale",
    "llama_swiglu_clamped",
    "llama_tied",
)
NOT_COVERED = {
    "bert_": "an encoder with another loss: a family of its own",
    "moe_": "mixture of experts",
    "t5_": "an encoder and a decoder: a family of its own",
}
CASES = ("case_gpt2", "case_llama")


def _model(shape, weights, **options) -> GPT:
    groups, device = {"tp": Group.single("tp")}, torch.device("cpu")
    model = build_gpt(shape, Place(), groups=groups, dtype=torch.float32, device=device, **options)
    fill(model, weights)
    return model


def _run(model, tokens, labels, mask):
    """(logits, losses' sum, losses of tokens); gradients of the mean are left in the parameters."""
    with torch.no_grad():
        logits = model.logits(tokens)[..., : model.shape.vocab_size]
    loss, losses_N = model((), microbatch(tokens, labels, mask))
    (loss / mask.sum()).backward()
    return logits, loss, losses_N.view(mask.shape)


def _part(tensors, prefix):
    return {key.removeprefix(prefix): x.float() for key, x in tensors.items() if key.startswith(prefix)}


def test_no_variant_is_forgotten(oracles):
    found = {path.stem for path in (oracles / "oracle" / "model" / "variants").glob("*.json")}
    rest = {name for name in found - set(COVERED) if not name.startswith(tuple(NOT_COVERED))}
    assert not rest, f"neither tested nor listed as not covered: {rest}"
    assert set(COVERED) <= found


@pytest.mark.parametrize("name", COVERED)
def test_variants_are_megatrons(oracles, name):
    tensors, described = load(oracles / "oracle" / "model" / "variants", name)
    shape = shape_of(described["model"])
    model = _model(shape, _part(tensors, "weights/"))
    mask = tensors["batch/loss_mask"]
    logits, loss, losses = _run(model, tensors["batch/tokens"], tensors["batch/labels"], mask)
    torch.testing.assert_close(logits, tensors["out/logits"], rtol=0, atol=1e-5)
    torch.testing.assert_close(loss.float(), (tensors["out/per_token_loss"] * mask).sum(), rtol=1e-5, atol=0)
    torch.testing.assert_close(losses, tensors["out/per_token_loss"] * mask, rtol=1e-5, atol=1e-5)
    for key, parameter in model.named_parameters():
        theirs = described["gradients"][_their_name(key, shape, described["gradients"])]
        norm = parameter.grad.double().norm().item()
        assert norm == pytest.approx(theirs["norm"], rel=1e-5, abs=1e-7), key
        got = parameter.grad.flatten()[:4].tolist()  # both orders of q, k and v begin with the first query
        assert got == pytest.approx(theirs["first4"], rel=1e-4, abs=1e-6), key


def _their_name(key, shape, names):
    """The key of Megatron's gradient, found by the function that finds its tensors."""
    wanted = []

    class Recorder(dict):
        def __getitem__(self, name):
            wanted.append(name)
            raise KeyError(name)

    with pytest.raises(KeyError):
        ours(key, Recorder(), shape)
    assert wanted[0] in names
    return wanted[0]


@pytest.mark.parametrize("case", CASES)
def test_cases_are_megatrons_in_every_gradient(oracles, case):
    from safetensors.torch import load_file

    folder = oracles / "oracle" / "model" / case
    described = json.loads((folder / "case.json").read_text())
    weights, batch, out, grads = (
        load_file(folder / f"{name}.safetensors") for name in ("weights", "batch", "outputs", "grads")
    )
    shape = shape_of(described["model"])
    model = _model(shape, weights)
    logits, loss, losses = _run(model, batch["tokens"], batch["labels"], batch["loss_mask"].float())
    torch.testing.assert_close(logits, out["logits"], rtol=0, atol=1e-5)
    torch.testing.assert_close(losses, out["per_token_loss"] * batch["loss_mask"], rtol=1e-5, atol=1e-5)
    assert loss.item() / batch["loss_mask"].sum().item() == pytest.approx(described["mean_loss"], rel=1e-5)
    square = 0.0
    for key, parameter in model.named_parameters():
        theirs = ours(key, grads, shape)
        got = parameter.grad[: len(theirs)]
        assert (got - theirs).abs().max() <= 1e-5 * theirs.abs().max() + 1e-8, key
        square += parameter.grad.double().square().sum().item()
    assert square**0.5 == pytest.approx(described["grad_norm"], rel=1e-5)


def _recomputed(name):
    """What a row of recompute.json recomputes; None: what ours does not do by that name."""
    mode, _, layers = name.rpartition("/")[2].rpartition("_")
    if not mode.startswith("full"):
        return None
    return RecomputeSection(mode="full", method=mode.partition("_")[2], layers=int(layers))


@pytest.mark.parametrize("case", CASES)
def test_recomputation_has_megatrons_loss_and_no_other_gradient(oracles, case):
    """Theirs selects parts that ours does not keep anyway (attention's scores), or did not run: ours is one mode."""
    from safetensors.torch import load_file

    folder = oracles / "oracle" / "model"
    told = json.loads((folder / "recompute.json").read_text())
    weights, batch = (load_file(folder / case / f"{name}.safetensors") for name in ("weights", "batch"))
    shape = shape_of(json.loads((folder / case / "case.json").read_text())["model"])
    mask = batch["loss_mask"].float()

    def gradients(recompute):
        config = small_config("gpt2", **({"recompute": recompute} if recompute else {}))
        model = _model(shape, weights, config=config)
        _, loss, _ = _run(model, batch["tokens"], batch["labels"], mask)
        return (loss / mask.sum()).item(), dict(model.named_parameters())

    loss, expected = gradients(None)
    rows = {name: row for name, row in told.items() if name.startswith(case) and isinstance(row, dict)}
    assert len(rows) >= 4 and {row["grads_maxdiff"] for row in rows.values()} == {0.0}
    for name, row in rows.items():
        got_loss, got = gradients(_recomputed(name) or RecomputeSection(mode="selective"))
        assert got_loss == loss == pytest.approx(row["mean_loss"], rel=1e-5)
        assert all(torch.equal(got[key].grad, parameter.grad) for key, parameter in expected.items()), name


def test_rotary_tables_are_megatrons(oracles):
    for told in json.loads((oracles / "oracle" / "model" / "rope_tables.json").read_text()):
        scaling, factor = "none", 1.0
        if told["llama3_scaling"]:
            scaling, factor = "llama3", told["factor"]
        elif told["interpolation"]:
            scaling, factor = "linear", told["interpolation"]
        rope = RopeShape(
            theta=told["base"],
            fraction=told["rotary_percent"],
            scaling=scaling,
            factor=factor,
            original_length=8192,
        )
        got = frequencies(rope, told["kv_channels"])
        angles = torch.tensor(told["angles_at_position_5"], dtype=torch.float64)
        torch.testing.assert_close(5 * got, angles, rtol=1e-6, atol=0)


def test_padded_vocabularies_are_megatrons(oracles):
    for vocabulary, divisible_by, tp, padded in json.loads(
        (oracles / "oracle" / "model" / "vocab_padding.json").read_text()
    )["rows"]:
        assert round_up(vocabulary, divisible_by * tp) == padded
