"""The families of models, by the value of `model.family`; no other code names one of them.

A family is a room, trainer/models/NAME/, and its face is the value FAMILY: the rules of its configuration, its shape,
the table of a rank's parameters, its operations per token, the memory of its activations, the cost of a microbatch, the
kinds of its blocks, and building a stage. All but the last are pure and import no torch.
docs/howto/add-a-family.md lists what a new one needs.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, cast, get_args

from trainer.config.sections import TEXT_KINDS, DataKind, FamilyName, RunConfig
from trainer.kernels.scores import ScoreShape
from trainer.parallel.params import ParamSpec, Place

if TYPE_CHECKING:
    import torch

    import mdata
    from trainer.parallel.collectives import Group


Json = Mapping[str, Any]


class ModelShape(Protocol):
    """The fields that every family's shape has; a frozen dataclass."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    padded_vocab_size: int
    tie_embeddings: bool

    def __hash__(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """The forward and backward pass of one microbatch through a stage, on one rank.

    Args:
        product_flops: of matrix products. float8_flops: of those in FP8. attention_flops: of attention.
        moved_bytes: read and written by all other kernels.
        sent_bytes: by collectives over tp that are not overlapped.
        passes: runs of a block, forward or backward, including recomputation: each costs the host some time.
        expert_elements: elements of experts' matrices, counted for each product that has them as its weight or result.
        expert_passes: those of the passes that go through experts. host_waits: those in which the host waits for the
            device, which then has nothing to do until the host has launched more.
    """

    product_flops: float
    float8_flops: float
    attention_flops: float
    moved_bytes: float
    sent_bytes: float
    passes: float
    expert_elements: float = 0.0
    expert_passes: float = 0.0
    host_waits: float = 0.0


class BuildStage(Protocol):
    """Builds a stage with uninitialized weights; see `build_gpt` of models/gpt/model.py."""

    def __call__(
        self,
        shape: Any,
        place: Place,
        /,
        *,
        groups: Mapping[str, Group],
        dtype: torch.dtype,
        device: torch.device,
        config: RunConfig | None = None,
        allocate: bool = True,
    ) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeState:
    """What a block keeps of a row between the tokens that it generates.

    Args:
        tensors: name -> shape for one token, or for the row, of the whole model.
        per: a token of the row, or the row (a state of constant size).
        last: number of last tokens that are kept; None: all.
        divided: whether tensor parallelism divides the first dim, as it does heads; a rank of more ranks than there
            are heads holds a copy of one. False: each rank has all of it.
        of_encoder: the same of a token of the encoder, for models that have one; its tokens are read once for a row.
        wide: names of tensors that are in at least fp32; the others have the dtype of the weights.
        restart: a row with more tokens than this keeps other numbers of all of them (longrope turns them otherwise),
            so it is computed anew, from position `restart` of the tables on; None: never.
    """

    tensors: Mapping[str, tuple[int, ...]]
    per: Literal["token", "row"] = "token"
    last: int | None = None
    divided: bool = True
    wide: tuple[str, ...] = ()
    restart: int | None = None
    of_encoder: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Form:
    """Where one of our tensors is in a tensor of another project, in the notation of convert/links.py.

    Args:
        tensor: its name there. ours, theirs: the dims of both sides. lengths: of the axes in them.
        theirs_in: axes of theirs of which ours is a part: (first, whole). ours_in: the same of ours.
        cut: the axis that tensor parallelism divides; "": none.
        apart: (number of an expert, whether one layer computes all) -> the name of its own tensor, in state dicts of
            Megatron that do not have those of all experts in one; theirs then lacks the axis "expert". None: it is of
            no expert.
        split: the name of this part alone in torch_dist checkpoints, where parts are tensors of their own; "": they are
            not.
    """

    tensor: str
    ours: str
    theirs: str
    lengths: Mapping[str, int]
    theirs_in: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    cut: str = ""
    ours_in: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    apart: Callable[[int, bool], str] | None = None
    split: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFace:
    """The models of transformers that a family computes, by their model_type.

    Args:
        architectures: model_type -> its class.
        defaults: model_type -> the settings of config.json that `keys` reads, with transformers' defaults.
        nullable: settings that may be null. zeros: sizes that may be 0. amounts: numbers whose default is null.
        second_names: model_type -> second name of a setting -> its name in `defaults`.
        fitting_type: configuration -> the model_type that expresses it, if one does.
        keys: (model_type, settings, problems) -> keys of [model]; adds a line to problems for each part that we lack.
        settings: (model_type, keys of [model], derived ones too) -> settings of config.json.
        free: configuration -> keys of [model] that are not settings, because `tensor` changes the weights to fit.
        notes: settings -> what a user should know of them, a line each.
        tensor: (our tensor, its shape, shape of the model, model_type) -> where it is in theirs, or its parts are.
        prefixes: model_type -> prefix of tensors that is left out in published folders.
        buffers: model_type -> pattern of tensors that older versions stored beside the weights.
        is_derived: (name of a buffer, its values, shape of the model) -> whether config.json gives the same values.
        ties_by_presence: a folder without a tensor of the head is of a tied model, whatever config.json says.
        auto_class: configuration -> the one of transformers that opens a folder with all that our model computes.
        older_names: patterns of names that older versions gave tensors -> those of today.
        seen: (configuration, shapes of a folder's tensors) -> the same with what only tensors show, and notes.
        lacking: shapes of a folder's tensors -> what they lack of any model of the family.
        unlike: model_type of a model that resembles the family -> the part that we lack.
    """

    architectures: Mapping[str, str]
    defaults: Mapping[str, Json]
    nullable: tuple[str, ...] = ()
    zeros: tuple[str, ...] = ()
    amounts: tuple[str, ...] = ()
    second_names: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    fitting_type: Callable[[RunConfig], str]
    keys: Callable[[str, Json, list[str]], dict[str, Any]]
    settings: Callable[[str, Json], dict[str, Any]]
    free: Callable[[RunConfig], tuple[str, ...]] = lambda _: ()
    notes: Callable[[Json], Iterator[str]] = lambda _: iter(())
    tensor: Callable[[str, tuple[int, ...], Any, str], Form | tuple[Form, ...]]
    prefixes: Mapping[str, str] = field(default_factory=dict)
    buffers: Mapping[str, str] = field(default_factory=dict)
    is_derived: Callable[[str, torch.Tensor, Any], bool] = lambda *_: True
    ties_by_presence: bool = False
    auto_class: Callable[[RunConfig], str] = lambda _: "AutoModelForCausalLM"
    older_names: Mapping[str, str] = field(default_factory=dict)
    seen: Callable[[RunConfig, Mapping[str, tuple[int, ...]]], tuple[RunConfig, list[str]]] = lambda config, _: (
        config,
        [],
    )
    lacking: Callable[[Mapping[str, tuple[int, ...]]], Iterator[str]] = lambda _: iter(())
    unlike: Mapping[str, str] = field(default_factory=dict)

    def forms(self, name: str, size: tuple[int, ...], shape: Any, model_type: str) -> tuple[Form, ...]:
        """Where the parts of one of our tensors are in theirs."""
        form = self.tensor(name, size, shape, model_type)
        return form if isinstance(form, tuple) else (form,)


class LayerPlace(NamedTuple):
    """Where a block is: the module that holds its stack, its number there, and the layers of the stack."""

    stack: str
    number: int
    num_layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Megatron:
    """The model of Megatron-LM that a family computes.

    Args:
        arguments: (keys of [model], derived ones too) -> the arguments with which Megatron-LM builds it.
        tensor: (our tensor, its shape, shape of the model, checkpoint_version, fused) -> where it is in theirs: a name
            within its layer, or within the model; `fused`: norms have the names of fused layers.
        stack: the module that holds its layers, if there is one stack.
        place: (shape of the model, block) -> its layer, if there are two stacks; None: one.
        aliases: names of tensors -> names under which its modules hold the same ones again. Its optimizer has the state
            of such a tensor under the second name, and its loader wants the tensor under both.
        last_norm: the name of its last norm in the stack.
        stacks: whether torch_dist checkpoints have layers that are alike as one tensor.
    """

    arguments: Callable[[Json], dict[str, Any]]
    tensor: Callable[[str, tuple[int, ...], Any, float, bool], Form]
    stack: Literal["decoder", "encoder"] = "decoder"
    place: Callable[[Any, int], LayerPlace] | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    last_norm: str = "final_layernorm"
    stacks: bool = True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Family:
    """One family of models.

    Args:
        shape: (configuration, entries of the vocabulary) -> all numbers that define the function.
        problems: configuration -> its conflicts, one line each.
        cut_by_tp: configuration -> the sizes that tensor parallelism divides, by their setting names.
        float8_sizes: configuration -> rows and columns of the matrices of linear layers.
        parameters: (shape, place) -> the parameters of that rank, in the order of the module tree.
        buffers: (shape, place) -> state of that rank that no optimizer updates, in the form of parameters: fp32, whole
            on each rank that has it. Its stages then have `next_buffers`, see models/stage.py.
        losses: shape -> the names of losses beside that of the labels, which any stage may add, see models/stage.py.
        counts: shape -> name -> how many numbers; they are summed over a step, and any stage may add to them.
        metrics: (shape, counts of a step) -> what a line of metrics.jsonl says of them.
        active: shape -> the parameters that compute a token; None: all do.
        scans: shape -> whether blocks have a scan, whose kernel `mtrain plan` then names.
        flops_per_token: (shape, document lengths, see `Plan`) -> operations of forward and backward.
        activation_bytes: (shape, place, tokens, element, recompute, float8) -> peak bytes of a microbatch; with blocks
            that have a scan, also kernels.scan.
        stage_cost: (shape, place, **microbatch) -> the cost of its forward and backward pass on a rank.
        kinds: shape -> the kind of each block, in the family's own words. Blocks of a kind have the same parameters,
            cost, memory and decoding state; plan, kernels and decoding iterate over them.
        scores: (shape, kind) -> how attention changes scores in these blocks; None: they have none.
        decode_state: (shape, kind) -> what such a block keeps between tokens.
        decoder_start: (configuration, tokenizer) -> the token with which a decoder begins,
            whose rows are others than the encoder's; None: the model has one stack.
        function: shape -> what decides the function of a run's tensors, by keys of [model].
        effective: configuration -> the keys of [model] that have an effect on a trained model, derived ones too.
        build: a stage with uninitialized weights.
        predicts: what its logits are of: the token after each, or, of a model that reads both sides, the token itself.
        sections: the sub-sections of [model] that it reads. data_kinds: the values of data.kind that it trains on.
        usual_kind: keys of [model] -> the one for such a model; None: the first.
        classes: configuration -> the names of the classes of rows that its head tells apart; (): it chooses one of
            several rows. None: it has no such head.
        heads: shape -> prefixes of parameters that it may begin without, drawn instead, and that it may leave behind.
        hugging_face, megatron: its models in these projects; None: they have none.
    """

    shape: Callable[[RunConfig, int], Any]
    problems: Callable[[RunConfig], Iterator[str]]
    cut_by_tp: Callable[[RunConfig], dict[str, int]]
    float8_sizes: Callable[[RunConfig], dict[str, int]]
    parameters: Callable[[Any, Place], tuple[ParamSpec, ...]]
    flops_per_token: Callable[[Any, tuple[int, ...]], int]
    activation_bytes: Callable[..., int]
    stage_cost: Callable[..., StageCost]
    kinds: Callable[[Any], tuple[str, ...]]
    scores: Callable[[Any, str], ScoreShape | None]
    decode_state: Callable[[Any, str], DecodeState]
    function: Callable[[Any], dict[str, Any]]
    effective: Callable[[RunConfig], dict[str, Any]]
    build: BuildStage
    predicts: Literal["next", "masked"] = "next"
    sections: tuple[str, ...] = ()
    data_kinds: tuple[DataKind, ...] = TEXT_KINDS
    usual_kind: Callable[[Json], DataKind] | None = None
    classes: Callable[[RunConfig], tuple[str, ...] | None] = lambda _: None
    heads: Callable[[Any], tuple[str, ...]] = lambda _: ()
    decoder_start: Callable[[RunConfig, mdata.Tokenizer | None], int | None] = lambda *_: None
    buffers: Callable[[Any, Place], tuple[ParamSpec, ...]] = lambda *_: ()
    losses: Callable[[Any], tuple[str, ...]] = lambda _: ()
    counts: Callable[[Any], Mapping[str, int]] = lambda _: {}
    metrics: Callable[[Any, Mapping[str, Sequence[float]]], dict[str, Any]] = lambda *_: {}
    active: Callable[[Any], int] | None = None
    scans: Callable[[Any], bool] = lambda _: False
    hugging_face: HuggingFace | None = None
    megatron: Megatron | None = None

    def logical_shapes(self, shape: ModelShape) -> dict[str, tuple[int, ...]]:
        """Every logical tensor of a model with its shape, in the order of the module tree."""
        return {piece.name: piece.shape for spec in self.parameters(shape, Place()) for piece in spec.pieces}

    def logical_buffers(self, shape: ModelShape) -> dict[str, tuple[int, ...]]:
        """The same of buffers."""
        return {piece.name: piece.shape for spec in self.buffers(shape, Place()) for piece in spec.pieces}


# A family is a room of its own, which is imported when it is used.
FAMILIES: Mapping[str, str] = MappingProxyType({name: f"trainer.models.{name}" for name in get_args(FamilyName)})


def built_by(module: str, function: str) -> BuildStage:
    """A function of a module that is imported, and torch with it, when a stage is built, not when it is planned."""

    def build(*place: Any, **options: Any) -> Any:
        return getattr(importlib.import_module(module), function)(*place, **options)

    return build


def split_block(name: str) -> tuple[int | None, str]:
    """ "blocks.3.attention.q.weight" to (3, "attention.q.weight"); (None, name) outside the blocks."""
    if not name.startswith("blocks."):
        return None, name
    _, number, rest = name.split(".", 2)
    return int(number), rest


def family_of(config: RunConfig) -> Family:
    """The family that a configuration names."""
    return family_named(config.model.family)


@functools.cache
def family_named(name: str) -> Family:
    """The family of this name."""
    return cast(Family, importlib.import_module(FAMILIES[name]).FAMILY)
