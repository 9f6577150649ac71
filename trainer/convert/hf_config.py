"""Hugging Face's config.json and our [model], in both directions.

The settings of a model_type and their meaning are defined by its family (`HuggingFace` in models/family.py).
Unsupported settings that change the function are refused by name; all other keys are ignored. `to_hf` writes, reads its
own result, and refuses every difference, so the two directions cannot drift apart. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mdata import UsageError
from trainer.config.parse import problems_error
from trainer.config.sections import RunConfig
from trainer.convert.model_keys import OTHER_FORM, effective, model_config, refuse_differences
from trainer.models.family import FAMILIES, HuggingFace, Json, family_named, family_of

MXFP4 = "mxfp4"  # the only quantization that is read


def families_of_types() -> dict[str, str]:
    """The values of model_type that are read and written, each with our family."""
    faces = {name: family_named(name).hugging_face for name in FAMILIES}
    return {kind: name for name, face in faces.items() if face for kind in face.architectures}


def _unlike() -> dict[str, str]:
    """Values of model_type that are refused, each with the unsupported part."""
    faces = (family_named(name).hugging_face for name in FAMILIES)
    return {kind: reason for face in faces if face for kind, reason in face.unlike.items()}


def hugging_face(config: RunConfig) -> HuggingFace:
    """The counterpart of a model's family in transformers.

    Raises:
        UsageError: it has nothing.
    """
    face = family_of(config).hugging_face
    if face is None:
        raise UsageError(
            "transformers has no model of this family",
            found=f'model.family="{config.model.family}"',
            expected=f"one of {', '.join(dict.fromkeys(families_of_types().values()))}",
            fix="export to another format",
        )
    return face


def from_hf(config_json: Json, *, where: str, fix: str = "this model has a part that mtrain lacks") -> RunConfig:
    """The model that a config.json describes.

    Raises:
        UsageError: another model_type, or unsupported settings; names all of them.
    """
    kind, families = config_json.get("model_type"), families_of_types()
    if not isinstance(kind, str) or kind not in families:
        reason = _unlike().get(str(kind))
        raise UsageError(
            f"{where} describes a model that cannot be converted",
            found=f"model_type {kind!r}" + (f": {reason}" if reason else ""),
            expected=f"one of {', '.join(families)}",
        )
    face = family_named(families[kind]).hugging_face
    assert face is not None, "it names this model_type"
    # transformers knows some keys of GPT-2 by a second name, which takes precedence if both are present.
    names = face.second_names.get(kind, {})
    second = {first: config_json[name] for name, first in names.items() if name in config_json}
    values = {**face.defaults[kind], **second, **config_json}
    problems = list(_wrong_types(values, kind, face))
    problems += [
        f"{name} = {config_json[name]!r} and {first} = {config_json[first]!r} are two names of the same setting"
        for name, first in names.items()
        if first in second and config_json.get(first, config_json[name]) != config_json[name]
    ]
    if problems:
        raise problems_error(where, problems)
    quantized = config_json.get("quantization_config")
    if quantized and not (isinstance(quantized, dict) and quantized.get("quant_method") == MXFP4):
        problems.append(f"quantization_config is set; only float weights and those of {MXFP4} are read")
    keys = {"family": families[kind], **face.keys(kind, values, problems)}
    if problems:
        raise problems_error(where, problems, fix=fix)
    return model_config(keys, where=where, context=keys["max_position"])


def to_hf(config: RunConfig, vocab_size: int, *, model_type: str = "") -> dict[str, Any]:
    """The config.json of a model.

    Args:
        vocab_size: rows of the logical embedding. model_type: one of those of its family; "": the one that fits.

    Raises:
        UsageError: no config.json of that kind expresses the model; names the keys of ours.
    """
    face = hugging_face(config)
    kind = model_type or face.fitting_type(config)
    if kind not in face.architectures:
        raise UsageError(
            f"config.json of model_type {kind} cannot express this model",
            found=f'model.family="{config.model.family}"',
            expected=f"one of {', '.join(face.architectures)}",
        )
    keys = {**effective(config), "max_position": config.model.max_position or config.train.sequence_length}
    written = {"architectures": [face.architectures[kind]], "tie_word_embeddings": keys["tie_embeddings"]}
    written |= {**face.settings(kind, keys), "vocab_size": vocab_size}
    written |= {"initializer_range": config.model.init_std, "model_type": kind}
    form = f"config.json of model_type {kind}"
    back = from_hf(written, where=form, fix=OTHER_FORM)
    refuse_differences(config, back, form=form, free=("vocab_size", *face.free(config)))
    return written


def _wrong_types(values: Json, kind: str, face: HuggingFace) -> Iterator[str]:
    """Settings that transformers could not have written; a size that has no default is None or a number."""
    for name, default in face.defaults[kind].items():
        value = values[name]
        kinds: tuple[type, ...] = {bool: (bool,), str: (str,), float: (int, float)}.get(type(default), (int,))
        kinds = (float, int) if name in face.amounts else kinds
        if value is not None and (type(value) not in kinds or (type(value) is int and value < 0)):
            yield f"{name} = {value!r} is not {'a size' if int in kinds else f'of type {kinds[0].__name__}'}"
        elif (value is None and name not in face.nullable) or (
            type(default) is int and value == 0 and name not in face.zeros
        ):
            yield f"{name} = {value!r} is not allowed"
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(values.get(name) or {}, dict):
            yield f"{name} = {values[name]!r} is not a table"
