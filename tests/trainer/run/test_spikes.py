"""A planted spike in real runs: found, shown, skipped or rolled back, exactly as with these samples in data.skip.

The fault: from a step on, the documents of one corpus are shuffled bytes. Megatron's order depends on the lengths of
documents alone, so shuffling their bytes does not change it, and a trace of the sound corpus says which to shuffle. A
document fills a row, so that no other step reads a part of it.
"""

from __future__ import annotations

import html
import json
import random
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import mdata
from cli.mdata import main as mdata_command
from cli.mtrain import main as mtrain
from mdata.tracing.run_folder import trace_run
from mdata.tracing.run_record import read_record
from mdata.util import file_lock
from tests.helpers.examples import soaked
from tests.helpers.failures import Killed
from tests.helpers.posts import receiving_posts
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import WORDS
from tests.trainer.run.one_rank import alone, curve, events
from trainer.config.parse import dump_config, parse_config
from trainer.config.sections import RunConfig, SpikesSection, TrackSection
from trainer.parallel.mesh import Mesh
from trainer.parallel.placement import Placement
from trainer.parallel.world import join_world
from trainer.plan.check import check
from trainer.run import spikes
from trainer.run.data import open_data
from trainer.run.step_report import DivergedError
from trainer.run.train import train

pytestmark = pytest.mark.usefixtures("one_thread")

BATCH, LENGTH = 16, 32


@dataclass(frozen=True)
class Plant:
    """A run of so many steps with a checkpoint at `saved`; `faults` steps from `faulty` on read shuffled documents.

    window: of steps, with which the detector compares.
    """

    steps: int
    saved: int
    faulty: int
    faults: int
    window: int


STEPS, SAVED, FAULTY, FAULTS = 98, 76, 86, 3
SHORT = Plant(STEPS, SAVED, FAULTY, FAULTS, window=48)
LONG = Plant(steps=360, saved=290, faulty=300, faults=40, window=64)


@dataclass(frozen=True)
class Corpora:
    """A blend of two corpora with equal shares, and the documents of the second that are shuffled."""

    blend: Path
    shuffled: dict[int, str]


def config_of(folder: Path, blend: Path, *, plant: Plant = SHORT, **spikes) -> RunConfig:
    tables = {
        "run": {"folder": str(folder), "seed": 7},
        "model": {"num_layers": 1, "hidden_size": 32, "num_heads": 2, "tie_embeddings": False},
        "data": {"blend": str(blend), "order": "megatron"},
        "train": {"sequence_length": LENGTH, "global_batch": BATCH, "micro_batch": 8, "steps": plant.steps},
        "optimizer": {"lr": 1e-2, "warmup_steps": 10},
        "checkpoint": {"interval": plant.saved, "keep": 9},
        "spikes": {"window": plant.window, **spikes},
    }
    config, problems = parse_config(tables)
    assert config is not None, problems
    return config


def write_corpus(folder: Path, name: str, texts: list[str]) -> Path:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = mdata.PreprocessOptions(
        input=(str(folder / f"{name}.jsonl"),),
        output_prefix=str(folder / name),
        tokenizer_type="ByteTokenizer",
        append_eod=True,
    )
    mdata.preprocess(options)
    return folder / f"{name}_text_document.json"


def texts(seed: int, count: int, *, width: int | None = None) -> list[str]:
    """Sentences of 16 to 22 words that follow each other by a rule; or rows of so many characters."""
    draw, rows = random.Random(seed), []
    for _ in range(count):
        start, length = draw.randrange(len(WORDS)), width or draw.randint(16, 22)
        rows.append(" ".join(WORDS[(start + 5 * i) % len(WORDS)] for i in range(length))[:width])
    return rows


def planted(plant: Plant, folder: Path) -> Corpora:
    sound, faulty = folder / "sound", folder / "faulty"
    width, count = LENGTH - 1, plant.steps * BATCH * 5 // 9  # with its end-of-document token a text fills a row
    rows = {name: texts(seed, count, width=width) for seed, name in ((1, "good"), (2, "bad"))}
    config = config_of(sound / "run", mixed(sound, rows), plant=plant)
    tracer = mdata.Tracer(open_data(config).train)
    draw, shuffled = random.Random(3), {}
    for sample in range((plant.faulty - 1) * BATCH, (plant.faulty - 1 + plant.faults) * BATCH):
        traced = tracer.sample(sample)
        if traced.name.startswith("bad"):
            document = traced.parts[0].document  # of the next one it has only a label
            shuffled[document] = "".join(draw.sample(rows["bad"][document], width))
    bad = [shuffled.get(document, text) for document, text in enumerate(rows["bad"])]
    return Corpora(mixed(faulty, {**rows, "bad": bad}), shuffled)


