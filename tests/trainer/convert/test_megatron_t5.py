"""Megatron's T5 checkpoints: those of the oracles are read, both formats there and back, and what it does not have."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mdata import UsageError
from trainer.convert.compare import build_model
from trainer.convert.convert import ConvertOptions, convert, open_model
from trainer.convert.distcp import METADATA, ChunkSource
from trainer.convert.megatron_args import to_arguments
from trainer.convert.megatron_names import StateDictLayout, megatron_links
from trainer.convert.model_keys import effective
from trainer.models.stage import EncoderTokens, Microbatch

NAMES = ("t5_learned_tied", "t5_gated_rmsnorm")


def _saved(oracles: Path, name: str, folder: Path) -> dict[str, Any]:
    """A checkpoint as Megatron writes it, of a case of the oracles; gives the case's tensors."""
    path = oracles / "oracle/families/bert_t5" / f"{name}.safetensors"
    model, tensors = json.loads(path.with_suffix(".json").read_text())["model"], load_file(path)
    gated = model["gated_linear_unit"]
    arguments = {
        "num_layers": model["enc"], "encoder_num_layers": model["enc"], "decoder_num_layers": model["dec"],
        "hidden_size": model["hidden_size"], "num_attention_heads": model["num_attention_heads"],
        "kv_channels": model.get("kv_channels"), "ffn_hidden_size": model["ffn_hidden_size"],
        "max_position_embeddings": model["max_position_embeddings"], "seq_length": model["seq"],
        "position_embedding_type": model["position_embedding"], "normalization": model["normalization"],
        "norm_epsilon": 1e-5, "swiglu": gated, "bias_gelu_fusion": False, "add_bias_linear": model["add_bias_linear"],
        "untie_embeddings_and_output_weights": not model["tie_embeddings"], "rotary_base": 10000,
        "padded_vocab_size": model["vocab_size"],
    }  # fmt: skip
    rank = folder / "iter_0000003" / "mp_rank_00"
    rank.mkdir(parents=True)
    weights = {key.removeprefix("weights/"): x.float() for key, x in tensors.items() if key.startswith("weights/")}
    state = {"args": argparse.Namespace(**arguments), "checkpoint_version": 3.0, "iteration": 3, "model": weights}
    torch.save(state, rank / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("3")
    return tensors


def _difference(folder: Path, tensors: dict[str, Any]) -> float:
    """Of the logits of real tokens from those of the case."""
    model = build_model(open_model(folder))
    data = {key.removeprefix("data/"): x[0] for key, x in tensors.items() if key.startswith("data/")}
    lengths = data["encoder_padding"].sum(1).int()
    batch = Microbatch(
        tokens_BS=data["decoder_tokens"].long(),
        labels_BS=data["labels"].long(),
        loss_mask_BS=data["loss_mask"],
        encoder=EncoderTokens(data["encoder_tokens"].long(), lengths),
    )
    real = data["decoder_padding"] > 0
    with torch.no_grad():
        return float((model.whole_logits(batch)[real] - tensors["out/logits"][real]).abs().max())


@pytest.mark.parametrize(("form", "tp"), [("mp_rank", 2), ("torch_dist", 1)])
def test_a_checkpoint_of_megatron_goes_there_and_back(oracles, form, tp, tmp_path):
    tensors = _saved(oracles, NAMES[0], tmp_path / "theirs")
    assert _difference(tmp_path / "theirs", tensors) < 1e-5
    convert(tmp_path / "theirs", tmp_path / "ours", options=ConvertOptions(to="mtrain", check=False))
    convert(tmp_path / "ours", tmp_path / "back", options=ConvertOptions(to=form, tp=tp, check=False))
    before, back = (open_model(tmp_path / name) for name in ("ours", "back"))
    assert back.format == form and effective(back.config) == effective(before.config)
    assert back.config.model.family == "t5" and back.config.model.t5.encoder_layers == 2
    assert _difference(tmp_path / "back", tensors) < 1e-5
    # What its modules hold under two names, without which Megatron-Core does not load it.
    wanted = {"position_embeddings.weight", "output_layer.bias", "embedding.position_embeddings.weight"}
    if form == "mp_rank":
        for path in (tmp_path / "back").rglob("*.pt"):
            held = torch.load(path, weights_only=False)["model"]
            assert wanted | {"output_layer._extra_state", "lm_head.output_layer._extra_state"} <= held.keys()
            assert torch.equal(held["output_layer.bias"], held["lm_head.output_layer.bias"])
    else:
        names = set(ChunkSource(next((tmp_path / "back").glob("iter_*"))).tensors)
        assert wanted <= names
        more = {f"{name}output_layer._extra_state/shard_0_1" for name in ("", "lm_head.")}
        metadata = (next((tmp_path / "back").glob("iter_*")) / METADATA).read_bytes()
        assert all(name.encode() in metadata for name in more)


def test_moments_are_found_under_the_second_name_of_a_tensor(oracles, tmp_path):
    """Megatron-Core's optimizer knows a parameter by the name that it registered last."""
    _saved(oracles, NAMES[0], tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours", options=ConvertOptions(to="mtrain", check=False))
    model = open_model(tmp_path / "ours")
    layout = StateDictLayout(family=model.family, layers=range(model.shape.num_layers), padded_rows=128, stacked=True)
    of = {}
    for aliases in ("none", "beside", "instead"):
        form = replace(layout, aliases=aliases, written=True)
        of[aliases] = {one.theirs.tensor for one in megatron_links(model.shape, form)}
    first = {"embedding.position_embeddings.weight", "lm_head.output_layer.bias"}
    second = {"position_embeddings.weight", "output_layer.bias"}
    assert of["beside"] == of["none"] | second and of["instead"] == of["beside"] - first


def test_untied_gates_without_biases_are_read_with_what_arguments_do_not_say(oracles, tmp_path):
    """Megatron's arguments have no gated GELU."""
    tensors = _saved(oracles, NAMES[1], tmp_path / "theirs")
    folder = open_model(tmp_path / "theirs", settings=("model.activation=geglu_tanh",))
    model = build_model(folder)
    assert folder.config.model.head_dim == 12 and not folder.config.model.tie_embeddings
    assert "head_bias.bias" not in dict(model.named_parameters()) and "weights/lm_head.output_layer.weight" in tensors


def test_what_megatron_does_not_have_is_refused_by_name(oracles, tmp_path):
    _saved(oracles, NAMES[0], tmp_path / "theirs")
    model = open_model(tmp_path / "theirs")
    section = replace(model.config.model.t5, head_bias=False)
    config = replace(model.config, model=replace(model.config.model, t5=section))
    with pytest.raises(UsageError, match=r"model\.t5\.head_bias = "):
        to_arguments(config, 96, padded_rows=128)
    relative = replace(model.config, model=replace(model.config.model, position="relative"))
    assert to_arguments(relative, 96, padded_rows=128)["relative_attention_num_buckets"] == 32
    with pytest.raises(UsageError, match=r"for which Megatron-Core has no pipeline"):
        convert(tmp_path / "theirs", tmp_path / "two", options=ConvertOptions(to="mp_rank", pp=2, check=False))
