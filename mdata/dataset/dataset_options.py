"""How a run reads its data: one frozen set of options, checked when made, and which of them decide the data id.

Kinds of samples and orders are types of their own (`kind=Packed(longer="drop")`, `order=MegatronOrder(pad=0)`), so an
option of one cannot be given to another; `DatasetOptions.from_keys` makes them from the flat keys of a configuration.
Unused options are not in the identity of a dataset, so a new option changes no existing data id. How files are read
(`mode`, `threads`), where arrays are kept (`cache`) and, in native order, the number of samples are no part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, ClassVar, Literal

from mdata.blend.same_tokenizer import REFUSE, TOKENIZER_UNKNOWN
from mdata.errors import UsageError
from mdata.indexed.reader import MODES, Mode
from mdata.mixing import native_blend
from mdata.order import native_order
from mdata.order.data_split import SPLITS, split_edges
from mdata.samples.rows import RowOptions, effective_pad
from mdata.samples.sample_options import (
    LONGEST,
    PACKING_VERSION,
    T5,
    Bert,
    Chat,
    Classify,
    Document,
    FieldKind,
    Fim,
    Gpt,
    MaskedKind,
    MaskingOptions,
    Packed,
    Pairs,
    TextKind,
    WholeDocuments,
    check_integer,
    check_one_of,
)

Split = Literal["train", "valid", "test", "whole"]
KindName = Literal["gpt", "document", "packed", "chat", "pairs", "bert", "classify"]
OrderName = Literal["native", "megatron"]
WHOLE: Literal["whole"] = "whole"
LARGEST_BLOCK = 1 << 20  # of shuffle_block; mdata_cpp/block_shuffle.hpp
_MEGATRON_VERSION = 1
_BY_EOD = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask")


@dataclass(frozen=True, kw_only=True)
class NativeOrder:
    """mdata's own order: computed, without end in training, stable when the blend changes.

    Args:
        shuffle_block: gpt: permute sequences within blocks of this many, reshuffled each epoch; 0: file order.
    """

    name: ClassVar[str] = native_order.NAME
    shuffle_block: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.shuffle_block <= LARGEST_BLOCK:
            raise UsageError(f"shuffle_block {self.shuffle_block}", expected=f"0 to {LARGEST_BLOCK}")


@dataclass(frozen=True, kw_only=True)
class MegatronOrder:
    """The samples of Megatron's GPTDataset, its BERT and T5 datasets, and its blends.

    Args:
        pad: the tokenizer's pad id; tokens equal to it are padding. None: it has none.
        allow_ambiguous_pad: accept a `pad` that equals the eod.
        keep_partial: split "valid" or "whole": the last partial sample counts (in native order it always does).
        blend_surplus: extra samples to build for each corpus with a share, as a fraction of its part.
    """

    name: ClassVar[str] = "megatron"
    pad: int | None = None
    allow_ambiguous_pad: bool = False
    keep_partial: bool = False
    blend_surplus: float = 0.005


@dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    """How a run reads a blend.

    Args:
        sequence_length: tokens of a sample; of T5: of the encoder.
        seed: keys every draw.
        split: "train", "valid", "test" by `split_shares`, or "whole": all of it (native: in file order, once).
        split_shares: Megatron's split string.
        num_samples: Megatron's order: decides the epochs (None: one). Native: only the length of a training set.
        kind: `Gpt`, `Document`, `Packed`, `Chat`, `Pairs`, `Bert`, `T5` or `Classify`.
        order: `NativeOrder` or `MegatronOrder`.
        cache: folder for built arrays (packed, bert, t5, megatron; None: see mdata/array_cache/cache.py) and for blocks
            of corpora in object storage. cache_size: limit on these blocks, such as "500 GiB"; None: the disk's.
        tokenizer_unknown: "refuse"; "ok" mixes corpora that record their tokenizer with others that do not.
        allow_outside: manifests of corpora may name files outside their folders; only for manifests that you trust.
        mode: "mmap" or "pread": how token files are read. threads: number that read and build.

    Raises:
        UsageError: a value that is out of range, or a kind that the order does not have; names the option.
    """

    sequence_length: int
    seed: int = 1234
    split: str = "train"
    split_shares: str = "100,0,0"
    num_samples: int | None = None
    kind: TextKind | FieldKind = field(default_factory=Gpt)
    order: NativeOrder | MegatronOrder = field(default_factory=NativeOrder)
    cache: str | None = None
    cache_size: str | None = None
    tokenizer_unknown: str = REFUSE
    allow_outside: bool = False
    mode: Mode = "mmap"
    threads: int = 1

    def __post_init__(self) -> None:
        check_one_of("split", self.split, allowed=(*SPLITS, WHOLE))
        check_one_of("mode", self.mode, allowed=MODES)
        check_one_of("tokenizer_unknown", self.tokenizer_unknown, allowed=TOKENIZER_UNKNOWN)
        if not isinstance(self.kind, TextKind | FieldKind):
            raise UsageError(
                f"kind is {self.kind!r}",
                expected="Gpt(), Document(), Packed(), Chat(), Pairs(), Bert(), T5() or Classify()",
            )
        if not isinstance(self.order, NativeOrder | MegatronOrder):
            raise UsageError(f"order is {self.order!r}", expected="NativeOrder() or MegatronOrder()")
        check_integer("threads", self.threads, least=1)
        check_integer("seed", self.seed)
        check_integer("sequence_length", self.sequence_length, least=1, most=LONGEST)
        if self.num_samples is not None:
            check_integer("num_samples", self.num_samples, least=0)
        if self.cache_size:
            from mdata.block_cache.cache_room import most_blocks

            most_blocks(self.cache_size)
        _check_order(self.kind, self.order)

    @classmethod
    def from_keys(cls, keys: Mapping[str, object]) -> DatasetOptions:
        """From flat keys, as configurations and command lines give them; None counts as not given.

        `kind` and `order` are names. The fields of the kind and of the order are keys at the same level, those of
        `Fim` as fim_rate (0: none) and so on, those of `MaskingOptions` under their own names, but mask_probability.
        A key of another kind or order must be left out or have its default.

        Raises:
            UsageError: conflicting keys, or values out of range. TypeError: an unknown key.
        """
        kind, order = keys.get("kind") or Gpt.name, keys.get("order") or NativeOrder.name
        check_one_of("kind of samples", kind, allowed=KINDS)
        check_one_of("order", order, allowed=ORDERS)
        kind_type, order_type = KINDS[str(kind)], ORDERS[str(order)]
        values: dict[Any, dict[str, Any]] = {cls: {}, kind_type: {}, order_type: {}}
        values |= {Fim: {}} if kind_type is Gpt else {}
        values |= {MaskingOptions: {}} if issubclass(kind_type, MaskedKind) else {}
        for key, value in keys.items():
            if key not in OPTION_KEYS:
                raise TypeError(f"no option {key!r} of a dataset")
            if value is None or key in ("kind", "order"):
                continue
            owner = next((owner for owner in values if key in _FIELDS[owner]), None)
            if owner is not None:
                values[owner][_FIELDS[owner][key].name] = tuple(value) if isinstance(value, list) else value
            elif value != _default_of(key):
                of_order = any(key in _FIELDS[owner] for owner in ORDERS.values())
                whose = f"the {order} order has" if of_order else f"samples of kind {kind!r} have"
                raise UsageError(f"{whose} no {key}", found=f"{key}={value!r}")
        if kind_type is T5 and "decoder_length" not in values[T5]:
            raise UsageError("samples of kind 't5' need the decoder's length", fix="decoder_length=128")
        if values.get(Fim, {}).get("rate"):
            values[Gpt]["fim"] = Fim(**values[Fim])
        if masking := values.get(MaskingOptions):
            field_of_kind = kind_type.__dataclass_fields__["masking"]
            assert field_of_kind.default_factory is not MISSING, "a kind has its own defaults"
            of_kind = values[kind_type].get("masking") or field_of_kind.default_factory()
            values[kind_type]["masking"] = replace(of_kind, **masking)
        return cls(**values[cls], kind=kind_type(**values[kind_type]), order=order_type(**values[order_type]))

    @property
    def endless(self) -> bool:
        """Whether the set has no end by itself: training in native order."""
        return self.split == "train" and isinstance(self.order, NativeOrder)

    @property
    def by_documents(self) -> bool:
        """Whether the split counts documents, not sequences."""
        return not isinstance(self.kind, Gpt)

    @property
    def keeps_partial(self) -> bool:
        """Whether the last partial sample counts in Megatron's order: only of what may be a validation set."""
        keep = isinstance(self.order, MegatronOrder) and self.order.keep_partial
        return keep and self.split in ("valid", WHOLE)

    def row_options(self, corpus_eod: int | None) -> RowOptions:
        """How rows are masked and padded, for a corpus with this end of a document.

        Raises:
            UsageError: an option needs that id, and neither the options nor the corpus give it.
        """
        # Masked samples are not rows of text; they get the default options.
        kind, order = self.kind if isinstance(self.kind, TextKind) else Gpt(), self.order
        eod = corpus_eod if kind.eod is None else kind.eod
        needed = [name for name in _BY_EOD if getattr(kind, name)]
        if eod is None and needed:
            raise UsageError(
                f"{needed[0]} needs the id that ends a document, which the corpus does not record",
                fix="set eod, or record the corpus' tokenizer with mdata adopt --tokenizer-type",
            )
        megatron = isinstance(order, MegatronOrder)
        masks = kind.document_masks or isinstance(kind, Chat)
        return RowOptions(
            sequence_length=self.sequence_length,
            document_masks=masks,
            position_ids=megatron,
            mask_eod=kind.eod_mask_loss,
            # With document masks Megatron resets nothing by the id.
            reset_position_ids=kind.reset_position_ids and not masks,
            attention_mask=kind.create_attention_mask and not (megatron and masks),
            reset_attention_mask=kind.reset_attention_mask,
            mask_document_ends=isinstance(kind, Packed),
            eod=eod,
            pad=effective_pad(order.pad, eod, allow_ambiguous=order.allow_ambiguous_pad)
            if isinstance(order, MegatronOrder)
            else None,
        )

    def identity(self, blend_id: str) -> dict[str, Any]:
        """Everything that decides which tokens sample k has, and how they are masked."""
        kind, order = self.kind, self.order
        start, train, valid, test = split_edges(self.split_shares)
        identity: dict[str, Any] = {"blend": blend_id}
        if isinstance(order, NativeOrder):
            identity["blend_algorithm"] = f"{native_blend.NAME} {native_blend.VERSION}"
        version = native_order.VERSION if isinstance(order, NativeOrder) else _MEGATRON_VERSION
        identity |= {
            "order": f"{order.name} {version}",
            "sample_kind": kind.name,
            "seed": self.seed,
            "sequence_length": self.sequence_length,
        }
        if isinstance(kind, TextKind):
            identity["extra_token"] = kind.extra_token
        identity["split"] = self.split
        identity["split_shares"] = [repr(share) for share in (train - start, valid - train, test - valid)]
        for name in ("document_masks", *_BY_EOD, "create_attention_mask", "shuffle_block", "eod"):
            value = getattr(order if name == "shuffle_block" else kind, name, None)
            if value not in (None, False):  # a block of 0 is none
                identity[name] = value
        if isinstance(kind, Gpt) and kind.fim is not None:
            identity["fim"] = kind.fim.identity
        if isinstance(kind, WholeDocuments):
            identity["longer"] = kind.longer
        if isinstance(kind, Packed):
            identity["packing"] = f"best fit {PACKING_VERSION}"
        if isinstance(kind, FieldKind):
            identity[kind.name] = kind.identity
        if isinstance(order, MegatronOrder):
            identity |= {"num_samples": self.num_samples, "pad": order.pad}
            identity |= {"allow_ambiguous_pad": order.allow_ambiguous_pad, "keep_partial": self.keeps_partial}
        return identity


