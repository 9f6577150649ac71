"""Notes for the user on where transformers 5, which Megatron uses, deviates from tokenizer.json.

Observed with transformers 5.14.1. It adds special tokens that only the other files of the folder name; and for some
classes that tokenizer_config.json may name, it takes only the vocabulary from tokenizer.json and splits words by its
own rules. It chooses such a class by config.json's model_type, too, for some models against tokenizer_config.json.
mdata follows tokenizer.json, and a note says so where the ids may differ. The fields add_bos_token and
add_eos_token change nothing in transformers either: beside a tokenizer.json they are dropped, and the post-processor
decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mdata.tokenizers.base.byte_level import QWEN2
from mdata.tokenizers.base.tokenizer_json import AddedToken, Definition, added_tokens

Config = Mapping[str, Any]

_DECODER, _EXTRA, _ADDED_FILE = "added_tokens_decoder", ("additional_special_tokens", "extra_special_tokens"), "added"
_FLAGS = ("special", "single_word", "lstrip", "rstrip", "normalized")
# Classes built by their own rules: these are compared with tokenizer.json; of the others only that fact is known.
_COMPARED = ("GPT2Tokenizer", "RobertaTokenizer", "GPTNeoXTokenizer", "Qwen2Tokenizer", "LlamaTokenizer",
             "CodeLlamaTokenizer", "BertTokenizer", "GemmaTokenizer")  # fmt: skip
_OTHER_NAMES = """
    AlbertTokenizer BarthezTokenizer BartTokenizer BigBirdTokenizer BlenderbotTokenizer CamembertTokenizer
    CLIPTokenizer CohereTokenizer DebertaTokenizer DebertaV2Tokenizer DPRQuestionEncoderTokenizer FunnelTokenizer
    HerbertTokenizer LasrTokenizer LayoutLMv2Tokenizer LayoutLMv3Tokenizer LayoutXLMTokenizer LEDTokenizer
    LukeTokenizer LxmertTokenizer MarkupLMTokenizer MBart50Tokenizer MBartTokenizer MLukeTokenizer MobileBertTokenizer
    MPNetTokenizer MvpTokenizer NllbTokenizer NougatTokenizer OpenAIGPTTokenizer PegasusTokenizer Qwen3_5Tokenizer
    ReformerTokenizer RemBertTokenizer RoFormerTokenizer SeamlessM4TTokenizer Siglip2Tokenizer SplinterTokenizer
    T5Tokenizer Tipsv2Tokenizer UdopTokenizer VideoPrismTokenizer WhisperTokenizer XGLMTokenizer XLMRobertaTokenizer
    XLNetTokenizer
