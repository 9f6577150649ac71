"""What becomes of every argument of Megatron-LM: mapped, its default written, not needed, or refused.

`tests/golden/megatron_arguments.json` lists them: name -> [kind of value, default, what becomes of it]. The names and
defaults are those of the development version of August 2026 (0.20), and of core 0.12 to 0.16 where that has dropped
one; --muon-tp-mode keeps its older default, blockwise, because a run without it may mean either.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from trainer.config.parse import load_config
from trainer.migrate.arguments import PROGRAM, PROGRAMS
from trainer.migrate.flags import flag_table
from trainer.migrate.migrate import Migration, as_toml, migrate
from trainer.migrate.other_flags import REMOVED
from trainer.plan.check import check

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "megatron_arguments.json"
ARGUMENTS: dict[str, list[str | None]] = json.loads(GOLDEN.read_text(encoding="utf-8"))
TABLE = flag_table()
REQUIRED = {
    "--num-layers": "8",
    "--hidden-size": "64",
    "--num-attention-heads": "4",
    "--seq-length": "32",
    "--max-position-embeddings": "32",
    "--micro-batch-size": "2",
    "--global-batch-size": "8",
    "--lr": "1e-3",
    "--train-iters": "10",
    "--data-path": "corpus",
}
PIPELINE = "--pipeline-model-parallel-size 4"
MUON, FP16, FP8 = "--optimizer muon", "--fp16", "--bf16 --fp8-format hybrid"
FSDP, SWIGLU, ROPE = "--use-megatron-fsdp", "--swiglu --no-bias-swiglu-fusion", "--position-embedding-type rope"
YARN = "--position-embedding-type yarn --rotary-scaling-factor 4"
NORMED = f"{ROPE} --disable-bias-linear --qk-layernorm"
LATENT = f"{NORMED} --multi-latent-attention"
FIM, EXPERTS = "--fim-data", "--num-experts 8"
BIASED = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
RELATIVE = "--decoder-seq-length 12 --position-embedding-type relative"
# Of other programs than pretrain_gpt.py, whose families may not be there yet.
PROGRAM_OF = {
    "--mask-prob": "pretrain_bert.py",
    "--short-seq-prob": "pretrain_bert.py",
    "--bert-no-binary-head": "pretrain_bert.py",
    "--decoder-seq-length": "pretrain_t5.py",
    "--decoder-num-layers": "pretrain_t5.py",
    "--relative-attention-num-buckets": "pretrain_t5.py",
    "--relative-attention-max-distance": "pretrain_t5.py",
    **dict.fromkeys(
        (
            "--hybrid-override-pattern",
            "--hybrid-layer-pattern",
            "--hybrid-attention-ratio",
            "--hybrid-mlp-ratio",
            "--mamba-num-heads",
            "--mamba-head-dim",
            "--mamba-num-groups",
            "--mamba-state-dim",
        ),
        "pretrain_mamba.py",
    ),
}
RAMPED = "--weight-decay-incr-style linear --start-weight-decay 0.02 --end-weight-decay 0.03"
# name | other arguments (without NAME: this required one is left out) | its value | the value of the key
EXAMPLES = f"""
--num-layers | | 4 | 4
--encoder-num-layers | | 4 | 4
--mask-prob | | 0.2 | 0.2
--short-seq-prob | | 0.2 | 0.2
--bert-no-binary-head | | | false
--decoder-seq-length | | 12 | 12
--decoder-num-layers | --decoder-seq-length 12 | 4 | 12
--fim-data | | | "fim"
--fim-rate | {FIM} | 0.25 | 0.25
--fim-spm-rate | {FIM} | 0.25 | 0.25
--fim-split-sample | {FIM} --fim-fragment-rate 0.5 | x | "x"
--fim-fragment-rate | {FIM} --fim-split-sample x | 0.5 | 0.5
--fim-no-prefix | {FIM} | x | "x"
--fim-prefix-token | {FIM} | '<p>' | ["<p>", "<fim_middle>", "<fim_suffix>"]
--fim-middle-token | {FIM} | '<m>' | ["<fim_prefix>", "<m>", "<fim_suffix>"]
--fim-suffix-token | {FIM} | '<s>' | ["<fim_prefix>", "<fim_middle>", "<s>"]
--fim-pad-token | {FIM} | '<f>' | ["<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<f>"]
--fim-eod-token | {FIM} | '<e>' | ["<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", "<e>"]
--hidden-size | | 128 | 128
--ffn-hidden-size | | 100 | 100
--num-attention-heads | | 8 | 8
--kv-channels | | 32 | 32
--group-query-attention | --num-query-groups 2 | | 2
--num-query-groups | --group-query-attention | 2 | 2
--max-position-embeddings | | 64 | 64
--position-embedding-type | | none | "none"
--relative-attention-num-buckets | {RELATIVE} | 16 | 16
--relative-attention-max-distance | {RELATIVE} | 64 | 64
--use-rotary-position-embeddings | | | "rope"
--no-position-embedding | {ROPE} | | "rope"
--rotary-base | {ROPE} | 500000 | 500000.0
--rotary-percent | {ROPE} | 0.5 | 0.5
--rotary-interleaved | {ROPE} | | true
--no-rope-freq | {ROPE} | 4 | 4
--rotary-seq-len-interpolation-factor | {ROPE} | 2 | "linear"
--use-rope-scaling | {ROPE} | | "llama3"
--rope-scaling-factor | {ROPE} --use-rope-scaling | 4.0 | 4.0
--rotary-scaling-factor | --position-embedding-type yarn | 4 | 4.0
--yarn-original-max-position-embeddings | {YARN} | 128 | 128
--yarn-beta-fast | {YARN} | 16 | 16.0
--yarn-beta-slow | {YARN} | 2 | 2.0
--yarn-correction-range-round-to-int | {YARN} | | "yarn"
--mscale | {YARN} | 1 | "yarn"
--mscale-all-dim | {YARN} | 0 | "yarn"
--multi-latent-attention | {NORMED} | | 32
--q-lora-rank | {LATENT} | 24 | 24
--kv-lora-rank | {LATENT} | 48 | 48
--qk-head-dim | {LATENT} | 16 | 16
--qk-pos-emb-head-dim | {LATENT} | 8 | 8
--v-head-dim | {LATENT} | 16 | 16
--rope-type | {LATENT} --rotary-scaling-factor 4 | yarn | "yarn"
--mtp-num-layers | {ROPE} | 2 | 2
--mtp-loss-scaling-factor | {ROPE} --mtp-num-layers 2 | 0.3 | 0.3
--normalization | | RMSNorm | "rmsnorm"
--norm-epsilon | | 1e-6 | 1e-6
--layernorm-epsilon | | 1e-6 | 1e-6
--apply-layernorm-1p | | | true
--swiglu | | | "swiglu"
--squared-relu | | | "squared_relu"
--no-bias-gelu-fusion | | | "gelu_erf"
--use-te-activation-func | --no-bias-gelu-fusion | | "gelu"
--no-bias-swiglu-fusion | --swiglu --activation-func-clamp-value 7 | | 7.0
--activation-func-clamp-value | {SWIGLU} | 7 | 7.0
--glu-linear-offset | {SWIGLU} | 1 | 1.0
--disable-bias-linear | | | false
--add-qkv-bias | --disable-bias-linear | | "qkv"
--qk-layernorm | | | true
--window-size | | 7,0 | 8
--window-attn-skip-freq | --window-size 7,0 | 4 | 4
--softmax-type | | learnable | "learned"
--quick-geglu | --no-bias-gelu-fusion | | "quick_geglu"
--hybrid-override-pattern | | M*-MM*-M | "M*-MM*-M"
--hybrid-layer-pattern | --pipeline-model-parallel-size 2 | 'M*-M|M*-M' | "M*-MM*-M"
--hybrid-attention-ratio | | 0.25 | 0.25
--hybrid-mlp-ratio | | 0.25 | 0.25
--mamba-num-heads | | 16 | 16
--mamba-head-dim | --mamba-num-groups 2 | 32 | 32
--mamba-num-groups | --mamba-num-heads 16 | 4 | 4
--mamba-state-dim | | 64 | 64
--num-experts | | 8 | 8
--moe-router-topk | {EXPERTS} | 3 | 3
--moe-ffn-hidden-size | {EXPERTS} | 48 | 48
--moe-layer-freq | {EXPERTS} | '([0]*3+[1]*5)' | [0, 0, 0, 1, 1, 1, 1, 1]
--moe-router-load-balancing-type | {EXPERTS} | seq_aux_loss | "sequence"
--moe-aux-loss-coeff | {EXPERTS} | 0.02 | 0.02
--moe-z-loss-coeff | {EXPERTS} | 0.001 | 0.001
--moe-router-score-function | {EXPERTS} | sigmoid | "sigmoid"
--moe-router-pre-softmax | {EXPERTS} | | false
--moe-router-num-groups | {EXPERTS} | 2 | 2
--moe-router-group-topk | {EXPERTS} --moe-router-num-groups 2 | 1 | 1
--moe-router-topk-scaling-factor | {EXPERTS} | 2.5 | 2.5
--moe-router-enable-expert-bias | {EXPERTS} --moe-router-score-function sigmoid | | true
--moe-router-bias-update-rate | {EXPERTS} {BIASED} | 0.01 | 0.01
--moe-expert-capacity-factor | {EXPERTS} | 1.25 | 1.25
--moe-token-drop-policy | {EXPERTS} --moe-expert-capacity-factor 1 | position | "position"
--moe-shared-expert-intermediate-size | {EXPERTS} | 96 | 96
--moe-shared-expert-gate | {EXPERTS} --moe-shared-expert-intermediate-size 96 | | true
--attention-dropout | | 0.2 | 0.2
--hidden-dropout | | 0.2 | 0.2
--untie-embeddings-and-output-weights | | | false
--init-method-std | | 0.01 | 0.01
--embedding-init-method-std | | 0.02 | 0.02
--vocab-size | --tokenizer-type NullTokenizer | 999 | 1024
--tokenizer-type | | HuggingFaceTokenizer | null
--padded-vocab-size | | 512 | 512
--make-vocab-size-divisible-by | | 1000 | 51000
--no-pad-vocab-size | | | 50257
--disable-pad-vocab-size | | | 50257
--seed | | 7 | 7
--save | | new | "new"
--load | --save new | old | "old"
--finetune | --save new --load new | | "new"
--ckpt-step | --load old | 30 | "old/iter_0000030"
--verify-integrity | | | "latest-valid"
--no-load-optim | --load old | | false
--pretrained-checkpoint | | old | "old"
--save-interval | | 5 | 5
--persistent-save-interval | | 5 | 5
--save-retain-interval | --save-interval 5 | 10 | 10
--non-persistent-save-interval | --save-interval 10 | 5 | 5
--use-checkpoint-opt_param-scheduler | --load old | | true
--use-checkpoint-opt-param-scheduler | --load old | | true
--data-path | | 1 a 2 b | "1 a 2 b"
--mock-data | without --data-path | | "mock"
--train-data-path | without --data-path | 1 a 2 b | "1 a 2 b"
--valid-data-path | without --data-path --train-data-path a | b | ["b"]
--test-data-path | without --data-path --train-data-path a | b | ["b"]
--split | | 90,5,5 | "90,5,5"
--data-cache-path | | cache | "cache"
--object-storage-cache-path | | cache | "cache"
--s3-cache-path | | cache | "cache"
--mid-level-dataset-surplus | | 0.01 | 0.01
--reset-position-ids | --reset-attention-mask | | true
--reset-attention-mask | --reset-position-ids | | true
--seq-length | | 16 | 16
--encoder-seq-length | | 16 | 16
--micro-batch-size | | 4 | 4
--global-batch-size | | 16 | 16
--rampup-batch-size | without --train-iters --train-samples 80 | 2 2 16 | "2 2 16"
--step-batch-size-schedule | without --global-batch-size | 0:2 1K:4 | "0:2 1K:4"
--train-iters | | 20 | 20
--train-samples | without --train-iters | 80 | 80
--calculate-per-token-loss | | | "token"
--exit-interval | | 5 | 5
--exit-duration-in-mins | | 235 | 235.0
--iterations-to-skip | | 0 299 | ["0-7", "2392-2399"]
--deterministic-mode | | | true
--eval-interval | | 5 | 5
--eval-iters | | 5 | 40
--eval-global-batch-size | | 4 | 400
--full-validation | | | 0
--log-interval | | 10 | 10
--log-params-norm | | | true
--log-num-zeros-in-grad | | | true
--profile | | | [11, 12]
--use-pytorch-profiler | --profile | | [11, 12]
--profile-step-start | --profile | 5 | [6, 12]
--profile-step-end | --profile | 20 | [11, 20]
--profile-ranks | --profile | 0 3 | [0, 3]
--tensorboard-dir | | tb | "tb"
--wandb-project | | p | "p"
--wandb-exp-name | --wandb-project p | r1 | "r1"
--wandb-entity | --wandb-project p | e | "e"
--wandb-save-dir | --wandb-project p | d | "d"
--optimizer | | sgd | "sgd"
--lr | | 2e-3 | 2e-3
--min-lr | | 1e-4 | 1e-4
--decoupled-lr | | 5e-4 | 5e-4
--decoupled-min-lr | --decoupled-lr 5e-4 | 1e-5 | 1e-5
--lr-decay-style | | cosine | "cosine"
--lr-decay-iters | | 8 | 8
--lr-decay-samples | without --train-iters --train-samples 80 | 70 | 70
--lr-warmup-iters | | 2 | 2
--lr-warmup-samples | without --train-iters --train-samples 80 | 16 | 16
--lr-warmup-fraction | | 0.1 | 0.1
--lr-warmup-init | | 1e-5 | 1e-5
--lr-wsd-decay-style | --lr-decay-style WSD --lr-wsd-decay-iters 2 | cosine | "cosine"
--lr-wsd-decay-iters | --lr-decay-style WSD | 2 | 2
--lr-wsd-decay-samples | without --train-iters --train-samples 80 --lr-decay-style WSD | 16 | 16
--weight-decay | | 0.1 | 0.1
--start-weight-decay | --weight-decay-incr-style linear --end-weight-decay 0.03 | 0.02 | 0.02
--end-weight-decay | --weight-decay-incr-style linear --start-weight-decay 0.02 | 0.03 | 0.03
--weight-decay-incr-style | --start-weight-decay 0.02 --end-weight-decay 0.03 | linear | "linear"
--adam-beta1 | | 0.8 | 0.8
--adam-beta2 | | 0.95 | 0.95
--adam-eps | | 1e-6 | 1e-6
--sgd-momentum | --optimizer sgd | 0.8 | 0.8
--muon-momentum | {MUON} | 0.95 | 0.95
--muon-nesterov | {MUON} | | true
--muon-use-nesterov | {MUON} | | true
--muon-num-ns-steps | {MUON} | 3 | 3
--muon-coefficient-type | {MUON} | simple | "simple"
--muon-scale-mode | {MUON} | shape_scaling | "shape_scaling"
--muon-extra-scale-factor | {MUON} | 0.2 | 0.2
--muon-tp-mode | {MUON} --tensor-model-parallel-size 2 | duplicated | "muon"
--clip-grad | | 0.5 | 0.5
--use-megatron-fsdp | | | "parameters"
--use-custom-fsdp | | | "parameters"
--data-parallel-sharding-strategy | {FSDP} | optim | "state"
--use-torch-fsdp2 | | | "parameters"
--torch-fsdp2-no-reshard-after-forward | --use-torch-fsdp2 | | "gradients"
--overlap-grad-reduce | | | true
--overlap-param-gather | | | true
--ddp-bucket-size | | 1000 | 1000
--fp16 | | | "fp16"
--bf16 | | | "bf16"
--grad-reduce-in-bf16 | --bf16 | | "params"
--megatron-fsdp-main-grads-dtype | --bf16 {FSDP} | fp32 | "main"
--megatron-fsdp-grad-comm-dtype | --bf16 {FSDP} | fp32 | "main"
--accumulate-allreduce-grads-in-fp32 | {FP16} | | "main"
--loss-scale | {FP16} | 128 | 128.0
--initial-loss-scale | {FP16} | 1024 | 1024
--min-loss-scale | {FP16} | 2 | 2
--loss-scale-window | {FP16} | 500 | 500
--hysteresis | {FP16} | 1 | 1
--fp8-format | --bf16 | e4m3 | "e4m3"
--fp8-recipe | {FP8} | tensorwise | "current"
--fp8-recipe | {FP8} | blockwise | "blockwise"
--fp8-amax-history-len | {FP8} | 1024 | 1024
--fp8-amax-compute-algo | {FP8} | max | "max"
--fp8-margin | {FP8} | 3 | 3
--first-last-layers-bf16 | {FP8} | | 1
--num-layers-at-start-in-bf16 | {FP8} --first-last-layers-bf16 --num-layers-at-end-in-bf16 2 | 2 | 2
--num-layers-at-end-in-bf16 | {FP8} --first-last-layers-bf16 --num-layers-at-start-in-bf16 2 | 2 | 2
--recompute-activations | | | "selective"
--recompute-granularity | --recompute-method block | full | "full"
--recompute-method | --recompute-granularity full | block | "block"
--recompute-num-layers | --recompute-granularity full --recompute-method block | 2 | 2
--tensor-model-parallel-size | | 2 | 2
--sequence-parallel | --tensor-model-parallel-size 2 | | true
--pipeline-model-parallel-size | | 2 | 2
--num-layers-per-virtual-pipeline-stage | {PIPELINE} | 1 | 2
--num-virtual-stages-per-pipeline-rank | {PIPELINE} | 2 | 2
--decoder-first-pipeline-num-layers | {PIPELINE} --num-layers 7 | 1 | [1, 2, 2, 2]
--decoder-last-pipeline-num-layers | {PIPELINE} --num-layers 7 | 1 | [2, 2, 2, 1]
--account-for-embedding-in-pipeline-split | {PIPELINE} --num-layers 7 | | [1, 2, 2, 2]
--account-for-loss-in-pipeline-split | {PIPELINE} --num-layers 7 | | [2, 2, 2, 1]
--pipeline-model-parallel-layout | {PIPELINE} --num-layers 7 | Et|tt|tt|ttL | [1, 2, 2, 2]
--context-parallel-size | | 2 | 2
--expert-model-parallel-size | {EXPERTS} | 2 | 2
--expert-tensor-parallel-size | {EXPERTS} --tensor-model-parallel-size 2 --sequence-parallel | 1 | 1
"""
ROWS = {name: row for line in EXAMPLES.strip().splitlines() for name, *row in [[c.strip() for c in line.split(" |")]]}
MAPPED = [name for name, flag in TABLE.items() if flag.use == "mapped"]


def _words(context: str, *, without: str = "") -> list[str]:
    """A run's arguments, with those of a row, which may say which required one is left out."""
    others = shlex.split(context)
    dropped = {without, others[1] if others[:1] == ["without"] else ""}
    required = [word for name, value in REQUIRED.items() if name not in dropped for word in (name, value)]
    return [*required, *(others[2:] if others[:1] == ["without"] else others)]


