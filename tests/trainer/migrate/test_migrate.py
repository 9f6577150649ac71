"""Migrated runs of Megatron-LM: its example scripts, and rules for every argument of the table."""

from __future__ import annotations

import re
import shlex
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli.mtrain import main
from tests.trainer.migrate import examples
from trainer.config.describe import describe
from trainer.config.parse import load_config
from trainer.config.sections import BertSamplesSection, DataSection, FimSection, T5SamplesSection
from trainer.layers.rope import frequencies, magnitude
from trainer.migrate.arguments import read_arguments
from trainer.migrate.flags import flag_table
from trainer.migrate.launcher import Launch, find_launch
from trainer.migrate.migrate import Migration, as_toml, migrate
from trainer.models.family import family_of
from trainer.models.gpt.shape import gpt_shape
from trainer.parallel.params import Place, num_elements
from trainer.plan.check import check
from trainer.plan.plan import make_plan

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


@pytest.mark.parametrize(
    ("words", "cache"),
    [
        (["--data-cache-path", "a"], "a"),
        (["--object-storage-cache-path", "b"], "b"),
        (["--s3-cache-path", "c"], "c"),
        (["--s3-cache-path", "c", "--data-cache-path", "a"], "a"),
    ],
)
def test_the_folder_for_arrays_is_also_that_for_blocks_of_stored_corpora(words, cache):
    data = ["--data-path", "s3://corpora/x_text_document", "--train-iters", "1", "--micro-batch-size", "1"]
    shape = ["--num-layers", "1", "--hidden-size", "8", "--num-attention-heads", "1", "--seq-length", "8"]
    found = settings([*data, *shape, "--max-position-embeddings", "8", "--lr", "1", *words])
    assert found["data.cache"] == cache


@pytest.mark.parametrize(
    ("name", "value"), [("--exit-interval", "5"), ("--save-interval", "5"), ("--lr-warmup-fraction", ".5")]
)
def test_a_zero_that_turns_something_off_is_no_key(name, value):
    key = TABLE[name].key
    assert key in settings([*BASE, name, value])
    off = migrate([*BASE, name, "0"], 1)
    assert key not in settings(BASE) and key not in {one.key for one in off.settings}
    assert not off.refused and [text for text, _ in off.not_needed] == [f"{name} 0"]


@pytest.mark.parametrize("name", [name for name, flag in TABLE.items() if flag.default is not None])
def test_a_default_given_changes_nothing(name, every_key):
    flag = TABLE[name]
    words = [*BASE, name, *str(flag.default).split()]
    if name == "--num-query-groups" or flag.same_as:
        return
    before, after = migrate(BASE, 1), migrate(words, 1)
    assert {one.key: one.value for one in after.settings} == {one.key: one.value for one in before.settings}
    assert not after.refused and not before.refused


@pytest.mark.parametrize("name", [name for name, flag in TABLE.items() if flag.use == "mapped"])
def test_no_argument_is_dropped_silently(name):
    """It stands in one of the three lists, whatever its value; test_flags.py has those that are not mapped."""
    flag = TABLE[name]
    words = {"switch": [], "int": ["8"], "float": ["0.25"], "text": ["abc"], "texts": ["a", "b"]}.get(flag.kind, [])
    found = migrate([*BASE, name, *words], 1)
    told = [text for text, _ in (*found.mapped, *found.not_needed)] + list(found.refused)
    assert any(name in line for line in told), (name, found)


def test_what_megatron_does_otherwise_is_chosen(every_key):
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


