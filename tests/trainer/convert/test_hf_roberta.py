"""Roberta of transformers: there and back, positions behind padding's, tokens of its BPE, and masks filled."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

import mdata
from mdata import UsageError
from mdata.tokenizer_training.train_options import TrainOptions
from trainer.convert.compare import build_model
from trainer.convert.convert import ConvertOptions, convert, open_model
from trainer.convert.hf_config import from_hf, to_hf
from trainer.convert.model_keys import model_config
from trainer.models.stage import only_tokens
from trainer.tasks.fill_mask import fill_masks
from trainer.tasks.loaded_model import Model

transformers = pytest.importorskip("transformers")
NATIVE, HF = ConvertOptions(to="mtrain"), ConvertOptions(to="hf", model_type="roberta")
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
TEXTS = ["The capital of France is Paris.", "Un café à 3 €, please!", "def f(x):\n    return x + 1"] * 9
WEIGHTS = "model.safetensors"


def save_tokenizer(folder):
    """Byte-level BPE with Roberta's special tokens, as transformers saves it; gives the size of its vocabulary."""
    import tokenizers

    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    how = {"vocab_size": 330, "special_tokens": SPECIAL, "initial_alphabet": letters, "show_progress": False}
    bpe.train_from_iterator(TEXTS, tokenizers.trainers.BpeTrainer(**how))
    bpe.post_processor = tokenizers.processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    names = dict(zip(("bos_token", "pad_token", "eos_token", "unk_token", "mask_token"), SPECIAL, strict=True))
    names |= {"mask_token": transformers.AddedToken("<mask>", lstrip=True), "cls_token": "<s>", "sep_token": "</s>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, **names).save_pretrained(folder)
    return bpe.get_vocab_size()


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("roberta") / "theirs"
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    sizes |= {"vocab_size": save_tokenizer(folder), "max_position_embeddings": 66, "type_vocab_size": 1}
    torch.manual_seed(3)
    model = transformers.RobertaForMaskedLM(transformers.RobertaConfig(**sizes, layer_norm_eps=1e-5))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        model.roberta.embeddings.position_embeddings.weight[:2] = 0  # no text reads them
    model.save_pretrained(folder)
    return folder


def test_there_and_back_is_bit_equal(theirs, tmp_path):
    result = convert(theirs, tmp_path / "ours", options=NATIVE)
    assert result["check"]["by"] == ["transformers", "mtrain"]
    assert result["check"]["largest_difference"] < 1e-5
    back = convert(tmp_path / "ours", tmp_path / "back", options=HF)
    assert back["check"]["by"] == ["mtrain", "transformers"] and back["check"]["largest_difference"] < 1e-5
    ids = back["token_ids"]
    assert ids["compared"] and ids["texts"] >= 200 and not ids["different"], ids
    before, after = load_file(theirs / WEIGHTS), load_file(tmp_path / "back" / WEIGHTS)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert isinstance(
        transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "back"), transformers.RobertaForMaskedLM
    )


