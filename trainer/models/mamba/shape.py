"""The function that a Mamba-2 or hybrid model computes, derived from a configuration. Pure, no torch."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from trainer.config.sections import MambaSection, RunConfig
from trainer.kernels.scores import ScoreShape
from trainer.layers.shapes import MixerShape
from trainer.models.family import DecodeState
from trainer.models.gpt.shape import GPTShape, effective_keys, function_keys, gpt_shape
from trainer.models.gpt.shape import decode_state as attention_state

Kind = Literal["mixer", "attention", "mlp", "experts"]
LETTERS: dict[str, Kind] = {"M": "mixer", "*": "attention", "-": "mlp", "E": "experts"}
# Keys of [model] that have no effect in a model without attention, and without MLPs and experts.
_OF_ATTENTION = (
    "num_heads", "num_kv_heads", "head_dim", "qk_norm", "window", "window_interval", "attention_scale",
    "attention_softcap", "attention_sinks", "attention_dropout",
)  # fmt: skip
_OF_MLPS = ("activation", "activation_clamp", "activation_offset")


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaShape(GPTShape):
    """A GPT's, what each layer is, and the mixers.

    Args:
        pattern: a letter for each layer. dt_range, dt_floor: initial steps of a token.
    """

    pattern: str
    mixer: MixerShape
    dt_range: tuple[float, float] = (1e-3, 0.1)
    dt_floor: float = 1e-4


def mamba_shape(config: RunConfig, vocab_size: int) -> MambaShape:
    """The model that a configuration describes."""
    shape, section, layers = gpt_shape(config, vocab_size), section_of(config), pattern_of(config)
    moe = shape.moe and dataclasses.replace(shape.moe, layers=tuple(int(letter == "E") for letter in layers))
    same = {field.name: getattr(shape, field.name) for field in dataclasses.fields(shape)} | {"moe": moe}
    if "*" not in layers and shape.position != "learned":
        same["position"] = "none"
    mixer = MixerShape(
        width=shape.hidden_size,
        num_heads=num_heads(config),
        head_dim=section.head_dim,
        num_groups=section.num_groups,
        state_size=section.state_size,
        conv_kernel=section.conv_kernel,
        chunk_size=section.chunk_size,
        norm_epsilon=section.norm_epsilon,
        dt_limit=(section.dt_limit_min, section.dt_limit_max or math.inf),
    )
    return MambaShape(
        **same,
        pattern=layers,
        mixer=mixer,
        dt_range=(section.dt_min, section.dt_max),
        dt_floor=section.dt_floor,
    )


def section_of(config: RunConfig) -> MambaSection:
    """[model.mamba], with defaults where it is left out."""
    return config.model.mamba or MambaSection()


def num_heads(config: RunConfig) -> int:
    """Heads of a mixer."""
    section = section_of(config)
    return section.num_heads or 2 * config.model.hidden_size // section.head_dim


def pattern_of(config: RunConfig) -> str:
    """A letter for each layer."""
    section = section_of(config)
    if section.pattern is not None:
        return section.pattern
    return allocated(config.model.num_layers, attention=section.attention_ratio, mlp=section.mlp_ratio)


def allocated(num_layers: int, *, attention: float, mlp: float) -> str:
    """The pattern with these shares of layers, as Megatron allocates them.

    Attention lies evenly between mixers, which begin and end the stack; then MLPs replace mixers evenly, the last ones
    as late as possible.
    """
    layers = ["M"] * num_layers
    of_attention, of_mlps = round(num_layers * attention), round(num_layers * mlp)
    _replace_evenly(layers, "*", run=(num_layers - of_attention) / (of_attention + 1))
    if of_mlps:
        _replace_evenly(layers, "-", run=(num_layers - of_attention - of_mlps) / of_mlps)
    return "".join(layers)


def _replace_evenly(layers: list[str], letter: str, *, run: float) -> None:
    """Replace mixers so that on average `run` of them lie before each new letter."""
    left = run
    for place, old in enumerate(layers):
        if old != "M":
            continue
        if left < 0.5:
            layers[place] = letter
            left += run
        else:
            left -= 1


def kinds(shape: MambaShape) -> tuple[Kind, ...]:
    """What each layer is."""
    return tuple(LETTERS[letter] for letter in shape.pattern[: shape.num_layers])


def scores_of(shape: MambaShape, kind: str) -> ScoreShape | None:
    """How attention changes scores; other layers have none."""
    return shape.scores if kind == "attention" else None


def decode_state(shape: MambaShape, kind: str) -> DecodeState:
    """Keys and values of attention's tokens; of a mixer's row its window and its state."""
    if kind == "attention":
        return attention_state(shape, "window" if shape.scores.window else "full")
    if kind != "mixer":
        return DecodeState(tensors={})
    mixer = shape.mixer
    window = (mixer.convolved, mixer.conv_kernel - 1)
    state = (mixer.num_heads, mixer.head_dim, mixer.state_size)
    return DecodeState(tensors={"conv": window, "state": state}, per="row", wide=("state",))


def function(shape: MambaShape) -> dict[str, Any]:
    """See `Family`."""
    keys = function_keys(shape)
    for name in ("pattern", "dt_range", "dt_floor"):
        del keys[name]
    of_mixer = {name for name in keys if name.startswith("mixer_")}
    keys = {name: value for name, value in keys.items() if name not in of_mixer}
    return _with_effect(keys, shape) | _own_keys(shape)


def effective(config: RunConfig) -> dict[str, Any]:
    """See `Family`."""
    shape = mamba_shape(config, config.model.vocab_size or 1)
    keys = effective_keys(config) | {"position": shape.position} | _own_keys(shape)
    if shape.moe is not None:
        keys["moe.layers"] = tuple(int(letter == "E") for letter in shape.pattern)
    return _with_effect(keys, shape)


def _own_keys(shape: MambaShape) -> dict[str, Any]:
    mixer = shape.mixer
    sizes = {name: getattr(mixer, name) for name in ("num_heads", "head_dim", "num_groups", "state_size")}
    sizes |= {"conv_kernel": mixer.conv_kernel, "norm_epsilon": mixer.norm_epsilon}
    low, high = mixer.dt_limit
    sizes |= {"dt_limit_min": low, "dt_limit_max": None if high == math.inf else high}
    return {"mamba.pattern": shape.pattern} | {f"mamba.{name}": value for name, value in sizes.items()}


def _with_effect(keys: dict[str, Any], shape: MambaShape) -> dict[str, Any]:
    """Without the keys of layers that the pattern does not have."""
    idle: set[str] = set()
    if "*" not in shape.pattern:
        idle |= {*_OF_ATTENTION, *(name for name in keys if name.startswith("rope"))}
    if "-" not in shape.pattern:
        idle.add("ffn_hidden_size")
    if not {"-", "E"} & {*shape.pattern}:
        idle |= {*_OF_MLPS}
    return {name: value for name, value in keys.items() if name not in idle}