def test_the_program_is_the_kind_of_samples(every_key, monkeypatch):
    """In Megatron's order, with the options that pretrain_bert.py and pretrain_t5.py give their datasets."""
    monkeypatch.setattr("trainer.migrate.migrate.is_old_not_set", lambda name, value: False)
    masked = {"mask_probability": 0.15, "short_probability": 0.1}
    bert = migrate([*BASE, "--bert-no-binary-head"], 1, program="pretrain_bert.py").tables
    assert bert["data.bert"] == {**masked, "head": False} and bert["model.bert"] == {
        "binary_head": False,
        "head_activation": "gelu_erf",
    }
    assert (bert["data"]["kind"], bert["data"]["order"], bert["model"]["family"]) == ("bert", "megatron", "bert")
    t5 = migrate([*BASE, "--decoder-seq-length", "12", "--decoder-num-layers", "3"], 1, program="pretrain_t5.py").tables
    assert t5["data.t5"] == {**masked, "decoder_length": 12} and t5["data"]["kind"] == "t5"
    assert t5["model"]["num_layers"] == 5 and t5["model.t5"] == {"encoder_layers": 2, "head_bias": True}
    for program, section in (("bert", BertSamplesSection()), ("t5", T5SamplesSection())):
        for key, value in {"max_ngram": 3 if program == "bert" else 10, "geometric": program == "t5"}.items():
            assert getattr(section, key) == value and section.whole_words and not section.longer_ngrams
    (line,) = migrate(BASE, 1, program="pretrain_t5.py").refused
    assert line.startswith("--decoder-seq-length: missing")