"""
_OTHERS = frozenset(_OTHER_NAMES.split())
_OF_MODELS = {  # the classes of models whose tokenizer_config.json is not believed
    "qwen2": "Qwen2Tokenizer",
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text"), "Qwen3_5Tokenizer"),
}


def role_text(role: str, config: Config, *, special_map: Config) -> object:
    """The token of a role such as eos_token; from the older file if the newer lacks the list of added tokens."""
    first, second = (config, special_map) if _DECODER in config else (special_map, config)
    token = first.get(role)
    token = second.get(role) if token is None else token
    return token.get("content") if isinstance(token, dict) else token


def differences(
    definition: Definition, config: Config, *, special_map: Config, added: Config, model_type: str | None = None
) -> list[str]:
    """Notes for the user on what transformers 5 does differently with this folder.

    Args:
        definition: tokenizer.json.
        config, special_map, added: content of tokenizer_config.json, special_tokens_map.json and added_tokens.json.
        model_type: that of config.json.
    """
    notes = []
    name = _OF_MODELS.get(model_type or "") or str(config.get("tokenizer_class") or "").removesuffix("Fast")
    if name in _OTHERS or (name in _COMPARED and _parts(definition) != _parts_of(name, config)):
        may = "may cut" if name in _OTHERS else "cuts"
        notes.append(
            f"ids follow tokenizer.json; transformers 5, which Megatron uses, {may} words of a {name} by other rules"
        )
    by_content = {token.content: token for token in added_tokens(definition)}
    sources = [config] if _DECODER in config else [config, special_map, {_ADDED_FILE: added}]
    missing = dict.fromkeys(text for source in sources for text in _named(source) if text not in by_content)
    if missing:
        note = "ordinary text here, but special tokens in Megatron, because other files of the folder name them"
        notes.append(f"{note}: {' '.join(list(missing)[:8])} (add them to the added_tokens of tokenizer.json)")
    other = [token["content"] for token in _decoder(config) if _differs(token, by_content.get(token["content"]))]
    if other:
        note = "matched as tokenizer.json says; Megatron follows tokenizer_config.json, which has other flags for"
        notes.append(f"{note}: {' '.join(other[:8])}")
    return notes


def _named(config: Config) -> Iterator[str]:
    """The texts of all tokens that a file names."""
    for key, value in config.items():
        if key in _EXTRA:
            listed = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
        elif key == _ADDED_FILE:
            listed = list(value)
        else:
            # Such as eos_token and image_token; add_bos_token is not a text.
            listed = [value] if key.endswith("_token") else []
        for token in listed:
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str) and text:
                yield text
    yield from (token["content"] for token in _decoder(config))


def _decoder(config: Config) -> list[dict[str, Any]]:
    listed = config.get(_DECODER)
    tokens = listed.values() if isinstance(listed, dict) else ()
    return [token for token in tokens if isinstance(token, dict) and isinstance(token.get("content"), str)]


def _differs(token: Mapping[str, Any], added: AddedToken | None) -> bool:
    return added is not None and any(bool(token[flag]) != getattr(added, flag) for flag in _FLAGS if flag in token)


def _parts(definition: Definition) -> tuple[Any, Any]:
    return _plain(definition.get("normalizer")), _plain(definition.get("pre_tokenizer"))


def _plain(part: Any) -> Any:
    """Without parts that change no id; a sequence of one component becomes that component."""
    if not isinstance(part, dict):
        return None
    inner = part.get("normalizers", part.get("pretokenizers"))
    if isinstance(inner, list):
        plain = [_plain(component) for component in inner]
        return plain[0] if len(plain) == 1 else plain
    defaults = {
        "add_prefix_space": False,
        "use_regex": True,
        "prepend_scheme": "always",
        "split": True,
        "invert": False,
    }
    usual = {key: value for key, value in defaults.items() if part.get("type") in _HAVING[key]}
    return {**usual, **{key: value for key, value in part.items() if key not in ("trim_offsets", "str_rep")}}


_HAVING = {
    "add_prefix_space": ("ByteLevel",),
    "use_regex": ("ByteLevel",),
    "prepend_scheme": ("Metaspace",),
    "split": ("Metaspace",),
    "invert": ("Split",),
}


def _parts_of(name: str, config: Config) -> tuple[Any, Any]:
    """Normalizer and pre-tokenizer that transformers 5 builds for a class, in the form of `_parts`."""
    prefix = bool(config.get("add_prefix_space"))
    byte_level = {"type": "ByteLevel", "add_prefix_space": prefix, "use_regex": True}
    split = {"type": "Split", "invert": False}
    if name in ("GPT2Tokenizer", "RobertaTokenizer"):
        return None, byte_level
    if name == "GPTNeoXTokenizer":
        return {"type": "NFC"}, byte_level
    if name == "Qwen2Tokenizer":
        words = {**split, "pattern": {"Regex": QWEN2}, "behavior": "Isolated"}
        return {"type": "NFC"}, [words, {**byte_level, "use_regex": False}]
    if name == "GemmaTokenizer":
        words = {**split, "pattern": {"String": " "}, "behavior": "MergedWithPrevious"}
        return {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}, words
    if name == "BertTokenizer":
        lower, accents = config.get("do_lower_case", True), config.get("strip_accents")
        chinese = config.get("tokenize_chinese_chars", True)
        flags = {"clean_text": True, "handle_chinese_chars": chinese, "strip_accents": accents, "lowercase": lower}
        return {"type": "BertNormalizer", **flags}, {"type": "BertPreTokenizer"}
    scheme = "never" if config.get("add_prefix_space") is False else "always" if config.get("legacy") else "first"
    return None, {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": False}
