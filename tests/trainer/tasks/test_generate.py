"""Texts: the same on one rank and on several, in a batch and alone, after an interruption; and what is refused."""

from __future__ import annotations

import itertools
import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import mdata
from mdata import DamageError, UsageError
from mdata.tokenizers.registry import build_tokenizer
from tests.helpers.corpora import write_pair
from tests.helpers.examples import soaked
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import make_config, write_jsonl
from tests.trainer.shapes import SHAPES
from trainer.models.gpt.model import build_gpt
from trainer.models.gpt.params import parameter_table
from trainer.parallel.init import ElementRange, initialize_
from trainer.parallel.mesh import Mesh
from trainer.parallel.params import Place
from trainer.parallel.placement import Placement
from trainer.parallel.world import join_world
from trainer.run.train import train
from trainer.tasks.generate import (
    GenerationRequest,
    _lines_there,
    continue_rows,
    read_prompts,
    search_beams,
    write_samples,
)
from trainer.tasks.loaded_model import Model, prompt_ids, run_tokenizer
from trainer.tasks.sampling import Sampling
from trainer.tasks.text_stream import TextStream


def _model(context, name, *, eod=None, pp=1):
    world = context.join(Mesh(context.world, context.world // pp, pp=pp))
    tp, shape = world.groups["tp"], SHAPES[name]
    place = Place(tp_rank=tp.rank, tp_size=tp.size, stage=world.groups["pp"].rank, num_stages=pp, ends_apart=pp > 1)
    model = build_gpt(shape, place, groups={"tp": tp}, dtype=torch.float64, device=world.device)
    named = dict(model.named_parameters())
    for spec in parameter_table(shape, model.place):
        initialize_([ElementRange(spec, 0, spec.numel, named[spec.name].data.view(-1))], seed=3)
    sizes = {"vocab_size": shape.vocab_size, "rows": shape.vocab_size, "context": 16}
    return Model(module=model, world=world, ends=frozenset(() if eod is None else (eod,)), **sizes)


def _text(context, name, greedy, eod=None, prompt=(1, 2, 3), pp=1):
    request = GenerationRequest(ids=tuple(prompt), rules=Sampling(max_tokens=24, greedy=greedy))
    (answer,) = continue_rows(_model(context, name, eod=eod, pp=pp), [request], sliding=True)
    return answer.tokens


@pytest.mark.parametrize(
    ("name", "greedy"), soaked(itertools.product(SHAPES, [True, False]), but=[("gpt2", True), ("wide", False)])
)
def test_the_text_does_not_depend_on_the_layout(name, greedy):
    (alone,) = run_ranks(_text, 1, name, greedy)
    assert run_ranks(_text, 2, name, greedy) == [alone, alone]
    assert run_ranks(_text, 4, name, greedy, None, (1, 2, 3), 2) == [alone] * 4, "tp 2 x pp 2"
    assert len(alone) == 24, "longer than the context: the oldest tokens fall out"
    assert max(alone) < SHAPES[name].vocab_size


def _logits(context):
    return tuple(_model(context, "llama").logits([1, 2]).shape)


@pytest.mark.parametrize("ranks", [1, 2])
def test_padding_is_no_choice(ranks):
    assert run_ranks(_logits, ranks) == [(2, SHAPES["llama"].vocab_size)] * ranks


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
    assert cut == ids[: ids.index(ids[5]) + 1], "with the token that ended it"


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
    stream = TextStream(_words(tmp_path), [1, 2])
    assert [stream.add(3), stream.add(1), stream.finish()] == [" saw", " the", ""] and stream.text == " saw the"


def test_a_prompt_is_not_continued_after_its_end(tmp_path):
    from tokenizers.processors import TemplateProcessing

    tokenizer = _words(tmp_path, post_processor=TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 0)]))
    assert prompt_ids(tokenizer, "the man") == [1, 2]
    assert prompt_ids(tokenizer, "") == [0]


def test_a_prompt_that_is_not_text_is_refused(tmp_path):
    with pytest.raises(UsageError, match="the prompt is not UTF-8 text"):
        prompt_ids(_words(tmp_path), "the \udcff")


def test_a_folder_without_a_model_is_refused(tmp_path):
    world = join_world(Mesh(1), placement=ALONE)
    with pytest.raises(UsageError, match="is not a model that mtrain can read"):
        Model.load(tmp_path, world=world)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UsageError, match="there is no checkpoint 'step-9'"):
        Model.load(tmp_path, world=world, checkpoint="step-9")


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
    model = Model.load(tmp_path / "run", world=join_world(Mesh(1), placement=ALONE))
    request = GenerationRequest(ids=tuple(model.encode(prompt)), rules=Sampling(max_tokens=5))
    (answer,) = continue_rows(model, [request])
    assert model.step == 1 and isinstance(answer.text, str)


