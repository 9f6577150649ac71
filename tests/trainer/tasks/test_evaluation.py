"""WikiText, LAMBADA and perplexity: counts by hand, each token and line once in any layout, and bad files by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mdata
from mdata import BadInputError, UsageError
from mdata.tokenizers.registry import build_tokenizer
from tests.helpers.ranks import RankContext, run_ranks
from tests.trainer.shapes import SHAPES
from trainer.models.gpt.model import build_gpt
from trainer.models.gpt.params import parameter_table
from trainer.parallel.init import ElementRange, initialize_
from trainer.parallel.mesh import Mesh
from trainer.parallel.params import Place
from trainer.tasks.lambada import lambada, passage, read_passages
from trainer.tasks.loaded_model import Model
from trainer.tasks.perplexity import document_spans, perplexity, perplexity_text
from trainer.tasks.score import ScoredSpan
from trainer.tasks.wikitext import detokenize, detokenizer_by_path, megatron_windows, read_wikitext, wikitext, windows

WORDS = build_tokenizer("NullTokenizer", {}, options={"vocab_size": 250})


def model_of(context: RankContext, *, tp: int = 1, pp: int = 1) -> Model:
    """A model with random weights whose texts are numbers."""
    world = context.join(Mesh(context.world, tp, pp=pp))
    shape, group = SHAPES["llama"], world.groups["tp"]
    place = Place(tp_rank=group.rank, tp_size=tp, stage=world.groups["pp"].rank, num_stages=pp, ends_apart=pp > 1)
    module = build_gpt(shape, place, groups={"tp": group}, dtype=torch.float32, device=world.device)
    named = dict(module.named_parameters())
    for spec in parameter_table(shape, module.place):
        initialize_([ElementRange(spec, 0, spec.numel, named[spec.name].data.view(-1))], seed=3)
    return Model(
        module=module, world=world, vocab_size=250, rows=250, context=16, tokenizer=WORDS, ends=frozenset((249,))
    )


def _texts(folder: Path) -> None:
    words = [str(i * 37 % 240) for i in range(60)]
    (folder / "wiki.txt").write_text(" ".join(words))
    rows = [" ".join(words[i : i + 3 + 4 * i]) for i in range(5)]
    (folder / "lambada.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows) + "\n")


def _scored(context: RankContext, folder: Path, tp: int, pp: int, batch_size: int) -> list[dict[str, Any]]:
    model = model_of(context, tp=tp, pp=pp)
    wiki = wikitext(model, folder / "wiki.txt", overlap=5, batch_size=batch_size)
    return [
        wiki,
        *(lambada(model, folder / "lambada.jsonl", strict=strict, batch_size=batch_size) for strict in (0, 1)),
    ]


def test_each_token_and_line_counts_once_in_any_layout(tmp_path):
    _texts(tmp_path)
    ((wiki, loose, strict),) = run_ranks(_scored, 1, tmp_path, 1, 1, 2)
    assert wiki["targets"] == 59 and wiki["windows"] == 12 and wiki["num_original_tokens"] == 60
    assert loose["total"] == strict["total"] == 5 and strict["cut"] == 1 and strict["blank_lines"] == 1
    for ranks, tp, pp, batch_size in ((3, 1, 1, 1), (4, 2, 1, 3), (4, 1, 2, 8)):
        for found in run_ranks(_scored, ranks, tmp_path, tp, pp, batch_size):
            assert found[0]["avg_loss"] == pytest.approx(wiki["avg_loss"], abs=1e-6)
            assert [one["number_correct"] for one in found[1:]] == [loose["number_correct"], strict["number_correct"]]


def _by_hand(context: RankContext, folder: Path) -> None:
    model = model_of(context)
    found = wikitext(model, folder / "wiki.txt", overlap=5)
    ids, total = model.encode((folder / "wiki.txt").read_text()), 0.0
    for target in range(1, len(ids)):
        # The first window that reaches the token.
        start = max(0, math.ceil((target - 16) / 5) * 5)
        total -= float(model.logits(ids[start:target])[-1].log_softmax(-1)[ids[target]])
    assert found["avg_loss"] == pytest.approx(total / 59, abs=1e-5)
    assert found["adjusted_ppl"] == pytest.approx(math.exp(min(20, total / 59)), rel=1e-4)
    (pair, single) = model.score_spans([ScoredSpan([1, 2, 3], 2), ScoredSpan([4], 1)])
    log_probs = model.logits([1, 2])[-1].log_softmax(-1)
    assert pair.log_prob == pytest.approx(float(log_probs[3]), abs=1e-5)
    assert pair.greedy == (int(log_probs.argmax()) == 3) and single == (0.0, True)
    with pytest.raises(UsageError, match="a row of 18 tokens does not fit"):
        model.score_spans([ScoredSpan([1] * 18, 1)])
    with pytest.raises(UsageError, match="--sequence-length 0 does not fit"):
        lambada(model, folder / "lambada.jsonl", sequence_length=0)
    with pytest.raises(BadInputError, match="too short"):
        (folder / "one.txt").write_text("7")
        wikitext(model, folder / "one.txt")


def test_the_loss_by_hand(tmp_path):
    _texts(tmp_path)
    run_ranks(_by_hand, 1, tmp_path)


@given(st.integers(2, 200), st.integers(1, 40), st.integers(1, 40))
def test_windows_score_each_token_once(num_tokens, sequence_length, overlap):
    if overlap > sequence_length:
        with pytest.raises(UsageError, match=f"--overlap {overlap} does not fit windows of {sequence_length} tokens"):
            windows(num_tokens, sequence_length=sequence_length, overlap=overlap)
        return
    found = windows(num_tokens, sequence_length=sequence_length, overlap=overlap)
    scored = [token for part in found for token in range(part.first, part.stop)]
    assert scored == list(range(1, num_tokens))
    assert all(part.stop - part.start <= sequence_length + 1 and part.first > part.start for part in found)
    assert len(found) <= megatron_windows(num_tokens, overlap=overlap)


def test_texts_as_people_write_them():
    told = "the boys ' house , 2 @,@ 5 @.@ 1 well @-@ known : N men"
    assert detokenize(told) == "the boys' house, 2,5.1 well-known: 1 men"
    assert detokenize(" \n = = A = = \n ( b ) \" c ' d ' ") == "\n== A ==\n(b) \" c 'd' ", "an odd mark stays"
    assert detokenize("it 's N n't # 1 \n x", kind="ptb") == "it's Nn't #1\nx"
    assert detokenize("a , b", kind="none") == "a , b"
    paths = ("/ptb/wiki", "wikipedia", "lambada", "x")
    assert [detokenizer_by_path(path) for path in paths] == ["ptb", "wiki", "lambada", None]


class _Reads:
    """A model of which only the tokenizer is used."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


