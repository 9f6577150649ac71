"""Migrated runs of Megatron-LM: its example scripts, and rules for every argument of the table."""

from __future__ import annotations

import json
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.migrate import examples
from trainer.config.describe import Key
from trainer.config.parse import load_config
from trainer.config.sections import DataSection
from trainer.migrate.arguments import read_arguments
from trainer.migrate.flags import flag_table
from trainer.migrate.launcher import Launch, find_launch
from trainer.migrate.migrate import Migration, as_toml, migrate
from trainer.plan.check import check
from trainer.plan.plan import make_plan

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "megatron_arguments.json"
ARGUMENTS: dict[str, list[str | None]] = json.loads(GOLDEN.read_text(encoding="utf-8"))
TABLE = flag_table()
VERSION = "not supported by this version"
BASE = shlex.split(
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --lr 1e-3 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 10 --data-path corpus --tokenizer-type GPT2BPETokenizer"
)


@pytest.fixture
def every_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every key of the table were there with every value: what is mapped does not depend on the version."""
    monkeypatch.setattr("trainer.migrate.migrate.setting_problem", lambda name, value: None)


def settings(words: list[str], world_size: int | None = 1) -> dict[str, Any]:
    return {one.key: one.value for one in migrate(words, world_size).settings}


def loaded(launch: Launch, folder: Path, *overrides: str) -> tuple[Any, Migration]:
    """The configuration that load_config reads from what is written; keys that are not there yet are left out."""
    migration = migrate(launch.arguments, launch.world_size)
    assert all(VERSION in line for line in migration.refused), migration.refused
    path = folder / "run.toml"
    path.write_text(as_toml(migration, title="example", world_size=launch.world_size), encoding="utf-8")
    return load_config(path, overrides), migration


def test_every_argument_of_megatron_stands_in_the_table() -> None:
    assert not sorted(set(ARGUMENTS) - set(TABLE))
    kinds = {"switch": {"switch"}, "one": {"int", "float", "text"}, "several": {"texts"}}
    assert not [name for name, (kind, _) in ARGUMENTS.items() if TABLE[name].kind not in kinds[str(kind)]]


@pytest.mark.parametrize(
    ("words", "cache"),
    [
        (["--data-cache-path", "a"], "a"),
        (["--object-storage-cache-path", "b"], "b"),
        (["--s3-cache-path", "c"], "c"),
        (["--s3-cache-path", "c", "--data-cache-path", "a"], "a"),
    ],
)
def test_the_folder_for_arrays_is_also_that_for_blocks_of_stored_corpora(words: list[str], cache: str) -> None:
    data = ["--data-path", "s3://corpora/x_text_document", "--train-iters", "1", "--micro-batch-size", "1"]
    shape = ["--num-layers", "1", "--hidden-size", "8", "--num-attention-heads", "1", "--seq-length", "8"]
    found = settings([*data, *shape, "--max-position-embeddings", "8", "--lr", "1", *words])
    assert found["data.cache"] == cache


def test_defaults_are_those_of_megatron() -> None:
    """Of refused arguments too: with its default an argument passes."""
    for name, (_, default) in ARGUMENTS.items():
        flag = TABLE[name]
        if flag.use == "not needed" or default is None or default == "<|endoftext|>":
            continue
        ours = flag.default or ("single" if name == "--dataloader-type" else "")
        same = ours == default or (default[:1].isdigit() and float(ours or "nan") == float(default))
        assert same, (name, ours, default)


@pytest.mark.parametrize("name", [name for name, flag in TABLE.items() if flag.default is not None])
def test_a_default_given_changes_nothing(name: str, every_key: None) -> None:
    flag = TABLE[name]
    words = [*BASE, name, *str(flag.default).split()]
    if name == "--num-query-groups" or flag.same_as:
        return
    before, after = migrate(BASE, 1), migrate(words, 1)
    assert {one.key: one.value for one in after.settings} == {one.key: one.value for one in before.settings}
    assert not after.refused and not before.refused


@pytest.mark.parametrize("name", list(TABLE))
def test_no_argument_is_dropped_silently(name: str) -> None:
    """It stands in one of the three lists, whatever this version has."""
    flag = TABLE[name]
    words = {"switch": [], "int": ["8"], "float": ["0.25"], "text": ["abc"], "texts": ["a", "b"]}[flag.kind]
    found = migrate([*BASE, name, *words], 1)
    told = [text for text, _ in (*found.mapped, *found.not_needed)] + list(found.refused)
    assert any(name in line for line in told), (name, found)


@pytest.mark.parametrize("name", [name for name, flag in TABLE.items() if flag.use == "refused"])
def test_refused_arguments_name_a_reason(name: str) -> None:
    words = [] if TABLE[name].kind == "switch" else ["other"]
    lines = [line for line in migrate([*BASE, name, *words], 1).refused if line.startswith(name)]
    assert len(lines) == 1 and len(lines[0]) > len(name) + 20


def test_what_megatron_does_otherwise_is_chosen(every_key: None) -> None:
    found = settings(BASE)
    assert found["optimizer.warmup_count"] == "before" and found["optimizer.init_lr"] == 0.0
    assert found["train.loss_average"] == "megatron" and found["data.order"] == "megatron"
    assert found["model.activation"] == "gelu" and found["model.bias"] is True
    assert found["model.tie_embeddings"] is True and found["model.position"] == "learned"
    assert found["model.norm"] == "layernorm" and found["model.attention_dropout"] == 0.1
    assert found["optimizer.schedule"] == "linear" and found["data.split"] == "969,30,1"
    assert (found["optimizer.beta2"], found["optimizer.weight_decay"]) == (0.999, 0.01)
    assert found["model.vocab_size"] == 50304 and found["model.ffn_hidden_size"] == 256
    assert found["precision.dtype"] == "fp32"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--no-bias-gelu-fusion", {"model.activation": "gelu_erf", "model.bias": True}),
        ("--disable-bias-linear", {"model.activation": "gelu_erf", "model.bias": False}),
        ("--disable-bias-linear --add-qkv-bias", {"model.bias": "qkv"}),
        ("--swiglu", {"model.activation": "swiglu", "model.ffn_hidden_size": 128}),
        ("--squared-relu", {"model.activation": "squared_relu", "model.ffn_hidden_size": 256}),
        ("--calculate-per-token-loss", {"train.loss_average": "token"}),
        ("--tensor-model-parallel-size 4 --sequence-parallel", {"mesh.tp": 4, "model.vocab_size": 50688}),
        ("--sequence-parallel", {"mesh.sequence_parallel": False}),
        ("--make-vocab-size-divisible-by 1000", {"model.vocab_size": 51000}),
        ("--tokenizer-type NullTokenizer --vocab-size 128", {"model.vocab_size": 256}),
        ("--tokenizer-type HuggingFaceTokenizer --vocab-size 128", {"model.vocab_size": 0}),
        ("--padded-vocab-size 300", {"model.vocab_size": 300}),
        ("--fp16", {"precision.dtype": "fp16", "precision.gradients": "params", "precision.min_loss_scale": 1}),
        ("--fp16 --accumulate-allreduce-grads-in-fp32", {"precision.gradients": "main"}),
        ("--bf16", {"precision.dtype": "bf16", "precision.gradients": "main"}),
        ("--bf16 --grad-reduce-in-bf16", {"precision.gradients": "params"}),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 3", {"optimizer.wsd_decay": "exponential"}),
        ("--lr-warmup-fraction .01", {"optimizer.warmup_fraction": 0.01}),
        ("--window-size 7,0 --window-attn-skip-freq 4", {"model.window": 8, "model.window_interval": 4}),
        ("--position-embedding-type rope --no-rope-freq 4", {"model.rope_interval": 4}),
        (
            "--swiglu --no-bias-swiglu-fusion --activation-func-clamp-value 7 --glu-linear-offset 1",
            {"model.activation_clamp": 7.0, "model.activation_offset": 1.0},
        ),
        ("--softmax-type learnable", {"model.attention_sinks": "learned"}),
        (
            "--position-embedding-type rope --use-rope-scaling",
            {"model.rope_scaling": "llama3", "model.rope_factor": 8.0},
        ),
        ("--reset-position-ids --reset-attention-mask", {"data.document_masks": True}),
        ("--recompute-activations", {"recompute.mode": "selective"}),
        ("--eval-iters 0", {"train.eval_samples": 1}),
        ("--eval-iters 5 --full-validation", {"train.eval_samples": 0}),
        ("--split=9,1", {"data.split": "9,1,0"}),
        ("--data-path 0.5 a 0.5 b", {"data.blend": "0.5 a 0.5 b"}),
        (
            "--optimizer muon --muon-momentum 0.95",
            {
                "optimizer.name": "muon",
                "optimizer.muon_momentum": 0.95,
                "optimizer.muon_nesterov": False,
                "optimizer.muon_coefficient_type": "quintic",
                "optimizer.muon_extra_scale_factor": 1.0,
            },
        ),
        ("--optimizer dist_muon --muon-use-nesterov", {"optimizer.name": "muon", "optimizer.muon_nesterov": True}),
        (
            "--optimizer muon --muon-scale-mode shape_scaling --tensor-model-parallel-size 2 --muon-tp-mode duplicated",
            {"optimizer.muon_scale_mode": "shape_scaling", "mesh.tp": 2},
        ),
    ],
)
def test_rules(words: str, expected: dict[str, Any], every_key: None) -> None:
    found = migrate([*BASE, *shlex.split(words)], 1)
    assert not found.refused
    values = {one.key: one.value for one in found.settings}
    assert {key: values[key] for key in expected} == expected


def test_muon_on_shards_of_matrices_is_refused() -> None:
    (line,) = migrate([*BASE, *shlex.split("--optimizer muon --tensor-model-parallel-size 2")], 2).refused
    assert line.startswith("--muon-tp-mode: blockwise is not supported") and line.endswith("choose duplicated")
    (line,) = migrate([*BASE, *shlex.split("--optimizer muon --muon-coefficient-type polar_express")], 1).refused
    assert "simple" in line and "quintic" in line


def test_what_data_parallel_ranks_share() -> None:
    def sharding(line: str) -> object:
        return settings([*BASE, *shlex.split(line)]).get("optimizer.sharding")

    fsdp = "--use-megatron-fsdp --data-parallel-sharding-strategy"
    assert [sharding(f"{fsdp} {name}") for name in ("no_shard", "optim", "optim_grads", "optim_grads_params")] == [
        "none",
        "state",
        "gradients",
        "parameters",
    ]
    assert sharding("--use-torch-fsdp2 --ddp-bucket-size 1000") == "parameters"
    assert sharding("--use-distributed-optimizer --data-parallel-sharding-strategy optim") is None
    assert settings([*BASE, "--ddp-bucket-size", "1000"])["optimizer.bucket_size"] == 1000
    (line,) = migrate([*BASE, *shlex.split(f"{fsdp} optm")], 2).refused
    assert line == (
        "--data-parallel-sharding-strategy optm: optm is not one of no_shard, optim, optim_grads, optim_grads_params"
    )


def test_corpora_of_each_part(every_key: None) -> None:
    words = [word for word in BASE if word not in ("--data-path", "corpus")]
    more = shlex.split("--train-data-path 1 a 2 b --valid-data-path 0.5 v 0.5 w --test-data-path t")
    found = settings([*words, *more])
    assert found["data.blend"] == "1 a 2 b" and found["data.split"] == "100,0,0"
    assert found["data.valid"] == ("v", "w") and found["data.test"] == ("t",)


def test_the_batch_of_all_ranks_and_an_unknown_number_of_them(every_key: None) -> None:
    words = [word for word in BASE if word not in ("--global-batch-size", "8")]
    assert settings(words, 6)["train.global_batch"] == 12
    assert [line for line in migrate(words, None).refused if line.startswith("--global-batch-size: missing")]


def test_wrong_words_are_all_named() -> None:
    words = [*BASE, "--num-layrs", "3", "--swiglu", "yes", "--lr", "fast", "--mock-data", "--seed", "<SEED>"]
    refused = "\n".join(migrate(words, 1).refused)
    for text in (
        "did you mean --num-layers?",
        "'yes' follows it",
        "'fast'",
        "one source of data",
        "<SEED>; write it out",
    ):
        assert text in refused


def test_the_last_of_two_counts() -> None:
    assert read_arguments(["--lr", "1", "--lr=2"], TABLE)["--lr"] == 2.0


def test_gpt_345m(tmp_path: Path, every_key: None) -> None:
    launch = find_launch(examples.GPT_345M, ["ckpt"])
    found = migrate(launch.arguments, launch.world_size)
    assert launch.world_size == 1 and not found.refused
    values = {one.key: one.value for one in found.settings}
    assert values["run.folder"] == "ckpt" and values["data.blend"] == "corpus_text_document"
    assert values["precision.dtype"] == "fp16" and values["optimizer.warmup_fraction"] == 0.01
    assert values["model.vocab_size"] == 50304 and values["train.eval_samples"] == 80


def test_gpt_345m_is_planned(tmp_path: Path) -> None:
    config, _ = loaded(find_launch(examples.GPT_345M, ["ckpt"]), tmp_path)
    plan = make_plan(config, 1, facts=None)
    assert plan.num_parameters == 354_871_296 and plan.steps == 500000


def test_8_gpus_are_planned(tmp_path: Path) -> None:
    launch = find_launch(examples.GPT_8_GPUS)
    assert launch.world_size == 8
    config, migration = loaded(launch, tmp_path, "model.vocab_size=50304")
    assert config.data.blend == "0.7 a 0.3 b" and config.run.folder == "runs/8 gpus"
    assert config.precision.dtype == "bf16" and config.optimizer.warmup_steps == 3200
    assert make_plan(config, 8, facts=None).dp == 8
    assert ("--use-distributed-optimizer") in [text for text, _ in migration.not_needed]


def test_175b_is_planned(tmp_path: Path, every_key: None) -> None:
    launch = find_launch(examples.GPT_175B)
    assert launch.world_size == 1024
    found = migrate(launch.arguments, launch.world_size)
    values = {one.key: one.value for one in found.settings}
    assert not found.refused and (values["mesh.tp"], values["mesh.pp"]) == (8, 16)
    assert values["train.batch_ramp"] == "16 16 5859375" and values["train.samples"] == 146484375
    assert values["optimizer.warmup_samples"] == 183105 and values["recompute.mode"] == "full"
    assert values["data.blend"] == "0.2 one 0.3 two 0.5 three"
    tables = tomllib.loads(as_toml(found, title="175B", world_size=1024))
    assert tables["mesh"] == {"tp": 8, "sequence_parallel": True, "pp": 16, "cp": 1}


def test_llama2_begins_with_its_weights_and_is_planned(tmp_path: Path) -> None:
    tuned = find_launch(f"MORE='{examples.FINETUNE}'\n{examples.LLAMA2}")
    refused = [line.split(":")[0] for line in migrate(tuned.arguments, 8).refused if VERSION not in line]
    assert refused == ["--use-checkpoint-args"]
    found = migrate(["--load", "llama2", "--finetune", "--no-load-optim", *BASE], 1)
    assert not found.refused and {s.key: s.value for s in found.settings}["checkpoint.init_from"] == "llama2"
    assert "needs --load" in migrate(["--finetune", *BASE], 1).refused[0]
    config, _ = loaded(find_launch("MORE=\n" + examples.LLAMA2), tmp_path, "model.vocab_size=32000")
    plan = make_plan(config, 8, facts=None)
    assert plan.num_parameters == 6_738_415_616 and config.model.position == "rope"


def test_another_folder_is_continued_with_what_megatron_loads() -> None:
    switches = ("init_optimizer", "init_schedule", "init_data")

    def found(*words: str) -> dict[str, Any]:
        settings = migrate([*words, *BASE], 1).settings
        return {one.key.partition(".")[2]: one.value for one in settings if one.key.startswith("checkpoint.init")}

    everything = {"init_from": "old", **dict.fromkeys(switches, True)}
    assert found("--load", "old", "--save", "new") == found("--load", "old", "--no-load-rng") == everything
    without = {"init_optimizer": False, "init_schedule": False}
    assert found("--load", "old", "--save", "new", "--no-load-optim") == everything | without
    assert found("--load", "old", "--save", "new", "--finetune") == {"init_from": "old"}
    assert found("--load", "new", "--save", "new") == {}
    (refused,) = migrate(["--load", "new", "--save", "new", "--no-load-optim", *BASE], 1).refused
    assert "another folder to --save" in refused


def test_keys_that_are_not_there_yet_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = "model.attention_dropout"
    monkeypatch.setattr("trainer.migrate.migrate.setting_problem", lambda name, value: "no" * (name == missing) or None)
    refused = migrate(BASE, 1).refused
    assert refused == (f"--attention-dropout (Megatron-LM's default): {VERSION}: no",)
    assert not migrate([*BASE, "--attention-dropout", "0"], 1).refused  # what a version without the key does anyway


def test_mock_data_waits_for_the_key_to_say_so(monkeypatch: pytest.MonkeyPatch, every_key: None) -> None:
    words = [word for word in BASE if word not in ("--data-path", "corpus")] + ["--mock-data"]
    for comment, refused in (
        ("a manifest", (f"--mock-data: {VERSION}: data.blend has no mock data",)),
        ('or "mock"', ()),
    ):
        key = Key(name="data.blend", default=None, expected="a string", comment=comment)
        monkeypatch.setattr("trainer.migrate.migrate.describe", lambda key=key: (key,))
        assert migrate(words, 1).refused == refused


def test_mock_data_is_mapped_and_the_run_can_start(tmp_path: Path) -> None:
    words = [word for word in BASE if word not in ("--data-path", "corpus")] + ["--mock-data", "--split", "99,1,0"]
    migration = migrate(words, 1)
    assert not migration.refused
    (tmp_path / "run.toml").write_text(as_toml(migration, title="mock", world_size=1))
    config = load_config(tmp_path / "run.toml", ())
    assert config.data == DataSection(blend="mock") and check(config, 1, facts=None) == []
    assert migrate([*words, "--reset-attention-mask"], 1).refused == (
        "--reset-attention-mask: mock data has no documents; leave it out when --mock-data is given",
    )


def test_document_masks_are_mapped_where_both_flags_ask_for_them() -> None:
    masks = ["--reset-position-ids", "--reset-attention-mask"]
    migration = migrate([*BASE, *masks], 1)
    assert not migration.refused and settings([*BASE, *masks])["data.document_masks"] is True
    assert "data.document_masks" not in settings(BASE)
    assert migrate([*BASE, masks[0]], 1).refused


def test_the_file_says_everything(every_key: None) -> None:
    found = migrate([*BASE, "--bf16", "--use-flash-attn", "--num-experts", "0x\n[run]"], 4)
    assert found.refused
    words = [*BASE, "--bf16", "--use-flash-attn", "--sgd-momentum", "0.5", "--tensorboard-dir", "a\n[run]\x1b"]
    text = as_toml(migrate(words, 4), title="x", world_size=4)
    head, _, body = text.partition("\n[run]\n")
    assert all(line.startswith("#") or not line for line in head.splitlines())
    for line in (
        "--bf16 -> precision.dtype",
        "--use-flash-attn: it names a kernel",
        "--sgd-momentum 0.5: no effect",
        "--nproc 4",
    ):
        assert line in head
    assert "norm_epsilon = 1e-05  # (default)" in body
    assert set(tomllib.loads(text)) >= {"run", "model", "data", "train", "optimizer"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--num-layers-per-virtual-pipeline-stage 1", {"schedule": "interleaved", "virtual_pipeline": 3}),
        ("--num-virtual-stages-per-pipeline-rank 3", {"schedule": "interleaved", "virtual_pipeline": 3}),
        ("--decoder-last-pipeline-num-layers 3", {"layers_per_stage": (3, 3, 3, 3)}),
        (
            "--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 3",
            {"layers_per_stage": (1, 4, 4, 3)},
        ),
        (
            "--num-layers 14 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
            {"layers_per_stage": (3, 4, 4, 3)},
        ),
    ],
)
def test_pipeline_stages_are_mapped(words: str, expected: dict[str, Any]) -> None:
    base = [*BASE, "--num-layers", "12", "--pipeline-model-parallel-size", "4", *words.split()]
    found = {key.removeprefix("mesh."): value for key, value in settings(base, 4).items()}
    assert {key: found[key] for key in expected} == expected


def test_layers_that_cannot_be_cut_are_refused() -> None:
    words = [*BASE, "--num-layers", "12", "--pipeline-model-parallel-size", "4", "--decoder-last-pipeline-num-layers"]
    (problem,) = migrate([*words, "2"], 4).refused
    assert "12 layers cannot be split this way into 4 stages" in problem
    (problem,) = migrate([*words, "3", "--num-virtual-stages-per-pipeline-rank", "3"], 4).refused
    assert "mesh.layers_per_stage by hand" in problem