def test_fill_in_the_middle_is_written_as_a_section(tmp_path):
    words = "torchrun pretrain_gpt.py " + shlex.join([*BASE, "--fim-data", "--fim-rate", "0.4"])
    config, _ = loaded(find_launch(words), tmp_path)
    assert config.data.kind == "fim" and config.data.fim == FimSection(rate=0.4)


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
        ("--tokenizer-type HuggingFaceTokenizer --vocab-size 128", {"model.vocab_size": None}),
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
        ("--eval-iters 0", {"train.evaluate": False, "train.eval_samples": 0}),
        ("--eval-iters 0 --full-validation", {"train.eval_samples": 0}),
        ("--eval-iters 3 --eval-global-batch-size 5", {"train.eval_samples": 15}),
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
def test_rules(words, expected, every_key):
    found = migrate([*BASE, *shlex.split(words)], 1)
    assert not found.refused
    values = {one.key: one.value for one in found.settings}
    assert {key: values[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("more", "reason"),
    [("--iterations-to-skip x", "whole numbers"), ("--iterations-to-skip 3 --rampup-batch-size 2 2 16", "mtrain skip")],
)
def test_iterations_to_skip_are_known_for_a_constant_batch(more, reason):
    refused = [line for line in migrate([*BASE, *shlex.split(more)], 1).refused if line.startswith("--iterations")]
    assert len(refused) == 1 and reason in refused[0]


def test_muon_on_shards_of_matrices_is_refused():
    (line,) = migrate([*BASE, *shlex.split("--optimizer muon --tensor-model-parallel-size 2")], 2).refused
    assert line.startswith("--muon-tp-mode: blockwise is not supported") and line.endswith("choose duplicated")
    (line,) = migrate([*BASE, *shlex.split("--optimizer muon --muon-coefficient-type polar_express")], 1).refused
    assert "simple" in line and "quintic" in line


def test_what_data_parallel_ranks_share():
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


def test_corpora_of_each_part(every_key):
    words = [word for word in BASE if word not in ("--data-path", "corpus")]
    more = shlex.split("--train-data-path 1 a 2 b --valid-data-path 0.5 v 0.5 w --test-data-path t")
    found = settings([*words, *more])
    assert found["data.blend"] == "1 a 2 b" and found["data.split"] == "100,0,0"
    assert found["data.valid"] == ("v", "w") and found["data.test"] == ("t",)


def test_the_batch_of_all_ranks_and_an_unknown_number_of_them(every_key):
    words = [word for word in BASE if word not in ("--global-batch-size", "8")]
    assert settings(words, 6)["train.global_batch"] == 12
    assert [line for line in migrate(words, None).refused if line.startswith("--global-batch-size: missing")]


def test_wrong_words_are_all_named():
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


def test_the_last_of_two_counts():
    assert read_arguments(["--lr", "1", "--lr=2"], TABLE)["--lr"] == 2.0


def test_gpt_345m(tmp_path, every_key):
    launch = find_launch(examples.GPT_345M, ["ckpt"])
    found = migrate(launch.arguments, launch.world_size)
    assert launch.world_size == 1 and not found.refused
    values = {one.key: one.value for one in found.settings}
    assert values["run.folder"] == "ckpt" and values["data.blend"] == "corpus_text_document"
    assert values["precision.dtype"] == "fp16" and values["optimizer.warmup_fraction"] == 0.01
    assert values["model.vocab_size"] == 50304 and values["train.eval_samples"] == 80


def test_gpt_345m_is_planned(tmp_path):
    config, _ = loaded(find_launch(examples.GPT_345M, ["ckpt"]), tmp_path)
    plan = make_plan(config, 1, facts=None)
    assert plan.num_parameters == 354_871_296 and plan.steps == 500000


def test_8_gpus_are_planned(tmp_path):
    launch = find_launch(examples.GPT_8_GPUS)
    assert launch.world_size == 8
    config, migration = loaded(launch, tmp_path, "model.vocab_size=50304")
    assert config.data.blend == "0.7 a 0.3 b" and config.run.folder == "runs/8 gpus"
    assert config.precision.dtype == "bf16" and config.optimizer.warmup_steps == 3200
    assert make_plan(config, 8, facts=None).dp == 8
    assert ("--use-distributed-optimizer") in [text for text, _ in migration.not_needed]


def test_175b_is_planned(tmp_path, every_key):
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


TWO_KINDS = {"bert": (examples.BERT_345M, 334_723_458, 29056, 2), "t5": (examples.T5_220M, 222_421_920, 30624, 1)}


@pytest.mark.parametrize("kind", TWO_KINDS)
def test_bert_and_t5_are_planned(kind, tmp_path):
    script, parameters, rows, pp = TWO_KINDS[kind]
    launch = find_launch(script, ["ckpt"])
    found = migrate(launch.arguments, launch.world_size, program=launch.program)
    assert not found.refused and launch.world_size == 8
    path = tmp_path / "run.toml"
    path.write_text(as_toml(found, title=kind, world_size=8), encoding="utf-8")
    config = load_config(path, [f"model.vocab_size={rows}"])
    assert (config.model.family, config.data.kind, config.run.folder, config.mesh.tp) == (kind, kind, "ckpt", 2)
    plan = make_plan(config, 8, facts=None)
    assert (plan.dp, plan.pp) == (4 // pp, pp)
    assert num_elements(family_of(config).parameters(plan.shape, Place())) == parameters


@pytest.mark.soak
@pytest.mark.parametrize("kind", TWO_KINDS)
def test_bert_and_t5_are_rehearsed_at_their_size(kind, tmp_path):
    launch = find_launch(TWO_KINDS[kind][0], [str(tmp_path / "ckpt")])
    found = migrate(launch.arguments, launch.world_size, program=launch.program)
    path, text = tmp_path / "run.toml", as_toml(found, title=kind, world_size=8)
    path.write_text(re.sub(r'\nsplit = "[\d,]+"', "", text), encoding="utf-8")
    mock = ["data.blend=mock", "data.order=native", f"model.vocab_size={TWO_KINDS[kind][2]}"]
    assert main(["check", str(path), "--ranks", "8", "--memory", "80", *mock]) == 0


def test_llama2_begins_with_its_weights_and_is_planned(tmp_path):
    tuned = find_launch(f"MORE='{examples.FINETUNE}'\n{examples.LLAMA2}")
    refused = [line.split(":")[0] for line in migrate(tuned.arguments, 8).refused if VERSION not in line]
    assert refused == ["--use-checkpoint-args"]
    found = migrate(["--load", "llama2", "--finetune", "--no-load-optim", *BASE], 1)
    assert not found.refused and {s.key: s.value for s in found.settings}["checkpoint.init_from"] == "llama2"
    assert "needs --load" in migrate(["--finetune", *BASE], 1).refused[0]
    config, _ = loaded(find_launch("MORE=\n" + examples.LLAMA2), tmp_path, "model.vocab_size=32000")
    plan = make_plan(config, 8, facts=None)
    assert plan.num_parameters == 6_738_415_616 and config.model.position == "rope"


def test_another_folder_is_continued_with_what_megatron_loads():
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
    assert not migrate(["--save", "new", "--no-load-optim", *BASE], 1).refused  # nothing is loaded there


def test_keys_that_are_not_there_yet_are_refused_by_name(monkeypatch):
    missing = "model.attention_dropout"
    monkeypatch.setattr("trainer.migrate.migrate.setting_problem", lambda name, value: "no" * (name == missing) or None)
    refused = migrate(BASE, 1).refused
    assert refused == (f"--attention-dropout (Megatron-LM's default): {VERSION}: no",)
    assert not migrate([*BASE, "--attention-dropout", "0"], 1).refused  # what a version without the key does anyway


def test_mock_data_waits_for_the_key_to_say_so(monkeypatch, every_key):
    words = [word for word in BASE if word not in ("--data-path", "corpus")] + ["--mock-data"]
    for comment, refused in (
        ("a manifest", (f"--mock-data: {VERSION}: data.blend has no mock data",)),
        ('or "mock"', ()),
    ):
        key = replace(next(key for key in describe() if key.name == "data.blend"), comment=comment)
        monkeypatch.setattr("trainer.migrate.migrate.describe", lambda key=key: (key,))
        assert migrate(words, 1).refused == refused


def test_a_vocabulary_that_is_left_to_the_manifest_is_said_to_be():
    text = as_toml(migrate([*BASE, "--tokenizer-type", "Llama2Tokenizer"], 1), title="x", world_size=1)
    assert "--tokenizer-type Llama2Tokenizer -> model.vocab_size = (not set)\n" in text
    assert "\n# vocab_size is not set: the manifest's is used; for the same loss" in text


def test_mock_data_is_mapped_and_the_run_can_start(tmp_path):
    words = [word for word in BASE if word not in ("--data-path", "corpus")] + ["--mock-data", "--split", "99,1,0"]
    migration = migrate(words, 1)
    assert not migration.refused
    (tmp_path / "run.toml").write_text(as_toml(migration, title="mock", world_size=1))
    config = load_config(tmp_path / "run.toml", ())
    assert config.data == DataSection(blend="mock") and check(config, 1, facts=None) == []
    without = as_toml(migrate([*words, "--tokenizer-type", "Llama2Tokenizer"], 1), title="mock", world_size=1)
    assert "# vocab_size is not set: set it" in without and "the manifest's" not in without
    assert migrate([*words, "--reset-attention-mask"], 1).refused == (
        "--reset-attention-mask: mock data has no documents; leave it out when --mock-data is given",
    )


def test_document_masks_are_mapped_where_both_flags_ask_for_them():
    masks = ["--reset-position-ids", "--reset-attention-mask"]
    migration = migrate([*BASE, *masks], 1)
    assert not migration.refused and settings([*BASE, *masks])["data.document_masks"] is True
    assert "data.document_masks" not in settings(BASE)
    assert migrate([*BASE, masks[0]], 1).refused


def test_the_file_says_everything(every_key):
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
            "--num-layers 14 --decoder-first-pipeline-num-layers 2 --num-virtual-stages-per-pipeline-rank 2",
            {"layers_per_stage": (1, 2, 2, 2, 1, 2, 2, 2), "virtual_pipeline": 2},
        ),
        (
            "--num-layers 14 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split "
            "--num-layers-per-virtual-pipeline-stage 2",
            {"layers_per_stage": (1, 2, 2, 2, 2, 2, 2, 1), "virtual_pipeline": 2},
        ),
        (
            "--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 3",
            {"layers_per_stage": (1, 4, 4, 3)},
        ),
        (
            "--num-layers 14 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
            {"layers_per_stage": (3, 4, 4, 3)},
        ),
        ("--pipeline-model-parallel-layout 'Et*2|(t*4|)*2,ttL'", {"layers_per_stage": (2, 4, 4, 2)}),
        (
            "--pipeline-model-parallel-layout 'Et|(tt|)*4t|t|tL'",
            {"layers_per_stage": (1, 2, 2, 2, 2, 1, 1, 1), "schedule": "interleaved", "virtual_pipeline": 2},
        ),
    ],
)
def test_pipeline_stages_are_mapped(words, expected):
    base = [*BASE, "--num-layers", "12", "--pipeline-model-parallel-size", "4", *shlex.split(words)]
    found = {key.removeprefix("mesh."): value for key, value in settings(base, 4).items()}
    assert {key: found[key] for key in expected} == expected


