"""The examples of docs/howto/masked_samples.md and samples.md run, on a corpus made here."""

from __future__ import annotations

import re

import numpy as np
import pytest

import mdata
from tests.conftest import ROOT
from tests.mdata.samples.test_special_tokens import preprocessed

PAGE = (ROOT / "docs/howto/masked_samples.md").read_text()


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_examples_run(tmp_path, monkeypatch):
    corpus = preprocessed(tmp_path, "BertWordPieceCase")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for code in blocks():
        assert len(blocks()) == 2
        exec(code.replace("books_text_sentence.json", corpus.path.name), names)
    assert names["batch"]["text"].shape == (3, 512)
    assert names["sample"]["labels"].shape == (512,)
    assert names["valid"].num_samples > 0
    assert names["t5"][5]["text_dec"].shape == (128,)


def test_labels_for_transformers_are_those_that_its_models_shift(tmp_path):
    """Such a model compares the logits of place t with labels[t + 1] (ForCausalLMLoss), and leaves out -100."""
    page = (ROOT / "docs/howto/samples.md").read_text()
    (code,) = re.findall(r"```python\n(import numpy as np\n\n# for transformers.*?)```", page, re.DOTALL)
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n{"text": "defgh"}\n')
    mdata.preprocess(
        mdata.PreprocessOptions(
            input=(str(tmp_path / "a.jsonl"),), output_prefix=str(tmp_path / "a"), tokenizer_type="ByteTokenizer",
            append_eod=True, workers=1,
        )
    )  # fmt: skip
    data = mdata.open_dataset(str(tmp_path / "a_text_document.json"), sequence_length=4, kind=mdata.Document())
    rows = data.read(list(range(4)))
    names = {"rows": rows, "np": np}
    exec(code, names)
    shifted, mask = names["labels"][:, 1:], rows.loss_mask == 1
    assert 0 < mask.sum() < mask.size
    np.testing.assert_array_equal(names["input_ids"][:, :-1], rows.tokens)
    np.testing.assert_array_equal(shifted[mask], rows.labels[mask])
    assert (shifted[~mask] == -100).all()


@pytest.mark.parametrize("kind", ["BERT", "T5"])
def test_the_page_has_every_field(kind, tmp_path):
    from mdata.samples.bert import BertSamples
    from mdata.samples.sample_options import T5, Bert
    from mdata.samples.t5 import T5Samples

    corpus = preprocessed(tmp_path, "BertWordPieceCase")
    made = {
        "BERT": lambda: BertSamples(corpus, (0, 9), options=Bert(), sequence_length=20),
        "T5": lambda: T5Samples(corpus, (0, 9), options=T5(decoder_length=9), sequence_length=20),
    }
    page = PAGE.split(f"| field of {kind} | what |\n|---|---|\n")[1].split("\n\n")[0]
    told = {name for row in page.split("\n") for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert told == set(made[kind]().sample(0))
