"""Rotary positions and sliding windows of a config.json, in both directions.

Values of both spellings of rotary settings are read and written: `rope_parameters` of transformers 5, `rope_theta` and
`rope_scaling` of older versions; and those that are one table for layers with a window and one for the others. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from mdata.errors import counted
from trainer.models.family import Json

_SCALINGS = {
    "default": ("none", {}),
    "linear": ("linear", {"factor": "factor"}),
    "yarn": ("yarn", {"factor": "factor", "original_max_position_embeddings": "original_length",
                      "beta_fast": "beta_fast", "beta_slow": "beta_slow", "truncate": "truncate"}),
    "llama3": ("llama3", {"factor": "factor", "original_max_position_embeddings": "original_length",
                          "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor"}),
    "longrope": ("longrope", {"factor": "factor", "original_max_position_embeddings": "original_length",
                              "short_factor": "short_factors", "long_factor": "long_factors"}),
}  # fmt: skip
ROPE_TABLES = ("rope_scaling", "rope_parameters")
_ORIGINAL = "original_max_position_embeddings"
_ROPE_TOP = ("rope_theta", "partial_rotary_factor")  # beside the tables
_ROPE_ANY = ("rope_type", "type", "rope_theta", _ORIGINAL, "finetuned")  # in a table of any type
# Settings that have no counterpart here, with the values that change nothing.
_ROPE_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0}
_ROPE_NEUTRAL = {"partial_rotary_factor": 1.0}
_MAGNITUDES = {"attention_factor": None, "mscale": None, "mscale_all_dim": None}
_OPTIONAL = ("beta_fast", "beta_slow", "truncate")
_EVERY = {
    "gemma2": 2,
    "gemma3_text": 6,
    "olmo3": 4,
    "cohere2": 4,
    "gpt_oss": 2,
}  # layers of which the last sees everything
_SWITCHED = ("qwen2", "qwen3", "smollm3")  # whose windows have a switch
_ATTENTIONS = ("full_attention", "sliding_attention")


def demand(settings: Json, name: str, neutral: Any, problems: list[str]) -> None:
    """Add a problem if a setting that we lack is not neutral."""
    if settings.get(name, neutral) != neutral:
        problems.append(f"{name} = {settings[name]!r} is not supported; supported is {neutral!r}")


def contradictions(settings: Json) -> Iterator[str]:
    """Notes on rotary settings that have two values at two places of a config.json, with the one that is used."""
    for name in ROPE_TABLES:
        table = settings.get(name) or {}
        for key, first, second in (("rope_theta", table, settings), (_ORIGINAL, settings, table)):
            counts, other = first.get(key), second.get(key)
            scaled = _SCALINGS.get(str(table.get("rope_type", table.get("type"))), ("", {}))[1]
            if None not in (counts, other) and counts != other and (key == "rope_theta" or key in scaled):
                where = f"in {name}" if first is table else f"outside {name}"
                yield f"config.json has two values of {key}: {counts!r} {where} is used, not {other!r}"


def window_keys(kind: str, settings: Json, problems: list[str]) -> dict[str, Any]:
    """What layers attend to: the window, and every k-th layer that sees everything."""
    size, layers, listed = settings.get("sliding_window"), settings["num_hidden_layers"], settings.get("layer_types")
    if kind not in _EVERY and not (kind in _SWITCHED and settings["use_sliding_window"]):
        window = (size or 0) if kind in ("mistral", "mixtral", "phi3") else 0
        usual = _ATTENTIONS[window > 0]
        if listed is not None and (
            not isinstance(listed, list) or any(name_of_layer != usual for name_of_layer in listed)
        ):
            problems.append(f"layer_types = {str(listed)[:80]}: supported is {usual} in all layers")
        return {"window": window, "window_interval": 0}
    if listed is None:
        listed = _usual_layers(kind, settings, problems)
    elif not (isinstance(listed, list) and len(listed) == layers and set(map(str, listed)) <= set(_ATTENTIONS)):
        expected = f"a list of {' or '.join(_ATTENTIONS)} for {counted(layers, 'layer')}"
        problems.append(f"layer_types = {str(listed)[:80]} is not {expected}")
        return {}
    full_layers = [number for number, name in enumerate(listed, 1) if name == "full_attention"]
    if len(full_layers) == layers:
        return {"window": 0, "window_interval": 0}
    interval = _interval(full_layers, layers)
    if interval is None:
        problems.append(f"sliding windows in layers at irregular distances: full attention in {full_layers[:8]}")
    if size is None:
        switch = "use_sliding_window is set" if kind in _SWITCHED else "layers have sliding windows"
        problems.append(f"{switch} without a sliding_window")
    return {"window": size or 0, "window_interval": interval or 0}


def _usual_layers(kind: str, settings: Json, problems: list[str]) -> list[str]:
    """The layer_types that transformers derives from other settings."""
    layers = settings["num_hidden_layers"]
    if kind in _EVERY:
        every: Any = _EVERY[kind]
        if kind in ("gemma3_text", "cohere2") and settings.get("sliding_window_pattern") is not None:
            every = settings["sliding_window_pattern"]
        if type(every) is not int or every < 1:
            problems.append(f"sliding_window_pattern = {every!r} is not a number of layers")
            every = 1
        return [_ATTENTIONS[number % every != 0] for number in range(1, layers + 1)]
    if kind == "smollm3":
        return [_ATTENTIONS[number in _not_rotated(settings, problems)] for number in range(1, layers + 1)]
    first = settings["max_window_layers"]
    if 0 < first < layers:
        problems.append(f"sliding windows in layers from {first + 1} on, and full attention in those before")
    return [_ATTENTIONS[first < layers]] * layers


def _interval(numbers: list[int], layers: int) -> int | None:
    """k if the numbers are the multiples of k; 0: there are none; None: they are something else."""
    interval = numbers[0] if numbers else 0
    return interval if numbers == (list(range(interval, layers + 1, interval)) if interval else []) else None


def window_json(kind: str, keys: Json) -> dict[str, Any]:
    """The settings of layers that differ in what they attend to."""
    layers, every, window = keys["num_layers"], keys.get("window_interval") or 0, keys["window"]
    if kind in ("mistral", "mixtral", "phi3"):
        return {"sliding_window": window or None}
    if not window and kind not in _EVERY:
        off = {"use_sliding_window": False, "sliding_window": None}
        return off | ({} if kind == "smollm3" else {"max_window_layers": layers})
    are_full = [not window or (every > 0 and number % every == 0) for number in range(1, layers + 1)]
    unused = keys["max_position"]  # transformers makes a mask for a window even if no layer has one
    listed = {"sliding_window": window or unused, "layer_types": [_ATTENTIONS[not is_full] for is_full in are_full]}
    if kind in _EVERY:
        return listed
    return {"use_sliding_window": True, **listed} | ({} if kind == "smollm3" else {"max_window_layers": 0})


def no_rope_interval(settings: Json, problems: list[str]) -> int:
    """SmolLM3: every k-th layer does not rotate; 0: all do."""
    numbers = _not_rotated(settings, problems)
    interval = _interval(numbers, settings["num_hidden_layers"])
    if interval is None:
        problems.append(f"layers without rotary positions lie at irregular distances: {numbers[:8]}")
    return interval or 0


def _not_rotated(settings: Json, problems: list[str]) -> list[int]:
    layers, listed, every = (
        settings["num_hidden_layers"],
        settings.get("no_rope_layers"),
        settings["no_rope_layer_interval"],
    )
    if listed is None:
        return list(range(every, layers + 1, every))
    if not isinstance(listed, list) or len(listed) < layers:
        problems.append(f"no_rope_layers = {str(listed)[:80]} is not a list of 0 or 1 for {counted(layers, 'layer')}")
        return []
    return [number for number, rotated in enumerate(listed[:layers], 1) if not rotated]


def share_of_head(settings: Json, otherwise: float, problems: list[str]) -> tuple[float, Json]:
    """(the share of a head that is rotated, the settings without it)."""
    tables = {name: dict(settings[name]) for name in ROPE_TABLES if settings.get(name)}
    shares = [table.pop("partial_rotary_factor", None) for table in tables.values()]
    shares.append(settings.get("partial_rotary_factor"))
    share = next((stated for stated in shares if stated is not None), otherwise)
    if type(share) not in (int, float) or not 0 < share <= 1:
        problems.append(f"partial_rotary_factor = {share!r} is not a share of a head")
    return share, {name: value for name, value in settings.items() if name != "partial_rotary_factor"} | tables


def layered_rope_keys(settings: Json, problems: list[str], *, theta: float, window_theta: float) -> dict[str, Any]:
    """Rotary settings of models that have a table for each kind of layer; theta, window_theta: their defaults."""
    tables = settings.get("rope_parameters") or {}
    full, sliding = ({**(tables.get(name) or {})} if _is_table(tables.get(name)) else None for name in _ATTENTIONS)
    if full is None or sliding is None or set(tables) - set(_ATTENTIONS):
        problems.append(f"rope_parameters = {str(tables)[:80]} is not one table for each of {', '.join(_ATTENTIONS)}")
        return {}
    full |= settings.get("rope_scaling") or {}
    top = {name: value for name, value in settings.items() if name not in (*ROPE_TABLES, "rope_local_base_freq")}
    keys = rope_keys({"rope_theta": theta, **top, "rope_parameters": full}, problems)
    plain = {name: value for name, value in top.items() if name != "rope_theta"}
    local = settings.get("rope_local_base_freq")
    local = {"rope_theta": window_theta if local is None else local}
    in_windows = rope_keys({**plain, "rope_parameters": {**local, **sliding}}, problems)
    if in_windows == keys:
        return keys
    if set(in_windows) - {"rope_theta"}:
        problems.append("rotary positions are scaled in layers with a window, and otherwise than in the other layers")
    return {**keys, "rope_window_theta": in_windows.get("rope_theta")}


def _is_table(value: Any) -> bool:
    return value is None or isinstance(value, dict)


def layered_rope_json(keys: Json) -> dict[str, Any]:
    """The settings of rotary positions by kind of layer, in both spellings."""
    common = rope_json(keys)
    theta = keys.get("rope_window_theta")
    sliding = common["rope_parameters"] if theta is None else {"rope_type": "default", "rope_theta": theta}
    tables = dict(zip(_ATTENTIONS, (common["rope_parameters"], sliding), strict=True))
    return {**common, "rope_parameters": tables, "rope_local_base_freq": sliding["rope_theta"]}


def rope_keys(settings: Json, problems: list[str]) -> dict[str, Any]:
    """Rotary settings; for a key at two places, transformers' choice is used (see `contradictions`)."""
    tables = {name: settings[name] for name in ROPE_TABLES if settings.get(name)}
    problems += [
        f"{name} = {settings[name]!r} is not supported" for name in settings if _is_unknown_rope_key(name, settings)
    ]
    read = {name: _rope_table(name, table, settings, problems) for name, table in tables.items()}
    keys = next(iter(read.values()), _rope_theta({}, settings, "config.json", problems=problems))
    if any(other != keys for other in read.values()):
        problems.append(f"rope_scaling and rope_parameters disagree: {' and '.join(map(repr, tables.values()))}")
    return keys


