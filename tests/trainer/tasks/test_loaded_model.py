"""A model from any folder: the same logits, its ends of text, its recommendations; and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from mdata import DamageError, UsageError
from tests.trainer.convert.hf_models import save
from trainer.convert.convert import ConvertOptions, convert
from trainer.tasks.generate import GenerationRequest, continue_rows
from trainer.tasks.loaded_model import Model
from trainer.tasks.sampling import Sampling

transformers = pytest.importorskip("transformers")
IDS = [5, 250, 17, 3]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of transformers, its weights in several files."""
    return save("llama2", tmp_path_factory.mktemp("hf") / "theirs", shard="40KB")


@pytest.fixture(scope="module")
def logits(theirs: Path) -> torch.Tensor:
    """What transformers computes."""
    model = transformers.AutoModelForCausalLM.from_pretrained(theirs, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0]


@pytest.mark.parametrize("to", ["hf", "mtrain", "torch_dist", "mp_rank"])
def test_the_logits_of_any_folder(to, theirs, logits, tmp_path):
    folder, options = theirs, {}
    if to != "hf":
        folder = tmp_path / "theirs"
        convert(theirs, folder, options=ConvertOptions(to=to, check=False, tp=2 if to == "mp_rank" else 1))  # type: ignore[arg-type]
    if to in ("torch_dist", "mp_rank"):
        with pytest.raises(UsageError, match=r"theirs has no tokenizer(.|\n)*--tokenizer FOLDER"):
            Model.load(folder).encode("a")
        options = {"tokenizer": str(theirs)}
    model = Model.load(folder, **options)  # type: ignore[arg-type]
    found = model.logits(IDS)
    assert found.dtype == torch.float32 and model.context == 64 and (model.step is None) == (to == "hf")
    assert torch.allclose(found, logits[:, : found.shape[1]], atol=1e-5)
    assert model.ends == {256} and model.encode("the") == Model.load(theirs).encode("the")
    (answer,) = continue_rows(model, [GenerationRequest(ids=(5,), rules=Sampling(max_tokens=3, greedy=True))])
    assert len(answer.tokens) == 3


def test_weights_in_fp8(theirs, logits):
    whole, model = Model.load(theirs), Model.load(theirs, weights="fp8")
    left = {name for name, _ in model.module.named_parameters()}
    gone = {name for name, _ in whole.module.named_parameters()} - left
    assert {name.split(".", 2)[2] for name in gone} == {
        "attention.qkv.weight", "attention.out.weight", "mlp.up.weight", "mlp.down.weight"
    }  # fmt: skip
    assert {"embedding.weight", "head.weight", "final_norm.weight"} <= left
    difference = (model.logits(IDS) - logits).norm() / logits.norm()
    assert 1e-4 < difference < 0.1
    request = GenerationRequest(ids=tuple(IDS), rules=Sampling(max_tokens=6, greedy=True), log_probs=0)
    (answer,) = continue_rows(model, [request])
    scores = model.score([[*IDS, *answer.tokens]]).log_prob_BS[0, len(IDS) - 1 :]
    assert answer.log_probs == pytest.approx(scores.tolist(), abs=0.02), "with the cache as without"
    with pytest.raises(UsageError, match="--weights fp4 is not known"):
        Model.load(theirs, weights="fp4")


def _changed(theirs: Path, folder: Path, **settings: object) -> Path:
    shutil.copytree(theirs, folder)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return folder


def test_several_tokens_end_a_text(theirs, tmp_path):
    request = GenerationRequest(ids=(5, 6), rules=Sampling(max_tokens=9, greedy=True))
    (whole,) = continue_rows(Model.load(theirs), [request])
    third = whole.tokens[2]
    folder = _changed(theirs, tmp_path / "ends", eos_token_id=[299, third], temperature=0.6, top_p=0.9, top_k=True)
    model = Model.load(folder)
    assert model.ends == {299, third} and dict(model.recommended) == {"temperature": 0.6, "top_p": 0.9}
    (cut,) = continue_rows(model, [request])
    assert cut.tokens == whole.tokens[: whole.tokens.index(third) + 1] and cut.finish_reason == "stop"
    rules = Sampling(max_tokens=9, min_tokens=6, greedy=True)
    (longer,) = continue_rows(model, [GenerationRequest(ids=(5, 6), rules=rules)])
    assert len(longer.tokens) >= 6 and third not in longer.tokens[:5]


@pytest.mark.parametrize("ends", [[300], ["a"], True, -1])
def test_ends_that_the_model_does_not_have_are_refused(ends, theirs, tmp_path):
    with pytest.raises(DamageError, match="names an end-of-text token that the model does not have"):
        Model.load(_changed(theirs, tmp_path / "ends", eos_token_id=ends))


def test_what_is_no_model_or_does_not_fit_is_refused(theirs, tmp_path):
    with pytest.raises(UsageError, match="there is no folder"):
        Model.load(tmp_path / "none")
    (tmp_path / "a.jsonl").write_text("{}")
    with pytest.raises(UsageError, match=r"a\.jsonl is a file, not a folder"):
        Model.load(tmp_path / "a.jsonl")
    with pytest.raises(UsageError, match="there is no tokenizer in it"):
        Model.load(theirs, tokenizer=str(tmp_path))
    with pytest.raises(UsageError, match="--dtype fp8 is not known"):
        Model.load(theirs, dtype="fp8")
    model = Model.load(theirs)
    with pytest.raises(UsageError, match=r"a row of 65 tokens(.|\n)*1 to 64"):
        model.logits([1] * 65)
    with pytest.raises(UsageError, match="token 300 is outside the vocabulary"):
        model.logits([300])
    with pytest.raises(UsageError, match="a row of 0 tokens"):
        model.logits([])
