"""`mdata trace` as a user meets it: by hand and on run folders, both ways, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import mdata
from cli.mdata import main
from mdata.loader.sampler import global_batch
from tests.helpers.runs import make_mix

READ = ["--sequence-length", "32"]
STEPS = [*READ, "--global-batch", "8", "--micro-batch", "2", "--dp", "2"]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with the corpora web and code, and mix.json of both."""
    folder = tmp_path_factory.mktemp("traced")
    make_mix(folder, ["web", "code"])
    return folder


@pytest.fixture
def trace(made, capsys, monkeypatch):
    """Run `mdata trace` in that folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(made)

    def run(*words: str) -> tuple[int, str, str]:
        code = main(["trace", *words])
        found = capsys.readouterr()
        return code, found.out, found.err

    return run


def table_of(text: str, header: str) -> list[list[str]]:
    """The cells of the rows below a header."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(header))
    rows = []
    for line in lines[start + 1 :]:
        if not line or line.startswith("and "):
            break
        rows.append([cell for cell in line.split("  ") if cell.strip()])
    return rows


def test_a_sample_with_its_text(trace, made):
    code, out, err = trace("mix.json", *READ, "--sample", "5", "--text", "--length", "0")
    assert (code, err) == (0, "")
    first, header, *rest = out.splitlines()
    assert first == "sample 5: sample 3 of web, epoch 0"
    assert header.split() == ["in", "the", "sample", "document", "its", "tokens", "sequences", "shard", "origin"]
    rows = [line.split() for line in rest if not line.startswith("document ")]
    texts = [line.partition(": ")[2] for line in rest if line.startswith("document ")]
    corpus = mdata.open_corpus(made / "web_text_document.json")
    tokenizer = corpus.load_tokenizer()
    for row, text in zip(rows, texts, strict=True):
        begin, _, end = row[2].partition("-")
        ids = corpus.document(int(row[1]))[int(begin) : int(end or begin) + 1]
        assert text == repr(tokenizer.decode(ids.tolist()))
        line = (made / "web.jsonl").read_text().splitlines()[int(row[5].rpartition(":")[2]) - 1]
        assert tokenizer.decode(corpus.document(int(row[1]))[:-1].tolist()) == json.loads(line)["text"]


def test_json_of_a_token_is_that_of_its_sample(trace, made):
    _, out, _ = trace("mix.json", *READ, "--token", "1000", "--json", "--tokens", "--text", "--length", "3")
    facts = json.loads(out)
    assert (facts["token"], facts["in_sample"], facts["sample"], facts["step"]) == (1000, 8, 31, None)
    dataset = mdata.open_dataset(made / "mix.json", sequence_length=32)
    ids = dataset[31]["tokens"].tolist()
    for part in facts["parts"]:
        assert part["ids"] == ids[part["first"] : part["first"] + min(3, part["tokens"])]
        assert len(part["text"]) == 3 and Path(part["file"]).name == f"{facts['component']}.jsonl"
    _, out, _ = trace("mix.json", *READ, "--token", "1000")
    assert f"place 8 of the sample: token 16 of document 5, id {ids[8]}\n" in out
    assert len(table_of(out, "in the sample")) == 1


def test_a_step_is_counted_then_listed(trace, made):
    code, out, _ = trace("mix.json", *STEPS, "--step", "3", "--rows", "3")
    assert code == 0
    assert out.startswith("step 3: samples 16 to 23\ncomponent  samples  share\nweb              6   0.75\n")
    assert out.endswith("and 5 more (--rows)\n")
    expected = global_batch(16, 8, seed=1234).tolist()
    rows = table_of(out, "row  sample")
    assert [int(row[1]) for row in rows] == expected[:3]
    assert [(row[2].strip(), row[3].strip()) for row in rows] == [("0", "0"), ("0", "0"), ("1", "0")]
    _, out, _ = trace("mix.json", *STEPS, "--step", "3", "--dp-rank", "1", "--json")
    head, *samples = map(json.loads, out.splitlines())
    assert head == {"step": 3, "rank": 1, "samples": 4, "first": min(expected[2:4] + expected[6:]),
                    "last": max(expected[2:4] + expected[6:]), "components": head["components"]}  # fmt: skip
    assert sum(head["components"].values()) == 4
    assert [one["sample"] for one in samples] == expected[2:4] + expected[6:]
    assert {one["rank"] for one in samples} == {1} and {one["microbatch"] for one in samples} == {0, 1}
    _, out, err = trace("mix.json", *STEPS, "--step", "3", "--rows", "3", "--json")
    assert len(out.splitlines()) == 1 + 3 and "3 of 8 samples of step 3 shown (--rows: more)" in err
    _, out, _ = trace("mix.json", *STEPS, "--step", "3", "--rows", "0")
    assert out.endswith("0.25\nand 8 more (--rows)\n")
    _, out, err = trace("mix.json", *STEPS, "--step", "3", "--rows", "0", "--json")
    assert len(out.splitlines()) == 1 and "(--rows)" not in err