def test_layers_that_cannot_be_cut_are_refused():
    words = [*BASE, "--num-layers", "12", "--pipeline-model-parallel-size", "4", "--decoder-last-pipeline-num-layers"]
    (problem,) = migrate([*words, "2"], 4).refused
    assert "12 layers cannot be split this way into 4 stages" in problem
    (problem,) = migrate([*words, "3", "--num-virtual-stages-per-pipeline-rank", "2"], 4).refused
    assert "12 layers cannot be split this way into 8 stages" in problem
    (problem,) = migrate([*words[:-1], "--account-for-loss-in-pipeline-split", "--num-layers", "3"], 4).refused
    assert "3 layers cannot be divided into 4 stages" in problem
    for many in ("60000", "9" * 30):
        words = [*BASE, "--num-layers", many, "--pipeline-model-parallel-size", many]
        assert migrate([*words, "--account-for-loss-in-pipeline-split"], 4).refused


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ("Et*3|t*3|t*3|t*2L", "expected E, t 12 times (--num-layers) and L in this order"),
        ("t*3E|t*3|t*3|t*3L", "expected E, t 12 times"),
        ("Et*3|t*3|t*3|t*3LL", "expected E, t 12 times"),
        ("Et*3|t*3|t*3|t*999999999L", "expected E, t 12 times"),
        ("(" * 20 + "Et" + "*99)" * 20 + "*99", "expected E, t 12 times"),
        ("Et*6|t*6L", "2 stages for --pipeline-model-parallel-size 4"),
        ("E|t*6|t*6|L", "a stage without a t is not supported"),
        ("Et*3|t*3|t*3|t*3mL", "m is a layer of multi-token prediction"),
        ("Et*3|t*3|t*3|t*3L --num-virtual-stages-per-pipeline-rank 1", "refuses it together with --num-virtual"),
    ],
)
def test_a_layout_of_stages_that_is_not_there_is_refused(layout, reason):
    words = ["--num-layers", "12", "--pipeline-model-parallel-size", "4", "--pipeline-model-parallel-layout"]
    (problem,) = migrate([*BASE, *words, *layout.split(" ")], 4).refused
    assert problem.startswith("--pipeline-model-parallel-layout") and reason in problem


