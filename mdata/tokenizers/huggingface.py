"""HuggingFaceTokenizer: a folder with tokenizer.json, read by the `tokenizers` library.

Ids are those of the ordinary call, what the post-processor adds included; truncation and padding that the
file may ask for are switched off, because a corpus wants whole texts. The end-of-document token is the eos
token that tokenizer_config.json (or special_tokens_map.json) names, else its sep token; it is never guessed
from the vocabulary. The fingerprint covers tokenizer.json without the parts that cannot change an id, so
that reformatting the file or exchanging its decoder keeps a corpus compatible.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from tokenizers import Tokenizer as Engine

from mdata.errors import UsageError, explain_os_error
from mdata.tokenizers.protocol import IdArray, LengthArray

NAME = "HuggingFaceTokenizer"
MODEL_FILE = "tokenizer.json"
# Later files are asked only where earlier ones are silent.
CONFIG_FILES = ("tokenizer_config.json", "special_tokens_map.json")
_NOT_DECIDING = ("decoder", "padding", "truncation", "version")


def read_files(model: Path) -> dict[str, bytes]:
    """The files of a folder, or of the folder around a tokenizer.json, that matter.

    Raises:
        UsageError: no tokenizer.json there.
    """
    main = model / MODEL_FILE if model.is_dir() else model
    try:
        files = {MODEL_FILE: main.read_bytes()}
        for name in CONFIG_FILES:
            if (main.parent / name).is_file():
                files[name] = (main.parent / name).read_bytes()
    except OSError as error:
        raise explain_os_error(error, f"loading a {NAME}") from error
    return files


def build(files: Mapping[str, bytes], *, include_special_tokens: bool = True) -> HuggingFaceTokenizer:
    """A tokenizer from the content of its files.

    Args:
        files: what `read_files` gave.
        include_special_tokens: whether what the post-processor adds (BOS, CLS ...) is kept.

    Raises:
        UsageError: a file is not what its name says, or a special token is not in the vocabulary.
    """
    return HuggingFaceTokenizer(files, include_special_tokens=include_special_tokens)


class HuggingFaceTokenizer:
    """See `mdata.tokenizers.protocol.Tokenizer`."""

    name = NAME

    def __init__(self, files: Mapping[str, bytes], *, include_special_tokens: bool = True) -> None:
        self.files = dict(files)
        self.options = {"include_special_tokens": include_special_tokens}
        self._include_special_tokens = include_special_tokens
        definition = _json_object(files, MODEL_FILE)
        self._engine = _engine(files[MODEL_FILE])
        self.vocab_size = int(self._engine.get_vocab_size(with_added_tokens=True))
        self.eod = self._named_id("eos_token", "sep_token")
        self.special_ids = {
            token.content: id for id, token in self._engine.get_added_tokens_decoder().items() if token.special
        }
        self.fingerprint = _fingerprint(definition, self.eod, include_special_tokens)

    def encode_batch(self, texts: Sequence[str]) -> tuple[IdArray, LengthArray]:
        """See the protocol."""
        # The fast call leaves out character offsets, which nobody here asks for.
        found = self._engine.encode_batch_fast(list(texts), add_special_tokens=self._include_special_tokens)
        lists = [encoding.ids for encoding in found]
        lengths = np.fromiter(map(len, lists), dtype=np.int64, count=len(lists))
        flat = chain.from_iterable(lists)
        return np.fromiter(flat, dtype=np.int32, count=int(lengths.sum())), lengths

    def decode(self, ids: Sequence[int]) -> str:
        """See the protocol."""
        return str(self._engine.decode([int(id) for id in ids], skip_special_tokens=False))

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
        id = self._engine.token_to_id(text) if isinstance(text, str) else None
        if id is None:
            raise UsageError(
                f"the tokenizer's {role} is not in its vocabulary",
                found=json.dumps(text),
                fix=f"add it to the added_tokens of {MODEL_FILE}",
            )
        return int(id)


def _engine(text: bytes) -> Engine:
    try:
        engine = Engine.from_str(text.decode())
    # The library raises bare Exception for anything that it cannot read.
    except Exception as error:
        raise UsageError(f"{MODEL_FILE} is not a tokenizer", found=" ".join(str(error).split())) from error
    engine.no_truncation()
    engine.no_padding()
    return engine


def _json_object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        value = json.loads(files[name])
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{name} is not JSON", found=str(error)) from error
    if not isinstance(value, dict):
        raise UsageError(f"{name} is not a JSON object", found=type(value).__name__)
    return value


def _fingerprint(definition: dict[str, Any], eod: int | None, include_special_tokens: bool) -> str:
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
        "include_special_tokens": include_special_tokens,
    }
    return blake3(json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()).hexdigest()
