"""Megatron's BERT checkpoints: published ones and old names from a twin, both formats there and back, refusals."""

from __future__ import annotations

import argparse
import json
import math
import zipfile
from dataclasses import replace

import pytest
import tomli_w
import torch

from cli.mtrain import main
from mdata import DamageError, UsageError
from tests.oracles import bert_twin
from trainer.convert.compare import build_model
from trainer.convert.convert import ConvertOptions, convert, open_model
from trainer.convert.megatron_args import to_arguments
from trainer.convert.model_keys import effective
from trainer.models.stage import Microbatch
from trainer.tasks.loaded_model import Model

ARGUMENTS = {
    "num_layers": bert_twin.LAYERS, "hidden_size": bert_twin.WIDTH, "num_attention_heads": bert_twin.HEADS,
    "ffn_hidden_size": bert_twin.INNER, "max_position_embeddings": bert_twin.LENGTH + 4, "seq_length": 12,
    "bias_gelu_fusion": False, "layernorm_epsilon": 1e-5, "padded_vocab_size": bert_twin.VOCABULARY,
}  # fmt: skip
CORE = {
    "self_attention.linear_qkv": "attention.query_key_value",
    "self_attention.linear_proj": "attention.dense",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp.linear_fc1": "mlp.dense_h_to_4h",
    "mlp.linear_fc2": "mlp.dense_4h_to_h",
}


def older(weights, version):
    """The nested dictionaries of Megatron-LM before its core, and its order of rows of q, k and v."""
    language, head, pairs = {"embedding": {}, "transformer": {}, "pooler": {}}, {}, {}
    for name, x in weights.items():
        part, last = name.rsplit(".", 1)
        if part.startswith("embedding."):
            language["embedding"].setdefault(part.partition(".")[2], {})[last] = x
        elif part.startswith("encoder."):
            inside = part.removeprefix("encoder.")
            if "linear_qkv" in inside:  # now: q, k, v of one head after the other
                rows = x.unflatten(0, (bert_twin.HEADS, 3, -1))
                rows = rows.transpose(0, 1) if version == 0 else rows.transpose(1, 2) if version == 1 else rows
                x = rows.flatten(0, 2).contiguous()
            for new, old in CORE.items():
                inside = inside.replace(new, old)
            language["transformer"][f"{inside}.{last}"] = x
        elif part == "pooler.dense":
            language["pooler"][f"dense.{last}"] = x
        elif part == "binary_head":
            pairs[last] = x
        else:
            head[name.replace("lm_head.", "").replace("layer_norm", "layernorm").replace("output_layer.", "")] = x
    return {"language_model": language, "lm_head": head, "binary_head": pairs}


def published(folder, *, version=None, with_args=True, half=True, zipped=True):
    """A released checkpoint, of which the file is as torch wrote it then."""
    weights = {name: x.half() if half else x for name, x in bert_twin.weights().items()}
    state = {"iteration": 0, "model": older(weights, version or 0)}
    state |= {} if version is None else {"checkpoint_version": version}
    state |= {"args": argparse.Namespace(**ARGUMENTS)} if with_args else {}
    rank = folder / "release" / "mp_rank_00"
    rank.mkdir(parents=True)
    torch.save(state, rank / "model_optim_rng.pt", _use_new_zipfile_serialization=zipped)
    (folder / "latest_checkpointed_iteration.txt").write_text("release")
    return folder


def check_logits(model):
    """Against the twin, of a batch with padding, both types and pairs."""
    data = {name: x[0] for name, x in bert_twin.data().items()}
    batch = Microbatch(
        tokens_BS=data["tokens"].long(),
        labels_BS=data["labels"].long(),
        loss_mask_BS=data["loss_mask"],
        types_BS=data["tokentypes"].long(),
        lengths_B=data["padding_mask"].sum(1).int(),
    )
    stored = {name: x.to(model.weights_dtype).float() for name, x in bert_twin.weights().items()}
    built, real = build_model(model), data["padding_mask"].bool()
    with torch.no_grad():
        logits, pairs = bert_twin.outputs(stored, data)
        torch.testing.assert_close(built.whole_logits(batch)[real], logits[real], rtol=0, atol=1e-5)
        torch.testing.assert_close(built.pair_logits(batch), pairs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("version", "zipped"), [(None, False), (0, True), (1.0, True), (2.0, False), (3.0, True)])