def _rope_table(where: str, table: Json, config_json: Json, problems: list[str]) -> dict[str, Any]:
    """Our keys for one of the two tables."""
    keys = _rope_theta(table, config_json, where, problems=problems)
    kinds = [table[name] for name in ("rope_type", "type") if table.get(name) is not None] or ["default"]
    kind = kinds[0]
    if not isinstance(kind, str) or kind not in _SCALINGS:
        problems.append(f"{where} of type {kind!r} is not supported; supported are {', '.join(_SCALINGS)}")
        return keys
    if kinds[-1] != kind:
        problems.append(f"{where} has two types, {kind!r} and {kinds[-1]!r}")
    scaling, names = _SCALINGS[kind]
    settings = {name: value for name, value in table.items() if value is not None}
    magnitude = None
    neutral = {**_ROPE_NEUTRAL, **(_MAGNITUDES if kind in ("yarn", "longrope") else {})}
    neutral |= {"truncate": True} if kind == "longrope" else {}
    for name, value in settings.items():
        if name == "attention_factor" and name in neutral and _is_positive(value):
            magnitude = value
        elif name in neutral:
            demand(table, name, neutral[name], problems)
        elif name not in {*names, *_ROPE_ANY}:
            problems.append(f"{where} has {name} = {value!r}, which type {kind!r} does not use")
    if _ORIGINAL in names:
        settings[_ORIGINAL] = (
            config_json.get(_ORIGINAL) or settings.get(_ORIGINAL) or config_json["max_position_embeddings"]
        )
    if kind == "longrope" and settings.get("factor") is None and _is_positive(settings[_ORIGINAL]):
        settings["factor"] = config_json["max_position_embeddings"] / settings[_ORIGINAL]
    missing = [name for name in names if name not in settings and name not in _OPTIONAL]
    if missing:
        problems.append(f"{where} of type {kind!r} lacks {', '.join(missing)}")
        return keys
    given = {f"rope_{ours}": settings[name] for name, ours in names.items() if name in settings}
    wrong = [name for name in names if name in settings and not _fits(name, settings[name])]
    expected = {"truncate": "true or false"}
    problems += [f"{name} = {settings[name]!r} is not {expected.get(name, 'a number above 0')}" for name in wrong]
    if not wrong:
        problems += _wrong_order(kind, {**keys, **_ROPE_DEFAULTS, **settings})
        if magnitude is not None and not math.isclose(magnitude, _magnitude(kind, settings), rel_tol=1e-6):
            problems.append(f"attention_factor = {magnitude!r} is not the one that the factor gives")
    return {**keys, "rope_scaling": scaling, **given} if scaling != "none" and not wrong else keys


