"""A configuration of Accelerate's Megatron-LM plugin: every field is mapped, not needed, or refused by name."""

from __future__ import annotations

import dataclasses
import importlib.util
import tomllib
from typing import Any

import pytest

from cli.mtrain import main
from trainer.config.parse import parse_config
from trainer.migrate.accelerate import ARGUMENTS, NOT_NEEDED, OTHER, PREFIX, REFUSED, convert
from trainer.migrate.flags import flag_table

# Of accelerate 1.15.
FIELDS = [
    "tp_degree",
    "pp_degree",
    "use_custom_fsdp",
    "overlap_cpu_optimizer_d2h_h2d",
    "no_load_optim",
    "eod_mask_loss",
    "no_save_optim",
    "optimizer_cpu_offload",
    "use_precision_aware_optimizer",
    "decoder_last_pipeline_num_layers",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "attention_backend",
    "expert_model_parallel_size",
    "context_parallel_size",
    "attention_dropout",
    "hidden_dropout",
    "attention_softmax_in_fp32",
    "expert_tensor_parallel_size",
    "calculate_per_token_loss",
    "use_rotary_position_embeddings",
    "num_micro_batches",
    "gradient_clipping",
    "sequence_parallelism",
    "recompute_activations",
    "use_distributed_optimizer",
    "pipeline_model_parallel_split_rank",
    "num_layers_per_virtual_pipeline_stage",
    "is_train_batch_min",
    "train_iters",
    "train_samples",
    "weight_decay_incr_style",
    "start_weight_decay",
    "end_weight_decay",
    "lr_decay_style",
    "lr_decay_iters",
    "lr_decay_samples",
    "lr_warmup_iters",
    "lr_warmup_samples",
    "lr_warmup_fraction",
    "min_lr",
    "consumed_samples",
    "no_wd_decay_cond",
    "scale_lr_cond",
    "lr_mult",
    "megatron_dataset_flag",
    "seq_length",
    "encoder_seq_length",
    "decoder_seq_length",
    "tensorboard_dir",
    "set_all_logging_options",
    "eval_iters",
    "eval_interval",
    "return_logits",
    "custom_train_step_class",
    "custom_train_step_kwargs",
    "custom_model_provider_function",
    "custom_prepare_model_function",
    "custom_megatron_datasets_provider_function",
    "custom_get_batch_function",
    "custom_loss_function",
    "other_megatron_args",
]
FILE = """
compute_environment: LOCAL_MACHINE
distributed_type: MEGATRON_LM
downcast_bf16: 'no'
machine_rank: 0
main_training_function: main
megatron_lm_config:
  megatron_lm_gradient_clipping: 0.5
  megatron_lm_num_micro_batches: 2
  megatron_lm_pp_degree: 2
  megatron_lm_recompute_activations: true
  megatron_lm_sequence_parallelism: true
  megatron_lm_tp_degree: 2
  megatron_lm_use_distributed_optimizer: true
mixed_precision: bf16
num_machines: 2
num_processes: 8
rdzv_backend: static
same_network: true
use_cpu: false
"""


def converted(**fields: Any):
    return convert({"megatron_lm_config": {PREFIX + name: value for name, value in fields.items()}}).migration


def test_every_field_of_the_plugin_is_in_one_table():
    tables = [*ARGUMENTS, *NOT_NEEDED, *REFUSED, OTHER]
    assert sorted(tables) == sorted(FIELDS)
    assert {flag for flag in ARGUMENTS.values() if flag not in flag_table()} == set(), (
        "arguments that Megatron-LM lacks"
    )
    if importlib.util.find_spec("accelerate"):
        from accelerate.utils import MegatronLMPlugin

        unknown = {field.name for field in dataclasses.fields(MegatronLMPlugin)} - set(FIELDS)
        assert unknown == set()


def test_a_file_of_accelerate_config(tmp_path, capsys):
    (tmp_path / "a.yaml").write_text(FILE)
    assert main(["config", "--from-accelerate", str(tmp_path / "a.yaml")]) == 0
    text = capsys.readouterr().out
    assert "# Start it on each machine with: torchrun --nnodes 2 --nproc-per-node 4" in text
    tables = tomllib.loads(text)
    assert tables == {
        "mesh": {"tp": 2, "pp": 2, "sequence_parallel": True},
        "optimizer": {"clip_norm": 0.5},
        "precision": {"dtype": "bf16"},
        "recompute": {"mode": "selective"},
    }
    rest: dict[str, Any] = {
        "run": {"folder": "run"},
        "model": {"preset": "gpt2"},
        "data": {"blend": "mock"},
        "train": {"sequence_length": 8, "global_batch": 8, "micro_batch": 1, "steps": 1},
        "optimizer": {"lr": 1e-3, **tables.pop("optimizer")},
    }
    config, problems = parse_config(rest | tables)
    assert config is not None and problems == []


@pytest.mark.parametrize(
    ("fields", "settings"),
    [
        ({"context_parallel_size": 2}, {"mesh": {"cp": 2}}),
        ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3},
         {"recompute": {"mode": "full", "method": "block", "layers": 3}}),
        ({"train_samples": 1000, "lr_warmup_samples": 9},
         {"train": {"samples": 1000}, "optimizer": {"warmup_samples": 9}}),
        ({"calculate_per_token_loss": True}, {"train": {"loss_average": "token"}}),
        ({"attention_dropout": 0.1}, {"model": {"attention_dropout": 0.1}}),
        ({"sequence_parallelism": False, "lr_mult": 1.0, "no_wd_decay_cond": None}, {}),
        ({"other_megatron_args": {"swiglu": True, "seq_length": 64, "bf16": False}},
         {"model": {"activation": "swiglu"}, "train": {"sequence_length": 64}}),
    ],
)  # fmt: skip
def test_fields_become_settings(fields, settings):
    migration = converted(**fields)
    assert migration.refused == () and migration.tables == settings


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ({"megatron_lm_config": {"megatron_lm_custom_loss_function": "f"}}, "custom_loss_function: is code of yours"),
        ({"megatron_lm_config": {"megatron_lm_lr_mult": 2.0}}, "megatron_lm_lr_mult: a group of parameters"),
        ({"megatron_lm_config": {"megatron_lm_tp": 2}}, "megatron_lm_tp: not a field"),
        ({"megatron_lm_config": {"megatron_lm_tp_degree": "two"}}, "--tensor-model-parallel-size is 'two'"),
        ({"megatron_lm_config": {"megatron_lm_other_megatron_args": {"warp": 9}}}, "--warp"),
        (
            {"fsdp_config": {"x": 2}, "megatron_lm_config": {"megatron_lm_tp_degree": 1}},
            "fsdp_config: no setting",
        ),
        ({"mixed_precision": "int4", "megatron_lm_config": {"megatron_lm_tp_degree": 1}}, "mixed_precision: int4"),
        ({"num_processes": "8", "megatron_lm_config": {"megatron_lm_tp_degree": 1}}, "num_processes: '8'"),
        ({"distributed_type": "FSDP"}, "megatron_lm_config is missing"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(file, said):
    assert any(said in line for line in convert(file).migration.refused), convert(file).migration.refused


@pytest.mark.parametrize(("content", "said"), [("a: [", "is not a YAML file"), ("- 1", "is not a configuration of")])
def test_a_file_of_another_kind(content, said, tmp_path, capsys):
    (tmp_path / "a.yaml").write_text(content)
    assert main(["config", "--from-accelerate", str(tmp_path / "a.yaml")]) == 2
    assert said in capsys.readouterr().err
