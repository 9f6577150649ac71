"""SentencePieceTokenizer, GPTSentencePieceTokenizer and Llama2Tokenizer: in today's Megatron they are the same.

The ids are those of the library's plain encoding: no BOS, no EOS; control pieces (<s>, </s>) in a text are ordinary
text, user-defined pieces are matched. Three options change that. `legacy`: texts are split at the `special_tokens`, and
there is no end of document. `ignore_extra_whitespaces=False`: runs of blanks are preserved by putting a mark between
them. `compat="megatron-2023"`: the behaviour of the types in the older fork. The fingerprint is that of the model:
types that give the same ids have the same one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from mdata.errors import UsageError
from mdata.tokenizers.base.helpers import (
    AUTO,
    MEGATRON_2023,
    check_engine_name,
    fast_or_exact,
    hash_content,
    is_megatron_2023,
    plain_special_tokens,
    read_file,
    refuse_surrogates,
)
from mdata.tokenizers.base.tokenizer import IdArray, LengthArray, TextRefused, TokenizerSpec
from mdata.tokenizers.engines.long_text import refuse_long
from mdata.tokenizers.sentencepiece.sentencepiece_bpe import SentencePieceBpe
from mdata.tokenizers.sentencepiece.sentencepiece_library import SentencePieceLibrary
from mdata.tokenizers.sentencepiece.sentencepiece_model import (
    BLANK,
    CONTROL,
    USER_DEFINED,
    SentencePieceModel,
    read_model,
)
from mdata.tokenizers.sentencepiece.sentencepiece_split import TokenSplitter, encode_parts, split_blanks, without_last

# Engines that are faster than the library; without them the library encodes all models.
FAST_ENGINES = (SentencePieceBpe,)

MODEL_FILE = "tokenizer.model"
UNKNOWN = "\ufffd"  # the text of an id that is no piece


class SentencePieceType:
    """See `mdata.tokenizers.base.tokenizer.Tokenizer`; the three types differ only in the behaviour of the older fork.

    Args:
        files: the model, under MODEL_FILE.
        options: those of OPTIONS.
        source: the model's name in errors.

    Raises:
        UsageError: an unusable model, or conflicting options.
    """

    name: str
    OPTIONS = ("legacy", "special_tokens", "ignore_extra_whitespaces", "special_in_text", "compat")
    # In the older fork: whether texts were split at its own tokens, and whether BOS was put before each text.
    fork_splits = False
    fork_bos = False

    @classmethod
    def load(cls, spec: TokenizerSpec, options: Mapping[str, Any]) -> Self:
        """See TokenizerType; `spec.model` is a model file, or a folder with tokenizer.model."""
        if spec.model is None:
            raise UsageError(f"{cls.name} needs a model file", fix="--tokenizer-model FILE, such as tokenizer.model")
        path = Path(spec.model)
        content = read_file(path / MODEL_FILE if path.is_dir() else path, cls.name)
        return cls({MODEL_FILE: content}, options, source=spec.model)

    @classmethod
    def build(cls, files: Mapping[str, bytes], options: Mapping[str, Any], *, engine: str) -> Self:
        """See TokenizerType."""
        tokenizer = cls(files, options)
        fast = next((fast for fast in FAST_ENGINES if fast.name == engine), None)
        if fast is not None and fast.unsupported(tokenizer._model) is None:
            tokenizer._fast = fast(tokenizer._model)
        return tokenizer

    def __init__(self, files: Mapping[str, bytes], options: Mapping[str, Any], *, source: str = MODEL_FILE) -> None:
        self.files = dict(files)
        self.options = {key: value for key, value in options.items() if value != _DEFAULTS.get(key)}
        self.notes: tuple[str, ...] = ()
        self._source = source
        self._model = read_model(self.files[MODEL_FILE], source)
        self._check_options()
        plain = plain_special_tokens(self.options)
        self._legacy = bool(self.options.get("legacy"))
        forked = is_megatron_2023(self.options)
        self._bos = self._role("bos") if forked and self.fork_bos else None
        self._added = self._added_tokens(forked)
        self._token_splitter = TokenSplitter(self._added, self._model.id_of(BLANK) if self._legacy else None)
        if plain:
            self._refuse_plain()
            self._token_splitter = TokenSplitter({}, None)
        self._keeps_blanks = self.options.get("ignore_extra_whitespaces") is False and self._drops_blanks()
        self.vocab_size = max([len(self._model.pieces), *(id + 1 for id in self._added.values())])
        self.eod = self._added["<EOD>"] if forked and self.fork_splits else self._end()
        self.bos = self._model.roles.get("bos")
        self._fast: SentencePieceBpe | None = None

    def likely_engine(self, wanted: str) -> str:
        """See SelectsEngine."""
        fast = (fast.name for fast in FAST_ENGINES if fast.unsupported(self._model) is None)
        return next(fast, self._exact.name) if wanted == AUTO else wanted

    def select_engine(self, wanted: str) -> None:
        """See SelectsEngine.

        Raises:
            UsageError: the library refuses the model, too.
        """
        check_engine_name(
            wanted, [*(fast.name for fast in FAST_ENGINES), self._exact.name], used_for="SentencePiece models"
        )
        for fast in FAST_ENGINES if wanted != self._exact.name else ():
            engine_or_reason = fast.try_model(self._model, self._exact)
            engine, notes = fast_or_exact(engine_or_reason, self._exact, name=fast.name, wanted=wanted)
            self._fast = engine if isinstance(engine, fast) else None
            self.notes = notes if self._model.model_type == "bpe" else ()

    @property
    def engine(self) -> str:
        """See the protocol."""
        return self._engine.name

    @cached_property
    def special_ids(self) -> Mapping[str, int]:
        """See the protocol: control pieces, user-defined pieces written like tokens, and tokens of the options."""
        marks = [id for id in self._model.ids_of_kind(USER_DEFINED) if _is_mark(self._model.pieces[id])]
        own = [*self._model.ids_of_kind(CONTROL), *marks]
        return {**{self._model.pieces[id]: id for id in own}, **self._added}

    @cached_property
    def fingerprint(self) -> str:
        """See the protocol."""
        return _fingerprint(self._model, self._deciding())

    def encode_batch(self, texts: Sequence[str]) -> tuple[IdArray, LengthArray]:
        """See the protocol."""
        refuse_long(texts)
        try:
            ids, lengths = self._encode(texts)
        except TextRefused as refused:
            # In a part of a text the character has another position.
            refuse_surrogates([texts[refused.index]], refused.index)
            raise
        if self._bos is not None:
            starts = np.cumsum(lengths) - lengths
            ids, lengths = np.insert(ids, starts, self._bos), lengths + 1
        return ids, lengths

    def special_in_text(self, ids: IdArray, num_texts: int) -> int:
        """See the protocol.

        Tokens of the options that are ordinary pieces are not counted: they occur in texts anyway.
        """
        count = int(np.count_nonzero(np.isin(ids, self._counted))) if len(self._counted) else 0
        return count - num_texts if self._bos is not None else count

    def decode(self, ids: Sequence[int]) -> str:
        """See the protocol."""
        shown = {id: text for text, id in self.special_ids.items()}
        parts: list[str] = []
        run: list[int] = []
        for id in [*map(int, ids), None]:
            if id is not None and id not in shown and 0 <= id < len(self._model.pieces):
                run.append(id)
                continue
            parts += [self._exact.library.decode(run)] if run else []
            parts += [] if id is None else [shown.get(id, UNKNOWN)]
            run = []
        return "".join(parts)

    @property
    def _engine(self) -> SentencePieceBpe | SentencePieceLibrary:
        return self._fast or self._exact

    @cached_property
    def _exact(self) -> SentencePieceLibrary:
        return SentencePieceLibrary(self.files[MODEL_FILE], self._source)

    @cached_property
    def _counted(self) -> IdArray:
        kinds = self._model.kinds
        ids = [id for id in self.special_ids.values() if id >= len(kinds) or kinds[id] in (CONTROL, USER_DEFINED)]
        return np.array(sorted(set(ids)), dtype=np.int32)

    def _encode(self, texts: Sequence[str]) -> tuple[IdArray, LengthArray]:
        if self._token_splitter.tokens:
            return self._token_splitter.encode(texts, self._engine.encode)
        if not self._keeps_blanks:
            return self._engine.encode(texts)
        parts = [split_blanks(text) for text in texts]
        counts = list(map(len, parts))
        flat = [part for of_text in parts for part in of_text]
        return without_last(*encode_parts(flat, counts, encode=self._engine.encode), counts=counts)

    def _check_options(self) -> None:
        tokens = self.options.get("special_tokens", [])
        if not isinstance(tokens, list) or not all(isinstance(token, str) and token for token in tokens):
            raise UsageError(f"special_tokens={tokens!r}", expected="a list of texts that are not empty")
        if tokens and not self.options.get("legacy"):
            problem = f"{self.name} takes special tokens only in its legacy mode; otherwise the model has all tokens"
            raise UsageError(problem, fix="--tokenizer-sentencepiece-legacy, or leave out --tokenizer-special-tokens")
        exclusive = {"legacy", "ignore_extra_whitespaces", "compat"} & self.options.keys()
        if len(exclusive) > 1:
            raise UsageError(
                f"{self.name}: {' and '.join(sorted(exclusive))} exclude each other", fix="name one of them"
            )

    def _added_tokens(self, forked: bool) -> dict[str, int]:
        """The tokens at which texts are split, with their ids: new ones follow the pieces, in the order given."""
        piece_ids = dict(self._model.ids)
        if self._legacy:
            # A text that the library does not know is a new token; so is <unk> itself.
            del piece_ids[self._model.pieces[self._model.roles["unk"]]]
            wanted = self.options.get("special_tokens", [])
        elif forked and self.fork_splits:
            pieces, roles = self._model.pieces, self._model.roles
            of_roles = [pieces[roles[role]] if role in roles else f"<{role.upper()}>" for role in ("pad", "bos", "eos")]
            wanted = ["<CLS>", "<SEP>", "<EOD>", "<MASK>", *of_roles]
        else:
            return {}
        new = iter(range(len(self._model.pieces), len(self._model.pieces) + len(wanted)))
        return {token: piece_ids[token] if token in piece_ids else next(new) for token in dict.fromkeys(wanted)}

    def _role(self, role: str) -> int:
        if role not in self._model.roles:
            problem = f"{self.name} of {MEGATRON_2023} puts {role} before every text, and this model has no such piece"
            raise UsageError(problem, fix="leave out --compat")
        return self._model.roles[role]

    def _end(self) -> int | None:
        return None if self._legacy else self._model.roles.get("eos")

    def _refuse_plain(self) -> None:
        mark = next((text for text in self.special_ids if self._is_user_defined(text)), None)
        if mark is not None:
            raise UsageError(
                "special tokens in texts cannot be plain text: this model matches its user-defined pieces everywhere",
                found=f"{mark!r}",
                fix="leave out --special-tokens-in-text, or train a model without it",
            )

    def _is_user_defined(self, text: str) -> bool:
        id = self._model.id_of(text)
        return self._model.kinds[id] == USER_DEFINED and self._model.pieces[id] == text

    def _drops_blanks(self) -> bool:
        """Whether the model drops blanks; only then must they be preserved."""
        return self._exact.pieces("x  y") == self._exact.pieces("x y")

    def _deciding(self) -> dict[str, Any]:
        """The options on which ids depend besides the model; left out if they change nothing."""
        facts: dict[str, Any] = {"eod": self.eod}
        if self._added:
            facts["tokens"] = list(self._added.items())
            facts["cut"] = bool(self._token_splitter.tokens)
            facts["trims"] = self._legacy
        if self._keeps_blanks:
            facts["keeps_blanks"] = True
        if self._bos is not None:
            facts["bos"] = self._bos
        return facts


class SentencePieceTokenizer(SentencePieceType):
    """In the fork: texts were split at its own tokens, of which <EOD> ended documents."""

    name = "SentencePieceTokenizer"
    fork_splits = True


class GPTSentencePieceTokenizer(SentencePieceType):
    """In the fork: the same ids as today."""

    name = "GPTSentencePieceTokenizer"


class Llama2Tokenizer(SentencePieceType):
    """In the fork: BOS was put before every sentence, even an empty one."""

    name = "Llama2Tokenizer"
    fork_bos = True


_DEFAULTS = {"legacy": False, "ignore_extra_whitespaces": True, "special_tokens": [], "special_in_text": "special"}


def _is_mark(piece: str) -> bool:
    """Whether a user-defined piece looks like a special token; others are words, blanks or line ends."""
    return re.fullmatch(r"<.+>|\[.+\]", piece, re.DOTALL) is not None


def _fingerprint(model: SentencePieceModel, more: Mapping[str, Any]) -> str:
    content = {
        "type": "SentencePiece",
        "pieces": model.pieces,
        "scores": model.scores,
        "kinds": list(model.kinds),
        "model_type": model.model_type,
        "byte_fallback": model.byte_fallback,
        "charsmap": model.charsmap.hex(),
        "add_dummy_prefix": model.add_dummy_prefix,
        "remove_extra_whitespaces": model.remove_extra_whitespaces,
        "escape_whitespaces": model.escape_whitespaces,
        "whitespace_as_suffix": model.whitespace_as_suffix,
        **more,
    }
    return hash_content(content)