def _magnitude(kind: str, settings: Json) -> float:
    """The factor of rotated heads that yarn and longrope give, as in layers/rope.py."""
    factor = max(settings["factor"], 1.0)
    if kind == "yarn":
        return 0.1 * math.log(factor) + 1
    return math.sqrt(1 + math.log(factor) / math.log(max(settings[_ORIGINAL], 2)))


def _wrong_order(kind: str, settings: Json) -> Iterator[str]:
    """Problems of settings for which the formula is undefined; programs differ in what they then compute."""
    below = {"yarn": ("beta_slow", "beta_fast"), "llama3": ("low_freq_factor", "high_freq_factor")}.get(kind)
    if below and not settings[below[0]] < settings[below[1]]:
        yield f"{below[0]} = {settings[below[0]]!r} is not below {below[1]} = {settings[below[1]]!r}"
    if kind == "yarn" and settings.get("rope_theta", math.inf) <= 1:
        yield f"rope_theta = {settings['rope_theta']!r} is not above 1, which yarn needs"


def _rope_theta(table: Json, settings: Json, where: str, *, problems: list[str]) -> dict[str, Any]:
    theta = next((place["rope_theta"] for place in (table, settings) if place.get("rope_theta") is not None), 10000.0)
    if not _is_positive(theta):
        problems.append(f"rope_theta = {theta!r} in {where} is not a number above 0")
        return {}
    return {"rope_theta": float(theta)}


