"""Tasks that score a run while it trains: in every layout the numbers of `mtrain eval` on its last checkpoint."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cli.mtrain import main
from mdata import BadInputError, UsageError, make_blend
from mdata.chat.prompt import answer_prompt
from mdata.chat.templates import choose_template
from tests.helpers.examples import soaked
from tests.helpers.ranks import RankContext, run_ranks
from tests.helpers.runs import make_chat, make_config, make_mix
from trainer.config.sections import CheckpointSection, EvaluateSection, MeshSection, RunConfig
from trainer.parallel.mesh import Mesh
from trainer.run.data import open_data
from trainer.run.metrics import read_metrics
from trainer.run.run_folder import tokenizer_files
from trainer.run.train import train
from trainer.tasks.generate import GenerationRequest, continue_rows
from trainer.tasks.in_training import FixedTask, read_evaluations, read_tasks, score_tasks, task_problems
from trainer.tasks.loaded_model import Model, template_of_run
from trainer.tasks.sampling import Sampling


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mix, a held-out corpus, and files of LAMBADA and WikiText."""
    folder = tmp_path_factory.mktemp("corpora")
    make_mix(folder, ["first", "second", "held"])
    texts = [json.loads(line)["text"] for line in (folder / "held.jsonl").read_text().splitlines()]
    passages = (" ".join(text.rstrip(".").split()[:n]) for n, text in enumerate(texts, 2))
    (folder / "lambada.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in passages))
    (folder / "wiki.txt").write_text("\n".join(texts[:3]))
    return folder


def _tasks(corpora: Path) -> tuple[str, ...]:
    names = {"lambada": "lambada.jsonl", "lambada-strict": "lambada.jsonl", "wikitext103": "wiki.txt"}
    return (*(f"{kind}={corpora / name}" for kind, name in names.items()), f"perplexity={corpora / 'mix.json'}")


def _config(corpora: Path, folder: Path, mesh: MeshSection | None = None, *, sharding: str = "state") -> RunConfig:
    valid = [corpora / "held_text_document.json"]
    config = make_config(folder, blend=corpora / "mix.json", valid=valid, steps=24, global_batch=8)
    return replace(
        config,
        mesh=mesh or MeshSection(),
        model=replace(config.model, num_layers=4),
        checkpoint=CheckpointSection(interval=12),
        evaluate=EvaluateSection(tasks=_tasks(corpora), interval=12),
        optimizer=replace(config.optimizer, lr=1e-2, sharding=sharding),  # type: ignore[arg-type]
    )


def _train(context: RankContext, config: RunConfig) -> None:
    mesh = config.mesh
    train(config, context.join(Mesh(context.world, mesh.tp, cp=mesh.cp, pp=mesh.pp)))


def _afterwards(context: RankContext, folder: Path, tasks: tuple[str, ...]) -> dict[str, float]:
    model = Model.load(str(folder), world=context.join(Mesh(1)))
    return score_tasks(read_tasks(tasks, tokenizer=True), model)


LAYOUTS = {
    "tp 2, sequence parallel": (2, MeshSection(tp=2, sequence_parallel=True), "state"),
    "dp 2, sharded parameters": (2, MeshSection(), "parameters"),
    "cp 2": (2, MeshSection(cp=2), "state"),
    "pp 2, interleaved": (2, MeshSection(pp=2, schedule="interleaved", virtual_pipeline=2), "state"),
    "pp 2, zb_v": (2, MeshSection(pp=2, schedule="zb_v"), "state"),
}


@pytest.fixture(scope="module")
def run(corpora: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on one rank, with its checkpoints of steps 12 and 24."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    run_ranks(_train, 1, _config(corpora, folder))
    return folder


@pytest.fixture(scope="module")
def alone(corpora: Path, run: Path) -> list[dict[str, float]]:
    """The scores of the run; its last ones are those of its checkpoint."""
    curve = [line.get("tasks") for line in read_metrics(run)]
    assert [scores is not None for scores in curve] == [step in (12, 24) for step in range(1, 25)]
    (afterwards,) = run_ranks(_afterwards, 1, run, _tasks(corpora))
    assert curve[23] == pytest.approx(afterwards, rel=1e-5)
    assert list(afterwards) == [
        "lambada accuracy",
        "lambada-strict accuracy",
        "wikitext103 perplexity",
        "first perplexity",
        "second perplexity",
    ]
    assert curve[11] != curve[23] and afterwards["lambada accuracy"] > 0
    return [scores for scores in curve if scores is not None]


@pytest.mark.parametrize("name", soaked(LAYOUTS, but=["pp 2, zb_v"]))
def test_scores_are_those_of_one_rank(name, alone, corpora, tmp_path):
    ranks, mesh, sharding = LAYOUTS[name]
    run_ranks(_train, ranks, _config(corpora, tmp_path / "run", mesh, sharding=sharding))
    curve = [line["tasks"] for line in read_metrics(tmp_path / "run") if "tasks" in line]
    for scores, expected in zip(curve, alone, strict=True):
        assert scores == pytest.approx(expected, rel=5e-3)  # their weights differ after 24 steps


def test_each_checkpoint_is_scored_afterwards(alone, run, corpora, capsys):
    task = ("--task", "perplexity", "--data", str(corpora / "mix.json"))
    assert main(["eval", str(run), "--all-checkpoints", *task, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [row["step"] for row in rows] == [12, 24]
    for row, scores in zip(rows, alone, strict=True):
        for name in ("first", "second"):
            assert row["corpora"][name]["ppl"] == pytest.approx(scores[f"{name} perplexity"], rel=1e-5)
    assert main(["eval", str(run), "--all-checkpoints", *task]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6 and lines[0].startswith("step 12: first: loss ") and lines[-1].startswith("step 24: total: ")
    kept = read_evaluations(run)
    assert kept.keys() == {"first perplexity (mix.json)", "second perplexity (mix.json)"}
    for name, of in kept.items():
        assert list(of.values()) == [row["corpora"][name.split()[0]]["ppl"] for row in rows] and list(of) == [12, 24]
    assert main(["report", str(run)]) == 0 and "second perplexity (mix.json)" in (run / "report.html").read_text()
    capsys.readouterr()
    assert main(["eval", str(corpora), "--all-checkpoints", *task]) == 2
    assert "needs the folder of a run" in capsys.readouterr().err


PROMPTS = ("the sea", "of a stone")


def _talking(folder: Path, corpus: Path, mesh: MeshSection | None = None) -> RunConfig:
    config = make_config(folder, blend=corpus, valid=[], steps=6, global_batch=4, micro_batch=2, sequence_length=64)
    return replace(
        config,
        data=replace(config.data, kind="chat"),
        mesh=mesh or MeshSection(),
        evaluate=EvaluateSection(prompts=PROMPTS, interval=3, answer_tokens=12),
        optimizer=replace(config.optimizer, lr=1e-2),
    )


def _answered(context: RankContext, folder: Path) -> list[str]:
    """The answers of the last checkpoint by the engine of `mtrain generate`."""
    model = Model.load(str(folder), world=context.join(Mesh(1)))
    assert model.tokenizer is not None
    template = choose_template("plain", model.tokenizer)
    rules = Sampling(temperature=0.0, max_tokens=12)
    ids = [tuple(answer_prompt(template, model.tokenizer, [("user", text)])) for text in PROMPTS]
    return [answer.text for answer in continue_rows(model, [GenerationRequest(ids=of, rules=rules) for of in ids])]


@pytest.mark.parametrize(
    "mesh", [MeshSection(cp=2), pytest.param(MeshSection(pp=2), marks=pytest.mark.soak)], ids=["cp", "pp"]
)
def test_prompts_are_answered_while_a_run_trains(tmp_path, mesh):
    corpus, folder = make_chat(tmp_path), tmp_path / "run"
    run_ranks(_train, 2, _talking(folder, corpus, mesh))
    lines = read_metrics(folder)
    assert [line["step"] for line in lines if "answers" in line] == [3, 6]
    told = lines[-1]["answers"]
    assert [one["prompt"] for one in told] == [*PROMPTS]
    (afterwards,) = run_ranks(_answered, 1, folder)
    assert [one["answer"] for one in told] == afterwards and all(afterwards)
    assert main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert "<h2>Answers</h2>" in page and all(f"<h3>{prompt}</h3>" in page for prompt in PROMPTS)


def test_prompts_that_cannot_be_asked_are_named(corpora, tmp_path):
    config = _config(corpora, tmp_path / "run")
    asked = replace(config, evaluate=EvaluateSection(prompts=("word " * 400,)))
    with pytest.raises(UsageError, match=r"prompt of another length\n.*tokens: 'word word"):
        open_data(asked)
    mock = replace(
        config, data=replace(config.data, blend="mock", valid=()), model=replace(config.model, vocab_size=99)
    )
    with pytest.raises(UsageError, match=r"evaluate\.prompts needs a tokenizer"):
        open_data(replace(mock, evaluate=EvaluateSection(prompts=("a",))))
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    chat = make_chat(tmp_path, chat_template=str(tmp_path / "own.jinja"))
    data = replace(config.data, kind="chat", blend=str(chat), valid=())
    asked = replace(config, data=data, evaluate=EvaluateSection(prompts=("a",)))
    open_data(asked)
    (plain := tmp_path / "plain").mkdir()
    mix = tmp_path / "mix.json"
    both = [{"path": str(path)} for path in (chat, make_chat(plain))]
    make_blend({"component": both, "allow_overlap": True}, mix)
    with pytest.raises(UsageError, match=r"found: 2 templates: own\.jinja, plain"):
        open_data(replace(asked, data=replace(data, blend=str(mix))))


def test_a_run_keeps_the_template_file_of_its_conversations(corpora, tmp_path):
    """The file is gone when the run is asked."""
    file, text = tmp_path / "own.jinja", "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    file.write_text(text)
    chat = make_chat(tmp_path, chat_template=str(file))
    file.unlink()
    config = _config(corpora, tmp_path / "run")
    data = open_data(replace(config, data=replace(config.data, kind="chat", blend=str(chat), valid=())))
    (tmp_path / "tokenizer_facts.json").write_bytes(tokenizer_files(data)["tokenizer_facts.json"])
    assert template_of_run(tmp_path) == ("own.jinja", text)


def test_tasks_that_cannot_be_read_are_named_before_the_run_starts(corpora, tmp_path):
    (tmp_path / "text").write_text("no JSON\n")
    with pytest.raises(UsageError, match="has 'squad=x'"):
        read_tasks(["squad=x"], tokenizer=True)
    with pytest.raises(UsageError, match="has lambada twice"):
        read_tasks([f"lambada={corpora / 'lambada.jsonl'}"] * 2, tokenizer=True)
    with pytest.raises(BadInputError, match="line 1 is not a passage"):
        read_tasks([f"lambada={tmp_path / 'text'}"], tokenizer=True)
    with pytest.raises(UsageError, match="needs a tokenizer"):
        read_tasks([f"wikitext103={tmp_path / 'text'}"], tokenizer=False)
    problems = task_problems(["squad=x", f"perplexity={tmp_path / 'no.json'}"])
    assert len(problems) == 2 and "no.json" in str(problems[1])
    config = replace(_config(corpora, tmp_path / "run"), evaluate=EvaluateSection(tasks=("lambada=missing",)))
    with pytest.raises(UsageError, match="missing"):
        open_data(config)
    tasks = open_data(_config(corpora, tmp_path / "run")).tasks
    assert tasks[0] == FixedTask("lambada", str(corpora / "lambada.jsonl"))