def _settings(migration: Migration) -> dict[str, Any]:
    return {setting.key: setting.value for setting in migration.settings}


def test_each_argument_of_megatron_is_in_the_table_with_its_kind_and_default():
    kinds = {"switch": {"switch", "any"}, "one": {"int", "float", "text", "token", "any"}, "several": {"texts"}}
    kinds["one"].add("texts")  # the schedule of batch sizes, which scripts leave unquoted
    for name, (kind, default, _) in ARGUMENTS.items():
        assert TABLE[name].kind in kinds[str(kind)], name
        if TABLE[name].kind == "any" or TABLE[name].use == "not needed" or default is None:
            continue
        ours = TABLE[name].default or ""
        assert ours == default or float(ours) == float(default), (name, ours, default)
    assert len(ARGUMENTS) > 900


def test_what_becomes_of_each_argument_is_what_the_list_says():
    uses = {"mapped": "mapped", "written": "mapped", "not needed": "not needed", "refused": "refused"}
    assert {name: uses[str(fate)] for name, (_, _, fate) in ARGUMENTS.items()} == {
        name: TABLE[name].use for name in ARGUMENTS
    }
    assert set(MAPPED) == set(ROWS)


@pytest.mark.parametrize("name", MAPPED)
def test_a_mapped_argument_sets_its_key(name, monkeypatch):
    """And only those whose fate is "written" have a value in the file where they are not given."""
    context, words, value = ROWS[name]
    flag, expected = TABLE[name], json.loads(value)
    first = flag.same_as or name
    required = first in REQUIRED and first not in context
    program = PROGRAM_OF.get(name, PROGRAM)
    if program != PROGRAM:
        monkeypatch.setattr("trainer.migrate.migrate.setting_problem", lambda name, value: None)
        monkeypatch.setattr("trainer.migrate.migrate.is_old_not_set", lambda name, value: False)
    words_given = [*_words(context, without=first if required else ""), name, *shlex.split(words)]
    found = migrate(words_given, 8, program=program)
    assert not found.refused
    got = _settings(found)[flag.key]
    assert (list(got) if isinstance(got, tuple) else got) == expected
    assert any(text.startswith(name) or f" {name}" in text for text, line in found.mapped if line.startswith(flag.key))
    if required:
        return
    without = migrate(_words(context), 8, program=program)
    before = _settings(without).get(flag.key)
    effect = before != got or without.refused
    assert effect or name in (
        "--no-position-embedding",  # only permitted with rope
        "--embedding-init-method-std",  # only the other's value
        "--use-checkpoint-opt_param-scheduler",  # Megatron-LM loads it with the optimizer anyway
        "--use-checkpoint-opt-param-scheduler",
        "--megatron-fsdp-main-grads-dtype",  # fp32 is what sums are in
        "--megatron-fsdp-grad-comm-dtype",
        "--yarn-correction-range-round-to-int",  # the only values that yarn has here
        "--mscale",
        "--mscale-all-dim",
        "--rope-type",  # yarn is the default
        "--use-pytorch-profiler",  # the only one here
    )
    if name in ARGUMENTS and not without.refused:
        assert (ARGUMENTS[name][2] == "written") == (flag.key in _settings(without)), (name, before)


