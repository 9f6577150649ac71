"""BertWordPieceLowerCase and BertWordPieceCase: WordPiece from a vocab.txt, as BERT published it.

Both are written as a tokenizer.json, so the exact engine is the `tokenizers` library. [PAD], [UNK], [CLS],
[SEP] and [MASK] are matched in the raw text, in Case also <extra_id_0> to <extra_id_99>, which follow the
vocabulary. [CLS] and [SEP] stand around every sentence unless `include_special_tokens` is False; [SEP] ends
documents. As in Megatron, LowerCase takes further special tokens and Case does not: a note says so.
`compat="megatron-2023"` is another class (wordpiece_2023.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from blake3 import blake3

from mdata.errors import UsageError, explain_os_error
from mdata.tokenizers.base.tokenizer import Announce, Tokenizer, TokenizerSpec
from mdata.tokenizers.base.tokenizer_json import added_tokens, with_special_tokens
from mdata.tokenizers.engines.libraries import EXACT
from mdata.tokenizers.types.json_backed import DefinedTokenizer
from mdata.tokenizers.types.wordpiece_2023 import BertWordPiece2023, is_2023
from mdata.tokenizers.types.wordpiece_vocab import CLS, NAMED, SEP, as_definition, read_vocabulary

VOCAB_FILE = "vocab.txt"
LOWER, CASE = "BertWordPieceLowerCase", "BertWordPieceCase"
_EXTRA = tuple(f"<extra_id_{number}>" for number in range(100))


class BertWordPiece(DefinedTokenizer):
    """See `mdata.tokenizers.base.tokenizer.Tokenizer`."""

    OPTIONS = ("special_tokens", "special_in_text", "include_special_tokens", "compat")

    @classmethod
    def load(cls, spec: TokenizerSpec, options: Mapping[str, Any]) -> Tokenizer:
        """The tokenizer of a vocabulary file, with its best engine.

        Raises:
            UsageError: no file was named or it cannot be read, or its content is not what it should be.
        """
        if spec.vocab_file is None:
            raise UsageError(f"{cls.name} needs a vocabulary", fix="--vocab-file vocab.txt")
        try:
            files = {VOCAB_FILE: Path(spec.vocab_file).read_bytes()}
        except OSError as error:
            raise explain_os_error(error, f"loading a {cls.name}") from error
        read_vocabulary(files[VOCAB_FILE], spec.vocab_file)
        if is_2023(options):
            return BertWordPiece2023(cls.name, files, options=options, engine=spec.engine)
        try:
            return cls(files, options, engine=EXACT).checked(spec.engine, spec.announce)
        except UsageError as error:
            raise UsageError(f"{spec.vocab_file}: {error}") from error

    @classmethod
    def build(cls, files: Mapping[str, bytes], options: Mapping[str, Any], *, engine: str) -> Tokenizer:
        """A tokenizer from the content of its file, which `load` has checked once.

        Args:
            files: as a tokenizer has them.
            options: of OPTIONS.
            engine: the library that gives the ids; not compared with the exact one here.
        """
        if is_2023(options):
            # It has one engine; the exact one is what a caller names who does not care.
            return BertWordPiece2023(cls.name, files, options=options, engine="auto" if engine == EXACT else engine)
        return cls(files, options, engine=engine)

    def __init__(self, files: Mapping[str, bytes], options: Mapping[str, Any], *, engine: str) -> None:
        self._vocabulary = read_vocabulary(files[VOCAB_FILE], VOCAB_FILE)
        kept = {key: value for key, value in options.items() if (key, value) != ("include_special_tokens", True)}
        self._ignored = kept.pop("special_tokens", []) if self.name == CASE else []
        named = _named_ids(self._vocabulary)
        definition = as_definition(self._vocabulary, lower=self.name == LOWER, around=(named[CLS], named[SEP]))
        further = _EXTRA if self.name == CASE else kept.get("special_tokens", ())
        super().__init__(files, definition, options={**kept, "special_tokens": [*NAMED, *further]}, engine=engine)
        self.options = kept
        self.eod = named[SEP]

    def checked(self, wanted: str, announce: Announce | None = None) -> Self:
        """See DefinedTokenizer."""
        super().checked(wanted, announce)
        missing = [f"{name} gets id {self.special_ids[name]}" for name in NAMED if name not in self._vocabulary]
        if missing:
            self.notes += (f"not in the vocabulary: {', '.join(missing)}",)
        if self._ignored:
            self.notes += (f"{CASE} takes no further special tokens (as in Megatron): {' '.join(self._ignored)}",)
        return self

    @cached_property
    def fingerprint(self) -> str:
        """See the protocol."""
        import orjson

        content = {"type": self.name, "vocabulary": self._vocabulary, "special": self.special_ids}
        content |= {key: value for key, value in self.options.items() if key != "special_tokens"}
        return blake3(orjson.dumps(content, option=orjson.OPT_SORT_KEYS)).hexdigest()


class BertWordPieceLowerCase(BertWordPiece):
    """Letters lose their case and their accents."""

    name = LOWER


class BertWordPieceCase(BertWordPiece):
    """Letters stay as they are."""

    name = CASE


def _named_ids(vocabulary: Mapping[str, int]) -> dict[str, int]:
    """The ids of the special tokens that every vocabulary of BERT's has, or gets."""
    definition = with_special_tokens({"model": {"vocab": vocabulary}}, NAMED)
    return {token.content: token.id for token in added_tokens(definition)}
