"""How a run reads its data: one frozen set of options, checked by name, and what of it decides which tokens come.

Options that are not used leave the identity of a dataset as it is, so that a new option changes no existing data id.
How files are read (`mode`, `threads`) and where arrays are kept (`cache`) is no part of it, and neither is, in the
native order, how many samples are asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from numbers import Integral
from typing import TYPE_CHECKING, Any

from mdata.blend.same_tokenizer import REFUSE, TOKENIZER_UNKNOWN
from mdata.errors import UsageError
from mdata.indexed.reader import MODES, Mode
from mdata.mixing import native_blend
from mdata.mixing.megatron_blend import SURPLUS
from mdata.order import native_order
from mdata.order.data_split import SPLITS, split_edges
from mdata.samples.fim_options import CHARACTER, NAMES, FimOptions
from mdata.samples.rows import RowOptions, effective_pad

if TYPE_CHECKING:
    from mdata.samples.masked import MaskingOptions
    from mdata.samples.special_tokens import MaskedVocabulary

WHOLE = "whole"
NATIVE, MEGATRON = native_order.NAME, "megatron"
ORDERS = (NATIVE, MEGATRON)
LONGEST = 2**31 - 2  # of sequence_length: with its label a row is counted in 32 bits
LARGEST_BLOCK = 1 << 20  # of shuffle_block; mdata_cpp/block_shuffle.hpp
GPT, DOCUMENT, PACKED, CHAT, BERT, T5 = "gpt", "document", "packed", "chat", "bert", "t5"
KINDS = (GPT, DOCUMENT, PACKED, CHAT, BERT, T5)
MASKED = (BERT, T5)
_PACKED = (PACKED, CHAT)
_WHOLE_DOCUMENTS = (DOCUMENT, *_PACKED)
# Options that only some kinds have.
_ONLY_OF = {
    "longer": _WHOLE_DOCUMENTS,
    "decoder_length": (T5,),
    "head": (BERT,),
    **dict.fromkeys(("short_probability", "masking", "vocabulary"), MASKED),
}
_NOT_OF_MASKED = ("extra_token", "document_masks", "create_attention_mask", "eod", "keep_partial", "pad")
_MEGATRON_VERSION = 1
_BY_EOD = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask")


@dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    """How a run reads a blend.

    Args:
        sequence_length: tokens of a sample.
        seed: keys every draw.
        split: "train", "valid", "test" by `split_shares`, or "whole": all of it (native: in file order, once).
        split_shares: Megatron's split string.
        order: "native", or "megatron" for the samples of Megatron's GPTDataset and its blends.
        num_samples: asked for; megatron: decides the epochs (None: one). Native: only the length of a training set.
        extra_token: a sample reads one token more, so that its last one has a label.
        keep_partial: megatron, split "valid" or "whole": the last partial sample counts (native always keeps it).
        shuffle_block: native: sequences are permuted inside of blocks of so many, anew in each epoch; 0: file order.
        kind: "gpt": concatenated text; native: also "document", one a sample, "packed", several fitted into one, and
            "chat", conversations packed, with loss on what is trained on (`document_masks` is then on);
            "bert" and "t5": sentences with masked tokens (t5: `sequence_length` is the encoder's).
        longer: document, packed, chat: longer documents are "cut" (packed: into rows), or left out ("drop").
        document_masks: position_ids restart with each document, cu_seqlens and max_seqlen tell their lengths.
        eod_mask_loss: no loss where the input is the end of a document.
        reset_position_ids, reset_attention_mask: Megatron's: positions restart, the mask is cut, behind that id.
        create_attention_mask: a dense attention_mask.
        eod: the end of a document; None: as the corpus says.
        pad: megatron: the tokenizer's pad id; tokens equal to it are padding. None: it has none.
        allow_ambiguous_pad: megatron: take `pad` also where it is the eod.
        fim_rate: share of documents that fill-in-the-middle rearranges; 0: none. The other fim_...: see `FimOptions`.
        blend_surplus: megatron: how much more than its part each corpus with a share is built for.
        decoder_length: t5: tokens that the decoder reads. head: bert: two texts, and whether they were exchanged.
        short_probability, masking, vocabulary: bert, t5: share of samples that are cut shorter, which tokens are masked
            (None: as usual for the kind), and the ids of special tokens (None: as the tokenizer of the corpus says).
        cache: folder for arrays that are built (packed, bert, t5, megatron); None: see mdata/array_cache/cache.py.
        tokenizer_unknown: "refuse", or "ok": a corpus whose tokenizer is not known may stand beside one whose is.
        allow_outside: manifests of corpora may name files outside their folders; for those of people whom you trust.
        mode: "mmap" or "pread": how token files are read. threads: that read and build.
    """

    sequence_length: int
    seed: int = 1234
    split: str = "train"
    split_shares: str = "100,0,0"
    order: str = NATIVE
    num_samples: int | None = None
    extra_token: bool = True
    keep_partial: bool = False
    shuffle_block: int = 0
    kind: str = GPT
    longer: str = "cut"
    document_masks: bool = False
    eod_mask_loss: bool = False
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    create_attention_mask: bool = False
    eod: int | None = None
    pad: int | None = None
    allow_ambiguous_pad: bool = False
    fim_rate: float = 0.0
    fim_spm_rate: float = 0.5
    fim_level: str = CHARACTER
    fim_tokens: tuple[int | str, ...] = NAMES
    fim_split_sample: int | str | None = None
    fim_fragment_rate: float | None = None
    fim_no_prefix: str | None = None
    blend_surplus: float = SURPLUS
    decoder_length: int | None = None
    head: bool = True
    short_probability: float = 0.1
    masking: MaskingOptions | None = None
    vocabulary: MaskedVocabulary | None = None
    cache: str | None = None
    tokenizer_unknown: str = REFUSE
    allow_outside: bool = False
    mode: Mode = "mmap"
    threads: int = 1

    @property
    def opening(self) -> dict[str, Any]:
        """How `open_blend` is to open what these options read."""
        return {
            "mode": self.mode,
            "checked": False,
            "tokenizer_unknown": self.tokenizer_unknown,
            "allow_outside": self.allow_outside,
        }

    def check(self) -> None:
        """Refuse what means nothing.

        Raises:
            UsageError: names the option.
        """
        _one_of("split", self.split, (*SPLITS, WHOLE))
        _one_of("order", self.order, ORDERS)
        _one_of("mode", self.mode, MODES)
        _one_of("tokenizer_unknown", self.tokenizer_unknown, TOKENIZER_UNKNOWN)
        _one_of("kind of samples", self.kind, KINDS)
        _one_of("way with longer documents", self.longer, ("cut", "drop"))
        for name, least in (("threads", 1), ("num_samples", 0), ("seed", None)):
            _is_integer(name, getattr(self, name), least=least)
        for name in ("sequence_length", "decoder_length"):
            _is_integer(name, getattr(self, name), least=1, most=LONGEST)
        if not 0 <= self.shuffle_block <= LARGEST_BLOCK or (self.shuffle_block and self.kind != GPT):
            raise UsageError(
                f"shuffle_block {self.shuffle_block}" + f" with samples of kind {self.kind!r}" * (self.kind != GPT),
                expected=f"0 to {LARGEST_BLOCK}, and samples of concatenated documents",
                fix="0 leaves it out; documents of other kinds are shuffled anyway",
            )
        if self.fim is not None and self.kind != GPT:
            raise UsageError("fill-in-the-middle is of samples of concatenated documents", found=f"kind {self.kind!r}")
        ours, theirs = ("shuffle_block",), ("keep_partial", "pad", "allow_ambiguous_pad")
        for name in theirs if self.order == NATIVE else ours:
            if getattr(self, name):
                raise UsageError(f"the {self.order} order knows no {name}", found=f"{name}={getattr(self, name)!r}")
        if self.order == NATIVE and self.blend_surplus != SURPLUS:
            raise UsageError("the native order knows no blend_surplus", found=f"blend_surplus={self.blend_surplus!r}")
        if self.order == MEGATRON and self.kind in _WHOLE_DOCUMENTS:
            raise UsageError(f"the megatron order knows no samples of kind {self.kind!r}", fix='order="native"')
        self._check_kind()

    def _check_kind(self) -> None:
        """Refuse options that the kind does not have."""
        usual = {field.name: field.default for field in fields(self)}
        others = [name for name, kinds in _ONLY_OF.items() if self.kind not in kinds]
        others += [*_NOT_OF_MASKED, *_BY_EOD] if self.kind in MASKED else []
        for name in others:
            if getattr(self, name) != usual[name]:
                raise UsageError(
                    f"samples of kind {self.kind!r} know no {name}", found=f"{name}={getattr(self, name)!r}"
                )
        if self.kind in MASKED:
            from mdata.dataset.masked_kinds import options_of

            options_of(self)

    @property
    def by_documents(self) -> bool:
        """Whether the split counts documents, not sequences."""
        return self.kind != GPT

    @property
    def fim(self) -> FimOptions | None:
        """How fill-in-the-middle rearranges rows; None: not at all.

        Raises:
            UsageError: an option of it that means nothing.
        """
        if not self.fim_rate:
            return None
        return FimOptions(
            rate=self.fim_rate,
            spm_rate=self.fim_spm_rate,
            level=self.fim_level,
            tokens=tuple(self.fim_tokens),
            split_sample=self.fim_split_sample,
            fragment_rate=self.fim_fragment_rate,
            no_prefix=self.fim_no_prefix,
        )

    @property
    def keeps_partial(self) -> bool:
        """Whether the last partial sample counts in Megatron's order: only of what may be a validation set."""
        return self.keep_partial and self.split in ("valid", WHOLE)

    def row_options(self, corpus_eod: int | None) -> RowOptions:
        """What is told of rows, for a corpus with this end of a document.

        Raises:
            UsageError: an option needs that id, and nobody says it.
        """
        eod = corpus_eod if self.eod is None else self.eod
        needed = [name for name in _BY_EOD if getattr(self, name)]
        if eod is None and needed:
            raise UsageError(
                f"{needed[0]} needs the id that ends a document, and the corpus does not say it",
                fix="set eod, or `mdata adopt --tokenizer` gives the corpus a tokenizer",
            )
        megatron = self.order == MEGATRON
        masks = self.document_masks or self.kind == CHAT
        return RowOptions(
            sequence_length=self.sequence_length,
            document_masks=masks,
            position_ids=megatron,
            mask_eod=self.eod_mask_loss,
            # With documents told apart Megatron resets nothing by the id.
            reset_position_ids=self.reset_position_ids and not masks,
            attention_mask=self.create_attention_mask and not (megatron and masks),
            reset_attention_mask=self.reset_attention_mask,
            apart=self.kind in _PACKED,
            eod=eod,
            pad=effective_pad(self.pad, eod, allow_ambiguous=self.allow_ambiguous_pad) if megatron else None,
        )

    def identity(self, blend_id: str) -> dict[str, Any]:
        """Everything that decides which tokens sample k has, and what is told of them."""
        start, train, valid, test = split_edges(self.split_shares)
        found = {
            "blend": blend_id,
            "blend_algorithm": f"{native_blend.NAME} {native_blend.VERSION}",
            "order": f"{native_order.NAME} {native_order.VERSION}",
            "sample_kind": self.kind,
            "seed": self.seed,
            "sequence_length": self.sequence_length,
            "extra_token": self.extra_token,
            "split": self.split,
            "split_shares": [repr(share) for share in (train - start, valid - train, test - valid)],
        }
        flags = ("document_masks", *_BY_EOD, "create_attention_mask", "shuffle_block", "eod")
        found |= {name: getattr(self, name) for name in flags if getattr(self, name) not in (None, False)}
        if self.fim is not None:
            found["fim"] = self.fim.identity
        if self.kind in _WHOLE_DOCUMENTS:
            found["longer"] = self.longer
        if self.kind in _PACKED:
            from mdata.samples import packing

            found["packing"] = f"best fit {packing.VERSION}"
        if self.kind in MASKED:
            from mdata.dataset.masked_kinds import identity_of

            del found["extra_token"]
            found[self.kind] = identity_of(self)
        if self.order == MEGATRON:
            del found["blend_algorithm"]
            found["order"] = f"{MEGATRON} {_MEGATRON_VERSION}"
            found |= {name: getattr(self, name) for name in ("num_samples", "pad", "allow_ambiguous_pad")}
            found["keep_partial"] = self.keeps_partial
        return found


def _is_integer(name: str, value: object, *, least: int | None, most: int | None = None) -> None:
    if name in ("num_samples", "decoder_length") and value is None:
        return
    number = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None
    if number is None or (least is not None and number < least) or (most is not None and number > most):
        bounds = "" if least is None else f", {least} or more" if most is None else f", {least} to {most}"
        raise UsageError(f"{name} is {value!r}", expected=f"an integer{bounds}")


def _one_of(what: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(f"no {what} {value!r}", expected=", ".join(known))
