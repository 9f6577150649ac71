"""Choosing tokens: top-p against a slow twin, draws by position, and the same text on one rank and on two."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mdata
from mdata import DamageError, UsageError
from mdata.tokenizers.registry import build_tokenizer
from tests.helpers.corpora import write_pair
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import make_config, write_jsonl
from tests.trainer.shapes import SHAPES
from trainer.models.gpt.model import build_gpt
from trainer.models.gpt.params import parameter_table
from trainer.parallel.init import ElementRange, initialize_
from trainer.parallel.mesh import Mesh
from trainer.parallel.params import Place
from trainer.parallel.world import Placement, join_world
from trainer.run.train import train
from trainer.tasks.generate import (
    Chooser,
    Sampling,
    _added_text,
    _encode,
    continue_ids,
    generate,
    run_tokenizer,
    top_p_token,
)


def slow_top_p(logits: list[float], temperature: float, top_p: float, uniform: float) -> int:
    """Holtzman et al. 2020, section 3.1: the smallest set of likeliest tokens that reaches p, then one of them."""
    weights = [math.exp((x - max(logits)) / temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: -weights[i])
    nucleus, reached = [], 0.0
    for token in order:
        nucleus.append(token)
        reached += weights[token] / sum(weights)
        if reached >= top_p:
            break
    target = uniform * sum(weights[t] for t in nucleus)
    for token in nucleus:
        target -= weights[token]
        if target < 0:
            return token
    return nucleus[-1]


@given(
    st.lists(st.integers(-40, 40), min_size=1, max_size=8, unique=True),
    st.sampled_from([0.5, 1.0, 2.0]),
    st.sampled_from([0.1, 0.5, 0.93, 1.0]),
    st.integers(0, 999),
)
def test_top_p_equals_its_twin(steps, temperature, top_p, thousandths):
    logits = [x / 8 for x in steps]
    uniform = (thousandths + 0.123456) / 1000
    sampling = Sampling(temperature=temperature, top_p=top_p)
    got = top_p_token(torch.tensor(logits, dtype=torch.float64), sampling, uniform=uniform)
    assert got == slow_top_p(logits, temperature, top_p, uniform)


def test_a_small_nucleus_is_greedy_and_a_whole_one_draws_everything():
    logits = torch.tensor([0.0, 3.0, 1.0, 2.0])
    assert {top_p_token(logits, Sampling(top_p=1e-9), uniform=u / 50) for u in range(50)} == {1}
    assert {top_p_token(logits, Sampling(temperature=1.0, top_p=1.0), uniform=u / 50) for u in range(50)} == {
        0,
        1,
        2,
        3,
    }


def test_draws_depend_on_seed_prompt_and_position_alone():
    logits = torch.zeros(1000)

    def tokens(seed, prompt):
        choose = Chooser(Sampling(seed=seed), prompt)
        return [choose(logits) for _ in range(4)]

    assert tokens(1, 0) == tokens(1, 0)
    assert len({tuple(tokens(s, p)) for s in (1, 2) for p in (0, 1)}) == 4
    assert len(set(tokens(1, 0))) == 4


def _text(context, name, greedy, eod=None, prompt=(1, 2, 3), pp=1):
    world = context.join(Mesh(context.world, context.world // pp, pp=pp))
    tp, shape = world.groups["tp"], SHAPES[name]
    place = Place(tp_rank=tp.rank, tp_size=tp.size, stage=world.groups["pp"].rank, num_stages=pp, ends_apart=pp > 1)
    model = build_gpt(shape, place, groups={"tp": tp}, dtype=torch.float64, device=world.device)
    named = dict(model.named_parameters())
    for spec in parameter_table(shape, model.place):
        initialize_([ElementRange(spec, 0, spec.numel, named[spec.name].data.view(-1))], seed=3)
    choose = Chooser(Sampling(max_tokens=24, greedy=greedy), 0)
    return continue_ids(model, prompt, choose=choose, eod=eod, context=16, world=world)


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("name", SHAPES)
def test_the_text_does_not_depend_on_the_layout(name, greedy):
    (alone,) = run_ranks(_text, 1, name, greedy)
    assert run_ranks(_text, 2, name, greedy) == [alone, alone]
    assert run_ranks(_text, 4, name, greedy, None, (1, 2, 3), 2) == [alone] * 4, "tp 2 x pp 2"
    assert len(alone) == 24, "longer than the context: the oldest tokens fall out"
    assert max(alone) < SHAPES[name].vocab_size


def _logits(context):
    from trainer.tasks.generate import next_logits

    world = context.join(Mesh(context.world, context.world))
    shape = SHAPES["llama"]
    tp = world.groups["tp"]
    model = build_gpt(
        shape, Place(tp_rank=tp.rank, tp_size=tp.size), groups={"tp": tp}, dtype=torch.float64, device=world.device
    )
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.01)
    return len(next_logits(model, torch.tensor([[1, 2]], device=world.device), world=world))


@pytest.mark.parametrize("ranks", [1, 2])
def test_padding_is_no_choice(ranks):
    assert run_ranks(_logits, ranks) == [SHAPES["llama"].vocab_size] * ranks


def _after(context, ids):
    return _text(context, "llama", True, prompt=ids)


def test_a_long_text_goes_on_from_its_last_tokens():
    (whole,) = run_ranks(_text, 1, "llama", True)
    known = [1, 2, 3, *whole]
    (again,) = run_ranks(_after, 1, known[7:23])
    assert again[:4] == known[23:27], "the 16 tokens of the context decide"


def test_the_end_of_document_token_ends_a_text():
    (ids,) = run_ranks(_text, 1, "llama", False)
    (cut,) = run_ranks(_text, 1, "llama", False, ids[5])
    assert cut == ids[: ids.index(ids[5])]


def _words(folder, *, post_processor=None):
    """A tokenizer of SentencePiece's kind: a word carries the space before it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {"</s>": 0, "\u2581the": 1, "\u2581man": 2, "\u2581saw": 3}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="</s>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer.add_special_tokens(["</s>"])
    if post_processor is not None:
        tokenizer.post_processor = post_processor
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return mdata.load_tokenizer("HuggingFaceTokenizer", folder)


