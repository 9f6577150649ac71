"""SentencePieceTokenizer, GPTSentencePieceTokenizer and Llama2Tokenizer: in today's Megatron they are one thing.

The ids are those of the library's plain encoding: no BOS, no EOS; control pieces (<s>, </s>) spelled in a text are
ordinary text, pieces that the model defines for users are matched. Three options change that. `legacy`: texts are
cut at the `special_tokens`, and there is no end of document. `ignore_extra_whitespaces=False`: runs of blanks are
kept by a mark put between them. `compat="megatron-2023"`: what the types of the older fork did. A model is known
by its content: three types that give the same ids have one fingerprint.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from blake3 import blake3

from mdata.errors import UsageError, explain_os_error
from mdata.tokenizers.base.megatron_2023 import FORK, wants_fork
from mdata.tokenizers.base.tokenizer import IdArray, LengthArray, TextRefused, TokenizerSpec
from mdata.tokenizers.engines.long_text import LONGEST_WHOLE_CHARS
from mdata.tokenizers.sentencepiece.sentencepiece_engines import (
    AUTO,
    EXACT,
    OWN,
    Engine,
    LibraryEngine,
    OwnEngine,
    check_name,
    own_obstacle,
    refuse_surrogates,
    try_own,
)
from mdata.tokenizers.sentencepiece.sentencepiece_model import (
    BLANK,
    CONTROL,
    USER_DEFINED,
    SentencePieceModel,
    read_model,
)
from mdata.tokenizers.sentencepiece.sentencepiece_split import Cuts, encode_parts, kept_blanks, without_last
from mdata.tokenizers.types.json_backed import check_special_in_text

MODEL_FILE = "tokenizer.model"


def read_files(spec: TokenizerSpec) -> dict[str, bytes]:
    """The model file that a user names, or the tokenizer.model of a folder.

    Raises:
        UsageError: none was named, or it cannot be read.
    """
    if spec.model is None:
        raise UsageError(f"{spec.type} needs a model file", fix="--tokenizer-model FILE, such as tokenizer.model")
    path = Path(spec.model)
    try:
        return {MODEL_FILE: (path / MODEL_FILE if path.is_dir() else path).read_bytes()}
    except OSError as error:
        raise explain_os_error(error, f"loading a {spec.type}") from error


class SentencePieceFamily:
    """See `mdata.tokenizers.base.tokenizer.Tokenizer`; a type says what the older fork did differently.

    Args:
        files: the model, under MODEL_FILE.
        options: of OPTIONS.
        source: how to call the model in errors.

    Raises:
        UsageError: a model that cannot be used, or options that do not go together.
    """

    name: str
    OPTIONS = ("legacy", "special_tokens", "ignore_extra_whitespaces", "special_in_text", "compat")
    # Of the older fork: tokens at which texts were cut, and whether BOS stands before each.
    fork_cuts = False
    fork_bos = False

    @classmethod
    def load(cls, spec: TokenizerSpec, options: Mapping[str, Any]) -> Self:
        """The tokenizer of a model file, with its best engine.

        Raises:
            UsageError: no file was named, it cannot be read or used, or the engine that was named cannot be had.
        """
        return cls(read_files(spec), options, source=str(spec.model)).checked(spec.engine)

    @classmethod
    def build(cls, files: Mapping[str, bytes], options: Mapping[str, Any], *, engine: str) -> Self:
        """A tokenizer from the content of its model file, which `load` has checked once.

        Args:
            files: as a tokenizer has them.
            options: as a tokenizer has them.
            engine: what gives the ids; not compared with the library here.
        """
        return cls(files, options).with_engine(engine)

    def __init__(self, files: Mapping[str, bytes], options: Mapping[str, Any], *, source: str = MODEL_FILE) -> None:
        self.files = dict(files)
        self.options = {key: value for key, value in options.items() if value != _DEFAULTS.get(key)}
        self.notes: tuple[str, ...] = ()
        self._source = source
        self._model = read_model(self.files[MODEL_FILE], source)
        self._check_options()
        plain = check_special_in_text(self.options.get("special_in_text", "special")) == "plain"
        self._legacy = bool(self.options.get("legacy"))
        forked = wants_fork(self.options)
        self._bos = self._role("bos") if forked and self.fork_bos else None
        self._added = self._added_tokens(forked)
        self._cuts = Cuts(self._added, self._model.id_of(BLANK) if self._legacy else None)
        if plain:
            self._refuse_plain()
            self._cuts = Cuts({}, None)
        self._keeps_blanks = self.options.get("ignore_extra_whitespaces") is False and self._drops_blanks()
        self.vocab_size = max([len(self._model.pieces), *(id + 1 for id in self._added.values())])
        self.eod = self._added["<EOD>"] if forked and self.fork_cuts else self._end()
        self._own: Engine | None = None

    def checked(self, wanted: str) -> Self:
        """This tokenizer, with the engine that is best or wanted; equality is shown before it is taken.

        Raises:
            UsageError: the library refuses the model, or the wanted engine cannot be had.
        """
        check_name(wanted)
        # It judges the model even where another engine does the work.
        exact = self._exact
        if wanted == EXACT:
            return self
        found = try_own(self._model, exact)
        if not isinstance(found, str):
            self._own = found
        elif wanted != AUTO:
            raise UsageError(f"{wanted} cannot be used for this model", found=found, fix="--engine auto")
        elif self._model.model_type == "bpe":
            self.notes = (f"ids come from {EXACT}: {OWN} is not taken: {found}",)
        return self

    def with_engine(self, name: str) -> Self:
        """This tokenizer, with the engine of that name, which is not compared again."""
        if name == OWN and own_obstacle(self._model) is None:
            self._own = OwnEngine(self._model)
        return self

    @property
    def engine(self) -> str:
        """See the protocol."""
        return EXACT if self._own is None else self._own.name

    @cached_property
    def special_ids(self) -> Mapping[str, int]:
        """See the protocol: control pieces, pieces for users that are written like marks, and tokens of the options."""
        marks = [id for id in self._model.ids_of_kind(USER_DEFINED) if _is_mark(self._model.pieces[id])]
        own = [*self._model.ids_of_kind(CONTROL), *marks]
        return {**{self._model.pieces[id]: id for id in own}, **self._added}

    @cached_property
    def fingerprint(self) -> str:
        """See the protocol."""
        return _fingerprint(self._model, self._deciding())

    def encode_batch(self, texts: Sequence[str]) -> tuple[IdArray, LengthArray]:
        """See the protocol."""
        _refuse_long(texts)
        try:
            ids, lengths = self._encode(texts)
        except TextRefused as refused:
            # A part of a text does not know where in the text it stood.
            refuse_surrogates(refused.index, texts[refused.index])
            raise
        if self._bos is not None:
            starts = np.cumsum(lengths) - lengths
            ids, lengths = np.insert(ids, starts, self._bos), lengths + 1
        return ids, lengths

    def special_in_text(self, ids: IdArray, num_texts: int) -> int:
        """See the protocol. Tokens of the options that are ordinary pieces are not counted: texts hold them anyway."""
        found = int(np.count_nonzero(np.isin(ids, self._counted))) if len(self._counted) else 0
        return found - num_texts if self._bos is not None else found

    def decode(self, ids: Sequence[int]) -> str:
        """See the protocol."""
        shown = {id: text for text, id in self.special_ids.items()}
        parts: list[str] = []
        run: list[int] = []
        for id in [*map(int, ids), -1]:
            if id in shown or id == -1:
                parts += [self._exact.library.decode(run)] if run else []
                parts += [shown[id]] if id in shown else []
                run = []
            elif 0 <= id < len(self._model.pieces):
                run.append(id)
            else:
                raise UsageError(f"id {id} is not in the vocabulary", expected=f"0 to {self.vocab_size - 1}")
        return "".join(parts)

    @property
    def _engine(self) -> Engine:
        return self._own or self._exact

    @cached_property
    def _exact(self) -> LibraryEngine:
        return LibraryEngine(self.files[MODEL_FILE], self._source)

    @cached_property
    def _counted(self) -> IdArray:
        kinds = self._model.kinds
        ids = [id for id in self.special_ids.values() if id >= len(kinds) or kinds[id] in (CONTROL, USER_DEFINED)]
        return np.array(sorted(set(ids)), dtype=np.int32)

    def _encode(self, texts: Sequence[str]) -> tuple[IdArray, LengthArray]:
        if self._cuts.tokens:
            return self._cuts.encode(texts, self._engine.encode)
        if not self._keeps_blanks:
            return self._engine.encode(texts)
        parts = [kept_blanks(text) for text in texts]
        counts = list(map(len, parts))
        flat = [part for of_text in parts for part in of_text]
        return without_last(*encode_parts(flat, counts, encode=self._engine.encode), counts=counts)

    def _check_options(self) -> None:
        tokens = self.options.get("special_tokens", [])
        if not isinstance(tokens, list) or not all(isinstance(token, str) and token for token in tokens):
            raise UsageError(f"special_tokens={tokens!r}", expected="a list of texts that are not empty")
        if tokens and not self.options.get("legacy"):
            what = f"{self.name} takes special tokens only in its legacy mode: else a model has all tokens it needs"
            raise UsageError(what, fix="--tokenizer-sentencepiece-legacy, or leave out --tokenizer-special-tokens")
        given = {"legacy", "ignore_extra_whitespaces", "compat"} & self.options.keys()
        if len(given) > 1:
            raise UsageError(f"{self.name}: {' and '.join(sorted(given))} do not go together", fix="name one of them")

    def _added_tokens(self, forked: bool) -> dict[str, int]:
        """The tokens at which texts are cut, with their ids: new ones follow the pieces in the order given."""
        known = dict(self._model.ids)
        if self._legacy:
            # What the library calls unknown is new, the piece <unk> itself too.
            del known[self._model.pieces[self._model.roles["unk"]]]
            wanted = self.options.get("special_tokens", [])
        elif forked and self.fork_cuts:
            pieces, roles = self._model.pieces, self._model.roles
            of_roles = [pieces[roles[role]] if role in roles else f"<{role.upper()}>" for role in ("pad", "bos", "eos")]
            wanted = ["<CLS>", "<SEP>", "<EOD>", "<MASK>", *of_roles]
        else:
            return {}
        new = iter(range(len(self._model.pieces), len(self._model.pieces) + len(wanted)))
        return {token: known[token] if token in known else next(new) for token in dict.fromkeys(wanted)}

    def _role(self, role: str) -> int:
        if role not in self._model.roles:
            what = f"{self.name} of {FORK} puts {role} before every text, and this model has no such piece"
            raise UsageError(what, fix="leave out --compat")
        return self._model.roles[role]

    def _end(self) -> int | None:
        return None if self._legacy else self._model.roles.get("eos")

    def _refuse_plain(self) -> None:
        mark = next((text for text in self.special_ids if self._is_user_defined(text)), None)
        if mark is not None:
            raise UsageError(
                "special tokens in texts cannot be plain text with this model: it matches pieces of its own anywhere",
                found=f"the user-defined piece {mark!r}",
                fix="leave out --special-tokens-in-text, or train a model without it",
            )

    def _is_user_defined(self, text: str) -> bool:
        id = self._model.id_of(text)
        return self._model.kinds[id] == USER_DEFINED and self._model.pieces[id] == text

    def _drops_blanks(self) -> bool:
        """Whether the model itself takes blanks away; only then is there anything to keep."""
        return self._exact.pieces("x  y") == self._exact.pieces("x y")

    def _deciding(self) -> dict[str, Any]:
        """What ids depend on besides the model; absent where it changes nothing."""
        facts: dict[str, Any] = {"eod": self.eod}
        if self._added:
            facts["tokens"] = list(self._added.items())
            facts["cut"] = bool(self._cuts.tokens)
            facts["trims"] = self._legacy
        if self._keeps_blanks:
            facts["keeps_blanks"] = True
        if self._bos is not None:
            facts["bos"] = self._bos
        return facts


class SentencePieceTokenizer(SentencePieceFamily):
    """Of the fork: texts were cut at tokens of its own, of which <EOD> ended documents."""

    name = "SentencePieceTokenizer"
    fork_cuts = True


class GPTSentencePieceTokenizer(SentencePieceFamily):
    """Of the fork: the same ids as today's."""

    name = "GPTSentencePieceTokenizer"


class Llama2Tokenizer(SentencePieceFamily):
    """Of the fork: BOS stood before every sentence, an empty one too."""

    name = "Llama2Tokenizer"
    fork_bos = True


_DEFAULTS = {"legacy": False, "ignore_extra_whitespaces": True, "special_tokens": [], "special_in_text": "special"}


def _is_mark(piece: str) -> bool:
    """Whether a user-defined piece is written like a special token; others are words, blanks or line ends."""
    return re.fullmatch(r"<.+>|\[.+\]", piece, re.DOTALL) is not None


def _refuse_long(texts: Sequence[str]) -> None:
    for index, text in enumerate(texts):
        if len(text) > LONGEST_WHOLE_CHARS:
            reason = f"the text has {len(text):,} characters; this tokenizer accepts at most {LONGEST_WHOLE_CHARS:,}"
            raise TextRefused(index, reason)


def _fingerprint(model: SentencePieceModel, more: Mapping[str, Any]) -> str:
    import orjson

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
    return blake3(orjson.dumps(content, option=orjson.OPT_SORT_KEYS)).hexdigest()
