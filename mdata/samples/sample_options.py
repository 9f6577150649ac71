"""The kinds of samples as options: each has only the fields that apply to it.

`Gpt`, `Document`, `Packed`, `Chat` and `Pairs` give rows of text (`TextKind`); `Bert` and `T5` give sentences with
masked tokens (`MaskedKind`), and `Classify` labelled rows. These are values, checked when they are created. The samples
themselves are in one module per kind, which is imported when a dataset of that kind is opened.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from mdata import _core
from mdata.errors import UsageError, counted

if TYPE_CHECKING:
    from mdata.samples.special_tokens import MaskedVocabulary

LONGEST = 2**31 - 2  # of sequence_length: with its label a row is counted in 32 bits
LEAST = 2  # tokens of a document that has a loss: a token and its label
PACKING_VERSION = 1  # of the construction of packed rows
MASKED_VERSION = 1  # of the rules of BERT and T5 and their draws
CLASSIFY_VERSION = 1  # of the rules of labelled rows
_LEAST_DECODER = 3  # the first token, a sentinel and a token
_MOST_NGRAM = 65536
CHARACTER, TOKEN = "character", "token"
LEVELS = (CHARACTER, TOKEN)
FIM_VERSION = 1  # of the rules and their draws
# Megatron's defaults: prefix, middle, suffix.
NAMES = ("<fim_prefix>", "<fim_middle>", "<fim_suffix>")
ROLES = ("prefix", "middle", "suffix", "pad", "eod")
Name = int | str
Longer = Literal["cut", "drop"]


@dataclass(frozen=True, kw_only=True)
class Fim:
    """Options of fill-in-the-middle: how documents are rearranged.

    Args:
        rate: share of documents.
        spm_rate: share of these that begin with the suffix.
        level: documents are cut between characters ("character") or between tokens ("token").
        tokens: prefix, middle, suffix; then pad and eod, unless they are "<fim_pad>" (if the tokenizer has it) and the
            corpus' end of a document. Ids or texts.
        split_sample: the token between parts of a document that are rearranged separately.
        fragment_rate: share of these parts, in a chosen document.
        no_prefix: texts that begin with this are not rearranged.
    """

    rate: float
    spm_rate: float = 0.5
    level: str = CHARACTER
    tokens: tuple[Name, ...] = NAMES
    split_sample: Name | None = None
    fragment_rate: float | None = None
    no_prefix: str | None = None

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise UsageError(f"no fim_level {self.level!r}", expected=" or ".join(LEVELS))
        rates = {"fim_rate": self.rate, "fim_spm_rate": self.spm_rate, "fim_fragment_rate": self.fragment_rate or 0.0}
        for name, rate in rates.items():
            if not 0.0 <= rate <= 1.0:
                raise UsageError(f"{name} is not a share", found=str(rate), expected="0 to 1")
        if not len(NAMES) <= len(self.tokens) <= len(ROLES):
            raise UsageError(
                "fim_tokens are prefix, middle and suffix, optionally followed by pad and eod", found=str(self.tokens)
            )
        if (self.split_sample is None) != (self.fragment_rate is None):
            raise UsageError("fim_split_sample and fim_fragment_rate go together", fix="give both, or neither")

    @property
    def identity(self) -> dict[str, Any]:
        """All fields as JSON types without floats: part of a data id."""
        fields: dict[str, Any] = {**asdict(self), "version": FIM_VERSION, "tokens": list(self.tokens)}
        return {name: repr(value) if isinstance(value, float) else value for name, value in fields.items()}


@dataclass(frozen=True, kw_only=True)
class MaskingOptions:
    """Which tokens are masked.

    Args:
        probability: share of tokens, in (0, 1).
        max_ngram: most consecutive words that are masked together.
        whole_words: a word's tokens are masked together.
        longer_ngrams: lengths are drawn in proportion to 1/m, ..., 1/2, 1; otherwise to 1, 1/2, ..., 1/m.
        geometric: lengths are drawn as in SpanBERT, p = 0.2.
        permutation: permute as many further tokens as are masked (BERT in native order).
    """

    probability: float = 0.15
    max_ngram: int = 3
    whole_words: bool = True
    longer_ngrams: bool = False
    geometric: bool = False
    permutation: bool = False

    def __post_init__(self) -> None:
        if not 0.0 < self.probability < 1.0:
            raise UsageError("the share of masked tokens is not between 0 and 1", found=str(self.probability))
        if not 1 <= self.max_ngram <= _MOST_NGRAM:
            raise UsageError("max_ngram is out of range", found=str(self.max_ngram), expected=f"1 to {_MOST_NGRAM}")
        if self.geometric and self.permutation:
            raise UsageError("geometric lengths and a permutation exclude each other", fix="leave one of them out")

    def as_core(self) -> _core.MaskRule:
        """The options in the form that C++ takes."""
        return _core.MaskRule(
            self.probability, self.max_ngram, self.whole_words, self.longer_ngrams, self.geometric, self.permutation
        )


@dataclass(frozen=True, kw_only=True)
class TextKind:
    """Options of all kinds whose samples are rows of text.

    Args:
        extra_token: a sample reads one more token, so that its last input has a label.
        document_masks: position_ids restart with each document; cu_seqlens and max_seqlen give their lengths.
        eod_mask_loss: no loss where the input is the end of a document.
        reset_position_ids, reset_attention_mask: Megatron's: after the end of a document positions restart, and
            attention does not cross it.
        create_attention_mask: a dense attention_mask.
        eod: the end of a document; None: the corpus' id.
    """

    name: ClassVar[str]
    extra_token: bool = True
    document_masks: bool = False
    eod_mask_loss: bool = False
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    create_attention_mask: bool = False
    eod: int | None = None


@dataclass(frozen=True, kw_only=True)
class Gpt(TextKind):
    """Rows of concatenated documents.

    Args:
        fim: rearranges documents for fill-in-the-middle.
    """

    name: ClassVar[str] = "gpt"
    fim: Fim | None = None


@dataclass(frozen=True, kw_only=True)
class WholeDocuments(TextKind):
    """Options of kinds whose rows begin with a document; in native order only.

    Args:
        longer: documents longer than a row are "cut" (packed: into several rows), or left out ("drop").
    """

    longer: Longer = "cut"

    def __post_init__(self) -> None:
        check_one_of("rule for longer documents", self.longer, allowed=("cut", "drop"))


@dataclass(frozen=True, kw_only=True)
class Document(WholeDocuments):
    """One document per row."""

    name: ClassVar[str] = "document"


@dataclass(frozen=True, kw_only=True)
class Packed(WholeDocuments):
    """Several documents fitted into each row."""

    name: ClassVar[str] = "packed"


@dataclass(frozen=True, kw_only=True)
class Chat(Packed):
    """Packed conversations, with loss on trained tokens only; `document_masks` is always on."""

    name: ClassVar[str] = "chat"


@dataclass(frozen=True, kw_only=True)
class Pairs(Chat):
    """Packed pairs of conversations, chosen and rejected; each is whole, in one row."""

    name: ClassVar[str] = "pairs"
    longer: Longer = "drop"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.longer == "cut":
            raise UsageError('pairs of conversations are not cut: longer="cut"', fix='longer="drop"')


@dataclass(frozen=True, kw_only=True)
class FieldKind:
    """Options of kinds whose samples are several fields.

    Args:
        vocabulary: ids of special tokens; None: those of the corpus' tokenizer.
    """

    name: ClassVar[str]
    vocabulary: MaskedVocabulary | None = None

    @property
    def identity(self) -> dict[str, Any]:
        """The fields that decide the samples, as JSON types; without a vocabulary that comes from the corpus."""
        raise AssertionError("each kind has its own")


@dataclass(frozen=True, kw_only=True)
class MaskedKind(FieldKind):
    """Options of BERT and T5.

    Args:
        short_probability: share of samples with a shorter target.
        masking: which tokens are masked.
    """

    short_probability: float = 0.1
    masking: MaskingOptions = field(default_factory=MaskingOptions)

    @property
    def identity(self) -> dict[str, Any]:
        """The fields that decide the samples, as JSON types; without a vocabulary that comes from the corpus."""
        fields = {
            "version": MASKED_VERSION,
            "short_probability": repr(self.short_probability),
            "masking": {name: repr(value) for name, value in asdict(self.masking).items()},
            "head": getattr(self, "head", None),
            "full_rows": getattr(self, "full_rows", False) or None,
            "decoder_length": getattr(self, "decoder_length", None),
            "vocabulary": self.vocabulary.fingerprint if self.vocabulary else None,
        }
        return {name: value for name, value in fields.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Bert(MaskedKind):
    """Two texts of a document, or one, with masked tokens to predict.

    Args:
        head: samples have two texts, and a label whether the second follows the first, for the next-sentence head.
        full_rows: the text of a sample fills its row, across documents and whatever the sentences, as RoBERTa's
            (without the head, in native order).
    """

    name: ClassVar[str] = "bert"
    head: bool = True
    full_rows: bool = False

    def __post_init__(self) -> None:
        if self.full_rows and self.head:
            raise UsageError("full_rows have one text, and the head needs two", fix="head=False")


@dataclass(frozen=True, kw_only=True)
class T5(MaskedKind):
    """A text whose masked spans the decoder predicts; the dataset's `sequence_length` is the encoder's.

    Args:
        decoder_length: tokens that the decoder reads.
    """

    name: ClassVar[str] = "t5"
    decoder_length: int
    masking: MaskingOptions = field(default_factory=lambda: MaskingOptions(max_ngram=10, geometric=True))

    def __post_init__(self) -> None:
        check_integer("decoder_length", self.decoder_length, least=1, most=LONGEST)
        if self.decoder_length < _LEAST_DECODER:
            raise UsageError("the decoder has no room for a span", found=counted(self.decoder_length, "token"))
        if self.masking.permutation:
            raise UsageError("T5 has no labels for a permutation of tokens; only BERT does")


@dataclass(frozen=True, kw_only=True)
class Classify(FieldKind):
    """Labelled rows, each of one text or two; in native order only.

    Args:
        choices: pairs of a row of which one is right, at least 2, as the four of RACE; None: a row has a class.
    """

    name: ClassVar[str] = "classify"
    choices: int | None = None

    def __post_init__(self) -> None:
        if self.choices == 0:  # as earlier versions wrote None
            object.__setattr__(self, "choices", None)
        if self.choices == 1:
            raise UsageError("one choice leaves nothing to choose", found="choices=1", expected="None, or at least 2")
        if self.choices is not None:
            check_integer("choices", self.choices, least=2, most=LONGEST)

    @property
    def identity(self) -> dict[str, Any]:
        """See `FieldKind`."""
        fields: dict[str, Any] = {"version": CLASSIFY_VERSION, "choices": self.choices}
        fields |= {"vocabulary": self.vocabulary.fingerprint if self.vocabulary else None}
        return {name: value for name, value in fields.items() if value is not None}


def check_integer(name: str, value: object, *, least: int | None = None, most: int | None = None) -> None:
    """Refuse values that are not integers within these bounds.

    Raises:
        UsageError: names the option.
    """
    number = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None
    if number is None or (least is not None and number < least) or (most is not None and number > most):
        bounds = "" if least is None else f", {least} or more" if most is None else f", {least} to {most}"
        raise UsageError(f"{name} is {value!r}", expected=f"an integer{bounds}")


def check_one_of(noun: str, value: object, *, allowed: Collection[str]) -> None:
    """Refuse an unknown name.

    Raises:
        UsageError: lists the known names.
    """
    if value not in allowed:
        raise UsageError(f"no {noun} {value!r}", expected=", ".join(allowed))