def test_published_weights_of_every_version_compute_what_the_twin_does(version, zipped, tmp_path):
    model = open_model(published(tmp_path / "bert", version=version, zipped=zipped))
    assert (model.format, model.weights_dtype, model.config.model.family) == ("mp_rank", torch.float16, "bert")
    check_logits(model)


def archived(folder):
    """FOLDER.zip, as it is downloaded."""
    with zipfile.ZipFile(f"{folder}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(folder.rglob("*")):
            archive.write(file, file.relative_to(folder))
    return f"{folder}.zip"


def test_the_commands_take_the_archives(tmp_path, capsys):
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *(f"w{number}" for number in range(bert_twin.VOCABULARY - 5)),
    ]
    (tmp_path / "vocab").mkdir()
    (tmp_path / "vocab/vocab.txt").write_text("\n".join(words) + "\n")
    rows = [{"text": f"w1 w{2 + label}", "label": "ab"[label]} for label in (0, 1)] * 8
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "lambada.jsonl").write_text('{"text": "w1 w2 w3 w4"}\n')
    published(tmp_path / "bert", with_args=False)
    published_decoder(tmp_path / "gpt")
    bert, gpt = archived(tmp_path / "bert"), archived(tmp_path / "gpt")
    more = ["--tokenizer", str(tmp_path / "vocab")]
    run = ["--task", "classify", "--epochs", "1", "--folder", str(tmp_path / "run"), *more]
    assert main(["finetune", bert, str(tmp_path / "rows.jsonl"), *run]) == 0
    assert (tmp_path / "run/checkpoints/step-1").is_dir()
    heads = ["--set", "model.num_heads=2"]
    assert main(["eval", gpt, "--task", "lambada", "--data", str(tmp_path / "lambada.jsonl"), *heads, *more]) == 0
    assert "total examples: 1.0000E+00" in capsys.readouterr().out


def test_the_archive_that_was_published_is_read_without_arguments(tmp_path):
    archived(published(tmp_path / "bert", with_args=False, zipped=False))
    told = ("model.num_heads=2", "model.activation=gelu_erf")
    model = open_model(tmp_path / "bert.zip", settings=told)
    assert model.config.model.bert is not None and model.config.model.bert.binary_head
    assert any("it has no args: its sizes are those of its tensors, with 2 heads" in note for note in model.notes)
    check_logits(model)
    assert open_model(tmp_path / "bert.zip").config.model.num_heads == 1, "heads of 64 features"
    (tmp_path / "other.zip").write_bytes((tmp_path / "bert.zip").read_bytes()[:500])
    with pytest.raises(DamageError, match="download it again"):
        open_model(tmp_path / "other.zip")
    with zipfile.ZipFile(tmp_path / "none.zip", "w") as archive:
        archive.writestr("readme", "")
    with pytest.raises(UsageError, match="holds no checkpoint of Megatron-LM"):
        open_model(tmp_path / "none.zip")


def test_published_weights_go_to_transformers(tmp_path):
    pytest.importorskip("transformers")
    result = convert(published(tmp_path / "bert"), tmp_path / "hf", options=ConvertOptions(to="hf"))
    assert result["check"]["by"] == ["mtrain", "transformers"] and result["check"]["largest_difference"] < 1e-5


@pytest.mark.parametrize(("form", "tp", "pp"), [("mp_rank", 2, 2), ("mp_rank", 1, 1), ("torch_dist", 1, 1)])
def test_both_formats_there_and_back(form, tp, pp, tmp_path):
    convert(
        published(tmp_path / "bert", half=False), tmp_path / "ours", options=ConvertOptions(to="mtrain", check=False)
    )
    options = ConvertOptions(to=form, tp=tp, pp=pp)
    convert(tmp_path / "ours", tmp_path / "theirs", options=options)
    before, back = (open_model(tmp_path / name) for name in ("ours", "theirs"))
    assert back.format == form and effective(back.config) == effective(before.config)
    check_logits(back)
    if form == "mp_rank" and tp == 1:
        state = torch.load(next((tmp_path / "theirs").rglob("*.pt")), weights_only=False)["model"]
        held = {name: x for name, x in state.items() if x is not None}
        assert held.keys() == bert_twin.weights().keys()
        for name, x in bert_twin.weights().items():
            torch.testing.assert_close(held[name][: len(x)], x, rtol=0, atol=0, msg=name)


