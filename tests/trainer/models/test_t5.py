"""T5: layouts, pipelines over both stacks and recomputation against one rank; the function against transformers."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.examples import soaked
from tests.helpers.ranks import run_ranks
from tests.trainer.convert import hf_models
from tests.trainer.engines import assemble, check_same_gradients, layouts, reduced, small_config
from trainer.config.parse import parse_config
from trainer.config.sections import (
    DataSection,
    MeshSection,
    OptimizerSection,
    RecomputeSection,
    RunConfig,
    T5SamplesSection,
    T5Section,
)
from trainer.convert.convert import ConvertOptions, convert
from trainer.convert.hf_folder import open_hf
from trainer.models.family import family_named, family_of
from trainer.models.stage import EncoderTokens, Microbatch, RealTokens, only_tokens
from trainer.parallel.collectives import Group, all_reduce_
from trainer.parallel.params import Place, num_elements
from trainer.run.data import real_tokens

PUBLISHED = {  # elements of the tensors of presets
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-v1.1-base": 247_577_856,
    "mt5-small": 300_176_768,
    "mt5-base": 582_401_280,
    "mt5-large": 1_229_581_312,
    "mt5-xl": 3_742_619_648,
}
ENCODER, DECODER = 16, 12  # tokens of a row
FORMS: dict[str, dict[str, Any]] = {
    "relative": {
        "position": "relative",
        "norm": "rmsnorm",
        "activation": "geglu_tanh",
        "bias": False,
        "attention_scale": 1.0,
        "logit_scale": 0.2,
    },
    "learned": {"position": "learned", "norm": "layernorm", "activation": "gelu", "bias": True},
    "rope": {"position": "rope", "norm": "rmsnorm", "activation": "relu", "bias": False},
}


def _config(
    form: str = "relative",
    *,
    layers: tuple[int, int] = (3, 3),
    tied: bool = True,
    dropout: float = 0.0,
    recompute: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    micro_batch: int = 1,
    **mesh: Any,
) -> RunConfig:
    config = small_config("gpt2")
    section = T5Section(
        encoder_layers=layers[0], relative_buckets=8, relative_distance=10, head_bias=tied and form != "relative"
    )
    model = replace(
        config.model,
        family="t5",
        t5=section,
        num_layers=sum(layers),
        tie_embeddings=tied,
        hidden_dropout=dropout,
        attention_dropout=dropout,
        **FORMS[form],
    )
    return replace(
        config,
        model=model,
        data=DataSection(blend="unused", kind="t5", t5=T5SamplesSection(decoder_length=DECODER)),
        mesh=MeshSection(**mesh),
        train=replace(config.train, micro_batch=micro_batch),
        recompute=RecomputeSection(**(recompute or {})),
        optimizer=OptimizerSection(lr=1e-2, **(optimizer or {})),
    )


def _microbatches(engine: Any, step: int = 0, multiple: int = 0) -> list[Microbatch]:
    """This rank's part of a seeded global batch: rows of several lengths; without padding for a multiple of tokens."""
    generator, batch = np.random.default_rng(step), engine.plan.global_batch
    encoder = generator.integers(0, 250, (batch, ENCODER))
    tokens, labels = (generator.integers(0, 250, (batch, DECODER)) for _ in range(2))
    lengths = generator.integers(3, ENCODER + 1, batch).astype(np.int32)
    own = generator.integers(2, DECODER + 1, batch).astype(np.int32)
    mask = (np.arange(DECODER) < own[:, None]).astype(np.float32)
    plan, dp = engine.plan, engine.dp
    rows = np.arange(batch).reshape(plan.num_microbatches, dp.size, plan.micro_batch)[:, dp.rank]
    made = []
    for r in rows:
        every = (tokens, labels, mask, own, encoder, lengths)
        parts = [torch.from_numpy(x[r]).to(engine.world.device) for x in every]
        made.append(
            Microbatch(
                tokens_BS=parts[0],
                labels_BS=parts[1],
                loss_mask_BS=parts[2],
                lengths_B=parts[3],
                encoder=EncoderTokens(parts[4], parts[5], _real(lengths[r], ENCODER, multiple, engine)),
                real=_real(own[r], DECODER, multiple, engine),
                samples_B=torch.from_numpy(r + step * batch).to(engine.world.device),
            )
        )
    return made