def test_an_option_decides_what_a_prompt_is(kinds, tmp_path):
    _run(kinds["begun"][1], tmp_path / "begun")
    _run(kinds["bare"][1], tmp_path / "bare")
    begun, bare = (prompt_ids(run_tokenizer(tmp_path / name), "Once") for name in ("begun", "bare"))
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
    assert prompt_ids(tokenizer, "") == [50] and prompt_ids(tokenizer, "7 8") == [7, 8]
    with pytest.raises(UsageError, match="the prompt has no tokens: 'Once' is not an integer"):
        prompt_ids(tokenizer, "Once")


REQUESTS = (
    ((1, 2, 3, 4, 5, 6, 7), Sampling(max_tokens=8, greedy=True)),
    ((9,), Sampling(max_tokens=5, temperature=1.0, top_k=7, top_p=0.9)),
    ((4, 4), Sampling(max_tokens=12, repetition_penalty=1.3, frequency_penalty=0.5, min_p=0.01)),
    ((8, 1, 9, 2), Sampling(max_tokens=1, logit_bias={3: 50.0})),
)


def _batch(context, alone):
    model = _model(context, "llama", eod=11, pp=context.world // 2 or 1)
    requests = [
        GenerationRequest(ids=ids, rules=rules, number=i, log_probs=2) for i, (ids, rules) in enumerate(REQUESTS)
    ]
    answers = [continue_rows(model, [one])[0] for one in requests] if alone else continue_rows(model, requests)
    return [(answer.tokens, answer.finish_reason, answer.log_probs) for answer in answers]


def test_a_row_of_a_batch_equals_the_row_alone():
    (alone,) = run_ranks(_batch, 1, True)
    for ranks in (1, 4):
        for answers in run_ranks(_batch, ranks, False):
            for (tokens, reason, log_probs), mine in zip(answers, alone, strict=True):
                assert (tokens, reason) == mine[:2] and log_probs == pytest.approx(mine[2], abs=1e-5)
    assert alone[3][0] == [3] and alone[3][1] == "length"


def _scores(context):
    model, rows = _model(context, "llama", pp=context.world // 2 or 1), [[1, 2, 3, 4], [7, 8]]
    scores = model.score(rows, top=3, bias={5: 2.0})
    assert scores.top_BSN is not None
    logits = model.logits(rows[0])
    logits[:, 5] += 2.0
    log_probs = logits.log_softmax(-1)
    values, ids = log_probs[:-1].sort(descending=True, stable=True)
    assert torch.allclose(scores.log_prob_BS[0], log_probs[range(3), rows[0][1:]], atol=1e-5)
    assert scores.greedy_BS[0].tolist() == (log_probs[:-1].argmax(-1) == torch.tensor(rows[0][1:])).tolist()
    assert scores.top_BSN[1][0].tolist() == ids[:, :3].tolist()
    assert torch.allclose(scores.top_BSN[0][0], values[:, :3], atol=1e-5)
    return logits.tolist(), scores.log_prob_BS[1, 0].item()


def test_scores_are_those_of_the_whole_logits_in_every_layout():
    ((logits, second),) = run_ranks(_scores, 1)
    for ranks in (2, 4):
        for found, other in run_ranks(_scores, ranks):
            assert torch.allclose(torch.tensor(found), torch.tensor(logits), atol=1e-5)
            assert other == pytest.approx(second, abs=1e-5)


def _beams(context):
    model = _model(context, "llama", eod=11)
    found = search_beams(model, [1, 2], width=3, max_tokens=4, count=2)
    scores = [model.score([[1, 2, *beam.tokens, *([11] if beam.stopped else [])]]) for beam in found]
    return [
        (beam.tokens, beam.total, score.log_prob_BS[0, 1:].sum().item())
        for beam, score in zip(found, scores, strict=True)
    ]


def test_beams_have_the_sums_of_their_tokens():
    (found,) = run_ranks(_beams, 1)
    assert len(found) == 2 and all(total == pytest.approx(summed, abs=1e-5) for _, total, summed in found)
    for ranks in run_ranks(_beams, 2):
        assert [tokens for tokens, *_ in ranks] == [tokens for tokens, *_ in found]


def _refused(context):
    model = _model(context, "llama", eod=11)
    size = model.vocab_size
    for ids, rules, text in (
        ((1,) * 10, Sampling(max_tokens=7), "10 tokens of the prompt and 7 new ones"),
        ((1,) * 17, Sampling(), "17 tokens of the prompt"),
        ((1, size), Sampling(), f"token {size} is outside the vocabulary"),
        ((1, True), Sampling(), "a token is not an integer"),
        ((), Sampling(), "the prompt has no tokens"),
        ((1,), Sampling(stop=("x",)), "stop strings need a tokenizer"),
    ):
        with pytest.raises(UsageError, match=text):
            continue_rows(model, [GenerationRequest(ids=ids, rules=rules)])
    (answer,) = continue_rows(model, [GenerationRequest(ids=(1,) * 14, rules=Sampling(ignore_eod=True))])
    assert len(answer.tokens) == 2, "without --max-tokens the context decides"
    with pytest.raises(UsageError, match="a beam search over 2 rows cannot return 5 texts"):
        search_beams(model, [1], width=2, max_tokens=3, count=5)


def test_what_does_not_fit_is_refused_with_both_numbers():
    run_ranks(_refused, 1)


def _beams_of_nan(context):
    model = _model(context, "llama", eod=11)
    with torch.no_grad():
        model.module.head.weight.fill_(math.nan)
    with pytest.raises(DamageError, match="logits are not numbers"):
        search_beams(model, [1, 2], width=3, max_tokens=4)


def test_beams_of_a_broken_model_are_no_empty_answer():
    run_ranks(_beams_of_nan, 1)


def _samples(context, folder, calls):
    model, output = _model(context, "llama", eod=11), folder / "out.jsonl"
    for count, batch_size, cut in calls:
        requests = [GenerationRequest(ids=(1, 2), rules=Sampling(max_tokens=6), number=i) for i in range(count)]
        write_samples(model, requests, output, texts=["x"] * count, batch_size=batch_size)
        if cut:
            output.write_bytes(output.read_bytes()[:-cut])
    return output.read_text()


def test_an_interrupted_file_of_samples_goes_on(tmp_path):
    folders = [tmp_path / name for name in ("whole", "parts")]
    for folder in folders:
        folder.mkdir()
    (whole,) = run_ranks(_samples, 1, folders[0], [(5, 5, 0)])
    (parts,) = run_ranks(_samples, 1, folders[1], [(2, 2, 10), (4, 3, 1), (5, 2, 0), (5, 2, 0)])
    assert parts == whole and len(whole.splitlines()) == 5
    lines = [json.loads(line) for line in whole.splitlines()]
    assert [line["index"] for line in lines] == [0, 1, 2, 3, 4] and len({tuple(line["tokens"]) for line in lines}) > 1
    assert set(lines[0]) == {"index", "prompt", "text", "finish_reason", "tokens", "step", "job"}


def _mixed(context, folder):
    model, output = _model(context, "llama"), folder / "out.jsonl"
    requests = [GenerationRequest(ids=(1, 2), rules=Sampling(max_tokens=2), number=i) for i in range(2)]
    write_samples(model, requests, output, texts=["x", "x"])
    with pytest.raises(UsageError, match="has more samples than are asked for"):
        write_samples(model, requests[:1], output, texts=["x"])
    with pytest.raises(UsageError, match="has lines of another model, prompt or option"):
        write_samples(model, [replace(requests[0], ids=(1, 3)), requests[1]], output, texts=["x", "x"])


def test_lines_of_two_jobs_are_not_mixed(tmp_path):
    run_ranks(_mixed, 1, tmp_path)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ('{"prompt": "a"}\n{"text": "b"}', "line 2 has no prompt"),
        ('{"prompt": [1, true]}', "line 1 has no prompt"),
        ("{", "line 1 has no prompt"),
        ("[" * 100_000, "line 1 has no prompt"),
        ("\n \n", "has no prompts"),
        ('{"prompt": "a", "b": 1}', "line 1 has unknown keys"),
    ],
)
def test_prompts_that_are_none_are_named(content, text, tmp_path):
    (tmp_path / "in.jsonl").write_text(content)
    with pytest.raises(UsageError, match=text):
        read_prompts(tmp_path / "in.jsonl", strict=True)


def test_a_line_of_prompts_has_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.tasks.generate.MOST_LINE", 15)
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n{"prompt": "ab"}\n')
    with pytest.raises(UsageError, match="line 2 is too long\n  found: 16 bytes\n  expected: at most 15"):
        read_prompts(tmp_path / "in.jsonl")


def test_pipes_and_devices_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for read in (read_prompts, lambda path: _lines_there(path, None, [])):
        with pytest.raises(UsageError, match="pipe is not a regular file\n  found: a pipe"):
            read(tmp_path / "pipe")
        with pytest.raises(UsageError, match="/dev/zero is not a regular file\n  found: a device"):
            read(Path("/dev/zero"))


def test_prompts_are_texts_or_ids(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "a\\nb", "id": 7}\r\n\n{"prompt": [1, 2]}\n')
    assert read_prompts(tmp_path / "in.jsonl") == {1: "a\nb", 3: [1, 2]}
    with pytest.raises(UsageError, match=r"reading the prompts: .*none\.jsonl: No such file"):
        read_prompts(tmp_path / "none.jsonl")