def test_passages_are_divided_at_the_last_word():
    model: Any = _Reads()

    def parts(text: str, *, strict: bool) -> tuple[bytes, ...]:
        return tuple(bytes(ids) for ids in passage(model, text, strict=strict))

    assert parts(" one two\nlast ", strict=True) == (b"one two", b" last")
    assert parts("one two", strict=False) == (b"one tw", b"o")
    assert parts("word", strict=True) == (b"", b" word")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ('{"text": "a"}\n{"prompt": "a"}', "line 2 is not a passage"),
        ("plain text", "line 1 is not a passage"),
        ('{"text": 3}', "line 1 is not a passage"),
        ("\n\n", "has no passages"),
    ],
)
def test_a_file_in_another_format_is_named(content, text, tmp_path):
    path = tmp_path / "lambada.jsonl"
    path.write_text(content)
    with pytest.raises(BadInputError, match=text):
        read_passages(path)
    path.write_bytes(b"\xff")
    with pytest.raises(BadInputError, match="is not UTF-8 text"):
        read_passages(path)
    path.write_bytes('{"text": "a"}'.encode("utf-16"))
    with pytest.raises(UsageError, match=r"is UTF-16 text\n  expected: UTF-8\n  try: iconv -f UTF-16 -t UTF-8"):
        read_passages(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_passages(tmp_path / "none")
    with pytest.raises(UsageError, match="/dev/zero is not a regular file"):
        read_passages(Path("/dev/zero"))


def test_lines_of_json_are_no_wikitext(tmp_path):
    path = tmp_path / "test.jsonl"
    path.write_text('\n{"text": "a b"}\n')
    with pytest.raises(BadInputError, match="has lines of JSON"):
        read_wikitext(path)
    for text in (" = Title = \n", '{ " a " : said', "[1]\n", "1 2 3"):
        path.write_text(text)
        assert read_wikitext(path) == text
    for text in ("", " \n"):
        path.write_text(text)
        with pytest.raises(BadInputError, match="has no text"):
            read_wikitext(path)


def test_a_byte_order_mark_is_no_text(tmp_path):
    path = tmp_path / "marked"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a b"}\n')
    assert read_passages(path) == (["a b"], 0)
    path.write_bytes(b"\xef\xbb\xbf = Title = \n")
    assert read_wikitext(path) == " = Title = \n"


def test_a_document_in_windows():
    spans = document_spans([1, 2, 3, 4, 5], begin=9, context=2)
    assert [list(span.ids) for span in spans] == [[9, 1, 2], [2, 3, 4], [4, 5]] and {span.first for span in spans} == {
        1
    }
    assert document_spans([], begin=9, context=2) == []


def _perplexity(context: RankContext, folder: Path) -> dict[str, Any]:
    model = model_of(context)
    found = perplexity(model, f"0.5 {folder}/a_text_document 0.5 {folder}/b_text_document", batch_size=2)
    with pytest.raises(UsageError, match="--max-documents 0"):
        perplexity(model, f"{folder}/a_text_document", max_documents=0)
    first = perplexity(model, f"{folder}/a_text_document", max_documents=1)
    assert first["total"]["documents"] == 1 and first["total"]["tokens"] == 4
    ids, total = [1, 2, 3, 249], 0.0
    for place, token in enumerate(ids):
        total -= float(model.logits([249, *ids[:place]])[-1].log_softmax(-1)[token])
    assert first["total"]["loss"] == pytest.approx(total / 4, abs=1e-5)
    assert first["total"]["bits_per_byte"] == pytest.approx(total / math.log(2) / len("1 2 3"), abs=1e-5)
    return found


def test_perplexity_of_each_corpus_and_of_all(tmp_path):
    for name, rows in (("a", ("1 2 3", " ".join("5" * 40))), ("b", ("8 9", "7"))):
        lines = "".join(json.dumps({"text": row}) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(lines)
        mdata.preprocess(
            mdata.PreprocessOptions(
                input=(str(tmp_path / f"{name}.jsonl"),),
                output_prefix=str(tmp_path / name),
                tokenizer_type="NullTokenizer",
                tokenizer_options=(("vocab_size", 250),),
                append_eod=True,
                workers=1,
            )
        )
    (found,) = run_ranks(_perplexity, 1, tmp_path)
    parts, total = found["corpora"], found["total"]
    assert [one["tokens"] for one in parts.values()] == [4 + 41, 3 + 2] and total["tokens"] == 50
    nats = sum(one["loss"] * one["tokens"] for one in parts.values())
    assert total["loss"] == pytest.approx(nats / 50)
    assert perplexity_text(found).splitlines()[-1].startswith("total: loss ")
