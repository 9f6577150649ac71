"""BertWordPieceLowerCase and BertWordPieceCase: WordPiece from a vocab.txt, as BERT published it.

Both are written as a tokenizer.json, so the exact engine is the `tokenizers` library. [PAD], [UNK], [CLS], [SEP] and
[MASK] are matched in the raw text, in Case also <extra_id_0> to <extra_id_99>, which follow the vocabulary. [CLS] and
[SEP] surround every sentence unless `include_special_tokens` is False; [SEP] ends documents. As in Megatron, LowerCase
accepts further special tokens and Case does not: a note says so. `compat="megatron-2023"` is another class
(wordpiece_2023.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from mdata.errors import UsageError
from mdata.tokenizers.base.helpers import hash_content, read_file
from mdata.tokenizers.base.tokenizer import Tokenizer, TokenizerSpec
from mdata.tokenizers.base.tokenizer_json import added_tokens, with_special_tokens
from mdata.tokenizers.engines.libraries import EXACT
from mdata.tokenizers.types.json_backed import JsonTokenizer, errors_name
from mdata.tokenizers.types.wordpiece_2023 import BertWordPiece2023, is_2023
from mdata.tokenizers.types.wordpiece_vocab import CLS, NAMED, SEP, as_definition, read_vocabulary

VOCAB_FILE = "vocab.txt"
LOWER, CASE = "BertWordPieceLowerCase", "BertWordPieceCase"
_EXTRA = tuple(f"<extra_id_{number}>" for number in range(100))


class BertWordPiece(JsonTokenizer):
    """See `mdata.tokenizers.base.tokenizer.Tokenizer`."""

    OPTIONS = ("special_tokens", "special_in_text", "include_special_tokens", "compat")

    @classmethod
    def load(cls, spec: TokenizerSpec, options: Mapping[str, Any]) -> Tokenizer:
        """See TokenizerType."""
        if spec.vocab_file is None:
            raise UsageError(f"{cls.name} needs a vocabulary", fix="--vocab-file vocab.txt")
        files = {VOCAB_FILE: read_file(spec.vocab_file, cls.name)}
        read_vocabulary(files[VOCAB_FILE], spec.vocab_file)
        if is_2023(options):
            return BertWordPiece2023(cls.name, files, options=options, engine=spec.engine)
        with errors_name(spec.vocab_file):
            return cls(files, options, engine=EXACT)

    @classmethod
    def build(cls, files: Mapping[str, bytes], options: Mapping[str, Any], *, engine: str) -> Tokenizer:
        """See TokenizerType."""
        if is_2023(options):
            # It has only its own engine; EXACT is the default of `build_tokenizer`.
            return BertWordPiece2023(cls.name, files, options=options, engine="auto" if engine == EXACT else engine)
        return cls(files, options, engine=engine)

    def __init__(self, files: Mapping[str, bytes], options: Mapping[str, Any], *, engine: str) -> None:
        self._vocabulary = read_vocabulary(files[VOCAB_FILE], VOCAB_FILE)
        recorded_options = {
            key: value for key, value in options.items() if (key, value) != ("include_special_tokens", True)
        }
        self._ignored = recorded_options.pop("special_tokens", []) if self.name == CASE else []
        named = _named_ids(self._vocabulary)
        definition = as_definition(self._vocabulary, lower=self.name == LOWER, surrounding=(named[CLS], named[SEP]))
        further = _EXTRA if self.name == CASE else recorded_options.get("special_tokens", ())
        super().__init__(
            files, definition, options={**recorded_options, "special_tokens": [*NAMED, *further]}, engine=engine
        )
        self.options = recorded_options
        self.eod, self.bos = named[SEP], named[CLS]

    def _file_notes(self) -> list[str]:
        missing = [f"{name} gets id {self.special_ids[name]}" for name in NAMED if name not in self._vocabulary]
        notes = [f"not in the vocabulary: {', '.join(missing)}"] if missing else []
        if self._ignored:
            notes.append(f"{CASE} takes no further special tokens (as in Megatron): {' '.join(self._ignored)}")
        return notes

    @cached_property
    def fingerprint(self) -> str:
        """See the protocol."""
        content = {"type": self.name, "vocabulary": self._vocabulary, "special": self.special_ids}
        content |= {key: value for key, value in self.options.items() if key != "special_tokens"}
        return hash_content(content)


class BertWordPieceLowerCase(BertWordPiece):
    """Letters are lowercased and lose their accents."""

    name = LOWER


class BertWordPieceCase(BertWordPiece):
    """Letters are not changed."""

    name = CASE


def _named_ids(vocabulary: Mapping[str, int]) -> dict[str, int]:
    """The ids of the special tokens that every BERT vocabulary has, or gets."""
    definition = with_special_tokens({"model": {"vocab": vocabulary}}, NAMED)
    return {token.content: token.id for token in added_tokens(definition)}