def _real(lengths: np.ndarray, length: int, multiple: int, engine: Any) -> RealTokens | None:
    return real_tokens(lengths, length, multiple, engine.world.device) if multiple else None


def _gradients(context: Any, config: RunConfig, multiple: int = 0) -> Any:
    engine = layouts(context, config)
    batches = _microbatches(engine, multiple=multiple)
    assert not multiple or any(batch.real and batch.encoder.real for batch in batches)
    evaluated = engine.evaluate(batches)
    totals = engine.add_gradients(batches)
    for axis in ("data", "pp"):
        all_reduce_(totals, engine.world.groups[axis])
    return totals.tolist(), evaluated, reduced(engine, totals[1])


def _whole(config: RunConfig, ranks: int, multiple: int = 0) -> Any:
    results = run_ranks(_gradients, ranks, config, multiple)
    (totals,) = {tuple(totals) for totals, *_ in results}
    (evaluated,) = {loss for _, loss, _ in results}
    return totals, evaluated, assemble([part for *_, parts in results for part in parts])


def _same(options: dict[str, Any], ranks: int, form: str = "relative", multiple: int = 0, **model: Any) -> None:
    expected_totals, expected_loss, expected = _whole(_config(form, **model), 1)
    totals, evaluated, gradients = _whole(_config(form, **model, **options), ranks, multiple)
    np.testing.assert_allclose(totals, expected_totals, rtol=1e-12)
    np.testing.assert_allclose(evaluated, expected_loss, rtol=1e-12)
    check_same_gradients(gradients, expected)
    assert all(np.abs(values).max() > 0 for values in expected.values()), "every tensor has a gradient"


SOAK = pytest.mark.soak


@pytest.mark.parametrize(
    ("options", "ranks", "form"),
    [
        ({"tp": 2, "pp": 2, "sequence_parallel": True}, 4, "relative"),
        pytest.param({"recompute": {"mode": "full"}}, 1, "learned", marks=SOAK),
        pytest.param({"pp": 2, "schedule": "zb_h1"}, 2, "rope", marks=SOAK),
        pytest.param({"tp": 2}, 2, "learned", marks=SOAK),
    ],
)
def test_padding_can_be_left_out_in_every_layout(options, ranks, form):
    """Microbatches of other sizes: losses and every gradient, with dropout of the same features."""
    _same(options, ranks, form, 2, dropout=0.2)


def test_logits_of_real_tokens_are_those_of_padded_rows():
    config = _config("relative")
    family, alone = family_of(config), {"tp": Group.single("tp")}
    shape = family.shape(config, config.model.vocab_size or 250)
    model = family.build(shape, Place(), groups=alone, dtype=torch.float64, device=torch.device("cpu"))
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2)
    lengths = np.array([ENCODER, 3, 7]), np.array([5, DECODER, 2])
    tokens = [torch.randint(0, 250, (3, n)) for n in (ENCODER, DECODER)]
    real = [real_tokens(n, x.shape[1], 4, torch.device("cpu")) for n, x in zip(lengths, tokens, strict=True)]
    padded = replace(only_tokens(tokens[1]), encoder=EncoderTokens(tokens[0], torch.from_numpy(lengths[0]).int()))
    packed = replace(padded, encoder=padded.encoder._replace(real=real[0]), real=real[1])
    written = torch.arange(DECODER) < torch.from_numpy(lengths[1])[:, None]
    expected, got = (model.whole_logits(batch) for batch in (padded, packed))
    torch.testing.assert_close(got[written], expected[written], rtol=1e-10, atol=1e-12)
    assert got.shape == expected.shape and not torch.equal(got, expected)