OF_OTHERS = r"has no meaning|not supported by model\.family|is for model\.family|applies only to|has none|no layer with"


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_program_gets_settings_that_its_runs_do_not_have(program, tmp_path):
    """Each argument with each program: refused here, without effect, or set in a file that `mtrain check` accepts."""
    more = ["--decoder-seq-length", "16"] if program == "pretrain_t5.py" else []
    loaded, wrong = 0, list[str]()
    for name, words in [
        *((name, ROWS[name][1]) for name in MAPPED),
        ("--optimizer", "sgd"),
        ("--softmax-type", "learnable"),
    ]:
        migration = migrate([*_words(ROWS[name][0]), *more, name, *shlex.split(words)], 8, program=program)
        if migration.refused:
            continue
        (tmp_path / "run.toml").write_text(as_toml(migration, title="example", world_size=8), encoding="utf-8")
        problems = check(load_config(tmp_path / "run.toml"), 8, facts=None)
        wrong += [f"{name}: {text}" for text in problems if re.search(OF_OTHERS, text)]
        loaded += 1
    assert wrong == [] and loaded > 50


@pytest.mark.parametrize("per_stage", [3, 16])
def test_layers_that_cannot_be_divided_into_virtual_stages_are_refused(per_stage):
    words = [*_words(PIPELINE), "--num-layers-per-virtual-pipeline-stage", str(per_stage)]
    (line,) = migrate([*words, "--account-for-loss-in-pipeline-split", "--num-layers", "15"], 8).refused
    assert line.endswith("Megatron-LM refuses it too")


