"""`checkpoint.init_from` with its switches: what goes on from another run, what begins anew, and what is refused."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import mdata
from mdata import UsageError
from mdata.tokenizers.base.tokenizer import TokenizerConfig
from mdata.tracing.run_record import read_record
from tests.helpers.notes import Notes
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import make_corpora, write_jsonl
from tests.trainer.convert.hf_models import save_tokenizer
from tests.trainer.convert.test_megatron import everything, reference
from tests.trainer.engines import assemble, logical
from trainer.checkpoint.folder import latest_checkpoint, run_state
from trainer.config.parse import ReadConfig, parse_config
from trainer.config.sections import CheckpointSection, DataSection, MeshSection, OptimizerSection, RunConfig, RunSection
from trainer.convert.convert import ConvertOptions, convert, open_model
from trainer.convert.first_state import FirstState, check_tokenizer, first_state
from trainer.parallel.mesh import Mesh, mesh_of
from trainer.parallel.placement import Placement
from trainer.parallel.world import join_world
from trainer.plan.check import check
from trainer.plan.plan import make_plan
from trainer.run import train as train_module
from trainer.run.data import open_data
from trainer.run.engine import Engine
from trainer.run.launch import survey
from trainer.run.metrics import read_metrics
from trainer.run.resume import done_in, find_start, first_done
from trainer.run.train import train

NO_FILES: dict[str, dict[str, Any]] = {"Null": {"vocab_size": 300}, "Byte": {}}
SWITCHES = ("init_optimizer", "init_schedule", "init_data")


@pytest.fixture(scope="module")
def corpora(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("corpora")
    return make_corpora(folder, {name: write_jsonl(folder / f"{name}.jsonl", i) for i, name in enumerate("ab")})


def config_of(corpora: dict[str, Path], folder: Path, *, data: str = "a", **changes: dict[str, Any]) -> RunConfig:
    tables: dict[str, dict[str, Any]] = {
        "run": {"folder": str(folder)},
        "model": {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "tie_embeddings": False},
        "data": {"blend": str(corpora[data]), "order": "megatron"},
        "train": {"sequence_length": 16, "global_batch": 2, "micro_batch": 1, "steps": 8, "batch_ramp": "1 1 4"},
        "optimizer": {"lr": 1e-2, "schedule": "cosine", "warmup_steps": 2, "decay_steps": 8},
    }
    for name, keys in changes.items():
        tables[name] = tables.get(name, {}) | keys
    config, problems = parse_config(tables)
    assert config is not None, problems
    return config


def trained(config: RunConfig, *, exit_interval: int | None = None) -> list[str]:
    notes, train_ = Notes(), replace(config.train, exit_interval=exit_interval)
    train(replace(config, train=train_), join_world(Mesh(1), placement=Placement()), progress=notes)
    return notes.lines


def curve(folder: str | Path) -> list[tuple[Any, ...]]:
    names = ("step", "consumed_samples", "loss", "grad_norm", "lr")
    return [tuple(line[name] for name in names) for line in read_metrics(Path(folder))]


@pytest.fixture(scope="module")
def before(corpora, tmp_path_factory) -> Path:
    """A run that was ended after 4 of its 8 steps."""
    config = config_of(corpora, tmp_path_factory.mktemp("before") / "run")
    trained(config, exit_interval=4)
    return Path(config.run.folder)


def beginning(config: RunConfig, folder: Path, *switches: str) -> RunConfig:
    """The same with the first state of another run."""
    return replace(config, checkpoint=CheckpointSection(init_from=str(folder), **dict.fromkeys(switches, True)))


def test_with_all_switches_the_run_of_the_other_folder_goes_on_bit_for_bit(corpora, before, tmp_path):
    straight = config_of(corpora, tmp_path / "straight")
    trained(straight)
    config = beginning(config_of(corpora, tmp_path / "other"), before, *SWITCHES)
    told = trained(config, exit_interval=6)
    assert any(f"the first weights and moments are those of {before}/checkpoints/step-4 (mtrain)" in x for x in told)
    assert any("steps and data continue from it, after step 4 and 4 samples" in line for line in told)
    trained(config)  # its own checkpoint of step 6
    assert curve(config.run.folder) == curve(straight.run.folder)[4:]


@pytest.mark.parametrize("given", list(itertools.product([False, True], repeat=3)), ids=str)
@pytest.mark.parametrize("count_skipped", [True, False])
def test_each_switch_decides_one_thing(given, count_skipped, corpora, before, tmp_path):
    optimizer, schedule, data = given
    chosen = [name for name, on in zip(SWITCHES, given, strict=True) if on]
    config = beginning(config_of(corpora, tmp_path / "run"), before, *chosen)
    config = replace(config, optimizer=replace(config.optimizer, count_skipped=count_skipped))
    trained(config, exit_interval=5 if data else 1)
    (step, samples, _, _, lr), *_ = curve(config.run.folder)
    assert (step, samples) == ((5, 6) if data else (1, 2 if data else 1))
    rates = [line[4] for line in curve(before)]
    assert (lr == rates[0]) is not schedule
    run = run_state(latest_checkpoint(tmp_path / "run" / "checkpoints"))
    assert run.optimizer_steps == (5 if optimizer else 1)
    assert done_in(run).skipped_steps == 0
    assert done_in(run).scheduled(config.optimizer).steps == (5 if schedule else 1)


def test_a_switch_survives_a_restart(corpora, before, tmp_path):
    """Moments and data go on and the schedule begins anew: in one go, and with a stop behind each step."""
    once, often = (
        beginning(config_of(corpora, tmp_path / name), before, "init_optimizer", "init_data") for name in "ab"
    )
    trained(once)
    for _ in range(4):
        trained(often, exit_interval=1)
    assert curve(often.run.folder) == curve(once.run.folder) and len(curve(once.run.folder)) == 4
    (first, *later), (other, *_) = (read_record(run.run.folder).spans for run in (once, often))
    assert (first.steps_before, other.steps_before, later) == (0, 0, []), "its data goes on, so its steps are traced"


def test_a_run_that_goes_on_from_a_converted_checkpoint_is_traced_from_step_1(corpora, before, tmp_path):
    convert(before, tmp_path / "again", options=ConvertOptions(to="mtrain", check=False))
    config = beginning(config_of(corpora, tmp_path / "run"), tmp_path / "again", *SWITCHES)
    told = trained(config, exit_interval=5)
    assert [span.steps_before for span in read_record(config.run.folder).spans] == [0]
    assert not [line for line in told if "cannot be traced" in line]
    assert (tmp_path / "again" / "data.json").read_bytes() == (before / "data.json").read_bytes()


def test_steps_that_changed_nothing_are_not_counted_twice(corpora, before, tmp_path):
    """A run of 4 steps of which one was skipped: a schedule that stands still in such steps goes on after 3 of them."""
    config = beginning(config_of(corpora, tmp_path / "run"), before, *SWITCHES)
    data = open_data(config)
    run = replace(run_state(latest_checkpoint(before / "checkpoints")), optimizer_steps=3, skipped_samples=1)
    for count_skipped, steps in ((True, 4), (False, 3)):
        now = replace(config, optimizer=replace(config.optimizer, count_skipped=count_skipped))
        done = first_done(now, FirstState(before, run, ()))
        assert done.scheduled(now.optimizer).steps == steps
        assert (done.steps, done.skipped_steps, done.steps + done.moment_steps) == (4, 0, 3)
    assert find_start(config, data).done.steps == 4


def test_other_data_is_refused_where_it_should_go_on(corpora, before, tmp_path):
    config = beginning(config_of(corpora, tmp_path / "run", data="b"), before, "init_data")
    with pytest.raises(UsageError, match="trained on different data") as caught:
        find_start(config, open_data(config))
    assert "set checkpoint.init_data=false" in str(caught.value)
    assert find_start(beginning(config, before, "init_optimizer"), open_data(config)).done.samples == 0


def test_a_run_without_steps_left_is_refused(corpora, before, tmp_path):
    changes = {"train": {"steps": 4}, "optimizer": {"decay_steps": 4}}
    config = beginning(config_of(corpora, tmp_path / "run", **changes), before, "init_data")
    longer = open_data(config_of(corpora, tmp_path / "longer"))
    with pytest.raises(UsageError, match="none is left") as caught:
        find_start(config, longer)
    assert "step 4 and 4 samples" in str(caught.value) and "set train.steps" in str(caught.value)


@pytest.mark.parametrize("given", [0, 12])
def test_a_decay_under_way_is_not_stretched(given, corpora, tmp_path):
    """As where a run continues by itself: its end is that of the other run, unless one is set."""
    other = config_of(corpora, tmp_path / "other", optimizer={"decay_steps": None})
    trained(other, exit_interval=4)
    changes = {"optimizer": {"decay_steps": given}, "train": {"steps": 12}}
    longer = config_of(corpora, tmp_path / "longer", **changes)
    for switches, end in ((SWITCHES[:2], given or 8), (SWITCHES[:1], 12)):
        start = find_start(beginning(longer, Path(other.run.folder), *switches), open_data(longer))
        assert start.config.optimizer.decay_steps == end
        # The schedule counts the 4 steps of the other run and these 12.
        told = any("set optimizer.decay_steps=16 to let it decay until step 16" in note for note in start.notes)
        assert told == (end == 8)


def test_a_schedule_that_has_ended_is_not_gone_on_with(corpora, tmp_path):
    """Every step of the new run would have learning rate 0."""
    other = config_of(corpora, tmp_path / "other", optimizer={"decay_steps": None})
    trained(other)
    new = beginning(config_of(corpora, tmp_path / "new", train={"steps": 3}), Path(other.run.folder), "init_schedule")
    new = replace(new, optimizer=replace(new.optimizer, decay_steps=None))
    with pytest.raises(UsageError, match=r"^steps 1 to 3 would run at learning rate 0\n.*\n  try: .*decay_steps=11 "):
        find_start(new, open_data(new))


def test_the_checkpoint_that_was_looked_at_is_read_though_that_run_goes_on(corpora, before, tmp_path, monkeypatch):
    folder, real = shutil.copytree(before, tmp_path / "before"), train_module.find_start

    def find_start_and_wait(config: RunConfig, *arguments: Any, **options: Any) -> Any:
        start = real(config, *arguments, **options)
        if start.first:
            trained(config_of(corpora, folder))  # to step 8
        return start

    expected = beginning(config_of(corpora, tmp_path / "expected"), before, *SWITCHES)
    trained(expected, exit_interval=5)
    monkeypatch.setattr(train_module, "find_start", find_start_and_wait)
    config = beginning(config_of(corpora, tmp_path / "run"), folder, *SWITCHES)
    trained(config, exit_interval=5)
    assert latest_checkpoint(folder / "checkpoints").name == "step-8"
    assert curve(config.run.folder) == curve(expected.run.folder)


def test_moments_of_another_rule_are_refused_and_named(corpora, before, tmp_path):
    sgd = {"optimizer": {"name": "sgd", "momentum": 0.9}}
    config = beginning(config_of(corpora, tmp_path / "run", **sgd), before, "init_optimizer")
    with pytest.raises(UsageError, match="momentum_buffer/") as caught:
        find_start(config, open_data(config))
    assert "weight, exp_avg, exp_avg_sq" in str(caught.value)


def test_ids_that_are_other_text_to_the_folder_are_refused(corpora, before, tmp_path):
    hf = tmp_path / "hf"
    convert(before, hf, options=ConvertOptions(to="hf", check=False))
    config = beginning(config_of(corpora, tmp_path / "run"), hf)
    data, path = open_data(config), hf / "tokenizer.json"
    whole = json.loads(path.read_text())
    path.write_text(json.dumps({**whole, "normalizer": {"type": "NFC"}}))  # of another fingerprint
    assert find_start(config, data).done.steps == 0
    save_tokenizer(hf)  # as many ids, or fewer, for other letters
    with pytest.raises(UsageError, match=r"another tokenizer than that of checkpoint\.init_from") as caught:
        find_start(config, data)
    assert "'The year is 1969.' in the data" in str(caught.value) and len(str(caught.value).splitlines()) == 4
    path.unlink()
    assert find_start(config, data).done.steps == 0


def test_a_tokenizer_without_files_is_compared_too(corpora, before, tmp_path):
    def data_of(kind: str, text: str, **options: Any) -> RunConfig:
        (tmp_path / f"{kind}.jsonl").write_text(f'{{"text": "{text}"}}\n' * 100)
        prefix = str(tmp_path / kind)
        source = (str(tmp_path / f"{kind}.jsonl"),)
        mdata.preprocess(
            mdata.PreprocessOptions(input=source, output_prefix=prefix, tokenizer_type=kind, append_eod=True, **options)
        )
        rows = {"vocab_size": open_model(before).vocab_size}
        manifest = tmp_path / f"{kind}_text_document.json"
        return beginning(config_of({"a": manifest}, tmp_path / "run", model=rows), before)

    config = data_of("ByteTokenizer", "The year is 1969.")
    with pytest.raises(UsageError, match=r"another tokenizer than that of checkpoint\.init_from") as caught:
        find_start(config, open_data(config))
    assert "'The year is 1969.' in the data (ByteTokenizer of 257 ids)" in str(caught.value)
    config = data_of("NullTokenizer", "1 2 3 4 5", tokenizer_options=(("vocab_size", 100),))
    assert find_start(config, open_data(config)).done.steps == 0, "ids that never were text"
    ids, texts = (TokenizerConfig(f"{kind}Tokenizer", {}, options, "none") for kind, options in NO_FILES.items())
    check_tokenizer(texts, ids, where="a folder whose ids never were text")


def test_data_with_more_ids_than_the_weights_is_told_once_and_no_size_is_advised(corpora, tmp_path):
    """Advice to set model.vocab_size to either number is refused by the check of the other."""
    config = config_of(corpora, tmp_path / "small", model={"vocab_size": 64}, train={"batch_ramp": None})
    trained(replace(config, data=DataSection(blend="mock")), exit_interval=1)
    ids = open_data(config_of(corpora, tmp_path / "run")).facts.num_ids
    assert ids > 64
    for size in (0, 64, ids):
        asked = config_of(corpora, tmp_path / "run", model={"vocab_size": size})
        problems = survey(ReadConfig(beginning(asked, Path(config.run.folder)), []), 1).problems
        assert len(problems) == 1 and f"a tokenizer with {ids} ids, weights for 64" in problems[0]
        assert "vocab_size" not in problems[0]
    asked = config_of(corpora, tmp_path / "run", model={"vocab_size": 64})
    assert [
        f"set model.vocab_size to at least {ids}, or leave it out" in text
        for text in survey(ReadConfig(asked, []), 1).problems
    ] == [True]


def test_what_does_not_fit_is_told_with_the_keys_to_set(corpora, before, tmp_path):
    wider = {"model": {"num_kv_heads": 1, "tie_embeddings": True}}
    config = beginning(config_of(corpora, tmp_path / "run", **wider), before)
    with pytest.raises(UsageError, match="does not fit") as caught:
        find_start(config, open_data(config))
    found, expected = str(caught.value).splitlines()[1:3]
    assert found == (
        "  found: blocks.0.attention.k.weight [16, 16] instead of [8, 16], "
        "blocks.0.attention.v.weight [16, 16] instead of [8, 16] and 1 more"
    )
    assert expected == "  expected: model.num_kv_heads = 2, model.tie_embeddings = false"
    none = beginning(config, tmp_path / "none")
    with pytest.raises(UsageError, match=r"checkpoint\.init_from = .*none: there is no folder"):
        find_start(none, open_data(none))


def test_a_folder_without_a_run_has_nothing_that_goes_on(corpora, before, tmp_path):
    convert(before, tmp_path / "hf", options=ConvertOptions(to="hf", check=False))
    convert(tmp_path / "hf", tmp_path / "back", options=ConvertOptions(to="mtrain", check=False))
    for folder in (tmp_path / "hf", tmp_path / "back"):
        config = beginning(config_of(corpora, tmp_path / "run"), folder, "init_schedule", "init_data")
        data = open_data(config)
        with pytest.raises(
            UsageError, match=r"init_schedule and checkpoint\.init_data: .* contains no resumable training state"
        ):
            find_start(config, data)
        with pytest.raises(UsageError, match=r"exp_avg/.*\n  try: set checkpoint\.init_optimizer=false"):
            find_start(beginning(config, folder, "init_optimizer"), data)
        assert find_start(beginning(config, folder), data).done.steps == 0


def test_switches_without_a_folder_are_a_problem(corpora, tmp_path):
    config = config_of(corpora, tmp_path / "run", checkpoint={"init_data": True, "init_optimizer": True})
    (problem,) = check(config, 1, facts=None)
    assert problem.startswith("checkpoint.init_optimizer and checkpoint.init_data=true without checkpoint.init_from")


LOADABLE = [
    *(f"{kind}_tp{tp}pp{pp}_optim" for kind in ("gpt2", "llama") for tp in (1, 2) for pp in (1, 2)),
    *(f"{kind}_dp2_distopt_{form}_reshardable" for kind in ("gpt2", "llama") for form in ("dp", "fully")),
]


def megatron_config(folder: Path, name: str, *, mesh: MeshSection, sharding: str) -> RunConfig:
    config = open_model(folder).config
    return replace(
        config,
        run=RunSection(folder="unused", seed=3),
        train=replace(config.train, global_batch=4, micro_batch=1),
        mesh=mesh,
        optimizer=OptimizerSection(lr=1e-3, sharding=sharding),
        checkpoint=CheckpointSection(init_from=str(folder), init_optimizer=name == "moments"),
    )


def _state(context, config):
    world = context.join(mesh_of(config, context.world))
    engine = Engine(config, make_plan(config, context.world, facts=None), world=world)
    o = engine.optimizer
    return [[(f"{n}/{a}", b, c) for a, b, c in logical(o.holds[n], o.state[n])] for n in o.state], o.steps


def _whole(results):
    return assemble([part for groups, _ in results for group in groups for part in group])


@pytest.mark.parametrize("name", LOADABLE)
def test_moments_of_megatron_are_those_of_the_reference(name, oracles):
    folder = oracles / "oracle" / "model" / "checkpoints" / name
    config = megatron_config(folder, "moments", mesh=MeshSection(), sharding="state")
    found = _whole(results := run_ranks(_state, 1, config))
    assert results[0][1] == 3
    source = everything(open_model(folder).source)
    expected = reference(folder, open_model(folder).shape)
    inventory = json.loads((folder.parent / "inventory.json").read_text())
    allowed = inventory.get(name, {}).get("max_difference_from_one_process", {})
    most = max([1e-9, *(x for x in allowed.values() if isinstance(x, float))]) * 1.01
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(torch.from_numpy(found[key]).float(), source[key]), key
        if not key.endswith(("k.bias",)):
            torch.testing.assert_close(torch.from_numpy(found[key]).float(), value, atol=most, rtol=0)


@pytest.mark.parametrize(
    ("ranks", "mesh", "sharding"),
    [
        (4, MeshSection(tp=2, pp=2), "state"),
        (2, MeshSection(), "none"),
        (4, MeshSection(tp=2), "parameters"),
    ],
    ids=str,
)
def test_every_layout_begins_with_them(ranks, mesh, sharding, oracles):
    folder = oracles / "oracle" / "model" / "checkpoints" / "gpt2_tp2pp2_optim"
    config = megatron_config(folder, "moments", mesh=mesh, sharding=sharding)
    found, source = _whole(run_ranks(_state, ranks, config)), everything(open_model(folder).source)
    assert found.keys() == source.keys()
    for key, value in source.items():
        assert torch.equal(torch.from_numpy(found[key]).float(), value), key


def test_a_classic_folder_gives_its_weights_and_has_no_moments(oracles):
    folder = oracles / "oracle" / "model" / "checkpoints" / "gpt2_classic_tp2pp1"
    config = megatron_config(folder, "weights", mesh=MeshSection(tp=2), sharding="state")
    found, source = _whole(run_ranks(_state, 2, config)), everything(open_model(folder).source)
    for key, value in source.items():
        assert torch.equal(torch.from_numpy(found[key]).float(), value), key
    assert not any(found[key].any() for key in found.keys() - source.keys())


def test_a_dp_reshardable_folder_of_several_ranks_says_why_it_has_no_moments(corpora, before, tmp_path, oracles):
    folder = oracles / "oracle" / "model" / "checkpoints" / "llama_dp2_distopt_dp_reshardable"
    copy = shutil.copytree(folder, tmp_path / "copy")
    (common,) = copy.glob("iter_*/common.pt")
    state = torch.load(common, weights_only=False)
    state["args"].tensor_model_parallel_size = 2
    torch.save(state, common)
    config = megatron_config(copy, "moments", mesh=MeshSection(), sharding="state")
    with pytest.raises(UsageError, match="dp-reshardable form is read for tp = pp = 1"):
        first_state(config, config.model.vocab_size)