def test_a_decoder_longer_than_the_table_of_positions_is_refused():
    config = _config("learned")
    config = replace(config, data=replace(config.data, t5=replace(config.data.t5, decoder_length=2 * ENCODER)))
    config = replace(config, model=replace(config.model, max_position=ENCODER))
    (problem,) = family_of(config).problems(config)
    assert "data.t5.decoder_length=32 is longer than model.max_position=16" in problem
    relative = replace(config, model=replace(config.model, position="relative"))
    assert not [*family_of(relative).problems(relative)]


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_number_of_parameters(name):
    tables = {"run": {"folder": "x"}, "model": {"preset": name}, "data": {"blend": "mock"}, "optimizer": {"lr": 1e-3}}
    tables["train"] = {"sequence_length": 512, "global_batch": 8, "micro_batch": 1, "steps": 3}
    config, problems = parse_config(tables)
    assert config is not None and not problems
    family = family_of(config)
    assert not [*family.problems(config)]
    assert (
        num_elements(family.parameters(family.shape(config, config.model.vocab_size or 0), Place())) == PUBLISHED[name]
    )


@pytest.mark.parametrize("name", hf_models.TWO_STACKS)
def test_the_original_form_is_that_of_transformers(name, tmp_path):
    """Logits and every gradient, rows of several lengths, stacks of another depth; their norms compute in fp32."""
    transformers = pytest.importorskip("transformers")
    hf_models.save(name, tmp_path, dtype=torch.float64, tokens=False)
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    folder = open_hf(tmp_path)
    family, shape, alone = family_of(folder.config), folder.shape, {"tp": Group.single("tp")}
    ours = family.build(shape, Place(), groups=alone, dtype=torch.float64, device=torch.device("cpu"))
    for parameter in ours.parameters():
        parameter.data.zero_()  # rows that pad the vocabulary, which would else be anything, such as NaN
    pairs = list(_pairs(ours, dict(theirs.named_parameters()), shape))
    for mine, parameter in pairs:
        mine.data.copy_(parameter.data)
    generator = torch.Generator().manual_seed(1)
    read, tokens, labels = (torch.randint(0, 256, (2, n), generator=generator) for n in (50, 30, 30))
    lengths, written = torch.tensor([50, 33]), torch.arange(30) < torch.tensor([[20], [30]])
    batch = Microbatch(
        tokens_BS=tokens,
        labels_BS=labels,
        loss_mask_BS=written.float(),
        encoder=EncoderTokens(read, lengths.int()),
    )
    mask, labels = (torch.arange(50) < lengths.unsqueeze(1)).long(), labels.masked_fill(~written, -100)
    expected = theirs(read, attention_mask=mask, decoder_input_ids=tokens, labels=labels)
    largest = expected.logits.abs().max().item()
    torch.testing.assert_close(ours.whole_logits(batch), expected.logits, rtol=0, atol=1e-5 * largest)
    ours((), batch)[0].backward()
    (expected.loss * written.sum()).backward()
    assert len(pairs) == len(dict(theirs.named_parameters()))
    for mine, parameter in pairs:
        torch.testing.assert_close(mine.grad, parameter.grad, rtol=0, atol=1e-5 * parameter.grad.abs().max().item())


class _Part(NamedTuple):
    """Rows of a parameter."""

    parameter: torch.Tensor
    rows: slice

    @property
    def data(self) -> torch.Tensor:
        return self.parameter.data[self.rows]

    @property
    def grad(self) -> torch.Tensor:
        assert self.parameter.grad is not None
        return self.parameter.grad[self.rows]


def _pairs(ours: Any, theirs: dict[str, torch.Tensor], shape: Any) -> Iterator[tuple[_Part, torch.Tensor]]:
    """Each of their parameters with the rows of ours that it is."""
    family, named = family_named("t5"), dict(ours.named_parameters())
    assert family.hugging_face is not None
    for spec in family.parameters(shape, Place()):
        for piece in spec.pieces:
            (form,) = family.hugging_face.forms(piece.name, piece.shape, shape, "t5")
            first = piece.offset // math.prod(piece.shape[1:])
            yield _Part(named[spec.name], slice(first, first + piece.shape[0])), theirs[form.tensor]


