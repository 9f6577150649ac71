"""Bert and MegatronBert of transformers: there and back, both heads, older names, and what is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from mdata import DamageError, UsageError
from mdata.tokenizers.base.tokenizer import TokenizerSpec
from mdata.tokenizers.registry import build_tokenizer, config_of, load_tokenizer
from tests.helpers.notes import Counted
from tests.trainer.convert.coverage import covers_exactly
from trainer.config.sections import BertSection
from trainer.convert.compare import build_model
from trainer.convert.convert import ConvertOptions, convert, open_model
from trainer.convert.hf_config import from_hf, to_hf
from trainer.convert.hf_folder import find_tokenizer, hf_links, write_hf
from trainer.convert.model_keys import effective, model_config
from trainer.models.family import family_of
from trainer.models.stage import only_tokens

transformers = pytest.importorskip("transformers")
NATIVE, HF = ConvertOptions(to="mtrain"), ConvertOptions(to="hf")
SIZES = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 64, "max_position_embeddings": 64}
CLASSES = ("BertForPreTraining", "BertForMaskedLM", "MegatronBertForPreTraining", "MegatronBertForMaskedLM")
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "capital", "of", "is", "##s", "paris", "The", "."]


def save(name, folder, *, words=False, **changes):
    """A tiny model of a class, with weights far from an initialization."""
    kind = transformers.MegatronBertConfig if name.startswith("Megatron") else transformers.BertConfig
    torch.manual_seed(len(name))
    model = getattr(transformers, name)(kind(**SIZES | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    if words:
        (folder / "vocab.txt").write_text("\n".join([*WORDS, *(f"w{i}" for i in range(300 - len(WORDS)))]) + "\n")
    return model.eval()


def weights(folder):
    return load_file(folder / "model.safetensors")


def _same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("name", CLASSES)
def test_there_and_back_is_bit_equal(name, tmp_path):
    save(name, tmp_path / "theirs", hidden_act="gelu_new" if name == CLASSES[1] else "gelu")
    result = convert(tmp_path / "theirs", tmp_path / "ours", options=NATIVE)
    assert result["check"]["by"] == ["transformers", "mtrain"]
    assert result["check"]["largest_difference"] < 1e-5
    check = convert(tmp_path / "ours", tmp_path / "back", options=HF)["check"]
    assert check["by"] == ["mtrain", "transformers"] and check["largest_difference"] < 1e-5
    assert _same(weights(tmp_path / "theirs"), weights(tmp_path / "back"))
    before, after = (json.loads((tmp_path / one / "config.json").read_text()) for one in ("theirs", "back"))
    assert effective(from_hf(before, where="")) == effective(from_hf(after, where=""))
    assert after["architectures"] == [name]


@pytest.mark.parametrize("name", CLASSES[::2])
def test_logits_of_tokens_and_pairs_are_theirs(name, tmp_path):
    theirs = save(name, tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours", options=NATIVE)
    ours = build_model(open_model(tmp_path / "ours"))
    tokens = torch.randint(300, (3, 20), generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([20, 13, 5])
    types = (torch.arange(20) >= 7).long().expand(3, -1)
    batch = replace(only_tokens(tokens), lengths_B=lengths.int(), types_BS=types)
    with torch.no_grad():
        real = (torch.arange(20) < lengths[:, None]).long()
        wanted = theirs(tokens, attention_mask=real, token_type_ids=types)
        logits, pairs = ours.whole_logits(batch), ours.pair_logits(batch)
    torch.testing.assert_close(logits[real.bool()], wanted.prediction_logits[real.bool()], rtol=0, atol=1e-5)
    torch.testing.assert_close(pairs, wanted.seq_relationship_logits, rtol=0, atol=1e-5)


def test_names_of_older_folders_and_sizes_of_tensors_are_read(tmp_path):
    """Published weights have gamma and beta, a stored count of positions, and another vocabulary than config.json."""
    save(CLASSES[0], tmp_path / "theirs")
    found = weights(tmp_path / "theirs")
    older = {re.sub("LayerNorm.weight$", "LayerNorm.gamma", name): x for name, x in found.items()}
    older = {re.sub("LayerNorm.bias$", "LayerNorm.beta", name): x.clone() for name, x in older.items()}
    older["cls.predictions.decoder.bias"] = older.pop("cls.predictions.bias")
    older["cls.predictions.decoder.weight"] = older["bert.embeddings.word_embeddings.weight"].clone()
    older["bert.embeddings.position_ids"] = torch.arange(64)[None]
    save_file(older, tmp_path / "theirs" / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((tmp_path / "theirs" / "config.json").read_text())
    settings |= {"vocab_size": 299, "architectures": ["BertForMaskedLM"]}
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(settings))
    heard = Counted()
    model = open_model(tmp_path / "theirs")
    assert model.vocab_size == 300 and model.config.model.bert == BertSection(norm="post", token_types=2)
    assert any("the embedding has 300 rows" in note for note in model.notes)
    convert(tmp_path / "theirs", tmp_path / "ours", options=replace(NATIVE, check=False), progress=heard)
    convert(tmp_path / "ours", tmp_path / "back", options=HF)
    assert _same(weights(tmp_path / "back"), found)


def test_a_model_without_token_types_is_refused():
    """Their embedding of types must have rows, so transformers could not run the folder."""
    with pytest.raises(UsageError, match=r"model.bert.token_types not set, and model.bert.binary_head=false"):
        to_hf(model_config({"preset": "bert-base", "bert": {"binary_head": False}}, where="", context=512), 30522)


@pytest.mark.parametrize("form", ["mp_rank", "torch_dist"])
def test_the_original_is_refused_as_a_checkpoint_of_megatron(form, tmp_path):
    save(CLASSES[0], tmp_path / "theirs")
    with pytest.raises(UsageError, match=r"Megatron-LM cannot express this model(.|\n)*model\.bert\.norm = 'post'"):
        convert(tmp_path / "theirs", tmp_path / "megatron", options=ConvertOptions(to=form))
    assert not (tmp_path / "megatron").exists()


@pytest.mark.parametrize(
    ("norm", "asked", "named"),
    [
        ("pre", "bert", "model.bert.norm = 'pre'"),
        ("post", "megatron-bert", "model.bert.norm = 'post'"),
        ("pre", "gpt2", 'model.family="bert"'),
    ],
)
def test_the_class_of_the_other_place_of_norms_is_refused_by_name(norm, asked, named):
    keys = {"preset": "bert-base", "bert": {"norm": norm}}
    with pytest.raises(UsageError, match=f"config.json of model_type {asked} cannot express") as error:
        to_hf(model_config(keys, where="", context=512), 30522, model_type=asked)
    assert named in str(error.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"activation": "swiglu", "bert": {"head_activation": "gelu"}}, "model.activation = 'swiglu'"),
        ({"bert": {"head_activation": "gelu"}}, "model.bert.head_activation = 'gelu'"),
        ({"position": "rope"}, "model.position = 'rope'"),
    ],
)
def test_what_its_class_cannot_express_is_refused_by_name(changes, named):
    config = model_config({"preset": "megatron-bert-345m", **changes}, where="", context=512)
    with pytest.raises(UsageError, match=re.escape(named)):
        to_hf(config, 29056)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"is_decoder": True}, "is_decoder = True is not supported"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type = 'relative_key' is not supported"),
        ({"hidden_act": "silu"}, "hidden_act = 'silu' is not supported"),
    ],
)
def test_a_part_that_is_lacking_is_refused_by_name(changes, named):
    with pytest.raises(UsageError, match=re.escape(named)):
        from_hf({"model_type": "bert", **changes}, where="")


def test_a_folder_without_the_head_for_masked_tokens_is_refused_by_name(tmp_path):
    for name, folder in (("BertForNextSentencePrediction", "pairs"), ("BertModel", "bare")):
        save(name, tmp_path / folder)
        with pytest.raises(UsageError, match="no head for masked tokens"):
            open_model(tmp_path / folder)
    save("BertForMaskedLM", tmp_path / "untied")
    found = weights(tmp_path / "untied")
    found["cls.predictions.decoder.weight"] = found["bert.embeddings.word_embeddings.weight"] + 1
    save_file(found, tmp_path / "untied" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"model\.tie_embeddings=false has no meaning"):
        open_model(tmp_path / "untied")
    found = weights(tmp_path / "pairs")
    found |= {name: x for name, x in weights(tmp_path / "untied").items() if name.startswith("cls.predictions.t")}
    save_file(found, tmp_path / "pairs" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DamageError, match=r"missing: cls\.predictions\.bias"):
        open_model(tmp_path / "pairs")


@pytest.mark.parametrize("kind", ["bert", "megatron-bert"])
def test_links_cover_every_element_once(kind):
    norm = "post" if kind == "bert" else "pre"
    config = model_config(
        {"preset": "bert-base", "num_layers": 2, "hidden_size": 8, "num_heads": 2, "ffn_hidden_size": 12}
        | {"vocab_size": 20, "max_position": 16, "bert": {"norm": norm}},
        where="",
        context=16,
    )
    family = family_of(config)
    links = list(hf_links(family, family.shape(config, 20), model_type=kind))
    assert covers_exactly(links) and covers_exactly([one.flipped() for one in links])


def test_a_vocabulary_of_word_pieces_goes_with_the_model(tmp_path):
    save(CLASSES[0], tmp_path / "theirs", words=True)
    convert(tmp_path / "theirs", tmp_path / "ours", options=NATIVE)
    found = convert(tmp_path / "ours", tmp_path / "back", options=HF)["token_ids"]
    assert found["compared"] and found["texts"] > 200 and not found["different"], found
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert theirs.mask_token_id == 4 and theirs("The capital", add_special_tokens=False).input_ids == [5, 6]


def test_special_tokens_beyond_the_vocabulary_are_read(tmp_path):
    save(CLASSES[0], tmp_path, words=True)
    (tmp_path / "tokenizer_config.json").write_text('{"additional_special_tokens": ["<extra_id_0>", "<extra_id_1>"]}')
    tokenizer = find_tokenizer(tmp_path)
    assert build_tokenizer(*tokenizer[:2], options=tokenizer.options).special_ids["<extra_id_1>"] == 301


def test_capitals_are_kept_by_whom_they_are_trained_with(tmp_path):
    """Megatron's type for them has a hundred further ids, so it is not taken for a folder of transformers."""
    save(CLASSES[0], tmp_path / "theirs", words=True)
    (tmp_path / "theirs" / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    model = open_model(tmp_path / "theirs")
    assert model.tokenizer is None
    spec = TokenizerSpec(type="BertWordPieceCase", vocab_file=str(tmp_path / "theirs" / "vocab.txt"))
    model = replace(model, tokenizer=config_of(load_tokenizer(spec)))
    how = {"dtype": torch.float32, "max_shard_bytes": 1 << 30, "model_type": "", "report": lambda _: None}
    write_hf(tmp_path / "back", model, **how)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert theirs("The capital", add_special_tokens=False).input_ids == [11, 6]