# Frequencies of a head of 16 features and the factor of rotated heads, by Megatron-Core's YarnRotaryEmbedding.
YARN = "--position-embedding-type yarn --kv-channels 16"
YARN_NUMBERS = [
    (
        "--rotary-scaling-factor 4 --yarn-original-max-position-embeddings 64",
        [1, 0.237171, 0.05, 0.00790569, 0.0025, 0.000790569, 0.00025, 7.90569e-05],
        1.13863,
    ),
    (
        "--rotary-scaling-factor 16 --rotary-base 500000 --yarn-beta-fast 8 --yarn-beta-slow 2",
        [1, 0.193923, 0.037606, 0.00387423, 8.83883e-05, 1.71405e-05, 3.32393e-06, 6.44587e-07],
        1.27726,
    ),
    (
        "--rotary-scaling-factor 2 --yarn-original-max-position-embeddings 1",
        [1, 0.316228, 0.1, 0.0316228, 0.01, 0.00316228, 0.001, 0.000316228],
        1.06931,
    ),
    ("--mscale 0.5", [1, 0.316228, 0.1, 0.0316228, 0.01, 0.00316228, 0.001, 0.000316228], 1),
]


@pytest.mark.parametrize(("words", "expected", "factor"), YARN_NUMBERS)
def test_yarn_has_megatrons_numbers(words, expected, factor, tmp_path):
    migration = migrate([*BASE, *shlex.split(f"{YARN} {words}")], 1)
    assert not migration.refused
    path = tmp_path / "run.toml"
    path.write_text(as_toml(migration, title="example", world_size=1), encoding="utf-8")
    config = load_config(path, ())
    assert check(config, 1, facts=None) == []
    rope = gpt_shape(config, 64).rope
    assert rope is not None and magnitude(rope) == pytest.approx(factor, rel=1e-5)
    assert frequencies(rope, 16).tolist() == pytest.approx(expected, rel=1e-5)