def test_the_space_before_the_first_new_word_stays(tmp_path):
    tokenizer = _words(tmp_path)
    assert _added_text(tokenizer, [1, 2], [3, 1]) == " saw the"


def test_a_prompt_is_not_continued_after_its_end(tmp_path):
    from tokenizers.processors import TemplateProcessing

    tokenizer = _words(tmp_path, post_processor=TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 0)]))
    assert _encode(tokenizer, "the man") == [1, 2]
    assert _encode(tokenizer, "") == [0]


def test_a_prompt_that_is_not_text_is_refused(tmp_path):
    with pytest.raises(UsageError, match="the prompt is not UTF-8 text"):
        _encode(_words(tmp_path), "the \udcff")


@pytest.mark.parametrize(
    ("options", "text"),
    [({"max_tokens": 0}, "max_tokens=0"), ({"temperature": 0.0}, "use greedy"), ({"top_p": 1.5}, r"top_p=1\.5")],
)
def test_options_out_of_range_are_refused(options, text, tmp_path):
    with pytest.raises(UsageError, match=text):
        generate(tmp_path, ["x"], sampling=Sampling(**options), world=None)  # type: ignore[arg-type]


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(UsageError, match="there is no checkpoint 'latest'"):
        generate(tmp_path, ["x"], sampling=Sampling(), world=None)  # type: ignore[arg-type]


ALONE = Placement()


def _texts(folder: Path) -> Path:
    """Documents whose `text` is words and whose `numbers` is whole numbers below 50."""
    records = [json.loads(line) for line in write_jsonl(folder / "words.jsonl", 1).read_text().splitlines()]
    for record in records:
        record["numbers"] = " ".join(str(len(word) * 7 % 50) for word in record["text"].split())
    path = folder / "both.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def _begun_by(folder: Path, token: str) -> None:
    """Let a tokenizer.json put a token before every text."""
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    special = [(token, tokenizer.token_to_id(token))]
    tokenizer.post_processor = TemplateProcessing(single=f"{token} $A", special_tokens=special)
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def kinds(tmp_path_factory) -> dict[str, tuple[str, mdata.PreprocessOptions]]:
    """Name of a case -> (a prompt, how its corpus is made)."""
    folder = tmp_path_factory.mktemp("kinds")
    made = folder / "tokenizer"
    both = _texts(folder)
    mdata.train_tokenizer([both], made, vocab_size=300)
    model = json.loads((made / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(" ".join(pair) + "\n" for pair in model["merges"]))
    _begun_by(made, "<|endoftext|>")

    def options(name: str, **more: object) -> mdata.PreprocessOptions:
        told = {"input": (str(both),), "output_prefix": str(folder / name), "append_eod": True, "workers": 1, **more}
        return mdata.PreprocessOptions(**told)

    huggingface = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(made)}
    gpt2 = {"vocab_file": str(folder / "vocab.json"), "merge_file": str(folder / "merges.txt")}
    null = {"json_keys": ("numbers",), "tokenizer_options": (("vocab_size", 51),)}
    return {
        "begun": ("Once", options("begun", **huggingface)),
        "bare": ("Once", options("bare", **huggingface, tokenizer_options=(("include_special_tokens", False),))),
        "gpt2": ("Once", options("gpt2", tokenizer_type="GPT2BPETokenizer", **gpt2)),
        "byte": ("Once", options("byte", tokenizer_type="ByteTokenizer")),
        "null": ("7 14 21", options("null", tokenizer_type="NullTokenizer", **null)),
    }


