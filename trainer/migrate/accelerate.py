"""Converts a configuration of Accelerate's Megatron-LM plugin to the sections of a run.toml that it decides.

The plugin hands its fields to Megatron-LM as arguments, so a field here is the argument that it becomes, and
migrate.py does the rest. Model, data and learning rate come from the user's script and are not in the file. Fields are
those of `MegatronLMPlugin` in accelerate 1.15; the file calls them megatron_lm_NAME.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from trainer.migrate.migrate import Migration, migrate

PREFIX = "megatron_lm_"
_OWN_CODE = "is code of yours; see the how-to on a loss of your own"
_SPLIT = "a group of parameters with other rules is not supported"

# Fields that are an argument of Megatron-LM with a value, or a switch.
ARGUMENTS: Mapping[str, str] = MappingProxyType(
    {
        "tp_degree": "--tensor-model-parallel-size",
        "pp_degree": "--pipeline-model-parallel-size",
        "sequence_parallelism": "--sequence-parallel",
        "gradient_clipping": "--clip-grad",
    }
    | {
        name: f"--{name.replace('_', '-')}"
        for name in [
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
            "expert_model_parallel_size",
            "context_parallel_size",
            "attention_dropout",
            "hidden_dropout",
            "attention_softmax_in_fp32",
            "expert_tensor_parallel_size",
            "calculate_per_token_loss",
            "use_rotary_position_embeddings",
            "recompute_activations",
            "use_distributed_optimizer",
            "pipeline_model_parallel_split_rank",
            "num_layers_per_virtual_pipeline_stage",
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
            "seq_length",
            "encoder_seq_length",
            "decoder_seq_length",
            "tensorboard_dir",
            "eval_iters",
            "eval_interval",
        ]
    }
)
# Fields that change nothing here, with the reason.
NOT_NEEDED: Mapping[str, str] = MappingProxyType(
    {
        "attention_backend": "kernels are chosen by measurement (mtrain plan shows them)",
        "num_micro_batches": "train.global_batch is this x train.micro_batch x the data-parallel ranks",
        "is_train_batch_min": "train.micro_batch is the same in training and validation",
        "consumed_samples": "a run continues from its newest checkpoint",
        "megatron_dataset_flag": "data.blend takes Megatron-LM's files",
        "set_all_logging_options": "metrics.jsonl has all measurements",
        "return_logits": "mtrain logits writes those of a trained model",
    }
)
# Fields that are refused if they are set to anything but this value, with the reason.
REFUSED: Mapping[str, tuple[Any, str]] = MappingProxyType(
    {
        "no_wd_decay_cond": (None, _SPLIT),
        "scale_lr_cond": (None, _SPLIT),
        "lr_mult": (1.0, _SPLIT),
        "custom_train_step_class": (None, _OWN_CODE),
        "custom_train_step_kwargs": (None, _OWN_CODE),
        "custom_model_provider_function": (None, _OWN_CODE),
        "custom_prepare_model_function": (None, _OWN_CODE),
        "custom_megatron_datasets_provider_function": (None, _OWN_CODE),
        "custom_get_batch_function": (None, _OWN_CODE),
        "custom_loss_function": (None, _OWN_CODE),
    }
)
OTHER = "other_megatron_args"
# Keys of the file itself that say how Accelerate starts processes.
_STARTING = frozenset(
    [
        "compute_environment",
        "debug",
        "distributed_type",
        "downcast_bf16",
        "enable_cpu_affinity",
        "gpu_ids",
        "machine_rank",
        "main_process_ip",
        "main_process_port",
        "main_training_function",
        "num_machines",
        "num_processes",
        "rdzv_backend",
        "same_network",
        "tpu_env",
        "tpu_use_cluster",
        "tpu_use_sudo",
        "use_cpu",
    ]
)
_PRECISIONS = {"no": [], "bf16": ["--bf16"], "fp16": ["--fp16"], "fp8": ["--bf16", "--fp8-format", "hybrid"]}


class Converted(NamedTuple):
    """What a file says.

    Attributes:
        migration: only what its fields decide; with anything refused it must not be used.
        world_size, nodes: ranks and machines; None: not in the file.
    """

    migration: Migration
    world_size: int | None
    nodes: int | None


def convert(file: Mapping[str, Any]) -> Converted:
    """Map every field of a parsed configuration file, or refuse it by name.

    Args:
        file: as `accelerate config` writes it, with `megatron_lm_config`.
    """
    words, spared, refused = list[str](), list[tuple[str, str]](), list[str]()
    plugin = file.get("megatron_lm_config")
    if not isinstance(plugin, Mapping) or not plugin:
        refused.append("megatron_lm_config is missing; only configurations of Accelerate's Megatron-LM plugin are read")
        plugin = {}
    precision = str(file.get("mixed_precision", "no")).lower()
    if precision in _PRECISIONS:
        words += _PRECISIONS[precision]
    else:
        refused.append(f"mixed_precision: {precision}: expected {', '.join(_PRECISIONS)}")
    for name, value in file.items():
        if name in _STARTING or name in ("mixed_precision", "megatron_lm_config"):
            continue
        if value not in (None, {}, [], False, ""):
            refused.append(f"{name}: no setting corresponds to it; leave it out")
    for key, value in plugin.items():
        name = str(key).removeprefix(PREFIX)
        if value is None:
            continue
        if name == OTHER and isinstance(value, Mapping):
            for other, given in value.items():
                words += _as_words(f"--{str(other).replace('_', '-')}", given)
        elif name in ARGUMENTS:
            words += _as_words(ARGUMENTS[name], value)
        elif name in NOT_NEEDED:
            spared.append((f"{key}: {value}", NOT_NEEDED[name]))
        elif name in REFUSED:
            usual, reason = REFUSED[name]
            if value != usual:
                refused.append(f"{key}: {reason}")
        else:
            refused.append(f"{key}: not a field of Accelerate's Megatron-LM plugin")
    numbers = {name: file.get(name) for name in ("num_processes", "num_machines")}
    for name, number in numbers.items():
        if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
            refused.append(f"{name}: {number!r}: expected integer >= 1")
            numbers[name] = None
    migration = _given_only(migrate(words, numbers["num_processes"]), words)
    migration = dataclasses.replace(
        migration,
        not_needed=(*migration.not_needed, *spared),
        refused=(*migration.refused, *refused),
    )
    return Converted(migration, numbers["num_processes"], numbers["num_machines"])


def _as_words(flag: str, value: Any) -> list[str]:
    """An argument as Accelerate gives it: switches that are false are left out."""
    if isinstance(value, bool) or str(value).lower() in ("true", "false"):
        return [flag] if str(value).lower() == "true" else []
    if isinstance(value, list):
        return [flag, *map(str, value)]
    return [flag, str(value)]


def _given_only(migration: Migration, words: list[str]) -> Migration:
    """Without what a whole run needs besides: Megatron-LM's defaults, and problems of arguments that are missing."""
    keys = {setting.partition(" = ")[0] for _, setting in migration.mapped}
    return dataclasses.replace(
        migration,
        settings=tuple(setting for setting in migration.settings if setting.key in keys),
        refused=tuple(line for line in migration.refused if line.split(":")[0].split(" ")[0] in words),
    )