def mixed(folder: Path, rows: dict[str, list[str]]) -> Path:
    folder.mkdir()
    made = {name: write_corpus(folder, name, lines) for name, lines in rows.items()}
    mdata.make_blend(["0.5", str(made["good"]), "0.5", str(made["bad"])], folder / "mix.json")
    return folder / "mix.json"


@pytest.fixture(scope="module")
def corpora(one_thread, tmp_path_factory) -> Corpora:
    return planted(SHORT, tmp_path_factory.mktemp("corpora"))


@pytest.fixture(scope="module")
def reported(corpora, tmp_path_factory) -> RunConfig:
    """A run that only reports, with checkpoints at SAVED and at the end."""
    config = config_of(tmp_path_factory.mktemp("reported") / "run", corpora.blend)
    alone(config)
    return config


@pytest.fixture(scope="module")
def skipping(corpora, tmp_path_factory) -> RunConfig:
    """A run that skips on the device."""
    config = config_of(tmp_path_factory.mktemp("skipping") / "run", corpora.blend, action="skip")
    alone(config)
    return config


def from_checkpoint(reported: RunConfig, folder: Path, skip: tuple[str, ...], *, plant: Plant = SHORT) -> RunConfig:
    """A run that goes on from the first checkpoint without some samples."""
    shutil.copytree(reported.run.folder, folder)
    (folder / "checkpoints" / "latest").write_text(f"step-{plant.saved}")
    config = replace(reported, run=replace(reported.run, folder=str(folder)))
    return replace(config, data=replace(config.data, skip=skip))


def skipped_samples(first_step: int, last_step: int) -> str:
    return f"{(first_step - 1) * BATCH}-{last_step * BATCH - 1}"


def losses(config: RunConfig) -> dict[int, float]:
    return {step: loss for step, loss, _ in curve(config)}


def assert_found(plant: Plant, corpora: Corpora, config: RunConfig) -> None:
    """Within 3 steps, and its page names the corpus first and quotes the documents with file and row."""
    spike = events(config, "spike")[0]
    assert plant.faulty <= spike["step"] <= plant.faulty + 2
    assert spike["loss"] > spike["loss_limit"] and spike["losses"]["bad"] > 3 > spike["losses"]["good"]
    page = (Path(config.run.folder) / spike["page"]).read_text()
    assert not re.search(r"<script|<img|<link|src=|href=|@import|url\(", page)
    text = html.unescape(re.sub("<[^>]*>", "\n", page))
    by_corpus = text[text.index("Loss by corpus") : text.index("Gradient norm by group")]
    assert 0 < by_corpus.index("bad") < by_corpus.index("good"), "what stands out comes first"
    documents = text[text.index("Documents") : text.index("Surrounding steps")]
    tracer, (first, last) = trace_run(config.run.folder), spike["samples"]
    rows = [tracer.sample(sample) for sample in range(first, last + 1)]
    faulty = [row.parts[0] for row in rows if row.name == "bad"]
    assert len(faulty) >= 4
    for part in faulty:
        assert corpora.shuffled[part.document] in documents and f"bad.jsonl:{part.document + 1}" in documents
    around = text[text.index("Surrounding steps") :]
    assert f"{spike['step']} (spike)" in around and f"\n{spike['step'] + 10}\n" in around, (
        "written again ten steps later"
    )


def test_a_planted_spike_is_found_and_its_page_shows_the_documents(corpora, reported):
    assert_found(SHORT, corpora, reported)
    (spike,) = events(reported, "spike")
    assert sum(norm**2 for norm in spike["norms"].values()) == pytest.approx(spike["grad_norm"] ** 2, rel=1e-5)
    assert {"embedding.weight", "blocks.mlp.up.weight"} <= spike["norms"].keys()


