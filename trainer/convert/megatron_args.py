"""Megatron-LM's arguments, as its checkpoints keep them, and our [model], in both directions.

Reading goes through the rules of `mtrain config --from-megatron`: an argument means the same on the command line and in
a checkpoint. Arguments missing in older or foreign checkpoints are inferred from the tensors if possible, otherwise
Megatron's defaults are assumed; both are reported. Writing reads its own result and refuses every difference. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mdata import DamageError, UsageError
from mdata.errors import counted
from trainer.config.parse import problems_error
from trainer.config.sections import RunConfig
from trainer.convert.links import TensorInfo
from trainer.convert.megatron_names import megatron_model, num_rows
from trainer.convert.model_keys import effective, model_config, refuse_differences
from trainer.migrate.arguments import PROGRAM, PROGRAMS, Given, read_arguments
from trainer.migrate.flags import flag_table
from trainer.migrate.rules_model import model_rules
from trainer.migrate.settings import Setting

Arguments = Mapping[str, Any]
# Switches whose stored value is the opposite of the argument's.
_NEGATED = {
    "--disable-bias-linear": "add_bias_linear",
    "--no-bias-gelu-fusion": "bias_gelu_fusion",
    "--no-bias-swiglu-fusion": "bias_swiglu_fusion",
    "--bert-no-binary-head": "bert_binary_head",
}
# Numbers or texts, or lists of them.
_LISTS = ("--no-rope-freq", "--window-attn-skip-freq", "--window-size", "--moe-layer-freq", "--moe-aux-loss-coeff",
          "--moe-router-load-balancing-type")  # fmt: skip
_OTHER_NAMES = {
    "--norm-epsilon": ("norm_epsilon", "layernorm_epsilon"),
    "--apply-layernorm-1p": ("layernorm_zero_centered_gamma", "apply_layernorm_1p"),
}
# Arguments that change the function and have no counterpart here, with the values that change nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "openai_gelu": (False, None),
    "apply_residual_connection_post_layernorm": (False, None),
    "qk_l2_norm": (False, None),
    "use_mup": (False, None),
    "attention_output_gate": (False, None),
    "experimental_attention_variant": (None,),
    "enable_mhc_connections": (False, None),
    "heterogeneous_layers_config_path": (None, ""),
    "heterogeneous_layers_config_encoded_json": (None, ""),
    "moe_latent_size": (None,),
    "moe_apply_probs_on_input": (False, None),
    "moe_use_legacy_grouped_gemm": (False, None),
    "softmax_scale": (None,),
    "yarn_correction_range_round_to_int": (True, None),
}
# Our own, beside Megatron's: rows without padding, which its loss runs over and ours does not.
ROWS_KEY = "mtrain_vocab_size"
# Ours as well: Megatron's arguments do not say which of its programs they are for.
FAMILY_KEY = "mtrain_family"
_HEAD_SIZE = 64  # of all models that were published without arguments
# The types that an argument's value may have in a checkpoint, by its kind on the command line.
_KINDS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "switch": ((bool,), "true or false"),
    "int": ((int, float), "a number"),
    "float": ((int, float), "a number"),
    "text": ((str,), "a text"),
    "texts": ((str, list, tuple), "texts"),
}
_LONGEST_TEXT = 1000
_SIZES = ("num_layers", "hidden_size", "num_attention_heads")


def from_arguments(
    arguments: Arguments, tensors: Mapping[str, TensorInfo], *, where: str, settings: Mapping[str, Any], layers: int = 0
) -> tuple[RunConfig, tuple[str, ...]]:
    """(model, notes) of a checkpoint.

    Args:
        arguments: by name. tensors: of it, by Megatron's names without layer numbers.
        settings: keys of [model] that a user gives. layers: that have tensors.

    Raises:
        UsageError: arguments that are unsupported or missing; names all of them.
    """
    said: list[str] = []
    if not arguments and (sizes := _sizes_of(tensors, layers, settings)):
        arguments = sizes
        heads = counted(arguments["num_attention_heads"], "head")
        said = [f"it has no args: its sizes are those of its tensors, with {heads}"]
        said[0] += "" if "num_heads" in settings else " of 64 features (--set model.num_heads=... for others)"
    lacking = [name for name in _SIZES if arguments.get(name) is None]
    if lacking:
        raise UsageError(f"{where} does not say the sizes of its model", found=f"no {', '.join(lacking)} in its args")
    given, notes = _completed(arguments, tensors, settings, where=where)
    problems = [
        f"{name} = {arguments[name]!r} is not supported" for name, neutral in _NEUTRAL.items()
        if name in arguments and arguments[name] not in neutral
    ]  # fmt: skip
    keys = {"num_layers": arguments["num_layers"], "hidden_size": arguments["hidden_size"]}
    keys |= {"num_heads": arguments["num_attention_heads"], "norm_epsilon": given["--norm-epsilon"]}
    for rule in model_rules(given):
        if isinstance(rule, Setting):
            *section, key = rule.key.removeprefix("model.").split(".")
            table = keys.setdefault(section[0], {}) if section else keys
            table[key] = rule.value
        else:
            problems.append(f"{rule.flag}: {rule.reason}")
    if problems:
        raise problems_error(where, problems, fix="this model has a part that mtrain lacks")
    keys = {name: value for name, value in keys.items() if value is not None}
    rows = num_rows(tensors)
    keys["vocab_size"] = arguments.get(ROWS_KEY) or keys.get("vocab_size") or rows
    keys |= {name: keys.get(name, {}) | x if isinstance(x, Mapping) else x for name, x in settings.items()}
    context = given["--seq-length"] or keys.get("max_position") or 1024
    keys["max_position"] = max(keys.get("max_position") or 0, context)
    return model_config(keys, where=where, context=context), (*said, *notes)


def _sizes_of(tensors: Mapping[str, TensorInfo], layers: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a checkpoint without any, as far as they follow from the sizes of its tensors."""
    embedding, positions = (tensors.get(f"embedding.{name}_embeddings.weight") for name in ("word", "position"))
    inner = tensors.get("decoder.layers.mlp.linear_fc1.weight")
    if embedding is None or positions is None or inner is None:
        return {}
    width = embedding.shape[1]
    return {
        "num_layers": layers,
        "hidden_size": width,
        "num_attention_heads": settings.get("num_heads") or max(1, width // _HEAD_SIZE),
        "ffn_hidden_size": inner.shape[0],
        "max_position_embeddings": positions.shape[0],
    }


def to_arguments(config: RunConfig, vocab_size: int, *, padded_rows: int, tp: int = 1, pp: int = 1) -> dict[str, Any]:
    """The arguments with which Megatron-LM builds a model.

    Raises:
        UsageError: no arguments express the model; names the keys of ours.
    """
    model, length = config.model, config.train.sequence_length
    more = {"max_position": model.max_position or length, "sequence_length": length, "init_std": model.init_std}
    more |= {"mtp.loss_factor": model.mtp.loss_factor} if model.mtp else {}
    written = {
        **megatron_model(config).arguments({**effective(config), **more}),
        "padded_vocab_size": padded_rows,
        ROWS_KEY: vocab_size,
        FAMILY_KEY: model.family,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
    }
    back, _ = from_arguments(written, {}, where="args", settings={})
    refuse_differences(config, back, form="Megatron-LM", free=("vocab_size",))
    return written


def _completed(
    arguments: Arguments, tensors: Mapping[str, TensorInfo], settings: Mapping[str, Any], *, where: str
) -> tuple[Given, tuple[str, ...]]:
    """The arguments as the command line would have set them, and the names of missing ones."""
    values = dict(read_arguments([], flag_table()).values)
    notes = [note for key, note in _seen_in_tensors(arguments, tensors, values) if key not in settings]
    for name in values:
        names = _OTHER_NAMES.get(name, (name.removeprefix("--").replace("-", "_"),))
        stored = next((arguments[alias] for alias in names if arguments.get(alias) is not None), None)
        if stored is not None:
            values[name] = stored
    for name, stored in _NEGATED.items():
        if isinstance(arguments.get(stored), bool):
            values[name] = not arguments[stored]
    values["--group-query-attention"] = bool(arguments.get("num_query_groups"))
    values["--tokenizer-type"] = None
    for name in _LISTS:
        value = values[name]
        text = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        values[name] = None if value is None else text
    program = _program(arguments, tensors)
    given = Given(_Typed(values, where=where), {"--embedding-init-method-std": ""}, (), program=program)
    return given, tuple(notes)


def _program(arguments: Arguments, tensors: Mapping[str, TensorInfo]) -> str:
    """The program of Megatron that a checkpoint belongs to, seen from its head's tensors if we did not write it."""
    family = "bert" if "lm_head.dense.weight" in tensors else arguments.get(FAMILY_KEY)
    family = "t5" if "decoder.layers.cross_attention.linear_q.weight" in tensors else family
    family = "mamba" if "decoder.layers.mixer.A_log" in tensors else family
    return next((name for name, of_program in PROGRAMS.items() if of_program == family), PROGRAM)


class _Typed(dict[str, Any]):
    """Values of arguments; each is checked against its kind when it is read."""

    def __init__(self, values: Mapping[str, Any], *, where: str) -> None:
        super().__init__(values)
        self._where, self._table = where, flag_table()

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        types, expected = _KINDS[self._table[name].kind]
        out_of_range = float in types and type(value) in types and not -(1 << 62) < value < 1 << 62
        too_long = type(value) is str and len(value) > _LONGEST_TEXT
        if value is not None and (type(value) not in types or out_of_range or too_long):
            raise DamageError(
                f"{self._where} is damaged at args.{name.removeprefix('--').replace('-', '_')}",
                found=repr(value)[:120], expected=expected, fix="restore the file from a copy",
            )  # fmt: skip
        return value


def _seen_in_tensors(
    arguments: Arguments, tensors: Mapping[str, TensorInfo], values: dict[str, Any]
) -> Iterator[tuple[str, str]]:
    """Set what tensors show where the arguments are silent; (key of ours, note) for each that they do not show."""
    layer = "decoder.layers."
    if arguments.get("position_embedding_type") is None and not arguments.get("use_rotary_position_embeddings"):
        learned = not tensors or "embedding.position_embeddings.weight" in tensors
        values["--position-embedding-type"] = "learned_absolute" if learned else "rope"
        if not learned:
            yield (
                "position",
                'its args name no position_embedding_type and it has no positions: model.position = "rope"',
            )
    if arguments.get("add_bias_linear") is None and tensors:
        values["--disable-bias-linear"] = f"{layer}self_attention.linear_proj.bias" not in tensors
        values["--add-qkv-bias"] = f"{layer}self_attention.linear_qkv.bias" in tensors
    if arguments.get("qk_layernorm") is None:
        values["--qk-layernorm"] = f"{layer}self_attention.q_layernorm.weight" in tensors
    if "lm_head.dense.weight" in tensors:
        values["--bert-no-binary-head"] = "binary_head.weight" not in tensors
    if arguments.get("untie_embeddings_and_output_weights") is None:
        heads = ("output_layer.weight", "lm_head.output_layer.weight")
        values["--untie-embeddings-and-output-weights"] = any(name in tensors for name in heads)
    silent = {"norm_epsilon": "norm_epsilon" not in arguments and "layernorm_epsilon" not in arguments}
    rotary = "rope" in (arguments.get("position_embedding_type"), values["--position-embedding-type"])
    silent["rope_theta"] = rotary and "rotary_base" not in arguments
    silent["activation"] = not arguments.get("swiglu") and "bias_gelu_fusion" not in arguments
    for key in (key for key, lacks in silent.items() if lacks):
        yield key, f"its args do not say model.{key}; Megatron's default is taken (--set model.{key}=... for another)"