KINDS: Mapping[str, type[TextKind | FieldKind]] = {
    kind.name: kind for kind in (Gpt, Document, Packed, Chat, Pairs, Bert, T5, Classify)
}
ORDERS: Mapping[str, type[NativeOrder | MegatronOrder]] = {order.name: order for order in (NativeOrder, MegatronOrder)}
_PREFIXED: Mapping[type, Mapping[str, str]] = {
    Fim: {field.name: f"fim_{field.name}" for field in fields(Fim)},
    MaskingOptions: {"probability": "mask_probability"},
}
_FIELDS: Mapping[type, Mapping[str, Any]] = {
    owner: {
        _PREFIXED.get(owner, {}).get(field.name, field.name): field
        for field in fields(owner)
        if field.name != "fim"  # flat keys have its fields
    }
    for owner in (DatasetOptions, *KINDS.values(), *ORDERS.values(), Fim, MaskingOptions)
}
OPTION_KEYS = tuple(dict.fromkeys(key for of_owner in _FIELDS.values() for key in of_owner))
"""The keys of `DatasetOptions.from_keys`."""


def _default_of(key: str) -> object:
    default = next(of_owner[key].default for of_owner in _FIELDS.values() if key in of_owner)
    return None if default is MISSING else default


def named_kind(kind: str | TextKind | FieldKind) -> TextKind | FieldKind:
    """A kind of samples by its name, with its default options.

    Raises:
        UsageError: no such kind, or one that has no defaults.
    """
    if not isinstance(kind, str):
        return kind
    check_one_of("kind of samples", kind, allowed=KINDS)
    if kind == T5.name:
        raise UsageError("kind 't5' needs the decoder's length", fix="kind=mdata.T5(decoder_length=128)")
    return KINDS[kind]()