LAYOUTS = {
    "tp": (2, "relative", {"tp": 2}, {}),
    "tp, sequence parallel, selective": (
        2, "learned", {"tp": 2, "sequence_parallel": True, "recompute": {"mode": "selective"}}, {"dropout": 0.2},
    ),
    "dp, sharded, full": (
        2, "relative", {"optimizer": {"sharding": "parameters"}, "recompute": {"mode": "full", "layers": 2}}, {},
    ),
    "pp in the encoder": (2, "relative", {"pp": 2, "layers_per_stage": (1, 5)}, {}),
    "pp at the border, recomputed": (
        2, "relative", {"pp": 2, "layers_per_stage": (3, 3), "recompute": {"mode": "full", "layers": 4}}, {},
    ),
    "pp in the decoder": (2, "rope", {"pp": 2, "layers_per_stage": (5, 1), "schedule": "gpipe"}, {"tied": False}),
    "pp in both, tp": (
        8, "relative",
        {"pp": 4, "tp": 2, "sequence_parallel": True, "layers_per_stage": (1, 1, 3, 1), "schedule": "zb_h1"}, {},
    ),
    "interleaved": (2, "learned", {"pp": 2, "schedule": "interleaved", "layers_per_stage": (2, 2, 1, 1)}, {}),
    "zb_v": (
        2, "relative", {"pp": 2, "schedule": "zb_v", "layers_per_stage": (1, 1, 3, 1)}, {"dropout": 0.2},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", soaked(LAYOUTS, but=["tp, sequence parallel, selective", "pp in both, tp", "dp, sharded, full", "zb_v"])
)
def test_fp64_gradients_do_not_depend_on_the_layout(name):
    ranks, form, options, model = LAYOUTS[name]
    _same(options, ranks, form, **model)


CUTS = {
    f"{schedule} {cut}": {"pp": ranks, "schedule": schedule, "layers_per_stage": cut}
    for schedule, ranks, stages in (
        ("1f1b", 3, 3),
        ("gpipe", 3, 3),
        ("zb_h1", 3, 3),
        ("interleaved", 2, 4),
        ("zb_v", 2, 4),
    )
    for cut in itertools.product(range(1, 5), repeat=stages)
    if sum(cut) == 6
}


@pytest.mark.soak
@pytest.mark.parametrize("form", ["relative", "learned"])
def test_every_cut_of_both_stacks_in_every_schedule(form):
    """Two layers of the encoder and four of the decoder, cut anywhere."""
    expected_totals, expected_loss, expected = _whole(_config(form, layers=(2, 4)), 1)
    for name, mesh in CUTS.items():
        totals, evaluated, gradients = _whole(_config(form, layers=(2, 4), **mesh), mesh["pp"])
        np.testing.assert_allclose(totals, expected_totals, rtol=1e-12, err_msg=name)
        np.testing.assert_allclose(evaluated, expected_loss, rtol=1e-12, err_msg=name)
        check_same_gradients(gradients, expected)


@pytest.mark.parametrize("name", ["t5", "t5_v1.1"])
def test_a_model_of_transformers_comes_back_bit_for_bit(name, tmp_path):
    """Through our own format; a head is told by its tensor, and the first token of the decoder is kept."""
    pytest.importorskip("transformers")
    source = hf_models.save(name, tmp_path / "hf")
    convert(source, tmp_path / "ours", options=ConvertOptions(to="mtrain"))
    result = convert(tmp_path / "ours", tmp_path / "back", options=ConvertOptions(to="hf"))
    assert not result["token_ids"]["different"], "token ids by transformers' tokenizer"
    assert result["check"]["compared"] and set(result["check"]["by"]) == {"mtrain", "transformers"}
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "back"))
    assert before.keys() == after.keys() and all(torch.equal(after[key], before[key]) for key in before)
    said = json.loads((tmp_path / "back/config.json").read_text())
    assert said["tie_word_embeddings"] == (name == "t5") and said["decoder_start_token_id"] == 0