def test_what_yarn_lacks_is_refused():
    for word in ("--mscale 0.7", "--mscale-all-dim 1", "--no-yarn-correction-range-round-to-int"):
        (line,) = migrate([*BASE, *shlex.split(f"{YARN} --rotary-scaling-factor 4 {word}")], 1).refused
        assert line.startswith(word) and "here" in line
    (line,) = migrate([*BASE, *shlex.split(f"{YARN} --rotary-interleaved")], 1).refused
    assert "Megatron-LM refuses it with yarn" in line
    idle = migrate([*BASE, *shlex.split(f"{YARN} --rotary-scaling-factor 4 --rotary-percent 0.5")], 1)
    assert ("--rotary-percent 0.5", "no effect with the other arguments, in Megatron-LM or here") in idle.not_needed


def test_all_checkpoints_are_kept_as_megatron_does_unless_it_deletes_some():
    def kept(words: str) -> dict[str, Any]:
        found = migrate([*BASE, *words.split()], 1)
        assert not found.refused
        keys = ("interval", "keep", "keep_every", "minutes")
        values = {one.key: one.value for one in found.settings}
        return {key: values[f"checkpoint.{key}"] for key in keys if f"checkpoint.{key}" in values}

    assert kept("") == {}
    every = kept("--save-interval 2")
    assert every.pop("keep") >= 1_000_000 and every == {"interval": 2, "minutes": 0.0}
    assert kept("--save-interval 2 --save-retain-interval 6") == {"interval": 2, "keep": 1, "keep_every": 6}
    between = "--save-interval 6 --non-persistent-save-interval 2"
    assert kept(between) == {"interval": 2, "keep": 1, "keep_every": 6}
    for words, text in (
        ("--save-interval 4 --save-retain-interval 6", "expected a multiple of --save-interval 4"),
        ("--save-interval 6 --non-persistent-save-interval 4", "divides --save-interval 6"),
        ("--save-retain-interval 6", "needs --save-interval"),
    ):
        (line,) = migrate([*BASE, *words.split()], 1).refused
        assert text in line


def test_the_scheduler_of_a_checkpoint_matters_only_where_a_run_goes_on_elsewhere():
    flag = "--use-checkpoint-opt_param-scheduler"
    for words in ([], ["--save", "a"], ["--save", "a", "--load", "a"]):
        found = migrate([*BASE, flag, *words], 1)
        assert not found.refused and flag in [text for text, _ in found.not_needed]
        assert settings([*BASE, *words]) == settings([*BASE, flag, *words])
    found = migrate([*BASE, flag, "--load", "a"], 1)
    (setting,) = [one for one in found.settings if one.key == "checkpoint.init_schedule"]
    assert setting.value is True and "lengths of the checkpoint" in setting.note


def test_an_iteration_of_a_checkpoint_is_chosen_by_its_folder():
    first = "checkpoint.init_from"
    assert settings([*BASE, "--load", "a", "--ckpt-step", "30"])[first] == "a/iter_0000030"
    assert settings([*BASE, "--load", "a", "--ckpt-step", "30", "--finetune"])[first] == "a/iter_0000030"
    (line,) = migrate([*BASE, "--load", "a", "--save", "a", "--ckpt-step", "30"], 1).refused
    assert "continues with its newest checkpoint" in line


def test_the_tokenizer_is_that_of_pretrain_gpt_where_none_is_named():
    without = [word for word in BASE if word not in ("--tokenizer-type", "GPT2BPETokenizer")]
    assert settings(without) == settings(BASE)
    wide = [*without, "--tensor-model-parallel-size", "8"]
    assert settings(wide, 8)["model.vocab_size"] == 51200
    assert settings([*without, "--no-pad-vocab-size"])["model.vocab_size"] == 50257
    for program in ("pretrain_bert.py", "pretrain_t5.py"):  # they take BertWordPieceLowerCase, of any size
        values, named = (migrate(words, 1, program=program).tables["model"] for words in (without, BASE))
        assert values.get("vocab_size") is None and named["vocab_size"] == 50304
    null = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "512", "--no-pad-vocab-size"]
    assert settings([*without, *null])["model.vocab_size"] == 513


