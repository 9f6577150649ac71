"""What transformers has to know of the tokenizer of a BERT or T5, and what a tokenizer.json need not say.

Samples of BERT begin, end and mask texts with the tokens of these names, wherever the tokenizer comes from.
Transformers reads the names from tokenizer_config.json, and adds the first and the last token only where a
post-processor does, or where its class for a type of model does so by itself. Samples of T5 do not add any to the text
of the encoder.
"""

from __future__ import annotations

import json
from typing import Any

from mdata import UsageError
from mdata.tokenizers.base.tokenizer import TokenizerConfig, token_id
from mdata.tokenizers.base.tokenizer_json import with_special_tokens
from mdata.tokenizers.registry import build_tokenizer
from mdata.tokenizers.types.json_backed import JsonTokenizer

JSON, SETTINGS = "tokenizer.json", "tokenizer_config.json"
_ROLES = ("cls_token", "sep_token", "mask_token", "pad_token", "unk_token")
_WORDPIECE = dict(zip(_ROLES, ("[CLS]", "[SEP]", "[MASK]", "[PAD]", "[UNK]"), strict=True))
_ROBERTA = dict(zip(_ROLES, ("<s>", "</s>", "<mask>", "<pad>", "<unk>"), strict=True))


def with_added_tokens(tokenizer: TokenizerConfig) -> TokenizerConfig:
    """The same with the special tokens of its options in its tokenizer.json, if it has one."""
    if JSON not in tokenizer.files or not tokenizer.options.get("special_tokens"):
        return tokenizer
    definition = with_special_tokens(json.loads(tokenizer.files[JSON]), tokenizer.options["special_tokens"])
    return tokenizer._replace(files={**tokenizer.files, JSON: _json(definition)})


def with_ends_and_masks(tokenizer: TokenizerConfig) -> dict[str, bytes]:
    """All files of a tokenizer, of which tokenizer.json and its settings name what begins, ends and masks a text."""
    files = dict(tokenizer.files)
    if JSON not in files:
        return files
    definition: dict[str, Any] = json.loads(files[JSON])
    settings: dict[str, Any] = json.loads(files.get(SETTINGS, b"{}"))
    ids = {token["content"]: token["id"] for token in definition.get("added_tokens") or ()}
    names = _WORDPIECE if _WORDPIECE["mask_token"] in ids else _ROBERTA
    roles = {role: name for role, name in names.items() if name in ids and not settings.get(role)}
    if roles:
        files[SETTINGS] = _json(settings | roles)
    ends = {role: (names[f"{role}_token"], ids.get(names[f"{role}_token"])) for role in ("cls", "sep")}
    adds_none = (definition.get("post_processor") or {}).get("type", "ByteLevel") == "ByteLevel"
    if adds_none and all(id is not None for _, id in ends.values()):
        kind: dict[str, Any] = {"type": "BertProcessing"}
        if names is _ROBERTA:
            kind = {"type": "RobertaProcessing", "trim_offsets": True, "add_prefix_space": False}
        definition["post_processor"] = kind | ends
        files[JSON] = _json(definition)
    return files


def without_ends(tokenizer: TokenizerConfig) -> dict[str, bytes] | None:
    """Files of a tokenizer that adds no token to a text; None: training's own adds some, or has no tokenizer.json."""
    built = build_tokenizer(*tokenizer[:2], options=tokenizer.options)
    if tokenizer.options.get("include_special_tokens", True) or not isinstance(built, JsonTokenizer):
        return None
    names = _WORDPIECE if _WORDPIECE["sep_token"] in built.special_ids else _ROBERTA
    settings: dict[str, Any] = {
        **json.loads(tokenizer.files.get(SETTINGS, b"{}")),
        "tokenizer_class": "PreTrainedTokenizerFast",  # others add what their type of model has
        "model_input_names": ["input_ids", "attention_mask"],  # T5 refuses token types
        **{role: name for role, name in names.items() if name in built.special_ids},
        "eos_token": built.decode([built.eod]) if built.eod is not None else None,
    }
    definition = {**built.definition, "post_processor": None}
    written = {JSON: definition, SETTINGS: {name: value for name, value in settings.items() if value is not None}}
    return {**tokenizer.files, **{name: _json(of) for name, of in written.items()}}


def check_padding(tokenizer: TokenizerConfig, padding: int, model_type: str) -> None:
    """Refuse a tokenizer whose token with this id begins, ends or masks texts, or is one of them.

    Roberta of transformers numbers the positions of a row without these tokens.

    Raises:
        UsageError: another token pads.
    """
    built = build_tokenizer(*tokenizer[:2], options=tokenizer.options)
    pads = token_id(built, _ROBERTA["pad_token"])
    if pads != padding:
        raise UsageError(
            f"model_type {model_type!r} counts positions without token {padding}, which this tokenizer uses in texts",
            found=f"{padding} is {built.decode([padding])!r}; <pad> is {'none' if pads is None else pads}",
            expected=f"<pad> with the id {padding}",
            fix="leave --model-type out, which writes BertForMaskedLM",
        )


def _json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n"
