"""The report of made-up runs over real corpora, and of runs with little data."""

from __future__ import annotations

import html
import itertools
import json
import math
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

import mdata
from cli.mtrain import main as mtrain
from mdata import DamageError, UsageError
from mdata.reporting.svg import escape
from tests.helpers import runs
from trainer.config.sections import MeshSection
from trainer.plan.facts import plan_facts
from trainer.plan.plan import make_plan
from trainer.report import baselines
from trainer.report import data as report_data
from trainer.report import page as report_page
from trainer.report import plots as report_plots
from trainer.report.page import write_report
from trainer.run.data import open_data
from trainer.tasks.in_training import record_evaluation


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpora")
    made = runs.make_mix(folder, ("a-train", "b-train", "a-valid", "b-valid"))
    return {**made, "blend": folder / "mix.json", "folder": folder}


@pytest.fixture
def config(corpora, tmp_path):
    valid = [corpora["a-valid"], corpora["b-valid"]]
    return runs.make_config(tmp_path / "run", blend=corpora["blend"], valid=valid)


class Page(HTMLParser):
    """Text and tags of a page; every tag that opens is closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.text, self.tags = [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "wbr"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    def __str__(self):
        return " ".join(self.text)


def page_of(folder):
    path, _ = write_report(folder)
    assert path == folder / "report.html"
    return Page(path.read_text())


def test_the_page_says_what_happened(config):
    folder = runs.write_run(config, steps=40)
    (folder / "generated.jsonl").write_text('{"prompt": "time <b>", "text": " of<|endoftext|>", "step": 40}\n')
    page = page_of(folder)
    text = str(page)
    for part in ("a-valid", "b-valid", "Witten-Bell bigram", "bits per byte", "tokens per second", "0.12 % of the time",
                 "5,120 tokens read", "123,456 parameters", "60,000", "time <b>", "num_layers = 2",
                 "Generated text at step 40", "408.1 TFLOP/s of each rank", "41.2 % of the devices",
                 "at most 3.00 GiB held by rank 0",
                 "learning rate 0.001, weight decay 0.1"):  # fmt: skip
        assert part in text
    assert text.count("<|endoftext|>") >= 1
    assert [attrs for tag, attrs in page.tags if tag == "mark"]
    assert len([1 for tag, _ in page.tags if tag == "svg"]) == 7


def test_a_pipeline_is_drawn(config):
    """One row for each rank, one box for each pass of the microbatches shown."""
    folder = runs.write_run(config, steps=5)
    model = replace(config.model, num_layers=4, vocab_size=300)
    piped = replace(config, model=model, mesh=MeshSection(pp=2, schedule="interleaved"))
    facts = plan_facts(piped, make_plan(piped, 2, facts=None))
    (folder / "plan.json").write_text(json.dumps(facts))
    page, text = page_of(folder), (folder / "report.html").read_text()
    assert "Schedule interleaved, 2 microbatches a step: estimated bubble " in str(page)
    drawing = ElementTree.fromstring(re.search(r"<svg[^>]*Pipeline schedule of 2 ranks.*?</svg>", text, re.DOTALL)[0])
    assert [row.text for row in drawing.findall("text")] == ["rank 0", "rank 1"]
    titles = [box.find("title").text.split(":")[0] for box in drawing.findall("g")]
    assert sorted(titles) == sorted(f"{s}{kind}{m}" for s in range(4) for kind in "FB" for m in range(2))


def test_losses_are_said_beside_their_baselines(config):
    _, lines = write_report(runs.write_run(config, steps=40))
    assert len(lines) == 2 and lines[0].startswith("a-valid: 2.199 nats per token (unigram entropy ")
    assert "Witten-Bell bigram" in lines[1]


def test_the_page_needs_nothing_from_elsewhere(config):
    folder = runs.write_run(config, steps=5)
    page = page_of(folder)
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in page.tags}
    loaded = [v for _, attrs in page.tags for k, v in attrs.items() if k in ("src", "href", "xlink:href") and v]
    assert all(value.startswith("#") for value in loaded), loaded


def test_what_was_read_is_what_the_dataset_dealt(config):
    folder = runs.write_run(config, steps=25)
    run = report_data.read_run(folder)
    read = report_data.read_corpora(run).read
    assert [corpus.name for corpus in read] == ["a-train", "b-train"]
    assert [corpus.samples for corpus in read] == [70, 30]
    assert [corpus.share for corpus in read] == pytest.approx([0.7, 0.3])
    assert read[0].tokens == 70 * 32
    manifest = mdata.load_manifest(mdata.open_blend(config.data.blend).corpora[0].path)
    assert sum(read[0].lengths) == manifest.shards[0].documents
    assert read[0].epochs == pytest.approx(read[0].tokens / read[0].corpus_tokens, rel=0.05)


def test_baselines_are_fitted_on_the_rows_of_the_run(config):
    run = report_data.read_run(runs.write_run(config, steps=10))
    data = open_data(config)
    rows = [data.train[k] for k in range(40)]
    counts = baselines.count_pairs([(r["tokens"], r["labels"], r["loss_mask"]) for r in rows], 300)
    found, notes = report_data.baselines_of(run, data)
    assert not notes
    for name, dataset in data.valid.items():
        held = [dataset[k] for k in range(dataset.num_samples)]
        expected = baselines.evaluate(counts, [(r["tokens"], r["labels"], r["loss_mask"]) for r in held])
        assert found[name] == expected
        assert found[name].train_tokens == 40 * 32


def test_baselines_are_kept_for_their_state_of_the_run(config, monkeypatch):
    folder = runs.write_run(config, steps=10)
    data = open_data(config)
    first, _ = report_data.baselines_of(report_data.read_run(folder), data)
    monkeypatch.setattr(report_data, "count_pairs", None)  # a second count would fail
    assert report_data.baselines_of(report_data.read_run(folder), data) == (first, [])
    kept = json.loads((folder / "baselines.json").read_text())
    assert kept["facts"]["consumed_samples"] == 40
    shutil.rmtree(folder)
    runs.write_run(config, steps=11)
    (folder / "baselines.json").write_text(json.dumps(kept))
    with pytest.raises(TypeError, match="not callable"):
        report_data.baselines_of(report_data.read_run(folder), data)


def test_bits_per_byte(config, corpora):
    run = report_data.read_run(runs.write_run(config, steps=10))
    valid = report_data.read_corpora(run).valid[0]
    texts = [json.loads(line)["text"] for line in (corpora["folder"] / "a-valid.jsonl").open()]
    tokens = mdata.open_corpus(corpora["a-valid"]).num_tokens
    expected = tokens / sum(len(text.encode()) for text in texts) / math.log(2)
    assert valid.bits_per_byte == pytest.approx(expected)
    assert valid.curve[-1][0] == 40


def test_a_run_with_one_step_and_no_validation(corpora, tmp_path):
    config = runs.make_config(tmp_path / "run", blend=corpora["a-train"], valid=[])
    page = page_of(runs.write_run(config, steps=1))
    assert "no validation corpus" in str(page) and "Compared with n-gram" not in str(page)
    assert not (tmp_path / "run" / "baselines.json").exists()


def test_a_large_run_says_that_baselines_are_left_out(config, monkeypatch):
    monkeypatch.setattr(report_data, "MOST_TOKENS", 100)
    text = str(page_of(runs.write_run(config, steps=10)))
    assert "not computed above 100 training tokens; this run has read 1,280" in text
    assert "the model" in text


def test_data_that_has_moved_leaves_a_note(config):
    folder = runs.write_run(config, steps=10)
    text = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(text.replace("mix.json", "gone.json"))
    text = str(page_of(folder))
    assert "The data could not be opened" in text and "a-valid" in text and "Data read" not in text


def test_lines_without_values_are_left_out(config):
    folder = runs.write_run(config, steps=10)
    line = {"step": 11, "consumed_samples": 44, "loss": None, "tokens_per_s": None, "time_s": 1011.0}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    assert "1,408 tokens read" in str(page_of(folder))


def test_test_sets_are_shown_once_they_were_read(config):
    folder = runs.write_run(config, steps=10)
    assert "Test sets" not in str(page_of(folder))
    line = {"step": 11, "consumed_samples": 44, "loss": 2.0, "test": {"c-<test>": 1.23456}}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    text = str(page_of(folder))
    assert "Test sets" in text and "c-<test>" in text and "1.235" in text


def test_numbers_that_no_json_holds_are_left_out(config):
    """NaN and infinity are null in metrics.jsonl: of a router, of rewards, of a test set after a diverged run."""
    folder = runs.write_run(config, steps=10)
    experts = {"max": 1.5, "min": 0.5, "entropy": 1.25, "dropped": 0.0, "loads": [1, 3]}
    rewards = {"reward_chosen": 0.5, "reward_accuracy": 1.0}
    before = {"step": 11, "consumed_samples": 44, "loss": 2.0, "experts": {"1": experts}, "named_losses": rewards}
    diverged = {
        "step": 12,
        "consumed_samples": 48,
        "loss": None,
        "test": {"c-test": None},
        "experts": {"1": experts | {"entropy": None}},
        "named_losses": dict.fromkeys(rewards),
    }
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in (before, diverged))
    record_evaluation(folder, 10, {"scored": math.nan, "also scored": 0.5})
    text = str(page_of(folder))
    assert "also scored: 0.5" in text and "scored: nan" not in text
    assert "Experts" in text and "1.25" in text and "Preferences" in text
    assert "c-test" in text and "not a number" in text


def test_training_loss_has_a_line_for_each_corpus(config, monkeypatch):
    folder = runs.write_run(config, steps=40)
    text = (folder / "report.html", write_report(folder))[0].read_text()
    drawing = ElementTree.fromstring(re.search(r"<svg[^>]*Training loss by corpus.*?</svg>", text, re.DOTALL)[0])
    lines = [path for path in drawing.iter("path") if "line" in path.get("class", "")]
    assert [path.find("title").text for path in lines] == ["a-train", "b-train"]
    assert [path.get("d").count("L") + 1 for path in lines] == [40, 13]  # b-train is in every third step
    monkeypatch.setattr(report_page, "COLOURS", 1)
    assert "the 1 corpora read most often; 1 more" in str(page_of(folder))


def test_a_run_of_one_corpus_has_no_losses_by_corpus(corpora, tmp_path):
    config = runs.make_config(tmp_path / "run", blend=corpora["a-train"], valid=[])
    assert "training, by corpus" not in str(page_of(runs.write_run(config, steps=5)))


def test_nothing_to_report_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"nothing to report in .*no line in metrics.jsonl"):
        write_report(tmp_path)
    with pytest.raises(UsageError, match=r"there is no folder .*firs\n"):
        write_report(tmp_path / "firs")
    (tmp_path / "a.jsonl").write_text("{}")
    with pytest.raises(UsageError, match=r"a\.jsonl is a file, not a folder"):
        write_report(tmp_path / "a.jsonl")


@pytest.mark.parametrize("text", ["[{", "[" * 30_000, "9" * 5000])
def test_a_damaged_file_is_named(config, text):
    folder = runs.write_run(config, steps=2)
    (folder / "generated.jsonl").write_text(text)
    with pytest.raises(DamageError, match=r"generated.jsonl has a line that is not JSON"):
        write_report(folder)
    (folder / "ranks.json").write_text(text)
    with pytest.raises(DamageError, match=r"ranks.json is not JSON"):
        write_report(folder)


def test_answers_may_hold_any_character_of_a_line_end(config):
    folder = runs.write_run(config, steps=2)
    lines = [{"prompt": "a", "text": f"first{end}last word", "step": 1} for end in "\u0085\u2028\u2029\x1c\r"]
    (folder / "generated.jsonl").write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    assert str(page_of(folder)).count("last word") == len(lines)


def test_answers_may_hold_half_a_character(config):
    folder = runs.write_run(config, steps=2)
    (folder / "generated.jsonl").write_bytes(b'{"prompt": "a\xed\xa0\x80b", "text": "c", "step": 1}\n')
    assert "a?b" in str(page_of(folder))


def test_labels_of_lengths_stand_at_their_bars():
    """With more than ten classes every second one has a label."""
    read = report_data.CorpusRead(
        name="a", share=1.0, samples=3, tokens=9, corpus_tokens=9, epochs=1.0, lengths=[1] * 14
    )
    root = ElementTree.fromstring(f"<div>{report_plots.document_lengths([read])}</div>")
    bars = [node for node in root.iter() if node.tag == "rect" and node.get("height") and "c0" in node.get("class", "")]
    centres = [float(node.get("x")) + float(node.get("width")) / 2 for node in bars if len(node)]
    labels = {node.text: float(node.get("x")) for node in root.iter("text")}
    assert len(centres) == 14
    for number in (0, 2, 8, 12):
        assert labels[report_plots.largest(number)] == pytest.approx(centres[number], abs=3)


def test_a_report_ends_with_the_plan(config, monkeypatch):
    """A line of 10^18 samples takes no longer than the samples of the plan."""
    folder = runs.write_run(config, steps=25)
    run = report_data.read_run(folder)
    (folder / "plan.json").write_text(json.dumps({**run.plan, "num_samples": 120}))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**run.metrics[-1], "consumed_samples": 10**18}) + "\n")
    run = report_data.read_run(folder)
    corpora = report_data.read_corpora(run)
    assert [corpus.samples for corpus in corpora.read] == [84, 36]
    assert f"metrics.jsonl says that {10**18:,} samples were read, but the plan ends at 120" in corpora.notes[0]
    # Nor do counts of a run without a plan depend on how many there are.
    (folder / "plan.json").write_text("{}")
    monkeypatch.setattr(report_data, "MOST_TOKENS", 0)
    corpora = report_data.read_corpora(report_data.read_run(folder))
    assert [corpus.samples for corpus in corpora.read] == [7 * 10**17, 3 * 10**17]


NAMES = ["$\\frac{1}{$", "$a$ and $b$", "_hidden", "a\0b", "\ud800", "<b>&'\"", "x" * 3000, "\n", "%s {}"]


@pytest.mark.parametrize("name", NAMES)
def test_any_name_can_be_drawn(name):
    """As text, escaped; a long one is cut."""
    read = report_data.CorpusRead(
        name=name, share=1.0, samples=3, tokens=9, corpus_tokens=9, epochs=1.0, lengths=[0, 1, 2]
    )
    drawn = [
        report_plots.loss_panel(name, [(1.0, 2.0)], valid=[(1.0, 2.0)], lines=[(name, 1.5)]),
        report_plots.document_lengths([read]),
        report_plots.several("training", [(name, [(1.0, 2.0)], 0)], quantity="nats per token"),
    ]
    for drawing in drawn:
        drawing.encode()
        root = ElementTree.fromstring(f"<div>{drawing}</div>")
        wanted = html.unescape(escape(report_plots.shown(name)))
        assert any(wanted in text for text in root.itertext())


def test_labels_stand_clear_of_each_other():
    places = report_plots._spread([5.0, 5.01, 2.0, 5.02], (0.0, 10.0))
    assert places[0] == 5.0 and places[2] == 2.0
    assert places[1] - places[0] == pytest.approx(0.6) and places[3] - places[1] == pytest.approx(0.6)


def test_long_curves_are_thinned_by_means():
    curve = [(float(i), float(i % 2)) for i in range(2000)]
    thin = report_plots._thinned(curve)
    assert len(thin) <= 600 and thin[-1][0] == 1999.0
    assert thin[0] == (3.0, 0.5)
    assert report_plots._thinned(curve[:5]) == curve[:5]


ALTERED = {
    "plan.json": ['"x"', "[]", '{"num_parameters": "5"}', '{"world_size": {}}'],
    "ranks.json": ["{}", "[3]", '[{"copied_parameters": "many"}]', '[{"tp": []}]'],
    "metrics.jsonl": [
        '{"step": 1}',
        '{"step": 1, "consumed_samples": 4, "tokens_per_s": {}}',
        '{"step": 1, "consumed_samples": 4, "loss": "x"}',
        '{"step": 1, "consumed_samples": 4, "train": {"a": "x"}}',
        '{"step": 1, "consumed_samples": 4, "accuracy": {"a": "x"}}',
    ],
    "generated.jsonl": ["[]", '{"prompt": 3, "text": ""}', '{"text": ""}'],
    "baselines.json": ["[]", '{"facts": 3}', '{"valid": {"a": {"train_tokens": 1}}}'],
    "evaluations.json": ["[]", '{"a": 3}', '{"a": {"x": 1}}', '{"a": {"1": null}}'],
}  # fmt: skip


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in ALTERED.items() for text in texts])
def test_a_file_with_values_of_other_types_is_named(config, name, text):
    folder = runs.write_run(config, steps=2)
    (folder / name).write_text(text + "\n")
    with pytest.raises(DamageError, match=rf"{name} is not as mtrain wrote it"):
        write_report(folder)


def test_scores_of_tasks_are_drawn(config, tmp_path):
    folder = runs.write_run(config, steps=40)
    assert "Tasks" not in str(page_of(folder))
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line, accuracy in zip(lines[9::10], (0.1, 0.2, None, 0.4), strict=True):
        line |= {"tasks": {"lambada accuracy": accuracy}, "accuracy": {"dev": accuracy}}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    record_evaluation(folder, 30, {"wikitext103 perplexity (wiki <1>)": 20.0})
    record_evaluation(folder, 10, {"wikitext103 perplexity (wiki <1>)": 30.0})
    run = report_data.read_run(folder)
    samples = config.train.global_batch
    assert report_page.task_curves(run) == {
        "accuracy dev": [(10 * samples, 0.1), (20 * samples, 0.2), (40 * samples, 0.4)],
        "lambada accuracy": [(10 * samples, 0.1), (20 * samples, 0.2), (40 * samples, 0.4)],
        "wikitext103 perplexity (wiki <1>)": [(10 * samples, 30.0), (30 * samples, 20.0)],
    }
    text = str(page_of(folder))
    assert "Tasks" in text and "lambada accuracy: 0.4" in text and "wikitext103 perplexity (wiki <1>): 20" in text
    report_page.write_comparison([folder, folder], tmp_path / "both.html")
    assert "wikitext103 perplexity (wiki <1>)" in str(Page((tmp_path / "both.html").read_text()))


def happened(folder, *events):
    (folder / "events.jsonl").write_text("".join(json.dumps({"time_s": 0.0, **event}) + "\n" for event in events))


def test_what_happened_is_marked(config):
    folder = runs.write_run(config, steps=40)
    first = {"event": "start", "step": 0, "world_size": 2}
    happened(
        folder,
        first,
        {**first, "step": 8},
        {**first, "step": 10, "world_size": 4},
        {**first, "step": 12, "world_size": 4, "changed": {"mesh.tp": {"before": 2, "now": 4}}},
        {**first, "step": 14, "world_size": 4, "changed": {"data.blend": {"before": "a", "now": "b"}}},
        {"event": "spike", "step": 20},
        {**first, "step": 16, "world_size": 4, "rolled_back": True},
        {"event": "saved", "step": 30},
    )
    axis = report_page.axis_of(report_data.read_run(folder), [36])
    per_step = 4 * 32 / 1e6
    assert [(letter, round(x / per_step)) for x, letter, _ in axis.marks] == [
        ("R", 8), ("M", 9), ("L", 10), ("L", 12), ("M", 14), ("B", 16), ("S", 20)
    ]  # fmt: skip
    assert axis.step_at(10.5 * per_step) == 10 and axis.step_at(0.0) == 0 and axis.step_at(1.0) is None
    text = str(page_of(folder))
    assert "Dashed lines: R resumed, L layout changed, M mixture changed, S spike, B rolled back." in text
    assert "spike at step 20" in text and "mesh.tp from step 13 on" in text
    assert "<summary>1 mark<" in report_page._legend_of_marks(replace(axis, marks=axis.marks[:1]))
    assert "million tokens trained on; below: steps" in text


def test_a_mixture_that_changes_is_marked(corpora, tmp_path):
    spec = [f"[[component]]\nname = '{name}'\npath = '{corpora[name]}'" for name in ("a-train", "b-train")]
    for length, share in (("samples = 40", 0.9), ("", 0.3)):
        spec.append(f"[[phase]]\n{length}\nshares = {{ a-train = {share}, b-train = {1 - share:.1f} }}")
    (tmp_path / "mix.toml").write_text("\n".join(spec))
    mdata.make_blend(tmp_path / "mix.toml", tmp_path / "mix.json")
    config = runs.make_config(tmp_path / "run", blend=tmp_path / "mix.json", valid=[])
    assert "M: mixture changed at sample 40" in str(page_of(runs.write_run(config, steps=20)))


def test_perplexity_stands_beside_the_loss(config):
    folder = runs.write_run(config, steps=40)
    text = str(page_of(folder))
    loss = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["valid"]["a-valid"]
    assert "perplexity" in text and f"{math.exp(loss):.4g}" in text


def test_no_colour_has_two_meanings(config):
    """c0, c1 ... are corpora, the same in every drawing; all else has the colour of the text."""
    folder = runs.write_run(config, steps=40)
    text = (folder / "report.html", write_report(folder))[0].read_text()
    coloured = {}
    for drawing in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        for node in ElementTree.fromstring(drawing).iter():
            kind = re.search(r"\bc\d+$", node.get("class", ""))
            if kind:
                name = node.find("title").text.split(":")[0]
                coloured.setdefault(kind[0], set()).add(name)
    assert coloured == {"c0": {"a-train"}, "c1": {"b-train"}}
    assert not re.search(r"var\(--c\d", text[text.index("td.good { color: inherit") : text.index("</style>")])


def test_a_long_run_is_read_in_parts(config, monkeypatch):
    """Evenly spaced lines, those of evaluations, and the last ones: the same page, whatever the length."""
    config = replace(config, train=replace(config.train, eval_interval=50))
    folder = runs.write_run(config, steps=1000, eval_interval=50)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for name, value in {"WHOLE_BYTES": 1000, "BLOCKS": 40, "BLOCK_BYTES": 1024}.items():
        monkeypatch.setattr(report_data, name, value)
    monkeypatch.setattr(report_data, "last_metrics", lambda folder: lines[-3:])
    run = report_data.read_run(folder)
    assert 60 < len(run.metrics) < 250
    assert all(line in lines for line in run.metrics) and run.metrics[-1] == lines[-1]
    steps = [line["step"] for line in run.metrics]
    assert steps == sorted(set(steps)) and max(b - a for a, b in itertools.pairwise(steps)) < 40
    assert [line["step"] for line in run.metrics if line.get("valid")] == list(range(50, 1001, 50))
    assert "128,000 tokens read" in str(page_of(folder))
    monkeypatch.setattr(report_data, "MOST_EVALUATIONS", 5)
    monkeypatch.setattr(report_data, "BLOCK_BYTES", 64)  # shorter than a line
    assert len(report_data.read_run(folder).metrics) > 40


def test_runs_are_laid_over_each_other(config, tmp_path, capsys):
    first = runs.write_run(config, steps=40)
    other = replace(config, run=replace(config.run, folder=str(tmp_path / "other")))
    other = replace(other, optimizer=replace(other.optimizer, lr=5e-4))
    second = runs.write_run(other, steps=30)
    happened(second, {"event": "spike", "step": 3})
    out = tmp_path / "both.html"
    assert mtrain(["report", str(first), str(second), "-o", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    page, text = Page(out.read_text()), out.read_text()
    names = [f"{tmp_path.name}/run", f"{tmp_path.name}/other"]
    drawing = ElementTree.fromstring(re.search(r"<svg[^>]*training loss.*?</svg>", text, re.DOTALL)[0])
    lines = [path for path in drawing.iter("path") if "line" in path.get("class", "")]
    assert [(path.get("class"), path.find("title").text) for path in lines] == [
        ("line stroke-c0", names[0]), ("line stroke-c1", names[1])
    ]  # fmt: skip
    for part in ("validation loss of a-valid", "gradient norm", "optimizer.lr", "5e-04", "0.001"):
        assert part in str(page) or part.replace("5e-04", "0.0005") in str(page), part
    assert not {"script", "link", "img"} & {tag for tag, _ in page.tags}
    assert mtrain(["report", str(first), "-o", str(out)]) == 2
    with pytest.raises(UsageError, match="13 runs on one page"):
        report_page.write_comparison([first] * 13, out)