@pytest.mark.parametrize("more", [["--decoder-seq-length", "8"], []])
def test_without_a_name_the_tokenizer_of_bert_and_t5_is_no_gpt2s(more):
    """Their programs take BertWordPieceLowerCase, of which the manifest has the size."""
    without = [word for word in BASE if word not in ("--tokenizer-type", "GPT2BPETokenizer")]
    program = "pretrain_t5.py" if more else "pretrain_bert.py"
    values = {one.key: one.value for one in migrate([*without, *more], 1, program=program).settings}
    assert values["model.vocab_size"] is None
    named = {one.key: one.value for one in migrate([*BASE, *more], 1, program=program).settings}
    assert named["model.vocab_size"] == 50304


@pytest.mark.parametrize("words", ["", "--fp16"])
def test_fp8_needs_bf16(words):
    (line,) = migrate([*BASE, *words.split(), "--fp8-format", "hybrid"], 8).refused
    assert "--bf16 is needed" in line


def test_the_history_of_fp8_is_megatrons():
    def found(words: str) -> tuple[Any, ...]:
        values = settings([*BASE, "--bf16", "--fp8-format", "hybrid", *words.split()])
        return tuple(values.get(f"precision.fp8_{key}") for key in ("amax_history_len", "amax_compute", "margin"))

    assert found("") == (1, "most_recent", 0)
    assert found("--fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-margin 3") == (1024, "max", 3)
    assert found("--fp8-recipe tensorwise --fp8-margin 3") == (None, None, None)


def test_a_learning_rate_of_their_own_for_embedding_and_head():
    own = ["--min-lr", "1e-5", "--decoupled-lr", "5e-4"]
    values = settings([*BASE, *own])
    assert (values["optimizer.embedding_lr"], values["optimizer.embedding_min_lr"]) == (5e-4, 1e-5)
    assert settings([*BASE, *own, "--decoupled-min-lr", "2e-5"])["optimizer.embedding_min_lr"] == 2e-5
    assert "optimizer.embedding_lr" not in settings(BASE)
    (line,) = migrate([*BASE, "--decoupled-lr", "0"], 1).refused
    assert "would not train the embedding and the head" in line


def test_a_table_of_batch_sizes_and_the_schedules_that_count_samples():
    table = ["--step-batch-size-schedule", "0:2", "256:4", "1K:8"]
    values = settings([*BASE, *table, "--lr-warmup-iters", "2"])
    assert values["train.batch_schedule"] == "0:2 256:4 1K:8" and values["train.global_batch"] == 8
    # Megatron-LM counts the schedules in samples: an iteration is --global-batch-size of them, whatever a step reads.
    assert (values["optimizer.warmup_samples"], values["optimizer.decay_samples"]) == (16, 80)
    assert values["train.steps"] == 10 and "optimizer.warmup_steps" not in values
    without = [word for word in BASE if word not in ("--global-batch-size", "8")]
    values = settings([*without, *table], 4)  # 4 ranks of microbatches of 2
    assert (values["train.global_batch"], values["train.eval_samples"]) == (8, 800)
    (line,) = migrate([*BASE, "--step-batch-size-schedule", "0:2 256:4"], 1).refused
    assert "it ends with 4, but --global-batch-size is 8" in line
    (line,) = migrate([*BASE, *table, "--rampup-batch-size", "2", "2", "8"], 1).refused
    assert "leave one of them out" in line
    (line,) = migrate([*BASE, "--step-batch-size-schedule", "5K:8"], 1).refused
    assert "thresholds that begin at 0" in line