def _is_unknown_rope_key(name: str, settings: Json) -> bool:
    """Whether a key outside the tables seems to change the rotation in an unknown way."""
    known_keys = (*ROPE_TABLES, *_ROPE_TOP)
    return ("rope" in name or "rotary" in name) and name not in known_keys and settings[name] not in (None, False)


def _fits(name: str, value: Any) -> bool:
    """Whether a setting of a rotary scaling is a number above 0, or a list of them where one is expected."""
    if name == "truncate":
        return isinstance(value, bool)
    if name not in ("short_factor", "long_factor"):
        return _is_positive(value)
    return isinstance(value, list) and bool(value) and all(map(_is_positive, value))


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def rope_json(keys: Json, *, share: bool = False) -> dict[str, Any]:
    """The settings of rotary positions, in both spellings; `share`: with that of a head's features."""
    theta = keys.get("rope_theta", 10000.0)
    kind, names = next(
        ((kind, names) for kind, (scaling, names) in _SCALINGS.items() if scaling == keys.get("rope_scaling")),
        ("default", {}),
    )
    settings = {name: keys[f"rope_{ours}"] for name, ours in names.items()}
    settings |= {name: list(value) for name, value in settings.items() if isinstance(value, tuple)}
    if settings.get("truncate") is True:  # the default
        del settings["truncate"]
    if share:
        settings["partial_rotary_factor"] = keys.get("rope_fraction", 1.0)
    scaling = {"rope_type": kind, **settings} if kind != "default" else None
    return {
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_type": kind, "rope_theta": theta, **settings},
    }