@pytest.mark.parametrize("name", [name for name, flag in TABLE.items() if flag.use != "mapped"])
def test_others_are_not_needed_or_refused_with_a_reason(name):
    flag = TABLE[name]
    words = [] if flag.kind == "switch" else ["other"]
    found = migrate([*_words(""), name, *words], 8)
    lines = dict(found.not_needed) if flag.use == "not needed" else {line: line for line in found.refused}
    ((_, reason),) = [(text, why) for text, why in lines.items() if text.split(":")[0].split()[0] == name]
    assert len(reason) > 20
    assert bool(found.refused) == (flag.use == "refused")


@pytest.mark.parametrize(("name", "replacement"), REMOVED)
def test_removed_names_say_what_replaced_them(name, replacement):
    (line,) = migrate([*_words(""), name, "1"], 8).refused
    assert line.startswith(f"{name} 1: removed") and line.endswith(replacement)
    first = replacement.split()[0]
    assert not first.startswith("--") or first in TABLE


@pytest.mark.parametrize(
    "word",
    [
        "-1",
        "99999999999999",
        *(pytest.param(word, marks=pytest.mark.soak) for word in ("0", "nan", "1e400", "\u00b2", "9" * 5000, "")),
    ],
)
def test_no_value_breaks_the_command(word):
    """Each is set or refused: a number that is too large, or no number, is no fault of ours."""
    for name in MAPPED:
        context, _, _ = ROWS[name]
        found = migrate([*_words(context), name, word], 8)
        assert isinstance(found, Migration)


