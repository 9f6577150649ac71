"""A model with an encoder generates the tokens of transformers' `generate`: greedy, beams, rows beside each other."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from mdata import UsageError
from tests.helpers.ranks import run_ranks
from tests.trainer.convert import hf_models
from trainer.parallel.mesh import Mesh
from trainer.tasks.engine import DecodeEngine, Request, Token
from trainer.tasks.generate import GenerationRequest, continue_rows, search_beams
from trainer.tasks.loaded_model import Model
from trainer.tasks.sampling import Sampling
from trainer.tasks.score import ScoredSpan

TEXTS = [[5, 17, 99, 200, 41], [7] * 30 + [8, 9], [250], [120, 3, 3, 64, 77, 12, 15, 90, 33, 2, 1]]
NEW = 20  # tokens, of which the last see more distances than there are buckets


@pytest.fixture(scope="module", params=hf_models.TWO_STACKS)
def pair(request: Any, tmp_path_factory: Any) -> tuple[Model, Any]:
    transformers = pytest.importorskip("transformers")
    folder = hf_models.save(request.param, tmp_path_factory.mktemp("t5"))
    return Model.load(str(folder)), transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()


def _theirs(theirs: Any, text: list[int], **options: Any) -> list[list[int]]:
    options |= {"max_new_tokens": NEW, "do_sample": False, "use_cache": False}  # their cache has as many layers each
    rows = theirs.generate(torch.tensor([text]), **options)
    return [[token for token in row.tolist()[1:] if token not in (0, 256)] for row in rows]


def test_greedy_rows_beside_each_other_are_those_of_transformers(pair):
    model, theirs = pair
    rules = Sampling(temperature=0.0, max_tokens=NEW)
    answers = continue_rows(model, [GenerationRequest(ids=tuple(text), rules=rules) for text in TEXTS], batch_size=3)
    for text, answer in zip(TEXTS, answers, strict=True):
        assert [[token for token in answer.tokens if token not in (0, 256)]] == _theirs(theirs, text), text
    assert len({tuple(answer.tokens) for answer in answers}) > 1, "texts decide what is written"


def test_beams_are_those_of_transformers(pair):
    model, theirs = pair
    for text in TEXTS[:2]:
        beams = search_beams(model, text, width=3, max_tokens=NEW, count=3)
        expected = _theirs(theirs, text, num_beams=3, num_return_sequences=3, early_stopping=False)
        assert [[token for token in beam.tokens if token] for beam in beams] == expected


def _run(engine: DecodeEngine) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    while engine.busy:
        for token in engine.step():
            assert isinstance(token, Token)
            found.setdefault(token.id, []).append(token.token)
    return found


def test_a_preempted_row_reads_its_text_again(pair):
    model, _ = pair
    rules, found = Sampling(temperature=0.0, ignore_eod=True), []
    for cache in (None, 32):  # the second has room for about one and a half rows
        engine = DecodeEngine(model, max_batch=3, cache_tokens=cache, page_tokens=4, longest=NEW + 1)
        for number, text in enumerate(TEXTS[:3]):
            engine.add(Request(str(number), text, rules, NEW))
        found.append(_run(engine))
    assert found[0] == found[1] and all(len(row) == NEW for row in found[0].values())


def _on_ranks(context: Any, path: str, mesh: dict[str, int]) -> tuple[list[list[int]], list[list[int]]]:
    """Greedy rows beside each other, and beams."""
    model = Model.load(path, world=context.join(Mesh(context.world, **mesh)))
    rules = Sampling(temperature=0.0, max_tokens=NEW)
    answers = continue_rows(model, [GenerationRequest(ids=tuple(text), rules=rules) for text in TEXTS], batch_size=3)
    beams = search_beams(model, TEXTS[0], width=2, max_tokens=5, count=2)
    return [list(answer.tokens) for answer in answers], [list(beam.tokens) for beam in beams]


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("t5", {"pp": 2}),
        *(
            pytest.param(name, mesh, marks=pytest.mark.soak)
            for name, mesh in (("mt5", {"pp": 2}), ("t5", {"pp": 3}), ("t5", {"pp": 4}), ("t5", {"tp": 2, "pp": 2}))
        ),
    ],
)
def test_stages_write_what_one_rank_writes(name, mesh, tmp_path):
    pytest.importorskip("transformers")
    folder = str(hf_models.save(name, tmp_path / "model"))
    (alone,) = run_ranks(_on_ranks, 1, folder, {})
    for found in run_ranks(_on_ranks, math.prod(mesh.values()), folder, mesh):
        assert found == alone


def test_what_an_encoder_cannot_read_is_refused(pair):
    model, _ = pair
    engine, rules = DecodeEngine(model), Sampling(temperature=0.0)
    with pytest.raises(UsageError, match=r"a text of 65 tokens does not fit the encoder"):
        engine.add(Request("a", [1] * 65, rules, 4))
    with pytest.raises(UsageError, match=r"token 300 is outside the vocabulary"):
        engine.add(Request("a", [300], rules, 4))
    with pytest.raises(UsageError, match=r"has no log probabilities of its prompt"):
        engine.add(Request("a", [1], rules, 4, echo=True))


def test_texts_that_an_encoder_reads_are_not_scored(pair):
    """The rows of both stacks would be the same, so each token would be predicted by one that has read it."""
    model, _ = pair
    spans = [ScoredSpan(TEXTS[0], 1)]
    for score in (lambda: model.score(TEXTS[:1]), lambda: model.score_spans(spans), lambda: model.logits(TEXTS[0])):
        with pytest.raises(UsageError, match=r"has no probabilities of the text that its encoder reads"):
            score()
