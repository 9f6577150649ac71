"""HuggingFaceTokenizer: a folder with tokenizer.json.

Ids are those of the ordinary call, what the post-processor adds included; truncation and padding that the
file may ask for are switched off, because a corpus wants whole texts. The end-of-document token is the eos
token that tokenizer_config.json (or special_tokens_map.json) names, else its sep token; it is never guessed
from the vocabulary. The fingerprint covers tokenizer.json without the parts that cannot change an id, so
that reformatting the file or exchanging its decoder keeps a corpus compatible.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from blake3 import blake3

from mdata.errors import UsageError, explain_os_error
from mdata.tokenizers.defined import DefinedTokenizer
from mdata.tokenizers.definition import Definition
from mdata.tokenizers.engines import EXACT
from mdata.tokenizers.protocol import TokenizerSpec

NAME = "HuggingFaceTokenizer"
OPTIONS = ("include_special_tokens", "special_tokens", "special_in_text")
MODEL_FILE = "tokenizer.json"
# Later files are asked only where earlier ones are silent.
CONFIG_FILES = ("tokenizer_config.json", "special_tokens_map.json")
_NOT_DECIDING = ("decoder", "padding", "truncation", "version")


def load(spec: TokenizerSpec, options: Mapping[str, Any]) -> HuggingFaceTokenizer:
    """The tokenizer of a folder, or of the folder around a tokenizer.json, with its best engine.

    Raises:
        UsageError: no tokenizer.json there, or files that are not what their names say.
    """
    files = _read_files(spec)
    try:
        return HuggingFaceTokenizer(files, options, engine=EXACT).checked(spec.engine)
    except UsageError as error:
        raise UsageError(f"{spec.model}: {error}") from error


def _read_files(spec: TokenizerSpec) -> dict[str, bytes]:
    if spec.model is None:
        raise UsageError(f"{NAME} needs a folder", fix="--tokenizer-model FOLDER, one with tokenizer.json")
    model = Path(spec.model)
    main = model / MODEL_FILE if model.is_dir() else model
    try:
        files = {MODEL_FILE: main.read_bytes()}
        for name in CONFIG_FILES:
            if (main.parent / name).is_file():
                files[name] = (main.parent / name).read_bytes()
    except OSError as error:
        raise explain_os_error(error, f"loading a {NAME}") from error
    return files


def build(files: Mapping[str, bytes], options: Mapping[str, Any], *, engine: str = EXACT) -> HuggingFaceTokenizer:
    """A tokenizer from the content of its files.

    Args:
        files: as a tokenizer has them.
        options: `include_special_tokens`: whether what the post-processor adds (BOS, CLS ...) is kept;
            `special_tokens`: more of them, put at the end; `special_in_text`: see TokenizerSpec.
        engine: the library that gives the ids; not compared with the exact one here.

    Raises:
        UsageError: a file is not what its name says, or a special token is not in the vocabulary.
    """
    return HuggingFaceTokenizer(files, options, engine=engine)


class HuggingFaceTokenizer(DefinedTokenizer):
    """See `mdata.tokenizers.protocol.Tokenizer`."""

    name = NAME

    def __init__(self, files: Mapping[str, bytes], options: Mapping[str, Any], *, engine: str) -> None:
        definition = _json_object(files, MODEL_FILE)
        _check_definition(definition)
        kept = {"include_special_tokens": True, **options}
        super().__init__(files, definition, options=kept, engine=engine)
        self.eod = self._named_id("eos_token", "sep_token")

    @cached_property
    def fingerprint(self) -> str:
        """See the protocol."""
        return _fingerprint(self._definition, self.eod, self.options)

    def _named_id(self, *roles: str) -> int | None:
        """The id of the first of these roles that a configuration file names."""
        configs = [_json_object(self.files, name) for name in CONFIG_FILES if name in self.files]
        for role in roles:
            for config in configs:
                token = config.get(role)
                text = token.get("content") if isinstance(token, dict) else token
                if text is not None:
                    return self._id_of(text, role)
        return None

    def _id_of(self, text: object, role: str) -> int:
        id = self.id_of(text) if isinstance(text, str) else None
        if id is None:
            raise UsageError(
                f"the tokenizer's {role} is not in its vocabulary",
                found=json.dumps(text),
                fix=f"add it to the added_tokens of {MODEL_FILE}",
            )
        return id


def _check_definition(definition: Definition) -> None:
    """Refuse what our own reading would stumble over; the library judges the rest."""
    added = definition.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(t, dict) and isinstance(t.get("content"), str) for t in added):
        raise UsageError(f"{MODEL_FILE} is not a tokenizer", found="added_tokens that are not a list of tokens")
    model = definition.get("model")
    if isinstance(model, dict) and model.get("dropout"):
        raise UsageError(
            f"{MODEL_FILE} drops merges at random, so a text has no ids of its own",
            found=f"dropout {model['dropout']}",
            fix='set "dropout" of its model to null',
        )


def _json_object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    import orjson

    try:
        value = orjson.loads(files[name])
    except orjson.JSONDecodeError as error:
        raise UsageError(f"{name} is not JSON", found=str(error)) from error
    if not isinstance(value, dict):
        raise UsageError(f"{name} is not a JSON object", found=type(value).__name__)
    return value


def _fingerprint(definition: Definition, eod: int | None, options: Mapping[str, Any]) -> str:
    deciding = {key: value for key, value in definition.items() if key not in _NOT_DECIDING}
    model = deciding.get("model")
    if isinstance(model, dict) and isinstance(model.get("merges"), list):
        # Older files write a merge as "a b", newer ones as ["a", "b"]; the ids are the same.
        merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        deciding["model"] = {**model, "merges": merges}
    content = {
        "type": NAME,
        "definition": deciding,
        "eod": eod,
        "include_special_tokens": options["include_special_tokens"],
    }
    # Absent where it has its default, so that corpora of versions that did not know it keep their fingerprint.
    if options.get("special_in_text", "special") != "special":
        content["special_in_text"] = options["special_in_text"]
    return blake3(json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()).hexdigest()