def named_order(order: str | NativeOrder | MegatronOrder) -> NativeOrder | MegatronOrder:
    """An order by its name, with its default options.

    Raises:
        UsageError: no such order.
    """
    if not isinstance(order, str):
        return order
    check_one_of("order", order, allowed=ORDERS)
    return ORDERS[order]()


def document_mask_keys(*, order: str, wanted: bool) -> dict[str, bool]:
    """The keys that keep documents apart in a training run.

    These are the documents of the index, or in Megatron's order what its --reset-position-ids and
    --reset-attention-mask do, using the id that ends a document.
    """
    if order == MegatronOrder.name:
        return {"reset_position_ids": wanted, "reset_attention_mask": wanted}
    return {"document_masks": wanted}


def _check_order(kind: TextKind | FieldKind, order: NativeOrder | MegatronOrder) -> None:
    """Refuse a kind of samples that an order does not have."""
    if isinstance(order, NativeOrder):
        if order.shuffle_block and not isinstance(kind, Gpt):
            raise UsageError(
                f"shuffle_block {order.shuffle_block} with samples of kind {kind.name!r}",
                expected="samples of concatenated documents",
                fix="0 leaves it out; documents of other kinds are shuffled anyway",
            )
        return
    if isinstance(kind, WholeDocuments | Classify):
        raise UsageError(f"the megatron order has no samples of kind {kind.name!r}", fix="the native order")
    if isinstance(kind, Bert) and kind.full_rows:
        raise UsageError("the megatron order has no full_rows of kind 'bert'", fix="the native order")
    if isinstance(kind, MaskedKind) and (order.keep_partial or order.pad is not None):
        raise UsageError(f"samples of kind {kind.name!r} have neither keep_partial nor pad", found=repr(order))