def _run(kind: mdata.PreprocessOptions, folder: Path) -> mdata.Corpus:
    """Train one step on the corpus that these options make; the corpus."""
    (path,) = mdata.preprocess(kind).paths.values()
    config = make_config(folder, blend=path, valid=[], steps=1, eval_interval=None)
    config = replace(config, mesh=replace(config.mesh, tp=1, sequence_parallel=False))
    train(config, join_world(Mesh(1), placement=ALONE))
    return mdata.open_corpus(path)


@pytest.mark.parametrize("name", ["begun", "bare", "gpt2", "byte", "null"])
def test_a_run_speaks_the_language_of_its_corpus(name, kinds, tmp_path):
    """Type and options too: the run folder alone gives the tokenizer again, and a text."""
    prompt, kind = kinds[name]
    corpus = _run(kind, tmp_path / "run")
    theirs, ours = corpus.load_tokenizer(), run_tokenizer(tmp_path / "run")
    assert (ours.name, ours.fingerprint, dict(ours.options)) == (theirs.name, theirs.fingerprint, dict(theirs.options))
    assert list(ours.encode_batch([prompt])[0]) == list(theirs.encode_batch([prompt])[0])
    world = join_world(Mesh(1), placement=ALONE)
    (text,) = generate(tmp_path / "run", [prompt], sampling=Sampling(max_tokens=5), world=world)
    assert text.prompt == prompt and text.step == 1 and isinstance(text.text, str)


def test_an_option_decides_what_a_prompt_is(kinds, tmp_path):
    _run(kinds["begun"][1], tmp_path / "begun")
    _run(kinds["bare"][1], tmp_path / "bare")
    begun, bare = (_encode(run_tokenizer(tmp_path / name), "Once") for name in ("begun", "bare"))
    assert begun[1:] == bare and begun[0] == run_tokenizer(tmp_path / "bare").eod


def test_a_run_of_an_older_version_has_the_one_type_of_then(kinds, tmp_path):
    corpus = _run(kinds["begun"][1], tmp_path)
    (tmp_path / "tokenizer_facts.json").unlink()
    assert run_tokenizer(tmp_path).fingerprint == corpus.tokenizer_fingerprint


def test_a_run_without_a_tokenizer_is_refused_by_name(tmp_path):
    with pytest.raises(UsageError, match=r"has no tokenizer(.|\n)*mdata adopt"):
        run_tokenizer(tmp_path)


def test_a_tokenizer_that_is_not_the_one_of_the_data_is_refused(kinds, tmp_path):
    _run(kinds["gpt2"][1], tmp_path)
    merges = tmp_path / "tokenizer" / "merges.txt"
    merges.write_text("".join(merges.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(DamageError, match=r"is not the tokenizer that tokenizer_facts\.json describes"):
        run_tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"type": "ByteTokenizer"}', "[" * 30_000, "9" * 5000])
def test_facts_that_are_none_are_refused(content, tmp_path):
    (tmp_path / "tokenizer_facts.json").write_text(content)
    with pytest.raises(DamageError, match="does not name a tokenizer"):
        run_tokenizer(tmp_path)


def test_the_corpus_that_names_its_tokenizer_answers_for_a_blend(kinds, tmp_path):
    corpus = _run(kinds["byte"][1], tmp_path / "own")
    write_pair(tmp_path / "bare", [[40]] * 9)
    options = mdata.DatasetOptions(sequence_length=32, tokenizer_unknown="ok")
    dataset = mdata.Dataset.from_options(f"0.5 {tmp_path}/bare 0.5 {corpus.path}", options)
    assert dataset.tokenizer.type == "ByteTokenizer" and dataset.tokenizer_files == {}
    alone = mdata.open_dataset(tmp_path / "bare", sequence_length=32)
    assert alone.tokenizer is None and alone.tokenizer_files == {}


def test_a_tokenizer_of_numbers_refuses_words_and_begins_an_empty_prompt():
    tokenizer = build_tokenizer("NullTokenizer", {}, options={"vocab_size": 51})
    assert _encode(tokenizer, "") == [50] and _encode(tokenizer, "7 8") == [7, 8]
    with pytest.raises(UsageError, match="the prompt has no tokens: 'Once' is not a whole number"):
        _encode(tokenizer, "Once")