def test_rolling_back_is_the_run_from_that_checkpoint_without_these_samples(corpora, reported, tmp_path):
    config = config_of(tmp_path / "back", corpora.blend, action="roll_back", skip_before=1, skip_after=FAULTS - 1)
    with receiving_posts() as posts:
        notes = alone(replace(config, track=TrackSection(to=("webhook",), webhook_url=posts.address)))
    assert [json.loads(body)["event"] for body in posts.bodies] == ["start", "spike", "finish"], (
        "one follower, no crash"
    )
    (rollback,) = events(config, "rollback")
    first, last = FAULTY - 1, FAULTY + FAULTS - 1
    samples = skipped_samples(first, last)
    assert (rollback["step"], rollback["checkpoint"]) == (FAULTY, f"step-{SAVED}")
    assert rollback["samples"] == list(map(int, samples.split("-")))
    assert any(f"rolling back to step-{SAVED}" in line for line in notes.lines)
    assert read_record(config.run.folder).skip == (tuple(rollback["samples"]),)
    checkpoint = Path(config.run.folder) / "checkpoints" / f"step-{STEPS}"
    assert read_record(checkpoint).skip == (tuple(rollback["samples"]),), "each later checkpoint knows them"
    assert [event["step"] for event in events(config, "skip")] == list(range(first, last + 1))
    assert [event["step"] for event in events(config, "start")] == [0, SAVED]
    assert_equals_the_run_without(samples, config, from_checkpoint(reported, tmp_path / "other", (samples,)))
    assert losses(config)[STEPS] != losses(reported)[STEPS]


@pytest.mark.parametrize(("keep", "saved"), soaked([(9, 68), (1, 85)], but=[(1, 85)]))
def test_no_checkpoint_was_trained_on_what_is_recorded_as_skipped(corpora, tmp_path, keep, saved):
    """It returns to before `skip_before` steps too; where it cannot, it trained on these, and does not deny it."""
    config = config_of(tmp_path / "run", corpora.blend, action="roll_back", skip_before=1, skip_after=FAULTS - 1)
    alone(replace(config, checkpoint=replace(config.checkpoint, interval=17, keep=keep)))
    (rollback,) = events(config, "rollback")
    first = max(FAULTY - 1, saved + 1)
    samples = skipped_samples(first, FAULTY + FAULTS - 1)
    assert (rollback["checkpoint"], rollback["samples"]) == (f"step-{saved}", list(map(int, samples.split("-"))))
    assert read_record(config.run.folder).skip == (tuple(rollback["samples"]),)
    assert [step for step, loss in losses(config).items() if loss is None] == list(range(first, FAULTY + FAULTS))


def test_a_kill_while_it_rolls_back_changes_nothing(corpora, tmp_path, monkeypatch):
    """The newest checkpoint was trained on a step to skip: `latest` must not name it once that is recorded."""
    spikes_of_run = {"action": "roll_back", "skip_before": 1, "skip_after": FAULTS - 1}
    configs = [config_of(tmp_path / name, corpora.blend, **spikes_of_run) for name in ("whole", "killed")]
    whole, killed = (replace(c, checkpoint=replace(c.checkpoint, interval=17)) for c in configs)
    alone(whole)
    calls = []

    def first_alone(real):
        def call(*words):
            if calls:
                raise Killed
            calls.append(real(*words))

        return call

    with monkeypatch.context() as patch:
        for name in ("record_skip", "point_to"):
            patch.setattr(spikes, name, first_alone(getattr(spikes, name)))
        with pytest.raises(Killed):
            alone(killed)
    alone(killed)
    assert curve(killed) == curve(whole)
    assert read_record(killed.run.folder).skip == read_record(whole.run.folder).skip


