"""Every shipped configuration loads, fits its mesh, and has the size that its comment says."""

from __future__ import annotations

from pathlib import Path

import pytest

import mdata
from tests.helpers.corpora import write_pair
from tests.helpers.manifests import corpus_of_pairs
from trainer.config.parse import load_config
from trainer.plan.check import DataFacts
from trainer.plan.plan import make_plan

CONFIGS = Path(__file__).parents[1] / "configs"
RUNS = sorted(path for path in CONFIGS.glob("*.toml") if "[run]" in path.read_text())


def facts(vocab_size: int) -> DataFacts:
    return DataFacts(
        vocab_size=vocab_size,
        largest_id=vocab_size - 1,
        eod=0,
        fingerprint="f",
        num_tokens=10**6,
        components=(("code", 700_000), ("prose", 300_000)),
    )


def test_there_are_runs():
    assert {path.name for path in RUNS} >= {"quickstart.toml", "gpt-small-h200.toml"}


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_each_run_can_be_planned_on_its_smallest_world(path):
    config = load_config(path)
    plan = make_plan(config, config.mesh.tp, facts=facts(2048))
    assert plan.num_microbatches * plan.micro_batch * plan.dp == plan.global_batch


def test_sizes_are_those_of_the_comments():
    small = make_plan(load_config(CONFIGS / "quickstart.toml"), 2, facts=facts(2048))
    assert 0.9e6 < small.num_parameters < 1.3e6
    large = make_plan(load_config(CONFIGS / "gpt-small-h200.toml"), 1, facts=facts(50_000))
    assert round(large.num_parameters / 1e6) == 355
    assert round((large.num_parameters - 50_000 * 1024) / 1e6) == 304
    experts = make_plan(load_config(CONFIGS / "experts-small.toml"), 1, facts=facts(16_384))
    sizes = (experts.num_parameters - 16_384 * 512, experts.active_parameters - 16_384 * 512)
    assert [round(size / 1e6) for size in sizes] == [109, 21]


def test_the_blend_can_be_planned(tmp_path, monkeypatch):
    """Over small corpora of the names that it names, as the command in its first line does it."""
    text = (CONFIGS / "blend.toml").read_text()
    (tmp_path / "mix.toml").write_text(text.replace("e9", "e4"))
    for number, name in enumerate(("web/a", "web/b", "books", "wiki", "code", "held")):
        (tmp_path / "corpora" / name).parent.mkdir(parents=True, exist_ok=True)
        write_pair(tmp_path / "corpora" / f"{name}_text_document", [[5]] * (8_000 + number))
    corpus_of_pairs(tmp_path / "corpora" / "code_text_document.json", ["code_text_document"])
    monkeypatch.chdir(tmp_path)
    preview = mdata.preview_blend(mdata.make_blend("mix.toml", "mix.json"), sequence_length=8, tokens=400_000)
    assert [row.name for row in preview.rows] == ["a", "b", "books", "wiki", "code"]
    assert [row.name for row in preview.groups] == ["web", "text"]
    assert preview.starts == (0, 12_500, 18_750, 31_250)
    assert preview.rows[4].phases == pytest.approx([0.1, 0.25, 0.2, 0.4], abs=1e-3)
    assert preview.num_samples == 50_000