def test_rows_with_padding_have_their_logits(theirs):
    """Their positions are counted from the tokens that are no padding."""
    tokens = torch.randint(5, 300, (3, 20), generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([20, 13, 5])
    real = torch.arange(20) < lengths[:, None]
    tokens[~real] = 1
    batch = replace(only_tokens(tokens), lengths_B=lengths.int())
    model = transformers.RobertaForMaskedLM.from_pretrained(theirs).eval()
    with torch.no_grad():
        wanted, logits = (
            model(tokens, attention_mask=real.long()).logits,
            build_model(open_model(theirs)).whole_logits(batch),
        )
    torch.testing.assert_close(logits[real], wanted[real], rtol=0, atol=1e-5)


def test_candidates_for_masks_are_theirs(theirs):
    prompts = ("The capital of<mask> is Paris.", "<mask> café<mask>")
    tokenizer = transformers.AutoTokenizer.from_pretrained(theirs)
    model = transformers.RobertaForMaskedLM.from_pretrained(theirs).eval()
    for prompt, filled in zip(prompts, fill_masks(Model.load(str(theirs)), prompts, top=3), strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            best = model(ids).logits[ids == tokenizer.mask_token_id].topk(3).indices.tolist()
        assert [[one.token for one in mask] for mask in filled.masks] == best


def _with_tokenizer(theirs, folder, special):
    """The model with a byte-level BPE that mdata trained, whose files have no roles and no ends of texts."""
    shutil.copytree(theirs, folder)
    (folder / "text.txt").write_text("\n".join(TEXTS))
    options = TrainOptions(special_tokens=special, overwrite=True)
    mdata.train_tokenizer([folder / "text.txt"], folder, vocab_size=300, options=options)
    return folder


def test_a_tokenizer_without_roles_fills_masks_in_transformers(theirs, tmp_path):
    folder = _with_tokenizer(theirs, tmp_path / "own", ("<pad>", "<s>", "</s>", "<mask>"))
    prompt = "The capital of [MASK] is Paris."
    ((mask,),) = (one.masks for one in fill_masks(Model.load(str(folder)), [prompt], top=3))
    convert(folder, tmp_path / "ours", options=NATIVE)
    result = convert(tmp_path / "ours", tmp_path / "back", options=HF)["token_ids"]
    assert result["texts"] >= 200 and not result["different"], result
    fill = transformers.pipeline("fill-mask", str(tmp_path / "back"), top_k=3)
    wanted = fill(prompt.replace("[MASK]", "<mask>"))
    assert [one.token for one in mask] == [one["token"] for one in wanted]
    assert [one.probability for one in mask] == pytest.approx([one["score"] for one in wanted], rel=1e-4)


def test_a_tokenizer_that_uses_the_token_of_padding_is_refused(theirs, tmp_path):
    """Transformers would number the positions of a row without it."""
    folder = _with_tokenizer(theirs, tmp_path / "own", ("<s>", "<pad>", "</s>", "<mask>"))
    convert(folder, tmp_path / "ours", options=NATIVE)
    with pytest.raises(
        UsageError, match=r"without token 1, which(.|\n)*1 is '<s>'; <pad> is 2(.|\n)*leave --model-type out"
    ):
        convert(tmp_path / "ours", tmp_path / "back", options=HF)
    result = convert(tmp_path / "ours", tmp_path / "bert", options=ConvertOptions(to="hf"))
    assert result["check"]["largest_difference"] < 1e-5 and not result["token_ids"]["different"]


def test_a_pooler_that_masked_tokens_do_not_read_is_left_out(theirs, tmp_path):
    """Published folders have one."""
    folder = tmp_path / "published"
    folder.mkdir()
    (folder / "config.json").write_bytes((theirs / "config.json").read_bytes())
    pooler = {"roberta.pooler.dense.weight": torch.ones(32, 32), "roberta.pooler.dense.bias": torch.ones(32)}
    save_file(load_file(theirs / WEIGHTS) | pooler, folder / WEIGHTS, metadata={"format": "pt"})
    assert open_model(folder).source.tensors.keys() == open_model(theirs).source.tensors.keys()


def test_pairs_and_other_tokens_of_padding_are_refused_by_name(theirs, tmp_path):
    pairs = model_config({"preset": "bert-base"}, where="", context=512)
    with pytest.raises(UsageError, match=r"model\.bert\.binary_head"):
        to_hf(pairs, 30522, model_type="roberta")
    with pytest.raises(UsageError, match="pad_token_id = 3 is not supported"):
        from_hf({"model_type": "roberta", "pad_token_id": 3}, where="")
    with pytest.raises(UsageError, match="of Roberta the head for masked tokens is read"):
        from_hf({"model_type": "roberta", "architectures": ["RobertaForSequenceClassification"]}, where="")