def test_a_head_that_megatron_does_not_have_is_refused_by_name(tmp_path):
    convert(published(tmp_path / "bert"), tmp_path / "ours", options=ConvertOptions(to="mtrain", check=False))
    model = open_model(tmp_path / "ours")
    for change in ({"head_activation": "gelu"}, {"norm": "post"}):
        section = replace(model.config.model.bert, **change)
        config = replace(model.config, model=replace(model.config.model, bert=section))
        with pytest.raises(UsageError, match=rf"model\.bert\.{next(iter(change))} = "):
            to_arguments(config, 40, padded_rows=128)


def published_decoder(folder):
    """GPT-345M (v0.0), which has the same layout; gives its weights."""
    weights = {name: x.half() for name, x in bert_twin.weights().items()}
    kept = {name: x for name, x in weights.items() if name.startswith(("embedding.w", "embedding.p", "encoder."))}
    language = older(kept, 0)["language_model"]
    del language["pooler"]
    rank = folder / "release" / "mp_rank_00"
    rank.mkdir(parents=True)
    state = {"iteration": 0, "model": {"language_model": language}}
    torch.save(state, rank / "model_optim_rng.pt", _use_new_zipfile_serialization=False)
    (folder / "latest_checkpointed_iteration.txt").write_text("release")
    return weights


@pytest.mark.parametrize("family", ["bert", pytest.param("gpt", marks=pytest.mark.soak)])
def test_a_run_goes_on_with_published_weights(family, tmp_path):
    """The losses are those of the converted model on the same mock data, and not near those of new weights."""
    if family == "bert":
        published(tmp_path / "theirs")
    else:
        published_decoder(tmp_path / "theirs")
    heads = ("model.num_heads=2",) if family == "gpt" else ()
    convert(tmp_path / "theirs", tmp_path / "ours", options=ConvertOptions(to="mtrain", check=False, settings=heads))
    model = open_model(tmp_path / "ours").config.model
    model = {
        "family": family, "num_layers": model.num_layers, "hidden_size": model.hidden_size, "num_heads": 2,
        "ffn_hidden_size": model.ffn_hidden_size, "vocab_size": model.vocab_size, "max_position": model.max_position,
        "position": "learned", "norm": "layernorm", "activation": model.activation, "bias": True,
        "tie_embeddings": True,
    }  # fmt: skip
    losses = {}
    for name in ("theirs", "ours"):
        tables = {
            "run": {"folder": str(tmp_path / f"run{name}"), "log_interval": 1},
            "model": model,
            "data": {"blend": "mock", "kind": family},
            "train": {"sequence_length": 12, "global_batch": 2, "micro_batch": 2, "steps": 2},
            "optimizer": {"lr": 1e-3},
            "checkpoint": {"init_from": str(tmp_path / name)},
        }
        path = tmp_path / f"run{name}.toml"
        path.write_text(tomli_w.dumps(tables))
        assert main(["train", str(path)]) == 0
        lines = (tmp_path / f"run{name}/metrics.jsonl").read_text().splitlines()
        losses[name] = [json.loads(line)["loss"] for line in lines if "loss" in line]
    assert losses["theirs"] == losses["ours"] and len(losses["ours"]) == 2
    assert abs(losses["ours"][0] - math.log(bert_twin.VOCABULARY)) > 0.1


def test_a_published_decoder_is_scored_where_it_lies(tmp_path):
    published_decoder(tmp_path)
    rows = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8]]
    scores = Model.load(tmp_path, settings=("model.num_heads=2",)).score(rows)
    options = ConvertOptions(to="mtrain", check=False, settings=("model.num_heads=2",))
    convert(tmp_path, tmp_path / "ours", options=options)
    again = Model.load(tmp_path / "ours").score(rows)
    assert torch.equal(scores.log_prob_BS, again.log_prob_BS) and scores.log_prob_BS[0, :7].abs().sum() > 0


def test_a_published_decoder_is_read_without_arguments(tmp_path):
    weights = published_decoder(tmp_path)
    model = open_model(tmp_path, settings=("model.num_heads=2",))
    config = model.config.model
    assert (config.family, config.num_heads, config.activation, config.tie_embeddings) == ("gpt", 2, "gelu", True)
    rows = model.source.read("weight/blocks.1.attention.k.weight", ((0, 0), (bert_twin.WIDTH, bert_twin.WIDTH)))
    theirs = weights["encoder.layers.1.self_attention.linear_qkv.weight"].unflatten(0, (bert_twin.HEADS, 3, -1))
    assert torch.equal(rows, theirs[:, 1].flatten(0, 1))