def test_a_document_by_number_and_by_origin(trace):
    _, by_number, _ = trace("mix.json", *STEPS, "--component", "web", "--document", "7", "--until-step", "10", "--json")
    _, by_origin, _ = trace("mix.json", *STEPS, "--component", "web", "--origin", "web.jsonl:8", "--until-step", "10",
                            "--json")  # fmt: skip
    assert by_number == by_origin
    readers = [json.loads(line) for line in by_number.splitlines()]
    found = set()
    for sample in range(80):
        facts = json.loads(trace("mix.json", *STEPS, "--sample", str(sample), "--json")[1])
        if facts["component"] == "web" and any(part["document"] == 7 for part in facts["parts"]):
            found.add((facts["sample"], facts["step"], facts["rank"], facts["microbatch"]))
    assert {(one["sample"], one["step"], one["rank"], one["microbatch"]) for one in readers} == found != set()
    _, out, _ = trace("mix.json", *STEPS, "--component", "web", "--document", "7", "--rows", "1")
    assert "in the first 3 epochs of its component" in out and out.endswith("and more (--rows)\n")
    assert len(table_of(out, "step  sample")) == 1
    _, out, _ = trace("mix.json", *STEPS, "--component", "web", "--document", "7", "--until-sample", "0")
    assert out.endswith("no sample reads it before the search ends (with the run, --until-step or --until-sample)\n")


def test_an_origin_is_looked_for_in_all_components(trace):
    words = ("mix.json", *STEPS, "--until-step", "10")
    _, out, _ = trace(*words, "--origin", "code.jsonl:3", "--text", "--length", "9")
    assert out.startswith("document 2 of code, ")
    assert out == trace(*words, "--component", "code", "--document", "2", "--text", "--length", "9")[1]
    assert "\nsample " in out and "\ndocument 2: '" in out
    code, _, err = trace(*words, "--origin", "no.jsonl:3")
    assert code == 2 and "no component has a document of no.jsonl:3\n  found: no.jsonl is not an input of web" in err
    _, out, err = trace("mix.json", *READ, "--origin", "code.jsonl:3", "--json", "--rows", "2")
    assert len(out.splitlines()) == 2 and "more than 2 samples read document 2" in err


def test_options_by_hand(trace, made):
    words = ("--order", "megatron", "--num-samples", "40", "--seed", "3")
    _, out, _ = trace("mix.json", *READ, *words, "--sample", "7", "--tokens", "--length", "0", "--json")
    facts = json.loads(out)
    dataset = mdata.open_dataset(made / "mix.json", sequence_length=32, num_samples=40, seed=3, order="megatron")
    assert [id for part in facts["parts"] for id in part["ids"]][:32] == dataset[7]["tokens"].tolist()
    assert facts["epoch"] is None
    _, out, _ = trace(
        "web_text_document", *READ, "--kind", "document", "--option", "longer=drop", "--sample", "0", "--json"
    )
    assert len(json.loads(out)["parts"]) == 1
    _, out, err = trace("web_text_document", *READ, "--option", "fim_rate=0.5", "--option",
                        'fim_tokens=[290, 291, 292, 293]', "--option", "fim_level=token", "--token", "70")  # fmt: skip
    assert "rearrange or mask" in err and "before any of it is rearranged" in out


def test_gone_origins_are_said_and_documents_stay(trace, made, tmp_path):
    for file in made.glob("web_text_document*"):
        shutil.copy(file, tmp_path) if file.is_file() else shutil.copytree(file, tmp_path / file.name)
    (tmp_path / "web_text_document.origins").unlink()
    code, out, err = trace(str(tmp_path / "web_text_document"), *READ, "--sample", "0")
    assert code == 0 and "web_text_document.origins is missing, so files and rows are not known" in err
    assert all(row[-1].strip() == "-" for row in table_of(out, "in the sample"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mix.json"], "takes one of --step, --sample, --token, --document, --origin\n  found: none of them"),
        (["mix.json", "--sample", "1", "--step", "1"], "found: --step, --sample"),
        (["mix.json", "--sample", "1"], "mix.json is not a run folder, and no option says how to read it"),
        (["mix.json", *READ, "--step", "1"], "steps are not known\n  try: a run folder, or --global-batch"),
        (["mix.json", *READ, "--micro-batch", "1", "--sample", "1"], "steps need --global-batch"),
        (["mix.json", *STEPS, "--step", "0"], "the run has no step 0"),
        (["mix.json", *STEPS, "--step", str(1 << 60)], f"the run has no step {1 << 60}\n"),
        (["mix.json", *STEPS, "--step", "1", "--dp-rank", "2"], "no rank 2 has rows of step 1"),
        (["mix.json", *READ, "--sample", "-1"], "the dataset has no sample -1"),
        (["mix.json", *READ, "--document", "1"], "there are several\n  expected: web, code\n  try: --component"),
        (["mix.json", *READ, "--component", "wob", "--document", "1"], "no component wob\n  expected: web, code\n"),
        (["mix.json", *READ, "--component", "web", "--document", "40"], "web has no document 40"),
        (["mix.json", *READ, "--component", "web", "--origin", "x.jsonl:1"], "x.jsonl is not an input of web"),
        (["mix.json", *READ, "--origin", "web.jsonl"], "error: origin 'web.jsonl' is not a row of"),
        (["mix.json", *READ, "--origin", f"web.jsonl:{1 << 63}"], "is not a row of a file"),
        (["mix.json", *READ, "--option", "longr=drop", "--sample", "1"], "--option longr=drop"),
        (["mix.json", *READ, "--blend", "x", "--sample", "1"], "mix.json is not a run folder, so --blend does not"),
        (["nothing.json", *READ, "--sample", "1"], "nothing.json"),
    ],
)  # fmt: skip
def test_a_wrong_trace_command_ends_with_code_2_and_names_the_mistake(trace, words, message):
    code, out, err = trace(*words)
    assert (code, out) == (2, "") and message in err
    assert len(err.splitlines()) <= 4 and err.startswith("mdata: error: ")
