"""Masks filled by a model of both sides: transformers' candidates, every layout, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch

from cli.mtrain import main
from mdata import UsageError
from tests.helpers.ranks import run_ranks
from tests.trainer.convert.test_hf_bert import CLASSES, save
from trainer.parallel.mesh import Mesh
from trainer.tasks.engine import DecodeEngine
from trainer.tasks.fill_mask import fill_masks
from trainer.tasks.loaded_model import Model

transformers = pytest.importorskip("transformers")
PROMPTS = ("The capital of [MASK] is paris.", "[MASK] w3 [MASK]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("bert") / "theirs"
    save(CLASSES[0], path, words=True)
    return path


def test_candidates_are_those_of_transformers(folder):
    filled = fill_masks(Model.load(str(folder)), PROMPTS, top=3)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    theirs = transformers.BertForMaskedLM.from_pretrained(folder).eval()
    for prompt, one in zip(PROMPTS, filled, strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            shares = theirs(ids).logits[ids == tokenizer.mask_token_id].softmax(-1)
        assert [[c.token for c in mask] for mask in one.masks] == shares.topk(3).indices.tolist()
        torch.testing.assert_close(torch.tensor([[c.probability for c in m] for m in one.masks]), shares.topk(3).values)
    assert len(filled[1].masks) == 2 and filled[0].text.startswith("the capital of ")
    assert filled[0].lines().splitlines()[1].startswith("  [MASK] 1: '") and json.dumps(filled[0].facts())


def _on_ranks(context, path, mesh):
    world = context.join(Mesh(context.world, **mesh))
    return [one.facts() for one in fill_masks(Model.load(path, world=world), PROMPTS, top=3)]


def test_ranks_of_tp_and_pp_fill_alike(folder):
    alone = [one.facts() for one in fill_masks(Model.load(str(folder)), PROMPTS, top=3)]
    for found in run_ranks(_on_ranks, 4, str(folder), {"tp": 2, "pp": 2}):
        for one, other in zip(found, alone, strict=True):
            assert one["text"] == other["text"]
            for mask, expected in zip(one["masks"], other["masks"], strict=True):
                assert [c["token"] for c in mask] == [c["token"] for c in expected]


def test_what_has_no_mask_and_what_continues_texts_is_refused_by_name(folder):
    model = Model.load(str(folder))
    with pytest.raises(UsageError, match="there is nothing to fill in the prompt 'the capital'"):
        fill_masks(model, ["the capital"])
    for use in (lambda: DecodeEngine(model), lambda: model.score([[5, 6]])):
        with pytest.raises(UsageError, match="predicts masked tokens, and not the next one"):
            use()


def test_options_of_new_tokens_are_refused_by_name(folder, capsys):
    words = ["generate", str(folder), "--prompt", PROMPTS[0]]
    assert main([*words, "--top-k", "2", "--seed", "5"]) == 0 and capsys.readouterr().out.count("'") == 4
    assert main([*words, "--max-tokens", "5", "--temperature", "0.5", "--greedy"]) == 2
    assert "found: --max-tokens and --greedy and --temperature, which it would ignore" in capsys.readouterr().err


def test_a_chat_is_refused_before_a_template_is_asked_for(folder, capsys):
    assert main(["chat", str(folder)]) == 2
    assert "predicts masked tokens, and not the next one" in capsys.readouterr().err
