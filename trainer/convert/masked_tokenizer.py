"""What transformers has to know of the tokenizer of a model that fills masks, and what a tokenizer.json need not say.

Samples begin, end and mask texts with the tokens of these names, wherever the tokenizer comes from. Transformers reads
the names from tokenizer_config.json, and adds the first and the last token only where a post-processor does.
"""

from __future__ import annotations

import json
from typing import Any

from mdata import UsageError
from mdata.tokenizers.base.tokenizer import TokenizerConfig, token_id
from mdata.tokenizers.registry import build_tokenizer

JSON, SETTINGS = "tokenizer.json", "tokenizer_config.json"
_ROLES = ("cls_token", "sep_token", "mask_token", "pad_token", "unk_token")
_WORDPIECE = dict(zip(_ROLES, ("[CLS]", "[SEP]", "[MASK]", "[PAD]", "[UNK]"), strict=True))
_ROBERTA = dict(zip(_ROLES, ("<s>", "</s>", "<mask>", "<pad>", "<unk>"), strict=True))


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
        files[SETTINGS] = json.dumps(settings | roles, indent=2, ensure_ascii=False).encode() + b"\n"
    ends = {role: (names[f"{role}_token"], ids.get(names[f"{role}_token"])) for role in ("cls", "sep")}
    adds_none = (definition.get("post_processor") or {}).get("type", "ByteLevel") == "ByteLevel"
    if adds_none and all(id is not None for _, id in ends.values()):
        kind: dict[str, Any] = {"type": "BertProcessing"}
        if names is _ROBERTA:
            kind = {"type": "RobertaProcessing", "trim_offsets": True, "add_prefix_space": False}
        definition["post_processor"] = kind | ends
        files[JSON] = json.dumps(definition, indent=2, ensure_ascii=False).encode() + b"\n"
    return files


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