def test_latent_attention_multiplies_scores_with_and_without_yarn():
    words = f"{LATENT} --rotary-scaling-factor 4 --mscale-all-dim 1 --qk-head-dim 8 --qk-pos-emb-head-dim 8"
    yarn = _settings(migrate(_words(words), 8))
    assert yarn["model.mla.mscale_all_dim"] == 1 and yarn["model.rope_original_length"] == 4096
    assert yarn["model.rope_interleaved"] is True and "model.attention_scale" not in yarn
    plain = _settings(migrate(_words(f"{words} --rope-type rope"), 8))
    assert plain["model.attention_scale"] == pytest.approx((0.1 * math.log(4) + 1) ** 2 / 4)
    assert not {"model.rope_scaling", "model.mla.mscale_all_dim", "model.qk_norm"} & plain.keys()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (LATENT.replace("--qk-layernorm", ""), "add --qk-layernorm"),
        (LATENT.replace("--disable-bias-linear", ""), "add --disable-bias-linear"),
        (LATENT.replace("rope", "learned_absolute"), "only rope"),
        (f"{LATENT} --group-query-attention --num-query-groups 2", "Megatron-LM refuses it"),
        (f"{LATENT} --rotary-interleaved", "pairs are neighbours"),
    ],
)
def test_latent_attention_is_refused_where_ours_is_another(words, reason):
    assert any(reason in line for line in migrate(_words(words), 8).refused)