def assert_equals_the_run_without(samples: str, config: RunConfig, other: RunConfig) -> None:
    """Bit for bit, and only the steps of these samples have no loss."""
    alone(other)
    first, last = (int(sample) // BATCH + 1 for sample in samples.split("-"))
    assert losses(config) == losses(other) and list(losses(config)) == list(range(1, config.train.steps + 1))
    assert [step for step, loss in losses(config).items() if loss is None] == list(range(first, last + 1))


@pytest.mark.soak
def test_a_corpus_that_turns_bad_at_step_300(tmp_path):
    """It stays so for longer than one return skips: the run returns twice, and is the run without all its samples."""
    corpora = planted(LONG, tmp_path)
    reported = config_of(tmp_path / "reported", corpora.blend, plant=LONG)
    alone(reported)
    assert_found(LONG, corpora, reported)
    back = {"action": "roll_back", "skip_after": LONG.faults // 2 - 1}
    config = config_of(tmp_path / "back", corpora.blend, plant=LONG, **back)
    alone(config)
    assert [(event["step"], event["checkpoint"]) for event in events(config, "rollback")] == [
        (LONG.faulty, f"step-{LONG.saved}"),
        (LONG.faulty + LONG.faults // 2, f"step-{LONG.saved}"),
    ]
    samples = skipped_samples(LONG.faulty, LONG.faulty + LONG.faults - 1)
    assert read_record(config.run.folder).skip == (tuple(map(int, samples.split("-"))),)
    other = from_checkpoint(reported, tmp_path / "other", (samples,), plant=LONG)
    assert_equals_the_run_without(samples, config, other)


def test_skipping_on_the_device_is_the_run_without_these_samples(reported, skipping, tmp_path):
    steps = [event["step"] for event in events(skipping, "skip")]
    assert steps == list(range(FAULTY, FAULTY + FAULTS)) and len(events(skipping, "spike")) == 1
    other = from_checkpoint(reported, tmp_path / "other", tuple(skipped_samples(step, step) for step in steps))
    alone(other)
    left_out, trained = losses(other), losses(skipping)
    assert [step for step, loss in left_out.items() if loss is None] == steps
    assert {step: trained[step] for step in trained if step not in steps} == {
        step: left_out[step] for step in left_out if step not in steps
    }


@pytest.mark.parametrize(
    "stop", [FAULTY, *(pytest.param(step, marks=pytest.mark.soak) for step in (FAULTY - 1, FAULTY + 1, FAULTY + 2))]
)
def test_a_run_that_resumes_decides_the_same(stop, corpora, skipping, tmp_path):
    """Also between the steps of a spike."""
    config = config_of(tmp_path / "run", corpora.blend, action="skip")
    alone(replace(config, train=replace(config.train, exit_interval=stop)))
    alone(config)
    assert curve(config) == curve(skipping)
    whole, parts = ([event | {"time_s": 0} for event in events(c, "spike")] for c in (skipping, config))
    assert whole == parts and len(parts) == 1


def test_a_run_that_returns_too_often_ends(corpora, tmp_path):
    config = config_of(tmp_path / "run", corpora.blend, action="roll_back", max_rollbacks=1)
    with pytest.raises(DivergedError, match=f"the rollbacks to step-{SAVED} are used up"):
        alone(config)
    assert [event["step"] for event in events(config, "rollback")] == [FAULTY]
    assert all(event.get("rolled_back") for event in events(config, "start")[1:]), "no restarts without progress"


def test_without_an_earlier_checkpoint_the_run_goes_on(corpora, tmp_path):
    config = config_of(tmp_path / "run", corpora.blend, action="roll_back")
    config = replace(config, checkpoint=replace(config.checkpoint, interval=None))
    notes = alone(config)
    assert any("no checkpoint before" in line for line in notes.lines)
    assert len(curve(config)) == STEPS and not events(config, "rollback")


def _train(context, config):
    train(config, context.join(Mesh(context.world, config.mesh.tp)))


def test_two_ranks_roll_back_together(corpora, tmp_path):
    config = config_of(tmp_path / "run", corpora.blend, action="roll_back", skip_after=FAULTS - 1)
    run_ranks(_train, 2, config)
    (rollback,) = events(config, "rollback")
    assert rollback["checkpoint"] == f"step-{SAVED}"
    assert [step for step, loss in losses(config).items() if loss is None] == list(range(FAULTY, FAULTY + FAULTS))
    (spike,) = events(config, "spike")
    assert sum(norm**2 for norm in spike["norms"].values()) == pytest.approx(spike["grad_norm"] ** 2, rel=1e-5)


def test_some_rows_of_a_step_are_left_out_of_its_loss(corpora, reported, tmp_path):
    """A step whose samples are skipped in part trains on the others."""
    step = FAULTY - 5
    first = (step - 1) * BATCH
    config = from_checkpoint(reported, tmp_path / "run", (f"{first}-{first + 2}", f"{first + 5}-{first + 5}"))
    reports = []
    train(config, join_world(Mesh(1), placement=Placement()), callbacks=[reports.append])
    tokens = {finished.step: finished.report.num_tokens for finished in reports}
    assert (tokens[step - 1], tokens[step], tokens[step + 1]) == (BATCH * LENGTH, (BATCH - 4) * LENGTH, BATCH * LENGTH)
    assert losses(config)[step - 1] == losses(reported)[step - 1] and losses(config)[step] != losses(reported)[step]


def test_what_is_no_range_is_refused(corpora, tmp_path):
    config = config_of(tmp_path / "run", corpora.blend)
    for text in ("9", "9-8", "a-b", "-1-5"):
        problems = check(replace(config, data=replace(config.data, skip=(text,))), 1, facts=None)
        assert len(problems) == 1 and problems[0].startswith(f"data.skip={text!r} is not a range of samples; expected:")
    back = config_of(tmp_path / "run", corpora.blend, action="roll_back")
    back = replace(back, checkpoint=replace(back.checkpoint, interval=None, minutes=0.0))
    assert "has no checkpoint to return to" in check(back, 1, facts=None)[0]


@pytest.mark.parametrize("scale", [1, pytest.param(10, marks=pytest.mark.soak)])
def test_an_ordinary_run_raises_no_alarm(scale, tmp_path):
    """2,000 steps with a warmup, a mixture that changes at a step, and a ramp; a tenth of it in `make test`."""
    rows = {"plain": texts(1, 480), "other": [text[::-1] for text in texts(2, 480)]}
    made = {name: write_corpus(tmp_path, name, lines) for name, lines in rows.items()}
    shares = [(80, 0.9, ""), (50, 0.3, ""), (40, 0.8, "ramp = true"), (None, 0.8, "")]
    spec = [f"[[component]]\nname = '{name}'\npath = '{path}'" for name, path in made.items()]
    for steps, share, more in shares:
        length = f"samples = {steps * scale * BATCH}" if steps else ""
        spec.append(f"[[phase]]\n{length}\n{more}\nshares = {{ plain = {share}, other = {1 - share:.1f} }}")
    (tmp_path / "mix.toml").write_text("\n".join(spec))
    mdata.make_blend(tmp_path / "mix.toml", tmp_path / "mix.json")
    config = config_of(tmp_path / "run", tmp_path / "mix.json")
    data, of_run = replace(config.data, order="native"), replace(config.train, steps=200 * scale)
    optimizer, spikes = (
        replace(config.optimizer, warmup_steps=10 * scale),
        SpikesSection(window=128 if scale > 1 else 32),
    )
    config = replace(config, data=data, train=of_run, optimizer=optimizer, spikes=spikes)
    alone(config)
    assert len(curve(config)) == 200 * scale
    # So small a model has one step of a gradient five times as long as usual in 2,000, before the mixture changes.
    alarms = [event["step"] for event in events(config, "spike")]
    assert len(alarms) <= scale // 10 and all(step < 80 * scale for step in alarms), alarms


def test_a_humans_decision_is_recorded_and_kept(reported, tmp_path, capsys):
    """`mtrain skip` while the run rests; it applies from the next start on, and `mdata trace` knows it."""
    folder = tmp_path / "run"
    config = from_checkpoint(reported, folder, ())
    samples = skipped_samples(FAULTY, FAULTY + FAULTS - 1)
    assert mtrain(["skip", str(folder), "--steps", f"{FAULTY}-{FAULTY + FAULTS - 1}"]) == 0
    assert capsys.readouterr().out.endswith("are skipped from the next start on\n")
    assert mtrain(["skip", str(folder), "--samples", "5", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["steps"], said["trained_already"], said["continue_from"]) == ([1, 1], True, None)
    alone(config)
    assert [step for step, loss in losses(config).items() if loss is None] == list(range(FAULTY, FAULTY + FAULTS))
    other = from_checkpoint(reported, tmp_path / "other", (samples,))
    alone(other)
    assert losses(config) == losses(other)
    assert read_record(folder).skip == ((5, 5), tuple(map(int, samples.split("-"))))
    decisions = [event["samples"] for event in events(config, "skip") if event["why"] == "mtrain skip"]
    assert decisions == [list(map(int, samples.split("-"))), [5, 5]]

    assert mtrain(["skip", str(folder), "--steps", str(FAULTY - 2)]) == 0
    said = capsys.readouterr().out
    assert f"step-{STEPS}, was already trained on all of them" in said and f"write step-{SAVED} into" in said
    assert mdata_command(["trace", str(folder), "--step", str(FAULTY), "--rows", "1"]) == 0
    assert f"; {BATCH} of them are recorded as skipped" in capsys.readouterr().out
    assert mdata_command(["trace", str(folder), "--sample", "5"]) == 0
    assert ", recorded as skipped" in capsys.readouterr().out


def test_a_decision_about_steps_that_were_trained_on_is_taken_back(reported, tmp_path, capsys):
    """They have a loss; of a step that is recorded in part nobody knows."""
    folder = tmp_path / "run"
    config = from_checkpoint(reported, folder, (skipped_samples(SAVED + 2, SAVED + 2),))
    alone(config)
    for step in (SAVED - 3, SAVED - 2, SAVED + 4):
        assert mtrain(["skip", str(folder), "--steps", f"{step}"]) == 0
    first = (SAVED + 7) * BATCH
    assert mtrain(["skip", str(folder), "--samples", f"{first}-{first + 3}"]) == 0
    assert mtrain(["skip", str(folder), "--steps", f"{SAVED - 3}-{SAVED - 2}", "--undo"]) == 0
    assert mtrain(["skip", str(folder), "--steps", f"{SAVED + 4}", "--undo"]) == 0
    capsys.readouterr()
    for step in (SAVED + 2, SAVED + 8):
        assert mtrain(["skip", str(folder), "--steps", f"{step}", "--undo"]) == 2
        error = capsys.readouterr().err
        assert f"has already done step {step} without these samples" in error
        assert f"return to a checkpoint before step {step}" in error
    left = skipped_samples(SAVED + 2, SAVED + 2)
    assert read_record(folder).skip == (tuple(map(int, left.split("-"))), (first, first + 3))


def test_a_decision_is_taken_back(reported, tmp_path, capsys):
    """In part, and as if it had never been; not for steps that are done, or that an active run is about to skip."""
    folder = tmp_path / "run"
    config = from_checkpoint(reported, folder, ())
    last = FAULTY + FAULTS - 1
    assert mtrain(["skip", str(folder), "--steps", f"{FAULTY}-{last}"]) == 0
    capsys.readouterr()
    assert mtrain(["skip", str(folder), "--steps", f"{FAULTY - 3}-{FAULTY}", "--undo", "--json"]) == 0
    first = (FAULTY - 1) * BATCH
    said = json.loads(capsys.readouterr().out)
    assert (said["steps"], said["unskipped"]) == ([FAULTY, FAULTY], [[first, first + BATCH - 1]])
    assert read_record(folder).skip == ((first + BATCH, last * BATCH - 1),)
    assert mtrain(["skip", str(folder), "--steps", f"{FAULTY}-{last}", "--undo"]) == 0
    assert "are trained on after all from the next start on" in capsys.readouterr().out
    assert read_record(folder).skip == ()
    assert [(event["step"], event["steps"]) for event in events(config, "skip undone")] == [
        (FAULTY, [FAULTY, FAULTY]),
        (FAULTY + 1, [FAULTY + 1, last]),
    ]
    assert mtrain(["skip", str(folder), "--steps", f"{FAULTY}", "--undo"]) == 2
    assert "skips none of samples" in capsys.readouterr().err
    alone(config)
    assert losses(config) == losses(reported)

    assert mtrain(["skip", str(folder), "--steps", f"{FAULTY}"]) == 0
    (folder / "checkpoints" / "latest").write_text(f"step-{SAVED}")
    active = replace(config, data=replace(config.data, skip=(skipped_samples(FAULTY, FAULTY),)))
    (folder / "config.toml").write_text(dump_config(active))
    with file_lock.hold(folder / ".lock"):
        assert mtrain(["skip", str(folder), "--steps", f"{FAULTY}", "--undo"]) == 2
    assert "mtrain stop it first" in capsys.readouterr().err
    assert mtrain(["skip", str(folder), "--steps", f"{FAULTY}", "--undo"]) == 0


@pytest.mark.parametrize(
    "words",
    [
        ["--steps", "9-8"],
        ["--steps", "x"],
        ["--samples", "99999999"],
        ["--steps", "999"],
        ["--steps", f"{FAULTY}-{STEPS + 1}"],
        ["--samples", f"5-{STEPS * BATCH}"],
    ],
)
def test_a_decision_that_cannot_be_meant_is_refused(words, reported, tmp_path, capsys):
    before = (Path(reported.run.folder) / "data.json").read_bytes()
    assert mtrain(["skip", reported.run.folder, *words]) == 2
    assert (Path(reported.run.folder) / "data.json").read_bytes() == before