def test_what_may_stand_in_unknown_arguments_is_not_called_missing():
    words = ["--num-layers", "2", "<SIZES>", "--bf16", "<DATA>", "--mup-base-head-dim", "4", "--lr-decay-style", "WSD"]
    lacking = "--mup-base-head-dim 4: no model here supports it; `mtrain config --key model` lists the settings"
    unclear = [f"{name} stands for arguments that are not known here; write them out" for name in ("<SIZES>", "<DATA>")]
    assert migrate(words, 8).refused == (*unclear, lacking)
    (problem,) = migrate([*BASE, "--save", "<FOLDER>"], 1).refused
    assert problem == "--save has a value that cannot be resolved here: <FOLDER>; write it out"


def test_unknown_words_are_named_up_to_a_limit():
    refused = migrate([*BASE, *(f"--x{i}" for i in range(10_000))], 1).refused
    assert len(refused) == 11 and refused[-1].startswith("9990 more")
    assert len(migrate([*BASE, *(word for i in range(1000) for word in ("--seed", f"x{i}"))], 1).refused) == 1


def test_mamba_and_hybrids_are_planned(tmp_path):
    """The hybrid of Megatron-LM's example, and the newer spelling, whose cuts are those of stages."""
    base = (
        "--num-layers 8 --hidden-size 256 --num-attention-heads 8 --group-query-attention --num-query-groups 2 "
        "--seq-length 128 --max-position-embeddings 128 --normalization RMSNorm --squared-relu --disable-bias-linear "
        "--untie-embeddings-and-output-weights --position-embedding-type none --micro-batch-size 1 --is-hybrid-model "
        "--global-batch-size 8 --lr 1e-3 --train-iters 10 --data-path corpus --bf16 --mamba-head-dim 32 --vocab-size "
        "1000 --tokenizer-type NullTokenizer --spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec"
    )
    for words, pattern, stages in (
        ("--hybrid-override-pattern M-M*-M-M", "M-M*-M-M", ()),
        ("--hybrid-attention-ratio 0.125 --hybrid-mlp-ratio 0.375", "M-MM*-M-", ()),
        ("--pipeline-model-parallel-size 2 --hybrid-layer-pattern M-M|*-M-M", "M-M*-M-M", (3, 5)),
        ("--pipeline-model-parallel-size 2 --hybrid-layer-pattern M-|M|*-M|-M", "M-M*-M-M", (2, 1, 3, 2)),
        ("--hybrid-layer-pattern M-M*-M-M --num-layers 9", "M-M*-M-M", ()),
    ):
        found = migrate([*base.split(), *words.split()], 2, program="pretrain_mamba.py")
        assert not found.refused
        path = tmp_path / "run.toml"
        path.write_text(as_toml(found, title="hybrid", world_size=2), encoding="utf-8")
        plan = make_plan(config := load_config(path), 2, facts=None)
        assert (config.model.family, plan.shape.pattern, config.mesh.layers_per_stage) == ("mamba", pattern, stages)
        assert config.data.kind == "gpt" and plan.shape.mixer.num_heads == 16
    rest = base.split()[2:]  # without --num-layers, which the pattern decides
    found = migrate([*rest, "--hybrid-layer-pattern", "M-M*-M-M"], 1, program="pretrain_mamba.py")
    assert (found.refused, found.tables["model"]["num_layers"]) == ((), 8)
    (line,) = migrate([*rest, "--hybrid-layer-pattern", "<PATTERN>"], 1, program="pretrain_mamba.py").refused
    assert line.startswith("--hybrid-layer-pattern has a value that cannot be resolved here: <PATTERN>")
    (line,) = migrate(rest, 1, program="pretrain_mamba.py").refused
    assert line.startswith("--num-layers: missing")
    (line,) = migrate([*base.split(), "--hybrid-layer-pattern", "M-M*-M-M/*-"], 1, program="pretrain_mamba.py").refused
    assert "predict later tokens (/) are not supported" in line
    (line,) = migrate([*base.split(), "--hybrid-layer-pattern", "M-XMG*-M"], 1, program="pretrain_mamba.py").refused
    assert line == "--hybrid-layer-pattern M-XMG*-M: unknown letters: G X; known are M * - E"
    (line,) = migrate([*BASE, "--mamba-num-heads", "4"], 1).refused
    assert "pretrain_mamba.py alone has such layers" in line
